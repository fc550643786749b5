"""The jitted programs that move blocks between the caches and arrays of the host pool's shape.

A block is spread over the caches, one page a layer. In a segment of the host pool, and in a staging
array, its pages lie side by side. Every program is a loop over blocks, and the number of trips is an
argument, so one compiled program serves jobs of every size:

  direct_save   caches -> segment             one DMA a block, HBM to host
  direct_load   segment -> caches             one DMA a block, host to HBM
  gather        caches -> staging in HBM      the staged path's first half of a save
  land          host staging -> segment       ... and its second half, run by the host's CPU
  pick          segment -> host staging       the staged path's first half of a load, by the host's CPU
  scatter       staging in HBM -> caches      ... and its second half

The direct programs put a block's pages together in HBM, so they need one block of it, and a block goes
over PCIe in one piece. A DMA a page would need less with large pages, but the TPU compiler takes about
40 KiB for each, which is 3.6 blocks when a page has 16 KiB, and waits for each before the next.

What is written is donated and updated in place; what is read is not. In-place matters: a fresh pool
or cache would need room for two, and on the CPU backend fresh memory costs more than the copy.

Each program also returns a token, i32[] with the number of blocks that it copied. The segment and the
caches are donated on to the next program as soon as it is dispatched, so they cannot be asked whether
this one is done; the token can (`is_ready`). It is counted by the loop and not handed through: jax
forwards an untouched argument to the output, and it would be ready before the program has run.

Ids are not checked on the device, where XLA would clamp them: the caller has.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.compute_on import compute_on

from tpu_offload.kernels.spec import DEVICE_MEMORY_KIND, HOST_MEMORY_KIND, TransferSpec

Space = jax.memory.Space
Caches = list[jax.Array]


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """A jitted function with the argument shapes that it is compiled for, ahead of time.

    Attributes:
      name: for error messages and reports.
      function: the jitted function, with donation and output shardings.
      args: shape structs of its arguments.
      platform: platform of the devices that it runs on.
    """

    name: str
    function: Any
    args: tuple[Any, ...]
    platform: str

    def compile(self) -> Any:
        """Compiles; the result is called with arrays of exactly the shapes in `args`.

        Returns:
          A `jax.stages.Compiled`, which never compiles again: other shapes are a TypeError.
        """
        # Naming the platform lets the TPU compiler run where there is no TPU (see tests/tpu_compile).
        platforms = ("tpu",) if self.platform == "tpu" else None
        return self.function.trace(*self.args).lower(lowering_platforms=platforms).compile()


def direct_save(spec: TransferSpec) -> Program:
    """`(segment, kv_caches, block_ids, host_block_ids, num_blocks) -> (segment, token)`.

    Args of the program:
      segment: carrier[segment_blocks, num_layers, *page_shape] in pinned host memory; donated.
      kv_caches: per layer, dtype[num_blocks, *page_shape].
      block_ids: i32[capacity], blocks to read.
      host_block_ids: i32[capacity], places in the segment to write.
      num_blocks: i32[], how many of the ids count.
    """

    def save(segment: Any, kv_caches: Any, block_ids: Any, host_block_ids: Any, num_blocks: Any) -> Any:
        caches = _as_carrier(kv_caches, spec)
        return _caches_to_pool(segment, caches, block_ids, host_block_ids, num_blocks, space=Space.Host)

    ids = spec.ids_struct(spec.capacity)
    args = (spec.segment_struct(), spec.cache_structs(), ids, ids, spec.count_struct())
    return _program(save, args, spec, donate=0, out=spec.pool_sharding(HOST_MEMORY_KIND))


def direct_load(spec: TransferSpec) -> Program:
    """`(kv_caches, segment, block_ids, host_block_ids, num_blocks) -> (kv_caches, token)`.

    Args of the program:
      kv_caches: per layer, dtype[num_blocks, *page_shape]; donated.
      segment: carrier[segment_blocks, num_layers, *page_shape] in pinned host memory.
      block_ids: i32[capacity], blocks to write.
      host_block_ids: i32[capacity], places in the segment to read.
      num_blocks: i32[], how many of the ids count.
    """

    def load(kv_caches: Any, segment: Any, block_ids: Any, host_block_ids: Any, num_blocks: Any) -> Any:
        return _pool_to_caches(kv_caches, segment, block_ids, host_block_ids, num_blocks, spec)

    ids = spec.ids_struct(spec.capacity)
    args = (spec.cache_structs(), spec.segment_struct(), ids, ids, spec.count_struct())
    return _program(load, args, spec, donate=0, out=_caches_sharding(spec))


def gather(spec: TransferSpec, bucket: int) -> Program:
    """`(kv_caches, block_ids i32[bucket]) -> (staging, token)`.

    The staging array, carrier[bucket, num_layers, *page_shape] in HBM, is all the HBM that it takes.
    """
    struct = spec.pool_struct(bucket, DEVICE_MEMORY_KIND)

    def gather_blocks(kv_caches: Any, block_ids: Any) -> Any:
        rows = jnp.arange(bucket, dtype=jnp.int32)
        caches = _as_carrier(kv_caches, spec)
        # In a mesh with explicit axes every array of a program has a sharding, and this one has to be told.
        staging = lax.empty(struct.shape, struct.dtype, out_sharding=struct.sharding if spec.explicit else None)
        return _caches_to_pool(staging, caches, block_ids, rows, bucket, space=Space.Device)

    args = (spec.cache_structs(), spec.ids_struct(bucket))
    return _program(gather_blocks, args, spec, donate=None, out=struct.sharding)


def scatter(spec: TransferSpec, bucket: int) -> Program:
    """`(kv_caches, staging, block_ids, rows, num_blocks) -> (kv_caches, token)`.

    Args of the program:
      kv_caches: per layer, dtype[num_blocks, *page_shape]; donated.
      staging: carrier[bucket, num_layers, *page_shape] in HBM.
      block_ids: i32[bucket], blocks to write.
      rows: i32[bucket], rows of the staging array to read; a cancelled job's are left out.
      num_blocks: i32[], how many of the ids count.
    """

    def scatter_blocks(kv_caches: Any, staging: Any, block_ids: Any, rows: Any, num_blocks: Any) -> Any:
        return _pool_to_caches(kv_caches, staging, block_ids, rows, num_blocks, spec)

    ids = spec.ids_struct(bucket)
    staging = spec.pool_struct(bucket, DEVICE_MEMORY_KIND)
    args = (spec.cache_structs(), staging, ids, ids, spec.count_struct())
    return _program(scatter_blocks, args, spec, donate=0, out=_caches_sharding(spec))


def land(spec: TransferSpec, bucket: int) -> Program:
    """`(segment, staging, host_block_ids) -> (segment, token)`, on the host's CPU.

    Args of the program:
      segment: carrier[segment_blocks, num_layers, *page_shape] in pinned host memory; donated.
      staging: carrier[bucket, num_layers, *page_shape] in pinned host memory.
      host_block_ids: i32[bucket], places in the segment to write.
    """

    def land_rows(segment: Any, staging: Any, host_block_ids: Any) -> Any:
        return _host_copy(segment, staging, host_block_ids, jnp.arange(bucket, dtype=jnp.int32))

    staging = spec.pool_struct(bucket, HOST_MEMORY_KIND)
    args = (spec.segment_struct(), staging, spec.ids_struct(bucket))
    return _program(land_rows, args, spec, donate=0, out=staging.sharding)


def pick(spec: TransferSpec, bucket: int) -> Program:
    """`(staging, segment, host_block_ids) -> (staging, token)`, on the host's CPU.

    Args of the program:
      staging: carrier[bucket, num_layers, *page_shape] in pinned host memory; donated.
      segment: carrier[segment_blocks, num_layers, *page_shape] in pinned host memory.
      host_block_ids: i32[bucket], places in the segment to read.
    """

    def pick_rows(staging: Any, segment: Any, host_block_ids: Any) -> Any:
        return _host_copy(staging, segment, jnp.arange(bucket, dtype=jnp.int32), host_block_ids)

    staging = spec.pool_struct(bucket, HOST_MEMORY_KIND)
    args = (staging, spec.segment_struct(), spec.ids_struct(bucket))
    return _program(pick_rows, args, spec, donate=0, out=staging.sharding)


def _program(
    function: Callable[..., Any], args: tuple[Any, ...], spec: TransferSpec, *, donate: int | None, out: Any
) -> Program:
    """Jits `function`, which returns an array (or the caches) of sharding `out`, and a token."""
    jitted = jax.jit(function, donate_argnums=() if donate is None else (donate,), out_shardings=(out, spec.replicated))
    return Program(name=function.__name__, function=jitted, args=args, platform=spec.platform)


def _caches_sharding(spec: TransferSpec) -> list[Any]:
    return [spec.cache_sharding] * spec.num_layers


def _as_carrier(kv_caches: Caches, spec: TransferSpec) -> Caches:
    """The caches seen as the carrier type.

    Whole arrays, outside the loop: a bitcast of one page of float8_e5m2 is not exact on the CPU backend,
    which widens the page before it. On other platforms there is nothing to do.
    """
    return [_bitcast(cache, spec.carrier) for cache in kv_caches]


def _bitcast(array: Any, dtype: np.dtype[Any]) -> Any:
    return array if array.dtype == dtype else lax.bitcast_convert_type(array, dtype)


def _caches_to_pool(pool: Any, caches: Caches, block_ids: Any, rows: Any, num_blocks: Any, *, space: Any) -> Any:
    """Writes block `block_ids[i]` to `pool[rows[i]]`, which lies in `space`, for each i < num_blocks."""
    origin = (np.int32(0),) * (pool.ndim - 1)  # typed: under jax_enable_x64 a plain 0 would not go with i32 ids

    def body(i: Any, carry: Any) -> Any:
        pool, count = carry
        pages = [lax.dynamic_slice_in_dim(cache, block_ids[i], 1, axis=0)[:, None] for cache in caches]
        block = jax.device_put(jnp.concatenate(pages, axis=1), space)
        return lax.dynamic_update_slice(pool, block, (rows[i], *origin)), count + 1

    return lax.fori_loop(0, num_blocks, body, (pool, jnp.int32(0)))


def _pool_to_caches(
    kv_caches: Caches, pool: Any, block_ids: Any, rows: Any, num_blocks: Any, spec: TransferSpec
) -> Any:
    """Writes `pool[rows[i]]` to block `block_ids[i]` of the caches, for each i < num_blocks."""

    def body(i: Any, carry: Any) -> Any:
        caches, count = carry
        block = jax.device_put(lax.dynamic_slice_in_dim(pool, rows[i], 1, axis=0), Space.Device)
        out = [
            lax.dynamic_update_slice_in_dim(cache, block[:, layer], block_ids[i], axis=0)
            for layer, cache in enumerate(caches)
        ]
        return out, count + 1

    caches, count = lax.fori_loop(0, num_blocks, body, (_as_carrier(kv_caches, spec), jnp.int32(0)))
    return [_bitcast(cache, spec.dtype) for cache in caches], count


def _host_copy(target: Any, source: Any, target_rows: Any, source_rows: Any) -> Any:
    """Writes `source[source_rows[i]]` to `target[target_rows[i]]`, both in host memory, by the host's CPU."""
    origin = (np.int32(0),) * (target.ndim - 1)

    def copy(target: Any, source: Any, target_rows: Any, source_rows: Any) -> Any:
        def body(i: Any, carry: Any) -> Any:
            target, count = carry
            row = lax.dynamic_slice_in_dim(source, source_rows[i], 1, axis=0)
            return lax.dynamic_update_slice(target, row, (target_rows[i], *origin)), count + 1

        return lax.fori_loop(0, target_rows.shape[0], body, (target, jnp.int32(0)))

    on_host = compute_on(jax.jit(copy), compute_type="device_host", out_memory_spaces=(Space.Host, Space.Device))
    return on_host(target, source, target_rows, source_rows)
