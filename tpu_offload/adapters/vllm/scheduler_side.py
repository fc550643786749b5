"""The scheduler side of the connector: translates vLLM's requests for `OffloadScheduler`.

vLLM schedules in one pass: it looks up waiting requests (`match`), grants blocks to those that it admits (`admit`), and
ends the pass with `plan`, which releases what was matched and not admitted.

The block hashes are vLLM's own (with storage, those of `LoRAHashes`). They cover LoRA, cache salt and images, and only
known tokens, so neither a placeholder of async scheduling nor a draft is ever in one.

This file is long because every call of vLLM's scheduler is here, with what vLLM has done before it.
"""

import dataclasses
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, final

from vllm.v1.request import RequestStatus

from tpu_offload import (
    BlockHash,
    ConfigError,
    CopyPath,
    FinishedTransfer,
    JobKind,
    KVLayout,
    MatchState,
    OffloadConfig,
    OffloadScheduler,
    OffloadStats,
    RequestLimits,
    StepPlan,
    StepReport,
    TierStats,
    Update,
)
from tpu_offload.adapters.vllm.event_sources import BlockSources
from tpu_offload.adapters.vllm.kv_events import EventGroup, to_kv_events
from tpu_offload.adapters.vllm.limits import RateLimitedWarnings, read_limits
from tpu_offload.adapters.vllm.load_timing import LoadTiming
from tpu_offload.adapters.vllm.lora_hashes import LoRAHashes
from tpu_offload.adapters.vllm.messages import PlanMessage, ReportMessages
from tpu_offload.adapters.vllm.offers import ActiveRequest, Offers
from tpu_offload.adapters.vllm.prefill_times import PrefillTimes, PrefillWork, prefill_work
from tpu_offload.adapters.vllm.ranks import count_host_tokens_in_routing
from tpu_offload.adapters.vllm.received_loads import ReceivedLoads
from tpu_offload.adapters.vllm.rollback import Rollback
from tpu_offload.adapters.vllm.stats import OffloadConnectorStats, tier_counts
from tpu_offload.adapters.vllm.step_clock import StepClock
from tpu_offload.adapters.vllm.tainted_requests import TaintedRequests
from tpu_offload.config import LoadMode
from tpu_offload.core.policies import find_policy

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

MAX_SILENT_S = 10.0  # without a result, an engine that computes nothing goes on with steps for so long
STATS_STEPS = 8  # that share a snapshot of the statistics while requests run: it takes a tenth of a millisecond
_MAX_STEPS_WITHOUT_LAYOUT = 16  # in which requests wait; with pipeline stages the first report comes some steps later


