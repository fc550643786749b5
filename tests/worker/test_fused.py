"""What the worker hands to a forward pass, what it takes back, and what becomes of a pass that never returns."""

import jax
import numpy as np
import pytest

from tests.caches import pointers
from tests.worker.engine import FAILED, FINISHED, NUM_HOST_BLOCKS, Engine, forward, slow_down
from tpu_offload.config import OffloadConfig
from tpu_offload.errors import ConfigError
from tpu_offload.memory import host_arena
from tpu_offload.types import StepPlan
from tpu_offload.worker import OffloadWorker


def begin(engine, *, loads=(), saves=(), fuse=True):
    engine.step_id += 1
    plan = StepPlan(step_id=engine.step_id, jobs=(*loads, *saves))
    engine.caches = engine.worker.begin_step(plan, engine.caches, fuse=fuse)
    return plan, engine.worker.fused_step()


def end(engine, plan, fused):
    engine.caches, outcome = forward(engine.caches, *fused)
    engine.worker.end_step(plan, engine.caches, outcome)
    return outcome


def ids(fused):
    inputs = fused.inputs
    return [np.asarray(i).tolist() for i in (inputs.save_block_ids, inputs.save_rows, inputs.load_block_ids)]


def test_whole_chunks_go_into_the_step_and_the_rest_around_it():
    engine = Engine("fused")
    # Three chunks: two in the step, for which it is compiled, and the third behind it, with half of a fourth.
    save = engine.save([0, 1, 2, 3, 4, 5, 6], [4, 5, 0, 1, 2, 3, 6])
    plan, fused = begin(engine, saves=[save])
    assert ids(fused) == [[[0, 1], [2, 3]], [4, 0], []]
    end(engine, plan, fused)
    engine.expect_saved(save)
    engine.scribble()
    assert engine.states() == {save.job_id: FINISHED}
    # The segment that is saved into is not read in the same step; one of another segment is.
    again, load, other = engine.save([0, 1], [2, 3]), engine.load([8, 9], [4, 5]), engine.load([10, 11], [8, 9])
    plan, fused = begin(engine, loads=[load, other], saves=[again])
    assert ids(fused) == [[[0, 1]], [2], [[10, 11]]]
    end(engine, plan, fused)
    for job in (load, other):
        engine.expect_loaded(job)
    engine.expect_saved(again)
    assert set(engine.states().values()) == {FINISHED}
    engine.check()


def test_a_run_never_crosses_chunks_and_half_a_chunk_is_no_run():
    engine = Engine("fused")
    for places in ([1, 2], [0], [3, 4, 6, 5], [1, 0]):
        _, fused = begin(engine, saves=[engine.save(range(len(places)), places)])
        assert fused.inputs is None
        engine.worker.end_step(StepPlan(step_id=engine.step_id), engine.caches)
    assert set(engine.states().values()) == {FINISHED}


def test_without_a_forward_pass_nothing_waits_for_one():
    engine = Engine("fused")
    save, load = engine.save([0, 1], [4, 5]), engine.load([8, 9], [4, 5])
    for jobs in ({"saves": [save]}, {"loads": [load]}):
        plan, fused = begin(engine, **jobs, fuse=False)
        assert fused.inputs is None
        engine.worker.end_step(plan, engine.caches)
    engine.expect_saved(save)
    engine.expect_loaded(load)
    assert set(engine.states().values()) == {FINISHED}
    engine.check()


def test_a_step_with_nothing_to_copy_is_the_step_of_an_engine_without_offloading():
    engine = Engine("fused")
    _, fused = begin(engine)
    assert fused == ((), None)
    assert jax.tree.structure(tuple(fused)) == jax.tree.structure(((), None))  # type: ignore[operator]


@pytest.mark.parametrize("then", ["end", "begin"])
def test_a_pass_that_does_not_return_fails_its_copies(then):
    """The segment was not donated yet: nothing is lost but the jobs."""
    engine = Engine("fused")
    save, load = engine.save([0, 1], [4, 5]), engine.load([8, 9], [8, 9])
    plan, _ = begin(engine, saves=[save], loads=[load])
    if then == "end":
        engine.worker.end_step(plan, engine.caches)
    else:
        begin(engine)
    report = engine.worker.poll(wait=True)
    results = {result.job_id: result for result in report.results}
    assert {job_id: result.state for job_id, result in results.items()} == {save.job_id: FAILED, load.job_id: FAILED}
    assert "the forward pass that was to copy it did not return" in results[save.job_id].error
    assert report.lost_slots == ()
    engine.check_round_trip()


def test_a_pass_that_fails_takes_the_segment_along():
    engine = Engine("fused")
    plan, fused = begin(engine, saves=[engine.save([0, 1], [4, 5])])
    for part in fused.segment:
        part.delete()
    engine.worker.end_step(plan, engine.caches)
    report = engine.worker.poll()
    assert [result.state for result in report.results] == [FAILED]
    assert report.lost_slots == ((0, 0, 4),)


