"""The page of `tpu-offload bench`, from the profile that it writes."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from tpu_offload.cli.html.charts import BLUE, GREEN, GREY, ORANGE, Axis, Chart, Series, lines, log_marks
from tpu_offload.cli.html.page import Figure, Page, Section, environment_line
from tpu_offload.config import CopyPath
from tpu_offload.types import Direction

_COLORS = {CopyPath.DIRECT: BLUE, CopyPath.STAGED: ORANGE, CopyPath.FUSED: GREEN}
_CHARTS = (
    ("Rate", "gb_per_s", 1.0, "GB/s", "Dashed: the limit, one contiguous copy of the same size."),
    ("Delay of the model", "delay_s", 1e3, "ms", "How much later model steps end because of the job."),
    ("Dispatch", "dispatch_s", 1e3, "ms", "Time that the engine's thread is busy."),
)

type _Figures = Mapping[str, Any]


def bench_page(profile: Mapping[str, Any], table: Table) -> Page:
    """The page.

    Args:
      profile: as in the JSON file.
      table: the one that the terminal shows.
    """
    bench = profile["bench"]
    geometry, figures, entry = bench["geometry"], bench["figures"], profile["entries"][0]
    sections = []
    for direction in Direction:
        mine = [one for one in figures if one["direction"] == direction.value]
        title = (
            f"{direction.value.capitalize()}s: "
            + {
                Direction.SAVE: "from HBM to host memory",
                Direction.LOAD: "from host memory to HBM",
            }[direction]
        )
        best = f"Recommended here: TPU_OFFLOAD_{direction.name}_PATH={entry[direction.value][0]}."
        sections.append(Section(title, f"{best} Bars are the 10th to the 90th percentile of rounds.", _charts(mine)))
    warnings = [f"{one['path']} {one['direction']}s failed: {one['error']}" for one in bench["failures"]]
    if bench["interrupted"]:
        warnings.append("Interrupted: the results cover what was measured until then.")
    return Page(
        f"Copies between {profile['device_kind']} and host memory",
        bench["argv"],
        f"{environment_line(bench)}; {bench['date']}",
        [
            Figure("a block", f"{geometry['block_nbytes'] / 2**20:.2f} MiB", f"{geometry['num_layers']} layers"),
            *(_best(figures, direction) for direction in Direction),
        ],
        warnings,
        [*sections, Section("In numbers", tables=[table])],
    )


def _best(figures: Sequence[_Figures], direction: Direction) -> Figure:
    rates = [
        (one["gb_per_s"]["median"], one)
        for one in figures
        if one["direction"] == direction.value and one["gb_per_s"] is not None
    ]
    if not rates:
        return Figure(f"fastest {direction.value}", "-")
    rate, one = max(rates, key=lambda pair: float(pair[0]))
    of_limit = f", {one['of_limit']['median']:.2f} of the limit" if one["of_limit"] else ""
    return Figure(
        f"fastest {direction.value}", f"{rate:.2f} GB/s", f"{one['path']}, {one['num_blocks']} blocks{of_limit}"
    )


def _charts(figures: Sequence[_Figures]) -> list[Chart]:
    charts = []
    sizes = sorted({one["num_blocks"] for one in figures})
    x = Axis("blocks of a job", log=True, marks=sizes)
    for title, name, scale, unit, note in _CHARTS:
        series = [_series(figures, path, name, scale) for path in CopyPath if _known(figures, path, name)]
        if name == "gb_per_s":
            limits = {one["num_blocks"]: one["limit_gb_per_s"]["median"] for one in figures}
            series.append(Series("limit", sizes, [limits[size] for size in sizes], GREY, dash="dash"))
        if not series:
            continue
        values = [value for one in series for value in one.y if value is not None]
        y = Axis(unit, log=name != "gb_per_s", marks=log_marks(values) if name != "gb_per_s" else None)
        charts.append(lines(title, series, x=x, y=y, note=note, marks=True))
    return charts


def _known(figures: Sequence[_Figures], path: CopyPath, name: str) -> list[_Figures]:
    found = [one for one in figures if one["path"] == path.value and one[name] is not None]
    return sorted(found, key=lambda one: int(one["num_blocks"]))


def _series(figures: Sequence[_Figures], path: CopyPath, name: str, scale: float) -> Series:
    mine = _known(figures, path, name)
    return Series(
        path.value,
        [one["num_blocks"] for one in mine],
        [scale * one[name]["median"] for one in mine],
        _COLORS[path],
        low=[scale * one[name]["p10"] for one in mine],
        high=[scale * one[name]["p90"] for one in mine],
    )
