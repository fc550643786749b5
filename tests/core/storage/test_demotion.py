"""Chunks that the host tier evicts are written to storage: from their slots, before others are written there."""

from typing import Any

import pytest

from tests.compiled import interpreted_only
from tests.inside.scheduler import (
    chunk_index,
    expected_chunks,
    save_planner,
    slot_of_chunk,
    storage_planner,
    storage_planners,
)
from tests.storage.fakes import StorageEngine, prompt
from tpu_offload import ConfigError, MatchState, RequestLimits
from tpu_offload.types import JobKind, Pool

A, B, C = prompt(1), prompt(2), prompt(3)


def make(*, num_workers=1, num_host_chunks=4, **settings):
    settings = {"storage_write_on": "eviction", "num_storage_chunks": 64} | settings
    return StorageEngine(num_workers=num_workers, num_host_chunks=num_host_chunks, sizes=(64,), **settings)


def stored(engine):
    return list(storage_planner(engine.scheduler).records.stored)


def demoted(plan):
    return [chunk for job in plan.of(JobKind.DEMOTE) for chunk in job.chunks]


def test_nothing_is_written_before_the_host_tier_is_full():
    engine = make(num_host_chunks=8)
    engine.fill(A)
    engine.fill(B)
    assert stored(engine) == []
    assert engine.scheduler.stats().cascaded_chunks == 0


def test_the_evicted_are_read_from_slots_that_the_same_step_writes():
    engine = make()
    engine.fill(A)
    engine.add("b", B)
    plan, _ = engine.step({"b": 16})
    (save,) = plan.of(JobKind.SAVE)
    assert plan.jobs[0].kind is JobKind.DEMOTE, "before all that write slots"
    assert {slot for _, slot in demoted(plan)} == set(save.parts[0].host_block_ids)
    assert [key for key, _ in demoted(plan)] == engine.keys(A), "heads first"
    assert stored(engine) == []
    engine.apply(engine.workers[0], engine.workers[0].finish())
    assert set(stored(engine)) == set(engine.keys(A))
    engine.check_storage([A])
    stats = engine.scheduler.stats()
    assert (stats.cascaded_chunks, stats.dropped_demotion_chunks, stats.num_failed_jobs) == (4, 0, 0)


def test_a_promotion_demotes_what_it_takes_the_slots_of():
    engine = make(num_host_chunks=8)
    for tokens in (A, B, C):
        engine.fill(tokens)
    assert set(stored(engine)) == set(engine.keys(A))
    assert engine.match("a", A).state is MatchState.ARRIVING
    plan = engine.turn()
    (promotion,) = plan.of(JobKind.PROMOTE)
    assert {slot for _, slot in demoted(plan)} == {slot for _, slot in promotion.chunks}
    assert {key for key, _ in demoted(plan)} == set(engine.keys(B))
    engine.check_storage([A, B, C])
    assert engine.serve("a", A) > 0


def test_what_is_stored_is_not_written_again():
    engine = make(num_host_chunks=8)
    for tokens in (A, B, C, A, B, C, A):
        engine.match("reader", tokens)
        engine.rest()
        engine.scheduler.finish("reader")
        engine.fill(tokens)
    stats = engine.scheduler.stats()
    assert stats.cascaded_chunks == len(stored(engine)) == 12
    engine.check_storage([A, B, C])


def test_a_chunk_is_not_written_by_two_jobs_at_once():
    """It is saved and evicted again while its demotion is in flight."""
    engine = make()
    worker = engine.workers[0]
    engine.fill(A)
    engine.add("b", B)
    engine.step({"b": 16})
    slow = worker.in_flight.pop(0)
    assert slow[0].kind is JobKind.DEMOTE
    for name, tokens in (("a", A), ("c", C)):
        engine.apply(worker, worker.finish())
        engine.add(name, tokens)
        plan, _ = engine.step({name: 16})
        assert not {key for key, _ in demoted(plan)} & set(engine.keys(A))
        engine.scheduler.check_invariants()
    worker.in_flight.append(slow)
    engine.apply(worker, worker.finish())
    assert set(engine.keys(A)) <= set(stored(engine))
    engine.check_storage([A, B, C])


