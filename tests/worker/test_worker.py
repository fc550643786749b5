"""The worker on real arrays: what it copies, what it compiles and what it reports."""

import logging
import threading
from typing import Any

import jax
import numpy as np
import pytest

from tests.caches import random_caches
from tests.worker.engine import (
    FAILED,
    FINISHED,
    IDLE,
    NUM_CHUNKS,
    NUM_HOST_BLOCKS,
    PATHS,
    Engine,
    slow_down,
    split_path,
)
from tpu_offload.config import OffloadConfig
from tpu_offload.errors import ConfigError, LayoutError
from tpu_offload.layout import KVLayout
from tpu_offload.memory import host_arena
from tpu_offload.types import Direction
from tpu_offload.worker import OffloadWorker


@pytest.mark.parametrize("num_devices", [1, 8])
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e5m2"])
@pytest.mark.parametrize("path", PATHS)
def test_round_trip(path, dtype, num_devices):
    engine = Engine(path, dtype=dtype, num_devices=num_devices)
    save = engine.save([3, 0, 7], [6, 7, 8])  # over the end of a segment
    engine.step(saves=[save])
    engine.expect_saved(save)
    engine.scribble()
    assert engine.states() == {1: FINISHED}
    engine.check()
    load = engine.load([11, 2, 5], [7, 8, 6])
    engine.step(loads=[load])
    engine.expect_loaded(load)
    assert engine.states() == {2: FINISHED}
    engine.check()


@pytest.mark.parametrize("path", PATHS)
def test_random_plans(path):
    """Steps of saves and loads with writes between, as a scheduler would order them."""
    engine = Engine(path)
    rng = np.random.default_rng(11)
    for _ in range(25):
        blocks = rng.permutation(12)
        places = rng.permutation(NUM_HOST_BLOCKS)
        cut = sorted(rng.integers(0, 7, 3))
        jobs = [
            engine.job(direction, blocks[a:b].tolist(), places[a:b].tolist())
            for direction, a, b in zip(
                (Direction.LOAD, Direction.SAVE, Direction.SAVE), [0, *cut[:2]], cut, strict=True
            )
        ]
        load, *saves = jobs
        engine.step(loads=[load], saves=saves)
        engine.expect_loaded(load)
        for save in saves:
            engine.expect_saved(save)
        if engine.load_path != "staged":
            engine.scribble()  # a staged load may still be in flight; its blocks are not scribbled on
        assert engine.states() == {job.job_id: FINISHED for job in jobs}
    engine.check()


def test_loads_of_a_plan_share_a_dispatch(monkeypatch):
    engine = Engine()
    dispatched = []
    copier = engine.loader
    real = copier.load

    def record(segment_id, moves, caches):
        dispatched.append((segment_id, moves.jobs()))
        return real(segment_id, moves, caches)

    monkeypatch.setattr(copier, "load", record)
    engine.step(loads=[engine.load([0], [0]), engine.load([1, 2], [1, 8]), engine.load([3], [9])])
    assert dispatched == [(0, [1, 2]), (1, [2, 3])]
    assert engine.states() == {1: FINISHED, 2: FINISHED, 3: FINISHED}


def test_saves_of_a_plan_fail_apart():
    """A plan has more than one save only where one has failed before."""
    engine = Engine()
    real = engine.saver.save

    def one_bad_block(segment_id, moves, kv_caches):
        if 7 in moves.block_ids:
            raise RuntimeError("bad block")
        return real(segment_id, moves, kv_caches)

    engine.saver.save = one_bad_block
    bad, good = engine.save([7], [0]), engine.save([1], [1])
    engine.step(saves=[bad, good])
    assert engine.states() == {bad.job_id: FAILED, good.job_id: FINISHED}


def test_more_than_the_budget_in_one_plan_still_works():
    engine = Engine()
    saves = [engine.save(range(6), range(6)), engine.save(range(6, 12), range(10, 16))]
    engine.step(saves=saves)
    for save in saves:
        engine.expect_saved(save)
    assert set(engine.states().values()) == {FINISHED}
    engine.check()


