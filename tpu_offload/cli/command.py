"""What every command does around its work: flags in, one line on an error, an exit status, the end of the process."""

import argparse
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

from tpu_offload.cli.compiling import COMPILE_THREAD
from tpu_offload.cli.terminal import open_missing_streams
from tpu_offload.errors import InputError, OffloadError


class Parser(argparse.ArgumentParser):
    """Reports a wrong flag as an `InputError`, like any other wrong input."""

    def error(self, message: str) -> NoReturn:
        """See `argparse.ArgumentParser`."""
        raise InputError(f"{message} (see {self.prog} --help)")


def exit_status(prog: str, command: Callable[[], int]) -> int:
    """Runs a command.

    Args:
      prog: its name, in front of errors and warnings.
      command: returns 0, or 1 when it found what it is there to find (outputs that differ), or 130 when it was
        interrupted and has reported what it had.
    Returns:
      What `command` returned, 2 for input that cannot be used, 130 when interrupted, 141 when nobody reads the output
      any more.
    """
    open_missing_streams()
    logging.basicConfig(level=logging.WARNING, format=f"{prog}: %(levelname)s: %(message)s")
    try:
        return command()
    except BrokenPipeError:  # whoever read our output has gone, as `head` does; nobody is left to be told
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141
    except (OffloadError, OSError) as e:
        sys.stderr.write(f"{prog}: error: {' '.join(str(e).split())}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write(f"{prog}: interrupted\n")
        return 130


def end_process(status: int) -> NoReturn:
    """Ends the process after its command, without a word more than that had to say."""
    if status == 130 or any(thread.name == COMPILE_THREAD and thread.is_alive() for thread in threading.enumerate()):
        # The interpreter would wait for a compile that nobody wants any more, or pull the ground from under it.
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
