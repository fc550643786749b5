"""Transfers between HBM and the host tier, from the plan that they go with to their one end.

Every job ends once: finished, failed, cancelled or timed out. With the end what a save was to write becomes visible or
goes. One thing outlives it: where a save timed out, its copy may still land, so its slots stay in quarantine until
every worker has shown that it is through with it.
"""

import sys
from collections.abc import Callable, Sequence
from typing import final

from tpu_offload.core.context import TierContext
from tpu_offload.core.engine_api import FailedLoad, FinishedTransfer
from tpu_offload.core.index import touches
from tpu_offload.core.jobs import Job, WaitingLoad
from tpu_offload.core.load_queue import LoadQueue
from tpu_offload.core.saving import SavePlanner
from tpu_offload.types import ChunkKey, Direction, JobKind, JobState

TRANSFERS = (JobKind.EARLY_SAVE, JobKind.LOAD, JobKind.SAVE)


@final
class Transfers:
    """The transfers in flight of one scheduler, and what their requests are yet to be told.

    Args:
      context: the books.
      queue: loads that no plan has taken yet.
      saves: offers again what was lost.
    """

    def __init__(self, context: TierContext, *, queue: LoadQueue, saves: SavePlanner) -> None:
        self._jobs = context.jobs
        self._queue = queue
        self._index = context.index
        self._saves = saves
        self._requests = context.requests
        self._backoff = context.backoff
        self._counts = context.counts
        self._block_size = context.block_size
        self._blocks_per_chunk = context.blocks_per_chunk
        self._to_cancel: dict[int, set[int]] = {}  # by job id, the workers that may still be at it
        self._loaded: list[str] = []
        self._failed_loads: list[FailedLoad] = []
        self._finished: list[FinishedTransfer] = []
        self._lost_keys: set[ChunkKey] = set()
        # Requests that have seen a load fail: they compute what failed, others may try it once more.
        self._had_failed_loads: set[str] = set()
        self._on_saved: Callable[[Sequence[ChunkKey]], None] | None = None
        self._jobs.on_end(*TRANSFERS, call=self.ended)

    def on_saved(self, call: Callable[[Sequence[ChunkKey]], None]) -> None:
        """Has `call` called with the chunks of each save that has ended well."""
        self._on_saved = call

    # On the way down.

    def send(self, load: WaitingLoad) -> None:
        """A load goes with the next plan that has room for it."""
        self._queue.add(load)

    @property
    def has_plans(self) -> bool:
        """Whether `plan` might do anything."""
        return bool(self._queue or self._to_cancel)

    def plan(self, now_s: float) -> tuple[int, ...]:
        """Plans the loads that can go with the coming step, and returns the ids of those that are taken back."""
        for job in self._queue.start(now_s) if self._queue else ():
            self._requests[job.wire.request_id].load = job
        if self._to_cancel:
            self._to_cancel = {i: waiting for i, waiting in self._to_cancel.items() if self._jobs.may_run(i, waiting)}
        return tuple(self._to_cancel)

    def detach(self, load: Job | WaitingLoad) -> None:
        """Nobody waits for a load any more, and its blocks are about to be used for something else."""
        if isinstance(load, WaitingLoad):  # never told to a worker: it ends here
            self._queue.remove(load)
            self._index.unpin(load.keys)
        else:
            load.detached = True
            self._to_cancel[load.job_id] = load.waiting_for

    def expire_waiting(self, now_s: float) -> None:
        """Ends the loads that have waited too long to be sent."""
        if self._queue:
            for load in self._queue.impatient(now_s):
                self._counts.dropped_load_blocks += load.num_blocks
                self._give_up_waiting(load)

    # On the way up.

    def ended(self, job: Job) -> None:
        """What the end of a transfer means for its chunks and its request."""
        if job.state is JobState.FINISHED:
            self._count_moved(job)
        if job.state is JobState.TIMED_OUT and job.direction is Direction.LOAD and not job.detached:
            # Before a plan, so that the workers are told before the engine lets a step compute into these blocks.
            self._to_cancel[job.job_id] = job.waiting_for
        bad = self._bad_chunks(job)
        too_often = self._record_outcome(job, [job.keys[i] for i in bad])
        if job.direction is Direction.SAVE:
            self._end_save(job, bad)
        else:
            # A failure may pass, so a chunk is tried once more. What is late may cost the next request as long again.
            self.lose(self._index.drop(job.keys if job.state is JobState.TIMED_OUT else too_often))
            if not job.detached:
                self._tell_of(job)

    @property
    def has_news(self) -> bool:
        """Whether `take_news` would return anything."""
        return bool(self._loaded or self._failed_loads or self._finished)

    def take_news(self) -> tuple[tuple[str, ...], tuple[FailedLoad, ...], tuple[FinishedTransfer, ...]]:
        """Requests that are loaded, those that must compute, and the jobs that finished, since the last call."""
        loaded, self._loaded = tuple(self._loaded), []
        failed, self._failed_loads = tuple(self._failed_loads), []
        finished, self._finished = tuple(self._finished), []
        return loaded, failed, finished

    def tell_failed(self, failed: FailedLoad) -> None:
        """The next update says that a request must compute."""
        self._failed_loads.append(failed)

    def has_failed_load(self, request_id: str) -> bool:
        """Whether a load of this request has failed."""
        return request_id in self._had_failed_loads

    def forget(self, request_id: str) -> None:
        """A request ended."""
        self._had_failed_loads.discard(request_id)

    def forget_news(self, request_id: str) -> None:
        """The request has given its blocks back: nothing is to be said of what it waited for."""
        if self._failed_loads:
            self._failed_loads = [failed for failed in self._failed_loads if failed.request_id != request_id]

    # What hits all of them.

    def reset(self) -> None:
        """What they move is no longer what the model would compute: loads are given up, saves are not published."""
        for load in list(self._queue):
            self._give_up_waiting(load)
        for job in self._jobs.of(*TRANSFERS):
            self._give_up(job, "the cache was reset")

    def doubt(self, worker_id: int, *, why: str) -> None:
        """A worker was started anew: what it was sent either died with it, or is done by one with empty memory."""
        for job in self._jobs.of(*TRANSFERS):
            if job.state is JobState.SENT and worker_id in job.waiting_for:
                self._give_up(job, why)

    def lose_caches(self) -> None:
        """All KV in HBM is gone: nothing of it is saved, and what is loaded there is of no use.

        Saves in flight read their blocks before the loss, or are cancelled by the worker that it hit.
        """
        self._saves.leaving.clear()
        for request in self._requests.values():
            self._saves.withdraw(request)
            request.lose_caches()
        for load in list(self._queue):
            load.num_valid_tokens = 0
            self._give_up_waiting(load)
        for job in self._jobs.of(*TRANSFERS):
            if job.direction is Direction.LOAD:
                job.num_valid_tokens = 0
                self._give_up(job, "the KV caches were lost")

    def lose_slots(self, first: int, end: int) -> None:
        """Host memory is gone: what was about to use it fails, its other blocks do not."""
        self.lose(self._index.lose_slots(first, end))
        self._fail_in(first, end)

    def lose_all(self) -> None:
        """All host memory is gone. O(jobs and requests), however many chunks there were."""
        self._index.clear()
        self._fail_in(0, sys.maxsize)
        self._saves.rewind_all(self._requests.values())

    def _fail_in(self, first: int, end: int) -> None:
        for job in (*self._jobs.of(*TRANSFERS), *self._queue):
            if touches(job.slots, first, end):
                gone = {i for i, slot in enumerate(job.slots) if first <= slot < end}
                job.error = job.error or "the host memory of its chunks was lost"
                job.failed_blocks.update(i for i in range(job.num_blocks) if self._chunk_of(job, i) in gone)

    def lose(self, keys: Sequence[ChunkKey]) -> None:
        """Requests that counted on these chunks in the host tier save them again, from the next `settle` on."""
        self._lost_keys.update(keys)

    def settle(self) -> None:
        """What follows from all that was lost and has ended since the last call, once for all of it."""
        lost_later = self._index.tidy()
        if lost_later:
            self.lose(lost_later)
        # Once for all of a large loss, however many calls it takes to drop it: this looks through all requests.
        if self._lost_keys and not self._index.is_dropping:
            lost, self._lost_keys = self._lost_keys, set()
            self._saves.rewind(self._requests.values(), lost)

    # Inside.

    def _give_up(self, job: Job, why: str) -> None:
        """A job is of no use any more. It ends when the workers are through with it; nobody waits for a load."""
        job.doom(why)
        if job.direction is Direction.LOAD and not job.detached:
            self._tell_of(job)
            self.detach(job)

    def _give_up_waiting(self, load: WaitingLoad) -> None:
        """A load will not be sent: its request computes."""
        self.detach(load)
        self._requests[load.request_id].load = None
        self._failed_loads.append(FailedLoad(request_id=load.request_id, num_valid_tokens=load.num_valid_tokens))

    def _chunk_of(self, job: Job | WaitingLoad, position: int) -> int:
        """Which of a job's chunks a block belongs to. A load may begin inside a chunk."""
        position %= _blocks_per_group(job)
        first_block = job.num_valid_tokens // self._block_size
        return (first_block % self._blocks_per_chunk + position) // self._blocks_per_chunk

    def _bad_chunks(self, job: Job) -> list[int]:
        """Which of the job's chunks were not copied."""
        if job.doomed:
            return list(range(len(job.keys)))
        return sorted({self._chunk_of(job, position) for position in job.failed_blocks})

    def _record_outcome(self, job: Job, bad: Sequence[ChunkKey]) -> list[ChunkKey]:
        """What its end says of later copies of its chunks; returns those that have failed too often."""
        if job.state is JobState.FINISHED:
            self._backoff.succeeded(job.keys, job.direction)
        elif job.copy_failed:
            return self._backoff.failed(bad, job.direction, job_id=job.job_id, next_job_id=self._jobs.num_given)
        return []

    def _end_save(self, job: Job, bad: Sequence[int]) -> None:
        """Publishes the chunks whose bytes every worker has; the others go."""
        failed = set(bad)
        ended = [(key, slot) for i, (key, slot) in enumerate(zip(job.keys, job.slots, strict=True)) if i not in failed]
        if ended:
            keys, slots = zip(*ended, strict=True)
            self._index.complete(keys, slots, success=True)
            if self._on_saved is not None:
                self._on_saved(keys)
        if bad:
            lost = [job.keys[i] for i in bad]
            quarantine = job.state is JobState.TIMED_OUT
            self._index.complete(lost, [job.slots[i] for i in bad], success=False, quarantine=quarantine)
            self.lose(lost)

    def _tell_of(self, job: Job) -> None:
        """A load has ended, or will for nothing: its request goes on."""
        request_id = job.wire.request_id
        self._requests[request_id].load = None
        if job.state is JobState.FINISHED:
            self._loaded.append(request_id)
            self._counts.loaded_tokens += _blocks_per_group(job) * self._block_size
            return
        self._had_failed_loads.add(request_id)
        # What came before the first hole can be used.
        num_loaded = 0 if job.doomed else min(position % _blocks_per_group(job) for position in job.failed_blocks)
        self._counts.loaded_tokens += num_loaded * self._block_size
        self._failed_loads.append(
            FailedLoad(request_id=request_id, num_valid_tokens=job.num_valid_tokens + num_loaded * self._block_size)
        )

    def _count_moved(self, job: Job) -> None:
        num_blocks, counts = job.wire.num_blocks, self._counts
        self._finished.append(
            FinishedTransfer(direction=job.direction, num_blocks=num_blocks, duration_s=job.duration_s)
        )
        if job.direction is Direction.SAVE:
            counts.saved_blocks += num_blocks
            counts.saved_nbytes += job.nbytes
            counts.save_s += job.duration_s
        else:
            counts.loaded_blocks += num_blocks
            counts.loaded_nbytes += job.nbytes
            counts.load_s += job.duration_s


def _blocks_per_group(job: Job | WaitingLoad) -> int:
    """Blocks of each layer group: all have as many, for the same tokens."""
    parts = job.wire.parts if isinstance(job, Job) else job.parts
    return len(parts[0].block_ids)
