"""The better of two orders of eviction of a storage tier."""

import itertools
import logging
import random

import pytest

from tests.core.storage.prefixes import prefix, written
from tpu_offload.core.policies import POLICIES, EvictionPolicy, PriorityPolicy, Use
from tpu_offload.core.storage.adaptive_order import AdaptiveOrder
from tpu_offload.core.storage.eviction_order import RecencyOrder
from tpu_offload.core.storage.policy_order import PolicyOrder


class NewestFirstPolicy(EvictionPolicy):
    """Evicts the prefix that was saved last: right for loops, and wrong for nearly all else."""

    def __init__(self):
        self._tails = {}

    def insert(self, use, keys, parent, depth):
        self._tails[keys[-1]] = None

    def touch(self, use, keys, num_chunks, residents):
        pass

    def remove(self, key, parent):
        self._tails.pop(key, None)
        if parent is not None:
            self.became_leaf(parent)

    def became_leaf(self, key):
        self._tails.setdefault(key, None)

    def clear(self):
        tails, self._tails = self._tails, {}
        return [tails]

    def evict(self, num_chunks, residents):
        for key in list(reversed(self._tails)):
            if num_chunks <= 0:
                break
            del self._tails[key]
            num_evicted, stopped_at = residents.evict_tail(key, num_chunks, until=self._tails)
            num_chunks -= num_evicted
            if stopped_at is not None and residents.is_leaf(stopped_at):
                self._tails.setdefault(stopped_at, None)

    def check_invariants(self, leaves, residents):
        assert all(key in self._tails for key in leaves)


def make(capacity):
    return make_with(POLICIES["density"], capacity)


def make_with(cls, capacity, *, num_expected=0):
    name = "newest" if cls is NewestFirstPolicy else "density"
    orders = {"lru": RecencyOrder(), name: PolicyOrder(PriorityPolicy(cls), capacity, num_expected=num_expected)}
    return AdaptiveOrder(orders, capacity, label="the tier", expects=num_expected > 0)


class Tiers:
    """A storage tier below a host tier of the chunks that were used last; everything is written when it is saved."""

    def __init__(self, order, capacity, *, num_host=0):
        self.order, self.capacity, self.num_host = order, capacity, num_host
        self.host: dict[bytes, None] = {}
        self.use_ids = itertools.count()
        self.num_hits = 0

    def serve(self, keys, *, kept=()):
        use = Use(next(self.use_ids))
        in_host = sum(itertools.takewhile(bool, (key in self.host for key in keys)))
        self.order.begin(use, keys, in_host)
        rest = keys[in_host:]
        self.num_hits += sum(itertools.takewhile(bool, (key in self.order.stored for key in rest)))
        new = [chunk for chunk in written(use, keys)[in_host:] if chunk[1] not in self.order.stored]
        self.order.evict(len(self.order.stored) + len(new) - self.capacity, kept)
        self.order.add_written(new[: self.capacity - len(self.order.stored)])
        self.order.use(use, keys)
        for key in reversed(keys):
            self.host.pop(key, None)
            self.host[key] = None
        while len(self.host) > self.num_host:
            del self.host[next(iter(self.host))]


def loop(num_prompts, num_turns, length=10):
    """Prompts that return in turn: the least recently used is the next one."""
    prompts = [prefix(f"loop {number}", *range(1, length)) for number in range(num_prompts)]
    return prompts * num_turns


def recent(num_prompts, length=10, seed=0):
    """Prompts that return twice, soon after the first time, and never later, and many that do not return."""
    rng = random.Random(seed)
    coming: list[tuple[float, int, int]] = []
    for number in range(num_prompts):
        coming.append((number, number, 0))
        if number % 2:
            coming.extend((number + 1 + 10 * rng.random(), number, turn) for turn in (1, 2))
    return [prefix(f"recent {number}", *range(1, length)) for _, number, _ in sorted(coming)]


