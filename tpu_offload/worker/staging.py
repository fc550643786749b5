"""How much of the staging buffer the copies of one worker hold, and how much more they may take.

A staging block counts as one in every layer group, as in the scheduler's budget. The page groups of a layer group
stage the same blocks, each its share of the bytes: what counts is the page group that holds most. The scheduler plans
within the budget; how a load is cut into portions within its reservation is decided here.

In lockstep nothing here depends on which flights have ended: that differs between hosts, and what they dispatch must
not.
"""

import sys
from collections.abc import Callable, Iterable
from typing import final

import numpy as np

from tpu_offload.kernels import Flight
from tpu_offload.worker.backlog import BackloggedLoad

type Flights = Iterable[tuple[int, Iterable[Flight]]]
"""Per page group, its layer group and the flights."""


@final
class StagingUsage:
    """The staging buffer of one worker.

    Args:
      num_blocks: the staging budget.
      flights: the flights of the host tier.
      lockstep: the caches span hosts.
    """

    def __init__(self, num_blocks: int, *, flights: Callable[[], Flights], lockstep: bool) -> None:
        self._num_blocks = num_blocks
        self._flights = flights
        self._lockstep = lockstep

    @property
    def room(self) -> int:
        """Blocks that all copies together may stage now; unlimited in lockstep."""
        return sys.maxsize if self._lockstep else self._num_blocks - self._num_held

    def room_of(self, load: BackloggedLoad, *, step_id: int) -> int:
        """Blocks of one load that may be dispatched now.

        Args:
          load: a staged load.
          step_id: the current step; in lockstep the portions of the step before still hold their blocks.
        """
        allowed = load.job.num_staging_blocks or self._num_blocks
        if self._lockstep:
            return allowed - sum(size for portion_step_id, size in load.portions if portion_step_id > step_id - 2)
        job_id = load.job.job_id
        return allowed - self._sum(lambda f: int(np.count_nonzero(f.moves.job_ids == job_id)) if f.num_staged else 0)

    @property
    def _num_held(self) -> int:
        return self._sum(lambda flight: flight.num_staged)

    def _sum(self, blocks_of: Callable[[Flight], int]) -> int:
        held: dict[int, int] = {}
        for group_id, flights in self._flights():
            held[group_id] = max(held.get(group_id, 0), sum(map(blocks_of, flights)))
        return sum(held.values())
