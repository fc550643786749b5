"""Compilation on background threads, so that slow programs compile concurrently."""

import concurrent.futures
import threading
from collections.abc import Callable
from typing import Any


def compile_in_background(lower: Callable[..., Any], *args: Any) -> concurrent.futures.Future[Any]:
    """Traces, lowers and compiles a program on a new thread.

    It is a daemon thread: at exit the interpreter would wait for the threads of an executor. A process that ends while
    one is running should use `os._exit`.

    Args:
      lower: returns a `jax.stages.Lowered`.
      args: for `lower`.
    Returns:
      A future of the compiled program, or of the exception.
    """
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(lower(*args).compile())
        except BaseException as e:
            future.set_exception(e)

    threading.Thread(target=run, name="compile", daemon=True).start()
    return future
