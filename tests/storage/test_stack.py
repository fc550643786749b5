"""Two storage tiers below the host tier, as the scheduler plans them: which one reads, what each one takes, faults."""

import dataclasses
import pickle

import pytest
from prometheus_client import CollectorRegistry

from tests.core.fakes import LAYOUT
from tests.inside.scheduler import chunk_index, storage_planners, storage_stack_planner, tier_context
from tests.storage.fakes import StorageEngine, prompt
from tests.storage.memory_tier import NAME
from tests.test_config import make_layout
from tpu_offload import (
    JobResult,
    JobState,
    KVLayout,
    MatchState,
    OffloadConfig,
    OffloadScheduler,
    StatsCollector,
    TierStats,
    WorkerSetup,
)
from tpu_offload.core.load_costs import LoadCosts
from tpu_offload.core.workers import expected_setups
from tpu_offload.metrics import TIER_METRICS
from tpu_offload.types import JobKind

A, B, C = (prompt(i) for i in range(1, 4))
NEAR, FAR = f"0:{NAME}", f"1:{NAME}"


def make(**settings):
    return StorageEngine(**({"sizes": (16, 16)} | settings))


def tiers(engine):
    return storage_planners(engine.scheduler)


def stored(engine, tier_id):
    return set(tiers(engine)[tier_id].stored_keys())


def put(engine, tier_id, tokens, chunks=slice(None)):
    """A tier has these chunks of a prompt, as an earlier run left them."""
    keys, names = engine.keys(tokens)[chunks], engine.hashes(tokens)[chunks]
    for worker in engine.workers:
        worker.storages[tier_id].update(zip(keys, names, strict=True))
    for key in reversed(keys):
        tiers(engine)[tier_id].records.add(key)


def reads(plan):
    """By tier, how many chunks the promotions of a plan read."""
    return [(job.tier_id, len(job.chunks)) for job in plan.of(JobKind.PROMOTE)]


def wants(engine, tokens):
    """Looks a prompt up, and returns what the next plan reads."""
    engine.match(f"r{tokens[0]}", tokens)
    return reads(engine.turn())


def compute(engine, tokens, *, num_turns=4):
    """Serves a prompt whose request leaves although something may hang."""
    name = f"c{tokens[0]}"
    engine.add(name, tokens)
    plan, _ = engine.step({name: len(tokens)})
    assert not plan.of(JobKind.LOAD)
    for _ in range(num_turns):
        engine.apply(engine.workers[0], engine.workers[0].finish())
        engine.step()
    engine.remove(name)
    engine.turn()


def all_of(engine, tokens):
    """What is read of a prompt, match by match, until nothing comes any more."""
    found = []
    while read := wants(engine, tokens):
        found += read
        engine.clock.now_s += 0.01
    return found


# --- writes -------------------------------------------------------------------------------------


def test_each_tier_is_written_by_its_own_rule():
    engine = make(storage_write_on=("save", "eviction"), num_host_chunks=8)
    engine.fill(A)
    assert (stored(engine, 0), stored(engine, 1)) == (set(engine.keys(A)), set())
    engine.fill(B)
    engine.fill(C)  # pushes A out of the host tier
    assert stored(engine, 0) == {*engine.keys(A), *engine.keys(B), *engine.keys(C)}
    assert stored(engine, 1) == set(engine.keys(A))
    engine.check_storage([A, B, C])


def test_two_tiers_may_both_take_what_the_host_evicts():
    engine = make(storage_write_on="eviction")
    engine.fill(A)
    engine.fill(B)
    assert stored(engine, 0) == stored(engine, 1) == set(engine.keys(A))
    engine.check_storage([A, B])


def test_each_tier_admits_for_itself():
    engine = make(storage_admission=("second_sighting", "all"))
    engine.fill(A)
    assert (stored(engine, 0), stored(engine, 1)) == (set(), set(engine.keys(A)))
    engine.match("again", A)
    engine.rest()
    assert stored(engine, 0) == set(engine.keys(A))


def test_each_tier_evicts_for_itself():
    engine = make(sizes=(4, 64), num_host_chunks=8)
    for tokens in (A, B, C):
        engine.fill(tokens)
    assert stored(engine, 0) == set(engine.keys(C))
    assert len(stored(engine, 1)) == 12
    assert not any(job.tier_id for plan in engine.rest() for job in plan.jobs if job.deleted_keys)
    engine.check_storage([A, B, C])


