"""Starts `tpu-offload`. Outside the package, because importing a command takes seconds, and Ctrl-C must work then."""

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
    """Imports a command and runs it. An interrupt during the import ends the process immediately.

    Args:
      prog: the command's name, for the message on an interrupt.
      module: module with the command's `run`, which then handles signals.
    """
    for signum in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, functools.partial(_end, prog))
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as e:
        if e.name != "click":  # for parsing flags; packages that only some commands need are checked later
            raise
        os.write(2, f"{prog}: error: click is not installed; install with: pip install 'tpu_offload[cli]'\n".encode())
        sys.exit(2)
    imported.run()
    raise AssertionError(f"{module}.run() has returned")


def _end(prog: str, signum: int, frame: types.FrameType | None) -> NoReturn:
    # Not an exception: imported modules may catch it.
    try:
        os.write(2, f"{prog}: interrupted\n".encode())
    finally:
        os._exit(_INTERRUPTED)


if __name__ == "__main__":
    sys.argv[0] = _PROG
    run()
