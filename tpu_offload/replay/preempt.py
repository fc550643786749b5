"""`tpu-offload replay --preempt`: what request swap brings where running requests are preempted, and costs elsewhere.

A workload that generates more than it is asked is served under an HBM that takes in the prompts of the requests
in flight, but not what they generate: some must give their blocks back, again and again. One side computes
their KV again, the other swaps it out and in. All else is the same, the prefix cache in HBM included; the host
tier is off for both unless it was sized, because it would bring back the prompts of either side.

The control serves the same with HBM for everything, without and with swap: nothing is preempted, so nothing may
change.

Each round serves all four with fresh engines, in an order that is turned round from one to the next, so that a
machine that gets slower or faster meanwhile favours nobody. One more run comes first, with HBM for everything and
without swap: it warms the process up, and is the reference that every output of all others is compared with.
"""

import argparse
import dataclasses
import gc
import logging
from collections.abc import Callable
from typing import Any

from tpu_offload.cli import preempt_report
from tpu_offload.cli.console import ReportConsole, progress
from tpu_offload.cli.replay_report import find_differences, outcome
from tpu_offload.cli.replay_setup import (
    Setup,
    blocks_per_request,
    build_setup,
    build_workload,
    describe,
    serve_once,
)
from tpu_offload.cli.report import tell_outcome
from tpu_offload.cli.serving import ServedRun
from tpu_offload.config import OffloadConfig, SwapMode
from tpu_offload.engine import ModelConfig
from tpu_offload.metrics import OffloadStats

_logger = logging.getLogger(__name__)

DEFAULT_NUM_ROUNDS = 3
DEFAULT_CONCURRENCY = 256

# Admission and steps as in vLLM, which keeps nothing spare for requests that grow, and does not have the device wait
# for the scheduler; requests are about a thirtieth of their real size, and so are the blocks.
ENGINE = {"block_size": 4, "max_num_batched_tokens": 512, "num_spare_blocks": 0, "async_scheduling": 1}

# One wide layer: most of a step goes into its dense matrices, as on an accelerator with a large model, and more so
# with more requests in a step. With the default model most of a decode step is attention, of whose tiles of 16
# queries a decoding request uses one: a generated token costs as much as nine to fourteen of a prompt, and recompute
# next to nothing.
MODEL = ModelConfig(num_layers=1, d_model=1024, num_heads=2, num_kv_heads=1, head_dim=32, d_ff=4096)
_HBM_PER_PROMPTS = 1.5  # HBM takes in the prompts of all requests in flight, and half as much again


@dataclasses.dataclass(frozen=True, slots=True)
class Side:
    """One of the runs of a round.

    Attributes:
      name: how the report calls it.
      setup: the sizes; `pressed` ones have too little HBM, those of the control enough.
      offload: the settings; None serves without the library.
    """

    name: str
    setup: Setup
    offload: OffloadConfig | None


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """What is served in each round.

    Attributes:
      pressed: with too little HBM.
      control: with enough.
      sides: all runs of a round; the first one is without swap and preemption.
      num_rounds: rounds.
      notes: what a person should know of the settings, in sentences.
    """

    pressed: Setup
    control: Setup
    sides: tuple[Side, ...]
    num_rounds: int
    notes: tuple[str, ...]


def build_comparison(args: argparse.Namespace, offload: OffloadConfig) -> Comparison:
    """Checks flags and settings, and sizes HBM.

    Raises:
      InputError: a flag cannot be.
      ConfigError: a setting cannot be.
    """
    workload = build_workload(args, MODEL, default="decode")
    concurrency = args.concurrency or min(DEFAULT_CONCURRENCY, args.max_num_batched_tokens)
    offload, notes = _settings(offload)
    needed = blocks_per_request(workload, args.block_size)
    in_flight = min(concurrency, len(workload.conversations))
    num_prompt_tokens = in_flight * sum(workload.prompt_lens) / workload.num_requests
    num_blocks = args.num_blocks or max(needed, int(_HBM_PER_PROMPTS * num_prompt_tokens / args.block_size))
    enough = in_flight * (needed + args.num_spare_blocks)
    pressed, control = (
        build_setup(args, offload, workload=workload, model=MODEL, concurrency=concurrency, num_blocks=n)
        for n in (num_blocks, max(num_blocks, enough))
    )
    if num_blocks >= enough:
        _logger.warning("HBM of %d blocks holds all requests in flight, so nothing is preempted", num_blocks)
    unswapped = offload.model_copy(update={"swap_gb": 0.0})
    sides = (
        Side("off", control, unswapped if offload.enabled else None),
        Side("on", control, offload),
        Side("recompute", pressed, offload.model_copy(update={"swap_mode": SwapMode.RECOMPUTE})),
        Side("swap", pressed, offload),
    )
    return Comparison(pressed, control, sides, args.rounds or DEFAULT_NUM_ROUNDS, notes)


