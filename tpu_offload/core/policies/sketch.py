"""How often chunks were used lately, in four bytes a chunk of the tier, whether they are resident or not."""

import zlib
from collections.abc import Sequence
from typing import final

import numpy as np

from tpu_offload.types import ChunkKey

_MAX_COUNT = 15
_USES_PER_CHUNK = 10
# Multiplicative hashing: the high bits of the product are the place of a key in a row.
_FACTORS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F)
_ROW_FACTORS = np.array(_FACTORS, np.uint32)[:, np.newaxis]
_MASK = 2**32 - 1
_WIDTH = 32
_FEW = 6  # below that numpy costs more than it saves


@final
class CountSketch:
    """A count-min sketch of four rows whose counts are halved now and then, so that old uses fade.

    Nothing depends on the seed of Python's own hash: the same uses give the same counts in every process.

    References:
      Einziger, Friedman, Manes: "TinyLFU: a highly efficient cache admission policy", ACM ToS 13 (2017).
    """

    def __init__(self) -> None:
        self._sample = 0
        self._num_added = 0
        self._set_width(16)

    def resize(self, num_chunks: int) -> None:
        """The tier has this many chunks. All counts are lost where that is more than there was room for."""
        self._sample = _USES_PER_CHUNK * num_chunks
        if _WIDTH * num_chunks > self._width:
            self._set_width(num_chunks)

    def _set_width(self, num_chunks: int) -> None:
        bits = max(4, (_WIDTH * num_chunks - 1).bit_length())
        self._width = 1 << bits
        self._shift = 32 - bits
        self._counts = bytearray(len(_FACTORS) * self._width)
        self._array = np.frombuffer(self._counts, np.uint8)
        self._starts = tuple(row * self._width for row in range(len(_FACTORS)))
        self._row_starts = np.array(self._starts, np.int64)[:, np.newaxis]

    def add(self, keys: Sequence[ChunkKey]) -> None:
        """Counts a use of each. O(keys), and once in ten uses of each chunk O(tier)."""
        if len(keys) < _FEW:
            counts = self._counts
            for key in keys:
                places = self._places(key)
                least = min([counts[place] for place in places])
                for place in places:
                    if counts[place] == least < _MAX_COUNT:
                        counts[place] += 1
        else:
            hashes = np.fromiter(map(zlib.crc32, keys), np.uint32, len(keys))
            cells = ((hashes * _ROW_FACTORS) >> np.uint32(self._shift)) + self._row_starts
            found = self._array[cells]
            self._array[cells] = np.maximum(found, np.minimum(found.min(axis=0) + 1, _MAX_COUNT))
        self._num_added += len(keys)
        if self._num_added >= self._sample:
            self._array >>= 1
            self._num_added //= 2

    def estimate(self, key: ChunkKey) -> int:
        """How often the chunk was used, at least; more where others share all its counters."""
        counts = self._counts
        return min([counts[place] for place in self._places(key)])

    def _places(self, key: ChunkKey) -> list[int]:
        value, shift = zlib.crc32(key), self._shift
        return [
            start + ((value * factor & _MASK) >> shift) for start, factor in zip(self._starts, _FACTORS, strict=True)
        ]
