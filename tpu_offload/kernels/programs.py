"""The jitted programs that move blocks between the caches and the host pool.

A block is spread over the caches, one page per layer. In a segment of the host pool its pages lie in a few stripes,
each with some of the layers; in a staging array they are contiguous. Every program is a loop over blocks with a dynamic
trip count, so one compiled program serves jobs of every size:

  direct_save   caches -> segment             one DMA per block and stripe, HBM to host
  direct_load   segment -> caches             one DMA per block and stripe, host to HBM
  gather        caches -> staging in HBM      first half of a staged save
  land          host staging -> segment       second half of a staged save, on the host's CPU
  pick          segment -> host staging       first half of a staged load, on the host's CPU
  scatter       staging in HBM -> caches      second half of a staged load

The programs that copy chunks of the host tier for storage are in `payload_programs`.

The direct programs gather the pages of a stripe in HBM, which takes one block, and send each stripe in one DMA. The
DMAs of a block's stripes are in flight together; two into the same array would be serialized
(`benchmarks/bench_tpu_compile.py` shows both). One DMA per page would need no HBM with large pages, but the TPU
compiler takes about 40 KiB for each, which is 3.6 blocks when a page has 16 KiB. On the CPU backend pages are copied
one by one: gathering them first would copy them twice.

What is written is donated and updated in place; what is read is not donated. In place matters: a new pool or cache
would need twice the memory, and on the CPU backend fresh memory costs more than the copy.

Each program also returns a token, i32[] with the number of blocks that it copied. The segment and the caches are
donated to the next program as soon as that is dispatched, so they cannot be polled for completion; the token can
(`is_ready`). The loop counts it: jax forwards an unmodified argument to the output, so a forwarded count would be ready
before the program has run.

With data-parallel ranks one direct program copies for all of them: each device runs the loop over the blocks of its own
rank, as many as that rank has, and reads and writes only its own part of caches and segment. So no block of one rank
can reach a place of another, for any ids.

Ids are not checked on the device, where XLA would clamp them. The caller checks them.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.compute_on import compute_on
from jax.sharding import NamedSharding

from tpu_offload.kernels.pages import bitcast, read_block, write_block
from tpu_offload.kernels.spec import DEVICE_MEMORY_KIND, HOST_MEMORY_KIND, LayerRange, TransferSpec

Space = jax.memory.Space
Caches = list[jax.Array]
Stripes = list[jax.Array]
Ids = np.ndarray[Any, np.dtype[np.int32]]


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """A jitted function and the argument shapes to compile it for, ahead of time.

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

    def lower(self) -> Any:
        """Traces and lowers it for exactly the shapes in `args`; returns a `jax.stages.Lowered`."""
        # Naming the platform lets the TPU compiler run on a machine without a TPU (see tests/tpu_compile).
        platforms = ("tpu",) if self.platform == "tpu" else None
        with self._own_mesh():
            return self.function.trace(*self.args).lower(lowering_platforms=platforms)

    def _own_mesh(self) -> AbstractContextManager[Any]:
        """The program's mesh as context if an engine has set another: jax refuses programs of some of its devices."""
        sharding = jax.tree.leaves(self.args)[0].sharding
        current = jax.sharding.get_mesh()
        if current.empty or not isinstance(sharding, NamedSharding) or sharding.mesh == current:
            return contextlib.nullcontext()
        mesh: Any = sharding.mesh
        return jax.set_mesh(mesh)

    def compile(self) -> Any:
        """Compiles for exactly the shapes in `args`.

        Returns:
          A `jax.stages.Compiled`, which never compiles again: other shapes are a TypeError.
        """
        return self.lower().compile()


def direct_save(spec: TransferSpec) -> Program:
    """`(segment, kv_caches, moves) -> (segment, token)`.

    Args of the program:
      segment: per stripe, carrier[segment_blocks, layers, *pool_page] in pinned host memory; donated.
      kv_caches: per layer, dtype[num_blocks, *page_shape].
      moves: i32[3, capacity] from `pack_moves`: blocks to read, positions in the segment to write, their number; with
        ranks one each, i32[num_ranks, 3, capacity].
    """

    def save(spec: TransferSpec, segment: Any, kv_caches: Any, moves: Any) -> Any:
        caches = cpu_carrier(kv_caches, spec)
        return _caches_to_pool(segment, caches, *_unpack(moves), spec, copies=spec.copies, space=Space.Host)

    args = (spec.segment_structs(), spec.cache_structs(), spec.moves_struct(spec.capacity))
    out = segment_sharding(spec)
    return make_program("direct_save", _by_rank(save, args, out, spec), args, spec, donate=0, out=out)


