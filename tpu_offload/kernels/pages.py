"""Reads one block from the caches and writes one block into them, page by page.

In segments and staging arrays a page has the shape `TransferSpec.pool_page`. Off TPU that is the caches' own page
shape, and a page is a slice. On TPU a page may be rows of 128 elements, for two reasons found with the compiler:

- An array `[blocks, layers, *page_shape]` whose last axis is not a multiple of 128 gets a layout with the first axis
  last, in host memory too. To copy one block the compiler then transposes all of it, and all caches with it. Rows of
  128 have one layout, without padding.
- With the block axis last in memory (see `formats`), 128 blocks share each row of a tile. Reading one column stays
  within the HBM bound, writing one does not: the compiler transposes the whole cache there and back. So a write reads
  the 128 blocks, replaces one under a mask, and writes them back. That moves 128 times the bytes within HBM, but not
  over PCIe, and takes no more memory than a copy of a page.

Each device converts its own shard to rows, so a page in the pool is the shards' rows one after another.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from tpu_offload.kernels.formats import LANES
from tpu_offload.kernels.spec import TransferSpec

_SMALL_NBYTES = 64 * 1024
_PIECE_NBYTES = 2 * 1024 * 1024


def read_block(caches: Sequence[Any], block_id: Any, spec: TransferSpec) -> Any:
    """Gathers a block's pages from some caches.

    Args:
      caches: carrier[num_blocks, *page_shape] each.
      block_id: i32[].
      spec: shapes.
    Returns:
      carrier[1, len(caches), *pool_page].
    """

    def read(block_id: Any, *shards: Any) -> Any:
        pages = [_read_page(shard, block_id, spec) for shard in shards]
        return pages[0] if len(pages) == 1 else jnp.concatenate(pages, axis=1)

    in_specs = PartitionSpec(), *[_cache_axes(spec)] * len(caches)
    return _by_shard(read, spec, in_specs=in_specs, out_specs=_pool_axes(spec))(block_id, *caches)


def write_block(caches: Sequence[Any], pages: Any, block_id: Any, spec: TransferSpec) -> list[Any]:
    """Writes a block's pages into the caches and returns these; the inverse of `read_block`."""

    def write(block_id: Any, pages: Any, *shards: Any) -> Any:
        page_shape = shards[0].shape[1:]
        if spec.flat and pages.size * pages.dtype.itemsize <= _SMALL_NBYTES:
            # Taken page by page, each would be fetched by its own DMA, and the compiler takes 40 KiB for each DMA.
            pages = pages.reshape(1, len(shards), -1)[..., : math.prod(page_shape)].reshape(1, len(shards), *page_shape)
        return [_write_page(shard, pages[:, i], block_id, spec) for i, shard in enumerate(shards)]

    in_specs = PartitionSpec(), _pool_axes(spec), *[_cache_axes(spec)] * len(caches)
    out_specs = [_cache_axes(spec)] * len(caches)
    written: list[Any] = _by_shard(write, spec, in_specs=in_specs, out_specs=out_specs)(block_id, pages, *caches)
    return written


def _read_page(cache: Any, block_id: Any, spec: TransferSpec) -> Any:
    """carrier[1, 1, *pool_page of a shard]."""
    if spec.blocks_together > 1:
        first, own = _blocks_around(cache, block_id, spec)
        together = lax.dynamic_slice_in_dim(cache, first, spec.blocks_together, axis=0)
        together = bitcast(together, spec.carrier)
        return _to_rows(jnp.sum(jnp.where(own, together, 0), axis=0, dtype=together.dtype), spec)
    page = bitcast(lax.dynamic_slice_in_dim(cache, block_id, 1, axis=0), spec.carrier)
    return _to_rows(page, spec) if spec.flat else page[:, None]


