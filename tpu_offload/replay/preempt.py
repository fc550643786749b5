"""Compares request swap with recompute when running requests are preempted, and measures its cost otherwise.

A workload with answers longer than its prompts is served in an HBM that holds the prompts of the requests in flight but
not their answers, so running requests are preempted repeatedly. One side recomputes their KV, the other swaps it out
and in. Everything else is the same, including the prefix cache in HBM. The host tier is off on both sides unless it was
sized, because it would restore prompts on either side.

The control serves the same workload with enough HBM, without and with swap: nothing is preempted, so swap should change
nothing.

Each round serves all four variants with fresh engines, in an order that rotates from round to round, so that changes in
machine load favour none. A first additional run, with enough HBM and without swap, warms up the process and is the
reference for the outputs of all others.
"""

import dataclasses
import gc
import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tpu_offload.config import OffloadConfig, SwapMode
from tpu_offload.engine import ModelConfig
from tpu_offload.metrics import SWAP_FIELDS, OffloadStats
from tpu_offload.replay.comparison import find_differences, outcome, percentile, served_numbers
from tpu_offload.replay.serving import ServedRun
from tpu_offload.replay.setup import (
    ServingOptions,
    Setup,
    blocks_per_request,
    build_setup,
    build_workload,
    describe,
    serve_once,
)
from tpu_offload.replay.timeline import request_columns

_logger = logging.getLogger(__name__)

DEFAULT_NUM_ROUNDS = 3
DEFAULT_CONCURRENCY = 256

# Admission and steps as in vLLM: no spare blocks for growing requests, and the device does not wait for the
# scheduler. Requests and blocks are about a thirtieth of their real size.
ENGINE = {"block_size": 4, "max_num_batched_tokens": 512, "num_spare_blocks": 0, "async_scheduling": 1}

# One wide layer: a step spends most of its time in dense matrices, as on an accelerator with a large model, and more
# so with more requests in a step. With the default model most of a decode step is attention, where a decoding request
# uses one query of a tile of 16: a generated token costs as much as nine to fourteen prompt tokens, and recompute is
# almost free.
MODEL = ModelConfig(num_layers=1, d_model=1024, num_heads=2, num_kv_heads=1, head_dim=32, d_ff=4096)
_RATIOS = ("tokens_per_s", "completion_p50_s", "completion_p99_s", "ttft_p50_s")
_HBM_PER_PROMPTS = 1.5  # size of HBM by the prompts of all requests in flight


@dataclasses.dataclass(frozen=True, slots=True)
class Side:
    """One variant of a round, by its name in the report; `offload` is None without the library."""

    name: str
    setup: Setup
    offload: OffloadConfig | None


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """What is served in each round: `constrained` has too little HBM, `control` enough.

    The first of `sides` has neither swap nor preemption. `notes` are remarks on the settings for the user.
    """

    constrained: Setup
    control: Setup
    sides: tuple[Side, ...]
    num_rounds: int
    notes: tuple[str, ...]


def build_comparison(options: ServingOptions, offload: OffloadConfig, *, num_rounds: int) -> Comparison:
    """Checks options and settings, and sizes HBM.

    Args:
      options: the options.
      offload: the settings.
      num_rounds: number of rounds.
    Raises:
      InputError: an option is invalid.
      ConfigError: a setting is invalid.
    """
    workload = build_workload(options, default="decode")
    concurrency = options.concurrency or min(DEFAULT_CONCURRENCY, options.max_num_batched_tokens)
    offload, notes = _settings(offload)
    needed = blocks_per_request(workload, options)
    in_flight = min(concurrency, len(workload.conversations))
    num_prompt_tokens = in_flight * sum(workload.prompt_lens) / workload.num_requests
    num_blocks = options.num_blocks or max(needed, int(_HBM_PER_PROMPTS * num_prompt_tokens / options.block_size))
    enough = in_flight * (needed + options.num_spare_blocks)
    constrained, control = (
        build_setup(options, offload, workload=workload, concurrency=concurrency, num_blocks=n)
        for n in (num_blocks, max(num_blocks, enough))
    )
    if num_blocks >= enough:
        _logger.warning(
            "HBM of %d blocks holds all requests in flight: nothing will be preempted; lower --num-blocks", num_blocks
        )
    unswapped = offload.model_copy(update={"swap_gb": 0.0})
    sides = (
        Side("off", control, unswapped if offload.enabled else None),
        Side("on", control, offload),
        Side("recompute", constrained, offload.model_copy(update={"swap_mode": SwapMode.RECOMPUTE})),
        Side("swap", constrained, offload),
    )
    return Comparison(constrained, control, sides, num_rounds, notes)


def _settings(offload: OffloadConfig) -> tuple[OffloadConfig, tuple[str, ...]]:
    """The settings with swap on and the host tier off unless it was sized; and remarks on them for the user."""
    notes = []
    if offload.swap_gb == 0:
        if "swap_gb" in offload.model_fields_set:
            notes.append("TPU_OFFLOAD_SWAP_GB=0 is ignored here: the swap pool was sized automatically.")
        offload = offload.model_copy(update={"swap_gb": "auto"})
    if offload.num_cpu_chunks is None and offload.host_gb is None:
        offload = offload.model_copy(update={"num_cpu_chunks": 0})
    elif offload.enabled:
        notes.append("The host tier is on and serves prompts on both sides.")
    if offload.swap_mode is SwapMode.RECOMPUTE:
        notes.append("Both sides are the same: TPU_OFFLOAD_SWAP_MODE=recompute.")
    return offload, tuple(notes)


