"""What offloading did, as numbers: a snapshot for code, Prometheus series for a scrape, a line for a log.

Each metric is declared once, where `OffloadStats` has its field: what it counts, in which unit, and whether it is a
counter or a gauge. The series here and those of the vLLM adapter, their names and their help are made from that.

Counting is plain integers on the scheduler's thread. Prometheus and the log read a snapshot when they
want one, so the engine's steps pay nothing for them.
"""

import dataclasses
import enum
import functools
import logging
import operator
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tpu_offload.errors import ConfigError

_logger = logging.getLogger(__name__)
_METRIC = "tpu_offload.metric"
_BASE_UNITS = {"_nbytes": "_bytes", "_s": "_seconds", "_nbytes_per_s": "_bytes_per_second", "_per_s": "_per_second"}


class MetricKind(enum.Enum):
    """What a reader may do with the values of a metric."""

    COUNTER = "counter"  # only rises: look at its rate
    GAUGE = "gauge"  # how things are now


class MetricGroup(enum.Enum):
    """Which engines have anything in a metric."""

    TIER = "tier"  # all
    SWAP = "swap"  # those with request swap


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MetricSpec:
    """The declaration of one metric.

    Attributes:
      field: the field of `OffloadStats`.
      family: name in Prometheus, in base units, without prefix and `_total`.
      unit: what is counted, or the base unit; the family's name ends with it.
      kind: counter or gauge.
      group: which engines have it.
      help: for an operator: what it says, and where that is not plain, what to make of it.
    """

    field: str
    family: str
    unit: str
    kind: MetricKind
    group: MetricGroup
    help: str

    @property
    def series(self) -> str:
        """The family as a scrape has it: counters end with `_total`."""
        return f"{self.family}_total" if self.kind is MetricKind.COUNTER else self.family


def _metric(kind: MetricKind, unit: str, text: str, *, group: MetricGroup = MetricGroup.TIER, family: str = "") -> Any:
    """A field of `OffloadStats` with its declaration. The family follows from its name unless given."""
    declared = {"kind": kind, "unit": unit, "help": text, "group": group, "family": family}
    return dataclasses.field(default=0.0 if "second" in unit else 0, metadata={_METRIC: declared})


_counter = functools.partial(_metric, MetricKind.COUNTER)
_gauge = functools.partial(_metric, MetricKind.GAUGE)
_swap_counter = functools.partial(_metric, MetricKind.COUNTER, group=MetricGroup.SWAP)
_swap_gauge = functools.partial(_metric, MetricKind.GAUGE, group=MetricGroup.SWAP)


