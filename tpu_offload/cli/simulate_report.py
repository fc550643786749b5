"""Results of a simulation: numbers for the JSON file, tables and a plot."""

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from tpu_offload.cli.report import ReportConsole, build_table, format_number
from tpu_offload.cli.simulate_sizes import GB
from tpu_offload.config.storage_tiers import SEPARATOR
from tpu_offload.core.policies import DEFAULT_POLICY
from tpu_offload.sim import BOUND, Experiment, HitCounts, Result

_BASE = "lru"  # the gap to the bound is measured from this policy

type _Row = Mapping[str, Any]


def as_json(experiment: Experiment, results: Sequence[Result], *, chunk_nbytes: int | None) -> list[dict[str, Any]]:
    """A record for each case. Rates are shares of all prompt blocks; unknown values are None."""
    return [_record(experiment, result, chunk_nbytes) for result in results]


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
        "num_hbm_blocks": num_hbm_blocks,
        "chunk_nbytes": chunk_nbytes,
        "notes": list(trace.notes),
    }


def print_report(report: Mapping[str, Any]) -> None:
    """Prints the tables."""
    console = ReportConsole()
    results: Sequence[_Row] = report["results"]
    console.print(
        f"{report['num_requests']} requests, {report['num_blocks']} prompt blocks, {report['num_unique_blocks']} "
        f"unique; second part from {report['second_part_s'] or 0:g} s on. * is the default policy, {BOUND} the bound."
    )
    where = ", second part only" if report["counts_second_part_only"] else ""
    if report["num_hbm_blocks"]:
        console.print(
            f"HBM in front: {report['num_hbm_blocks']} blocks, with a hit rate of {results[0]['hbm_hit_rate']:.3f}"
            f"{where}; saved on {report['save_on']}, after {report['save_after_sightings']} sightings."
        )
    console.print(_size_table(results, f"Prefix hit rate of the host tier{where}", _cell("prefix_hit_rate", "share")))
    if {_BASE, BOUND} <= {row["policy"] for row in results}:
        others = [row for row in results if row["policy"] not in (_BASE, BOUND)]
        if others:
            console.print(
                _size_table(others, f"Share of the gap from {_BASE} to the bound{where}", _gap_share(results))
            )
    for part in ("first", "second"):
        console.print(_size_table(results, f"Prefix hit rate, {part} part", _cell(f"{part}_part_hit_rate", "share")))
    played = [row for row in results if row["policy"] != BOUND]
    if played:
        _print_traffic(console, played)


def _print_traffic(console: ReportConsole, played: Sequence[_Row]) -> None:
    num_tiers = max(len(row["storage"]) for row in played)
    if num_tiers:
        for number in range(num_tiers):
            title = f"Prefix hit rate of {_tier_name(number, num_tiers)}"
            console.print(_size_table(played, title, _tier_cell(number, "hit_rate", "share")))
        console.print(_size_table(played, "Prefix hit rate of all tiers", _rate_of_all))
    in_gb = played[0]["saved_nbytes"] is not None
    unit = "GB" if in_gb else "chunks"
    for name in ("saved", "loaded"):
        cell = _cell(f"{name}_nbytes", "GB") if in_gb else _cell(f"num_{name}_chunks", "narrow")
        console.print(_size_table(played, f"{name.capitalize()} {unit}", cell))
    for number in range(num_tiers):
        for name, title in (("written", "Written to"), ("read", "Read from")):
            field, how = (f"{name}_nbytes", "GB") if in_gb else (f"num_{name}_chunks", "narrow")
            title = f"{title} {_tier_name(number, num_tiers)}, {unit}"
            console.print(_size_table(played, title, _tier_cell(number, field, how)))
    console.print(_size_table(played, "Evicted chunks", _cell("num_evicted_chunks", "narrow")))
    if any(row["num_dropped_chunks"] for row in played):
        console.print(_size_table(played, "Dropped chunks", _cell("num_dropped_chunks", "narrow")))


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


