"""Gives back what copies hold, and ends every job, of any kind: counts it, logs it, updates its circuit breaker.

What a promise, a waiting load, a job or a swapped-out request holds is its `Holdings`. Staging blocks, pins,
checkpoints and places in the swap pool are given back here and nowhere else. A planned job keeps them until it ends,
even if its request ends first. Copies of a job that timed out may still run. Until every worker has finished with it,
the job keeps its staging blocks, and a save the memory that it writes: in the host tier its slots are in quarantine
(`ChunkIndex.complete`), and a swap-out keeps its places in the swap pool.
"""

import logging
from typing import final

from tpu_offload.core.holdings import Holdings
from tpu_offload.core.index import ChunkIndex
from tpu_offload.core.jobs import Job
from tpu_offload.core.staging import Staging
from tpu_offload.core.swap.pool import SwapPool
from tpu_offload.metrics import OffloadStats
from tpu_offload.types import Direction, JobState

_logger = logging.getLogger(__name__)


@final
class Completion:
    """Releases what copies hold, and ends jobs.

    Args:
      staging: staging blocks are released here.
      index: chunks are unpinned here, checkpoints released, and slots leave quarantine.
      pool: places of the swap pool are released here.
      counts: the counters to increment.
    """

    def __init__(self, *, staging: Staging, index: ChunkIndex, pool: SwapPool, counts: OffloadStats) -> None:
        self._staging = staging
        self._index = index
        self._pool = pool
        self._counts = counts

    def release(self, held: Holdings, *, late_account: str = "", sweep: bool = True) -> None:
        """Releases all that a copy holds; it has ended, at whichever stage.

        Args:
          held: what it holds.
          late_account: of a job that timed out, whose copies may still run: keeps for `release_late` what these need.
            Its staging blocks go to this account, because its request may reserve again.
          sweep: see `ChunkIndex.unpin`.
        """
        if held.account:
            self._staging.release(held.account, held.num_staging_blocks, held.direction)
            if late_account:
                held.account = late_account
                self._staging.reserve_late(late_account, held.num_staging_blocks, held.direction)
        if held.checkpoint is not None:
            self._index.checkpoints.release(held.checkpoint)
        if held.pool_blocks and not (late_account and held.direction is Direction.SAVE):
            self._pool.release(held.pool_blocks)
        held.breaker.cancel_probe(held.probe)
        if held.are_pinned:  # last: an eviction policy of the user's own may raise, and then nothing else is held
            self._index.unpin(held.keys, sweep=sweep)

    def release_rest(self, held: Holdings, *, num_chunks: int, num_staging_blocks: int) -> None:
        """A load needs only the first of the chunks that were promised: releases the rest."""
        self._staging.release(held.account, held.num_staging_blocks - num_staging_blocks, held.direction)
        held.num_staging_blocks = num_staging_blocks
        if num_chunks < len(held.keys):
            promised, held.keys = held.keys, held.keys[:num_chunks]
            held.slots = held.slots[:num_chunks]
            self._index.pin(held.keys)
            self._index.unpin(promised)

    def release_late(self, job: Job) -> None:
        """Releases what a job that timed out still holds: no worker copies anything of it any more."""
        held = job.held
        self._staging.release(held.account, held.num_staging_blocks, held.direction)
        if job.kind.writes_host:
            if held.slots:
                self._index.end_quarantine(held.slots)
            if held.pool_blocks:
                self._pool.release(held.pool_blocks)

    def complete(self, job: Job) -> None:
        """Ends a job; its state is final."""
        timed_out, kind, breaker = job.state is JobState.TIMED_OUT, job.kind, job.held.breaker
        failed = job.state is JobState.FAILED and (job.copy_failed or not job.is_void)
        if timed_out:
            _logger.warning("%s timed out; %s", job.what, job.consequence)
        elif failed:
            _logger.warning("%s failed: %s; %s", job.what, job.error, job.consequence)
        if (timed_out or failed) and not kind.of_storage:  # those have counters of their own
            self._counts.num_timed_out_jobs += timed_out
            self._counts.num_failed_jobs += 1
        if job.state is JobState.FINISHED:
            breaker.succeeded(job.job_id)
        elif job.copy_failed:
            breaker.failed(job.job_id, job.error)
        self.release(job.held, late_account=f"late job {job.job_id}" if timed_out else "", sweep=False)
