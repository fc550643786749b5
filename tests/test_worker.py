"""The worker on real arrays: what it copies, when it says so, and that nothing that goes wrong gets out."""

import logging
import threading
import timeit

import jax
import numpy as np
import pytest

from tests.caches import random_array, random_caches
from tpu_offload.config import OffloadConfig
from tpu_offload.errors import LayoutError
from tpu_offload.kernels import Phase, reference
from tpu_offload.layout import KVLayout
from tpu_offload.memory import host_pool
from tpu_offload.types import Direction, JobState, StepPlan, TransferJob
from tpu_offload.worker import OffloadWorker

PATHS = ["direct", "staged"]
BLOCKS_PER_CHUNK = 2
NUM_CHUNKS = 10
CHUNKS_PER_SEGMENT = 4
NUM_HOST_BLOCKS = NUM_CHUNKS * BLOCKS_PER_CHUNK
IDLE = StepPlan(step_id=0)


class Clock:
    now = 0.0

    def __call__(self):
        self.now += 1.0
        return self.now


class Engine:
    """A worker with its caches, and numpy copies of what both should hold."""

    def __init__(self, path="direct", *, dtype="bfloat16", num_devices=1, wait=True, **settings):
        self.rng = np.random.default_rng(5)
        self.caches = random_caches(self.rng, dtype=dtype, num_devices=num_devices)
        self.layout = KVLayout.from_caches(self.caches, block_size=4)
        settings = {
            "num_staging_blocks": 6,
            "num_cpu_chunks": NUM_CHUNKS,
            "blocks_per_chunk": BLOCKS_PER_CHUNK,
            # Not a whole number of chunks: 4.5 of them.
            "host_segment_gb": 4.5 * BLOCKS_PER_CHUNK * self.layout.block_nbytes / 2**30,
            "copy_path": path,
            "skip_jax_precompile": True,
        } | settings
        self.clock = Clock()
        self.worker = OffloadWorker(
            OffloadConfig.create(**settings), self.layout, self.caches, worker_id=3, clock=self.clock, available=2**30
        )
        if wait and self.worker._pool:
            self.worker._pool.wait_until_allocated()
        self.step_id = 0
        self.next_job_id = 0
        self.expected = [reference.as_bytes(cache) for cache in self.caches]
        self.host = np.zeros((NUM_HOST_BLOCKS, len(self.caches), *self.expected[0].shape[1:]), np.uint8)

    def job(self, direction, block_ids, host_block_ids):
        self.next_job_id += 1
        return TransferJob(self.next_job_id, direction, 0, tuple(block_ids), tuple(host_block_ids))

    def save(self, block_ids, host_block_ids):
        return self.job(Direction.SAVE, block_ids, host_block_ids)

    def load(self, block_ids, host_block_ids):
        return self.job(Direction.LOAD, block_ids, host_block_ids)

    def begin(self, *loads, cancel=()):
        self.step_id += 1
        self.plan = StepPlan(self.step_id, loads=loads, cancelled_job_ids=tuple(cancel))
        self.caches = self.worker.begin_step(self.plan, self.caches)

    def end(self, *saves):
        self.worker.end_step(StepPlan(self.step_id, saves=saves), self.caches)

    def step(self, *, loads=(), saves=(), cancel=()):
        self.begin(*loads, cancel=cancel)
        self.end(*saves)

    def scribble(self):
        """What a forward pass does: new bytes in all caches, which donates them."""
        new = [random_array(self.rng, c.shape, c.dtype) for c in self.caches]
        write = jax.jit(lambda old, new: [jax.lax.dynamic_update_slice(o, n, (0,) * o.ndim) for o, n in zip(old, new)],
                        donate_argnums=0)  # fmt: skip
        self.caches = write(self.caches, new)
        self.expected = [reference.as_bytes(n) for n in new]

    def expect_saved(self, job):
        self.host = reference.save(self.host, self.expected, job.block_ids, job.host_block_ids)

    def expect_loaded(self, job):
        self.expected = reference.load(self.expected, self.host, job.block_ids, job.host_block_ids)

    def drain(self):
        """Steps until nothing is in flight; results by job id."""
        results = {}
        for _ in range(100):
            report = self.worker.poll(wait=True)
            assert report.worker_id == 3
            for result in report.results:
                assert result.job_id not in results
                results[result.job_id] = result
            if not self.worker._flights:
                return results
            self.step()
        raise AssertionError("the worker never comes to rest")

    def states(self):
        return {job_id: result.state for job_id, result in self.drain().items()}

    def check(self):
        segments = [reference.as_bytes(s) for s in self.worker._pool._segments]
        np.testing.assert_array_equal(np.concatenate(segments)[:NUM_HOST_BLOCKS], self.host)
        for cache, wanted in zip(self.caches, self.expected, strict=True):
            np.testing.assert_array_equal(reference.as_bytes(cache), wanted)


