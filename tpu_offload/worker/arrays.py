"""Polls arrays for readiness, waits for them with a timeout, and replaces donated caches that were lost."""

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout

from tpu_offload.errors import CachesLostError

# Sleeps are a twentieth of the time waited so far: short waits are measured well, long ones cost little CPU.
_SHORTEST_SLEEP_S, _LONGEST_SLEEP_S, _SHARE = 20e-6, 5e-3, 0.05


def check_alive(kv_caches: Iterable[jax.Array], error: Exception) -> None:
    """Raises CachesLostError if a failed program had taken the donated caches: no step can run on them."""
    if any(cache.is_deleted() for cache in kv_caches):
        raise CachesLostError(
            f"a copy failed and took the KV caches with it ({type(error).__name__}: {error}), or they were lost "
            "before; the engine must make new caches, and recompute or end every running request"
        ) from error


def renew(kv_caches: Sequence[jax.Array], *, layouts: Sequence[Layout | None] = ()) -> list[jax.Array]:
    """Makes caches of zeros in place of these, some of which a failed program has taken.

    The remaining old caches are deleted first and each shard is made on its device, so no device ever holds more than
    before. Every process makes its own shards without waiting for the others, which may have kept their caches.

    Args:
      kv_caches: the old caches.
      layouts: their layouts in device memory, read from `cache.format.layout` while they were alive: deleted arrays
        have none. Empty, or None for a cache, means the default layout of its shape.
    """
    for cache in kv_caches:
        if not cache.is_deleted():
            cache.delete()
    programs: dict[Any, Any] = {}
    layouts = layouts or [None] * len(kv_caches)
    return [_zeros(cache, layout, programs) for cache, layout in zip(kv_caches, layouts, strict=True)]


def _zeros(like: jax.Array, layout: Layout | None, programs: dict[Any, Any]) -> jax.Array:
    shape, sharding = like.shape, like.sharding
    shard_shape, shards = sharding.shard_shape(shape), []
    for device in sharding.addressable_devices:
        key = shard_shape, like.dtype, device, layout
        if key not in programs:
            place: Any = jax.sharding.SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
            place = Format(layout, place) if layout is not None else place
            programs[key] = jax.jit(functools.partial(jnp.zeros, shard_shape, like.dtype), out_shardings=place)
        # The engine may have set the mesh of all devices, in which jax refuses a program of one.
        with jax.set_mesh(jax.sharding.Mesh(np.array([device]), ("device",))):
            shards.append(programs[key]())
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def is_ready(array: Any) -> bool:
    """Whether the array is computed, or has failed; reading its value raises the error."""
    try:
        return bool(array.is_ready())
    except RuntimeError:
        return True


def wait_until(condition: Callable[[], bool], *, timeout_s: float) -> bool:
    """Waits until a condition holds; returns whether it does.

    `block_until_ready` has no timeout: the caller would hang with the device.
    """
    start_s = time.monotonic()
    while not condition():
        waited_s = time.monotonic() - start_s
        if waited_s >= timeout_s:
            return False
        time.sleep(min(max(_SHORTEST_SLEEP_S, _SHARE * waited_s), _LONGEST_SLEEP_S, timeout_s - waited_s))
    return True


def wait_for_all(arrays: Iterable[Any], *, timeout_s: float) -> bool:
    """Waits for all of these arrays; returns whether they are ready."""
    waiting = list(arrays)
    return wait_until(lambda: all(map(is_ready, waiting)), timeout_s=timeout_s)


def wait_for_any(arrays: Iterable[Any], *, timeout_s: float) -> bool:
    """Waits for any of these arrays; returns whether one is ready."""
    waiting = list(arrays)
    return wait_until(lambda: any(map(is_ready, waiting)), timeout_s=timeout_s)
