"""The chunk index: which chunks the host tier holds, in which slots, and which of them may go.

Three rules live here. A chunk can be looked up only once its save is complete (READY). A pinned chunk
stays. And a chunk on which another resident chunk hangs stays too: evicting a prefix from its tail
keeps every resident prefix whole, so no slot ever holds a chunk that no lookup can reach. The one
exception is a failed copy, whose chunk is lost at once and can leave later chunks of its prefix behind;
they become reachable again when a request saves the missing chunk, or grow old and go.

The third rule makes pins cheap: a pin on the last chunk of a prefix keeps all of it, so pinning ten
thousand chunks is one count. Only where chunks are lost under a pin, which is rare, does it have to be
found out which those are (`_covered`). It makes lookups cheap too: where a prefix ends is found by bisection, and
its slots by going from its last chunk towards its head.

No call takes long, however many chunks there are. What is known of a chunk is a few machine words in columns by slot,
and an entry in a table that grows in small parts (see `tables`); nothing of it is looked at by the garbage collector,
each of whose passes over a million references would stop the engine for 100 ms. `clear` begins anew beside what there
was, and large losses are worked off a slice at a time; both are finished by `tidy`, which is called in every step.
"""

import enum
from array import array
from collections import deque
from collections.abc import Container, Iterable, Sequence
from typing import Any, final

import numpy as np

from tpu_offload.core.big_tables import FreeSlots, Scrap, Table, without
from tpu_offload.core.policies import EvictionPolicy, Residents, Use
from tpu_offload.types import ChunkKey

_NONE = -1  # no chunk before it, or none that hangs on it
_LOST = -2  # the chunk before it is not resident
_STRIDE = 64  # chunks of a prefix that mostly lie in slots one after another, and are gone through at once
_MIN_TOGETHER = 8  # fewer come and go one by one
MAX_AT_ONCE = 256
"""Chunks that one call drops, of those that were lost together; 1 ms, more where prompts of 100,000 chunks break up."""
NUM_FREED = 4096
"""Entries of tables of before a `clear` that one call frees; 1 ms."""
_MAX_NEW = 2**16  # slots for which columns grow at a time
_CLEARING = Use(-1)  # chunks that outlive a `clear` count as used before all others

