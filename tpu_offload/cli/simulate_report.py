"""Results of a simulation: numbers for the JSON file, tables and a plot."""

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from tpu_offload.cli.report import ReportConsole, build_table, format_number
from tpu_offload.cli.simulate_sizes import GB
from tpu_offload.core.policies import DEFAULT_POLICY
from tpu_offload.sim import BOUND, Experiment, HitCounts, Result

_BASE = "lru"  # the gap to the bound is measured from this policy

type _Row = Mapping[str, Any]


def as_json(experiment: Experiment, results: Sequence[Result], *, chunk_nbytes: int | None) -> list[dict[str, Any]]:
    """A record for each case. Rates are shares of all prompt blocks; unknown values are None."""
    return [_record(experiment, result, chunk_nbytes) for result in results]


def _record(experiment: Experiment, result: Result, chunk_nbytes: int | None) -> dict[str, Any]:
    counted = result.second if experiment.only_second else result.first + result.second
    whole = result.first + result.second
    moves = {"saved": result.num_saved, "loaded": whole.num_host_hits}
    moves |= {"secondary_saved": result.num_secondary_saved, "secondary_loaded": whole.num_secondary_hits}
    return {
        "policy": result.case.policy,
        "default": result.case.policy == DEFAULT_POLICY,
        "size_share": result.case.size_share,
        "num_chunks": result.case.setup.num_chunks,
        "nbytes": result.case.setup.num_chunks * chunk_nbytes if chunk_nbytes else None,
        "num_secondary_chunks": result.case.setup.num_secondary_chunks,
        "prefix_hit_rate": _rate(counted.num_host_hits, counted),
        "first_part_hit_rate": _rate(result.first.num_host_hits, result.first),
        "second_part_hit_rate": _rate(result.second.num_host_hits, result.second),
        "hbm_hit_rate": _rate(counted.num_hbm_hits, counted),
        "secondary_hit_rate": _rate(counted.num_secondary_hits, counted),
        **{f"num_{name}_chunks": num for name, num in moves.items()},
        "num_evicted_chunks": result.num_evicted,
        "num_dropped_chunks": result.num_dropped,
        **{f"{name}_nbytes": num * chunk_nbytes if chunk_nbytes else None for name, num in moves.items()},
        "run_s": result.run_s,
    }


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
        _print_traffic(console, played, has_secondary=any(row["secondary_hit_rate"] for row in played))


def _print_traffic(console: ReportConsole, played: Sequence[_Row], *, has_secondary: bool) -> None:
    if has_secondary:
        title = "Prefix hit rate of the secondary tier"
        console.print(_size_table(played, title, _cell("secondary_hit_rate", "share")))
        title = "Prefix hit rate of both tiers"
        console.print(_size_table(played, title, _both_rates))
    for name in ("saved", "loaded", *(["secondary_saved", "secondary_loaded"] if has_secondary else [])):
        what = name.capitalize().replace("_", " tier, ")
        in_gb = played[0][f"{name}_nbytes"] is not None
        cell = _cell(f"{name}_nbytes", "GB") if in_gb else _cell(f"num_{name}_chunks", "narrow")
        console.print(_size_table(played, f"{what} {'GB' if in_gb else 'chunks'}", cell))
    console.print(_size_table(played, "Evicted chunks", _cell("num_evicted_chunks", "narrow")))
    if any(row["num_dropped_chunks"] for row in played):
        console.print(_size_table(played, "Dropped chunks", _cell("num_dropped_chunks", "narrow")))


def _cell(name: str, unit: str) -> Callable[[_Row], str]:
    return lambda row: format_number(row[name], unit)


def _both_rates(row: _Row) -> str:
    known = row["prefix_hit_rate"] is not None
    return format_number(row["prefix_hit_rate"] + row["secondary_hit_rate"] if known else None, "share")


def _gap_share(results: Sequence[_Row]) -> Callable[[_Row], str]:
    rates = {(row["policy"], row["num_chunks"], row["num_secondary_chunks"]): row["prefix_hit_rate"] for row in results}

    def share(row: _Row) -> str:
        base, bound = rates[_BASE, row["num_chunks"], row["num_secondary_chunks"]], rates[BOUND, row["num_chunks"], 0]
        if bound <= base:
            return "-"
        part = (row["prefix_hit_rate"] - base) / (bound - base)
        return f"{part:.0%}" if part >= -1 else "< -100%"

    return share


def _size_table(rows: Sequence[_Row], title: str, cell: Callable[[_Row], str]) -> Table:
    """A table with a row for each policy and size of the secondary tier, and a column for each size."""
    columns = [""]
    for share, nbytes in dict.fromkeys((row["size_share"], row["nbytes"]) for row in rows):
        in_gb = f"\n{nbytes / GB:.3g} GB" if nbytes else ""
        columns.append(f"{100 * share:.3g} %{in_gb}")
    lines: dict[str, list[str]] = {}
    several = len({row["num_secondary_chunks"] for row in rows} - {0}) > 1
    for row in rows:
        label = row["policy"] + (" *" if row["default"] else "")
        if several:
            label += f" + {row['num_secondary_chunks']}" if row["num_secondary_chunks"] else ""
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
    several = len({row["num_secondary_chunks"] for row in rows} - {0}) > 1
    for policy, num_secondary in dict.fromkeys((row["policy"], row["num_secondary_chunks"]) for row in rows):
        mine = [row for row in rows if (row["policy"], row["num_secondary_chunks"]) == (policy, num_secondary)]
        mine.sort(key=lambda row: float(row["size_share"]))
        label = f"{policy} + {num_secondary}" if several and num_secondary else policy
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
