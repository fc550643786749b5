"""A plan that comes twice, late, out of order, or that was made before the KV caches were lost."""

import dataclasses
import pickle

import numpy as np
import pytest

from tests.jobs import as_early
from tests.worker.engine import CANCELLED, FAILED, FINISHED, Engine, broken
from tpu_offload import CachesLostError, ConfigError, OffloadConfig, OffloadWorker, StepPlan
from tpu_offload.types import CacheEpoch
from tpu_offload.worker.arrays import renew

PATHS = ["direct", "staged", "staged saves, direct loads", "direct saves, staged loads"]
paths = pytest.mark.parametrize("path", PATHS)


def copy_of(plan):
    return pickle.loads(pickle.dumps(plan))


def epochs(engine, *, num_losses=None):
    """The epochs of a plan when the scheduler knows of all losses, or of a given number."""
    own = engine.worker.cache_epoch
    losses = own.num_losses if num_losses is None else num_losses
    return ((0, 0),) * own.worker_id + ((own.incarnation, losses),)


def plan_of(engine, *, loads=(), saves=(), early=(), **fields):
    engine.step_id += 1
    return StepPlan(
        step_id=engine.step_id,
        jobs=(*map(as_early, early), *loads, *saves),
        **({"next_job_id": engine.sent(*loads, *saves, *early)} | fields),
    )


def do(engine, plan):
    engine.caches = engine.worker.begin_step(plan, engine.caches)
    engine.worker.end_step(plan, engine.caches)


def saved_and_scribbled(path):
    """An engine in whose host tier blocks 0 to 3 are in places 4 to 7, and whose caches hold something else now."""
    engine = Engine(path)
    save = engine.save([0, 1, 2, 3], [4, 5, 6, 7])
    plan = plan_of(engine, saves=[save])
    do(engine, plan)
    engine.expect_saved(save)
    assert engine.states() == {save.job_id: FINISHED}
    engine.check()
    engine.scribble()
    return engine, plan


@paths
def test_a_save_is_done_once_however_often_its_plan_comes(path):
    engine, plan = saved_and_scribbled(path)
    do(engine, copy_of(plan))
    do(engine, plan)
    assert engine.drain() == {}
    engine.check()


@paths
def test_a_load_is_done_once_however_often_its_plan_comes(path):
    engine, _ = saved_and_scribbled(path)
    load = engine.load([8, 9], [4, 5])
    plan = plan_of(engine, loads=[load])
    do(engine, plan)
    engine.expect_loaded(load)
    assert engine.states() == {load.job_id: FINISHED}
    engine.scribble()  # blocks 8 and 9 have new owners
    do(engine, copy_of(plan))
    assert engine.drain() == {}
    engine.check()


@paths
def test_the_same_plan_again_in_the_middle_of_its_step_changes_nothing(path):
    engine, _ = saved_and_scribbled(path)
    load, save = engine.load([8, 9], [4, 5]), engine.save([1], [9])
    plan = plan_of(engine, loads=[load], saves=[save])
    engine.caches = engine.worker.begin_step(plan, engine.caches)
    engine.caches = engine.worker.begin_step(copy_of(plan), engine.caches)
    engine.worker.end_step(copy_of(plan), engine.caches)  # the step is done with a copy of what it began with
    engine.worker.end_step(plan, engine.caches)
    engine.expect_saved(save)
    engine.expect_loaded(load)
    assert engine.states() == {load.job_id: FINISHED, save.job_id: FINISHED}
    engine.check()


@paths
@pytest.mark.parametrize("later_has_jobs", [True, False])
def test_a_plan_that_a_later_one_has_overtaken_is_not_done(path, later_has_jobs):
    engine, _ = saved_and_scribbled(path)
    load, save, early = engine.load([8, 9], [4, 5]), engine.save([1], [9]), engine.save([2], [10])
    overtaken = plan_of(engine, loads=[load], saves=[save], early=[early])
    later = engine.load([10], [6])
    do(engine, plan_of(engine, loads=[later] if later_has_jobs else []))
    if later_has_jobs:
        engine.expect_loaded(later)
    states = engine.states()
    do(engine, overtaken)
    assert engine.drain() == {}
    assert states == ({later.job_id: FINISHED} if later_has_jobs else {})
    assert engine.worker.poll().oldest_job_id > early.job_id, "no job with that id will be done"
    engine.check()


def test_one_line_of_every_power_of_two_says_so(caplog):
    engine, plan = saved_and_scribbled("direct")
    for _ in range(20):
        engine.worker.begin_step(copy_of(plan), engine.caches)
    assert [r.getMessage() for r in caplog.records if "ignored" in r.getMessage()] == [
        f"ignored plan {plan.step_id}, which is a duplicate, or older than the last one ({n} ignored so far)"
        for n in (1, 2, 4, 8, 16)
    ]


