"""Starts `tpu-offload`. Outside the package, because importing a command takes seconds, and Ctrl-C must work then."""

import _thread
import importlib
import os
import signal
import sys
from typing import NoReturn

_PROG = "tpu-offload"
_SIGNALS = signal.SIGINT, signal.SIGTERM
_INTERRUPTED = 130


def run(*, prog: str = _PROG, module: str = "tpu_offload.cli.main") -> NoReturn:
    """Imports a command and runs it. An interrupt during the import ends the process immediately.

    Args:
      prog: the command's name, for the message on an interrupt.
      module: module with the command's `run`, which then handles signals (`tpu_offload.cli.interrupts`).
    """
    # On a thread: Python runs handlers of signals in the main thread, not while that one blocks in a system call, and
    # imported modules may catch what a handler raises.
    received, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup)
    _thread.start_new_thread(_end_on_signal, (received, prog))
    for signum in _SIGNALS:
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, lambda signum, frame: None)
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as e:
        if e.name != "click":  # for parsing flags; packages that only some commands need are checked later
            raise
        os.write(2, f"{prog}: error: click is not installed; install with: pip install 'tpu_offload[cli]'\n".encode())
        sys.exit(2)
    imported.run()
    raise AssertionError(f"{module}.run() has returned")


def _end_on_signal(received: int, prog: str) -> NoReturn:
    while os.read(received, 1)[0] not in _SIGNALS:
        pass  # of a module that has set a handler
    try:
        os.write(2, f"{prog}: interrupted\n".encode())
    finally:
        os._exit(_INTERRUPTED)


if __name__ == "__main__":
    sys.argv[0] = _PROG
    run()
