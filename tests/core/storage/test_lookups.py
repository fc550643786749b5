"""Lookups of a shared tier, the scheduler's half: who asks when, how long it waits, and every way to fail."""

import dataclasses
import pickle

import pytest

from tests.compiled import interpreted_only
from tests.core.fakes import BLOCK_SIZE
from tests.inside.scheduler import lookup_planner, storage_planner, storage_stack_planner, write_candidates
from tests.storage.fakes import SharedEngine, StorageEngine, prompt
from tests.storage.lives import live_shared
from tpu_offload import JobResult, JobState, MatchState, RequestLimits
from tpu_offload.config import LoadMode
from tpu_offload.core.load_costs import LoadCosts
from tpu_offload.core.storage import lookups as storage_lookups
from tpu_offload.core.storage.stack import StorageStackPlanner
from tpu_offload.types import JobKind

A, B, C = prompt(1), prompt(2), prompt(3)
HIT, MISS, ARRIVING = MatchState.HIT, MatchState.MISS, MatchState.ARRIVING
WAIT_S = 0.25  # the default


@pytest.fixture
def engine():
    return SharedEngine(num_host_chunks=8)


def lookups(engine):
    return lookup_planner(storage_planner(engine.scheduler))


def asked(plan):
    """The prefixes that a plan asks for."""
    return [list(prefix) for job in plan.of(JobKind.LOOKUP) for prefix in job.prefixes]


def stored(engine):
    return set(storage_stack_planner(engine.scheduler).stored_keys())


def turn(engine, **kinds):
    """One step, in which lookups are answered unless `lookups` says otherwise: "fail" or "late"."""
    how = kinds.get("lookups")
    plan, results = engine.step()
    for worker, early in zip(engine.workers, results, strict=True):
        held = [entry for entry in worker.in_flight if entry[0].kind is JobKind.LOOKUP]
        worker.in_flight = [entry for entry in worker.in_flight if entry[0].kind is not JobKind.LOOKUP]
        ended = early + worker.finish()
        worker.in_flight = held
        if how != "late":
            ended += worker.finish(fail=how == "fail")
        engine.apply(worker, ended)
        engine.scheduler.check_invariants()
    return plan


# --- what others have stored is found -------------------------------------------------------------


def test_what_another_engine_has_stored_is_found(engine):
    engine.others_store(A)
    found = engine.match("a", A)
    assert (found.num_tokens, found.state, found.until_s) == (0, ARRIVING, engine.clock.now_s + WAIT_S)
    assert engine.scheduler.has_jobs, "an idle engine makes the step that asks"
    plan = turn(engine)
    assert [job.kind for job in plan.jobs] == [JobKind.LOOKUP]
    assert asked(plan) == [engine.keys(A)]
    assert stored(engine) == set(engine.keys(A))
    assert engine.match("a", A).state is ARRIVING, "it is being read"
    assert not asked(turn(engine))
    assert engine.match("a", A).num_tokens == 15
    request = engine.add("a", A)
    assert request.num_computed == 15
    engine.settle()  # compares the bytes
    stats = engine.scheduler.stats()
    assert (stats.looked_up_storage_chunks, stats.found_storage_chunks, stats.promoted_chunks) == (4, 4, 4)
    assert (stats.num_failed_storage_lookups, stats.num_failed_jobs) == (0, 0)


def test_tails_are_evicted_first(engine):
    engine.others_store(A)
    engine.match("a", A)
    turn(engine)
    assert storage_planner(engine.scheduler).stored_keys() == engine.keys(A)[::-1]


def test_only_the_chunks_after_those_known_here_are_asked_for(engine):
    longer = [*A, *B]
    engine.fill(A)
    engine.others_store(longer)
    assert engine.match("a", longer).state is ARRIVING
    assert asked(turn(engine)) == [engine.keys(longer)[4:]]


