"""Report of a soak: numbers of the rounds for the JSON file, a table, and the verdict."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.soak.container_census import SizeHistory
from tests.soak.faults import STORAGE_FAULTS, Fault
from tpu_offload.cli.tables import build_table, print_differences
from tpu_offload.replay.comparison import outcome

MAX_GROWTH_MIB = 5.0
"""Growth of the process over the second half of a soak that still counts as flat, because allocators fluctuate."""

_MIB = 2**20
_MOST_POINTS = 300  # most points for fitting a line, which takes quadratic time
_COUNTS = (
    "num_steps",
    "num_preemptions",
    "num_swapped_out",
    "num_swapped_in",
    "num_lost_swaps",
    "saved_blocks",
    "loaded_blocks",
    "num_evicted_chunks",
    "dropped_save_blocks",
    "dropped_load_blocks",
    "num_failed_jobs",
    "num_timed_out_jobs",
    "num_ignored_results",
    "num_lost_results",
    "num_breaker_openings",
    "num_cache_losses",
)
_STORAGE_COUNTS = (
    "cascaded_chunks", "promoted_chunks", "failed_storage_chunks", "num_evicted_storage_chunks",
    "dropped_cascade_chunks", "dropped_demotion_chunks", "num_dropped_promotions",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Round:
    """One engine served the workload once, completely or partly.

    Attributes:
      engine: name of the engine.
      num_requests: finished requests.
      num_compared: finished requests that the baseline finished too.
      differences: requests that differ.
      num_jobs_left: unfinished jobs after the round, when the engine was idle, and slots of the host tier still in
        quarantine.
      error: why the soak cannot continue; empty if it can.
      at_s: end of the round, in seconds since the start.
      rss_nbytes: memory of the process after the round.
      num_entries: entries of all tables of all engines after the round.
    """

    engine: str
    num_requests: int
    num_compared: int
    differences: tuple[dict[str, Any], ...]
    num_jobs_left: int
    error: str
    at_s: float = 0.0
    rss_nbytes: int = 0
    num_entries: int = 0


def numbers(rounds: Sequence[Round], tables: SizeHistory) -> dict[str, Any]:
    """Numbers of all rounds for the JSON file."""
    differences = [difference for done in rounds for difference in done.differences]
    return {
        "num_rounds": len(rounds),
        "wall_s": rounds[-1].at_s if rounds else 0.0,
        "num_requests": sum(done.num_requests for done in rounds),
        **outcome(differences, sum(done.num_compared for done in rounds)),
        "memory": _memory(rounds),
        "num_tables": tables.num_containers,
        "largest_tables": tables.largest(10),
        "grown_tables": tables.grown(),
        "num_jobs_left": max((done.num_jobs_left for done in rounds), default=0),
        "errors": [done.error for done in rounds if done.error],
        "rounds": [dataclasses.asdict(done) for done in rounds],
    }


def _memory(rounds: Sequence[Round]) -> dict[str, Any]:
    """Memory of the process, and its growth over the second half by a robust line fit."""
    if not rounds:
        return {"flat": None, "growth_mib": None, "growth_mib_per_1000_requests": None}
    half = rounds[len(rounds) // 2 :]
    points = [(done.at_s, done.rss_nbytes / _MIB) for done in half]
    points = points[:: -(-len(points) // _MOST_POINTS)]
    slopes = [
        (one[1] - other[1]) / (one[0] - other[0])
        for i, one in enumerate(points)
        for other in points[:i]
        if one[0] > other[0]
    ]
    growth = statistics.median(slopes) * (points[-1][0] - points[0][0]) if slopes else None
    num_requests = sum(done.num_requests for done in half[1:])
    return {
        "start_mib": rounds[0].rss_nbytes / _MIB,
        "half_mib": half[0].rss_nbytes / _MIB,
        "end_mib": rounds[-1].rss_nbytes / _MIB,
        "growth_mib": growth,
        "growth_mib_per_1000_requests": None if growth is None or not num_requests else growth * 1000 / num_requests,
        "limit_mib": MAX_GROWTH_MIB,
        "flat": None if growth is None else growth <= MAX_GROWTH_MIB,
    }


def failures(report: Mapping[str, Any]) -> list[str]:
    """The failed checks, in words; empty if all passed."""
    found = []
    if report["differences"]:
        found.append(f"outputs differ in {len(report['differences'])} of {report['num_compared']} requests")
    if report["errors"]:
        found.append("an engine crashed or hangs")
    if report["memory"]["flat"] is False:
        memory = report["memory"]
        found.append(f"memory grew by {memory['growth_mib']:.1f} MiB, more than {memory['limit_mib']:g}")
    found += [f"{path} grew from {text}" for path, text in report["grown_tables"].items()]
    if report["num_jobs_left"]:
        found.append(f"{report['num_jobs_left']} jobs or slots were not released when an engine was idle")
    return found


def print_report(console: Console, report: Mapping[str, Any]) -> int:
    """Prints the tables and the verdict; returns the exit status."""
    console.print(_table(report))
    for error in report["errors"]:
        console.print(error, highlight=False, markup=False)
    print_differences(console, report)
    found = failures(report)
    if report["interrupted"]:
        console.print("Interrupted: the numbers cover the rounds so far.")
    if found:
        console.print(f"SOAK FAILED: {'; '.join(found)}.", highlight=False, markup=False)
        return 1
    if not report["num_compared"]:
        console.print("No request finished in both runs, so nothing was compared.")
    else:
        console.print(f"Soak passed: {_verdict(report)}.", highlight=False, markup=False)
    return 130 if report["interrupted"] else 0


def _verdict(report: Mapping[str, Any]) -> str:
    growth, num_faults = report["memory"]["growth_mib"], sum(report["faults"].values())
    parts = [
        f"{report['num_compared']:,} requests with the tokens of the baseline under {num_faults:,} faults",
        "too short to check memory" if growth is None else f"memory {growth:+.1f} MiB over the second half",
        f"none of {report['num_tables']} tables grew" if report["num_rounds"] >= 12 else "too short to check tables",
    ]
    return ", ".join(parts)


def _table(report: Mapping[str, Any]) -> Table:
    workload, memory = report["workload"], report["memory"]
    names = _COUNTS + (_STORAGE_COUNTS if report["storage"] else ())
    counts = {name: sum(engine.get(name, 0) for engine in report["engines"].values()) for name in names}
    lines: list[Sequence[str] | None] = [
        (fault, f"{count:,}")
        for fault, count in report["faults"].items()
        if report["storage"] or Fault(fault) not in STORAGE_FAULTS
    ]
    lines.append(None)
    lines += [(name.removeprefix("num_").replace("_", " "), f"{count:,}") for name, count in counts.items()]
    lines.append(None)
    if memory["growth_mib"] is not None:
        sizes = " -> ".join(f"{memory[name]:.0f}" for name in ("start_mib", "half_mib", "end_mib"))
        per_1000 = memory["growth_mib_per_1000_requests"]
        lines += [
            ("memory after the first round -> at half time -> at the end, MiB", sizes),
            ("growth over the second half, MiB", f"{memory['growth_mib']:+.2f}"),
            ("  per 1000 requests", "-" if per_1000 is None else f"{per_1000:+.3f}"),
        ]
    lines += [(f"entries of {path}", f"{size:,}") for path, size in list(report["largest_tables"].items())[:5]]
    title = (
        f"{workload['name']}: {workload['num_requests']} requests per round,  {report['num_rounds']} rounds in "
        f"{report['wall_s']:.0f} s, {report['num_requests']:,} requests"
    )
    return build_table(title, ("", "all engines"), lines)
