"""When copies are suspended, and when they resume."""

import logging

import pytest

from tests.core.fakes import Clock, FakeEngine, FakeWorker, tokens
from tests.core.swap.fakes import SwapEngine
from tpu_offload import JobKind, JobResult, JobState
from tpu_offload.core.breaker import CircuitBreaker
from tpu_offload.types import BlockHash


def make_breaker(num_failures=3):
    clock = Clock()
    return CircuitBreaker("loads", num_failures=num_failures, retry_s=5.0, clock=clock), clock


def opened(num_failures=3):
    breaker, clock = make_breaker(num_failures)
    for job_id in range(num_failures):
        breaker.failed(job_id, "injected")
    return breaker, clock


def test_it_opens_after_num_failures_in_a_row_and_not_earlier():
    breaker, _ = make_breaker()
    for job_id in range(10):
        breaker.failed(job_id, "injected")
        breaker.failed(job_id, "injected")
        assert breaker.closed
        breaker.succeeded(job_id)
    assert breaker.num_opened == 0
    for job_id in range(3):
        assert breaker.admits("a")
        breaker.failed(job_id, "injected")
    assert not breaker.closed
    assert not breaker.admits("a")
    assert breaker.num_opened == 1


def test_one_probe_at_a_time_closes_it(caplog):
    caplog.set_level(logging.WARNING)
    breaker, clock = opened()
    clock.now_s += 4.9
    assert not breaker.admits("a")
    clock.now_s += 0.2
    assert breaker.admits("a")
    assert not breaker.closed, "what is planned now is a probe"
    breaker.begin("a")
    assert breaker.admits("a")
    assert not breaker.admits("b")
    breaker.hand_over("a", 17)
    breaker.succeeded(16)  # of before it opened
    assert not breaker.closed
    breaker.succeeded(17)
    assert breaker.closed
    assert breaker.admits("b")
    assert caplog.messages == [
        "loads have failed 3 times in a row (injected): suspended for 5 s, then one is tried",
        "loads work again",
    ]


def test_each_failed_probe_doubles_the_wait_up_to_64_times():
    breaker, clock = opened()
    waits = []
    for job_id in range(10, 20):
        start_s = clock.now_s
        while not breaker.admits("a"):
            clock.now_s += 1.0
        waits.append(clock.now_s - start_s)
        breaker.begin("a")
        breaker.hand_over("a", job_id)
        breaker.failed(3, "another one")
        assert not breaker.admits("b"), "only the probe counts"
        breaker.failed(job_id, "injected")
    assert waits == [5, 10, 20, 40, 80, 160, 320, 320, 320, 320]
    assert breaker.num_opened == 1


def test_a_probe_that_is_given_up_makes_room_for_the_next():
    breaker, clock = opened()
    clock.now_s += 5
    breaker.begin("a")
    breaker.cancel_probe("b")
    assert not breaker.admits("b")
    breaker.cancel_probe("a")
    assert breaker.admits("b")


def test_with_zero_failures_it_never_opens():
    breaker, _ = opened(0)
    for job_id in range(100):
        breaker.failed(job_id, "injected")
    assert breaker.closed


def serve(engine, name, prompt, *, fail):
    """Runs one request to its end; returns the tokens that it was promised."""
    worker = engine.workers[0]
    request = engine.add(name, prompt)
    promised = request.num_computed
    for _ in range(4):
        left = len(prompt) - request.num_computed
        engine.step({name: left} if left and not request.loading else {})
        engine.apply(worker, worker.finish(fail=fail))
    engine.check_bytes(request, len(prompt))
    engine.remove(name)
    return promised