FINISHED, FAILED, CANCELLED = JobState.FINISHED, JobState.FAILED, JobState.CANCELLED


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
        engine.begin(load)
        engine.end(*saves)
        engine.expect_loaded(load)
        for save in saves:
            engine.expect_saved(save)
        if path == "direct":
            engine.scribble()  # a staged load may still be on its way, and its blocks are its own
        assert engine.states() == {job.job_id: FINISHED for job in jobs}
    engine.check()


def test_jobs_of_a_plan_share_a_dispatch(monkeypatch):
    engine = Engine()
    dispatched = []
    copier = engine.worker._copier
    monkeypatch.setattr(
        copier, "save", lambda segment_id, rows, caches: dispatched.append((segment_id, rows.jobs())) or real(segment_id, rows, caches)
    )  # fmt: skip
    real = type(copier).save.__get__(copier)
    engine.step(saves=[engine.save([0], [0]), engine.save([1, 2], [1, 8]), engine.save([3], [9])])
    assert dispatched == [(0, [1, 2]), (1, [2, 3])]
    assert engine.states() == {1: FINISHED, 2: FINISHED, 3: FINISHED}


def test_more_than_the_budget_in_one_plan_still_works():
    engine = Engine()
    saves = [engine.save(range(6), range(6)), engine.save(range(6, 12), range(10, 16))]
    engine.step(saves=saves)
    for save in saves:
        engine.expect_saved(save)
    assert set(engine.states().values()) == {FINISHED}
    engine.check()


def test_empty_job_finishes():
    engine = Engine()
    engine.step(saves=[engine.save([], [])])
    assert engine.states() == {1: FINISHED}


def test_report_counts_chunks_as_they_become_ready(monkeypatch):
    go_on = threading.Event()
    real = host_pool.pinned_zeros
    monkeypatch.setattr(host_pool, "pinned_zeros", lambda s: go_on.wait(10) and real(s))
    engine = Engine(wait=False)
    assert engine.worker.num_host_chunks == NUM_CHUNKS
    assert engine.worker.poll().num_host_chunks == 0
    engine.step(saves=[engine.save([0], [0])])
    (result,) = engine.worker.poll().results
    assert result.state is FAILED
    assert "host block ids 0 to 0" in result.error
    go_on.set()
    engine.worker._pool.wait_until_allocated()
    assert engine.worker.poll().num_host_chunks == NUM_CHUNKS
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
    assert engine.worker.poll(wait=True).num_host_chunks == 0
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


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_programs_are_compiled_at_start_unless_told_otherwise(path, skip):
    compiles = []

    def listen(event, duration_s, **kwargs):
        if event == "/jax/core/compile/backend_compile_duration":
            compiles.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        engine = Engine(path, skip_jax_precompile=skip)
        assert len(compiles) == (0 if skip else 2 if path == "direct" else 12)
        del compiles[:]
        for n in (1, 2, 5):
            engine.step(saves=[engine.save(range(n), range(n))])
            engine.step(loads=[engine.load(range(n), range(n))])
            engine.drain()
        assert len(compiles) == (0 if not skip else 2 if path == "direct" else 12)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


# Failures.


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("blocks", "places", "part"),
    [
        ([12], [0], "block ids 12 to 12: expected 0 to 11"),
        ([-1, 3], [0, 1], "block ids -1 to 3"),
        ([0], [NUM_HOST_BLOCKS], f"host block ids {NUM_HOST_BLOCKS} to {NUM_HOST_BLOCKS}: expected 0 to 19"),
        ([0], [-1], "host block ids -1 to -1"),
    ],
)
def test_ids_out_of_range_fail_alone(path, blocks, places, part):
    engine = Engine(path)
    bad, good = engine.save(blocks, places), engine.save([4], [5])
    bad_load, good_load = engine.load(blocks, places), engine.load([6], [2])
    engine.step(loads=[bad_load, good_load], saves=[bad, good])
    engine.expect_loaded(good_load)
    engine.expect_saved(good)
    results = engine.drain()
    for job in (bad, bad_load):
        assert results[job.job_id].state is FAILED
        assert part in results[job.job_id].error
    assert results[good.job_id].state is results[good_load.job_id].state is FINISHED
    engine.check()


