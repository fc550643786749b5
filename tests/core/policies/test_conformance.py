"""What every eviction policy must do."""

import functools
import gc
import os
import random
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.core.policies import decisions, example
from tests.core.policies.residents import CountedResidents, FakeResidents, chunk_keys, new_use
from tests.grids import few
from tpu_offload.config import EvictionPolicyName, OffloadConfig
from tpu_offload.core.index import ChunkIndex
from tpu_offload.core.policies import (
    DEFAULT_POLICY,
    POLICIES,
    EvictionPolicy,
    PriorityPolicy,
    Use,
    density,
    find_policy,
)
from tpu_offload.errors import ConfigError
from tpu_offload.types import ChunkKey, Pool

CLASSES = {**POLICIES, "docs/policies.md": example.load()}
MAKERS: dict[str, Callable[[], EvictionPolicy]] = {
    **CLASSES,
    **{f"{name}, priorities": functools.partial(PriorityPolicy, make) for name, make in CLASSES.items()},
}


@pytest.fixture(params=MAKERS)
def make(request):
    return MAKERS[request.param]


@pytest.fixture
def policy(make) -> EvictionPolicy:
    policy = make()
    policy.resize(1000)
    return policy


@pytest.fixture
def residents() -> FakeResidents:
    return FakeResidents()


def keys(prefix: str, num: int) -> list[ChunkKey]:
    return [ChunkKey(f"{prefix}{i}".encode()) for i in range(num)]


def test_evicts_the_tail_of_a_prefix_before_its_head(policy, residents) -> None:
    chain = keys("a", 5)
    residents.add(chain)
    policy.insert(new_use(), chain[:3], None, 0)
    policy.insert(new_use(), chain[3:], chain[2], 3)
    policy.touch(new_use(), chain, 5, residents)
    policy.evict(5, residents)
    assert residents.evicted == chain[::-1]


def test_evicts_no_more_than_requested(policy, residents) -> None:
    residents.add(keys("a", 10))
    policy.insert(new_use(), keys("a", 10), None, 0)
    policy.evict(2, residents)
    assert len(residents.evicted) == 2
    policy.check_invariants(residents.leaves(), residents)


def test_a_blocked_chunk_stays_and_is_evicted_later(policy, residents) -> None:
    for name in "ab":
        residents.add(keys(name, 4))
        policy.insert(new_use(), keys(name, 4), None, 0)
    residents.blocked = {b"a2", b"b3"}
    policy.evict(8, residents)
    assert residents.evicted == [b"a3"]
    residents.blocked.clear()
    policy.evict(8, residents)
    assert not residents.parents


def test_a_blocked_chunk_keeps_its_place(make) -> None:
    """An eviction that finds no victim changes nothing, or pins would make the oldest chunks recent."""
    orders = []
    for in_vain in (0, 2):
        residents, policy = FakeResidents(), make()
        policy.resize(1000)
        for i in range(6):
            key = ChunkKey(b"%d" % i)
            residents.add([key])
            policy.insert(Use(i), [key], None, 0)
        residents.blocked = set(residents.parents)
        for _ in range(in_vain):
            policy.evict(3, residents)
        residents.blocked = set()
        policy.evict(6, residents)
        orders.append(residents.evicted)
    assert orders[0] == orders[1]


@pytest.mark.parametrize("name", ["lru", "arc", "s3fifo", "wtinylfu"])
def test_a_head_that_was_set_aside_and_then_used_is_recent_again(name, residents) -> None:
    policy = POLICIES[name]()
    policy.resize(1000)
    for chain in (chunk_keys("a0 a1"), chunk_keys("b0")):
        residents.add(chain)
        policy.insert(new_use(), chain, None, 0)
    for chain in (chunk_keys("a0 a1"), chunk_keys("b0")):
        policy.touch(new_use(), chain, len(chain), residents)
    residents.blocked = set(chunk_keys("a1 b0"))
    policy.evict(1, residents)
    policy.touch(new_use(), chunk_keys("a0"), 1, residents)
    residents.blocked = set()
    policy.evict(3, residents)
    assert residents.evicted == [b"a1", b"b0", b"a0"]


