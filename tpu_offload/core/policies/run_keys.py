"""The keys of runs, and the run of each key, in containers that the garbage collector does not traverse.

Each of its passes visits every reference in lists and in dicts of objects: at a million keys that stops the engine for
100 ms. It does not visit tuples of keys, nor dicts from keys to ints.
"""

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, final

from tpu_offload.core.chunk_table import ChunkTable, Entries
from tpu_offload.types import ChunkKey

if TYPE_CHECKING:
    from tpu_offload.core.policies.runs import Run

_PIECE = 512


@final
class RunKeys:
    """Consecutive chunk keys of a prefix, head first, in pieces. Grows and shrinks at both ends."""

    __slots__ = ("_end", "_pieces", "_starts")

    def __init__(self, keys: Sequence[ChunkKey] = ()) -> None:
        self._end = len(keys)
        self._pieces: list[tuple[ChunkKey, ...]] = [tuple(keys)]
        self._starts = [0]  # where each piece begins; only differences are meaningful
        if not 0 < self._end <= _PIECE:
            self._starts = list(range(0, self._end, _PIECE))
            self._pieces = [tuple(keys[i : i + _PIECE]) for i in self._starts]

    def __len__(self) -> int:
        return self._end - self._starts[0] if self._starts else 0

    def __getitem__(self, number: int) -> ChunkKey:
        if number == -1:  # most often
            return self._pieces[-1][-1]
        starts = self._starts
        place = self._end + number if number < 0 else starts[0] + number
        if place >= starts[-1]:
            return self._pieces[-1][place - starts[-1]]
        p = bisect_right(starts, place) - 1
        return self._pieces[p][place - starts[p]]

    def __iter__(self) -> Iterator[ChunkKey]:
        return itertools.chain.from_iterable(self._pieces)

    def index(self, key: ChunkKey) -> int:
        """The index of a key that is contained. O(keys)."""
        for start, piece in zip(self._starts, self._pieces, strict=True):
            if key in piece:
                return start - self._starts[0] + piece.index(key)
        raise ValueError("no such key")

    def extend(self, keys: Sequence[ChunkKey]) -> None:
        """Adds keys at the end."""
        for i in range(0, len(keys), _PIECE):
            self._append(tuple(keys[i : i + _PIECE]))

    def append_all(self, others: "RunKeys") -> None:
        """Adds the keys of `others` at the end. O(pieces)."""
        for piece in others._pieces:
            self._append(piece)

    def prepend_all(self, others: "RunKeys") -> None:
        """Adds the keys of `others` at the head. O(pieces)."""
        for piece in reversed(others._pieces):
            if self._pieces and len(self._pieces[0]) + len(piece) <= _PIECE:
                self._pieces[0] = piece + self._pieces[0]
                self._starts[0] -= len(piece)
            else:
                start = self._starts[0] if self._starts else self._end
                self._pieces.insert(0, piece)
                self._starts.insert(0, start - len(piece))

    def pop(self) -> ChunkKey:
        """Removes and returns the last key."""
        piece = self._pieces.pop()
        self._end -= 1
        if len(piece) > 1:
            self._pieces.append(piece[:-1])
        else:
            self._starts.pop()
        return piece[-1]

    def pop_head(self) -> None:
        """Removes the first key."""
        piece = self._pieces[0]
        if len(piece) > 1:
            self._pieces[0] = piece[1:]
            self._starts[0] += 1
        else:
            del self._pieces[0], self._starts[0]

    def split(self, num_keys: int) -> "RunKeys":
        """Removes all but the first `num_keys` keys and returns them. O(pieces of those)."""
        rest = RunKeys()
        if num_keys >= len(self):
            return rest
        place = self._starts[0] + num_keys
        p = bisect_right(self._starts, place) - 1
        inside = place - self._starts[p]
        pieces = self._pieces[p:]
        del self._pieces[p:], self._starts[p:]
        self._end = place - inside
        if inside:
            self._append(pieces[0][:inside])
            pieces[0] = pieces[0][inside:]
        for piece in pieces:
            rest._append(piece)
        return rest

    def split_head(self, num_keys: int) -> "RunKeys":
        """Removes the first `num_keys` keys, fewer than all, and returns them. O(pieces)."""
        head = RunKeys()
        place = self._starts[0] + num_keys
        p = bisect_right(self._starts, place) - 1
        for piece in self._pieces[:p]:
            head._append(piece)
        inside = place - self._starts[p]
        if inside:
            head._append(self._pieces[p][:inside])
            self._pieces[p] = self._pieces[p][inside:]
            self._starts[p] = place
        del self._pieces[:p], self._starts[:p]
        return head

    def _append(self, piece: tuple[ChunkKey, ...]) -> None:
        if self._pieces and len(self._pieces[-1]) + len(piece) <= _PIECE:
            self._pieces[-1] += piece
        else:
            self._pieces.append(piece)
            self._starts.append(self._end)
        self._end += len(piece)


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