@pytest.mark.parametrize("path", [path for path in PATHS if "fused" not in path])  # see test_fused.py
def test_a_long_random_run_compiles_nothing(path, compiles):
    """Jobs of every size, in any mix, over segments and past the budget, run from what was compiled at the start."""
    engine = Engine(path, skip_jax_precompile=False)
    del compiles[:]
    rng = np.random.default_rng(4)
    for _ in range(60):
        blocks, places = rng.permutation(12), rng.permutation(NUM_HOST_BLOCKS)
        if rng.random() < 0.5:  # whole chunks
            places = (rng.permutation(NUM_CHUNKS)[:, None] * 2 + np.arange(2)).ravel()
        a, b, c = sorted(rng.integers(0, 13, 3))
        loads = [engine.load(blocks[:a].tolist(), places[:a].tolist())]
        saves = [engine.save(blocks[a:b].tolist(), places[a:b].tolist()), engine.save(blocks[b:c], places[b:c])]
        engine.step(loads=loads, saves=saves)
        assert engine.states() == {job.job_id: FINISHED for job in (*loads, *saves)}
    assert compiles == []


def test_empty_job_finishes():
    engine = Engine()
    engine.step(saves=[engine.save([], [])])
    assert engine.states() == {1: FINISHED}


def test_report_counts_chunks_as_they_become_ready(monkeypatch):
    go_on = threading.Event()
    real = host_arena.pinned_zeros
    monkeypatch.setattr(host_arena, "pinned_zeros", lambda s: go_on.wait(10) and real(s))
    engine = Engine(wait=False)
    assert engine.worker.num_host_chunks == NUM_CHUNKS
    assert engine.worker.poll().num_host_slots == (0,)
    engine.step(saves=[engine.save([0], [0])])
    (result,) = engine.worker.poll().results
    assert result.state is FAILED
    assert "host block ids 0 to 0" in result.error
    go_on.set()
    engine.pool.wait_until_allocated()
    assert engine.worker.poll().num_host_slots == (NUM_CHUNKS,)
    engine.worker.close()


def test_capacity_is_capped_by_memory(caplog):
    caches = random_caches(np.random.default_rng(0))
    layout = KVLayout.from_caches(caches, block_size=4)
    config = OffloadConfig.create(num_staging_blocks=4, num_cpu_chunks=100, host_memory_fraction=0.5)
    worker = OffloadWorker(config, layout, caches, available=10 * layout.block_nbytes)
    assert worker.num_host_chunks == 5
    assert "from 100 to 5 chunks" in caplog.text
    worker.close()
    assert OffloadWorker(config, layout, caches, available=layout.block_nbytes).num_host_chunks == 0


@pytest.mark.parametrize("setting", ["num_cpu_chunks", "num_staging_blocks"])
def test_offloading_that_is_off_does_nothing(setting):
    engine = Engine(**{setting: 0})
    threads = threading.active_count()
    assert engine.worker.num_host_chunks == 0
    caches = engine.caches
    assert engine.worker.begin_step(IDLE, caches) is caches
    engine.worker.end_step(IDLE, caches)
    assert engine.worker.poll(wait=True).num_host_slots == (0,)
    engine.step(saves=[engine.save([0], [0])])
    (result,) = engine.worker.poll().results
    assert (result.state, "offloading is off" in result.error) == (FAILED, True)
    assert threading.active_count() == threads
    engine.worker.close()


def test_caches_of_another_layout_are_refused():
    engine = Engine()
    other = random_caches(engine.rng, dtype="float32")
    with pytest.raises(LayoutError, match="float32"):
        OffloadWorker(OffloadConfig.create(), engine.layout, other)


