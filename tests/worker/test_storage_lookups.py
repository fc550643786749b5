"""The worker's half of lookups in a shared tier: answers, faults, and that nothing waits for them or they for it."""

import threading

import pytest

from tests.jobs import key_of
from tests.storage.memory_tier import NAME, SHARED, SharedTier
from tests.worker.engine import FAILED, FINISHED, Engine
from tests.worker.test_storage import StorageEngine, io_threads
from tpu_offload.types import CopyJob, JobKind, JobState
from tpu_offload.worker.storage import lookups as storage_lookups
from tpu_offload.worker.storage import stack as storage_stack


@pytest.fixture(autouse=True)
def servers(monkeypatch):
    monkeypatch.setattr(SharedTier, "servers", {})


class SharedEngine(StorageEngine):
    """Chunks 1 to 4 are stored."""

    def __init__(self, **settings):
        super().__init__(tier=SHARED, **settings)
        self.fill(range(4))
        cascade = self.cascade((1, 0), (2, 1), (3, 2), (4, 3))
        self.step(saves=[cascade])
        self.expect_stored(cascade)
        assert self.done(cascade).state is FINISHED
        self.disk.began.clear()
        self.disk.threads.clear()

    def look_up(self, *prefixes):
        keys = tuple(tuple(key_of(name) for name in prefix) for prefix in prefixes)
        return CopyJob(job_id=self.new_job_id(), kind=JobKind.LOOKUP, prefixes=keys)


def test_each_prefix_is_answered_by_its_leading_chunks():
    engine = SharedEngine()
    job = engine.look_up((1, 2, 3, 4), (5, 1), (4, 3, 9, 2), (2,))
    engine.step(loads=[job])
    result = engine.done(job)
    assert (result.state, result.num_found, result.failed_blocks) == (FINISHED, (4, 0, 2, 1), ())
    assert engine.disk.asked == [[list(prefix) for prefix in job.prefixes]], "in one call"
    assert {name.split("-0:")[0] for name in engine.disk.threads} == {"tpu_offload-storage-lookup"}


def test_another_engine_finds_and_reads_it():
    first, second = SharedEngine(), StorageEngine(tier=SHARED)
    job = CopyJob(job_id=second.new_job_id(), kind=JobKind.LOOKUP, prefixes=((key_of(1), key_of(2)),))
    second.step(loads=[job])
    assert second.done(job).num_found == (2,)
    promote = second.promote((1, 5), (2, 0))
    second.stored = first.stored
    second.step(loads=[promote])
    second.expect_promoted(promote)
    assert second.done(promote).state is FINISHED
    second.check()


@pytest.mark.parametrize("call", ["read", "write"])
def test_a_look_up_waits_for_no_read_or_write(call):
    """More of them than there are threads hang."""
    engine = SharedEngine()
    engine.disk.gates[call] = gate = threading.Event()
    chunks = [(1, 4), (2, 5), (3, 6), (4, 7)]
    slow = engine.promote(*chunks) if call == "read" else engine.cascade(*[(name, name - 1) for name, _ in chunks])
    engine.step(**{"loads" if call == "read" else "saves": [slow]})
    engine.wait_for(call)
    job = engine.look_up((1, 2, 9))
    engine.step(loads=[job])
    while not (results := engine.worker.poll(wait=True).results):
        pass
    assert [(result.job_id, result.num_found) for result in results] == [(job.job_id, (2,))]
    gate.set()
    assert engine.done(slow).state is FINISHED


def test_nothing_waits_for_a_look_up():
    """Steps, saves, loads, reads and writes of storage go on while one hangs; it ends when it ends."""
    engine = SharedEngine()
    engine.disk.gates["find"] = gate = threading.Event()
    slow = engine.look_up((1,))
    engine.step(loads=[slow])
    engine.wait_for("find")
    save, load = engine.save([0, 1], [0, 1]), engine.load([2, 3], [2, 3])
    promote, cascade = engine.promote((1, 5)), engine.cascade((7, 3))
    engine.step(loads=[promote, load], saves=[save, cascade])
    results: dict[int, JobState] = {}
    while len(results) < 4:  # each of these would wait for ever if anything did
        results |= {result.job_id: result.state for result in engine.worker.poll(wait=True).results}
        engine.step()
    assert results == {job.job_id: FINISHED for job in (save, load, promote, cascade)}
    report = engine.worker.poll()
    assert report.storage_job_ids == (slow.job_id,), "it is in flight"
    assert report.oldest_job_id > save.job_id, "which says nothing of others"
    gate.set()
    assert engine.done(slow).num_found == (1,)
    assert not engine.worker.has_flights


@pytest.mark.parametrize("all_of_them", [False, True])
def test_an_idle_worker_waits_for_the_answer(all_of_them):
    """What it sleeps on is ready once the lookup is answered, and not before."""
    engine = SharedEngine()
    engine.disk.gates["find"] = gate = threading.Event()
    job = engine.look_up((1,))
    engine.step(loads=[job])
    engine.wait_for("find")
    assert engine.worker.has_flights
    assert engine.worker.poll().results == ()
    (answer,) = engine.storage.waiting_on(all_of_them=all_of_them)
    assert not answer.is_ready()
    gate.set()
    (result,) = engine.worker.poll(wait=True).results or engine.worker.poll(wait=True).results
    assert result.num_found == (1,)
    assert engine.storage.waiting_on(all_of_them=all_of_them) == []


