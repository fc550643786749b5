"""The devices: what can be wrong with them, as one line for a person, and what reports say of them."""

import contextlib
import importlib.metadata
import platform
from collections.abc import Iterator
from typing import Any

import jax

from tpu_offload.errors import InputError


def check_backend() -> None:
    """Finds the devices.

    Raises:
      InputError: there are none; says why.
    """
    try:
        jax.devices()
    except RuntimeError as e:  # an unknown name in JAX_PLATFORMS, or a device that another process holds
        raise InputError(f"jax finds no device: {str(e).partition(chr(10))[0]}") from e


@contextlib.contextmanager
def device_errors(*, make_smaller: str) -> Iterator[None]:
    """Turns a device that has too little memory into an `InputError` that says what to make smaller."""
    try:
        yield
    except jax.errors.JaxRuntimeError as e:
        if "RESOURCE_EXHAUSTED" not in str(e):
            raise
        first_line = str(e).partition("\n")[0]
        raise InputError(f"out of device memory ({first_line}); make {make_smaller} smaller") from e


def environment() -> dict[str, Any]:
    """Versions and device, for whoever compares two files."""
    versions = {"python": platform.python_version()}
    for name in ("tpu_offload", "jax", "jaxlib", "flax", "numpy", "libtpu"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    devices = jax.devices()
    device = {"platform": devices[0].platform, "kind": devices[0].device_kind, "count": len(devices)}
    return {"versions": versions, "device": device}
