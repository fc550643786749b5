"""Saves and loads between HBM and the host tier: loads from their admission, saves from their plan, to their end.

Every job ends once: finished, failed, cancelled or timed out. At the end the chunks of a save become visible or are
removed. The copy of a job that timed out may still run: until every worker has finished with it, its staging blocks
stay reserved, and the slots of a save in quarantine.
"""

import sys
from collections.abc import Callable, Container, Mapping, Sequence, Set
from typing import final

from tpu_offload.core.context import TierContext
from tpu_offload.core.engine_api import FailedLoad, FinishedTransfer
from tpu_offload.core.host_writes import HostWrites
from tpu_offload.core.index import Checkpoint
from tpu_offload.core.jobs import Job
from tpu_offload.core.load_queue import LoadQueue
from tpu_offload.core.policies import Use
from tpu_offload.core.promises import WaitingLoad
from tpu_offload.core.saving import SavePlanner
from tpu_offload.types import ChunkKey, Direction, JobKind, JobState, StepPlan

TRANSFERS = (JobKind.EARLY_SAVE, JobKind.LOAD, JobKind.SAVE)
_NO_SLOTS: Set[int] = frozenset()


@final
class Transfers:
    """The transfers in flight of one scheduler, and their part of the engine's next update.

    Args:
      context: the scheduler's shared state.
      queue: loads that no plan contains yet.
      saves: offers lost chunks again.
    """

    def __init__(self, context: TierContext, *, queue: LoadQueue, saves: SavePlanner) -> None:
        self._jobs = context.jobs
        self._queue = queue
        self._index = context.index
        self._saves = saves
        self._requests = context.requests
        self._backoff = context.backoff
        self._costs = context.costs
        self._counts = context.counts
        self._block_size = context.block_size
        self._groups = context.groups
        self._to_cancel: dict[int, set[int]] = {}  # by job id, the workers that may still run it
        self._loaded: list[str] = []
        self._failed_loads: list[FailedLoad] = []
        self._finished: list[FinishedTransfer] = []
        self._lost_keys: set[ChunkKey] = set()
        # Requests with a failed load compute what failed; other requests may load it once more.
        self._had_failed_loads: set[str] = set()
        self._on_saved: Callable[[Mapping[ChunkKey, Use]], None] | None = None
        self._jobs.on_end(*TRANSFERS, call=self.ended)

    def on_saved(self, call: Callable[[Mapping[ChunkKey, Use]], None]) -> None:
        """Registers the one callback for chunks that a save has published, with the uses of those that saved them."""
        self._on_saved = call

    # Planning.

    def queue_load(self, load: WaitingLoad) -> None:
        """Queues a load for the next plan that has room for it."""
        self._queue.add(load)

    @property
    def has_plans(self) -> bool:
        """Whether `plan` has anything to do."""
        return bool(self._queue or self._to_cancel)

    def plan(self, now_s: float) -> tuple[int, ...]:
        """Plans the loads that have room in the coming step; returns the ids of loads to cancel."""
        for job in self._queue.start(now_s) if self._queue else ():
            self._requests[job.wire.request_id].load = job
        if self._to_cancel:
            self._to_cancel = {i: waiting for i, waiting in self._to_cancel.items() if self._jobs.may_run(i, waiting)}
        return tuple(self._to_cancel)

    def detach(self, load: Job | WaitingLoad) -> None:
        """The request waits for this load no more: the workers are told to cancel it."""
        if isinstance(load, WaitingLoad):  # no worker knows of it: it ends here
            self._queue.remove(load)
        else:
            load.detached = True
            self._to_cancel[load.job_id] = load.waiting_for

    def expire_waiting(self, now_s: float) -> None:
        """Ends the loads that have waited too long."""
        if self._queue:
            for load in self._queue.overdue(now_s):
                self._counts.dropped_load_blocks += load.num_blocks
                self._give_up_waiting(load)

    # Ends.

    def ended(self, job: Job) -> None:
        """Updates the chunks and the request of a transfer that has ended."""
        if job.state is JobState.FINISHED:
            self._count_moved(job)
        if job.state is JobState.TIMED_OUT and job.direction is Direction.LOAD and not job.detached:
            # Jobs expire before a plan is made, so the workers cancel before a step computes into these blocks.
            self._to_cancel[job.job_id] = job.waiting_for
        bad = self._bad_slots(job)
        too_often = self._record_outcome(job, bad)
        if job.writes is not None:
            self._end_save(job, job.writes, bad)
        else:
            if bad and job.held.checkpoint is not None:
                self._lose_pieces(job, job.held.checkpoint, bad, too_often=bool(too_often))
            # A failure may be transient, so a chunk is retried once. After a timeout the next load may take as long.
            invalid = job.keys if job.state is JobState.TIMED_OUT else too_often
            if invalid:
                self.mark_lost(self._index.invalidate(invalid))
            if not job.detached:
                self._resume_request(job)

    @property
    def has_news(self) -> bool:
        """Whether `take_news` would return anything."""
        return bool(self._loaded or self._failed_loads or self._finished)

    def take_news(self) -> tuple[tuple[str, ...], tuple[FailedLoad, ...], tuple[FinishedTransfer, ...]]:
        """Loaded requests, requests that must recompute, and finished jobs since the last call."""
        loaded, self._loaded = tuple(self._loaded), []
        failed, self._failed_loads = tuple(self._failed_loads), []
        finished, self._finished = tuple(self._finished), []
        return loaded, failed, finished

    def add_failed_load(self, failed: FailedLoad) -> None:
        """Adds a failed load to the next update."""
        self._failed_loads.append(failed)

    def has_failed_load(self, request_id: str) -> bool:
        """Whether a load of this request has failed."""
        return request_id in self._had_failed_loads

    def forget(self, request_id: str) -> None:
        """A request ended."""
        self._had_failed_loads.discard(request_id)

    def num_valid_tokens(self, request_id: str, num_tokens: int) -> int:
        """How many of a request's first `num_tokens` tokens are valid, if a load has failed that no update names."""
        return min([num_tokens, *(f.num_valid_tokens for f in self._failed_loads if f.request_id == request_id)])

    def forget_news(self, request_id: str) -> None:
        """The request has given its blocks back: the next update does not contain its failed load."""
        if self._failed_loads:
            self._failed_loads = [failed for failed in self._failed_loads if failed.request_id != request_id]

    # Resets and losses.

    def reset(self) -> None:
        """The KV is invalid: loads fail, saves are not published."""
        for load in list(self._queue):
            self._give_up_waiting(load)
        for job in self._jobs.of(*TRANSFERS):
            job.is_void = True
            self._give_up(job, "the cache was reset")

    def abort_step(self, plan: StepPlan) -> None:
        """The forward pass of a plan was not executed: publishes no save that reads what it was to compute.

        Those are the saves that follow it, and all saves of later plans. The early saves of the plan itself come before
        the pass.
        """
        self._saves.abort_step(self._requests.all(), plan.step_id)
        job_ids = {job.job_id for job in plan.of(JobKind.SAVE)}
        for job in self._jobs.of(JobKind.EARLY_SAVE, JobKind.SAVE):
            if job.job_id >= plan.next_job_id or job.job_id in job_ids:
                job.make_void("the step was aborted")

    def fail_in_flight(self, worker_id: int, *, why: str) -> None:
        """Fails the jobs sent to a worker that has restarted: they are lost, or will run with empty host memory."""
        for job in self._jobs.of(*TRANSFERS):
            if job.state is JobState.SENT and worker_id in job.waiting_for:
                self._give_up(job, why)

    def mark_caches_lost(self, *, swapped_out: Container[str]) -> None:
        """All KV in HBM is gone: clears all offers and fails all loads. Swapped-out requests have theirs elsewhere.

        Saves in flight have read their blocks before the loss, or are cancelled by the worker that lost its caches.
        """
        self._saves.abandon_plan()
        for request in self._requests.all():
            self._saves.clear_offer(request)
            if request.request_id not in swapped_out:
                request.mark_caches_lost()
        for load in list(self._queue):
            load.num_valid_tokens = 0
            self._give_up_waiting(load)
        for job in self._jobs.of(*TRANSFERS):
            if job.direction is Direction.LOAD:
                job.num_valid_tokens = 0
                self._give_up(job, "the KV caches were lost")

    def mark_slots_lost(self, first: int, end: int) -> None:
        """Host memory is gone: fails the blocks that jobs copy from or to it, and drops its chunks."""
        self._fail_in(first, end)
        self.mark_lost(self._index.invalidate_slots(first, end))

    def mark_tier_lost(self) -> None:
        """All host memory is gone. O(jobs + requests), however many chunks there were."""
        self._index.clear()
        self._fail_in(0, sys.maxsize)
        self._saves.rewind_all(self._requests.all())

    def _fail_in(self, first: int, end: int) -> None:
        for job in (*self._jobs.of(*TRANSFERS), *self._queue):
            if job.held.touches(first, end):
                job.error = job.error or "the host memory of its chunks was lost"
                if job.held.checkpoint is not None:  # it is of use as a whole
                    job.all_failed = True
                    continue
                slots = self._slot_of_each_block(job)
                job.failed_blocks |= {i for i, slot in enumerate(slots) if first <= slot < end}

    def mark_lost(self, keys: Sequence[ChunkKey]) -> None:
        """At the next `flush_losses`, the requests that had saved these chunks offer them again."""
        self._lost_keys.update(keys)

    def flush_losses(self) -> None:
        """Has requests offer again what was lost since the last call."""
        lost_later = self._index.tidy()
        if lost_later:
            self.mark_lost(lost_later)
        # A large loss is dropped over several calls; this goes through all requests once, after the last.
        if self._lost_keys and not self._index.has_lost_slots:
            lost, self._lost_keys = self._lost_keys, set()
            self._saves.rewind(self._requests.all(), lost)

    # Inside.

    def _give_up(self, job: Job, why: str) -> None:
        """Fails a job in flight. It ends when the workers have finished with it; a load's request is told at once."""
        job.mark_failed(why)
        if job.direction is Direction.LOAD and not job.detached:
            self._resume_request(job)
            self.detach(job)

    def _give_up_waiting(self, load: WaitingLoad) -> None:
        """Fails a load that was not sent."""
        self.detach(load)
        self._requests[load.request_id].load = None
        self._failed_loads.append(FailedLoad(request_id=load.request_id, num_valid_tokens=load.num_valid_tokens))

    def _bad_slots(self, job: Job) -> Set[int]:
        """The slots that were not copied: all, or of a partial failure those of the failed blocks."""
        if job.all_failed:
            return set(job.slots)
        if not job.failed_blocks:
            return _NO_SLOTS
        slots = self._slot_of_each_block(job)
        return {slots[i] for i in job.failed_blocks}

    def _lose_pieces(self, job: Job, checkpoint: Checkpoint, bad: Set[int], *, too_often: bool) -> None:
        """Drops the pieces of a checkpoint that a failed load could not read.

        Where it is not known what failed, all of them, once the chunks of full attention have failed too often.
        """
        if not job.all_failed:
            chunks = set(job.slots)
            self._index.checkpoints.lose_pieces([slot for slot in bad if slot not in chunks])
        elif too_often:
            self._index.checkpoints.lose_pieces(checkpoint.slots)

    def _slot_of_each_block(self, job: Job | WaitingLoad) -> list[int]:
        """The slot in the host tier of each block of a job, or row."""
        return [slot for part in job.parts for slot in self._groups[part.group_id].slots_of(part.host_block_ids)]

    def _record_outcome(self, job: Job, bad: Set[int]) -> list[ChunkKey]:
        """Updates the backoff of a job's chunks; returns those that have failed too often."""
        if job.state is JobState.FINISHED:
            self._backoff.succeeded(job.keys, job.direction)
        elif job.copy_failed and job.keys:
            keys = [key for key, slot in zip(job.keys, job.slots, strict=True) if slot in bad]
            return self._backoff.failed(keys, job.direction, job_id=job.job_id, next_job_id=self._jobs.next_job_id)
        return []

    def _end_save(self, job: Job, writes: HostWrites, bad: Set[int]) -> None:
        """Publishes what every worker has, and removes the rest."""
        published = writes.publish(job.held, bad)
        if published and self._on_saved is not None:
            uses = dict(zip(job.keys, job.held.uses, strict=True))
            self._on_saved({key: uses[key] for key in published} if bad else uses)
        if bad:
            self.mark_lost(writes.remove(job.held, bad, quarantine=job.state is JobState.TIMED_OUT))

    def _resume_request(self, job: Job) -> None:
        """A load has ended, or was given up: adds it to the next update, and the request stops waiting."""
        request_id = job.wire.request_id
        self._requests[request_id].load = None
        if job.state is JobState.FINISHED:
            self._loaded.append(request_id)
            return
        self._had_failed_loads.add(request_id)
        # The blocks before the first failed one are valid.
        is_useless = job.all_failed or job.held.checkpoint is not None  # a checkpoint is of use as a whole
        num_loaded = 0 if is_useless else min(position % _blocks_per_group(job) for position in job.failed_blocks)
        self._counts.loaded_tokens += num_loaded * self._block_size
        self._failed_loads.append(
            FailedLoad(request_id=request_id, num_valid_tokens=job.num_valid_tokens + num_loaded * self._block_size)
        )

    def _count_moved(self, job: Job) -> None:
        num_blocks, counts = job.num_blocks, self._counts
        self._finished.append(
            FinishedTransfer(direction=job.direction, num_blocks=num_blocks, duration_s=job.duration_s)
        )
        if job.direction is Direction.SAVE:
            counts.saved_blocks += num_blocks
            counts.saved_nbytes += job.nbytes
            counts.save_s += job.duration_s
        else:
            counts.loaded_blocks += num_blocks
            counts.loaded_tokens += _blocks_per_group(job) * self._block_size
            counts.loaded_nbytes += job.nbytes
            counts.load_s += job.duration_s
            self._costs.observe_load(job.nbytes, job.duration_s)


def _blocks_per_group(job: Job) -> int:
    """Blocks of each group with full attention: these come first, and have the same number, for the same tokens."""
    return len(job.parts[0].block_ids)