def test_saves_that_keep_failing_are_suspended_and_resume_automatically():
    engine = FakeEngine(breaker_failures=3, breaker_retry_s=100.0)
    for i in range(6):
        serve(engine, f"bad{i}", tokens(8, start=100 * i), fail=True)
    stats = engine.scheduler.stats()
    assert (stats.num_open_breakers, stats.num_breaker_openings, stats.num_failed_jobs) == (1, 1, 3)
    assert stats.dropped_save_blocks == 12
    serve(engine, "bypassed", tokens(8, start=900), fail=False)
    assert engine.scheduler.stats().saved_blocks == 0
    engine.clock.now_s += 101
    engine.add("probe", tokens(16, start=1000))
    plan, _ = engine.step({"probe": 16})
    assert [job.num_blocks for job in plan.of(JobKind.SAVE)] == [1], "the smallest copy there is"
    plan, _ = engine.step()
    assert plan.of(JobKind.SAVE) == ()
    engine.apply(engine.workers[0], engine.workers[0].finish())
    assert engine.scheduler.stats().num_open_breakers == 0
    plan, _ = engine.step()
    assert [job.num_blocks for job in plan.of(JobKind.SAVE)] == [3]
    engine.settle()
    engine.scheduler.check_invariants()


def test_loads_that_keep_failing_are_suspended_while_saves_continue():
    engine = FakeEngine(breaker_failures=2, breaker_retry_s=100.0, num_blocks=64)
    for i in range(4):
        engine.serve(f"saved{i}", tokens(8, start=100 * i))
    for i in range(2):
        assert serve(engine, f"bad{i}", tokens(8, start=100 * i), fail=True)
    assert engine.scheduler.stats().num_open_breakers == 1
    assert serve(engine, "computes", tokens(8, start=200), fail=False) == 0
    assert engine.scheduler.stats().dropped_load_blocks == 2
    assert serve(engine, "saves", tokens(8, start=800), fail=False) == 0
    assert engine.scheduler.stats().saved_blocks == 10
    engine.clock.now_s += 101
    assert serve(engine, "probe", tokens(8, start=200), fail=False) == 4, "one chunk"
    assert engine.scheduler.stats().num_open_breakers == 0
    assert serve(engine, "loads", tokens(8, start=300), fail=False) == 7
    engine.scheduler.check_invariants()


def test_a_probing_load_that_is_released_or_aborted_makes_room_for_the_next_probe():
    engine = FakeEngine(breaker_failures=1, breaker_retry_s=10.0, num_blocks=64)
    engine.serve("a", tokens(8))
    engine.serve("other", tokens(8, start=100))
    assert serve(engine, "bad", tokens(8), fail=True)
    engine.clock.now_s += 11
    hashes: list[BlockHash] = []
    engine.hasher.extend(hashes, tokens(8, start=100))
    assert engine.scheduler.match("parked", hashes, num_tokens=8, num_computed_tokens=0).num_tokens == 4
    assert engine.scheduler.match("second", hashes, num_tokens=8, num_computed_tokens=0).num_tokens == 0
    engine.scheduler.release("parked")
    assert engine.add("aborted", tokens(8, start=100)).num_computed == 4
    engine.step()
    engine.remove("aborted")
    engine.settle()
    assert engine.scheduler.stats().num_open_breakers == 1
    assert serve(engine, "good", tokens(8, start=100), fail=False) == 4
    assert engine.scheduler.stats().num_open_breakers == 0


@pytest.mark.parametrize("state", [JobState.FINISHED, JobState.CANCELLED])
def test_a_load_whose_request_ends_before_the_report_counts_if_it_was_copied(state):
    """As every load of a prompt that is computed in one step with one token of output."""
    engine = FakeEngine(breaker_failures=1, breaker_retry_s=10.0, num_blocks=64)
    engine.serve("a", tokens(8))
    engine.serve("other", tokens(8, start=100))
    assert serve(engine, "bad", tokens(8), fail=True)
    engine.clock.now_s += 11
    before = engine.scheduler.stats()
    assert engine.add("probe", tokens(8, start=100)).num_computed == 4
    plan, _ = engine.step()
    engine.remove("probe")
    (load,) = plan.of(JobKind.LOAD)
    engine.workers[0].finish()
    update = engine.apply(engine.workers[0], [JobResult(job_id=load.job_id, state=state, duration_s=0.5)])
    assert not update.loaded
    stats, is_done = engine.scheduler.stats(), state is JobState.FINISHED
    assert stats.num_open_breakers == (not is_done)
    assert stats.loaded_blocks - before.loaded_blocks == is_done
    assert stats.loaded_tokens - before.loaded_tokens == 4 * is_done
    assert stats.load_s - before.load_s == 0.5 * is_done
    engine.scheduler.check_invariants()


