"""Metrics: a snapshot for code, Prometheus series, and a log line.

Each metric is declared once, at its field of `OffloadStats`, or of `TierStats` for each storage tier: what it counts,
its unit, and whether it is a counter or a gauge. The series here and those of the vLLM adapter, with names and help,
are generated from that, and so are the dashboard, the alerts and docs/metrics.md (`monitoring/`).

The file is long because all declarations are in one place.

Counters are plain integers on the scheduler's thread. Prometheus and the log take a snapshot when they need one, and
vLLM's connector every few steps (`adapters/vllm/scheduler_side.py`), so a snapshot is built at once from a dictionary.
"""

import dataclasses
import enum
import functools
import logging
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tpu_offload.errors import ConfigError

_logger = logging.getLogger(__name__)
PREFIX = "tpu_offload_"
"""Of the series of `StatsCollector`."""
VLLM_PREFIX = "vllm:tpu_offload_"
"""Of the series on vLLM's endpoint."""
_METRIC = "tpu_offload.metric"
_BASE_UNITS = {"_nbytes": "_bytes", "_s": "_seconds", "_nbytes_per_s": "_bytes_per_second", "_per_s": "_per_second"}


class MetricKind(enum.Enum):
    """The type of a metric."""

    COUNTER = "counter"  # only increases: take its rate
    GAUGE = "gauge"  # the current value


class MetricGroup(enum.Enum):
    """Which engines report a metric."""

    TIER = "tier"  # all
    SWAP = "swap"  # those with request swap


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MetricSpec:
    """The declaration of one metric.

    Attributes:
      field: the field of `OffloadStats` or `TierStats`.
      family: name in Prometheus, in base units, without prefix and `_total`.
      unit: the counted thing, or the base unit; the family's name ends with it.
      kind: counter or gauge.
      group: which engines report it.
      help: for an operator: what it means and, where useful, what to do about it.
    """

    field: str
    family: str
    unit: str
    kind: MetricKind
    group: MetricGroup
    help: str

    @property
    def series(self) -> str:
        """The name of the series in a scrape: counters end with `_total`."""
        return f"{self.family}_total" if self.kind is MetricKind.COUNTER else self.family


def _metric(kind: MetricKind, unit: str, text: str, *, group: MetricGroup = MetricGroup.TIER, family: str = "") -> Any:
    """A field of `OffloadStats` or `TierStats` with its declaration.

    The family is derived from the field's name unless given.
    """
    declared = {"kind": kind, "unit": unit, "help": text, "group": group, "family": family}
    return dataclasses.field(default=0.0 if "second" in unit else 0, metadata={_METRIC: declared})


_counter = functools.partial(_metric, MetricKind.COUNTER)
_gauge = functools.partial(_metric, MetricKind.GAUGE)
_swap_counter = functools.partial(_metric, MetricKind.COUNTER, group=MetricGroup.SWAP)
_swap_gauge = functools.partial(_metric, MetricKind.GAUGE, group=MetricGroup.SWAP)


