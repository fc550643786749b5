"""The fused path: copies inside the engine's own jitted step, overlapped with the compute of its layers.

Programs of a device run one after another, so a copy in a program of its own delays the next step. Inside one program
the TPU compiler can start a DMA, continue with matrix products, and wait for it later. Two things prevent that: writes
into the same array are serialized, and a write that nothing depends on is scheduled at the end of the program. So:

- A segment of the host pool is split into stripes, each with some of the layers (`TransferSpec.stripes`). When the last
  layer of a stripe has written its KV, the pages to save are gathered in HBM.
- After each layer at most one DMA per stripe is started. An optimization barrier makes the residual stream depend on
  the DMAs started one layer earlier: each overlaps with one layer's compute, and HBM holds the pages of only a few
  stripes.
- Loads read their stripe early and write it into the caches after the layer, whose attention never reads the blocks
  that a load is filling.

`benchmarks/bench_tpu_compile.py` shows how much of it overlaps in the compiler's schedule.

The step is compiled for fixed numbers of chunks. A chunk is `blocks_per_chunk` blocks at adjacent positions of the
segment. There is no padding: chunks beyond a compiled number use the direct path, outside the step.

    fused = worker.fused_step()                       # outside; often there is nothing to copy
    step(..., fused.segment, fused.inputs)            # donates `segment`, not `inputs`

    copies = FusedCopies(segment, inputs)             # inside
    for i, layer in enumerate(layers):
        x, kv_caches[i] = layer(x, kv_caches[i])      # writes this step's KV
        x, kv_caches[i] = copies.after_layer(i, x, kv_caches[i])
    outcome = copies.finish()                         # an output of the step, for `worker.end_step`
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar, final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tpu_offload.kernels.copier import Segment
from tpu_offload.kernels.pages import bitcast, read_block, write_block
from tpu_offload.kernels.programs import cpu_carrier
from tpu_offload.kernels.spec import LayerRange, TransferSpec

Space = jax.memory.Space
_X = TypeVar("_X")


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["save_block_ids", "save_rows", "load_block_ids", "load_rows", "load_segment"],
    meta_fields=["spec"],
)
@dataclasses.dataclass(frozen=True, slots=True)
class FusedInputs:
    """What a step copies; a pytree argument of the jitted step, not donated.

    Attributes:
      save_block_ids: i32[num_saves, blocks_per_chunk], blocks of the caches to read.
      save_rows: i32[num_saves], first position of each chunk in the segment.
      load_block_ids: i32[num_loads, blocks_per_chunk], blocks of the caches to write.
      load_rows: i32[num_loads], first position of each chunk in `load_segment`.
      load_segment: the segment to load from; empty when nothing is loaded.
      spec: shapes; part of the tree's structure.
    """

    save_block_ids: Any
    save_rows: Any
    load_block_ids: Any
    load_rows: Any
    load_segment: Segment
    spec: TransferSpec

    @property
    def num_saves(self) -> int:
        """Chunks to save."""
        return len(self.save_rows)

    @property
    def num_loads(self) -> int:
        """Chunks to load."""
        return len(self.load_rows)


class FusedStep(NamedTuple):
    """The copy arguments of one step; the step must donate `segment`.

    Attributes:
      segment: per stripe, the segment to save into; empty when nothing is saved.
      inputs: all else; None when nothing is copied.
    """

    segment: Sequence[Any] = ()
    inputs: FusedInputs | None = None


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["segment", "save_token", "load_token"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True, slots=True)
class FusedOutcome:
    """The copy results of one step; a pytree.

    Attributes:
      segment: the donated segment's successor, in pinned host memory.
      save_token: i32[], the number of blocks saved; ready when the step is.
      load_token: i32[], the number of blocks loaded.
    """

    segment: list[Any]
    save_token: Any
    load_token: Any


@final
class FusedCopies:
    """Traces the copies of one step. Make a new one in each trace.

    Args:
      segment: `FusedStep.segment`.
      inputs: `FusedStep.inputs`; with None all calls return their arguments unchanged.
    """

    def __init__(self, segment: Sequence[Any], inputs: FusedInputs | None) -> None:
        self._inputs = inputs
        self._segment = list(segment)
        # Per stripe, the chunks that are gathered in HBM and whose DMA is not started yet.
        self._staged: list[list[Any]] = [[] for _ in segment]
        self._in_flight: list[int] = []
        self._pages: list[jax.Array] = []  # of the current stripe's layers
        self._arriving: dict[int, Any] = {}

    def after_layer(self, layer: int, x: _X, kv_cache: jax.Array) -> tuple[_X, jax.Array]:
        """Call it after each layer, in order, once the layer has written its KV and attended.

        Args:
          layer: index of the cache.
          x: the residual stream: any pytree that all later compute depends on.
          kv_cache: dtype[num_blocks, *page_shape], this layer's cache.
        Returns:
          `x` with the same value, and the cache with the loaded blocks in it.
        """
        if self._inputs is not None and self._inputs.num_loads:
            # Tied to the layer's result: XLA copies the whole cache unless it knows that the layer has read it before
            # it is written again.
            x, kv_cache = lax.optimization_barrier((x, kv_cache))
            kv_cache = self._write_loads(self._inputs, layer, kv_cache)
        if self._inputs is not None and self._inputs.num_saves:
            self._stage(self._inputs, layer, kv_cache)
            x = self._start_some(self._inputs, x)
        return x, kv_cache

    def finish(self) -> FusedOutcome | None:
        """Call it after the last layer. The result must be an output of the step."""
        if self._inputs is None:
            return None
        while any(self._staged):
            self._start_some(self._inputs, ())
        return FusedOutcome(self._segment, _count(self._inputs.save_block_ids), _count(self._inputs.load_block_ids))

    # Loads.

    def _write_loads(self, inputs: FusedInputs, layer: int, kv_cache: jax.Array) -> jax.Array:
        stripe, (first, _) = _stripe_of(inputs.spec, layer)
        if stripe not in self._arriving:
            self._arriving[stripe] = self._read_chunks(inputs, stripe)
        (cache,) = cpu_carrier([kv_cache], inputs.spec)
        for pages, block_ids in zip(self._arriving[stripe], inputs.load_block_ids, strict=True):
            cache = _scatter(cache, pages[:, layer - first], block_ids, inputs.spec)
        written: jax.Array = bitcast(cache, inputs.spec.dtype)
        return written

    def _read_chunks(self, inputs: FusedInputs, stripe: int) -> list[Any]:
        """Per chunk, carrier[blocks_per_chunk, layers of the stripe, *pool_page], being copied to HBM."""
        source = inputs.load_segment[stripe]
        shape = (inputs.load_block_ids.shape[1], *source.shape[1:])
        return [
            jax.device_put(lax.dynamic_slice(source, (row, *_origin(source)), shape), Space.Device)
            for row in inputs.load_rows
        ]

    # Saves.

    def _stage(self, inputs: FusedInputs, layer: int, kv_cache: jax.Array) -> None:
        """Gathers the pages of each chunk in HBM once the last layer of the stripe is done."""
        stripe, (_, end) = _stripe_of(inputs.spec, layer)
        self._pages += cpu_carrier([kv_cache], inputs.spec)
        if layer + 1 == end:
            caches, self._pages = self._pages, []
            self._staged[stripe] = [_gather(caches, block_ids, inputs.spec) for block_ids in inputs.save_block_ids]

    def _start_some(self, inputs: FusedInputs, x: _X) -> _X:
        """Waits for the DMAs of the previous call and starts at most one per stripe."""
        if self._in_flight:
            arrived = [self._segment[stripe] for stripe in self._in_flight]
            x, arrived = lax.optimization_barrier((x, arrived))
            for stripe, array in zip(self._in_flight, arrived, strict=True):
                self._segment[stripe] = array
        self._in_flight = [stripe for stripe, chunks in enumerate(self._staged) if chunks]
        for stripe in self._in_flight:
            chunk = inputs.num_saves - len(self._staged[stripe])
            pages = jax.device_put(self._staged[stripe].pop(0), Space.Host)
            target = self._segment[stripe]
            start = (inputs.save_rows[chunk], *_origin(target))
            self._segment[stripe] = lax.dynamic_update_slice(target, pages, start)
        return x


def _stripe_of(spec: TransferSpec, layer: int) -> tuple[int, LayerRange]:
    for i, (first, end) in enumerate(spec.stripes):
        if first <= layer < end:
            return i, (first, end)
    raise ValueError(f"layer {layer}; expected 0 to {spec.num_layers - 1}")


def _gather(caches: list[Any], block_ids: Any, spec: TransferSpec) -> Any:
    """carrier[len(block_ids), len(caches), *pool_page] in HBM, a separate array: the source of one DMA."""
    struct = spec.staging_struct(len(block_ids), len(caches))
    empty = lax.empty(struct.shape, struct.dtype, out_sharding=struct.sharding if spec.explicit else None)

    def body(_: Any, carry: Any) -> Any:
        pages, i = carry  # i is i32 under jax_enable_x64 too
        return lax.dynamic_update_slice(pages, read_block(caches, block_ids[i], spec), (i, *_origin(pages))), i + 1

    return lax.fori_loop(0, len(block_ids), body, (empty, jnp.int32(0)))[0]


def _scatter(cache: Any, pages: Any, block_ids: Any, spec: TransferSpec) -> Any:
    """The cache with this layer's `pages[i]` in block `block_ids[i]`."""

    def body(i: Any, cache: Any) -> Any:
        return write_block([cache], lax.dynamic_index_in_dim(pages, i)[:, None], block_ids[i], spec)[0]

    return lax.fori_loop(0, len(block_ids), body, cache)


def _origin(pool: Any) -> Any:
    return (np.int32(0),) * (pool.ndim - 1)


def _count(block_ids: Any) -> jax.Array:
    """The number of block ids, computed on device: a forwarded argument would be ready before the program has run."""
    return jnp.sum(block_ids >= 0, dtype=jnp.int32)
