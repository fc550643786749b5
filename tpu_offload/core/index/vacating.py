"""Evicts what is in the last slots of a pool, so that their memory can be given to another pool.

The slots are not handed out any more (`SlotAllocator.shrink`). A chunk is evicted after all chunks that follow it,
wherever these are. What is pinned, held or being written stays until that has ended; calls go on until all is gone.
"""

from collections.abc import Callable
from typing import final

from tpu_offload.core.index.checkpoints import CheckpointTable
from tpu_offload.core.index.chunk_states import ChunkStates
from tpu_offload.core.index.prefix_tree import NO_CHUNK, PrefixTree
from tpu_offload.types import ChunkKey, Pool

_MAX_STEPS = 1024  # chunks that one call looks at; 1 ms


@final
class Vacating:
    """Vacates slots, a few in each call.

    Args:
      tree: the resident chunks.
      states: which of them are pinned or not READY.
      checkpoints: window chunks and states.
      evict: evicts a chunk that no other follows.
    """

    def __init__(
        self,
        tree: PrefixTree,
        states: ChunkStates,
        checkpoints: CheckpointTable,
        *,
        evict: Callable[[ChunkKey], ChunkKey | None],
    ) -> None:
        self._tree = tree
        self._states = states
        self._checkpoints = checkpoints
        self._evict = evict
        self._path: list[ChunkKey] = []  # a chunk in one of the slots, one after it, and so on
        self._num_slots_seen = 0

    def evict_chunks(self, slots: range) -> None:
        """Evicts chunks in these slots, from the last slot on, and around again in later calls."""
        num_left, num_slots_left = _MAX_STEPS, len(slots)
        while num_left and (self._path or num_slots_left):
            num_left -= 1
            if not self._path:
                num_slots_left -= 1
                self._begin_path(slots[-1 - self._num_slots_seen % len(slots)])
                self._num_slots_seen += 1
                continue
            key = self._path[-1]
            slot = self._tree.slot_of.get(key)
            if slot is None:
                self._path.pop()
            elif self._tree.children[slot] != NO_CHUNK:
                self._path.append(self._tree.keys[self._tree.children[slot]])
            elif key in self._states.pins or slot in self._states.unready:
                self._path.clear()  # not now
            else:
                self._evict(key)
                self._path.pop()
        self._checkpoints.evict_from(Pool.CHUNKS, slots)

    def _begin_path(self, slot: int) -> None:
        keys = self._tree.keys
        key = keys[slot] if slot < len(keys) else None
        if key is not None and self._tree.slot_of.get(key) == slot:
            self._path = [key]