@dataclasses.dataclass(slots=True, kw_only=True)
class OffloadStats:
    """The running counts, and a snapshot of them. The help of each field describes it.

    `_nbytes` are bytes over all devices, `_s` seconds; all others are counts. What `TierStats` has too is counted
    there, for each storage tier; only a snapshot has the sums.

    **Lookups** (`looked_up_tokens`, `found_tokens`). Each admission of a request counts one lookup: its last `match`
    before `admit`. Earlier matches, made while the request waited for blocks, a save or staging blocks, are not
    counted. A request that ends without being admitted counts its last `match` at `finish`. A request that is
    preempted, matched and admitted again counts a second lookup; `preempt` itself counts none.

    Looked-up tokens are those from `num_computed_tokens` to `num_tokens`, in whole blocks, up to the load limits of the
    settings and of the request. A match that starts inside a block, or of a request with `cache=False`, looks up
    nothing. Found tokens are those of them that the host tier has, without the one token that is always left to
    compute; they include tokens that are not loaded because there are no staging blocks or loads are suspended. Thus
    `matched_tokens <= found_tokens <= looked_up_tokens`. The return of a swapped-out request is not a lookup.
    """

    looked_up_tokens: int = _counter(
        "tokens",
        "Prompt tokens looked up in the host tier, after those found in HBM. Counted once per admission of a request, "
        "however often it was looked up while it waited.",
    )
    found_tokens: int = _counter(
        "tokens", "Looked-up tokens that were in the host tier. Divided by looked_up_tokens: the tier's hit rate."
    )
    matched_tokens: int = _counter(
        "tokens",
        "Found tokens that requests were granted to load. If well below found_tokens, the staging buffer has no room "
        "for loads, or loads are suspended.",
    )
    skipped_load_tokens: int = _counter(
        "tokens",
        "Found tokens that were computed all the same, because that was estimated to be faster than to load them.",
    )
    loaded_tokens: int = _counter(
        "tokens", "Tokens of finished loads, in whole blocks. If well below matched_tokens, loads fail."
    )
    saved_blocks: int = _counter("blocks", "Blocks of finished saves.")
    loaded_blocks: int = _counter("blocks", "Blocks of finished loads.")
    saved_nbytes: int = _counter("bytes", "Bytes of finished saves, over all devices.")
    loaded_nbytes: int = _counter("bytes", "Bytes of finished loads, over all devices.")
    save_s: float = _counter(
        "seconds", "Duration of finished saves, from dispatch to observed completion on the slowest worker."
    )
    load_s: float = _counter(
        "seconds", "Duration of finished loads, from dispatch to observed completion on the slowest worker."
    )
    num_dropped_checkpoints: int = _counter(
        "checkpoints",
        "Checkpoints (the sliding-window blocks or the state at a boundary) that were not saved: no room for them or "
        "for the chunks before them, or saves suspended. They are gone from HBM in the next step, so they are not "
        "saved later.",
        family="dropped_checkpoints",
    )
    dropped_save_blocks: int = _counter(
        "blocks",
        "Blocks never saved: no room in the staging buffer or the host tier while their request held them, or saves "
        "suspended. At a steady rate check open_breakers, then enlarge the staging buffer or the host tier.",
    )
    dropped_load_blocks: int = _counter(
        "blocks",
        "Blocks that were in the host tier but were recomputed: the load waited too long for room in the staging "
        "buffer, or loads were suspended. At a steady rate check open_breakers, then enlarge the staging buffer.",
    )
    deferred_save_blocks: int = _counter(
        "blocks", "Blocks whose save was deferred to a later step for lack of room, counted each time."
    )
    staging_budget_blocks: int = _gauge("blocks", "Size of the staging buffer.")
    staging_reserved_blocks: int = _gauge("blocks", "Staging blocks in use.")
    staging_peak_blocks: int = _gauge("blocks", "Peak of staging blocks in use. Only staged copies use any.")
    num_host_chunks: int = _gauge(
        "chunks", "Slots of the host tier whose memory is allocated. Grows after start, in the background."
    )
    num_resident_chunks: int = _gauge("chunks", "Chunks in the host tier, including unfinished saves.")
    num_evicted_chunks: int = _counter("chunks", "Chunks evicted from the host tier to make room.")
    num_checkpoints: int = _gauge(
        "checkpoints",
        "Boundaries in the host tier at which a request can continue: the sliding-window blocks before them and the "
        "state after them are there, or being saved. 0 for a model without sliding windows and states.",
        family="resident_checkpoints",
    )
    num_window_chunks: int = _gauge("chunks", "Slots of the host tier that the windows of checkpoints take.")
    num_host_states: int = _gauge(
        "states", "Slots for states in the host tier, on every worker. Memory moves between them and chunks."
    )
    num_states: int = _gauge(
        "states",
        "States in the host tier: one for each checkpoint of a model that has them.",
        family="resident_states",
    )
    num_evicted_checkpoints: int = _counter(
        "checkpoints", "Checkpoints evicted from the host tier to make room, by themselves or with their prefix."
    )
    num_moved_segments: int = _counter(
        "segments", "Segments of the host tier that moved from chunks to states, or from states to chunks."
    )
    num_quarantined_chunks: int = _gauge(
        "chunks",
        "Slots of the host tier that are not reused yet because a timed-out copy may still write them. Should return "
        "to 0.",
    )
    num_jobs_in_flight: int = _gauge(
        "jobs", "Copies in flight: planned, or waiting for room, and not ended.", family="in_flight_jobs"
    )
    num_failed_jobs: int = _counter(
        "jobs",
        "Copies between HBM and host memory that failed, including those that timed out. Should be 0; the log has the "
        "reason of each.",
    )
    num_timed_out_jobs: int = _counter(
        "jobs",
        "Copies between HBM and host memory that a worker did not report in time. Should be 0; look for a worker that "
        "hangs.",
    )
    num_ignored_results: int = _counter(
        "results", "Late, duplicate or unknown results from workers, ignored. A few after a timeout are normal."
    )
    num_rejected_reports: int = _counter(
        "reports", "Invalid worker reports, and stale ones from before a worker's restart, rejected. Should be 0."
    )
    num_lost_results: int = _counter(
        "results", "Copies that a worker finished but whose result never arrived: reports were lost. Should be 0."
    )
    num_worker_restarts: int = _counter("restarts", "Worker restarts. Each one empties the host tier.")
    num_breaker_openings: int = _counter(
        "openings", "How often a kind of copy (see open_breakers) was suspended because it kept failing."
    )
    num_open_breakers: int = _gauge(
        "breakers",
        "Kinds of copies (saves, loads; with request swap also swaps out, swaps in; with a storage tier also cascades, "
        "promotions, deletions, lookups, of each tier) that are suspended because they keep failing. Requests are "
        "still served, by prefill. Alert when it is not 0.",
    )
    num_stored_chunks: int = _gauge(
        "chunks",
        "Records in the storage tiers: of a chunk one, also of a chunk of a window, of a state one or several. One "
        "that two of them have counts twice.",
    )
    num_storage_chunks: int = _gauge("chunks", "Records that the storage tiers have room for.")
    restored_chunks: int = _counter(
        "chunks", "Records that the storage tiers had from earlier runs when the engine started."
    )
    cascaded_chunks: int = _counter(
        "chunks", "Chunks, those of windows included, and states written from the host tier to the storage tiers."
    )
    cascaded_nbytes: int = _counter("bytes", "Bytes written to the storage tiers, over all devices.")
    promoted_chunks: int = _counter(
        "chunks", "Chunks, those of windows included, and states read from the storage tiers into the host tier."
    )
    promoted_nbytes: int = _counter("bytes", "Bytes read from the storage tiers, over all devices.")
    promoted_tokens: int = _counter(
        "tokens",
        "Tokens of the chunks of full attention that were read from the storage tiers. Those that requests load are "
        "found_tokens.",
    )
    dropped_cascade_chunks: int = _counter(
        "chunks",
        "Chunks, and checkpoints, never written to a storage tier: evicted from the host tier before, too many at "
        "once, or cascades suspended. At a steady rate storage is slower than saves.",
    )
    dropped_demotion_chunks: int = _counter(
        "chunks",
        "Evicted chunks and states that were not written to a storage tier: too many at once, storage had no room, or "
        "its copies are suspended. At a steady rate storage is slower than evictions.",
    )
    rejected_storage_chunks: int = _counter(
        "chunks",
        "Chunks of full attention that admission kept out of a storage tier, counted each time they were saved, or "
        "with writes on eviction each time they were evicted.",
    )
    num_dropped_promotions: int = _counter(
        "lookups",
        "Lookups whose next chunk was in a storage tier that did not read it: no room in flight or in the host tier, "
        "or promotions suspended. A farther tier may have.",
    )
    num_skipped_promotions: int = _counter(
        "lookups",
        "Lookups whose next chunk was in a storage tier that did not read it, because computing was estimated to be "
        "faster.",
    )
    failed_storage_chunks: int = _counter(
        "chunks",
        "Chunks and states whose copy to or from a storage tier, or deletion there, failed or was late. Should be 0; "
        "the log has the reason.",
    )
    missing_storage_chunks: int = _counter(
        "chunks",
        "Chunks and states that a storage tier no longer had when they were to be read: a server that engines share "
        "has evicted them.",
    )
    num_evicted_storage_chunks: int = _counter("chunks", "Records evicted from a storage tier to make room.")
    looked_up_storage_chunks: int = _counter(
        "chunks", "Records that a shared storage tier was asked for, because this engine does not know them."
    )
    found_storage_chunks: int = _counter("chunks", "How many of these it has, with all that precede them.")
    vanished_storage_chunks: int = _counter(
        "chunks",
        "Chunks taken for stored in a shared tier that were gone when it was asked again: evicted there, expired, or "
        "lost by a restart. Those in host memory are written again.",
    )
    num_failed_storage_lookups: int = _counter(
        "lookups", "Lookups in a shared storage tier that failed or were late. Should be 0; the log has the reason."
    )
    swap_pool_blocks: int = _swap_gauge("blocks", "Allocated blocks of the swap pool, over all layer groups.")
    swap_held_blocks: int = _swap_gauge("blocks", "Blocks of the swap pool in use.")
    swap_peak_blocks: int = _swap_gauge("blocks", "Peak of blocks in use in the swap pool.")
    num_swapped_requests: int = _swap_gauge("requests", "Requests that are swapped out now.")
    num_swapped_out: int = _swap_counter("requests", "Preempted requests that were swapped out.")
    num_swapped_in: int = _swap_counter("requests", "Swapped-out requests that were swapped in.")
    num_lost_swaps: int = _swap_counter(
        "swaps",
        "Swapped-out requests that had to be recomputed: a copy failed or was late, host memory was lost, or the cache "
        "was reset.",
    )
    num_recomputed: int = _swap_counter("requests", "Preempted requests that were recomputed instead of swapped out.")
    num_recomputed_no_room: int = _swap_counter(
        "requests", "Recomputed requests for which the swap pool had no room. Enlarge the pool."
    )
    num_recomputed_faster: int = _swap_counter(
        "requests", "Recomputed requests for which recompute was predicted to be faster than a swap."
    )
    num_thrashed_swaps: int = _swap_counter(
        "swaps",
        "Requests swapped out again within 32 steps of their return. A steady rate means that HBM is too small for so "
        "many concurrent requests.",
    )
    swapped_out_blocks: int = _swap_counter("blocks", "Blocks that were swapped out.")
    swapped_in_blocks: int = _swap_counter("blocks", "Blocks that were swapped in.")
    swapped_out_nbytes: int = _swap_counter("bytes", "Bytes that were swapped out, over all devices.")
    swapped_in_nbytes: int = _swap_counter("bytes", "Bytes that were swapped in, over all devices.")
    swap_skipped_blocks: int = _swap_counter(
        "blocks",
        "Blocks of swapped requests that needed no copy: already in the host tier or the swap pool, or still in HBM.",
    )
    swap_out_s: float = _swap_counter(
        "seconds", "Duration of finished swaps out, from dispatch to observed completion on the slowest worker."
    )
    swap_in_s: float = _swap_counter(
        "seconds", "Duration of finished swaps in, from dispatch to observed completion on the slowest worker."
    )
    swap_out_nbytes_per_s: float = _swap_gauge(
        "bytes_per_second", "Measured rate of swaps out; 0 until one is measured."
    )
    swap_in_nbytes_per_s: float = _swap_gauge("bytes_per_second", "Measured rate of swaps in; 0 until one is measured.")
    prefill_tokens_per_s: float = _swap_gauge(
        "tokens_per_second", "Measured prefill rate, as reported by the engine; 0 until reported."
    )

    def since(self, earlier: "OffloadStats") -> "OffloadStats":
        """The counts since an earlier snapshot, and the current gauges."""
        changes: dict[str, Any] = self.changes_since(earlier)
        return OffloadStats(**changes)

    def changes_since(self, earlier: "OffloadStats") -> dict[str, int | float]:
        """The counts since an earlier snapshot that are not 0, and all current gauges, by name."""
        counts = zip(_COUNTERS, _counter_values(self), _counter_values(earlier), strict=True)
        changes = {name: now - before for name, now, before in counts if now != before}
        changes.update(zip(_GAUGES, _gauge_values(self), strict=True))
        return changes

    def as_dict(self) -> dict[str, int | float]:
        """Values by name; `dataclasses.asdict`, a deep copy, takes over twice as long."""
        return dict(zip(_NAMES, _values(self), strict=True))


