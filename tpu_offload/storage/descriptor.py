"""A descriptor of a file that is closed once, whoever closes it how often."""

import os
from typing import final


@final
class Descriptor:
    """Opens a file, which is made if it is missing.

    Attributes:
      fd: the descriptor; -1 once it is closed, so that no call uses another file that has its number by then.
    """

    def __init__(self, path: str, flags: int = 0) -> None:
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | flags, 0o600)

    def close(self) -> None:
        """Closes the file. Does nothing if it is closed."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