def compare(
    comparison: Comparison, *, start: Callable[[str], Callable[[], None]], stop: Callable[[], bool]
) -> dict[str, Any]:
    """Serves all rounds; returns the report. `start` and `stop` are those of `serve_twice`."""
    runs: dict[str, list[dict[str, Any]]] = {side.name: [] for side in comparison.sides}
    details: dict[str, list[dict[str, Any]]] = {side.name: [] for side in comparison.sides}
    differences: list[dict[str, Any]] = []
    num_compared = num_runs_compared = 0

    def serve(side: Side, name: str) -> tuple[ServedRun, OffloadStats | None]:
        gc.collect()  # collect the last engine's garbage now, not during the measurement
        return serve_once(side.setup, side.offload, on_finish=start(name), stop=stop)

    reference, _ = serve(comparison.sides[0], "reference")
    for i in range(comparison.num_rounds):
        for side in comparison.sides[:: -1 if i % 2 else 1]:
            if stop():
                break
            name = f"{side.name}, round {i + 1}"
            run, stats = serve(side, name)
            runs[side.name].append(side_numbers(run, stats, round_number=i + 1))
            requests = request_columns(run.records, start_s=run.start_s)
            details[side.name].append({"round": i + 1, "requests": requests, "timeline": dict(run.timeline)})
            found, num = find_differences(reference.records, run.records, names=("reference", name))
            differences += [{"run": side.name, "round": i + 1} | difference.as_dict() for difference in found]
            num_compared += num
            num_runs_compared += bool(num)
    recompute, swap = (summary(runs[name]) for name in ("recompute", "swap"))
    off, on = (summary(runs[name]) for name in ("off", "on"))
    return {
        **describe(comparison.constrained),
        "num_rounds": comparison.num_rounds,
        "num_reference_requests": len(reference.records),
        "notes": list(comparison.notes),
        **outcome(differences, num_compared),
        "num_runs_compared": num_runs_compared,
        "recompute": recompute,
        "swap": swap,
        "details": {name: details[name] for name in ("recompute", "swap")},
        "swap_to_recompute": ratios(recompute, swap),
        "control": {
            "num_blocks": comparison.control.engine.num_blocks,
            "off": off,
            "on": on,
            "on_to_off": ratios(off, on),
        },
    }


def side_numbers(run: ServedRun, stats: OffloadStats | None, *, round_number: int) -> dict[str, Any]:
    """Numbers of one run in the JSON file. Times without a measurement are None."""
    numbers = served_numbers(run)
    requests = [record.stats for record in run.records]
    completions = [request.completion_s for request in requests]
    num_preempted = sum(request.num_preemptions > 0 for request in requests)
    # A prompt served again after a preemption counts again. First-time hits in HBM offset some of that, so for
    # prompts that share prefixes this is a lower bound.
    computed_again = (max(0, r.stats.prompt_tokens.computed - len(r.prompt_tokens)) for r in run.records)
    numbers["prompt_tokens"]["computed_again"] = sum(computed_again)
    counts = (stats or OffloadStats()).as_dict()
    return numbers | {
        "round": round_number,
        "completion_p50_s": percentile(completions, 50),
        "completion_p99_s": percentile(completions, 99),
        "num_preempted_requests": num_preempted,
        "preempted_share": num_preempted / len(requests) if requests else None,
        "num_swaps": sum(request.num_swaps for request in requests),
        "swap": {name: counts[name] for name in counts if name in SWAP_FIELDS or name == "num_failed_jobs"},
    }


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The rounds of one side, their medians and the range of tokens/s, over complete runs if there are any.

    The median of a count is one of the counts.
    """
    chosen = [run for run in runs if run["complete"]] or list(runs)
    rates = [run["tokens_per_s"] for run in chosen if run["tokens_per_s"] is not None]
    return {
        "rounds": list(runs),
        "median": _median(chosen),
        "tokens_per_s_range": [min(rates), max(rates)] if rates else None,
    }


def ratios(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Ratios of the second side to the first, round by round: those of complete runs, median, minimum and maximum."""
    by_round = {run["round"]: run for run in one["rounds"] if run["complete"]}
    pairs = [(by_round[run["round"]], run) for run in other["rounds"] if run["complete"] and run["round"] in by_round]
    found: dict[str, Any] = {}
    for name in _RATIOS:
        values = [theirs[name] / ours[name] for ours, theirs in pairs if ours[name] and theirs[name] is not None]
        found[name] = (
            {"rounds": values, "median": statistics.median(values), "min": min(values), "max": max(values)}
            if values
            else None
        )
    return found


def _median(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    medians: dict[str, Any] = {}
    for name in runs[0] if runs else ():
        values = [run[name] for run in runs if run[name] is not None]
        if name in ("round", "complete"):
            continue
        if values and isinstance(values[0], Mapping):
            medians[name] = _median(values)
        elif values and isinstance(values[0], int):
            medians[name] = statistics.median_low(values)
        else:
            medians[name] = statistics.median(values) if values else None
    return medians