def test_unknown_layer_group_fails():
    engine = Engine()
    engine.step(saves=[TransferJob(1, Direction.SAVE, 1, (0,), (0,))])
    assert "layer group 1" in engine.drain()[1].error


def broken(error, *, deletes=None):
    def program(*args):
        if deletes is not None:
            args[deletes].delete()
        raise error

    return program


def test_save_that_raises_fails_its_jobs_and_no_others(caplog):
    engine = Engine()
    good = engine.save([0], [0])
    engine.step(saves=[good])
    engine.expect_saved(good)
    engine.worker._copier._save = broken(jax.errors.JaxRuntimeError("INTERNAL: one\ntwo"))
    load = engine.load([9], [0])
    engine.step(saves=[engine.save([1], [1])], loads=[load])
    engine.expect_loaded(load)
    results = engine.drain()
    assert {i: r.state for i, r in results.items()} == {1: FINISHED, 2: FAILED, 3: FINISHED}
    assert results[2].error == "JaxRuntimeError: INTERNAL: one"
    del engine.worker._copier._save
    after = engine.save([1], [1])  # the segment was not donated, and goes on
    engine.step(saves=[after])
    engine.expect_saved(after)
    assert engine.states() == {4: FINISHED}
    engine.check()


def test_failed_save_that_took_the_segment_loses_it():
    engine = Engine()
    engine.worker._copier._save = broken(RuntimeError("the device is gone"), deletes=0)
    engine.step(saves=[engine.save([0], [0])])
    assert engine.states() == {1: FAILED}
    del engine.worker._copier._save
    engine.step(saves=[engine.save([1], [1]), engine.save([2], [8])], loads=[engine.load([3], [2])])
    results = engine.drain()
    assert {i: r.state for i, r in results.items()} == {2: FAILED, 3: FINISHED, 4: FAILED}
    assert "segment 0 was lost" in results[2].error
    assert "segment 0 was lost" in results[4].error


def test_load_that_raises_leaves_the_caches():
    engine = Engine()
    engine.worker._copier._load = broken(ValueError("no"))
    engine.step(loads=[engine.load([3], [2])])
    assert engine.drain()[1].error == "ValueError: no"
    engine.check()


def test_wrong_token_fails_the_job_and_the_segment():
    engine = Engine()
    real = engine.worker._copier._save
    engine.worker._copier._save = lambda *args: (real(*args)[0], jax.numpy.int32(1))
    engine.step(saves=[engine.save([0, 1], [0, 1])])
    result = engine.drain()[1]
    assert (result.state, result.error) == (FAILED, "TransferError: the device copied 1 of 2 blocks")


@pytest.mark.parametrize(("name", "direction"), [("gather", "save"), ("pick", "load")])
def test_staged_first_half_that_raises(name, direction):
    engine = Engine("staged")
    real = engine.worker._copier._program
    engine.worker._copier._program = lambda build, bucket: (
        broken(RuntimeError("halted")) if build.__name__ == name else real(build, bucket)
    )
    job = getattr(engine, direction)([0, 1, 2], [6, 7, 8])
    engine.step(**{f"{direction}s": [job]})
    assert engine.drain()[1].error == "RuntimeError: halted"
    engine.check()


@pytest.mark.parametrize(("name", "direction"), [("land", "save"), ("scatter", "load")])
def test_staged_second_half_that_raises(name, direction):
    engine = Engine("staged")
    real = engine.worker._copier._program
    engine.worker._copier._program = lambda build, bucket: (
        broken(RuntimeError("halted")) if build.__name__ == name else real(build, bucket)
    )
    job = getattr(engine, direction)([0, 1, 2], [6, 7, 8])
    engine.step(**{f"{direction}s": [job]})
    assert engine.drain()[1].error == "RuntimeError: halted"
    engine.check()


