"""Block hashes and chunk keys.

A block's hash covers its own tokens and, through its parent's hash, all tokens of the prefix: equal hashes mean equal
prefixes. The chain starts at a root that covers the layout's fingerprint and the request's `cache_salt`, so that
models, layouts and tenants never share a chunk. An engine that hashes its blocks itself (vLLM does) passes those hashes
instead.

References:
  vLLM, automatic prefix caching: hash(parent block hash, block tokens, extra keys).
"""

import array
import hashlib
import itertools
import operator
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, final, overload

import numpy as np

from tpu_offload.errors import RequestError
from tpu_offload.types import BlockHash, ChunkKey
from tpu_offload.values import as_count, error_text, one_line

_DIGEST_NBYTES = 16
_MAX_TOKEN = 2**63 - 1
_NAMESPACE_NBYTES = 8


class BlockHasher:
    """Hashes the full blocks of a token sequence.

    Args:
      fingerprint: `KVLayout.fingerprint()` of the cache that holds the blocks.
      block_size: tokens in a block.
    Raises:
      RequestError: the fingerprint is not bytes, or the size is not a positive integer.
    """

    def __init__(self, fingerprint: bytes, *, block_size: int) -> None:
        size = as_count(block_size, least=1)
        if not isinstance(fingerprint, bytes) or size is None:
            raise RequestError(
                f"a hasher with fingerprint={one_line(fingerprint)} and block_size={one_line(block_size)}; expected "
                "bytes and a positive integer"
            )
        self._fingerprint = fingerprint
        self._block_size = size

    def root(self, cache_salt: str = "") -> BlockHash:
        """The parent hash of the first block."""
        try:
            salt = cache_salt.encode()
        except (AttributeError, UnicodeEncodeError) as e:
            raise RequestError(f"the cache_salt is {cache_salt!r:.100}; expected valid text") from e
        digest = hashlib.blake2b(self._fingerprint + struct.pack("<q", len(salt)) + salt, digest_size=_DIGEST_NBYTES)
        return BlockHash(digest.digest())

    def extend(self, hashes: list[BlockHash], tokens: Sequence[int], *, cache_salt: str = "") -> None:
        """Appends the hashes of the full blocks of `tokens` that `hashes` does not cover yet.

        Args:
          hashes: hashes of the first `len(hashes)` blocks of this sequence; extended in place.
          tokens: all tokens of the sequence so far, each in [0, 2**63): a list, an array, any sequence.
          cache_salt: the request's salt; the same in every call for one sequence.
        Raises:
          RequestError: invalid token ids or salt; nothing was appended.
        """
        if not isinstance(hashes, list) or (hashes and type(hashes[-1]) is not bytes):
            raise RequestError(f"the hashes so far are {one_line(hashes)}; expected a list of bytes to extend")
        parent = hashes[-1] if hashes else self.root(cache_salt)
        size = self._block_size
        first = len(hashes) * size
        if type(tokens) is list:
            end = len(tokens) // size * size
            nbytes = _token_bytes(tokens[first:end]) if first < end else b""
        else:
            nbytes = _other_token_bytes(tokens, first, size)
        width = 8 * size
        for start in range(0, len(nbytes), width):
            digest = hashlib.blake2b(parent + nbytes[start : start + width], digest_size=_DIGEST_NBYTES).digest()
            parent = BlockHash(digest)
            hashes.append(parent)


def _other_token_bytes(tokens: Any, first: int, block_size: int) -> bytes:
    """The bytes of the tokens from `first` to the end of the last full block, for any kind of sequence."""
    if not hasattr(tokens, "__getitem__") or isinstance(tokens, (str, bytes, bytearray, Mapping)):
        raise RequestError(f"the tokens are a {type(tokens).__name__}; expected a sequence of integers")
    try:
        end = len(tokens) // block_size * block_size
        if hasattr(tokens, "__array__"):  # a device array is fetched in one transfer
            tokens = np.asarray(tokens)
        sliced = isinstance(tokens, (tuple, np.ndarray, array.array, memoryview))
        wanted = tokens[first:end] if sliced else list(itertools.islice(tokens, first, end))
        if isinstance(wanted, np.ndarray) and wanted.dtype == object:
            wanted = wanted.tolist()
    except Exception as e:  # a caller's object may raise anything
        raise RequestError(f"the tokens cannot be read: {error_text(e)}") from e
    return _token_bytes(wanted) if len(wanted) else b""