# --- reads --------------------------------------------------------------------------------------


def test_the_nearest_tier_that_has_a_chunk_reads_it():
    engine = make(num_host_chunks=16)
    engine.turn()
    put(engine, 0, A)
    put(engine, 1, A)
    put(engine, 1, B)
    assert all_of(engine, A) == [(0, 4)]
    assert all_of(engine, B) == [(1, 4)]
    assert engine.match("hit", B).state is MatchState.HIT
    assert [tier.promoted_chunks for tier in engine.scheduler.tier_stats()] == [4, 4]
    assert engine.scheduler.stats().promoted_chunks == 8


def test_runs_of_a_prefix_may_come_from_different_tiers():
    engine = make(num_host_chunks=32)
    engine.turn()
    tokens = prompt(5, num_blocks=9)
    put(engine, 0, tokens, slice(0, 3))
    put(engine, 1, tokens, slice(2, 6))
    put(engine, 0, tokens, slice(6, 8))
    assert all_of(engine, tokens) == [(0, 3), (1, 3), (0, 2)]
    assert engine.match("end", tokens).num_tokens == 32


def test_what_came_from_a_far_tier_is_offered_to_the_nearer_one_once_it_is_there():
    engine = make(num_host_chunks=16)
    engine.turn()
    put(engine, 1, A)
    engine.match("a", A)
    plan = engine.turn()
    assert reads(plan) == [(1, 4)]
    assert not plan.of(JobKind.CASCADE), "not before it is READY"
    engine.rest()
    assert stored(engine, 0) == set(engine.keys(A))
    engine.check_storage([A])
    put(engine, 0, B)
    assert all_of(engine, B) == [(0, 4)]
    engine.rest()
    assert not stored(engine, 1) & set(engine.keys(B)), "the farther one is not filled from the nearer one"


def test_the_nearer_tier_does_not_take_what_it_does_not_admit():
    engine = make(num_host_chunks=16, storage_admission=("second_sighting", "all"))
    engine.turn()
    put(engine, 1, A)
    assert all_of(engine, A) == [(1, 4)]
    engine.rest()
    assert stored(engine, 0) == set()
    engine.match("another", A)
    engine.rest()
    assert stored(engine, 0) == set(engine.keys(A))


def test_promotions_of_all_tiers_take_at_most_half_of_the_host_tier():
    engine = make(num_host_chunks=8)
    engine.turn()
    put(engine, 0, A)
    put(engine, 1, B)
    engine.match("a", A)
    engine.match("b", B)
    assert reads(engine.scheduler.plan_step()) == [(0, 2), (1, 2)], "each its share, also if the other hangs"
    engine.scheduler.check_invariants()


# --- faults -------------------------------------------------------------------------------------


def suspended(engine, tier_id):
    """Reads from one tier fail until they are suspended."""
    for number in range(20, 23):
        put(engine, tier_id, prompt(number, num_blocks=1))
        engine.match(f"s{number}", prompt(number, num_blocks=1))
        engine.turn(fail=True)
        engine.rest()
    assert engine.scheduler.tier_stats()[tier_id].num_open_breakers == 1
    assert engine.scheduler.tier_stats()[1 - tier_id].num_open_breakers == 0


def test_while_a_tier_is_suspended_a_farther_one_reads():
    engine = make(num_host_chunks=16, breaker_failures=3, breaker_retry_s=100.0)
    engine.turn()
    suspended(engine, 0)
    put(engine, 0, A)
    put(engine, 1, A)
    assert all_of(engine, A) == [(1, 4)]


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_tier_delays_no_job_of_the_other(frozen):
    other = 1 - frozen
    engine = make(num_host_chunks=16, sizes=(64, 64), max_storage_gb_in_flight=8 * 512 / 2**30)
    engine.turn()
    engine.workers[0].frozen = {frozen}
    for number in range(8):
        compute(engine, prompt(number))
    assert stored(engine, frozen) == set()
    assert len(stored(engine, other)) == 32, "it goes on"
    assert sum(len(job.chunks) for job, _ in engine.workers[0].in_flight) == 4, "half of what may be in flight"
    assert all_of(engine, A) == [(other, 4)]
    assert engine.scheduler.stats().num_failed_jobs == 0