def test_touch_skips_chunks_that_are_not_resident(policy, residents) -> None:
    residents.add(keys("a", 2))
    policy.insert(new_use(), keys("a", 2), None, 0)
    policy.touch(new_use(), [b"a0", b"a1", b"gone", b"never used"], 3, residents)
    policy.touch(new_use(), [b"gone"], 1, residents)
    policy.check_invariants(residents.leaves(), residents)
    policy.evict(2, residents)
    assert residents.evicted == [b"a1", b"a0"]


@pytest.mark.parametrize("priorities", [(0,), (0, 1), (-3, 5, 100)], ids=str)
@pytest.mark.parametrize("size", [0, 3, 40])
@pytest.mark.parametrize("has_storage", [False, True])
def test_whatever_happens_every_chunk_can_be_evicted(policy, residents, has_storage, size, priorities) -> None:
    """And a batch evicts exactly the requested number while that many can be evicted, whatever the tier's size."""
    rng = random.Random(0)
    lost: dict[ChunkKey, bytes | None] = {}
    stored: set[ChunkKey] = set()
    if has_storage:
        residents.is_stored = stored.__contains__
    for i in range(600):
        known = sorted(residents.parents)
        if has_storage:
            stored ^= {key for key in known if rng.random() < 0.2}
        what = rng.random()
        use = new_use(rng.choice(priorities))
        back = next((key for key, parent in lost.items() if parent is None or parent in residents), None)
        if back is not None and what < 0.2:
            parent = lost.pop(back)
            residents.add([back], parent=parent)
            policy.insert(use, [back], parent, residents.depth_after(parent))
        elif what < 0.4 or not known:
            chain = keys(f"{i}-", rng.randint(1, 5))
            parent = rng.choice([*known, None])
            residents.add(chain, parent=parent)
            policy.insert(use, chain, parent, residents.depth_after(parent))
        elif what < 0.6:
            gone = rng.choice(known)
            lost[gone] = parent = residents.parents.pop(gone)
            policy.remove(gone, parent if parent in residents else None)
        elif what < 0.8:
            chain = residents.prefix(rng.choice(known))
            policy.touch(use, chain, rng.randint(1, len(chain)), residents)
        else:
            residents.blocked = {key for key in known if rng.random() < 0.3}
            num, num_free = rng.randint(1, 6), residents.num_evictable()
            residents.evicted.clear()
            policy.evict(num, residents)
            assert len(residents.evicted) == min(num, num_free)
        if rng.random() < 0.02:
            policy.resize(rng.choice([0, 1, size]))
        policy.check_invariants(residents.leaves(), residents)
    residents.blocked = set()
    policy.evict(1000, residents)
    assert not residents.parents


def test_chunks_can_be_evicted_one_by_one(policy, residents) -> None:
    for name in "abc":
        residents.add(keys(name, 7))
        policy.insert(new_use(), keys(name, 7), None, 0)
        residents.add(keys(name + "x", 3), parent=f"{name}2".encode())
        policy.insert(new_use(), keys(name + "x", 3), f"{name}2".encode(), 3)
        policy.touch(new_use(), keys(name, 4), 4, residents)
    for num_left in reversed(range(30)):
        policy.evict(1, residents)
        assert len(residents) == num_left


# --- a use is one use, however many calls carry it -------------------------------------------------


def test_repeating_the_calls_of_a_use_changes_nothing(make) -> None:
    """A request causes a call when it loads, with each part that it saves and at its end."""
    assert decisions.run(make(), repeats=0) == decisions.run(make(), repeats=3)


def test_the_same_calls_give_the_same_decisions(make) -> None:
    assert decisions.run(make()) == decisions.run(make())


