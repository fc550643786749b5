"""What commands print: progress, tables from row specs, and the outcome of a comparison."""

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

_LINE_INTERVAL_S = 10.0  # between progress lines when stderr is not a terminal
_FORMATS: Mapping[str, Callable[[Any], str]] = {
    "": "{:,}".format,  # a count
    "id": "{}".format,  # without commas
    "narrow": lambda count: str(count) if count < 100_000 else f"{count / 1000:.0f}k",
    "s": lambda seconds: f"{seconds * 1e3:.1f} ms",
    "rate": "{:,.1f}".format,
    "whole": "{:,.0f}".format,  # a rate without decimals
    "share": "{:.3f}".format,
    "MiB": lambda nbytes: f"{nbytes / 2**20:.1f}",
    "GB": lambda nbytes: f"{nbytes / 2**30:.1f}",
    "GB/s": lambda nbytes_per_s: f"{nbytes_per_s / 1e9:.2f}",
}


class ReportConsole(Console):
    """Prints a report to standard output, wrapped to the width of a terminal, elsewhere unwrapped.

    A closed pipe (`| head`) raises BrokenPipeError; rich would exit with 1, which is a status of the commands.
    """

    def __init__(self) -> None:
        terminal = sys.stdout.isatty()
        super().__init__(soft_wrap=not terminal, width=None if terminal else 100)

    def on_broken_pipe(self) -> NoReturn:
        """See `rich.console.Console`; called by its handler of the error."""
        raise BrokenPipeError


@contextlib.contextmanager
def progress(num_requests: int | None, *, what: str = "requests") -> Iterator[Callable[[str], Callable[[], None]]]:
    """Shows the progress of runs: a bar on a terminal, elsewhere a line every ten seconds, and none before.

    Args:
      num_requests: requests in each run; None if unknown.
      what: the unit that is counted.

    Yields:
      A function to call with a run's name. It returns a function to call after each of that run's requests.
    """
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    # Refresh rarely: a refresh takes time from the runs that are measured.
    with Progress(
        *columns, console=console, disable=not console.is_terminal, transient=True, refresh_per_second=2
    ) as bars:

        def start(name: str) -> Callable[[], None]:
            task = bars.add_task(name, total=num_requests)
            num_finished = 0
            next_line_s = time.monotonic() + _LINE_INTERVAL_S

            def on_finish() -> None:
                nonlocal num_finished, next_line_s
                num_finished += 1
                bars.advance(task)
                if not console.is_terminal and time.monotonic() >= next_line_s:
                    next_line_s = time.monotonic() + _LINE_INTERVAL_S
                    of_all = "" if num_requests is None else f" of {num_requests}"
                    sys.stderr.write(f"{name}: {num_finished}{of_all} {what}\n")

            return on_finish

        yield start


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """A row of a table with a column for each side of a comparison.

    Attributes:
      label: text of the first column.
      value: path of the value in a side's numbers, see `at_path`; or several paths, or a function from the numbers to
        text.
      unit: unit of the values, see `format_number`.
      between: separator of several values.
      only_last: only the last side has this value.
    """

    label: str
    value: str | tuple[str, ...] | Callable[[Mapping[str, Any]], str]
    unit: str = ""
    between: str = " + "
    only_last: bool = False

    def cells(self, sides: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
        """The label and one cell for each side."""
        return self.label, *("" if self.only_last and side is not sides[-1] else self._text(side) for side in sides)

    def _text(self, side: Mapping[str, Any]) -> str:
        if callable(self.value):
            return self.value(side)
        paths = (self.value,) if isinstance(self.value, str) else self.value
        return self.between.join(format_number(at_path(side, path), self.unit) for path in paths)


def build_table(
    title: str, columns: Iterable[str | Column], lines: Iterable[Sequence[str] | None], *, left_title: bool = False
) -> Table:
    """A table with a column of labels and columns of numbers; a line that is None ends a section."""
    headers = (
        c if isinstance(c, Column) else Column(c, justify="right" if i else "left") for i, c in enumerate(columns)
    )
    table = Table(*headers, title=title, title_justify="left" if left_title else "center")
    for line in lines:
        if line is None:
            table.add_section()
        else:
            table.add_row(*line)
    return table


def at_path(numbers: Mapping[str, Any], path: str) -> Any:
    """The value at a path of keys separated by dots; None if there is none."""
    value: Any = numbers
    for key in path.split("."):
        value = None if value is None else value.get(key)
    return value


def format_number(value: float | None, unit: str) -> str:
    """Formats a number for a table; the unit is a key of `_FORMATS`."""
    return "-" if value is None else _FORMATS[unit](value)


def print_differences(console: Console, report: Mapping[str, Any]) -> None:
    """Prints the first ten of the `differences` between outputs."""
    for difference in report["differences"][:10]:
        console.print(difference["text"], highlight=False, markup=False)


def print_outcome(console: Console, report: Mapping[str, Any], *, same: str) -> int:
    """Prints the outcome of comparing the outputs; returns the exit status.

    Args:
      console: to print to.
      report: has `differences`, `num_compared` and `interrupted`.
      same: what was found identical, for the message.
    """
    print_differences(console, report)
    if report["differences"]:
        console.print(f"OUTPUTS DIFFER in {len(report['differences'])} of {report['num_compared']} requests.")
    elif report["num_compared"]:
        console.print(f"Outputs identical: {same}.")
    else:
        console.print("No request finished in both runs, so no output was compared.")
    if report["interrupted"]:
        console.print("Interrupted: the numbers cover the requests finished so far.")
    if report["differences"]:
        return 1
    return 130 if report["interrupted"] else 0
