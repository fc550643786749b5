"""Entry point of `tpu-offload`: flags in, exit status out.

A person's mistake ends in one line on stderr and status 2, an interrupt (Ctrl-C, SIGTERM) in status 130; a traceback
is a bug of ours. The process starts in `tpu_offload_command`, which listens while all this is imported.
"""

import argparse
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Sequence
from typing import NoReturn

from tpu_offload.cli import bench, replay, simulate
from tpu_offload.cli.compiling import COMPILE_THREAD
from tpu_offload.cli.terminal import interrupt_once, open_missing_streams
from tpu_offload.errors import InputError, OffloadError

_PROG = "tpu-offload"


class _Parser(argparse.ArgumentParser):
    """Reports a wrong flag as an `InputError`, like any other wrong input."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
      argv: the arguments after the program's name; by default those of the process.
    Returns:
      Exit status: 0, 1 when a command found what it is there to find (outputs that differ), 2 for
      input that cannot be used, 130 when interrupted, 141 when nobody reads the output any more.
    """
    open_missing_streams()
    logging.basicConfig(level=logging.WARNING, format=f"{_PROG}: %(levelname)s: %(message)s")
    try:
        parser = _Parser(prog=_PROG, description="KV cache offloading for TPUs.", allow_abbrev=False)
        commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
        replay.add_command(commands)
        bench.add_command(commands)
        simulate.add_command(commands)
        args = parser.parse_args(argv)
        status: int = args.run(args, sys.argv[1:] if argv is None else list(argv))
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


def run() -> NoReturn:
    """Runs one command as a process of its own, and ends that without a word more than the command had to say."""
    interrupt_once()
    status = main()
    if status == 130 or any(thread.name == COMPILE_THREAD and thread.is_alive() for thread in threading.enumerate()):
        # The interpreter would wait for a compile that nobody wants any more, or pull the ground from under it.
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    run()
