"""What every eviction policy must do."""

import random

import pytest

from tpu_offload.core.policies import EvictionPolicy, LRUPolicy

POLICIES = [LRUPolicy]


@pytest.fixture(params=POLICIES, ids=lambda p: p.__name__)
def policy(request) -> EvictionPolicy:
    return request.param()


def keys(prefix: str, num: int) -> list[bytes]:
    return [f"{prefix}{i}".encode() for i in range(num)]


def test_offers_the_tail_of_a_prefix_before_its_head(policy) -> None:
    chain = keys("a", 5)
    policy.insert(chain[:3])
    policy.insert(chain[3:])
    policy.touch(chain)
    assert policy.victims(5, lambda key: True) == chain[::-1]


def test_names_victims_without_changing_anything(policy) -> None:
    policy.insert(keys("a", 4))
    first = policy.victims(2, lambda key: True)
    assert policy.victims(2, lambda key: True) == first
    assert len(policy) == 4


def test_a_refused_chunk_is_no_victim_and_is_asked_once(policy) -> None:
    policy.insert(keys("a", 4))
    asked = []

    def choose(key: bytes) -> bool:
        asked.append(key)
        return key != b"a2"

    assert b"a2" not in policy.victims(4, choose)
    assert len(asked) == len(set(asked)) == 4


def test_asks_no_further_than_it_needs(policy) -> None:
    policy.insert(keys("a", 10))
    asked = []
    policy.victims(2, lambda key: asked.append(key) or True)
    assert len(asked) == 2
    assert policy.victims(0, lambda key: True) == []


def test_touch_passes_over_what_is_not_resident(policy) -> None:
    policy.insert(keys("a", 2))
    policy.touch([b"a0", b"a1", b"gone"])
    assert b"gone" not in policy
    assert len(policy) == 2


def test_removing_the_unknown_is_an_error(policy) -> None:
    with pytest.raises(KeyError):
        policy.remove(b"gone")


def test_resident_set_follows_inserts_and_removes(policy) -> None:
    rng = random.Random(0)
    resident: set[bytes] = set()
    for i in range(300):
        if resident and rng.random() < 0.4:
            key = rng.choice(sorted(resident))
            policy.remove(key)
            resident.remove(key)
        else:
            chain = keys(f"{i}-", rng.randint(1, 5))
            policy.insert(chain)
            resident.update(chain)
        assert len(policy) == len(resident)
        assert sorted(policy.victims(len(resident), lambda key: True)) == sorted(resident)
