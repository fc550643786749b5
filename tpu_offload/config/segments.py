"""The host tier of a model with states, in segments that can hold slots of any pool."""

import dataclasses
from collections.abc import Sequence
from typing import final

_LEAST_SEGMENTS = 16  # a host tier that is too small for so many has smaller segments
_PARTS = 32  # a move takes about this part of the host tier, however many segments there are


@final
@dataclasses.dataclass(frozen=True, slots=True)
class HostSegments:
    """Segments of the host tier. Those of each pool take about the same memory.

    Attributes:
      num_segments: segments of all pools together.
      segment_slots: by pool, slots in a segment.
      segment_nbytes: bytes of host memory of the largest one, on each host.
    """

    num_segments: int
    segment_slots: tuple[int, ...]
    segment_nbytes: int

    @classmethod
    def plan(cls, nbytes: int, *, slot_nbytes: Sequence[int], segment_nbytes: int) -> "HostSegments":
        """Divides a host tier into segments. Hosts that run the same programs get equal ones.

        Args:
          nbytes: the size of the host tier.
          slot_nbytes: by pool, the size of a slot.
          segment_nbytes: segments are smaller, unless one slot is larger.
        """
        wanted = min(segment_nbytes, nbytes // _LEAST_SEGMENTS)
        largest = max(slot_nbytes)
        size = max(1, wanted // largest) * largest
        return cls(nbytes // size, tuple([size // slot for slot in slot_nbytes]), size)

    @property
    def max_segments(self) -> int:
        """The most that one pool can have: then each other one has a single segment. 0 if there are too few."""
        return max(0, self.num_segments - len(self.segment_slots) + 1)

    @property
    def max_slots(self) -> tuple[int, ...]:
        """By pool, its slots if it has the most segments."""
        return tuple([self.max_segments * num_slots for num_slots in self.segment_slots])

    @property
    def move_unit(self) -> int:
        """Segments that evictions and free memory must amount to before any move."""
        return max(1, self.num_segments // _PARTS)

    def divide(self, num_segments: int, shares: Sequence[float]) -> tuple[int, ...]:
        """By pool, its segments of so many: at least one, if there are enough.

        Args:
          num_segments: segments to divide.
          shares: of all pools but the first, which gets the rest.
        """
        sizes: list[int] = []
        for i, share in enumerate(shares):
            most = num_segments - sum(sizes) - (len(shares) - i)  # leaves one to each that follows, and to the first
            sizes.append(max(1, min(most, round(num_segments * share))))
        return num_segments - sum(sizes), *sizes
