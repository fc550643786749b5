"""A synthetic model step that runs beside copies, or with fused copies inside."""

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
    """A synthetic forward pass of a few milliseconds, with the layers that fused copies need.

    Each layer writes its KV into block 0 of its cache, reads it back as attention would, and multiplies by two
    matrices. The number of rows sets the step's duration. The step is the same for every copy path; fused copies are
    compiled in only for `fused`.

    Args:
      caches: per layer, dtype[num_blocks, *page_shape]; the step is compiled for their shapes.
      target_s: approximate duration of a step.
    """

    def __init__(self, caches: Caches, *, target_s: float) -> None:
        self._spec = TransferSpec.from_caches(caches, segment_blocks=1, capacity=1)
        on_cpu = self._spec.platform == "cpu"
        # One layer with the fewest rows takes well under 20 us on a CPU and on any accelerator.
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
        """The number of rows for the target duration, timed on the matrix products alone, which compile quickly."""
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
            wanted = max(1, round(num_tiles * min(ratio, 16)))  # few rows predict many poorly, so grow step by step
            if 0.8 < ratio < 1.25 or wanted == num_tiles:
                break
            num_tiles = wanted
        return num_tiles * self._row_tile

    def compile_fused(self, shapes: Sequence[FusedStep], *, sizes: Collection[int]) -> None:
        """Starts compiling the step for copies in one direction in the background; see `wait_for_fused`.

        Args:
          shapes: `OffloadWorker.fused_shapes()`.
          sizes: numbers of runs to compile for; steps that copy in both directions are skipped.
        """
        for fused in shapes:
            assert fused.inputs is not None, "a shape that copies nothing"
            num_saves, num_loads = fused.inputs.num_saves, fused.inputs.num_loads
            if 0 in (num_saves, num_loads) and num_saves + num_loads in sizes:
                self._fused[num_saves, num_loads] = compile_in_background(self._lower, fused)

    def wait_for_plain(self) -> None:
        """Blocks until the step without copies is compiled; re-raises the compilation's exception."""
        self._plain.result()

    def wait_for_fused(self, direction: Direction, size: int, *, seconds: float) -> None:
        """Blocks until the step that copies `size` runs in that direction is compiled.

        Raises:
          TimeoutError: it is not compiled after that many seconds; compilation continues.
          Exception: any exception of the compilation.
        """
        self._fused[(size, 0) if direction is Direction.SAVE else (0, size)].result(timeout=seconds)

    def dispatch(self, caches: Caches, fused: FusedStep | None = None) -> tuple[Caches, FusedOutcome | None]:
        """Starts one step; donates the caches.

        Args:
          caches: per layer, dtype[num_blocks, *page_shape].
          fused: copies to run inside, of a compiled shape; its segment is donated.
        """
        fused = fused or FusedStep()
        if fused.inputs is None:
            program = self._plain.result()
        else:
            program = self._fused[fused.inputs.num_saves, fused.inputs.num_loads].result()
        self._x, caches, outcome = program(self._x, self._weights, caches, *fused)
        return caches, outcome

    def wait(self) -> None:
        """Waits for the output of the last step, as an engine waits for its tokens."""
        self._x.block_until_ready()

    def reset(self) -> None:
        """Drops the output of the last step; call it after a failed step."""
        self._x = self._make_x(self._num_rows)

    def _make_x(self, num_rows: int) -> jax.Array:
        up = self._weights[0]
        x: jax.Array = jax.device_put(jnp.full((num_rows, up.shape[0]), 0.5, up.dtype), self._spec.replicated)
        return x

    def _lower(self, fused: FusedStep) -> Any:
        return self._jitted.lower(self._x, self._weights, self._spec.cache_structs(), *fused)


def _forward(x: Any, weights: Any, caches: Any, segment: Any, inputs: Any) -> Any:
    """One step: returns x, the caches, and the result of `FusedCopies.finish`."""
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
