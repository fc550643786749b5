"""Tables of a million keys that never make a call wait: they grow, and are freed, in small parts.

A dict that is full copies itself, and one that is dropped frees what it holds: with a million entries either takes
100 to 400 ms, under the interpreter's lock, whichever thread does it. So keys are spread over many dicts, and what is
not needed any more is emptied a slice at a time.
"""

import functools
import itertools
import operator
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from typing import Any, final

from tpu_offload.types import ChunkKey

NUM_PARTS = 256
"""One for each first byte of a key. A part of a table of five million entries has 20,000, which take 1 ms to copy."""

type Entries = dict[Any, Any] | OrderedDict[Any, Any] | set[Any] | list[Any] | deque[Any]


@final
class Table[V]:
    """A dict by chunk key, in parts. Loops over many keys look into `parts[key[0]]` themselves.

    Keys begin with a hash, so their first bytes are spread evenly; where they are not, parts are larger than meant.
    """

    __slots__ = ("parts",)

    def __init__(self) -> None:
        self.parts: list[dict[ChunkKey, V]] = [{} for _ in range(NUM_PARTS)]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self.parts[key[0]]

    def __iter__(self) -> Iterator[ChunkKey]:
        for part in self.parts:
            yield from part

    def keys(self) -> Iterator[ChunkKey]:
        """All keys."""
        return iter(self)

    def __getitem__(self, key: ChunkKey) -> V:
        return self.parts[key[0]][key]

    def __setitem__(self, key: ChunkKey, value: V) -> None:
        self.parts[key[0]][key] = value

    def __delitem__(self, key: ChunkKey) -> None:
        del self.parts[key[0]][key]

    def get(self, key: ChunkKey) -> V | None:
        """The value, None if there is none."""
        return self.parts[key[0]].get(key)

    def add_all(self, keys: Iterable[ChunkKey], value: V) -> bool:
        """Gives all these keys, each another, one value, unless one has any: then nothing changes; whether it did."""
        parts = self.parts
        for key in keys:
            part = parts[key[0]]
            if key in part:
                self.drop_all(itertools.takewhile(functools.partial(operator.ne, key), keys))
                return False
            part[key] = value
        return True

    def drop_all(self, keys: Iterable[ChunkKey]) -> None:
        """Takes out all of these, which are here."""
        parts = self.parts
        for key in keys:
            del parts[key[0]][key]

    def set_all(self, keys: Iterable[ChunkKey], value: V) -> None:
        """Gives all of these keys one value."""
        parts = self.parts
        for key in keys:
            parts[key[0]][key] = value


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
        """Takes so many, or all that there are."""
        stack = self.stack
        if num_slots <= len(stack):
            taken = stack[: -num_slots - 1 : -1]
            del stack[-num_slots:]
            return taken
        taken = stack[::-1]
        stack.clear()
        num_slots = min(num_slots, len(taken) + self._num_others)
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