def test_those_nearest_to_their_heads_are_kept_if_there_are_too_many(monkeypatch):
    monkeypatch.setattr("tpu_offload.core.storage.writes.MAX_DEMOTIONS", 3)
    engine = make()
    engine.fill(A)
    engine.fill(B)
    assert set(stored(engine)) == set(engine.keys(A)[:3])
    assert engine.scheduler.stats().dropped_demotion_chunks == 1
    assert engine.match("a", A).state is MatchState.ARRIVING


def test_demotions_in_flight_are_bounded():
    engine = make(num_host_chunks=16, max_storage_gb_in_flight=8 * 512 / 2**30)
    engine.fill(prompt(1, num_blocks=16))
    engine.add("b", B)
    engine.step({"b": 16})
    engine.apply(engine.workers[0], [])
    engine.add("c", C)
    plan, _ = engine.step({"c": 16})
    assert demoted(plan) == []
    (job,) = engine.workers[0].of_kind(JobKind.DEMOTE)
    assert len(job.chunks) == 4, "half of what may be in flight"
    assert engine.scheduler.stats().dropped_demotion_chunks > 0
    engine.scheduler.check_invariants()


@pytest.mark.parametrize("num_chunks", [2, 7, 16])
def test_storage_never_holds_more_than_it_may_and_keeps_taking_chunks(num_chunks):
    engine = make(num_storage_chunks=num_chunks, num_host_chunks=8)
    prompts = [prompt(i) for i in range(12)]
    for tokens in prompts:
        engine.fill(tokens)
    assert engine.workers[0].most_stored[0] <= num_chunks
    newest = {key for tokens in prompts[-6:] for key in engine.keys(tokens)}
    assert newest & set(stored(engine)), "it does not stop when it is full"
    engine.check_storage(prompts)
    assert set(engine.workers[0].storage) - set(stored(engine)) <= set(
        storage_planner(engine.scheduler).records.to_delete
    )


def test_a_key_to_be_deleted_is_not_deleted_after_it_was_demoted_again():
    """The demotions of a step are dispatched before its deletions."""
    engine = make()
    engine.fill(A)
    engine.fill(B)
    storage = storage_planner(engine.scheduler)
    assert set(stored(engine)) == set(engine.keys(A))
    for key in engine.keys(A):
        storage.records.forget(key)
    engine.add("a", A)
    engine.add("c", C)
    engine.step({"a": 16})
    engine.apply(engine.workers[0], engine.workers[0].finish(fail=False))
    engine.step({"c": 16})
    engine.apply(engine.workers[0], engine.workers[0].finish())
    engine.rest()
    assert set(stored(engine)) <= set(engine.workers[0].storage)
    engine.check_storage([A, B, C])


@pytest.mark.parametrize("failed", [(), (1,)])
def test_a_demotion_that_fails_is_not_stored_and_its_keys_are_deleted(failed):
    engine = make()
    engine.fill(A)
    engine.add("b", B)
    engine.step({"b": 16})
    worker = engine.workers[0]
    engine.apply(worker, worker.finish(1, fail=True, failed_blocks=failed) + worker.finish())
    bad = set(engine.keys(A)) if not failed else {engine.keys(A)[1]}
    assert set(stored(engine)) == set(engine.keys(A)) - bad
    assert engine.scheduler.stats().failed_storage_chunks == len(bad)
    engine.rest()
    engine.remove("b")
    engine.fill(C)
    engine.check_storage([A, B, C])


def test_every_worker_has_to_have_written_it():
    engine = make(num_workers=2)
    engine.fill(A)
    engine.add("b", B)
    engine.step({"b": 16})
    engine.apply(engine.workers[0], engine.workers[0].finish())
    assert stored(engine) == []
    engine.apply(engine.workers[1], engine.workers[1].finish(1, fail=True, failed_blocks=(0,)))
    assert set(stored(engine)) == set(engine.keys(A)[1:])


def test_a_reset_drops_what_was_to_be_demoted():
    engine = make(num_host_chunks=8)
    for tokens in (A, B, C):
        engine.fill(tokens)
    num_evicted = engine.scheduler.stats().num_evicted_chunks
    engine.match("a", A)  # evicts for a promotion
    assert engine.scheduler.stats().num_evicted_chunks == num_evicted + 4
    engine.scheduler.reset()
    engine.scheduler.check_invariants()
    assert demoted(engine.turn()) == []
    engine.rest()
    assert stored(engine) == []


