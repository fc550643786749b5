"""The chunk index: which chunks the host tier holds, in which slots, and which of them may go.

Three rules live here. A chunk can be looked up only once its save is complete (READY). A pinned chunk
stays. And a chunk on which another resident chunk hangs stays too: evicting a prefix from its tail
keeps every resident prefix whole, so no slot ever holds a chunk that no lookup can reach. The one
exception is a failed copy, whose chunk is lost at once and can leave later chunks of its prefix behind;
they become reachable again when a request saves the missing chunk, or grow old and go.

The third rule makes pins cheap: a pin on the last chunk of a prefix keeps all of it, so pinning ten
thousand chunks is one count. Only where chunks are lost under a pin, which is rare, does it have to be
found out which those are (`_covered`).

Calls that take a prefix cost what a dictionary operation or two cost for each chunk, in loops that run
inside the interpreter where that is possible. What is known of a chunk is a few machine words, none of
them seen by the garbage collector: with a million objects, each of its passes would stop the engine.
"""

import contextlib
import enum
import itertools
from collections import deque
from collections.abc import Container, Iterable, Sequence
from typing import final

from tpu_offload.core.policies import EvictionPolicy, Residents
from tpu_offload.types import ChunkKey


class ChunkState(enum.Enum):
    """What the index knows about a chunk; a chunk it does not know has no state."""

    PENDING = "pending"  # it has a slot and its bytes are on the way
    READY = "ready"  # every worker has its bytes in place
    CONDEMNED = "condemned"  # its bytes are not to be trusted; it goes with the last pin that covers it


