"""The page of `tpu-offload simulate`, from its report."""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from tpu_offload.cli.html.charts import (
    GREEN,
    INK,
    ORANGE,
    PALETTE,
    PURPLE,
    RED,
    SKY,
    Axis,
    Chart,
    Series,
    lines,
    stacked,
)
from tpu_offload.cli.html.page import Figure, Page, Section
from tpu_offload.cli.simulate_report import BASE, gap_share, has_several_stacks, stack_of
from tpu_offload.cli.simulate_sizes import GB
from tpu_offload.sim import BOUND

type _Row = Mapping[str, Any]


def simulate_page(report: Mapping[str, Any], tables: Sequence[Table]) -> Page:
    """The page.

    Args:
      report: as in the JSON file.
      tables: those that the terminal shows.
    """
    rows = [row for row in report["results"] if row["prefix_hit_rate"] is not None]
    names = ", ".join(Path(path).name for path in report["traces"])
    where = ", of its second part only" if report["counts_second_part_only"] else ""
    has_storage = any(row["storage"] for row in rows)
    bound = " The bound is that of a host tier without storage." if has_storage else ""
    sections = [
        Section("Hit rate by size and policy", f"Prefix hit rate of the host tier{where}.{bound}", _rate_charts(rows)),
        Section("Where prompt blocks came from", charts=_source_charts(rows)),
        Section("Over the trace", charts=_time_charts(report, rows)),
        Section("Copies and evictions", charts=_traffic_charts(rows)),
        Section("In numbers", tables=tables),
    ]
    return Page(
        f"Simulation of {names}: {report['num_requests']:,} requests",
        report["argv"],
        _subtitle(report),
        _figures(report, rows),
        report["notes"],
        [section for section in sections if section.charts or section.tables],
    )


def _subtitle(report: Mapping[str, Any]) -> str:
    hbm = f"HBM of {report['num_hbm_blocks']:,} blocks in front; " if report["num_hbm_blocks"] else "no HBM in front; "
    return f"{hbm}saved on {report['save_on']}, with TPU_OFFLOAD_SAVE_AFTER_SIGHTINGS={report['save_after_sightings']}"


def _figures(report: Mapping[str, Any], rows: Sequence[_Row]) -> list[Figure]:
    found = [
        Figure("prompt blocks", f"{report['num_blocks']:,}", f"{report['num_unique_blocks']:,} unique"),
    ]
    if rows and report["num_hbm_blocks"]:
        found.append(Figure("hit in HBM", f"{rows[0]['hbm_hit_rate']:.1%}"))
    default = [row for row in _default_rows(rows) if row["default"]]
    if default:
        largest = max(default, key=lambda row: int(row["num_chunks"]))
        size = f"{largest['num_chunks']:,} chunks, {largest['policy']}"
        found.append(Figure("hit in the largest host tier", f"{largest['prefix_hit_rate']:.1%}", size))
    shares = [share for row in default if (share := gap_share(rows, row)) is not None]
    if shares:
        note = f"from {BASE} to the bound, by {default[0]['policy']}: median of the sizes"
        found.append(Figure("gap closed", f"{statistics.median(shares):.0%}", note))
    return found


def _by_policy(rows: Sequence[_Row]) -> dict[str, list[_Row]]:
    """The rows of each line of a chart, by its name, in order of size."""
    several = has_several_stacks(rows)
    found: dict[str, list[_Row]] = {}
    for row in sorted(rows, key=lambda row: float(row["size_share"])):
        name = row["policy"] + (f" + {stack_of(row)}" if several and row["storage"] else "")
        name += " (the bound)" if row["policy"] == BOUND else " (default)" if row["default"] else ""
        found.setdefault(name, []).append(row)
    return found


def _look(number: int, row: _Row) -> dict[str, Any]:
    if row["policy"] == BOUND:
        return {"color": INK, "dash": "dash", "width": 1.6}
    return {"color": PALETTE[number % len(PALETTE)], "width": 3.6 if row["default"] else 1.6}


def _size_axis(rows: Sequence[_Row]) -> Axis:
    shares = sorted({100 * row["size_share"] for row in rows})
    return Axis("host tier, % of the unique blocks", log=True, marks=shares)


def _size_text(rows: Sequence[_Row]) -> list[str]:
    return [
        f"{row['num_chunks']:,} chunks" + (f", {row['nbytes'] / GB:,.3g} GB" if row["nbytes"] else "") for row in rows
    ]


def _size_series(name: str, rows: Sequence[_Row], values: Sequence[float | None], **look: Any) -> Series:
    return Series(name, [100 * row["size_share"] for row in rows], values, text=_size_text(rows), **look)


