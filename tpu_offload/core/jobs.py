"""Jobs in flight: each is planned once, sent once, and ended once.

A job ends when every worker has reported it, or has acknowledged that it will report it no more, or at its deadline.
"""

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import final

from tpu_offload.core.holdings import Holdings
from tpu_offload.core.host_writes import HostWrites
from tpu_offload.layout import KVLayout
from tpu_offload.types import ChunkKey, CopyJob, CopyPart, Direction, JobKind, JobResult, JobState

_ORDER = {kind: number for number, kind in enumerate(JobKind)}


def _place(job: "Job") -> int:
    return _ORDER[job.kind]


def host_blocks(slots: Sequence[int], *, blocks_per_chunk: int, first: int = 0, num_blocks: int) -> tuple[int, ...]:
    """Host pool places of `num_blocks` consecutive blocks in the chunks in `slots`, from block `first` of these on."""
    if blocks_per_chunk == 1:
        return tuple(slots[first : first + num_blocks])
    places = (slot * blocks_per_chunk + j for slot in slots for j in range(blocks_per_chunk))
    return tuple(itertools.islice(places, first, first + num_blocks))


def label_of(request_ids: Sequence[str]) -> str:
    """Names the requests of a shared job, in a log line."""
    others = len(request_ids) - 1
    return request_ids[0] + (f" and {others} more" if others else "")


