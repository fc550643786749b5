"""Results of a simulation: numbers for the JSON file, and tables."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from rich.table import Table

from tpu_offload.cli.simulate_sizes import GB
from tpu_offload.cli.tables import ReportConsole, build_table, format_number
from tpu_offload.config.storage_tiers import SEPARATOR
from tpu_offload.core.policies import DEFAULT_POLICY
from tpu_offload.sim import BOUND, Experiment, HitCounts, Result, Trace

BASE = "lru"
"""The gap to the bound is measured from this policy."""
_NUM_BINS = 40  # of time

type _Row = Mapping[str, Any]


def as_json(experiment: Experiment, results: Sequence[Result], *, chunk_nbytes: int | None) -> list[dict[str, Any]]:
    """A record for each case. Rates are shares of all prompt blocks; unknown values are None."""
    bins = _bins(experiment.trace)
    return [
        _record(experiment, result, chunk_nbytes) | {"hit_rate_over_time": _over_time(experiment.trace, result, bins)}
        for result in results
    ]


def _bins(trace: Trace) -> list[float]:
    """The ends of equal parts of the trace's time, in seconds."""
    first_s, last_s = trace.requests[0].time_s, trace.requests[-1].time_s
    num = _NUM_BINS if last_s > first_s else 1
    return np.linspace(first_s, last_s, num + 1).tolist()


def _over_time(trace: Trace, result: Result, bins: Sequence[float]) -> list[float | None]:
    """The prefix hit rate of the host tier in each of `bins`; None where no request has a block."""
    numbers = np.digitize([request.time_s for request in trace.requests], bins[1:-1])
    num_blocks = [len(request.blocks) for request in trace.requests]
    num = len(bins) - 1
    asked = np.bincount(numbers, weights=num_blocks, minlength=num)
    hit = np.bincount(numbers, weights=result.outcome.host_hits, minlength=num)
    return [float(h / a) if a else None for h, a in zip(hit, asked, strict=True)]


def _record(experiment: Experiment, result: Result, chunk_nbytes: int | None) -> dict[str, Any]:
    counted = result.second if experiment.only_second else result.first + result.second
    whole, outcome = result.first + result.second, result.outcome
    moves = {"saved": outcome.num_saved, "loaded": whole.num_host_hits + sum(whole.num_storage_hits)}
    return {
        "policy": result.case.policy,
        "default": result.case.policy == DEFAULT_POLICY,
        "size_share": result.case.size_share,
        "num_chunks": result.case.setup.num_chunks,
        "nbytes": result.case.setup.num_chunks * chunk_nbytes if chunk_nbytes else None,
        "prefix_hit_rate": _rate(counted.num_host_hits, counted),
        "first_part_hit_rate": _rate(result.first.num_host_hits, result.first),
        "second_part_hit_rate": _rate(result.second.num_host_hits, result.second),
        "hbm_hit_rate": _rate(counted.num_hbm_hits, counted),
        "storage_hit_rate": _rate(sum(counted.num_storage_hits), counted),
        **_moves(moves, chunk_nbytes),
        "num_evicted_chunks": outcome.num_evicted,
        "num_dropped_chunks": outcome.num_dropped,
        "storage": [
            {
                "num_chunks": setup.num_chunks,
                "write_on": setup.write_on.value,
                "admission": setup.admission.value,
                "eviction_policy": setup.eviction.value,
                "hit_rate": _rate(counted.num_storage_hits[number], counted),
                **_moves({"written": tier.num_written, "read": whole.num_storage_hits[number]}, chunk_nbytes),
                "num_evicted_chunks": tier.num_evicted,
                "num_dropped_chunks": tier.num_dropped,
            }
            for number, (setup, tier) in enumerate(zip(result.case.setup.storage, outcome.storage, strict=True))
        ],
        "run_s": result.run_s,
    }


def _moves(moves: Mapping[str, int], chunk_nbytes: int | None) -> dict[str, int | None]:
    """Chunks that were copied, and bytes."""
    in_bytes = {f"{name}_nbytes": num * chunk_nbytes if chunk_nbytes else None for name, num in moves.items()}
    return {f"num_{name}_chunks": num for name, num in moves.items()} | in_bytes


def _rate(num_hits: int, part: HitCounts) -> float | None:
    return num_hits / part.num_blocks if part.num_blocks else None


def describe(experiment: Experiment, *, num_hbm_blocks: int, chunk_nbytes: int | None) -> dict[str, Any]:
    """Describes the simulated trace in the JSON file."""
    trace, split = experiment.trace, experiment.split
    requests = trace.requests
    return {
        "num_requests": len(requests),
        "num_blocks": trace.num_blocks,
        "num_unique_blocks": trace.num_unique_blocks,
        "first_request_s": requests[0].time_s,
        "last_request_s": requests[-1].time_s,
        "second_part_s": requests[split].time_s if split < len(requests) else None,
        "num_first_part_requests": split,
        "counts_second_part_only": experiment.only_second,
        "bins_s": _bins(trace),
        "num_hbm_blocks": num_hbm_blocks,
        "chunk_nbytes": chunk_nbytes,
        "notes": list(trace.notes),
    }


def print_report(report: Mapping[str, Any], tables: Sequence[Table]) -> None:
    """Prints the tables."""
    console = ReportConsole()
    console.print(
        f"{report['num_requests']} requests, {report['num_blocks']} prompt blocks, {report['num_unique_blocks']} "
        f"unique; second part from {report['second_part_s'] or 0:g} s on. * is the default policy, {BOUND} the bound."
    )
    if report["num_hbm_blocks"]:
        where = ", second part only" if report["counts_second_part_only"] else ""
        console.print(
            f"HBM in front: {report['num_hbm_blocks']} blocks, with a hit rate of "
            f"{report['results'][0]['hbm_hit_rate']:.3f}"
            f"{where}; saved on {report['save_on']}, after {report['save_after_sightings']} sightings."
        )
    for table in tables:
        console.print(table)


