"""Block hashes and chunk keys.

A block's hash covers its own tokens and, through the hash before it, every token of the prefix: equal
hashes mean equal prefixes. The chain starts from a root that covers the layout's fingerprint and the
request's `cache_salt`, so that models, layouts and tenants never share a chunk. An engine that hashes
its blocks already (vLLM does) hands those hashes in instead.

References:
  vLLM, automatic prefix caching: hash(parent block hash, block tokens, extra keys).
"""

import hashlib
import itertools
import operator
import struct
from collections.abc import Iterable, Sequence

import numpy as np

from tpu_offload.errors import RequestError
from tpu_offload.types import BlockHash, ChunkKey

_DIGEST_NBYTES = 16
_MAX_TOKEN = 2**63 - 1
_NAMESPACE_NBYTES = 8


class BlockHasher:
    """Hashes the full blocks of a token sequence.

    Args:
      fingerprint: `KVLayout.fingerprint()` of the cache that the blocks live in.
      block_size: tokens in a block.
    """

    def __init__(self, fingerprint: bytes, *, block_size: int) -> None:
        self._fingerprint = fingerprint
        self._block_size = block_size

    def root(self, cache_salt: str = "") -> BlockHash:
        """The hash that the first block is chained on."""
        try:
            salt = cache_salt.encode()
        except (AttributeError, UnicodeEncodeError) as e:
            raise RequestError(f"the cache_salt is {cache_salt!r:.100}; expected valid text") from e
        digest = hashlib.blake2b(self._fingerprint + struct.pack("<q", len(salt)) + salt, digest_size=_DIGEST_NBYTES)
        return BlockHash(digest.digest())

    def extend(self, hashes: list[BlockHash], tokens: Sequence[int], *, cache_salt: str = "") -> None:
        """Appends the hashes of the full blocks of `tokens` that `hashes` does not cover yet.

        Args:
          hashes: hashes of the first `len(hashes)` blocks of this very sequence; grows in place.
          tokens: all tokens of the sequence so far, each in [0, 2**63).
          cache_salt: the request's salt; the same at every call for one sequence.
        Raises:
          RequestError: something is no token id, or the salt no valid text; nothing was appended.
        """
        parent = hashes[-1] if hashes else self.root(cache_salt)
        size = self._block_size
        first, end = len(hashes) * size, len(tokens) // size * size
        if first >= end:
            return
        nbytes = _token_bytes(tokens[first:end])
        width = 8 * size
        for start in range(0, len(nbytes), width):
            digest = hashlib.blake2b(parent + nbytes[start : start + width], digest_size=_DIGEST_NBYTES).digest()
            parent = BlockHash(digest)
            hashes.append(parent)


def _token_bytes(tokens: Sequence[int]) -> bytes:
    """8 bytes a token, little-endian."""
    try:
        ids = np.asarray(tokens)
    except (TypeError, ValueError) as e:
        raise RequestError(f"the tokens cannot be read: {e}") from e
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or int(ids.min()) < 0 or int(ids.max()) > _MAX_TOKEN:
        raise RequestError(f"the tokens are {tokens!r:.100}; expected integers from 0 to 2**63 - 1")
    return ids.astype("<i8").tobytes()


def key_namespace(fingerprint: bytes, *, blocks_per_chunk: int, group_id: int = 0, epoch: int = 0) -> bytes:
    """What tells apart the chunks of equal tokens: 8 bytes that end every chunk key.

    The fingerprint is in here as well as in the hashes of `BlockHasher`, because an engine may hand in
    block hashes of its own that know nothing of the layout. `epoch` counts the resets of the cache: keys
    of different epochs never meet.
    """
    text = fingerprint + struct.pack("<IHI", blocks_per_chunk, group_id, epoch)
    return hashlib.blake2b(text, digest_size=_NAMESPACE_NBYTES).digest()


def chunk_keys(
    block_hashes: Sequence[BlockHash], *, blocks_per_chunk: int, namespace: bytes, first_chunk: int = 0
) -> Iterable[ChunkKey]:
    """Keys of the full chunks of a prefix, from `first_chunk` on.

    The hash of a chunk's last block is chained over all its tokens and all before, so it names the chunk.
    """
    last_blocks = itertools.islice(block_hashes, (first_chunk + 1) * blocks_per_chunk - 1, None, blocks_per_chunk)
    # Only the functions' own loops: prompts have thousands of chunks, and this is paid for each.
    keys: Iterable[ChunkKey] = map(operator.add, last_blocks, itertools.repeat(namespace))
    return keys


def last_block_hash(key: ChunkKey) -> BlockHash:
    """The hash of a chunk's last block, as the engine handed it in."""
    return BlockHash(key[:-_NAMESPACE_NBYTES])