def test_a_segment_that_is_lost_before_the_pass_costs_its_jobs_only(monkeypatch):
    """An earlier save fails on the device, and a `poll` finds out between planning the pass and running it."""
    # Allocated again by then, it would be used: the report of the loss has already failed the jobs.
    monkeypatch.setattr(host_arena, "_rebuild", lambda *args: None)
    engine = Engine("fused")
    load, save = engine.load([8, 9], [0, 1]), engine.save([0, 1, 2], [8, 9, 11])
    plan, fused = begin(engine, loads=[load], saves=[save])
    assert fused.inputs.num_saves == fused.inputs.num_loads == 1
    for part in engine.pool.segment(0):
        part.delete()
    engine.pool.mark_lost(0)
    fused = engine.worker.fused_step()
    assert fused.inputs is None
    engine.worker.end_step(plan, engine.caches)
    assert engine.states() == {load.job_id: FAILED, save.job_id: FAILED}  # the save's rest went its way


def test_nothing_is_fused_into_a_segment_that_is_lost(monkeypatch):
    monkeypatch.setattr(host_arena, "_rebuild", lambda *args: None)
    engine = Engine("fused")
    engine.pool.mark_lost(0)
    save = engine.save([0, 1], [4, 5])
    plan, fused = begin(engine, saves=[save])
    assert fused.inputs is None
    engine.worker.end_step(plan, engine.caches)
    assert engine.states() == {save.job_id: FAILED}


def test_nothing_is_fused_into_a_segment_with_a_save_that_may_yet_fail():
    """Its failure on the device would become that of the forward pass, and the engine dies of no cache."""
    engine = Engine("fused")
    first = engine.save([3], [0])  # half a chunk goes directly
    engine.step(saves=[first])
    token = slow_down(engine)
    save, load, other = engine.save([0, 1], [4, 5]), engine.load([8, 9], [6, 7]), engine.load([10, 11], [8, 9])
    plan, fused = begin(engine, saves=[save], loads=[load, other])
    assert ids(fused) == [[], [], [[10, 11]]]
    end(engine, plan, fused)
    token.ready = True
    assert set(engine.states().values()) == {FINISHED}


def test_impossible_saves_are_reported_once():
    engine = Engine("fused")
    save = engine.save([99, 98], [4, 5])
    engine.step(saves=[save])
    report = engine.worker.poll()
    assert [(result.job_id, result.state) for result in report.results] == [(save.job_id, FAILED)]


def test_the_segment_stays_in_place_and_in_pinned_memory():
    engine = Engine("fused")
    before = [pointers(part) for segment in engine.segments for part in segment]
    for _ in range(3):
        engine.step(saves=[engine.save([0, 1, 2, 3], [4, 5, 6, 7])], loads=[engine.load([8, 9], [8, 9])])
        engine.drain()
    assert engine.num_fused == 3
    parts = [part for segment in engine.segments for part in segment]
    assert [pointers(part) for part in parts] == before
    assert {part.sharding.memory_kind for part in parts} == {"pinned_host"}


def test_an_engine_can_compile_for_every_step_beforehand(compiles):
    """A long random run compiles nothing after that, and copies what it should."""
    engine = Engine("fused")
    programs = {}
    shapes = engine.worker.fused_shapes()
    assert len(shapes) == 3 * 3 - 2, "none for nothing, nor for more blocks than the staging budget has"
    for shape in shapes:
        programs[shape.inputs.num_saves, shape.inputs.num_loads] = forward.lower(engine.caches, *shape).compile()
    forward(engine.caches, (), None)  # donates the caches, so they are made anew
    engine = Engine("fused", skip_jax_precompile=False)
    del compiles[:]
    rng = np.random.default_rng(3)
    for _ in range(40):
        blocks, chunks = rng.permutation(12), rng.permutation(NUM_HOST_BLOCKS // 2)
        places = (chunks[:, None] * 2 + np.arange(2)).ravel()
        a, b = sorted(rng.integers(0, 13, 2))
        save, load = engine.save(blocks[:a], places[:a]), engine.load(blocks[a:b], places[a:b])
        plan, fused = begin(engine, saves=[save], loads=[load])
        outcome = None
        if fused.inputs is not None:
            program = programs[fused.inputs.num_saves, fused.inputs.num_loads]
            engine.caches, outcome = program(engine.caches, *fused)
        engine.worker.end_step(plan, engine.caches, outcome)
        engine.expect_loaded(load)
        engine.expect_saved(save)
        assert set(engine.states().values()) == {FINISHED}
    assert compiles == []
    engine.check()


def test_fused_is_refused_where_the_engine_does_not_offer_it():
    engine = Engine("direct")
    config = OffloadConfig.create(save_path="fused")
    with pytest.raises(ConfigError, match="TPU_OFFLOAD_SAVE_PATH=fused: this engine does not run the fused copies"):
        OffloadWorker(config, engine.layout, engine.caches)