@dataclasses.dataclass(slots=True, kw_only=True)
class OffloadStats:
    """Running counts, and what a reader gets a copy of. What each field is, its declaration says.

    Names in `_nbytes` are bytes over all devices, in `_s` seconds; others are counts.

    **Lookups** (`looked_up_tokens`, `found_tokens`). Each admission of a request counts one lookup: its last `match`
    before `admit`. Earlier ones, of an engine that asks again while the request waits for blocks, for a save or for
    staging blocks, count nothing. A request that ends without being admitted counts its last `match` at `finish`. One
    that is preempted, matched and admitted again counts a second lookup; `preempt` itself counts none.

    Looked up are the tokens from `num_computed_tokens` to `num_tokens`, at most as many as the limits of the settings
    and of the request let it load, in whole blocks. A match inside a block, and one of a request with `cache=False`,
    looks nothing up. Found are those of them in the host tier, but for the one token that is always left to compute;
    also those that are not loaded then, for want of staging blocks or because loads are suspended. Thus
    `matched_tokens <= found_tokens <= looked_up_tokens`. Swapped-out requests that come back look nothing up.
    """

    looked_up_tokens: int = _counter(
        "tokens",
        "Tokens that requests asked the host tier for: those that HBM did not have. Counted once for each admission of "
        "a request, however often it was looked up while it waited.",
    )
    found_tokens: int = _counter(
        "tokens", "Of the looked-up tokens, those that the host tier had. Divided by looked_up_tokens: its hit rate."
    )
    matched_tokens: int = _counter(
        "tokens",
        "Of the found tokens, those that requests took instead of computing them. Well below found_tokens: the staging "
        "buffer has no room for loads, or they are suspended.",
    )
    loaded_tokens: int = _counter(
        "tokens", "Tokens of loads that finished, in whole blocks. Well below matched_tokens: loads fail."
    )
    saved_blocks: int = _counter("blocks", "Blocks of saves that finished.")
    loaded_blocks: int = _counter("blocks", "Blocks of loads that finished.")
    saved_nbytes: int = _counter("bytes", "Bytes of saves that finished, over all devices.")
    loaded_nbytes: int = _counter("bytes", "Bytes of loads that finished, over all devices.")
    save_s: float = _counter(
        "seconds", "Seconds of finished saves, each the slowest worker's from dispatch until seen finished."
    )
    load_s: float = _counter(
        "seconds", "Seconds of finished loads, each the slowest worker's from dispatch until seen finished."
    )
    dropped_save_blocks: int = _counter(
        "blocks",
        "Blocks never saved: the staging buffer or the host tier had no room while their request held them, or saves "
        "were suspended. A steady rate: see open_breakers; else enlarge the staging buffer or the host tier.",
    )
    dropped_load_blocks: int = _counter(
        "blocks",
        "Blocks in the host tier that were computed instead: the staging buffer had no room for too long, or loads "
        "were suspended. A steady rate: see open_breakers; else enlarge the staging buffer.",
    )
    deferred_save_blocks: int = _counter(
        "blocks", "Times that a block found no room to be saved in a step; it was offered again in a later one."
    )
    staging_budget_blocks: int = _gauge("blocks", "Size of the staging buffer.")
    staging_reserved_blocks: int = _gauge("blocks", "Staging blocks held now.")
    staging_peak_blocks: int = _gauge(
        "blocks", "The most staging blocks that were ever held. Copies that are not staged hold none."
    )
    num_host_chunks: int = _gauge(
        "chunks", "Slots of the host tier whose memory is there; it grows after the start, in the background."
    )
    num_resident_chunks: int = _gauge("chunks", "Chunks in the host tier, unfinished saves included.")
    num_evicted_chunks: int = _counter("chunks", "Chunks evicted from the host tier to make room.")
    num_quarantined_chunks: int = _gauge(
        "chunks",
        "Slots of the host tier that are kept back because a copy that timed out may still write them. Should go back "
        "to 0.",
    )
    num_jobs_in_flight: int = _gauge(
        "jobs", "Copies planned, or waiting for room, and not ended.", family="in_flight_jobs"
    )
    num_failed_jobs: int = _counter(
        "jobs", "Copies that failed, timed-out ones included. Should be 0; the log says why each failed."
    )
    num_timed_out_jobs: int = _counter(
        "jobs", "Copies that some worker did not report in time. Should be 0; look for a worker that hangs."
    )
    num_ignored_results: int = _counter(
        "results", "Results of workers that fitted no copy: late, doubled or unknown ones. A few follow a timeout."
    )
    num_rejected_reports: int = _counter(
        "reports",
        "Reports of workers that made no sense, or came from an earlier life of the worker, and were ignored. Should "
        "be 0.",
    )
    num_lost_results: int = _counter(
        "results", "Copies that a worker was done with and whose result never came. Should be 0; reports were lost."
    )
    num_worker_restarts: int = _counter(
        "restarts", "Workers that were started anew. Each time the host tier is empty afterwards."
    )
    num_breaker_openings: int = _counter(
        "openings", "Times that one kind of copy (see open_breakers) was suspended because it kept failing."
    )
    num_open_breakers: int = _gauge(
        "breakers",
        "Kinds of copies (saves, loads; with request swap also swaps out, swaps in) that are suspended now because "
        "they keep failing. Requests are served and compute instead. Alert when it is not 0.",
    )
    swap_pool_blocks: int = _swap_gauge("blocks", "Blocks of the swap pool whose memory is there, of all layer groups.")
    swap_held_blocks: int = _swap_gauge("blocks", "Blocks of the swap pool that hold something now.")
    swap_peak_blocks: int = _swap_gauge("blocks", "The most blocks of the swap pool that ever held something.")
    num_swapped_requests: int = _swap_gauge("requests", "Requests that are swapped out now.")
    num_swapped_out: int = _swap_counter("requests", "Preempted requests that were swapped out.")
    num_swapped_in: int = _swap_counter("requests", "Swapped-out requests that came back.")
    num_lost_swaps: int = _swap_counter(
        "swaps",
        "Swapped-out requests that had to be recomputed: a copy failed or came late, host memory was lost, or the "
        "cache was reset.",
    )
    num_recomputed: int = _swap_counter("requests", "Preempted requests that were not swapped out but recomputed.")
    num_recomputed_no_room: int = _swap_counter(
        "requests", "Of the recomputed requests, those for which the swap pool had no room. Make it larger."
    )
    num_recomputed_faster: int = _swap_counter(
        "requests", "Of the recomputed requests, those for which recompute was predicted to be faster than a swap."
    )
    num_thrashed_swaps: int = _swap_counter(
        "swaps",
        "Requests swapped out again within 32 steps of their return. A steady rate: HBM is too small for so many "
        "requests at a time.",
    )
    swapped_out_blocks: int = _swap_counter("blocks", "Blocks that were swapped out.")
    swapped_in_blocks: int = _swap_counter("blocks", "Blocks that were swapped in.")
    swapped_out_nbytes: int = _swap_counter("bytes", "Bytes that were swapped out, over all devices.")
    swapped_in_nbytes: int = _swap_counter("bytes", "Bytes that were swapped in, over all devices.")
    swap_skipped_blocks: int = _swap_counter(
        "blocks",
        "Blocks of swapped requests that needed no copy: in the host tier or the swap pool already, or still in HBM.",
    )
    swap_out_s: float = _swap_counter(
        "seconds", "Seconds of finished swaps out, each the slowest worker's from dispatch until seen finished."
    )
    swap_in_s: float = _swap_counter(
        "seconds", "Seconds of finished swaps in, each the slowest worker's from dispatch until seen finished."
    )
    swap_out_nbytes_per_s: float = _swap_gauge(
        "bytes_per_second", "Measured rate of the copies out; 0 until the first is measured."
    )
    swap_in_nbytes_per_s: float = _swap_gauge(
        "bytes_per_second", "Measured rate of the copies in; 0 until the first is measured."
    )
    prefill_tokens_per_s: float = _swap_gauge(
        "tokens_per_second", "Measured rate of recompute, as the engine reported it; 0 until it has."
    )

    def since(self, earlier: "OffloadStats") -> "OffloadStats":
        """What was counted after an earlier snapshot; what is not a count, as it is now."""
        pairs = zip(_NAMES, _values(self), _values(earlier), strict=True)
        return OffloadStats(**{name: now if name in GAUGES else now - before for name, now, before in pairs})

    def as_dict(self) -> dict[str, int | float]:
        """Values by name; `dataclasses.asdict`, which copies deeply, takes over twice as long."""
        return dict(zip(_NAMES, _values(self), strict=True))