def result_tables(report: Mapping[str, Any]) -> list[Table]:
    """The tables of a report."""
    results: Sequence[_Row] = report["results"]
    where = ", second part only" if report["counts_second_part_only"] else ""
    tables = [_size_table(results, f"Prefix hit rate of the host tier{where}", _cell("prefix_hit_rate", "share"))]
    if {BASE, BOUND} <= {row["policy"] for row in results}:
        others = [row for row in results if row["policy"] not in (BASE, BOUND)]
        if others:
            tables.append(_size_table(others, f"Share of the gap from {BASE} to the bound{where}", _gap_cell(results)))
    for part in ("first", "second"):
        tables.append(_size_table(results, f"Prefix hit rate, {part} part", _cell(f"{part}_part_hit_rate", "share")))
    played = [row for row in results if row["policy"] != BOUND]
    return [*tables, *_traffic_tables(played)] if played else tables


def _traffic_tables(played: Sequence[_Row]) -> Iterator[Table]:
    num_tiers = max(len(row["storage"]) for row in played)
    if num_tiers:
        for number in range(num_tiers):
            title = f"Prefix hit rate of {_tier_name(number, num_tiers)}"
            yield _size_table(played, title, _tier_cell(number, "hit_rate", "share"))
        yield _size_table(played, "Prefix hit rate of all tiers", _rate_of_all)
    in_gb = played[0]["saved_nbytes"] is not None
    unit = "GB" if in_gb else "chunks"
    for name in ("saved", "loaded"):
        cell = _cell(f"{name}_nbytes", "GB") if in_gb else _cell(f"num_{name}_chunks", "narrow")
        yield _size_table(played, f"{name.capitalize()} {unit}", cell)
    for number in range(num_tiers):
        for name, title in (("written", "Written to"), ("read", "Read from")):
            field, how = (f"{name}_nbytes", "GB") if in_gb else (f"num_{name}_chunks", "narrow")
            title = f"{title} {_tier_name(number, num_tiers)}, {unit}"
            yield _size_table(played, title, _tier_cell(number, field, how))
    yield _size_table(played, "Evicted chunks", _cell("num_evicted_chunks", "narrow"))
    if any(row["num_dropped_chunks"] for row in played):
        yield _size_table(played, "Dropped chunks", _cell("num_dropped_chunks", "narrow"))


def _tier_name(number: int, num_tiers: int) -> str:
    return f"storage tier {number}" if num_tiers > 1 else "storage"


def _tier_cell(number: int, name: str, unit: str) -> Callable[[_Row], str]:
    """A figure of one storage tier; a stack may have fewer."""
    return lambda row: format_number(row["storage"][number][name], unit) if number < len(row["storage"]) else "-"


def _cell(name: str, unit: str) -> Callable[[_Row], str]:
    return lambda row: format_number(row[name], unit)


def _rate_of_all(row: _Row) -> str:
    known = row["prefix_hit_rate"] is not None
    return format_number(row["prefix_hit_rate"] + row["storage_hit_rate"] if known else None, "share")


def stack_of(row: _Row) -> str:
    """The sizes of the storage tiers, in chunks; empty without any."""
    return SEPARATOR.join(str(tier["num_chunks"]) for tier in row["storage"])


def has_several_stacks(rows: Sequence[_Row]) -> bool:
    """Whether names of policies need the stack of storage tiers, too."""
    return len(set(map(stack_of, rows)) - {""}) > 1


def gap_share(results: Sequence[_Row], row: _Row) -> float | None:
    """How far a policy goes from `BASE` (0) to the bound (1) at its size; None without either, or without a gap."""

    def rate(policy: str, stack: str) -> float | None:
        found = ((one["policy"], one["num_chunks"], stack_of(one), one["prefix_hit_rate"]) for one in results)
        return next((r for *case, r in found if case == [policy, row["num_chunks"], stack]), None)

    base, bound, own = rate(BASE, stack_of(row)), rate(BOUND, ""), row["prefix_hit_rate"]
    if base is None or bound is None or own is None or bound <= base:
        return None
    return float((own - base) / (bound - base))


def _gap_cell(results: Sequence[_Row]) -> Callable[[_Row], str]:
    def text(row: _Row) -> str:
        share = gap_share(results, row)
        return "-" if share is None else f"{share:.0%}" if share >= -1 else "< -100%"

    return text


def _size_table(rows: Sequence[_Row], title: str, cell: Callable[[_Row], str]) -> Table:
    """A table with a row for each policy and stack of storage tiers, and a column for each size of the host tier."""
    columns = [""]
    for share, nbytes in dict.fromkeys((row["size_share"], row["nbytes"]) for row in rows):
        in_gb = f"\n{nbytes / GB:.3g} GB" if nbytes else ""
        columns.append(f"{100 * share:.3g} %{in_gb}")
    lines: dict[str, list[str]] = {}
    several = has_several_stacks(rows)
    for row in rows:
        label = row["policy"] + (" *" if row["default"] else "")
        if several and row["storage"]:
            label += f" + {stack_of(row)}"
        lines.setdefault(label, [label]).append(cell(row))
    return build_table(title, columns, lines.values(), left_title=True)
