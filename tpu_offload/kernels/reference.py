"""Reference implementation of the copy programs in numpy, one page at a time."""

from collections.abc import Sequence
from typing import Any

import numpy as np

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def as_bytes(array: Any) -> Bytes:
    """A copy of an array's elements as uint8, with a last axis for the bytes of one element."""
    host = np.ascontiguousarray(np.asarray(array))
    return host.view(np.uint8).reshape(*host.shape, host.dtype.itemsize).copy()


def save(segment: Bytes, kv_caches: Sequence[Bytes], block_ids: Sequence[int], host_block_ids: Sequence[int]) -> Bytes:
    """Copies blocks of the caches into a segment.

    Args:
      segment: u8[segment_blocks, num_layers, *page_shape, itemsize]; not modified.
      kv_caches: per layer, u8[num_blocks, *page_shape, itemsize].
      block_ids: blocks to read.
      host_block_ids: positions in the segment to write, one per block.
    Returns:
      The segment afterwards.
    """
    segment = segment.copy()
    for block_id, host_block_id in zip(block_ids, host_block_ids, strict=True):
        for layer, cache in enumerate(kv_caches):
            segment[host_block_id, layer] = cache[block_id]
    return segment


def load(
    kv_caches: Sequence[Bytes], segment: Bytes, block_ids: Sequence[int], host_block_ids: Sequence[int]
) -> list[Bytes]:
    """Copies blocks of a segment into the caches; arguments as in `save`, none of them modified.

    Returns:
      The caches afterwards.
    """
    caches = [cache.copy() for cache in kv_caches]
    for block_id, host_block_id in zip(block_ids, host_block_ids, strict=True):
        for layer, cache in enumerate(caches):
            cache[block_id] = segment[host_block_id, layer]
    return caches
