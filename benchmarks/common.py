"""What benchmarks share: arguments, a stopwatch, spreads, the order of rounds, the environment and the JSON file."""

import argparse
import dataclasses
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Self

PACKAGES = ("tpu_offload", "jax", "jaxlib", "libtpu", "numpy", "flax", "vllm-tpu", "tpu-inference")


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the benchmark's docstring; it has `--json`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=_new_file, help="write settings, environment and all figures to this file")
    return parser


def count(text: str) -> int:
    """An argument that is a whole number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}; expected a whole number from 1 on")
    return int(text)


def _new_file(text: str) -> Path:
    path = Path(text)  # checked now, because the run may take an hour
    if path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write {path}")
    return path


@dataclasses.dataclass(frozen=True, slots=True)
class Spread:
    """A figure over all rounds."""

    median: float
    p10: float
    p90: float
    min: float
    max: float
    mean: float
    num: int

    @classmethod
    def of(cls, values: Iterable[float], *, scale: float = 1) -> Self:
        """Of values, at least one, each multiplied by `scale`."""
        some = sorted(value * scale for value in values)
        deciles = statistics.quantiles(some, n=10, method="inclusive") if len(some) > 1 else some * 9
        return cls(
            statistics.median(some), deciles[0], deciles[-1], some[0], some[-1], statistics.fmean(some), len(some)
        )

    def text(self, digits: int = 2) -> str:
        """Median, and the 10th to the 90th percentile."""
        return f"{self.median:.{digits}f} ({self.p10:.{digits}f}-{self.p90:.{digits}f})"

    def range(self, digits: int = 2) -> str:
        """Median, and the least to the most."""
        return f"{self.median:.{digits}f} ({self.min:.{digits}f}-{self.max:.{digits}f})"


class Stopwatch:
    """Collects seconds of calls under names; the seconds of one name stand in the order of its calls.

    Args:
      clock: seconds; `time.thread_time` leaves other programs on the machine out.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.seconds: dict[str, list[float]] = {}

    def __call__[**P, T](self, name: str, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        start_s = self.clock()
        result = function(*args, **kwargs)
        self.record(name, self.clock() - start_s)
        return result

    def record(self, name: str, seconds: float) -> None:
        self.seconds.setdefault(name, []).append(seconds)

    def add(self, name: str, *parts: str) -> None:
        """A name for the sums of others that were called equally often."""
        self.seconds[name] = [sum(times) for times in zip(*(self.seconds[part] for part in parts), strict=True)]

    def ratio(self, name: str, other: str) -> Spread:
        """Of the seconds of two names, call by call, so that a machine that slows down slows both sides."""
        return Spread.of(a / b for a, b in zip(self.seconds[name], self.seconds[other], strict=True))

    def spreads(self, *, scale: float) -> dict[str, Spread]:
        return {name: Spread.of(seconds, scale=scale) for name, seconds in self.seconds.items() if seconds}


def in_turn[T](items: Sequence[T], number: int) -> list[T]:
    """The order of a round: each has another one begin, so that what slows the machine slows all of them."""
    start = number % len(items)
    return [*items[start:], *items[:start]]


def print_table(
    title: str, headers: Sequence[str], rows: Iterable[Sequence[str] | None], *, num_labels: int = 1
) -> None:
    """Prints a table; a row that is None ends a section, and all but the first columns are numbers."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for i, header in enumerate(headers):
        table.add_column(header, justify="left" if i < num_labels else "right")
    for row in rows:
        if row is None:
            table.add_section()
        else:
            table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 240).print(table)


def environment() -> dict[str, Any]:
    """Versions and machine; the devices too if the benchmark uses jax."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    device: dict[str, Any] = {"platform": "cpu", "kind": platform.processor() or platform.machine(), "count": 1}
    if "jax" in sys.modules:
        devices = sys.modules["jax"].devices()
        device = {"platform": devices[0].platform, "kind": devices[0].device_kind, "count": len(devices)}
    machine = {"num_cpus": os.cpu_count(), "load_average": os.getloadavg()}
    return {"date": time.strftime("%Y-%m-%d"), "versions": versions, "device": device, **machine}


def write_json(args: argparse.Namespace, *, question: str, **figures: Any) -> None:
    """Writes what was measured, with what is needed to repeat it, if `--json` is given."""
    if args.json is None:
        return
    about = {"question": question, "argv": sys.argv[1:], "settings": vars(args), **environment()}
    args.json.write_text(json.dumps(about | figures, indent=1, default=_plain) + "\n")


def _plain(value: Any) -> Any:
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else str(value)
