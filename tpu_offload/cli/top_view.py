"""The table that `tpu-offload top` shows."""

from collections.abc import Mapping, Sequence

from rich.table import Table

from tpu_offload.cli.report import build_table
from tpu_offload.monitoring.scrape import Scrape

_MIB = 2**20
# What should stay at 0, by field and how the table calls it.
_FAULTS = (
    ("num_failed_jobs", "failed copies"),
    ("num_timed_out_jobs", "of these, timed out"),
    ("dropped_save_blocks", "blocks never saved"),
    ("dropped_load_blocks", "blocks computed for lack of room"),
    ("num_lost_results", "lost reports"),
    ("num_worker_restarts", "worker restarts"),
)


class _Change:
    """Two readings: totals, and rates between them."""

    def __init__(self, now: Scrape, before: Scrape | None) -> None:
        self._now, self._before = now, before

    def total(self, field: str) -> float:
        return self._now.values.get(field, 0.0)

    def grown(self, field: str) -> float | None:
        """By how much it has grown; None without an earlier reading, or if the engine has started anew."""
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


def view(now: Scrape, before: Scrape | None, first: Scrape, *, url: str) -> Table:
    """The table of one reading.

    Args:
      now: the reading.
      before: the one before, for rates; None if there is none.
      first: the first one, for what has happened since.
      url: of the endpoint.
    """
    last, whole = _Change(now, before), _Change(now, None)
    since = _Change(now, first)
    lines: list[Sequence[str] | None] = [
        ("hit rate of HBM's prefix cache", *_rates(last, now, "vllm.prefix_cache_hits", "vllm.prefix_cache_queries")),
        ("hit rate of the host tier, behind it", *_rates(last, now, "found_tokens", "looked_up_tokens")),
        ("tokens loaded a second", last.rate("loaded_tokens"), f"{whole.total('loaded_tokens'):,.0f}"),
        (
            "saved, MiB/s",
            last.rate("saved_nbytes", by=_MIB, digits=1),
            f"{whole.total('saved_nbytes') / _MIB:,.0f} MiB",
        ),
        (
            "loaded, MiB/s",
            last.rate("loaded_nbytes", by=_MIB, digits=1),
            f"{whole.total('loaded_nbytes') / _MIB:,.0f} MiB",
        ),
        None,
        ("chunks in the host tier", "", _of(whole, "num_resident_chunks", "num_host_chunks")),
        ("evicted a second", last.rate("num_evicted_chunks", digits=1), f"{whole.total('num_evicted_chunks'):,.0f}"),
        ("staging blocks in use (peak)", "", _of(whole, "staging_reserved_blocks", "staging_budget_blocks", peak=True)),
        ("copies in flight", "", f"{whole.total('num_jobs_in_flight'):,.0f}"),
    ]
    if now.values.get("num_host_states"):
        lines.insert(7, ("states in the host tier", "", _of(whole, "num_states", "num_host_states")))
    for tier, numbers in sorted(now.tiers.items()):
        lines += [None, *_tier_lines(tier, numbers)]
    lines.append(None)
    if whole.total("num_open_breakers"):
        lines.append(("KINDS OF COPIES SUSPENDED", "", f"{whole.total('num_open_breakers'):,.0f}"))
    for field, name in _FAULTS:
        new = since.grown(field)
        lines.append((name, f"+{new:,.0f}" if new else "0", f"{whole.total(field):,.0f}"))
    return build_table(url, ("", "last interval", "since start"), lines, left_title=True)


def _rates(last: _Change, now: Scrape, part: str, whole: str) -> tuple[str, str]:
    of = now.values.get(whole, 0.0)
    return last.share(part, whole), f"{now.values.get(part, 0.0) / of:.1%}" if of else "-"


def _of(numbers: _Change, part: str, whole: str, *, peak: bool = False) -> str:
    most = f" ({numbers.total('staging_peak_blocks'):,.0f})" if peak else ""
    return f"{numbers.total(part):,.0f}{most} of {numbers.total(whole):,.0f}"


def _tier_lines(tier: str, numbers: Mapping[str, float]) -> list[Sequence[str]]:
    labels = {field: field.removeprefix("num_").replace("_", " ") for field in sorted(numbers) if numbers[field]}
    return [(f"tier {tier}: {label}", "", f"{numbers[field]:,.0f}") for field, label in labels.items()]