def num_hits(order, capacity, prompts, **kwargs):
    tiers = Tiers(order, capacity, **kwargs)
    for keys in prompts:
        tiers.serve(keys)
    order.check_invariants()
    return tiers.num_hits


def test_a_loop_that_is_longer_than_the_tier_is_not_for_lru(caplog):
    caplog.set_level(logging.INFO)
    prompts = loop(60, 40)
    order = make(300)
    assert num_hits(RecencyOrder(), 300, prompts) == 0
    best = num_hits(PolicyOrder(PriorityPolicy(POLICIES["density"]), 300), 300, prompts)
    assert best > 6000
    assert num_hits(order, 300, prompts) > 0.85 * best
    assert (order.followed, order.num_switches) == ("density", 1)
    assert "the tier evicts by density from now on: it would have found " in caplog.text
    assert "chunks more than lru" in caplog.text


def test_what_the_host_tier_has_does_not_count():
    """Beside a host tier that has the whole loop no order finds anything."""
    order = make(300)
    assert num_hits(order, 300, loop(60, 40), num_host=600) == 0
    assert order.num_switches == 0


def test_it_goes_back_when_the_traffic_changes():
    order = make_with(NewestFirstPolicy, 300)
    tiers = Tiers(order, 300)
    for number, (prompts, best) in enumerate(
        ((loop(60, 40), "newest"), (recent(3000), "lru"), (loop(60, 40), "newest"))
    ):
        for keys in prompts:
            tiers.serve(keys)
        order.check_invariants()
        assert (order.followed, order.num_switches) == (best, number + 1)


def test_it_stays_where_both_find_the_same():
    order = make(300)
    rng = random.Random(0)
    prompts = [prefix(f"same {number}", *range(1, 10)) for number in range(25)]  # all fit
    num_hits(order, 300, [rng.choice(prompts) for _ in range(2000)])
    assert (order.followed, order.num_switches) == ("lru", 0)


@pytest.mark.parametrize("prompts", [loop(60, 40), recent(3000)], ids=["loop", "recent"])
@pytest.mark.parametrize("policy", ["density", "newest"])
def test_it_is_nearly_as_good_as_the_better_one(prompts, policy):
    cls = NewestFirstPolicy if policy == "newest" else POLICIES[policy]
    alone = [num_hits(order, 300, prompts) for order in (RecencyOrder(), PolicyOrder(PriorityPolicy(cls), 300))]
    assert num_hits(make_with(cls, 300), 300, prompts) > 0.9 * max(alone)


@pytest.fixture
def disagreeing():
    """Written: a, then b, 40 chunks each. By recency b is left, and is stored.

    Newest first has the first prompt of a and the last of b. What is not stored is surplus nowhere.
    """
    order = make_with(NewestFirstPolicy, 40)
    tiers = Tiers(order, 40)
    for keys in (*A, *B):
        tiers.serve(keys)
    assert set(order.stored) == {*B[0], *B[1]}
    assert set(order._second.order.stored) == {*A[0], *B[1]}
    order.check_invariants()
    return order


A, B = ([prefix(f"{name} {i}", *range(1, 20)) for i in range(2)] for name in "ab")
USE_IDS = itertools.count(1000)
X = prefix("x")


def request(order, keys, num_above=0, *, num_in_hbm=0):
    order.begin(Use(next(USE_IDS), num_in_hbm=num_in_hbm), keys, num_above)
    order.check_invariants()


def test_one_request_is_no_reason_to_change(disagreeing):
    """The lead, 20 chunks, is more than a change costs, but not more than one standard deviation."""
    request(disagreeing, A[0])
    assert disagreeing.num_switches == 0
    request(disagreeing, A[0])
    assert disagreeing.num_switches == 1


def test_a_small_lead_is_no_reason_to_change(disagreeing):
    """20 chunks would have to be written first; it is ahead by 2 with each request."""
    for _ in range(5):
        request(disagreeing, A[0][:2])
    assert disagreeing.num_switches == 0
    request(disagreeing, A[0][:2])
    assert disagreeing.num_switches == 1


