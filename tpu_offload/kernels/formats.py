"""The layout of the KV caches in device memory. Copy programs are compiled for exactly that layout.

An array made without a `Format` has the default layout of its shape. On CPU and GPU that is row-major. The TPU
compiler orders the axes for the least padding to tiles of 8 x 128: where the last axis of a page is not a multiple of
128 (a head size of 64, a latent page of 576), the block axis comes last in memory, and a block is a column of tiles.
An engine that wants contiguous blocks makes its caches with a row-major `Format`. Both are supported.
"""

import functools
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.experimental.layout import Layout
from jax.sharding import Sharding

LANES = 128
"""Elements in a row of a TPU tile."""


@functools.lru_cache(maxsize=64)  # asked at each copy, and looking it up takes 5 us with cold processor caches
def platform_of(sharding: Sharding) -> str:
    """Platform of a sharding's devices: `tpu`, `gpu` or `cpu`."""
    device: Any = next(iter(sharding.device_set))
    return str(device.platform)


def layout_of(cache: Any) -> Layout | None:
    """The layout of a cache in device memory; None if it is row-major by default.

    Args:
      cache: an array, or a shape struct whose sharding may be a `Format`; without one the TPU compiler is asked.
    """
    given: Any = cache.format.layout if cache.format is not None else None
    if platform_of(cache.sharding) != "tpu":
        row_major = given is None or tuple(given.major_to_minor) == tuple(range(len(cache.shape)))
        return None if row_major else Layout(given.major_to_minor)
    if isinstance(cache, jax.Array) and given is not None:
        layout: Layout = given
        return layout
    return _ask_compiler(tuple(cache.shape), np.dtype(cache.dtype), cache.format)


@functools.lru_cache(maxsize=64)
def _ask_compiler(shape: tuple[int, ...], dtype: np.dtype[Any], at: Any) -> Layout:
    """The full layout, tiles included, that the compiler chooses for an argument of this shape and `Format`."""
    struct = jax.ShapeDtypeStruct(shape, dtype, sharding=at)
    corner = jax.jit(lambda array: lax.slice(array, (0,) * len(shape), (1,) * len(shape)))
    compiled = corner.trace(struct).lower(lowering_platforms=("tpu",)).compile()
    ((asked,), _) = compiled.input_formats
    layout: Layout = asked.layout
    return layout


def row_major(num_axes: int) -> str:
    """The expression that makes caches with the block axis outermost, for error messages."""
    return (
        f"jax.experimental.layout.Format(jax.experimental.layout.Layout({tuple(range(num_axes))}), cache.sharding), "
        "as out_shardings of the jitted function that makes them and of the engine's step"
    )
