"""The simulated engine's HBM blocks: refcounts, and a prefix cache by hash."""

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from typing import final

from tests.simulation.memory import Violation
from tpu_offload import BlockHash


@final
class BlockPool:
    """Allocates blocks; freed blocks stay cached until they are allocated again."""

    def __init__(self, num_blocks: int) -> None:
        self._refs = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._hash_of: dict[int, BlockHash] = {}
        self._block_of: dict[BlockHash, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def get(self, block_hash: BlockHash) -> int | None:
        return self._block_of.get(block_hash)

    def lookup(self, hashes: Sequence[BlockHash]) -> list[int]:
        """The cached blocks of the longest cached prefix."""
        found = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
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

    def next_evicted(self, num_blocks: int) -> list[BlockHash]:
        """Hashes of the cached blocks that allocating `num_blocks` would evict."""
        blocks = itertools.islice(self._free, num_blocks)
        return [self._hash_of[block] for block in blocks if block in self._hash_of]

    def allocate(self, num_blocks: int) -> list[int]:
        blocks = [self._free.popitem(last=False)[0] for _ in range(num_blocks)]
        for block in blocks:
            self._refs[block] = 1
            known = self._hash_of.pop(block, None)
            if known is not None:
                del self._block_of[known]
        return blocks

    def register(self, block: int, block_hash: BlockHash) -> None:
        """Adds a held block to the prefix cache."""
        if block_hash not in self._block_of and block not in self._hash_of:
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash

    def free(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            if self._refs[block] < 1:
                raise Violation(f"the simulated engine frees block {block} twice")
            self._refs[block] -= 1
            if not self._refs[block]:
                self._free[block] = None
                self._free.move_to_end(block, last=block in self._hash_of)

    def invalidate(self) -> None:
        """Empties the prefix cache."""
        self._hash_of.clear()
        self._block_of.clear()