@pytest.mark.wide
def test_nothing_depends_on_the_hash_seed() -> None:
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", "from tests.core.policies import decisions; decisions.show()"]
    outputs = []
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=120, check=True
        )
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1]
    assert len(outputs[0].splitlines()) == len(POLICIES) * 2


# --- cost -----------------------------------------------------------------------------------------


def deep_nbytes(policy: EvictionPolicy) -> int:
    seen: dict[int, int] = {}
    todo: list[object] = [policy]
    while todo:
        thing = todo.pop()
        if id(thing) not in seen and not isinstance(thing, type | types.ModuleType | types.FunctionType):
            seen[id(thing)] = sys.getsizeof(thing)
            todo += gc.get_referents(thing)
    return sum(seen.values())


@pytest.mark.parametrize("name", few([*POLICIES, "priorities"], "density", "priorities"))
def test_its_memory_is_bounded_by_the_tier(name, monkeypatch) -> None:
    monkeypatch.setattr(density, "MIN_TRACKED", 0)
    make, priorities = MAKERS["lru, priorities" if name == "priorities" else name], range(-50, 50)
    size = 500
    policy = make()
    index = ChunkIndex(policy)
    index.grow(Pool.CHUNKS, size)
    nbytes = []
    for i in range(16000):
        use = Use(i, priority=priorities[i % len(priorities)])
        chain = [ChunkKey(b"%d-%d-filled up to a length" % (i, j)) for j in range(1 + i % 9)]
        index.complete(chain, index.allocate(use, chain, range(len(chain))), success=True)
        index.touch(use, chain, len(chain))
        if i % 3:
            index.touch(Use(i), chain, len(chain) // 2)
        if i % 2000 == 1999:
            nbytes.append(deep_nbytes(policy))
    assert max(nbytes[4:]) < 1.2 * max(nbytes[:4]) + 20_000, f"its memory keeps growing: {nbytes}"


@pytest.mark.parametrize("num_at_once", [1, 50])
@pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
def test_a_third_of_the_tier_pinned_costs_little(make, num_at_once) -> None:
    """Evictions look at blocked chunks, but not at all of them for each victim."""
    residents = CountedResidents(make())
    index, rng = residents.index, random.Random(0)
    index.grow(Pool.CHUNKS, 30_000)
    chains = [[ChunkKey(b"%d-%d" % (i, j)) for j in range(100)] for i in range(300)]
    for i, chain in enumerate(chains):
        index.complete(chain, index.allocate(Use(i), chain, range(100)), success=True)
    for chain in rng.sample(chains, 90):
        index.pin(chain)
    for i in range(6_000 // num_at_once):
        chain = [ChunkKey(b"new %d-%d" % (i, j)) for j in range(num_at_once)]
        index.complete(chain, index.allocate(Use(1000 + i), chain, range(num_at_once)), success=True)
    assert index.num_evicted == 6_000 // num_at_once * num_at_once
    assert residents.num_asked / index.num_evicted < 100 / num_at_once * 3 + 5


# --- names ----------------------------------------------------------------------------------------


def test_every_name_in_the_settings_is_a_policy() -> None:
    assert list(POLICIES) == [name.value for name in EvictionPolicyName]
    assert OffloadConfig.create().eviction_policy.value == DEFAULT_POLICY
    for name in ("fifo", ":", "os:", ":FIFOPolicy"):
        with pytest.raises(ConfigError, match=f"unknown eviction policy '{name}'; expected one of density, lru, arc"):
            find_policy(name)


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_by_name_obeys_priorities(name, residents) -> None:
    policy = PriorityPolicy(find_policy(name))
    policy.resize(10)
    for i, priority in enumerate((1, 0, 2)):
        residents.add(keys("abc"[i], 2))
        policy.insert(new_use(priority), keys("abc"[i], 2), None, 0)
    policy.evict(6, residents)
    assert residents.evicted == [b"b1", b"b0", b"a1", b"a0", b"c1", b"c0"]
