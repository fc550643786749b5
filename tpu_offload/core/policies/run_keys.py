"""The keys of runs, and the run of each key, in containers that the garbage collector does not traverse.

Each of its passes visits every reference in lists and in dicts of objects: at a million keys that stops the engine for
100 ms. It does not visit tuples of keys, nor tuples of those, nor dicts from keys to ints, nor queue entries with
numbers of runs. Of a run it visits the run, its `RunKeys`, and its entries in `RunQueues`.
"""

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, final

from tpu_offload.core.chunk_table import ChunkTable, Entries
from tpu_offload.types import ChunkKey

if TYPE_CHECKING:
    from tpu_offload.core.policies.runs import Run

_SLAB = 512


@final
class RunKeys:
    """Consecutive chunk keys of a prefix, head first, in slabs. Grows and shrinks at both ends."""

    __slots__ = ("_end", "_slabs", "_starts")

    def __init__(self, keys: Sequence[ChunkKey] = ()) -> None:
        self._end = len(keys)
        self._slabs: tuple[tuple[ChunkKey, ...], ...] = (tuple(keys),)
        self._starts: tuple[int, ...] = (0,)  # where each slab begins; only differences are meaningful
        if not 0 < self._end <= _SLAB:
            self._starts = tuple(range(0, self._end, _SLAB))
            self._slabs = tuple(tuple(keys[i : i + _SLAB]) for i in self._starts)

    def __len__(self) -> int:
        return self._end - self._starts[0] if self._starts else 0

    def __getitem__(self, number: int) -> ChunkKey:
        if number == -1:  # most often
            return self._slabs[-1][-1]
        starts = self._starts
        place = self._end + number if number < 0 else starts[0] + number
        if place >= starts[-1]:
            return self._slabs[-1][place - starts[-1]]
        p = bisect_right(starts, place) - 1
        return self._slabs[p][place - starts[p]]

    def __iter__(self) -> Iterator[ChunkKey]:
        return itertools.chain.from_iterable(self._slabs)

    def index(self, key: ChunkKey) -> int:
        """The index of a key that is contained. O(keys)."""
        for start, slab in zip(self._starts, self._slabs, strict=True):
            if key in slab:
                return start - self._starts[0] + slab.index(key)
        raise ValueError("no such key")

    def extend(self, keys: Sequence[ChunkKey]) -> None:
        """Adds keys at the end. O(slabs)."""
        self._append([tuple(keys[i : i + _SLAB]) for i in range(0, len(keys), _SLAB)])

    def append_all(self, others: "RunKeys") -> None:
        """Adds the keys of `others` at the end. O(slabs)."""
        self._append(others._slabs)

    def prepend_all(self, others: "RunKeys") -> None:
        """Adds the keys of `others` at the head. O(slabs)."""
        start = self._starts[0] if self._starts else self._end
        before: list[tuple[ChunkKey, ...]] = []  # last first
        starts: list[int] = []
        slabs, first = self._slabs, self._starts
        for slab in reversed(others._slabs):
            start -= len(slab)
            if not before and slabs and len(slabs[0]) + len(slab) <= _SLAB:
                slabs, first = (slab + slabs[0], *slabs[1:]), (start, *first[1:])
            elif before and len(before[-1]) + len(slab) <= _SLAB:
                before[-1], starts[-1] = slab + before[-1], start
            else:
                before.append(slab)
                starts.append(start)
        self._slabs, self._starts = (*reversed(before), *slabs), (*reversed(starts), *first)

    def pop(self) -> ChunkKey:
        """Removes and returns the last key. O(slabs)."""
        *slabs, slab = self._slabs
        self._end -= 1
        if len(slab) > 1:
            self._slabs = (*slabs, slab[:-1])
        else:
            self._slabs, self._starts = tuple(slabs), self._starts[:-1]
        return slab[-1]

    def pop_head(self) -> None:
        """Removes the first key. O(slabs)."""
        slab, *slabs = self._slabs
        if len(slab) > 1:
            self._slabs, self._starts = (slab[1:], *slabs), (self._starts[0] + 1, *self._starts[1:])
        else:
            self._slabs, self._starts = tuple(slabs), self._starts[1:]

    def split(self, num_keys: int) -> "RunKeys":
        """Removes all but the first `num_keys` keys and returns them. O(slabs)."""
        rest = RunKeys()
        if num_keys >= len(self):
            return rest
        p, inside = self._slab_of(num_keys)
        slabs = self._slabs[p:]
        self._end = self._starts[p]
        self._slabs, self._starts = self._slabs[:p], self._starts[:p]
        if inside:
            self._append((slabs[0][:inside],))
            slabs = (slabs[0][inside:], *slabs[1:])
        rest._append(slabs)
        return rest

    def split_head(self, num_keys: int) -> "RunKeys":
        """Removes the first `num_keys` keys, fewer than all, and returns them. O(slabs)."""
        head = RunKeys()
        p, inside = self._slab_of(num_keys)
        slabs, starts = self._slabs[p:], self._starts[p:]
        head._append(self._slabs[:p])
        if inside:
            head._append((slabs[0][:inside],))
            slabs, starts = (slabs[0][inside:], *slabs[1:]), (starts[0] + inside, *starts[1:])
        self._slabs, self._starts = slabs, starts
        return head

    def _slab_of(self, number: int) -> tuple[int, int]:
        """In which slab the key with this index is, and where in it."""
        place = self._starts[0] + number
        p = bisect_right(self._starts, place) - 1
        return p, place - self._starts[p]

    def _append(self, more: Iterable[tuple[ChunkKey, ...]]) -> None:
        slabs, starts, end = list(self._slabs), list(self._starts), self._end
        for slab in more:
            if slabs and len(slabs[-1]) + len(slab) <= _SLAB:
                slabs[-1] += slab
            else:
                slabs.append(slab)
                starts.append(end)
            end += len(slab)
        self._slabs, self._starts, self._end = tuple(slabs), tuple(starts), end


