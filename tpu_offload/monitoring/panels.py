"""The parts of the dashboard, without Grafana's JSON: rows, panels and their queries; `rows` lists them."""

import dataclasses
import enum
from collections.abc import Sequence
from typing import final

from tpu_offload.monitoring.expressions import Expression, render

SELECTOR = '{model_name=~"$model",instance=~"$instance"}'
ENGINE = "{{instance}} {{engine}}"
TIER = "{{instance}} {{engine}} {{tier}}"


class Shape(enum.Enum):
    """How a panel draws; the value is Grafana's name of the panel type."""

    STAT = "stat"
    LINES = "timeseries"


class Unit(enum.Enum):
    """The unit of a panel's values; the value is Grafana's name of it."""

    SHARE = "percentunit"
    BYTES_PER_S = "Bps"
    SECONDS = "s"
    PER_S = "cps"
    COUNT = "short"


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Query:
    """One expression of a panel.

    Attributes:
      template: a template of `expressions`.
      legend: its name in the legend.
    """

    template: str
    legend: str

    @property
    def expression(self) -> Expression:
        """Its PromQL, for the engines that the dashboard's variables select."""
        return render(self.template, selector=SELECTOR)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel.

    Attributes:
      title: unique in the dashboard.
      help: what it shows, and which value is good.
      unit: of its values.
      queries: what it draws.
      shape: how.
      stacked: lines only: areas on top of each other.
      is_bad: stat only: the value from which it is red; None is never.
    """

    title: str
    help: str
    unit: Unit
    queries: Sequence[Query]
    shape: Shape = Shape.LINES
    stacked: bool = False
    is_bad: float | None = None


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of panels.

    Attributes:
      title: unique in the dashboard.
      panels: from left to right, then down.
      collapsed: whether it is closed at first.
    """

    title: str
    panels: Sequence[Panel]
    collapsed: bool = False


def rate(name: str, by: str = "") -> str:
    """Per second, summed over the selected engines, or for each value of labels."""
    return f"sum {f'by ({by}) ' if by else ''}(rate({{{name}}}[$__rate_interval]))"


def rate_of_engine(name: str) -> str:
    """Per second, of each engine."""
    return rate(name, "instance, engine")


def increase_of_engine(name: str) -> str:
    """How often in the interval between two points of the graph, of each engine."""
    return f"sum by (instance, engine) (increase({{{name}}}[$__rate_interval]))"


def gauge_of_engine(name: str) -> str:
    """The current value, of each engine."""
    return f"sum by (instance, engine) ({{{name}}})"


def rate_of_tier(name: str) -> str:
    """Per second, of each storage tier of each engine."""
    return rate(f"tier.{name}", "instance, engine, tier")


def gauge_of_tier(name: str) -> str:
    """The current value, of each storage tier of each engine."""
    return f"sum by (instance, engine, tier) ({{tier.{name}}})"


def quantile(q: float, bucket: str) -> str:
    """A quantile of a histogram over the selected engines."""
    return f"histogram_quantile({q}, sum by (le) (rate({{{bucket}}}[$__rate_interval])))"


def share(part: str, whole: str) -> str:
    """One rate divided by another, over the selected engines."""
    return f"{rate(part)} / {rate(whole)}"


def stat(title: str, text: str, unit: Unit, template: str, *, is_bad: float | None = None) -> Panel:
    """A panel with one number."""
    queries = (Query(template, title),)
    return Panel(title=title, help=text, unit=unit, queries=queries, shape=Shape.STAT, is_bad=is_bad)
