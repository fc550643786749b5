"""A model step for copies to get in the way of, or to run inside of."""

import concurrent.futures
import time
from collections.abc import Collection, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
from jax import lax

from tpu_offload import FusedCopies, FusedOutcome, FusedStep
from tpu_offload.kernels import TransferSpec
from tpu_offload.measure.baselines import Caches
from tpu_offload.measure.compiling import compile_in_background
from tpu_offload.types import Direction

_NUM_TRIES = 4
_NUM_TIMED = 5


@final
class ModelStep:
    """Stands for a forward pass, of a few milliseconds, with the layers that fused copies need.

    Each layer writes its KV into block 0 of its cache, reads it back as attention would, and multiplies
    with two matrices. How many rows go through them is what makes a step as long as wanted. It is the same
    step for every copy path: without fused copies it is compiled with none in it.

    Args:
      caches: per layer, dtype[num_blocks, *page_shape]; what a step is compiled for.
      target_s: how long a step is to take, about.
    """

    def __init__(self, caches: Caches, *, target_s: float) -> None:
        self._spec = TransferSpec.from_caches(caches, segment_blocks=1, capacity=1)
        on_cpu = self._spec.platform == "cpu"
        # One layer of the fewest rows is well under 20 us on a CPU, and on any accelerator.
        width, self._row_tile, dtype = (64, 8, jnp.float32) if on_cpu else (2048, 128, jnp.bfloat16)
        up = jnp.full((width, 4 * width), 1 / width, dtype)
        self._weights = jax.device_put((up, up.T), self._spec.replicated)
        self._num_rows = self._find_num_rows(target_s)
        self._x = self._make_x(self._num_rows)
        shardings = [cache.sharding for cache in caches]
        self._jitted = jax.jit(_forward, donate_argnums=(2, 3), out_shardings=(self._spec.replicated, shardings, None))
        self._plain = compile_in_background(self._lower, FusedStep())
        self._fused: dict[tuple[int, int], concurrent.futures.Future[Any]] = {}

    def _find_num_rows(self, target_s: float) -> int:
        """How many rows take as long as wanted, by the matrix products alone: those compile in a moment."""
        num_layers = self._spec.num_layers
        products = jax.jit(lambda x, w: lax.fori_loop(0, num_layers, lambda _, x: _layer(x, w), x))
        num_tiles = 1
        for _ in range(_NUM_TRIES):
            x = self._make_x(num_tiles * self._row_tile)
            seconds = []
            for _ in range(_NUM_TIMED):  # the first compiles
                start_s = time.perf_counter()
                products(x, self._weights).block_until_ready()
                seconds.append(time.perf_counter() - start_s)
            ratio = target_s / min(seconds)
            wanted = max(1, round(num_tiles * min(ratio, 16)))  # few rows say little of many
            if 0.8 < ratio < 1.25 or wanted == num_tiles:
                break
            num_tiles = wanted
        return num_tiles * self._row_tile

    def compile_fused(self, shapes: Sequence[FusedStep], *, sizes: Collection[int]) -> None:
        """Starts to compile the step for copies in one direction, on threads; `wait_for_fused` says how it went.

        Args:
          shapes: `OffloadWorker.fused_shapes()`.
          sizes: numbers of runs to compile for; steps that copy both ways are left out.
        """
        for fused in shapes:
            assert fused.inputs is not None, "a shape that copies nothing"
            num_saves, num_loads = fused.inputs.num_saves, fused.inputs.num_loads
            if 0 in (num_saves, num_loads) and num_saves + num_loads in sizes:
                self._fused[num_saves, num_loads] = compile_in_background(self._lower, fused)

    def wait_for_plain(self) -> None:
        """Blocks until the step without copies is compiled; raises what compiling it raised."""
        self._plain.result()

    def wait_for_fused(self, direction: Direction, size: int, *, seconds: float) -> None:
        """Blocks until the step that copies `size` runs in that direction is compiled.

        Raises:
          TimeoutError: it is not, after that many seconds. It goes on compiling.
          Exception: whatever compiling it raised.
        """
        self._fused[(size, 0) if direction is Direction.SAVE else (0, size)].result(timeout=seconds)

    def dispatch(self, caches: Caches, fused: FusedStep | None = None) -> tuple[Caches, FusedOutcome | None]:
        """Starts one step; donates the caches.

        Args:
          caches: per layer, dtype[num_blocks, *page_shape].
          fused: copies to take along, of a shape that was compiled; its segment is donated.
        """
        fused = fused or FusedStep()
        if fused.inputs is None:
            program = self._plain.result()
        else:
            program = self._fused[fused.inputs.num_saves, fused.inputs.num_loads].result()
        self._x, caches, outcome = program(self._x, self._weights, caches, *fused)
        return caches, outcome

    def wait(self) -> None:
        """Waits for what the last step computed, as an engine does for its tokens."""
        self._x.block_until_ready()

    def reset(self) -> None:
        """Forgets what the last step computed; to be called when that has failed."""
        self._x = self._make_x(self._num_rows)

    def _make_x(self, num_rows: int) -> jax.Array:
        up = self._weights[0]
        x: jax.Array = jax.device_put(jnp.full((num_rows, up.shape[0]), 0.5, up.dtype), self._spec.replicated)
        return x

    def _lower(self, fused: FusedStep) -> Any:
        return self._jitted.lower(self._x, self._weights, self._spec.cache_structs(), *fused)


def _forward(x: Any, weights: Any, caches: Any, segment: Any, inputs: Any) -> Any:
    """One step: x, of any number of rows, the caches, and what `FusedCopies.finish` returns."""
    copies = FusedCopies(segment, inputs)
    out = []
    for layer, cache in enumerate(caches):
        page = jnp.broadcast_to(x[0, 0], (1, *cache.shape[1:])).astype(cache.dtype)
        cache = lax.dynamic_update_slice_in_dim(cache, page, 0, axis=0)
        attended = lax.dynamic_slice_in_dim(cache, 0, 1, axis=0).astype(jnp.float32).mean()
        x = _layer(x + attended.astype(x.dtype), weights)
        x, cache = copies.after_layer(layer, x, cache)
        out.append(cache)
    return x, out, copies.finish()


def _layer(x: Any, weights: Any) -> Any:
    up, down = weights
    return jnp.tanh(jnp.tanh(x @ up) @ down)
