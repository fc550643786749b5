"""`tpu-offload replay`: serves one workload without and with offloading, and says what that changed.

With `--preempt` it compares request swap with computing preempted requests again.
"""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from tpu_offload.cli.options import Command, number
from tpu_offload.cli.replay_tables import offload_table, swap_findings, swap_table
from tpu_offload.cli.report import ReportConsole, progress, tell_outcome
from tpu_offload.cli.serving import ENGINE_FLAGS, MODEL_FLAGS, SOURCES, make_report, serving_flags, serving_options
from tpu_offload.config import OffloadConfig
from tpu_offload.engine import EngineConfig, ModelConfig
from tpu_offload.errors import InputError
from tpu_offload.measure import check_backend
from tpu_offload.replay import preempt, replay, serve_twice, setup, size_setup

_SIZES = dataclasses.asdict(EngineConfig()) | dataclasses.asdict(ModelConfig())
_PREEMPT_SIZES = preempt.ENGINE | dataclasses.asdict(preempt.MODEL)
_DEFAULTS = {
    "workload": "chat; with --preempt decode",
    "requests": f"chat: {setup.DEFAULT_NUM_CHAT_REQUESTS}, decode: {setup.DEFAULT_NUM_DECODE_REQUESTS}",
    "turns": setup.DEFAULT_NUM_TURNS,
    "concurrency": f"{replay.DEFAULT_CONCURRENCY}; with --preempt {preempt.DEFAULT_CONCURRENCY}",
    "num_blocks": "for --concurrency longest requests, at most half the workload; with --preempt for as many prompts",
    **{name: f"{int(_SIZES[name])}; with --preempt {_PREEMPT_SIZES[name]}" for name in (*ENGINE_FLAGS, *MODEL_FLAGS)},
}


@click.command(cls=Command, exclusive=[SOURCES])
@click.option("--preempt", "is_preempt", is_flag=True, help="compare swap with recompute under preemption, instead")
@number("--rounds", f"--preempt: rounds ({preempt.DEFAULT_NUM_ROUNDS})")
@serving_flags(_DEFAULTS)
@click.pass_obj
def command(argv: list[str], /, *, is_preempt: bool, rounds: int | None, json: Path | None, **flags: Any) -> int:
    """Serves a workload twice, without and with offloading, under an HBM too small for it. The TPU_OFFLOAD_* variables
    apply. Exit status 1 when any output token differs.
    """
    if rounds is not None and not is_preempt:
        raise InputError(f"--rounds {rounds} does nothing here: it goes with --preempt")
    offload = OffloadConfig.from_env()
    check_backend()
    if is_preempt:
        options = serving_options(flags, engine=preempt.ENGINE, model=preempt.MODEL)
        comparison = preempt.build_comparison(options, offload, num_rounds=rounds or preempt.DEFAULT_NUM_ROUNDS)
        report = _report(preempt.compare, comparison, comparison.pressed, json, argv)
        return _tell_preempt(comparison, report)
    options = serving_options(flags, engine=_SIZES, model=ModelConfig())
    sized = size_setup(options, offload)
    return _tell(sized, _report(serve_twice, sized, sized, json, argv))


def _report[T](
    compare: Callable[..., dict[str, Any]], what: T, sized: setup.Setup, json: Path | None, argv: list[str]
) -> dict[str, Any]:
    """Compares, showing how far each run is."""
    with progress(sized.workload.num_requests) as start:
        return make_report(functools.partial(compare, what, start=start), json, argv)


def _tell(sized: setup.Setup, report: dict[str, Any]) -> int:
    """Prints the table and what it means; returns the exit status."""
    console = ReportConsole()
    console.print(offload_table(report))
    if not sized.offload.enabled:
        console.print("Offloading is off: a size in the TPU_OFFLOAD_* variables is zero.")
    if report["loaded_share_of_recomputed"] is not None:
        share = report["loaded_share_of_recomputed"]
        console.print(f"Loaded from the host: {share:.0%} of the prompt tokens that the baseline computed again.")
    same = f"every token of the {report['num_compared']} requests that both runs finished"
    return tell_outcome(console, report, same=same)


def _tell_preempt(comparison: preempt.Comparison, report: dict[str, Any]) -> int:
    """Prints the table and what it means; returns the exit status."""
    console = ReportConsole()
    console.print(swap_table(report))
    for note in (*comparison.notes, *swap_findings(report)):
        console.print(note)
    same = (
        f"every token and log-probability of {report['num_compared']} requests in {report['num_runs_compared']} runs "
        "equals that of the reference, where nothing is preempted"
    )
    return tell_outcome(console, report, same=same)
