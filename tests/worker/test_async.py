"""Jobs end when their copies have, in any order; cancelled ones write nothing; nothing waits unasked."""

import time

import jax
import pytest

from tests.worker.engine import CANCELLED, FAILED, FINISHED, Engine, slow_down
from tpu_offload.kernels import Phase
from tpu_offload.worker import worker as worker_module


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


def test_job_ends_with_its_last_flight():
    engine = Engine()
    engine.step(saves=[engine.save([0, 1], [7, 8])])
    first, second = slow_down(engine, 0), slow_down(engine, 1)
    second.ready = True
    assert engine.worker.poll().results == ()
    first.ready = True
    assert [r.job_id for r in engine.worker.poll().results] == [1]


def test_flights_of_different_sizes_end_in_any_order():
    """Two saves into one segment differ only in arrays, which have no single truth value to compare by."""
    engine = Engine()
    engine.step(saves=[engine.save([0, 1, 2], [0, 1, 2])])
    engine.step(saves=[engine.save([3, 4], [3, 4])])
    first, second = slow_down(engine, 0), slow_down(engine, 1)
    second.ready = True
    assert [r.job_id for r in engine.worker.poll().results] == [2]
    first.ready = True
    assert [r.job_id for r in engine.worker.poll().results] == [1]


def test_failed_flight_waits_for_the_others():
    """Or a late flight would land in a slot that has a new owner."""
    engine = Engine()
    real = engine.saver.save
    calls = []

    def second_fails(*args):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("halted")
        return real(*args)

    engine.saver.save = second_fails
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
    slow_down(engine, 0, ready_after=50)
    slow_down(engine, 1, ready_after=9)
    assert [r.job_id for r in engine.worker.poll(wait=True).results] == [2]  # whichever ends first
    assert [r.job_id for r in engine.worker.poll(wait=True).results] == [1]
    assert engine.worker.poll(wait=True).results == ()


def test_waiting_poll_returns_when_a_staged_load_needs_a_step():
    engine = Engine("staged")
    load = engine.load([0], [0])
    engine.begin(load)
    transit = slow_down(engine, ready_after=9)
    assert engine.worker.poll(wait=True).results == ()
    assert transit.ready
    engine.flights[0].waiting_on = transit.array
    engine.begin()
    engine.expect_loaded(load)
    assert engine.states() == {1: FINISHED}
    engine.check()


@pytest.mark.parametrize("path", ["direct", "staged"])
def test_waiting_poll_comes_back_when_nothing_ends(path, monkeypatch):
    """Also with a copy that never ends beside one that does."""
    monkeypatch.setattr(worker_module, "MAX_WAIT_S", 0.05)
    engine = Engine(path)
    engine.step(saves=[engine.save([0], [0])], loads=[engine.load([4], [8])])
    for index in range(2):
        slow_down(engine, index)
    times_s = []
    for _ in range(5):  # on a busy machine some may take long
        start_s = time.monotonic()
        assert engine.worker.poll(wait=True).results == ()
        times_s.append(time.monotonic() - start_s)
    assert 0.05 <= min(times_s) < 0.9
    good = engine.save([1], [1])
    engine.step(saves=[good])
    assert [r.job_id for r in engine.worker.poll(wait=True).results] == [good.job_id]


def test_waits_of_poll_are_about_a_second():
    assert worker_module.MAX_WAIT_S == 1.0


@pytest.mark.parametrize("timeout_s", [0.05, 60.0])
def test_close_waits_for_copies_but_not_for_ever(caplog, monkeypatch, timeout_s):
    assert worker_module.MAX_CLOSE_S == 20.0
    if timeout_s > 0.05:
        monkeypatch.setattr(worker_module, "MAX_CLOSE_S", 0.05)
    engine = Engine(job_timeout_s=timeout_s)
    engine.step(saves=[engine.save([0], [0])])
    engine.step(saves=[engine.save([1], [1])])
    token = slow_down(engine, 0, ready_after=2)
    slow_down(engine, 1)
    start_s = time.monotonic()
    engine.worker.close()
    assert 0.05 <= time.monotonic() - start_s < 15
    assert token.ready
    assert caplog.messages == ["closing with 1 copies still in flight after 0.05 s"]
    assert not engine.worker.has_flights


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
    assert engine.flights[0].phase is Phase.TRANSIT
    assert engine.worker.poll().results == ()
    assert transit.blocked == 0


# Cancelling.


def test_cancelled_staged_load_writes_nothing():
    engine = Engine("staged")
    engine.step(saves=[save := engine.save([0, 1, 2, 3], [0, 1, 2, 3])])
    engine.expect_saved(save)
    engine.drain()
    kept, dropped = engine.load([6], [2]), engine.load([4, 5], [0, 1])
    engine.begin(kept, dropped)
    engine.begin(cancel=[dropped.job_id, 999])
    engine.expect_loaded(kept)
    assert engine.states() == {kept.job_id: FINISHED, dropped.job_id: CANCELLED}
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
    jax.block_until_ready(engine.flights[0].waiting_on)
    engine.begin()
    assert engine.flights[0].phase is Phase.COPYING
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
    engine.in_lockstep()
    load, save = engine.load([4], [0]), engine.save([1], [1])
    engine.step(loads=[load], saves=[save])
    jax.block_until_ready([flight.waiting_on for flight in engine.flights])
    engine.worker.poll()
    assert [f.phase for f in engine.flights] == [Phase.TRANSIT, Phase.TRANSIT]
    engine.step()
    assert [f.phase for f in engine.flights] == [Phase.COPYING, Phase.COPYING]
    engine.expect_loaded(load)
    engine.expect_saved(save)
    assert set(engine.states().values()) == {FINISHED}
    engine.check()
