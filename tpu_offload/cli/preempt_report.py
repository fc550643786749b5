"""What `replay --preempt` came to: numbers of its runs for a file, and a table for a person."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from tpu_offload.cli.replay_report import served_numbers
from tpu_offload.cli.report import Row, build_table, format_number, percentile
from tpu_offload.cli.serving import ServedRun
from tpu_offload.metrics import SWAP_FIELDS, OffloadStats

_RATIOS = ("tokens_per_s", "completion_p50_s", "completion_p99_s", "ttft_p50_s")


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


def comparison_table(report: Mapping[str, Any]) -> Table:
    """The report for a terminal."""
    workload, engine = report["workload"], report["engine"]
    sides = [report[name]["median"] | {"range": report[name]["tokens_per_s_range"]} for name in ("recompute", "swap")]

    def ratio(row: Row) -> str:
        name = row.value if isinstance(row.value, str) else None
        return _ratio_text(report["swap_to_recompute"].get(name))

    rows = _ROWS + (_SWAP_ROWS if "swap" in sides[1] else ())
    return build_table(
        f"{workload['name']}: {workload['num_requests']} requests, {workload['concurrency']} in flight, HBM of "
        f"{engine['num_blocks']} blocks; median of {report['num_rounds']} rounds",
        ("", "recompute", "swap", "swap / recompute"),
        ((*row.cells(sides), ratio(row)) if row else None for row in rows),
    )


def findings(report: Mapping[str, Any]) -> list[str]:
    """What is to be said after the table, in sentences."""
    control = report["control"]
    found = []
    if report["recompute"]["median"].get("num_preemptions") == 0:
        found.append("No request was preempted: HBM is large enough for all in flight; make --num-blocks smaller.")
    ratio = control["on_to_off"]["tokens_per_s"]
    if ratio is not None:
        found.append(
            f"With HBM for all ({control['num_blocks']} blocks), tokens/s with swap on by off: {_ratio_text(ratio)}."
        )
    num_preemptions = sum(run["num_preemptions"] for name in ("off", "on") for run in control[name]["rounds"])
    if num_preemptions:
        found.append(f"That is no control: {num_preemptions} preemptions in its runs.")
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


def _preempted_text(side: Mapping[str, Any]) -> str:
    if side.get("preempted_share") is None:
        return "-"
    return f"{side['num_preempted_requests']} ({side['preempted_share']:.0%})"


def _range_text(side: Mapping[str, Any]) -> str:
    return "-" if side["range"] is None else " to ".join(format_number(rate, "rate") for rate in side["range"])


def _ratio_text(ratio: Mapping[str, Any] | None) -> str:
    return "" if ratio is None else f"{ratio['median']:.3f} ({ratio['min']:.3f} to {ratio['max']:.3f})"


_ROWS: tuple[Row | None, ...] = (
    Row("requests finished", "num_requests"),
    Row("requests preempted", _preempted_text),
    Row("preemptions", "num_preemptions"),
    Row("swapped out", "swap.num_swapped_out", only_last=True),
    Row("  thrashed: just back", "swap.num_thrashed_swaps", only_last=True),
    Row("recomputed", "swap.num_recomputed"),
    Row("  taken to be faster", "swap.num_recomputed_faster", only_last=True),
    Row("  no room in the swap pool", "swap.num_recomputed_no_room", only_last=True),
    Row("  swapped out and lost", "swap.num_lost_swaps", only_last=True),
    Row("prompt tokens computed again", "prompt_tokens.computed_again"),
    None,
    Row("generated tokens/s", "tokens_per_s", "rate"),
    Row("  least to most", _range_text),
    Row("completion time, p50", "completion_p50_s", "s"),
    Row("completion time, p99", "completion_p99_s", "s"),
    Row("time to first token, p50", "ttft_p50_s", "s"),
    None,
)
# What was copied, and what the choice between swap and recompute goes by.
_SWAP_ROWS = (
    Row("copied out + in, MiB", ("swap.swapped_out_nbytes", "swap.swapped_in_nbytes"), "MiB", only_last=True),
    Row("blocks that needed no copy", "swap.swap_skipped_blocks", only_last=True),
    Row("swap pool, peak of blocks", ("swap.swap_peak_blocks", "swap.swap_pool_blocks"), "id", " of ", only_last=True),
    Row("GB/s measured, out + in", ("swap.swap_out_nbytes_per_s", "swap.swap_in_nbytes_per_s"), "GB/s", only_last=True),
    Row("prompt tokens/s measured", "swap.prefill_tokens_per_s", "whole", only_last=True),
)
