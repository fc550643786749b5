"""Asking arrays whether they are computed yet, waiting for them, never for ever, and what to do when they are gone."""

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout

from tpu_offload.errors import CachesLostError

# A look every twentieth of what the wait has taken so far: short waits are measured well, long ones cost no CPU.
_SHORTEST_SLEEP_S, _LONGEST_SLEEP_S, _SHARE = 20e-6, 5e-3, 0.05


def check_alive(kv_caches: Iterable[jax.Array], error: Exception) -> None:
    """Raises CachesLostError if a program that failed had taken the donated caches: no step can run on them."""
    if any(cache.is_deleted() for cache in kv_caches):
        raise CachesLostError(
            f"a copy failed and took the KV caches with it ({type(error).__name__}: {error}), or they were gone "
            "before; the engine has to make new caches and compute every running request again"
        ) from error


def renew(kv_caches: Sequence[jax.Array], *, layouts: Sequence[Layout | None] = ()) -> list[jax.Array]:
    """Caches of zeros in place of these, some of which a program that failed has taken.

    What is left of the old ones goes first and each shard is made where it belongs, so that no device ever holds more
    than before. Every process makes its own shards and waits for no other, which may have kept its caches.

    Args:
      kv_caches: the old ones.
      layouts: their layouts in device memory, `cache.format.layout` while they were alive: those that are deleted no
        longer tell. Empty, or None for a cache, for the default of their shape.
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
        shards.append(programs[key]())
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def is_ready(array: Any) -> bool:
    """Whether the array is computed, or never will be; asking for its value tells which."""
    try:
        return bool(array.is_ready())
    except RuntimeError:
        return True


def wait_until(condition: Callable[[], bool], *, timeout_s: float) -> bool:
    """Waits until a condition holds, and says whether it does.

    `block_until_ready` knows no bound: a device that hangs would take its caller along.
    """
    start_s = time.monotonic()
    while not condition():
        waited_s = time.monotonic() - start_s
        if waited_s >= timeout_s:
            return False
        time.sleep(min(max(_SHORTEST_SLEEP_S, _SHARE * waited_s), _LONGEST_SLEEP_S, timeout_s - waited_s))
    return True


def wait_for_all(arrays: Iterable[Any], *, timeout_s: float) -> bool:
    """Waits for all of these arrays; whether they are ready now."""
    waiting = list(arrays)
    return wait_until(lambda: all(map(is_ready, waiting)), timeout_s=timeout_s)


def wait_for_any(arrays: Iterable[Any], *, timeout_s: float) -> bool:
    """Waits for the first of these arrays; whether one is ready now."""
    waiting = list(arrays)
    return wait_until(lambda: any(map(is_ready, waiting)), timeout_s=timeout_s)