def test_a_lead_counts_half_when_the_tier_has_been_written_sixteen_times(disagreeing):
    for _ in range(5):
        request(disagreeing, A[0][:2])
    request(disagreeing, prefix("new", *range(639)))
    for _ in range(2):
        request(disagreeing, A[0][:2])
    assert disagreeing.num_switches == 0
    request(disagreeing, A[0][:2])
    assert disagreeing.num_switches == 1


def test_an_order_that_was_behind_for_long_can_be_followed_soon(disagreeing):
    for _ in range(5):  # newest first has one of the two, the one that was used last
        request(disagreeing, B[0])
        request(disagreeing, B[1])
    for _ in range(4):
        assert disagreeing.num_switches == 0
        request(disagreeing, A[0])
    assert disagreeing.num_switches == 1


def test_differences_of_long_ago_do_not_count(disagreeing):
    for _ in range(5):
        request(disagreeing, B[0])
        request(disagreeing, B[1])
    request(disagreeing, prefix("new", *range(20 * 640)))
    for _ in range(5):
        request(disagreeing, A[0][:2])
    assert disagreeing.num_switches == 0
    request(disagreeing, A[0][:2])
    assert disagreeing.num_switches == 1


def test_what_is_found_above_does_not_count(disagreeing):
    for _ in range(50):
        request(disagreeing, [*A[0], *X], 20)
        request(disagreeing, A[0], 20)
        request(disagreeing, [*A[0], *X], num_in_hbm=20)
        request(disagreeing, [*A[0], *X], 10, num_in_hbm=20)
    assert disagreeing.num_switches == 0


def test_what_hbm_lacks_counts(disagreeing):
    """2 chunks with each request; with 10 it is ahead by half of what a change costs."""
    for num_above, num_in_hbm in ((0, 10), (5, 10), (0, 10), (10, 5), (10, 0)):
        request(disagreeing, A[0][: max(num_above, num_in_hbm) + 2], num_above, num_in_hbm=num_in_hbm)
        assert disagreeing.num_switches == 0
    request(disagreeing, A[0][:12], num_in_hbm=10)
    assert disagreeing.num_switches == 1


def test_a_simulated_order_is_given_what_it_would_be_given(disagreeing):
    """b is stored, and its request would have newest first written what it lacks."""
    request(disagreeing, [*B[0], *X], 20)
    assert set(disagreeing._second.order.stored) == {*A[0], *B[1]}, "the host tier has it, so it is not saved"
    request(disagreeing, [*B[0], *X])
    assert set(disagreeing._second.order.stored) == {*A[0], *B[0]}
    assert set(disagreeing._second.surplus) == {*B[1]}


def test_a_long_prompt_is_given_in_pieces():
    order = make_with(NewestFirstPolicy, 1000)
    tiers = Tiers(order, 1000)
    for name in "ab":
        tiers.serve(prefix(name, *range(999)))
    assert len(order._second.surplus) == 0
    tiers.serve(prefix("c", *range(999)))
    keys = prefix("d", *range(999))
    tiers.serve(keys)
    order._second.order.evict(1000, ())
    order._second.surplus.update(dict.fromkeys(keys))
    for num_left in (1000 - 512, 0):
        request(order, keys)
        assert len(order._second.surplus) == num_left
        assert set(order._second.order.stored) == {*keys[: 1000 - num_left]}, "the head first"


def test_what_the_followed_order_does_not_hold_goes_first(disagreeing):
    for _ in range(2):
        request(disagreeing, A[0])
    assert disagreeing.followed == "newest"
    assert disagreeing.evict(20, ()) == B[0][::-1]
    disagreeing.check_invariants()
    assert disagreeing.evict(30, ()) == B[1][::-1], "what only newest first holds is not stored"
    disagreeing.check_invariants()