def _rate_charts(rows: Sequence[_Row]) -> list[Chart]:
    if not rows:
        return []
    named = _by_policy(rows)
    rates = [
        _size_series(name, mine, [100 * row["prefix_hit_rate"] for row in mine], **_look(number, mine[0]))
        for number, (name, mine) in enumerate(named.items())
    ]
    x = _size_axis(rows)
    charts = [lines("Prefix hit rate", rates, x=x, y=Axis("of prompt blocks", suffix=" %"), marks=True, tall=True)]
    gaps = []
    for number, (name, mine) in enumerate(named.items()):
        shares = [gap_share(rows, row) for row in mine]
        if mine[0]["policy"] not in (BASE, BOUND) and any(share is not None for share in shares):
            values = [None if share is None else 100 * max(share, -1.0) for share in shares]
            gaps.append(_size_series(name, mine, values, **_look(number, mine[0])))
    if gaps:
        title = f"Share of the gap from {BASE} to the bound"
        note = f"0 is {BASE}, 100 the bound; below -100 is drawn at -100."
        charts.append(lines(title, gaps, x=x, y=Axis("of the gap", suffix=" %"), note=note, marks=True, tall=True))
    return charts


def _default_rows(rows: Sequence[_Row]) -> list[_Row]:
    """The rows of one policy with one stack of storage: the default's, else those of the first."""
    played = [row for row in rows if row["policy"] != BOUND]
    chosen = [row for row in played if row["default"]] or played
    mine = [row for row in chosen if (row["policy"], stack_of(row)) == (chosen[0]["policy"], stack_of(chosen[0]))]
    return sorted(mine, key=lambda row: float(row["size_share"]))


def _source_charts(rows: Sequence[_Row]) -> list[Chart]:
    mine = _default_rows(rows)
    if not mine:
        return []
    several = has_several_stacks(rows)
    names = [f"{100 * row['size_share']:.3g} %" for row in mine]
    tiers = range(len(mine[0]["storage"]))
    parts = [("hit in HBM", [row["hbm_hit_rate"] for row in mine], SKY)]
    parts.append(("loaded from the host tier", [row["prefix_hit_rate"] for row in mine], GREEN))
    for tier in tiers:
        name = "read from storage" if len(tiers) == 1 else f"read from storage tier {tier}"
        parts.append((name, [row["storage"][tier]["hit_rate"] for row in mine], (PURPLE, ORANGE)[tier % 2]))
    computed = [1.0 - sum(values[i] for _, values, _ in parts) for i in range(len(mine))]
    series = [
        Series(name, names, [100 * value for value in values], color)
        for name, values, color in [*parts, ("computed", computed, RED)]
    ]
    title = f"Prompt blocks by source, {mine[0]['policy']}" + (f" + {stack_of(mine[0])}" if several else "")
    x = Axis("host tier, share of the unique blocks")
    return [stacked(title, series, x=x, y=Axis("of prompt blocks", suffix=" %"), text=_size_text(mine))]


def _time_charts(report: Mapping[str, Any], rows: Sequence[_Row]) -> list[Chart]:
    """The hit rate over the trace, at the size at which policies differ most."""
    if not rows:
        return []
    by_size: dict[int, list[_Row]] = {}
    for row in rows:
        by_size.setdefault(row["num_chunks"], []).append(row)
    rates = {
        size: [float(row["prefix_hit_rate"]) for row in mine if row["policy"] != BOUND] or [0.0]
        for size, mine in by_size.items()
    }
    spreads = {size: max(values) - min(values) for size, values in rates.items()}
    size = max(spreads, key=lambda size: spreads[size])
    middles = [(one + other) / 2 for one, other in itertools.pairwise(report["bins_s"])]
    series = [
        Series(
            name,
            middles,
            [None if rate is None else 100 * rate for rate in mine[0]["hit_rate_over_time"]],
            **_look(number, mine[0]),
        )
        for number, (name, mine) in enumerate(_by_policy(by_size[size]).items())
    ]
    title = f"Prefix hit rate of a host tier of {size:,} chunks"
    note = "The size at which the policies differ most. " if len(rates) > 1 and max(spreads.values()) > 0 else ""
    note += "All tiers start empty."
    x = Axis("seconds since the start of the trace")
    return [lines(title, series, x=x, y=Axis("of prompt blocks", suffix=" %"), note=note, marks=True, tall=True)]


def _traffic_charts(rows: Sequence[_Row]) -> list[Chart]:
    played = [row for row in rows if row["policy"] != BOUND]
    if not played:
        return []
    in_gb = played[0]["saved_nbytes"] is not None
    named, x = _by_policy(played), _size_axis(played)
    charts = []
    for title, column in (
        ("Saved", "saved_nbytes" if in_gb else "num_saved_chunks"),
        ("Loaded", "loaded_nbytes" if in_gb else "num_loaded_chunks"),
        ("Evicted", "num_evicted_chunks"),
    ):
        unit, scale = ("GB", GB) if column.endswith("_nbytes") else ("chunks", 1)
        series = [
            _size_series(name, mine, [row[column] / scale for row in mine], **_look(number, mine[0]))
            for number, (name, mine) in enumerate(named.items())
        ]
        charts.append(lines(title, series, x=x, y=Axis(unit), marks=True))
    return charts
