"""What the simulated memories hold: names of KV, so that every read can be checked.

A prefix of tokens is a node of a tree, the child of the prefix one token shorter. The KV of a token is that
of the prefix that ends with it, under the weights of the day: `kv(node, epoch)`. What nobody may read is junk,
and no two pieces of junk are equal, nor equal to KV.
"""

from typing import final

_EPOCHS = 1 << 12
_MASK = (1 << 32) - 1


class Violation(AssertionError):
    """The library broke a rule, or so the simulation thinks."""


def mix(number: int, salt: int) -> int:
    """A number under 2**32 that looks random; the choices that one number of a trace stands for."""
    x = (number ^ (salt * 0x9E3779B9) ^ (number >> 32)) & _MASK
    x = ((x ^ (x >> 16)) * 0x45D9F3B) & _MASK
    x = ((x ^ (x >> 16)) * 0x45D9F3B) & _MASK
    return x ^ (x >> 16)


def kv(node: int, epoch: int) -> int:
    """The KV of the last token of a prefix, computed by the weights of `epoch`."""
    return node * _EPOCHS + epoch


@final
class Prefixes:
    """The tree of all prefixes that were ever seen. Node 0 is nobody's; each cache salt has a root of its own."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, int], int] = {}

    def child(self, parent: int, token: int) -> int:
        """The prefix one token longer."""
        key = parent, token
        node = self._nodes.get(key)
        if node is None:
            node = self._nodes[key] = len(self._nodes) + 1
        return node

    def root(self, salt: int) -> int:
        """The empty prefix under a cache salt."""
        return self.child(0, salt)


@final
class Junk:
    """Hands out junk."""

    def __init__(self) -> None:
        self._last = 0

    def one(self) -> int:
        """One piece."""
        self._last -= 1
        return self._last

    def block(self, block_size: int) -> tuple[int, ...]:
        """A block of it."""
        self._last -= block_size
        return tuple(range(self._last + block_size - 1, self._last - 1, -1))
