"""The library's counters in vLLM's log lines and on its Prometheus endpoint."""

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, final

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from tpu_offload import FinishedTransfer, OffloadStats
from tpu_offload.metrics import GAUGES, SWAP_FIELDS
from tpu_offload.types import Direction

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_PREFIX = "vllm:tpu_offload_"
_SECONDS = {Direction.SAVE: "save_seconds", Direction.LOAD: "load_seconds"}
_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 60.0)
_FIELDS = [name for name in OffloadStats().as_dict() if name not in SWAP_FIELDS]
_HELP = {
    "matched_tokens": "Tokens that requests took from the host tier instead of computing them.",
    "loaded_tokens": "Tokens of loads that finished.",
    "saved_blocks": "Blocks of saves that finished.",
    "loaded_blocks": "Blocks of loads that finished.",
    "saved_nbytes": "Bytes of saves that finished, over all devices.",
    "loaded_nbytes": "Bytes of loads that finished, over all devices.",
    "save_s": "Seconds of finished saves, from dispatch until seen finished.",
    "load_s": "Seconds of finished loads, from dispatch until seen finished.",
    "dropped_save_blocks": "Blocks never saved: no room in the staging buffer or the host tier.",
    "dropped_load_blocks": "Blocks of the host tier that were computed: no room in the staging buffer.",
    "deferred_save_blocks": "Times that a block found no room in a step and was offered again later.",
    "num_evicted_chunks": "Chunks evicted from the host tier.",
    "num_failed_jobs": "Copies that failed.",
    "num_timed_out_jobs": "Copies that some worker did not report in time.",
    "num_ignored_results": "Reported results that fitted no copy.",
    "num_rejected_reports": "Reports of workers that made no sense and were ignored.",
    "num_lost_results": "Copies that a worker had done with and whose result never came.",
    "num_worker_restarts": "Workers that were started anew, with an empty host tier.",
    "num_quarantined_chunks": "Slots of the host tier that a copy which timed out may still write.",
    "num_breaker_openings": "Times that saves or loads were suspended because they kept failing.",
    "num_open_breakers": "Whether saves, loads or both are suspended now: 0 to 2.",
    "staging_budget_blocks": "Size of the staging buffer.",
    "staging_reserved_blocks": "Staging blocks held now.",
    "staging_peak_blocks": "The most staging blocks that were ever held.",
    "num_host_chunks": "Slots of the host tier whose memory is there.",
    "num_resident_chunks": "Chunks in the host tier, unfinished saves included.",
    "num_jobs_in_flight": "Copies planned and not ended.",
}


@final
@dataclasses.dataclass
class OffloadConnectorStats(KVConnectorStats):
    """What was counted in an interval. `data` holds numbers and lists of numbers only, to be sent anywhere."""

    @classmethod
    def of(cls, stats: OffloadStats, transfers: Iterable[FinishedTransfer]) -> "OffloadConnectorStats":
        """Of what was counted, and the transfers that ended, in an interval."""
        data: dict[str, Any] = {name: value for name, value in stats.as_dict().items() if name in _FIELDS}
        for name in _SECONDS.values():
            data[name] = []
        for transfer in transfers:
            data[_SECONDS[transfer.direction]].append(transfer.duration_s)
        return cls(data=data)

    def reset(self) -> None:
        """Forgets everything."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Adds a later interval."""
        for name, value in other.data.items():
            if name in GAUGES or name not in self.data:
                self.data[name] = value
            else:
                self.data[name] = self.data[name] + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """What a line of the log shows of an interval."""
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
        if data.get("num_open_breakers"):
            line["Suspended kinds of copies"] = data["num_open_breakers"]
        for name, label in (("load_seconds", "Longest load (ms)"), ("save_seconds", "Longest save (ms)")):
            if data.get(name):
                line[label] = round(1000 * max(data[name]), 2)
        return line

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


@final
class OffloadPromMetrics(KVConnectorPromMetrics):
    """One series a field of `OffloadStats` but request swap's, `vllm:tpu_offload_<field>`; two histograms."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        kinds = {
            **{name: Gauge if name in GAUGES else Counter for name in _FIELDS},
            **dict.fromkeys(_SECONDS.values(), Histogram),
        }
        self._kinds = kinds
        self._series: dict[str, dict[int, Any]] = {}
        for name, kind in kinds.items():
            extra: dict[str, Any] = {"buckets": _BUCKETS_S} if kind is Histogram else {}
            text = _HELP.get(name, "Seconds from the dispatch of a copy until it was seen finished.")
            metric = metric_types[kind](name=_PREFIX + name, documentation=text, labelnames=labelnames, **extra)
            self._series[name] = {i: metric.labels(*values) for i, values in per_engine_labelvalues.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds an interval; see the base class."""
        for name, value in transfer_stats_data.items():
            if name not in self._series:
                continue
            series, kind = self._series[name][engine_idx], self._kinds[name]
            if kind is Gauge:
                series.set(value)
            elif kind is Counter:
                if value:
                    series.inc(value)
            else:
                for seconds in value:
                    series.observe(seconds)
