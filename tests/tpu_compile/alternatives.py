"""Copy programs that were tried and are not used, and the direct peer's, to be compiled beside ours.

`benchmarks/bench_tpu_compile.py --alternatives` prints what the TPU compiler makes of them.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_offload.kernels import TransferSpec, programs
from tpu_offload.kernels.pages import read_block
from tpu_offload.kernels.programs import Program
from tpu_offload.kernels.spec import DEVICE_MEMORY_KIND, HOST_MEMORY_KIND

Space = jax.memory.Space


def chained_save(spec: TransferSpec, bucket: int) -> Program:
    """The direct save into a segment of one stripe: a block goes in one DMA, and each waits for the one before."""
    del bucket
    one_stripe = dataclasses.replace(spec, stripes=((0, spec.num_layers),))
    return dataclasses.replace(programs.direct_save(one_stripe), name="chained_save")


def page_save(spec: TransferSpec, bucket: int) -> Program:
    """A DMA a page: nothing is put together in HBM first."""
    del bucket
    each = dataclasses.replace(spec, stripes=((0, spec.num_layers),))

    def save(segment: Any, caches: Any, moves: Any) -> Any:
        block_ids, rows, num_blocks = moves[0], moves[1], moves[2, 0]

        def body(i: Any, pool: Any) -> Any:
            for layer, cache in enumerate(caches):
                page = jax.device_put(read_block([cache], block_ids[i], each), Space.Host)
                pool = lax.dynamic_update_slice(pool, page, (rows[i], layer, *(0,) * (pool.ndim - 2)))
            return pool

        return [lax.fori_loop(0, num_blocks, body, segment[0])], num_blocks + 1

    args = (each.segment_structs(), each.cache_structs(), each.moves_struct(each.capacity))
    out = ([struct.sharding for struct in each.segment_structs()], each.replicated)
    return Program("page_save", jax.jit(save, donate_argnums=0, out_shardings=out), args, spec.platform)


def unrolled_save(spec: TransferSpec, bucket: int) -> Program:
    """Four blocks a trip of the loop, into a segment of one stripe; serves multiples of four only."""
    del bucket
    one = dataclasses.replace(spec, stripes=((0, spec.num_layers),))

    def save(segment: Any, caches: Any, moves: Any) -> Any:
        block_ids, rows, num_fours = moves[0], moves[1], moves[2, 0]

        def body(i: Any, pool: Any) -> Any:
            for j in range(4):
                block = jax.device_put(read_block(caches, block_ids[4 * i + j], one), Space.Host)
                pool = lax.dynamic_update_slice(pool, block, (rows[4 * i + j], *(0,) * (pool.ndim - 1)))
            return pool

        return [lax.fori_loop(0, num_fours, body, segment[0])], num_fours + 1

    args = (one.segment_structs(), one.cache_structs(), one.moves_struct(one.capacity))
    out = ([struct.sharding for struct in one.segment_structs()], one.replicated)
    return Program("unrolled_save", jax.jit(save, donate_argnums=0, out_shardings=out), args, spec.platform)


def pallas_save(spec: TransferSpec, bucket: int) -> Program:
    """A Pallas kernel that DMAs pages of one cache to a place in host memory that is known only at run time.

    On a single device; the compiler fails on it for pages of 128 lanes, and takes it where the place is fixed.
    """
    del bucket

    def kernel(src: Any, dst: Any, count: Any, cache: Any, _: Any, pool: Any, semaphore: Any) -> None:
        def body(i: Any, carry: Any) -> Any:
            copy = pltpu.make_async_copy(cache.at[pl.ds(src[i], 1)], pool.at[pl.ds(dst[i], 1)], semaphore)
            copy.start()
            copy.wait()
            return carry

        lax.fori_loop(0, count[0], body, 0)

    shape = (spec.segment_blocks, *spec.page_shape)
    pool = jax.ShapeDtypeStruct(shape, spec.dtype)

    def save(pool_in: Any, cache: Any, src: Any, dst: Any, count: Any) -> Any:
        call = pl.pallas_call(
            kernel,
            out_shape=pool,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=3,
                grid=(),
                in_specs=[pl.BlockSpec(memory_space=pl.ANY), pl.BlockSpec(memory_space=pl.HOST)],
                out_specs=pl.BlockSpec(memory_space=pl.HOST),
                scratch_shapes=[pltpu.SemaphoreType.DMA],
            ),
            input_output_aliases={4: 0},
        )
        return call(src, dst, count, cache, pool_in)

    device = next(iter(spec.cache_sharding.device_set))
    mesh = jax.sharding.Mesh(np.array([device]), ("device",))

    def struct(shape: Any, dtype: Any, kind: str) -> Any:
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(), memory_kind=kind)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    ids = struct((spec.capacity,), jnp.int32, DEVICE_MEMORY_KIND)
    target = struct(shape, spec.dtype, HOST_MEMORY_KIND)
    cache = struct((spec.num_blocks, *spec.page_shape), spec.dtype, DEVICE_MEMORY_KIND)
    args = (target, cache, ids, ids, struct((1,), jnp.int32, DEVICE_MEMORY_KIND))
    return Program("pallas_save", jax.jit(save, donate_argnums=0, out_shardings=target.sharding), args, spec.platform)


def peer_save(spec: TransferSpec, bucket: int) -> Program:
    """The direct peer's save up to the transfers: gathers the blocks and splits them, all in HBM."""

    def save(caches: Any, block_ids: Any) -> Any:
        return jnp.split(jnp.stack([cache[block_ids] for cache in caches], axis=1), bucket)

    args = (spec.cache_structs(), spec.ids_struct(bucket))
    out = [spec.block_sharding(DEVICE_MEMORY_KIND)] * bucket
    return Program("peer_save", jax.jit(save, out_shardings=out), args, spec.platform)


def peer_load(spec: TransferSpec, bucket: int) -> Program:
    """The direct peer's load after the transfers: blocks in HBM are put together and scattered."""

    def load(caches: Any, blocks: Any, block_ids: Any) -> Any:
        together = jnp.concatenate(blocks)
        return [cache.at[block_ids].set(together[:, i]) for i, cache in enumerate(caches)]

    shape = (1, spec.num_layers, *spec.page_shape)
    block = jax.ShapeDtypeStruct(shape, spec.dtype, sharding=spec.block_sharding(DEVICE_MEMORY_KIND))
    args = (spec.cache_structs(), [block] * bucket, spec.ids_struct(bucket))
    out = [spec.cache_format] * spec.num_layers
    return Program("peer_load", jax.jit(load, donate_argnums=0, out_shardings=out), args, spec.platform)


def untied(step: Callable[..., Any]) -> Callable[..., Any]:
    """A fused step without the optimization barriers, so that nothing depends on its saves."""

    @functools.wraps(step)
    def without(*args: Any) -> Any:
        with mock.patch("jax.lax.optimization_barrier", lambda x: x):
            return step(*args)

    return without