def _settings(offload: OffloadConfig) -> tuple[OffloadConfig, tuple[str, ...]]:
    """The settings with swap on, and the host tier off unless it was sized; and what to say about it."""
    notes = []
    if offload.swap_gb == 0:
        if "swap_gb" in offload.model_fields_set:
            notes.append("TPU_OFFLOAD_SWAP_GB=0 would leave nothing to compare: the swap pool was sized automatically.")
        offload = offload.model_copy(update={"swap_gb": "auto"})
    if offload.num_cpu_chunks is None and offload.host_gb is None:
        offload = offload.model_copy(update={"num_cpu_chunks": 0})
    elif offload.enabled:
        notes.append("The host tier is on for both sides, and serves prompts of both.")
    if offload.swap_mode is SwapMode.RECOMPUTE:
        notes.append("Both sides are the same: TPU_OFFLOAD_SWAP_MODE=recompute.")
    return offload, tuple(notes)


def compare(comparison: Comparison, *, stop: Callable[[], bool]) -> dict[str, Any]:
    """Serves all rounds; returns the report."""
    runs: dict[str, list[dict[str, Any]]] = {side.name: [] for side in comparison.sides}
    differences: list[dict[str, Any]] = []
    num_compared = num_runs_compared = 0
    with progress(comparison.pressed.workload.num_requests) as on_finish:

        def serve(side: Side, name: str) -> tuple[ServedRun, OffloadStats | None]:
            gc.collect()  # the last engine's garbage now, not while this one is measured
            return serve_once(side.setup, side.offload, on_finish=on_finish(name), stop=stop)

        reference, _ = serve(comparison.sides[0], "reference")
        for i in range(comparison.num_rounds):
            for side in comparison.sides[:: -1 if i % 2 else 1]:
                if stop():
                    break
                name = f"{side.name}, round {i + 1}"
                run, stats = serve(side, name)
                runs[side.name].append(preempt_report.side_numbers(run, stats, round_number=i + 1))
                found, num = find_differences(reference.records, run.records, names=("reference", name))
                differences += [{"run": side.name, "round": i + 1} | difference.as_dict() for difference in found]
                num_compared += num
                num_runs_compared += bool(num)
    recompute, swap = (preempt_report.summary(runs[name]) for name in ("recompute", "swap"))
    off, on = (preempt_report.summary(runs[name]) for name in ("off", "on"))
    return {
        **describe(comparison.pressed),
        "num_rounds": comparison.num_rounds,
        "num_reference_requests": len(reference.records),
        "notes": list(comparison.notes),
        **outcome(differences, num_compared),
        "num_runs_compared": num_runs_compared,
        "recompute": recompute,
        "swap": swap,
        "swap_to_recompute": preempt_report.ratios(recompute, swap),
        "control": {
            "num_blocks": comparison.control.engine.num_blocks,
            "off": off,
            "on": on,
            "on_to_off": preempt_report.ratios(off, on),
        },
    }


def tell(comparison: Comparison, report: dict[str, Any]) -> int:
    """Prints the table and what it means; returns the exit status."""
    console = ReportConsole()
    console.print(preempt_report.comparison_table(report))
    for note in (*comparison.notes, *preempt_report.findings(report)):
        console.print(note)
    same = (
        f"every token and log-probability of {report['num_compared']} requests in {report['num_runs_compared']} runs "
        "equals that of the reference, where nothing is preempted"
    )
    return tell_outcome(console, report, same=same)
