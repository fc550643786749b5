"""Jobs in flight on one worker, and the results of those that ended."""

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
      started_s: time of its dispatch.
      parts: what it copies, if its blocks can fail one by one.
      num_refs: flights that carry blocks of it, and one until all of it is dispatched.
      num_unwritten: for a load, how many of these still lack the program that writes the caches.
      error: the first error.
      failed: (group_id, block_id) of the blocks that failed, unless all did; None without any.
      failed_whole: an error concerns all of its blocks.
      writes_caches: it is a load, or a swap in.
      cancelled: the engine has taken its blocks back before all were written, or the caches were lost.
      copy_s: seconds that the copy alone took, if measured.
      of_storage: it is a copy to or from storage, or a lookup there.
      missing: for a promotion, positions of chunks that storage does not have.
      num_found: for a lookup, what it has found.
    """

    started_s: float
    parts: tuple[CopyPart, ...]
    writes_caches: bool
    num_refs: int = 1
    num_unwritten: int = 1
    error: str = ""
    failed: set[tuple[int, int]] | None = None  # few jobs fail: no container for the others
    failed_whole: bool = False
    cancelled: bool = False
    copy_s: float = 0.0
    of_storage: bool = False
    missing: tuple[int, ...] = ()
    num_found: tuple[int, ...] = ()

    def failed_positions(self) -> tuple[int, ...]:
        """Positions in `CopyJob.block_ids` of the blocks that failed; empty if all did."""
        if self.failed_whole or self.failed is None:
            return ()
        blocks = [(part.group_id, block_id) for part in self.parts for block_id in part.block_ids]
        positions = tuple(i for i, block in enumerate(blocks) if block in self.failed)
        return positions if len(positions) < len(blocks) else ()


@final
class WorkerJobs:
    """Reference-counted jobs. A job ends when its last reference is dropped, so no flight of it lands after its end.

    Args:
      clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._jobs: dict[int, _Job] = {}
        self._watermark = 0  # no job with a smaller id will be started
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
        """No job with a smaller id is in flight, except those of storage, or will be: ids rise from plan to plan."""
        if not self._jobs:
            return self._watermark
        return min([self._watermark, *[i for i, job in self._jobs.items() if not job.of_storage]])

    @property
    def storage_ids(self) -> tuple[int, ...]:
        """The jobs in flight to and from storage."""
        return tuple([i for i, job in self._jobs.items() if job.of_storage]) if self._jobs else ()

    def start(
        self,
        job_id: int,
        parts: tuple[CopyPart, ...] = (),
        *,
        writes_caches: bool = False,
        of_storage: bool = False,
    ) -> None:
        """Adds a job with one reference, for its dispatch."""
        self._jobs[job_id] = _Job(self._clock(), parts, writes_caches, of_storage=of_storage)

    def raise_watermark(self, job_id: int) -> None:
        """No job with a smaller id will be started."""
        if job_id > self._watermark:
            self._watermark = job_id

    def add_ref(self, job_ids: Iterable[int]) -> None:
        """Adds a reference to each of these jobs, for a flight that carries blocks of them."""
        jobs = self._jobs
        for job_id in job_ids:
            job = jobs[job_id]
            job.num_refs += 1
            job.num_unwritten += 1

    def mark_written(self, job_ids: Iterable[int]) -> None:
        """The program that writes one flight of these loads into the caches has been dispatched."""
        for job_id in job_ids:
            job = self._jobs[job_id]
            job.num_unwritten -= 1
            if job.num_unwritten == 0 and not job.error and not job.cancelled:
                self._written.append(job_id)

    def drop_ref(self, job_ids: Iterable[int], error: str = "", *, failed: Collection[tuple[int, int]] = ()) -> None:
        """Drops a reference of each of these jobs; with an error, they fail.

        Args:
          job_ids: the jobs.
          error: one line; empty if nothing failed.
          failed: (group_id, block_id) of the blocks that failed; empty for all blocks of these jobs.
        """
        for job_id in job_ids:
            job = self._jobs[job_id]
            job.num_refs -= 1
            if error:
                job.error = job.error or error
                job.failed = (job.failed or set()).union(failed)
                job.failed_whole |= not failed
            if job.num_refs == 0:
                self._end(job_id, job)

    def cancel(self, job_id: int, *, unwritten: bool) -> None:
        """Cancels a job if some of its blocks are `unwritten`; otherwise it ends as it would have."""
        job = self._jobs.get(job_id)
        if job is not None:
            job.cancelled |= unwritten  # plans repeat a cancellation

    def cancel_loads(self) -> None:
        """Cancels every copy into the caches, even one that succeeds: the caches are lost."""
        for job in self._jobs.values():
            job.cancelled |= job.writes_caches
        self._written.clear()

    def set_copy_s(self, job_id: int, seconds: float) -> None:
        """Sets the measured duration of the copy of a job in flight."""
        self._jobs[job_id].copy_s = seconds

    def raise_copy_s(self, job_id: int, seconds: float) -> None:
        """Part of a job in flight has taken so long; the longest part counts."""
        self._jobs[job_id].copy_s = max(self._jobs[job_id].copy_s, seconds)

    def add_missing(self, job_id: int, positions: Iterable[int]) -> None:
        """Storage does not have these chunks of a promotion in flight."""
        job = self._jobs[job_id]
        job.missing = (*job.missing, *positions)

    def set_found(self, job_id: int, num_found: tuple[int, ...]) -> None:
        """Sets the answer of a lookup in flight, see `JobResult.num_found`."""
        self._jobs[job_id].num_found = num_found

    def is_cancelled(self, job_id: int) -> bool:
        """Whether a job in flight will end as cancelled."""
        return self._jobs[job_id].cancelled

    def take_results(self) -> tuple[JobResult, ...]:
        """The jobs that ended since the last call."""
        results, self._results = tuple(self._results), []
        if self._written:  # bounds the list for engines that never call `take_written`
            ended = {result.job_id for result in results}
            self._written = [job_id for job_id in self._written if job_id in self._jobs or job_id in ended]
        return results

    def take_written(self) -> tuple[int, ...]:
        """The loads whose last write into the caches was dispatched since the last call."""
        written, self._written = tuple(self._written), []
        return written

    def clear(self) -> None:
        """Drops every job; none of them will end."""
        self._jobs.clear()

    def _end(self, job_id: int, job: _Job) -> None:
        del self._jobs[job_id]
        state = JobState.FAILED if job.error else JobState.CANCELLED if job.cancelled else JobState.FINISHED
        positions = job.failed_positions() if job.error else ()
        if positions and job.of_storage:
            job.error = f"{len(positions)} of {len(job.parts[0].block_ids)}: {job.error}"
        if job.error:
            what = "storage" if job.of_storage else "into HBM" if job.writes_caches else "out of HBM"
            _logger.warning("job %d (%s) failed: %s", job_id, what, job.error)
        seconds = self._clock() - job.started_s
        self._results.append(
            JobResult(
                job_id=job_id,
                state=state,
                error=job.error,
                duration_s=seconds,
                copy_s=job.copy_s,
                failed_blocks=positions,
                missing_chunks=tuple(sorted(job.missing)) if job.missing else (),
                num_found=job.num_found,
            )
        )
