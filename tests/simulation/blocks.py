"""The simulated engine's HBM blocks: refcounts, and a prefix cache by hash."""

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from typing import final

from tests.simulation.memory import Violation
from tpu_offload import BlockHash

type CacheKey = tuple[int, BlockHash]
"""A layer group, and the hash of the block in it."""


@final
class BlockPool:
    """Allocates blocks; freed blocks stay cached until they are allocated again. Block 0 is never allocated."""

    def __init__(self, num_blocks: int) -> None:
        self._refs = [0] * (num_blocks + 1)
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks + 1))
        self._key_of: dict[int, CacheKey] = {}
        self._block_of: dict[CacheKey, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def get(self, key: CacheKey) -> int | None:
        return self._block_of.get(key)

    def lookup(self, keys: Sequence[CacheKey]) -> list[int]:
        """The cached blocks of the longest cached prefix."""
        found = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def num_free_without(self, shared: Sequence[int]) -> int:
        """Number of blocks that can be allocated after sharing these cached ones."""
        return len(self._free) - sum(self._refs[block] == 0 for block in shared)

    def share(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if not self._refs[block]:
                del self._free[block]
            self._refs[block] += 1

    def next_evicted(self, num_blocks: int) -> list[CacheKey]:
        """The cached blocks that allocating `num_blocks` would evict."""
        blocks = itertools.islice(self._free, num_blocks)
        return [self._key_of[block] for block in blocks if block in self._key_of]

    def allocate(self, num_blocks: int) -> list[int]:
        blocks = [self._free.popitem(last=False)[0] for _ in range(num_blocks)]
        for block in blocks:
            self._refs[block] = 1
            known = self._key_of.pop(block, None)
            if known is not None:
                del self._block_of[known]
        return blocks

    def register(self, block: int, key: CacheKey) -> None:
        """Adds a held block to the prefix cache."""
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def free(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            if self._refs[block] < 1:
                raise Violation(f"the simulated engine frees block {block} twice")
            self._refs[block] -= 1
            if not self._refs[block]:
                self._free[block] = None
                self._free.move_to_end(block, last=block in self._key_of)

    def invalidate(self) -> None:
        """Empties the prefix cache."""
        self._key_of.clear()
        self._block_of.clear()
