"""What all commands share: parsing flags, one-line errors, exit statuses, the end of the process."""

import importlib.util
import io
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import click

from tpu_offload.cli.interrupts import INTERRUPTED, interrupt_once, was_interrupted
from tpu_offload.errors import MORE_THREADS, InputError, OffloadError

_CONTEXT: Mapping[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
_NO_THREAD = "can't start new thread"  # Python's own words
EXTRAS = {
    "click": "cli",
    "flax": "engine",
    "jinja2": "html",
    "packaging": "cli",
    "plotly": "html",
    "rich": "cli",
}
_LOST_OUTPUT = 120  # the status of the interpreter itself when it cannot write what was printed


def run_command(command: click.Command, argv: Sequence[str] | None = None, *, prog: str) -> int:
    """Parses flags and runs a command, which receives `argv` through `click.pass_obj`.

    It does not use click's own `main`, which exits with 1 on an interrupt and on a closed pipe: here 1 is a finding,
    such as outputs that differ.

    Args:
      command: returns 0 (or None), 1 for a finding, or 130 if it was interrupted and has reported its partial results.
      argv: the arguments after the program's name; by default those of the process.
      prog: the program's name, which prefixes errors and warnings.
    Returns:
      What `command` returned, 2 for invalid input, 130 on an interrupt, 141 on a closed pipe.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the caller (`>&-`)
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  (for the life of the process)
    # Names that its encoding lacks are escaped, as on stderr; and so are bytes of an answer that are no text.
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    logging.basicConfig(level=logging.WARNING, format=f"{prog}: %(levelname)s: %(message)s")
    try:
        with command.make_context(prog, list(given), obj=given, **_CONTEXT) as context:
            return command.invoke(context) or 0
    except click.exceptions.Exit as e:  # --help
        return e.exit_code
    except BrokenPipeError:  # the reader has exited, like `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141
    except click.ClickException as e:
        where = e.ctx.command_path if isinstance(e, click.UsageError) and e.ctx else prog
        return _fail(prog, f"{e.format_message().rstrip('.')} (see {where} --help)")
    except (OffloadError, OSError) as e:
        return _fail(prog, str(e))
    except KeyboardInterrupt:
        return _interrupted(prog)
    except Exception as e:
        if was_interrupted():
            return _interrupted(prog)
        if isinstance(e, RuntimeError) and str(e) == _NO_THREAD:
            return _fail(prog, f"{e}: {MORE_THREADS}")
        raise


def _interrupted(prog: str) -> int:
    _say(f"{prog}: interrupted\n")
    return INTERRUPTED


def _fail(prog: str, message: str) -> int:
    _say(f"{prog}: error: {' '.join(message.split())}\n")
    return 2


def _say(line: str) -> None:
    """Writes to stderr. On a full disk the line is lost; an exception would end the process with 1, a finding."""
    try:
        sys.stderr.write(line)
        sys.stderr.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # for what is still to be written


def end_process(status: int) -> NoReturn:
    """Ends the process after its command, with no further output."""
    if status == INTERRUPTED or threading.active_count() > 1:
        # The interpreter would wait for a compilation or a read that nobody needs, or crash it by shutting down.
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:
                status = status if status == INTERRUPTED else _LOST_OUTPUT
        os._exit(status)
    sys.exit(status)


def run_process(main: Callable[[], int]) -> NoReturn:
    """Runs a command as the only work of its process: handles interrupts and exits with its status."""
    interrupt_once()
    end_process(main())


def require(what: str, *packages: str) -> None:
    """Checks that packages of the extras in setup.cfg are installed, without importing them.

    Args:
      what: the command or flag that requires them.
      packages: their import names.
    Raises:
      InputError: one is not installed; the message says how to install it.
    """
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        from tpu_offload.storage import STORAGE_TIERS  # takes half a second

        of_tiers = {tier.package: name for name, tier in STORAGE_TIERS.items()}
        extras = ",".join(sorted({EXTRAS.get(package) or of_tiers[package] for package in missing}))
        verb = "is" if len(missing) == 1 else "are"
        raise InputError(
            f"{what} needs {' and '.join(missing)}, which {verb} not installed; "
            f"install with: pip install 'tpu_offload[{extras}]'"
        )