def test_a_read_that_hangs_ends_and_the_next_one_comes_from_the_other_tier():
    engine = make(num_host_chunks=16, job_timeout_s=8.0)
    engine.turn()
    put(engine, 0, A)
    put(engine, 1, A)
    engine.workers[0].frozen = {0}
    assert wants(engine, A) == [(0, 4)]
    engine.clock.now_s += 9.0
    engine.turn()
    stats = engine.scheduler.stats()
    assert (stats.failed_storage_chunks, stats.num_timed_out_jobs, stats.num_failed_jobs) == (4, 0, 0)
    assert not stored(engine, 0), "it is not asked for them again"
    assert wants(engine, A) == [(1, 4)]
    engine.workers[0].frozen = set()
    engine.turn()
    engine.scheduler.check_invariants()
    assert engine.match("a", A).state is MatchState.HIT


def test_a_tier_whose_read_hangs_is_asked_last():
    engine = make(num_host_chunks=64, sizes=(64, 64))
    engine.turn()
    for tokens in (A, B, C):
        put(engine, 0, tokens)
        put(engine, 1, tokens)
    put(engine, 0, prompt(4))
    engine.workers[0].frozen = {0}
    assert wants(engine, A) == [(0, 4)]
    engine.clock.now_s += 1.5
    assert wants(engine, B) == [(0, 4)], "it may just be slow"
    engine.clock.now_s += 1.0
    assert wants(engine, C) == [(1, 4)]
    assert wants(engine, prompt(4)) == [(0, 4)], "the far one does not have it"
    engine.workers[0].frozen = set()
    engine.turn()
    put(engine, 0, prompt(5))
    put(engine, 1, prompt(5))
    assert wants(engine, prompt(5)) == [(0, 4)]


def test_a_reset_clears_every_tier_and_one_that_hangs_holds_up_itself_only():
    engine = make()
    engine.fill(A)
    engine.workers[0].frozen = {1}
    engine.scheduler.reset()
    assert stored(engine, 0) == stored(engine, 1) == set()
    plan = engine.turn()
    assert [(job.tier_id, job.kind) for job in plan.jobs] == [(0, JobKind.CLEAR), (1, JobKind.CLEAR)]
    assert engine.workers[0].storages[0] == {}
    compute(engine, B)
    assert stored(engine, 0) == set(engine.keys(B))
    assert (stored(engine, 1), len(engine.workers[0].storages[1])) == (set(), 4), "nothing of before is found in it"
    engine.workers[0].frozen = set()
    engine.rest()
    assert engine.workers[0].storages[1].keys() == stored(engine, 1) == set(engine.keys(B))


def test_lost_host_memory_fails_the_copies_of_all_tiers():
    engine = make(storage_write_on="save")
    engine.add("a", A)
    engine.step({"a": 16})
    engine.apply(engine.workers[0], engine.workers[0].finish())
    plan, _ = engine.step()
    assert [(job.tier_id, job.kind) for job in plan.jobs] == [(0, JobKind.CASCADE), (1, JobKind.CASCADE)]
    engine.workers[0].lose(0, 1, blocks_per_chunk=1)
    engine.apply(engine.workers[0], [])
    engine.apply(engine.workers[0], engine.workers[0].finish())
    lost = engine.scheduler.stats()
    assert (lost.num_jobs_in_flight, lost.failed_storage_chunks) == (0, 0), "storage is not to blame"
    assert len(stored(engine, 0)) == len(stored(engine, 1)) == 3


# --- restart ------------------------------------------------------------------------------------


def setup_of(config, **fields):
    (expected,) = expected_setups(config, LAYOUT, 1)
    paths = {"save_path": "direct", "load_path": "direct"}
    return WorkerSetup(num_processes=1, process_index=0, segment_slots=(4,), **(paths | expected | fields))


