"""Whatever goes wrong in a copy ends as a failed result, and spoils nothing else."""

import contextlib
import time

import jax
import numpy as np
import pytest

from tests.inside.worker import staging_usage
from tests.jobs import copy_job
from tests.worker.engine import (
    CANCELLED,
    FAILED,
    FINISHED,
    NUM_HOST_BLOCKS,
    PATHS,
    Engine,
    Poisoned,
    Slow,
    Unpollable,
    broken,
    ending_with,
    split_path,
    wait_until_rebuilt,
)
from tpu_offload import OffloadConfig, OffloadWorker
from tpu_offload.errors import CachesLostError, ConfigError, TransferError
from tpu_offload.kernels import Flight, Phase
from tpu_offload.memory import host_arena
from tpu_offload.types import Direction, JobKind, StepPlan
from tpu_offload.worker.arrays import renew


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
    engine.step(saves=[copy_job(1, JobKind.SAVE, (0,), (0,), group_id=1)])
    assert "layer group 1" in engine.drain()[1].error


def test_save_that_raises_fails_its_jobs_and_no_others(caplog):
    engine = Engine()
    good = engine.save([0], [0])
    engine.step(saves=[good])
    engine.expect_saved(good)
    assert engine.states() == {1: FINISHED}
    engine.saver.save = broken(jax.errors.JaxRuntimeError("INTERNAL: one\ntwo"))
    load = engine.load([9], [0])
    engine.step(saves=[engine.save([1], [1])], loads=[load])
    engine.expect_loaded(load)
    results = engine.drain()
    assert {i: r.state for i, r in results.items()} == {2: FINISHED, 3: FAILED}
    assert results[3].error == "JaxRuntimeError: INTERNAL: one"
    del engine.saver.save
    after = engine.save([1], [1])  # the segment was not donated and is still usable
    engine.step(saves=[after])
    engine.expect_saved(after)
    assert engine.states() == {4: FINISHED}
    engine.check()


@pytest.fixture
def no_rebuild(monkeypatch):
    """A lost segment stays lost."""
    monkeypatch.setattr(host_arena, "_rebuild", lambda *args: None)


def test_failed_save_that_took_the_segment_loses_it(no_rebuild):
    engine = Engine()
    engine.saver.save = broken(RuntimeError("the device is gone"), takes=engine.pool)
    engine.step(saves=[engine.save([0], [0])])
    assert engine.states() == {1: FAILED}
    del engine.saver.save
    engine.step(saves=[engine.save([1], [1]), engine.save([2], [8])], loads=[engine.load([3], [2])])
    results = engine.drain()
    assert {i: r.state for i, r in results.items()} == {2: FAILED, 3: FINISHED, 4: FAILED}
    assert "host pool segment 0 was lost" in results[2].error
    assert "segment 0 of host_tier was lost" in results[4].error


def test_load_that_raises_leaves_the_caches():
    engine = Engine()
    engine.loader.load = broken(ValueError("no"))
    engine.step(loads=[engine.load([3], [2])])
    assert engine.drain()[1].error == "ValueError: no"
    engine.check()


def test_wrong_token_fails_the_job_and_the_segment(no_rebuild):
    engine = Engine()
    engine.saver.save = ending_with(engine.saver.save, jax.numpy.int32(1))
    engine.step(saves=[engine.save([0, 1], [0, 1])])
    result = engine.drain()[1]
    assert (result.state, result.error) == (FAILED, "TransferError: the device copied 1 of 2 blocks")
    del engine.saver.save
    engine.step(loads=[engine.load([0], [0])])
    assert "segment 0 of host_tier was lost" in engine.drain()[2].error


# The paths in which the tested direction is staged.
STAGED = [
    (path, direction)
    for path in PATHS
    for direction, its_path in zip(("save", "load"), split_path(path), strict=True)
    if its_path == "staged"
]


@pytest.mark.parametrize(("path", "direction"), STAGED)
@pytest.mark.parametrize("half", [0, 1])
def test_staged_program_that_raises(path, direction, half):
    engine = Engine(path)
    copier = engine.saver if direction == "save" else engine.loader
    setattr(copier, ("", "resume_")[half] + direction, broken(RuntimeError("halted")))
    job = getattr(engine, direction)([0, 1, 2], [6, 7, 8])
    engine.step(**{f"{direction}s": [job]})
    assert engine.drain()[1].error == "RuntimeError: halted"
    engine.check()


