"""Approximate counts of how often each key was seen lately, in a few bytes a key.

A count-min sketch: each key has one counter in each of two rows, shared with other keys, and the lower of the two is
its count. So a count is never too low, and too high only where both collide. Only the counters of a key that are no
higher than its count are incremented ("conservative update"), which makes that rarer. After a fixed number of additions
all counters are halved, so that old counts decay.

Counts are read one at a time and added a prompt at a time, so the rows are bytearrays that plain Python reads: numpy
needs more than a hundred keys to be as fast. Two rows take more memory than four for the same error, and half the time;
next to chunks of megabytes memory is cheap.

References:
  Cormode, Muthukrishnan: "An improved data stream summary: the count-min sketch and its applications", 2005.
  Estan, Varghese: "New directions in traffic measurement and accounting", SIGCOMM 2002 (conservative update).
  Einziger, Friedman, Manes: "TinyLFU: a highly efficient cache admission policy", ACM ToS 13 (2017) (the halving).
"""

import zlib
from collections.abc import Sequence
from typing import final

import numpy as np

MAX_COUNT = 15

_MIN_KEYS = 256
# In a row. Most keys are seen once, and before a halving there are up to ten times more of them than matter. Then 2 %
# of new keys look as if seen; with 32 it is 7 %, nearly as many as are really reused.
_COUNTERS_PER_KEY = 64
_ADDITIONS_PER_KEY = 10  # between two halvings
_HASH_BITS = 32
_HASH_MASK = 2**_HASH_BITS - 1
_FACTOR = 0x9E3779B1  # multiplicative hashing: the high bits of the product are the place in the second row


@final
class Sketch:
    """Counts up to 15. Deterministic: the same additions give the same counts in every process.

    Args:
      num_keys: how many keys matter at one time; determines its memory (128 bytes a key, rounded up to a power of two)
        and how long a count lasts.
    """

    def __init__(self, num_keys: int = 0) -> None:
        self._num_keys = _MIN_KEYS
        self._num_additions = 0
        bits = _width_bits(_MIN_KEYS)
        self._first, self._second = bytearray(1 << bits), bytearray(1 << bits)
        self._shift = _HASH_BITS - bits
        self.grow(num_keys)

    @property
    def nbytes(self) -> int:
        """Memory of the counters."""
        return len(self._first) + len(self._second)

    def grow(self, num_keys: int) -> None:
        """Raises the number of keys, and keeps the counts; a smaller number changes nothing. O(num_keys)."""
        if num_keys <= self._num_keys:
            return
        self._num_keys = num_keys
        bits = _width_bits(num_keys)
        repeats = (1 << bits) // len(self._first)
        if repeats > 1:
            # A key's place gets more bits: at the upper end in the first row, at the lower end in the second.
            self._first = self._first * repeats
            self._second = bytearray(np.repeat(np.frombuffer(self._second, np.uint8), repeats))
            self._shift = _HASH_BITS - bits

    def add(self, keys: Sequence[bytes]) -> None:
        """Counts each key once more. Amortized O(keys)."""
        first, second, shift, mask = self._first, self._second, self._shift, len(self._first) - 1
        crc32 = zlib.crc32
        for key in keys:
            value = crc32(key)
            i, j = value & mask, (value * _FACTOR & _HASH_MASK) >> shift
            a, b = first[i], second[j]
            if a <= b and a < MAX_COUNT:
                first[i] = a + 1
            if b <= a and b < MAX_COUNT:
                second[j] = b + 1
        self._num_additions += len(keys)
        if self._num_additions >= _ADDITIONS_PER_KEY * self._num_keys:
            self._num_additions //= 2
            for row in (first, second):
                counts = np.frombuffer(row, np.uint8)
                counts >>= 1

    def count(self, key: bytes) -> int:
        """How often the key was seen; at most 15."""
        value = zlib.crc32(key)
        a = self._first[value & (len(self._first) - 1)]
        b = self._second[(value * _FACTOR & _HASH_MASK) >> self._shift]
        return a if a < b else b


def _width_bits(num_keys: int) -> int:
    return min((_COUNTERS_PER_KEY * num_keys - 1).bit_length(), _HASH_BITS)
