"""What is known of a shared tier and used is asked for again: what the server has lost is written again."""

import pytest

from tests.inside.scheduler import asks_again, forget_confirmations, storage_planner, write_candidates
from tests.storage.fakes import SharedEngine, StorageEngine, prompt
from tpu_offload import MatchState
from tpu_offload.config import StorageAdmission
from tpu_offload.core.storage.confirmations import MAX_ASKED
from tpu_offload.types import JobKind

A, B = prompt(1), prompt(2)
INTERVAL_S = 60.0


def engine_with(*prompts, num_host_chunks=16, **settings):
    """What has served these prompts, whose chunks are in the host tier and on the server."""
    engine = SharedEngine(num_host_chunks=num_host_chunks, **settings)
    for i, tokens in enumerate(prompts):
        engine.fill(tokens, name=f"first-{i}")
    return engine


@pytest.fixture
def engine():
    return engine_with(A)


def asked(plans):
    """The names that these plans ask for."""
    return [name for plan in plans for job in plan.of(JobKind.LOOKUP) for prefix in job.prefixes for name in prefix]


def written(plans):
    return [key for plan in plans for job in plan.of(JobKind.CASCADE) for key, _ in job.chunks]


def use(engine, tokens, name="user"):
    """A request with this prompt is matched and ends; what is planned until the engine comes to rest."""
    engine.match(name, tokens)
    plans = engine.rest()
    engine.scheduler.finish(name)
    return plans + engine.rest()


def num_vanished(engine):
    return engine.scheduler.stats().vanished_storage_chunks


def test_what_the_server_has_lost_is_written_again_once_it_is_used(engine):
    engine.others_drop(A, 0, 2)
    engine.clock.now_s += 2 * INTERVAL_S
    found = engine.match("a", A)
    assert (found.state, found.num_tokens) == (MatchState.HIT, 15), "the request does not wait"
    plans = engine.rest()
    assert asked(plans[:1]) == engine.keys(A)
    assert written(plans) == [engine.keys(A)[0], engine.keys(A)[2]]
    assert engine.workers[0].storage.keys() >= set(engine.keys(A))
    engine.check_storage([A])
    stats = engine.scheduler.stats()
    assert (stats.vanished_storage_chunks, stats.missing_storage_chunks, stats.num_failed_jobs) == (2, 0, 0)
    assert (stats.looked_up_storage_chunks, stats.found_storage_chunks) == (4, 0), "by the first request alone"
    assert not asked(use(engine, A)), "they were written"


def test_what_was_confirmed_a_short_while_ago_is_not_asked_for(engine):
    assert not asked(use(engine, A)), "it was written"
    engine.clock.now_s += 2 * INTERVAL_S
    assert asked(use(engine, A)) == engine.keys(A)
    engine.clock.now_s += 0.9 * INTERVAL_S
    assert not asked(use(engine, A, "b")), "it was found"
    engine.clock.now_s += 1.1 * INTERVAL_S
    assert asked(use(engine, A, "c")) == engine.keys(A)


def test_what_nobody_uses_is_not_asked_for():
    engine = engine_with(A, B)
    engine.clock.now_s += 2 * INTERVAL_S
    assert asked(use(engine, A)) == engine.keys(A)


def test_it_is_asked_for_if_hbm_has_it(engine):
    """A system prompt that never leaves HBM."""
    engine.others_drop(A)
    engine.clock.now_s += 2 * INTERVAL_S
    engine.scheduler.match("a", engine.hashes(A), num_tokens=len(A) + 1, num_computed_tokens=len(A))
    assert written(engine.rest()) == engine.keys(A)


def test_requests_that_use_it_at_once_ask_once(engine):
    engine.clock.now_s += 2 * INTERVAL_S
    for name in "abc":
        engine.match(name, A)
    plan, _ = engine.step()
    engine.match("d", A)
    assert asked([plan]) == engine.keys(A)
    assert not asked([engine.step()[0]]), "it is in flight"


def test_what_is_read_is_not_asked_for():
    engine = SharedEngine(num_host_chunks=8)
    engine.others_store(A)
    assert asked(use(engine, A)) == engine.keys(A)
    engine.fill(B)  # pushes A out of the host tier
    engine.fill(prompt(3))
    engine.clock.now_s += 2 * INTERVAL_S
    plans = use(engine, A)
    assert [len(job.chunks) for plan in plans for job in plan.of(JobKind.PROMOTE)] == [4]
    assert not asked(plans)
    assert not asked(use(engine, A)), "a read confirms it"


def test_what_is_gone_from_the_host_tier_too_is_forgotten():
    engine = engine_with(A, num_host_chunks=16)
    engine.clock.now_s += 2 * INTERVAL_S
    engine.others_drop(A)
    engine.match("a", A)
    plan, _ = engine.step()
    assert asked([plan]) == engine.keys(A)
    engine.scheduler.finish("a")
    for i in range(3, 7):
        engine.serve(f"filler-{i}", prompt(i))
    engine.rest()
    assert num_vanished(engine) == 4
    assert not set(engine.keys(A)) & set(storage_planner(engine.scheduler).stored_keys())


