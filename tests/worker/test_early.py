"""Early saves on real arrays: what leaves its blocks is read before anything is written there."""

import pytest

from tests.jobs import as_early
from tests.worker.engine import FAILED, FINISHED, PATHS, Engine, broken, forward
from tpu_offload import CachesLostError, StepPlan


@pytest.mark.parametrize("path", PATHS)
def test_an_early_save_reads_before_a_load_and_the_step_overwrite(path):
    """Blocks change hands: what leaves them, a load into them in the same plan, and a forward pass into others."""
    engine = Engine(path)
    first = engine.save([0, 1, 2, 3], [4, 5, 6, 7])
    engine.step(saves=[first])
    engine.expect_saved(first)
    assert engine.states() == {first.job_id: FINISHED}
    engine.scribble()
    early = as_early(engine.save([5, 6], [8, 9]))  # by now they hold something else
    load = engine.load([5, 6, 7, 8], [4, 5, 6, 7])
    late = engine.save([9, 10], [10, 11])
    engine.step_id += 1
    plan = StepPlan(step_id=engine.step_id, jobs=(early, load, late), next_job_id=late.job_id + 1)
    engine.caches = engine.worker.begin_step(plan, engine.caches, fuse="fused" in path)
    engine.expect_saved(early)
    engine.expect_loaded(load)
    outcome = None
    if "fused" in path:
        engine.caches, outcome = forward(engine.caches, *engine.worker.fused_step())
    engine.worker.end_step(plan, engine.caches, outcome)
    engine.expect_saved(late)
    assert engine.states() == dict.fromkeys((early.job_id, load.job_id, late.job_id), FINISHED)
    engine.check()


def test_early_saves_that_cannot_be_fail_and_are_answered():
    engine = Engine()
    bad, good = as_early(engine.save([99], [0])), as_early(engine.save([1], [2]))
    plan = StepPlan(step_id=1, jobs=(bad, good), next_job_id=good.job_id + 1)
    engine.caches = engine.worker.begin_step(plan, engine.caches)
    engine.worker.end_step(plan, engine.caches)
    engine.expect_saved(good)
    assert engine.states() == {bad.job_id: FAILED, good.job_id: FINISHED}
    assert engine.worker.poll().oldest_job_id == good.job_id + 1
    engine.check()


def test_a_load_that_takes_the_caches_along_leaves_early_saves_answered():
    engine = Engine()
    first = engine.save([0, 1], [0, 1])
    engine.step(saves=[first])
    engine.expect_saved(first)
    assert engine.states() == {first.job_id: FINISHED}
    early, load = as_early(engine.save([2, 3], [2, 3])), engine.load([2, 3], [0, 1])
    plan = StepPlan(step_id=2, jobs=(early, load), next_job_id=load.job_id + 1)
    engine.loader.load = broken(RuntimeError("halted"), takes="caches")
    with pytest.raises(CachesLostError):
        engine.worker.begin_step(plan, engine.caches)
    engine.expect_saved(early)
    results = {result.job_id: result.state for result in engine.worker.poll(wait=True).results}
    while engine.worker.has_flights:
        results |= {result.job_id: result.state for result in engine.worker.poll(wait=True).results}
    assert results == {early.job_id: FINISHED, load.job_id: FAILED}


def test_without_a_host_tier_an_early_save_is_refused():
    engine = Engine(wait=False, num_cpu_chunks=0, swap_gb=0.001)
    early = as_early(engine.save([2, 3], [2, 3]))
    plan = StepPlan(step_id=1, jobs=(early,), next_job_id=early.job_id + 1)
    engine.caches = engine.worker.begin_step(plan, engine.caches)
    engine.worker.end_step(plan, engine.caches)
    (result,) = engine.worker.poll().results
    assert (result.state, result.error) == (FAILED, "offloading is off on this worker: it has no host pool")
