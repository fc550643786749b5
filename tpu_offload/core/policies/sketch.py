"""How often chunks were used lately, whether they are resident or not."""

import zlib
from collections.abc import Sequence
from typing import final

from tpu_offload.types import ChunkKey

_MAX_COUNT = 15
_USES_PER_CHUNK = 10
# Counters of a row for each chunk of the tier. Most chunks are used once, and between two halvings there are up to ten
# times as many of them as the tier has chunks. The usual four counters in all let one in ten of those look as if it had
# been used twice, which is as many as really are. 128 bytes a chunk are nothing beside what a chunk takes.
_WIDTH = 64
_FACTOR = 0x9E3779B1  # multiplicative hashing: the high bits of the product are the place in the second row
_MASK = 2**32 - 1
_HALVED = bytes(value // 2 for value in range(256))


@final
class CountSketch:
    """A count-min sketch of two rows whose counts are halved now and then, so that old uses fade.

    Of a key's counters only the lower ones are raised ("conservative update"). Nothing depends on the seed of
    Python's own hash: the same uses give the same counts in every process.

    References:
      Einziger, Friedman, Manes: "TinyLFU: a highly efficient cache admission policy", ACM ToS 13 (2017).
      Estan, Varghese: "New directions in traffic measurement and accounting", SIGCOMM 2002 (conservative update).
    """

    def __init__(self) -> None:
        self._sample = 0
        self._num_added = 0
        self._set_width(1)

    def resize(self, num_chunks: int) -> None:
        """The tier has this many chunks. All counts are lost where that is more than there was room for."""
        self._sample = _USES_PER_CHUNK * num_chunks
        if _WIDTH * num_chunks > len(self._first):
            self._set_width(_WIDTH * num_chunks)

    def _set_width(self, num_counters: int) -> None:
        bits = min(max(4, (num_counters - 1).bit_length()), 32)
        self._first, self._second = bytearray(1 << bits), bytearray(1 << bits)
        self._shift = 32 - bits

    def add(self, keys: Sequence[ChunkKey]) -> None:
        """Counts a use of each. O(keys), and once in ten uses of each chunk O(tier)."""
        first, second, shift, mask = self._first, self._second, self._shift, len(self._first) - 1
        crc32 = zlib.crc32
        for key in keys:
            value = crc32(key)
            i, j = value & mask, (value * _FACTOR & _MASK) >> shift
            a, b = first[i], second[j]
            if a <= b and a < _MAX_COUNT:
                first[i] = a + 1
            if b <= a and b < _MAX_COUNT:
                second[j] = b + 1
        self._num_added += len(keys)
        if self._num_added >= self._sample:
            self._first, self._second = first.translate(_HALVED), second.translate(_HALVED)
            self._num_added //= 2

    def estimate(self, key: ChunkKey) -> int:
        """How often the chunk was used, up to 15; more than that where others share its counters."""
        value = zlib.crc32(key)
        a = self._first[value & (len(self._first) - 1)]
        b = self._second[(value * _FACTOR & _MASK) >> self._shift]
        return a if a < b else b
