"""Entry point of `tpu-offload`: flags in, exit status out.

A person's mistake ends in one line on stderr and status 2, an interrupt (Ctrl-C, SIGTERM) in status 130; a traceback
is a bug of ours. The process starts in `tpu_offload_command`, which listens while all this is imported.
"""

import sys
from collections.abc import Sequence
from typing import NoReturn

from tpu_offload.cli import bench, replay, simulate
from tpu_offload.cli.command import Parser, end_process, exit_status
from tpu_offload.cli.terminal import interrupt_once

_PROG = "tpu-offload"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
      argv: the arguments after the program's name; by default those of the process.
    Returns:
      Exit status, see `exit_status`.
    """
    given = sys.argv[1:] if argv is None else list(argv)
    return exit_status(_PROG, lambda: _run(given))


def _run(argv: list[str]) -> int:
    parser = Parser(prog=_PROG, description="KV cache offloading for TPUs.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    replay.add_command(commands)
    bench.add_command(commands)
    simulate.add_command(commands)
    args = parser.parse_args(argv)
    status: int = args.run(args, argv)
    return status


def run() -> NoReturn:
    """Runs one command as a process of its own."""
    interrupt_once()
    end_process(main())


if __name__ == "__main__":
    run()
