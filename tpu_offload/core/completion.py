"""The end of every job, whatever its kind: counted, logged, told to its circuit breaker, and what it held given back.

A job takes staging blocks, pins in the host tier and places in the swap pool when it is planned, and holds them while
bytes may be moving, whatever became of the request. One thing outlives the end: a save that timed out may still land,
so the memory that it writes is kept until all workers are through with it. That is the quarantine of slots in the host
tier (`ChunkIndex.complete`), and for a copy out the places in the swap pool.
"""

import logging
from typing import final

from tpu_offload.core.index import ChunkIndex
from tpu_offload.core.jobs import Job
from tpu_offload.core.staging import Staging
from tpu_offload.core.swap_pool import SwapPool
from tpu_offload.metrics import OffloadStats
from tpu_offload.types import JobState

_logger = logging.getLogger(__name__)


@final
class Completion:
    """Ends jobs.

    Args:
      staging: where they reserved.
      index: where they pinned chunks, and put slots in quarantine.
      pool: where they hold places.
      counts: where to count.
      timeout_s: for the log.
    """

    def __init__(
        self, *, staging: Staging, index: ChunkIndex, pool: SwapPool, counts: OffloadStats, timeout_s: float
    ) -> None:
        self._staging = staging
        self._index = index
        self._pool = pool
        self._counts = counts
        self._timeout_s = timeout_s

    def complete(self, job: Job) -> None:
        """A job has ended, in its last state."""
        if job.account:
            self._staging.release(job.account, job.wire.num_staging_blocks, job.direction)
        if job.keys and not job.kind.writes_host:
            # A cascade has chunks of any prefixes, and pins each.
            for keys in [(key,) for key in job.keys] if job.kind.of_storage else [job.keys]:
                self._index.unpin(keys, sweep=False)
        timed_out = job.state is JobState.TIMED_OUT
        if job.pool_blocks and not (timed_out and job.kind.writes_host):
            self._pool.release(job.pool_blocks)
        if timed_out:
            self._counts.num_timed_out_jobs += 1
            _logger.warning("%s timed out after %g s; %s", job.what, self._timeout_s, job.consequence)
        elif job.state is JobState.FAILED:
            _logger.warning("%s failed: %s; %s", job.what, job.error, job.consequence)
        self._counts.num_failed_jobs += job.state in (JobState.FAILED, JobState.TIMED_OUT)
        if job.state is JobState.FINISHED:
            job.breaker.succeeded(job.job_id)
        elif job.copy_failed:
            job.breaker.failed(job.job_id, job.error)
        else:
            job.breaker.withdraw(job.job_id)

    def settle(self, job: Job) -> None:
        """Nothing of a save that had timed out can land any more: the memory that it wrote is free."""
        if job.slots:
            self._index.end_quarantine(job.slots)
        if job.pool_blocks:
            self._pool.release(job.pool_blocks)
