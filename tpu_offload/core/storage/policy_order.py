"""The order of an eviction policy for the chunks of full attention in a private storage tier.

As in the host tier, the policy knows which chunk follows which, and is told of every request. What a tier has from
before a restart belongs to no prompt that is known; until a request uses it, it is evicted first, the oldest before the
others.

Where chunks are written when the host tier evicts them, the policy has those of the host tier as well: they are
*expected*. So it knows their uses when they come, and what follows an evicted chunk stays after it.
"""

import itertools
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import final

from tpu_offload.core.chunk_table import Discarded
from tpu_offload.core.index.chunk_index import MAX_FREED
from tpu_offload.core.index.chunk_states import ChunkStates
from tpu_offload.core.index.eviction import Evictor
from tpu_offload.core.index.prefix_tree import NO_PARENT, PrefixTree
from tpu_offload.core.index.slots import SlotAllocator
from tpu_offload.core.policies import EvictionPolicy, Use
from tpu_offload.core.storage.eviction_order import EvictionOrder, WrittenChunk
from tpu_offload.types import ChunkKey

_CHECKED = 4  # expected chunks that `tidy` looks at; 1 us
_CHECKED_IF_SHORT = 128  # likewise, after one may have been in the way of an eviction; 1 ms if all are dropped
_SLOTS_ADDED = 1024


