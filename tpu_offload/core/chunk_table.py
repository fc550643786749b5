"""Tables of a million chunk keys that never stall a step: they grow, and are freed, in small parts.

A dict that is full copies itself, and one that is deleted frees what it holds: with a million entries either takes
100 to 400 ms, under the interpreter's lock, in whichever thread. So keys are spread over many dicts, and discarded
containers are freed incrementally.
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
class ChunkTable[V]:
    """A dict by chunk key, in parts. Loops over many keys look into `parts[key[0]]` themselves.

    Keys begin with a hash, so their first bytes are spread evenly; where they are not, parts are larger than intended.
    """

    __slots__ = ("parts",)

    def __init__(self) -> None:
        self.parts: list[dict[ChunkKey, V]] = [{} for _ in range(NUM_PARTS)]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self.parts[key[0]]

    def __iter__(self) -> Iterator[ChunkKey]:
        return itertools.chain.from_iterable(filter(None, self.parts))

    def keys(self) -> Iterator[ChunkKey]:
        """All keys."""
        return iter(self)

    def values(self) -> Iterator[V]:
        """All values, in the order of `keys`."""
        return itertools.chain.from_iterable(map(dict.values, filter(None, self.parts)))

    def items(self) -> Iterator[tuple[ChunkKey, V]]:
        """All keys with their values, in the order of `keys`."""
        return itertools.chain.from_iterable(map(dict.items, filter(None, self.parts)))

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
        """Gives one value to all of these different keys, unless one has a value: then nothing changes.

        Returns:
          Whether it did.
        """
        parts = self.parts
        for key in keys:
            part = parts[key[0]]
            if key in part:
                self.drop_all(itertools.takewhile(functools.partial(operator.ne, key), keys))
                return False
            part[key] = value
        return True

    def drop_all(self, keys: Iterable[ChunkKey]) -> None:
        """Removes all of these keys; each has a value."""
        parts = self.parts
        for key in keys:
            del parts[key[0]][key]

    def set_all(self, keys: Iterable[ChunkKey], value: V) -> None:
        """Gives one value to all of these keys."""
        parts = self.parts
        for key in keys:
            parts[key[0]][key] = value


@final
class Discarded:
    """Discarded containers, freed a slice at a time because freeing a whole one would stall a step."""

    def __init__(self) -> None:
        self._containers: list[Entries] = []

    def __len__(self) -> int:
        """Entries left. O(containers)."""
        return sum(map(len, self._containers))

    def __bool__(self) -> bool:
        return bool(self._containers)

    def add(self, container: Entries) -> None:
        """Takes a container; the caller keeps no reference."""
        if container:  # a table has many parts, and what is cleared often is mostly empty
            self._containers.append(container)

    def free(self, num_entries: int) -> int:
        """Frees up to `num_entries` entries, where an empty container counts as one; returns how many."""
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
