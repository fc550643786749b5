"""Who holds which blocks of the swap pool.

A block has as many holders as there are swapped-out requests that it belongs to and copies in flight that
read or write it. It is free again when the last of them lets go, so the memory under a copy that may still
land is never given to anybody else.

Blocks full of tokens are known by their hash while they are held: samples of one prompt that shared them in
HBM share them here, and each is copied once.

Blocks of copies out that did not count, for whatever reason, and blocks whose memory was lost are handed out last
until a copy to them has counted: where memory is gone for good, others are tried first.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import final

from tpu_offload.types import BlockHash

HostBlocks = tuple[tuple[int, ...], ...]
"""Places in the swap pool, per layer group."""


@final
class SwapPool:
    """Bookkeeping of the swap pool, per layer group. It never sees an array.

    Args:
      num_groups: layer groups.
    """

    def __init__(self, *, num_groups: int) -> None:
        self._free: list[deque[int]] = [deque() for _ in range(num_groups)]  # taken from the end
        self._doubtful: list[set[int]] = [set() for _ in range(num_groups)]
        self._num_blocks = [0] * num_groups  # that can be had
        self._num_known = [0] * num_groups  # that ever could
        self._unusable: list[set[int]] = [set() for _ in range(num_groups)]
        self._num_holders: list[dict[int, int]] = [{} for _ in range(num_groups)]
        self._block_of: dict[BlockHash, int] = {}  # of group 0
        self._hash_of: dict[int, BlockHash] = {}
        self._peak_num_held = 0

    @property
    def num_blocks(self) -> tuple[int, ...]:
        """Blocks that exist, per group."""
        return tuple(self._num_blocks)

    @property
    def num_held(self) -> int:
        """Blocks that somebody holds, of all groups."""
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
                if self._doubtful[g]:
                    self._sort_free(g)

    def limit(self, num_blocks: Sequence[int]) -> None:
        """Lowers the number of blocks of each group: what is held beyond comes back only with `grow`."""
        for g, most in enumerate(num_blocks):
            if most < self._num_blocks[g]:
                self._num_blocks[g] = most
                self._sort_free(g)

    def allocate(self, num_blocks: Sequence[int]) -> HostBlocks | None:
        """Takes so many free blocks of each group, with one holder each; None, and nothing, if any is short."""
        if any(wanted > len(free) for wanted, free in zip(num_blocks, self._free, strict=True)):
            return None
        blocks = tuple(tuple([free.pop() for _ in range(n)]) for n, free in zip(num_blocks, self._free, strict=True))
        for holders, group in zip(self._num_holders, blocks, strict=True):
            holders.update(dict.fromkeys(group, 1))
        self._peak_num_held = max(self._peak_num_held, self.num_held)
        return blocks

    def hold(self, blocks: HostBlocks) -> None:
        """One more holder for each of these held blocks."""
        for holders, group in zip(self._num_holders, blocks, strict=True):
            for block in group:
                holders[block] += 1

    def release(self, blocks: HostBlocks) -> None:
        """One holder less for each."""
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
                self.forget(free)

    def doubt(self, group_id: int, blocks: Iterable[int]) -> None:
        """A copy to these blocks did not count, or their memory was lost."""
        doubted = set(blocks)
        self._doubtful[group_id] |= doubted
        if not doubted.isdisjoint(self._free[group_id]):
            self._sort_free(group_id)

    def trust(self, blocks: HostBlocks) -> None:
        """A copy to these blocks has come to its end."""
        for g, (doubtful, group) in enumerate(zip(self._doubtful, blocks, strict=True)):
            if doubtful and not doubtful.isdisjoint(group):
                doubtful.difference_update(group)
                self._sort_free(g)

    def _sort_free(self, group_id: int) -> None:
        free, self._free[group_id] = self._free[group_id], deque()
        self._set_free(group_id, free)

    def _set_free(self, group_id: int, blocks: Iterable[int]) -> None:
        most, doubtful, free = self._num_blocks[group_id], self._doubtful[group_id], self._free[group_id]
        for block in blocks:
            if block >= most:
                self._unusable[group_id].add(block)
            elif block in doubtful:
                free.appendleft(block)
            else:
                free.append(block)

    def name(self, blocks: Iterable[int], block_hashes: Iterable[BlockHash]) -> None:
        """Makes held blocks of group 0 findable, each unless one of these contents is already."""
        block_of, hash_of = self._block_of, self._hash_of
        for block, block_hash in zip(blocks, block_hashes, strict=True):
            if block_hash not in block_of:
                block_of[block_hash] = block
                hash_of[block] = block_hash

    def find(self, block_hashes: Iterable[BlockHash]) -> list[int | None]:
        """For each, the held block of group 0 with these contents, if there is one."""
        return list(map(self._block_of.get, block_hashes))

    def forget(self, blocks: Iterable[int]) -> None:
        """Makes blocks of group 0 unfindable: they are free, or what they hold is lost."""
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
