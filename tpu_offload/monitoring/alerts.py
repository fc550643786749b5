"""The alerts. Each says what is wrong, what it costs and what to do; docs/monitoring.md has a section for each.

Requests are served correctly while any of these fires: the library's failures cost speed, and vLLM recomputes. So the
alerts are `critical` only where the tier does not work for minutes or memory is not returned, `warning` where someone
should look on the next working day, and `info` where the setup may be intended.

Counters that should be 0 alert on their first increase: `increase` over a window, without `for`, so that an event of
one scrape is seen and the alert ends by itself one window later. What is normal now and then (drops, evictions, a full
buffer) must last.
"""

import dataclasses
import enum
from typing import final

from tpu_offload.monitoring.expressions import Expression, render


class Severity(enum.Enum):
    """How soon someone should look."""

    CRITICAL = "critical"  # now
    WARNING = "warning"  # the next working day
    INFO = "info"  # it may be intended


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One rule.

    Attributes:
      name: in Prometheus, and the heading of its section in docs/monitoring.md.
      severity: how soon someone should look.
      template: its condition, as a template of `expressions`.
      for_minutes: how long the condition must hold.
      summary: one line, with the labels of Prometheus' templates.
      action: what to do first.
    """

    name: str
    severity: Severity
    template: str
    for_minutes: int = 0
    summary: str
    action: str

    @property
    def expression(self) -> Expression:
        """Its condition."""
        return render(self.template)


_AT = "{{ $labels.instance }}"
_COUNT = '{{ $value | printf "%.0f" }}'
_SHARE = "{{ $value | humanizePercentage }}"
_TIER = "{{ $labels.tier }}"

_COPIES = (
    Alert(
        name="TpuOffloadBreakerOpen",
        severity=Severity.CRITICAL,
        # Those of the storage tiers have an alert of their own. Without storage there is no series of a tier.
        template="{num_open_breakers} > sum without (tier) ({tier.num_open_breakers})"
        " or ({num_open_breakers} > 0 unless sum without (tier) ({tier.num_open_breakers}))",
        for_minutes=5,
        summary=f"{_AT}: saves or loads have failed repeatedly and are suspended",
        action="Requests are served, but prefilled instead of loaded. Find the reason ('suspended') in the engine's "
        "log. A probe is sent by itself, and copies continue when it succeeds.",
    ),
    Alert(
        name="TpuOffloadCopiesFail",
        severity=Severity.WARNING,
        template="increase({num_failed_jobs}[10m]) > increase({num_timed_out_jobs}[10m])",
        summary=f"{_AT}: copies failed ({_COUNT} in 10 minutes)",
        action="The requests were recomputed. The engine's log has the reason of each failure.",
    ),
    Alert(
        name="TpuOffloadCopiesTimeOut",
        severity=Severity.WARNING,
        template="increase({num_timed_out_jobs}[10m]) > 0",
        summary=f"{_AT}: {_COUNT} copies were not reported in time",
        action="Look for a worker that hangs or steps that take longer than TPU_OFFLOAD_JOB_TIMEOUT_S.",
    ),
    Alert(
        name="TpuOffloadQuarantineStuck",
        severity=Severity.CRITICAL,
        template="{num_quarantined_chunks} > 0",
        for_minutes=15,
        summary=f"{_AT}: {_COUNT} chunks of host memory are not returned by a timed-out copy",
        action="A worker does not finish a copy. Find the worker that no longer reports and restart the engine.",
    ),
    Alert(
        name="TpuOffloadWorkerRestarted",
        severity=Severity.WARNING,
        template="increase({num_worker_restarts}[1h]) > 0",
        summary=f"{_AT}: a worker restarted, and the host tier is empty",
        action="Hit rates recover as the tier fills. Find out why the worker ended.",
    ),
    Alert(
        name="TpuOffloadReportsRejected",
        severity=Severity.WARNING,
        template="increase({num_rejected_reports}[10m]) > 0",
        summary=f"{_AT}: {_COUNT} worker reports were rejected",
        action="Scheduler and workers disagree. Compare versions and settings of all hosts; a few after a worker's "
        "restart are normal.",
    ),
    Alert(
        name="TpuOffloadResultsLost",
        severity=Severity.WARNING,
        template="increase({num_lost_results}[10m]) > 0",
        summary=f"{_AT}: {_COUNT} results of workers never arrived",
        action="Reports are lost between worker and scheduler, or a plan was overtaken. Look at the executor and the "
        "network between hosts.",
    ),
)
_SIZES = (
    Alert(
        name="TpuOffloadSavesDropped",
        severity=Severity.WARNING,
        template="rate({dropped_save_blocks}[10m])"
        " / (rate({dropped_save_blocks}[10m]) + rate({saved_blocks}[10m])) > 0.05",
        for_minutes=15,
        summary=f"{_AT}: {_SHARE} of the blocks to save are dropped",
        action="Check for open breakers first. If there are none, enlarge the staging buffer (staged copies) or the "
        "host tier.",
    ),
    Alert(
        name="TpuOffloadCheckpointsDropped",
        severity=Severity.WARNING,
        template="rate({num_dropped_checkpoints}[10m]) > 0",
        for_minutes=30,
        summary=f"{_AT}: checkpoints of sliding windows are dropped steadily",
        action="Prompts cannot continue from the boundaries that are missing. Check for open breakers; if there are "
        "none, enlarge the host tier.",
    ),
    Alert(
        name="TpuOffloadLoadsDropped",
        severity=Severity.WARNING,
        template="rate({dropped_load_blocks}[10m])"
        " / (rate({dropped_load_blocks}[10m]) + rate({loaded_blocks}[10m])) > 0.1",
        for_minutes=15,
        summary=f"{_AT}: {_SHARE} of the blocks found in the host tier are recomputed",
        action="Check for open breakers first. If there are none, enlarge the staging buffer.",
    ),
    Alert(
        name="TpuOffloadStagingFull",
        severity=Severity.WARNING,
        template="avg_over_time({staging_reserved_blocks}[10m]) / {staging_budget_blocks} > 0.9",
        for_minutes=10,
        summary=f"{_AT}: the staging buffer is {_SHARE} full",
        action="Staged copies wait for room. Enlarge the staging buffer, or use direct copies, which need none. If no "
        "copies finish at all, a worker hangs.",
    ),
    Alert(
        name="TpuOffloadHostTierThrashing",
        severity=Severity.WARNING,
        template="increase({num_evicted_chunks}[30m]) / {num_host_chunks} > 1"
        " and increase({found_tokens}[30m]) < 0.1 * increase({looked_up_tokens}[30m])",
        for_minutes=30,
        summary=f"{_AT}: the host tier was replaced {{{{ $value | humanize }}}} times in 30 minutes, and hits are rare",
        action="The tier is too small for this traffic. Enlarge it (host_gb), add a storage tier, or route requests of "
        "a conversation to the same engine; tpu-offload simulate shows the hit rate of other sizes.",
    ),
    Alert(
        name="TpuOffloadSilent",
        severity=Severity.INFO,
        template="(increase({vllm.prompt_tokens}[30m]) - increase({vllm.prompt_tokens_cached}[30m]) > 10000)"
        " and increase({looked_up_tokens}[30m]) == 0 and increase({saved_blocks}[30m]) == 0 and {num_host_chunks} > 0",
        for_minutes=10,
        summary=f"{_AT}: {_COUNT} prompt tokens were computed, and the connector neither looked up nor saved any",
        action="Either all prompts are shorter than a chunk, or requests turn the cache off (tpu_offload.cache), or "
        "the connector has stopped: compare with the engine's log.",
    ),
)
_STORAGE = (
    Alert(
        name="TpuOffloadStorageBreakerOpen",
        severity=Severity.WARNING,
        template="{tier.num_open_breakers} > 0",
        for_minutes=5,
        summary=f"{_AT}: copies of storage tier {_TIER} keep failing and are suspended",
        action="The host tier and other storage tiers continue. Check the disk, bucket or server (tpu-offload tier), "
        "and the engine's log.",
    ),
    Alert(
        name="TpuOffloadStorageCopiesFail",
        severity=Severity.WARNING,
        template="increase({tier.failed_storage_chunks}[10m]) > 0",
        summary=f"{_AT}: {_COUNT} chunks could not be written to or read from storage tier {_TIER}",
        action="The engine's log has the reason of each: space, permissions, time-outs, or damaged records.",
    ),
    Alert(
        name="TpuOffloadStorageLookupsFail",
        severity=Severity.WARNING,
        template="increase({num_failed_storage_lookups}[10m]) > 0",
        summary=f"{_AT}: {_COUNT} lookups in a shared storage tier failed or were late",
        action="Requests waited for them and were computed. Check the server's load and the network to it.",
    ),
    Alert(
        name="TpuOffloadStorageTooSlow",
        severity=Severity.INFO,
        template="(rate({dropped_cascade_chunks}[10m]) + rate({dropped_demotion_chunks}[10m]))"
        " / (rate({dropped_cascade_chunks}[10m]) + rate({dropped_demotion_chunks}[10m]) + rate({cascaded_chunks}[10m]))"
        " > 0.2",
        for_minutes=30,
        summary=f"{_AT}: {_SHARE} of the chunks for storage are never written",
        action="Storage is slower than what it is given. Admit less (TPU_OFFLOAD_STORAGE_ADMISSION), write on "
        "eviction, or use faster storage.",
    ),
)
_SWAPS = (
    Alert(
        name="TpuOffloadSwapsLost",
        severity=Severity.WARNING,
        template="increase({num_lost_swaps}[10m]) > 0",
        summary=f"{_AT}: {_COUNT} swapped-out requests had to be recomputed",
        action="Find the failed copies in the engine's log. After a reset of the cache this is normal.",
    ),
    Alert(
        name="TpuOffloadSwapThrashing",
        severity=Severity.WARNING,
        template="rate({num_thrashed_swaps}[10m]) / rate({num_swapped_out}[10m]) > 0.2",
        for_minutes=15,
        summary=f"{_AT}: {_SHARE} of the swapped-out requests had just returned",
        action="HBM is too small for so many concurrent requests. Admit fewer at once.",
    ),
)

ALERTS = (*_COPIES, *_SIZES, *_STORAGE, *_SWAPS)
"""All alerts, by subject and in the order of docs/monitoring.md."""
