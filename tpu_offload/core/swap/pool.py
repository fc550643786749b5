"""Reference counts of the blocks of the swap pool.

A block is held by each swapped-out request that it belongs to and by each copy in flight that reads or writes it. It
is free again when the last of them releases it, so memory under a copy that may still land is not reused.

Full blocks are known by their hash while they are held: samples of one prompt that shared them in HBM share them here,
and each is copied once.

Suspect blocks are allocated last: those whose memory was lost, and those of failed swap-outs, until a copy to them has
succeeded. Where memory is gone for good, other blocks are tried first.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import final

from tpu_offload.types import BlockHash

HostBlocks = tuple[tuple[int, ...], ...]
"""Places in the swap pool, per layer group."""


@final
class SwapPool:
    """Bookkeeping of the swap pool, per layer group, without arrays.

    Args:
      num_groups: layer groups.
    """

    def __init__(self, *, num_groups: int) -> None:
        self._free: list[deque[int]] = [deque() for _ in range(num_groups)]  # taken from the end
        self._suspect: list[set[int]] = [set() for _ in range(num_groups)]
        self._num_blocks = [0] * num_groups  # usable
        self._num_known = [0] * num_groups  # that were ever usable
        self._unusable: list[set[int]] = [set() for _ in range(num_groups)]
        self._num_holders: list[dict[int, int]] = [{} for _ in range(num_groups)]
        self._block_of: dict[BlockHash, int] = {}  # of group 0
        self._hash_of: dict[int, BlockHash] = {}
        self._peak_num_held = 0

    @property
    def num_blocks(self) -> tuple[int, ...]:
        """Usable blocks, per group."""
        return tuple(self._num_blocks)

    @property
    def num_held(self) -> int:
        """Held blocks, of all groups."""
        return sum(map(len, self._num_holders))

    @property
    def peak_num_held(self) -> int:
        """The most that were ever held."""
        return self._peak_num_held

    def grow(self, num_blocks: Sequence[int]) -> None:
        """Raises the number of blocks of each group to `num_blocks`; a smaller number changes nothing."""
        for g, wanted in enumerate(num_blocks):
            if wanted > self._num_blocks[g]:
                back = sorted(block for block in self._unusable[g] if block < wanted)
                self._unusable[g].difference_update(back)
                # Low places are handed out first, so that a pool that is never full touches little memory.
                self._free[g].extendleft([*back, *range(self._num_known[g], wanted)])
                self._num_known[g] = max(self._num_known[g], wanted)
                self._num_blocks[g] = wanted
                if self._suspect[g]:
                    self._sort_free(g)

    def limit(self, num_blocks: Sequence[int]) -> None:
        """Lowers the number of blocks of each group: what is held beyond comes back only with `grow`."""
        for g, most in enumerate(num_blocks):
            if most < self._num_blocks[g]:
                self._num_blocks[g] = most
                self._sort_free(g)

    def allocate(self, num_blocks: Sequence[int]) -> HostBlocks | None:
        """Allocates free blocks of each group, with one holder each; None, and no blocks, if any group has too few."""
        if any(wanted > len(free) for wanted, free in zip(num_blocks, self._free, strict=True)):
            return None
        blocks = tuple(tuple([free.pop() for _ in range(n)]) for n, free in zip(num_blocks, self._free, strict=True))
        for holders, group in zip(self._num_holders, blocks, strict=True):
            holders.update(dict.fromkeys(group, 1))
        self._peak_num_held = max(self._peak_num_held, self.num_held)
        return blocks

    def hold(self, blocks: HostBlocks) -> None:
        """Adds a holder to each of these held blocks."""
        for holders, group in zip(self._num_holders, blocks, strict=True):
            for block in group:
                holders[block] += 1

    def release(self, blocks: HostBlocks) -> None:
        """Removes a holder from each; a block without holders is free."""
        for g, group in enumerate(blocks):
            holders, free = self._num_holders[g], []
            for block in group:
                num_left = holders[block] - 1
                if num_left:
                    holders[block] = num_left
                else:
                    del holders[block]
                    free.append(block)
            self._set_free(g, free)
            if g == 0:
                self.clear_hashes(free)

    def mark_suspect(self, group_id: int, blocks: Iterable[int]) -> None:
        """A copy to these blocks failed, or their memory was lost."""
        suspect = set(blocks)
        self._suspect[group_id] |= suspect
        if not suspect.isdisjoint(self._free[group_id]):
            self._sort_free(group_id)

    def clear_suspect(self, blocks: HostBlocks) -> None:
        """A copy to these blocks has succeeded."""
        for g, (suspect, group) in enumerate(zip(self._suspect, blocks, strict=True)):
            if suspect and not suspect.isdisjoint(group):
                suspect.difference_update(group)
                self._sort_free(g)

    def _sort_free(self, group_id: int) -> None:
        free, self._free[group_id] = self._free[group_id], deque()
        self._set_free(group_id, free)

    def _set_free(self, group_id: int, blocks: Iterable[int]) -> None:
        most, suspect, free = self._num_blocks[group_id], self._suspect[group_id], self._free[group_id]
        for block in blocks:
            if block >= most:
                self._unusable[group_id].add(block)
            elif block in suspect:
                free.appendleft(block)
            else:
                free.append(block)

    def set_hashes(self, blocks: Iterable[int], block_hashes: Iterable[BlockHash]) -> None:
        """Makes held blocks of group 0 findable by hash, unless another block with the same hash is."""
        block_of, hash_of = self._block_of, self._hash_of
        for block, block_hash in zip(blocks, block_hashes, strict=True):
            if block_hash not in block_of:
                block_of[block_hash] = block
                hash_of[block] = block_hash

    def find(self, block_hashes: Iterable[BlockHash]) -> list[int | None]:
        """For each, the held block of group 0 with these contents, if there is one."""
        return list(map(self._block_of.get, block_hashes))

    def clear_hashes(self, blocks: Iterable[int]) -> None:
        """Makes blocks of group 0 unfindable: they are free, or their contents are lost."""
        block_of, hash_of = self._block_of, self._hash_of
        for block in blocks:
            block_hash = hash_of.pop(block, None)
            if block_hash is not None:
                del block_of[block_hash]

    def check_holders(self, expected: Sequence[dict[int, int]]) -> None:
        """Raises AssertionError unless these, per group, are the blocks held and their holders. For tests."""
        assert list(expected) == self._num_holders
        for g, free in enumerate(self._free):
            owners = [*free, *self._num_holders[g], *self._unusable[g]]
            assert sorted(owners) == list(range(self._num_known[g])), "a block got lost"
            assert all(block < self._num_blocks[g] for block in free), "a block is free that a worker does not have"
        assert {block: block_hash for block_hash, block in self._block_of.items()} == self._hash_of
        assert self._hash_of.keys() <= self._num_holders[0].keys()
