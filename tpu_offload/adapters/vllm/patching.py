"""Wraps a function of vLLM or tpu-inference, once in a process however often it is asked to."""

import functools
from collections.abc import Callable
from typing import Any


def wrap_once(owner: Any, name: str, call: Callable[..., Any]) -> None:
    """Replaces a function of a class or module; does nothing if it is wrapped already, or this version has none.

    Args:
      owner: the class or module.
      name: the function.
      call: called in its place, with the function itself in front of the arguments.
    """
    original = getattr(owner, name, None)
    if original is None or hasattr(original, "by_tpu_offload"):
        return

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return call(original, *args, **kwargs)

    wrapped.by_tpu_offload = True  # type: ignore[attr-defined, unused-ignore]
    setattr(owner, name, wrapped)
