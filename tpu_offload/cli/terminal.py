"""A command and its process: an end on Ctrl-C, and streams that the caller has closed."""

import contextlib
import os
import signal
import sys
import types
from collections.abc import Callable, Iterator

_SIGNALS = signal.SIGINT, signal.SIGTERM


def interrupt_once() -> None:
    """Makes the first Ctrl-C or SIGTERM a KeyboardInterrupt, and has those after it ignored while the process ends.

    A signal that the caller has ignored, as `nohup` does, is left alone.
    """
    interrupted = False

    def handle(signum: int, frame: types.FrameType | None) -> None:
        nonlocal interrupted
        if not interrupted:
            interrupted = True
            raise KeyboardInterrupt

    for signum in _SIGNALS:
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, handle)


@contextlib.contextmanager
def stop_on_interrupt() -> Iterator[Callable[[], bool]]:
    """Makes the first Ctrl-C or SIGTERM a request to stop after this step, the second one a KeyboardInterrupt."""
    asked = False

    def handle(signum: int, frame: types.FrameType | None) -> None:
        nonlocal asked
        asked = True
        restore()

    def restore() -> None:
        for signum, handler in previous.items():
            signal.signal(signum, handler)

    previous = {s: h for s in _SIGNALS if (h := signal.getsignal(s)) is not signal.SIG_IGN}
    for signum in previous:
        signal.signal(signum, handle)
    try:
        yield lambda: asked
    finally:
        restore()


def open_missing_streams() -> None:
    """Gives standard streams that the caller has closed (`>&-`) somewhere to write to."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  (for the life of the process)