def test_a_worker_that_starts_lists_what_each_of_its_tiers_has():
    engine = make()
    config = tier_context(engine.scheduler).config
    a, b = engine.keys(A), engine.keys(B)
    setup = setup_of(config, stored_keys=(tuple(a), tuple(b + a)), shares_storage=(False, False))
    assert pickle.loads(pickle.dumps(setup)) == setup
    worker = engine.workers[0]
    report = dataclasses.replace(worker.report(), incarnation=5, setup=setup)
    engine.scheduler.apply(report)
    assert (stored(engine, 0), stored(engine, 1)) == (set(a), {*a, *b})
    assert [tier.num_stored_chunks for tier in engine.scheduler.tier_stats()] == [4, 8]
    assert engine.scheduler.stats().restored_chunks == 12
    assert engine.scheduler.stored_block_hashes() == frozenset(engine.hashes(A) + engine.hashes(B))
    again = setup_of(config, stored_keys=((), tuple(b)), shares_storage=(False, False))
    engine.scheduler.apply(dataclasses.replace(report, incarnation=6, setup=again))
    assert (stored(engine, 0), stored(engine, 1)) == (set(), set(b)), "each has lost its own"
    deleted = {job.tier_id: set(job.deleted_keys) for job in engine.scheduler.plan_step().jobs}
    assert deleted == {0: set(a), 1: set(a)}, "the other workers may have it"


@pytest.mark.parametrize(
    "wrong",
    [
        {"storage_chunks": 16},
        {"storage_chunks": (16, -1)},
        {"stored_keys": ((),)},
        {"stored_keys": ((b"k",), (7,))},
        {"stored_keys": ((b"k",), [b"k"])},
        {"shares_storage": (False,)},
        {"shares_storage": (False, 1)},
        {"shares_storage": False},
    ],
    ids=str,
)
def test_an_invalid_list_is_ignored_with_its_report(wrong):
    engine = make()
    good = {"stored_keys": ((), ()), "shares_storage": (False, False)}
    setup = setup_of(tier_context(engine.scheduler).config, **(good | wrong))
    engine.scheduler.apply(dataclasses.replace(engine.workers[0].report(), setup=setup))
    assert engine.scheduler.stats().num_rejected_reports == 1


def test_with_sizes_in_gb_each_pipeline_stage_has_its_own_number_and_the_least_counts():
    larger = make_layout(block_size=4, num_layers=64, page_shape=(4, 2, 2, 8))
    layout = KVLayout.of_stages([LAYOUT, dataclasses.replace(larger, stage_layers="1 to 64 of 65")])
    config = OffloadConfig.create(storage_tier=(NAME, NAME), storage_gb=(0.01, 0.1), load_path="direct")
    sizes = [expected["storage_chunks"] for expected in expected_setups(config, layout, 2)]
    assert sizes == [config.storage_chunks(LAYOUT), config.storage_chunks(larger)]
    assert sizes[1] < sizes[0]
    scheduler = OffloadScheduler(config, layout, num_workers=2)
    assert tuple(tier.records.capacity for tier in storage_planners(scheduler)) == sizes[1]


# --- the wire, estimates, statistics ------------------------------------------------------------


def test_a_job_names_its_tier_on_the_wire():
    engine = make(storage_write_on=("save", "eviction"))
    put(engine, 1, A)
    engine.turn()
    engine.match("a", A)
    plan = engine.scheduler.plan_step()
    assert reads(plan) != []
    copied = pickle.loads(pickle.dumps(plan))
    assert copied == plan
    assert [job.tier_id for job in copied.jobs] == [1]


def test_each_tier_is_measured_by_itself():
    clock = iter(range(10**6)).__next__
    costs = LoadCosts(OffloadConfig.create(load_mode="auto").effective_load_mode, clock=lambda: float(clock()))
    for nbytes in (1000, 2000, 4000):
        costs.observe_promotion(0, nbytes, nbytes / 1000)
        costs.observe_promotion(1, nbytes, nbytes / 10)
    assert costs.promotion_s(0, 3000, num_jobs=0) == pytest.approx(3.0, rel=0.01)
    assert costs.promotion_s(1, 3000, num_jobs=0) == pytest.approx(300.0, rel=0.01)
    assert costs.promotion_s(2, 3000, num_jobs=0) is None


def test_a_request_waits_once_for_what_all_tiers_have():
    """Reads of the near tier take 1 s a chunk, of the far one 2 s; computing takes longer than both."""
    engine = make(num_host_chunks=32, load_mode="auto", storage_wait_s=0.5)
    engine.turn()
    costs, nbytes = tier_context(engine.scheduler).costs, LAYOUT.block_nbytes
    for num in (1, 2, 4):
        costs.observe_prefill(num, num * 100.0, 0.0)
        costs.observe_promotion(0, num * nbytes, num * 1.0)
        costs.observe_promotion(1, num * nbytes, num * 2.0)
    put(engine, 0, A, slice(0, 2))
    put(engine, 1, A, slice(2, 4))
    found = engine.match("a", A)
    assert found.state is MatchState.ARRIVING
    assert found.until_s is not None
    assert found.until_s - engine.clock.now_s == pytest.approx(2 * (2 * 1.0 + 2 * 2.0), rel=0.01)
    assert storage_stack_planner(engine.scheduler).estimate(engine.keys(B), 0, 4) == (0, 0.0)


