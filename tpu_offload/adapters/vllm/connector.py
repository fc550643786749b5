"""The connector class that vLLM loads: one object a role, each call handed to that role's side.

    --kv-transfer-config '{"kv_connector": "TPUOffloadConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "tpu_offload.adapters.vllm", "kv_load_failure_policy": "recompute"}'

vLLM's calls and the library's:

    scheduler role                  OffloadScheduler      worker role               OffloadWorker
    get_num_new_matched_tokens      match                 register_runner           (made)
    update_state_after_alloc        admit                 bind_connector_metadata   (takes the plan)
    build_connector_meta            plan_step             start_load_kv             begin_step
    update_connector_output         apply                 wait_for_save             end_step
    request_finished                finish                get_finished              poll
    reset_cache                     reset                 shutdown                  close

A plan goes down as the step's metadata, a report comes up as the worker's. vLLM frees the blocks of a
finished or preempted request at once: a save has been dispatched by then, and device order protects it.
"""

import logging
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
    KVConnectorWorkerMetadata,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from tpu_offload.adapters.vllm.messages import PlanMessage
from tpu_offload.adapters.vllm.scheduler_side import SchedulerSide
from tpu_offload.adapters.vllm.settings import count_workers, read_config, warn_of_failing_requests
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
class TPUOffloadConnector(KVConnectorBase_V1):
    """Keeps the KV cache of prompts in host memory. Made by vLLM, once a role.

    Raises:
      ConfigError: a setting makes no sense, or vLLM is set up in a way that is not supported.
    """

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _log_where_vllm_does()
        config = read_config(vllm_config, kv_cache_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            warn_of_failing_requests(self._kv_transfer_config.kv_load_failure_policy)
            events = vllm_config.kv_events_config
            self._scheduler = SchedulerSide(
                config,
                block_size=vllm_config.cache_config.block_size,
                num_workers=count_workers(),
                record_events=events is not None and events.enable_kv_cache_events,
            )
        else:
            self._worker = WorkerSide()

    @property
    def scheduler_side(self) -> SchedulerSide:
        """The side that decides; only in the scheduler role."""
        assert self._scheduler is not None, "a call for the scheduler role reached the worker role"
        return self._scheduler

    @property
    def worker_side(self) -> WorkerSide:
        """The side that copies; only in the worker role."""
        assert self._worker is not None, "a call for the worker role reached the scheduler role"
        return self._worker

    @property
    def requires_kv_delivery(self) -> bool:
        """False: what is not saved is computed again."""
        return False

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: "KVTransferConfig") -> bool:
        """False: it holds on to the shapes and places of the caches it was made for."""
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

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> PlanMessage:
        """See the base class."""
        return self.scheduler_side.plan(scheduler_output)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """See the base class."""
        self.scheduler_side.end_step()
        self.scheduler_side.apply(connector_output.kv_connector_worker_meta)
        if connector_output.invalid_block_ids:
            self.scheduler_side.spoil(connector_output.invalid_block_ids)

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """See the base class; the blocks may always be freed at once."""
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
        """Whether copies are in flight: an engine that has nothing else to do sees to their reports first."""
        return self._scheduler is not None and self._scheduler.has_jobs

    def get_finished_count(self) -> int:
        """How many workers report a load before vLLM takes it for finished."""
        return self.scheduler_side.num_workers

    # The worker role.

    def register_runner(self, runner: Any) -> None:
        """Called by tpu-inference when the KV caches are there, before the first step.

        Raises:
          ConfigError: a setting makes no sense for these caches, or there is too little HBM.
          LayoutError: the caches are of a kind that is not supported.
        """
        self.worker_side.register(runner)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """See the base class; before the forward pass."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, PlanMessage), f"metadata of {type(connector_metadata)}"
        self.worker_side.bind(connector_metadata)

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        """See the base class; before the forward pass if it needs a load, else after it."""
        self.worker_side.start_loads()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: loads are ordered by the device."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: saves are of all layers at once."""

    def wait_for_save(self) -> None:
        """See the base class; dispatches the saves and does not wait for them, for the device orders them."""
        self.worker_side.start_saves()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """See the base class."""
        return None, self.worker_side.take_received()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """See the base class."""
        return self.worker_side.take_invalid_block_ids()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """See the base class."""
        return self.worker_side.take_report()

    def shutdown(self) -> None:
        """See the base class; waits for copies in flight and frees the host tier."""
        if self._worker is not None:
            self._worker.close()
        else:
            _shut_worker_down(self._vllm_config)

    # Statistics.

    def get_kv_connector_stats(self) -> "KVConnectorStats | None":
        """See the base class; the scheduler role has all of them."""
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


def _shut_worker_down(vllm_config: "VllmConfig") -> None:
    """Ends the worker role of an engine that ends, if it is in this process.

    tpu-inference 0.32 never does. The worker role would keep the engine's caches, weights and host tier, and the next
    engine of the process would be given it, whether or not it wants a connector.
    """
    if not has_kv_transfer_group():
        return
    connector = get_kv_transfer_group()
    # A next engine may be there before this one has ended; then the worker role is that engine's by now.
    if isinstance(connector, TPUOffloadConnector) and connector.worker_side.serves(vllm_config):
        ensure_kv_transfer_shutdown()


def _log_where_vllm_does() -> None:
    """Gives the library's log lines vLLM's handlers, unless somebody has given them others."""
    ours, theirs = logging.getLogger("tpu_offload"), logging.getLogger("vllm")
    if not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.propagate = not ours.handlers
        ours.setLevel(theirs.level)
