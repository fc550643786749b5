"""What offloading did, as numbers: a snapshot for code, Prometheus series for a scrape, a line for a log.

Counting is plain integers on the scheduler's thread. Prometheus and the log read a snapshot when they
want one, so the engine's steps pay nothing for them.
"""

import dataclasses
import logging
import operator
from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tpu_offload.errors import ConfigError

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True, kw_only=True)
class OffloadStats:
    """Running counts, and what a reader gets a copy of.

    Names in `_nbytes` are bytes over all devices, in `_s` seconds; others are counts.

    Attributes:
      staging_budget_blocks: size of the staging buffer.
      staging_reserved_blocks: staging blocks held now.
      staging_peak_blocks: the most that were ever held. Copies that are not staged hold none.
      num_host_chunks: slots of the host tier that are usable by now.
      num_resident_chunks: chunks in the host tier, unfinished saves included.
      num_evicted_chunks: chunks evicted from the host tier.
      num_jobs_in_flight: jobs and waiting loads that have not ended.
      matched_tokens: tokens promised from the host tier to requests that took them.
      loaded_tokens: tokens of loads that finished.
      saved_blocks: blocks of saves that finished.
      loaded_blocks: blocks of loads that finished.
      saved_nbytes: bytes of those saves.
      loaded_nbytes: bytes of those loads.
      save_s: sum over finished saves of the slowest worker's time from dispatch to seen finished.
      load_s: the same for loads.
      dropped_save_blocks: blocks never saved because staging buffer, host tier or plans had no room while the
        request held them, or because saves were suspended.
      dropped_load_blocks: blocks in the host tier that a request computed because the staging buffer had no room for
        too long, or because loads were suspended.
      deferred_save_blocks: times that a block was refused in a step; it was offered again later.
      num_failed_jobs: jobs that failed, timed-out ones included.
      num_timed_out_jobs: jobs that some worker did not report in time.
      num_ignored_results: reported results that fitted no job: late, doubled or unknown ones.
      num_rejected_reports: reports that made no sense, or were of an earlier life of their worker, and were ignored.
      num_lost_results: jobs that a worker had done with and whose result never came.
      num_worker_restarts: workers that were started anew, with an empty host pool.
      num_quarantined_chunks: slots of the host tier that a copy which is not waited for any more may still write.
      num_breaker_openings: times that saves, loads, swaps out or swaps in were suspended because they kept failing.
      num_open_breakers: how many of these four are suspended now.
      swap_pool_blocks: blocks of the swap pool that are usable by now, of all layer groups.
      swap_held_blocks: those that hold something now.
      swap_peak_blocks: the most that ever did.
      num_swapped_requests: requests that are swapped out now.
      num_swapped_out: preempted requests that were swapped out.
      num_swapped_in: swapped-out requests that came back.
      num_lost_swaps: swapped-out requests that had to be recomputed, for a failed copy, lost memory or a reset.
      num_recomputed: preempted requests that were not swapped out but recomputed.
      num_recomputed_no_room: of these, those that found no room in the swap pool.
      num_recomputed_faster: of these, those that recompute was taken to be faster for.
      num_thrashed_swaps: requests swapped out again within 32 steps of their return.
      swapped_out_blocks: blocks that were copied out.
      swapped_in_blocks: blocks that were copied back.
      swapped_out_nbytes: bytes of those copied out.
      swapped_in_nbytes: bytes of those copied back.
      swap_skipped_blocks: blocks that needed no copy: in the host tier or the swap pool already, or back in HBM.
      swap_out_s: sum over swap-outs of the slowest worker's time from dispatch to seen finished.
      swap_in_s: the same for swap-ins.
      swap_out_nbytes_per_s: measured rate of the copies out; 0 until the first is measured.
      swap_in_nbytes_per_s: the same of the copies back.
      prefill_tokens_per_s: measured rate of recompute, as the engine reported it.
    """

    staging_budget_blocks: int = 0
    staging_reserved_blocks: int = 0
    staging_peak_blocks: int = 0
    num_host_chunks: int = 0
    num_resident_chunks: int = 0
    num_evicted_chunks: int = 0
    num_jobs_in_flight: int = 0
    matched_tokens: int = 0
    loaded_tokens: int = 0
    saved_blocks: int = 0
    loaded_blocks: int = 0
    saved_nbytes: int = 0
    loaded_nbytes: int = 0
    save_s: float = 0.0
    load_s: float = 0.0
    dropped_save_blocks: int = 0
    dropped_load_blocks: int = 0
    deferred_save_blocks: int = 0
    num_failed_jobs: int = 0
    num_timed_out_jobs: int = 0
    num_ignored_results: int = 0
    num_rejected_reports: int = 0
    num_lost_results: int = 0
    num_worker_restarts: int = 0
    num_quarantined_chunks: int = 0
    num_breaker_openings: int = 0
    num_open_breakers: int = 0
    swap_pool_blocks: int = 0
    swap_held_blocks: int = 0
    swap_peak_blocks: int = 0
    num_swapped_requests: int = 0
    num_swapped_out: int = 0
    num_swapped_in: int = 0
    num_lost_swaps: int = 0
    num_recomputed: int = 0
    num_recomputed_no_room: int = 0
    num_recomputed_faster: int = 0
    num_thrashed_swaps: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    swapped_out_nbytes: int = 0
    swapped_in_nbytes: int = 0
    swap_skipped_blocks: int = 0
    swap_out_s: float = 0.0
    swap_in_s: float = 0.0
    swap_out_nbytes_per_s: float = 0.0
    swap_in_nbytes_per_s: float = 0.0
    prefill_tokens_per_s: float = 0.0

    def since(self, earlier: "OffloadStats") -> "OffloadStats":
        """What was counted after an earlier snapshot; what is not a count, as it is now."""
        pairs = zip(_NAMES, _values(self), _values(earlier), strict=True)
        return OffloadStats(**{name: now if name in GAUGES else now - before for name, now, before in pairs})

    def as_dict(self) -> dict[str, int | float]:
        """Values by name; `dataclasses.asdict`, which copies deeply, takes over twice as long."""
        return dict(zip(_NAMES, _values(self), strict=True))