def test_a_lost_segment_is_reported_once_and_allocated_again():
    engine = Engine()
    engine.saver.save = broken(RuntimeError("the device is gone"), takes=engine.pool)
    engine.step(saves=[engine.save([0], [9])])
    del engine.saver.save
    report = engine.worker.poll()
    assert [r.state for r in report.results] == [FAILED]
    assert report.lost_slots == ((0, 4, 8),)  # slots of the segment, as the scheduler counts them
    wait_until_rebuilt(engine.pool, 1)
    engine.host[8:16] = 0
    again = engine.save([1], [9])
    engine.step(saves=[again])
    engine.expect_saved(again)
    assert engine.worker.poll(wait=True).lost_slots == ()
    engine.check()


def test_caches_that_a_failed_load_took_are_one_clear_error():
    engine = Engine()

    def takes_the_caches(segment_id, moves, kv_caches):
        kv_caches[0].delete()
        raise RuntimeError("halted")

    engine.loader.load = takes_the_caches
    with pytest.raises(TransferError, match=r"took the KV caches with it .*RuntimeError: halted.*new caches"):
        engine.begin(engine.load([3], [2]), engine.load([4, 5], [0, 9]))
    # All of them end, so that nothing is held for them for ever.
    assert [result.state for result in engine.worker.poll().results] == [FAILED, FAILED]


@pytest.mark.parametrize("path", ["direct", "fused", "staged saves, direct loads"])
def test_every_job_of_a_plan_has_its_end_when_the_caches_are_lost(path):
    """Those that had begun and those that had not; and the worker continues with new caches."""
    engine = Engine(path)
    engine.loader.load = broken(RuntimeError("halted"), takes="caches")
    loads = engine.load([3], [2]), engine.load([4, 5], [0, 9])
    saves = engine.save([6], [4]), engine.save([7], [5])
    plan = StepPlan(step_id=1, jobs=(*loads, *saves))
    with pytest.raises(CachesLostError):
        # Of the fused path only what does not fit into the pass is loaded by itself.
        engine.worker.begin_step(plan, engine.caches, fuse=path != "fused")
    report = engine.worker.poll()
    assert sorted(r.job_id for r in report.results) == [1, 2, 3, 4]
    ends = {r.job_id: r.state for r in report.results}
    assert {ends[job.job_id] for job in loads} == {FAILED}
    assert {ends[job.job_id] for job in saves} <= {FAILED, CANCELLED}
    assert CANCELLED in ends.values() or path == "fused", "what had not begun is cancelled, not failed"
    assert not engine.worker.has_flights
    other = Engine(path)
    other.worker.close()
    other.worker, other.step_id, other.num_jobs = engine.worker, 1, 4
    del engine.loader.load
    other.check_round_trip()


def test_save_that_fails_on_the_device_loses_the_segment(no_rebuild):
    engine = Engine()
    engine.saver.save = ending_with(engine.saver.save, Poisoned())
    engine.step(saves=[engine.save([0], [0])])
    assert engine.drain()[1].error == "JaxRuntimeError: INTERNAL: core halted"
    engine.step(loads=[engine.load([0], [0])])
    assert "segment 0 of host_tier was lost" in engine.drain()[2].error


@pytest.mark.parametrize(("path", "direction"), STAGED)
def test_staged_transfer_that_fails_on_the_device_spoils_nothing(path, direction):
    engine = Engine(path)
    engine.step(**{f"{direction}s": [getattr(engine, direction)([0, 1], [0, 1])]})
    engine.flights[0].waiting_on = Poisoned()
    assert engine.drain()[1].error == "JaxRuntimeError: INTERNAL: core halted"
    good = engine.save([2], [3])
    engine.step(saves=[good])
    engine.expect_saved(good)
    assert engine.states() == {2: FINISHED}
    engine.check()


def not_to_be_polled(engine, method, job_id):
    """Replaces what the flight of a job waits on once this method of its copier has dispatched a program."""
    copier = engine.saver if "save" in method else engine.loader
    real = getattr(copier, method)

    def dispatch(*args):
        result = real(*args)
        of_result = result if isinstance(result, tuple) else (result,)
        flight = next(found for found in (*of_result, *args) if isinstance(found, Flight))
        if job_id in flight.moves.job_ids:
            flight.waiting_on = Unpollable()  # type: ignore[assignment]
        return result

    setattr(copier, method, dispatch)