def test_it_is_asked_while_what_is_known_is_read(engine):
    """One wait for both."""
    longer = [*A, *B]
    engine.fill(A)
    engine.fill(prompt(9, num_blocks=8))  # A is in storage alone
    engine.others_store(longer)
    engine.match("a", longer)
    plan = turn(engine)
    assert [job.kind for job in plan.jobs] == [JobKind.LOOKUP, JobKind.PROMOTE]
    assert asked(plan) == [engine.keys(longer)[4:]]


def test_a_chunk_counts_only_if_all_workers_have_it():
    engine = SharedEngine(num_workers=2)
    engine.others_store(A)
    engine.others_store(B, 0, 1, 2)
    engine.others_store(B, 3, workers=[0])
    engine.others_store(C, workers=[1])
    for name, tokens in (("a", A), ("b", B), ("c", C)):
        engine.match(name, tokens)
    assert len(asked(turn(engine))) == 3, "one batch a step"
    assert stored(engine) == {*engine.keys(A), *engine.keys(B)[:3]}


@pytest.mark.parametrize("number", range(4))
def test_what_follows_a_hole_is_not_found(engine, number):
    engine.others_store(A)
    engine.others_drop(A, number)
    engine.match("a", A)
    turn(engine)
    assert stored(engine) == set(engine.keys(A)[:number])
    engine.match("a", A)
    turn(engine)
    assert engine.match("a", A).num_tokens == number * BLOCK_SIZE


def test_what_others_have_stored_is_not_written_again(engine):
    engine.add("b", B)
    engine.step({"b": 16})
    engine.apply(engine.workers[0], engine.workers[0].finish())
    assert len(write_candidates(storage_planner(engine.scheduler))) == 4, "saved, and to be written"
    storage_planner(engine.scheduler).add_found(engine.keys(B)[:3])
    (job,) = engine.turn().of(JobKind.CASCADE)
    assert [key for key, _ in job.chunks] == engine.keys(B)[3:]
    engine.rest()
    assert stored(engine) == set(engine.keys(B))


def test_nothing_of_others_is_ever_deleted():
    engine = SharedEngine(num_storage_chunks=6)
    for tokens in (A, B, C):
        engine.others_store(tokens)
        engine.match("x", tokens)
        engine.scheduler.finish("x")
        plan = turn(engine)
        assert not any(job.deleted_keys for job in plan.jobs)
    assert stored(engine) == {*engine.keys(B)[:2], *engine.keys(C)}, "the most recently used"
    assert engine.scheduler.stats().num_evicted_storage_chunks == 6
    assert len(engine.workers[0].storage) == 12


def test_a_prefix_longer_than_the_capacity_is_found_piece_by_piece():
    engine = SharedEngine(num_host_chunks=64, num_storage_chunks=4, storage_lookup_wait_s=5.0, storage_wait_s=5.0)
    long = prompt(1, num_blocks=10)
    engine.others_store(long)
    sizes: list[int] = []
    for _ in range(12):
        engine.match("a", long)
        sizes += map(len, asked(turn(engine)))
    assert sizes == [4, 4, 2]
    assert engine.match("a", long).num_tokens == 39


# --- who asks, and how often ----------------------------------------------------------------------


def test_a_private_tier_is_never_asked():
    engine = StorageEngine()
    assert engine.match("a", A).state is MISS
    assert not engine.scheduler.has_jobs


def test_it_can_be_turned_off():
    engine = SharedEngine(storage_lookup_wait_s=0)
    engine.others_store(A)
    assert engine.match("a", A).state is MISS
    assert not engine.scheduler.has_jobs


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_less_than_a_chunk_is_not_worth_asking(engine, num_tokens):
    assert engine.match("a", A[:num_tokens]).state is MISS
    engine.fill(A)
    assert engine.match("b", [*A, *B[:num_tokens]]).state is HIT
    assert not asked(turn(engine))


