"""Asking arrays whether they are computed yet, and waiting for them, never for ever."""

import time
from collections.abc import Callable, Iterable
from typing import Any

import jax

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