@pytest.mark.parametrize(
    ("path", "method"),
    [("direct", "save"), ("direct", "load"), *(("staged", m) for m in ("save", "resume_save", "load", "resume_load"))],
)
def test_an_array_that_raises_when_it_is_polled_fails_its_job_and_no_other(path, method):
    engine = Engine(path)
    first = engine.save([0, 1, 2, 3], [0, 1, 8, 9])
    engine.step(saves=[first])
    engine.expect_saved(first)
    engine.drain()
    direction = method.removeprefix("resume_")
    bad, good = (getattr(engine, direction)(*places) for places in (([4, 5], [8, 9]), ([6, 7], [0, 1])))
    not_to_be_polled(engine, method, bad.job_id)
    engine.step(**{f"{direction}s": [bad, good]})
    results = engine.drain()
    assert {job_id: result.state for job_id, result in results.items()} == {bad.job_id: FAILED, good.job_id: FINISHED}
    assert results[bad.job_id].error == "JaxRuntimeError: INTERNAL: core halted"
    assert not engine.flights
    assert staging_usage(engine.worker).room == 6, "its staging blocks are free"
    if direction == "save":
        engine.expect_saved(good)
    else:
        engine.expect_loaded(good)
    if (path, method) == ("direct", "save") or method == "resume_save":  # the program had the segment
        wait_until_rebuilt(engine.pool, 1)
        engine.host[8:16] = 0
    elif (path, method) == ("direct", "load") or method == "resume_load":  # here it has run all the same
        engine.expect_loaded(bad)
    engine.check()
    vars(engine.saver).pop(method, None)
    vars(engine.loader).pop(method, None)
    engine.check_round_trip()


def test_a_worker_closes_although_polling_raises(caplog):
    engine = Engine("staged")
    engine.step(saves=[engine.save([0], [0])], loads=[engine.load([1], [1])])
    for flight in engine.flights:
        flight.waiting_on = Unpollable()
    engine.worker.close()
    assert not caplog.messages


class Unusable:
    """The output of a program that has failed: it is not deleted, but every program that takes it fails."""

    def is_deleted(self):
        return False

    def __len__(self):
        return 2


@pytest.mark.parametrize("phase", Phase)
def test_the_host_staging_array_of_a_failed_load_is_not_used_again(phase):
    """The program that failed may have been the one that wrote it."""
    engine = Engine("staged")
    engine.begin(engine.load([4, 5], [0, 1]))
    if phase is Phase.COPYING:
        engine.flights[0].waiting_on.block_until_ready()
        engine.caches = engine.worker.resume_loads(engine.caches)
    (flight,) = engine.flights
    assert flight.phase is phase
    flight.waiting_on, flight.host_staging = Unpollable(), Unusable()
    assert engine.drain()[1].error == "JaxRuntimeError: INTERNAL: core halted"
    engine.expect_what_is_there()
    again = engine.load([6, 7], [2, 3])
    engine.step(loads=[again])
    engine.expect_loaded(again)
    assert engine.states() == {again.job_id: FINISHED}
    engine.check()


def fail_in_segment(engine, direction, bad_segment):
    """Dispatches in one direction raise for one segment only."""
    copier, name = engine.saver if direction is Direction.SAVE else engine.loader, direction.value
    real = getattr(copier, name)

    def maybe(segment_id, moves, kv_caches):
        if segment_id == bad_segment:
            raise RuntimeError("injected")
        return real(segment_id, moves, kv_caches)

    setattr(copier, name, maybe)


@pytest.mark.parametrize("path", ["direct", "staged"])
def test_a_job_over_two_segments_fails_in_one_of_them(path):
    engine = Engine(path)
    size = engine.spec.segment_blocks
    places = [0, size, 1, size + 1]
    engine.step(saves=[saved := engine.save([0, 1, 2, 3], places)])
    engine.expect_saved(saved)
    assert engine.states() == {saved.job_id: FINISHED}
    fail_in_segment(engine, Direction.LOAD, 1)
    fail_in_segment(engine, Direction.SAVE, 1)
    load, save = engine.load([8, 9, 10, 11], places), engine.save([4, 5], [2, size + 2])
    engine.step(loads=[load], saves=[save])
    results = engine.drain()
    assert results[load.job_id].state is results[save.job_id].state is FAILED
    assert results[load.job_id].failed_blocks == (1, 3)
    assert results[save.job_id].failed_blocks == (1,)
    engine.expect_loaded(engine.load([8, 10], [0, 1]))
    engine.expect_saved(engine.save([4], [2]))
    engine.check()


