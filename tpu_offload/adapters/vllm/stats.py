"""The library's counters in vLLM's log lines and on its Prometheus endpoint."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from tpu_offload import FinishedTransfer, TierStats
from tpu_offload.metrics import (
    GAUGES,
    HISTOGRAMS,
    LOAD_DURATION,
    METRICS,
    SAVE_DURATION,
    TIER_METRICS,
    VLLM_PREFIX,
    MetricGroup,
    MetricKind,
    MetricSpec,
)
from tpu_offload.types import Direction

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_SECONDS = {Direction.SAVE: SAVE_DURATION.family, Direction.LOAD: LOAD_DURATION.family}
_OF_TIER = "@"  # between the name of a count and the label of its storage tier
_SPECS = {name: spec for name, spec in METRICS.items() if spec.group is not MetricGroup.SWAP}


def tier_counts(tiers: Sequence[TierStats], earlier: Sequence[TierStats]) -> dict[str, int]:
    """The counts of each storage tier since an earlier snapshot, which is empty at first, and its gauges."""
    before = {tier.tier: tier.as_dict() for tier in earlier}
    return {
        f"{name}{_OF_TIER}{tier.tier}": value if name in GAUGES else value - before.get(tier.tier, {}).get(name, 0)
        for tier in tiers
        for name, value in tier.as_dict().items()
    }


@final
@dataclasses.dataclass
class OffloadConnectorStats(KVConnectorStats):
    """The counts of an interval. `data` holds numbers and lists of numbers only, so it can cross processes."""

    @classmethod
    def of(
        cls, changes: Mapping[str, int | float], transfers: Iterable[FinishedTransfer], of_tiers: Mapping[str, int]
    ) -> "OffloadConnectorStats":
        """From the changes of `OffloadStats` in an interval, the transfers that ended in it, and the `tier_counts`."""
        data: dict[str, Any] = {name: value for name, value in changes.items() if name in _SPECS}
        data |= of_tiers
        for transfer in transfers:
            data.setdefault(_SECONDS[transfer.direction], []).append(transfer.duration_s)
        return cls(data=data)

    def reset(self) -> None:
        """Discards the interval."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Adds a later interval."""
        for name, value in other.data.items():
            if name.partition(_OF_TIER)[0] in GAUGES or name not in self.data:
                self.data[name] = value
            else:
                self.data[name] = self.data[name] + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """The figures of an interval for vLLM's log line."""
        data = self.data
        line: dict[str, int | float] = {
            "Saved MiB": data.get("saved_nbytes", 0) >> 20,
            "Loaded MiB": data.get("loaded_nbytes", 0) >> 20,
            "Loaded tokens": data.get("loaded_tokens", 0),
            "Chunks in host memory": data.get("num_resident_chunks", 0),
            "Evicted chunks": data.get("num_evicted_chunks", 0),
            "Staging blocks held (peak)": data.get("staging_peak_blocks", 0),
            "Dropped save blocks": data.get("dropped_save_blocks", 0),
            "Dropped load blocks": data.get("dropped_load_blocks", 0),
            "Failed copies": data.get("num_failed_jobs", 0),
        }
        if data.get("failed_storage_chunks") or data.get("num_failed_storage_lookups"):
            line["Failed storage chunks"] = data.get("failed_storage_chunks", 0)
            line["Failed storage lookups"] = data.get("num_failed_storage_lookups", 0)
        if data.get("num_open_breakers"):
            line["Copy kinds suspended"] = data["num_open_breakers"]
        for direction, label in ((Direction.LOAD, "Longest load (ms)"), (Direction.SAVE, "Longest save (ms)")):
            if durations := data.get(_SECONDS[direction]):
                line[label] = round(1000 * max(durations), 2)
        return line

    def is_empty(self) -> bool:
        """Whether the interval has no counts."""
        return not self.data


@final
class RankStats:
    """The counts of all data-parallel ranks of an engine, from those of each.

    A rank that has counted nothing in a step reports nothing, so its gauges keep their values.

    Args:
      num_ranks: number of ranks.
    """

    def __init__(self, num_ranks: int) -> None:
        self._gauges: tuple[dict[str, Any], ...] = tuple({} for _ in range(num_ranks))

    def join(self, of_ranks: Iterable[Mapping[str, Any] | None]) -> dict[str, Any] | None:
        """The sums of the `data` that ranks report after a step; None if none does.

        Args:
          of_ranks: what each rank reports, in the order of ranks.
        """
        joined: dict[str, Any] = {}
        reported = False
        for gauges, data in zip(self._gauges, of_ranks, strict=True):
            reported = reported or data is not None
            for name, value in (data or {}).items():
                if name.partition(_OF_TIER)[0] in GAUGES:
                    gauges[name] = value
                else:
                    joined[name] = joined[name] + value if name in joined else value
        for gauges in self._gauges:
            for name, value in gauges.items():
                joined[name] = joined.get(name, 0) + value
        return joined if reported else None


@final
class OffloadPromMetrics(KVConnectorPromMetrics):
    """A series `vllm:tpu_offload_<family>` for every metric except those of request swap, and two histograms.

    Those of storage tiers have the label `tier`, too, and a series for each tier from its first counts on.
    """

    def __init__(
        self,
        vllm_config: "VllmConfig",
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._series: dict[str, tuple[type[Any], dict[int, Any]]] = {}

        def make(kind: type[Any], family: str, text: str, *labels: str, **extra: Any) -> Any:
            if kind is Gauge:
                # Several API servers have an endpoint together, and each interval goes to one: the newest is right.
                extra["multiprocess_mode"] = "mostrecent"
            labels = *labelnames, *labels
            return metric_types[kind](name=VLLM_PREFIX + family, documentation=text, labelnames=labels, **extra)

        def add(name: str, kind: type[Any], family: str, text: str, **extra: Any) -> None:
            metric = make(kind, family, text, **extra)
            self._series[name] = kind, {i: metric.labels(*values) for i, values in per_engine_labelvalues.items()}

        for name, spec in _SPECS.items():
            add(name, _type(spec), spec.family, spec.help)
        for durations in HISTOGRAMS.values():
            add(durations.family, Histogram, durations.family, durations.help, buckets=durations.buckets_s)
        self._of_tiers = {
            name: make(_type(spec), spec.family, spec.help, "tier") for name, spec in TIER_METRICS.items()
        }
        self._label_values = per_engine_labelvalues

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds an interval; see the base class."""
        for name, value in transfer_stats_data.items():
            of_tier, _, tier = name.partition(_OF_TIER)
            if tier and of_tier in self._of_tiers:
                kind = _type(TIER_METRICS[of_tier])
                series = self._of_tiers[of_tier].labels(*self._label_values[engine_idx], tier)
            elif name in self._series:
                kind, of_engine = self._series[name]
                series = of_engine[engine_idx]
            else:
                continue
            if kind is Gauge:
                series.set(value)
            elif kind is Counter:
                if value:
                    series.inc(value)
            else:
                for seconds in value:
                    series.observe(seconds)


def _type(spec: MetricSpec) -> type[Any]:
    return Gauge if spec.kind is MetricKind.GAUGE else Counter