@final
class Job:
    """A job in flight, of any kind.

    Attributes:
      wire: what is sent to the workers.
      job_id: unique over the life of the scheduler.
      kind: its kind.
      direction: which way it goes.
      label: its requests, or of a storage job what it copies, for log lines.
      held: the resources that it holds until it ends (see `core.completion`).
      writes: what a save or a promotion writes into the host tier; None if it writes nothing there.
      num_valid_tokens: for a load, the request's tokens that were in HBM before it.
      num_blocks: blocks that move.
      nbytes: bytes that move, over all devices.
      deadline_s: time after which it counts as failed.
      waiting_for: workers that have not reported it.
      state: PLANNED, SENT or an end.
      all_failed: all of its blocks count as failed, even if the workers report success; `error` says why.
      failed_blocks: positions of the blocks that some worker did not copy, where that is known.
      copy_failed: some worker reported that the copy failed, or did not report it in time. Otherwise a failure says
        nothing about the next copy.
      is_void: what it copies was made invalid by a reset, or is of a step that was aborted: unless a copy failed, its
        end is no failure to report.
      detached: the request was told the outcome, or is gone: nothing waits for the end.
      was_cancelled: some worker has not copied all of it, because it is detached.
      result_lost: some worker will never report it.
      missing: for a promotion, positions of chunks that some worker's storage does not have; for a deletion, of keys
        that it has refused to delete.
      num_found: for a lookup, for each of its prefixes the number of leading chunks that all workers so far have.
      error: the first error reported.
      duration_s: the longest time that a worker took.
      copy_s: the longest time that a worker measured for the copy alone; 0 when none did.
    """

    def __init__(
        self,
        *,
        wire: CopyJob,
        label: str,
        held: Holdings,
        writes: HostWrites | None,
        num_valid_tokens: int,
        num_blocks: int,
        nbytes: int,
        deadline_s: float,
        waiting_for: set[int],
    ) -> None:
        self.wire = wire
        # Fields of `wire`, which are read several times for each job.
        self.job_id: int = wire.job_id
        self.kind: JobKind = wire.kind
        self.direction: Direction = wire.kind.direction
        self.label = label
        self.held = held
        self.writes = writes
        self.num_valid_tokens = num_valid_tokens
        self.num_blocks = num_blocks
        self.nbytes = nbytes
        self.deadline_s = deadline_s
        self.waiting_for = waiting_for
        self.state: JobState = JobState.PLANNED
        self.all_failed = False
        self.failed_blocks: frozenset[int] = frozenset()
        self.copy_failed = False
        self.is_void = False
        self.detached = self.was_cancelled = self.result_lost = False
        self.missing: frozenset[int] = frozenset()
        self.num_found: tuple[int, ...] = ()
        self.error = ""
        self.duration_s = 0.0
        self.copy_s = 0.0

    @property
    def parts(self) -> tuple[CopyPart, ...]:
        """What moves."""
        return self.wire.parts

    @property
    def keys(self) -> Sequence[ChunkKey]:
        """Chunks of the host tier that it reads or writes."""
        return self.held.keys

    @property
    def slots(self) -> tuple[int, ...]:
        """Their slots, or those of the pieces that it writes."""
        return self.held.slots

    @property
    def what(self) -> str:
        """What it does and for whom, for a log line."""
        return f"{self.kind.value} of {self.label if self.kind.of_storage else f'request {self.label}'}"

    @property
    def consequence(self) -> str:
        """What its failure means for the engine, for a log line."""
        if self.kind is JobKind.LOOKUP:
            return "requests compute what it asked for"
        if self.kind in (JobKind.CLEAR, JobKind.DELETE):
            return "it is tried again"
        if self.kind.of_storage:
            return "requests compute its chunks" if self.kind.writes_host else "its chunks are not stored"
        if self.kind.of_swap:
            return "the request is recomputed"
        return "its blocks were not loaded" if self.direction is Direction.LOAD else "its blocks are not published"

    def mark_failed(self, why: str) -> None:
        """All of it fails, even if the workers report success."""
        self.all_failed = True
        self.error = self.error or why

    def make_void(self, why: str) -> None:
        """What it copies is invalid: all of it fails, and does not count as a failed copy."""
        self.is_void = True
        self.mark_failed(why)

    def add_result(self, worker_id: int, result: JobResult) -> None:
        """Records one worker's result."""
        self.waiting_for.remove(worker_id)
        self.duration_s = max(self.duration_s, result.duration_s)
        self.copy_s = max(self.copy_s, result.copy_s)
        if self.kind is JobKind.PROMOTE or self.kind is JobKind.DELETE:
            missing = {i for i in result.missing_chunks if i < self.wire.num_items}
            self.missing |= missing
            failed = result.failed_blocks or range(self.wire.num_items)
            if self.kind is JobKind.DELETE and missing.issuperset(failed):
                return  # the tier has answered: that says nothing about the next deletion
        if self.kind is JobKind.LOOKUP and result.state is JobState.FINISHED:
            self._add_found(worker_id, result.num_found)
            return
        if result.state is JobState.FINISHED or (result.state is JobState.CANCELLED and self.detached):
            self.was_cancelled |= result.state is JobState.CANCELLED
            return
        why = result.error or f"worker {worker_id} reported it as {result.state.value}"
        self.copy_failed |= result.state is JobState.FAILED
        # A swap succeeds or fails as a whole.
        if result.failed_blocks and not self.kind.of_swap and max(result.failed_blocks) < self.wire.num_items:
            self.failed_blocks |= set(result.failed_blocks)
            self.error = self.error or why
        else:
            self.mark_failed(why)

    def _add_found(self, worker_id: int, num_found: tuple[int, ...]) -> None:
        """A chunk counts as found if every worker has found it."""
        lengths = [len(prefix) for prefix in self.wire.prefixes]
        if len(num_found) != len(lengths) or any(n > most for n, most in zip(num_found, lengths, strict=True)):
            self.copy_failed = True
            self.mark_failed(f"worker {worker_id} found {num_found!r:.100} chunks in prefixes of {lengths!r:.100}")
            return
        self.num_found = tuple(map(min, self.num_found or num_found, num_found))


