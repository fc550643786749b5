"""Turns engine events into step plans, and step reports into what the engine should know.

The life of a request, as the engine tells it:

    n = match(...)            how many tokens past those in HBM can come from the host tier;
                              pins the chunks and reserves staging blocks for them
    admit(...)                the engine granted blocks: the promise becomes a load job
      (or release(...))       it could not: the promise is given back
    plan = plan_step(...)     every step, with the requests that complete a block in it:
                              loads to start, blocks to save, loads to cancel
    update = apply(report)    every step, one report a worker: which requests are loaded or must recompute
    preempt(...)/finish(...)  the request gives its blocks back, at any time
    swap                      takes a preempted request's KV out and back (see `core.swap`)

The engine may free and grant a request's blocks again as soon as `preempt` or `finish` returns, also
under pending copies. A save planned in step k reads its blocks right after the forward pass of step k,
in program order before anything that a later step writes (see `OffloadWorker.end_step`). A load of a
request that is gone is cancelled by the next plan, which every worker sees before it lets that step
write into the blocks.

What was to be saved and found no room, or was saved and lost, is saved by a later step without the
engine saying so again. It may be: until `preempt` or `finish` the blocks are the request's own, and
their KV, computed once, stays. Steps cost nothing for requests about which there is no news.

Staging blocks, pins and slots of a job are released at one place (`_end`), once, when every worker has
reported the job. Until then the bytes may still be moving, whatever became of the request.
"""

import dataclasses
import itertools
import logging
import operator
import time
from collections.abc import Callable, Iterable, Sequence

from tpu_offload import hashing
from tpu_offload.config import OffloadConfig
from tpu_offload.core.index import ChunkIndex, ChunkState
from tpu_offload.core.jobs import Job, JobTable
from tpu_offload.core.loading import LoadPlanner
from tpu_offload.core.policies import EvictionPolicy, LRUPolicy
from tpu_offload.core.requests import (
    FailedLoad,
    FinishedTransfer,
    ScheduledRequest,
    TierEvent,
    TierEventKind,
    Update,
)
from tpu_offload.core.save_policy import SaveAll, SavePrompt
from tpu_offload.core.saving import SavePlanner
from tpu_offload.core.staging import StagingBufferManager
from tpu_offload.core.swap import RequestSwap
from tpu_offload.core.tracking import TrackedRequest
from tpu_offload.errors import ConfigError, RequestError
from tpu_offload.layout import KVLayout
from tpu_offload.metrics import OffloadStats, StatsLogger
from tpu_offload.types import BlockHash, ChunkKey, Direction, JobState, StepPlan, StepReport, SwapJob

_logger = logging.getLogger(__name__)

_NO_UPDATE = Update()