def test_what_is_in_hbm_only_is_asked_for_too(engine):
    """What follows it cannot be read into the host tier without it; what is in both is not asked for."""
    engine.others_store(A)
    found = engine.scheduler.match("a", engine.hashes(A), num_tokens=16, num_computed_tokens=8)
    assert found.state is ARRIVING
    assert asked(turn(engine)) == [engine.keys(A)]
    engine.fill(B[:8])
    engine.scheduler.match("b", engine.hashes(B), num_tokens=16, num_computed_tokens=8)
    assert asked(turn(engine)) == [engine.keys(B)[2:]]


@pytest.mark.parametrize(
    ("limits", "num_chunks"),
    [
        (RequestLimits(cache=False), 0),
        (RequestLimits(max_load_tokens=0), 0),
        (RequestLimits(max_load_tokens=8), 2),
        (RequestLimits(max_load_tokens=9), 3),
        (RequestLimits(max_load_tokens=99), 4),
    ],
)
def test_limits(engine, limits, num_chunks):
    engine.scheduler.match("a", engine.hashes(A), num_tokens=16, num_computed_tokens=0, limits=limits)
    assert asked(turn(engine)) == [engine.keys(A)[:num_chunks]] * bool(num_chunks)


def test_a_request_asks_once(engine):
    """Its answer is negative, and holds for it for ever; another one asks after a second."""
    assert engine.match("a", A).state is ARRIVING
    assert asked(turn(engine))
    for _ in range(3):
        engine.clock.now_s += 0.01
        assert engine.match("a", A).state is MISS
        assert not asked(turn(engine))
    assert engine.match("b", A).state is MISS, "it is known to be missing"
    engine.clock.now_s += 1.0
    assert engine.match("a", A).state is MISS
    assert engine.match("c", A).state is ARRIVING
    assert asked(turn(engine)) == [engine.keys(A)]


def test_what_was_known_and_is_gone_is_asked_for_alone(engine):
    """What follows was asked for when it was still there."""
    longer = [*A, *B]
    engine.fill(A)
    engine.clock.now_s += 2.0  # it was asked for, too
    assert engine.match("a", longer).state is ARRIVING
    assert asked(turn(engine, lookups="fail")) == [engine.keys(longer)[4:]]
    engine.fill(prompt(9, num_blocks=8))  # in its place in the host tier
    for key in engine.keys(A):
        storage_planner(engine.scheduler).records.remove(key)
    engine.others_store(longer)
    assert engine.match("a", longer).state is ARRIVING
    assert asked(turn(engine)) == [engine.keys(A)]
    for _ in range(3):
        engine.match("a", longer)
        assert not asked(turn(engine))


def test_a_failed_read_is_not_asked_for_again(engine):
    engine.others_store(A)
    engine.match("a", A)
    turn(engine)
    engine.others_drop(A, 1)
    engine.match("a", A)
    turn(engine)
    assert engine.keys(A)[1] not in stored(engine), "forgotten at its first failed read"
    found = engine.match("a", A)
    assert (found.num_tokens, found.state) == (4, HIT)
    for _ in range(3):
        engine.clock.now_s += 2.0
        engine.match("a", A)
        assert not asked(turn(engine))
    engine.others_store(A)
    assert engine.match("b", A).state is ARRIVING
    assert asked(turn(engine)) == [engine.keys(A)[1:]], "a later request asks"


def test_what_a_suspended_server_is_known_to_have_is_not_asked_for():
    engine = SharedEngine(num_host_chunks=8, breaker_failures=2, breaker_retry_s=100.0)
    engine.fill(A)
    engine.fill(prompt(9, num_blocks=8))  # A is in storage alone
    engine.clock.now_s += 60.0  # it was missing when it was computed
    for job_id in range(2):
        storage_planner(engine.scheduler).reads.breaker.failed(job_id, "injected")
    assert engine.match("a", A).state is MISS
    assert not asked(turn(engine))


def test_a_read_that_fails_is_no_reason_to_ask_the_same_server(engine):
    engine.fill(A)
    engine.fill(prompt(9, num_blocks=8))
    engine.clock.now_s += 60.0
    engine.match("a", A)
    plan = engine.turn(fail=True)
    assert plan.of(JobKind.PROMOTE)
    assert engine.match("a", A).state is MISS
    assert not asked(turn(engine))


