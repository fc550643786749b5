"""How much of the host tier chunks get, and how much states: the rule by which memory moves between the two pools.

Both pools together should hold what one LRU cache over all bytes would. In such a cache the next victim of either kind
was last used equally long ago. So the pool whose evicted entries were used more recently gets memory from the other, as
slabs move in memcached ("slab automove"), and a pool with room to spare gives it to one that evicts. Age is counted in
requests: how many came since an entry was last used.

Moves cost entries, so three things keep memory where it is. Ages are compared over a window, in which a pool has
evicted as much as a move brings. A move must pay: after it, with ages in proportion to size, the pool that gets memory
must still evict younger entries than the other, by a margin. And a pool without evictions gives memory only if it has
more free slots than a move takes, or if the other has evicted for several windows.

References:
  memcached: slab_automove.c.
"""

import dataclasses
import enum
from collections.abc import Sequence
from typing import final

_MARGIN = 1.1  # by which ages must differ after a move
_LEAST_EVICTED = 8  # entries in a window
_SPARE = 1.5  # free slots of a pool that gives memory it does not use, in moves
_QUIET_WINDOWS = 2  # of one pool, without an eviction of the other


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
    """

    def __init__(self, segment_slots: Sequence[int], *, move_size: int) -> None:
        self._move_slots = [move_size * num for num in segment_slots]
        self._move_size = move_size
        self._num_quiet_windows = 0
        self._windows = _Window(), _Window()

    def note_evicted(self, pool: Pool, num_entries: int, age: int) -> None:
        """A pool was short of slots and evicted entries that were last used `age` requests ago."""
        window = self._windows[pool]
        window.num_evicted += num_entries
        window.sum_of_ages += num_entries * age

    def restart(self) -> None:
        """Forgets all evictions: the pools have other sizes now."""
        self._num_quiet_windows = 0
        self._begin_window()

    def choose(self, *, num_segments: Sequence[int], num_free: Sequence[int]) -> Pool | None:
        """The pool that gets a move's segments from the other; None if memory stays where it is. O(1).

        Args:
          num_segments: segments of each pool.
          num_free: free slots of each pool.
        """
        if not (self._windows[0].num_evicted or self._windows[1].num_evicted):
            return None
        for taker in Pool:
            giver = taker.other
            if (
                self._windows[taker].num_evicted
                and num_segments[giver] > self._move_size
                and num_free[giver] >= _SPARE * self._move_slots[giver]
            ):
                return taker
        for taker in Pool:
            if self._windows[taker].num_evicted >= max(_LEAST_EVICTED, self._move_slots[taker]):
                chosen = self._compare(num_segments)
                self._begin_window()
                return chosen
        return None

    def _compare(self, num_segments: Sequence[int]) -> Pool | None:
        """At the end of a window: the pool that evicts too early."""
        windows = self._windows
        if not all(window.num_evicted for window in windows):
            # Nothing is known of the other pool's ages, but that its entries live longer than the window.
            taker = Pool.CHUNKS if windows[Pool.CHUNKS].num_evicted else Pool.STATES
            self._num_quiet_windows += 1
            if self._num_quiet_windows < _QUIET_WINDOWS:
                return None
        else:
            self._num_quiet_windows = 0
            taker = min(Pool, key=lambda pool: windows[pool].mean_age / num_segments[pool])
            young, old = windows[taker].mean_age, windows[taker.other].mean_age
            more = (num_segments[taker] + self._move_size) / num_segments[taker]
            less = (num_segments[taker.other] - self._move_size) / num_segments[taker.other]
            if young * more * _MARGIN > old * less:
                return None
        return taker if num_segments[taker.other] > self._move_size else None

    def _begin_window(self) -> None:
        self._windows = _Window(), _Window()
