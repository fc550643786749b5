"""Jobs in flight: each is planned once, sent once, and ended once, when every worker has reported it."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from tpu_offload.types import ChunkKey, Direction, JobResult, JobState, TransferJob


def host_blocks(slots: Sequence[int], *, blocks_per_chunk: int, first: int = 0, num_blocks: int) -> tuple[int, ...]:
    """Places in the host pool of `num_blocks` blocks that follow each other in the chunks in `slots`.

    The first of them is block `first` of the first chunk.
    """
    if blocks_per_chunk == 1:
        return tuple(slots[:num_blocks])
    places = (slot * blocks_per_chunk + j for slot in slots for j in range(blocks_per_chunk))
    return tuple(itertools.islice(places, first, first + num_blocks))


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class TrackedJob:
    """What is known of any job in flight.

    Attributes:
      job_id: unique over the life of the scheduler.
      deadline_s: time after which it is taken for failed.
      waiting_for: workers that have not reported it.
      state: PLANNED, SENT or an end.
      doomed: it counts as failed however it ends; `error` says why.
      overdue: its deadline has passed; its request, if it is one that comes into HBM, has been told.
      detached: the request has been told, or is gone: nobody waits for the end.
      error: the first error reported.
      duration_s: the longest time that a worker took.
      copy_s: the longest time that a worker measured for the copy alone; 0 when none did.
    """

    job_id: int
    deadline_s: float
    waiting_for: set[int]
    state: JobState = JobState.PLANNED
    doomed: bool = False
    overdue: bool = False
    detached: bool = False
    error: str = ""
    duration_s: float = 0.0
    copy_s: float = 0.0

    def doom(self, why: str) -> None:
        """Whatever the workers report, the outcome is a failure."""
        self.doomed = True
        self.error = self.error or why


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class Job(TrackedJob):
    """A transfer between HBM and the host tier, and what it holds until its end.

    Attributes:
      transfer: what the workers are told.
      request_id: the engine's request; for a save that several share, words for a log.
      account: who holds the staging blocks, `transfer.num_blocks` of them.
      keys: chunks that a load has pinned or a save has made PENDING.
      slots: where they are in the host tier.
      num_valid_tokens: for a load, the request's tokens that were in HBM before it.
    """

    transfer: TransferJob
    request_id: str
    account: str
    keys: tuple[ChunkKey, ...]
    slots: tuple[int, ...]
    num_valid_tokens: int

    @property
    def direction(self) -> Direction:
        """Save or load."""
        return self.transfer.direction


class JobTable[J: TrackedJob]:
    """All jobs of one kind that have not ended, by id, oldest first.

    Args:
      num_workers: workers that must report each job.
      ids: where job ids come from; tables whose jobs the same workers report share it.
    """

    def __init__(self, *, num_workers: int, ids: Iterator[int]) -> None:
        self._num_workers = num_workers
        self._ids = ids
        self._jobs: dict[int, J] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[J]:
        return iter(self._jobs.values())

    def __contains__(self, job_id: object) -> bool:
        return job_id in self._jobs

    def next_id(self) -> int:
        """An id for a new job."""
        return next(self._ids)

    def workers(self) -> set[int]:
        """Those that a new job waits for."""
        return set(range(self._num_workers))

    def add(self, job: J) -> J:
        """Takes a planned job."""
        self._jobs[job.job_id] = job
        return job

    def expects(self, worker_id: int, result: JobResult) -> bool:
        """False for a result of a job that is unknown, unsent or ended, or that this worker reported before."""
        job = self._jobs.get(result.job_id)
        return job is not None and job.state is JobState.SENT and worker_id in job.waiting_for and result.state.ended

    def report(self, worker_id: int, result: JobResult) -> J | None:
        """Takes one worker's expected result; returns the job, ended, when this was the last worker."""
        job = self._jobs[result.job_id]
        job.waiting_for.remove(worker_id)
        job.duration_s = max(job.duration_s, result.duration_s)
        job.copy_s = max(job.copy_s, result.copy_s)
        withdrawn = result.state is JobState.CANCELLED and job.detached
        if result.state is not JobState.FINISHED and not withdrawn:
            job.doom(result.error or f"worker {worker_id} reported it as {result.state.value}")
        return None if job.waiting_for else self.end(job)

    def end(self, job: J) -> J:
        """Takes a job out, in its last state."""
        del self._jobs[job.job_id]
        job.state = JobState.FAILED if job.doomed else JobState.CANCELLED if job.detached else JobState.FINISHED
        return job

    def overdue(self, now_s: float) -> list[J]:
        """Sent jobs past their deadline that were not overdue before. O(1) when no deadline has passed."""
        jobs = []
        for job in self._jobs.values():
            if job.deadline_s > now_s:
                break  # one timeout for all, so deadlines rise with the ids
            if job.state is JobState.SENT and not job.overdue:
                jobs.append(job)
        return jobs


def transfer_job(
    jobs: JobTable[Job],
    direction: Direction,
    *,
    block_ids: tuple[int, ...],
    host_block_ids: tuple[int, ...],
    request_id: str,
    account: str,
    keys: tuple[ChunkKey, ...],
    slots: tuple[int, ...],
    num_valid_tokens: int,
    deadline_s: float,
) -> Job:
    """Plans a transfer under a new id."""
    loaded_for = request_id if direction is Direction.LOAD else ""
    job_id = jobs.next_id()
    return jobs.add(
        Job(
            job_id=job_id,
            deadline_s=deadline_s,
            waiting_for=jobs.workers(),
            transfer=TransferJob(job_id, direction, 0, block_ids, host_block_ids, loaded_for),
            request_id=request_id,
            account=account,
            keys=keys,
            slots=slots,
            num_valid_tokens=num_valid_tokens,
        )
    )
