"""What a command prints: reports, and progress while it runs."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

_LINE_INTERVAL_S = 10.0  # between lines where there is no terminal for a bar


class ReportConsole(Console):
    """Prints a report to standard output: to a terminal at its width, elsewhere in lines of any length.

    A reader that goes away (`| head`) is a BrokenPipeError, for the caller to tell from the exit status
    of a command that has something to say; rich would exit with 1.
    """

    def __init__(self) -> None:
        terminal = sys.stdout.isatty()
        super().__init__(soft_wrap=not terminal, width=None if terminal else 100)

    def on_broken_pipe(self) -> NoReturn:
        """See `rich.console.Console`; called where the error is handled."""
        raise BrokenPipeError


@contextlib.contextmanager
def progress(num_requests: int | None, *, what: str = "requests") -> Iterator[Callable[[str], Callable[[], None]]]:
    """Shows how far runs are: a bar on a terminal, elsewhere a line at times.

    Args:
      num_requests: of each run; None if nobody knows.
      what: what is counted, if not requests.

    Yields:
      A function to call with a run's name; it returns one to call after each of the run's requests.
    """
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    # Few refreshes: they take time from the runs that are measured.
    with Progress(
        *columns, console=console, disable=not console.is_terminal, transient=True, refresh_per_second=2
    ) as bars:

        def start(name: str) -> Callable[[], None]:
            task = bars.add_task(name, total=num_requests)
            num_finished = 0
            next_line_s = 0.0

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
