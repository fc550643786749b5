"""A step whose forward pass was not executed, on the worker: its saves are cancelled, and all else goes on."""

import dataclasses
import pickle

import pytest

from tests.jobs import as_early
from tests.worker.engine import CANCELLED, FAILED, FINISHED, PATHS, Engine
from tests.worker.test_fused import begin
from tests.worker.test_storage import StorageEngine
from tpu_offload.types import StepPlan


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("is_copied", [False, True], ids=["", "unpickled"])
def test_its_saves_are_cancelled_and_nothing_is_copied(path, is_copied):
    engine = Engine(path)
    early, save = engine.save([2, 3], [0, 1]), engine.save([0, 1], [4, 5])
    engine.step_id += 1
    plan = StepPlan(step_id=1, jobs=(as_early(early), save), next_job_id=engine.sent(early, save))
    engine.caches = engine.worker.begin_step(plan, engine.caches)
    engine.worker.abort_step(pickle.loads(pickle.dumps(plan)) if is_copied else plan)
    engine.expect_saved(early)
    engine.worker.end_step(plan, engine.caches)  # too late
    engine.worker.abort_step(plan)
    report = engine.worker.poll()
    assert {result.job_id: result.state for result in report.results}[save.job_id] is CANCELLED
    assert engine.states() in ({}, {early.job_id: FINISHED})
    assert engine.worker.poll().oldest_job_id == plan.next_job_id
    engine.check()
    engine.check_round_trip()


def test_a_load_that_was_dispatched_before_it_is_finished():
    engine = Engine("direct")
    save = engine.save([0, 1], [4, 5])
    engine.step(saves=[save])
    engine.expect_saved(save)
    load, other = engine.load([8, 9], [4, 5]), engine.save([2, 3], [6, 7])
    engine.step_id += 1
    plan = StepPlan(step_id=2, jobs=(load, other), next_job_id=engine.sent(load, other))
    engine.caches = engine.worker.begin_step(plan, engine.caches)
    engine.worker.abort_step(plan)
    engine.expect_loaded(load)
    assert engine.states() == {save.job_id: FINISHED, load.job_id: FINISHED, other.job_id: CANCELLED}
    engine.check()


@pytest.mark.parametrize("is_taken", [False, True], ids=["segment whole", "segment donated"])
def test_copies_that_were_to_be_inside_the_pass(is_taken):
    """The loads have failed. A pass that failed after it was dispatched has taken the segment along."""
    engine = Engine("fused")
    save, load = engine.save([0, 1], [4, 5]), engine.load([8, 9], [8, 9])
    plan, fused = begin(engine, saves=[save], loads=[load])
    if is_taken:
        for part in fused.segment:
            part.delete()
    engine.worker.abort_step(plan)
    report = engine.worker.poll()
    assert {result.job_id: result.state for result in report.results} == {save.job_id: CANCELLED, load.job_id: FAILED}
    assert bool(report.lost_slots) == is_taken
    if not is_taken:
        engine.check_round_trip()


def test_copies_to_storage_are_dispatched():
    """They read host memory, which the pass has nothing to do with."""
    engine = StorageEngine()
    engine.fill()
    cascade, save = engine.cascade((1, 0), (2, 1)), engine.save([8, 9], [8, 9])
    engine.step_id += 1
    plan = StepPlan(step_id=engine.step_id, jobs=(save, cascade), next_job_id=engine.sent(save, cascade))
    engine.caches = engine.worker.begin_step(plan, engine.caches)
    engine.worker.abort_step(plan)
    assert engine.states() == {save.job_id: CANCELLED, cascade.job_id: FINISHED}


def test_a_plan_that_has_not_begun_or_is_stale_changes_nothing():
    engine = Engine("direct")
    save = engine.save([0, 1], [4, 5])
    plan = StepPlan(step_id=1, jobs=(save,), next_job_id=engine.sent(save))
    engine.worker.abort_step(plan)
    assert engine.states() == {}
    stale = dataclasses.replace(plan, cache_epochs=((0, 0),) * 3 + ((engine.worker.cache_epoch.incarnation, 7),))
    engine.caches = engine.worker.begin_step(stale, engine.caches)
    assert engine.states() == {save.job_id: CANCELLED}
    engine.worker.abort_step(stale)
    assert engine.states() == {}, "it has ended already"


def test_a_save_that_was_refused_before_the_pass_is_reported_once():
    engine = Engine("fused")
    wrong, save = engine.save([0, 1], [4, 10**6]), engine.save([2, 3], [6, 7])
    plan, _ = begin(engine, saves=[wrong, save])
    assert {result.job_id: result.state for result in engine.worker.poll().results} == {wrong.job_id: FAILED}
    engine.worker.abort_step(plan)
    assert engine.states() == {save.job_id: CANCELLED}
