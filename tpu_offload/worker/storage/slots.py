"""The slots of one pool of host memory, as storage copies them.

A job names a slot by its number only, and the pool knows the rest: where the slot is in each page group, what copies
it, and which records hold its bytes. So chunks, those of windows included, and states take the same way.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, final

import jax
import numpy as np

from tpu_offload.errors import TransferError
from tpu_offload.kernels import SlotCopier
from tpu_offload.piece_keys import PieceKey, part_keys
from tpu_offload.types import ChunkKey
from tpu_offload.values import error_line
from tpu_offload.worker.host_memory import HostMemory

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Payload = list[list[jax.Array]]
"""The bytes of a slot: per page group, what its `SlotCopier` reads and writes."""


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlotPool:
    """The slots of a pool.

    Attributes:
      memories: per page group, the host memory.
      copiers: likewise, what copies its slots; shared by all tiers.
      rank: the data-parallel rank, of whose memory the copiers are.
      first_slot: the number of the slot at the beginning of that memory.
      num_parts: records that hold a state; 0 of chunks, each of which has one record under its own key.
    """

    memories: Sequence[HostMemory]
    copiers: Sequence[SlotCopier]
    rank: int = 0
    first_slot: int = 0
    num_parts: int = 0

    @property
    def slots(self) -> range:
        """The slots whose memory is allocated."""
        num_ready = min(memory.arena.num_chunks_ready for memory in self.memories)
        return range(self.first_slot, self.first_slot + num_ready)

    @property
    def num_records(self) -> int:
        """Records that hold the bytes of a slot."""
        return max(1, self.num_parts)

    @property
    def num_shards(self) -> int:
        """Devices that have a part of a slot, in this process and rank."""
        return self.copiers[0].num_shards

    @property
    def payload_nbytes(self) -> int:
        """Bytes of a slot in this process."""
        return sum(copier.payload_nbytes for copier in self.copiers)

    def record_keys(self, key: ChunkKey) -> Sequence[ChunkKey]:
        """The names of the records that hold the bytes of a slot, in their order; `key` names what is in it."""
        return part_keys(PieceKey(key), self.num_parts) if self.num_parts else (key,)

    # On the thread that dispatches.

    def read(self, slot: int) -> Payload:
        """Dispatches the copies of a slot.

        Raises:
          Exception: the slot is empty, or a program failed.
        """
        payload = []
        for memory, copier in zip(self.memories, self.copiers, strict=True):
            segment_id, place = self._place(slot, memory)
            if memory.lost[self.rank, self._rows(slot, memory)].any():
                raise TransferError(f"slot {slot} was lost, or never written")
            payload.append(copier.read(segment_id, place))
        return payload

    def write(self, slot: int, payload: Payload) -> tuple[list[jax.Array], str]:
        """Dispatches the copies of a payload into a slot, until one fails.

        Returns:
          The tokens of those that were dispatched, for `end_write`; and an error in one line, empty if none failed.
        """
        tokens: list[jax.Array] = []
        for memory, copier, of_group in zip(self.memories, self.copiers, payload, strict=True):
            segment_id, place = self._place(slot, memory)
            try:
                tokens.append(copier.write(segment_id, place, of_group))
            except Exception as e:
                memory.check_segment(segment_id, lost=False)
                return tokens, error_line(e)
            _mark_place(memory, segment_id, place, rank=self.rank)
        return tokens, ""

    def mark_written(self, slot: int, rank: int) -> None:
        """The devices of a rank, all of them on other hosts, are written.

        Every host dispatches the loads of every rank, and refuses those of places that it knows to be empty.

        Raises:
          TransferError: the memory is lost here.
        """
        for memory in self.memories:
            segment_id, place = self._place(slot, memory)
            memory.arena.segment(segment_id)
            _mark_place(memory, segment_id, place, rank=rank)

    def end_write(self, slot: int, tokens: Sequence[jax.Array]) -> str:
        """Checks the ready tokens of `write`; returns an error in one line, empty if all that it dispatched is there.

        Even a slot whose write failed in a later page group has tokens: they tell whether segments are lost.
        """
        error = ""
        for memory, token in zip(self.memories, tokens, strict=False):  # fewer, if the write failed on its way
            segment_id, place = self._place(slot, memory)
            expected = place + memory.blocks_per_chunk
            try:
                end = int(np.asarray(token))
                if end != expected:
                    raise TransferError(f"the device copied up to {end}; expected {expected}")
            except Exception as e:  # a program that fails on the device destroys the donated segment
                memory.check_segment(segment_id, lost=True)
                error = error or error_line(e)
                continue
            if memory.lost[self.rank, self._rows(slot, memory)].any():
                error = error or f"slot {slot} was lost, or its memory was freed, while it was written"
        return error

    def _rows(self, slot: int, memory: HostMemory) -> slice:
        """The rows of a slot in the memory of a page group."""
        first = (slot - self.first_slot) * memory.blocks_per_chunk
        return slice(first, first + memory.blocks_per_chunk)

    def _place(self, slot: int, memory: HostMemory) -> tuple[int, int]:
        """The segment, and the position in it, of the first row of a slot."""
        return divmod((slot - self.first_slot) * memory.blocks_per_chunk, memory.spec.segment_blocks)

    # On any thread.

    def pack(self, payload: Payload, target: Bytes) -> None:
        """Waits for a payload and copies its `payload_nbytes` bytes, one page group after another."""
        start = 0
        for copier, of_group in zip(self.copiers, payload, strict=True):
            copier.pack(of_group, target[start : start + copier.payload_nbytes])
            start += copier.payload_nbytes

    def unpack(self, source: Bytes) -> Payload:
        """Makes a payload from its bytes. `source` must not change while the payload is in use."""
        payload, start = [], 0
        for copier in self.copiers:
            payload.append(copier.unpack(source[start : start + copier.payload_nbytes]))
            start += copier.payload_nbytes
        return payload


def _mark_place(memory: HostMemory, segment_id: int, place: int, *, rank: int) -> None:
    """The slot that begins at this place of a segment is written."""
    memory.mark(segment_id, slice(place, place + memory.blocks_per_chunk), lost=False, ranks=rank)


def pool_of(pools: Sequence[SlotPool], slot: int) -> SlotPool:
    """The pool of a slot, of pools in the order of their slots."""
    return next(pool for pool in reversed(pools) if slot >= pool.first_slot)
