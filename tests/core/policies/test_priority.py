"""Priorities: what is evicted first, what is raised, and that they cost nothing when not used."""

import functools
import random

import pytest

from tests.core.policies.residents import FakeResidents, chunk_keys, new_use
from tests.core.policies.told import DepthsPolicy, ToldPolicy
from tests.inside.policy import lifetimes_of
from tpu_offload.core.policies import POLICIES, DensityPolicy, EvictionPolicy, LRUPolicy, PriorityPolicy
from tpu_offload.types import ChunkKey


@pytest.fixture
def residents() -> FakeResidents:
    return FakeResidents()


@pytest.fixture(params=POLICIES)
def policy(request) -> PriorityPolicy:
    policy = PriorityPolicy(POLICIES[request.param])
    policy.resize(100)
    return policy


def test_a_use_of_higher_priority_raises_the_chunks_it_uses(policy, residents) -> None:
    for chain in ([b"a0", b"a1", b"a2"], [b"b0", b"b1"]):
        residents.add(chain)
        policy.insert(new_use(), chain, None, 0)
    policy.touch(new_use(1), [b"a0", b"a1", b"a2"], 2, residents)
    policy.check_invariants(residents.leaves(), residents)
    policy.evict(5, residents)
    assert set(residents.evicted[:3]) == {b"a2", b"b0", b"b1"}
    assert residents.evicted[3:] == [b"a1", b"a0"]


def test_a_use_of_lower_priority_lowers_nothing(policy, residents) -> None:
    for chain, priority in (([b"a0", b"a1"], 2), ([b"b0"], 1)):
        residents.add(chain)
        policy.insert(new_use(priority), chain, None, 0)
    for _ in range(3):
        policy.touch(new_use(), [b"a0", b"a1"], 2, residents)
    policy.evict(2, residents)
    assert residents.evicted == [b"b0", b"a1"]


def test_a_chunk_of_lower_priority_is_evicted_right_after_those_that_follow_it(policy, residents) -> None:
    residents.add([b"low"])
    policy.insert(new_use(), [b"low"], None, 0)
    for tail in (b"x", b"y"):
        residents.add([tail], parent=b"low" if tail == b"x" else None)
        policy.insert(new_use(1), [tail], b"low" if tail == b"x" else None, int(tail == b"x"))
    policy.evict(3, residents)
    order = residents.evicted
    assert order.index(b"low") == order.index(b"x") + 1


def test_chunks_behind_those_of_another_priority_have_their_depth(residents) -> None:
    """Else HBM, which has the beginning of a prompt, would seem to have them too."""
    depths: dict[ChunkKey, int] = {}
    policy = PriorityPolicy(functools.partial(DepthsPolicy, depths))
    policy.resize(10)
    shared, rest = chunk_keys("s0 s1 s2"), chunk_keys("r3 r4")
    residents.add(shared)
    policy.insert(new_use(2), shared, None, 0)
    residents.add(rest, shared[-1])
    policy.insert(new_use(), rest, shared[-1], 3)
    expected = {key: i for i, key in enumerate(shared + rest)}
    assert depths == expected
    depths.clear()
    policy.touch(new_use(1), shared + rest, 5, residents)
    assert depths == {key: expected[key] for key in rest}, "they are raised"


def test_a_run_behind_one_of_another_priority_is_not_taken_for_what_hbm_has() -> None:
    made = []

    def make() -> EvictionPolicy:
        made.append(DensityPolicy())
        return made[-1]

    residents, policy = FakeResidents(), PriorityPolicy(make)
    policy.resize(10)
    shared, rest = chunk_keys("s0 s1 s2"), chunk_keys("r3 r4")
    for priority, keys, parent, depth in ((2, shared, None, 0), (0, rest, shared[-1], 3)):
        residents.add(keys, parent)
        policy.insert(new_use(priority), keys, parent, depth)
    policy.touch(new_use(0).replace(num_in_hbm=3), shared + rest, 5, residents)
    low, high = map(lifetimes_of, made)
    assert [low.all_uses.sum(), low.all_elsewhere.sum()] == [2, 0]
    assert [high.all_uses.sum(), high.all_elsewhere.sum()] == [3, 3]


@pytest.mark.parametrize("held", [None, [3], {}, [{}, None]], ids=str)
def test_what_a_policy_of_ones_own_returns_when_cleared_is_checked(held) -> None:
    """Else the steps after a reset would fail, which free it."""

    class Faulty(ToldPolicy):
        def clear(self):
            return held

    policy = PriorityPolicy(functools.partial(Faulty, {}))
    with pytest.raises(TypeError, match=r"Faulty.clear\(\) returned .*; expected a list of the dicts, sets, lists"):
        policy.clear()


def test_priorities_are_clamped(residents) -> None:
    made = []

    def make() -> LRUPolicy:
        made.append(LRUPolicy())
        return made[-1]

    policy = PriorityPolicy(make)
    policy.resize(1000)
    for i in range(500):
        key = ChunkKey(b"%d" % i)
        residents.add([key])
        policy.insert(new_use((-1) ** i * 2**i), [key], None, 0)
    assert len(made) <= 17
    policy.evict(250, residents)
    assert all(int(key) % 2 for key in residents.evicted)
    policy.evict(250, residents)
    assert not residents.parents


@pytest.mark.parametrize("name", POLICIES)
def test_an_empty_level_is_removed(name, residents) -> None:
    """With its policy, which has ghosts and counts: the next chunk of that priority begins with a new one."""
    made = []

    def make() -> EvictionPolicy:
        made.append(POLICIES[name]())
        return made[-1]

    policy = PriorityPolicy(make)
    policy.resize(100)
    for num_made in (2, 3):
        for key in (ChunkKey(b"a"), ChunkKey(b"b")):
            residents.add([key])
            policy.insert(new_use(3), [key], None, 0)
            assert len(made) == num_made, "one for priority 0, and one for each time that there are others"
        policy.evict(2, residents)
        assert policy.num_above_and_below == 0


@pytest.mark.parametrize("name", POLICIES)
def test_with_one_priority_it_decides_as_the_policy_alone(name) -> None:
    evicted = []
    makers = (
        (0, POLICIES[name]),
        (0, lambda: PriorityPolicy(POLICIES[name])),
        (5, lambda: PriorityPolicy(POLICIES[name])),
    )
    for priority, make in makers:
        rng, residents, policy = random.Random(0), FakeResidents(), make()
        policy.resize(60)
        for i in range(300):
            if rng.random() < 0.5 or not residents.parents:
                chain = [ChunkKey(b"%d-%d" % (i, j)) for j in range(rng.randint(1, 5))]
                if len(residents) + len(chain) > 60:
                    policy.evict(len(residents) + len(chain) - 60, residents)
                residents.add(chain)
                policy.insert(new_use(priority), chain, None, 0)
            else:
                chain = residents.prefix(rng.choice(sorted(residents.parents)))
                policy.touch(new_use(priority), chain, len(chain), residents)
        evicted.append(residents.evicted)
    assert evicted[0] == evicted[1] == evicted[2]
    assert len(evicted[0]) > 100