def direct_load(spec: TransferSpec) -> Program:
    """`(kv_caches, segment, moves) -> (kv_caches, token)`.

    Args of the program:
      kv_caches: per layer, dtype[num_blocks, *page_shape]; donated.
      segment: per stripe, carrier[segment_blocks, layers, *pool_page] in pinned host memory.
      moves: i32[3, capacity] from `pack_moves`: blocks to write, positions in the segment to read, their number; with
        ranks one each, i32[num_ranks, 3, capacity].
    """

    def load(spec: TransferSpec, kv_caches: Any, segment: Any, moves: Any) -> Any:
        return _pool_to_caches(kv_caches, segment, *_unpack(moves), spec, copies=spec.copies)

    args = (spec.cache_structs(), spec.segment_structs(), spec.moves_struct(spec.capacity))
    by_rank = _by_rank(load, args, [spec.cache_sharding] * spec.num_layers, spec)
    return make_program("direct_load", by_rank, args, spec, donate=0, out=[spec.cache_format] * spec.num_layers)


def gather(spec: TransferSpec, bucket: int) -> Program:
    """`(kv_caches, block_ids i32[bucket]) -> (staging, token)`.

    It takes no HBM beside the staging array, carrier[bucket, num_layers, *pool_page].
    """
    struct = spec.pool_struct(bucket, DEVICE_MEMORY_KIND)

    def gather_blocks(kv_caches: Any, block_ids: Any) -> Any:
        rows = jnp.arange(bucket, dtype=jnp.int32)
        caches = cpu_carrier(kv_caches, spec)
        # In a mesh with explicit axes every array needs a sharding; this one cannot be inferred.
        staging = lax.empty(struct.shape, struct.dtype, out_sharding=struct.sharding if spec.explicit else None)
        copies = ((0, spec.num_layers),)
        (staging,), token = _caches_to_pool(
            [staging], caches, block_ids, rows, bucket, spec, copies=(copies,), space=Space.Device
        )
        return staging, token

    args = (spec.cache_structs(), spec.ids_struct(bucket))
    return make_program("gather", gather_blocks, args, spec, donate=None, out=struct.sharding)


def scatter(spec: TransferSpec, bucket: int) -> Program:
    """`(kv_caches, staging, moves) -> (kv_caches, token)`.

    Args of the program:
      kv_caches: per layer, dtype[num_blocks, *page_shape]; donated.
      staging: carrier[bucket, num_layers, *pool_page] in HBM.
      moves: i32[3, bucket] from `pack_moves`: blocks to write, rows of the staging array to read (without those of
        cancelled jobs), their number.
    """

    def scatter_blocks(kv_caches: Any, staging: Any, moves: Any) -> Any:
        copies = ((0, spec.num_layers),)
        return _pool_to_caches(kv_caches, [staging], *_unpack(moves), spec, copies=(copies,))

    staging = spec.pool_struct(bucket, DEVICE_MEMORY_KIND)
    args = (spec.cache_structs(), staging, spec.moves_struct(bucket))
    return make_program("scatter", scatter_blocks, args, spec, donate=0, out=[spec.cache_format] * spec.num_layers)


def land(spec: TransferSpec, bucket: int) -> Program:
    """`(segment, staging, host_block_ids) -> (segment, token)`, on the host's CPU.

    Args of the program:
      segment: per stripe, carrier[segment_blocks, layers, *pool_page] in pinned host memory; donated.
      staging: carrier[bucket, num_layers, *pool_page] in pinned host memory.
      host_block_ids: i32[bucket], positions in the segment to write.
    """

    def land_rows(segment: Any, staging: Any, host_block_ids: Any) -> Any:
        def copy(segment: Any, staging: Any, i: Any, host_block_id: Any) -> Any:
            return [
                write_rows(stripe, read_rows(staging, i, (first, end)), host_block_id)
                for stripe, (first, end) in zip(segment, spec.stripes, strict=True)
            ]

        return _on_host(copy, segment, staging, host_block_ids)

    staging = spec.pool_struct(bucket, HOST_MEMORY_KIND)
    args = (spec.segment_structs(), staging, spec.ids_struct(bucket))
    return make_program("land", land_rows, args, spec, donate=0, out=segment_sharding(spec))


