"""Interrupts (Ctrl-C, SIGTERM) of a running command.

Python raises KeyboardInterrupt wherever the main thread happens to be. Out of a destructor or a callback of the garbage
collector (jax installs one) no exception propagates: Python gives it to `sys.unraisablehook` and goes on, and the
command would not hear of the interrupt. Such an interrupt is raised again a moment later, until one propagates.
"""

import contextlib
import os
import signal
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, Final

_SIGNALS = signal.SIGINT, signal.SIGTERM
_REPEAT_S = 0.01
_MAX_SIGNALS = 5
INTERRUPTED: Final = 130


class _Interrupt(KeyboardInterrupt):
    def __init__(self, signum: int) -> None:
        super().__init__()
        self.signum = signum


class _InterruptOnce:
    """Handler of the signals; see `interrupt_once`."""

    def __init__(self) -> None:
        self.num_signals = 0
        self._discarded: int | None = None  # signal whose exception was discarded

    def handle(self, signum: int, frame: types.FrameType | None) -> None:
        self.num_signals += 1
        if self.num_signals == 1:
            raise _Interrupt(signum)
        if self.num_signals >= _MAX_SIGNALS:
            os._exit(INTERRUPTED)

    def on_unraisable(self, unraisable: Any) -> None:
        """Replaces `sys.unraisablehook`."""
        if isinstance(unraisable.exc_value, _Interrupt):
            self._discarded = unraisable.exc_value.signum
            signal.setitimer(signal.ITIMER_REAL, _REPEAT_S)  # raising it in this hook would discard it again
        else:
            sys.__unraisablehook__(unraisable)

    def repeat(self, signum: int, frame: types.FrameType | None) -> None:
        """Handler of the timer."""
        while frame is not None:
            if frame.f_code is _InterruptOnce.on_unraisable.__code__:
                signal.setitimer(signal.ITIMER_REAL, _REPEAT_S)
                return
            frame = frame.f_back
        if self._discarded is not None:
            discarded, self._discarded, self.num_signals = self._discarded, None, 0
            signal.raise_signal(discarded)  # a command may have set another handler since


def interrupt_once() -> None:
    """Makes the first Ctrl-C or SIGTERM a KeyboardInterrupt and ignores later ones, while the process ends.

    The fifth ends the process without clean-up, should code between the signal and the command have caught the
    KeyboardInterrupt. A signal that the caller ignores (`nohup`) stays ignored. Takes SIGALRM and
    `sys.unraisablehook`. Only in the main thread.
    """
    once = _InterruptOnce()
    signal.signal(signal.SIGALRM, once.repeat)
    sys.unraisablehook = once.on_unraisable
    for signum in _SIGNALS:
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, once.handle)
    signal.set_wakeup_fd(-1)  # of `tpu_offload_command`, which ends the process while modules are imported


def was_interrupted() -> bool:
    """Whether a signal has come since `interrupt_once`; while C extensions are imported it becomes an ImportError."""
    once = _interrupts()
    return once is not None and once.num_signals > 0


def _interrupts() -> _InterruptOnce | None:
    once = getattr(signal.getsignal(signal.SIGALRM), "__self__", None)
    return once if isinstance(once, _InterruptOnce) else None


@contextlib.contextmanager
def ended_by_interrupt(prog: str) -> Iterator[None]:
    """While a command imports packages, a signal ends the process immediately, with the line of `run_command`.

    numpy would print a traceback of the import that a KeyboardInterrupt ends. Does nothing without `interrupt_once`.

    Args:
      prog: the program's name.
    """

    def end(signum: int, frame: types.FrameType | None) -> None:
        try:
            os.write(2, f"{prog}: interrupted\n".encode())
        finally:
            os._exit(INTERRUPTED)

    is_handled = _interrupts() is not None
    before = {s: h for s in _SIGNALS if is_handled and (h := signal.getsignal(s)) is not signal.SIG_IGN}
    for signum in before:
        signal.signal(signum, end)
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@contextlib.contextmanager
def stop_on_interrupt() -> Iterator[Callable[[], bool]]:
    """Makes the first Ctrl-C or SIGTERM a request to stop after the current step, the second a KeyboardInterrupt."""
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
