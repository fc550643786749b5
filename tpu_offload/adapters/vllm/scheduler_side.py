"""The scheduler's half of the connector: vLLM's requests in the words of `OffloadScheduler`.

vLLM schedules in one pass: it asks what waiting requests would find (`match`), grants blocks to those it
takes (`admit`), and ends the pass with `plan`. What it asked for and did not take is given back there.

When it asks, the request's hashes are vLLM's own: they cover LoRA, cache salt and images, and only tokens that
are known, so that neither a placeholder of async scheduling nor a draft is ever in one. What a step will have
computed is the other half of what may be saved; it is counted as if every draft were accepted, and of the two
the smaller counts.
"""

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, final

from vllm.distributed.kv_events import MEDIUM_CPU, AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.request import RequestStatus

from tpu_offload import (
    BlockHash,
    CopyPath,
    FinishedTransfer,
    JobKind,
    KVLayout,
    MatchState,
    OffloadConfig,
    OffloadScheduler,
    OffloadStats,
    RequestLimits,
    ScheduledRequest,
    StepPlan,
    TierEventKind,
    Update,
)
from tpu_offload.adapters.vllm.distrust import Distrust
from tpu_offload.adapters.vllm.limits import FewLines, read_limits
from tpu_offload.adapters.vllm.messages import KnownTokens, PlanMessage, ReportMessage
from tpu_offload.adapters.vllm.rollback import Rollback
from tpu_offload.adapters.vllm.stats import OffloadConnectorStats
from tpu_offload.core.policies import find_policy

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


@dataclasses.dataclass(slots=True)
class _Watched:
    """A request that holds blocks.

    Attributes:
      request: vLLM's.
      next_offer_tokens: when it has computed this many tokens, there is something new to save.
      num_told_tokens: of so many tokens the workers need not be told any more: its prompt, and what they were.
    """

    request: "Request"
    next_offer_tokens: int = 0
    num_told_tokens: int = 0


