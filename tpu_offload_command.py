"""Starts `tpu-offload`. Beside the package, because importing a command takes seconds in which Ctrl-C has to work."""

import os
import signal
import sys
import types
from typing import NoReturn

_PROG = "tpu-offload"
_INTERRUPTED = 130


def run() -> NoReturn:
    """Imports a command and runs it. An interrupt before that ends the process: it has done nothing yet."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, _end)
    from tpu_offload.cli.main import run as run_command

    run_command()  # takes the signals over


def _end(signum: int, frame: types.FrameType | None) -> NoReturn:
    # Not an exception: it would be raised in the middle of somebody's import, and some of those catch all.
    try:
        os.write(2, f"{_PROG}: interrupted\n".encode())
    finally:
        os._exit(_INTERRUPTED)


if __name__ == "__main__":
    sys.argv[0] = _PROG
    run()