def _stack(row: _Row) -> str:
    """The sizes of the storage tiers, in chunks; empty without any."""
    return SEPARATOR.join(str(tier["num_chunks"]) for tier in row["storage"])


def _gap_share(results: Sequence[_Row]) -> Callable[[_Row], str]:
    rates = {(row["policy"], row["num_chunks"], _stack(row)): row["prefix_hit_rate"] for row in results}

    def share(row: _Row) -> str:
        base, bound = rates[_BASE, row["num_chunks"], _stack(row)], rates[BOUND, row["num_chunks"], ""]
        if bound <= base:
            return "-"
        part = (row["prefix_hit_rate"] - base) / (bound - base)
        return f"{part:.0%}" if part >= -1 else "< -100%"

    return share


def _size_table(rows: Sequence[_Row], title: str, cell: Callable[[_Row], str]) -> Table:
    """A table with a row for each policy and stack of storage tiers, and a column for each size of the host tier."""
    columns = [""]
    for share, nbytes in dict.fromkeys((row["size_share"], row["nbytes"]) for row in rows):
        in_gb = f"\n{nbytes / GB:.3g} GB" if nbytes else ""
        columns.append(f"{100 * share:.3g} %{in_gb}")
    lines: dict[str, list[str]] = {}
    several = len(set(map(_stack, rows)) - {""}) > 1
    for row in rows:
        label = row["policy"] + (" *" if row["default"] else "")
        if several and row["storage"]:
            label += f" + {_stack(row)}"
        lines.setdefault(label, [label]).append(cell(row))
    return build_table(title, columns, lines.values(), left_title=True)


def plot(report: Mapping[str, Any], suffix: str) -> bytes:
    """Plots hit rate against size.

    Args:
      report: as in the JSON file.
      suffix: suffix of the file name, which selects the format.
    """
    # Imported here because it takes half a second and only plots need it.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    rows = [row for row in report["results"] if row["prefix_hit_rate"] is not None]
    several = len(set(map(_stack, rows)) - {""}) > 1
    for policy, stack in dict.fromkeys((row["policy"], _stack(row)) for row in rows):
        mine = [row for row in rows if (row["policy"], _stack(row)) == (policy, stack)]
        mine.sort(key=lambda row: float(row["size_share"]))
        label = f"{policy} + {stack}" if several and stack else policy
        style: dict[str, Any] = {"marker": "o", "markersize": 3.5, "linewidth": 1.2}
        if policy == BOUND:
            label, style = f"{policy} (the bound)", {"color": "black", "linestyle": "--", "linewidth": 1.2}
        elif mine[0]["default"]:
            label, style = f"{label} (default)", {"marker": "o", "markersize": 4.5, "linewidth": 2.8}
        axes.plot(
            [100 * row["size_share"] for row in mine], [row["prefix_hit_rate"] for row in mine], label=label, **style
        )
    axes.set_xscale("log")
    axes.set_xticks(sorted({100 * row["size_share"] for row in rows}))
    axes.minorticks_off()
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g} %")
    axes.set_xlabel("host tier, share of the unique blocks")
    axes.set_ylabel("prefix hit rate of the host tier")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    axes.set_title(_title(report), fontsize=10)
    content = io.BytesIO()
    # Equal results give equal files.
    metadata = {".png": {}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}[suffix.lower()]
    with rc_context({"svg.hashsalt": "tpu_offload"}):
        figure.savefig(content, format=suffix[1:].lower(), dpi=150, metadata=metadata)
    return content.getvalue()


def _title(report: Mapping[str, Any]) -> str:
    names = ", ".join(Path(path).name for path in report["traces"])
    title = f"{names}: {report['num_requests']} requests, {report['num_unique_blocks']} unique blocks"
    if report["num_hbm_blocks"]:
        title += f"\nHBM of {report['num_hbm_blocks']} blocks in front, saved on {report['save_on']}"
    return title + ("\nsecond part only" if report["counts_second_part_only"] else "")
