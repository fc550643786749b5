"""Pinned host memory of one process beside what is known of it: whether a place holds anything that may be read."""

import dataclasses
from typing import Any, Self, final

import numpy as np

from tpu_offload.errors import TransferError
from tpu_offload.kernels import Flight, TransferSpec
from tpu_offload.memory import HostArena


@final
@dataclasses.dataclass(frozen=True, slots=True)
class HostMemory:
    """Segments that blocks of one kind are copied to and from.

    Attributes:
      spec: what is copied.
      pool: the segments.
      num_segments: how many there are.
      blocks_per_chunk: places that are allocated together.
      lost: bool[places]; whether nothing was written there, or what was is lost. A plan that was made before the loss
        was known, or for an earlier life of this worker, asks for it, and would be given zeros.
    """

    spec: TransferSpec
    pool: HostArena
    num_segments: int
    blocks_per_chunk: int
    lost: np.ndarray[Any, np.dtype[np.bool_]]

    @classmethod
    def allocate(cls, spec: TransferSpec, *, num_segments: int, chunks_per_segment: int, num_chunks: int) -> Self:
        """Has it allocated in the background; see `HostArena`."""
        pool = HostArena(
            spec.segment_structs(),
            num_segments=num_segments,
            chunks_per_segment=chunks_per_segment,
            num_chunks=num_chunks,
        )
        return cls(
            spec,
            pool,
            num_segments,
            spec.segment_blocks // chunks_per_segment,
            np.ones(num_segments * spec.segment_blocks, np.bool_),
        )

    @property
    def num_blocks_ready(self) -> int:
        """Places whose memory is there; grows."""
        return self.pool.num_chunks_ready * self.blocks_per_chunk

    def mark(self, segment_id: int, places: Any, *, lost: bool) -> None:
        """Says of places of a segment whether what is there is lost."""
        first = segment_id * self.spec.segment_blocks
        self.lost[first : first + self.spec.segment_blocks][places] = lost

    def give_up(self, segment_id: int, *, lost: bool) -> None:
        """A copy has failed: gives the segment up if it is `lost`, or if the program has taken it along."""
        try:
            lost = lost or any(stripe.is_deleted() for stripe in self.pool.segment(segment_id))
        except TransferError:  # lost before
            return
        if lost:
            self.pool.mark_lost(segment_id)
            self.mark(segment_id, slice(None), lost=True)


def check_copied(flight: Flight) -> None:
    """Raises what went wrong with a flight whose token is ready."""
    num_copied = int(np.asarray(flight.waiting_on))
    if num_copied != len(flight.moves):
        raise TransferError(f"the device copied {num_copied} of {len(flight.moves)} blocks")


def error_line(error: Exception) -> str:
    """What a report says of an error."""
    return f"{type(error).__name__}: {error}".splitlines()[0]