def _token_bytes(tokens: Sequence[int]) -> bytes:
    """8 bytes a token, little-endian."""
    try:
        ids = np.asarray(tokens)
    except (TypeError, ValueError) as e:
        raise RequestError(f"the tokens cannot be read: {one_line(e)}") from e
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or int(ids.min()) < 0 or int(ids.max()) > _MAX_TOKEN:
        raise RequestError(f"the tokens are {one_line(tokens)}; expected integers from 0 to 2**63 - 1")
    return ids.astype("<i8").tobytes()


def key_namespace(fingerprint: bytes, *, blocks_per_chunk: int, group_id: int = 0, epoch: int = 0) -> bytes:
    """The 8-byte suffix of every chunk key: it separates chunks with equal tokens.

    It includes the fingerprint, as the hashes of `BlockHasher` do, because an engine's own block hashes do not cover
    the layout. `epoch`, of 64 bits, changes with each reset of the cache: keys of different epochs are never equal.
    """
    text = fingerprint + struct.pack("<IHQ", blocks_per_chunk, group_id, epoch)
    return hashlib.blake2b(text, digest_size=_NAMESPACE_NBYTES).digest()


@final
class PrefixKeys(Sequence[ChunkKey]):
    """The chunk keys of a prefix, created lazily. Slices are O(1) and do not include later extensions.

    Most keys of a long prefix are never needed: a few lookups find how much of it is resident.

    Args:
      namespace: the suffix of the keys.
    """

    __slots__ = ("_end", "_first", "_hashes", "_namespace")

    def __init__(self, namespace: bytes) -> None:
        self._hashes: list[BlockHash] = []  # of the last block of each chunk; append-only, shared with slices
        self._namespace = namespace
        self._first = self._end = 0

    def extend(self, hashes: Iterable[BlockHash]) -> None:
        """Appends chunks, given the hashes of their last blocks. Not for slices."""
        assert len(self._hashes) == self._end, "a slice"
        self._hashes += hashes
        self._end = len(self._hashes)

    def __len__(self) -> int:
        return self._end - self._first

    @overload
    def __getitem__(self, number: int) -> ChunkKey: ...
    @overload
    def __getitem__(self, number: slice) -> "PrefixKeys": ...
    def __getitem__(self, number: int | slice) -> "ChunkKey | PrefixKeys":
        if type(number) is int:
            index = number + (self._first if number >= 0 else self._end)
            if not self._first <= index < self._end:
                raise IndexError(f"chunk {number} of {len(self)}")
            return self._hashes[index] + self._namespace  # type: ignore[return-value]  # ChunkKey() is a slow call
        first, end, step = number.indices(len(self))  # type: ignore[union-attr]
        assert step == 1, "slices are contiguous"
        part = PrefixKeys(self._namespace)
        part._hashes = self._hashes
        part._first, part._end = self._first + first, self._first + max(first, end)
        return part

    def __iter__(self) -> Iterator[ChunkKey]:
        hashes = self._hashes if len(self) == len(self._hashes) else self._hashes[self._first : self._end]
        keys: Iterator[ChunkKey] = map(operator.add, hashes, itertools.repeat(self._namespace))
        return keys

    def __reversed__(self) -> Iterator[ChunkKey]:
        return reversed(list(self))


def chunk_keys(
    block_hashes: Sequence[BlockHash], *, blocks_per_chunk: int, namespace: bytes, first_chunk: int = 0
) -> PrefixKeys:
    """Keys of the full chunks of a prefix, from `first_chunk` on.

    The hash of a chunk's last block covers all tokens up to the chunk's end, so it identifies the chunk.
    """
    keys = PrefixKeys(namespace)
    first = (first_chunk + 1) * blocks_per_chunk - 1
    keys.extend(itertools.islice(block_hashes, first, None, blocks_per_chunk))
    return keys


def last_block_hash(key: ChunkKey) -> BlockHash:
    """The hash of a chunk's last block, as the engine passed it."""
    return BlockHash(key[:-_NAMESPACE_NBYTES])