def test_what_a_plan_cancels_may_be_said_any_number_of_times():
    engine, _ = saved_and_scribbled("staged")
    load = engine.load([8, 9], [4, 5])
    engine.caches = engine.worker.begin_step(plan_of(engine, loads=[load]), engine.caches)
    for _ in range(3):
        do(engine, plan_of(engine, cancelled_job_ids=(load.job_id,)))
    assert engine.states() == {load.job_id: CANCELLED}
    engine.check()


# --- lost caches ----------------------------------------------------------------------------------


def replace_caches(engine):
    """What an engine does that has lost them."""
    engine.worker.mark_caches_lost()
    engine.caches = renew(engine.caches)
    engine.expected = [np.zeros_like(expected) for expected in engine.expected]


@paths
def test_a_plan_made_before_the_loss_is_cancelled_whole(path):
    engine, _ = saved_and_scribbled(path)
    jobs = engine.load([8, 9], [4, 5]), engine.save([1], [9]), engine.save([2], [10])
    plan = plan_of(engine, loads=jobs[:1], saves=jobs[1:2], early=jobs[2:], cache_epochs=epochs(engine))
    replace_caches(engine)
    assert engine.worker.is_stale(plan)
    do(engine, copy_of(plan))
    assert engine.states() == {job.job_id: CANCELLED for job in jobs}
    assert engine.worker.poll().oldest_job_id > jobs[-1].job_id
    engine.check()
    # The next one is for the new caches.
    load = engine.load([8, 9], [4, 5])
    do(engine, plan_of(engine, loads=[load], cache_epochs=epochs(engine)))
    engine.expect_loaded(load)
    assert engine.states() == {load.job_id: FINISHED}
    engine.check()


def test_a_plan_made_before_the_loss_still_cancels():
    engine, _ = saved_and_scribbled("staged")
    load = engine.load([8, 9], [4, 5])
    engine.caches = engine.worker.begin_step(plan_of(engine, loads=[load]), engine.caches)
    do(engine, plan_of(engine, cancelled_job_ids=(load.job_id,), cache_epochs=epochs(engine, num_losses=7)))
    assert engine.states() == {load.job_id: CANCELLED}
    engine.check()


@paths
def test_a_load_on_its_way_into_lost_caches_has_brought_nothing(path):
    engine, _ = saved_and_scribbled(path)
    load = engine.load([8, 9], [4, 5])
    do(engine, plan_of(engine, loads=[load]))
    replace_caches(engine)
    assert engine.states() == {load.job_id: CANCELLED}
    assert engine.worker.take_written_loads() == ()
    engine.check()


@paths
def test_a_save_on_its_way_out_of_lost_caches_is_what_it_was(path):
    engine, _ = saved_and_scribbled(path)
    save = engine.save([1, 2], [9, 10])
    do(engine, plan_of(engine, saves=[save]))
    engine.expect_saved(save)
    replace_caches(engine)
    assert engine.states() == {save.job_id: FINISHED}
    engine.check()


@pytest.mark.parametrize("how", ["the same plan", "a copy"])
def test_caches_lost_in_the_forward_pass_are_not_saved(how):
    engine, _ = saved_and_scribbled("direct")
    save = engine.save([1, 2], [9, 10])
    plan = plan_of(engine, saves=[save], cache_epochs=epochs(engine))
    engine.caches = engine.worker.begin_step(plan, engine.caches)
    replace_caches(engine)
    engine.worker.end_step(plan if how == "the same plan" else copy_of(plan), engine.caches)
    assert engine.states() == {save.job_id: CANCELLED}
    engine.check()


def test_saves_of_caches_that_are_gone_count_as_a_loss():
    """A forward pass took them along, or the engine hands in those of before it."""
    engine, _ = saved_and_scribbled("direct")
    jobs = engine.save([1], [9]), engine.save([2], [10])
    plan = plan_of(engine, saves=jobs, cache_epochs=epochs(engine))
    later = engine.save([3], [11])
    ahead = plan_of(engine, saves=[later], cache_epochs=epochs(engine))
    engine.caches = engine.worker.begin_step(plan, engine.caches)
    engine.caches[0].delete()
    with pytest.raises(CachesLostError, match="lost before"):
        engine.worker.end_step(plan, engine.caches)
    assert engine.worker.cache_epoch.num_losses == 1
    engine.caches = renew(engine.caches)
    engine.expected = [np.zeros_like(expected) for expected in engine.expected]
    do(engine, ahead)
    assert engine.states() == {jobs[0].job_id: FAILED, jobs[1].job_id: FAILED, later.job_id: CANCELLED}
    engine.check()