@final
@dataclasses.dataclass(slots=True, kw_only=True)
class TierStats:
    """The counts of one storage tier.

    `OffloadStats` has the sums under the same names; its `num_open_breakers` also counts those of saves, loads and
    swaps.

    Attributes:
      tier: its place, from 0, the nearest, and its name, such as `1:valkey`.
    """

    tier: str
    num_stored_chunks: int = _gauge("chunks", "Records in this storage tier.")
    num_storage_chunks: int = _gauge(
        "chunks", "Records that this storage tier has room for. Written on eviction, it keeps some of it free."
    )
    num_open_breakers: int = _gauge(
        "breakers",
        "Kinds of copies of this storage tier (cascades, promotions, deletions, lookups) that are suspended because "
        "they keep failing.",
    )
    cascaded_chunks: int = _counter(
        "chunks", "Chunks, those of windows included, and states written from the host tier to this storage tier."
    )
    promoted_chunks: int = _counter(
        "chunks", "Chunks, those of windows included, and states read from this storage tier into the host tier."
    )
    failed_storage_chunks: int = _counter(
        "chunks",
        "Chunks and states whose copy to or from this storage tier, or deletion there, failed or was late.",
    )

    def as_dict(self) -> dict[str, int]:
        """The counts by name."""
        return {name: getattr(self, name) for name in TIER_METRICS}


