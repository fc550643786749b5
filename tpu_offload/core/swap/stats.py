"""Counters of request swap."""

from typing import final

from tpu_offload.core.jobs import Job
from tpu_offload.metrics import OffloadStats
from tpu_offload.types import Direction

_THRASH_STEPS = 32


@final
class SwapStats:
    """Counts swaps, and those that thrash: requests swapped out again soon after they were swapped in.

    Args:
      counts: the scheduler's counters, which it increments.
    """

    def __init__(self, counts: OffloadStats) -> None:
        self._counts = counts
        self._num_steps = 0
        self._swapped_in_at: dict[str, int] = {}  # step of the last swap-in, of those in the last steps

    def begin_step(self) -> None:
        """A step is planned."""
        self._num_steps += 1
        while self._swapped_in_at:
            request_id = next(iter(self._swapped_in_at))
            if self._num_steps - self._swapped_in_at[request_id] <= _THRASH_STEPS:
                break
            del self._swapped_in_at[request_id]

    def forget(self, request_id: str) -> None:
        """A request has ended; its id may be used again."""
        self._swapped_in_at.pop(request_id, None)

    def count_recompute(self, *, faster: bool = False, no_room: bool = False) -> None:
        """A preempted request is recomputed: because that is faster, because the pool is full, or for neither."""
        self._counts.num_recomputed += 1
        self._counts.num_recomputed_faster += faster
        self._counts.num_recomputed_no_room += no_room

    def count_swap_out(self, request_id: str, *, num_skipped: int) -> None:
        """A request is swapped out, and `num_skipped` of its blocks need no copy."""
        self._counts.num_swapped_out += 1
        self._counts.swap_skipped_blocks += num_skipped
        self._counts.num_thrashed_swaps += request_id in self._swapped_in_at

    def count_present(self, num_blocks: int) -> None:
        """Blocks of a request that is swapped in are in HBM already, and need no copy."""
        self._counts.swap_skipped_blocks += num_blocks

    def count_swap_in(self, request_id: str) -> None:
        """A request has been swapped in."""
        self._swapped_in_at.pop(request_id, None)
        self._swapped_in_at[request_id] = self._num_steps
        self._counts.num_swapped_in += 1

    def count_lost(self) -> None:
        """A swapped-out request must be recomputed."""
        self._counts.num_lost_swaps += 1

    def count_copy(self, job: Job) -> None:
        """A copy has finished."""
        counts = self._counts
        if job.direction is Direction.SAVE:
            counts.swapped_out_blocks += job.wire.num_blocks
            counts.swapped_out_nbytes += job.nbytes
            counts.swap_out_s += job.duration_s
        else:
            counts.swapped_in_blocks += job.wire.num_blocks
            counts.swapped_in_nbytes += job.nbytes
            counts.swap_in_s += job.duration_s
