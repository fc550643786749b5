"""Resident chunks by key and by slot, and which chunk follows which.

Each chunk takes a few machine words in per-slot columns and an entry in a table that grows in small parts
(see `core.chunk_table`). The garbage collector looks at none of it: each of its passes over a million references would
stop the engine for 100 ms.

The tree says where chunks are, not whether they may be found or evicted. `lookup` and `eviction` read its columns in
their loops; only its own methods change them.
"""

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, final

import numpy as np

from tpu_offload.core.chunk_table import ChunkTable, Entries
from tpu_offload.types import ChunkKey

NO_CHUNK = -1
"""In place of a slot: the chunk begins a prefix, or no chunk follows it."""
NO_PARENT = ChunkKey(b"")
"""In place of the key of a chunk's parent: the chunk begins a prefix."""
NOT_RESIDENT = -2
"""In place of the slot of a chunk's parent: the parent was lost."""
STRIDE = 64
"""Chunks of a prefix that are compared and linked at once, as they mostly lie in consecutive slots."""
MIN_BATCH = 8
"""Fewer chunks are added and evicted one by one."""
_MAX_NEW = 2**16  # slots by which the columns grow at a time


@final
class PrefixTree:
    """Resident chunks. The parent of a chunk is the one before it in its prefix, its children are those after it.

    Attributes:
      slot_of: slots by chunk key.
      keys: object[slots], the chunk in each slot that was ever used. A slot that is free now keeps its last entries.
      parents: the slot of each chunk's parent, `NO_CHUNK` or `NOT_RESIDENT`.
      children: the slot of one child of each chunk, or `NO_CHUNK` for a leaf.
      numbers: its own number for each slot; consecutive slots are found by comparison with these.
      more_children: the other children of each chunk that has several. Nearly every chunk has at most one.
      orphans: slots of chunks whose parent was lost in a failed copy, by the parent's key, until it is resident again.
    """

    def __init__(self) -> None:
        self.slot_of: ChunkTable[int] = ChunkTable()
        # The garbage collector does not look into arrays, of numpy or of the standard library.
        self.keys: np.ndarray[Any, np.dtype[np.object_]] = np.empty(0, object)
        self.parents = array("i")
        self.children = array("i")
        self.numbers = array("i")
        self.more_children: dict[int, set[int]] = {}
        self.orphans: dict[ChunkKey, set[int]] = {}
        self._lost_parents: dict[int, ChunkKey] = {}  # the same by the orphan's slot
        self._num_chunks = 0

    def __len__(self) -> int:
        return self._num_chunks

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self.slot_of.parts[key[0]]

    def has_any(self, keys: Sequence[ChunkKey]) -> bool:
        """Whether any of these chunks is resident."""
        parts = self.slot_of.parts
        for key in keys:  # noqa: SIM110 - for each chunk that is saved, and a generator takes three times as long
            if key in parts[key[0]]:
                return True
        return False

    def reserve(self, num_slots: int, *, max_slots: int) -> None:
        """Makes the columns, which are too short, longer than `num_slots` slots, up to `max_slots`: so this is rare."""
        num_before = len(self.keys)
        num_slots = min(max(num_slots, num_before + min(num_before, _MAX_NEW) + 64), max_slots)
        self.keys.resize(num_slots, refcheck=False)  # moves pointers, or whole pages of them, and counts no references
        self.keys[num_before:] = None
        numbers = np.arange(num_before, num_slots, dtype=np.int32)
        self.numbers.frombytes(numbers.tobytes())
        numbers.fill(NO_CHUNK)
        self.parents.frombytes(numbers.tobytes())
        self.children.frombytes(numbers.tobytes())

    def insert(self, parent: ChunkKey | None, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
        """Adds consecutive chunks of one prefix, head first, in slots that are reserved.

        Args:
          parent: the resident chunk before them; None when they begin a prefix.
          keys: at least one; none is resident.
          slots: the slot of each.
        """
        column, parts, parents, children, before = self.keys, self.slot_of.parts, self.parents, self.children, NO_CHUNK
        if parent is not None:
            assert parent in self, "a chunk is saved that no lookup can reach"
            before = self.slot_of[parent]
            if children[before] != NO_CHUNK:
                self.more_children.setdefault(before, set()).add(children[before])
        few = len(slots) < MIN_BATCH
        assert len(keys) == len(slots), "each chunk has a slot"
        for i, key in enumerate(keys):
            slot = slots[i]
            part = parts[key[0]]
            assert key not in part, "a resident chunk is not saved again"
            part[key] = slot
            if few:
                column[slot], parents[slot], children[slot] = key, before, NO_CHUNK
                if before != NO_CHUNK:
                    children[before] = slot
                before = slot
        if not few:
            for first in range(0, len(slots), STRIDE):
                before = self._link(keys[first : first + STRIDE], slots[first : first + STRIDE], before)
        self._num_chunks += len(keys)
        if self.orphans:
            for key, slot in zip(keys, slots, strict=True):
                self._adopt_orphans(key, slot)

    def insert_orphans(self, parent: ChunkKey, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
        """As `insert`, after a chunk that is not resident: the first of them is its child once it is."""
        self.insert(None, keys, slots)
        self.parents[slots[0]] = NOT_RESIDENT
        self._lost_parents[slots[0]] = parent
        self.orphans.setdefault(parent, set()).add(slots[0])

    def parent_in(self, slot: int) -> ChunkKey | None:
        """The chunk before the one in this slot, or that was in it last; `NO_PARENT` if it begins a prefix.

        None if it is not known: the chunk is an orphan.
        """
        parent = self.parents[slot]
        if parent == NO_CHUNK:
            return NO_PARENT
        return self.keys[parent] if parent >= 0 else None

    def remove(self, key: ChunkKey) -> tuple[int, ChunkKey | None]:
        """Removes a chunk, wherever it is in its prefix. Its children become orphans.

        Returns:
          Its slot, and its parent if that is resident.
        """
        slot = self.slot_of.parts[key[0]].pop(key)
        self._num_chunks -= 1
        if self.children[slot] != NO_CHUNK:
            orphans = self.more_children.pop(slot, set()) | {self.children[slot]}
            self.orphans[key] = orphans
            for child in orphans:
                self.parents[child] = NOT_RESIDENT
                self._lost_parents[child] = key
        parent = self.parents[slot]
        if parent != NO_CHUNK:
            self._detach(slot)
        return slot, self.keys[parent] if parent >= 0 else None

    def remove_tail(self, keys: Sequence[ChunkKey], head: int) -> None:
        """Removes consecutive chunks of one prefix, tail first.

        Args:
          keys: a leaf, its parent and so on; no chunk but these follows any of them.
          head: the slot of the last of these.
        """
        parts = self.slot_of.parts
        for key in keys:
            del parts[key[0]][key]
        self._num_chunks -= len(keys)
        if self.parents[head] != NO_CHUNK:
            self._detach(head)

    def clear(self, kept: set[int]) -> list[Entries]:
        """Removes all chunks but those in the slots `kept`, of any prefixes. O(kept).

        Returns:
          What held the others, for the caller to free incrementally.
        """
        discarded: list[Entries] = [*self.slot_of.parts, self.more_children, self.orphans]
        column, parents, lost_parents = self.keys, self.parents, self._lost_parents
        self.slot_of, self.more_children, self.orphans, self._lost_parents = ChunkTable(), {}, {}, {}
        self._num_chunks = len(kept)
        for slot in kept:
            self.slot_of[column[slot]] = slot
            self.children[slot] = NO_CHUNK
        for slot in sorted(kept):
            parent = parents[slot]
            if parent in kept:
                self._add_child(parent, slot)
            elif parent != NO_CHUNK:
                key = lost_parents[slot] if parent == NOT_RESIDENT else column[parent]
                parents[slot] = NOT_RESIDENT
                self._lost_parents[slot] = key
                self.orphans.setdefault(key, set()).add(slot)
        return discarded

    def paths(self) -> Iterator[tuple[list[ChunkKey], ChunkKey | None, int]]:
        """All chunks, each once, as consecutive chunks of a prefix, head first, the parent of the first, and its depth.

        The depth is how many chunks come before it, or before an orphan as if it began its prompt.
        """
        known: dict[int, int] = {}  # slots, with the depths of their chunks
        for leaf in sorted(self.slot_of[key] for key in self.leaves()):
            slots, slot = [], leaf
            while slot >= 0 and slot not in known:
                slots.append(slot)
                slot = self.parents[slot]
            slots.reverse()
            depth = known[slot] + 1 if slot >= 0 else 0
            known.update(zip(slots, range(depth, depth + len(slots)), strict=True))
            yield [self.keys[s] for s in slots], self.keys[slot] if slot >= 0 else None, depth

    def check_invariants(self) -> None:
        """Raises AssertionError unless table, columns and orphans agree. O(chunks)."""
        resident = set(self.slot_of.values())
        assert len(resident) == self._num_chunks
        assert all(self.keys[slot] == key for key, slot in self.slot_of.items())
        children: dict[int, set[int]] = {slot: set() for slot in resident}
        orphans: dict[ChunkKey, set[int]] = {}
        for slot in resident:
            parent = self.parents[slot]
            if parent == NOT_RESIDENT:
                orphans.setdefault(self._lost_parents[slot], set()).add(slot)
            elif parent != NO_CHUNK:
                children[parent].add(slot)
        assert orphans == self.orphans
        assert not any(key in self for key in orphans), "a resident chunk has not adopted its orphans"
        assert set(self._lost_parents) == {slot for slots in orphans.values() for slot in slots}
        for slot, found in children.items():
            known = {self.children[slot]} - {NO_CHUNK} | self.more_children.get(slot, set())
            assert found == known, "a chunk has wrong children"
        assert all(self.more_children.values())
        assert self.more_children.keys() <= children.keys()

    def leaves(self) -> set[ChunkKey]:
        """The chunks that no resident chunk follows. O(chunks)."""
        return {key for key in self.slot_of if self.children[self.slot_of[key]] == NO_CHUNK}

    def _link(self, keys: Sequence[ChunkKey], slots: Sequence[int], before: int) -> int:
        """Writes the columns of a few consecutive chunks after the one in slot `before`; returns the last slot."""
        parents, children = self.parents, self.children
        first, last = slots[0], slots[-1]
        if before != NO_CHUNK:
            children[before] = first
        if last - first == len(slots) - 1 and self.numbers[first : last + 1].tolist() == slots:
            self.keys[first : last + 1] = keys
            parents[first + 1 : last + 1] = self.numbers[first:last]
            children[first:last] = self.numbers[first + 1 : last + 1]
            parents[first] = before
        else:
            column = self.keys
            for key, slot in zip(keys, slots, strict=True):
                column[slot] = key
                parents[slot] = before
                if before != NO_CHUNK:
                    children[before] = slot
                before = slot
        children[last] = NO_CHUNK
        return last

    def _add_child(self, parent: int, slot: int) -> None:
        other = self.children[parent]
        if other != NO_CHUNK:
            self.more_children.setdefault(parent, set()).add(other)
        self.children[parent] = slot

    def _detach(self, slot: int) -> None:
        """Takes a removed chunk that does not begin a prefix from its parent's children, or from the orphans."""
        parent = self.parents[slot]
        if parent == NOT_RESIDENT:
            key = self._lost_parents.pop(slot)
            siblings = self.orphans[key]
            siblings.remove(slot)
            if not siblings:
                del self.orphans[key]
            return
        more = self.more_children.get(parent)
        if more is None:
            self.children[parent] = NO_CHUNK
            return
        if self.children[parent] == slot:
            self.children[parent] = more.pop()
        else:
            more.remove(slot)
        if not more:
            del self.more_children[parent]

    def _adopt_orphans(self, key: ChunkKey, slot: int) -> None:
        for child in sorted(self.orphans.pop(key, ())):
            del self._lost_parents[child]
            if self._comes_before(child, slot):  # only if hashes are not chained: neither could ever be evicted
                self.parents[child] = NO_CHUNK
            else:
                self.parents[child] = slot
                self._add_child(slot, child)

    def _comes_before(self, slot: int, later: int) -> bool:
        """Whether the chunk in a slot is in the prefix of another. O(length of the prefix)."""
        while later >= 0 and later != slot:
            later = self.parents[later]
        return later == slot
