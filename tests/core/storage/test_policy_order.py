"""The order of eviction that a policy gives in a storage tier."""

import gc
import random
from collections import deque
from typing import Any

import pytest

from tests.core.policies.told import ToldPolicy
from tests.core.storage.prefixes import prefix, written
from tpu_offload.core.index import NO_PARENT
from tpu_offload.core.policies import POLICIES, PriorityPolicy, Use
from tpu_offload.core.policies.runs import Run
from tpu_offload.core.storage.eviction_order import RecencyOrder
from tpu_offload.core.storage.policy_order import PolicyOrder
from tpu_offload.types import ChunkKey


def make(policy, capacity=100, *, num_expected=0):
    return PolicyOrder(PriorityPolicy(POLICIES[policy]), capacity, num_expected=num_expected)


@pytest.mark.parametrize("policy", POLICIES)
def test_prefixes_are_evicted_from_their_tails(policy):
    order = make(policy)
    a, b = prefix(*"abcdefgh"), prefix(*"abcdxyz")
    order.use(Use(0), a)
    order.add_written(written(Use(0), a))
    order.use(Use(1), b)
    order.add_written(written(Use(1), b)[4:])
    order.check_invariants()
    evicted = []
    while order.stored:
        evicted += order.evict(1, ())
        order.check_invariants()
        for keys in (a, b):
            left = [key in order.stored for key in keys]
            assert left == sorted(left, reverse=True), "a chunk is left whose head is gone"
    assert sorted(evicted) == sorted({*a, *b})


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_being_read_is_kept_with_all_before_it(policy):
    order = make(policy)
    a = prefix(*range(8))
    order.add_written(written(Use(0), a))
    assert order.evict(8, {a[4]}) == a[:4:-1]
    assert order.evict(8, {a[4]}) == []
    order.check_invariants()
    assert order.evict(8, ()) == a[4::-1]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_head_that_is_written_after_its_tail_adopts_it(policy):
    """Its write failed at first. Until it is stored, the rest may be evicted in any order; then from the tail."""
    order = make(policy)
    a = prefix(*range(6))
    chunks = written(Use(0), a)
    order.add_written(chunks[:2] + chunks[3:])
    order.check_invariants()
    order.add_written(chunks[2:3])
    order.check_invariants()
    assert order.evict(6, ()) == a[::-1]


@pytest.mark.parametrize("policy", POLICIES)
def test_what_a_restart_finds_goes_first_until_it_is_used(policy):
    order = make(policy)
    old, used, new = prefix(*"abcd"), prefix(*"efgh"), prefix(*"ijkl")
    for key in [*used[::-1], *old]:
        order.add(key)
    order.add_written(written(Use(0), new))
    order.use(Use(1), used)
    order.check_invariants()
    assert order.evict(2, ()) == old[:2], "in the order of the listing"
    assert order.evict(1, {old[2]}) == [old[3]], "not the one that is being read"
    order.use(Use(2), old)
    order.check_invariants()
    while order.evict(1, ()):
        order.check_invariants()
        for keys in (used, new):
            left = [key in order.stored for key in keys]
            assert left == sorted(left, reverse=True)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_lost_chunk_leaves_the_rest_and_may_be_written_again(policy):
    order = make(policy)
    a = prefix(*range(6))
    order.add_written(written(Use(0), a))
    order.remove(a[2])
    order.check_invariants()
    order.use(Use(1), a)
    order.add_written(written(Use(1), a)[2:3])
    order.check_invariants()
    assert set(order.evict(6, ())) == set(a)


@pytest.mark.parametrize("policy", POLICIES)
def test_keys_that_are_not_chained_do_not_fill_the_tier_for_ever(policy):
    """One chunk before another and after it, as block hashes of the tokens of a block alone say."""
    order = make(policy, 4)
    a, x = prefix("a")[0], prefix("x")[0]
    order.add(a)
    order.use(Use(1), [x, a])
    order.add_written([(Use(2), x, a)])
    order.check_invariants()
    assert sorted(order.evict(4, ())) == sorted([a, x])


@pytest.mark.parametrize("policy", POLICIES)
def test_many_resets_leave_nothing(policy):
    order = make(policy)
    for use_id in range(50):
        order.add_written(written(Use(use_id), prefix(use_id, *range(8))))
        order.add(prefix("listed", use_id)[0])
        order.clear()
        order.tidy(lambda key: True)
        assert not len(order.stored)
        assert not len(order._discarded)


