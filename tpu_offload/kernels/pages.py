"""Reads one block from the caches and writes one block into them, page by page.

In segments and staging arrays a page has the shape `TransferSpec.pool_page`. Off TPU that is the caches' own page
shape, and a page is a slice. On TPU a page may be rows of 128 elements, for reasons found with the compiler:

- An array `[blocks, layers, *page_shape]` whose last axis is not a multiple of 128 gets a layout with the first axis
  last, in host memory too. To copy one block the compiler then transposes all of it, and all caches with it. Rows of
  128 have one layout, without padding.
- The rows hold a page in the order in which the cache has it in memory. For any other order the compiler prefers to
  transpose whole caches, there and back, to transposing one page.
- With the block axis last in memory (see `formats`), 128 blocks share each row of a tile. Reading one column stays
  within the HBM bound, writing one does not: the compiler transposes the whole cache there and back. So a write reads
  the 128 blocks, replaces one under a mask, and writes them back. That moves 128 times the bytes within HBM, but not
  over PCIe, and takes no more memory than a copy of a page.

Each device converts its own shard to rows, so a page in the pool is the shards' rows one after another. What is in the
pool is thus valid for caches of the same shape, sharding and layout only.
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
        shape = _page_in_memory(shards[0], spec)
        if spec.flat and _num_columns(shape, spec) == 1 and pages.size * pages.dtype.itemsize <= _SMALL_NBYTES:
            # Taken page by page, each would be fetched by its own DMA, and the compiler takes 40 KiB for each DMA.
            pages = pages.reshape(1, len(shards), -1)[..., : math.prod(shape)].reshape(1, len(shards), *shape)
        written: list[Any] = []
        for i, shard in enumerate(shards):
            if spec.in_turn and written:
                block_id, pages, written[-1] = lax.optimization_barrier((block_id, pages, written[-1]))
            written.append(_write_page(shard, pages[:, i], block_id, spec))
        return written

    in_specs = PartitionSpec(), _pool_axes(spec), *[_cache_axes(spec)] * len(caches)
    out_specs = [_cache_axes(spec)] * len(caches)
    written: list[Any] = _by_shard(write, spec, in_specs=in_specs, out_specs=out_specs)(block_id, pages, *caches)
    return written


def _read_page(cache: Any, block_id: Any, spec: TransferSpec) -> Any:
    """carrier[1, 1, *pool_page of a shard]."""
    cache, axis = _in_memory_order(cache, spec)
    if spec.blocks_together > 1:
        first, own = _blocks_around(cache, axis, block_id, spec)
        together = lax.dynamic_slice_in_dim(cache, first, spec.blocks_together, axis=axis)
        together = bitcast(together, spec.carrier)
        return _to_rows(jnp.sum(jnp.where(own, together, 0), axis=axis, dtype=together.dtype), spec)
    page = bitcast(lax.dynamic_slice_in_dim(cache, block_id, 1, axis=axis), spec.carrier)
    return _to_rows(page, spec) if spec.flat else page[:, None]


def _write_page(cache: Any, page: Any, block_id: Any, spec: TransferSpec) -> Any:
    """The cache with the page, carrier[1, *pool_page of a shard], in it."""
    cache, axis = _in_memory_order(cache, spec)
    shape = *cache.shape[:axis], 1, *cache.shape[axis + 1 :]
    if page.shape != shape:
        page = _from_rows(page, shape, spec)
    if spec.blocks_together == 1:
        cache = lax.dynamic_update_slice_in_dim(cache, bitcast(page, cache.dtype), block_id, axis=axis)
        return _in_logical_order(cache, spec)
    first, own = _blocks_around(cache, axis, block_id, spec)
    cut, length = _piece(cache.shape, axis, spec)

    # Unrolled: the compiler would carry 8-bit caches through an inner loop with another tile height, as copies.
    for begin in range(0, cache.shape[cut], length):
        start = [jnp.int32(0)] * cache.ndim
        start[axis], start[cut] = first, jnp.int32(begin)
        sizes = list(cache.shape)
        sizes[axis], sizes[cut] = spec.blocks_together, length
        old = bitcast(lax.dynamic_slice(cache, start, sizes), spec.carrier)
        new = lax.slice_in_dim(page, begin, begin + length, axis=cut)
        cache = lax.dynamic_update_slice(cache, bitcast(jnp.where(own, new, old), cache.dtype), start)
    return _in_logical_order(cache, spec)


def _page_in_memory(cache: Any, spec: TransferSpec) -> tuple[int, ...]:
    """Shape of a page with its axes from major to minor."""
    order = _order(spec) or range(cache.ndim)
    return tuple(cache.shape[i] for i in order if i)


def _in_memory_order(cache: Any, spec: TransferSpec) -> tuple[Any, int]:
    """The cache with its axes from major to minor, which costs nothing, and its block axis."""
    order = _order(spec)
    return (cache.transpose(order), order.index(0)) if order else (cache, 0)


def _in_logical_order(cache: Any, spec: TransferSpec) -> Any:
    """The inverse of `_in_memory_order`."""
    order = _order(spec)
    return cache.transpose([order.index(i) for i in range(len(order))]) if order else cache


def _order(spec: TransferSpec) -> tuple[int, ...]:
    if not spec.flat:
        return ()
    assert spec.cache_layout is not None, "pages are flat only in a known layout"
    return tuple(spec.cache_layout.major_to_minor)


def _blocks_around(cache: Any, axis: int, block_id: Any, spec: TransferSpec) -> tuple[Any, Any]:
    """The first of the blocks that share tiles with this one, and a mask that selects this one among them."""
    num_together = spec.blocks_together
    # At the end of the cache there may be fewer; then the window starts earlier.
    first = jnp.minimum(block_id - block_id % num_together, cache.shape[axis] - num_together)
    own = jnp.arange(num_together, dtype=jnp.int32) == block_id - first
    return first, own.reshape(-1, *[1] * (cache.ndim - 1 - axis))


def _piece(shape: tuple[int, ...], axis: int, spec: TransferSpec) -> tuple[int, int]:
    """The axis and the length of the pieces in which a page is replaced among the blocks that share its tiles.

    The compiler keeps small pieces in the core's vector memory; large ones would take HBM.
    """
    others = [i for i in range(len(shape)) if i != axis]
    if jax.dtypes.itemsize_bits(spec.dtype) <= 8:  # with two pieces or more the compiler transposes 8-bit caches
        return others[0], shape[others[0]]
    outer = [i for i in others if i < len(shape) - 2]  # any cut along these is a tile boundary
    cut = max(outer or others, key=lambda i: shape[i])
    step = 1 if outer else 8 * LANES
    row_nbytes = spec.blocks_together * math.prod(shape[i] for i in others) // shape[cut] * spec.dtype.itemsize
    fitting = [
        length
        for length in range(step, shape[cut] + 1, step)
        if shape[cut] % length == 0 and (length == step or length * row_nbytes <= _PIECE_NBYTES)
    ]
    return cut, max(fitting, default=shape[cut])


def bitcast(array: Any, dtype: Any) -> Any:
    """The array's bits as another type of the same size; the array itself if it has that type."""
    return array if array.dtype == dtype else lax.bitcast_convert_type(array, dtype)


