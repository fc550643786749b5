from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tpu_offload.engine.block_manager import NULL_BLOCK, BlockManager
from tpu_offload.types import BlockHash

NUM_BLOCKS = 6


def h(i: int) -> BlockHash:
    return BlockHash(bytes([i]))


def cached_run(manager: BlockManager, hashes: list[int]) -> list[int]:
    """Allocates blocks, registers these hashes and frees the blocks."""
    block_ids = manager.allocate(len(hashes))
    for block_id, i in zip(block_ids, hashes, strict=True):
        manager.register(block_id, h(i))
    manager.free(block_ids)
    return block_ids


def test_lookup_stops_at_the_first_gap():
    manager = BlockManager(4)
    block_ids = cached_run(manager, [1, 2, 4])
    assert manager.lookup([h(1), h(2), h(3), h(4)]) == block_ids[:2]
    assert manager.num_free == 4


def test_tails_are_reused_before_heads_and_old_before_new():
    manager = BlockManager(4)
    old = cached_run(manager, [1, 2])
    new = cached_run(manager, [3, 4])
    assert manager.allocate(4) == [old[1], old[0], new[1], new[0]]


def test_blocks_without_contents_are_reused_first():
    manager = BlockManager(3)
    cached = cached_run(manager, [1])
    plain = manager.allocate(2)
    manager.free(plain)
    assert set(manager.allocate(2)) == set(plain)
    assert manager.lookup([h(1)]) == cached


def test_a_shared_block_is_free_after_its_last_holder():
    manager = BlockManager(2)
    block_ids = cached_run(manager, [1])
    manager.share(block_ids)
    manager.share(block_ids)
    manager.free(block_ids)
    assert manager.num_free == 1
    assert not manager.can_allocate(2)
    manager.free(block_ids)
    assert manager.can_allocate(2)


def test_cached_blocks_that_are_free_count_once():
    manager = BlockManager(3)
    block_ids = cached_run(manager, [1, 2])
    assert manager.can_allocate(1, cached=block_ids)
    assert not manager.can_allocate(2, cached=block_ids)


def test_refusals_change_nothing():
    manager = BlockManager(2)
    manager.allocate(1)
    with pytest.raises(ValueError, match="2 blocks asked for, 1 of 2 are free"):
        manager.allocate(2)
    with pytest.raises(ValueError, match="block 2 is freed but not held"):
        manager.free([2])
    manager.check_invariants()
    assert manager.num_free == 1


def test_layer_groups_are_cached_apart():
    manager = BlockManager(4, num_groups=2)
    first, second = manager.allocate(2)
    assert manager.register(first, h(1), group_id=0)
    assert manager.lookup([h(1)], group_id=1) == []
    assert not manager.register(first, h(1), group_id=1), "a block belongs to one group at a time"
    assert manager.register(second, h(1), group_id=1)
    assert [manager.get(g, h(1)) for g in (0, 1)] == [first, second]
    manager.free([first, second])
    manager.allocate(3)  # evicts the one that was freed first
    assert [manager.get(g, h(1)) for g in (0, 1)] == [first, None]


def test_the_null_block_is_never_allocated():
    manager = BlockManager(3)
    assert sorted(manager.allocate(3)) == [1, 2, 3]
    with pytest.raises(ValueError, match="block 0 is freed but not held"):
        manager.free([NULL_BLOCK])


@pytest.mark.parametrize("harm", ["held by nobody", "null held", "null cached", "wrong holders"])
def test_the_invariants_can_fail(harm):
    manager = BlockManager(3)
    manager.allocate(1)
    holders = {1: 1}
    manager.check_invariants(holders)
    if harm == "held by nobody":
        del manager._free[2]
    elif harm == "null held":
        manager._ref_counts[NULL_BLOCK] = 1
    elif harm == "null cached":
        manager.register(NULL_BLOCK, h(1))
    else:
        holders = {1: 2}
    with pytest.raises(AssertionError):
        manager.check_invariants(holders)


class BlockManagerMachine(RuleBasedStateMachine):
    """Compares the manager with a model that stores each block's holders and contents."""

    def __init__(self):
        super().__init__()
        self.manager = BlockManager(NUM_BLOCKS, num_groups=2)
        self.held: list[list[int]] = []
        self.contents: dict[int, tuple[int, BlockHash]] = {}

    @rule(n=st.integers(0, NUM_BLOCKS + 1))
    def allocate(self, n):
        in_use = {b for run in self.held for b in run}
        if not self.manager.can_allocate(n):
            assert n > NUM_BLOCKS - len(in_use)
            return
        block_ids = self.manager.allocate(n)
        assert len(set(block_ids)) == n
        assert not in_use & set(block_ids)
        for block_id in block_ids:
            self.contents.pop(block_id, None)
        self.held.append(block_ids)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), g=st.integers(0, 1), i=st.integers(0, 7))
    def register(self, data, g, i):
        run = data.draw(st.sampled_from(self.held))
        if run:
            block_id = data.draw(st.sampled_from(run))
            new = block_id not in self.contents and (g, h(i)) not in self.contents.values()
            if new:
                self.contents[block_id] = g, h(i)
            assert self.manager.register(block_id, h(i), group_id=g) == new

    @rule(g=st.integers(0, 1), wanted=st.lists(st.integers(0, 7), unique=True))
    def share_cached(self, g, wanted):
        block_ids = self.manager.lookup([h(i) for i in wanted], group_id=g)
        for block_id, i in zip(block_ids, wanted, strict=False):
            assert self.contents[block_id] == (g, h(i))
        if len(block_ids) < len(wanted):
            assert (g, h(wanted[len(block_ids)])) not in self.contents.values()
        self.manager.share(block_ids)
        self.held.append(block_ids)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data):
        self.manager.free(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @invariant()
    def agrees(self):
        self.manager.check_invariants(Counter(b for run in self.held for b in run))
        in_use = {b for run in self.held for b in run}
        assert self.manager.num_free == NUM_BLOCKS - len(in_use)


TestBlockManagerMachine = BlockManagerMachine.TestCase
TestBlockManagerMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, derandomize=True)
