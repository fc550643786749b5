"""Tables of a million keys that never make a call wait: they grow, and are freed, in small parts.

A dict that is full copies itself, and one that is dropped frees what it holds: with a million entries either takes
100 to 400 ms, under the interpreter's lock, whichever thread does it. So keys are spread over many dicts, and what is
not needed any more is emptied a slice at a time.
"""

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Iterator
from typing import Any, final

NUM_PARTS = 256
"""A part of a table of five million entries has 20,000, which take 1 ms to copy."""
MASK = NUM_PARTS - 1

type Entries = dict[Any, Any] | OrderedDict[Any, Any] | set[Any] | list[Any] | deque[Any]


@final
class Table[K: Hashable, V]:
    """A dict in parts. Loops over many keys look into `parts[hash(key) & MASK]` themselves.

    The order of its entries is none: it differs from process to process.
    """

    __slots__ = ("parts",)

    def __init__(self) -> None:
        self.parts: list[dict[K, V]] = [{} for _ in range(NUM_PARTS)]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __contains__(self, key: object) -> bool:
        return key in self.parts[hash(key) & MASK]

    def __iter__(self) -> Iterator[K]:
        for part in self.parts:
            yield from part

    def keys(self) -> Iterator[K]:
        """All keys."""
        return iter(self)

    def __getitem__(self, key: K) -> V:
        return self.parts[hash(key) & MASK][key]

    def __setitem__(self, key: K, value: V) -> None:
        self.parts[hash(key) & MASK][key] = value

    def __delitem__(self, key: K) -> None:
        del self.parts[hash(key) & MASK][key]

    def get(self, key: K) -> V | None:
        """The value, None if there is none."""
        return self.parts[hash(key) & MASK].get(key)

    def has_any(self, keys: Iterable[K]) -> bool:
        """Whether one of these keys is here."""
        parts = self.parts
        for key in keys:  # noqa: SIM110 (a generator takes half as long again)
            if key in parts[hash(key) & MASK]:
                return True
        return False

    def drop_all(self, keys: Iterable[K]) -> None:
        """Takes out all of these, which are here."""
        parts = self.parts
        for key in keys:
            del parts[hash(key) & MASK][key]

    def set_all(self, keys: Iterable[K], value: V) -> None:
        """Gives all of these keys one value."""
        parts = self.parts
        for key in keys:
            parts[hash(key) & MASK][key] = value


@final
class Scrap:
    """Containers that nobody needs any more. Emptied a slice at a time, because freeing one whole would be felt."""

    def __init__(self) -> None:
        self._containers: list[Entries] = []

    def __len__(self) -> int:
        """Entries left. O(containers)."""
        return sum(map(len, self._containers))

    def __bool__(self) -> bool:
        return bool(self._containers)

    def add(self, container: Entries) -> None:
        """Takes a container; the caller keeps no reference."""
        self._containers.append(container)

    def take_apart(self, num_entries: int) -> int:
        """Frees up to so many entries, where an empty container counts as one; returns how many it did."""
        num_left = num_entries
        while self._containers and num_left > 0:
            container = self._containers[-1]
            if len(container) <= num_left:
                num_left -= len(container) + 1
                self._containers.pop()
                continue
            if isinstance(container, list):
                del container[-num_left:]
            else:
                take = container.popitem if isinstance(container, dict) else container.pop
                for _ in range(num_left):
                    take()
            num_left = 0
        return num_entries - max(0, num_left)


@final
class FreeSlots:
    """Slots that are free. What was freed last is taken first, then the lowest of those never used.

    Slots that follow each other are kept as ranges, so that a million of them come and go in O(1).
    """

    def __init__(self) -> None:
        self.stack: list[int] = []  # taken from the end, before all others
        self._others: deque[range] = deque()  # taken from the left
        self._num_others = 0

    def __len__(self) -> int:
        return len(self.stack) + self._num_others

    def __iter__(self) -> Iterator[int]:
        """In the order in which they are taken."""
        yield from reversed(self.stack)
        for slots in self._others:
            yield from slots

    def take(self, num_slots: int) -> list[int]:
        """Takes so many; there are as many."""
        stack = self.stack
        if num_slots <= len(stack):
            taken = stack[: -num_slots - 1 : -1]
            del stack[-num_slots:]
            return taken
        taken = stack[::-1]
        stack.clear()
        self._num_others -= num_slots - len(taken)
        while (num_left := num_slots - len(taken)) > 0:
            slots = self._others.popleft()
            taken += slots[:num_left]
            if num_left < len(slots):
                self._others.appendleft(slots[num_left:])
        return taken

    def put_last(self, slots: range) -> None:
        """These are taken when there are no others."""
        if slots:
            self._others.append(slots)
            self._num_others += len(slots)

    def remove_from(self, first: int) -> list[range]:
        """Takes out all slots from `first` on. O(ranges + slots freed one by one)."""
        out = [range(slot, slot + 1) for slot in self.stack if slot >= first]
        self.stack = [slot for slot in self.stack if slot < first]
        others, self._others, self._num_others = self._others, deque(), 0
        for slots in others:
            self.put_last(range(slots.start, min(slots.stop, first)))
            if slots.stop > first:
                out.append(range(max(slots.start, first), slots.stop))
        return out


def without(slots: range, taken: Iterable[int]) -> list[range]:
    """The ranges that are left of these slots, ascending. O(taken)."""
    left, first = [], slots.start
    for slot in sorted(slot for slot in taken if slot in slots):
        if first < slot:
            left.append(range(first, slot))
        first = slot + 1
    if first < slots.stop:
        left.append(range(first, slots.stop))
    return left