@final
class SchedulerSide:
    """All calls come from the thread of vLLM's scheduler.

    Args:
      config: the settings.
      block_size: tokens in a block.
      num_workers: processes that hold a part of the caches.
      record_events: whether somebody takes the events.
      clock: monotonic seconds.
    Raises:
      ConfigError: the settings name an eviction policy that cannot be made.
    """

    def __init__(
        self,
        config: OffloadConfig,
        *,
        block_size: int,
        num_workers: int,
        record_events: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_workers = num_workers
        self._config = config
        self._policy = find_policy(config.eviction_policy)  # before the first step: an error then ends the engine
        self._block_size = block_size
        self._record_events = record_events
        self._clock = clock
        self._log_mistake = FewLines(clock=clock)
        # What a block is made of only the workers know; they say so with the first step. Before that the host tier
        # has no memory, so there is nothing to find and nowhere to save.
        self._offload: OffloadScheduler | None = None
        self._num_early_steps = 0
        self._watched: dict[str, _Watched] = {}
        # Those of them that may have something new to save; for the many that only generate a step costs nothing.
        self._offering: dict[str, _Watched] = {}
        self._promised: set[str] = set()  # matched in this pass and not admitted
        self._sync_blocks: dict[str, int] = {}  # that the coming step waits for
        self._max_sync_blocks = 0  # 0 for no bound
        # Requests whose load goes in the background, by the first block that it loads, and the other way round.
        self._in_background: dict[BlockHash, str] = {}
        self._first_in_background: dict[str, BlockHash] = {}
        self._computed_on_invalid = False
        self._matched: set[str] = set()  # matched in this pass
        self._admitted: set[str] = set()  # admitted in this pass
        self._unfinished: dict[str, Request] = {}  # those that were matched
        self._limits: dict[str, RequestLimits | None] = {}  # theirs
        self._known_tokens: list[KnownTokens] = []  # for the coming message
        self._told = OffloadStats()
        self._has_news = False  # something may have been counted since then
        self._transfers: list[FinishedTransfer] = []

    def bind(self, kv_cache_manager: "KVCacheManager") -> None:
        """vLLM's cache manager, before the first step."""
        sync_loads = bool(self._config.sync_load)
        self._rollback = Rollback(kv_cache_manager, block_size=self._block_size, sync_loads=sync_loads)
        self._distrust = Distrust(kv_cache_manager, block_size=self._block_size)

    def match(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens past `num_computed_tokens` in the host tier, and whether they arrive between steps.

        None in place of a number: ask again in the next step, for the next chunk is being saved, or the staging buffer
        has too little room for the load.
        """
        request_id = request.request_id
        if self._forget(request_id) and self._offload is not None:
            # It held blocks and holds none now, though no pass has said so yet: vLLM has reset its cache, or a load
            # brought nothing. That load may be in flight still, on another worker or in the books only.
            self._offload.preempt(request_id)
        self._matched.add(request_id)
        if request_id not in self._unfinished:
            self._unfinished[request_id] = request
            self._limits[request_id] = read_limits(request_id, request.kv_transfer_params, self._log_mistake)
        limits = self._limits[request_id]
        if self._offload is None:
            return 0, False
        if request.skip_reading_prefix_cache:
            limits = dataclasses.replace(limits or RequestLimits(), max_load_tokens=0)
        self._has_news = True
        found = self._offload.match(
            request_id,
            request.block_hashes,
            num_tokens=request.num_tokens,
            num_computed_tokens=num_computed_tokens,
            limits=limits,
            can_wait=False,  # vLLM's own queue is where it waits: workers tell vLLM only of loads that they were sent
        )
        if found.state is MatchState.ARRIVING:
            self._offload.release(request_id)
            return None, False
        if found.state is MatchState.MISS:
            return 0, False
        holds_up = self._holds_up_a_step(request_id, found.num_tokens)
        if self._config.sync_load and not holds_up:
            first = request.block_hashes[num_computed_tokens // self._block_size]
            if self._is_on_its_way(first, request_id):
                self._offload.release(request_id)
                return None, False
            self._forget_first(request_id)
            self._in_background[first] = request_id
            self._first_in_background[request_id] = first
        self._promised.add(request_id)
        return found.num_tokens, not holds_up

    def admit(self, request: "Request", block_tables: Sequence[Sequence[int]], num_loaded_tokens: int) -> None:
        """vLLM granted blocks, with which the request waits for a load if it has one."""
        request_id = request.request_id
        self._admitted.add(request_id)
        self._watched[request_id] = entry = _Watched(request, num_told_tokens=request.num_prompt_tokens)
        # Without a layout nobody is there to heed limits.
        if request_id not in self._distrust and (self._offload is not None or not self._limits.get(request_id)):
            self._offering[request_id] = entry
        self._rollback.admit(request_id)
        self._promised.discard(request_id)
        if self._offload is not None:
            self._offload.admit(request_id, block_tables, num_loaded_tokens=num_loaded_tokens)

    def plan(self, output: "SchedulerOutput") -> PlanMessage:
        """Ends a pass: what the workers do in the step that it scheduled."""
        idle = output.total_num_scheduled_tokens == 0
        preempted, matched, self._matched = output.preempted_req_ids or (), self._matched, set()
        admitted, self._admitted = self._admitted, set()
        for request_id in preempted:
            if request_id not in matched:  # else it was given up when it was matched, and may hold blocks again
                self._forget(request_id)
                if self._offload is not None:
                    self._offload.preempt(request_id)
        if self._distrust:
            requests = {r: entry.request for r, entry in self._watched.items()}
            for request_id in self._distrust.spread(requests, admitted & requests.keys()):
                if request_id not in admitted:  # else it has nothing to save yet, and may be about to load
                    self._stop_saving(request_id)
                self._offering.pop(request_id, None)
        message = PlanMessage(
            StepPlan(step_id=0),
            idle,
            spoilt_block_ids=self._rollback.begin_step(),
            distrusted=self._distrust.request_ids,
            finished=frozenset(output.finished_req_ids),
        )
        if self._offload is None:
            self._num_early_steps += 1
            return dataclasses.replace(message, plan=StepPlan(step_id=self._num_early_steps))
        for request_id in self._promised:
            self._offload.release(request_id)
        self._promised.clear()
        self._has_news |= self._offload.has_jobs  # asked before they time out
        plan = self._offload.plan_step(self._changed(output))
        loads = plan.of(JobKind.LOAD)
        in_background = frozenset(job.job_id for job in loads if job.request_id not in self._sync_blocks)
        self._sync_blocks.clear()
        self._hear(self._offload.take_update())  # a worker may never say anything again
        self._has_news |= not plan.empty
        known_tokens, self._known_tokens = tuple(self._known_tokens), []
        return dataclasses.replace(message, plan=plan, known_tokens=known_tokens, background_job_ids=in_background)

    def apply(self, message: "KVConnectorWorkerMetadata | None") -> None:
        """Takes what the workers reported after a step.

        What becomes of loads, and that caches are lost, vLLM hears from the workers themselves, as invalid blocks. Here
        only the books are kept.
        """
        if message is None:
            return
        assert isinstance(message, ReportMessage), f"a report of {type(message)}"
        for request_id, block_ids in message.distrusted:
            self._distrust.hear(request_id, block_ids, self._unfinished.get(request_id))
            requests = {r: entry.request for r, entry in self._watched.items()}
            for distrusted in (request_id, *self._distrust.spread(requests, ())):
                self._stop_saving(distrusted)
        if self._offload is None:
            if message.layout is None:
                return
            self._offload = self._start(message.layout)
        self._has_news = True
        self._computed_on_invalid |= message.computed_on_invalid
        for report in message.reports:
            self._hear(self._offload.apply(report))
        if message.forget_all:
            self.reset()

    def _hear(self, update: Update) -> None:
        self._transfers += update.transfers
        for failed in update.failed_loads:
            self._offer_anew(failed.request_id)

    def _stop_saving(self, request_id: str) -> None:
        """Nothing more of a request is saved. A load that it waits for goes on: vLLM waits for that, too."""
        self._offering.pop(request_id, None)
        entry = self._watched.get(request_id)
        waits = entry is not None and entry.request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        if self._offload is not None and not waits:
            self._offload.preempt(request_id)

    def end_step(self) -> None:
        """A step has ended, and vLLM has taken its tokens or dropped them."""
        self._rollback.end_step()

    def spoil(self, block_ids: set[int]) -> None:
        """Blocks do not hold what they should: some worker failed to load them, or has lost its caches."""
        requests = {request_id: entry.request for request_id, entry in self._watched.items()}
        computed_on, self._computed_on_invalid = self._computed_on_invalid, False
        for request_id in self._rollback.spoil(block_ids, requests, computed_on=computed_on):
            self._offer_anew(request_id)

    def _offer_anew(self, request_id: str) -> None:
        """Nothing of a request is saved until it says anew how far it has computed.

        It has said so already if its load was synchronous, and rests on blocks that never came.
        """
        if self._offload is not None:
            self._offload.preempt(request_id)
        entry = self._watched.get(request_id)
        if entry is not None and request_id not in self._distrust:
            entry.next_offer_tokens = 0
            self._offering[request_id] = entry

    def finish(self, request_id: str) -> None:
        """The request ended, in whatever state."""
        self._forget(request_id)
        self._promised.discard(request_id)
        self._unfinished.pop(request_id, None)
        self._limits.pop(request_id, None)
        self._forget_first(request_id)
        self._distrust.finish(request_id)
        self._rollback.finish(request_id)
        self._has_news = True
        if self._offload is not None:
            self._offload.finish(request_id)

    def reset(self) -> None:
        """Nothing that was saved may be found any more."""
        self._promised.clear()
        self._has_news = True
        if self._offload is not None:
            self._offload.reset()

    @property
    def has_jobs(self) -> bool:
        """Whether copies are in flight."""
        return self._offload is not None and self._offload.has_jobs

    def take_events(self) -> Iterable[KVCacheEvent]:
        """What changed in the host tier, for routers. A chunk goes by the hash of its last block, as in vLLM's own."""
        if not self._record_events or self._offload is None:
            return
        for event in self._offload.take_events():
            if event.kind is TierEventKind.CLEARED:
                # There is no such event for one medium. After a reset, or the loss of a worker, HBM has nothing either.
                yield AllBlocksCleared()
                continue
            hashes = [maybe_convert_block_hash(block_hash) for block_hash in event.block_hashes]
            if event.kind is TierEventKind.REMOVED:
                yield BlockRemoved(block_hashes=hashes, medium=MEDIUM_CPU)
            else:
                yield BlockStored(
                    block_hashes=hashes,
                    parent_block_hash=None,
                    token_ids=[],
                    block_size=self._block_size * self._config.blocks_per_chunk,
                    lora_id=None,
                    medium=MEDIUM_CPU,
                    lora_name=None,
                )

    def take_stats(self) -> OffloadConnectorStats | None:
        """What was counted since the last call; None when nothing was."""
        if self._offload is None or not self._has_news:
            return None
        self._has_news = False
        stats = self._offload.stats()
        if stats == self._told:
            return None
        told, self._told = self._told, stats
        transfers, self._transfers = self._transfers, []
        return OffloadConnectorStats.of(stats.since(told), transfers)

    def check_invariants(self) -> None:
        """Raises AssertionError if the books disagree. For tests."""
        if self._offload is not None:
            self._offload.check_invariants()

    def _holds_up_a_step(self, request_id: str, num_tokens: int) -> bool:
        """Whether the load of a request that was just matched goes before the coming step, with its first tokens.

        The whole batch waits for such loads. So all of one step together are bounded, and what is beyond that waits for
        its load in vLLM's queue, while others run.
        """
        if not self._config.sync_load:
            return False
        self._sync_blocks.pop(request_id, None)
        num_blocks = -(-num_tokens // self._block_size)
        if self._max_sync_blocks and sum(self._sync_blocks.values()) + num_blocks > self._max_sync_blocks:
            return False
        self._sync_blocks[request_id] = num_blocks
        return True

    def _is_on_its_way(self, first: BlockHash, request_id: str) -> bool:
        """Whether another request waits for a load that begins with the same block.

        vLLM finds blocks in its prefix cache once their load is over. Until then requests for one document would each
        load all of it, into blocks of their own. That load ends, well or not, after `job_timeout_s` at the latest.
        """
        other = self._watched.get(self._in_background.get(first, ""))
        return (
            other is not None
            and other.request.request_id != request_id
            and other.request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        )

    def _forget_first(self, request_id: str) -> None:
        """The request loads in the background no more, or from another block on."""
        first = self._first_in_background.pop(request_id, None)
        if first is not None and self._in_background.get(first) == request_id:
            del self._in_background[first]

    def _forget(self, request_id: str) -> bool:
        """Whether the request was watched."""
        self._offering.pop(request_id, None)
        return self._watched.pop(request_id, None) is not None

    def _start(self, layout: KVLayout) -> OffloadScheduler:
        if self._config.load_path is not CopyPath.STAGED:  # else the staging buffer is the bound
            self._max_sync_blocks = self._config.max_load_blocks(layout)
        return OffloadScheduler(
            self._config,
            layout,
            num_workers=self.num_workers,
            policy=self._policy,
            clock=self._clock,
            record_events=self._record_events,
        )

    def _changed(self, output: "SchedulerOutput") -> list[ScheduledRequest]:
        """The requests that complete a block in this step."""
        changed = []
        num_scheduled, tables = output.num_scheduled_tokens, output.kv_connector_block_state
        for request_id, entry in list(self._offering.items()):
            num_scheduled_tokens = num_scheduled.get(request_id)
            if num_scheduled_tokens is None:
                continue
            num_computed_tokens = entry.request.num_computed_tokens + num_scheduled_tokens
            if num_computed_tokens >= entry.next_offer_tokens:
                assert tables is not None, "a step without block tables"
                changed.append(self._offer(entry, tables.resolve_block_ids(request_id), num_computed_tokens))
        return changed

    def _offer(
        self, entry: _Watched, block_tables: Sequence[Sequence[int]], num_computed_tokens: int
    ) -> ScheduledRequest:
        request, size = entry.request, self._block_size
        num_offered = min(num_computed_tokens // size, len(request.block_hashes))
        entry.next_offer_tokens = (num_offered + 1) * size
        if not self._config.decode_save and entry.next_offer_tokens > request.num_prompt_tokens:
            del self._offering[request.request_id]
        num_tokens = num_offered * size
        if num_tokens > entry.num_told_tokens:
            told, entry.num_told_tokens = entry.num_told_tokens, num_tokens
            self._known_tokens.append(
                KnownTokens(request.request_id, told, tuple(request.all_token_ids[told:num_tokens]))
            )
        return ScheduledRequest(
            request_id=request.request_id,
            block_tables=block_tables,
            block_hashes=request.block_hashes,
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=num_computed_tokens,
        )
