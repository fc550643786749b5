"""What `replay --preempt` came to: numbers of its runs for a file, and a table for a person."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from tpu_offload.cli.report import at_path, format_number, percentile
from tpu_offload.cli.serving import ServedRun
from tpu_offload.metrics import SWAP_FIELDS, OffloadStats

_RATIOS = ("tokens_per_s", "completion_p50_s", "completion_p99_s", "ttft_p50_s")


def side_numbers(run: ServedRun, stats: OffloadStats | None, *, round_number: int) -> dict[str, Any]:
    """One run, as it stands in the JSON file. Times that nothing was measured for are None."""
    requests = [record.stats for record in run.records]
    completions = [request.completion_s for request in requests]
    ttfts = [request.ttft_s for request in requests if request.ttft_s is not None]
    num_generated = sum(len(record.tokens) for record in run.records)
    num_preempted = sum(request.num_preemptions > 0 for request in requests)
    # A prompt served again after a preemption counts again. What was found in HBM the first time makes up for
    # some of it, so for prompts that share prefixes this is a lower bound.
    computed_again = (max(0, r.stats.prompt_tokens.computed - len(r.prompt_tokens)) for r in run.records)
    counts = (stats or OffloadStats()).as_dict()
    return {
        "round": round_number,
        "complete": run.complete,
        "wall_s": run.wall_s,
        "num_requests": len(requests),
        "num_generated_tokens": num_generated,
        "tokens_per_s": num_generated / run.wall_s if run.wall_s else None,
        "completion_p50_s": percentile(completions, 50),
        "completion_p99_s": percentile(completions, 99),
        "ttft_p50_s": percentile(ttfts, 50),
        "num_preempted_requests": num_preempted,
        "preempted_share": num_preempted / len(requests) if requests else None,
        "num_preemptions": sum(request.num_preemptions for request in requests),
        "num_swaps": sum(request.num_swaps for request in requests),
        "prompt_tokens": {
            "computed": sum(request.prompt_tokens.computed for request in requests),
            "computed_again": sum(computed_again),
            "hbm": sum(request.prompt_tokens.hbm for request in requests),
            "host": sum(request.prompt_tokens.host for request in requests),
        },
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


def build_table(report: Mapping[str, Any]) -> Table:
    """The report for a terminal."""
    sides = report["recompute"]["median"], report["swap"]["median"]
    workload, engine = report["workload"], report["engine"]
    table = Table(
        title=f"{workload['name']}: {workload['num_requests']} requests, {workload['concurrency']} in flight, HBM of "
        f"{engine['num_blocks']} blocks; median of {report['num_rounds']} rounds"
    )
    table.add_column("")
    for name in ("recompute", "swap", "swap / recompute"):
        table.add_column(name, justify="right")

    def add(label: str, *path: str, unit: str = "", only_swap: bool = False) -> None:
        one, other = (format_number(at_path(side, path), unit) for side in sides)
        table.add_row(label, "" if only_swap else one, other, _ratio_text(report["swap_to_recompute"].get(path[-1])))

    add("requests finished", "num_requests")
    table.add_row("requests preempted", *map(_preempted_text, sides), "")
    add("preemptions", "num_preemptions")
    add("swapped out", "swap", "num_swapped_out", only_swap=True)
    add("  thrashed: just back", "swap", "num_thrashed_swaps", only_swap=True)
    add("recomputed", "swap", "num_recomputed")
    add("  taken to be faster", "swap", "num_recomputed_faster", only_swap=True)
    add("  no room in the swap pool", "swap", "num_recomputed_no_room", only_swap=True)
    add("  swapped out and lost", "swap", "num_lost_swaps", only_swap=True)
    add("prompt tokens computed again", "prompt_tokens", "computed_again")
    table.add_section()
    add("generated tokens/s", "tokens_per_s", unit="rate")
    table.add_row(
        "  least to most", *(_range_text(report[name]["tokens_per_s_range"]) for name in ("recompute", "swap")), ""
    )
    add("completion time, p50", "completion_p50_s", unit="s")
    add("completion time, p99", "completion_p99_s", unit="s")
    add("time to first token, p50", "ttft_p50_s", unit="s")
    table.add_section()
    for label, text in _swap_rows(sides[1]):
        table.add_row(label, "", text, "")
    return table


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


def _swap_rows(side: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What was copied, and what the choice between swap and recompute goes by."""
    swap = side.get("swap")
    if swap is None:
        return []
    moved = " + ".join(f"{swap[f'swapped_{way}_nbytes'] / 2**20:.1f}" for way in ("out", "in"))
    rates = " + ".join(f"{swap[f'swap_{way}_nbytes_per_s'] / 1e9:.2f}" for way in ("out", "in"))
    return [
        ("copied out + in, MiB", moved),
        ("blocks that needed no copy", f"{swap['swap_skipped_blocks']:,}"),
        ("swap pool, peak of blocks", f"{swap['swap_peak_blocks']} of {swap['swap_pool_blocks']}"),
        ("GB/s measured, out + in", rates),
        ("prompt tokens/s measured", f"{swap['prefill_tokens_per_s']:,.0f}"),
    ]


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


def _range_text(pair: Sequence[float] | None) -> str:
    return "-" if pair is None else f"{pair[0]:,.1f} to {pair[1]:,.1f}"


def _ratio_text(ratio: Mapping[str, Any] | None) -> str:
    return "" if ratio is None else f"{ratio['median']:.3f} ({ratio['min']:.3f} to {ratio['max']:.3f})"
