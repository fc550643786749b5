"""Compiling on threads, for programs that take long, so that they compile beside each other."""

import concurrent.futures
import threading
from collections.abc import Callable
from typing import Any


def compile_in_background(lower: Callable[..., Any], *args: Any) -> concurrent.futures.Future[Any]:
    """Traces, lowers and compiles a program on a thread of its own.

    It is a daemon, unlike those of an executor, which the interpreter waits for at its end although nobody
    wants the program any more. A process that ends while one is alive is best left with `os._exit`.

    Args:
      lower: returns a `jax.stages.Lowered`.
      args: for `lower`.
    Returns:
      Has the compiled program, or what making it raised.
    """
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(lower(*args).compile())
        except BaseException as e:
            future.set_exception(e)

    threading.Thread(target=run, name="compile", daemon=True).start()
    return future
