"""Contents of the simulated memories: symbolic KV, so that every read can be checked.

A prefix of tokens is a node of a tree, a child of the prefix one token shorter. The KV of a token is identified by the
prefix that ends with it and the current weights: `kv(node, epoch)`. Memory that must not be read holds junk; each piece
of junk is unique and differs from all KV.
"""

from typing import final

_EPOCHS = 1 << 12
_MASK = (1 << 32) - 1


class Violation(AssertionError):
    """The library broke a rule of the simulation."""


def mix(number: int, salt: int) -> int:
    """A hash under 2**32; derives several choices from one number of a trace."""
    x = (number ^ (salt * 0x9E3779B9) ^ (number >> 32)) & _MASK
    x = ((x ^ (x >> 16)) * 0x45D9F3B) & _MASK
    x = ((x ^ (x >> 16)) * 0x45D9F3B) & _MASK
    return x ^ (x >> 16)


def kv(node: int, epoch: int) -> int:
    """The KV of the last token of a prefix, computed with the weights of `epoch`."""
    return node * _EPOCHS + epoch


@final
class Prefixes:
    """The tree of all prefixes so far. Node 0 is the parent of the roots, one for each cache salt."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, int], int] = {}

    def child(self, parent: int, token: int) -> int:
        """The node of the prefix one token longer."""
        key = parent, token
        node = self._nodes.get(key)
        if node is None:
            node = self._nodes[key] = len(self._nodes) + 1
        return node

    def root(self, salt: int) -> int:
        """The node of the empty prefix under a cache salt."""
        return self.child(0, salt)


@final
class Junk:
    """Creates unique junk."""

    def __init__(self) -> None:
        self._last = 0

    def one(self) -> int:
        """One piece of junk."""
        self._last -= 1
        return self._last

    def block(self, block_size: int) -> tuple[int, ...]:
        """A block of junk."""
        self._last -= block_size
        return tuple(range(self._last + block_size - 1, self._last - 1, -1))