class OffloadScheduler:
    """Plans saves and loads for one engine. All calls come from the thread of the engine's scheduler.

    Args:
      config: the settings. With a size of zero nothing is ever matched or saved.
      layout: what a block is made of.
      num_workers: workers that report each step; a job ends when all have reported it.
      policy: eviction policy of the host tier, LRU by default.
      clock: monotonic seconds.
      record_events: keeps what `take_events` returns; somebody has to call it then.
    Raises:
      ConfigError: the staging buffer or the host tier is smaller than one chunk, or there is no worker.
      LayoutError: the host tier is on and cannot hold such blocks.
    """

    def __init__(
        self,
        config: OffloadConfig,
        layout: KVLayout,
        *,
        num_workers: int = 1,
        policy: EvictionPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
        record_events: bool = False,
    ) -> None:
        self._config = config
        self._enabled = config.enabled
        self._layout = layout
        self._block_nbytes = layout.block_nbytes
        if num_workers < 1:
            raise ConfigError(f"{num_workers=}; expected at least 1")
        if self._enabled:
            layout.check_tier()
        self._max_host_chunks = config.host_chunks(layout)
        self._staging = StagingBufferManager(config.staging_blocks(layout) if self._enabled else 0)
        self._index = ChunkIndex(policy or LRUPolicy(), record=record_events)
        job_ids = itertools.count()
        self._jobs: JobTable[Job] = JobTable(num_workers=num_workers, ids=job_ids)
        self._loads = LoadPlanner(
            self._index,
            self._staging,
            self._jobs,
            block_size=layout.block_size,
            blocks_per_chunk=config.blocks_per_chunk,
        )
        self._saves = SavePlanner(
            self._index,
            self._staging,
            self._jobs,
            SaveAll() if config.decode_save else SavePrompt(),
            block_size=layout.block_size,
            blocks_per_chunk=config.blocks_per_chunk,
        )
        self._swap = RequestSwap(
            config,
            layout,
            index=self._index,
            jobs=JobTable(num_workers=num_workers, ids=job_ids),
            namespace=lambda: self._namespace,
            clock=clock,
        )
        self._num_swap_blocks = dict.fromkeys(range(num_workers), (0,) * len(layout.groups))
        self._num_host_chunks = dict.fromkeys(range(num_workers), 0)
        self._requests: dict[str, TrackedRequest] = {}
        self._num_requests_seen = 0
        self._num_steps = 0
        self._num_resets = 0
        self._namespace = self._make_namespace()
        self._loads_to_send: list[Job] = []
        self._job_ids_to_cancel: list[int] = []
        self._failed_loads: list[FailedLoad] = []
        self._transfers: list[FinishedTransfer] = []
        self._counts = OffloadStats()
        self._clock = clock
        self._stats_logger = StatsLogger(config.metrics_log_interval)

    # Engine events.

    @property
    def swap(self) -> RequestSwap:
        """Takes preempted requests' KV out of HBM and back."""
        return self._swap

    def is_saving_next(self, request_id: str) -> bool:
        """Whether what the last match of a request would find next is being saved at this moment.

        An engine may let such a request wait for a step or two instead of computing what will be there by then,
        and match it again. For how long is up to the engine: a save can take a while, and can fail.
        """
        request = self._requests.get(request_id)
        return request is not None and self._loads.ends_at_a_save(request)

    def match(
        self, request_id: str, block_hashes: Sequence[BlockHash], *, num_tokens: int, num_computed_tokens: int
    ) -> int:
        """Finds how much of a request the host tier can load, and holds it ready.

        Pins the chunks and reserves staging blocks until `admit` or `release`. Asking again replaces
        the earlier answer. A load that does not fit the free staging blocks is cut to what fits.

        Args:
          request_id: the request.
          block_hashes: hashes of its full blocks, from the first on.
          num_tokens: tokens that it needs before it can sample the next one.
          num_computed_tokens: leading tokens that are in HBM already.
        Returns:
          Tokens past `num_computed_tokens` that can be loaded. One token is always left to compute, so
          a request whose every block is here gets one less; its last block is loaded all the same.
          0 if `num_computed_tokens` is not at a block boundary.
        Raises:
          RequestError: the request is waiting for a load, the numbers make no sense, or the hashes are not
            those that an earlier match of this request had; nothing was changed.
        """
        if not 0 <= num_computed_tokens <= num_tokens:
            raise RequestError(
                f"request {request_id}: {num_computed_tokens=} of {num_tokens=}; expected 0 to num_tokens"
            )
        if not self._enabled:
            return 0
        request = self._request(request_id)
        found = self._loads.match(request, block_hashes, num_tokens=num_tokens, num_computed_tokens=num_computed_tokens)
        self._saves.withdraw(request)  # it may be given other blocks
        return found

    def release(self, request_id: str) -> None:
        """Gives back what `match` promised; without a promise it does nothing."""
        request = self._requests.get(request_id)
        if request is not None:
            self._loads.release(request)
            request.num_cut_load_blocks = 0  # it will be matched again

    def admit(self, request_id: str, block_ids: Sequence[int], *, num_loaded_tokens: int) -> None:
        """The engine granted blocks. With `num_loaded_tokens` the request now waits for its load.

        Args:
          request_id: the request.
          block_ids: all of its blocks so far, in token order.
          num_loaded_tokens: how many of the promised tokens the engine takes; 0 takes none.
        Raises:
          RequestError: more tokens than promised, or too few blocks for them; the promise stands.
        """
        request = self._requests.get(request_id)
        if num_loaded_tokens == 0:
            if request is not None:
                self._loads.release(request)
            return
        if request is None:
            raise RequestError(f"request {request_id} admits {num_loaded_tokens} loaded tokens but was never matched")
        job = self._loads.admit(
            request,
            block_ids,
            num_loaded_tokens=num_loaded_tokens,
            deadline_s=self._clock() + self._config.job_timeout_s,
        )
        self._loads_to_send.append(job)
        self._counts.matched_tokens += num_loaded_tokens

    def preempt(self, request_id: str) -> None:
        """The engine takes a request's blocks; it may be matched again later. Unknown requests are fine."""
        self._forget(request_id)

    def finish(self, request_id: str) -> None:
        """A request ended, in whatever state it was. Unknown requests are fine."""
        self._forget(request_id)

    def reset(self) -> None:
        """Forgets every chunk, because what they hold is no longer what the model would compute.

        Promises are taken back; loads in flight fail with the next plan; saves in flight are not published. Blocks
        that requests hold at this moment are not saved any more, unless the request is preempted and
        computed again.
        """
        # Chunks that a load in flight has pinned stay until it ends; keys of a new namespace never find them.
        self._num_resets += 1
        self._namespace = self._make_namespace()
        for request in self._requests.values():
            self._loads.release(request)
            self._saves.withdraw(request)
            request.start_over(namespace=self._namespace)
        for job in list(self._jobs):
            job.doom("the cache was reset")
            if job.direction is Direction.LOAD and not job.detached:
                self._tell_failed(job)
                self._detach(job)
        self._swap.reset()
        self._index.clear()

    # Once a step.

    def plan_step(self, changed: Iterable[ScheduledRequest] = ()) -> StepPlan:
        """Plans the copies of the coming step. O(requests named + requests that wait for room).

        Args:
          changed: at least the requests in which the coming step completes a block: one becomes full
            whose tokens are all computed then and whose hash and block id are known. Also one whose blocks
            changed, or whose computed tokens became fewer. What is said of a request stands, and its blocks
            may be read in any step, until it is named again, preempted, finished or matched again. Naming
            others is harmless, but not free. Blocks past the prompt matter only with `decode_save`.
        Returns:
          The plan for every worker: loads first, saves after the forward pass.
        Raises:
          RequestError: a block table has become shorter than what its request offered; nothing was planned.
        """
        now_s = self._clock()
        self._fail_overdue(now_s)
        saves: list[Job] = []
        if self._enabled:
            self._offer(changed)
            saves, num_refused = self._saves.plan(deadline_s=now_s + self._config.job_timeout_s)
            self._counts.deferred_save_blocks += num_refused * self._config.blocks_per_chunk
        swaps = self._swap.take_jobs(now_s)
        if self._loads_to_send or saves or self._job_ids_to_cancel or any(swaps):
            plan = self._make_plan(saves, swaps)
        else:
            plan = StepPlan(self._num_steps)
        self._num_steps += 1
        self._stats_logger.maybe_log(now_s, self.stats)
        return plan

    def apply(self, report: StepReport) -> Update:
        """Takes one worker's report.

        Results that fit no job in flight (late, doubled, unknown) change nothing and are counted.
        """
        if report.worker_id not in self._num_host_chunks:
            self._counts.num_ignored_results += len(report.results)
            return _NO_UPDATE
        if report.num_host_chunks > self._num_host_chunks[report.worker_id]:
            # A slot is usable once every worker has it.
            self._num_host_chunks[report.worker_id] = report.num_host_chunks
            self._index.grow(min(self._max_host_chunks, *self._num_host_chunks.values()))
        if report.num_swap_blocks:
            self._grow_swap_pool(report)
        for first, end in report.lost_slots:
            self._lose_slots(first, end)
        for group_id, first, end in report.lost_swap_blocks:
            self._swap.lose_blocks(group_id, first, end)
        loaded = []
        for result in report.results:
            if self._swap.expects(report.worker_id, result):
                self._swap.report(report.worker_id, result)
                continue
            if not self._jobs.expects(report.worker_id, result):
                self._counts.num_ignored_results += 1
                continue
            job = self._jobs.report(report.worker_id, result)
            if job is not None and self._end(job):
                loaded.append(job.request_id)
        swapped_in, lost_swaps = self._swap.take_news()
        if not loaded and not self._failed_loads and not self._transfers and not swapped_in and not lost_swaps:
            return _NO_UPDATE
        failed, self._failed_loads = tuple(self._failed_loads), []
        transfers, self._transfers = tuple(self._transfers), []
        return Update(tuple(loaded), failed, transfers, swapped_in, lost_swaps)

    # State.

    @property
    def has_jobs(self) -> bool:
        """Whether any job is planned or in flight, so that plans and reports should go on.

        Those that have timed out do not count: what a worker has lost it never reports, and nobody waits for it.
        """
        return any(not job.overdue for job in self._jobs) or self._swap.has_jobs

    def take_events(self) -> list[TierEvent]:
        """What changed in the host tier since the last call, in order; nothing without `record_events`."""
        events = []
        for found, changes in itertools.groupby(self._index.take_changes(), key=operator.itemgetter(1)):
            kind = TierEventKind.STORED if found else TierEventKind.REMOVED
            events.append(TierEvent(kind, tuple(hashing.last_block_hash(key) for key, _ in changes)))
        return events

    def stats(self) -> OffloadStats:
        """A snapshot of the counters; may be taken from another thread."""
        stats = dataclasses.replace(
            self._counts,
            staging_budget_blocks=self._staging.num_blocks,
            staging_reserved_blocks=self._staging.num_reserved,
            staging_peak_blocks=self._staging.peak_num_reserved,
            num_host_chunks=self._index.num_slots,
            num_resident_chunks=len(self._index),
            num_evicted_chunks=self._index.num_evicted,
            num_jobs_in_flight=len(self._jobs),
        )
        return self._swap.add_stats(stats)

    def check_invariants(self) -> None:
        """Raises AssertionError unless accounts, pins and jobs agree. For tests; O(everything)."""
        self._staging.check_invariants()
        self._index.check_invariants()
        held: dict[tuple[str, Direction], int] = {}
        self._swap.check_invariants()
        pins: dict[ChunkKey, int] = dict(self._swap.pins())
        pending: list[ChunkKey] = []
        for job in self._jobs:
            held[job.account, job.direction] = held.get((job.account, job.direction), 0) + job.transfer.num_blocks
            if job.direction is Direction.SAVE:
                pending += job.keys
        for request in self._requests.values():
            if request.promise:
                held[request.account, Direction.LOAD] = request.promise.num_blocks
        for keys in (
            *(job.keys for job in self._jobs if job.direction is Direction.LOAD),
            *(request.promise.keys for request in self._requests.values() if request.promise),
        ):
            pins[keys[-1]] = pins.get(keys[-1], 0) + 1
            assert not any(self._index.state(key) is ChunkState.PENDING for key in keys), "a load of what is not there"
        self._saves.check_invariants(self._requests.values())
        assert sum(held.values()) == self._staging.num_reserved
        assert all(self._staging.held(account, direction) == n for (account, direction), n in held.items())
        self._index.check_holds(pins=pins, pending=set(pending))

    # Inside.

    def _make_namespace(self) -> bytes:
        return hashing.key_namespace(
            self._layout.fingerprint(), blocks_per_chunk=self._config.blocks_per_chunk, epoch=self._num_resets
        )

    def _request(self, request_id: str) -> TrackedRequest:
        request = self._requests.get(request_id)
        if request is None:
            request = self._requests[request_id] = TrackedRequest(
                request_id, account=f"{request_id}#{self._num_requests_seen}", namespace=self._namespace
            )
            self._num_requests_seen += 1
        return request

    def _forget(self, request_id: str) -> None:
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        self._saves.withdraw(request)
        self._failed_loads = [failed for failed in self._failed_loads if failed.request_id != request_id]
        self._counts.dropped_save_blocks += request.num_refused_chunks * self._config.blocks_per_chunk
        self._counts.dropped_load_blocks += request.num_cut_load_blocks
        self._loads.release(request)
        self._index.touch(request.keys, max(request.num_saved_chunks, request.num_found_chunks))
        if request.load is not None:
            self._detach(request.load)

    def _detach(self, job: Job) -> None:
        """Nobody waits for this load any more, and its blocks are about to be used for something else."""
        job.detached = True
        if job.state is JobState.PLANNED:  # never told to a worker: it ends here
            self._loads_to_send.remove(job)
            self._jobs.end(job)
            self._give_back(job)
        else:
            self._job_ids_to_cancel.append(job.job_id)

    def _offer(self, changed: Iterable[ScheduledRequest]) -> None:
        for scheduled in changed:
            num_chunks = self._saves.num_chunks_to_save(scheduled)
            request = self._requests.get(scheduled.request_id)
            if request is None and num_chunks:
                request = self._request(scheduled.request_id)
            if request is not None:
                self._saves.offer(request, scheduled, num_chunks)

    def _make_plan(self, saves: list[Job], swaps: tuple[tuple[SwapJob, ...], tuple[SwapJob, ...]]) -> StepPlan:
        loads, self._loads_to_send = self._loads_to_send, []
        cancelled, self._job_ids_to_cancel = self._job_ids_to_cancel, []
        for job in (*loads, *saves):
            job.state = JobState.SENT
        return StepPlan(
            step_id=self._num_steps,
            loads=tuple([job.transfer for job in loads]),
            saves=tuple([job.transfer for job in saves]),
            cancelled_job_ids=tuple(cancelled),
            swap_outs=swaps[0],
            swap_ins=swaps[1],
        )

    def _fail_overdue(self, now_s: float) -> None:
        for job in self._jobs.overdue(now_s):
            _logger.warning(
                "%s of %d blocks of request %s timed out after %g s; %s",
                job.direction.value, job.transfer.num_blocks, job.request_id, self._config.job_timeout_s,
                "the request computes them" if job.direction is Direction.LOAD else "they are not published",
            )  # fmt: skip
            self._counts.num_timed_out_jobs += 1
            self._counts.num_failed_jobs += 1
            job.overdue = True
            job.doom("timed out")
            self._lose(self._index.drop(job.keys))
            if job.direction is Direction.LOAD and not job.detached:
                # The cancellation goes down with this very plan, before the engine hears of the failure
                # and lets a step compute into these blocks.
                self._tell_failed(job)
                self._detach(job)

    def _tell_failed(self, job: Job) -> None:
        self._requests[job.request_id].load = None
        self._failed_loads.append(FailedLoad(job.request_id, job.num_valid_tokens))

    def _grow_swap_pool(self, report: StepReport) -> None:
        """A block of the swap pool is usable once every worker has it."""
        if len(report.num_swap_blocks) == len(self._layout.groups):
            self._num_swap_blocks[report.worker_id] = report.num_swap_blocks
            self._swap.grow([min(counts) for counts in zip(*self._num_swap_blocks.values(), strict=True)])

    def _lose_slots(self, first: int, end: int) -> None:
        """Host memory is gone: forgets what was in it and fails what was about to use it."""
        self._swap.lose_slots(first, end)
        self._lose(self._index.lose_slots(first, end))
        for job in self._jobs:
            if any(first <= slot < end for slot in job.slots):
                job.doom("the host memory of its chunks was lost")
        for request in self._requests.values():
            if request.promise and any(first <= slot < end for slot in request.promise.slots):
                request.promise.lost = True

    def _lose(self, keys: list[ChunkKey]) -> None:
        """Requests that counted on these chunks in the host tier save them again."""
        if keys:
            self._saves.rewind(self._requests.values(), set(keys), failed_save=False)

    def _end(self, job: Job) -> bool:
        """Releases what a reported job held. True when it is a load that its request can use."""
        self._give_back(job)
        if job.state is JobState.FINISHED:
            self._count_moved(job)
        elif job.state is JobState.FAILED and not job.overdue:
            self._counts.num_failed_jobs += 1
            _logger.warning("%s of request %s failed: %s", job.direction.value, job.request_id, job.error)
        if job.direction is Direction.SAVE:
            self._index.complete(job.keys, job.slots, success=job.state is JobState.FINISHED)
            if job.state is JobState.FAILED:
                self._saves.rewind(self._requests.values(), set(job.keys), failed_save=True)
            return False
        if job.state is JobState.FAILED:
            # What could not be read once is not offered again; whoever computes it saves it anew.
            self._lose(self._index.drop(job.keys))
        if job.detached:
            return False
        if job.state is JobState.FAILED:
            self._tell_failed(job)
            return False
        self._requests[job.request_id].load = None
        self._counts.loaded_tokens += job.transfer.num_blocks * self._layout.block_size
        return True

    def _give_back(self, job: Job) -> None:
        self._staging.release(job.account, job.transfer.num_blocks, job.direction)
        if job.direction is Direction.LOAD:
            self._index.unpin(job.keys)

    def _count_moved(self, job: Job) -> None:
        num_blocks, counts = job.transfer.num_blocks, self._counts
        self._transfers.append(FinishedTransfer(job.direction, num_blocks, job.duration_s))
        nbytes = num_blocks * self._block_nbytes
        if job.direction is Direction.SAVE:
            counts.saved_blocks += num_blocks
            counts.saved_nbytes += nbytes
            counts.save_s += job.duration_s
        else:
            counts.loaded_blocks += num_blocks
            counts.loaded_nbytes += nbytes
            counts.load_s += job.duration_s