def test_every_worker_has_to_have_it():
    engine = engine_with(A, num_workers=2)
    del engine.workers[1].storage[engine.keys(A)[1]]
    engine.clock.now_s += 2 * INTERVAL_S
    assert written(use(engine, A)) == [engine.keys(A)[1]]


def test_admission_still_decides():
    engine = engine_with(A, storage_admission=StorageAdmission.AFTER_HIT)
    assert not engine.workers[0].storage
    engine.add("a", A)
    engine.settle()
    engine.remove("a")
    engine.rest()
    num_stored = len(engine.workers[0].storage)
    assert num_stored
    engine.others_drop(A)
    engine.clock.now_s += 2 * INTERVAL_S
    use(engine, A)
    assert len(engine.workers[0].storage) == num_stored


def test_what_is_written_on_eviction_is_written_when_it_is_evicted():
    engine = SharedEngine(num_host_chunks=8, storage_write_on="eviction")
    engine.others_store(A)
    use(engine, A)  # asked for
    use(engine, A)  # read
    engine.others_drop(A)
    engine.clock.now_s += 2 * INTERVAL_S
    assert asked(use(engine, A)) == engine.keys(A)
    assert not engine.workers[0].storage
    engine.fill(B)
    engine.fill(prompt(3))
    assert engine.workers[0].storage.keys() >= set(engine.keys(A))


def test_a_server_that_does_not_answer_is_not_asked_for_ever():
    engine = engine_with(A, breaker_failures=2, breaker_retry_s=10.0)
    planner = storage_planner(engine.scheduler)
    engine.others_drop(A)
    engine.clock.now_s += 2 * INTERVAL_S
    num_asked = 0
    for i in range(8):
        engine.match(f"a{i}", A)
        num_asked += len(asked([engine.turn(fail=True)]))
    assert num_asked == 2 * 4
    assert planner.stored_keys(), "nothing is known"
    engine.clock.now_s += 20.0
    engine.match("probe", A)
    assert asked([engine.turn()]) == engine.keys(A)[:1], "a probe is small"
    engine.match("b", A)
    assert asked(engine.rest()) == engine.keys(A)[1:]
    assert engine.workers[0].storage.keys() >= set(engine.keys(A))
    assert engine.scheduler.stats().num_failed_storage_lookups == 2


def test_an_answer_that_comes_after_a_write_changes_nothing(engine):
    """The chunk was read, found gone, computed and written again while the lookup was in flight."""
    planner, (worker,) = storage_planner(engine.scheduler), engine.workers
    engine.clock.now_s += 2 * INTERVAL_S
    engine.others_drop(A, 3)
    engine.match("a", A)
    engine.step()
    (job,) = worker.of_kind(JobKind.LOOKUP)
    assert asks_again(planner, job.job_id)
    results = worker.finish()
    planner.confirmations.note(engine.keys(A)[3:])
    engine.apply(worker, results)
    assert num_vanished(engine) == 0
    assert engine.keys(A)[3] in planner.stored_keys()


def test_a_long_prompt_is_asked_for_in_parts():
    long = prompt(1, num_blocks=2 * MAX_ASKED + 40)
    engine = SharedEngine(num_host_chunks=16, sizes=(3 * MAX_ASKED,))
    planner = storage_planner(engine.scheduler)
    engine.others_store(long)
    planner.add_found(engine.keys(long))
    forget_confirmations(planner)
    engine.scheduler.match("a", engine.hashes(long), num_tokens=len(long) + 1, num_computed_tokens=len(long))
    plans = engine.rest()
    assert [len(asked([plan])) for plan in plans if asked([plan])] == [MAX_ASKED, MAX_ASKED, 40]
    assert asked(plans) == engine.keys(long), "the head first"


def test_nothing_is_asked_for_after_a_reset(engine):
    engine.scheduler.reset()
    engine.rest()
    engine.fill(A)
    engine.clock.now_s += 2 * INTERVAL_S
    engine.others_drop(A)
    assert not asked(use(engine, A))


def test_a_reset_while_it_is_asked(engine):
    engine.clock.now_s += 2 * INTERVAL_S
    engine.match("a", A)
    engine.step()
    engine.scheduler.reset()
    engine.rest()
    assert num_vanished(engine) == 0
    assert not write_candidates(storage_planner(engine.scheduler))


@pytest.mark.parametrize("settings", [{}, {"storage_lookup_wait_s": 0.0}])
def test_nothing_is_asked_of_a_private_tier_or_without_lookups(settings):
    engine = (SharedEngine if settings else StorageEngine)(num_host_chunks=16, **settings)
    engine.fill(A)
    engine.clock.now_s += 2 * INTERVAL_S
    assert not asked(use(engine, A))


def test_requests_without_the_cache_ask_for_nothing(engine):
    engine.clock.now_s += 2 * INTERVAL_S
    engine.scheduler.match("a", [], num_tokens=len(A), num_computed_tokens=0)
    assert not asked(engine.rest())