@interpreted_only
def test_a_prompt_that_is_known_is_looked_through_once(monkeypatch):
    looked_at, is_readable = [], StorageStackPlanner.is_readable

    def noted(self, key):
        looked_at.append(key)
        return is_readable(self, key)

    monkeypatch.setattr(StorageStackPlanner, "is_readable", noted)
    engine = SharedEngine(num_host_chunks=8)
    engine.fill(A)
    engine.fill(prompt(9, num_blocks=8))
    looked_at.clear()
    for _ in range(5):
        engine.match("a", A)
    assert looked_at == engine.keys(A)


def test_requests_with_one_prefix_ask_once(engine):
    engine.others_store(A)
    for name in ("a", "b", "c"):
        assert engine.match(name, A).state is ARRIVING
    assert asked(turn(engine, lookups="late")) == [engine.keys(A)]
    assert engine.match("d", A).state is ARRIVING, "while it is in flight"
    assert not asked(turn(engine))
    assert stored(engine) == set(engine.keys(A))
    for name in ("a", "b", "c", "d"):
        assert not asked(turn(engine))
        assert engine.match(name, A).num_tokens in (0, 15)


def test_the_longest_of_several_prompts_is_asked_for(engine):
    longer = [*A, *B]
    for name, tokens in (("a", A), ("b", longer), ("c", A[:8])):
        assert engine.match(name, tokens).state is ARRIVING
    assert asked(turn(engine)) == [engine.keys(longer)]
    engine.clock.now_s += 1.0
    for name, tokens in (("a", A), ("b", longer), ("c", A[:8])):
        assert engine.match(name, tokens).state is MISS, "it has asked"


def test_prompts_that_part_after_a_common_prefix(engine):
    """The first one asks for both; the other one then asks for its own part."""
    one, other = [*A[:8], *B], [*A[:8], *C]
    engine.others_store(one)
    engine.others_store(other)
    engine.match("one", one)
    engine.match("other", other)
    assert asked(turn(engine)) == [engine.keys(one)]
    assert engine.match("other", other).state is ARRIVING
    assert asked(turn(engine)) == [engine.keys(other)[2:]]
    assert stored(engine) == {*engine.keys(one), *engine.keys(other)}


def test_keys_in_flight_are_bounded(engine, monkeypatch):
    monkeypatch.setattr(storage_lookups, "_MAX_KEYS", 10)
    assert engine.match("a", A).state is ARRIVING
    assert engine.match("b", B).state is ARRIVING
    assert engine.match("c", C).state is MISS, "no room: it is computed"
    assert engine.match("d", C[:8]).state is ARRIVING
    assert sum(map(len, asked(turn(engine)))) == 10
    engine.clock.now_s += 1.0
    assert engine.match("c", C).state is ARRIVING


def test_jobs_in_flight_are_bounded(engine, monkeypatch):
    monkeypatch.setattr(storage_lookups, "_MAX_JOBS", 1)
    engine.match("a", A)
    assert asked(turn(engine, lookups="late"))
    engine.match("b", B)
    assert not lookups(engine).has_plans, "an idle engine does not spin"
    assert not asked(turn(engine))
    assert asked(turn(engine)) == [engine.keys(B)]


def test_negative_answers_are_bounded(engine, monkeypatch):
    monkeypatch.setattr(storage_lookups, "_MAX_MISSING", 2)

    def asks_for(number: int) -> bool:
        engine.match("a", prompt(number))
        engine.scheduler.finish("a")
        return bool(asked(turn(engine)))

    assert all(asks_for(number) for number in range(5))
    assert [asks_for(number) for number in (4, 3, 2)] == [False, False, True], "the latest two are known"


# --- how long it waits ----------------------------------------------------------------------------


