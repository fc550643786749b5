"""`tpu-offload top`: what a serving engine's host tier does, refreshed in the terminal."""

import time
from collections.abc import Sequence

import click
from rich.live import Live

from tpu_offload.cli.interrupts import INTERRUPTED, stop_on_interrupt
from tpu_offload.cli.options import Command, FiniteFloat, number, option
from tpu_offload.cli.tables import ReportConsole
from tpu_offload.cli.top_view import has_restarted, view
from tpu_offload.errors import InputError
from tpu_offload.monitoring.scrape import Scrape

_DEFAULT = "http://127.0.0.1:8000/metrics"
_WAKE_S = 0.1


@click.command(cls=Command)
@click.argument("url", metavar="URL", default=_DEFAULT)
@option("--interval", FiniteFloat(0.1, 3600), "S", "seconds between two readings (2)", default=2.0)
@number("--count", "stop after N readings; without, on Ctrl-C")
@click.pass_obj
def command(argv: Sequence[str], /, *, url: str, interval: float, count: int | None) -> int:
    """Shows hit rates, bytes, occupancy, drops and failures of a serving engine, from its metrics endpoint.

    URL is the endpoint (http://127.0.0.1:8000/metrics). Rates are of the last interval; the first reading has none.
    Status 0 after --count readings, 1 if the last one failed, 130 on Ctrl-C.
    """
    url = _with_path(url)
    last = first = Scrape.read(url)
    num_read, problem = 1, ""
    with (
        stop_on_interrupt() as stopped,
        Live(view(first, None, first, url=url), console=ReportConsole(), auto_refresh=False) as live,
    ):
        live.refresh()
        while count is None or num_read < count:
            end_s = time.monotonic() + interval
            while (left_s := end_s - time.monotonic()) > 0 and not stopped():
                time.sleep(min(left_s, _WAKE_S))
            if stopped():
                return INTERRUPTED
            num_read += 1
            try:
                now, problem = Scrape.read(url), ""
            except InputError as e:  # the engine restarts, or is busy: its last numbers stay
                problem = str(e)
                live.update(view(last, None, first, url=url, problem=problem), refresh=True)
                continue
            if has_restarted(now, last):
                first = Scrape(at_s=now.at_s, values={}, tiers={})  # all of its counts are new
            live.update(view(now, last, first, url=url), refresh=True)
            last = now
    if not live.console.is_terminal:
        live.console.line()  # on a terminal `Live` has ended it
    return 1 if problem else 0


def _with_path(url: str) -> str:
    """The address with `/metrics`, if it is a server's alone: `127.0.0.1:8000`, `http://host:8000/`."""
    if "://" not in url:
        url = f"http://{url}"
    scheme, _, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    return url if path else f"{scheme}://{host}{slash or '/'}metrics"
