"""Entry point of `tpu-offload`: flags in, exit status out.

A person's mistake ends in one line on stderr and status 2, an interrupt (Ctrl-C, SIGTERM) in status 130; a traceback
is a bug of ours. A command is imported when it is called, so that `simulate` does not wait for jax. The process starts
in `tpu_offload_command`, which handles interrupts until that is done.
"""

import argparse
import dataclasses
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from tpu_offload.cli.command import Parser, end_process, exit_status
from tpu_offload.cli.extras import require
from tpu_offload.cli.terminal import interrupt_once

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


def main(argv: Sequence[str] | None = None, *, on_import: Callable[[], None] = lambda: None) -> int:
    """Runs one command.

    Args:
      argv: the arguments after the program's name; by default those of the process.
      on_import: called once the command is imported, before it runs.
    Returns:
      Exit status, see `exit_status`.
    """
    given = sys.argv[1:] if argv is None else list(argv)
    return exit_status(_PROG, lambda: _run(given, on_import))


def _run(argv: list[str], on_import: Callable[[], None]) -> int:
    args = _parse(argv)
    on_import()
    status: int = args.run(args, argv)
    return status


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(prog=_PROG, description="KV cache offloading for TPUs.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    called = next((arg for arg in argv if not arg.startswith("-")), None)  # no flag in front of it takes a value
    for name, command in _COMMANDS.items():
        subparser = commands.add_parser(name, help=command.help, allow_abbrev=False)
        if name == called:
            require(name, *command.packages)
            importlib.import_module(command.module).add_flags(subparser)
    return parser.parse_args(argv)


def run() -> NoReturn:
    """Runs one command as a process of its own."""
    # Not before the import: a KeyboardInterrupt in one may be caught there.
    end_process(main(on_import=interrupt_once))


if __name__ == "__main__":
    run()