def test_what_is_being_read_is_kept(disagreeing):
    for _ in range(2):
        request(disagreeing, A[0])
    assert disagreeing.evict(40, {B[0][1], *B[1]}) == [*B[0][:1:-1], B[0][0]], "surplus is in any order"
    disagreeing.check_invariants()
    assert disagreeing.evict(40, ()) == [B[0][1], *B[1][::-1]]


def test_reads_count_as_uses(disagreeing):
    disagreeing.touch(B[0][::-1])
    assert disagreeing.evict(20, ()) == B[1][::-1]


def test_a_reset_frees_what_it_discards_in_later_steps():
    order = make(20_000)
    for use_id in range(100):
        order.add_written(written(Use(use_id), prefix(use_id, *range(199))))
    order.clear()
    assert not order.stored
    discarded = [order._discarded, order._first.order._discarded, order._second.order._discarded]
    sizes = [len(container) for container in discarded]
    assert min(sizes) >= 20_000
    order.tidy(lambda key: True)
    assert all(0 < before - len(left) <= 5000 for before, left in zip(sizes, discarded, strict=True))
    for _ in range(40):
        order.tidy(lambda key: True)
    assert not any(discarded)


def test_what_an_order_holds_already_displaces_nothing():
    order = make_with(NewestFirstPolicy, 4)
    a, b = prefix(0, 1), prefix(1, 1)
    order.add_written(written(Use(0), a))
    order.add_written(written(Use(1), b))
    assert order.evict(2, ()) == a[::-1]
    order.add(a[0])
    order.check_invariants()
    assert set(order._second.order.stored) == {*a, *b}


def test_what_a_restart_finds_goes_first_until_it_is_used():
    order = make(100)
    old, new = prefix(*"abcd"), prefix(*"efgh")
    for key in old[::-1]:
        order.add(key)
    order.add(old[0])
    order.add_written(written(Use(0), new))
    order.check_invariants()
    assert set(order.stored) == {*old, *new}
    assert order.evict(2, ()) == old[:1:-1]
    order.begin(Use(1), old, 0)
    order.check_invariants()
    assert order.evict(4, ()) == new[::-1]


def test_a_lost_chunk_is_gone_from_both():
    order = make(4)
    a = prefix(*range(4))
    order.add_written(written(Use(0), a))
    order.remove(a[1])
    order.check_invariants()
    assert not any(a[1] in simulated.order.stored for simulated in (order._first, order._second))
    order.add_written(written(Use(1), a)[1:2])
    order.check_invariants()
    assert set(order.evict(4, ())) == {*a}
    assert order.evict(1, ()) == []


class Exclusive:
    """A storage tier that is written when the host tier above, of the chunks that were used last, evicts.

    With each request at most `most` chunks.
    """

    def __init__(self, order, capacity, num_host, most):
        self.order, self.capacity, self.num_host, self.most = order, capacity, num_host, most
        self.host: dict[bytes, bytes] = {}  # and the chunk before it
        self.use = Use(0)
        self.num_hits = 0

    def serve(self, keys):
        self.use = use = Use(self.use.use_id + 1)
        in_host = sum(itertools.takewhile(bool, (key in self.host for key in keys)))
        self.order.begin(use, keys, in_host)
        self.num_hits += sum(itertools.takewhile(bool, (key in self.order.stored for key in keys[in_host:])))
        stored = self.order.stored
        self.order.expect([c for c in written(use, keys) if c[1] not in self.host and c[1] not in stored])
        for _, key, parent in written(use, keys)[::-1]:
            self.host.pop(key, None)
            self.host[key] = parent
        evicted = list(itertools.islice(self.host, max(0, len(self.host) - self.num_host)))[::-1]
        chunks = [(use, key, self.host.pop(key)) for key in evicted]
        self.order.host_evicted(chunks, self.most)
        new = [chunk for chunk in chunks if chunk[1] not in self.order.stored]
        room = min(self.most, len(new))
        self.order.evict(len(self.order.stored) + room - self.capacity, ())
        room = min(room, self.capacity - len(self.order.stored))
        for _, key, _ in new[room:]:
            self.order.drop_expected(key)
        self.order.add_written(new[:room])