def _family(field: str, unit: str) -> str:
    """The name in Prometheus: no `num_`, base units in full, the unit at the end."""
    name = field.removeprefix("num_")
    for short in sorted(_BASE_UNITS, key=len, reverse=True):
        if name.endswith(short):
            name = name.removesuffix(short) + _BASE_UNITS[short]
            break
    return name if name.endswith(f"_{unit}") else f"{name}_{unit}"


def _specs() -> Mapping[str, MetricSpec]:
    specs = {}
    for field in dataclasses.fields(OffloadStats):
        declared = dict(field.metadata[_METRIC])
        declared["family"] = declared["family"] or _family(field.name, declared["unit"])
        specs[field.name] = MetricSpec(field=field.name, **declared)
    return MappingProxyType(specs)


METRICS = _specs()
"""The declarations of all metrics, by field of `OffloadStats`, in its order."""

GAUGES = frozenset(name for name, spec in METRICS.items() if spec.kind is MetricKind.GAUGE)
"""Fields of `OffloadStats` that say how things are; all others count up."""

SWAP_FIELDS = frozenset(name for name, spec in METRICS.items() if spec.group is MetricGroup.SWAP)
"""Fields of `OffloadStats` that only engines with request swap have anything in."""

_NAMES = tuple(METRICS)
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
        """One family a metric: `tpu_offload_<family>`."""
        stats = self._get_stats()
        for spec in METRICS.values():
            family = GaugeMetricFamily if spec.kind is MetricKind.GAUGE else CounterMetricFamily
            yield family(f"tpu_offload_{spec.family}", spec.help, value=getattr(stats, spec.field))


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
            "saved %d MiB, loaded %d MiB (%d tokens), found %d of %d tokens looked up, "
            "host tier %d/%d chunks (%d evicted), staging peak %d/%d blocks, "
            "dropped %d save and %d load blocks, %d jobs failed%s%s",
            stats.saved_nbytes >> 20, stats.loaded_nbytes >> 20, stats.loaded_tokens, stats.found_tokens,
            stats.looked_up_tokens, stats.num_resident_chunks, stats.num_host_chunks, stats.num_evicted_chunks,
            stats.staging_peak_blocks, stats.staging_budget_blocks, stats.dropped_save_blocks,
            stats.dropped_load_blocks, stats.num_failed_jobs,
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
