"""LRU: recency follows requests."""

import random

import pytest

from tests.core.policies.residents import FakeResidents, LRUByDefinition, chunk_keys, new_use
from tpu_offload.core.policies import LRUPolicy
from tpu_offload.types import ChunkKey


@pytest.fixture
def residents() -> FakeResidents:
    return FakeResidents()


def test_the_prefix_used_longest_ago_is_evicted_first(residents) -> None:
    policy = LRUPolicy()
    for chain in (chunk_keys("a0 a1"), chunk_keys("b0 b1")):
        residents.add(chain)
        policy.insert(new_use(), chain, None, 0)
    policy.touch(new_use(), chunk_keys("a0 a1"), 2, residents)
    policy.evict(4, residents)
    assert residents.evicted == chunk_keys("b1 b0 a1 a0")


def test_using_a_shared_head_keeps_it_longer_than_both_tails(residents) -> None:
    policy = LRUPolicy()
    residents.add(chunk_keys("s a"))
    policy.insert(new_use(), chunk_keys("s a"), None, 0)
    residents.add(chunk_keys("b"), parent=ChunkKey(b"s"))
    policy.insert(new_use(), chunk_keys("b"), ChunkKey(b"s"), 1)
    policy.touch(new_use(), chunk_keys("s b"), 2, residents)
    policy.evict(3, residents)
    assert residents.evicted == chunk_keys("a b s")


def test_a_head_used_after_its_tail_outlives_chunks_used_in_between(residents) -> None:
    policy = LRUPolicy()
    for chain in (chunk_keys("a0 a1 a2"), chunk_keys("b0")):
        residents.add(chain)
        policy.insert(new_use(), chain, None, 0)
    policy.touch(new_use(), chunk_keys("a0 a1"), 2, residents)
    policy.evict(4, residents)
    assert residents.evicted == chunk_keys("a2 b0 a1 a0")


def test_a_head_used_after_its_tail_keeps_its_place_while_the_tail_is_blocked(residents) -> None:
    policy = LRUPolicy()
    for chain in (chunk_keys("a0 a1 a2"), chunk_keys("b0")):
        residents.add(chain)
        policy.insert(new_use(), chain, None, 0)
    policy.touch(new_use(), chunk_keys("a0 a1"), 2, residents)
    residents.blocked = set(chunk_keys("a2 b0"))
    policy.evict(1, residents)
    assert residents.evicted == []
    residents.blocked.clear()
    policy.evict(4, residents)
    assert residents.evicted == chunk_keys("a2 b0 a1 a0")


@pytest.mark.parametrize("seed", range(40))
def test_agrees_with_the_definition(seed) -> None:
    rng = random.Random(seed)
    residents, policy = FakeResidents(), LRUPolicy()
    reference = LRUByDefinition(residents)
    num_victims = 0
    for i in range(200):
        # A path in a tree of prefixes: used, and saved where it is not resident.
        prefix = [ChunkKey(b"".join(steps)) for steps in _walk(rng)]
        num_resident = next((n for n, key in enumerate(prefix) if key not in residents), len(prefix))
        if rng.random() < 0.6 and num_resident < len(prefix):
            parent = prefix[num_resident - 1] if num_resident else None
            residents.add(prefix[num_resident:], parent=parent)
            policy.insert(new_use(), prefix[num_resident:], parent, num_resident)
            num_resident = len(prefix)
        if num_resident:
            policy.touch(new_use(), prefix, len(prefix), residents)
            reference.use(prefix[:num_resident])
        if rng.random() < 0.5:
            residents.blocked = {key for key in sorted(residents.parents) if rng.random() < 0.2}
            expected = reference.victims(rng.randint(1, 8))
            residents.evicted.clear()
            policy.evict(len(expected), residents)
            assert residents.evicted == expected, f"in step {i}"
            num_victims += len(expected)
    assert num_victims > 50


def _walk(rng: random.Random):
    steps = []
    for _ in range(rng.randint(1, 6)):
        steps.append(rng.choice(chunk_keys("x y")))
        yield list(steps)