def test_jobs_that_time_out_open_it_as_well():
    engine = FakeEngine(
        breaker_failures=2,
        breaker_retry_s=100.0,
        job_timeout_s=5.0,
        workers=[FakeWorker(0), FakeWorker(1)],
        num_blocks=64,
    )
    for i in range(3):
        engine.add(f"r{i}", tokens(8, start=100 * i))
        engine.step({f"r{i}": 8})
        engine.apply(engine.workers[0], engine.workers[0].finish())  # the other never says anything
        engine.clock.now_s += 6
    engine.step()
    stats = engine.scheduler.stats()
    assert (stats.num_open_breakers, stats.num_breaker_openings) == (1, 1)
    assert stats.num_quarantined_chunks == 2 * stats.num_timed_out_jobs == 6, "r0 was tried twice"
    assert (stats.staging_reserved_blocks, stats.num_jobs_in_flight) == (6, 0), "the copies may still run"


def test_a_reset_counts_as_no_failure():
    engine = FakeEngine(breaker_failures=1)
    engine.add("a", tokens(8))
    engine.step({"a": 8})
    engine.scheduler.reset()
    engine.settle()
    assert engine.scheduler.stats().num_failed_jobs == 0
    assert engine.scheduler.stats().num_open_breakers == 0


def test_swaps_that_keep_failing_end_in_recompute_without_a_copy():
    engine = SwapEngine(breaker_failures=2, breaker_retry_s=100.0)
    engine.failing = lambda job: True
    for name in "abc":
        engine.start(name, tokens(9, start=100 * ord(name)))
        swapped = engine.swap_out(name)
        engine.settle()
    assert not swapped
    stats = engine.scheduler.stats()
    assert (stats.num_lost_swaps, stats.num_recomputed, stats.num_open_breakers) == (2, 1, 1)
    engine.failing = lambda job: False
    engine.clock.now_s += 101
    engine.start("d", tokens(9))
    assert engine.swap_out("d")
    engine.settle()
    assert engine.scheduler.stats().num_open_breakers == 0
    engine.swap_in("d")
    engine.settle()
    engine.discard("d")
    engine.check_empty()


def test_swap_ins_that_keep_failing_suspend_swap_outs_until_one_succeeds():
    engine = SwapEngine(breaker_failures=2, breaker_retry_s=100.0)
    for i, name in enumerate(("a", "b")):
        engine.start(name, tokens(9, start=100 * i))
        engine.swap_out(name)
        engine.settle()
        engine.failing = lambda job: True
        engine.swap_in(name)
        engine.settle()
        engine.failing = lambda job: False
    assert engine.scheduler.stats().num_open_breakers == 1
    engine.start("c", tokens(9, start=300))
    assert not engine.swap_out("c")
    engine.clock.now_s += 101
    engine.start("d", tokens(9, start=400))
    engine.start("e", tokens(9, start=500))
    assert engine.swap_out("d"), "it is the probe"
    assert not engine.swap_out("e")
    engine.settle()
    assert engine.scheduler.stats().num_open_breakers == 1, "that it is out says nothing"
    engine.swap_in("d")
    engine.settle()
    assert engine.scheduler.stats().num_open_breakers == 0
    engine.discard("d")
    engine.check_empty()
