"""Charts, as Plotly draws them: lines, points, stacked bars, distributions.

Colours are those of Okabe and Ito, "Color Universal Design", which people with any colour vision tell apart.
"""

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any, final

BLUE, GREEN, ORANGE, RED, PURPLE, SKY, YELLOW, GREY = (
    "#0072B2", "#009E73", "#E69F00", "#D55E00", "#CC79A7", "#56B4E9", "#B8A900", "#7A8088",
)  # fmt: skip
INK = "#1a1c1f"
PALETTE = BLUE, ORANGE, GREEN, PURPLE, SKY, RED, YELLOW
MAX_POINTS = 4000
"""Points of one series that a chart shows; of more, every second, third, ... is drawn."""

_FEW = 50  # values, of which each has a mark: a line of one value is nothing
_FONT = {"family": "system-ui, sans-serif", "size": 12.5, "color": INK}
_GRID = {"gridcolor": "#e6e9ed", "zerolinecolor": "#c8cdd4", "linecolor": "#c8cdd4", "automargin": True}


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Series:
    """A named row of values.

    Attributes:
      name: in the legend.
      x, y: the values; None in `y` is a gap.
      color: of line and marks.
      dash: of the line: solid, dash, dot.
      width: of the line.
      text: of each point, shown when it is pointed at.
      low, high: ends of the bar of spread around each `y`.
    """

    name: str
    x: Sequence[Any]
    y: Sequence[float | None]
    color: str
    dash: str = "solid"
    width: float = 2.0
    text: Sequence[str] = ()
    low: Sequence[float] = ()
    high: Sequence[float] = ()


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Axis:
    """An axis: its title with the unit, whether it is logarithmic, and where it has marks (None: as Plotly decides)."""

    title: str
    log: bool = False
    marks: Sequence[float] | None = None
    suffix: str = ""

    def layout(self, *, from_zero: bool) -> dict[str, Any]:
        """The axis in Plotly's layout."""
        found: dict[str, Any] = {**_GRID, "title": {"text": self.title}, "ticksuffix": self.suffix}
        if self.log:
            found["type"] = "log"
        elif from_zero:
            found["rangemode"] = "tozero"
        if self.marks is not None:
            found |= {
                "tickmode": "array",
                "tickvals": list(self.marks),
                "ticktext": [short(mark) for mark in self.marks],
            }
        return found


def short(value: float) -> str:
    """A number of at most three digits, never with an exponent above 0.001: 0.52, 690, 8192, 131k, 2M."""
    for unit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if round(value) >= max(unit, 10_000) or (suffix != "k" and round(value, -3) >= unit):
            return f"{value / unit:.3g}{suffix}"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Chart:
    """A chart: its title, a sentence on how to read it, and what Plotly draws."""

    title: str
    spec: dict[str, Any]
    note: str = ""
    tall: bool = False


def lines(
    title: str, series: Sequence[Series], *, x: Axis, y: Axis, note: str = "", marks: bool = False, tall: bool = False
) -> Chart:
    """Lines through points; with `marks` each point has one."""
    return _drawn(title, series, x, y, note, mode="lines+markers" if marks else "lines", tall=tall)


def steps(title: str, series: Sequence[Series], *, x: Axis, y: Axis, note: str = "") -> Chart:
    """Lines that keep each value until the next point."""
    return _drawn(title, series, x, y, note, mode="lines", shape="hv")


