"""Jobs in flight: each is planned once, sent once, and ended once.

It ends when every worker has reported it, or shown that it is through with it, or when its deadline passes.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import final

from tpu_offload.core.breaker import CircuitBreaker
from tpu_offload.layout import KVLayout
from tpu_offload.types import ChunkKey, CopyJob, CopyPart, Direction, JobKind, JobResult, JobState

_ORDER = {kind: number for number, kind in enumerate(JobKind)}


def host_blocks(slots: Sequence[int], *, blocks_per_chunk: int, first: int = 0, num_blocks: int) -> tuple[int, ...]:
    """Places in the host pool of `num_blocks` blocks that follow each other in the chunks in `slots`.

    The first of them is block `first` of the first chunk.
    """
    if blocks_per_chunk == 1:
        return tuple(slots[:num_blocks])
    places = (slot * blocks_per_chunk + j for slot in slots for j in range(blocks_per_chunk))
    return tuple(itertools.islice(places, first, first + num_blocks))


@final
@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """What is known of a job in flight, of whatever kind, and what it holds until it ends (see `core.completion`).

    Attributes:
      wire: what the workers are told.
      what: names it in a log line, with its requests.
      account: who holds its staging blocks.
      keys: chunks of the host tier that it reads, and has pinned, or that it writes, and has made PENDING.
      slots: where they are.
      pool_blocks: places in the swap pool that it reads or writes, per layer group; held.
      num_valid_tokens: for a load, the request's tokens that were in HBM before it.
      nbytes: bytes that move, over all devices.
      breaker: told how it ended.
      deadline_s: time after which it is taken for failed.
      waiting_for: workers that have not reported it.
      state: PLANNED, SENT or an end.
      doomed: all of it counts as failed, whatever the workers report; `error` says why.
      failed_blocks: positions of the blocks that some worker did not copy, where that is known.
      copy_failed: some worker said that the copy failed, or did not say anything in time. Else a job that failed did
        so for a reason that says nothing of the next one.
      detached: the request has been told, or is gone: nobody waits for the end.
      error: the first error reported.
      duration_s: the longest time that a worker took.
      copy_s: the longest time that a worker measured for the copy alone; 0 when none did.
    """

    wire: CopyJob
    what: str
    account: str
    keys: Sequence[ChunkKey]
    slots: tuple[int, ...]
    pool_blocks: tuple[tuple[int, ...], ...]
    num_valid_tokens: int
    nbytes: int
    breaker: CircuitBreaker
    deadline_s: float
    waiting_for: set[int]
    state: JobState = JobState.PLANNED
    doomed: bool = False
    failed_blocks: set[int] = dataclasses.field(default_factory=set)
    copy_failed: bool = False
    detached: bool = False
    error: str = ""
    duration_s: float = 0.0
    copy_s: float = 0.0

    @property
    def job_id(self) -> int:
        """Unique over the life of the scheduler."""
        return self.wire.job_id

    @property
    def kind(self) -> JobKind:
        """What it is for."""
        return self.wire.kind

    @property
    def direction(self) -> Direction:
        """Which way it goes."""
        return self.wire.kind.direction

    @property
    def num_blocks(self) -> int:
        """Blocks that move."""
        return self.wire.num_blocks

    @property
    def consequence(self) -> str:
        """What follows for the engine if it fails, for a log line."""
        if self.wire.kind.of_storage:
            return "its chunks are not in storage any more"
        if self.wire.kind.of_swap:
            return "the request is recomputed"
        return "the request computes its blocks" if self.direction is Direction.LOAD else "its blocks are not published"

    def doom(self, why: str) -> None:
        """Whatever the workers report, the outcome is a failure."""
        self.doomed = True
        self.error = self.error or why

    def take(self, worker_id: int, result: JobResult) -> None:
        """What one worker says of it."""
        self.waiting_for.remove(worker_id)
        self.duration_s = max(self.duration_s, result.duration_s)
        self.copy_s = max(self.copy_s, result.copy_s)
        if result.state is JobState.FINISHED or (result.state is JobState.CANCELLED and self.detached):
            return
        why = result.error or f"worker {worker_id} reported it as {result.state.value}"
        self.copy_failed |= result.state is JobState.FAILED
        # A swap succeeds or fails as a whole.
        if result.failed_blocks and not self.kind.of_swap and max(result.failed_blocks) < self.wire.num_items:
            self.failed_blocks.update(result.failed_blocks)
            self.error = self.error or why
        else:
            self.doom(why)


@final
@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class WaitingLoad:
    """A load that its request waits for and that no plan has taken yet; it has no job id until one does.

    Attributes:
      request_id: the engine's request.
      account: who holds the staging blocks.
      parts: the blocks of HBM, and their places in the host tier.
      keys: the chunks that hold them; pinned.
      slots: where these are in the host tier.
      num_valid_tokens: the request's tokens that were in HBM before it.
      num_staging_blocks: staging blocks that it holds; 0 if it takes none, or waits for some.
      waits_until_s: time after which it waits for staging blocks no more.
      failed_blocks: positions of blocks that cannot be copied any more.
      doomed: none of it can be used.
      error: why.
    """

    request_id: str
    account: str
    parts: tuple[CopyPart, ...]
    keys: Sequence[ChunkKey]
    slots: tuple[int, ...]
    num_valid_tokens: int
    num_staging_blocks: int
    waits_until_s: float
    failed_blocks: set[int] = dataclasses.field(default_factory=set)
    doomed: bool = False
    error: str = ""

    @property
    def num_blocks(self) -> int:
        """Blocks that are to move."""
        return sum([len(part.block_ids) for part in self.parts])


@final
class JobTable:
    """All jobs that have not ended, of every kind, and the one way in which they end.

    A job ends when all workers have reported it, when one that has not will never do so, or at its deadline. Beside the
    jobs the table keeps the saves that timed out: their copies may still land, and until it is known that they do not,
    nobody else can be given the memory that they write.

    Args:
      layout: how many bytes a block has.
      num_workers: workers that must report each job.
      complete: ends a job, see `Completion.complete`.
      settle: ends a save that had timed out for good, see `Completion.settle`.
    """

    def __init__(
        self,
        layout: KVLayout,
        *,
        num_workers: int,
        complete: Callable[[Job], None],
        settle: Callable[[Job], None],
    ) -> None:
        self._block_nbytes = tuple(group.block_nbytes for group in layout.groups)
        self._num_workers = num_workers
        self._complete = complete
        self._settle = settle
        self._num_given = 0
        self._jobs: dict[int, Job] = {}
        self._planned: list[Job] = []  # those of them that no plan has taken yet
        self._on_end: dict[JobKind, Callable[[Job], None]] = {}
        self._late: dict[int, Job] = {}
        self._oldest = dict.fromkeys(range(num_workers), 0)  # what each worker last said
        self._next_deadline_s = math.inf  # no job's deadline is before this

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs.values())

    def __contains__(self, job_id: object) -> bool:
        return job_id in self._jobs

    def of(self, *kinds: JobKind) -> list[Job]:
        """Those of these kinds, oldest first."""
        return [job for job in self._jobs.values() if job.kind in kinds]

    def late(self, *kinds: JobKind) -> list[Job]:
        """Saves of these kinds that timed out and may still write to host memory."""
        return [job for job in self._late.values() if job.kind in kinds]

    def on_end(self, *kinds: JobKind, call: Callable[[Job], None]) -> None:
        """Has `call` called with each job of these kinds that has been completed; before the first of them."""
        for kind in kinds:
            assert kind not in self._on_end, "one for each kind"
            self._on_end[kind] = call

    @property
    def num_given(self) -> int:
        """No job has this id or a greater one."""
        return self._num_given

    def plan(
        self,
        kind: JobKind,
        parts: tuple[CopyPart, ...],
        *,
        who: str,
        breaker: CircuitBreaker,
        deadline_s: float,
        account: str = "",
        num_staging_blocks: int = 0,
        keys: Sequence[ChunkKey] = (),
        slots: tuple[int, ...] = (),
        pool_blocks: tuple[tuple[int, ...], ...] = (),
        num_valid_tokens: int = 0,
        deleted_keys: tuple[ChunkKey, ...] = (),
        nbytes: int = 0,
    ) -> Job:
        """Takes up a job, under a new id. From now on it holds what the caller has taken hold of for it.

        Args:
          kind: what it is for.
          parts: what moves.
          who: its request; for a save that several share, words for a log.
          breaker, deadline_s, account, keys, slots, pool_blocks, num_valid_tokens: see `Job`.
          num_staging_blocks, deleted_keys: see `CopyJob`.
          nbytes: bytes of its chunks, for a storage job; else they are counted here.
        """
        is_save = kind.direction is Direction.SAVE and not kind.of_swap
        wire = CopyJob(
            job_id=self._num_given,
            kind=kind,
            parts=parts,
            request_id="" if is_save or kind.of_storage else who,
            num_staging_blocks=num_staging_blocks,
            chunks=tuple(zip(keys, slots, strict=True)) if kind.of_storage else (),
            deleted_keys=deleted_keys,
        )
        self._num_given += 1
        job = Job(
            wire=wire,
            what=f"{kind.value} of {who}" if kind.of_storage else f"{kind.value} of request {who}",
            account=account,
            keys=keys,
            slots=slots,
            pool_blocks=pool_blocks,
            num_valid_tokens=num_valid_tokens,
            nbytes=nbytes or sum([len(part.block_ids) * self._block_nbytes[part.group_id] for part in parts]),
            breaker=breaker,
            deadline_s=deadline_s,
            waiting_for=set(range(self._num_workers)),
        )
        self._jobs[job.job_id] = job
        self._planned.append(job)
        self._next_deadline_s = min(self._next_deadline_s, deadline_s)
        return job

    def send(self) -> tuple[CopyJob, ...]:
        """All that is planned goes with the plan at hand, in the order of `JobKind`."""
        if not self._planned:
            return ()
        jobs, self._planned = self._planned, []
        if any(job.kind is not jobs[0].kind for job in jobs):
            jobs.sort(key=lambda job: _ORDER[job.kind])
        for job in jobs:
            job.state = JobState.SENT
        return tuple([job.wire for job in jobs])

    def fail_planned(self, why: str) -> None:
        """What no plan has taken must not go with a later one: its blocks may be others' by then. Swaps may wait."""
        failed, self._planned = (
            [j for j in self._planned if not j.kind.of_swap],
            [j for j in self._planned if j.kind.of_swap],
        )
        for job in failed:
            job.doom(why)
            self._end(job)

    def drop(self, job: Job) -> None:
        """A job that was never sent will not be. The caller knows, so nothing else is called."""
        assert job.state is JobState.PLANNED, "the workers know of it"
        del self._jobs[job.job_id]
        self._planned.remove(job)
        job.state = JobState.CANCELLED
        self._complete(job)

    def report(self, worker_id: int, result: JobResult) -> bool:
        """Takes one worker's result, which ends a job if it is the last.

        Returns:
          False for a result of a job that is unknown, unsent or ended, or that this worker reported before.
        """
        job = self._jobs.get(result.job_id)
        if job is None or job.state is not JobState.SENT or worker_id not in job.waiting_for:
            self._report_late(worker_id, result.job_id)
            return False
        job.take(worker_id, result)
        if not job.waiting_for:
            self._end(job)
        return True

    def may_run(self, job_id: int, waiting_for: Collection[int]) -> bool:
        """Whether any of these workers, which have not reported a job, may still be at it."""
        return any(self._oldest[worker_id] <= job_id for worker_id in waiting_for)

    def expire(self, now_s: float) -> None:
        """Ends the sent jobs past their deadline. O(1) when none has passed, but for a look now and then."""
        if now_s < self._next_deadline_s:
            return
        overdue = [job for job in self._jobs.values() if job.state is JobState.SENT and job.deadline_s <= now_s]
        for job in overdue:
            job.doom("timed out")
            job.copy_failed = True
            if job.kind.writes_host:
                self._late[job.job_id] = job
            self._end(job, JobState.TIMED_OUT)
        self._next_deadline_s = min((job.deadline_s for job in self._jobs.values()), default=math.inf)

    def ack_through(self, worker_id: int, oldest_job_id: int, *, why: str) -> int:
        """A worker is through with all jobs below this id, and says no more of them than it has said.

        Returns:
          How many jobs it had not reported; those that no other worker is at fail.
        """
        if oldest_job_id <= self._oldest[worker_id]:
            return 0
        self._oldest[worker_id] = oldest_job_id
        for job_id in [job_id for job_id in self._late if job_id < oldest_job_id]:
            self._report_late(worker_id, job_id)
        earlier = itertools.takewhile(lambda job: job.job_id < oldest_job_id, self._jobs.values())
        lost = [job for job in earlier if worker_id in job.waiting_for and job.state is JobState.SENT]
        for job in lost:
            job.waiting_for.remove(worker_id)
            job.doom(why)
        ended = [job for job in lost if not job.waiting_for]
        for job in ended:
            self._end(job)
        return len(ended)

    def _end(self, job: Job, state: JobState | None = None) -> None:
        del self._jobs[job.job_id]
        failed = job.doomed or job.failed_blocks
        ended = JobState.FAILED if failed else JobState.CANCELLED if job.detached else JobState.FINISHED
        job.state = state or ended
        self._complete(job)
        self._on_end[job.kind](job)

    def _report_late(self, worker_id: int, job_id: int) -> None:
        """A worker is through with a job that may have timed out."""
        job = self._late.get(job_id)
        if job is not None and worker_id in job.waiting_for:
            job.waiting_for.remove(worker_id)
            if not job.waiting_for:
                del self._late[job_id]
                self._settle(job)