def test_an_estimate_goes_on_behind_what_takes_an_unknown_time():
    engine = make(num_host_chunks=32)
    engine.turn()
    put(engine, 0, A, slice(0, 2))
    put(engine, 1, A, slice(2, 3))
    put(engine, 0, A, slice(3, 4))
    stack, keys = storage_stack_planner(engine.scheduler), engine.keys(A)
    assert stack.estimate(keys, 0, 4) == (4, None)
    assert stack.estimate(keys, 0, 3) == (3, None)
    costs = tier_context(engine.scheduler).costs
    for num in (1, 2, 4):
        costs.observe_promotion(0, num * LAYOUT.block_nbytes, num * 1.0)
        costs.observe_promotion(1, num * LAYOUT.block_nbytes, num * 2.0)
    end, seconds = stack.estimate(keys, 0, 4)
    assert end == 4
    assert seconds == pytest.approx(3 * 1.0 + 2.0, rel=0.01)


def test_an_estimate_leaves_out_what_is_suspended_and_not_being_read():
    engine = make(num_host_chunks=32, breaker_failures=1, breaker_retry_s=1e6)
    engine.turn()
    put(engine, 1, A)
    engine.match("a", A)
    assert reads(engine.scheduler.plan_step()) == [(1, 4)]
    put(engine, 1, B)
    storage_planners(engine.scheduler)[1].reads.breaker.failed(10**6, "the server is gone")
    stack = storage_stack_planner(engine.scheduler)
    assert stack.estimate(engine.keys(A), 0, 4) == (4, None)
    assert stack.estimate(engine.keys(B), 0, 4) == (0, 0.0)


def test_a_tier_that_is_slower_than_computing_is_passed_over_for_one_that_is_not():
    engine = make(num_host_chunks=32, load_mode="auto")
    engine.turn()
    costs, nbytes = tier_context(engine.scheduler).costs, LAYOUT.block_nbytes
    for num in (1, 2, 4):
        costs.observe_prefill(num, num * 1.0, 0.0)
        costs.observe_promotion(0, num * nbytes, num * 1000.0)
        costs.observe_promotion(1, num * nbytes, num * 0.001)
    put(engine, 0, A)
    put(engine, 1, A)
    assert wants(engine, A) == [(1, 4)]
    assert engine.scheduler.stats().num_skipped_promotions == 1


def test_statistics_of_each_tier_reach_prometheus():
    engine = make(storage_write_on=("save", "eviction"))
    registry = CollectorRegistry()
    registry.register(StatsCollector(engine.scheduler.stats, engine.scheduler.tier_stats))
    engine.fill(A)
    engine.fill(B)
    engine.rest()
    engine.match("a", A)
    engine.turn(fail=True)

    def of(name, tier):
        return registry.get_sample_value(f"tpu_offload_tier_{name}", {"tier": tier})

    assert (of("stored_chunks", NEAR), of("stored_chunks", FAR)) == (7, 4)
    assert (of("cascaded_chunks_total", NEAR), of("cascaded_chunks_total", FAR)) == (8, 4)
    assert (of("failed_storage_chunks_total", NEAR), of("failed_storage_chunks_total", FAR)) == (1, 1)
    sums = engine.scheduler.stats()
    assert (sums.num_stored_chunks, sums.cascaded_chunks, sums.failed_storage_chunks) == (11, 12, 2)
    own = engine.scheduler.tier_stats()
    assert [type(tier) for tier in own] == [TierStats, TierStats]
    for name in TIER_METRICS:
        assert sum(getattr(tier, name) for tier in own) == getattr(sums, name)


def test_without_tiers_there_is_nothing():
    engine = StorageEngine(storage_tier="", sizes=(16,))
    assert engine.scheduler.tier_stats() == ()
    assert not storage_stack_planner(engine.scheduler).has_plans
    counts = engine.scheduler.stats().as_dict()
    storage_stack_planner(engine.scheduler).add_stats(counts)
    assert counts == engine.scheduler.stats().as_dict()