def _family(field: str, unit: str) -> str:
    """The name in Prometheus: no `num_`, base units in full, the unit at the end."""
    name = field.removeprefix("num_")
    for short in sorted(_BASE_UNITS, key=len, reverse=True):
        if name.endswith(short):
            name = name.removesuffix(short) + _BASE_UNITS[short]
            break
    return name if name.endswith(f"_{unit}") else f"{name}_{unit}"


def _specs(declared_in: type[OffloadStats | TierStats], *, prefix: str = "") -> Mapping[str, MetricSpec]:
    specs = {}
    for field in dataclasses.fields(declared_in):
        if _METRIC in field.metadata:
            declared = dict(field.metadata[_METRIC])
            declared["family"] = prefix + (declared["family"] or _family(field.name, declared["unit"]))
            specs[field.name] = MetricSpec(field=field.name, **declared)
    return MappingProxyType(specs)


METRICS = _specs(OffloadStats)
"""The declarations of all metrics, by field of `OffloadStats`, in its order."""

TIER_METRICS = _specs(TierStats, prefix="tier_")
"""Those of the metrics of one storage tier, with the label `tier`, by field of `TierStats`."""

GAUGES = frozenset(name for name, spec in METRICS.items() if spec.kind is MetricKind.GAUGE)
"""Fields of `OffloadStats` that are gauges; all others are counters."""

