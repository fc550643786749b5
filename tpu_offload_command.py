"""Starts `tpu-offload`. Beside the package, because importing a command takes seconds in which Ctrl-C has to work."""

import functools
import importlib
import os
import signal
import sys
import types
from typing import NoReturn

_PROG = "tpu-offload"
_INTERRUPTED = 130


def run(*, prog: str = _PROG, module: str = "tpu_offload.cli.main") -> NoReturn:
    """Imports a command and runs it. An interrupt before that ends the process: it has done nothing yet.

    Args:
      prog: the command's name, for what is said of an interrupt.
      module: has its `run`, which takes the signals over.
    """
    for signum in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, functools.partial(_end, prog))
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as e:
        if e.name != "click":  # what parses the flags; packages that only some commands need are looked for later
            raise
        os.write(2, f"{prog}: error: click is not installed; install with: pip install 'tpu_offload[cli]'\n".encode())
        sys.exit(2)
    imported.run()
    raise AssertionError(f"{module}.run() has returned")


def _end(prog: str, signum: int, frame: types.FrameType | None) -> NoReturn:
    # Not an exception: it would be raised in the middle of somebody's import, and some of those catch all.
    try:
        os.write(2, f"{prog}: interrupted\n".encode())
    finally:
        os._exit(_INTERRUPTED)


if __name__ == "__main__":
    sys.argv[0] = _PROG
    run()