class Stop(BaseException):
    pass


@pytest.mark.parametrize("error", [OSError("timed out"), RuntimeError("bug"), Stop("stop")])
def test_a_call_that_raises_fails_its_job(error):
    engine = SharedEngine()
    engine.disk.failing, engine.disk.error = {"find"}, error
    bad = engine.look_up((1,))
    engine.step(loads=[bad])
    result = engine.done(bad)
    assert (result.state, result.num_found) == (FAILED, ())
    assert result.error == f"{type(error).__name__}: {error}"
    engine.disk.failing = set()
    good = engine.look_up((1,))
    engine.step(loads=[good])
    assert engine.done(good).num_found == (1,), "the thread is alive"


@pytest.mark.parametrize("answer", [(), (1,), (1, 2, 3), (3, 0), (-1, 0), (True, 0), (0.0, 0), None, 5])
def test_an_answer_that_makes_no_sense_fails_its_job(answer, monkeypatch):
    engine = SharedEngine()
    monkeypatch.setattr(engine.disk, "find", lambda prefixes: answer)
    job = engine.look_up((1, 2), (3,))
    engine.step(loads=[job])
    result = engine.done(job)
    assert (result.state, result.num_found) == (FAILED, ())
    assert ("expected a number from 0 to each of [2, 1]" in result.error) or "TypeError" in result.error


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"prefixes": ()}, "prefixes are ()"),
        ({"prefixes": [(key_of(1),)]}, "prefixes are [("),
        ({"prefixes": ((),)}, "a prefix is not a tuple, or empty"),
        ({"prefixes": ([key_of(1)],)}, "a prefix is not a tuple, or empty"),
        ({"prefixes": (("text",),)}, "a key is not bytes, or empty"),
        ({"prefixes": ((b"",),)}, "a key is not bytes, or empty"),
        ({"chunks": ((key_of(1), 0),)}, "has chunks"),
        ({"deleted_keys": (key_of(1),)}, "some of a deletion only"),
        ({"parts": ("part",)}, "parts"),
        ({"kind": JobKind.PROMOTE}, "with some only of a lookup"),
        ({"kind": JobKind.CASCADE}, "with some only of a lookup"),
    ],
)
def test_a_job_that_makes_no_sense_fails_alone(fields, error):
    engine = SharedEngine()
    good = engine.look_up((1,))
    values = {"job_id": engine.new_job_id(), "kind": JobKind.LOOKUP, "prefixes": ((key_of(1),),)} | fields
    bad = CopyJob(**values)
    saves = [bad] if bad.kind is JobKind.CASCADE else []
    engine.step(loads=[good] if saves else [bad, good], saves=saves)
    results = engine.drain()
    assert results[bad.job_id].state is FAILED
    assert error in results[bad.job_id].error
    assert results[good.job_id].num_found == (1,)


def test_a_private_tier_and_a_worker_without_one_refuse():
    job = CopyJob(job_id=10**6, kind=JobKind.LOOKUP, prefixes=((key_of(1),),))
    for engine, error in ((StorageEngine(tier=NAME), "private"), (Engine(), "this worker has no storage tier")):
        engine.step(loads=[job])
        result = engine.drain()[job.job_id]
        assert result.state is FAILED
        assert error in result.error


def test_too_many_look_ups_fail(monkeypatch):
    monkeypatch.setattr(storage_lookups, "_MAX_CALLS", 2)
    engine = SharedEngine()
    engine.disk.gates["find"] = gate = threading.Event()
    jobs = [engine.look_up((1,)) for _ in range(3)]
    engine.step(loads=jobs)
    (result,) = engine.worker.poll(wait=True).results
    assert (result.job_id, result.state, result.error) == (jobs[2].job_id, FAILED, "2 lookups have no answer yet")
    gate.set()
    assert set(engine.states().values()) == {FINISHED}


def test_a_shared_tier_is_not_listed_at_the_start(monkeypatch):
    monkeypatch.setattr(SharedTier, "stored_keys", lambda self: pytest.fail("it is listed"))
    setup = StorageEngine(tier=SHARED).worker.poll().setup
    assert (setup.stored_keys, setup.shares_storage) == (((),), (True,))


@pytest.mark.parametrize("hangs", [False, True])
def test_close_ends_the_thread(hangs, caplog, monkeypatch):
    monkeypatch.setattr(storage_stack, "_CLOSE_S", 0.05 if hangs else 60.0)
    before = io_threads()
    engine = SharedEngine(job_timeout_s=0.1)
    own = io_threads() - before
    assert len(own) == 7
    disk = engine.disk
    if hangs:
        disk.gates["find"] = gate = threading.Event()
        engine.step(loads=[engine.look_up((1,))])
        engine.wait_for("find")
    engine.worker.close()
    assert ("does not respond: its I/O threads were abandoned" in caplog.text) == hangs
    assert disk.num_closed == (not hangs)
    if hangs:
        gate.set()
    else:
        assert not own & io_threads()
