"""How much of the staging buffer the copies of one worker hold, and how much more they may take.

A staging block counts as one whatever its layer group, as in the scheduler's budget. The scheduler plans within the
budget but releases the blocks of jobs that time out, whose copies still hold theirs: only the worker knows those.

In lockstep nothing here depends on which flights have ended: that differs between hosts, and what they dispatch must
not.
"""

import sys
from collections.abc import Callable, Iterable
from typing import final

import numpy as np

from tpu_offload.errors import TransferError
from tpu_offload.kernels import Copier, Flight
from tpu_offload.worker.backlog import BackloggedLoad
from tpu_offload.worker.jobs import WorkerJobs


@final
class StagingUsage:
    """The staging buffer of one worker.

    Args:
      num_blocks: the staging budget.
      flights: the flights of the host tier.
      jobs: the worker's jobs in flight.
      lockstep: the caches span hosts.
      timeout_s: age at which the scheduler expires a job.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        flights: Callable[[], Iterable[Flight]],
        jobs: WorkerJobs,
        lockstep: bool,
        timeout_s: float,
    ) -> None:
        self._num_blocks = num_blocks
        self._flights = flights
        self._jobs = jobs
        self._lockstep = lockstep
        self._timeout_s = timeout_s

    def check(self, copier: Copier, num_blocks: int) -> None:
        """Raises TransferError if a copy of `num_blocks` would exceed the budget because late copies hold blocks."""
        if not copier.stages or self._lockstep or self._jobs.oldest_age_s <= self._timeout_s:
            return
        num_held = self._num_held
        if num_held + num_blocks > self._num_blocks:
            raise TransferError(
                f"late copies hold {num_held} of the staging buffer's {self._num_blocks} blocks; no room for "
                f"{num_blocks}"
            )

    @property
    def room(self) -> int:
        """Blocks that all copies together may stage now; unlimited in lockstep."""
        return sys.maxsize if self._lockstep else self._num_blocks - self._num_held

    def room_of(self, load: BackloggedLoad, *, step_id: int) -> int:
        """Blocks of one load that may be dispatched now.

        Args:
          load: a staged load.
          step_id: the current step; in lockstep the pieces of the step before still hold their blocks.
        """
        allowed = load.job.num_staging_blocks or self._num_blocks
        if self._lockstep:
            return allowed - sum(size for piece_step_id, size in load.pieces if piece_step_id > step_id - 2)
        staged = (flight.moves.job_ids for flight in self._flights() if flight.num_staged)
        return allowed - sum(int(np.count_nonzero(job_ids == load.job.job_id)) for job_ids in staged)

    @property
    def _num_held(self) -> int:
        return sum(flight.num_staged for flight in self._flights())