@final
class PolicyOrder(EvictionOrder):
    """Chunks of full attention, ordered by an eviction policy.

    Args:
      policy: a new one.
      capacity: most chunks that are stored.
      num_expected: the chunks that the host tier has room for, if they are written when it evicts them; else 0.
    """

    def __init__(self, policy: EvictionPolicy, capacity: int, *, num_expected: int = 0) -> None:
        self._policy = policy
        self.expects = num_expected > 0
        self._tree = PrefixTree()  # of stored and expected chunks
        self._unplaced: OrderedDict[ChunkKey, None] = OrderedDict()  # of no known prompt, oldest first
        # The numbers of slots mean nothing here: a place in the columns of the tree.
        self._slots = SlotAllocator()
        self._slots.grow(capacity)
        self._evictor = Evictor(
            self._tree, ChunkStates(self._tree), self._slots, changes=None, on_evict=self._note_evicted
        )
        self._stored = _Stored(self._tree, self._evictor, self._unplaced)
        self.stored = self._stored
        self._next_checked = 0  # the slot at which `tidy` goes on
        self._is_short = False  # whether the last eviction was of too few
        self._evicted: list[ChunkKey] = []
        self._discarded = Discarded()
        policy.resize(capacity + num_expected)

    def add(self, name: ChunkKey) -> None:
        """See the base class."""
        if self._is_expected(name):
            self._publish([name])
        elif name not in self.stored:
            self._unplaced[name] = None

    def add_written(self, chunks: Sequence[WrittenChunk]) -> None:
        """See the base class."""
        if self._stored.num_expected:
            came = [key for _, key, _ in chunks if self._is_expected(key)]
            self._publish(came)
            if len(came) == len(chunks):
                return
            chunks = [chunk for chunk in chunks if chunk[1] not in self._tree]
        self._add(chunks)

    def host_evicted(self, chunks: Sequence[WrittenChunk], most: int) -> None:
        """See the base class."""

    def expect(self, chunks: Sequence[WrittenChunk]) -> None:
        """See the base class. O(chunks)."""
        if not self.expects:
            return
        tree, unplaced, evictor = self._tree, self._unplaced, self._evictor
        slots = self._add([chunk for chunk in chunks if chunk[1] not in tree and chunk[1] not in unplaced])
        for slot in slots:
            evictor.withheld[slot] = 1
        self._stored.num_expected += len(slots)

    def drop_expected(self, name: ChunkKey) -> None:
        """See the base class. As `remove`."""
        if self._is_expected(name):
            self._stop_expecting(self._tree.slot_of[name])
            self._remove(name)

    def expected(self) -> set[ChunkKey]:
        """All expected chunks. O(slots). For tests."""
        return {key for key in self._tree.slot_of if self._is_expected(key)}

    def _is_expected(self, key: ChunkKey) -> bool:
        if not self._stored.num_expected:
            return False
        slot = self._tree.slot_of.get(key)
        return slot is not None and self._stored.is_expected(slot)

    def _stop_expecting(self, slot: int) -> bool:
        """The chunk in this slot is not expected any more; returns whether the policy has asked for it."""
        self._stored.num_expected -= 1
        self._evictor.withheld[slot] = 0
        has_asked = self._evictor.asked[slot] > 0
        self._evictor.asked[slot] = 0
        return has_asked

    def _publish(self, keys: Sequence[ChunkKey]) -> None:
        """Expected chunks are stored."""
        asked = [key for key in keys if self._stop_expecting(self._tree.slot_of[key])]
        for key in asked:
            if self._evictor.is_leaf(key):
                self._policy.became_leaf(key)

    def _add(self, chunks: Sequence[WrittenChunk]) -> list[int]:
        """Adds chunks that are not in the tree; returns their slots."""
        first, slots = 0, list[int]()
        while first < len(chunks):
            use, key, parent = chunks[first]
            keys = [key]
            while first + len(keys) < len(chunks):
                next_use, next_key, before = chunks[first + len(keys)]
                if next_use.use_id != use.use_id or before != keys[-1]:
                    break
                keys.append(next_key)
            slots += self._insert(use, keys, parent, 0)  # its depth is of use only where HBM has a part of the prompt
            first += len(keys)
        return slots

    def _insert(self, use: Use, keys: Sequence[ChunkKey], parent: ChunkKey, depth: int) -> list[int]:
        """Adds consecutive chunks of a prefix; returns their slots."""
        if len(keys) > len(self._slots.free):  # more are expected than there were
            self._slots.grow(self._slots.num_usable + max(len(keys), _SLOTS_ADDED))
        slots = self._slots.free.take(len(keys))
        if (highest := max(slots)) >= len(self._tree.keys):
            self._tree.reserve(highest + 1, max_slots=self._slots.num_known)
        if self.expects and (num_new := len(self._tree.keys) - len(self._evictor.withheld)) > 0:
            self._evictor.withheld.extend(bytes(num_new))
            self._evictor.asked.extend(bytes(num_new))
        before = parent if parent != NO_PARENT and parent in self._tree else None
        if before is None and parent != NO_PARENT:
            self._tree.insert_orphans(parent, keys, slots)
        else:
            self._tree.insert(before, keys, slots)
        self._policy.insert(_of_tier(use), keys, before, depth)
        return slots

    def remove(self, name: ChunkKey) -> None:
        """See the base class."""
        if name in self._unplaced:
            del self._unplaced[name]
        else:
            self._remove(name)

    def _remove(self, key: ChunkKey) -> None:
        slot, parent = self._tree.remove(key)
        self._slots.free_first((slot,))  # else what is expected and dropped would have ever new slots
        self._policy.remove(key, parent)

    def use(self, use: Use, keys: Sequence[ChunkKey]) -> None:
        """See the base class. O(runs of the prefix + chunks at its end that are not stored).

        O(keys) while chunks from before a restart are not placed.
        """
        if self._unplaced and not self._unplaced.keys().isdisjoint(keys):
            self._place(use, keys)
        if not len(self._tree):
            return
        end = len(keys)  # a chunk that was evicted, and that this request saves again, is used by that
        while end and keys[end - 1] not in self._tree:
            end -= 1
        if end:
            self._policy.touch(_of_tier(use), keys, end, self._evictor)

    def _place(self, use: Use, keys: Sequence[ChunkKey]) -> None:
        """Places the chunks of a prefix that belonged to no known one."""
        unplaced, first = self._unplaced, 0
        while first < len(keys):
            end = first
            while end < len(keys) and keys[end] in unplaced:
                del unplaced[keys[end]]
                end += 1
            if end > first:
                self._insert(use, keys[first:end], keys[first - 1] if first else NO_PARENT, first)
            first = end + 1

    def touch(self, names: Iterable[ChunkKey]) -> None:
        """See the base class. The request that reads them has used its whole prompt."""

    def evict(self, num_records: int, kept: Container[ChunkKey]) -> Sequence[ChunkKey]:
        """See the base class."""
        unplaced = (name for name in self._unplaced if name not in kept)
        evicted = list(itertools.islice(unplaced, max(0, num_records)))
        for name in evicted:
            del self._unplaced[name]
        if len(evicted) < num_records and len(self._tree):
            self._evictor.protected = kept
            self._policy.evict(num_records - len(evicted), self._evictor)
            self._evictor.protected = ()
            evicted += self._evicted
            self._evicted = []
            self._is_short = len(evicted) < num_records
        return evicted

    def _note_evicted(self, keys: Sequence[ChunkKey], slots: Sequence[int], before: ChunkKey | None) -> None:
        self._evicted += keys

    def clear(self) -> None:
        """See the base class."""
        unplaced, self._unplaced = self._unplaced, OrderedDict()
        self._evictor.withheld, self._evictor.asked = bytearray(), bytearray()
        self._stored = _Stored(self._tree, self._evictor, self._unplaced)
        self.stored = self._stored
        self._slots.clear(set())
        for container in (unplaced, *self._tree.clear(set()), *self._policy.clear()):
            self._discarded.add(container)

    def tidy(self, is_coming: Callable[[ChunkKey], bool]) -> None:
        """See the base class."""
        if self._discarded:
            self._discarded.free(MAX_FREED)
        if self._stored.num_expected:
            num_checked, self._is_short = _CHECKED_IF_SHORT if self._is_short else _CHECKED, False
            for _ in range(num_checked):
                slot = self._evictor.withheld.find(1, self._next_checked)
                self._next_checked = slot + 1
                if slot < 0:  # it begins again
                    break
                key = self._tree.keys[slot]
                if not is_coming(key):
                    self.drop_expected(key)

    def check_invariants(self) -> None:
        """See the base class."""
        self._tree.check_invariants()
        expected, evictor = self.expected(), self._evictor
        self._policy.check_invariants(self._tree.leaves() - expected, evictor)
        assert len(expected) == self._stored.num_expected == evictor.withheld.count(1), "a free slot is withheld"
        assert all(waits or not asked for waits, asked in zip(evictor.withheld, evictor.asked, strict=True))
        stored = set(self.stored)
        assert len(stored) == len(self.stored), "a chunk is placed and is not"
        assert stored.isdisjoint(expected), "what is stored is expected"


