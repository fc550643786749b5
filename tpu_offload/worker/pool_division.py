"""Moves segments of host memory between the pools of the host tier.

The scheduler decides how many segments each pool may have (`HostDivision`), and sees to it that nothing uses those that
it takes away. This process sees to it that all pools together never have more segments than it was given: it frees the
segments of one pool before it allocates any of another.
"""

import dataclasses
from collections.abc import Sequence
from typing import final

from tpu_offload.memory import SegmentLimit
from tpu_offload.types import HostDivision
from tpu_offload.worker.page_group_copies import PageGroupCopies


@final
@dataclasses.dataclass(slots=True)
class HostPool:
    """The segments of one pool. Each of its page groups has an arena with as many.

    Attributes:
      copies: of its page groups.
      limit: shared by their arenas.
      num_allowed: segments that the arenas have or are allocating, at most.
      readers: other copies from this memory: swap-ins.
    """

    copies: Sequence[PageGroupCopies]
    limit: SegmentLimit
    num_allowed: int
    readers: Sequence[PageGroupCopies] = ()

    @property
    def growing(self) -> bool:
        """Whether memory is being allocated."""
        return any(group.memory.arena.growing for group in self.copies)

    @property
    def is_cut(self) -> bool:
        """Whether its allocation was ended before all allowed segments were there, though memory has not run out."""
        return self.limit.num_segments < self.num_allowed and not self.limit.has_failed

    def grow(self, num_segments: int) -> None:
        """Allocates segments in the background until there are so many. Not while it is `growing`."""
        self.num_allowed = self.limit.num_segments = num_segments
        for group in self.copies:
            group.memory.arena.grow(num_segments)

    def try_lower(self, num_segments: int) -> None:
        """Frees the segments from `num_segments` on, unless a copy or an allocation in progress uses one."""
        self.limit.num_segments = min(self.limit.num_segments, num_segments)  # ends the allocation
        if not all(group.memory.arena.can_free(num_segments) for group in self.copies):
            return
        for group in (*self.copies, *self.readers):
            if any(flight.segment_id >= num_segments for flight in group.flights):
                return
        for group in self.copies:
            group.memory.free_from(num_segments)
        self.num_allowed = num_segments

    def note_failure(self) -> bool:
        """If a segment could not be allocated, frees what not all page groups have; whether it has."""
        if not self.limit.has_failed or self.growing:
            return False
        num_ready = min(group.memory.arena.num_segments_ready for group in self.copies)
        self.try_lower(num_ready)
        self.limit.has_failed = self.num_allowed > num_ready  # else tried again
        return not self.limit.has_failed


@final
class PoolDivision:
    """The pools of one process. All methods are called by the thread that dispatches the model.

    Args:
      pools: by pool, its segments.
      num_segments: what all may have together.
    """

    def __init__(self, pools: Sequence[HostPool], *, num_segments: int) -> None:
        self._pools = pools
        self._num_segments = num_segments
        self._wanted = HostDivision(division_id=0, segments=tuple([pool.num_allowed for pool in pools]))

    @property
    def division_id(self) -> int:
        """The last division that was begun."""
        return self._wanted.division_id

    @property
    def num_segments(self) -> int:
        """Segments that all pools can have together; less than at first once memory has run out."""
        return self._num_segments

    def add_readers(self, readers: Sequence[PageGroupCopies]) -> None:
        """Notes copies that read the memory of a pool, whose flights have to be waited for."""
        for pool in self._pools:
            pool.readers = [reader for reader in readers if any(reader.memory is own.memory for own in pool.copies)]

    def begin(self, division: HostDivision) -> None:
        """Begins to carry out a division; `advance` continues. An earlier one than the last is ignored."""
        if division.division_id > self._wanted.division_id:
            self._wanted = division

    def advance(self) -> None:
        """Frees and allocates what can be freed and allocated now. Does not wait."""
        wanted = self._wanted.segments
        for pool, num_wanted in zip(self._pools, wanted, strict=True):
            if pool.num_allowed > num_wanted:
                pool.try_lower(num_wanted)
            elif pool.is_cut and not pool.growing:  # by a division that has been taken back
                pool.grow(pool.num_allowed)
            elif pool.note_failure():
                self._num_segments = sum(pool.num_allowed for pool in self._pools)
        room = self._num_segments - sum(pool.num_allowed for pool in self._pools)
        for pool, num_wanted in zip(self._pools, wanted, strict=True):
            if room > 0 and pool.num_allowed < num_wanted and not pool.growing:
                num_more = min(room, num_wanted - pool.num_allowed)
                pool.grow(pool.num_allowed + num_more)
                room -= num_more