# --- a shared tier behind a private one whose reads do not come -------------------------------------


def shared_below(**settings):
    """A private tier and a shared one below it both have A; of the shared one that is not known, as after a restart."""
    engine = make(num_host_chunks=16, **settings)
    engine.turn()
    for worker in engine.workers:
        tiers(engine)[1].adopt(worker.worker_id, (), is_shared=True)
    put(engine, 0, A)
    for worker in engine.workers:
        worker.storages[1].update(zip(engine.keys(A), engine.hashes(A), strict=True))
    return engine


def looked_up(plan):
    return [prefix for job in plan.of(JobKind.LOOKUP) for prefix in job.prefixes]


def test_what_a_suspended_tier_has_is_asked_for_in_the_shared_one():
    engine = shared_below(breaker_failures=3, breaker_retry_s=100.0)
    engine.match("a", A)
    assert not looked_up(engine.turn()), "it is read"
    engine = shared_below(breaker_failures=3, breaker_retry_s=100.0)
    for job_id in range(3):
        tiers(engine)[0].reads.breaker.failed(job_id, "injected")
    engine.match("a", A)
    assert [list(keys) for keys in looked_up(engine.turn())] == [engine.keys(A)]
    assert wants(engine, A) == [(1, 4)]


def test_what_a_hanging_tier_has_is_asked_for_in_the_shared_one():
    engine = shared_below()
    put(engine, 0, B)
    engine.workers[0].frozen = {0}
    assert wants(engine, B) == [(0, 4)]
    engine.clock.now_s += 2.5
    engine.match("a", A)
    assert [list(keys) for keys in looked_up(engine.turn())] == [engine.keys(A)]
    assert wants(engine, A) == [(1, 4)]


@pytest.mark.parametrize("failed", [(), (2,)])
def test_a_request_whose_read_has_failed_asks_the_shared_tier(failed):
    engine = shared_below()
    engine.match("a", A)
    plan, _ = engine.step()
    assert reads(plan) == [(0, 4)]
    engine.apply(engine.workers[0], engine.workers[0].finish(fail=True, failed_blocks=failed))
    assert engine.match("a", A).state is MatchState.ARRIVING
    assert [list(keys) for keys in looked_up(engine.turn())] == [engine.keys(A)[2 if failed else 0 :]]
    assert wants(engine, A) == [(1, 1 if failed else 4)]
    engine.rest()
    assert engine.match("b", A).num_tokens == 15


def test_a_request_whose_record_is_missing_asks_the_shared_tier():
    engine = shared_below()
    engine.match("a", A)
    plan, _ = engine.step()
    (job,) = plan.of(JobKind.PROMOTE)
    engine.workers[0].finish(fail=True)
    result = JobResult(job_id=job.job_id, state=JobState.FINISHED, missing_chunks=(0, 1, 2, 3))
    engine.apply(engine.workers[0], [result])
    engine.match("a", A)
    assert [list(keys) for keys in looked_up(engine.turn())] == [engine.keys(A)]


def test_a_request_asks_for_chunks_before_those_that_it_has_asked_for():
    """The nearer tier has the first half; the other one was asked for the rest only, until that read has failed."""
    engine = shared_below()
    for key in engine.keys(A)[2:]:
        tiers(engine)[0].records.remove(key)
    engine.match("a", A)
    plan, _ = engine.step()
    assert [list(keys) for keys in looked_up(plan)] == [engine.keys(A)[2:]]
    for job, _ in list(engine.workers[0].in_flight):
        engine.apply(engine.workers[0], engine.workers[0].finish(1, fail=job.kind is JobKind.PROMOTE))
    engine.match("a", A)
    assert [keys[0] for keys in looked_up(engine.turn())] == [engine.keys(A)[0]]
    assert wants(engine, A) == [(1, 4)]


# --- a read that fails though the record may be intact ----------------------------------------------