GAUGES = frozenset({
    "staging_budget_blocks", "staging_reserved_blocks", "staging_peak_blocks", "num_host_chunks",
    "num_resident_chunks", "num_jobs_in_flight", "swap_pool_blocks", "swap_held_blocks", "swap_peak_blocks",
    "num_swapped_requests", "swap_out_nbytes_per_s", "swap_in_nbytes_per_s", "prefill_tokens_per_s",
    "num_quarantined_chunks", "num_open_breakers",
})  # fmt: skip
"""Fields of `OffloadStats` that say how things are; all others count up."""

SWAP_FIELDS = frozenset({
    "swap_pool_blocks", "swap_held_blocks", "swap_peak_blocks", "num_swapped_requests", "num_swapped_out",
    "num_swapped_in", "num_lost_swaps", "num_recomputed", "num_recomputed_no_room", "num_recomputed_faster",
    "num_thrashed_swaps", "swapped_out_blocks", "swapped_in_blocks", "swapped_out_nbytes", "swapped_in_nbytes",
    "swap_skipped_blocks", "swap_out_s", "swap_in_s", "swap_out_nbytes_per_s", "swap_in_nbytes_per_s",
    "prefill_tokens_per_s",
})  # fmt: skip
"""Fields of `OffloadStats` that only engines with request swap have anything in."""

_NAMES = tuple(field.name for field in dataclasses.fields(OffloadStats))
_values = operator.attrgetter(*_NAMES)


class StatsCollector(Collector):
    """Offers the statistics to Prometheus: `registry.register(StatsCollector(scheduler.stats))`.

    Args:
      get_stats: returns a fresh snapshot; may be called from the scraping thread.
    Raises:
      ConfigError: it is no function.
    """

    def __init__(self, get_stats: Callable[[], OffloadStats]) -> None:
        if not callable(get_stats):
            raise ConfigError(f"get_stats is a {type(get_stats).__name__}; expected a function")
        self._get_stats = get_stats

    def collect(self) -> Iterable[Metric]:
        """One family a field of `OffloadStats`, named `tpu_offload_<field>`."""
        stats = self._get_stats()
        for field in dataclasses.fields(stats):
            name, text = f"tpu_offload_{field.name}", f"OffloadStats.{field.name}"
            family = GaugeMetricFamily if field.name in GAUGES else CounterMetricFamily
            yield family(name, text, value=getattr(stats, field.name))


class StatsLogger:
    """Logs one line an interval while something moves.

    Args:
      interval_s: seconds between lines; 0 logs nothing.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._next_s = 0.0
        self._last_moved = 0

    def maybe_log(self, now_s: float, get_stats: Callable[[], OffloadStats]) -> None:
        """Called each step with the scheduler's clock."""
        if not self._interval_s or now_s < self._next_s:
            return
        self._next_s = now_s + self._interval_s
        stats = get_stats()
        moved = stats.saved_nbytes + stats.loaded_nbytes + stats.num_failed_jobs + stats.num_open_breakers
        moved += stats.num_swapped_out + stats.num_recomputed
        if moved == self._last_moved:
            return
        self._last_moved = moved
        _logger.info(
            "saved %d MiB, loaded %d MiB (%d tokens), host tier %d/%d chunks (%d evicted), staging peak %d/%d blocks, "
            "dropped %d save and %d load blocks, %d jobs failed%s%s",
            stats.saved_nbytes >> 20, stats.loaded_nbytes >> 20, stats.loaded_tokens, stats.num_resident_chunks,
            stats.num_host_chunks, stats.num_evicted_chunks, stats.staging_peak_blocks, stats.staging_budget_blocks,
            stats.dropped_save_blocks, stats.dropped_load_blocks, stats.num_failed_jobs,
            _trouble_text(stats), _swap_text(stats),
        )  # fmt: skip


def _trouble_text(stats: OffloadStats) -> str:
    """What the log line says of copies that are suspended and memory that waits for late ones; mostly nothing."""
    text = ""
    if stats.num_open_breakers:
        text += f", {stats.num_open_breakers} of saves, loads, swaps out and swaps in suspended"
    if stats.num_quarantined_chunks:
        text += f", {stats.num_quarantined_chunks} chunks in quarantine"
    return text


def _swap_text(stats: OffloadStats) -> str:
    """What the log line says of request swap; empty for who does not use it."""
    if not stats.swap_pool_blocks:
        return ""
    return (
        f", swapped out {stats.num_swapped_out} requests ({stats.num_swapped_requests} are out, "
        f"{stats.num_thrashed_swaps} thrashed), recomputed {stats.num_recomputed + stats.num_lost_swaps}, swap pool "
        f"{stats.swap_held_blocks}/{stats.swap_pool_blocks} blocks"
    )
