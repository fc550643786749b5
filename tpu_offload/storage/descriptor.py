"""A descriptor of a file that is closed once, whoever closes it how often, and also if nobody does."""

import os
import weakref
from typing import final


@final
class Descriptor:
    """Opens a file, which is made if it is missing. It is closed once this object is garbage-collected.

    Attributes:
      fd: the descriptor; -1 once it is closed, so that no later call uses another file that has its number by then.
    """

    def __init__(self, path: str, flags: int = 0) -> None:
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | flags, 0o600)
        self._close = weakref.finalize(self, os.close, self.fd)
        self._close.atexit = False  # threads may use it until the process has ended

    def close(self) -> None:
        """Closes the file. Does nothing if it is closed."""
        self.fd = -1
        self._close()
