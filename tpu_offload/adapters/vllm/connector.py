"""The connector class that vLLM loads. Each object has one role and forwards the calls to the side of that role.

    --kv-transfer-config '{"kv_connector": "TPUOffloadConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "tpu_offload.adapters.vllm", "kv_load_failure_policy": "recompute"}'

vLLM's calls and the library's:

    scheduler role                  OffloadScheduler
    bind_kv_cache_manager           (rollback and tainted requests use vLLM's block tables)
    get_num_new_matched_tokens      match; release if vLLM is to ask again
    update_state_after_alloc        admit
    build_connector_meta            preempt or release what was not admitted, plan_step, take_update
    update_connector_output         apply; rollback of requests with invalid blocks; failed loads by request
    request_finished (_all_groups)  finish
    get_finished_count              (how many workers report each load)
    has_pending_push_work           has_jobs: vLLM goes on with steps until copies have ended, or hang
    reset_cache, take_events        reset, take_events
    get_kv_connector_stats          stats

    worker role                     OffloadWorker
    register_runner                 (constructor)
    bind_connector_metadata         (receives the plan; reports loads that it cancels as failed)
    start_load_kv                   begin_step, resume_loads
    wait_for_layer_load             (nothing: program order on the device makes a layer wait for its load)
    save_kv_layer                   (nothing: wait_for_save saves all layers at once)
    wait_for_save                   end_step
    get_finished                    poll, take_written_loads
    get_transfer_results            the same, and failed loads by request
    build_connector_worker_meta     (returns the reports since the last call)
    get_block_ids_with_load_errors  (invalid blocks of failed loads)
    shutdown                        close

With data-parallel ranks each rank has a scheduler role, and one worker role merges their plans and splits its report
(`RankMessages` in `ranks`); `rank_reports` joins what the ranks report to vLLM. Each pipeline stage has a worker role,
and so has each host: vLLM's aggregator joins their reports (`ReportMessages.aggregate` in `messages`), and a job ends
when all have reported it. `stage_outputs` and `stage_start` mend what stages of tpu-inference lack.

A plan is the connector metadata of a step, a report its worker metadata. vLLM frees the blocks of a finished or
preempted request at once: its saves have been dispatched by then, and program order on the device protects them.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, final

from vllm.distributed.kv_transfer import (
    ensure_kv_transfer_shutdown,
    get_kv_transfer_group,
    has_kv_transfer_group,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from tpu_offload.adapters.vllm.kv_events import event_groups
from tpu_offload.adapters.vllm.log_lines import use_vllm_log
from tpu_offload.adapters.vllm.messages import PlanMessages
from tpu_offload.adapters.vllm.ranks import shut_down_with_ranks
from tpu_offload.adapters.vllm.scheduler_side import SchedulerSide
from tpu_offload.adapters.vllm.settings import (
    count_ranks,
    count_workers,
    group_order,
    num_stages,
    read_config,
    state_groups,
    warn_if_failed_loads_end_requests,
    warn_of_boundaries_inside_chunks,
)
from tpu_offload.adapters.vllm.stats import OffloadConnectorStats, OffloadPromMetrics
from tpu_offload.adapters.vllm.worker_side import WorkerSide

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.kv_transfer import KVTransferConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


@final
class TPUOffloadConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps the KV cache of prompts in host memory. vLLM creates one for each role.

    Raises:
      ConfigError: a setting is invalid, or vLLM's configuration is not supported.
    """

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        use_vllm_log()
        config = read_config(vllm_config, kv_cache_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            warn_if_failed_loads_end_requests(self._kv_transfer_config.kv_load_failure_policy)
            warn_of_boundaries_inside_chunks(config, kv_cache_config)
            events = vllm_config.kv_events_config
            self._scheduler = SchedulerSide(
                config,
                block_size=vllm_config.cache_config.block_size,
                num_workers=count_workers(vllm_config),
                num_stages=num_stages(vllm_config),
                group_order=group_order(kv_cache_config),
                state_groups=state_groups(kv_cache_config),
                retains_all_states=kv_cache_config.prefix_cache_retention_interval is None,
                num_ranks=count_ranks(vllm_config),
                has_drafts=vllm_config.speculative_config is not None,
                event_groups=event_groups(kv_cache_config),
                record_events=events is not None and events.enable_kv_cache_events,
            )
        else:
            self._worker = WorkerSide()
            if count_ranks(vllm_config) > 1:
                shut_down_with_ranks(shut_down_worker)

    @property
    def scheduler_side(self) -> SchedulerSide:
        """The scheduler side; only in the scheduler role."""
        assert self._scheduler is not None, "a call for the scheduler role reached the worker role"
        return self._scheduler

    @property
    def worker_side(self) -> WorkerSide:
        """The worker side; only in the worker role."""
        assert self._worker is not None, "a call for the worker role reached the scheduler role"
        return self._worker

    @property
    def requires_kv_delivery(self) -> bool:
        """False: blocks that are not saved are recomputed."""
        return False

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: "KVTransferConfig") -> bool:
        """False: copy programs are compiled for the shapes and placement of the caches."""
        return False

    # The scheduler role.

    def bind_kv_cache_manager(self, kv_cache_manager: "KVCacheManager") -> None:
        """See the base class."""
        super().bind_kv_cache_manager(kv_cache_manager)
        self.scheduler_side.bind(kv_cache_manager)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        """See the base class."""
        return self.scheduler_side.match(request, num_computed_tokens)

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        """See the base class."""
        self.scheduler_side.admit(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> PlanMessages:
        """See the base class."""
        return PlanMessages(requests_meta=[self.scheduler_side.plan(scheduler_output)])

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """See the base class."""
        self.scheduler_side.end_step()
        if connector_output.finished_recving:
            connector_output.finished_recving = self.scheduler_side.take_awaited(connector_output.finished_recving)
        self.scheduler_side.apply(connector_output.kv_connector_worker_meta)
        if connector_output.invalid_block_ids:
            self.scheduler_side.invalidate_blocks(connector_output.invalid_block_ids)
        self.scheduler_side.fail_loads(connector_output.failed_recving)

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """See the base class. The blocks may always be freed at once."""
        self.scheduler_side.finish(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See the base class; called in place of `request_finished`."""
        self.scheduler_side.finish(request.request_id)
        return False, None

    def reset_cache(self) -> bool:
        """See the base class."""
        self.scheduler_side.reset()
        return True

    def take_events(self) -> Iterable["KVCacheEvent"]:
        """See the base class."""
        return self.scheduler_side.take_events()

    def has_pending_push_work(self) -> bool:
        """Whether copies are in flight: an idle engine keeps stepping until they are reported, or hang."""
        return self._scheduler is not None and self._scheduler.needs_steps

    def get_finished_count(self) -> int:
        """The number of workers that must report a load before vLLM considers it finished."""
        return self.scheduler_side.num_workers

    # The worker role.

    def register_runner(self, runner: Any) -> None:
        """Called by tpu-inference when the KV caches are allocated, before the first step.

        Raises:
          ConfigError: a setting is invalid for these caches, or there is too little HBM.
          LayoutError: this kind of cache is not supported.
        """
        self.worker_side.register(runner)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """See the base class. Called before the forward pass."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, PlanMessages), f"metadata of {type(connector_metadata)}"
        self.worker_side.bind(connector_metadata)

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        """See the base class. Called before the forward pass if the pass needs a load, else after it."""
        self.worker_side.start_loads()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: program order on the device makes layers wait for their loads."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Does nothing: `wait_for_save` saves all layers at once."""

    def wait_for_save(self) -> None:
        """See the base class. Dispatches the saves without waiting: program order on the device protects the blocks."""
        self.worker_side.start_saves()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """See the base class."""
        return None, self.worker_side.take_finished_recving()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """See the base class. Names failed loads of several KV cache groups, or ranks; others by their blocks."""
        finished_recving = self.worker_side.take_finished_recving()
        return KVConnectorTransferResults(
            finished_recving=finished_recving, failed_recving=self.worker_side.take_failed_recving()
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        """See the base class."""
        return self.worker_side.take_invalid_block_ids()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """See the base class."""
        return self.worker_side.take_report()

    def shutdown(self) -> None:
        """See the base class. Waits for copies in flight and frees the host tier."""
        if self._worker is not None:
            self._worker.close()
        else:
            shut_down_worker(self._vllm_config)

    # Statistics.

    def get_kv_connector_stats(self) -> "KVConnectorStats | None":
        """See the base class. Only the scheduler role has statistics."""
        return self._scheduler.take_stats() if self._scheduler is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> "KVConnectorStats | None":
        """See the base class."""
        return OffloadConnectorStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> "KVConnectorPromMetrics | None":
        """See the base class."""
        return OffloadPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def shut_down_worker(vllm_config: "VllmConfig") -> None:
    """Shuts down the worker role of this engine, if it is in this process.

    tpu-inference 0.32 never does. The worker role would keep the engine's caches, weights and host tier alive, and the
    next engine in the process would get it, even one without a connector. With data-parallel ranks the scheduler role
    is in a process that was forked, and has a copy of it that must not be touched; see `ranks.shut_down_with_ranks`.
    """
    if not has_kv_transfer_group():
        return
    connector = get_kv_transfer_group()
    # The next engine may have been created before this one is shut down, and own the worker role by now.
    if isinstance(connector, TPUOffloadConnector) and connector.worker_side.serves(vllm_config):
        ensure_kv_transfer_shutdown()