class Poisoned:
    """A token or a staging array whose computation failed on the device."""

    def is_ready(self):
        return True

    def copy_to_host_async(self):
        pass

    def block_until_ready(self):
        raise jax.errors.JaxRuntimeError("INTERNAL: core halted")

    def __array__(self, *args, **kwargs):
        raise jax.errors.JaxRuntimeError("INTERNAL: core halted")


def test_save_that_fails_on_the_device_loses_the_segment():
    engine = Engine()
    real = engine.worker._copier._save
    engine.worker._copier._save = lambda *args: (real(*args)[0], Poisoned())
    engine.step(saves=[engine.save([0], [0])])
    assert engine.drain()[1].error == "JaxRuntimeError: INTERNAL: core halted"
    engine.step(loads=[engine.load([0], [0])])
    assert "segment 0 was lost" in engine.drain()[2].error


@pytest.mark.parametrize("direction", ["save", "load"])
def test_staged_transfer_that_fails_on_the_device_spoils_nothing(direction):
    engine = Engine("staged")
    engine.step(**{f"{direction}s": [getattr(engine, direction)([0, 1], [0, 1])]})
    engine.worker._flights[0].waiting_on = Poisoned()
    assert engine.drain()[1].error == "JaxRuntimeError: INTERNAL: core halted"
    good = engine.save([2], [3])
    engine.step(saves=[good])
    engine.expect_saved(good)
    assert engine.states() == {2: FINISHED}
    engine.check()


# Asynchrony.


class Slow:
    """Stands for an array that is not ready until it is said to be."""

    def __init__(self, array):
        self.array, self.ready, self.blocked = array, False, 0

    def is_ready(self):
        return self.ready

    def block_until_ready(self):
        self.blocked += 1
        self.ready = True
        return self.array.block_until_ready()

    def __array__(self, *args, **kwargs):
        assert self.ready, "the worker waited for a token"
        return np.asarray(self.array)


def slow_down(engine, index=0):
    flight = engine.worker._flights[index]
    flight.waiting_on = Slow(flight.waiting_on)
    return flight.waiting_on


def test_poll_does_not_wait_for_a_token():
    engine = Engine()
    engine.step(saves=[engine.save([0], [0])])
    token = slow_down(engine)
    for _ in range(3):
        engine.step()
        assert engine.worker.poll().results == ()
    token.ready = True
    (result,) = engine.worker.poll().results
    assert (result.job_id, result.state, token.blocked) == (1, FINISHED, 0)
    assert result.duration_s == 1.0  # the clock ticks once a look
    assert engine.worker.poll().results == ()


def test_job_ends_with_its_last_part():
    engine = Engine()
    engine.step(saves=[engine.save([0, 1], [7, 8])])
    first, second = slow_down(engine, 0), slow_down(engine, 1)
    second.ready = True
    assert engine.worker.poll().results == ()
    first.ready = True
    assert [r.job_id for r in engine.worker.poll().results] == [1]


def test_failed_part_waits_for_the_others():
    """Or a late part would land in a slot that has a new owner."""
    engine = Engine()
    real, engine.worker._copier._save = engine.worker._copier._save, None
    calls = []

    def second_fails(*args):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("halted")
        return real(*args)

    engine.worker._copier._save = second_fails
    engine.step(saves=[engine.save([0, 1], [7, 8])])
    token = slow_down(engine)
    assert engine.worker.poll().results == ()
    token.ready = True
    (result,) = engine.worker.poll().results
    assert (result.state, result.error) == (FAILED, "RuntimeError: halted")


def test_waiting_poll_blocks_until_one_job_ends():
    engine = Engine()
    engine.step(saves=[engine.save([0], [0])])
    engine.step(saves=[engine.save([1], [1])])
    tokens = slow_down(engine, 0), slow_down(engine, 1)
    assert [r.job_id for r in engine.worker.poll(wait=True).results] == [1]
    assert tokens[1].blocked == 0
    assert [r.job_id for r in engine.worker.poll(wait=True).results] == [2]
    assert engine.worker.poll(wait=True).results == ()


def test_waiting_poll_returns_when_a_staged_load_needs_a_step():
    engine = Engine("staged")
    load = engine.load([0], [0])
    engine.begin(load)
    transit = slow_down(engine)
    assert engine.worker.poll(wait=True).results == ()
    assert transit.blocked == 1
    engine.worker._flights[0].waiting_on = transit.array
    engine.begin()
    engine.expect_loaded(load)
    assert engine.states() == {1: FINISHED}
    engine.check()


