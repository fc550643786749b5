"""How much of the host tier chunks get, and how much states: the rule by which memory moves between the two pools.

Both pools together should hold what one LRU cache over all bytes would. In such a cache the next victim of either kind
was last used equally long ago. So the pool whose evicted entries were used more recently gets memory from the other, as
slabs move in memcached ("slab automove"), and a pool with room to spare gives it to one that evicts. Age is counted in
requests: how many came since an entry was last used.

Moves cost entries, so memory stays where it is unless there is a reason:

- Evictions are counted over a window: until a pool has evicted as many entries as a unit holds, and for as many
  requests as a quarter of their mean age, so that the last move has had its effect.
- If both pools have evicted in the window, a move must pay: after it, with ages in proportion to size, the pool that
  gets memory must still evict younger entries than the other, by a margin. It takes half of what would make both ages
  the same.
- If only one has, it gets half of what the other has had free through the window, if that is more than a unit. Chunks
  also give a unit if none was evicted during as many requests as states live: then chunks live longer. The reverse does
  not hold: states are evicted with their chunks, so states may be short although none is evicted by itself.
- A move takes a quarter of the pool that gives at most, and no more than the other pool has.
- Ages of chunks mean little if the eviction policy is not LRU, since others evict young entries by choice. Then chunks
  get only memory that states have free, which is what they have as soon as there are too few chunks for them.

References:
  memcached: slab_automove.c.
"""

import dataclasses
import sys
from collections.abc import Sequence
from typing import NamedTuple, final

from tpu_offload.native import mypyc_attr
from tpu_offload.types import Pool

_MARGIN = 1.1  # by which ages must differ after a move
_LEAST_EVICTED = 8  # entries in a window
_PART = 0.5  # of the move that would make both pools even
_MOST_GIVEN = 0.25  # of a pool in a move
_SPARE = 1.5  # free slots of a pool that gives memory it does not use, in units
_WINDOW_AGE = 0.25  # requests in a window, in mean ages of evicted entries


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


class PoolMove(NamedTuple):
    """A move of memory.

    Attributes:
      taker: the pool that gets it.
      giver: the pool that it is taken from.
      num_segments: how much.
    """

    taker: Pool
    giver: Pool
    num_segments: int


@mypyc_attr(allow_interpreted_subclasses=True)
class PoolBalance:
    """Decides which pool gets memory next, and how much. Indices of all sequences are `Pool`.

    Args:
      segment_slots: slots in a segment of each pool.
      unit: segments for whose slots evictions and free slots are observed before any move.
      chunks_by_age: whether chunks are evicted by their age.
    """

    def __init__(self, segment_slots: Sequence[int], *, unit: int, chunks_by_age: bool = True) -> None:
        self._num_evicted = 0
        self._chunks_by_age = chunks_by_age
        self._segment_slots = segment_slots
        self._unit = unit
        self._least_free = sys.maxsize, sys.maxsize  # slots, since the window began
        self._begun_at = 0  # requests
        self._chunks_evicted_at = 0  # a request since when there was no eviction
        self._num_chunks_seen = 0  # of those evicted in this window
        self._windows = _Window(), _Window()

    @property
    def num_evicted(self) -> int:
        """Entries of both pools since the start."""
        return self._num_evicted

    def note_evicted(self, pool: Pool, num_entries: int, age: int) -> None:
        """A pool was short of slots and evicted entries that were last used `age` requests ago."""
        self._num_evicted += num_entries
        window = self._windows[pool]
        window.num_evicted += num_entries
        window.sum_of_ages += num_entries * age

    def restart(self, now: int) -> None:
        """Forgets all evictions: the pools have other sizes since request `now`."""
        self._chunks_evicted_at = now
        self._begin_window(now)

    def choose(self, *, now: int, num_segments: Sequence[int], num_free: Sequence[int]) -> PoolMove | None:
        """The next move; None if memory stays where it is. O(1).

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
        if (num_chunks := windows[Pool.CHUNKS].num_evicted) != self._num_chunks_seen:
            self._num_chunks_seen, self._chunks_evicted_at = num_chunks, now
        if not any(self._is_complete(pool, now) for pool in Pool):
            return None
        is_both = all(window.num_evicted for window in windows)
        move = self._evened(num_segments) if is_both else self._spared(now, num_segments)
        self._begin_window(now)
        return move if move is not None and num_segments[move.giver] > move.num_segments else None

    def _is_complete(self, pool: Pool, now: int) -> bool:
        window = self._windows[pool]
        if window.num_evicted < max(_LEAST_EVICTED, self._unit * self._segment_slots[pool]):
            return False
        return now - self._begun_at >= _WINDOW_AGE * window.mean_age

    def _evened(self, num_segments: Sequence[int]) -> PoolMove | None:
        """At the end of a window in which both pools have evicted: a move to the one that does so earlier."""
        windows = self._windows
        taker = min(Pool, key=lambda pool: windows[pool].mean_age)
        if not self._goes_by_age(taker):
            return None
        giver = _other(taker)
        num_taker, num_giver = num_segments[taker], num_segments[giver]
        young, old = max(1.0, windows[taker].mean_age), max(1.0, windows[giver].mean_age)
        size = _size((old - young) / (old / num_giver + young / num_taker), num_taker, num_giver)
        still_young, still_old = young * (num_taker + size) / num_taker, old * (num_giver - size) / num_giver
        return PoolMove(taker, giver, size) if still_young * _MARGIN <= still_old else None

    def _spared(self, now: int, num_segments: Sequence[int]) -> PoolMove | None:
        """At the end of a window in which one pool has evicted: a move of what the other has free."""
        taker = Pool.CHUNKS if self._windows[Pool.CHUNKS].num_evicted else Pool.STATES
        other = _other(taker)
        spare = self._least_free[other] / self._segment_slots[other]
        if spare >= _SPARE * self._unit:
            return PoolMove(taker, other, _size(spare, num_segments[taker], num_segments[other]))
        age = now - self._chunks_evicted_at
        is_old = other is Pool.CHUNKS and age >= _MARGIN * self._windows[taker].mean_age
        return PoolMove(taker, other, self._unit) if is_old else None

    def _goes_by_age(self, taker: Pool) -> bool:
        """Whether a pool may get memory because its entries are evicted young."""
        return self._chunks_by_age or taker is not Pool.CHUNKS

    def _begin_window(self, now: int) -> None:
        self._begun_at, self._num_chunks_seen = now, 0
        self._least_free = sys.maxsize, sys.maxsize
        self._windows = _Window(), _Window()


def _other(pool: Pool) -> Pool:
    """The rule is one for two pools."""
    return Pool.STATES if pool is Pool.CHUNKS else Pool.CHUNKS


def _size(even: float, num_taker: int, num_giver: int) -> int:
    """Segments of a move, of pools with so many, if `even` segments would make them even; at least one."""
    return max(1, int(min(_PART * even, _MOST_GIVEN * num_giver, num_taker)))