def points(title: str, series: Sequence[Series], *, x: Axis, y: Axis, note: str = "") -> Chart:
    """Points without lines."""
    drawn = []
    for one in series:
        step = -(-len(one.x) // MAX_POINTS) or 1
        drawn.append(dataclasses.replace(one, x=one.x[::step], y=one.y[::step], text=one.text[::step]))
        if step > 1:
            note = f"{note} {one.name}: one point of {step} is drawn.".strip()
    return _drawn(title, drawn, x, y, note, mode="markers")


def stacked(
    title: str, series: Sequence[Series], *, x: Axis, y: Axis, note: str = "", text: Sequence[str] = ()
) -> Chart:
    """Bars on top of each other; all series have the same `x`. `text` is shown when a bar is pointed at."""
    import plotly.graph_objects as go

    figure = go.Figure(layout=_layout(x, y, num_series=len(series)) | {"barmode": "stack", "bargap": 0.05})
    if any(isinstance(value, str) for one in series for value in one.x):
        figure.update_xaxes(type="category")  # "5 %" would be the number 5
        figure.update_layout(bargap=0.35)
    for one in series:
        figure.add_trace(
            go.Bar(name=one.name, x=list(one.x), y=list(one.y), marker={"color": one.color}, hovertext=list(text))
        )
    return Chart(title, _spec(figure), note)


def distribution(title: str, series: Sequence[Series], *, x: Axis, note: str = "") -> Chart:
    """The share of values up to each one; the values are in `x`, in any order, and `y` is not used."""
    drawn = []
    for one in series:
        values = sorted(one.x)
        shares = [100 * (i + 1) / len(values) for i in range(len(values))]
        step = -(-len(values) // MAX_POINTS) or 1  # from the end, so that the largest value stays
        drawn.append(dataclasses.replace(one, x=values[::-1][::step][::-1], y=shares[::-1][::step][::-1]))
    if x.log and x.marks is None:
        x = dataclasses.replace(x, marks=log_marks([value for one in drawn for value in one.x]))
    mode = "lines" if min((len(one.x) for one in drawn), default=0) >= _FEW else "lines+markers"
    return _drawn(title, drawn, x, Axis("requests up to it", suffix=" %"), note, mode=mode, shape="hv")


def log_marks(values: Sequence[float]) -> list[float]:
    """1, 2 and 5 times the powers of ten around positive values: marks of a logarithmic axis."""
    positive = [value for value in values if value > 0]
    if not positive:
        return []
    powers = range(math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive))) + 1)
    return [digit * 10.0**power for power in powers for digit in (1, 2, 5)]


def _drawn(
    title: str,
    series: Sequence[Series],
    x: Axis,
    y: Axis,
    note: str,
    *,
    mode: str,
    shape: str = "linear",
    tall: bool = False,
) -> Chart:
    import plotly.graph_objects as go

    figure = go.Figure(layout=_layout(x, y, num_series=len(series)))
    for one in series:
        trace = go.Scatter(
            name=one.name,
            x=list(one.x),
            y=list(one.y),
            mode=mode,
            line={"color": one.color, "dash": one.dash, "width": one.width, "shape": shape},
            marker={"color": one.color, "size": 6, "opacity": 0.75},
        )
        if one.text:
            trace.hovertext = list(one.text)
        if one.high:
            known = [(value or 0.0, low, high) for value, low, high in zip(one.y, one.low, one.high, strict=True)]
            trace.error_y = {
                "type": "data",
                "symmetric": False,
                "array": [high - value for value, _, high in known],
                "arrayminus": [value - low for value, low, _ in known],
                "thickness": 1.2,
            }
        figure.add_trace(trace)
    return Chart(title, _spec(figure), note, tall)


def _layout(x: Axis, y: Axis, *, num_series: int) -> dict[str, Any]:
    return {
        "template": "none",
        "font": _FONT,
        "margin": {"l": 60, "r": 16, "t": 60, "b": 48},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "hovermode": "closest",
        "hoverlabel": {"font": _FONT},
        "showlegend": num_series > 1,
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": "#9aa1aa", "activecolor": INK},
        "xaxis": x.layout(from_zero=False),
        "yaxis": y.layout(from_zero=True),
    }


def _spec(figure: Any) -> dict[str, Any]:
    spec: dict[str, Any] = json.loads(figure.to_json())
    spec["layout"].pop("template", None)  # Plotly's default look, large, and of no use here
    return spec