def pick(spec: TransferSpec, bucket: int) -> Program:
    """`(staging, segment, host_block_ids) -> (staging, token)`, on the host's CPU.

    Args of the program:
      staging: carrier[bucket, num_layers, *pool_page] in pinned host memory; donated.
      segment: per stripe, carrier[segment_blocks, layers, *pool_page] in pinned host memory.
      host_block_ids: i32[bucket], positions in the segment to read.
    """

    def pick_rows(staging: Any, segment: Any, host_block_ids: Any) -> Any:
        def copy(staging: Any, segment: Any, i: Any, host_block_id: Any) -> Any:
            for stripe, (first, end) in zip(segment, spec.stripes, strict=True):
                staging = write_rows(staging, read_rows(stripe, host_block_id, (0, end - first)), i, first)
            return staging

        return _on_host(copy, staging, segment, host_block_ids)

    staging = spec.pool_struct(bucket, HOST_MEMORY_KIND)
    args = (staging, spec.segment_structs(), spec.ids_struct(bucket))
    return make_program("pick", pick_rows, args, spec, donate=0, out=staging.sharding)


def make_program(
    name: str, function: Callable[..., Any], args: tuple[Any, ...], spec: TransferSpec, *, donate: int | None, out: Any
) -> Program:
    """Jits `function`, which returns arrays with sharding `out`, and a token."""
    jitted = jax.jit(function, donate_argnums=() if donate is None else (donate,), out_shardings=(out, spec.by_rank))
    return Program(name=name, function=jitted, args=args, platform=spec.platform)


