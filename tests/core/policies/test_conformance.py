"""What every eviction policy must do."""

import random

import pytest

from tests.core.policies.residents import FakeResidents, new_use
from tpu_offload.config import EvictionPolicyName, OffloadConfig
from tpu_offload.core.policies import DEFAULT_POLICY, EvictionPolicy, make_policy
from tpu_offload.core.policies import POLICIES as BY_NAME
from tpu_offload.errors import ConfigError

POLICIES = list(BY_NAME.values())


@pytest.fixture(params=POLICIES, ids=lambda p: p.__name__)
def policy(request) -> EvictionPolicy:
    return request.param()


@pytest.fixture
def residents() -> FakeResidents:
    return FakeResidents()


def keys(prefix: str, num: int) -> list[bytes]:
    return [f"{prefix}{i}".encode() for i in range(num)]


def test_evicts_the_tail_of_a_prefix_before_its_head(policy, residents) -> None:
    chain = keys("a", 5)
    residents.add(chain)
    policy.insert(new_use(), chain[:3], None)
    policy.insert(new_use(), chain[3:], chain[2])
    policy.touch(new_use(), chain, 5, residents)
    policy.evict(5, residents)
    assert residents.evicted == chain[::-1]


def test_evicts_no_more_than_it_is_asked_to(policy, residents) -> None:
    residents.add(keys("a", 10))
    policy.insert(new_use(), keys("a", 10), None)
    policy.evict(2, residents)
    assert len(residents.evicted) == 2
    policy.check_invariants(residents.leaves(), residents)


def test_what_may_not_go_stays_and_goes_later(policy, residents) -> None:
    for name in "ab":
        residents.add(keys(name, 4))
        policy.insert(new_use(), keys(name, 4), None)
    residents.blocked = {b"a2", b"b3"}
    policy.evict(8, residents)
    assert residents.evicted == [b"a3"]
    residents.blocked.clear()
    policy.evict(8, residents)
    assert not residents.parents


def test_touch_passes_over_what_is_not_resident(policy, residents) -> None:
    residents.add(keys("a", 2))
    policy.insert(new_use(), keys("a", 2), None)
    policy.touch(new_use(), [b"a0", b"a1", b"gone", b"never used"], 3, residents)
    policy.touch(new_use(), [b"gone"], 1, residents)
    policy.check_invariants(residents.leaves(), residents)
    policy.evict(2, residents)
    assert residents.evicted == [b"a1", b"a0"]


def test_whatever_happens_every_chunk_can_be_evicted(policy, residents) -> None:
    rng = random.Random(0)
    for i in range(600):
        known = sorted(residents.parents)
        what = rng.random()
        if what < 0.4 or not known:
            chain = keys(f"{i}-", rng.randint(1, 5))
            parent = rng.choice([*known, None])
            residents.add(chain, parent=parent)
            policy.insert(new_use(), chain, parent)
        elif what < 0.6:
            gone = rng.choice(known)
            parent = residents.parents.pop(gone)
            policy.remove(gone, parent if parent in residents else None)
        elif what < 0.8:
            policy.touch(new_use(), known, rng.randint(1, len(known)), residents)
        else:
            residents.blocked = {key for key in known if rng.random() < 0.3}
            policy.evict(rng.randint(1, 6), residents)
        policy.check_invariants(residents.leaves(), residents)
    residents.blocked = set()
    policy.evict(1000, residents)
    assert not residents.parents


def test_every_name_that_the_settings_know_is_a_policy() -> None:
    assert list(BY_NAME) == [name.value for name in EvictionPolicyName]
    assert OffloadConfig.create().eviction_policy.value == DEFAULT_POLICY
    assert all(type(make_policy(name)) is policy for name, policy in BY_NAME.items())
    assert type(make_policy()) is BY_NAME[DEFAULT_POLICY]
    with pytest.raises(ConfigError, match=r"'fifo' is no eviction policy; expected one of lru, arc"):
        make_policy("fifo")
