"""Entry point of `tpu-offload`.

Invalid input ends with one line on stderr and status 2, an interrupt (Ctrl-C, SIGTERM) with status 130; a traceback is
a bug of the library. A command's module is imported when the command is called, so that `simulate` does not import jax.
The process starts in `tpu_offload_command`, which handles interrupts during these imports.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import click

from tpu_offload import __version__
from tpu_offload.cli.command import end_process, require, run_command
from tpu_offload.cli.interrupts import interrupt_once

_PROG = "tpu-offload"
# By name: a line for `--help`, and the optional packages required. Module `tpu_offload.cli.NAME` has `command`.
_COMMANDS: Mapping[str, tuple[str, Sequence[str]]] = {
    "replay": ("serve a workload without and with offloading", ("flax", "rich")),
    "bench": ("measure the copy paths and recommend one for each direction", ("rich",)),
    "simulate": ("play request traces through eviction policies", ("rich",)),
    "plan": ("what a model needs on a TPU machine, what it gains, and the command that serves it", ("rich",)),
    "doctor": ("is everything right on the machine that will serve", ("packaging",)),
    "top": ("what a serving engine's host tier does, refreshed in the terminal", ("rich",)),
    "tier": ("list, verify or clear what storage tiers hold", ("rich",)),
}


class _Commands(click.Group):
    """Imports a command's module only when it is called."""

    def __init__(self, on_import: Callable[[], None]) -> None:
        super().__init__(help="KV cache offloading for TPUs.", no_args_is_help=False)
        click.version_option(__version__, prog_name=_PROG, message="%(prog)s %(version)s")(self)
        self._on_import = on_import

    def list_commands(self, ctx: click.Context) -> list[str]:
        """See `click.Group`."""
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """See `click.Group`."""
        if cmd_name not in _COMMANDS:
            return None
        require(cmd_name, *_COMMANDS[cmd_name][1])
        command: click.Command = importlib.import_module(f"tpu_offload.cli.{cmd_name}").command
        self._on_import()
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """See `click.Group`."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (text, _) in _COMMANDS.items()])


def main(argv: Sequence[str] | None = None, *, on_import: Callable[[], None] = lambda: None) -> int:
    """Runs one command.

    Args:
      argv: the arguments after the program's name; by default those of the process.
      on_import: called after the command's module is imported, before it runs.
    Returns:
      Exit status, see `run_command`.
    """
    return run_command(_Commands(on_import), argv, prog=_PROG)


def run() -> NoReturn:
    """Runs one command and ends the process."""
    # Only after the imports: code that runs during an import may catch KeyboardInterrupt.
    end_process(main(on_import=interrupt_once))


if __name__ == "__main__":
    run()