def test_what_could_not_be_read_rests_and_is_read_again():
    """As while a server does not answer: what it has is intact, and nothing is deleted."""
    engine = StorageEngine(num_host_chunks=16, sizes=(6,), breaker_retry_s=5.0)
    engine.turn()
    put(engine, 0, A)
    records = tiers(engine)[0].records
    for _ in range(3):
        engine.match("a", A)
        plan = engine.turn(fail=True)
        assert reads(plan) == [(0, 4)]
        assert set(records.resting) == set(engine.keys(A))
        assert (records.room, len(records.stored)) == (2, 0)
        assert engine.match("b", A).state is MatchState.MISS, "it is computed meanwhile"
        engine.clock.now_s += 4.9
        assert wants(engine, A) == []
        engine.clock.now_s += 0.2
        engine.turn()
        assert stored(engine, 0) == set(engine.keys(A))
    assert not records.to_delete
    assert wants(engine, A) == [(0, 4)]
    assert engine.match("c", A).state is MatchState.HIT


def test_what_fails_again_while_others_are_read_is_deleted():
    engine = StorageEngine(num_host_chunks=16, sizes=(16,), breaker_retry_s=5.0)
    engine.turn()
    put(engine, 0, A)
    records, bad = tiers(engine)[0].records, engine.keys(A)[3]
    engine.match("a", A)
    engine.turn(fail=True, failed_blocks=(3,))
    assert list(records.resting) == [bad]
    chunk_index(engine.scheduler).clear()
    engine.clock.now_s += 6.0
    engine.turn()
    engine.match("b", A)
    engine.turn(fail=True, failed_blocks=(3,))
    assert not records.resting
    engine.turn()
    assert bad not in engine.workers[0].storage


def test_a_rest_ends_in_an_idle_engine_too():
    engine = StorageEngine(num_host_chunks=16, sizes=(16,), breaker_retry_s=5.0)
    engine.turn()
    put(engine, 0, A)
    engine.match("a", A)
    engine.turn(fail=True)
    engine.clock.now_s += 3600.0
    assert engine.match("b", A).state is MatchState.ARRIVING


def test_failures_with_a_success_between_them_do_not_add_up():
    engine = StorageEngine(num_host_chunks=16, sizes=(16,), breaker_retry_s=5.0)
    engine.turn()
    put(engine, 0, A)
    records, failed = tiers(engine)[0].records, engine.keys(A)[3]
    for fails in (True, False, True):
        chunk_index(engine.scheduler).clear()
        engine.match("a", A)
        engine.turn(fail=fails, failed_blocks=(3,) if fails else ())
        assert list(records.resting) == [failed] * fails
        engine.clock.now_s += 6.0
        engine.turn()
    assert stored(engine, 0) == set(engine.keys(A))


def test_what_rests_is_not_written_again():
    """While a server does not answer that would fail, and what it has would be deleted."""
    engine = StorageEngine(num_host_chunks=16, sizes=(16,))
    engine.turn()
    put(engine, 0, A)
    engine.match("a", A)
    engine.turn(fail=True)
    assert engine.serve("a", A) == 0, "it is computed"
    plans = engine.rest()
    assert not any(job.chunks for plan in plans for job in plan.of(JobKind.CASCADE))
    assert set(tiers(engine)[0].records.resting) == set(engine.keys(A))
    assert engine.workers[0].storage.keys() == set(engine.keys(A))


def test_a_worker_that_restarts_while_a_record_rests_has_it_still():
    engine = StorageEngine(num_host_chunks=16, sizes=(16,))
    engine.turn()
    tiers(engine)[0].adopt(0, [])
    put(engine, 0, A)
    engine.match("a", A)
    engine.turn(fail=True)
    assert not stored(engine, 0)
    tiers(engine)[0].adopt(0, engine.keys(A)[:3])
    engine.scheduler.check_invariants()
    assert stored(engine, 0) == set(engine.keys(A)[:3])
    assert list(tiers(engine)[0].records.to_delete) == engine.keys(A)[3:]


def test_a_damaged_record_is_deleted_at_once():
    engine = StorageEngine(num_host_chunks=16, sizes=(16,))
    engine.turn()
    put(engine, 0, A)
    engine.match("a", A)
    plan, _ = engine.step()
    (job,) = plan.of(JobKind.PROMOTE)
    engine.workers[0].finish()
    result = JobResult(
        job_id=job.job_id, state=JobState.FAILED, error="damaged", failed_blocks=(1, 2), missing_chunks=(2,)
    )
    engine.apply(engine.workers[0], [result])
    records, keys = tiers(engine)[0].records, engine.keys(A)
    assert (list(records.resting), list(records.to_delete)) == ([keys[1]], [keys[2]])
    stats = engine.scheduler.stats()
    assert (stats.failed_storage_chunks, stats.missing_storage_chunks) == (2, 0)
