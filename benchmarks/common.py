"""Shared by all benchmarks: arguments, stopwatch, spreads, interleaving, environment and JSON file."""

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

from tpu_offload.native import is_compiled

PACKAGES = ("tpu_offload", "jax", "jaxlib", "libtpu", "numpy", "flax", "vllm-tpu", "tpu-inference")


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    """An argument parser with `--json` whose help is the benchmark's docstring."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=_new_file, help="write settings, environment and all figures to this file")
    return parser


def count(text: str) -> int:
    """Parses an integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}; expected an integer of at least 1")
    return int(text)


def _new_file(text: str) -> Path:
    path = Path(text)  # check now, because the run may take an hour
    if path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write {path}")
    return path


@dataclasses.dataclass(frozen=True, slots=True)
class Spread:
    """The distribution of a figure over all rounds."""

    median: float
    p10: float
    p90: float
    min: float
    max: float
    mean: float
    num: int

    @classmethod
    def of(cls, values: Iterable[float], *, scale: float = 1) -> Self:
        """Summarizes at least one value, each multiplied by `scale`."""
        some = sorted(value * scale for value in values)
        deciles = statistics.quantiles(some, n=10, method="inclusive") if len(some) > 1 else some * 9
        return cls(
            statistics.median(some), deciles[0], deciles[-1], some[0], some[-1], statistics.fmean(some), len(some)
        )

    def text(self, digits: int = 2) -> str:
        """Median and 10th to 90th percentile."""
        return f"{self.median:.{digits}f} ({self.p10:.{digits}f}-{self.p90:.{digits}f})"

    def range(self, digits: int = 2) -> str:
        """Median, minimum and maximum."""
        return f"{self.median:.{digits}f} ({self.min:.{digits}f}-{self.max:.{digits}f})"


class Stopwatch:
    """Collects durations of calls by name, in the order of the calls.

    Args:
      clock: seconds; `time.thread_time` excludes other processes.
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
        """Adds a name for the sums of other names, call by call."""
        self.seconds[name] = [sum(times) for times in zip(*(self.seconds[part] for part in parts), strict=True)]

    def ratio(self, name: str, other: str) -> Spread:
        """The ratio of two names, call by call, so that changes in machine load cancel."""
        return Spread.of(a / b for a, b in zip(self.seconds[name], self.seconds[other], strict=True))

    def spreads(self, *, scale: float) -> dict[str, Spread]:
        return {name: Spread.of(seconds, scale=scale) for name, seconds in self.seconds.items() if seconds}


def in_turn[T](items: Sequence[T], number: int) -> list[T]:
    """The order of a round: rotated from round to round, so that changes in machine load affect all items."""
    start = number % len(items)
    return [*items[start:], *items[:start]]


def print_table(
    title: str, headers: Sequence[str], rows: Iterable[Sequence[str] | None], *, num_labels: int = 1
) -> None:
    """Prints a table; a row that is None ends a section, and all columns after the labels are numbers."""
    from rich.console import Console
    from rich.table import Column

    from tpu_offload.cli.tables import build_table

    columns = [Column(header, justify="left" if i < num_labels else "right") for i, header in enumerate(headers)]
    Console(width=None if sys.stdout.isatty() else 240).print(build_table(title, columns, rows))


def environment() -> dict[str, Any]:
    """Versions and machine, and the devices if the benchmark uses jax."""
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
    return {
        "date": time.strftime("%Y-%m-%d"),
        "versions": versions,
        "is_compiled": is_compiled(),
        "device": device,
        **machine,
    }


def write_json(args: argparse.Namespace, *, question: str, **figures: Any) -> None:
    """Writes the measurements, and what is needed to repeat them, if `--json` is given."""
    if args.json is None:
        return
    about = {"question": question, "argv": sys.argv[1:], "settings": vars(args), **environment()}
    args.json.write_text(json.dumps(about | figures, indent=1, default=_plain) + "\n")


def _plain(value: Any) -> Any:
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else str(value)
