"""How much of the host tier chunks get, and how much states: the rule by which memory moves between the two pools.

Both pools together should hold what one LRU cache over all bytes would. In such a cache the next victim of either kind
was last used equally long ago. So the pool whose evicted entries were used more recently gets memory from the other, as
slabs move in memcached ("slab automove"), and a pool with room to spare gives it to one that evicts. Age is counted in
requests: how many came since an entry was last used.

Moves cost entries, so memory stays where it is unless there is a reason:

- Evictions are counted over a window: until a pool has evicted as many entries as a move takes, and for as many
  requests as a quarter of their mean age, so that the last move has had its effect.
- If both pools have evicted in the window, a move must pay: after it, with ages in proportion to size, the pool that
  gets memory must still evict younger entries than the other, by a margin.
- If only one has, it gets memory if the other has had free slots for more than a move through the window, or has not
  evicted for as many requests as the entries of the first live: then its own live longer.
- Ages of chunks mean little if the eviction policy is not LRU, since others evict young entries by choice. Then chunks
  get only memory that states have free.

References:
  memcached: slab_automove.c.
"""

import dataclasses
import enum
import sys
from collections.abc import Sequence
from typing import final

_MARGIN = 1.1  # by which ages must differ after a move
_LEAST_EVICTED = 8  # entries in a window
_SPARE = 1.5  # free slots of a pool that gives memory it does not use, in moves
_WINDOW_AGE = 0.25  # requests in a window, in mean ages of evicted entries


class Pool(enum.IntEnum):
    """A pool of the host tier."""

    CHUNKS = 0
    STATES = 1

    @property
    def other(self) -> "Pool":
        """The other one."""
        return Pool(1 - self)


@final
@dataclasses.dataclass(slots=True)
class _Window:
    """Evictions of one pool since the last decision.

    Attributes:
      num_evicted: entries.
      sum_of_ages: over these entries.
    """

    num_evicted: int = 0
    sum_of_ages: int = 0

    @property
    def mean_age(self) -> float:
        return self.sum_of_ages / self.num_evicted


@final
class PoolBalance:
    """Decides which pool gets memory next. Indices of all sequences are `Pool`.

    Args:
      segment_slots: slots in a segment of each pool.
      move_size: segments that move at a time.
      chunks_by_age: whether chunks are evicted by their age.
    """

    def __init__(self, segment_slots: Sequence[int], *, move_size: int, chunks_by_age: bool = True) -> None:
        self._chunks_by_age = chunks_by_age
        self._move_slots = [move_size * num for num in segment_slots]
        self._move_size = move_size
        self._least_free = sys.maxsize, sys.maxsize  # slots, since the window began
        self._begun_at = 0  # requests
        self._last_evicted_at = [0, 0]
        self._num_seen = [0, 0]  # evictions in this window
        self._windows = _Window(), _Window()

    def note_evicted(self, pool: Pool, num_entries: int, age: int) -> None:
        """A pool was short of slots and evicted entries that were last used `age` requests ago."""
        window = self._windows[pool]
        window.num_evicted += num_entries
        window.sum_of_ages += num_entries * age

    def restart(self, now: int) -> None:
        """Forgets all evictions: the pools have other sizes since request `now`."""
        self._last_evicted_at = [now, now]
        self._begin_window(now)

    def choose(self, *, now: int, num_segments: Sequence[int], num_free: Sequence[int]) -> Pool | None:
        """The pool that gets a move's segments from the other; None if memory stays where it is. O(1).

        Args:
          now: requests so far.
          num_segments: segments of each pool.
          num_free: free slots of each pool.
        """
        windows = self._windows
        if not (windows[0].num_evicted or windows[1].num_evicted):
            self._begin_window(now)
            return None
        self._least_free = min(self._least_free[0], num_free[0]), min(self._least_free[1], num_free[1])
        for pool in Pool:
            if windows[pool].num_evicted != self._num_seen[pool]:
                self._num_seen[pool], self._last_evicted_at[pool] = windows[pool].num_evicted, now
        if not any(self._is_complete(pool, now) for pool in Pool):
            return None
        taker = self._taker(now, num_segments)
        self._begin_window(now)
        return taker if taker is not None and num_segments[taker.other] > self._move_size else None

    def _is_complete(self, pool: Pool, now: int) -> bool:
        window = self._windows[pool]
        if window.num_evicted < max(_LEAST_EVICTED, self._move_slots[pool]):
            return False
        return now - self._begun_at >= _WINDOW_AGE * window.mean_age

    def _taker(self, now: int, num_segments: Sequence[int]) -> Pool | None:
        """At the end of a window: the pool that evicts too early."""
        windows = self._windows
        if not all(window.num_evicted for window in windows):
            taker = Pool.CHUNKS if windows[Pool.CHUNKS].num_evicted else Pool.STATES
            other = taker.other
            is_spare = self._least_free[other] >= _SPARE * self._move_slots[other]
            is_old = now - self._last_evicted_at[other] >= _MARGIN * windows[taker].mean_age
            return taker if is_spare or (is_old and self._goes_by_age(taker)) else None
        taker = min(Pool, key=lambda pool: windows[pool].mean_age)
        young, old = windows[taker].mean_age, windows[taker.other].mean_age
        more = (num_segments[taker] + self._move_size) / num_segments[taker]
        less = (num_segments[taker.other] - self._move_size) / num_segments[taker.other]
        return taker if young * more * _MARGIN <= old * less and self._goes_by_age(taker) else None

    def _goes_by_age(self, taker: Pool) -> bool:
        """Whether a pool may get memory because its entries are evicted young."""
        return self._chunks_by_age or taker is not Pool.CHUNKS

    def _begin_window(self, now: int) -> None:
        self._begun_at, self._num_seen = now, [0, 0]
        self._least_free = sys.maxsize, sys.maxsize
        self._windows = _Window(), _Window()
