"""The chunk index: which chunks the host tier holds, in which slots, and which of them may go.

Three rules live here. A chunk can be looked up only once its save is complete (READY). A pinned chunk
stays. And a chunk on which another resident chunk hangs stays too: evicting a prefix from its tail
keeps every resident prefix whole, so no slot ever holds a chunk that no lookup can reach. The one
exception is a failed copy, whose chunk is lost at once and can leave later chunks of its prefix behind;
they become reachable again when a request saves the missing chunk, or grow old and go.
"""

import dataclasses
import enum
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tpu_offload.core.policies import EvictionPolicy
from tpu_offload.types import ChunkKey


class ChunkState(enum.Enum):
    """What the index knows about a chunk; a chunk it does not know has no state."""

    PENDING = "pending"  # it has a slot and its bytes are on the way
    READY = "ready"  # every worker has its bytes in place
    CONDEMNED = "condemned"  # its bytes are not to be trusted; it goes with its last pin


@dataclasses.dataclass(slots=True)
class _Chunk:
    slot: int
    parent: ChunkKey | None
    state: ChunkState
    num_pins: int = 0


class NewChunk(NamedTuple):
    """A chunk that wants a slot, and the chunk right before it in its prefix (None for the first)."""

    key: ChunkKey
    parent: ChunkKey | None