def exclusive_hits(order, prompts, most=1000):
    tiers = Exclusive(order, 200, 100, most)
    for keys in prompts:
        tiers.serve(keys)
    order.expect(written(Use(tiers.use.use_id + 1), prefix("last")))  # density looks at its limits then
    order.check_invariants()
    return tiers.num_hits


@pytest.mark.parametrize("prompts", [loop(60, 40), recent(3000)], ids=["loop", "recent"])
@pytest.mark.parametrize("policy", ["density", "newest"])
def test_written_on_eviction_it_is_nearly_as_good_as_the_better_one(prompts, policy):
    cls = NewestFirstPolicy if policy == "newest" else POLICIES[policy]
    both = RecencyOrder(), PolicyOrder(PriorityPolicy(cls), 200, num_expected=100)
    alone = [exclusive_hits(order, prompts) for order in both]
    assert exclusive_hits(make_with(cls, 200, num_expected=100), prompts) > 0.9 * max(alone)


@pytest.mark.parametrize("num_prompts", [8, 10])
def test_also_where_the_host_tier_evicts_more_than_a_step_writes(num_prompts):
    """What is written depends on what is stored: each order writes the first ones that it lacks itself."""
    prompts = loop(num_prompts, 200, length=45)
    best = exclusive_hits(PolicyOrder(PriorityPolicy(POLICIES["density"]), 200, num_expected=100), prompts, most=16)
    assert best > 10 * exclusive_hits(RecencyOrder(), prompts, most=16)
    assert exclusive_hits(make_with(POLICIES["density"], 200, num_expected=100), prompts, most=16) > 0.7 * best


def test_what_the_host_tier_evicts_is_written_where_it_is_missing():
    order = make_with(NewestFirstPolicy, 4, num_expected=4)
    assert order.expects
    first, second = order._first, order._second
    a, b, c, d = (written(Use(i), prefix(name, 1)) for i, name in enumerate("abcd"))
    for chunks in (a, b):
        order.host_evicted(chunks, 4)
        order.add_written(chunks)
    names = [{key for _, key, _ in chunks} for chunks in (a, b, c, d)]
    assert set(order.evict(2, ())) == names[0]
    order.host_evicted(c, 4)  # newest first evicts b, which is stored
    order.add_written(c)
    assert set(second.surplus) == names[1]
    order.begin(Use(3), [key for _, key, _ in b], 0)
    assert set(second.surplus) == names[1], "nothing is written before the host tier evicts it"
    order.host_evicted(b, 1)
    order.check_invariants()
    assert set(second.surplus) & names[1] == {b[1][1]}, "at most so many, the head first"
    assert set(first.order.stored) == names[1] | names[2], "it had them"
    order.check_invariants()
    order.add_written(d)
    order.check_invariants()
    assert set(first.surplus) >= names[3], "written by the tier, and not by the orders, which were not told of it"


def test_chunks_before_expected_ones_are_not_displaced():
    """Nothing may be evicted, since what follows it is in the host tier: what has no room is left out."""
    order = make_with(POLICIES["lru"], 2, num_expected=4)
    a, b = written(Use(0), prefix("a", 1, 2, 3)), written(Use(1), prefix("b", 1))
    order.host_evicted(a[:2], 4)
    order.add_written(a[:2])
    order.expect(a[2:])
    order.expect(b)
    assert len(order.evict(2, ())) == 2
    order.host_evicted(b, 4)
    order.add_written(b)
    order.check_invariants()
    second = order._second
    assert set(second.order.stored) == {key for _, key, _ in a[:2]}
    assert set(second.surplus) == {key for _, key, _ in b}
    assert not second.order.expected() & {key for _, key, _ in b}
    order.add(prefix("c")[0])
    order.check_invariants()
    assert prefix("c")[0] in second.surplus


