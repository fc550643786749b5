"""A page of figures, charts and tables as one HTML file, with the charts' library inside."""

import dataclasses
import itertools
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

from tpu_offload.cli.html.charts import Chart

if TYPE_CHECKING:
    from rich.table import Table


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Figure:
    """A number at the top of a page: what it is, the number, and a remark."""

    label: str
    value: str
    note: str = ""


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Section:
    """A part of a page under its own heading.

    Attributes:
      title: the heading.
      text: a paragraph before the charts.
      charts: the charts.
      tables: tables as in the terminal.
      code: a command to copy.
    """

    title: str
    text: str = ""
    charts: Sequence[Chart] = ()
    tables: "Sequence[Table]" = ()
    code: str = ""


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Page:
    """A page.

    Attributes:
      title: what was run.
      argv: the arguments that the command was given.
      subtitle: what it ran on or simulated; may be empty.
      figures: the numbers at the top.
      warnings: what a reader must know first.
      sections: the parts.
    """

    title: str
    argv: Sequence[str]
    subtitle: str
    figures: Sequence[Figure]
    warnings: Sequence[str]
    sections: Sequence[Section]

    def render(self) -> bytes:
        """The file. Equal pages give equal files."""
        import jinja2
        from plotly.offline import get_plotlyjs

        loader = jinja2.PackageLoader("tpu_offload.cli.html", "")
        environment = jinja2.Environment(
            loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
        )
        numbers = itertools.count()
        sections = [(section, [(next(numbers), chart) for chart in section.charts]) for section in self.sections]
        return (
            environment.get_template("page.html.jinja")
            .render(
                page=self,
                command=shlex.join(["tpu-offload", *self.argv]),
                sections=sections,
                specs=[chart.spec for _, charts in sections for _, chart in charts],
                plotly_js=get_plotlyjs(),
                columns_of=_columns_of,
                rows_of=_rows_of,
            )
            .encode(errors="backslashreplace")  # a name with bytes that are no text
        )


def environment_line(report: Mapping[str, Any]) -> str:
    """Device and versions, from what `measure.environment` puts into a report; empty without."""
    if "device" not in report:
        return ""
    device = report["device"]
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    return f"{device['count']} x {device['kind']}; {versions}"


def _columns_of(table: "Table") -> list[Any]:
    return [_plain(column.header) for column in table.columns]


def _rows_of(table: "Table") -> list[tuple[str, ...]]:
    return list(zip(*([_plain(cell) for cell in column.cells] for column in table.columns), strict=True))


def _plain(text: object) -> str:
    """A cell without rich's markup."""
    from rich.text import Text

    return text.plain if isinstance(text, Text) else Text.from_markup(str(text)).plain
