"""What request swap brings where running requests are preempted, and costs elsewhere.

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
_RATIOS = ("tokens_per_s", "completion_p50_s", "completion_p99_s", "ttft_p50_s")
_HBM_PER_PROMPTS = 1.5  # HBM takes in the prompts of all requests in flight, and half as much again


@dataclasses.dataclass(frozen=True, slots=True)
class Side:
    """One of the runs of a round, as the report calls it; `offload` is None without the library."""

    name: str
    setup: Setup
    offload: OffloadConfig | None


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """What is served in each round: `pressed` has too little HBM, `control` enough.

    The first of `sides` is without swap and preemption. `notes` say what a person should know of the settings.
    """

    pressed: Setup
    control: Setup
    sides: tuple[Side, ...]
    num_rounds: int
    notes: tuple[str, ...]


def build_comparison(options: ServingOptions, offload: OffloadConfig, *, num_rounds: int) -> Comparison:
    """Checks options and settings, and sizes HBM.

    Args:
      options: what to serve.
      offload: the settings.
      num_rounds: rounds.
    Raises:
      InputError: an invalid option.
      ConfigError: an invalid setting.
    """
    workload = build_workload(options, default="decode")
    concurrency = options.concurrency or min(DEFAULT_CONCURRENCY, options.max_num_batched_tokens)
    offload, notes = _settings(offload)
    needed = blocks_per_request(workload, options.block_size)
    in_flight = min(concurrency, len(workload.conversations))
    num_prompt_tokens = in_flight * sum(workload.prompt_lens) / workload.num_requests
    num_blocks = options.num_blocks or max(needed, int(_HBM_PER_PROMPTS * num_prompt_tokens / options.block_size))
    enough = in_flight * (needed + options.num_spare_blocks)
    pressed, control = (
        build_setup(options, offload, workload=workload, concurrency=concurrency, num_blocks=n)
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
    return Comparison(pressed, control, sides, num_rounds, notes)


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


def compare(
    comparison: Comparison, *, start: Callable[[str], Callable[[], None]], stop: Callable[[], bool]
) -> dict[str, Any]:
    """Serves all rounds; returns the report. `start` and `stop` are those of `serve_twice`."""
    runs: dict[str, list[dict[str, Any]]] = {side.name: [] for side in comparison.sides}
    differences: list[dict[str, Any]] = []
    num_compared = num_runs_compared = 0

    def serve(side: Side, name: str) -> tuple[ServedRun, OffloadStats | None]:
        gc.collect()  # the last engine's garbage now, not while this one is measured
        return serve_once(side.setup, side.offload, on_finish=start(name), stop=stop)

    reference, _ = serve(comparison.sides[0], "reference")
    for i in range(comparison.num_rounds):
        for side in comparison.sides[:: -1 if i % 2 else 1]:
            if stop():
                break
            name = f"{side.name}, round {i + 1}"
            run, stats = serve(side, name)
            runs[side.name].append(side_numbers(run, stats, round_number=i + 1))
            found, num = find_differences(reference.records, run.records, names=("reference", name))
            differences += [{"run": side.name, "round": i + 1} | difference.as_dict() for difference in found]
            num_compared += num
            num_runs_compared += bool(num)
    recompute, swap = (summary(runs[name]) for name in ("recompute", "swap"))
    off, on = (summary(runs[name]) for name in ("off", "on"))
    return {
        **describe(comparison.pressed),
        "num_rounds": comparison.num_rounds,
        "num_reference_requests": len(reference.records),
        "notes": list(comparison.notes),
        **outcome(differences, num_compared),
        "num_runs_compared": num_runs_compared,
        "recompute": recompute,
        "swap": swap,
        "swap_to_recompute": ratios(recompute, swap),
        "control": {
            "num_blocks": comparison.control.engine.num_blocks,
            "off": off,
            "on": on,
            "on_to_off": ratios(off, on),
        },
    }


def side_numbers(run: ServedRun, stats: OffloadStats | None, *, round_number: int) -> dict[str, Any]:
    """One run, as it stands in the JSON file. Times that nothing was measured for are None."""
    numbers = served_numbers(run)
    requests = [record.stats for record in run.records]
    completions = [request.completion_s for request in requests]
    num_preempted = sum(request.num_preemptions > 0 for request in requests)
    # A prompt served again after a preemption counts again. What was found in HBM the first time makes up for
    # some of it, so for prompts that share prefixes this is a lower bound.
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
    """The runs of one side: each, the medians, and the range of tokens/s; of complete runs, if there are any.

    A count's median is one that was counted.
    """
    chosen = [run for run in runs if run["complete"]] or list(runs)
    rates = [run["tokens_per_s"] for run in chosen if run["tokens_per_s"] is not None]
    return {
        "rounds": list(runs),
        "median": _median(chosen),
        "tokens_per_s_range": [min(rates), max(rates)] if rates else None,
    }


def ratios(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """The second side's numbers by the first one's, round by round: those of complete runs, median, least and most."""
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