def test_a_load_that_takes_the_caches_counts_as_a_loss():
    engine, _ = saved_and_scribbled("direct")
    load, save = engine.load([8], [4]), engine.save([1], [9])
    before = engine.worker.cache_epoch
    engine.loader.load = broken(RuntimeError("halted"), takes="caches")
    with pytest.raises(CachesLostError):
        engine.worker.begin_step(plan_of(engine, loads=[load], saves=[save]), engine.caches)
    assert engine.worker.cache_epoch == dataclasses.replace(before, num_losses=1)
    assert engine.worker.poll().num_cache_losses == 1


def test_a_plan_for_another_life_or_for_fewer_workers_is_not_done():
    engine, _ = saved_and_scribbled("direct")
    own = engine.worker.cache_epoch
    for wrong in (((0, 0),) * 4, ((0, 0),) * 3 + ((own.incarnation - 1, 0),), ((0, 0),) * 3, ((-1, -1),), "junk"):
        save = engine.save([1], [9])
        do(engine, plan_of(engine, saves=[save], cache_epochs=wrong))
        assert engine.states() == {save.job_id: CANCELLED}, wrong
    engine.check()


# --- what reports say of the worker ----------------------------------------------------------------


def test_reports_say_how_a_worker_was_made_until_the_scheduler_knows():
    engine = Engine("staged saves, direct loads")
    report = engine.worker.poll()
    assert report.setup == engine.worker.poll().setup
    assert (report.setup.num_processes, report.setup.process_index) == (1, 0)
    assert (report.setup.save_path, report.setup.load_path) == ("staged", "direct")
    assert (report.setup.blocks_per_chunk, report.setup.staging_blocks, report.setup.segment_slots) == (2, 6, (4,))
    assert report.setup.fingerprint == engine.layout.fingerprint().hex()
    do(engine, plan_of(engine, cache_epochs=((0, 0),) * 4))
    assert engine.worker.poll().setup is not None
    do(engine, plan_of(engine, cache_epochs=epochs(engine)))
    assert engine.worker.poll().setup is None
    assert engine.worker.poll() is engine.worker.poll(), "with nothing new it is the same report"


def test_a_worker_that_sees_another_in_its_place_says_so():
    engine = Engine("direct")
    do(engine, plan_of(engine, cache_epochs=epochs(engine)))
    own = engine.worker.cache_epoch
    assert own == CacheEpoch(worker_id=3, incarnation=own.incarnation, num_losses=0)
    do(engine, plan_of(engine, cache_epochs=((0, 0),) * 3 + ((own.incarnation + 5, 0),)))
    assert engine.worker.poll().setup.rival == own.incarnation + 5


@pytest.mark.parametrize(
    ("wrong", "least"),
    [({"worker_id": -1}, 0), ({"worker_id": "0"}, 0), ({"incarnation": 2**70}, 1), ({"worker_id": True}, 0)],
)
def test_a_worker_is_not_made_with_what_no_report_could_say(wrong, least):
    engine = Engine("direct")
    with pytest.raises(ConfigError, match=f"expected an integer from {least} on"):
        OffloadWorker(OffloadConfig.create(num_cpu_chunks=0), engine.layout, engine.caches, **wrong)


def test_a_rank_of_numpy_is_a_worker_id():
    engine = Engine("direct")
    worker = OffloadWorker(OffloadConfig.create(num_cpu_chunks=0), engine.layout, engine.caches, worker_id=np.int64(1))  # type: ignore[arg-type]
    assert type(worker.poll().worker_id) is int


@paths
def test_a_load_that_its_own_plan_cancels_writes_nothing(path):
    engine = Engine(path)
    save = engine.save([0, 1], [4, 5])
    engine.step(saves=[save])
    engine.expect_saved(save)
    assert engine.states() == {save.job_id: FINISHED}
    load, other = engine.load([6, 7], [4, 5]), engine.load([8, 9], [4, 5])
    do(engine, plan_of(engine, loads=[load, other], cancelled_job_ids=(load.job_id,)))
    engine.expect_loaded(other)
    results = engine.drain()
    assert {job_id: result.state for job_id, result in results.items()} == {
        load.job_id: CANCELLED,
        other.job_id: FINISHED,
    }
    engine.check()


@pytest.mark.parametrize("jobs", [None, np.arange(3), 0])
@pytest.mark.parametrize("cancelled", [(), None, np.arange(3)])
def test_a_plan_whose_fields_are_no_tuples_has_none_of_them(jobs, cancelled):
    engine = Engine()
    plan = plan_of(engine, cache_epochs=epochs(engine))
    object.__setattr__(plan, "jobs", jobs)
    object.__setattr__(plan, "cancelled_job_ids", cancelled)
    do(engine, plan)
    stale = dataclasses.replace(plan, step_id=plan.step_id + 1, cache_epochs=epochs(engine, num_losses=7))
    do(engine, stale)
    assert engine.worker.poll().results == ()
    engine.check()
