"""Asking arrays whether they are computed yet, waiting for them, never for ever, and what to do when they are gone."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tpu_offload.errors import CachesLostError

# A look every twentieth of what the wait has taken so far: short waits are measured well, long ones cost no CPU.
_SHORTEST_SLEEP_S, _LONGEST_SLEEP_S, _SHARE = 20e-6, 5e-3, 0.05


def check_alive(kv_caches: Iterable[jax.Array], error: Exception) -> None:
    """Raises CachesLostError if a program that failed had taken the donated caches: no step can run on them."""
    if any(cache.is_deleted() for cache in kv_caches):
        raise CachesLostError(
            f"a load failed and took the KV caches with it ({type(error).__name__}: {error}); the engine has to make "
            "new caches and compute every running request again"
        ) from error


def renew(kv_caches: Sequence[jax.Array]) -> list[jax.Array]:
    """Caches of zeros in place of these, some of which a program that failed has taken.

    What is left of the old ones goes first and each shard is made where it belongs, so that no device ever holds more
    than before. Every process makes its own shards and waits for no other, which may have kept its caches.
    """
    for cache in kv_caches:
        if not cache.is_deleted():
            cache.delete()
    programs: dict[Any, Any] = {}
    return [_zeros(cache.shape, cache.dtype, cache.sharding, programs) for cache in kv_caches]


def _zeros(shape: tuple[int, ...], dtype: Any, sharding: jax.sharding.Sharding, programs: dict[Any, Any]) -> jax.Array:
    shard_shape, shards = sharding.shard_shape(shape), []
    for device in sharding.addressable_devices:
        key = shard_shape, dtype, device
        if key not in programs:
            place = jax.sharding.SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
            programs[key] = jax.jit(lambda: jnp.zeros(shard_shape, dtype), out_shardings=place)
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
