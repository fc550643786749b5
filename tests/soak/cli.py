"""The command behind `scripts/soak`."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from tests.soak import report as soak_report
from tests.soak.plan import DEFAULT_CONCURRENCY, DEFAULT_NUM_REQUESTS, DEFAULT_NUM_TURNS, ENGINE, MODEL, build_plan
from tests.soak.soak import soak
from tpu_offload.cli.command import end_process, interrupt_once, run_command
from tpu_offload.cli.options import Command
from tpu_offload.cli.report import ReportConsole
from tpu_offload.cli.serving import MODEL_FLAGS, SOURCES, make_report, serving_flags, serving_options
from tpu_offload.config import OffloadConfig
from tpu_offload.measure import check_backend

_DEFAULTS = {
    **ENGINE,
    **{name: getattr(MODEL, name) for name in MODEL_FLAGS},
    "workload": "a mix of both",
    "requests": DEFAULT_NUM_REQUESTS,
    "turns": DEFAULT_NUM_TURNS,
    "concurrency": DEFAULT_CONCURRENCY,
    "num_blocks": "half of the prompts in flight",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Returns:
      Exit status, see `run_command`; 1 when something was found that must not be.
    """
    return run_command(_command, argv, prog="soak")


@click.command(cls=Command, exclusive=[SOURCES, ("seconds", "seconds_flag")])
@click.argument("seconds", type=click.IntRange(1), required=False)
@click.option("--seconds", "seconds_flag", type=click.IntRange(1), metavar="SECONDS", help="the same")
@serving_flags(_DEFAULTS)
@click.pass_obj
def _command(
    argv: list[str], /, *, seconds: int | None, seconds_flag: int | None, json: Path | None, **flags: Any
) -> int:
    """Serves a workload again and again, for so many seconds, while copies, messages and requests go wrong; looks for
    wrong tokens, memory that grows and engines that hang. The TPU_OFFLOAD_* variables apply. Exit status 1 when
    anything is found.
    """
    seconds = seconds or seconds_flag
    if seconds is None:
        raise click.UsageError("SECONDS or --seconds is required", click.get_current_context())
    offload = OffloadConfig.from_env()
    check_backend()
    plan = build_plan(serving_options(flags, engine=ENGINE, model=MODEL), offload, seconds=seconds)
    return soak_report.print_report(ReportConsole(), make_report(functools.partial(soak, plan), json, argv))


def run() -> NoReturn:
    """Runs the command as a process of its own."""
    interrupt_once()
    end_process(main())


if __name__ == "__main__":
    run()
