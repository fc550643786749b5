"""Asking arrays whether they are computed yet."""

from collections.abc import Iterable
from typing import Any

import jax

from tpu_offload.errors import TransferError


def check_alive(kv_caches: Iterable[jax.Array], error: Exception) -> None:
    """Raises TransferError if a program that failed had taken the donated caches: no step can run on them."""
    if any(cache.is_deleted() for cache in kv_caches):
        raise TransferError(
            f"a load failed and took the KV caches with it ({type(error).__name__}: {error}); the engine has to make "
            "new caches and compute every running request again"
        ) from error


def is_ready(array: Any) -> bool:
    """Whether the array is computed, or never will be; asking for its value tells which."""
    try:
        return bool(array.is_ready())
    except RuntimeError:
        return True


def block(array: jax.Array) -> None:
    """Waits for an array; what went wrong with it is found by whoever takes its value."""
    try:
        array.block_until_ready()
    except RuntimeError:
        return