def test_a_request_waits_no_longer_than_the_setting(engine):
    found = engine.match("a", A)
    turn(engine, lookups="late")
    engine.clock.now_s = found.until_s - 1e-6
    assert engine.match("a", A).state is ARRIVING
    engine.clock.now_s = found.until_s
    assert engine.match("a", A).state is MISS
    engine.others_store(A)
    turn(engine)
    assert engine.match("a", A).state is ARRIVING, "a late answer is of use all the same"


def test_while_a_look_up_is_late_nobody_waits(engine):
    engine.match("a", A)
    turn(engine, lookups="late")
    engine.clock.now_s += WAIT_S
    assert engine.match("b", A).state is MISS
    assert engine.match("c", C).state is MISS
    assert not asked(turn(engine))
    assert engine.match("c", C).state is ARRIVING, "it was answered"


def test_the_wait_ends_where_computing_would():
    engine = SharedEngine(load_mode="auto")
    for num_tokens in (16, 32, 64):
        engine.scheduler.swap.observe_prefill(num_tokens, num_tokens * 1e-3, 0.0)
    found = engine.match("a", A)
    assert found.until_s == pytest.approx(engine.clock.now_s + 16e-3)


@pytest.mark.parametrize(
    ("mode", "load_s", "recompute_s", "wait_s"),
    [
        (LoadMode.LOAD, 9.0, 0.1, 0.5),
        (LoadMode.RECOMPUTE, None, None, 0.0),
        (LoadMode.AUTO, None, None, 0.5),
        (LoadMode.AUTO, 0.1, None, 0.5),
        (LoadMode.AUTO, None, 0.2, 0.2),
        (LoadMode.AUTO, 0.1, 0.2, 0.2),
        (LoadMode.AUTO, 0.1, 2.0, 0.5),
        (LoadMode.AUTO, 0.3, 0.2, 0.0),
    ],
)
def test_how_long_a_look_up_is_worth_waiting_for(mode, load_s, recompute_s, wait_s):
    costs = LoadCosts(mode, clock=lambda: 100.0)
    costs.observe_promotion(0, 1, 1.0)
    assert costs.lookup_wait_s(0, load_s, recompute_s, default_s=0.5) == wait_s


def test_an_old_measurement_of_storage_counts_as_none():
    now_s = [100.0]
    costs = LoadCosts(LoadMode.AUTO, clock=lambda: now_s[0])
    costs.observe_promotion(0, 1, 1.0)
    now_s[0] += 31.0
    assert costs.lookup_wait_s(0, 9.0, 0.2, default_s=0.5) == 0.2
    assert costs.prefers_promotion(0, 9.0, 0.2), "asking has not used up the one read that measures storage again"


def test_a_dead_server_costs_a_few_short_waits():
    """Each one opens the breaker a bit more; then one lookup is tried at a time."""
    engine = SharedEngine(breaker_failures=3, breaker_retry_s=10.0, job_timeout_s=60.0)
    num_waits = []
    for i in range(200):  # a second each
        tokens = prompt(100 + i)
        num_waits.append(engine.match(f"r{i}", tokens).state is ARRIVING)
        engine.scheduler.finish(f"r{i}")
        turn(engine, lookups="fail")
        engine.clock.now_s += 1.0
    assert num_waits[:3] == [True] * 3
    assert sum(num_waits[3:]) == 4, "after 10, 20, 40 and 80 seconds"
    stats = engine.scheduler.stats()
    assert stats.num_failed_storage_lookups == sum(num_waits)
    assert stats.num_breaker_openings == stats.num_open_breakers == 1
    engine.clock.now_s += 1000.0
    engine.others_store(A)
    engine.match("a", A)
    assert engine.match("b", B).state is MISS, "one is tried"
    assert asked(turn(engine)) == [engine.keys(A)]
    assert stored(engine) == set(engine.keys(A))
    assert engine.match("b", B).state is ARRIVING, "lookups work again"
    assert engine.scheduler.stats().num_open_breakers == 0


