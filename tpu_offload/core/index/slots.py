"""Which slots of the host tier are free, in which order they are handed out, and which must not be."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import final


@final
class FreeSlots:
    """Free slots: the last one evicted from is handed out first, then the lowest of those never used.

    Consecutive slots are kept as ranges, so that adding or taking a million of them is O(1).

    Attributes:
      num: their number.
    """

    def __init__(self) -> None:
        self._stack: list[int] = []  # handed out from its end, before all others
        self._others: deque[range] = deque()  # handed out from the left
        self.num = 0

    def __len__(self) -> int:
        return self.num

    def __iter__(self) -> Iterator[int]:
        """In the order in which they are handed out."""
        yield from reversed(self._stack)
        for slots in self._others:
            yield from slots

    def take(self, num_slots: int) -> list[int]:
        """Hands out `num_slots` slots, or all there are."""
        stack = self._stack
        if num_slots == 1 and stack:  # a request that generates
            self.num -= 1
            return [stack.pop()]
        if not num_slots:
            return []
        num_slots = min(num_slots, self.num)
        self.num -= num_slots
        if num_slots <= len(stack):
            taken = stack[len(stack) - num_slots :][::-1]
            del stack[len(stack) - num_slots :]
            return taken
        taken = stack[::-1]
        stack.clear()
        while (num_left := num_slots - len(taken)) > 0:
            slots = self._others.popleft()
            taken += slots[:num_left]
            if num_left < len(slots):
                self._others.appendleft(slots[num_left:])
        return taken

    def put_first(self, slots: list[int]) -> None:
        """Adds slots that are handed out before all others, the last one first."""
        self._stack += slots
        self.num += len(slots)

    def put_last(self, slots: range) -> None:
        """Adds slots that are handed out after all others."""
        if slots:
            self._others.append(slots)
            self.num += len(slots)

    def remove_from(self, first: int) -> list[range]:
        """Removes and returns all slots from `first` on. O(ranges + slots put first)."""
        removed = [range(slot, slot + 1) for slot in self._stack if slot >= first]
        self._stack = [slot for slot in self._stack if slot < first]
        others, self._others, self.num = self._others, deque(), len(self._stack)
        for slots in others:
            self.put_last(range(slots.start, min(slots.stop, first)))
            if slots.stop > first:
                removed.append(range(max(slots.start, first), slots.stop))
        return removed


@final
class SlotAllocator:
    """Slots of one host pool that hold nothing: they are free, quarantined or unusable.

    Args:
      first: the lowest slot.

    Attributes:
      free: slots that hold nothing and may be handed out.
      num_usable: slots that every worker has allocated.
      num_known: slots that exist: those that ever did, less those that were vacated.
    """

    def __init__(self, *, first: int = 0) -> None:
        self.free = FreeSlots()
        self._first = first
        self.num_usable = 0
        self.num_known = 0
        # A late copy may still write into these.
        self._quarantined: set[int] = set()
        # A restarted worker has not allocated these again. All are behind the usable ones.
        self._unusable: list[range] = []

    @property
    def num_quarantined(self) -> int:
        """Slots that a late copy may still write."""
        return len(self._quarantined)

    @property
    def quarantined(self) -> frozenset[int]:
        """Those slots. For tests."""
        return frozenset(self._quarantined)

    def grow(self, num_slots: int) -> None:
        """Raises the number of usable slots to `num_slots`, which is more than there are."""
        self.num_usable, end = num_slots, self._first + num_slots
        unusable, self._unusable = sorted(self._unusable, key=lambda slots: slots.start), []
        # Low slots are handed out first, so that a pool that is never full touches little memory.
        for slots in [*unusable, range(self._first + self.num_known, end)]:
            self.free.put_last(range(slots.start, min(slots.stop, end)))
            if slots.stop > end:
                self._unusable.append(range(max(slots.start, end), slots.stop))
        self.num_known = max(self.num_known, num_slots)

    def shrink(self, num_slots: int) -> None:
        """Lowers the number of usable slots to `num_slots`, unless there are fewer."""
        self.num_usable = min(self.num_usable, num_slots)
        self._unusable += self.free.remove_from(self._end)

    def held_from(self, num_slots: int) -> range:
        """The slots from the `num_slots`-th on if something holds one of them, else none. They are not usable."""
        slots = range(self._first + num_slots, self._first + self.num_known)
        num_empty = sum(max(0, unusable.stop - max(unusable.start, slots.start)) for unusable in self._unusable)
        return slots if num_empty < len(slots) else range(0)

    def forget_from(self, num_slots: int) -> None:
        """The slots from the `num_slots`-th on exist no more; nothing holds them. `grow` makes new ones."""
        if num_slots < self.num_known:
            self.num_known, end = num_slots, self._first + num_slots
            self._unusable = [range(u.start, min(u.stop, end)) for u in self._unusable if u.start < end]

    def quarantine(self, slots: Iterable[int]) -> None:
        """A late copy may still write into these slots: they are not free before `end_quarantine`."""
        self._quarantined.update(slots)

    def end_quarantine(self, slots: Iterable[int]) -> None:
        """No copy will write into these slots any more: they are free."""
        for slot in slots:
            self._quarantined.remove(slot)
            self._put_last(slot)

    def release(self, slot: int) -> None:
        """A slot has lost its chunk, though not to eviction: it is handed out last, and not while quarantined."""
        if slot not in self._quarantined:
            self._put_last(slot)

    def free_first(self, slots: Iterable[int]) -> None:
        """Slots have lost what they held to eviction: they are handed out first, unless quarantined or unusable."""
        usable: list[int] = []
        end = self._end
        for slot in slots:
            if slot in self._quarantined:
                continue
            if slot < end:
                usable.append(slot)
            else:
                self._unusable.append(range(slot, slot + 1))
        self.free.put_first(usable[::-1])

    def free_evicted(self, slots: list[int]) -> None:
        """As `free_first`, for slots of which none is quarantined; the last one is handed out first. Fast."""
        if self.num_usable < self.num_known:
            self.free_first(slots[::-1])
        else:
            self.free.put_first(slots)

    def clear(self, occupied: set[int]) -> None:
        """All slots but the `occupied` and the quarantined ones lose their chunks. O(those), however many slots."""
        held = occupied | self._quarantined
        self.free = FreeSlots()
        for slots in without(range(self._first, self._end), held):
            self.free.put_last(slots)
        self._unusable = without(range(self._end, self._first + self.num_known), held)

    def check_invariants(self, occupied: Iterable[int]) -> None:
        """Raises AssertionError unless each slot is in one place, those `occupied` by chunks included. O(slots)."""
        free = list(self.free)
        unusable = [slot for slots in self._unusable for slot in slots]
        owners = [*occupied, *free, *self._quarantined, *unusable]
        known = range(self._first, self._first + self.num_known)
        assert sorted(owners) == list(known), "a slot has no owner or two"
        assert len(free) == len(self.free)
        assert all(slot < self._end for slot in free), "a slot is free that a worker does not have"
        assert all(slot >= self._end for slot in unusable), "a slot is withheld that every worker has"

    @property
    def _end(self) -> int:
        """The end of the usable slots."""
        return self._first + self.num_usable

    def _put_last(self, slot: int) -> None:
        if slot < self._end:
            self.free.put_last(range(slot, slot + 1))
        else:
            self._unusable.append(range(slot, slot + 1))


@final
class TierSlots:
    """The slots of the host tier, by their pool.

    Args:
      first_slots: by pool, the number of its first slot (see `Pool`).

    Attributes:
      pools: by pool, its slots.
    """

    def __init__(self, first_slots: Sequence[int] = (0,)) -> None:
        self.pools = [SlotAllocator(first=first) for first in first_slots]
        self._first_slots = [*first_slots]
        self._last_pool = len(self.pools) - 1

    def pool_of(self, slot: int) -> int:
        """The pool of a slot."""
        pool = self._last_pool
        while slot < self._first_slots[pool]:
            pool -= 1
        return pool

    def count(self, slots: Sequence[int], pool: int) -> int:
        """How many of these slots are of a pool."""
        if not self._last_pool:
            return 0 if pool else len(slots)
        return sum([self.pool_of(slot) == pool for slot in slots])

    def has_usable(self, slot: int) -> bool:
        """Whether every worker has allocated a slot, and its memory is not about to be given away."""
        pool = self.pool_of(slot)
        return slot - self._first_slots[pool] < self.pools[pool].num_usable

    def quarantine(self, slots: Sequence[int]) -> None:
        """See `SlotAllocator.quarantine`."""
        for pool, own in self._by_pool(slots):
            pool.quarantine(own)

    def end_quarantine(self, slots: Sequence[int]) -> None:
        """See `SlotAllocator.end_quarantine`."""
        for pool, own in self._by_pool(slots):
            pool.end_quarantine(own)

    def free_first(self, slots: Sequence[int]) -> None:
        """See `SlotAllocator.free_first`."""
        for pool, own in self._by_pool(slots):
            pool.free_first(own)

    def clear(self, occupied: set[int]) -> None:
        """See `SlotAllocator.clear`."""
        for pool in self.pools:
            pool.clear(occupied)

    @property
    def num_quarantined(self) -> int:
        """Slots that a late copy may still write."""
        return sum([pool.num_quarantined for pool in self.pools])

    @property
    def quarantined(self) -> frozenset[int]:
        """Those slots. For tests."""
        return frozenset().union(*[pool.quarantined for pool in self.pools])

    def check_invariants(self, occupied: Iterable[int]) -> None:
        """See `SlotAllocator.check_invariants`."""
        occupied = list(occupied)
        for pool, slots in enumerate(self.pools):
            slots.check_invariants([slot for slot in occupied if self.pool_of(slot) == pool])

    def _by_pool(self, slots: Sequence[int]) -> Iterable[tuple[SlotAllocator, Sequence[int]]]:
        if not self._last_pool or not slots or max(slots) < self._first_slots[1]:  # nearly always
            return ((self.pools[0], slots),)
        own: list[list[int]] = [[] for _ in self.pools]
        for slot in slots:
            own[self.pool_of(slot)].append(slot)
        return zip(self.pools, own, strict=True)


def without(slots: range, taken: Iterable[int]) -> list[range]:
    """The ranges of `slots` that are left without the `taken` ones, ascending. O(taken)."""
    left, first = [], slots.start
    for slot in sorted(slot for slot in taken if slot in slots):
        if first < slot:
            left.append(range(first, slot))
        first = slot + 1
    if first < slots.stop:
        left.append(range(first, slots.stop))
    return left


def overlaps(slots: Sequence[int], first: int, end: int) -> bool:
    """Whether one of these slots is among `first` to `end - 1`. Mostly decided by the lowest and the highest."""
    if not slots or max(slots) < first or min(slots) >= end:
        return False
    return any(first <= slot < end for slot in slots)