def test_what_is_not_written_is_expected_no_more():
    order = make_with(POLICIES["density"], 4, num_expected=4)
    a = written(Use(0), prefix("a", 1))
    order.expect(a)
    assert order._second.order.expected() == {key for _, key, _ in a}
    order.drop_expected(a[1][1])
    assert order._second.order.expected() == {a[0][1]}
    order.tidy(lambda key: False)
    assert not order._second.order.expected()


@pytest.mark.parametrize("num_expected", [0, 20])
@pytest.mark.parametrize("seed", range(8))
def test_any_order_of_calls(seed, num_expected):
    rng = random.Random(seed)
    capacity = rng.choice((1, 5, 40, 200))
    cls = rng.choice((NewestFirstPolicy, *POLICIES.values()))
    order = make_with(cls, capacity, num_expected=num_expected)
    use_id = 0
    prompts = [prefix(rng.randrange(3), *(rng.randrange(2) for _ in range(rng.randrange(1, 12)))) for _ in range(30)]
    for _ in range(600):
        keys = rng.choice(prompts)
        action = rng.randrange(20)
        use = Use(rng.randint(max(0, use_id - 3), use_id), rng.choice((0, 0, 0, -1)))
        if action < 8:
            use_id += 1
            order.begin(Use(use_id), keys, rng.choice((0, 0, rng.randrange(len(keys) + 1))))
            order.check_invariants()
            order.use(Use(use_id), keys)
        elif action < 16:
            new = [chunk for chunk in written(use, keys) if chunk[1] not in order.stored and rng.random() < 0.9]
            new = new[: rng.randrange(1, 9)]
            before = set(order.stored)
            kept = set(rng.sample(sorted(before), min(len(before), rng.randrange(4))))
            short = len(before) + len(new) - capacity
            evicted = order.evict(short, kept)
            if kept or num_expected:
                assert len(evicted) <= max(0, short)
            else:
                assert len(evicted) == max(0, min(short, len(before)))
            assert not kept.intersection(evicted)
            assert before - set(evicted) == set(order.stored)
            order.add_written(new[: capacity - len(order.stored)])
        elif action < 17 and order.stored:
            order.remove(rng.choice(sorted(order.stored)))
        elif action < 18:
            for key in keys:
                if len(order.stored) < capacity:
                    order.add(key)
        elif action == 18:
            order.touch([key for key in keys if key in order.stored])
            if num_expected:
                rest = [chunk for chunk in written(use, keys) if chunk[1] not in order.stored]
                order.expect(rest[: rng.randrange(5)])
                order.host_evicted([c for c in written(use, keys) if rng.random() < 0.5], rng.randrange(6))
                order.drop_expected(rng.choice(keys))
                order.tidy(lambda key: rng.random() < 0.9)
        elif rng.random() < 0.1:
            order.clear()
            order.tidy(lambda key: True)
            assert not order.stored
        assert len(order.stored) <= capacity
        order.check_invariants()
    for _ in range(20 if num_expected else 0):
        order.tidy(lambda key: False)
        order.evict(1, ())  # while too few can be, it asks about more that are expected
    num_left = len(order.stored)
    assert len(order.evict(capacity, ())) == num_left
    assert not order.stored, "a chunk that nothing evicts"


def test_the_host_tier_reckons_with_what_both_orders_hold():
    """Newest first keeps the oldest four, and lru the newest four, so both hold two of six at most."""
    order = make_with(NewestFirstPolicy, 4)
    tiers = Tiers(order, 4)
    prompts = [prefix(f"{i}") for i in range(5)]
    for keys in prompts[:4]:
        tiers.serve(keys)
    assert all(order.holds(keys[0]) for keys in prompts[:4])
    tiers.serve(prompts[4])
    assert order.followed == "lru"
    assert [keys[0] in order.stored for keys in prompts] == [False, True, True, True, True]
    assert [order.holds(keys[0]) for keys in prompts] == [False, True, True, False, True]
    order.remove(prompts[1][0])
    assert not order.holds(prompts[1][0])