def test_reports_say_which_jobs_are_over_and_which_life_speaks():
    engine = Engine()
    before = time.time_ns()
    first, second = engine.save([0], [0]), engine.save([1], [1])
    engine.step(saves=[first, second])
    flight = engine.flights[0]
    done, flight.waiting_on = flight.waiting_on, Slow(flight.waiting_on)
    report = engine.worker.poll()
    assert [result.job_id for result in report.results] == [second.job_id]
    assert report.oldest_job_id == first.job_id
    flight.waiting_on = done
    report = engine.worker.poll(wait=True)
    assert [result.job_id for result in report.results] == [first.job_id]
    assert report.oldest_job_id == second.job_id + 1
    assert engine.worker.poll().oldest_job_id == second.job_id + 1, "should that report be lost"
    assert 0 < report.incarnation <= time.time_ns()
    assert Engine().worker.poll().incarnation > report.incarnation
    assert report.incarnation <= before


def test_a_worker_says_that_it_is_through_with_jobs_that_never_reached_it():
    engine = Engine()
    engine.worker.begin_step(StepPlan(step_id=1, next_job_id=7), engine.caches)
    assert engine.worker.poll().oldest_job_id == 7
    save = copy_job(9, JobKind.SAVE, (0,), (0,))
    plan = StepPlan(step_id=2, jobs=(save,), next_job_id=10)
    engine.caches = engine.worker.begin_step(plan, engine.caches)
    assert engine.worker.poll().oldest_job_id <= 9, "the save of this very plan has not begun"
    engine.worker.end_step(plan, engine.caches)
    assert engine.worker.poll(wait=True).results[0].job_id == 9
    assert engine.worker.poll().oldest_job_id == 10


@pytest.mark.parametrize("incarnation", [0, -1, 2**63, "1"])
def test_an_incarnation_that_schedulers_do_not_know_is_refused(incarnation):
    """To them 0 is a worker that has not reported yet: its restart would not be noticed."""
    engine = Engine()
    config = OffloadConfig.create(num_cpu_chunks=4, skip_jax_precompile=True)
    with pytest.raises(ConfigError, match=r"incarnation=.*; expected an integer from 1 on"):
        OffloadWorker(config, engine.layout, engine.caches, incarnation=incarnation)


@pytest.mark.parametrize("in_mesh", [False, True])
def test_new_caches_are_like_the_old_ones(in_mesh):
    """Also in the mesh that an engine has set, in which jax refuses programs of one device."""
    devices = jax.devices()
    mesh = jax.sharding.Mesh(np.array(devices), ("x",))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "x"))
    single = jax.sharding.SingleDeviceSharding(devices[0])
    old = [
        jax.device_put(np.full((6, 8 * len(devices), 4), 3, dtype), sharding)
        for dtype, sharding in ((np.int8, spread), (np.float32, single), (np.int8, spread))
    ]
    old[1].delete()
    shapes = [(cache.shape, cache.dtype, cache.sharding) for cache in old]
    with jax.set_mesh(mesh) if in_mesh else contextlib.nullcontext():
        new = renew(old)
    assert all(cache.is_deleted() for cache in old)
    assert [(cache.shape, cache.dtype, cache.sharding) for cache in new] == shapes
    assert all(not np.asarray(cache).any() for cache in new)


def test_a_new_worker_loads_nothing_from_memory_that_was_never_written():
    engine = Engine(wait=False)
    engine.worker.wait_until_allocated()
    load = engine.load([1], [0])
    engine.step(loads=[load])
    assert engine.worker.take_written_loads() == ()
    assert "never written: host block 0 is empty" in engine.drain()[load.job_id].error


def test_a_job_that_makes_no_sense_says_nothing_of_others():
    engine = Engine()
    bad = copy_job(10**9, JobKind.SAVE, (-1,), (0,))
    plan = StepPlan(step_id=0, jobs=(bad,), next_job_id=3)
    engine.caches = engine.worker.begin_step(plan, engine.caches)
    engine.worker.end_step(plan, engine.caches)
    report = engine.worker.poll()
    assert report.results[0].state is FAILED
    assert report.oldest_job_id == 3