def _of_tier(use: Use) -> Use:
    """A use as this tier sees it, where it counts whatever other tiers have."""
    return use.replace(num_in_hbm=0, num_in_storage=0) if use.num_in_hbm or use.num_in_storage else use


@final
class _Stored:
    """The stored chunks of a `PolicyOrder`, or all but the expected ones.

    Attributes:
      num_expected: how many are expected.
    """

    def __init__(self, tree: PrefixTree, evictor: Evictor, unplaced: OrderedDict[ChunkKey, None]) -> None:
        self._tree = tree
        self._evictor = evictor
        self._unplaced = unplaced
        self.num_expected = 0

    def is_expected(self, slot: int) -> bool:
        """Whether the chunk in a slot is expected."""
        return self._evictor.withheld[slot] > 0

    def __contains__(self, name: object) -> bool:
        slot = self._tree.slot_of.parts[name[0]].get(name)  # type: ignore[index, call-overload]
        if slot is None:
            return name in self._unplaced
        return not (self.num_expected and self.is_expected(slot))

    def __iter__(self) -> Iterator[ChunkKey]:
        yield from self._unplaced
        for name, slot in self._tree.slot_of.items():
            if not (self.num_expected and self.is_expected(slot)):
                yield name

    def __len__(self) -> int:
        return len(self._tree) - self.num_expected + len(self._unplaced)
