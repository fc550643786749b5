"""Names of what a checkpoint consists of, and of the records that hold it in storage.

    chunk                 hash of its last block, namespace
    piece of a checkpoint chunk, group (1 byte)
    part of a state       piece, number (2 bytes, big-endian)

All records of a tier have the same length: that of a chunk, or a little more if padding on a device makes the states
larger. A chunk of a window has the length of a chunk of full attention, and so one record, under the piece's name. A
state has as many records as it needs: its bytes are divided evenly, and the last part is padded.
"""

import functools
from collections.abc import Sequence
from typing import NewType

from tpu_offload.types import ChunkKey

PieceKey = NewType("PieceKey", ChunkKey)
"""Names a piece: a window chunk by the chunk of full attention of the same tokens, a state by the one before it."""

_MAX_PARTS = 2**16


@functools.cache
def group_suffix(group: int) -> bytes:
    """What `piece_key` appends to the name of a chunk."""
    return bytes((group,))


def piece_key(key: ChunkKey, group: int) -> PieceKey:
    """The name of a piece.

    Args:
      key: the chunk of full attention of the same tokens, or before the state.
      group: 0 for the first window group; states come after all windows.
    """
    return PieceKey(ChunkKey(key + group_suffix(group)))


def chunk_of(piece: PieceKey) -> ChunkKey:
    """The chunk that a piece is named after."""
    return ChunkKey(piece[:-1])


def group_of(piece: PieceKey) -> int:
    """The group of a piece, as in `piece_key`."""
    return piece[-1]


@functools.cache
def _part_suffixes(num_parts: int) -> tuple[bytes, ...]:
    assert 0 < num_parts <= _MAX_PARTS
    return tuple(number.to_bytes(2) for number in range(num_parts))


def part_keys(piece: PieceKey, num_parts: int) -> Sequence[ChunkKey]:
    """The records of a state, in the order of its bytes."""
    return [ChunkKey(piece + suffix) for suffix in _part_suffixes(num_parts)]
