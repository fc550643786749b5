"""Entry point of `tpu-offload`: flags in, exit status out.

A person's mistake ends in one line on stderr and status 2, an interrupt (Ctrl-C, SIGTERM) in status 130; a traceback
is a bug of ours. A command is imported when it is called, so that `simulate` does not wait for jax. The process starts
in `tpu_offload_command`, which handles interrupts until that is done.
"""

import argparse
import contextlib
import dataclasses
import importlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import NoReturn

from tpu_offload.cli.compiling import COMPILE_THREAD
from tpu_offload.cli.extras import require
from tpu_offload.cli.terminal import interrupt_once, open_missing_streams
from tpu_offload.errors import InputError, OffloadError

_PROG = "tpu-offload"


@dataclasses.dataclass(frozen=True, slots=True)
class _Command:
    """A subcommand, which is imported when it is called.

    Attributes:
      module: has `add_flags(parser)`, which sets `run(args, argv)`, a function that returns the exit status.
      help: a line for `--help`.
      packages: those of extras that it needs.
    """

    module: str
    help: str
    packages: tuple[str, ...]


_COMMANDS = {
    "replay": _Command(
        "tpu_offload.cli.replay", "serve a workload without and with offloading", packages=("flax", "rich")
    ),
    "bench": _Command(
        "tpu_offload.cli.bench", "measure the copy paths and recommend one for each direction", packages=("rich",)
    ),
    "simulate": _Command(
        "tpu_offload.cli.simulate", "play request traces through eviction policies", packages=("rich",)
    ),
}


class _Parser(argparse.ArgumentParser):
    """Reports a wrong flag as an `InputError`, like any other wrong input."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None, *, on_import: Callable[[], None] = lambda: None) -> int:
    """Runs one command.

    Args:
      argv: the arguments after the program's name; by default those of the process.
      on_import: called once the command is imported, before it runs.
    Returns:
      Exit status: 0, 1 when a command found what it is there to find (outputs that differ), 2 for
      input that cannot be used, 130 when interrupted, 141 when nobody reads the output any more.
    """
    open_missing_streams()
    logging.basicConfig(level=logging.WARNING, format=f"{_PROG}: %(levelname)s: %(message)s")
    try:
        argv = sys.argv[1:] if argv is None else list(argv)
        args = _parse(argv)
        on_import()
        status: int = args.run(args, argv)
        return status
    except BrokenPipeError:  # whoever read our output has gone, as `head` does; nobody is left to be told
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141
    except (OffloadError, OSError) as e:
        sys.stderr.write(f"{_PROG}: error: {' '.join(str(e).split())}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write(f"{_PROG}: interrupted\n")
        return 130


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(prog=_PROG, description="KV cache offloading for TPUs.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    called = next((arg for arg in argv if not arg.startswith("-")), None)  # no flag in front of it takes a value
    for name, command in _COMMANDS.items():
        subparser = commands.add_parser(name, help=command.help, allow_abbrev=False)
        if name == called:
            require(name, *command.packages)
            importlib.import_module(command.module).add_flags(subparser)
    return parser.parse_args(argv)


def run() -> NoReturn:
    """Runs one command as a process of its own, and ends that without a word more than the command had to say."""
    status = main(on_import=interrupt_once)  # not before: a KeyboardInterrupt in an import may be caught there
    if status == 130 or any(thread.name == COMPILE_THREAD and thread.is_alive() for thread in threading.enumerate()):
        # The interpreter would wait for a compile that nobody wants any more, or pull the ground from under it.
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    run()