@final
class RunTable:
    """The run of each key."""

    def __init__(self) -> None:
        self._numbers: ChunkTable[int] = ChunkTable()
        self._runs: dict[int, Run] = {}
        self._num_made = 0

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._numbers

    def __iter__(self) -> Iterator[ChunkKey]:
        return iter(self._numbers)

    def __getitem__(self, key: ChunkKey) -> "Run":
        return self._runs[self._numbers[key]]

    def __delitem__(self, key: ChunkKey) -> None:
        del self._numbers[key]

    def get(self, key: ChunkKey) -> "Run | None":
        """The run of a key, None if it has none."""
        number = self._numbers.get(key)
        return None if number is None else self._runs[number]

    def with_ticket(self, entry: tuple[int, int]) -> "Run | None":
        """The run with this number and ticket; None if it was removed or has another ticket by now."""
        run = self._runs.get(entry[0])
        return run if run is not None and run.ticket == entry[1] else None

    def with_life(self, entry: tuple[int, int]) -> "Run | None":
        """The run with this number and lifetime; None if it was removed or has another lifetime by now."""
        run = self._runs.get(entry[0])
        return run if run is not None and run.life == entry[1] else None

    @property
    def max_entries(self) -> int:
        """So many entries may a queue of runs have before the stale ones are removed. O(1)."""
        return 2 * len(self._runs) + 64

    def next_known(self, keys: Sequence[ChunkKey], first: int, end: int) -> int:
        """The index of the first of `keys[first:end]` that has a run; `end` if none has."""
        parts = self._numbers.parts
        for i in range(first, end):
            key = keys[i]
            if key in parts[key[0]]:
                return i
        return end

    def add(self, run: "Run") -> "Run":
        """Adds a new run and assigns its keys to it."""
        self._number(run)
        self.assign(run.keys, run)
        return run

    def add_new(self, run: "Run", keys: Sequence[ChunkKey]) -> bool:
        """Adds a new run and assigns these keys to it, unless one of them has a run; returns whether it did."""
        if not self._numbers.add_all(keys, self._num_made):
            return False
        self._number(run)
        return True

    def assign_new(self, keys: Sequence[ChunkKey], run: "Run") -> bool:
        """Assigns keys to a run, unless one of them has one; returns whether it did."""
        return self._numbers.add_all(keys, run.number)

    def assign(self, keys: Iterable[ChunkKey], run: "Run") -> None:
        """Assigns keys to a run, whichever they had before."""
        self._numbers.set_all(keys, run.number)

    def drop_all(self, keys: Iterable[ChunkKey]) -> None:
        """These keys have no run any more."""
        self._numbers.drop_all(keys)

    def remove(self, run: "Run") -> None:
        """Removes a run, which has no keys any more."""
        del self._runs[run.number]

    def clear(self) -> list[Entries]:
        """Removes all; returns what held it. O(1)."""
        held: list[Entries] = [*self._numbers.parts, self._runs]
        self._numbers, self._runs = ChunkTable(), {}
        return held

    def _number(self, run: "Run") -> None:
        run.number = self._num_made
        self._num_made += 1
        self._runs[run.number] = run

    def runs(self) -> list["Run"]:
        """All runs. For tests."""
        return list(self._runs.values())
