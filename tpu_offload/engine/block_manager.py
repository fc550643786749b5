"""The HBM block pool: reference counts, a prefix cache by block hash, and an LRU list of free blocks.

One pool serves all layer groups of a model: they share the cache arrays, and a block belongs to one group at a time.
Block 0 is the null block. It stands in block tables for blocks that a window has left behind, and is never allocated.

A freed block keeps its contents and its hash until it is allocated again, so a request that returns soon enough finds
its prefix. The free list is in order of reuse: blocks without a hash first, because no lookup can find them, then the
least recently freed. A request's blocks are freed from last to first, because a prefix without its tail is still
useful, and a tail without its prefix never is.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

from tpu_offload import BlockHash

NULL_BLOCK = 0


class BlockManager:
    """Allocates blocks of the HBM cache. Bookkeeping only; the runner owns the arrays.

    Args:
      num_blocks: blocks in the pool, ids 1 to `num_blocks`.
      num_groups: layer groups, for the prefix cache.
      on_evict: called with the cached blocks that are about to be evicted, in order of eviction.
    """

    def __init__(
        self, num_blocks: int, *, num_groups: int = 1, on_evict: Callable[[Sequence[int]], None] | None = None
    ) -> None:
        self._num_blocks = num_blocks
        self._on_evict = on_evict
        self._ref_counts = [0] * (num_blocks + 1)
        self._key_of: dict[int, tuple[int, BlockHash]] = {}  # layer group and hash
        self._block_of: list[dict[BlockHash, int]] = [{} for _ in range(num_groups)]
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks + 1))

    @property
    def num_blocks(self) -> int:
        """Size of the pool."""
        return self._num_blocks

    @property
    def num_free(self) -> int:
        """Blocks without a reference, including those in the prefix cache."""
        return len(self._free)

    def lookup(self, hashes: Sequence[BlockHash], *, group_id: int = 0) -> list[int]:
        """A layer group's cached blocks of the longest cached prefix of `hashes`. Takes no references."""
        block_ids, block_of = [], self._block_of[group_id]
        for block_hash in hashes:
            block_id = block_of.get(block_hash)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def get(self, group_id: int, block_hash: BlockHash) -> int | None:
        """A layer group's cached block with these contents, None if there is none. Takes no reference."""
        return self._block_of[group_id].get(block_hash)

    def can_allocate(self, num_blocks: int, *, cached: Sequence[int] = ()) -> bool:
        """Whether `num_blocks` would be free once `cached` are taken too."""
        num_taken = sum(self._ref_counts[block_id] == 0 for block_id in cached)
        return num_blocks <= len(self._free) - num_taken

    def share(self, block_ids: Sequence[int]) -> None:
        """Takes a reference to each of these cached blocks."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                del self._free[block_id]
            self._ref_counts[block_id] += 1

    def allocate(self, num_blocks: int) -> list[int]:
        """Allocates blocks, the first of the free list, with one reference each; evicts what they cached.

        Raises:
          ValueError: too few are free; nothing was allocated.
        """
        if num_blocks > len(self._free):
            raise ValueError(f"{num_blocks} blocks asked for, {len(self._free)} of {self._num_blocks} are free")
        block_ids = [self._free.popitem(last=False)[0] for _ in range(num_blocks)]
        cached = [block_id for block_id in block_ids if block_id in self._key_of]
        if cached and self._on_evict:
            self._on_evict(cached)
        for block_id in cached:
            group_id, block_hash = self._key_of.pop(block_id)
            del self._block_of[group_id][block_hash]
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        return block_ids

    def register(self, block_id: int, block_hash: BlockHash, *, group_id: int = 0) -> bool:
        """Adds a held block to the prefix cache. Its KV must be in place: the next step may share it.

        If two requests have computed the same prefix, the first block registered wins and the other stays private.

        Returns:
          Whether this call added it.
        """
        if block_hash in self._block_of[group_id] or block_id in self._key_of:
            return False
        self._block_of[group_id][block_hash] = block_id
        self._key_of[block_id] = group_id, block_hash
        return True

    def key_of(self, block_id: int) -> tuple[int, BlockHash] | None:
        """The layer group and the hash by which a block can be found; None if it cannot."""
        return self._key_of.get(block_id)

    def invalidate(self) -> None:
        """Empties the prefix cache; held blocks stay held."""
        self._key_of.clear()
        for block_of in self._block_of:
            block_of.clear()

    def free(self, block_ids: Sequence[int]) -> None:
        """Drops one reference to each block; `block_ids` in token order.

        Raises:
          ValueError: a block is not held; the references of later blocks were dropped.
        """
        for block_id in reversed(block_ids):
            if self._ref_counts[block_id] < 1:
                raise ValueError(f"block {block_id} is freed but not held")
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._free[block_id] = None
                self._free.move_to_end(block_id, last=block_id in self._key_of)

    def check_invariants(self, holders: Mapping[int, int] | None = None) -> None:
        """Raises AssertionError unless free list, counts and prefix cache agree. For tests.

        Args:
          holders: per held block the number of its holders, if the caller knows them.
        """
        held = {i: count for i, count in enumerate(self._ref_counts) if count}
        assert min(held.values(), default=1) > 0
        assert NULL_BLOCK not in held, "the null block is held"
        assert set(self._free) == set(range(1, self._num_blocks + 1)) - set(held)
        assert holders is None or held == dict(holders), "blocks are held by none, or shared without a reference"
        found = {block_id: (g, h) for g, block_of in enumerate(self._block_of) for h, block_id in block_of.items()}
        assert found == self._key_of
        assert NULL_BLOCK not in found, "the null block is in the prefix cache"