def _before_a_plan_that_demotes():
    """An engine whose next plan demotes chunks, and their slots by key."""
    engine = make(num_host_chunks=8)
    for tokens in (A, B, C):
        engine.fill(tokens)
    before = dict(slot_of_chunk(engine.scheduler).items())
    engine.match("a", A)
    victims = {key: slot for key, slot in before.items() if key not in slot_of_chunk(engine.scheduler)}
    return engine, victims


def test_slots_that_are_lost_before_the_plan_are_not_read():
    engine, victims = _before_a_plan_that_demotes()
    lost = min(victims.values())
    engine.workers[0].lose(lost, lost + 1, blocks_per_chunk=1)
    engine.apply(engine.workers[0], [])
    plan = engine.turn()
    assert {slot for _, slot in demoted(plan)} == set(victims.values()) - {lost}
    engine.check_storage([A, B, C])


def test_slots_whose_memory_is_given_away_before_the_plan_are_not_read():
    """As with states: the workers change the division before they dispatch the demotions of a plan."""
    engine, victims = _before_a_plan_that_demotes()
    num_left = sorted(victims.values())[1]
    chunk_index(engine.scheduler).shrink(Pool.CHUNKS, num_left)
    plan = engine.turn()
    assert [slot for _, slot in demoted(plan)] == [slot for slot in victims.values() if slot < num_left]
    assert engine.scheduler.stats().dropped_demotion_chunks == 3
    engine.check_storage([A, B, C])


@interpreted_only
def test_a_plan_that_raises_keeps_what_is_to_be_demoted_for_the_next():
    engine = make(num_host_chunks=8)
    for tokens in (A, B, C):
        engine.fill(tokens)
    engine.match("a", A)
    saves: Any = save_planner(engine.scheduler)
    plan, saves.plan = saves.plan, None
    with pytest.raises(TypeError):
        engine.scheduler.plan_step()
    saves.plan = plan
    assert {key for key, _ in demoted(engine.turn())} == set(engine.keys(B))
    engine.rest()
    engine.check_storage([A, B, C])


def test_suspended_copies_drop_the_evicted():
    engine = make(breaker_failures=1, breaker_retry_s=5.0)
    engine.fill(A)
    engine.add("b", B)
    engine.step({"b": 16})
    worker = engine.workers[0]
    engine.apply(worker, worker.finish(1, fail=True) + worker.finish())
    engine.remove("b")
    engine.fill(C)
    assert engine.scheduler.stats().dropped_demotion_chunks == 4
    engine.clock.now_s += 5.0
    engine.fill(prompt(4))
    assert len(stored(engine)) == 1, "a probe is small"
    assert engine.scheduler.stats().num_open_breakers == 0


def test_a_late_demotion_holds_no_slot():
    engine = make(job_timeout_s=10.0)
    engine.fill(A)
    engine.add("b", B)
    engine.step({"b": 16})
    worker = engine.workers[0]
    late = worker.in_flight.pop(0)
    assert late[0].kind is JobKind.DEMOTE
    engine.apply(worker, worker.finish())
    engine.clock.now_s += 10.0
    engine.step()
    engine.scheduler.check_invariants()
    stats = engine.scheduler.stats()
    assert (stats.failed_storage_chunks, stats.num_quarantined_chunks) == (4, 0)
    assert stored(engine) == []


# --- what the tier's eviction policy knows --------------------------------------------------------


def known(engine):
    """What the policy has, beside what is stored."""
    return expected_chunks(storage_planner(engine.scheduler))


def policies_make(**settings):
    return make(storage_eviction_policy="density", **settings)


def test_the_policy_has_what_the_host_tier_has():
    engine = policies_make(num_host_chunks=8)
    for tokens in (A, B, C, prompt(4), A):
        engine.match("reader", tokens)
        engine.rest()
        engine.scheduler.finish("reader")
        engine.fill(tokens)
        in_host = set(slot_of_chunk(engine.scheduler))
        assert known(engine) == in_host - set(stored(engine))
    assert stored(engine)


