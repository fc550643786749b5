"""Prefixes and the chunks written of them."""

import hashlib

from tpu_offload.core.index import NO_PARENT
from tpu_offload.types import ChunkKey


def prefix(*names):
    """Chunks whose keys depend on all before them; each name is a chunk."""
    keys = []
    digest = b""
    for name in names:
        digest = hashlib.sha256(digest + str(name).encode()).digest()[:16]
        keys.append(ChunkKey(digest))
    return keys


def written(use, keys):
    return [(use, key, keys[i - 1] if i else NO_PARENT) for i, key in enumerate(keys)]
