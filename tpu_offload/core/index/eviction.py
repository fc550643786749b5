"""What an eviction policy sees of the resident chunks, and evicts from them.

A chunk that is pinned, protected or not READY is not evicted, nor is one that another resident chunk follows: prefixes
are evicted from their tails, so no slot ever holds a chunk that no lookup can reach.
"""

from collections.abc import Callable, Container, Sequence
from typing import final

from tpu_offload.core.index.changes import ChangeLog
from tpu_offload.core.index.chunk_states import ChunkStates
from tpu_offload.core.index.prefix_tree import MIN_BATCH, NO_CHUNK, STRIDE, PrefixTree
from tpu_offload.core.index.slots import SlotAllocator
from tpu_offload.core.policies import Residents
from tpu_offload.native import Given
from tpu_offload.types import ChunkKey


@final
class Evictor(Residents):
    """The resident chunks for a policy.

    Args:
      tree: the resident chunks.
      states: which of them are pinned or not READY.
      slots: takes the slots of evicted chunks.
      changes: records evictions, if there is one.
      on_evict: called with evicted chunks, their slots, and the resident chunk before them.
    Attributes:
      protected: chunks that are not evicted now, nor those before them.
      withheld: by slot, 1 for a chunk that is neither evicted nor a leaf until its owner sets 0; empty if none ever is.
      asked: by slot, 1 for one of these that would have been a leaf when the policy asked; it is to be told then.
      num_evicted: chunks evicted so far.
    """

    def __init__(
        self,
        tree: PrefixTree,
        states: ChunkStates,
        slots: SlotAllocator,
        *,
        changes: ChangeLog | None,
        on_evict: Callable[[Sequence[ChunkKey], Sequence[int], ChunkKey | None], None],
    ) -> None:
        self._tree = tree
        self._states = states
        self._slots = slots
        self._changes = changes
        self._on_evict = on_evict
        self.withheld, self.asked = bytearray(), bytearray()
        self.protected: Container[ChunkKey] = ()
        self.num_evicted = 0

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._tree.slot_of.parts[key[0]]

    def __len__(self) -> int:
        return len(self._tree)

    def is_leaf(self, key: ChunkKey) -> bool:
        """See the base class."""
        slot = self._tree.slot_of.get(key)
        if slot is None or self._tree.children[slot] != NO_CHUNK:
            return False
        if self.withheld and self.withheld[slot]:
            self.asked[slot] = 1
            return False
        return True

    def evict_tail(
        self, key: ChunkKey, max_chunks: Given[int], *, until: Container[ChunkKey] = (), singly: Given[bool] = False
    ) -> tuple[int, ChunkKey | None]:
        """See the base class."""
        limit = int(max_chunks)
        tree, protected = self._tree, self.protected
        pins, unready = self._states.pins, self._states.unready
        keys, parents, more_children, withheld = tree.keys, tree.parents, tree.more_children, self.withheld
        slot = tree.slot_of.parts[key[0]][key]
        if tree.children[slot] != NO_CHUNK:
            return 0, key
        evicted: list[ChunkKey] = []
        freed: list[int] = []
        stopped_at: ChunkKey | None = key
        try_at = limit if singly else 0  # evicted chunks from which on a batch is tried
        while (num_evicted := len(evicted)) < limit:
            if key in pins or key in protected or slot in unready or (num_evicted and key in until):
                break
            if withheld and withheld[slot]:
                break
            first = slot
            if limit - num_evicted >= MIN_BATCH <= slot and num_evicted >= try_at:
                first = self._first_of_batch(slot, min(STRIDE, limit - num_evicted, slot), until)
                try_at = num_evicted + (slot - first or STRIDE)
            if first == slot:
                evicted.append(key)
                freed.append(slot)
            else:
                evicted += keys[first : slot + 1].tolist()[::-1]
                freed += range(slot, first - 1, -1)
            slot = parents[first]
            if slot < 0:
                stopped_at = None
                break
            stopped_at = key = keys[slot]
            if more_children and slot in more_children:
                break
        if evicted:
            tree.remove_tail(evicted, freed[-1])
            self._slots.free_evicted(freed)
            self.num_evicted += len(evicted)
            self._on_evict(evicted, freed, stopped_at)
            if self._changes is not None:
                self._changes.add(evicted, found=False)
        return len(evicted), stopped_at

    def _first_of_batch(self, slot: int, num_chunks: int, until: Container[ChunkKey]) -> int:
        """The first of `num_chunks` consecutive slots up to `slot`, if all may be evicted at once; else `slot`."""
        tree, states = self._tree, self._states
        first = slot - num_chunks + 1
        if tree.parents[first + 1 : slot + 1] != tree.numbers[first:slot]:
            return slot
        if self.withheld and any(self.withheld[first:slot]):
            return slot
        slots = range(first, slot)  # the last one may be evicted
        if not (states.unready.isdisjoint(slots) and tree.more_children.keys().isdisjoint(slots)):
            return slot
        keys = tree.keys[first:slot].tolist()
        if not states.pins.keys().isdisjoint(keys):
            return slot
        kept = [chunks.__contains__ for chunks in (self.protected, until) if chunks]
        return slot if any(any(map(contains, keys)) for contains in kept) else first
