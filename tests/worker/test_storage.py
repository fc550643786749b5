"""The worker's half of storage, on real arrays: every bit through storage and back, faults, and that nothing waits."""

import dataclasses
import itertools
import pickle
import threading
import time

import jax
import numpy as np
import pytest

from tests.caches import random_caches
from tests.inside.worker import slot_pools, storage_calls, storage_copies, worker_storage, worker_storage_tier
from tests.jobs import key_of, storage_job
from tests.storage.memory_tier import FAULTY, NAME, MemoryTier
from tests.worker.engine import (
    BLOCKS_PER_CHUNK,
    FAILED,
    FINISHED,
    NUM_CHUNKS,
    PATHS,
    Engine,
    Poisoned,
    Unpollable,
    forward,
    make_landings_slow,
    wait_until_rebuilt,
)
from tpu_offload.config import OffloadConfig
from tpu_offload.errors import CompileError, ConfigError
from tpu_offload.kernels import DirectCopier, SlotCopier, reference
from tpu_offload.layout import KVLayout
from tpu_offload.memory import HostArena
from tpu_offload.storage import UndeletedError
from tpu_offload.types import CopyJob, JobKind, JobState, StepPlan
from tpu_offload.worker import OffloadWorker, swapping, tier_pools
from tpu_offload.worker.storage import record_io
from tpu_offload.worker.storage import stack as storage_stack

SIZE = BLOCKS_PER_CHUNK


class StorageEngine(Engine):
    """What `Engine` is, with a storage tier, and what that should hold."""

    def __init__(self, path="direct", *, tier=FAULTY, **settings):
        storage = {"storage_tier": tier, "num_storage_chunks": 32, "max_storage_gb_in_flight": 1.0}
        super().__init__(path, **(storage | settings))
        self.stored = {}

    @property
    def storage(self):
        return storage_copies(self.worker)

    @property
    def disk(self):
        return worker_storage_tier(self.worker)

    def move(self, kind, chunks, deleted=()):
        return storage_job(self.new_job_id(), kind, chunks, deleted=deleted)

    def cascade(self, *chunks):
        return self.move(JobKind.CASCADE, chunks)

    def delete(self, *names):
        return self.move(JobKind.DELETE, (), names)

    def clear(self):
        return self.move(JobKind.CLEAR, ())

    def demote(self, *chunks):
        return self.move(JobKind.DEMOTE, chunks)

    def promote(self, *chunks):
        return self.move(JobKind.PROMOTE, chunks)

    def expect_stored(self, job, *, but=()):
        for i, (key, slot) in enumerate(job.chunks):
            if i not in but:
                self.stored[key] = self.host[slot * SIZE : (slot + 1) * SIZE].copy()

    def expect_promoted(self, job, *, but=()):
        for i, (key, slot) in enumerate(job.chunks):
            if i not in but:
                self.host[slot * SIZE : (slot + 1) * SIZE] = self.stored[key]

    def fill(self, slots=range(4)):
        """Random bytes in some slots, by a save of all blocks that they need."""
        places = [slot * SIZE + j for slot in slots for j in range(SIZE)]
        save = self.save(list(range(len(places))), places)
        self.step(saves=[save])
        self.expect_saved(save)
        assert self.states() == {save.job_id: FINISHED}
        self.scribble()

    def wait_for(self, call):
        assert self.disk.began.wait(60), f"no {call} began"

    def done(self, job):
        """Its result, once it has ended."""
        return self.drain()[job.job_id]


