"""Loads are written when their last program is dispatched, which is earlier than when they end."""

import pytest

from tests.worker.engine import (
    CANCELLED,
    FAILED,
    FINISHED,
    PATHS,
    Engine,
    broken,
    slow_down,
    split_path,
    wait_until_rebuilt,
)
from tpu_offload.types import StepPlan


def saved_engine(path="direct", **settings):
    engine = Engine(path, **settings)
    save = engine.save([0, 1, 2, 3], [4, 5, 6, 7])
    engine.step(saves=[save])
    engine.expect_saved(save)
    engine.states()
    return engine


@pytest.mark.parametrize("path", PATHS)
def test_a_load_is_written_once_and_no_later_than_it_ends(path):
    engine = saved_engine(path)
    load = engine.load([8, 9, 10, 11], [4, 5, 6, 7])
    engine.step(loads=[load])
    written = list(engine.worker.take_written_loads())
    assert (written == []) == (split_path(path)[1] == "staged")
    states = engine.states()
    written += engine.worker.take_written_loads()
    assert written == [load.job_id]
    assert states == {load.job_id: FINISHED}
    engine.expect_loaded(load)
    engine.check()


def test_an_engine_that_never_asks_leaves_nothing_behind():
    engine = saved_engine()
    for _ in range(20):
        engine.step(loads=[engine.load([8], [4])])
        engine.drain()
    assert len(engine.worker.take_written_loads()) == 1


def test_it_is_written_while_the_copy_goes_on():
    engine = saved_engine()
    load = engine.load([8], [4])
    engine.step(loads=[load])
    token = slow_down(engine)
    assert engine.worker.take_written_loads() == (load.job_id,)
    assert engine.worker.poll().results == ()
    token.ready = True
    assert [result.state for result in engine.worker.poll().results] == [FINISHED]
    assert engine.worker.take_written_loads() == ()


def test_a_load_of_several_segments_is_written_with_the_last():
    engine = saved_engine("staged")
    load = engine.load([8, 9, 10], [6, 7, 8])  # two segments
    engine.step(loads=[load])
    first, second = engine.flights
    arrived = second.waiting_on
    slow_down(engine, 1)
    first.waiting_on.block_until_ready()
    engine.step()
    assert engine.worker.take_written_loads() == ()
    second.waiting_on = arrived
    arrived.block_until_ready()
    engine.step()
    assert engine.worker.take_written_loads() == (load.job_id,)


def test_a_load_that_fails_is_never_written():
    engine = saved_engine()
    engine.loader.load = broken(RuntimeError("no"))
    engine.step(loads=[engine.load([8], [4])])
    assert engine.states() == {2: FAILED}
    assert engine.worker.take_written_loads() == ()


def test_a_load_that_is_taken_back_may_be_told_after_the_pass_that_uses_its_blocks():
    """An engine that dispatches its loads behind the pass does so; until then none of it is written."""
    engine = saved_engine("staged")
    load = engine.load([8], [4])
    engine.begin(load)
    engine.flights[0].waiting_on.block_until_ready()
    engine.worker.poll()
    engine.scribble()  # the pass uses its block
    engine.begin(cancel=[load.job_id])
    engine.end()
    assert engine.states() == {load.job_id: CANCELLED}
    assert engine.worker.take_written_loads() == ()
    engine.check()


def test_saves_are_never_written():
    engine = saved_engine()
    assert engine.worker.take_written_loads() == ()


def test_a_plan_from_before_a_loss_was_known_is_given_no_zeros():
    engine = saved_engine()
    engine.saver.save = broken(RuntimeError("the device is gone"), takes=engine.pool)
    engine.step(saves=[engine.save([9], [0])])
    del engine.saver.save
    wait_until_rebuilt(engine.pool, 0)
    engine.step(loads=[engine.load([8], [5])])
    results = engine.drain()
    assert "segment 0 of host_tier was lost, or never written: host block 5 is empty" in results[3].error
    engine.step(saves=[engine.save([1], [5])])
    engine.step(loads=[engine.load([8], [5])])
    assert set(engine.states().values()) == {FINISHED}


# HBM.


@pytest.mark.parametrize(
    ("path", "num_blocks"),
    [("direct", 2), ("staged", 7), ("staged saves, direct loads", 9), ("fused", 2)],
)
def test_hbm_is_the_staging_budget_where_it_is_used_and_the_temporaries(path, num_blocks):
    engine = Engine(path)
    assert engine.worker.hbm_nbytes == num_blocks * engine.spec.block_nbytes_per_device


def test_no_host_tier_takes_no_hbm():
    worker = Engine(num_cpu_chunks=0).worker
    assert worker.hbm_nbytes == 0
    assert not worker.has_flights
    assert worker.take_written_loads() == ()


def test_an_empty_plan_leaves_the_caches_as_they_are():
    engine = saved_engine()
    assert engine.worker.begin_step(StepPlan(step_id=99), engine.caches) is engine.caches