class ChunkIndex:
    """Chunk keys to slots. Starts without slots; `grow` adds them as the host pool is allocated.

    Args:
      policy: decides which chunk goes. The index owns it from here on.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._chunks: dict[ChunkKey, _Chunk] = {}
        # Resident chunks that hang on a key. Kept apart from the chunks: a child can outlive its parent
        # (after a failed save), and finds it again when the parent returns.
        self._num_children: dict[ChunkKey, int] = {}
        # Taken from the right. What a failed copy gives back goes to the left, to be tried last.
        self._free_slots: deque[int] = deque()
        self._num_slots = 0
        self._num_evicted = 0

    @property
    def num_slots(self) -> int:
        """Slots that exist, used or free."""
        return self._num_slots

    @property
    def num_evicted(self) -> int:
        """Chunks evicted so far."""
        return self._num_evicted

    def __len__(self) -> int:
        return len(self._chunks)

    def grow(self, num_slots: int) -> None:
        """Raises the number of slots to `num_slots`; a smaller number changes nothing."""
        if num_slots > self._num_slots:
            # Low slots are handed out first, so that a pool that is never full touches little memory.
            self._free_slots.extendleft(range(self._num_slots, num_slots))
            self._num_slots = num_slots

    def state(self, key: ChunkKey) -> ChunkState | None:
        """The chunk's state, None when it is not here."""
        chunk = self._chunks.get(key)
        return None if chunk is None else chunk.state

    def slot(self, key: ChunkKey) -> int:
        """The slot of a chunk that is here."""
        return self._chunks[key].slot

    def num_ready(self, keys: Iterable[ChunkKey]) -> int:
        """How many chunks from the first on are READY, up to the first that is not."""
        chunks, count = self._chunks, 0
        for key in keys:
            chunk = chunks.get(key)
            if chunk is None or chunk.state is not ChunkState.READY:
                break
            count += 1
        return count

    def pin(self, keys: Iterable[ChunkKey]) -> None:
        """Keeps READY chunks from eviction until they are unpinned as often as they were pinned."""
        for key in keys:
            chunk = self._chunks[key]
            assert chunk.state is ChunkState.READY, "only a complete chunk can be pinned"
            chunk.num_pins += 1

    def unpin(self, keys: Iterable[ChunkKey]) -> None:
        """Takes one pin back from each chunk; a condemned one goes with its last."""
        for key in keys:
            chunk = self._chunks[key]
            assert chunk.num_pins > 0, "unpinned more often than pinned"
            chunk.num_pins -= 1
            if chunk.num_pins == 0 and chunk.state is ChunkState.CONDEMNED:
                self._remove(key, suspect=True)

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        """A request used this prefix, head first; chunks that are not here are passed over."""
        self._policy.touch(keys)

    def allocate(self, new_chunks: Sequence[NewChunk], *, protected: Sequence[ChunkKey] = ()) -> list[int]:
        """Gives slots to chunks that are about to be saved, evicting others where it must.

        Args:
          new_chunks: chunks of one prefix that are not here, head first.
          protected: chunks that may not go for this, besides the pinned ones: the caller's own prefix.
        Returns:
          Slots for the first of `new_chunks`, as many as could be found; those chunks are PENDING now.
          Evicts exactly as many as these slots need, and nothing when there are none.
        """
        num_victims = len(new_chunks) - len(self._free_slots)
        if num_victims > 0:
            for key in self._victims(num_victims, {*protected, *(c.parent for c in new_chunks if c.parent)}):
                self._remove(key)
                self._num_evicted += 1
        granted = new_chunks[: len(self._free_slots)]
        slots = []
        for new in granted:
            assert new.key not in self._chunks, "a resident chunk is not saved again"
            slot = self._free_slots.pop()
            self._chunks[new.key] = _Chunk(slot, new.parent, ChunkState.PENDING)
            if new.parent is not None:
                self._num_children[new.parent] = self._num_children.get(new.parent, 0) + 1
            slots.append(slot)
        self._policy.insert([new.key for new in granted])
        return slots

    def complete(self, keys: Iterable[ChunkKey], *, success: bool) -> None:
        """Ends the save of PENDING chunks: they become READY, or go and leave their slots."""
        for key in keys:
            chunk = self._chunks[key]
            assert chunk.state is ChunkState.PENDING, "only a pending chunk completes"
            if success:
                chunk.state = ChunkState.READY
            else:
                self._remove(key, suspect=True)

    def lose_slots(self, first: int, end: int) -> list[ChunkKey]:
        """The bytes in slots `first` to `end - 1` are gone: drops their chunks.

        Returns:
          The chunks that no lookup finds any more. The caller sees to those that are PENDING.
        """
        return self.drop([key for key, chunk in self._chunks.items() if first <= chunk.slot < end])

    def in_slots(self, keys: Iterable[ChunkKey], first: int, end: int) -> bool:
        """Whether any of these resident chunks is in slots `first` to `end - 1`."""
        return any(first <= self._chunks[key].slot < end for key in keys)

    def drop(self, keys: Iterable[ChunkKey]) -> list[ChunkKey]:
        """Takes READY chunks from the lookups for good. Those that are pinned keep their slots until unpinned.

        Returns:
          The chunks that were dropped; the others were unknown, PENDING or dropped before.
        """
        dropped = []
        for key in keys:
            chunk = self._chunks.get(key)
            if chunk is None or chunk.state is not ChunkState.READY:
                continue
            dropped.append(key)
            if chunk.num_pins:
                chunk.state = ChunkState.CONDEMNED
            else:
                self._remove(key, suspect=True)
        return dropped

    def clear(self) -> None:
        """Drops every READY chunk."""
        self.drop(list(self._chunks))

    def _victims(self, num_chunks: int, protected: set[ChunkKey]) -> list[ChunkKey]:
        num_chosen_children: dict[ChunkKey, int] = {}

        def choose(key: ChunkKey) -> bool:
            chunk = self._chunks[key]
            if chunk.state is not ChunkState.READY or chunk.num_pins or key in protected:
                return False
            if self._num_children.get(key, 0) > num_chosen_children.get(key, 0):
                return False
            if chunk.parent is not None:
                num_chosen_children[chunk.parent] = num_chosen_children.get(chunk.parent, 0) + 1
            return True

        return self._policy.victims(num_chunks, choose)

    def _remove(self, key: ChunkKey, *, suspect: bool = False) -> None:
        chunk = self._chunks.pop(key)
        self._policy.remove(key)
        if suspect:
            self._free_slots.appendleft(chunk.slot)
        else:
            self._free_slots.append(chunk.slot)
        if chunk.parent is not None:
            self._num_children[chunk.parent] -= 1
            if not self._num_children[chunk.parent]:
                del self._num_children[chunk.parent]

    def check_invariants(self) -> None:
        """Raises AssertionError unless slots, pins, children and policy agree. O(chunks + slots)."""
        used = [chunk.slot for chunk in self._chunks.values()]
        assert sorted([*used, *self._free_slots]) == list(range(self._num_slots)), "a slot has no owner or two"
        assert len(self._policy) == len(self._chunks)
        assert all(key in self._policy for key in self._chunks)
        num_children: dict[ChunkKey, int] = {}
        for chunk in self._chunks.values():
            assert chunk.num_pins >= 0
            assert chunk.state is not ChunkState.PENDING or chunk.num_pins == 0, "an unfinished chunk is pinned"
            assert chunk.state is not ChunkState.CONDEMNED or chunk.num_pins, "a condemned chunk outlived its pins"
            if chunk.parent is not None:
                num_children[chunk.parent] = num_children.get(chunk.parent, 0) + 1
        assert num_children == self._num_children

    def check_holds(self, *, pins: dict[ChunkKey, int], pending: set[ChunkKey]) -> None:
        """Raises AssertionError unless exactly these chunks are pinned, this often, and these are PENDING."""
        assert {key: chunk.num_pins for key, chunk in self._chunks.items() if chunk.num_pins} == pins
        assert {key for key, chunk in self._chunks.items() if chunk.state is ChunkState.PENDING} == pending