@final
class JobTable:
    """All jobs that have not ended, of every kind.

    A job ends when all workers have reported it, when a worker that has not will never do so, or at its deadline. The
    table also keeps jobs that timed out: their copies may still run, so until every worker is done with them, they keep
    their staging blocks and the host memory that they write.

    Args:
      layout: how many bytes a block has.
      num_workers: workers that must report each job.
      complete: ends a job, see `Completion.complete`.
      release_late: releases what a job that timed out still holds, see `Completion.release_late`.
    """

    def __init__(
        self,
        layout: KVLayout,
        *,
        num_workers: int,
        complete: Callable[[Job], None],
        release_late: Callable[[Job], None],
    ) -> None:
        self._block_nbytes = tuple(group.block_nbytes for group in layout.groups)
        self._worker_ids = frozenset(range(num_workers))
        self._complete = complete
        self._release_late = release_late
        self._next_job_id = 0
        self._jobs: dict[int, Job] = {}
        self._planned: list[Job] = []  # those that are not in a plan yet
        self._on_end: dict[JobKind, Callable[[Job], None]] = {}
        self._late: dict[int, Job] = {}
        # Each worker's last `StepReport.oldest_job_id` and `storage_job_ids`.
        self._oldest = dict.fromkeys(range(num_workers), 0)
        self._of_storage: dict[int, tuple[int, ...]] = dict.fromkeys(range(num_workers), ())
        self._next_deadline_s = math.inf  # no job's deadline is before this

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs.values())

    def __contains__(self, job_id: object) -> bool:
        return job_id in self._jobs

    def of(self, *kinds: JobKind) -> list[Job]:
        """Jobs of these kinds, oldest first."""
        return [job for job in self._jobs.values() if job.kind in kinds]

    def late(self, *kinds: JobKind) -> list[Job]:
        """Jobs of these kinds that timed out and whose copies may still run."""
        return [job for job in self._late.values() if job.kind in kinds]

    def on_end(self, *kinds: JobKind, call: Callable[[Job], None]) -> None:
        """Registers the one callback for completed jobs of these kinds."""
        for kind in kinds:
            assert kind not in self._on_end, "a second callback for a kind"
            self._on_end[kind] = call

    @property
    def next_job_id(self) -> int:
        """The id of the next job."""
        return self._next_job_id

    def plan(
        self,
        kind: JobKind,
        parts: tuple[CopyPart, ...],
        held: Holdings,
        *,
        request: str,
        deadline_s: float,
        writes: HostWrites | None = None,
        num_valid_tokens: int = 0,
        deleted_keys: tuple[ChunkKey, ...] = (),
        prefixes: tuple[tuple[ChunkKey, ...], ...] = (),
        tier_id: int = 0,
        nbytes: int = 0,
    ) -> Job:
        """Creates a job, which now owns the resources that the caller has acquired for it.

        Args:
          kind: its kind.
          parts: what moves.
          held: the resources that it holds; from now on the job may be the probe of their breaker.
          request: its request's id; for a save that several share or a storage job, a label for log lines.
          deadline_s, writes, num_valid_tokens: see `Job`.
          deleted_keys, prefixes, tier_id: see `CopyJob`.
          nbytes: bytes of a storage job; those of the parts are computed.
        """
        if kind.of_storage:  # it has no parts
            wire = CopyJob(
                job_id=self._next_job_id,
                kind=kind,
                chunks=tuple(zip(held.keys, held.slots, strict=True)),
                deleted_keys=deleted_keys,
                prefixes=prefixes,
                tier_id=tier_id,
            )
        else:
            wire = CopyJob(
                job_id=self._next_job_id,
                kind=kind,
                parts=parts,
                request_id="" if kind.writes_host and not kind.of_swap else request,
                num_staging_blocks=held.num_staging_blocks,
            )
        if held.probe is None:
            held.breaker.begin(self._next_job_id)
        else:
            held.breaker.hand_over(held.probe, self._next_job_id)
        held.probe = self._next_job_id
        self._next_job_id += 1
        num_blocks, nbytes_of_parts = self._size_of(parts)
        job = Job(
            wire=wire,
            label=request,
            held=held,
            writes=writes,
            num_valid_tokens=num_valid_tokens,
            num_blocks=num_blocks,
            nbytes=nbytes or nbytes_of_parts,
            deadline_s=deadline_s,
            waiting_for=set(self._worker_ids),
        )
        self._jobs[job.job_id] = job
        self._planned.append(job)
        self._next_deadline_s = min(self._next_deadline_s, deadline_s)
        return job

    def take_planned(self) -> tuple[CopyJob, ...]:
        """Moves all planned jobs into a plan, in the order of `JobKind`."""
        if not self._planned:
            return ()
        jobs, self._planned = self._planned, []
        if len(jobs) > 1:
            jobs.sort(key=_place)
        for job in jobs:
            job.state = JobState.SENT
        return tuple([job.wire for job in jobs])

    def fail_planned(self, why: str) -> None:
        """Fails the planned jobs, whose blocks another request may have by the next plan. Planned swaps are kept."""
        failed, self._planned = (
            [j for j in self._planned if not j.kind.of_swap],
            [j for j in self._planned if j.kind.of_swap],
        )
        for job in failed:
            job.mark_failed(why)
            self._end(job)

    def cancel_planned(self, job: Job) -> None:
        """Cancels a job that was not sent, without its callback: the caller knows."""
        assert job.state is JobState.PLANNED, "the job was sent to the workers"
        del self._jobs[job.job_id]
        self._planned.remove(job)
        job.state = JobState.CANCELLED
        self._complete(job)

    def report(self, worker_id: int, result: JobResult) -> bool:
        """Records one worker's result; the last worker's ends the job.

        Returns:
          False if the job is unknown, unsent or ended, or this worker has reported it before.
        """
        job = self._jobs.get(result.job_id)
        if job is None or job.state is not JobState.SENT or worker_id not in job.waiting_for:
            self._report_late(worker_id, result.job_id)
            return False
        job.add_result(worker_id, result)
        if not job.waiting_for:
            self._end(job)
        return True

    def may_run(self, job_id: int, waiting_for: Collection[int]) -> bool:
        """Whether any of these workers, which have not reported a job, may still run it."""
        return any(self._oldest[worker_id] <= job_id for worker_id in waiting_for)

    def expire(self, now_s: float) -> None:
        """Ends the sent jobs past their deadline. Amortized O(1) while none is."""
        if now_s < self._next_deadline_s:
            return
        overdue = [job for job in self._jobs.values() if job.state is JobState.SENT and job.deadline_s <= now_s]
        for job in overdue:
            job.mark_failed("timed out")
            job.copy_failed = True
            if job.kind.writes_host or job.wire.num_staging_blocks:
                self._late[job.job_id] = job
            self._end(job, JobState.TIMED_OUT)
        self._next_deadline_s = min((job.deadline_s for job in self._jobs.values()), default=math.inf)

    def ack_through(self, worker_id: int, oldest_job_id: int, *, but: tuple[int, ...] = ()) -> int:
        """A worker has finished with all jobs below this id, and will not report any of them again.

        Args:
          worker_id: the worker.
          oldest_job_id: see `StepReport`.
          but: jobs of storage that it still runs, at any ids.
        Returns:
          How many jobs have failed because of that: those that it had not reported, each counted for one worker only.
        """
        known = self._oldest[worker_id]
        if oldest_job_id < known or (oldest_job_id == known and but == self._of_storage[worker_id]):
            return 0
        self._oldest[worker_id], self._of_storage[worker_id] = oldest_job_id, but
        for job_id in [job_id for job_id in self._late if job_id < oldest_job_id and job_id not in but]:
            self._report_late(worker_id, job_id)
        earlier = itertools.takewhile(lambda job: job.job_id < oldest_job_id, self._jobs.values())
        lost = [
            job
            for job in earlier
            if worker_id in job.waiting_for and job.state is JobState.SENT and job.job_id not in but
        ]
        num_lost = sum(not job.result_lost for job in lost)
        for job in lost:
            job.result_lost = True
            job.waiting_for.remove(worker_id)
            job.mark_failed(f"worker {worker_id} never reported the result")
        ended = [job for job in lost if not job.waiting_for]
        for job in ended:
            self._end(job)
        return num_lost

    def _size_of(self, parts: tuple[CopyPart, ...]) -> tuple[int, int]:
        """How many blocks move, and bytes."""
        num_blocks = nbytes = 0
        for part in parts:
            num_of_part = len(part.block_ids)
            num_blocks += num_of_part
            nbytes += num_of_part * self._block_nbytes[part.group_id]
        return num_blocks, nbytes

    def _end(self, job: Job, state: JobState | None = None) -> None:
        del self._jobs[job.job_id]
        failed = job.all_failed or job.failed_blocks
        ended = JobState.FAILED if failed else JobState.CANCELLED if job.was_cancelled else JobState.FINISHED
        job.state = state or ended
        self._complete(job)
        self._on_end[job.kind](job)

    def _report_late(self, worker_id: int, job_id: int) -> None:
        """A worker has finished with a job that may have timed out."""
        job = self._late.get(job_id)
        if job is not None and worker_id in job.waiting_for:
            job.waiting_for.remove(worker_id)
            if not job.waiting_for:
                del self._late[job_id]
                self._release_late(job)