def test_a_frozen_server_costs_a_few_short_waits():
    """Its lookups never end: each one has a deadline of its own, and until then nobody waits."""
    engine = SharedEngine(breaker_failures=3, breaker_retry_s=1000.0, job_timeout_s=60.0)
    waited_s = 0.0
    for i in range(2000):  # 0.01 s each
        tokens = prompt(100 + i)
        waits = engine.match(f"r{i}", tokens).state is ARRIVING
        engine.scheduler.finish(f"r{i}")
        turn(engine, lookups="late")
        engine.clock.now_s += 0.01
        waited_s += 0.01 * waits
    stats = engine.scheduler.stats()
    assert stats.num_failed_storage_lookups >= 3
    assert stats.num_open_breakers == 1
    assert waited_s <= 3 * (WAIT_S + 0.02), "of 20 seconds"
    engine.settle()


def test_a_look_up_that_the_breaker_has_overtaken_is_not_sent(engine):
    engine.match("a", A)
    for job_id in range(-5, 0):
        lookups(engine).breaker.failed(job_id, "injected")
    assert not asked(turn(engine))
    assert engine.match("a", A).state is MISS
    assert not engine.scheduler.has_jobs


# --- answers that come too late, or are wrong -----------------------------------------------------


def test_a_reset_before_the_answer(engine):
    engine.others_store(A)
    engine.match("a", A)
    turn(engine, lookups="late")
    old = engine.keys(A)
    engine.scheduler.reset()
    engine.scheduler.check_invariants()
    turn(engine)
    engine.rest()
    assert not stored(engine), "the answer is of before the reset"
    assert engine.scheduler.stats().found_storage_chunks == 0
    assert set(old).isdisjoint(engine.keys(A))
    assert engine.match("a", A).state is MISS, "nobody else has keys of this namespace"
    storage_planner(engine.scheduler).adopt(0, (), is_shared=True)
    assert engine.match("b", A).state is MISS, "not even once a worker has restarted"


def test_a_reset_before_the_question(engine):
    engine.match("a", A)
    engine.scheduler.reset()
    assert not any(asked(plan) for plan in engine.rest())


def test_a_worker_that_restarts_before_the_answer(engine):
    """What it has stored is there still, and what it was asked is asked by the next request."""
    engine.fill(B)
    known = stored(engine)
    engine.others_store(A)
    engine.match("a", A)
    turn(engine, lookups="late")
    storage_planner(engine.scheduler).adopt(0, (), is_shared=True)
    turn(engine)
    assert stored(engine) == known
    assert engine.match("b", A).state is ARRIVING
    turn(engine)
    assert stored(engine) == known | set(engine.keys(A))


def test_a_request_that_is_gone_before_the_answer(engine):
    engine.others_store(A)
    engine.match("a", A)
    turn(engine, lookups="late")
    engine.scheduler.finish("a")
    turn(engine)
    assert stored(engine) == set(engine.keys(A)), "it is of use to others"


def test_an_answer_after_the_deadline_is_ignored(engine):
    engine.others_store(A)
    engine.match("a", A)
    turn(engine, lookups="late")
    engine.clock.now_s += 5.0
    turn(engine)
    assert not stored(engine)
    stats = engine.scheduler.stats()
    assert (stats.num_timed_out_jobs, stats.num_failed_storage_lookups) == (0, 1)
    assert stats.num_ignored_results == 1


def test_what_is_being_written_is_not_stored_yet(engine):
    engine.add("b", B)
    engine.step({"b": 16})
    engine.apply(engine.workers[0], engine.workers[0].finish())
    engine.step()
    assert engine.workers[0].of_kind(JobKind.CASCADE)
    storage_planner(engine.scheduler).add_found(engine.keys(B))
    engine.scheduler.check_invariants()
    assert not stored(engine)


@pytest.mark.parametrize("num_found", [(), (5,), (1, 1), (-1,), ("4",), (True,), 4, [4]])
def test_an_invalid_answer(engine, num_found):
    engine.match("a", A)
    engine.step()
    worker = engine.workers[0]
    ((job, _),) = worker.in_flight
    worker.in_flight.clear()
    result = JobResult(job_id=job.job_id, state=JobState.FINISHED, num_found=num_found)
    engine.apply(worker, [result])
    assert not stored(engine)
    stats = engine.scheduler.stats()
    assert stats.num_failed_storage_lookups + stats.num_rejected_reports == 1