def test_it_knows_priorities_and_uses_in_the_host_tier():
    engine = policies_make(num_host_chunks=8, num_storage_chunks=16)
    for name, tokens in (("a", A), ("b", B), ("c", C)):
        engine.add(name, tokens, limits=RequestLimits(priority=1))
        engine.step({name: len(tokens)})
        engine.settle()
        engine.remove(name)
        engine.rest()
    for i in range(30):
        engine.fill(prompt(10 + i))
    important = {key for tokens in (A, B, C) for key in engine.keys(tokens)}
    assert important <= {*stored(engine), *slot_of_chunk(engine.scheduler)}
    assert len(important.intersection(stored(engine))) >= 4
    assert engine.scheduler.stats().num_evicted_storage_chunks > 50


@pytest.mark.parametrize("why", ["not admitted", "no room", "failed"])
def test_what_is_not_written_is_forgotten(why):
    settings: dict[str, dict[str, Any]] = {
        "not admitted": {"storage_admission": "after_hit"},
        "no room": {"max_storage_gb_in_flight": 2 * 512 / 2**30},
        "failed": {},
    }
    engine = policies_make(**settings[why])
    engine.fill(A)
    engine.add("b", B)
    engine.step({"b": 16})
    worker = engine.workers[0]
    engine.apply(worker, worker.finish(1, fail=why == "failed") + worker.finish())
    engine.settle()
    assert len(stored(engine)) == (1 if why == "no room" else 0)
    assert known(engine) == (set() if why == "not admitted" else set(engine.keys(B)))
    assert set(slot_of_chunk(engine.scheduler)) == set(engine.keys(B))
    engine.check_storage([A, B])


def test_what_is_admitted_later_is_known_then():
    engine = policies_make(num_host_chunks=8, storage_admission="second_sighting")
    engine.fill(A)
    assert known(engine) == set()
    engine.serve("again", A)
    assert known(engine) == set(engine.keys(A))


def test_a_far_tier_knows_what_comes_from_a_near_one():
    """It had not admitted it before, so it gets it when the host tier evicts it again, though nobody has loaded it."""
    engine = StorageEngine(
        num_host_chunks=16,  # of which a quarter is for the reads of one tier
        sizes=(64, 64),
        storage_write_on=["eviction", "eviction"],
        storage_admission=["all", "second_sighting"],
        storage_eviction_policy=["density", "density"],
    )
    for tokens in (A, B, C, prompt(4), prompt(5)):
        engine.fill(tokens)
    near, far = storage_planners(engine.scheduler)
    assert set(near.stored_keys()) == set(engine.keys(A))
    assert far.stored_keys() == []
    engine.match("reader", A)
    engine.rest()
    engine.scheduler.finish("reader")
    assert set(slot_of_chunk(engine.scheduler)) >= set(engine.keys(A))
    assert expected_chunks(far) == set(engine.keys(A))
    assert not expected_chunks(near).intersection(engine.keys(A)), "it has them"


def test_what_the_host_tier_has_lost_is_forgotten_in_time():
    engine = policies_make(num_host_chunks=32)
    prompts = [prompt(i) for i in range(1, 16)]
    for tokens in prompts:
        engine.fill(tokens)
    lost = known(engine)
    assert len(lost) >= 28
    engine.workers[0].lose(0, 32, blocks_per_chunk=1)
    engine.apply(engine.workers[0], [])
    for _ in range(20):
        engine.turn()
    assert known(engine) == set()
    engine.check_storage(prompts)
    for tokens in prompts:
        engine.fill(tokens)
    engine.check_storage(prompts)


def test_a_reset_leaves_nothing_of_it():
    engine = policies_make(num_host_chunks=8)
    for tokens in (A, B, C):
        engine.fill(tokens)
    assert known(engine)
    engine.scheduler.reset()
    assert not known(engine)
    engine.rest()
    for tokens in (A, B, C):
        engine.fill(tokens)
    assert known(engine) == set(slot_of_chunk(engine.scheduler)) - set(stored(engine))
    engine.check_storage([A, B, C])


def test_the_setting_is_checked():
    with pytest.raises(ConfigError, match="storage_write_on"):
        make(storage_write_on="never")
