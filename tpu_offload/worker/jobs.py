"""Which jobs a worker is at, how many parts each has left, and how those that ended did."""

import dataclasses
import logging
from collections.abc import Callable, Collection, Iterable
from typing import final

from tpu_offload.types import CopyPart, JobResult, JobState

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class _Job:
    """A job that has not ended.

    Attributes:
      started_s: when it was dispatched.
      parts: what it moves, if its blocks can fail one by one.
      num_parts: flights that carry blocks of it, and one more while it is being dispatched.
      num_unwritten: for a load, those of them that no program has been dispatched for that writes the caches.
      error: the first thing that went wrong.
      failed: (group_id, block_id) of what was not copied, if all that went wrong is known to be about these.
      failed_whole: something went wrong that is about all of it.
      writes_caches: it is a load, or a swap in.
      cancelled: the engine has taken its blocks back, and some were not written by then; or they are gone.
      copy_s: seconds that the copy alone took, if that was measured.
    """

    started_s: float
    parts: tuple[CopyPart, ...]
    writes_caches: bool
    num_parts: int = 1
    num_unwritten: int = 1
    error: str = ""
    failed: set[tuple[int, int]] = dataclasses.field(default_factory=set)
    failed_whole: bool = False
    cancelled: bool = False
    copy_s: float = 0.0

    def failed_positions(self) -> tuple[int, ...]:
        """Positions in `CopyJob.block_ids` of what was not copied; empty for all of it."""
        if self.failed_whole:
            return ()
        blocks = [(part.group_id, block_id) for part in self.parts for block_id in part.block_ids]
        positions = tuple(i for i, block in enumerate(blocks) if block in self.failed)
        return positions if len(positions) < len(blocks) else ()


@final
class WorkerJobs:
    """Jobs in parts. A job ends with the last of its parts, so that no part lands after its end.

    Args:
      clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._jobs: dict[int, _Job] = {}
        self._num_seen = 0  # every job with a smaller id that there will be has been started
        self._results: list[JobResult] = []
        self._written: list[int] = []

    def __contains__(self, job_id: int) -> bool:
        return job_id in self._jobs

    def knows(self, job_id: int) -> bool:
        """Whether a job is in flight, or ended since `take_results`."""
        return job_id in self._jobs or any(result.job_id == job_id for result in self._results)

    @property
    def has_results(self) -> bool:
        """Whether any job ended since `take_results`."""
        return bool(self._results)

    @property
    def oldest_id(self) -> int:
        """No job with a smaller id is in flight, or will be: ids rise from plan to plan."""
        return min(self._num_seen, *self._jobs) if self._jobs else self._num_seen

    @property
    def oldest_age_s(self) -> float:
        """For how long the job that was started first has been in flight; 0 when none is."""
        return self._clock() - next(iter(self._jobs.values())).started_s if self._jobs else 0.0

    def start(self, job_id: int, parts: tuple[CopyPart, ...] = (), *, writes_caches: bool = False) -> None:
        """A job begins, with one part: its own dispatch."""
        self._jobs[job_id] = _Job(self._clock(), parts, writes_caches)

    def see_all_below(self, job_id: int) -> None:
        """Every job with a smaller id that this worker is ever to do has been started."""
        if job_id > self._num_seen:
            self._num_seen = job_id

    def add_part(self, job_ids: Iterable[int]) -> None:
        """One more part for each of these jobs."""
        for job_id in job_ids:
            self._jobs[job_id].num_parts += 1
            self._jobs[job_id].num_unwritten += 1

    def write_part(self, job_ids: Iterable[int]) -> None:
        """What writes one part of each of these loads into the caches has been dispatched."""
        for job_id in job_ids:
            job = self._jobs[job_id]
            job.num_unwritten -= 1
            if job.num_unwritten == 0 and not job.error and not job.cancelled:
                self._written.append(job_id)

    def end_part(self, job_ids: Iterable[int], error: str = "", *, failed: Collection[tuple[int, int]] = ()) -> None:
        """One part less for each of these jobs, with what went wrong with it, if anything did.

        Args:
          job_ids: the jobs.
          error: one line; empty if nothing went wrong.
          failed: (group_id, block_id) of the blocks of these jobs that this is about; empty for all of them.
        """
        for job_id in job_ids:
            job = self._jobs[job_id]
            job.num_parts -= 1
            if error:
                job.error = job.error or error
                job.failed.update(failed)
                job.failed_whole |= not failed
            if job.num_parts == 0:
                self._end(job_id, job)

    def cancel(self, job_id: int, *, unwritten: bool) -> None:
        """The engine has taken a job's blocks back; `unwritten` says whether some were not written by then."""
        job = self._jobs.get(job_id)
        if job is not None:
            job.cancelled |= unwritten  # plans repeat it

    def lose_loads(self) -> None:
        """The caches are gone: what is on its way into them has brought nothing, however well its copy goes."""
        for job in self._jobs.values():
            job.cancelled |= job.writes_caches
        self._written.clear()

    def set_copy_s(self, job_id: int, seconds: float) -> None:
        """What the copy of a job that has not ended took."""
        self._jobs[job_id].copy_s = seconds

    def is_cancelled(self, job_id: int) -> bool:
        """Whether it will end as cancelled."""
        return self._jobs[job_id].cancelled

    def take_results(self) -> tuple[JobResult, ...]:
        """The jobs that ended since the last call."""
        results, self._results = tuple(self._results), []
        if self._written:  # an engine that never asks for these has been told by the results before
            told = {result.job_id for result in results}
            self._written = [job_id for job_id in self._written if job_id in self._jobs or job_id in told]
        return results

    def take_written(self) -> tuple[int, ...]:
        """The loads that were wholly written since the last call."""
        written, self._written = tuple(self._written), []
        return written

    def clear(self) -> None:
        """Forgets every job; none of them will end."""
        self._jobs.clear()

    def _end(self, job_id: int, job: _Job) -> None:
        del self._jobs[job_id]
        state = JobState.FAILED if job.error else JobState.CANCELLED if job.cancelled else JobState.FINISHED
        if job.error:
            _logger.warning("job %d failed: %s", job_id, job.error)
        positions = job.failed_positions() if job.error else ()
        seconds = self._clock() - job.started_s
        self._results.append(
            JobResult(
                job_id=job_id,
                state=state,
                error=job.error,
                duration_s=seconds,
                copy_s=job.copy_s,
                failed_blocks=positions,
            )
        )
