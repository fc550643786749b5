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
from typing import Any, cast, final

from tpu_offload.types import ChunkKey

NUM_PARTS = 256
"""One for each first byte of a key. A part of a table of five million entries has 20,000, which take 1 ms to copy."""

_SEGMENT = 512

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
        """Gives all of these different keys one value, unless one has any: then nothing changes. Whether it did."""
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
class OrderedTable:
    """An OrderedDict from chunk keys to numbers, in parts: in order, in segments, and in which of them, by key.

    Only the first segment loses keys at its old end, so only that one is an OrderedDict. The others are dicts of keys
    and numbers, into which the garbage collector does not look.
    """

    __slots__ = ("_first", "_last", "_num", "_parts", "_segments")

    def __init__(self) -> None:
        self._parts: list[dict[ChunkKey, int]] = [{} for _ in range(NUM_PARTS)]  # the segment of each key
        self._first = self._last = 0
        self._segments: dict[int, dict[ChunkKey, int]] = {0: OrderedDict()}
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._parts[key[0]]

    def __iter__(self) -> Iterator[ChunkKey]:
        for _, segment in sorted(self._segments.items()):
            yield from segment

    def __getitem__(self, key: ChunkKey) -> int:
        return self._segments[self._parts[key[0]][key]][key]

    def __setitem__(self, key: ChunkKey, number: int) -> None:
        """One that is here keeps its place; another is the last from now on."""
        part = self._parts[key[0]]
        place = part.get(key)
        if place is None:
            place = part[key] = self._last if len(self._segments[self._last]) < _SEGMENT else self._begin_segment()
            self._num += 1
        self._segments[place][key] = number

    def __delitem__(self, key: ChunkKey) -> None:
        self._take(key, self._parts[key[0]].pop(key))

    def get(self, key: ChunkKey) -> int | None:
        """The number, None if it is not here."""
        place = self._parts[key[0]].get(key)
        return None if place is None else self._segments[place][key]

    def pop(self, key: ChunkKey) -> int | None:
        """Takes it out; None if it is not here."""
        place = self._parts[key[0]].pop(key, None)
        return None if place is None else self._take(key, place)

    def first(self) -> ChunkKey | None:
        """The one that is before all others."""
        return next(iter(self._segments[self._first]), None)

    def pop_first(self) -> tuple[ChunkKey, int]:
        """Takes out the one that is before all others."""
        key = next(iter(self._segments[self._first]))
        return key, self._take(key, self._parts[key[0]].pop(key))

    def put_first(self, key: ChunkKey, number: int) -> None:
        """One that is not here is before all others from now on."""
        segment = self._segments[self._first]
        segment[key] = number
        cast(OrderedDict[ChunkKey, int], segment).move_to_end(key, last=False)
        self._parts[key[0]][key] = self._first
        self._num += 1

    def move_to_end(self, key: ChunkKey) -> None:
        """One that is here is behind all others from now on."""
        self.move_all_to_end((key,))

    def move_all_to_end(self, keys: Iterable[ChunkKey]) -> None:
        """Those, which are here, are behind all others from now on, in their order."""
        parts, segments = self._parts, self._segments
        place = self._last
        last = segments[place]
        for key in keys:
            part = parts[key[0]]
            before = part[key]
            segment = segments[before]
            number = segment.pop(key)
            if not segment and before != place:
                self._end_segment(before)
                last = segments[place]
            if len(last) >= _SEGMENT:
                place = self._begin_segment()
                last = segments[place]
            last[key] = number
            if before != place:
                part[key] = place

    def all_have(self, keys: Iterable[ChunkKey], number: int) -> bool:
        """Whether all of these are here and have this number."""
        parts, segments = self._parts, self._segments
        for key in keys:
            place = parts[key[0]].get(key)
            if place is None or segments[place][key] != number:
                return False
        return True

    def extend(self, keys: Iterable[ChunkKey], number: int) -> None:
        """Puts different ones that are not here at the end, all with one number."""
        parts, left = self._parts, iter(keys)
        while True:
            segment = self._segments[self._last]
            new = dict.fromkeys(itertools.islice(left, _SEGMENT - len(segment)), number)
            segment.update(new)
            for key in new:
                parts[key[0]][key] = self._last
            self._num += len(new)
            if len(segment) < _SEGMENT:
                return
            self._begin_segment()

    def isdisjoint(self, keys: Iterable[ChunkKey]) -> bool:
        """Whether none of these is here."""
        parts = self._parts
        return not any(key in parts[key[0]] for key in keys)

    def clear(self) -> list[Entries]:
        """Forgets all; returns what it held. O(segments)."""
        held: list[Entries] = [*self._parts, *self._segments.values()]
        self._parts = [{} for _ in range(NUM_PARTS)]
        self._first = self._last = 0
        self._segments = {0: OrderedDict()}
        self._num = 0
        return held

    def _take(self, key: ChunkKey, place: int) -> int:
        segment = self._segments[place]
        number = segment.pop(key)
        self._num -= 1
        if not segment and place != self._last:
            self._end_segment(place)
        return number

    def _end_segment(self, place: int) -> None:
        """It is empty, and not the last."""
        del self._segments[place]
        if place == self._first:
            while self._first not in self._segments:
                self._first += 1
            self._segments[self._first] = OrderedDict(self._segments[self._first])

    def _begin_segment(self) -> int:
        self._last += 1
        self._segments[self._last] = {}
        return self._last


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
