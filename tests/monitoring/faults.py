"""What Prometheus sees of a healthy engine, of one with each fault, and of one with much that is not yet a fault.

Series are samples by minute, in promtool's notation. A fault begins after half an hour and ends, so that each alert
must fire and must end.
"""

import dataclasses
from collections.abc import Mapping

from tpu_offload.metrics import METRICS, MetricKind
from tpu_offload.monitoring import ALERTS
from tpu_offload.monitoring.expressions import NAMES, VLLM_SERIES, used_names

MINUTES = 180
START = 30
TIERS = ("0:file", "1:valkey")

Samples = str
"""Of one series, in promtool's notation."""


def gauge(value: float) -> Samples:
    """The same value all the time."""
    return f"{value}x{MINUTES}"


def grows(per_minute: float) -> Samples:
    """A counter that always grows at the same rate."""
    return f"0+{per_minute}x{MINUTES}"


def gauge_during(minutes: int, value: float, otherwise: float = 0) -> Samples:
    """A gauge that has another value for some minutes."""
    return _text([value if START <= t < START + minutes else otherwise for t in range(MINUTES)])


def grows_during(minutes: int, per_minute: float, otherwise: float = 0) -> Samples:
    """A counter that grows at another rate for some minutes."""
    values, value = [], 0.0
    for t in range(MINUTES):
        value += per_minute if START <= t < START + minutes else otherwise
        values.append(value)
    return _text(values)


def once(number: float = 1) -> Samples:
    """A counter that grows once."""
    return grows_during(1, number)


def _text(values: list[float]) -> str:
    return " ".join(f"{value:g}" for value in values)


_HEALTHY: dict[str, Samples] = {
    "vllm.prompt_tokens": grows(60_000),
    "vllm.prompt_tokens_cached": grows(40_000),
    "looked_up_tokens": grows(40_000),
    "found_tokens": grows(20_000),
    "matched_tokens": grows(20_000),
    "loaded_tokens": grows(20_000),
    "saved_blocks": grows(1000),
    "loaded_blocks": grows(1000),
    "num_evicted_chunks": grows(1000),
    "num_host_chunks": gauge(100_000),
    "num_resident_chunks": gauge(100_000),
    "staging_budget_blocks": gauge(100),
    "staging_reserved_blocks": gauge(60),
    "cascaded_chunks": grows(1000),
    "num_swapped_out": grows(10),
    "num_swapped_in": grows(10),
}
"""Not constant at 0."""
_READ = used_names(alert.expression for alert in ALERTS)


def labels(instance: str) -> str:
    """Of the series of an engine."""
    return f'job="vllm",instance="{instance}",model_name="m",engine="0"'