type Changes = tuple[Sequence[ChunkKey] | None, bool]
"""Chunks, None for all that there were, and whether lookups began or ceased to find them."""


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
        self._changes: deque[Changes] | None = deque() if record else None
        self._slots: Table[int] = Table()
        self._num_resident = 0
        # By slot, for as many as were ever used; what was in a slot that is free now is left there. numpy's arrays
        # and those of the standard library are not looked at by the garbage collector.
        self._keys: np.ndarray[Any, np.dtype[np.object_]] = np.empty(0, object)
        self._parents = array("i")  # the slot of the chunk before it, or _NONE, or _LOST
        self._children = array("i")  # of the chunk after it, or of one of several; _NONE for a leaf
        self._numbers = array("i")  # each its own number, to compare with
        # Further chunks that hang on a chunk: nearly every one has at most one, the next of its prefix.
        self._more_children: dict[int, set[int]] = {}
        # Of chunks that hang on one that is not resident (after a failed copy): by that one's key, for when it returns,
        # and by their slots.
        self._orphans: dict[ChunkKey, set[int]] = {}
        self._lost_parents: dict[int, ChunkKey] = {}
        # Slots of chunks that are not READY: some are CONDEMNED, the others PENDING.
        self._unready: set[int] = set()
        self._condemned: set[ChunkKey] = set()
        # Condemned chunks that no pin covers, still to be taken out; None when it has to be found out which those are.
        self._to_sweep: list[ChunkKey] | None = []
        # How many pins end at a chunk. Each covers the chunk and all before it.
        self._pins: dict[ChunkKey, int] = {}
        self._free = FreeSlots()
        # Neither free nor used: a copy that nobody waits for any more may still write there.
        self._quarantined: set[int] = set()
        # Neither free nor used: a worker that was started anew has not allocated them again. All are >= `_num_usable`.
        self._unusable: list[range] = []
        self._num_usable = 0
        self._num_known = 0  # slots that there ever were
        self._lost_slots: list[range] = []  # lookups end there; their chunks are still to be dropped
        self._scrap = Scrap()
        self._protected: Container[ChunkKey] = ()
        self._num_evicted = 0

    @property
    def num_slots(self) -> int:
        """Slots that exist, whatever they hold."""
        return self._num_usable

    @property
    def num_free_slots(self) -> int:
        """Slots that an allocation gets without evicting."""
        return len(self._free)

    @property
    def num_quarantined_slots(self) -> int:
        """Slots that a late copy may still write."""
        return len(self._quarantined)

    @property
    def num_evicted(self) -> int:
        """Chunks evicted so far."""
        return self._num_evicted

    @property
    def is_dropping(self) -> bool:
        """Whether a large loss is still being worked off, so that `tidy` will drop more."""
        return bool(self._lost_slots)

    @property
    def num_untidy(self) -> int:
        """Work that is left for `tidy`: chunks to drop, and entries to free. For tests."""
        return sum(map(len, self._lost_slots)) + len(self._to_sweep or ()) + len(self._scrap)

    def __len__(self) -> int:
        return self._num_resident

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._slots.parts[key[0]]

    def grow(self, num_slots: int) -> None:
        """Raises the number of slots to `num_slots`; a smaller number changes nothing."""
        if num_slots <= self._num_usable:
            return
        self._num_usable = num_slots
        self._policy.resize(num_slots)
        unusable, self._unusable = sorted(self._unusable, key=lambda slots: slots.start), []
        # Low slots are handed out first, so that a pool that is never full touches little memory.
        for slots in [*unusable, range(self._num_known, num_slots)]:
            self._free.put_last(range(slots.start, min(slots.stop, num_slots)))
            if slots.stop > num_slots:
                self._unusable.append(range(max(slots.start, num_slots), slots.stop))
        self._num_known = max(self._num_known, num_slots)

    def limit(self, num_slots: int) -> None:
        """Lowers the number of slots: a worker has fewer. Chunks in the others have been dropped.

        What a pin or an unfinished copy keeps there goes when that lets go, and its slot comes back with `grow`.
        O(1) after a `clear`.
        """
        self._num_usable = min(self._num_usable, num_slots)
        self._policy.resize(self._num_usable)
        self._unusable += self._free.remove_from(self._num_usable)

    def state(self, key: ChunkKey) -> ChunkState | None:
        """The chunk's state, None when it is not here."""
        slot = self._slots.get(key)
        if slot is None:
            return None
        if slot not in self._unready:
            return ChunkState.READY
        return ChunkState.CONDEMNED if key in self._condemned else ChunkState.PENDING

    def find(self, keys: Sequence[ChunkKey], first: int = 0) -> list[int]:
        """Slots of the READY chunks of a prefix from chunk `first` on, up to the first that is not READY.

        Looks at a logarithm of the keys, unless chunks of this prefix were lost.
        """
        num_keys = len(keys)
        if first >= num_keys:
            return []
        parts = self._slots.parts
        key = keys[first]
        head = parts[key[0]].get(key)
        if head is None:
            return []
        if num_keys - first == 1:
            slots = [head]
        else:
            end, tail = self._last_resident(keys, first, num_keys, head)
            slots = self._walk(head, tail, end - first)
            if not slots:  # something in between is not here
                slots = self._find_each(keys, first)
        if self._unready and not self._unready.isdisjoint(slots):
            del slots[next(i for i, slot in enumerate(slots) if slot in self._unready) :]
        for lost in self._lost_slots:
            if touches(slots, lost.start, lost.stop):
                del slots[next(i for i, slot in enumerate(slots) if slot in lost) :]
        return slots

    def missing(self, keys: Sequence[ChunkKey], first: int, end: int) -> tuple[Sequence[int], int]:
        """Which of the chunks `first` to `end - 1` of a prefix want saving: those that are not here.

        Returns:
          Their numbers in order, and how far it looked: `end`, or the first chunk that is CONDEMNED. The key of
          that one is taken until its last pin is gone; what follows waits, or hangs on nothing.
        """
        if self._condemned and not self._condemned.isdisjoint(keys[first:end]):
            end = next(i for i in range(first, end) if keys[i] in self._condemned)
        if first >= end:
            return (), end
        if end - first == 1:  # a request that generates
            key = keys[first]
            return () if key in self._slots.parts[key[0]] else (first,), end
        if self._orphans and not self._orphans.keys().isdisjoint(keys[first:end]):
            return [i for i in range(first, end) if keys[i] not in self], end
        head = self._slots.get(keys[first])
        start = first if head is None else self._last_resident(keys, first, end, head)[0]
        return range(start, end), end

    def pin(self, keys: Sequence[ChunkKey]) -> None:
        """Keeps chunks that follow each other in one prefix, and what is here before them, until unpinned. O(1).

        Those before may be PENDING: after a failed copy a chunk can be on its way back under others that stayed.
        The chunks themselves are READY, or pinned by the caller already: a pin may be made shorter under
        condemned chunks.
        """
        tail = keys[-1]
        assert self._slots[tail] not in self._unready or tail in self._condemned, "only a complete chunk can be pinned"
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
            if self._condemned:
                self._to_sweep = None
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
        num_short = len(numbers) - len(self._free)
        if num_short > 0:
            self._protected = protected
            self._policy.evict(num_short, self)
            self._protected = ()
        slots = self._free.take(len(numbers))
        num_chunks = len(slots)
        if not num_chunks:
            return slots
        if self._scrap:  # what is new takes no more memory than what was there goes away
            self._scrap.take_apart(4 * num_chunks)
        first = numbers[0]
        if numbers[num_chunks - 1] - first == num_chunks - 1:
            new = [keys[first]] if num_chunks == 1 else list(keys[first : first + num_chunks])
            self._insert(use, keys[first - 1] if first else None, new, slots)
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
        assert slots[0] in self._unready, "only a pending chunk completes"
        assert self._slots.get(keys[0]) == slots[0], "a chunk completes in its own slot"
        if success:
            self._unready.difference_update(slots)
            self._record(tuple(keys), found=True)
            return
        if quarantine:
            self._quarantined.update(slots)
        for key in reversed(keys):  # so that few of them lose what they hang on first
            self._remove(key)
        if self._condemned:  # those before it are covered no more
            self._to_sweep = None
        self.sweep()

    def end_quarantine(self, slots: Iterable[int]) -> None:
        """No copy is going to write these slots any more: they are free."""
        for slot in slots:
            self._quarantined.remove(slot)
            self._set_free(slot)

    def evict(
        self, key: ChunkKey, num_chunks: int, *, stop: Container[ChunkKey] = (), singly: bool = False
    ) -> tuple[int, ChunkKey | None]:
        """For the policy, from inside `allocate`; see the base class."""
        parts, keys, parents, children = self._slots.parts, self._keys, self._parents, self._children
        pins, protected, unready, more = self._pins, self._protected, self._unready, self._more_children
        slot = parts[key[0]][key]
        if children[slot] != _NONE:
            return 0, key
        gone: list[ChunkKey] = []
        freed: list[int] = []
        rest = key
        ends_at: ChunkKey | None = key
        # Chunks gone, from which on it is worth trying to take many at once.
        try_at = num_chunks if singly else 0
        while (num_gone := len(gone)) < num_chunks:
            if rest in pins or rest in protected or slot in unready or (num_gone and rest in stop):
                break
            first = slot
            if num_chunks - num_gone >= _MIN_TOGETHER <= slot and num_gone >= try_at:
                first = self._first_to_go(slot, min(_STRIDE, num_chunks - num_gone, slot), stop)
                try_at = num_gone + (slot - first or _STRIDE)
            if first == slot:
                del parts[rest[0]][rest]
                gone.append(rest)
                freed.append(slot)
            else:
                together = keys[first : slot + 1].tolist()
                together.reverse()
                for rest in together:
                    del parts[rest[0]][rest]
                gone += together
                freed += range(slot, first - 1, -1)
            parent = parents[first]
            if parent < 0:
                if parent == _LOST:
                    self._forget_orphan(first)
                ends_at = None
                break
            ends_at = rest = keys[parent]
            if more and parent in more:
                self._take_child(parent, first)
                break
            children[parent] = _NONE
            slot = parent
        if gone:
            self._free.stack += freed
            self._num_resident -= len(gone)
            self._num_evicted += len(gone)
            if self._changes is not None:
                self._record(gone, found=False)
        return len(gone), ends_at

    def _first_to_go(self, slot: int, num_chunks: int, stop: Container[ChunkKey]) -> int:
        """The first of so many chunks that lie one after another up to `slot`, if all may go; else that slot."""
        first = slot - num_chunks + 1
        if self._parents[first + 1 : slot + 1] != self._numbers[first:slot]:
            return slot
        slots = range(first, slot)  # the last one may go
        if not (self._unready.isdisjoint(slots) and self._more_children.keys().isdisjoint(slots)):
            return slot
        keys = self._keys[first:slot].tolist()
        if not self._pins.keys().isdisjoint(keys):
            return slot
        kept = [chunks.__contains__ for chunks in (self._protected, stop) if chunks]
        return slot if any(any(map(contains, keys)) for contains in kept) else first

    def is_leaf(self, key: ChunkKey) -> bool:
        """See the base class."""
        slot = self._slots.get(key)
        return slot is not None and self._children[slot] == _NONE

    def lose_slots(self, first: int, end: int) -> list[ChunkKey]:
        """The bytes in slots `first` to `end - 1` are gone: no lookup finds their chunks any more.

        Returns:
          The chunks that were dropped, as by `drop`. Of many slots these are some; `tidy` returns the others. The
          caller sees to those that are PENDING.
        """
        slots = range(first, min(end, len(self._keys)))
        if slots:
            self._lost_slots.append(slots)
        return self._drop_lost()

    def drop(self, keys: Iterable[ChunkKey]) -> list[ChunkKey]:
        """Takes READY chunks from the lookups for good. Those that a pin covers keep their slots until unpinned.

        Returns:
          The chunks that were dropped; the others were unknown, PENDING or dropped before.
        """
        dropped = [key for key in keys if self.state(key) is ChunkState.READY]
        covered = self._covered() if dropped and self._pins else ()
        self._record(dropped, found=False)
        for key in dropped:
            slot = self._slots[key]
            if slot in covered:
                self._condemned.add(key)
                self._unready.add(slot)
            else:
                self._remove(key)
        return dropped

    def clear(self) -> None:
        """Drops every READY chunk. O(chunks that pins cover or that are unfinished), whatever else there is.

        All slots are free at once, but those of these chunks. Low ones are handed out first again.
        """
        covered = self._covered()
        kept = covered | self._unready
        pending = self._unready.difference([self._slots[key] for key in self._condemned])
        self._condemned = {self._keys[slot] for slot in kept - pending}
        if self._to_sweep:
            self._to_sweep = None
        if self._changes is not None:  # nobody need hear of what came before
            self._scrap.add(self._changes)
            self._changes = deque([(None, False)])
        for part in self._slots.parts:
            self._scrap.add(part)
        for container in (self._more_children, self._orphans, *self._policy.clear()):
            self._scrap.add(container)
        self._slots, self._num_resident = Table(), 0
        self._more_children, self._orphans = {}, {}
        self._lost_slots = []
        self._unready = kept
        self._keep(kept)
        held = kept | self._quarantined
        self._free = FreeSlots()
        for slots in without(range(self._num_usable), held):
            self._free.put_last(slots)
        self._unusable = without(range(self._num_usable, self._num_known), held)

    def tidy(self) -> list[ChunkKey]:
        """Goes on with what large losses and `clear` have left to do, for 3 ms at most.

        Returns:
          The chunks that were dropped.
        """
        if self._scrap:
            self._scrap.take_apart(NUM_FREED)
        self.sweep()
        return self._drop_lost() if self._lost_slots else []

    def take_changes(self, max_chunks: int | None = None) -> list[Changes]:
        """Chunks that lookups began to find (True) or ceased to find since the last call, in order.

        Args:
          max_chunks: of more than these the next call tells.
        """
        taken: list[Changes] = []
        num_left = max_chunks
        while self._changes and num_left != 0:
            keys, found = self._changes.popleft()
            if keys is not None and num_left is not None:
                if len(keys) > num_left:
                    self._changes.appendleft((keys[num_left:], found))
                    keys = keys[:num_left]
                num_left -= len(keys)
            taken.append((keys, found))
        return taken

    def _record(self, keys: Sequence[ChunkKey], *, found: bool) -> None:
        if self._changes is not None and keys:
            self._changes.append((tuple(keys), found))

    def _covered(self) -> set[int]:
        """The slots that chunks may not lose because of pins. O(chunks that pins cover)."""
        covered: set[int] = set()
        parents = self._parents
        for tail in self._pins:
            slot = self._slots.get(tail)
            while slot is not None and slot >= 0 and slot not in covered:
                covered.add(slot)
                slot = parents[slot]
        return covered

    def sweep(self) -> None:
        """Takes out the condemned chunks that no pin covers any more, or as many of them as one call may."""
        if self._to_sweep is None:
            covered = self._covered()
            # Not in the order of a set, which no seed repeats, and tails before heads, mostly.
            table = self._slots
            self._to_sweep = sorted((k for k in self._condemned if table[k] not in covered), key=table.__getitem__)
        for _ in range(min(len(self._to_sweep), MAX_AT_ONCE)):
            key = self._to_sweep.pop()
            self._condemned.remove(key)
            self._remove(key)

    def _last_resident(self, keys: Sequence[ChunkKey], first: int, end: int, head: int) -> tuple[int, int]:
        """Where the resident chunks of a prefix end, and the slot of the last one, by bisection.

        Args:
          keys: a prefix.
          first: the first chunk to look at; it is resident.
          end: the end of those to look at.
          head: the slot of the first.
        Returns:
          If there is a hole, this may be behind it.
        """
        parts = self._slots.parts
        key = keys[end - 1]
        slot = parts[key[0]].get(key)
        if slot is not None:
            return end, slot
        low, high, tail = first, end - 1, head
        while high - low > 1:
            middle = (low + high) // 2
            key = keys[middle]
            slot = parts[key[0]].get(key)
            if slot is None:
                high = middle
            else:
                low, tail = middle, slot
        return high, tail

    def _walk(self, head: int, tail: int, num_chunks: int) -> list[int]:
        """The slots of so many chunks, from one in slot `head` to one in slot `tail`; none if there is a hole."""
        parents, numbers = self._parents, self._numbers
        slots: list[int] = []
        slot, num_left, try_at = tail, num_chunks, num_chunks
        while num_left:
            if slot < 0:
                return []
            if _STRIDE < num_left <= try_at and slot >= _STRIDE:
                first = slot - _STRIDE
                if parents[first + 1 : slot + 1] == numbers[first:slot]:
                    slots += range(slot, first, -1)
                    slot, num_left = first, num_left - _STRIDE
                    continue
                try_at = num_left - _STRIDE
            slots.append(slot)
            slot, num_left = parents[slot], num_left - 1
        if slots[-1] != head:
            return []
        slots.reverse()
        return slots

    def _find_each(self, keys: Sequence[ChunkKey], first: int) -> list[int]:
        slots: list[int] = []
        for i in range(first, len(keys)):
            slot = self._slots.get(keys[i])
            if slot is None:
                break
            slots.append(slot)
        return slots

    def _insert(self, use: Use, parent: ChunkKey | None, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
        """Makes chunks that follow each other resident, PENDING."""
        column = self._keys
        highest = max(slots)
        if highest >= len(column):
            self._add_columns(highest + 1)
        parts, parents, children, before = self._slots.parts, self._parents, self._children, _NONE
        if parent is not None:
            assert parent in self, "a chunk is saved that no lookup can reach"
            before = self._slots[parent]
            if children[before] != _NONE:
                self._more_children.setdefault(before, set()).add(children[before])
        few = len(slots) < _MIN_TOGETHER
        for key, slot in zip(keys, slots, strict=True):
            part = parts[key[0]]
            assert key not in part, "a resident chunk is not saved again"
            part[key] = slot
            if few:
                column[slot], parents[slot], children[slot] = key, before, _NONE
                if before != _NONE:
                    children[before] = slot
                before = slot
        if not few:
            for first in range(0, len(slots), _STRIDE):
                before = self._link(keys[first : first + _STRIDE], slots[first : first + _STRIDE], before)
        self._num_resident += len(keys)
        self._unready.update(slots)
        if self._orphans:
            for key, slot in zip(keys, slots, strict=True):
                self._take_back_orphans(key, slot)
        self._policy.insert(use, keys, parent)

    def _link(self, keys: Sequence[ChunkKey], slots: Sequence[int], before: int) -> int:
        """Notes in the columns what is in these slots, and that they follow the chunk in slot `before`; few of them."""
        parents, children = self._parents, self._children
        first, last = slots[0], slots[-1]
        if before != _NONE:
            children[before] = first
        if last - first == len(slots) - 1 and self._numbers[first : last + 1].tolist() == slots:
            self._keys[first : last + 1] = keys
            parents[first + 1 : last + 1] = self._numbers[first:last]
            children[first:last] = self._numbers[first + 1 : last + 1]
            parents[first] = before
        else:
            column = self._keys
            for key, slot in zip(keys, slots, strict=True):
                column[slot] = key
                parents[slot] = before
                if before != _NONE:
                    children[before] = slot
                before = slot
        children[last] = _NONE
        return last

    def _insert_parts(self, use: Use, keys: Sequence[ChunkKey], numbers: Sequence[int], slots: Sequence[int]) -> None:
        """Makes the chunks `numbers` of a prefix with holes resident."""
        starts = [i for i, number in enumerate(numbers) if i == 0 or number != numbers[i - 1] + 1]
        for start, end in zip(starts, [*starts[1:], len(numbers)], strict=True):
            first = numbers[start]
            parent = keys[first - 1] if first else None
            self._insert(use, parent, [keys[i] for i in numbers[start:end]], slots[start:end])

    def _keep(self, kept: set[int]) -> None:
        """Makes chunks resident again after a `clear`, each in its slot. They may be parts of any prefixes."""
        column, parents, lost_parents = self._keys, self._parents, self._lost_parents
        self._lost_parents = {}
        for slot in kept:
            self._slots[column[slot]] = slot
            self._children[slot] = _NONE
        self._num_resident = len(kept)
        for slot in sorted(kept):
            parent = parents[slot]
            if parent in kept:
                self._add_child(parent, slot)
            elif parent != _NONE:
                key = lost_parents[slot] if parent == _LOST else column[parent]
                parents[slot] = _LOST
                self._lost_parents[slot] = key
                self._orphans.setdefault(key, set()).add(slot)
        known: set[int] = set()
        for leaf in sorted(slot for slot in kept if self._children[slot] == _NONE):
            slots, slot = [], leaf
            while slot >= 0 and slot not in known:
                slots.append(slot)
                slot = parents[slot]
            known.update(slots)
            self._policy.insert(_CLEARING, [column[s] for s in reversed(slots)], column[slot] if slot >= 0 else None)

    def _add_columns(self, num_slots: int) -> None:
        """Makes room for what is known of so many slots. What has room for a million is not copied for one more."""
        num_before = len(self._keys)
        num_slots = min(max(num_slots, num_before + min(num_before, _MAX_NEW) + 64), self._num_known)
        self._keys.resize(num_slots, refcheck=False)  # moves pointers, or whole pages of them, and counts no references
        self._keys[num_before:] = None
        numbers = np.arange(num_before, num_slots, dtype=np.int32)
        self._numbers.frombytes(numbers.tobytes())
        numbers.fill(_NONE)
        self._parents.frombytes(numbers.tobytes())
        self._children.frombytes(numbers.tobytes())

    def _add_child(self, parent: int, slot: int) -> None:
        other = self._children[parent]
        if other != _NONE:
            self._more_children.setdefault(parent, set()).add(other)
        self._children[parent] = slot

    def _take_child(self, parent: int, slot: int) -> None:
        more = self._more_children.get(parent)
        if more is None:
            self._children[parent] = _NONE
            return
        if self._children[parent] == slot:
            self._children[parent] = more.pop()
        else:
            more.remove(slot)
        if not more:
            del self._more_children[parent]

    def _take_back_orphans(self, key: ChunkKey, slot: int) -> None:
        for child in sorted(self._orphans.pop(key, ())):
            del self._lost_parents[child]
            self._parents[child] = slot
            self._add_child(slot, child)

    def _forget_orphan(self, slot: int) -> None:
        key = self._lost_parents.pop(slot)
        siblings = self._orphans[key]
        siblings.remove(slot)
        if not siblings:
            del self._orphans[key]

    def _remove(self, key: ChunkKey) -> None:
        """Takes out a chunk whose bytes are lost or never came."""
        part = self._slots.parts[key[0]]
        slot = part.pop(key)
        self._num_resident -= 1
        self._unready.discard(slot)
        if self._children[slot] != _NONE:
            orphans = self._more_children.pop(slot, set()) | {self._children[slot]}
            self._orphans[key] = orphans
            for child in orphans:
                self._parents[child] = _LOST
                self._lost_parents[child] = key
        if slot not in self._quarantined:
            self._set_free(slot)
        parent = self._parents[slot]
        if parent >= 0:
            self._take_child(parent, slot)
        elif parent == _LOST:
            self._forget_orphan(slot)
        self._policy.remove(key, self._keys[parent] if parent >= 0 else None)

    def _drop_lost(self) -> list[ChunkKey]:
        """Drops what is in lost slots, as much as one call may."""
        num_left, keys = MAX_AT_ONCE, []
        while self._lost_slots and num_left:
            slots = self._lost_slots.pop()
            if len(slots) > num_left:
                self._lost_slots.append(slots[:-num_left])
                slots = slots[-num_left:]
            num_left -= len(slots)
            # Tails before heads, mostly: so few of them lose what they hang on first.
            found = [(self._keys[slot], slot) for slot in reversed(slots)]
            keys += [key for key, slot in found if key is not None and self._slots.get(key) == slot]
        return self.drop(keys)

    def _set_free(self, slot: int) -> None:
        """A slot has lost its chunk for another reason than eviction: it is tried last."""
        if slot < self._num_usable:
            self._free.put_last(range(slot, slot + 1))
        else:
            self._unusable.append(range(slot, slot + 1))

    def check_invariants(self) -> None:
        """Raises AssertionError unless slots, pins, children and policy agree. O(chunks + slots)."""
        used = [self._slots[key] for key in self._slots]
        unusable = [slot for slots in self._unusable for slot in slots]
        owners = [*used, *self._free, *self._quarantined, *unusable]
        assert sorted(owners) == list(range(self._num_known)), "a slot has no owner or two"
        assert len(used) == self._num_resident
        assert len(list(self._free)) == len(self._free)
        assert all(slot < self._num_usable for slot in self._free), "a slot is free that a worker does not have"
        assert all(slot >= self._num_usable for slot in unusable), "a slot is usable and cannot be had"
        assert all(self._keys[slot] == key for key, slot in ((key, self._slots[key]) for key in self._slots))
        children: dict[int, set[int]] = {slot: set() for slot in used}
        orphans: dict[ChunkKey, set[int]] = {}
        for slot in used:
            parent = self._parents[slot]
            if parent == _LOST:
                orphans.setdefault(self._lost_parents[slot], set()).add(slot)
            elif parent != _NONE:
                children[parent].add(slot)
        assert orphans == self._orphans
        assert not any(key in self for key in orphans), "what hangs on a resident chunk was not told"
        assert set(self._lost_parents) == {slot for slots in orphans.values() for slot in slots}
        for slot, found in children.items():
            known = {self._children[slot]} - {_NONE} | self._more_children.get(slot, set())
            assert found == known, "a chunk is wrong about what hangs on it"
        assert all(self._more_children.values())
        assert self._more_children.keys() <= children.keys()
        assert all(num > 0 for num in self._pins.values())
        covered = self._covered()
        if not self._to_sweep:
            assert {self._slots[key] for key in self._condemned} <= covered, "a condemned chunk outlived its pins"
        assert self._unready <= set(used)
        assert all(self._slots[key] in self._unready for key in self._condemned), "a condemned chunk can be found"
        leaves = {self._keys[slot] for slot, found in children.items() if not found}
        self._policy.check_invariants(leaves, self)

    def _pending(self) -> set[ChunkKey]:
        return {self._keys[slot] for slot in self._unready} - self._condemned

    def check_holds(self, *, pins: dict[ChunkKey, int], pending: set[ChunkKey]) -> None:
        """Raises AssertionError unless pins end at exactly these chunks, this often, and these are PENDING."""
        assert self._pins == pins
        assert self._pending() == pending


def touches(slots: Sequence[int], first: int, end: int) -> bool:
    """Whether one of these slots is among `first` to `end - 1`. Mostly seen from the lowest and the highest."""
    if not slots or max(slots) < first or min(slots) >= end:
        return False
    return any(first <= slot < end for slot in slots)
