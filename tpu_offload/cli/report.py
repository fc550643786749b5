"""What a replay came to: numbers for a file, a table for a person, and the comparison of the outputs."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from tpu_offload.cli.serving import Record, ServedRun
from tpu_offload.hashing import BlockHasher
from tpu_offload.metrics import SWAP_FIELDS, OffloadStats
from tpu_offload.types import BlockHash


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """A request whose two runs gave different tokens or log-probabilities, and where they first differ."""

    request_id: str
    position: int
    baseline: tuple[float, ...]
    offload: tuple[float, ...]
    what: str = "token"
    names: tuple[str, str] = ("baseline", "offload")

    def __str__(self) -> str:
        one, other = self.names
        return (
            f"request {self.request_id} differs from {self.what} {self.position} on: {one} "
            f"{list(self.baseline[self.position :][:4])}, {other} {list(self.offload[self.position :][:4])}"
        )

    def as_dict(self) -> dict[str, Any]:
        """It, as it stands in the JSON file."""
        return dataclasses.asdict(self) | {"text": str(self)}


def find_differences(
    baseline: Iterable[Record], offload: Iterable[Record], *, names: tuple[str, str] = ("baseline", "offload")
) -> tuple[list[Difference], int]:
    """Compares every output token, and its log-probability bit for bit, of the requests that both runs finished.

    Returns:
      The requests that differ, in the order of the offload run, and how many were compared.
    """
    expected = {record.request_id: record for record in baseline}
    differences = []
    num_compared = 0
    for record in offload:
        if record.request_id not in expected:
            continue
        num_compared += 1
        pair = expected[record.request_id], record
        for what, (one, other) in (
            ("token", tuple(r.tokens for r in pair)),
            ("logprob", tuple(r.logprobs for r in pair)),
        ):
            position = _first_difference(one, other)
            if position is not None:
                differences.append(Difference(record.request_id, position, one, other, what, names))
                break
    return differences, num_compared


def _first_difference(one: Sequence[float], other: Sequence[float]) -> int | None:
    """Where two sequences differ in any bit; None if nowhere."""
    bits, other_bits = np.asarray(one, np.float64).view(np.int64), np.asarray(other, np.float64).view(np.int64)
    length = min(len(bits), len(other_bits))
    differs = np.flatnonzero(bits[:length] != other_bits[:length])
    if len(differs):
        return int(differs[0])
    return length if len(bits) != len(other_bits) else None


def count_recomputed(records: Sequence[Record], *, block_size: int) -> int:
    """Prompt tokens that were computed although an earlier request had computed their KV before.

    It is what an unlimited cache would have saved: full blocks only, never the whole prompt.
    """
    hasher = BlockHasher(b"", block_size=block_size)
    seen: set[BlockHash] = set()
    num_recomputed = 0
    for record in sorted(records, key=lambda record: record.stats.arrival_s):
        hashes: list[BlockHash] = []
        hasher.extend(hashes, record.prompt_tokens)
        num_known = next((i for i, block_hash in enumerate(hashes) if block_hash not in seen), len(hashes))
        reusable = min(num_known * block_size, len(record.prompt_tokens) - 1)
        sources = record.stats.prompt_tokens
        num_recomputed += max(0, reusable - sources.hbm - sources.host)
        hasher.extend(hashes, record.prompt_tokens + record.tokens[:-1])
        seen.update(hashes)
    return num_recomputed


def run_numbers(run: ServedRun, *, block_size: int) -> dict[str, Any]:
    """One run, as it stands in the JSON file. Times that nothing was measured for are None."""
    ttfts = [record.stats.ttft_s for record in run.records if record.stats.ttft_s is not None]
    sources = [record.stats.prompt_tokens for record in run.records]
    num_generated = sum(len(record.tokens) for record in run.records)
    num_prompt = sum(len(record.prompt_tokens) for record in run.records)
    return {
        "num_requests": len(run.records),
        "complete": run.complete,
        "wall_s": run.wall_s,
        "ttft_p50_s": percentile(ttfts, 50),
        "ttft_p99_s": percentile(ttfts, 99),
        "tokens_per_s": num_generated / run.wall_s if run.wall_s else None,
        "total_tokens_per_s": (num_prompt + num_generated) / run.wall_s if run.wall_s else None,
        "num_generated_tokens": num_generated,
        "prompt_tokens": {
            "computed": sum(source.computed for source in sources),
            "hbm": sum(source.hbm for source in sources),
            "host": sum(source.host for source in sources),
            "recomputed": count_recomputed(run.records, block_size=block_size),
        },
        "num_preemptions": sum(record.stats.num_preemptions for record in run.records),
    }


def offload_numbers(stats: OffloadStats) -> dict[str, Any]:
    """What only the offload run has."""
    return {
        "staging": {
            "budget_blocks": stats.staging_budget_blocks,
            "peak_blocks": stats.staging_peak_blocks,
            "dropped_blocks": stats.dropped_save_blocks + stats.dropped_load_blocks,
            "dropped_save_blocks": stats.dropped_save_blocks,
            "dropped_load_blocks": stats.dropped_load_blocks,
        },
        "transfers": {
            "saved_nbytes": stats.saved_nbytes,
            "loaded_nbytes": stats.loaded_nbytes,
            "save_s": stats.save_s,
            "load_s": stats.load_s,
            "num_failed_jobs": stats.num_failed_jobs,
        },
        "host": {
            "num_chunks": stats.num_host_chunks,
            "num_resident_chunks": stats.num_resident_chunks,
            "num_evicted_chunks": stats.num_evicted_chunks,
        },
        "swap": {name: value for name, value in stats.as_dict().items() if name in SWAP_FIELDS},
    }


def hit_ttfts(baseline: ServedRun, offload: ServedRun) -> dict[str, Any]:
    """Time to first token over the requests that loaded from the host, in both runs."""
    before = {record.request_id: record.stats.ttft_s for record in baseline.records}
    pairs = [
        (before[record.request_id], record.stats.ttft_s)
        for record in offload.records
        if record.stats.prompt_tokens.host and record.request_id in before
    ]
    return {
        "num_requests": len(pairs),
        "baseline_ttft_p50_s": percentile([one for one, _ in pairs if one is not None], 50),
        "offload_ttft_p50_s": percentile([other for _, other in pairs if other is not None], 50),
    }


def build_table(report: Mapping[str, Any]) -> Table:
    """The report for a terminal."""
    baseline, offload = report["baseline"], report["offload"]
    table = Table(title=f"{report['workload']['name']}: {report['workload']['num_requests']} requests")
    table.add_column("")
    for name in ("baseline", "offload", "offload / baseline"):
        table.add_column(name, justify="right")

    def add(label: str, path: Sequence[str], unit: str, *, ratio: bool = True) -> None:
        one, other = at_path(baseline, path), at_path(offload, path)
        quotient = f"{other / one:.2f}" if ratio and one and other is not None else ""
        table.add_row(label, format_number(one, unit), format_number(other, unit), quotient)

    add("requests finished", ("num_requests",), "", ratio=False)
    add("prompt tokens computed", ("prompt_tokens", "computed"), "")
    add("  of these, computed again", ("prompt_tokens", "recomputed"), "")
    add("prompt tokens hit in HBM", ("prompt_tokens", "hbm"), "")
    add("prompt tokens loaded from host", ("prompt_tokens", "host"), "")
    add("time to first token, p50", ("ttft_p50_s",), "s")
    add("time to first token, p99", ("ttft_p99_s",), "s")
    hits = report["host_hits"]
    if hits["num_requests"]:
        one, other = hits["baseline_ttft_p50_s"], hits["offload_ttft_p50_s"]
        label = f"  p50 of {hits['num_requests']} with a host hit"
        table.add_row(label, format_number(one, "s"), format_number(other, "s"), f"{other / one:.2f}" if one else "")
    add("generated tokens/s", ("tokens_per_s",), "rate")
    add("all tokens/s", ("total_tokens_per_s",), "rate")
    add("preemptions", ("num_preemptions",), "", ratio=False)
    table.add_section()
    _add_offload_rows(table, offload)
    return table


def tell_outcome(console: Console, report: Mapping[str, Any], *, same: str) -> int:
    """Prints what the comparison of the outputs came to; returns the exit status.

    Args:
      console: to print to.
      report: has `differences`, `num_compared` and `interrupted`.
      same: what is identical, if it is.
    """
    for difference in report["differences"][:10]:
        console.print(difference["text"], highlight=False, markup=False)
    if report["differences"]:
        console.print(f"OUTPUTS DIFFER in {len(report['differences'])} of {report['num_compared']} requests.")
    elif report["num_compared"]:
        console.print(f"Outputs identical: {same}.")
    else:
        console.print("No request was finished in both runs, so no output was compared.")
    if report["interrupted"]:
        console.print("Interrupted: the numbers cover the requests finished so far.")
    if report["differences"]:
        return 1
    return 130 if report["interrupted"] else 0


def _add_offload_rows(table: Table, offload: Mapping[str, Any]) -> None:
    staging, transfers = offload["staging"], offload["transfers"]
    peak = f"{staging['peak_blocks']} of {staging['budget_blocks']}"
    table.add_row("staging peak of budget, blocks", "", peak, "")
    dropped = f"{staging['dropped_save_blocks']} + {staging['dropped_load_blocks']}"
    table.add_row("dropped blocks, save + load", "", dropped, "")
    for label in ("saved", "loaded"):
        table.add_row(f"{label}, MiB", "", f"{transfers[f'{label}_nbytes'] / 2**20:.1f}", "")
    rates = transfers.get("copy_rates")
    if rates:
        text = f"{rates['save_gb_per_s']:.2f} + {rates['load_gb_per_s']:.2f}"
        table.add_row(f"GB/s of {rates['num_blocks']} blocks alone, save + load", "", text, "")
    evicted = f"{offload['host']['num_resident_chunks']}, {offload['host']['num_evicted_chunks']}"
    table.add_row("host chunks resident, evicted", "", evicted, "")
    swap = offload["swap"]
    if swap["swap_pool_blocks"]:
        swapped = f"{swap['num_swapped_out']}, {swap['num_recomputed'] + swap['num_lost_swaps']}"
        table.add_row("preempted requests swapped out, recomputed", "", swapped, "")


def percentile(values: Sequence[float], percent: float) -> float | None:
    """A percentile, interpolated; None of nothing."""
    return float(np.percentile(values, percent)) if values else None


def at_path(numbers: Mapping[str, Any], path: Sequence[str]) -> Any:
    """A value in nested numbers; None if there is none."""
    value: Any = numbers
    for key in path:
        value = None if value is None else value.get(key)
    return value


def format_number(value: float | None, unit: str) -> str:
    """A number for the table; the unit is `s`, `rate` or empty for a count."""
    if value is None:
        return "-"
    if unit == "s":
        return f"{value * 1e3:.1f} ms"
    return f"{value:,.1f}" if unit == "rate" else f"{value:,}"