def test_a_use_counts_once_and_what_other_tiers_have_does_not_matter():
    calls: list[Any] = []

    class CallsPolicy(ToldPolicy):
        def insert(self, use, keys, parent, depth):
            calls.append(("insert", use.use_id, use.num_in_hbm, use.num_in_storage, len(keys), parent))
            super().insert(use, keys, parent, depth)

        def touch(self, use, keys, num_chunks, residents):
            calls.append(("touch", use.use_id, use.num_in_hbm, use.num_in_storage, num_chunks))
            super().touch(use, keys, num_chunks, residents)

    order = PolicyOrder(CallsPolicy({}), 100)
    a = prefix(*range(8))
    use = Use(3, num_in_hbm=2, num_in_storage=4)
    order.use(use, a)
    order.add_written(written(use, a[:5]))
    order.use(use, a)
    order.add_written([(Use(4), prefix("x")[0], NO_PARENT), (Use(4), prefix("y")[0], NO_PARENT)])
    assert calls == [
        ("insert", 3, 0, 0, 5, None),
        ("touch", 3, 0, 0, 5),  # chunks that are not stored are used by being written
        ("insert", 4, 0, 0, 1, None),
        ("insert", 4, 0, 0, 1, None),
    ]


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_expected_is_not_stored_and_stays_until_it_is_written_or_dropped(policy):
    order = make(policy, num_expected=100)
    a, b = prefix(*range(8)), prefix("x", *range(4))
    order.add_written(written(Use(0), a[:4]))
    order.expect(written(Use(1), a)[2:])  # of these the first two are stored
    order.expect(written(Use(1), b))
    assert set(order.stored) == set(a[:4])
    assert not any(key in order.stored for key in [*a[4:], *b])
    order.check_invariants()
    assert order.evict(100, ()) == [], "chunks that will be written follow those that are stored"
    order.check_invariants()
    order.add_written([(Use(2), a[4], a[3])])
    order.add(a[5])  # one of which nothing else is known
    for key in [*a[:5:-1], *b[:1:-1]]:
        order.drop_expected(key)
        order.check_invariants()
    order.drop_expected(a[0])
    assert set(order.stored) == set(a[:6]), "what is stored is not dropped"
    assert order.evict(100, ()) == a[5::-1]
    order.add_written([(Use(2), b[1], b[0])])
    assert order.evict(100, ()) == [b[1]]
    order.drop_expected(b[0])
    order.check_invariants()
    assert not len(order._tree)


@pytest.mark.parametrize("policy", POLICIES)
def test_what_the_host_tier_has_lost_is_dropped(policy):
    order = make(policy, num_expected=1000)
    a, kept = prefix(*range(600)), prefix("kept", *range(5))
    order.add_written(written(Use(0), a)[:10])
    order.expect(written(Use(0), a)[10:])
    order.expect(written(Use(1), kept))
    present = {*a, *kept}
    for _ in range(1000):
        order.tidy(present.__contains__)
    assert order.evict(1, ()) == []
    present = {*kept}
    num_calls = 0
    while order.evict(1, ()) == []:
        order.tidy(present.__contains__)
        order.check_invariants()
        num_calls += 1
        assert num_calls < 10, "while something is in the way of evictions, many are looked at"
    for _ in range(200):
        order.tidy(present.__contains__)
    assert order.expected() == {*kept}
    order.check_invariants()


def test_more_may_be_expected_than_there_was_room_for():
    """The host tier has grown."""
    order = make("density", 4, num_expected=2)
    prompts = [prefix(i, *range(30)) for i in range(100)]
    for use_id, keys in enumerate(prompts):
        order.expect(written(Use(use_id), keys))
    order.check_invariants()
    assert len(order.expected()) == 3100
    order.clear()
    assert not len(order.stored)
    assert order.evict(1, ()) == []


def test_a_chunk_that_was_used_in_the_host_tier_outlives_one_that_was_not():
    """And one of higher priority those of lower: both are known when they are written."""
    order = make("density", num_expected=100)
    often, once, high = prefix("often", *range(4)), prefix("once", *range(4)), prefix("high", *range(4))
    order.expect(written(Use(0, 1), high))
    order.expect(written(Use(1), often))
    for use_id in range(2, 9):
        order.use(Use(use_id), often)
    order.expect(written(Use(9), once))
    late = Use(10, is_request=False)
    order.add_written(written(late, [*high]))
    order.add_written(written(late, often))
    order.add_written(written(late, once))
    assert order.evict(15, ()) == [*once[::-1], *often[::-1], *high[::-1]]


def test_what_is_expected_and_dropped_leaves_nothing():
    """Such as what a step evicts beyond its limit: no slot is used that was not, and no run of `density` is kept."""
    order = make("density", 4000, num_expected=600)
    host: deque[list[ChunkKey]] = deque()
    num_runs = []
    for use_id in range(24_000):
        keys = prefix(use_id, 0, 1)
        order.expect(written(Use(use_id), keys))
        host.append(keys)
        if len(host) > 200:
            evicted = host.popleft()
            if use_id % 500 == 0:
                order.add_written(written(Use(use_id), evicted))
            else:
                for key in reversed(evicted):
                    order.drop_expected(key)
        if use_id in (7999, 23_999):
            gc.collect()
            num_runs.append(sum(isinstance(found, Run) for found in gc.get_objects()))
    assert len(order._tree.keys) < 1500
    assert num_runs[1] < 1.5 * num_runs[0], "three times as many were dropped"
    order.check_invariants()


