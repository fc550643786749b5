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

import enum
import itertools
from collections import deque
from collections.abc import Container, Iterable, Sequence
from typing import final

from tpu_offload.core.policies import EvictionPolicy, Residents, Use
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
      record: keeps what `take_changes` returns.
    """

    def __init__(self, policy: EvictionPolicy, *, record: bool = False) -> None:
        self._policy = policy
        self._changes: list[tuple[ChunkKey, bool]] | None = [] if record else None
        # The slot of each resident chunk: itself when the chunk is READY, its bitwise complement, which is
        # negative, when it is not.
        self._slots: dict[ChunkKey, int] = {}
        self._condemned: set[ChunkKey] = set()
        # By slot: the key before the chunk in its prefix.
        self._parents: list[ChunkKey | None] = []
        # Nearly every chunk has one child, the next of its prefix. Here are those that have none, and how
        # many those have that have more.
        self._leaves: set[ChunkKey] = set()
        self._num_children: dict[ChunkKey, int] = {}
        # How many chunks hang on a key that is not resident (after a failed copy), for when it returns.
        self._num_orphans: dict[ChunkKey, int] = {}
        # How many pins end at a chunk. Each covers the chunk and all before it.
        self._pins: dict[ChunkKey, int] = {}
        # Taken from the right. What a failed copy gives back goes to the left, to be tried last.
        self._free_slots: deque[int] = deque()
        # Neither free nor used: a copy that nobody waits for any more may still write there.
        self._quarantined: set[int] = set()
        # Neither free nor used: a worker that was started anew has not allocated them again. All are >= `_num_usable`.
        self._unusable: set[int] = set()
        self._num_usable = 0
        self._protected: Container[ChunkKey] = ()
        self._num_evicted = 0

    @property
    def num_slots(self) -> int:
        """Slots that exist, whatever they hold."""
        return self._num_usable

    @property
    def num_free_slots(self) -> int:
        """Slots that an allocation gets without evicting."""
        return len(self._free_slots)

    @property
    def num_quarantined_slots(self) -> int:
        """Slots that a late copy may still write."""
        return len(self._quarantined)

    @property
    def num_evicted(self) -> int:
        """Chunks evicted so far."""
        return self._num_evicted

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: object) -> bool:
        return key in self._slots

    def grow(self, num_slots: int) -> None:
        """Raises the number of slots to `num_slots`; a smaller number changes nothing."""
        if num_slots <= self._num_usable:
            return
        self._num_usable = num_slots
        self._policy.resize(num_slots)
        back = sorted(slot for slot in self._unusable if slot < num_slots)
        self._unusable.difference_update(back)
        # Low slots are handed out first, so that a pool that is never full touches little memory.
        self._free_slots.extendleft([*back, *range(len(self._parents), num_slots)])
        self._parents += [None] * (num_slots - len(self._parents))

    def limit(self, num_slots: int) -> None:
        """Lowers the number of slots: a worker has fewer. Chunks in the others have been dropped by `lose_slots`.

        What a pin or an unfinished copy keeps there goes when that lets go, and its slot comes back with `grow`.
        """
        self._num_usable = min(self._num_usable, num_slots)
        self._policy.resize(self._num_usable)
        self._unusable.update(slot for slot in self._free_slots if slot >= num_slots)
        self._free_slots = deque(slot for slot in self._free_slots if slot < num_slots)

    def state(self, key: ChunkKey) -> ChunkState | None:
        """The chunk's state, None when it is not here."""
        slot = self._slots.get(key)
        if slot is None:
            return None
        if slot >= 0:
            return ChunkState.READY
        return ChunkState.CONDEMNED if key in self._condemned else ChunkState.PENDING

    def find(self, keys: Sequence[ChunkKey], first: int = 0) -> list[int]:
        """Slots of the READY chunks of a prefix from chunk `first` on, up to the first that is not READY."""
        slots: list[int] = []
        try:  # noqa: SIM105 (contextlib.suppress costs a microsecond)
            slots.extend(map(self._slots.__getitem__, itertools.islice(keys, first, None)))
        except KeyError:
            pass  # a list keeps what an iterator gave it before that raised
        if slots and min(slots) < 0:
            del slots[next(i for i, slot in enumerate(slots) if slot < 0) :]
        return slots

    def missing(self, keys: Sequence[ChunkKey], first: int, end: int) -> tuple[list[int], int]:
        """Which of the chunks `first` to `end - 1` of a prefix want saving: those that are not here.

        Returns:
          Their numbers in order, and how far it looked: `end`, or the first chunk that is CONDEMNED. The key of
          that one is taken until its last pin is gone; what follows waits, or hangs on nothing.
        """
        if self._condemned:
            end = next((i for i in range(first, end) if keys[i] in self._condemned), end)
        slots = self._slots
        if end - first == 1:  # a request that generates
            return [] if keys[first] in slots else [first], end
        return [i for i, key in enumerate(itertools.islice(keys, first, end), first) if key not in slots], end

    def pin(self, keys: Sequence[ChunkKey]) -> None:
        """Keeps chunks that follow each other in one prefix, and what is here before them, until unpinned. O(1).

        Those before may be PENDING: after a failed copy a chunk can be on its way back under others that stayed.
        The chunks themselves are READY, or pinned by the caller already: a pin may be made shorter under
        condemned chunks.
        """
        tail = keys[-1]
        assert self._slots[tail] >= 0 or tail in self._condemned, "only a complete chunk can be pinned"
        self._pins[tail] = self._pins.get(tail, 0) + 1

    def unpin(self, keys: Sequence[ChunkKey], *, sweep: bool = True) -> None:
        """Takes back the pin that these keys, or others with the same last one, were given. O(1).

        Condemned chunks go with the last pin that covers them; without `sweep` only when `sweep` is called, which costs
        as much as one of these calls while there are any: O(chunks that pins cover).
        """
        tail = keys[-1]
        assert tail in self._pins, "unpinned more often than pinned"
        self._pins[tail] -= 1
        if not self._pins[tail]:
            del self._pins[tail]
        if sweep:
            self.sweep()

    def touch(self, use: Use, keys: Sequence[ChunkKey], num_chunks: int) -> None:
        """A request used the first `num_chunks` of `keys`, head first; chunks that are not here are passed over."""
        self._policy.touch(use, keys, num_chunks, self)

    def allocate(
        self, use: Use, keys: Sequence[ChunkKey], numbers: Sequence[int], *, protected: Container[ChunkKey] = ()
    ) -> list[int]:
        """Gives slots to chunks that are about to be saved, evicting others where it must.

        Args:
          use: whose request saves them.
          keys: a prefix, head first.
          numbers: which of it are to be saved, ascending: they are not here, and what is between them is.
          protected: chunks that may not go for this, and so none before them in their prefixes: the last ones
            of the caller's own. The one before the first to be saved has to be covered by one of them.
        Returns:
          Slots for the first of them, as many as could be found; those chunks are PENDING now.
          Evicts exactly as many as these slots need, and nothing when there are none.
        """
        free, num_chunks = self._free_slots, len(numbers)
        if num_chunks > len(free):
            self._protected = protected
            self._policy.evict(num_chunks - len(free), self)
            self._protected = ()
            if num_chunks > len(free):
                num_chunks = len(free)
        if not num_chunks:
            return []
        slots = [free.pop() for _ in range(num_chunks)]
        first = numbers[0]
        if numbers[num_chunks - 1] - first == num_chunks - 1:
            self._insert(use, keys[first - 1] if first else None, keys[first : first + num_chunks], slots)
        else:
            self._insert_parts(use, keys, numbers[:num_chunks], slots)
        return slots

    def complete(
        self, keys: Sequence[ChunkKey], slots: Sequence[int], *, success: bool, quarantine: bool = False
    ) -> None:
        """Ends the save of PENDING chunks, in the order of their allocation: they become READY, or go.

        Args:
          keys: the chunks.
          slots: where they are.
          success: their bytes are there.
          quarantine: without success: the bytes may still come. Their slots are given to nobody before
            `end_quarantine`.
        """
        assert self._slots.get(keys[0]) == ~slots[0], "only a pending chunk completes"
        if success:
            self._slots.update(zip(keys, slots, strict=True))
            self._record(keys, found=True)
            return
        if quarantine:
            self._quarantined.update(slots)
        for key in reversed(keys):  # so that few of them lose what they hang on first
            self._remove(key)
        self.sweep()

    def end_quarantine(self, slots: Iterable[int]) -> None:
        """No copy is going to write these slots any more: they are free."""
        for slot in slots:
            self._quarantined.remove(slot)
            self._set_free(slot)

    def evict(self, key: ChunkKey, num_chunks: int, *, stop: Container[ChunkKey] = ()) -> tuple[int, ChunkKey | None]:
        """For the policy, from inside `allocate`; see the base class."""
        slots, parents, free = self._slots, self._parents, self._free_slots
        pins, protected, num_children = self._pins, self._protected, self._num_children
        num_evicted, changes = 0, self._changes
        if key not in self._leaves:
            return 0, key
        self._leaves.remove(key)
        rest: ChunkKey | None = key
        while rest is not None and num_evicted < num_chunks:
            if rest in pins or rest in protected or (num_evicted and rest in stop):
                break
            slot = slots.pop(rest)
            if slot < 0:
                slots[rest] = slot
                break
            free.append(slot)
            num_evicted += 1
            if changes is not None:
                changes.append((rest, False))
            rest = parents[slot]
            if num_children or self._num_orphans:
                if rest is not None and rest in num_children:
                    self._take_child(rest)
                    self._num_evicted += num_evicted
                    return num_evicted, rest
                if rest in self._num_orphans:
                    self._take_child(rest)
                    rest = None
        if rest is not None:
            self._leaves.add(rest)
        self._num_evicted += num_evicted
        return num_evicted, rest

    def is_leaf(self, key: ChunkKey) -> bool:
        """See the base class."""
        return key in self._leaves

    def lose_slots(self, first: int, end: int) -> list[ChunkKey]:
        """The bytes in slots `first` to `end - 1` are gone: drops their chunks. O(chunks).

        Returns:
          The chunks that no lookup finds any more. The caller sees to those that are PENDING.
        """
        return self.drop([key for key, slot in self._slots.items() if first <= slot < end])

    def drop(self, keys: Iterable[ChunkKey]) -> list[ChunkKey]:
        """Takes READY chunks from the lookups for good. Those that a pin covers keep their slots until unpinned.

        Returns:
          The chunks that were dropped; the others were unknown, PENDING or dropped before.
        """
        dropped = [key for key in keys if self._slots.get(key, -1) >= 0]
        covered = self._covered() if dropped else ()
        self._record(dropped, found=False)
        for key in dropped:
            if key in covered:
                self._condemned.add(key)
                self._slots[key] = ~self._slots[key]
            else:
                self._remove(key)
        return dropped

    def clear(self) -> None:
        """Drops every READY chunk."""
        self.drop(list(self._slots))

    def take_changes(self) -> list[tuple[ChunkKey, bool]]:
        """Chunks that lookups began to find (True) or ceased to find since the last call, in order."""
        changes, self._changes = self._changes or [], [] if self._changes is not None else None
        return changes

    def _record(self, keys: Iterable[ChunkKey], *, found: bool) -> None:
        if self._changes is not None:
            self._changes += [(key, found) for key in keys]

    def _covered(self) -> set[ChunkKey]:
        """The chunks that may not lose their slots because of pins. O(chunks that pins cover)."""
        covered: set[ChunkKey] = set()
        for tail in self._pins:
            key: ChunkKey | None = tail
            while key is not None and key in self._slots and key not in covered:
                covered.add(key)
                key = self._parents[_place(self._slots[key])]
        return covered

    def sweep(self) -> None:
        """Takes out the condemned chunks that no pin covers any more."""
        if self._condemned:
            for key in sorted(self._condemned - self._covered()):  # not in the order of a set, which no seed repeats
                self._condemned.remove(key)
                self._remove(key)

    def _insert(self, use: Use, parent: ChunkKey | None, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
        """Makes chunks that follow each other resident, PENDING."""
        table, parents, before = self._slots, self._parents, parent
        num_chunks = len(table) + len(keys)
        for key, slot in zip(keys, slots, strict=True):
            table[key] = ~slot
            parents[slot] = before
            before = key
        assert len(table) == num_chunks, "a resident chunk is not saved again"
        if parent is not None:
            assert parent in table, "a chunk is saved that no lookup can reach"
            self._add_child(parent)
        self._leaves.add(keys[-1])
        if self._num_orphans:
            for key in keys:
                for _ in range(self._num_orphans.pop(key, 0)):
                    self._add_child(key)
        self._policy.insert(use, keys, parent)

    def _insert_parts(self, use: Use, keys: Sequence[ChunkKey], numbers: Sequence[int], slots: Sequence[int]) -> None:
        """Makes the chunks `numbers` of a prefix with holes resident."""
        starts = [i for i, number in enumerate(numbers) if i == 0 or number != numbers[i - 1] + 1]
        for start, end in zip(starts, [*starts[1:], len(numbers)], strict=True):
            first = numbers[start]
            parent = keys[first - 1] if first else None
            self._insert(use, parent, [keys[i] for i in numbers[start:end]], slots[start:end])

    def _add_child(self, parent: ChunkKey) -> None:
        if parent not in self._slots:
            self._num_orphans[parent] = self._num_orphans.get(parent, 0) + 1
        elif parent in self._leaves:
            self._leaves.remove(parent)
        else:
            self._num_children[parent] = self._num_children.get(parent, 1) + 1

    def _take_child(self, parent: ChunkKey) -> None:
        counts = self._num_children if parent in self._slots else self._num_orphans
        num_left = counts.pop(parent, 1) - 1
        if num_left > (counts is self._num_children):
            counts[parent] = num_left
        elif not num_left and parent in self._slots:
            self._leaves.add(parent)

    def _remove(self, key: ChunkKey) -> None:
        """Takes out a chunk whose bytes are lost or never came."""
        num_children = 0 if key in self._leaves else self._num_children.pop(key, 1)
        if num_children:
            self._num_orphans[key] = num_children
        self._leaves.discard(key)
        slot = _place(self._slots.pop(key))
        if slot not in self._quarantined:
            self._set_free(slot)
        parent = self._parents[slot]
        if parent is not None:
            self._take_child(parent)
        self._policy.remove(key, parent if parent in self._slots else None)

    def _set_free(self, slot: int) -> None:
        """A slot has lost its chunk for another reason than eviction: it is tried last."""
        if slot < self._num_usable:
            self._free_slots.appendleft(slot)
        else:
            self._unusable.add(slot)

    def check_invariants(self) -> None:
        """Raises AssertionError unless slots, pins, children and policy agree. O(chunks + slots)."""
        used = [_place(slot) for slot in self._slots.values()]
        owners = [*used, *self._free_slots, *self._quarantined, *self._unusable]
        assert sorted(owners) == list(range(len(self._parents))), "a slot has no owner or two"
        assert all(slot < self._num_usable for slot in self._free_slots), "a slot is free that a worker does not have"
        assert all(slot >= self._num_usable for slot in self._unusable), "a slot is usable and cannot be had"
        num_children = dict.fromkeys(self._slots, 0)
        num_orphans: dict[ChunkKey, int] = {}
        for slot in used:
            parent = self._parents[slot]
            if parent is not None:
                counts = num_children if parent in self._slots else num_orphans
                counts[parent] = counts.get(parent, 0) + 1
        assert num_orphans == self._num_orphans
        assert self._leaves == {key for key, num in num_children.items() if num == 0}
        assert self._num_children == {key: num for key, num in num_children.items() if num > 1}
        assert all(num > 0 for num in self._pins.values())
        covered = self._covered()
        assert self._condemned <= covered, "a condemned chunk outlived its pins"
        assert all(self._slots[key] < 0 for key in self._condemned), "a condemned chunk can be found"
        self._policy.check_invariants(self._leaves, self)

    def _pending(self) -> set[ChunkKey]:
        return {key for key, slot in self._slots.items() if slot < 0} - self._condemned

    def check_holds(self, *, pins: dict[ChunkKey, int], pending: set[ChunkKey]) -> None:
        """Raises AssertionError unless pins end at exactly these chunks, this often, and these are PENDING."""
        assert self._pins == pins
        assert self._pending() == pending


def _place(slot: int) -> int:
    """The slot behind a value of `ChunkIndex._slots`."""
    return slot if slot >= 0 else ~slot
