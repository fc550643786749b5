"""The end of every job, of any kind: counts and logs it, updates its circuit breaker and releases what it held.

A planned job owns staging blocks, pins in the host tier and places in the swap pool, and holds them until it ends,
even if its request ends before. Copies of a job that timed out may still run. Until every worker has finished with it,
the job keeps its staging blocks, and a save the memory that it writes: in the host tier its slots are in quarantine
(`ChunkIndex.complete`), and a swap-out keeps its places in the swap pool.
"""

import logging
from typing import final

from tpu_offload.core.index import ChunkIndex
from tpu_offload.core.jobs import Job
from tpu_offload.core.staging import Staging
from tpu_offload.core.swap.pool import SwapPool
from tpu_offload.metrics import OffloadStats
from tpu_offload.types import JobKind, JobState

_logger = logging.getLogger(__name__)


@final
class Completion:
    """Ends jobs.

    Args:
      staging: staging blocks are released here.
      index: chunks are unpinned here, and slots leave quarantine.
      pool: places of the swap pool are released here.
      counts: the counters to increment.
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
        """Ends a job; its state is final."""
        timed_out, kind = job.state is JobState.TIMED_OUT, job.kind
        failed = job.state is JobState.FAILED and (job.copy_failed or not job.is_void)
        if job.account:
            self._staging.release(job.account, job.wire.num_staging_blocks, job.direction)
            if timed_out:  # under an account of its own: its request may reserve again
                self._staging.reserve_late(late_account(job), job.wire.num_staging_blocks, job.direction)
        if job.keys and not kind.writes_host and not kind.of_storage:
            self._index.unpin(job.keys, sweep=False)
        if job.checkpoint is not None:
            self._index.checkpoints.release(job.checkpoint)
        if job.pool_blocks and not (timed_out and kind.writes_host):
            self._pool.release(job.pool_blocks)
        if timed_out:
            # A lookup has a deadline of its own.
            after = "" if kind is JobKind.LOOKUP else f" after {self._timeout_s:g} s"
            _logger.warning("%s timed out%s; %s", job.what, after, job.consequence)
        elif failed:
            _logger.warning("%s failed: %s; %s", job.what, job.error, job.consequence)
        if (timed_out or failed) and not kind.of_storage:  # those have counters of their own
            self._counts.num_timed_out_jobs += timed_out
            self._counts.num_failed_jobs += 1
        if job.state is JobState.FINISHED:
            job.breaker.succeeded(job.job_id)
        elif job.copy_failed:
            job.breaker.failed(job.job_id, job.error)
        else:
            job.breaker.cancel_probe(job.job_id)

    def release_late(self, job: Job) -> None:
        """Releases what a job that timed out still holds: no worker copies anything of it any more."""
        if job.account:
            self._staging.release(late_account(job), job.wire.num_staging_blocks, job.direction)
        if job.kind.writes_host:
            if job.slots:
                self._index.end_quarantine(job.slots)
            if job.pool_blocks:
                self._pool.release(job.pool_blocks)


def late_account(job: Job) -> str:
    """The holder of the staging blocks of a job that timed out."""
    return f"late job {job.job_id}"