def test_a_policy_is_told_of_leaves_only_if_it_has_asked():
    """Density loses the place of a run that it is told of, and no longer knows that it ends a prompt."""
    told: list[ChunkKey] = []

    class LeafPolicy(ToldPolicy):
        def became_leaf(self, key):
            told.append(key)
            super().became_leaf(key)

        def evict(self, num_chunks, residents):
            assert residents.evict_tail(b[-1], 1) == (0, b[-1])
            assert not residents.is_leaf(b[-1])

    order = PolicyOrder(LeafPolicy({}), 100, num_expected=100)
    a, b = prefix(*range(3)), prefix("x", *range(3))
    order.expect(written(Use(0), a))
    order.add_written(written(Use(0), a))
    assert not told
    order.expect(written(Use(1), b))
    order.evict(1, ())
    order.add_written(written(Use(1), b))
    assert told == [b[-1]]


@pytest.mark.parametrize("policy", POLICIES)
def test_expected_chunks_in_the_way_are_not_asked_for_again(policy):
    """Each eviction would look at all of the host tier."""
    order = make(policy, 100, num_expected=10_000)
    for use_id in range(2000):
        order.expect(written(Use(use_id), prefix("expected", use_id)))
    order.add_written(written(Use(2001), prefix(*range(4))))
    asked: list[ChunkKey] = []

    class Kept:
        def __contains__(self, key):
            asked.append(key)
            return False

    assert order.evict(1, ()) != []
    for use_id in range(3000, 3004):
        new = prefix(use_id)
        order.add_written(written(Use(use_id), new))
        assert len(order.evict(1, Kept())) == 1
    assert len(asked) < 100
    order.check_invariants()


def test_a_prompt_that_returns_outlives_many_that_do_not():
    """As least recently used does not: between two uses, more new chunks are written than the tier holds."""

    def num_hits(order, capacity=300):
        ids, hits = iter(range(10**6)), 0
        popular = [prefix(f"popular {i}", *range(20)) for i in range(6)]
        for turn in range(300):
            for keys in (popular[turn % 6], *(prefix(f"{turn} {i}", *range(20)) for i in range(4))):
                use = Use(next(ids))
                order.use(use, keys)
                new = [chunk for chunk in written(use, keys) if chunk[1] not in order.stored]
                hits += len(keys) - len(new)
                order.evict(len(order.stored) + len(new) - capacity, ())
                order.add_written([chunk for chunk in written(use, keys) if chunk[1] not in order.stored])
        assert len(order.stored) <= capacity
        return hits / (300 * 21)

    assert num_hits(RecencyOrder()) == 0
    assert num_hits(make("density", 300)) > 0.7


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_calls(policy, seed):
    rng = random.Random(seed)
    capacity, num_expected = rng.choice((5, 40, 200)), rng.choice((0, 5, 100))
    order = make(policy, capacity, num_expected=num_expected)
    use_id, keys_of = 0, {}
    expected: set[ChunkKey] = set()
    prompts = [prefix(rng.randrange(3), *(rng.randrange(2) for _ in range(rng.randrange(1, 12)))) for _ in range(30)]
    for keys in prompts:
        keys_of.update(dict.fromkeys(keys, keys))
    for _ in range(400):
        keys = rng.choice(prompts)
        action = rng.randrange(20)
        if action < 8:
            use_id += 1
            order.use(Use(use_id - rng.choice((0, 0, 0, min(use_id, 2))), rng.choice((0, 0, 0, 1))), keys)
        elif action < 16:
            use = Use(rng.randint(max(0, use_id - 3), use_id), rng.choice((0, 0, 0, -1)), is_request=rng.random() < 0.8)
            new = [chunk for chunk in written(use, keys) if chunk[1] not in order.stored and rng.random() < 0.9]
            new = new[: rng.randrange(1, 9)]
            kept = set(rng.sample(sorted(order.stored), min(len(order.stored), rng.randrange(4))))
            before = set(order.stored)
            evicted = order.evict(len(order.stored) + len(new) - capacity, kept)
            assert not kept.intersection(evicted)
            assert before - set(evicted) == set(order.stored)
            order.add_written(new := new[: capacity - len(order.stored)])
            expected.difference_update(key for _, key, _ in new)
            if rng.random() < 0.5:
                coming = [chunk for chunk in written(use, keys) if rng.random() < 0.9][: rng.randrange(1, 9)]
                order.expect(coming)
                expected.update(key for _, key, _ in coming if num_expected and key not in order.stored)
            for key in sorted(expected)[: rng.randrange(3)]:
                order.drop_expected(key)
                expected.remove(key)
            if rng.random() < 0.2:
                lost = {key for key in expected if rng.random() < 0.3}
                for _ in range(100):
                    order.tidy(lambda key, lost=lost: key not in lost)
                expected -= lost
        elif action < 17 and order.stored:
            order.remove(rng.choice(sorted(order.stored)))
        elif action < 18:
            for key in keys:
                if len(order.stored) < capacity:
                    order.add(key)
                    expected.discard(key)
        elif action == 19 and rng.random() < 0.1:
            order.clear()
            expected = set()
            assert not order.stored
        assert len(order.stored) <= capacity
        order.check_invariants()
        assert order.expected() == expected
    for key in sorted(expected):
        order.drop_expected(key)
    order.evict(capacity, ())
    assert not len(order.stored), "a chunk that nothing evicts"
