"""Faults of the soak: each kind has its effect, is determined by the seed, and can be stopped."""

import pytest

from tests.inside.worker import lost_segments, tier_group
from tests.soak.faults import RATES, Fault, Faults, FaultyCopier, FaultyRelay
from tests.worker.engine import FAILED, FINISHED, Engine
from tpu_offload.errors import CachesLostError
from tpu_offload.types import Direction, JobResult, StepReport


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


def make_faults(*always, clock=None, seed=1):
    faults = Faults(seed, job_timeout_s=10.0, clock=clock or Clock(), rates=dict.fromkeys(always, 1.0))
    faults.active = True
    return faults


def make_engine(faults, path="direct"):
    engine = Engine(path)
    copiers = tier_group(engine.worker).copiers
    wrapped = {copier: FaultyCopier(copier, engine.pool, faults) for copier in copiers.values()}
    tier_group(engine.worker).copiers = {direction: wrapped[copier] for direction, copier in copiers.items()}
    return engine


@pytest.mark.parametrize("path", ["direct", "staged"])
def test_without_faults_nothing_changes(path):
    make_engine(make_faults(), path).check_round_trip()


@pytest.mark.parametrize("path", ["direct", "staged"])
@pytest.mark.parametrize(
    ("fault", "direction", "error"),
    [
        (Fault.SAVE_RAISES, "save", "RuntimeError: injected: the save was not dispatched"),
        (Fault.SEGMENT_LOST, "save", "RuntimeError: injected: the save destroyed its segment"),
        (Fault.SHORT_SAVE, "save", "TransferError: the device copied 2 of 3 blocks"),
        (Fault.LOAD_RAISES, "load", "RuntimeError: injected: the load was not dispatched"),
        (Fault.SHORT_LOAD, "load", "TransferError: the device copied 2 of 3 blocks"),
    ],
)
def test_a_copy_fails(path, fault, direction, error):
    faults = make_faults()
    engine = make_engine(faults, path)
    engine.step(saves=[save := engine.save([0, 1, 2], [8, 9, 10])])
    engine.expect_saved(save)
    engine.drain()
    faults.rates = {fault: 1.0}
    if path == "staged" and "SHORT" in fault.name:
        error = "TransferError: the device copied 1 of 2 blocks"  # pieces of two and one
    job = getattr(engine, direction)([4, 5, 6], [8, 9, 10])
    engine.step(**{f"{direction}s": [job]})
    result = engine.drain()[job.job_id]
    assert (result.state, result.error) == (FAILED, error)
    assert faults.counts[fault] > 0
    lost = fault in (Fault.SEGMENT_LOST, Fault.SHORT_SAVE)
    assert (1 in lost_segments(engine.pool)) == lost


def test_a_block_that_is_left_out_is_not_written():
    """Otherwise a soak would not detect that the block is used."""
    faults = make_faults()
    engine = make_engine(faults)
    engine.step(saves=[save := engine.save([0, 1], [8, 9])])
    engine.expect_saved(save)
    engine.drain()
    faults.rates = {Fault.SHORT_LOAD: 1.0}
    engine.step(loads=[engine.load([4, 5], [8, 9])])
    engine.expect_loaded(engine.job(Direction.LOAD, [4], [8]))
    engine.drain()
    engine.check()


@pytest.mark.parametrize("path", ["direct", "staged"])
def test_a_load_takes_the_caches(path):
    engine = make_engine(make_faults(Fault.CACHES_LOST), path)
    engine.step(saves=[engine.save([0], [8])])
    engine.drain()
    load = engine.load([4], [8])
    if path == "staged":  # the second half writes
        engine.step(loads=[load])
        engine.flights[0].waiting_on.block_until_ready()
    with pytest.raises(CachesLostError):
        engine.step(loads=[] if engine.worker.has_flights else [load])
    assert engine.caches[0].is_deleted()


@pytest.mark.parametrize("path", ["direct", "staged"])
@pytest.mark.parametrize(("fault", "longest_s"), [(Fault.LATE, 5.0), (Fault.OVERDUE, 25.0)])
def test_a_copy_comes_late(path, fault, longest_s):
    clock = Clock()
    faults = make_faults(fault, clock=clock)
    engine = make_engine(faults, path)
    engine.step(saves=[save := engine.save([0], [8])])
    engine.expect_saved(save)
    for _ in range(100):
        assert engine.worker.poll().results == ()
    assert faults.counts[fault] == 1
    faults.active = False  # what is already late stays late
    clock.now_s = 0.9 if fault is Fault.OVERDUE else 0.0
    assert engine.worker.poll().results == ()
    clock.now_s = longest_s
    assert engine.states() == {save.job_id: FINISHED}
    engine.check()


def make_report(*job_ids):
    return StepReport(
        worker_id=0, results=tuple(JobResult(job_id=job_id, state=FINISHED) for job_id in job_ids), num_host_slots=(5,)
    )


def test_reports_are_lost_doubled_or_held_back():
    idle = make_report()
    relay = FaultyRelay(make_faults(Fault.REPORT_LOST))
    assert relay(make_report(1)) == []
    assert relay(idle) == [idle]
    relay = FaultyRelay(make_faults(Fault.REPORT_DOUBLED))
    assert relay(idle) == [idle]
    assert relay(make_report(2)) == [make_report(2)] * 2
    clock = Clock()
    faults = make_faults(Fault.SILENCE, clock=clock)
    relay = FaultyRelay(faults)
    assert [relay(report) for report in (make_report(3), idle, idle)] == [[], [], []]
    faults.active = False
    assert relay(make_report(4)) == []
    clock.now_s = 9.9
    assert relay(idle) == []
    clock.now_s = 20.0
    assert relay(idle) == [make_report(3), idle, make_report(4), idle]
    assert relay(idle) == [idle]


def test_a_seed_decides():
    def draw(seed):
        faults = Faults(seed, job_timeout_s=1.0, clock=Clock())
        faults.active = True
        return [faults.happens(fault) for _ in range(500) for fault in Fault]

    assert draw(3) == draw(3) != draw(4)
    assert any(draw(3))


def test_every_fault_has_a_rate():
    assert set(RATES) == set(Fault)
    assert all(0 < rate < 0.1 for rate in RATES.values())


def test_a_rare_fault_can_be_certain():
    faults = Faults(1, job_timeout_s=10.0, clock=Clock(), rates={}, certain={Fault.RESET: 3})
    assert not any(faults.happens(Fault.RESET) for _ in range(5)), "nothing is active"
    faults.active = True
    assert [faults.happens(Fault.RESET) for _ in range(6)] == [False, False, True, False, False, False]
    assert (faults.counts[Fault.RESET], faults.happens(Fault.ABORT)) == (1, False)
