"""How often each key has been seen lately, roughly, in a fixed few bytes a key.

A count-min sketch: each key has one counter in each of four rows, shared with whatever else falls there, and the
least of the four is its count. So a count is never too low, and too high only where four others collide. Raising none
but the least of the counters makes that rarer. Every so many additions all counters are halved: what was seen once is
forgotten then, and what was popular long ago does not stay so.

References:
  Cormode and Muthukrishnan, An improved data stream summary: the count-min sketch and its applications, 2005.
  Einziger, Friedman and Manes, TinyLFU: a highly efficient cache admission policy, 2017 (the halving).
"""

from collections.abc import Sequence
from typing import final

import numpy as np
from numpy.typing import NDArray

MAX_COUNT = 15

_NUM_ROWS = 4
_KEY_NBYTES = 16  # of each key: enough of a digest
_MIN_KEYS = 256
_COUNTERS_PER_KEY = 16  # in a row. Just before a halving 4 % of new keys look as if seen; with 8, 25 %
_ADDITIONS_PER_KEY = 10  # between two halvings


@final
class Sketch:
    """Counts up to 15. Two sketches that are told the same say the same, in whatever process.

    Args:
      num_keys: how many keys matter at one time; decides memory and memory span. 64 bytes a key, rounded up to a
        power of two.
    """

    def __init__(self, num_keys: int = 0) -> None:
        self._num_keys = _MIN_KEYS
        self._num_additions = 0
        self._counts = np.zeros((_NUM_ROWS, _width(_MIN_KEYS)), np.uint8)
        self.grow(num_keys)

    @property
    def nbytes(self) -> int:
        """Memory of the counters."""
        return self._counts.nbytes

    def grow(self, num_keys: int) -> None:
        """Raises the number of keys, and keeps the counts; a smaller number changes nothing."""
        if num_keys <= self._num_keys:
            return
        self._num_keys = num_keys
        # A key's place in a wider row is its old one plus a multiple of the old width.
        repeats = _width(num_keys) // self._counts.shape[1]
        if repeats > 1:
            self._counts = np.tile(self._counts, (1, repeats))

    def add(self, keys: Sequence[bytes]) -> None:
        """Each of these was seen once more. Keys are best uniform digests; the first 16 bytes count."""
        if not keys:
            return
        places = self._places(keys)
        counts = self._lookup(places)
        raised = np.minimum(counts.min(axis=0) + 1, MAX_COUNT)
        for row, place in zip(self._counts, places, strict=True):
            np.maximum.at(row, place, raised)  # two of the keys may share a place
        self._num_additions += len(keys)
        if self._num_additions >= _ADDITIONS_PER_KEY * self._num_keys:
            self._num_additions //= 2
            self._counts >>= 1

    def counts(self, keys: Sequence[bytes]) -> list[int]:
        """How often each was seen; at most 15."""
        if not keys:
            return []
        counts: list[int] = self._lookup(self._places(keys)).min(axis=0).tolist()
        return counts

    def _lookup(self, places: NDArray[np.int64]) -> NDArray[np.uint8]:
        return np.take_along_axis(self._counts, places, axis=1)

    def _places(self, keys: Sequence[bytes]) -> NDArray[np.int64]:
        """i64[4, len(keys)]: where each key counts in each row."""
        words = np.frombuffer(b"".join([key[:_KEY_NBYTES].ljust(_KEY_NBYTES, b"\0") for key in keys]), "<u8")
        first, second = words.reshape(-1, 2).T
        mixed = _mix(first ^ _mix(second))  # digests need no mixing; other keys are spread as well as digests
        steps = np.arange(_NUM_ROWS, dtype=np.uint64)[:, None]
        places = (mixed & np.uint64(0xFFFFFFFF)) + steps * (mixed >> np.uint64(32) | np.uint64(1))
        return (places & np.uint64(self._counts.shape[1] - 1)).astype(np.int64)


def _width(num_keys: int) -> int:
    return 1 << (_COUNTERS_PER_KEY * num_keys - 1).bit_length()


def _mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of splitmix64: every bit of the outcome depends on every bit of the word."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