@final
class SchedulerSide:
    """The scheduler side. All calls come from the thread of vLLM's scheduler.

    Args:
      config: the settings.
      block_size: tokens in a block.
      num_workers: processes that hold a part of the caches.
      num_stages: pipeline stages, each with layers of its own in one of these processes.
      group_order: vLLM's KV cache groups in the library's order, of those with states only one, the last.
      state_groups: all that have states.
      retains_all_states: vLLM keeps each state that it computes at a block boundary, not only where it expects a later
        request to continue.
      event_groups: how KV events name each of the library's layer groups, see `to_kv_events`.
      record_events: whether `take_events` is called.
      num_ranks: data-parallel ranks of the engine, each with a scheduler side like this one.
      has_drafts: the engine decodes speculatively.
      clock: monotonic seconds.

    Attributes:
      num_workers: see above.
      scheduler_id: identifies it in messages, as `PlanMessage.scheduler_id`.

    Raises:
      ConfigError: the eviction policy cannot be created.
    """

    def __init__(
        self,
        config: OffloadConfig,
        *,
        block_size: int,
        num_workers: int,
        num_stages: int = 1,
        group_order: Sequence[int] = (0,),
        state_groups: Sequence[int] = (),
        retains_all_states: bool = False,
        event_groups: Sequence[Sequence[EventGroup]] = (),
        record_events: bool,
        num_ranks: int = 1,
        has_drafts: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_workers, self._num_stages = num_workers, num_stages
        self._config = config
        self._policy = find_policy(config.eviction_policy)  # here, so that an error ends the engine at start
        self._block_size, self._num_groups = block_size, len(group_order)
        self._state_groups, self._event_groups = state_groups, event_groups
        self._event_sources = BlockSources() if record_events else None
        self._hashes = LoRAHashes()
        self._offers = Offers(
            block_size=block_size,
            decode_save=config.decode_save,
            group_order=group_order,
            state_groups=state_groups,
            retains_all_states=retains_all_states,
            event_sources=self._event_sources,
            hashes=self._hashes,
        )
        self._load_timing = LoadTiming(sync_load=bool(config.sync_load), block_size=block_size)
        self.scheduler_id = uuid.uuid4().hex
        self._has_ranks, self._has_drafts = num_ranks > 1, has_drafts
        # A `DPScheduler` alone makes no steps for copies in flight, see `rank_reports`.
        self._clock = StepClock(clock) if self._has_ranks else clock
        # Only where prefill is compared with loads, and a step has all that the engine computes at a time.
        is_timed = config.effective_load_mode is LoadMode.AUTO and num_ranks == 1 and num_stages == 1
        self._prefill_times = PrefillTimes(clock) if is_timed else None
        self._warn_of_limits = RateLimitedWarnings(clock=clock)
        # None until the workers have reported the layout, with the first step. Until then the host tier has no memory.
        self._offload: OffloadScheduler | None = None
        self._layouts: dict[int, KVLayout] = {}  # by worker id
        self._early_reports: list[StepReport] = []  # from before all stages have reported their layout
        self._num_steps_without_layout = 0
        self._active: dict[str, ActiveRequest] = {}
        self._promised: set[str] = set()  # matched in this pass and not admitted yet
        # Requests that waited for a load that has failed, until they are admitted again.
        self._failed_loads: set[str] = set()
        self._to_requeue: set[str] = set()  # those of them that vLLM still has among the requests that hold blocks
        self._computed_on_invalid = False
        self._matched, self._admitted = set[str](), set[str]()  # in this pass
        self._unfinished: dict[str, Request] = {}  # from the first match on
        self._limits: dict[str, RequestLimits | None] = {}  # of unfinished requests
        self._awaited: set[str] = set()  # requests whose load vLLM waits for; only with ranks
        self._last_stats, self._stats_changed, self._num_steps_without_stats = OffloadStats(), False, 0
        self._last_tier_stats: tuple[TierStats, ...] = ()
        self._transfers: list[FinishedTransfer] = []
        self._silent_since_s: float | None = None  # the first idle step or a later result; None while it computes

    def bind(self, kv_cache_manager: "KVCacheManager") -> None:
        """Takes vLLM's KV cache manager, before the first step.

        Raises:
          ConfigError: KV cache groups of states do not have the same block tables.
        """
        are_mirrored = getattr(kv_cache_manager.coordinator, "mirror_mamba_groups", False)
        if len(self._state_groups) > 1 and not are_mirrored:
            raise ConfigError(
                f"tpu_offload: the {len(self._state_groups)} KV cache groups of states have rows of their own, expected"
                " the same rows, as in tpu-inference 0.32: run this model without the connector"
            )
        sync_loads = bool(self._config.sync_load)
        self._rollback = Rollback(kv_cache_manager, block_size=self._block_size, sync_loads=sync_loads)
        self._tainted = TaintedRequests(kv_cache_manager, block_size=self._block_size, state_groups=self._state_groups)
        active = self._active.values()
        self._received = ReceivedLoads(kv_cache_manager, holding=lambda: [entry.request for entry in active])
        if self._has_ranks and self._config.patch_runner:
            count_host_tokens_in_routing(kv_cache_manager, self._num_host_tokens)

    def _num_host_tokens(self, block_hashes: Sequence[BlockHash], max_tokens: int) -> int:
        """Tokens of a prompt in the host tier, at most so many; see `count_host_tokens_in_routing`."""
        if self._offload is None:
            return 0
        return self._offload.num_cached_tokens(block_hashes, num_tokens=max_tokens + 1)

    def match(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        """Looks up a waiting request, as `get_num_new_matched_tokens` does.

        Returns:
          The tokens past `num_computed_tokens` that are in the host tier, and whether they are loaded asynchronously.
          None instead of a number: ask again in the next step. The answer of the library is ARRIVING (`MatchState`),
          the request is to be queued behind others, the blocks that it asks for are being loaded for another request,
          or the workers have not reported yet what their storage tiers have.
        """
        request_id = request.request_id
        if self._deactivate(request_id) and self._offload is not None:
            # vLLM has taken its blocks without reporting it yet: the cache was reset, or a load failed. That load may
            # still be in flight, on another worker or in the library's tables.
            self._offload.preempt(request_id)
        self._matched.add(request_id)
        if request_id not in self._unfinished:
            self._unfinished[request_id] = request
            self._limits[request_id] = read_limits(request_id, request.kv_transfer_params, self._warn_of_limits)
            if self._has_drafts and request.resumable:
                # vLLM 0.32 counts drafts that were accepted beyond the last token of a turn as computed tokens of the
                # next turn, whose tokens are others: what follows the first prompt may be wrong.
                self._tainted.add(request_id, (), request)
        limits = self._limits[request_id]
        if self._awaits_stored_chunks:
            return None, False
        if request_id in self._to_requeue:
            # It has lost its blocks, and vLLM looks at no request behind it until it fits. It may never fit: computing
            # a prompt takes more window blocks than vLLM has reserved for loading it, and those behind it may hold
            # them. A request that has to ask again is queued behind all that hold blocks.
            self._to_requeue.discard(request_id)
            return None, False
        if self._offload is None or request_id in self._failed_loads:
            # A request that is to wait for a load has to fit into HBM beside what vLLM has reserved for all that have
            # waited for one. That includes its own blocks, which it has lost, so it might never fit.
            return 0, False
        if request.skip_reading_prefix_cache:
            limits = dataclasses.replace(limits or RequestLimits(), max_load_tokens=0)
        self._stats_changed = True
        if self._event_sources is not None and self._config.has_storage:  # what is promoted is stored, too
            self._event_sources.track(request)
        found = self._offload.match(
            request_id,
            self._hashes.of(request),
            num_tokens=request.num_tokens,
            num_computed_tokens=num_computed_tokens,
            limits=limits,
            can_wait=False,  # it waits in vLLM's queue: workers report only loads that they were sent
        )
        if self._state_groups and found.junction_tokens > request.shared_prefix_boundary:
            # vLLM has set it to where the prompt parts from those in HBM, just before this call. It ends a prefill
            # chunk there, and keeps the state.
            request.shared_prefix_boundary = found.junction_tokens
        if found.state is MatchState.ARRIVING:
            self._offload.release(request_id)
            return None, False
        if found.state is MatchState.MISS:
            return 0, False
        before_step = self._load_timing.runs_before_step(request_id, found.num_tokens)
        if not before_step:
            first = request.block_hashes[num_computed_tokens // self._block_size]
            if not self._load_timing.begin_background(request_id, first, self._active_request):
                self._offload.release(request_id)
                return None, False
        self._promised.add(request_id)
        return found.num_tokens, not before_step

    @property
    def _awaits_stored_chunks(self) -> bool:
        """Whether the workers' first report, after a step in which requests wait, may say what storage has."""
        waits = self._offload is None and self._config.has_storage
        return waits and self._num_steps_without_layout < _MAX_STEPS_WITHOUT_LAYOUT

    def admit(self, request: "Request", block_tables: Sequence[Sequence[int]], num_loaded_tokens: int) -> None:
        """vLLM has granted blocks; a request with a load waits for it while holding them."""
        request_id = request.request_id
        self._admitted.add(request_id)
        self._active[request_id] = entry = ActiveRequest(request, num_sent_tokens=request.num_prompt_tokens)
        # Without a layout there is no scheduler that applies limits.
        if request_id not in self._tainted and (self._offload is not None or not self._limits.get(request_id)):
            self._offers.add(entry)
        self._rollback.admit(request_id)
        self._received.discard(request_id)
        self._promised.discard(request_id)
        self._failed_loads.discard(request_id)
        self._to_requeue.discard(request_id)
        if self._offload is not None:
            self._offload.admit(request_id, self._offers.ordered(block_tables), num_loaded_tokens=num_loaded_tokens)
        if self._has_ranks and num_loaded_tokens:
            self._awaited.add(request_id)

    def take_awaited(self, request_ids: set[str]) -> set[str]:
        """Those of the requests whose loads have ended that are this scheduler's: each rank is told of all."""
        own = request_ids
        if self._has_ranks:
            own = request_ids & self._awaited
            self._awaited -= own
        self._received.add(own & self._active.keys())
        return own

    def plan(self, output: "SchedulerOutput") -> PlanMessage:
        """Ends a pass: returns the plan for the step that it scheduled."""
        idle = not (output.total_num_scheduled_tokens or self._computes_elsewhere())
        if not idle:
            self._silent_since_s = None
        elif self._silent_since_s is None:
            self._silent_since_s = self._clock()
        preempted, matched, self._matched = output.preempted_req_ids or (), self._matched, set()
        admitted, self._admitted = self._admitted, set()
        for request_id in preempted:
            if request_id not in matched:  # else `match` has handled it, and it may hold blocks again
                self._deactivate(request_id)
                if self._offload is not None:
                    self._offload.preempt(request_id)
        if self._tainted:
            requests = {r: entry.request for r, entry in self._active.items()}
            for request_id in self._tainted.propagate(requests, admitted & requests.keys()):
                if request_id not in admitted:  # an admitted one has nothing to save yet, and may have a load
                    self._stop_saving(request_id)
                self._offers.remove(request_id)
        message = PlanMessage(
            plan=StepPlan(step_id=0),
            idle=idle,
            invalid_block_ids=self._rollback.begin_step(),
            tainted=self._tainted.request_ids,
            finished_req_ids=frozenset(output.finished_req_ids),
            scheduler_id=self.scheduler_id,
        )
        if isinstance(self._clock, StepClock):
            self._clock.step()
        if self._offload is None:
            self._num_steps_without_layout += 1
            return dataclasses.replace(message, plan=StepPlan(step_id=self._num_steps_without_layout))
        for request_id in self._promised:
            self._offload.release(request_id)
        self._promised.clear()
        self._stats_changed |= self._offload.has_jobs  # checked before `plan_step` expires them
        plan = self._offload.plan_step(self._offers.of_step(output))
        sync = self._load_timing.take_sync()
        in_background = frozenset(job.job_id for job in plan.of(JobKind.LOAD) if job.request_id not in sync)
        self._apply_update(self._offload.take_update())  # not only on reports: workers may be silent
        self._stats_changed |= not plan.empty
        return dataclasses.replace(
            message,
            plan=plan,
            known_tokens=self._offers.take_known_tokens(),
            background_job_ids=in_background,
            is_timed=self._begin_timing(output, plan.step_id),
        )

    def _begin_timing(self, output: "SchedulerOutput", step_id: int) -> bool:
        """Times the step if prefill is measured and the step computes something; returns whether it does."""
        if self._prefill_times is None or not output.total_num_scheduled_tokens:
            return False
        self._prefill_times.begin(step_id, self._prefill_work(output))
        return True

    def _prefill_work(self, output: "SchedulerOutput") -> PrefillWork | None:
        """What a step computes of prompts; None if it does not tell how fast prefill is."""
        assert self._offload is not None, "without a layout nothing is planned"
        num_scheduled = output.num_scheduled_tokens
        # A step of decodes has about one token a request: it is recognized without a look at each of them.
        if output.total_num_scheduled_tokens < 2 * len(num_scheduled) or self._offload.has_loads:
            return None
        spans = []
        for request_id, num_tokens in num_scheduled.items():
            entry = self._active.get(request_id)
            if entry is None:
                return None
            first = entry.request.num_computed_tokens
            spans.append((first, first + num_tokens, first + 1 < entry.request.num_tokens))
        return prefill_work(spans)

    def apply(self, messages: "KVConnectorWorkerMetadata | None") -> None:
        """Applies the workers' reports after a step.

        The workers report failed loads and lost caches to vLLM, as invalid block ids or as requests. This updates only
        the library.
        """
        if messages is None:
            return
        assert isinstance(messages, ReportMessages), f"a report of {type(messages)}"
        message = messages.of_schedulers.get(self.scheduler_id)
        if message is None:
            return
        for request_id, block_ids in message.tainted:
            self._tainted.add(request_id, block_ids, self._unfinished.get(request_id))
            requests = {r: entry.request for r, entry in self._active.items()}
            for tainted_id in (request_id, *self._tainted.propagate(requests, ())):
                self._stop_saving(tainted_id)
        if message.reports or message.tainted or message.needs_reset:  # a step that is only timed changes nothing
            self._stats_changed = True
        self._computed_on_invalid |= message.computed_on_invalid
        reports = [*self._early_reports, *message.reports]
        self._early_reports.clear()
        if self._silent_since_s is not None and any(report.results for report in reports):
            self._silent_since_s = self._clock()
        if self._offload is None:
            self._layouts.update(message.layouts)
            if len(self._layouts) < self._num_stages:
                self._early_reports = reports
                return
            self._offload = self._make_scheduler()
        for report in reports:
            self._apply_update(self._offload.apply(report))
        if self._prefill_times is not None and message.timed_step_id is not None:
            measured = self._prefill_times.end(message.timed_step_id)
            if measured is not None:
                work, seconds = measured
                self._offload.swap.observe_prefill(work.num_tokens, seconds, work.num_attended)
        if message.needs_reset:
            self.reset()

    def _apply_update(self, update: Update) -> None:
        self._transfers += update.transfers
        for failed in update.failed_loads:
            self._reoffer(failed.request_id)

    def _computes_elsewhere(self) -> bool:
        """Whether stages of the pipeline may be computing earlier steps."""
        return self._num_stages > 1 and any(entry.request.num_in_flight_tokens for entry in self._active.values())

    def _stop_saving(self, request_id: str) -> None:
        """Saves nothing more of a request. A load that it waits for continues, because vLLM waits for it, too."""
        self._offers.remove(request_id)
        entry = self._active.get(request_id)
        waits = entry is not None and entry.request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        if self._offload is not None and not waits:
            self._offload.preempt(request_id)

    def end_step(self) -> None:
        """A step has ended, and vLLM has accepted or dropped its tokens."""
        self._rollback.end_step()

    def invalidate_blocks(self, block_ids: set[int]) -> None:
        """Handles invalid blocks: a worker failed to load them, or has lost its caches."""
        requests = {request_id: entry.request for request_id, entry in self._active.items()}
        computed_on, self._computed_on_invalid = self._computed_on_invalid, False
        rolled_back = self._rollback.invalidate(block_ids, requests, computed_on=computed_on)
        self.fail_loads(rolled_back)
        for request_id in rolled_back:
            self._reoffer(request_id)

    def fail_loads(self, request_ids: Iterable[str]) -> None:
        """Those of these requests that wait for a load will be computed: it has failed in a worker."""
        for request_id in request_ids:
            entry = self._active.get(request_id)
            if entry is not None and entry.request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
                self._failed_loads.add(request_id)
                if self._num_groups > 1:  # with one, vLLM has reserved all that it needs
                    self._to_requeue.add(request_id)

    def _reoffer(self, request_id: str) -> None:
        """Withdraws what a request has offered to save; it is offered again as the request recomputes it.

        After a synchronous load the request has offered blocks that depend on the invalid ones.
        """
        if self._offload is not None:
            self._offload.preempt(request_id)
        entry = self._active.get(request_id)
        if entry is not None and request_id not in self._tainted:
            entry.next_offer_tokens = 0
            self._offers.add(entry)

    def finish(self, request_id: str) -> None:
        """The request ended, in any state."""
        self._deactivate(request_id)
        self._promised.discard(request_id)
        self._failed_loads.discard(request_id)
        self._to_requeue.discard(request_id)
        self._unfinished.pop(request_id, None)
        self._limits.pop(request_id, None)
        self._load_timing.end_background(request_id)
        self._hashes.finish(request_id)
        self._tainted.finish(request_id)
        self._rollback.finish(request_id)
        self._stats_changed = True
        if self._offload is not None:
            if self._event_sources is not None:
                self._event_sources.finish(request_id, next_job_id=self._offload.job_ids.stop)
            self._offload.finish(request_id)

    def reset(self) -> None:
        """Invalidates everything that was saved."""
        self._promised.clear()
        self._hashes.reset()
        self._stats_changed = True
        self._silent_since_s = None  # storage is to be emptied, which takes steps
        if self._offload is not None:
            self._offload.reset()

    @property
    def has_jobs(self) -> bool:
        """Whether copies are in flight, or to be planned."""
        return self._offload is not None and self._offload.has_jobs

    @property
    def needs_steps(self) -> bool:
        """Whether an engine that computes nothing should go on with steps: until all copies have ended.

        Not until those to a disk or server that hangs have: a pause, or the end of the engine, would wait for them.
        """
        if self._offload is None or not self._offload.has_jobs:
            return False
        since_s = self._silent_since_s
        return self._offload.has_loads or since_s is None or self._clock() < since_s + MAX_SILENT_S

    def take_events(self) -> Iterable["KVCacheEvent"]:
        """KV events of the host tier, for routers. A chunk is named by the hash of its last block, as in vLLM's own."""
        if self._event_sources is None or self._offload is None:
            return
        yield from to_kv_events(
            map(self._hashes.original, self._offload.take_events()),
            self._event_groups,
            sources=self._event_sources,
            block_size=self._block_size,
            blocks_per_chunk=self._config.blocks_per_chunk,
        )
        if not self._offload.has_events:
            self._event_sources.forget(oldest_job_id=self._offload.job_ids.start)

    def take_stats(self) -> OffloadConnectorStats | None:
        """The counts since it last returned some; None if nothing has changed, or in most steps while requests run."""
        if self._offload is None or not self._stats_changed:
            return None
        self._num_steps_without_stats += 1
        if self._unfinished and self._num_steps_without_stats < STATS_STEPS:
            return None
        self._stats_changed, self._num_steps_without_stats = False, 0
        stats = self._offload.stats()
        if stats == self._last_stats:
            return None
        last, self._last_stats = self._last_stats, stats
        transfers, self._transfers = self._transfers, []
        last_tiers, self._last_tier_stats = self._last_tier_stats, self._offload.tier_stats()
        of_tiers = tier_counts(self._last_tier_stats, last_tiers)
        return OffloadConnectorStats.of(stats.changes_since(last), transfers, of_tiers)

    def check_invariants(self) -> None:
        """Raises AssertionError if the scheduler's tables are inconsistent. For tests."""
        if self._offload is not None:
            self._offload.check_invariants()

    def check_empty(self) -> None:
        """Raises AssertionError if something is left of a request, for tests after the last one."""
        assert not self._active, "requests that hold blocks"
        assert not self._promised, "promised tokens"
        assert not self._awaited, "loads that vLLM waits for"
        assert not self._failed_loads | self._to_requeue, "requests whose load has failed"
        assert not self._unfinished.keys() | self._limits.keys(), "requests that have ended"
        assert not self._tainted.request_ids, "tainted requests that have ended"
        self._load_timing.check_empty()
        self._received.check_empty()
        self._rollback.check_empty()

    def _active_request(self, request_id: str) -> "Request | None":
        entry = self._active.get(request_id)
        return entry.request if entry is not None else None

    def _deactivate(self, request_id: str) -> bool:
        """Removes a request that holds no blocks any more. Returns whether it was active."""
        self._offers.remove(request_id)
        self._received.discard(request_id)
        return self._active.pop(request_id, None) is not None

    def _make_scheduler(self) -> OffloadScheduler:
        layouts = [self._layouts[worker_id] for worker_id in sorted(self._layouts)]
        layout = KVLayout.of_stages(layouts) if self._num_stages > 1 else layouts[0]
        if self._config.load_path is not CopyPath.STAGED:  # the staging buffer limits staged loads
            self._load_timing.max_blocks = self._config.max_load_blocks(layout)
        return OffloadScheduler(
            self._config,
            layout,
            num_workers=self.num_workers,
            policy=self._policy,
            clock=self._clock,
            record_events=self._event_sources is not None,
        )
