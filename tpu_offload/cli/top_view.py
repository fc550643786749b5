"""The table that `tpu-offload top` shows."""

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.text import Text

from tpu_offload.cli.tables import build_table
from tpu_offload.monitoring.scrape import Scrape

_MIB = 2**20
# What should stay at 0, by field and how the table calls it.
_FAULTS = (
    ("num_failed_jobs", "failed copies"),
    ("num_timed_out_jobs", "of these, timed out"),
    ("dropped_save_blocks", "blocks never saved"),
    ("num_dropped_checkpoints", "checkpoints never saved"),
    ("dropped_load_blocks", "blocks computed for lack of room"),
    ("failed_storage_chunks", "failed storage chunks"),
    ("dropped_cascade_chunks", "chunks never written to storage"),
    ("dropped_demotion_chunks", "evicted chunks never written"),
    ("num_lost_results", "lost results"),
    ("num_rejected_reports", "rejected reports"),
    ("num_worker_restarts", "worker restarts"),
)
_COUNTERS = ("looked_up_tokens", "saved_nbytes", "loaded_nbytes", *(field for field, _ in _FAULTS))


class _Change:
    """Two readings: totals, and rates between them."""

    def __init__(self, now: Scrape, before: Scrape | None) -> None:
        self._now, self._before = now, before

    def total(self, field: str) -> float:
        return self._now.values.get(field, 0.0)

    def grown(self, field: str) -> float | None:
        """By how much it has grown; None without an earlier reading, or if the engine has restarted."""
        if self._before is None:
            return None
        grown = self.total(field) - self._before.values.get(field, 0.0)
        return grown if grown >= 0 else None

    def rate(self, field: str, *, by: float = 1.0, digits: int = 0) -> str:
        """Its growth a second."""
        grown = self.grown(field)
        if grown is None or self._before is None or self._now.at_s <= self._before.at_s:
            return "-"
        return f"{grown / by / (self._now.at_s - self._before.at_s):,.{digits}f}"

    def share(self, part: str, whole: str) -> str:
        """What of one counter another is, since the earlier reading."""
        grown, of = self.grown(part), self.grown(whole)
        return f"{grown / of:.1%}" if grown is not None and of else "-"


def has_restarted(now: Scrape, before: Scrape) -> bool:
    """Whether the engine was started between two readings: a counter is smaller than it was."""
    return any(now.values.get(field, 0.0) < before.values.get(field, 0.0) for field in _COUNTERS)


def view(now: Scrape, before: Scrape | None, first: Scrape, *, url: str, problem: str = "") -> RenderableType:
    """The table of one reading, what is wrong first: a terminal may be too short for all of it.

    Args:
      now: the reading.
      before: the one before, for rates; None if there is none.
      first: the first one, for what has happened since.
      url: of the endpoint.
      problem: why there is no newer reading; empty if this is one.
    """
    last, whole = _Change(now, before), _Change(now, None)
    saved, loaded = (f"{whole.total(field) / _MIB:,.0f} MiB" for field in ("saved_nbytes", "loaded_nbytes"))
    lines: list[Sequence[str] | None] = [
        *_faults(now, first),
        None,
        ("hit rate of HBM's prefix cache", *_rates(last, now, "vllm.prefix_cache_hits", "vllm.prefix_cache_queries")),
        ("hit rate of the host tier, behind it", *_rates(last, now, "found_tokens", "looked_up_tokens")),
        ("tokens loaded a second", last.rate("loaded_tokens"), f"{whole.total('loaded_tokens'):,.0f}"),
        ("saved, MiB/s", last.rate("saved_nbytes", by=_MIB, digits=1), saved),
        ("loaded, MiB/s", last.rate("loaded_nbytes", by=_MIB, digits=1), loaded),
        None,
        ("chunks in the host tier", "", _of(whole, "num_resident_chunks", "num_host_chunks")),
        ("evicted a second", last.rate("num_evicted_chunks", digits=1), f"{whole.total('num_evicted_chunks'):,.0f}"),
        ("staging blocks in use (peak)", "", _of(whole, "staging_reserved_blocks", "staging_budget_blocks", peak=True)),
        ("copies in flight", "", f"{whole.total('num_jobs_in_flight'):,.0f}"),
    ]
    if now.values.get("num_host_states"):
        lines.append(("states in the host tier", "", _of(whole, "num_states", "num_host_states")))
    for tier, numbers in sorted(now.tiers.items()):
        lines += [None, *_tier_lines(tier, numbers)]
    table = build_table(escape(url), ("", "last interval", "since start, or now"), lines, left_title=True)
    return Group(Text(problem), table) if problem else table


def _faults(now: Scrape, first: Scrape) -> list[Sequence[str]]:
    """What should not happen and did, with what is new since the first reading."""
    since = _Change(now, first)
    lines: list[Sequence[str]] = []
    if number := now.values.get("num_open_breakers"):
        lines.append(("KINDS OF COPIES SUSPENDED", "", f"{number:,.0f}"))
    for field, name in _FAULTS:
        if total := now.values.get(field):
            new = since.grown(field)
            lines.append((name, "", f"{total:,.0f}" + (f" (+{new:,.0f} since this began)" if new else "")))
    return lines or [("failures, losses and drops", "", "none")]


def _rates(last: _Change, now: Scrape, part: str, whole: str) -> tuple[str, str]:
    of = now.values.get(whole, 0.0)
    return last.share(part, whole), f"{now.values.get(part, 0.0) / of:.1%}" if of else "-"


def _of(numbers: _Change, part: str, whole: str, *, peak: bool = False) -> str:
    most = f" ({numbers.total('staging_peak_blocks'):,.0f})" if peak else ""
    return f"{numbers.total(part):,.0f}{most} of {numbers.total(whole):,.0f}"


def _tier_lines(tier: str, numbers: Mapping[str, float]) -> list[Sequence[str]]:
    labels = {field: field.removeprefix("num_").replace("_", " ") for field in sorted(numbers) if numbers[field]}
    return [(f"tier {escape(tier)}: {label}", "", f"{numbers[field]:,.0f}") for field, label in labels.items()]