def test_other_arguments_are_refused_in_one_line():
    engine, config = Engine(), OffloadConfig.create()
    other: Any = None
    with pytest.raises(ConfigError, match="got a NoneType; expected the OffloadConfig"):
        OffloadWorker(other, engine.layout, engine.caches)
    with pytest.raises(ConfigError, match="got a NoneType; expected the KVLayout"):
        OffloadWorker(config, other, engine.caches)
    with pytest.raises(LayoutError, match="KV caches are a NoneType; expected a list with one array per layer"):
        OffloadWorker(config, engine.layout, other)


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("path", [path for path in PATHS if "fused" not in path])
def test_programs_are_compiled_at_start_unless_told_otherwise(path, skip, compiles):
    # A direction takes one program where it is direct, and two for each of three buckets where it is staged.
    num_programs = sum({"direct": 1, "staged": 6}[p] for p in split_path(path))
    engine = Engine(path, skip_jax_precompile=skip)
    assert len(compiles) == (0 if skip else num_programs)
    del compiles[:]
    for n in (1, 2, 5):
        engine.step(saves=[engine.save(range(n), range(n))])
        engine.step(loads=[engine.load(range(n), range(n))])
        engine.drain()
    assert len(compiles) == (num_programs if skip else 0)


@pytest.mark.parametrize("path", PATHS)
def test_an_idle_step_does_nothing(path):
    """What it costs is measured by benchmarks/bench_dispatch.py."""
    engine = Engine(path)
    engine.worker.poll()  # reports the size of the host pool
    report = engine.worker.poll()
    assert engine.worker.begin_step(IDLE, engine.caches, fuse=True) is engine.caches
    engine.worker.end_step(IDLE, engine.caches)
    assert engine.worker.poll() is report, "nothing new, and yet a report was built"


def test_close_waits_and_frees(caplog):
    engine = Engine()
    engine.step(saves=[engine.save([0], [0])])
    token = slow_down(engine, ready_after=9)
    with caplog.at_level(logging.WARNING):
        engine.worker.close()
        engine.worker.close()
    assert token.ready
    assert engine.pool.num_chunks_ready == 0
    assert not caplog.records


@pytest.mark.parametrize("path", PATHS)
def test_meshes_with_explicit_axes(path):
    """What `jax.make_mesh` makes by default."""
    mesh = jax.make_mesh((8,), ("model",), axis_types=(jax.sharding.AxisType.Explicit,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, None, "model"))
    engine = Engine(path, num_devices=8)
    engine.caches = [jax.device_put(reference_bytes, sharding) for reference_bytes in map(np.asarray, engine.caches)]
    config = OffloadConfig.create(
        save_path=engine.save_path,
        load_path=engine.load_path,
        num_staging_blocks=6,
        num_cpu_chunks=10,
        blocks_per_chunk=2,
    )
    engine.worker = OffloadWorker(config, engine.layout, engine.caches, worker_id=3, fused=True)
    engine.pool.wait_until_allocated()
    engine.check_round_trip()


@pytest.mark.parametrize("path", PATHS)
def test_x64_changes_nothing(path):
    jax.config.update("jax_enable_x64", True)
    try:
        Engine(path).check_round_trip()
    finally:
        jax.config.update("jax_enable_x64", False)


def test_caches_may_come_in_a_tuple():
    engine = Engine()
    save, load = engine.save([0], [4]), engine.load([7], [4])
    engine.caches = tuple(engine.caches)
    engine.step(saves=[save])
    engine.expect_saved(save)
    engine.caches = tuple(engine.caches)
    engine.step(loads=[load])
    engine.expect_loaded(load)
    assert engine.states() == {save.job_id: FINISHED, load.job_id: FINISHED}
    engine.check()


@pytest.mark.parametrize("path", PATHS)
def test_a_job_sent_twice_is_done_once(path, caplog):
    engine = Engine(path)
    save = engine.save([0], [4])
    engine.step(saves=[save])
    engine.expect_saved(save)
    engine.step(saves=[save])
    assert engine.states() == {save.job_id: FINISHED}
    assert "job 1 is in flight already" in caplog.text
    engine.check()
