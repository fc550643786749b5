"""What `tpu-offload tier` prints and writes."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Column

from tpu_offload.cli.tables import ReportConsole, build_table
from tpu_offload.storage import StoredRecord, Survey, Verdict, Verification

_MAX_ROWS = 40
_GB = 2**30  # as in the settings
_UNITS = (("d", 86400), ("h", 3600), ("min", 60))


def line_of(record: StoredRecord) -> str:
    """A line for a record, of fields separated by blanks: model, worker, generation, key, bytes, place."""
    of = record.generation
    key = record.key.hex() + ("..." if record.key_nbytes > len(record.key) else "")
    return f"{of.fingerprint} {of.worker_id} {of.name} {key} {record.nbytes} {record.place}\n"


def as_json(survey: Survey) -> dict[str, Any]:
    """What a scan has found."""
    return {
        "generations": [
            {
                "fingerprint": of.fingerprint,
                "worker_id": of.worker_id,
                "generation": of.name,
                "current": of.is_current,
                "num_chunks": holding.num_records,
                "nbytes": holding.nbytes,
                "oldest_s": holding.oldest_s,
                "newest_s": of.last_write_s if holding.newest_s is None else holding.newest_s,
            }
            for of, holding in sorted(
                survey.holdings.items(),
                key=lambda item: (item[0].fingerprint, item[0].worker_id, not item[0].is_current),
            )
        ],
        "num_chunks": survey.num_records,
        "nbytes": survey.nbytes,
        "num_foreign": survey.num_foreign,
        "foreign_nbytes": survey.foreign_nbytes,
        "damages": [{"place": damage.place, "reason": damage.what} for damage in survey.damages],
    }


def checks_as_json(verification: Verification) -> dict[str, Any]:
    """What the records were found to be."""
    counts = verification.counts
    return {
        "checked": {verdict.name.lower(): counts[verdict] for verdict in Verdict},
        "num_checked": counts.total(),
        "checked_nbytes": verification.nbytes,
        "num_damaged": sum(counts[verdict] for verdict in Verdict if verdict.is_damage),
        "suspects": [
            {"place": record.place, "key": record.key.hex(), "verdict": verdict.value, "reason": reason}
            for record, verdict, reason in verification.suspects
        ],
    }


def print_holdings(report: Mapping[str, Any]) -> None:
    """Prints a table of generations, and what else there is."""
    console = ReportConsole()
    headers = ("model", "worker", "generation", "state", "chunks", "GB", "oldest", "newest")
    numbers = {"worker", "chunks", "GB", "oldest", "newest"}
    columns = [Column(text, justify="right" if text in numbers else "left", no_wrap=True) for text in headers]
    rows = report["generations"]
    lines = [
        (
            f"{row['fingerprint'][:12]}...",
            str(row["worker_id"]),
            row["generation"],
            "current" if row["current"] else "left over",
            f"{row['num_chunks']:,}",
            _gb(row["nbytes"]),
            _age(row["oldest_s"]),
            _age(row["newest_s"]),
        )
        for row in rows[:_MAX_ROWS]
    ]
    console.print(
        f"{report['store']}: {report['num_chunks']:,} chunks, {_gb(report['nbytes'])} GB", markup=False, highlight=False
    )
    if rows:
        console.print(build_table("", columns, lines))
    if len(rows) > _MAX_ROWS:
        console.print(f"and {len(rows) - _MAX_ROWS:,} more generations: --json has all")
    if report["num_foreign"]:
        console.print(
            f"{report['num_foreign']:,} files or objects that no tier has written, {_gb(report['foreign_nbytes'])} GB"
        )
    print_damages(report)


def print_facts(facts: Sequence[Mapping[str, Any]]) -> None:
    """Prints what is known of workers, servers or a directory, a line each."""
    console = ReportConsole()
    for fact in facts:
        shown = (f"{_label(name)} {_value(name, value)}" for name, value in fact.items() if value is not None)
        console.print(", ".join(shown), markup=False, highlight=False)


def print_checks(report: Mapping[str, Any]) -> None:
    """Prints the counts of records by verdict, and the damaged ones."""
    console = ReportConsole()
    for suspect in report["suspects"][:_MAX_ROWS]:
        text = f"{suspect['verdict']}: {suspect['place']}: {suspect['reason']}"
        console.print(text, markup=False, highlight=False)
    if report["num_damaged"] > min(_MAX_ROWS, len(report["suspects"])):
        console.print(f"and {report['num_damaged'] - min(_MAX_ROWS, len(report['suspects'])):,} more")
    counts = ", ".join(f"{num:,} {Verdict[name.upper()].value}" for name, num in report["checked"].items() if num)
    console.print(f"Checked {report['num_checked']:,} records, {_gb(report['checked_nbytes'])} GB: {counts or 'none'}.")


def print_damages(report: Mapping[str, Any]) -> None:
    """Prints what is damaged beside records."""
    console = ReportConsole()
    for damage in report["damages"]:
        text = f"damaged: {damage['place']}: {damage['reason']}; an engine starts empty there"
        console.print(text, markup=False, highlight=False)


def _label(name: str) -> str:
    return name.removeprefix("num_").removesuffix("_nbytes").removesuffix("_s").removesuffix("_id").replace("_", " ")


def _value(name: str, value: Any) -> str:
    if name.endswith("_nbytes"):
        return f"{_gb(value)} GB"
    if name.endswith("_s"):
        return f"{_age(value)} ago"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _gb(nbytes: int) -> str:
    return f"{nbytes / _GB:,.2f}" if nbytes >= _GB // 100 or not nbytes else f"{nbytes / _GB:.6f}"


def _age(at_s: float | None) -> str:
    if at_s is None:
        return "-"
    seconds = max(0.0, time.time() - at_s)
    for unit, length in _UNITS:
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
