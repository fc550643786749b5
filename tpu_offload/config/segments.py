"""The host tier of a model with states, in segments that can hold chunks or states."""

import dataclasses
from typing import final

_LEAST_SEGMENTS = 16  # a host tier that is too small for so many has smaller segments
_PARTS = 32  # a move takes about this part of the host tier, however many segments there are


@final
@dataclasses.dataclass(frozen=True, slots=True)
class HostSegments:
    """Segments of the host tier. Those of chunks and those of states take about the same memory.

    Attributes:
      num_segments: segments of both kinds together.
      segment_chunks: chunks in one of chunks.
      segment_states: rows in one of states.
      segment_nbytes: bytes of host memory of the larger kind, on each host.
    """

    num_segments: int
    segment_chunks: int
    segment_states: int
    segment_nbytes: int

    @classmethod
    def plan(cls, nbytes: int, *, chunk_nbytes: int, row_nbytes: int, segment_nbytes: int) -> "HostSegments":
        """Divides a host tier of `nbytes` into segments of at most `segment_nbytes`, unless one row or chunk is larger.

        Hosts that run the same programs get equal segments: only settings and layout decide.
        """
        wanted = min(segment_nbytes, nbytes // _LEAST_SEGMENTS)
        larger = max(chunk_nbytes, row_nbytes)
        size = max(1, wanted // larger) * larger
        return cls(nbytes // size, size // chunk_nbytes, size // row_nbytes, size)

    @property
    def max_chunks(self) -> int:
        """Chunks if states have one segment only; 0 if there are fewer than two segments."""
        return max(0, self.num_segments - 1) * self.segment_chunks

    @property
    def max_states(self) -> int:
        """Rows if chunks have one segment only."""
        return max(0, self.num_segments - 1) * self.segment_states

    @property
    def move_unit(self) -> int:
        """Segments that evictions and free memory must amount to before any move."""
        return max(1, self.num_segments // _PARTS)

    def divide(self, num_segments: int, share: float) -> tuple[int, int]:
        """Segments of chunks and of states if states have this share of so many; at least one each, of two or more."""
        states = max(1, min(num_segments - 1, round(num_segments * share)))
        return num_segments - states, states
