"""Device errors as one-line messages, and the description of devices and versions in reports."""

import contextlib
import importlib.metadata
import platform
from collections.abc import Iterator
from typing import Any

import jax

from tpu_offload import __version__
from tpu_offload.errors import InputError


def check_backend() -> None:
    """Initializes the backend.

    Raises:
      InputError: there is no device; the message has the reason.
    """
    try:
        jax.devices()
    except RuntimeError as e:  # an unknown name in JAX_PLATFORMS, or a device in use by another process
        raise InputError(f"jax finds no device: {str(e).partition(chr(10))[0]}") from e


@contextlib.contextmanager
def device_errors(*, make_smaller: str) -> Iterator[None]:
    """Converts an out-of-memory error of the device into an `InputError` that names what to make smaller."""
    try:
        yield
    except jax.errors.JaxRuntimeError as e:
        if "RESOURCE_EXHAUSTED" not in str(e):
            raise
        first_line = str(e).partition("\n")[0]
        raise InputError(f"out of device memory ({first_line}); make {make_smaller} smaller") from e


def environment() -> dict[str, Any]:
    """Versions and devices, for the JSON file."""
    versions = {"python": platform.python_version(), "tpu_offload": __version__}
    for name in ("jax", "jaxlib", "flax", "numpy", "libtpu"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    devices = jax.devices()
    device = {"platform": devices[0].platform, "kind": devices[0].device_kind, "count": len(devices)}
    return {"versions": versions, "device": device}