SWAP_FIELDS = frozenset(name for name, spec in METRICS.items() if spec.group is MetricGroup.SWAP)
"""Fields of `OffloadStats` that only engines with request swap report."""


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HistogramSpec:
    """The declaration of a histogram of durations, which the vLLM adapter exports.

    Attributes:
      family: name in Prometheus, without prefix; its series end with `_bucket`, `_sum` and `_count`.
      help: for an operator.
      buckets_s: upper bounds of the buckets, in seconds.
    """

    family: str
    help: str
    buckets_s: tuple[float, ...] = (
        0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 60.0,
    )  # fmt: skip

    unit: ClassVar[str] = "seconds"


_OBSERVED = "from dispatch until seen finished. It is checked once a step, so no shorter than a step."
SAVE_DURATION = HistogramSpec(family="save_duration_seconds", help=f"Seconds of each finished save, {_OBSERVED}")
LOAD_DURATION = HistogramSpec(family="load_duration_seconds", help=f"Seconds of each finished load, {_OBSERVED}")
HISTOGRAMS = MappingProxyType({"save_duration": SAVE_DURATION, "load_duration": LOAD_DURATION})
"""The declarations of the histograms, by name."""

_NAMES = tuple(METRICS)
_values = operator.attrgetter(*_NAMES)
_COUNTERS = tuple(name for name in _NAMES if name not in GAUGES)
_counter_values = operator.attrgetter(*_COUNTERS)
_GAUGES = tuple(name for name in _NAMES if name in GAUGES)
_gauge_values = operator.attrgetter(*_GAUGES)