def test_waiting_poll_lands_staged_saves():
    engine = Engine("staged")
    save = engine.save([0, 1, 2], [7, 8, 9])
    engine.step(saves=[save])
    engine.expect_saved(save)
    assert [r.state for r in engine.worker.poll(wait=True).results] == [FINISHED]
    engine.check()


def test_staged_load_does_not_write_before_it_arrived():
    engine = Engine("staged")
    engine.begin(engine.load([0], [0]))
    transit = slow_down(engine)
    engine.step()
    engine.check()
    assert engine.worker._flights[0].phase is Phase.TRANSIT
    assert engine.worker.poll().results == ()
    assert transit.blocked == 0


# Cancelling.


def test_cancelled_staged_load_writes_nothing():
    engine = Engine("staged")
    engine.step(saves=[save := engine.save([0, 1, 2, 3], [0, 1, 2, 3])])
    engine.expect_saved(save)
    engine.drain()
    kept, gone = engine.load([6], [2]), engine.load([4, 5], [0, 1])
    engine.begin(kept, gone)
    engine.begin(cancel=[gone.job_id, 999])
    engine.expect_loaded(kept)
    assert engine.states() == {kept.job_id: FINISHED, gone.job_id: CANCELLED}
    engine.check()


def test_cancelled_load_holds_its_staging_until_it_arrived():
    engine = Engine("staged")
    engine.begin(engine.load([4], [0]))
    transit = slow_down(engine)
    engine.begin(cancel=[1])
    assert engine.worker.poll().results == ()
    transit.ready = True
    assert [r.state for r in engine.worker.poll().results] == [CANCELLED]
    engine.check()


def test_cancel_after_the_last_write_finishes():
    engine = Engine("staged")
    load = engine.load([4], [0])
    engine.begin(load)
    jax.block_until_ready(engine.worker._flights[0].waiting_on)
    engine.begin()
    assert engine.worker._flights[0].phase is Phase.COPYING
    engine.begin(cancel=[1])
    engine.expect_loaded(load)
    assert engine.states() == {1: FINISHED}
    engine.check()


def test_cancelled_direct_load_was_written_and_finishes():
    engine = Engine()
    load = engine.load([4], [0])
    engine.begin(load)
    engine.begin(cancel=[1])
    engine.expect_loaded(load)
    assert engine.states() == {1: FINISHED}
    engine.check()


def test_cancelling_a_save_changes_nothing():
    engine = Engine("staged")
    save = engine.save([0], [0])
    engine.step(saves=[save])
    engine.begin(cancel=[1])
    engine.expect_saved(save)
    assert engine.states() == {1: FINISHED}
    engine.check()


# Lockstep: hosts that share a model.


def test_in_lockstep_the_plan_decides_when_and_readiness_does_not():
    engine = Engine("staged")
    engine.worker._lockstep = True
    load, save = engine.load([4], [0]), engine.save([1], [1])
    engine.step(loads=[load], saves=[save])
    for index in (0, 1):
        array = engine.worker._flights[index].waiting_on
        assert array.is_ready() or True  # whatever it says
    engine.worker.poll()
    assert [f.phase for f in engine.worker._flights] == [Phase.TRANSIT, Phase.TRANSIT]
    engine.step()
    assert [f.phase for f in engine.worker._flights] == [Phase.COPYING, Phase.COPYING]
    engine.expect_loaded(load)
    engine.expect_saved(save)
    assert set(engine.states().values()) == {FINISHED}
    engine.check()


def test_idle_step_costs_microseconds():
    engine = Engine()
    engine.worker.poll()
    worker, caches = engine.worker, engine.caches

    def idle():
        worker.begin_step(IDLE, caches)
        worker.end_step(IDLE, caches)
        worker.poll()

    best = min(timeit.repeat(idle, number=1000, repeat=20)) / 1000
    assert best < 10e-6, f"{best * 1e6:.2f} us"  # about 1; the bound leaves room for a slow machine


def test_close_waits_and_frees(caplog):
    engine = Engine()
    engine.step(saves=[engine.save([0], [0])])
    token = slow_down(engine)
    with caplog.at_level(logging.WARNING):
        engine.worker.close()
        engine.worker.close()
    assert token.blocked == 1
    assert engine.worker._pool._segments == []
    assert not caplog.records
