"""LRU: recency follows requests."""

import random

import pytest

from tests.core.policies.residents import FakeResidents, LRUByDefinition, new_use
from tpu_offload.core.policies import LRUPolicy


@pytest.fixture
def residents() -> FakeResidents:
    return FakeResidents()


def test_the_prefix_used_longest_ago_goes_first(residents) -> None:
    policy = LRUPolicy()
    for chain in ([b"a0", b"a1"], [b"b0", b"b1"]):
        residents.add(chain)
        policy.insert(new_use(), chain, None)
    policy.touch(new_use(), [b"a0", b"a1"], 2, residents)
    policy.evict(4, residents)
    assert residents.evicted == [b"b1", b"b0", b"a1", b"a0"]


def test_using_a_shared_head_keeps_it_longer_than_both_tails(residents) -> None:
    policy = LRUPolicy()
    residents.add([b"s", b"a"])
    policy.insert(new_use(), [b"s", b"a"], None)
    residents.add([b"b"], parent=b"s")
    policy.insert(new_use(), [b"b"], b"s")
    policy.touch(new_use(), [b"s", b"b"], 2, residents)
    policy.evict(3, residents)
    assert residents.evicted == [b"a", b"b", b"s"]


def test_a_head_used_after_its_tail_outlives_what_was_used_in_between(residents) -> None:
    policy = LRUPolicy()
    for chain in ([b"a0", b"a1", b"a2"], [b"b0"]):
        residents.add(chain)
        policy.insert(new_use(), chain, None)
    policy.touch(new_use(), [b"a0", b"a1"], 2, residents)
    policy.evict(4, residents)
    assert residents.evicted == [b"a2", b"b0", b"a1", b"a0"]


def test_a_head_used_after_its_tail_keeps_its_place_while_the_tail_may_not_go(residents) -> None:
    policy = LRUPolicy()
    for chain in ([b"a0", b"a1", b"a2"], [b"b0"]):
        residents.add(chain)
        policy.insert(new_use(), chain, None)
    policy.touch(new_use(), [b"a0", b"a1"], 2, residents)
    residents.blocked = {b"a2", b"b0"}
    policy.evict(1, residents)
    assert residents.evicted == []
    residents.blocked.clear()
    policy.evict(4, residents)
    assert residents.evicted == [b"a2", b"b0", b"a1", b"a0"]


@pytest.mark.parametrize("seed", range(40))
def test_agrees_with_the_definition(seed) -> None:
    rng = random.Random(seed)
    residents, policy = FakeResidents(), LRUPolicy()
    reference = LRUByDefinition(residents)
    num_victims = 0
    for i in range(200):
        # A walk in a tree of prefixes, saved where it is not resident and used as far as it goes.
        prefix = [b"".join(steps) for steps in _walk(rng)]
        num_resident = next((n for n, key in enumerate(prefix) if key not in residents), len(prefix))
        if rng.random() < 0.6 and num_resident < len(prefix):
            parent = prefix[num_resident - 1] if num_resident else None
            residents.add(prefix[num_resident:], parent=parent)
            policy.insert(new_use(), prefix[num_resident:], parent)
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
        steps.append(rng.choice([b"x", b"y"]))
        yield list(steps)