def _write_page(cache: Any, page: Any, block_id: Any, spec: TransferSpec) -> Any:
    """The cache with the page, carrier[1, *pool_page of a shard], in it."""
    if page.shape[1:] != cache.shape[1:]:
        page = page.reshape(-1)[: math.prod(cache.shape[1:])].reshape(1, *cache.shape[1:])
    if spec.blocks_together == 1:
        return lax.dynamic_update_slice_in_dim(cache, bitcast(page, cache.dtype), block_id, axis=0)
    first, own = _blocks_around(cache, block_id, spec)
    axis, length = _piece(cache.shape, spec)

    # Unrolled: the compiler would carry 8-bit caches through an inner loop with another tile height, as copies.
    for begin in range(0, cache.shape[axis], length):
        start = [jnp.int32(0)] * cache.ndim
        start[0], start[axis] = first, jnp.int32(begin)
        sizes = [spec.blocks_together, *cache.shape[1:]]
        sizes[axis] = length
        old = bitcast(lax.dynamic_slice(cache, start, sizes), spec.carrier)
        new = lax.slice_in_dim(page, begin, begin + length, axis=axis)
        cache = lax.dynamic_update_slice(cache, bitcast(jnp.where(own, new, old), cache.dtype), start)
    return cache


def _blocks_around(cache: Any, block_id: Any, spec: TransferSpec) -> tuple[Any, Any]:
    """The first of the blocks that share tiles with this one, and a mask that selects this one among them."""
    num_together = spec.blocks_together
    # At the end of the cache there may be fewer; then the window starts earlier.
    first = jnp.minimum(block_id - block_id % num_together, cache.shape[0] - num_together)
    own = jnp.arange(num_together, dtype=jnp.int32) == block_id - first
    return first, own.reshape(-1, *[1] * (cache.ndim - 1))


def _piece(shape: tuple[int, ...], spec: TransferSpec) -> tuple[int, int]:
    """The axis and the length of the pieces in which a page is replaced among the blocks that share its tiles.

    The compiler keeps small pieces in the core's vector memory; large ones would take HBM.
    """
    assert spec.cache_layout is not None, "blocks share tiles only in a known layout"
    order = spec.cache_layout.major_to_minor
    if jax.dtypes.itemsize_bits(spec.dtype) <= 8:  # with two pieces or more the compiler transposes 8-bit caches
        axis = order[0] or order[1]
        return axis, shape[axis]
    outer = [axis for axis in order[:-2] if axis]  # any cut along these is a tile boundary
    axis = max(outer or [axis for axis in order if axis], key=lambda axis: shape[axis])
    step = 1 if outer else 8 * LANES
    row_nbytes = spec.blocks_together * math.prod(shape[1:]) // shape[axis] * spec.dtype.itemsize
    fitting = [
        length
        for length in range(step, shape[axis] + 1, step)
        if shape[axis] % length == 0 and (length == step or length * row_nbytes <= _PIECE_NBYTES)
    ]
    return axis, max(fitting, default=shape[axis])


def bitcast(array: Any, dtype: Any) -> Any:
    """The array's bits as another type of the same size; the array itself if it has that type."""
    return array if array.dtype == dtype else lax.bitcast_convert_type(array, dtype)


def _to_rows(page: Any, spec: TransferSpec) -> Any:
    """A page as carrier[1, 1, *pool_page of a shard], zero-padded in the last rows."""
    _, height, width = spec.pool_page
    missing = -page.size % (height * width)
    flat = page.reshape(1, 1, -1)
    flat = jnp.pad(flat, ((0, 0), (0, 0), (0, missing))) if missing else flat
    return flat.reshape(1, 1, -1, height, width)


def _by_shard(function: Callable[..., Any], spec: TransferSpec, *, in_specs: Any, out_specs: Any) -> Any:
    """Applies the function on each device to its own shards; without a mesh it is returned as it is."""
    sharding = spec.cache_sharding
    if not spec.flat or not isinstance(sharding, NamedSharding) or sharding.mesh.size == 1:
        return function
    return jax.shard_map(function, mesh=sharding.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _cache_axes(spec: TransferSpec) -> PartitionSpec:
    sharding = spec.cache_sharding
    return sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()


def _pool_axes(spec: TransferSpec) -> PartitionSpec:
    return PartitionSpec(None, None, *spec.pool_page_axes)