def _to_rows(page: Any, spec: TransferSpec) -> Any:
    """A page, in memory order, as carrier[1, 1, *pool_page of a shard], zero-padded in the last rows."""
    _, height, width = spec.pool_page
    num_columns = _num_columns(page.shape, spec)
    if num_columns > 1:
        page = jnp.concatenate(jnp.split(page.reshape(-1, page.shape[-1]), num_columns), axis=1)
    missing = -page.size % (height * width)
    flat = page.reshape(1, 1, -1)
    flat = jnp.pad(flat, ((0, 0), (0, 0), (0, missing))) if missing else flat
    return flat.reshape(1, 1, -1, height, width)


def _from_rows(page: Any, shape: tuple[int, ...], spec: TransferSpec) -> Any:
    """The inverse of `_to_rows`: a page of this shape, with its axes in memory order."""
    flat = page.reshape(-1)[: math.prod(shape)]
    num_columns = _num_columns(shape, spec)
    if num_columns > 1:
        flat = jnp.concatenate(jnp.split(flat.reshape(-1, LANES), num_columns, axis=1))
    return flat.reshape(shape)


def _num_columns(shape: tuple[int, ...], spec: TransferSpec) -> int:
    """How many parts of a page are side by side in its rows.

    A contiguous page whose rows are 64 (or 32, ...) long is padded to 128 in HBM. Its halves, side by side, fill rows
    of 128. To put neighbours into one row instead, the compiler transposes whole caches if the page is large.
    """
    width, num_rows = shape[-1], math.prod(shape[:-1])
    if not spec.flat or spec.blocks_together > 1 or width >= LANES or LANES % width:
        return 1
    num_columns = LANES // width
    return num_columns if num_rows % num_columns == 0 else 1


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
