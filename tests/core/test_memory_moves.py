"""Memory that moves between chunks and states, as the scheduler plans it."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from tests.core.fakes import FakeWorker, tokens
from tests.core.policies import example
from tests.core.window_engine import WindowEngine
from tests.inside.scheduler import segment_moves, set_pool_balance, tier_context
from tests.opcodes import num_opcodes
from tpu_offload import BlockHash, ChunkKey, EvictionPolicy, HostDivision, OffloadScheduler, Use
from tpu_offload.core.index import ChunkIndex, PoolBalance, PoolMove, checkpoints
from tpu_offload.core.policies import LRUPolicy
from tpu_offload.types import Pool

CHUNKS, STATES = 4, 5  # in a segment


class DrawnRule(PoolBalance):
    """In place of the rule: what the test wants."""

    def __init__(self) -> None:
        super().__init__((CHUNKS, STATES), unit=1)
        self.wanted: Pool | None = None
        self._numbers = itertools.count()

    @property
    def num_evicted(self) -> int:
        """As if chunks were evicted all the time, so that it is asked in every step."""
        return next(self._numbers)

    def restart(self, now: int) -> None:
        pass

    def choose(self, **_: Any) -> PoolMove | None:
        wanted, self.wanted = self.wanted, None
        return None if wanted is None else PoolMove(wanted, Pool(1 - wanted), 1)


class Tier:
    """An engine with a host tier of 16 segments, half of them for states."""

    def __init__(self, **settings: Any) -> None:
        self.worker = FakeWorker(num_host_chunks=8 * CHUNKS, num_host_states=8 * STATES)
        self.engine = WindowEngine((), num_rows=60, workers=[self.worker], **settings)
        self.rule = DrawnRule()
        set_pool_balance(self.engine.scheduler, self.rule)

    @property
    def slots(self) -> tuple[int, int]:
        self.engine.scheduler.check_invariants()
        stats = self.engine.scheduler.stats()
        return stats.num_host_chunks, stats.num_host_states

    @property
    def division(self) -> HostDivision | None:
        return self.engine.plans[-1].division

    def step(self, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            self.engine.step()
            self.engine.settle()

    def carry_out(self) -> None:
        """The worker does what the last plan says."""
        division = self.division
        assert division is not None
        self.worker.division_id = division.division_id
        self.worker.num_host_chunks = division.segments[Pool.CHUNKS] * CHUNKS
        self.worker.num_host_states = division.segments[Pool.STATES] * STATES
        self.report()

    def report(self) -> None:
        self.engine.scheduler.apply(self.worker.report())


class CountedRule(DrawnRule):
    """Counts how often it is asked; nothing is ever evicted."""

    num_asked = 0

    @property
    def num_evicted(self) -> int:
        return 0

    def choose(self, **_: Any) -> PoolMove | None:
        self.num_asked += 1
        return None


def own_policy(**attributes: object) -> Callable[[], EvictionPolicy]:
    """The example of the docs, with other attributes."""
    namespace: dict[str, Any] = {}
    exec(example.source(), namespace)
    return type("Own", (namespace["FIFOPolicy"],), attributes)


@pytest.mark.parametrize(
    ("policy", "by_age"),
    [
        (None, False),
        (LRUPolicy, True),
        (lambda: LRUPolicy(), True),
        (own_policy(), False),
        (own_policy(evicts_by_age=True), True),
    ],
)
def test_chunks_get_memory_by_age_with_policies_that_evict_by_age(
    policy: Callable[[], EvictionPolicy] | None, *, by_age: bool
) -> None:
    engine = WindowEngine((), num_rows=60, workers=[FakeWorker(num_host_chunks=8, num_host_states=8)])
    scheduler = OffloadScheduler(tier_context(engine.scheduler).config, engine.layout, num_workers=1, policy=policy)
    balance = tier_context(scheduler).balance
    assert balance is not None
    for pool, age in ((Pool.CHUNKS, 1), (Pool.STATES, 1000)):
        balance.note_evicted(pool, 1000, age)
    move = balance.choose(now=1000, num_segments=(8, 8), num_free=(0, 0))
    assert (move is not None) == by_age, "to the pool of the younger"


def test_the_rule_is_asked_only_when_something_has_changed() -> None:
    tier = Tier()
    rule = CountedRule()
    set_pool_balance(tier.engine.scheduler, rule)
    tier.step(5)
    assert rule.num_asked == 1
    tier.engine.serve("a", tokens(17))
    tier.step()
    num_asked = rule.num_asked
    assert num_asked > 1, "slots were taken"
    tier.step(5)
    assert rule.num_asked == num_asked
    moves = segment_moves(tier.engine.scheduler)
    assert moves is not None
    moves.reconsider()  # as a report that says what a worker has
    tier.step(5)
    assert rule.num_asked == num_asked + 1


def full_tier() -> Tier:
    """Eight prompts of four chunks: every slot of chunks is used, and 8 of states."""
    tier = Tier()
    for i in range(8):
        tier.engine.serve(f"a{i}", tokens(17, start=1000 * i))
    assert tier.slots == (32, 40)
    assert tier.engine.scheduler.stats().num_resident_chunks == 32
    assert tier.division is None
    return tier


def test_chunks_give_memory_to_states() -> None:
    tier = full_tier()
    tier.rule.wanted = Pool.STATES
    tier.step(3)
    assert tier.division == HostDivision(division_id=1, segments=(7, 9))
    stats = tier.engine.scheduler.stats()
    assert (tier.slots, stats.num_resident_chunks, stats.num_states) == ((28, 40), 28, 7)
    assert (stats.num_moved_segments, stats.num_evicted_chunks, stats.num_evicted_checkpoints) == (1, 4, 1)
    tier.carry_out()
    assert tier.slots == (28, 45)
    assert [tier.engine.serve(f"b{i}", tokens(17, start=1000 * i)) for i in range(8)] == [16] * 7 + [0]
    assert tier.engine.scheduler.stats().num_resident_chunks == 28


def test_states_give_memory_to_chunks() -> None:
    tier = full_tier()
    for i in range(40):  # another state at a prefix of each, so that every slot of states is used
        tier.engine.serve(f"b{i}", tokens(5 + 4 * (i % 3), start=1000 * (i % 8)))
    num_states = tier.engine.scheduler.stats().num_states
    assert num_states == 32
    for _ in range(2):
        tier.rule.wanted = Pool.CHUNKS
        tier.step(3)
        tier.carry_out()
    assert tier.slots == (40, 30)
    assert tier.engine.scheduler.stats().num_states == 30
    for i in range(2):
        assert tier.engine.serve(f"c{i}", tokens(17, start=50_000 + i)) == 0
    assert tier.engine.scheduler.stats().num_resident_chunks == 40, "without an eviction"


def test_what_a_request_was_promised_is_waited_for() -> None:
    tier = full_tier()
    scheduler, hashes = tier.engine.scheduler, list[BlockHash]()
    tier.engine.hasher.extend(hashes, tokens(17, start=7000))
    assert scheduler.match("b", hashes, num_tokens=17, num_computed_tokens=0).num_tokens == 16
    tier.rule.wanted = Pool.STATES
    tier.step(5)
    assert (tier.division, tier.slots) == (None, (28, 40))
    scheduler.release("b")
    tier.step(3)
    assert tier.division is not None


def test_a_move_whose_memory_stays_in_use_is_given_up() -> None:
    tier = full_tier()
    scheduler, hashes = tier.engine.scheduler, list[BlockHash]()
    tier.engine.hasher.extend(hashes, tokens(17, start=7000))
    scheduler.match("b", hashes, num_tokens=17, num_computed_tokens=0)
    tier.rule.wanted = Pool.STATES
    tier.step()
    tier.engine.clock.now_s += 2 * tier_context(scheduler).config.job_timeout_s
    tier.step(2)
    assert (tier.division, tier.slots) == (None, (32, 40))
    scheduler.release("b")
    assert scheduler.stats().num_moved_segments == 0


def test_reports_from_before_a_move_change_nothing() -> None:
    tier = full_tier()
    tier.rule.wanted = Pool.STATES
    tier.step(3)
    tier.worker.num_host_states = 50  # still of the first division
    tier.report()
    assert tier.slots == (28, 40)
    tier.worker.division_id, tier.worker.num_host_chunks = 1, 32  # not freed yet
    tier.report()
    assert tier.slots == (28, 45)
    tier.rule.wanted = Pool.CHUNKS
    tier.step(3)
    assert tier.slots == (28, 40), "what was to be freed does not count when it is wanted again"


def test_the_pools_are_cut_to_what_the_worker_can_have() -> None:
    tier = full_tier()
    tier.worker.num_host_segments = 12
    tier.report()
    tier.step(3)
    assert tier.division == HostDivision(division_id=1, segments=(6, 6))
    assert tier.slots == (24, 30)


def test_a_reset_in_the_middle_of_a_move() -> None:
    tier = full_tier()
    tier.rule.wanted = Pool.STATES
    tier.engine.scheduler.plan_step(())
    tier.engine.scheduler.reset()
    tier.step(3)
    tier.carry_out()
    assert tier.slots == (28, 45)
    assert tier.engine.scheduler.stats().num_resident_chunks == 0


def test_slots_that_were_vacated_are_not_looked_at_again() -> None:
    index = ChunkIndex(LRUPolicy())
    index.grow(Pool.CHUNKS, 100_000)
    index.shrink(Pool.CHUNKS, 1000)
    assert index.vacate(Pool.CHUNKS, 1000), "there was nothing in them"
    keys = [ChunkKey(b"%d" % i) for i in range(1000)]
    index.complete(keys, index.allocate(Use(0), keys, range(1000)), success=True)
    index.shrink(Pool.CHUNKS, 900)
    assert index.vacate(Pool.CHUNKS, 900), "one call looks at 1024"
    assert (index.num_slots(Pool.CHUNKS), len(index)) == (900, 900)
    index.grow(Pool.CHUNKS, 100_000)
    index.check_invariants()
    assert index.num_free_slots == 99_100


def test_slots_that_the_policy_evicts_from_while_they_are_vacated_are_not_used_again() -> None:
    index = ChunkIndex(LRUPolicy())
    index.grow(Pool.CHUNKS, 8)
    keys = [ChunkKey(b"%d" % i) for i in range(8)]
    index.complete(keys, index.allocate(Use(0), keys, range(8)), success=True)
    index.pin(keys)
    index.shrink(Pool.CHUNKS, 6)
    assert not index.vacate(Pool.CHUNKS, 6), "all of them are pinned"
    index.unpin(keys)
    slots = index.allocate(Use(1), new := [ChunkKey(b"new%d" % i) for i in range(3)], range(3))
    index.check_invariants()
    assert sorted(slots) == [3, 4, 5], "two more were evicted, whose slots go to the other pool"
    index.complete(new, slots, success=True)
    assert index.vacate(Pool.CHUNKS, 6)


def test_a_state_saved_anew_stays_when_the_slot_of_the_lost_one_is_vacated() -> None:
    """A load holds the lost one. The new one, of the same boundary, is in a slot that stays."""
    index = ChunkIndex(LRUPolicy(), first_slots=(0, 100))
    index.grow(Pool.CHUNKS, 10)
    index.grow(Pool.STATES, 2)
    keys = [ChunkKey(b"%d" % i) for i in range(2)]
    index.complete(keys, index.allocate(Use(0), keys, range(2)), success=True)
    held = []
    for end in 1, 2:
        begun = index.begin_checkpoint(keys, end, max_chunks=0)
        assert begun is not None
        held.append(begun[0])
        index.checkpoints.complete([piece.slot for piece in begun[1]], success=True)
    index.checkpoints.hold(held[1])
    index.checkpoints.lose_pieces([100, 101])
    assert index.checkpoints.get(keys[0]) is index.checkpoints.get(keys[1]) is None
    begun = index.begin_checkpoint(keys, 2, max_chunks=0)
    assert begun is not None
    index.checkpoints.complete([100], success=True)
    index.shrink(Pool.STATES, 1)
    assert not index.vacate(Pool.STATES, 1), "a load reads it"
    assert index.checkpoints.get(keys[1]) is begun[0]
    index.checkpoints.release(held[1])
    assert index.vacate(Pool.STATES, 1)
    index.check_invariants()


@pytest.mark.parametrize("is_held", [False, True])
def test_a_call_looks_at_few_checkpoints(is_held, monkeypatch) -> None:
    """However many there are, and as often as it is called while a load reads one of those that have to go."""
    monkeypatch.setattr(checkpoints, "_MAX_PIECES", 100)
    index = ChunkIndex(LRUPolicy(), window_chunks=(3,), first_slots=(0, 10_000))
    index.grow(Pool.CHUNKS, 1600)
    index.grow(Pool.STATES, 400)
    for r in range(40):
        keys = [ChunkKey(b"%d %d" % (r, i)) for i in range(10)]
        index.complete(keys, index.allocate(Use(r), keys, range(10)), success=True)
        for end in range(1, 11):
            begun = index.begin_checkpoint(keys, end, max_chunks=10)
            assert begun is not None
            index.checkpoints.complete([piece.slot for piece in begun[1]], success=True)
    assert (len(index.checkpoints), index.num_free_slots) == (400, 800)
    last = index.checkpoints.get(keys[-1])
    assert last is not None
    if is_held:
        index.checkpoints.hold(last)
    num_calls = 0
    while num_calls < 40 and any(slot in range(400, 1600) for slot in index.checkpoints.occupied()):
        num_calls += 1
        cost = num_opcodes(index.checkpoints.evict_from, Pool.CHUNKS, range(400, 1600))
        assert cost < 40_000, "19,000; one call for all of them takes 144,000"
    assert num_calls == 40 if is_held else num_calls in range(4, 20)
    index.shrink(Pool.CHUNKS, 400)
    assert is_held != any(index.vacate(Pool.CHUNKS, 400) for _ in range(20))
    if is_held:
        index.checkpoints.release(last)
    assert any(index.vacate(Pool.CHUNKS, 400) for _ in range(20))
    index.check_invariants()