class StatsCollector(Collector):
    """Exports the statistics: `registry.register(StatsCollector(scheduler.stats, scheduler.tier_stats))`.

    Args:
      get_stats: returns a fresh snapshot; called from the scraping thread.
      get_tier_stats: likewise, of each storage tier; None exports only their sums.
    Raises:
      ConfigError: one of them is not callable.
    """

    def __init__(
        self, get_stats: Callable[[], OffloadStats], get_tier_stats: Callable[[], Sequence[TierStats]] | None = None
    ) -> None:
        for name, given in (("get_stats", get_stats), ("get_tier_stats", get_tier_stats or tuple)):
            if not callable(given):
                raise ConfigError(f"{name} is a {type(given).__name__}; expected a function")
        self._get_stats = get_stats
        self._get_tier_stats = get_tier_stats or tuple

    def collect(self) -> Iterable[Metric]:
        """One family per metric: `tpu_offload_<family>`; those of tiers with a sample for each."""
        stats = self._get_stats()
        for spec in METRICS.values():
            yield _family_type(spec)(PREFIX + spec.family, spec.help, value=getattr(stats, spec.field))
        tiers = self._get_tier_stats()
        for spec in TIER_METRICS.values() if tiers else ():
            family = _family_type(spec)(PREFIX + spec.family, spec.help, labels=["tier"])
            for tier in tiers:
                family.add_metric([tier.tier], getattr(tier, spec.field))
            yield family


def _family_type(spec: MetricSpec) -> type[GaugeMetricFamily] | type[CounterMetricFamily]:
    return GaugeMetricFamily if spec.kind is MetricKind.GAUGE else CounterMetricFamily


class StatsLogger:
    """Logs one line per interval while something changes.

    Args:
      interval_s: seconds between lines; 0 logs nothing.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._next_s = 0.0
        self._last_activity = 0

    def maybe_log(self, now_s: float, get_stats: Callable[[], OffloadStats]) -> None:
        """Call it each step with the scheduler's clock."""
        if not self._interval_s or now_s < self._next_s:
            return
        self._next_s = now_s + self._interval_s
        stats = get_stats()
        activity = stats.saved_nbytes + stats.loaded_nbytes + stats.num_failed_jobs + stats.num_open_breakers
        activity += stats.num_swapped_out + stats.num_recomputed + stats.cascaded_chunks + stats.promoted_chunks
        activity += stats.failed_storage_chunks + stats.num_failed_storage_lookups
        if activity == self._last_activity:
            return
        self._last_activity = activity
        _logger.info(
            "saved %d MiB, loaded %d MiB (%d tokens), found %d of %d tokens looked up, "
            "host tier %d/%d chunks (%d evicted), staging peak %d/%d blocks, "
            "dropped %d save and %d load blocks, %d jobs failed%s%s%s",
            stats.saved_nbytes >> 20, stats.loaded_nbytes >> 20, stats.loaded_tokens, stats.found_tokens,
            stats.looked_up_tokens, stats.num_resident_chunks, stats.num_host_chunks, stats.num_evicted_chunks,
            stats.staging_peak_blocks, stats.staging_budget_blocks, stats.dropped_save_blocks,
            stats.dropped_load_blocks, stats.num_failed_jobs,
            _problems_text(stats), _swap_text(stats), _storage_text(stats),
        )  # fmt: skip


def _problems_text(stats: OffloadStats) -> str:
    """The part of the log line about suspended copies and quarantined memory; usually empty."""
    text = ""
    if stats.num_open_breakers:
        text += f", kinds of copies suspended: {stats.num_open_breakers}"
    if stats.num_quarantined_chunks:
        text += f", {stats.num_quarantined_chunks} chunks in quarantine"
    return text


def _swap_text(stats: OffloadStats) -> str:
    """The part of the log line about request swap; empty without it."""
    if not stats.swap_pool_blocks:
        return ""
    return (
        f", swapped out {stats.num_swapped_out} requests ({stats.num_swapped_requests} are out, "
        f"{stats.num_thrashed_swaps} thrashed), recomputed {stats.num_recomputed + stats.num_lost_swaps}, swap pool "
        f"{stats.swap_held_blocks}/{stats.swap_pool_blocks} blocks"
    )


def _storage_text(stats: OffloadStats) -> str:
    """The part of the log line about the storage tiers; empty without any, or while nothing has happened there."""
    num_failed = stats.failed_storage_chunks + stats.num_failed_storage_lookups
    if not (stats.cascaded_chunks or stats.promoted_chunks or num_failed):
        return ""
    return (
        f", storage {stats.num_stored_chunks} records (chunks: {stats.cascaded_chunks} written, "
        f"{stats.promoted_chunks} read, {stats.dropped_cascade_chunks} dropped; {num_failed} chunks and lookups "
        "failed)"
    )