def _by_rank(copy: Callable[..., Any], args: Any, out: Any, spec: TransferSpec) -> Callable[..., Any]:
    """A direct copy for all ranks: on each device with the moves of its rank and its own part of all arrays.

    Args:
      copy: takes a spec and the arguments, the moves last; returns arrays and a token.
      args: shape structs of the arguments.
      out: shardings of the arrays.
      spec: what is copied.
    """
    if spec.num_ranks == 1:
        return functools.partial(copy, spec)
    mesh: Any = spec.by_rank

    def copy_of_rank(*args: Any) -> Any:
        *arrays, moves = args
        copied, token = copy(spec.of_device, *arrays, moves[0])
        return copied, token[None]

    in_specs = jax.tree.map(_axes, args)
    out_specs = jax.tree.map(_axes, (out, spec.by_rank))
    return jax.shard_map(copy_of_rank, mesh=mesh.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _axes(of: Any) -> Any:
    """The mesh axes that an array, given by its shape struct or its sharding, is split over."""
    return of.spec if isinstance(of, NamedSharding) else of.sharding.spec


def pack_rank_moves(ranks: Ids, block_ids: Ids, rows: Ids, *, num_ranks: int, capacity: int) -> Ids:
    """As `pack_moves`, for all ranks.

    Args:
      ranks: i32[n], the rank of each block.
      block_ids: i32[n], blocks of the caches of that rank.
      rows: i32[n], positions in its part of a segment.
      num_ranks: number of ranks.
      capacity: of the program, for each rank.
    Returns:
      i32[num_ranks, 3, capacity].
    """
    moves = [pack_moves(block_ids[ranks == rank], rows[ranks == rank], capacity=capacity) for rank in range(num_ranks)]
    return np.stack(moves)


def pack_moves(block_ids: Ids, rows: Ids, *, capacity: int) -> Ids:
    """Packs block ids, their rows and their number into one array: each argument of a program costs a transfer.

    Args:
      block_ids: i32[n], blocks of the caches.
      rows: i32[n], positions in a segment or rows of a staging array.
      capacity: of the program; entries past `n` are zero and never read.
    Returns:
      i32[3, capacity].
    """
    moves = np.zeros((3, capacity), np.int32)
    num_blocks = len(rows)
    moves[0, :num_blocks], moves[1, :num_blocks], moves[2, 0] = block_ids, rows, num_blocks
    return moves


def _unpack(moves: Any) -> tuple[Any, Any, Any]:
    return moves[0], moves[1], moves[2, 0]


def segment_sharding(spec: TransferSpec) -> list[Any]:
    """Of each stripe of a segment."""
    return [struct.sharding for struct in spec.segment_structs()]


def cpu_carrier(kv_caches: Caches, spec: TransferSpec) -> Caches:
    """The caches bitcast to the carrier type, on CPU only.

    On CPU whole caches are bitcast, outside the loop: the backend widens a page of float8_e5m2 before a bitcast, which
    is not exact. Elsewhere single pages are: on TPU the bitcast of a whole cache would cost a copy.
    """
    return [bitcast(cache, spec.carrier) for cache in kv_caches] if spec.platform == "cpu" else kv_caches


def read_rows(pool: Any, row: Any, layers: LayerRange) -> Any:
    """`pool[row, first:end]` with a leading axis of 1."""
    start = (row, np.int32(layers[0]), *origin(pool))
    return lax.dynamic_slice(pool, start, (1, layers[1] - layers[0], *pool.shape[2:]))


def write_rows(pool: Any, pages: Any, row: Any, first_layer: int = 0) -> Any:
    """`pool` with `pages`, one or more rows, from `pool[row, first_layer:]` on."""
    return lax.dynamic_update_slice(pool, pages, (row, np.int32(first_layer), *origin(pool)))


def origin(pool: Any) -> Any:
    """The start of a slice in the axes of a page."""
    return (np.int32(0),) * (pool.ndim - 2)  # typed: under jax_enable_x64 a plain 0 would not match the i32 ids


def _caches_to_pool(
    stripes: Stripes,
    caches: Caches,
    block_ids: Any,
    rows: Any,
    num_blocks: Any,
    spec: TransferSpec,
    *,
    copies: tuple[tuple[LayerRange, ...], ...],
    space: Any,
) -> Any:
    """Writes block `block_ids[i]` to row `rows[i]` of the stripes, which are in `space`, for each i < num_blocks.

    `copies` has, per stripe, the layer ranges that are copied in one piece.
    """

    def body(i: Any, carry: Any) -> Any:
        stripes, count = carry
        out = []
        for stripe, pieces in zip(stripes, copies, strict=True):
            for first, end in pieces:
                together = read_block(caches[first:end], block_ids[i], spec)
                stripe = write_rows(stripe, jax.device_put(together, space), rows[i], first - pieces[0][0])
            out.append(stripe)
        return out, count + 1

    return lax.fori_loop(0, num_blocks, body, (list(stripes), jnp.int32(0)))


def _pool_to_caches(
    kv_caches: Caches,
    stripes: Stripes,
    block_ids: Any,
    rows: Any,
    num_blocks: Any,
    spec: TransferSpec,
    *,
    copies: tuple[tuple[LayerRange, ...], ...],
) -> Any:
    """Writes row `rows[i]` of the stripes to block `block_ids[i]` of the caches, for each i < num_blocks."""

    def body(i: Any, carry: Any) -> Any:
        caches, count = carry
        out: Caches = []
        for stripe, pieces in zip(stripes, copies, strict=True):
            for first, end in pieces:
                layers = first - pieces[0][0], end - pieces[0][0]
                row, block_id = rows[i], block_ids[i]
                if spec.in_turn and out:  # as `write_block` does within a stripe
                    row, block_id, out[-1] = lax.optimization_barrier((row, block_id, out[-1]))
                pages = jax.device_put(read_rows(stripe, row, layers), Space.Device)
                out += write_block(caches[first:end], pages, block_id, spec)
        return out, count + 1

    caches, count = lax.fori_loop(0, num_blocks, body, (cpu_carrier(kv_caches, spec), jnp.int32(0)))
    return [bitcast(cache, spec.dtype) for cache in caches], count


def _on_host(copy_row: Callable[..., Any], target: Any, source: Any, host_block_ids: Any) -> Any:
    """Applies `target = copy_row(target, source, i, host_block_ids[i])` for every i, on the host's CPU."""

    def copy(target: Any, source: Any, host_block_ids: Any) -> Any:
        def body(_: Any, carry: Any) -> Any:
            target, i = carry
            return copy_row(target, source, i, host_block_ids[i]), i + 1

        return lax.fori_loop(0, host_block_ids.shape[0], body, (target, jnp.int32(0)))

    on_host = compute_on(jax.jit(copy), compute_type="device_host", out_memory_spaces=(Space.Host, Space.Device))
    return on_host(target, source, host_block_ids)
