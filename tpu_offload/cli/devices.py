"""What can be wrong with the devices, as one line for a person."""

import contextlib
from collections.abc import Iterator

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