@pytest.mark.parametrize("num_devices", [1, 8])
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e5m2"])
def test_every_bit_comes_back(dtype, num_devices):
    engine = StorageEngine(dtype=dtype, num_devices=num_devices, tier=NAME)
    assert len(engine.segments) == 3, "several segments"
    engine.fill(range(2, 6))  # over the end of one
    cascade = engine.cascade((1, 2), (2, 3), (3, 4), (4, 5))
    engine.step(saves=[cascade])
    engine.expect_stored(cascade)
    assert engine.done(cascade).state is FINISHED
    assert {len(value) for value in engine.disk.values.values()} == {engine.disk.spec.record_nbytes}
    assert engine.disk.spec.record_nbytes == 4096 + -(-SIZE * engine.layout.block_nbytes // 4096) * 4096
    engine.fill(range(2, 6))  # other bytes
    promote = engine.promote((4, 0), (1, 3), (3, NUM_CHUNKS - 1), (2, 2))
    engine.step(loads=[promote])
    engine.expect_promoted(promote)
    result = engine.done(promote)
    assert result.state is FINISHED
    assert 0 < result.copy_s <= result.duration_s, "until it was read, for the choice between load and recompute"
    engine.check()
    load = engine.load([0, 1], [0, 1])
    engine.step(loads=[load])
    engine.expect_loaded(load)
    assert engine.states() == {load.job_id: FINISHED}
    engine.check()
    engine.worker.close()


@pytest.mark.parametrize("path", PATHS)
def test_beside_every_copy_path(path):
    engine = StorageEngine(path)
    engine.fill([0, 1])
    cascade, save = engine.cascade((1, 0), (2, 1)), engine.save([0, 1, 2, 3], [0, 1, 2, 3])
    engine.expect_stored(cascade)
    engine.step(saves=[cascade])
    engine.step(saves=[save])  # into the very slots
    engine.expect_saved(save)
    assert set(engine.states().values()) == {FINISHED}
    promote, load = engine.promote((1, 4), (2, 5)), engine.load([4, 5], [0, 1])
    engine.step(loads=[promote, load])
    engine.expect_promoted(promote)
    engine.expect_loaded(load)
    assert engine.states() == {promote.job_id: FINISHED, load.job_id: FINISHED}
    engine.check()


def test_a_slot_is_read_in_program_order():
    """What is saved into it in the next step, and before storage has written anything, is not seen."""
    engine = StorageEngine()
    engine.fill([0])
    engine.disk.gates["write"] = gate = threading.Event()
    cascade = engine.cascade((1, 0))
    engine.step(saves=[cascade])
    engine.expect_stored(cascade)
    engine.wait_for("write")
    save = engine.save([5, 6], [0, 1])
    engine.step(saves=[save])
    engine.expect_saved(save)
    gate.set()
    assert engine.states() == {cascade.job_id: FINISHED, save.job_id: FINISHED}
    promote = engine.promote((1, 7))
    engine.step(loads=[promote])
    engine.expect_promoted(promote)
    assert engine.done(promote).state is FINISHED
    engine.check()


@pytest.mark.parametrize("path", PATHS)
def test_a_demotion_reads_slots_that_its_own_step_writes(path):
    """By a save, an early save and a promotion, and before storage has written anything."""
    engine = StorageEngine(path)
    engine.fill(range(4))
    cascade = engine.cascade((9, 3))
    engine.step(saves=[cascade])
    engine.expect_stored(cascade)
    assert engine.done(cascade).state is FINISHED
    engine.disk.gates["write"] = gate = threading.Event()
    demotion = engine.demote((1, 0), (2, 1), (3, 2))
    early = dataclasses.replace(engine.save([4, 5], [2, 3]), kind=JobKind.EARLY_SAVE)
    promote, save = engine.promote((9, 2)), engine.save([6, 7], [0, 1])
    engine.expect_stored(demotion)
    engine.expect_saved(early)
    engine.expect_promoted(promote)
    engine.step(loads=[demotion, early, promote], saves=[save])
    engine.expect_saved(save)
    gate.set()
    assert set(engine.states().values()) <= {FINISHED}
    back = engine.promote((1, 6), (2, 7), (3, 8))
    engine.step(loads=[back])
    engine.expect_promoted(back)
    assert engine.done(back).state is FINISHED
    engine.check()


def test_a_cascade_goes_after_the_saves_of_its_step():
    engine = StorageEngine()
    save, cascade = engine.save([0, 1], [0, 1]), engine.cascade((1, 0))
    engine.step(saves=[save, cascade])
    engine.expect_saved(save)
    engine.expect_stored(cascade)
    assert engine.states() == {save.job_id: FINISHED, cascade.job_id: FINISHED}
    promote = engine.promote((1, 3))
    engine.step(loads=[promote])
    engine.expect_promoted(promote)
    assert engine.done(promote).state is FINISHED
    engine.check()


@pytest.mark.parametrize("call", ["read", "write", "delete"])
def test_nothing_waits_for_storage(call):
    """Steps and polls go on, saves and loads end, while a call hangs in the tier; it ends when it ends."""
    engine = StorageEngine()
    engine.fill(range(3))
    cascade = engine.cascade((1, 0))
    engine.step(saves=[cascade])
    engine.expect_stored(cascade)
    assert engine.done(cascade).state is FINISHED
    engine.disk.gates[call] = gate = threading.Event()
    slow = {
        "read": lambda: engine.promote((1, 5)),
        "write": lambda: engine.cascade((2, 1)),
        "delete": lambda: engine.delete(1),
    }[call]()
    if call == "read":
        engine.step(loads=[slow])
    else:
        engine.step(saves=[slow])
    engine.wait_for(call)
    save, load = engine.save([0, 1], [4, 5]), engine.load([2, 3], [2, 3])
    engine.step(loads=[load], saves=[save])
    engine.expect_loaded(load)
    engine.expect_saved(save)
    results: dict[int, JobState] = {}
    while len(results) < 2:  # each of these would wait for ever if anything did
        results |= {result.job_id: result.state for result in engine.worker.poll(wait=True).results}
    assert results == {save.job_id: FINISHED, load.job_id: FINISHED}
    report = engine.worker.poll()
    assert report.storage_job_ids == (slow.job_id,), "it is in flight"
    assert report.oldest_job_id > max(save.job_id, load.job_id), "which says nothing of others"
    gate.set()
    assert engine.done(slow).state is FINISHED
    assert not engine.worker.has_flights
    assert engine.worker.poll(wait=True).results == (), "an idle worker does not wait"
    if call == "read":
        engine.expect_promoted(slow)
    engine.check()


def test_only_threads_of_its_own_call_the_tier():
    engine = StorageEngine()
    engine.fill([0])
    for job, is_load in ((engine.cascade((1, 0)), False), (engine.promote((1, 1)), True)):
        engine.step(**{"loads" if is_load else "saves": [job]})
        assert engine.done(job).state is FINISHED
    delete = engine.delete(1)
    engine.step(saves=[delete])
    assert engine.done(delete).state is FINISHED
    names = {name.split("-", 3)[2] for name in engine.disk.threads}
    assert names == {"read", "write"}
    assert all(name.startswith("tpu_offload-storage-") for name in engine.disk.threads)
    assert all(t.daemon for t in threading.enumerate() if t.name.startswith("tpu_offload-storage"))


def test_bytes_are_copied_by_io_threads_only(monkeypatch):
    """The dispatching thread would wait for a chunk's copy, both ways."""
    names = []
    for method in ("pack", "unpack"):
        copy = getattr(SlotCopier, method)

        def noted(self, *args, copy=copy):
            names.append((copy.__name__, threading.current_thread().name.split("-0:")[0]))
            return copy(self, *args)

        monkeypatch.setattr(SlotCopier, method, noted)
    engine = StorageEngine()
    engine.fill([0])
    for job, is_load in ((engine.cascade((1, 0)), False), (engine.promote((1, 1)), True)):
        engine.step(**{"loads" if is_load else "saves": [job]})
        assert engine.done(job).state is FINISHED
    assert names == [("pack", "tpu_offload-storage-write"), ("unpack", "tpu_offload-storage-read")]


def test_a_payload_that_cannot_be_made_fails_its_chunk_and_leaves_the_slot(monkeypatch):
    engine = StorageEngine()
    engine.fill([0, 1])
    cascade = engine.cascade((1, 0))
    engine.step(saves=[cascade])
    assert engine.done(cascade).state is FINISHED
    engine.expect_stored(cascade)
    with monkeypatch.context() as failing:
        failing.setattr(SlotCopier, "unpack", lambda *_: 1 / 0)
        job = engine.promote((1, 1))
        engine.step(loads=[job])
        assert engine.done(job).state is FAILED
    engine.check()


def test_the_path_through_hbm_has_every_bit():
    engine = StorageEngine(storage_copy_path="hbm")
    engine.fill([0, 1])
    cascade = engine.cascade((1, 0), (2, 1))
    engine.step(saves=[cascade])
    assert engine.done(cascade).state is FINISHED
    engine.expect_stored(cascade)
    promote = engine.promote((1, 3), (2, 2))
    engine.step(loads=[promote])
    assert engine.done(promote).state is FINISHED
    engine.expect_promoted(promote)
    engine.check()


def test_what_is_deleted_cannot_be_read():
    engine = StorageEngine()
    engine.fill([0, 1])
    cascade = engine.cascade((1, 0), (2, 1))
    engine.step(saves=[cascade])
    engine.expect_stored(cascade)
    assert engine.done(cascade).state is FINISHED
    delete, cascade = engine.delete(1, 7), engine.cascade((3, 0))
    engine.step(saves=[delete, cascade])
    assert set(engine.states().values()) == {FINISHED}
    assert set(engine.disk.values) == {key_of(2), key_of(3)}
    promote = engine.promote((1, 5), (2, 6))
    engine.step(loads=[promote])
    engine.expect_promoted(promote, but=[0])
    result = engine.done(promote)
    assert (result.state, result.failed_blocks, result.missing_chunks) == (FINISHED, (), (0,))
    engine.check()


def test_a_key_is_deleted_before_it_is_written_again():
    engine = StorageEngine()
    engine.fill([0])
    for _ in range(20):
        engine.step(saves=[engine.delete(1), engine.cascade((1, 0))])
        assert set(engine.states().values()) == {FINISHED}
        assert key_of(1) in engine.disk.values


class WithoutTextError(Exception):
    def __str__(self):
        raise RuntimeError("no text")


@pytest.mark.parametrize("error", [OSError("disk"), RuntimeError(""), SystemExit(1), WithoutTextError()])
@pytest.mark.parametrize("call", ["read", "write", "delete"])
def test_a_call_that_raises_fails_its_chunks_and_no_others(call, error):
    engine = StorageEngine()
    engine.fill(range(4))
    first = engine.cascade((1, 0), (2, 1))
    engine.step(saves=[first])
    engine.expect_stored(first)
    assert engine.done(first).state is FINISHED
    engine.disk.failing, engine.disk.error = {call}, error
    before = engine.host.copy()
    jobs = {
        "read": engine.promote((1, 5), (2, 6)),
        "delete": engine.delete(2, 5),
        "write": engine.cascade((3, 2), (4, 3)),
    }
    engine.step(loads=[jobs["read"]] if call == "read" else [], saves=[jobs["delete"], jobs["write"]])
    results = engine.drain()
    result = results.pop(jobs[call].job_id)
    assert (result.state, result.failed_blocks) == (FAILED, ())
    assert {other.state for other in results.values()} == {FINISHED}
    assert type(error).__name__ in result.error
    np.testing.assert_array_equal(engine.host_bytes(), before)
    engine.disk.failing = set()
    again = engine.promote((1, 5))  # the thread goes on
    engine.step(loads=[again])
    engine.expect_promoted(again)
    assert engine.done(again).state is FINISHED
    engine.check()


def test_what_a_deletion_leaves_has_failed_and_no_more():
    """The keys are divided among threads, and each thread has several."""
    engine = StorageEngine()
    engine.disk.kept = {key_of(1), key_of(4)}
    delete = engine.delete(*range(100))
    engine.step(saves=[delete])
    result = engine.done(delete)
    assert (result.state, result.failed_blocks) == (FAILED, (1, 4))
    assert result.error == "2 of 100: UndeletedError: held"
    engine.disk.kept = set()
    delete = engine.delete(1, 4)
    engine.step(saves=[delete])
    assert engine.done(delete).state is FINISHED


@pytest.mark.parametrize("named", [(), [key_of(9)]])
def test_a_deletion_that_names_no_key_of_its_call_has_failed_as_a_whole(named):
    engine = StorageEngine()
    engine.disk.failing, engine.disk.error = {"delete"}, UndeletedError("held", named)
    delete = engine.delete(1, 2)
    engine.step(saves=[delete])
    result = engine.done(delete)
    assert (result.state, result.failed_blocks) == (FAILED, ())


@pytest.mark.parametrize("damage", ["one bit", "short", "another chunk"])
def test_other_bytes_than_were_written_never_reach_the_host_tier(damage):
    engine = StorageEngine()
    engine.fill(range(2))
    cascade = engine.cascade((1, 0), (2, 1))
    engine.step(saves=[cascade])
    engine.expect_stored(cascade)
    assert engine.done(cascade).state is FINISHED
    before = engine.host.copy()
    engine.disk.damage = damage
    promote = engine.promote((1, 5))
    engine.step(loads=[promote])
    result = engine.done(promote)
    assert result.state is FAILED
    assert result.error.startswith("RecordError: storage returned a record w")
    np.testing.assert_array_equal(engine.host_bytes(), before)


def test_bytes_that_are_verified_are_not_changed_any_more(caplog):
    """A tier that goes on writing after it has said that it is done, as a client may whose request was late."""
    engine = StorageEngine(tier=f"{__name__}:Keeping")
    engine.fill(range(2))
    cascade = engine.cascade((1, 0), (2, 1))
    engine.step(saves=[cascade])
    engine.expect_stored(cascade)
    assert engine.done(cascade).state is FINISHED
    promote = engine.promote((1, 5))
    engine.step(loads=[promote])
    engine.expect_promoted(promote)
    assert engine.done(promote).state is FINISHED
    with pytest.raises(ValueError, match="released memoryview"):
        engine.disk.kept[-1][:] = bytes(len(engine.disk.values[key_of(1)]))
    engine.disk.exports = True
    promote = engine.promote((2, 6))
    engine.step(loads=[promote])
    result = engine.done(promote)
    assert (result.state, "read() has kept its record" in result.error) == (FAILED, True)
    engine.check()


class Keeping(MemoryTier):
    """Keeps the views that it was given, or buffers of them, as a client in C may."""

    def __init__(self, spec):
        super().__init__(spec)
        self.kept = []
        self.exports = False

    def read(self, key, record):
        super().read(key, record)
        self.kept.append(pickle.PickleBuffer(record) if self.exports else record)


def test_a_failed_write_may_leave_the_record_of_before():
    """The same chunk, written by an earlier job: the key says what it is."""
    engine = StorageEngine()
    engine.fill(range(2))
    cascade = engine.cascade((1, 0))
    engine.step(saves=[cascade])
    engine.expect_stored(cascade)
    assert engine.done(cascade).state is FINISHED
    engine.disk.failing = {"write"}
    again = engine.cascade((1, 1))
    engine.step(saves=[again])
    assert engine.done(again).state is FAILED
    promote = engine.promote((1, 5))
    engine.step(loads=[promote])
    engine.expect_promoted(promote)
    assert engine.done(promote).state is FINISHED
    engine.check()


def test_more_than_may_be_in_flight_fails():
    engine = StorageEngine(max_storage_gb_in_flight=1e-9)
    engine.fill(range(3))
    engine.disk.gates["write"] = gate = threading.Event()
    cascade = engine.cascade((1, 0), (2, 1), (3, 2))
    engine.step(saves=[cascade])
    assert not engine.storage.is_landing
    gate.set()
    result = engine.done(cascade)
    assert (result.state, result.failed_blocks) == (FAILED, (2,))
    assert "more than 2 records" in result.error
    again = engine.cascade((3, 2), (1, 0))
    engine.step(saves=[again])
    assert engine.done(again).state is FINISHED, "and they have room again"


def test_a_slot_in_which_nothing_is_is_not_written():
    engine = StorageEngine()
    engine.fill([0])
    engine.memory.lost[0, 2:4] = True
    cascade = engine.cascade((1, 0), (2, 1))
    engine.step(saves=[cascade])
    result = engine.done(cascade)
    assert (result.state, result.failed_blocks) == (FAILED, (1,))
    assert "slot 1 was lost, or never written" in result.error


def test_a_promotion_makes_its_slot_readable():
    engine = StorageEngine()
    engine.fill([0])
    cascade = engine.cascade((1, 0))
    engine.step(saves=[cascade])
    engine.expect_stored(cascade)
    assert engine.done(cascade).state is FINISHED
    engine.memory.lost[:] = True  # as in a worker that has just been made
    promote = engine.promote((1, 3))
    engine.step(loads=[promote])
    engine.expect_promoted(promote)
    assert engine.done(promote).state is FINISHED
    assert engine.memory.lost[0].tolist() == [not 6 <= place < 8 for place in range(len(engine.memory.lost[0]))]
    load = engine.load([8, 9], [6, 7])
    engine.step(loads=[load])
    engine.expect_loaded(load)
    assert engine.states() == {load.job_id: FINISHED}
    engine.check()


@pytest.mark.parametrize("when", ["at dispatch", "on the device", "as it is polled"])
def test_a_write_that_takes_the_segment_along_is_a_failure_and_a_loss(when):
    engine = StorageEngine()
    engine.fill(range(2))
    cascade = engine.cascade((1, 0))
    engine.step(saves=[cascade])
    engine.expect_stored(cascade)
    assert engine.done(cascade).state is FINISHED
    (copier,) = slot_pools(engine.worker)[0].copiers
    real = copier.write
    if when == "at dispatch":

        def take(segment_id, first, payload):
            for part in engine.pool.segment(segment_id):
                part.delete()
            raise RuntimeError("device")

        copier.write = take
    else:
        token = Poisoned() if when == "on the device" else Unpollable()
        copier.write = lambda *args: real(*args) and token  # type: ignore[assignment]
    promote = engine.promote((1, 1))
    engine.step(loads=[promote])
    results: dict[int, JobState] = {}
    lost: list[tuple[int, int, int]] = []
    while engine.worker.has_flights:
        report = engine.worker.poll(wait=True)
        results |= {result.job_id: result.state for result in report.results}
        lost += report.lost_slots
    assert results == {promote.job_id: FAILED}
    assert lost == [(0, 0, 4)]
    copier.write = real
    wait_until_rebuilt(engine.pool, 0)
    again = engine.promote((1, 1))
    engine.step(loads=[again])
    assert engine.done(again).state is FINISHED
    np.testing.assert_array_equal(engine.host_bytes()[2:4], engine.stored[key_of(1)])


def fused_engine():
    """One chunk in storage, and saves inside the forward pass."""
    engine = StorageEngine("fused")
    engine.fill(range(4))
    cascade = engine.cascade((1, 0))
    engine.step(saves=[cascade])
    engine.expect_stored(cascade)
    assert engine.done(cascade).state is FINISHED
    return engine


def test_no_segment_goes_into_the_forward_pass_while_a_promotion_is_written(monkeypatch):
    engine = fused_engine()
    promote = engine.promote((1, 3))
    slow = make_landings_slow(engine, monkeypatch)
    engine.step(loads=[promote])
    while not engine.storage.is_landing:
        engine.worker.poll()
    num_fused = engine.num_fused
    save = engine.save([4, 5, 6, 7], [0, 1, 2, 3])
    engine.step(saves=[save])
    engine.expect_saved(save)
    assert engine.num_fused == num_fused, "the save went by another path"
    for token in slow:
        token.ready = True
    engine.expect_promoted(promote)
    assert set(engine.states().values()) == {FINISHED}
    engine.check()


def test_no_promotion_is_written_while_the_forward_pass_has_a_segment(monkeypatch):
    engine = fused_engine()
    engine.step_id += 1
    promote = engine.promote((1, 3))
    save = engine.save([4, 5, 6, 7], [0, 1, 2, 3])
    plan = StepPlan(step_id=engine.step_id, jobs=(promote, save))
    engine.caches = engine.worker.begin_step(plan, engine.caches, fuse=True)
    fused = engine.worker.fused_step()
    assert fused.inputs is not None
    while not storage_calls(engine.storage).done:
        time.sleep(0.001)
    looks, collect = itertools.count(), engine.worker._collect
    monkeypatch.setattr(engine.worker, "_collect", lambda: (next(looks), collect()))
    engine.worker.poll(wait=True)
    assert next(looks) < 5, "it spins until the pass is back"
    assert storage_calls(engine.storage).done, "read, and left for later"
    engine.caches, outcome = forward(engine.caches, *fused)
    engine.worker.end_step(plan, engine.caches, outcome)
    engine.expect_saved(save)
    engine.expect_promoted(promote)
    assert set(engine.states().values()) == {FINISHED}
    engine.check()


BAD = [
    ("CASCADE", {"chunks": ((key_of(1), NUM_CHUNKS),)}, "slots"),
    ("CASCADE", {"chunks": ((key_of(1), -1),)}, "slots"),
    ("PROMOTE", {"chunks": ((key_of(1), 0), (key_of(2), 0))}, "twice"),
    ("PROMOTE", {"chunks": ((key_of(1), 0), (key_of(1), 1))}, "twice"),
    ("PROMOTE", {"chunks": (("text", 0),)}, "not bytes"),
    ("PROMOTE", {"chunks": ((b"", 0),)}, "not bytes"),
    ("PROMOTE", {"chunks": [(key_of(1), 0)]}, "not tuples"),
    ("CASCADE", {"chunks": (key_of(1),)}, "not a pair"),
    ("DELETE", {"deleted_keys": (5,)}, "not bytes"),
    ("DELETE", {}, "keys to delete are ()"),
    ("DELETE", {"deleted_keys": (key_of(1),), "chunks": ((key_of(1), 0),)}, "a deletion has chunks"),
    ("CLEAR", {"chunks": ((key_of(1), 0),)}, "a clearing has chunks"),
    ("CLEAR", {"deleted_keys": (key_of(1),)}, "some of a deletion only"),
    ("CASCADE", {"deleted_keys": (key_of(1),)}, "some of a deletion only"),
    ("CASCADE", {"parts": ("part",)}, "parts"),
]


@pytest.mark.parametrize(("kind", "fields", "error"), BAD)
def test_a_job_that_makes_no_sense_fails_alone(kind, fields, error):
    engine = StorageEngine()
    engine.fill([0])
    bad = dataclasses.replace(engine.cascade(), kind=JobKind[kind], **fields)
    good = engine.cascade((1, 0))
    engine.step(
        loads=[bad] if bad.kind is JobKind.PROMOTE else [], saves=[good] if bad.kind is JobKind.PROMOTE else [bad, good]
    )
    results = engine.drain()
    assert results[bad.job_id].state is FAILED
    assert error in results[bad.job_id].error
    assert results[good.job_id].state is FINISHED


def test_an_empty_job_finishes():
    engine = StorageEngine()
    promote, cascade = engine.promote(), engine.cascade()
    engine.step(loads=[promote], saves=[cascade])
    assert engine.states() == {promote.job_id: FINISHED, cascade.job_id: FINISHED}


def test_a_worker_without_storage_refuses():
    engine = Engine()
    promote = CopyJob(job_id=1, kind=JobKind.PROMOTE, chunks=((key_of(1), 0),))
    cascade = CopyJob(job_id=2, kind=JobKind.CASCADE, chunks=((key_of(1), 0),))
    engine.step(loads=[promote], saves=[cascade])
    results = engine.drain()
    assert [result.state for result in results.values()] == [FAILED, FAILED]
    assert {result.error for result in results.values()} == {"this worker has no storage tier"}


def test_a_plan_in_one_piece_is_done_once_and_acknowledged():
    """The engine gives the whole plan to both calls; no job of it is known to be over before its cascade is."""
    engine = StorageEngine()
    engine.fill([0])
    engine.disk.gates["write"] = gate = threading.Event()
    cascade = engine.cascade((1, 0))
    plan = StepPlan(step_id=99, jobs=(cascade,), next_job_id=cascade.job_id + 1)
    engine.caches = engine.worker.begin_step(plan, engine.caches)
    assert engine.worker.poll().oldest_job_id <= cascade.job_id
    engine.worker.end_step(plan, engine.caches)
    engine.worker.end_step(plan, engine.caches)
    engine.wait_for("write")
    report = engine.worker.poll()
    assert (report.oldest_job_id, report.storage_job_ids) == (cascade.job_id + 1, (cascade.job_id,))
    gate.set()
    (result,) = engine.worker.poll(wait=True).results
    assert result.state is FINISHED
    report = engine.worker.poll()
    assert (report.oldest_job_id, report.storage_job_ids) == (cascade.job_id + 1, ())


def test_lost_caches_cancel_the_cascade_that_has_not_begun_and_no_other():
    engine = StorageEngine()
    engine.fill([0, 1])
    begun = engine.cascade((1, 0))
    engine.step(saves=[begun])
    cascade = engine.cascade((2, 1))
    plan = StepPlan(step_id=99, jobs=(cascade,), next_job_id=cascade.job_id + 1)
    engine.caches = engine.worker.begin_step(plan, engine.caches)
    engine.worker.mark_caches_lost()
    results: dict[int, str] = {}
    while engine.worker.has_flights or len(results) < 2:
        results |= {result.job_id: result.state.value for result in engine.worker.poll(wait=True).results}
    assert results == {begun.job_id: "finished", cascade.job_id: "cancelled"}


# --- start and end ------------------------------------------------------------------------------


def test_programs_are_compiled_at_the_start(compiles):
    engine = StorageEngine(skip_jax_precompile=False)
    engine.fill([0])
    del compiles[:]
    cascade = engine.cascade((1, 0))
    engine.step(saves=[cascade])
    assert engine.done(cascade).state is FINISHED
    promote = engine.promote((1, 1))
    engine.step(loads=[promote])
    assert engine.done(promote).state is FINISHED
    assert compiles == []


def test_the_tier_is_told_what_it_is_for():
    engine = StorageEngine(storage_options="/mnt/disk")
    spec = engine.disk.spec
    assert (spec.num_chunks, spec.worker_id, spec.options) == (32, 3, "/mnt/disk")
    same, other = StorageEngine().disk.spec, StorageEngine(num_devices=8).disk.spec
    assert same.fingerprint == spec.fingerprint
    assert other.fingerprint != spec.fingerprint, "its shards lie otherwise"
    assert other.record_nbytes == spec.record_nbytes


def test_buffers_are_aligned():
    for alignment in (4096, 2**21):
        for nbytes in (1, 4096, 100_001):
            buffer = record_io.aligned(nbytes, alignment)
            assert (len(buffer), buffer.ctypes.data % alignment) == (nbytes, 0)


def test_what_is_written_begins_at_a_huge_page():
    engine = StorageEngine()
    starts, write = [], engine.disk.write

    def watch(key, record):
        starts.append(np.frombuffer(record, np.uint8).ctypes.data)
        write(key, record)

    engine.disk.write = watch
    engine.fill([0])
    cascade = engine.cascade((1, 0))
    engine.step(saves=[cascade])
    assert engine.done(cascade).state is FINISHED
    assert [start % 2**21 for start in starts] == [0]


def test_a_tier_that_is_not_there_ends_the_start():
    with pytest.raises(ConfigError, match=r"^TPU_OFFLOAD_STORAGE_TIER=nowhere: there is no storage tier"):
        StorageEngine(tier="nowhere")


def test_a_worker_that_is_refused_frees_its_host_memory(monkeypatch):
    """Whoever keeps the error, to log it or to try again, keeps the worker's memory, which would go on growing."""
    closed, close = [], HostArena.close

    def close_and_note(arena):
        closed.append(arena)
        close(arena)

    monkeypatch.setattr(HostArena, "close", close_and_note)
    with pytest.raises(ConfigError, match="there is no storage tier"):
        StorageEngine(tier="nowhere")
    assert len(closed) == 1
    with pytest.raises(ConfigError, match="there is no storage tier"):
        StorageEngine(tier="nowhere", swap_gb=1e-3)
    assert len(closed) == 3

    def refuse(*args, **kwargs):
        raise CompileError("injected")

    monkeypatch.setattr(DirectCopier, "compile", refuse)
    with pytest.raises(CompileError, match="injected"):
        StorageEngine(skip_jax_precompile=False)
    assert len(closed) == 4
    monkeypatch.setattr(tier_pools, "make_copiers", refuse)
    with pytest.raises(CompileError, match="injected"):
        StorageEngine()
    assert len(closed) == 5
    monkeypatch.undo()
    monkeypatch.setattr(HostArena, "close", close_and_note)
    monkeypatch.setattr(swapping, "DirectCopier", refuse)
    with pytest.raises(CompileError, match="injected"):
        StorageEngine(swap_gb=1e-3)
    assert len(closed) == 7


def test_no_tier_is_made_without_host_memory():
    caches = Engine().caches
    layout = KVLayout.from_caches(caches, block_size=4)
    config = OffloadConfig.create(storage_tier=NAME, num_storage_chunks=1, skip_jax_precompile=True)
    worker = OffloadWorker(config, layout, caches, available=1)
    assert worker_storage(worker) is None
    assert not worker.has_flights
    worker.close()


def io_threads():
    """Of all workers: those of earlier tests may end at any time, when they are garbage-collected."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("tpu_offload-storage")}


def test_close_ends_threads_and_tier():
    before = io_threads()
    engine = StorageEngine(tier=NAME)
    own = io_threads() - before
    assert len(own) == 6
    engine.fill([0])
    engine.step(saves=[engine.cascade((1, 0))])
    disk = engine.disk
    engine.worker.close()
    assert not own & io_threads()
    assert disk.num_closed == 1
    engine.worker.close()
    assert disk.num_closed == 1, "a second call does nothing"


def test_a_close_that_is_interrupted_can_be_repeated(monkeypatch):
    """As by Ctrl-C while it waits for a thread, after the storage tier was closed."""
    before = io_threads()
    engine = StorageEngine(tier=NAME)
    engine.fill([0])
    disk, own_threads = engine.disk, io_threads() - before
    closes = []

    def close(own, real=tier_pools.TierPools.close):
        closes.append(own)
        if len(closes) == 1:
            raise KeyboardInterrupt
        real(own)

    monkeypatch.setattr(tier_pools.TierPools, "close", close)
    with pytest.raises(KeyboardInterrupt):
        engine.worker.close()
    engine.worker.close()
    engine.worker.close()
    assert len(closes) == 2, "the pool is freed by the second call, and the third does nothing"
    assert disk.num_closed == 1
    assert not own_threads & io_threads()


@pytest.mark.parametrize("failing", [set(), {"close"}])
def test_close_does_not_wait_for_a_tier_that_hangs(failing, caplog, monkeypatch):
    monkeypatch.setattr(storage_stack, "_CLOSE_S", 0.05)
    engine = StorageEngine(job_timeout_s=0.1)
    engine.fill([0])
    engine.disk.gates["write"] = gate = threading.Event()
    engine.disk.failing = failing
    disk = engine.disk
    cascade = engine.cascade((1, 0))
    engine.step(saves=[cascade])
    engine.wait_for("write")
    if failing:  # nothing hangs, but it fails to close
        gate.set()
        assert engine.done(cascade).state is FINISHED
    engine.worker.close()
    assert ("storage tier 0:tests.storage.memory_tier:FaultyTier does not respond" in caplog.text) != bool(failing)
    assert ("failed to close: OSError: injected" in caplog.text) == bool(failing)
    assert disk.num_closed == 0
    gate.set()


def test_close_does_not_wait_for_a_tier_whose_close_hangs(caplog, monkeypatch):
    monkeypatch.setattr(storage_stack, "_END_S", 0.05)
    engine = StorageEngine()
    engine.disk.gates["close"] = gate = threading.Event()
    disk = engine.disk
    engine.worker.close()
    assert disk.num_closed == 0
    assert "FaultyTier does not respond: its close() has not ended, and was abandoned" in caplog.text
    (closing,) = [thread for thread in io_threads() if thread.name == "tpu_offload-storage-close"]
    gate.set()
    closing.join(30)
    assert disk.num_closed == 1


def test_a_worker_that_is_never_closed_ends_its_threads():
    import gc

    before = io_threads()
    engine = StorageEngine(tier=NAME)
    own = io_threads() - before
    assert len(own) == 6
    del engine
    gc.collect()
    for thread in own:
        thread.join(30)
        assert not thread.is_alive()


def test_hbm_is_counted():
    with_storage, without = StorageEngine().worker.hbm_nbytes, Engine().worker.hbm_nbytes
    assert with_storage - without == Engine().layout.block_nbytes_per_device


def test_reference_reads_bytes_as_they_are():
    """What the comparisons above stand on: a bit that differs is seen."""
    engine = StorageEngine(tier=NAME)
    engine.fill([0])
    host = engine.host_bytes()
    host.flat[0] ^= 1
    with pytest.raises(AssertionError):
        np.testing.assert_array_equal(host, engine.host)
    assert reference.as_bytes(jax.numpy.zeros(2)).dtype == np.uint8


@pytest.mark.parametrize("seed", range(4))
def test_at_random(seed):
    """Jobs of all kinds, several at a time, over slots and keys; storage fails now and then."""
    engine = StorageEngine(num_storage_chunks=64)
    rng = np.random.default_rng(seed)
    engine.fill(range(6))
    for name in range(6):  # every slot holds something
        cascade = engine.cascade((name, name))
        engine.step(saves=[cascade])
        engine.expect_stored(cascade)
        assert engine.done(cascade).state is FINISHED
    for _ in range(15):
        slots, names = rng.permutation(NUM_CHUNKS).tolist(), rng.permutation(6).tolist()
        engine.disk.failing = {"read"} if rng.random() < 0.2 else set()
        promote = engine.promote(*zip(names[:2], slots[:2], strict=True))
        save = engine.save([0, 1], [slots[2] * SIZE, slots[2] * SIZE + 1])
        cascade = engine.cascade((names[2], slots[3]), (names[3], slots[2]))
        engine.step(loads=[promote], saves=[save, cascade])
        engine.expect_saved(save)
        engine.expect_stored(cascade)
        results = engine.drain()
        assert results[cascade.job_id].state is FINISHED
        assert results[promote.job_id].state is (FAILED if engine.disk.failing else FINISHED)
        if not engine.disk.failing:
            engine.expect_promoted(promote)
        engine.check()
        engine.scribble()


def test_storage_is_cleared_after_all_earlier_writes_and_before_all_later_ones():
    """Keys 1 and 2 belong to different threads; the clear waits for both, and both wait for it."""
    engine = StorageEngine()
    engine.fill(range(4))
    engine.disk.gates["write"] = gate = threading.Event()
    before = engine.cascade((1, 0), (2, 1))
    clear = engine.clear()
    after = engine.cascade((3, 2), (4, 3))
    engine.step(saves=[before, clear, after])
    engine.expect_stored(before)
    engine.expect_stored(after)
    engine.wait_for("write")
    gate.set()
    results = engine.drain()
    assert [results[job.job_id].state for job in (before, clear, after)] == [FINISHED] * 3
    assert set(engine.disk.values) == {key_of(3), key_of(4)}


def test_a_clear_that_fails_is_reported():
    engine = StorageEngine()
    engine.disk.failing = {"clear"}
    clear = engine.clear()
    engine.step(saves=[clear])
    result = engine.done(clear)
    assert (result.state, result.failed_blocks, result.error) == (FAILED, (), "OSError: injected")


def test_close_ends_threads_that_wait_for_a_clear():
    before = io_threads()
    engine = StorageEngine(job_timeout_s=0.1)
    own = io_threads() - before
    engine.fill([0])
    engine.disk.gates["clear"] = gate = threading.Event()
    engine.step(saves=[engine.clear()])
    engine.wait_for("clear")
    engine.worker.close()
    gate.set()
    for thread in own:
        thread.join(30)
        assert not thread.is_alive()


def test_a_worker_without_memory_for_a_host_tier_does_not_say_that_storage_is_empty():
    """The other hosts would delete what they have."""
    caches = random_caches(np.random.default_rng(0))
    layout = KVLayout.from_caches(caches, block_size=4)
    config = OffloadConfig.create(
        num_staging_blocks=4, num_cpu_chunks=4, storage_tier=NAME, num_storage_chunks=8, host_memory_fraction=0.5
    )
    worker = OffloadWorker(config, layout, caches, available=layout.block_nbytes)
    assert worker.num_host_chunks == 0
    assert worker.poll().setup.stored_keys == (None,)
    worker.close()


def test_the_first_reports_list_what_is_stored():
    engine = StorageEngine(tier=NAME)
    assert engine.worker.poll().setup.stored_keys == ((),)
    tier = f"{__name__}:Listing"
    engine = StorageEngine(tier=tier)
    assert engine.worker.poll().setup.stored_keys == ((key_of(1), key_of(2)),)
    StorageEngine(tier=f"{__name__}:LargestGeneration")
    for name, says in (
        ("Unlistable", r"what 0:.*:Unlistable has stored cannot be listed \(OSError: Input/output"),
        ("Misnaming", r"stored_keys\(\) of 0:.*:Misnaming has 'a name', a str; expected bytes, 1 to 256 of them"),
        ("OtherGeneration", r"0:.*:OtherGeneration has generation='b'; expected an integer from 0 to 2\*\*64 - 1"),
        ("HugeGeneration", r"0:.*:HugeGeneration has generation=18446744073709551616; expected"),
        ("NoGeneration", r"0:.*:NoGeneration has no generation \(OSError: no answer"),
    ):
        with pytest.raises(ConfigError, match=rf"^TPU_OFFLOAD_STORAGE_TIER: {says}"):
            StorageEngine(tier=f"{__name__}:{name}")


class Listing(MemoryTier):
    def stored_keys(self):
        return [key_of(1), key_of(2)]


class Unlistable(MemoryTier):
    def stored_keys(self):
        raise OSError("Input/output error")


class Misnaming(MemoryTier):
    def stored_keys(self):
        return [key_of(1), "a name"]


class OtherGeneration(MemoryTier):
    generation = "b"  # type: ignore[assignment]


class HugeGeneration(MemoryTier):
    generation = 2**64


class LargestGeneration(MemoryTier):
    generation = 2**64 - 1


class NoGeneration(MemoryTier):
    @property
    def generation(self):  # type: ignore[override]
        raise OSError("no answer")
