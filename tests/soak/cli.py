"""The command behind `scripts/soak`."""

import functools
from pathlib import Path
from typing import Any, NoReturn

import click

from tests.soak import report as soak_report
from tests.soak.plan import DEFAULT_CONCURRENCY, DEFAULT_NUM_REQUESTS, DEFAULT_NUM_TURNS, ENGINE, MODEL, build_plan
from tests.soak.soak import soak
from tests.soak.storage import StorageKind
from tpu_offload.cli.command import run_command, run_process
from tpu_offload.cli.options import Command, option
from tpu_offload.cli.serving import MODEL_FLAGS, SOURCES, make_report, serving_flags, serving_options
from tpu_offload.cli.tables import ReportConsole
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


@click.command(cls=Command, exclusive=[SOURCES, ("seconds", "seconds_flag")])
@click.argument("seconds", type=click.IntRange(1), required=False)
@click.option("--seconds", "seconds_flag", type=click.IntRange(1), metavar="SECONDS", help="the same")
@option(
    "--storage",
    click.Choice([kind.value for kind in StorageKind]),
    None,
    "a storage tier below each engine: files, files with I/O faults, or a server that freezes, dies and returns (none)",
)
@serving_flags(_DEFAULTS)
@click.pass_obj
def _command(
    argv: list[str],
    /,
    *,
    seconds: int | None,
    seconds_flag: int | None,
    storage: str | None,
    json: Path | None,
    **flags: Any,
) -> int:
    """Serves a workload round after round for SECONDS while copies, messages and requests fail, and checks for wrong
    tokens, memory growth and engines that hang. The TPU_OFFLOAD_* variables apply. Exit status 1 if a check fails.
    """
    seconds = seconds or seconds_flag
    if seconds is None:
        raise click.UsageError("SECONDS or --seconds is required", click.get_current_context())
    offload = OffloadConfig.from_env()
    check_backend()
    plan = build_plan(
        serving_options(flags, engine=ENGINE, model=MODEL),
        offload,
        seconds=seconds,
        storage=StorageKind(storage) if storage else None,
    )
    return soak_report.print_report(ReportConsole(), make_report(functools.partial(soak, plan), json, argv))


main = functools.partial(run_command, _command, prog="soak")


def run() -> NoReturn:
    """Runs the command and ends the process."""
    run_process(main)


if __name__ == "__main__":
    run()