@final
class ChunkIndex(Residents):
    """Chunk keys to slots. Starts without slots; `grow` adds them as the host pool is allocated.

    Args:
      policy: decides which chunk goes. The index owns it from here on.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        # The slot of each resident chunk, by state; a key is in one of the three.
        self._ready: dict[ChunkKey, int] = {}
        self._pending: dict[ChunkKey, int] = {}
        self._condemned: dict[ChunkKey, int] = {}
        # By slot, of the chunk in it: the key before it in its prefix, and the resident chunks that hang on it.
        self._parents: list[ChunkKey | None] = []
        self._num_children: list[int] = []
        # Resident chunks that hang on a key that is not resident (after a failed copy). They find it again
        # when it returns.
        self._num_orphans: dict[ChunkKey, int] = {}
        # How many pins end at a chunk. Each covers the chunk and all before it.
        self._pins: dict[ChunkKey, int] = {}
        # Taken from the right. What a failed copy gives back goes to the left, to be tried last.
        self._free_slots: deque[int] = deque()
        self._protected: Container[ChunkKey] = ()
        self._num_evicted = 0

    @property
    def num_slots(self) -> int:
        """Slots that exist, used or free."""
        return len(self._parents)

    @property
    def num_evicted(self) -> int:
        """Chunks evicted so far."""
        return self._num_evicted

    def __len__(self) -> int:
        return len(self._ready) + len(self._pending) + len(self._condemned)

    def __contains__(self, key: object) -> bool:
        return key in self._ready or key in self._pending or key in self._condemned

    def grow(self, num_slots: int) -> None:
        """Raises the number of slots to `num_slots`; a smaller number changes nothing."""
        num_new = num_slots - self.num_slots
        if num_new > 0:
            # Low slots are handed out first, so that a pool that is never full touches little memory.
            self._free_slots.extendleft(range(self.num_slots, num_slots))
            self._parents += [None] * num_new
            self._num_children += [0] * num_new

    def state(self, key: ChunkKey) -> ChunkState | None:
        """The chunk's state, None when it is not here."""
        if key in self._ready:
            return ChunkState.READY
        if key in self._pending:
            return ChunkState.PENDING
        return ChunkState.CONDEMNED if key in self._condemned else None

    def find(self, keys: Sequence[ChunkKey], first: int = 0) -> list[int]:
        """Slots of the READY chunks of a prefix from chunk `first` on, up to the first that is not READY."""
        slots: list[int] = []
        with contextlib.suppress(KeyError):  # a list keeps what an iterator gave it before that raised
            slots.extend(map(self._ready.__getitem__, itertools.islice(keys, first, None)))
        return slots

    def missing(self, keys: Sequence[ChunkKey], first: int, end: int) -> tuple[list[int], int]:
        """Which of the chunks `first` to `end - 1` of a prefix want saving: those that are not here.

        Returns:
          Their numbers in order, and how far it looked: `end`, or the first chunk that is CONDEMNED. The key of
          that one is taken until its last pin is gone; what follows waits, or hangs on nothing.
        """
        if self._condemned:
            end = next((i for i in range(first, end) if keys[i] in self._condemned), end)
        ready, pending, part = self._ready, self._pending, itertools.islice(keys, first, end)
        return [i for i, key in enumerate(part, first) if key not in ready and key not in pending], end

    def pin(self, keys: Sequence[ChunkKey]) -> None:
        """Keeps chunks that follow each other in one prefix, and all before them, until unpinned. O(1).

        They are READY, or pinned by the caller already: a pin may be made shorter under condemned chunks.
        """
        tail = keys[-1]
        assert tail in self._ready or tail in self._condemned, "only a complete chunk can be pinned"
        self._pins[tail] = self._pins.get(tail, 0) + 1

    def unpin(self, keys: Sequence[ChunkKey]) -> None:
        """Takes back the pin that these keys, or others with the same last one, were given. O(1).

        Condemned chunks go with the last pin that covers them.
        """
        tail = keys[-1]
        assert tail in self._pins, "unpinned more often than pinned"
        self._pins[tail] -= 1
        if not self._pins[tail]:
            del self._pins[tail]
        if self._condemned:
            covered = self._covered()
            for key in [key for key in self._condemned if key not in covered]:
                self._remove(key)

    def touch(self, keys: Sequence[ChunkKey], num_chunks: int) -> None:
        """A request used the first `num_chunks` of `keys`, head first; chunks that are not here are passed over."""
        self._policy.touch(keys, num_chunks, self)

    def allocate(
        self, keys: Sequence[ChunkKey], parents: Sequence[ChunkKey | None], *, protected: Container[ChunkKey] = ()
    ) -> list[int]:
        """Gives slots to chunks that are about to be saved, evicting others where it must.

        Args:
          keys: chunks of one prefix that are not here, head first, with only resident ones between.
          parents: the chunk right before each in the prefix; None for the prefix's first.
          protected: chunks that may not go for this, and so none before them in their prefixes: the last ones
            of the caller's own. Whatever the first of `keys` hangs on has to be covered by one of them.
        Returns:
          Slots for the first of `keys`, as many as could be found; those chunks are PENDING now.
          Evicts exactly as many as these slots need, and nothing when there are none.
        """
        free = self._free_slots
        num_short = len(keys) - len(free)
        if num_short > 0:
            self._protected = protected
            self._policy.evict(num_short, self)
            self._protected = ()
        num_granted = min(len(keys), len(free))
        if not num_granted:
            return []
        slots = [free.pop() for _ in range(num_granted)]
        granted = keys[:num_granted]
        assert self._ready.keys().isdisjoint(granted), "a resident chunk is not saved again"
        self._pending.update(zip(granted, slots, strict=True))
        num_children = self._num_children
        before, slot_before = None, 0
        for key, parent, slot in zip(granted, parents, slots, strict=False):
            self._parents[slot] = parent
            num_children[slot] = self._num_orphans.pop(key, 0) if self._num_orphans else 0
            if parent is None:
                pass
            elif parent is before:
                num_children[slot_before] += 1
            else:
                self._add_child(parent, 1)
            before, slot_before = key, slot
        self._policy.insert(granted)
        return slots

    def complete(self, keys: Sequence[ChunkKey], *, success: bool) -> None:
        """Ends the save of PENDING chunks of one prefix, head first: they become READY, or go and leave their slots."""
        if success:
            self._ready.update(zip(keys, map(self._pending.pop, keys), strict=True))
            return
        for key in reversed(keys):  # so that few of them lose what they hang on first
            assert key in self._pending, "only a pending chunk completes"
            self._remove(key)

    def evict(self, key: ChunkKey, num_chunks: int, *, stop: Container[ChunkKey] = ()) -> tuple[int, ChunkKey | None]:
        """For the policy, from inside `allocate`; see the base class."""
        ready, num_children, pins, protected = self._ready, self._num_children, self._pins, self._protected
        num_evicted = 0
        slot = ready.get(key)
        while slot is not None and not num_children[slot] and key not in pins and key not in protected:
            del ready[key]
            self._free_slots.append(slot)
            num_evicted += 1
            parent = self._parents[slot]
            if parent is None:
                self._num_evicted += num_evicted
                return num_evicted, None
            slot = ready.get(parent)
            if slot is None:
                self._add_child(parent, -1)
                key = parent
                break
            num_children[slot] -= 1
            key = parent
            if num_evicted == num_chunks or key in stop:
                break
        self._num_evicted += num_evicted
        return num_evicted, key if key in self else None

    def is_leaf(self, key: ChunkKey) -> bool:
        """See the base class."""
        return not self._num_children[self._slot(key)]

    def lose_slots(self, first: int, end: int) -> list[ChunkKey]:
        """The bytes in slots `first` to `end - 1` are gone: drops their chunks. O(chunks).

        Returns:
          The chunks that no lookup finds any more. The caller sees to those that are PENDING.
        """
        return self.drop([key for key, slot in self._ready.items() if first <= slot < end])

    def drop(self, keys: Iterable[ChunkKey]) -> list[ChunkKey]:
        """Takes READY chunks from the lookups for good. Those that a pin covers keep their slots until unpinned.

        Returns:
          The chunks that were dropped; the others were unknown, PENDING or dropped before.
        """
        dropped = [key for key in keys if key in self._ready]
        covered = self._covered() if dropped else ()
        for key in dropped:
            if key in covered:
                self._condemned[key] = self._ready.pop(key)
            else:
                self._remove(key)
        return dropped

    def clear(self) -> None:
        """Drops every READY chunk."""
        self.drop(list(self._ready))

    def _covered(self) -> set[ChunkKey]:
        """The chunks that may not lose their slots because of pins. O(chunks that pins cover)."""
        covered: set[ChunkKey] = set()
        for tail in self._pins:
            key: ChunkKey | None = tail
            while key is not None and key in self and key not in covered:
                covered.add(key)
                key = self._parents[self._slot(key)]
        return covered

    def _slot(self, key: ChunkKey) -> int:
        for slots in (self._ready, self._pending, self._condemned):
            slot = slots.get(key)
            if slot is not None:
                return slot
        raise KeyError(key)

    def _add_child(self, parent: ChunkKey, num: int) -> None:
        """Counts a chunk that hangs on `parent`, wherever that is; `num` is 1 or -1."""
        if parent in self:
            self._num_children[self._slot(parent)] += num
            return
        self._num_orphans[parent] = self._num_orphans.get(parent, 0) + num
        if not self._num_orphans[parent]:
            del self._num_orphans[parent]

    def _remove(self, key: ChunkKey) -> None:
        """Takes out a chunk whose bytes are lost or never came."""
        slots = next(slots for slots in (self._ready, self._pending, self._condemned) if key in slots)
        slot = slots.pop(key)
        self._free_slots.appendleft(slot)
        if self._num_children[slot]:
            self._num_orphans[key] = self._num_children[slot]
        parent = self._parents[slot]
        if parent is not None:
            self._add_child(parent, -1)
        self._policy.remove(key, parent if parent in self else None)

    def check_invariants(self) -> None:
        """Raises AssertionError unless slots, pins, children and policy agree. O(chunks + slots)."""
        resident = {**self._ready, **self._pending, **self._condemned}
        assert len(resident) == len(self), "a chunk is in two states"
        assert sorted([*resident.values(), *self._free_slots]) == list(range(self.num_slots)), (
            "a slot has no owner or two"
        )
        num_children = dict.fromkeys(resident, 0)
        num_orphans: dict[ChunkKey, int] = {}
        for slot in resident.values():
            parent = self._parents[slot]
            if parent is not None:
                counts = num_children if parent in resident else num_orphans
                counts[parent] = counts.get(parent, 0) + 1
        assert num_orphans == self._num_orphans
        assert all(num == self._num_children[resident[key]] for key, num in num_children.items())
        assert all(num > 0 for num in self._pins.values())
        covered = self._covered()
        assert not covered & self._pending.keys(), "an unfinished chunk is pinned"
        assert self._condemned.keys() <= covered, "a condemned chunk outlived its pins"
        self._policy.check_invariants([key for key, num in num_children.items() if not num], self)

    def check_holds(self, *, pins: dict[ChunkKey, int], pending: set[ChunkKey]) -> None:
        """Raises AssertionError unless pins end at exactly these chunks, this often, and these are PENDING."""
        assert self._pins == pins
        assert self._pending.keys() == pending
