"""Ports for servers that a test starts."""

import random
import socket

# Below those that Linux gives to connections, which could take a port before the server listens, or between two of its
# starts.
_FIRST, _LAST = 20000, 32000
_random = random.SystemRandom()  # tests in other processes choose at the same time


def free_port() -> int:
    return free_ports(1)[0]


def free_ports(count: int) -> range:
    """Consecutive ports, free on all interfaces."""
    while True:
        first = _random.randrange(_FIRST, _LAST - count)
        ports = range(first, first + count)
        if all(map(_is_free, ports)):
            return ports


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