def test_one_worker_fails():
    engine = SharedEngine(num_workers=2)
    engine.others_store(A)
    engine.match("a", A)
    engine.step()
    for worker, fail in zip(engine.workers, (False, True), strict=True):
        engine.apply(worker, worker.finish(fail=fail))
    assert not stored(engine)
    assert engine.scheduler.stats().num_failed_storage_lookups == 1
    assert engine.match("a", A).state is MISS, "it has asked"


def test_a_plan_and_its_answer_are_pickled(engine):
    engine.match("a", A)
    engine.match("b", B)
    plan, _ = engine.step()
    assert pickle.loads(pickle.dumps(plan)) == plan
    (job,) = plan.jobs
    assert job.prefixes == (tuple(engine.keys(A)), tuple(engine.keys(B)))
    assert (job.chunks, job.deleted_keys, job.parts, job.num_items) == ((), (), (), 0)
    engine.others_store(A)
    (result,) = engine.workers[0].finish()
    assert result == JobResult(job_id=job.job_id, state=JobState.FINISHED, num_found=(4, 0))
    assert pickle.loads(pickle.dumps(result)) == result
    assert dataclasses.replace(job, job_id=7).prefixes == job.prefixes


@interpreted_only
def test_a_policy_that_fails_the_plan_takes_back_the_look_up(engine, monkeypatch):
    engine.match("a", A)
    plan = storage_stack_planner(engine.scheduler).plan

    def fail(now_s):
        plan(now_s)
        raise RuntimeError("injected")

    monkeypatch.setattr(storage_stack_planner(engine.scheduler), "plan", fail)
    with pytest.raises(RuntimeError, match="injected"):
        engine.step()
    monkeypatch.undo()
    engine.scheduler.check_invariants()
    assert engine.match("a", A).state is MISS
    assert engine.match("b", A).state is ARRIVING


@pytest.mark.parametrize("seed", [*range(12), 23, 33, 42, 51, 55])
def test_random_lives(seed):
    live_shared(seed)


def test_what_the_server_has_evicted_meanwhile_opens_no_breaker():
    engine = SharedEngine(num_host_chunks=64, breaker_failures=1)
    engine.others_store(A)
    engine.match("a", A)
    turn(engine)
    assert stored(engine) == set(engine.keys(A))
    engine.others_drop(A, 1, 2)
    engine.match("a", A)
    turn(engine)
    stats = engine.scheduler.stats()
    assert (stats.missing_storage_chunks, stats.promoted_chunks) == (2, 2)
    assert (stats.failed_storage_chunks, stats.num_failed_jobs, stats.num_open_breakers) == (0, 0, 0)
    assert stored(engine) == {engine.keys(A)[0], engine.keys(A)[3]}, "what is gone is forgotten, and nothing else"
    assert engine.match("a", A).num_tokens == BLOCK_SIZE


def test_reads_that_fail_suspend_reads_though_others_are_missing():
    engine = SharedEngine(num_workers=2, num_host_chunks=8, sizes=(64,), breaker_failures=3, breaker_retry_s=1000.0)
    for number in range(20, 23):
        storage_planner(engine.scheduler).add_found(engine.keys(prompt(number)))
        engine.match(f"request {number}", prompt(number))
        engine.step()
        first, second = engine.workers
        engine.apply(first, first.finish())
        engine.apply(second, second.finish(fail=True))
    assert engine.scheduler.stats().num_breaker_openings == 1


def test_a_request_that_is_not_at_a_block_boundary_waits_for_nothing(engine):
    engine.others_store(A)
    storage_planner(engine.scheduler).add_found(engine.keys(A))
    assert engine.match("a", A).state is ARRIVING, "it is being read"
    found = engine.scheduler.match("a", engine.hashes(A), num_tokens=16, num_computed_tokens=2)
    assert found.state is MISS