def series(changed: Mapping[str, Samples], *, instance: str, storage: bool = True) -> dict[str, Samples]:
    """The series of an engine that rules read, of which some differ from those of a healthy one.

    Args:
      changed: samples by name, as in templates; `name@tier` for one storage tier.
      instance: the engine.
      storage: whether it has storage tiers.
    """
    found, engine = {}, labels(instance)
    left = {**changed}
    for name, metric in NAMES.items():
        if name not in _READ and name not in changed:
            continue
        if not name.startswith("tier."):
            found[f"{metric}{{{engine}}}"] = left.pop(name, _HEALTHY.get(name, gauge(0)))
        elif storage:
            for tier in TIERS:
                found[f'{metric}{{{engine},tier="{tier}"}}'] = left.pop(f"{name}@{tier}", gauge(0))
    assert not left, f"no such series: {left}"
    return found


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A course of events.

    Attributes:
      title: what happens; unique.
      changed: see `series`.
      fires: alerts that fire at some time, each with its storage tier or "".
      storage: whether the engine has storage tiers.
    """

    title: str
    changed: Mapping[str, Samples]
    fires: frozenset[tuple[str, str]] = frozenset()
    storage: bool = True


def _fault(alert: str, title: str, changed: dict[str, Samples], *, tier: str = "", storage: bool = True) -> Case:
    return Case(title=title, changed=changed, fires=frozenset({(alert, tier)}), storage=storage)


FAULTS = (
    _fault("TpuOffloadBreakerOpen", "saves suspended for 6 minutes", {"num_open_breakers": gauge_during(7, 1)}),
    _fault(
        "TpuOffloadBreakerOpen", "the same without storage", {"num_open_breakers": gauge_during(7, 1)}, storage=False
    ),
    _fault("TpuOffloadCopiesFail", "one copy fails", {"num_failed_jobs": once()}),
    _fault("TpuOffloadCopiesTimeOut", "one copy times out", {"num_failed_jobs": once(), "num_timed_out_jobs": once()}),
    Case(
        title="two copies fail and one times out",
        changed={"num_failed_jobs": once(3), "num_timed_out_jobs": once()},
        fires=frozenset({("TpuOffloadCopiesFail", ""), ("TpuOffloadCopiesTimeOut", "")}),
    ),
    _fault("TpuOffloadQuarantineStuck", "memory is not returned", {"num_quarantined_chunks": gauge_during(17, 3)}),
    _fault("TpuOffloadWorkerRestarted", "a worker restarts", {"num_worker_restarts": once()}),
    _fault("TpuOffloadReportsRejected", "a report is rejected", {"num_rejected_reports": once()}),
    _fault("TpuOffloadResultsLost", "a result is lost", {"num_lost_results": once()}),
    _fault("TpuOffloadSavesDropped", "a tenth of the saves dropped", {"dropped_save_blocks": grows_during(30, 111)}),
    _fault(
        "TpuOffloadSavesDropped",
        "nothing saved, all dropped",
        {"dropped_save_blocks": grows_during(30, 10), "saved_blocks": gauge(0)},
    ),
    _fault("TpuOffloadCheckpointsDropped", "checkpoints dropped", {"num_dropped_checkpoints": grows_during(45, 1)}),
    _fault("TpuOffloadLoadsDropped", "a fifth of the loads dropped", {"dropped_load_blocks": grows_during(30, 250)}),
    _fault("TpuOffloadStagingFull", "full for half an hour", {"staging_reserved_blocks": gauge_during(30, 100, 60)}),
    _fault(
        "TpuOffloadHostTierThrashing",
        "replaced twice in 30 minutes, few hits",
        {"num_evicted_chunks": grows_during(90, 7000, 100), "found_tokens": grows_during(90, 1000, 20_000)},
    ),
    _fault(
        "TpuOffloadSilent",
        "prompts are computed, and nothing is looked up or saved",
        {"looked_up_tokens": grows_during(60, 0, 40_000), "saved_blocks": grows_during(60, 0, 1000)},
    ),
    _fault(
        "TpuOffloadStorageBreakerOpen",
        "a server is suspended for 6 minutes",
        {"tier.num_open_breakers@1:valkey": gauge_during(7, 2), "num_open_breakers": gauge_during(7, 2)},
        tier="1:valkey",
    ),
    Case(
        title="saves and a server are suspended",
        changed={"tier.num_open_breakers@1:valkey": gauge_during(7, 2), "num_open_breakers": gauge_during(7, 3)},
        fires=frozenset({("TpuOffloadBreakerOpen", ""), ("TpuOffloadStorageBreakerOpen", "1:valkey")}),
    ),
    _fault(
        "TpuOffloadStorageCopiesFail",
        "a disk refuses a job of three chunks",
        {"tier.failed_storage_chunks@0:file": once(3), "failed_storage_chunks": once(3)},
        tier="0:file",
    ),
    _fault("TpuOffloadStorageLookupsFail", "one lookup fails", {"num_failed_storage_lookups": once()}),
    _fault("TpuOffloadStorageTooSlow", "a third not written", {"dropped_cascade_chunks": grows_during(60, 500)}),
    _fault(
        "TpuOffloadStorageTooSlow",
        "a third not written, on save and on eviction",
        {"dropped_cascade_chunks": grows_during(60, 200), "dropped_demotion_chunks": grows_during(60, 200)},
    ),
    _fault("TpuOffloadSwapsLost", "a swapped-out request is lost", {"num_lost_swaps": once()}),
    _fault("TpuOffloadSwapThrashing", "half have just returned", {"num_thrashed_swaps": grows_during(40, 5)}),
)
"""Each alert at least once."""

NO_FAULTS = (
    Case(title="a healthy engine", changed={}),
    Case(title="a healthy engine without storage", changed={}, storage=False),
    Case(title="an idle engine", changed=dict.fromkeys(_HEALTHY, gauge(0)) | {"num_host_chunks": gauge(1000)}),
    Case(title="an engine whose tier is turned off", changed=dict.fromkeys(
        [name for name in _HEALTHY if not name.startswith("vllm.")], gauge(0))),
    Case(title="suspended for a moment", changed={"num_open_breakers": gauge_during(4, 1)}),
    Case(title="a server suspended for a moment", changed={
        "num_open_breakers": gauge_during(4, 1), "tier.num_open_breakers@0:file": gauge_during(4, 1)}),
    Case(title="quarantine that is returned", changed={"num_quarantined_chunks": gauge_during(14, 3)}),
    Case(title="a burst of dropped saves", changed={"dropped_save_blocks": grows_during(5, 111)}),
    Case(title="few dropped saves", changed={"dropped_save_blocks": grows(40)}),
    Case(title="few dropped loads", changed={"dropped_load_blocks": grows(90)}),
    Case(title="a burst of dropped loads", changed={"dropped_load_blocks": grows_during(5, 250)}),
    Case(title="a burst of dropped checkpoints", changed={"num_dropped_checkpoints": grows_during(15, 1)}),
    Case(title="a staging buffer in use", changed={"staging_reserved_blocks": gauge(88)}),
    Case(title="a staging buffer full for a moment", changed={"staging_reserved_blocks": gauge_during(9, 100, 60)}),
    Case(title="no staging buffer", changed={
        "staging_reserved_blocks": gauge(0), "staging_budget_blocks": gauge(0)}),
    Case(title="replaced twice in 30 minutes, with hits", changed={"num_evicted_chunks": grows(7000)}),
    Case(title="replaced twice in 30 minutes, few hits for a moment", changed={
        "num_evicted_chunks": grows_during(28, 7000, 100), "found_tokens": grows_during(28, 0, 20_000)}),
    Case(title="replaced slowly, few hits", changed={"found_tokens": grows(1000)}),
    Case(title="silent for a moment", changed={
        "looked_up_tokens": grows_during(35, 0, 40_000), "saved_blocks": grows_during(35, 0, 1000)}),
    Case(title="all prompts found in HBM", changed={
        "vllm.prompt_tokens_cached": grows(59_900), "looked_up_tokens": gauge(0), "saved_blocks": gauge(0)}),
    Case(title="lookups, and nothing new to save", changed={"saved_blocks": gauge(0)}),
    Case(title="late results that are ignored", changed={"num_ignored_results": grows_during(10, 3)}),
    Case(title="a chunk that a shared server has evicted", changed={"missing_storage_chunks": grows(5)}),
    Case(title="a burst that storage does not take", changed={"dropped_cascade_chunks": grows_during(15, 500)}),
    Case(title="a tenth that storage does not take", changed={"dropped_demotion_chunks": grows(110)}),
    Case(title="few swaps of requests that had just returned", changed={"num_thrashed_swaps": grows(1)}),
    Case(title="a burst of such swaps", changed={"num_thrashed_swaps": grows_during(5, 5)}),
    Case(title="preempted requests recomputed", changed={"num_recomputed": grows(10)}),
)  # fmt: skip
"""Near misses: no alert fires at any time."""


def check_kinds() -> list[str]:
    """Names of counters that a case lets fall, which Prometheus would take for a restart of the engine."""
    counters = {name for name, spec in METRICS.items() if spec.kind is MetricKind.COUNTER} | {
        f"vllm.{name}" for name in VLLM_SERIES if name != "kv_cache_usage"
    }
    return [
        f"{case.title}: {name}"
        for case in (*FAULTS, *NO_FAULTS)
        for name, samples in case.changed.items()
        if name.partition("@")[0] in counters and "x" not in samples and _falls(samples)
    ]


def _falls(samples: str) -> bool:
    values = [float(value) for value in samples.split()]
    return values != sorted(values)
