"""Gives back what jobs held: the one place where that is done.

Staging blocks, pins in the host tier and places in the swap pool are taken when a job is planned. They are held while
bytes may be moving, whatever became of the request, and given back when the job ends. One thing outlives the end: a
save that timed out may still land, so the memory that it writes is kept until all workers are through with it. That
is the quarantine of slots in the host tier (`ChunkIndex.complete`), and for a copy out the places in the swap pool.
"""

from typing import final

from tpu_offload.core.index import ChunkIndex
from tpu_offload.core.jobs import TrackedJob
from tpu_offload.core.staging import Staging
from tpu_offload.core.swap_pool import SwapPool
from tpu_offload.types import Direction, JobState


@final
class Holdings:
    """Where jobs of all kinds take what they hold.

    Args:
      staging: the staging buffer.
      index: the host tier's.
      pool: the swap pool.
    """

    def __init__(self, *, staging: Staging, index: ChunkIndex, pool: SwapPool) -> None:
        self._staging = staging
        self._index = index
        self._pool = pool

    def give_back(self, job: TrackedJob) -> None:
        """A job has ended."""
        held = job.held
        if held.account:
            self._staging.release(held.account, held.num_staging_blocks, job.direction)
        if held.pins:
            self._index.unpin(held.pins, sweep=False)
        if held.pool_blocks and not (job.state is JobState.TIMED_OUT and job.direction is Direction.SAVE):
            self._pool.release(held.pool_blocks)
