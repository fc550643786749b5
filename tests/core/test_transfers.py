"""How jobs end: lost results, restarted workers, copies that fail in part, chunks that keep failing."""

import dataclasses
import pickle

import pytest

from tests.compiled import interpreted_only
from tests.core.fakes import FakeEngine, FakeRequest, FakeWorker, tokens
from tests.core.swap.fakes import SwapEngine
from tests.inside.scheduler import chunk_index, chunk_states, request_table, save_planner, tier_context
from tests.jobs import host_block_ids
from tpu_offload import FailedLoad, JobResult, JobState, ScheduledRequest, StepReport, Update
from tpu_offload.core.chunk_backoff import ChunkBackoff
from tpu_offload.core.policies import LRUPolicy
from tpu_offload.errors import RequestError
from tpu_offload.types import BlockHash, ChunkKey, Direction, JobKind

FINISHED, FAILED = JobState.FINISHED, JobState.FAILED


def match(engine, name, prompt):
    hashes: list[BlockHash] = []
    engine.hasher.extend(hashes, prompt)
    return engine.scheduler.match(name, hashes, num_tokens=len(prompt), num_computed_tokens=0).num_tokens


def report(engine, worker_id=0, *results, **fields):
    base = StepReport(
        worker_id=worker_id, results=tuple(results), num_host_slots=(engine.workers[worker_id].num_host_chunks,)
    )
    return engine.scheduler.apply(dataclasses.replace(base, **fields))


def test_a_job_whose_result_never_came_ends_as_soon_as_its_worker_has_acknowledged_it():
    engine = FakeEngine(workers=[FakeWorker(0), FakeWorker(1)], num_blocks=64)
    engine.serve("a", tokens(8))
    engine.add("loading", tokens(8))
    engine.add("saving", tokens(8, start=100))
    plan, _ = engine.step({"saving": 8})
    (load,), (save,) = plan.of(JobKind.LOAD), plan.of(JobKind.SAVE)
    for worker in engine.workers:
        worker.finish()  # and every word of it is lost
    assert report(engine, 0, oldest_job_id=save.job_id).failed_loads == ()
    assert engine.scheduler.stats().num_jobs_in_flight == 2, "the other worker may be at them"
    assert report(engine, 1, oldest_job_id=load.job_id).failed_loads == (), "nothing is said of this very job"
    assert report(engine, 1, oldest_job_id=save.job_id + 1).failed_loads == (
        FailedLoad(request_id="loading", num_valid_tokens=0),
    )
    assert report(engine, 0, oldest_job_id=save.job_id + 1).failed_loads == ()
    stats = engine.scheduler.stats()
    assert (stats.num_jobs_in_flight, stats.num_lost_results, stats.staging_reserved_blocks) == (0, 2, 0)
    assert report(engine, 0, JobResult(job_id=load.job_id, state=FINISHED)).loaded == (), "too late"
    assert engine.scheduler.stats().num_ignored_results == 1
    engine.requests["loading"].loading = False
    engine.scheduler.check_invariants()
    plan, _ = engine.step()
    assert [job.num_blocks for job in plan.of(JobKind.SAVE)] == [2], "it is saved again"


def test_a_swap_whose_result_never_came_ends_likewise():
    engine = SwapEngine(num_workers=2)
    engine.start("a", tokens(9))
    engine.swap_out("a")
    plan = engine.step()
    (job,) = plan.of(JobKind.SWAP_OUT)
    for worker in engine.workers:
        worker.unreported = []
        update = engine.scheduler.apply(dataclasses.replace(worker.report(), oldest_job_id=job.job_id + 1))
    assert update.lost_swaps == ("a",)
    assert engine.scheduler.stats().num_lost_results == 1
    engine.out.clear()
    engine.check_empty()


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("both", [False, True])
def test_a_result_that_is_lost_by_either_worker_is_counted_once(first, both):
    workers = [FakeWorker(i) for i in range(2)]
    engine = FakeEngine(workers=workers)
    engine.add("a", tokens(16))
    plan, _ = engine.step({"a": 16})
    (job,) = plan.of(JobKind.SAVE)
    for worker_id in (first, 1 - first):
        if worker_id == first or both:
            report(engine, worker_id, oldest_job_id=job.job_id + 1)
        else:
            report(engine, worker_id, JobResult(job_id=job.job_id, state=FINISHED))
    assert engine.scheduler.stats().num_lost_results == 1
    assert engine.scheduler.stats().num_failed_jobs == 1


@pytest.mark.parametrize("how", ["late result", "later jobs are over", "restarted"])
def test_slots_of_a_late_save_are_in_quarantine_until_every_worker_has_finished_with_it(how):
    workers = [FakeWorker(i, num_host_chunks=4) for i in range(2)]
    engine = FakeEngine(workers=workers, num_cpu_chunks=4, job_timeout_s=5.0, breaker_failures=0, num_blocks=64)
    for worker_id in range(2):
        report(engine, worker_id, incarnation=100)
    engine.add("a", tokens(16))
    plan, _ = engine.step({"a": 16})
    (job,) = plan.of(JobKind.SAVE)
    engine.remove("a")
    engine.clock.now_s += 6
    engine.add("b", tokens(16, start=100))
    assert engine.step({"b": 16})[0].of(JobKind.SAVE) == (), "the memory may still be written"
    stats = engine.scheduler.stats()
    assert (stats.num_quarantined_chunks, stats.num_resident_chunks, stats.num_timed_out_jobs) == (4, 0, 1)
    for worker_id in range(2):
        assert engine.step()[0].of(JobKind.SAVE) == ()
        if how == "late result":
            report(engine, worker_id, JobResult(job_id=job.job_id, state=FINISHED), incarnation=100)
        elif how == "later jobs are over":
            report(engine, worker_id, oldest_job_id=job.job_id + 1, incarnation=100)
        else:
            report(engine, worker_id, incarnation=200 + worker_id)
            report(engine, worker_id, oldest_job_id=job.job_id + 1, incarnation=200 + worker_id)
    assert engine.scheduler.stats().num_quarantined_chunks == 0
    if how == "restarted":  # what b has computed is gone with the KV caches
        assert engine.step()[0].of(JobKind.SAVE) == ()
        engine.remove("b", preempt=True)
        engine.add("c", tokens(16, start=100))
        plan, _ = engine.step({"c": 16})
    else:
        plan, _ = engine.step()
    assert [job.num_blocks for job in plan.of(JobKind.SAVE)] == [4]
    engine.scheduler.check_invariants()


@pytest.mark.parametrize("how", ["late result", "later jobs are over", "restarted"])
def test_staging_blocks_of_late_jobs_are_held_until_every_worker_has_finished_with_them(how):
    workers = [FakeWorker(i, num_host_chunks=16) for i in range(2)]
    engine = FakeEngine(
        workers=workers,
        num_cpu_chunks=16,
        job_timeout_s=5.0,
        breaker_failures=0,
        num_blocks=64,
        num_staging_blocks=6,
        save_path="staged",
        load_path="staged",
    )
    for worker_id in range(2):
        report(engine, worker_id, incarnation=100)
    engine.serve("saved", tokens(8))
    engine.add("a", tokens(16, start=100))
    plan, _ = engine.step({"a": 16})
    (save,) = plan.of(JobKind.SAVE)
    engine.add("b", tokens(8))
    plan, _ = engine.step()
    (load,) = plan.of(JobKind.LOAD)
    assert engine.scheduler.stats().staging_reserved_blocks == 6
    engine.clock.now_s += 6
    engine.step()
    stats = engine.scheduler.stats()
    assert (stats.num_timed_out_jobs, stats.num_jobs_in_flight, stats.staging_reserved_blocks) == (2, 0, 6)
    engine.scheduler.check_invariants()
    for worker_id in range(2):
        assert engine.scheduler.stats().staging_reserved_blocks == 6, "the copies of one worker may still run"
        if how == "late result":
            results = [JobResult(job_id=job.job_id, state=FINISHED) for job in (save, load)]
            report(engine, worker_id, *results, incarnation=100)
        elif how == "later jobs are over":
            report(engine, worker_id, oldest_job_id=load.job_id + 1, incarnation=100)
        else:
            report(engine, worker_id, incarnation=200 + worker_id)
            report(engine, worker_id, oldest_job_id=load.job_id + 1, incarnation=200 + worker_id)
    assert engine.scheduler.stats().staging_reserved_blocks == 0
    engine.scheduler.check_invariants()


def test_a_restarted_worker_may_have_more_host_memory_than_before():
    engine = FakeEngine(workers=[FakeWorker(0), FakeWorker(1)], num_blocks=64, num_staging_blocks=32)
    for worker_id in range(2):
        report(engine, worker_id, incarnation=4)
    for incarnation, num_host_chunks in ((5, 3), (6, 10), (7, 64)):  # it restarts while its pool grows
        report(engine, 1, incarnation=incarnation, num_host_slots=(num_host_chunks,))
        assert engine.scheduler.stats().num_host_chunks == num_host_chunks
    report(engine, 0, incarnation=5, num_host_slots=(9,))
    report(engine, 1, incarnation=8, num_host_slots=(20,))
    assert engine.scheduler.stats().num_host_chunks == 9, "the other worker's"
    engine.scheduler.check_invariants()


def test_a_restarted_worker_has_an_empty_tier_and_its_jobs_fail():
    engine = FakeEngine(workers=[FakeWorker(0), FakeWorker(1)], num_blocks=64, num_staging_blocks=32)
    for worker_id in range(2):
        report(engine, worker_id, incarnation=5)
    engine.serve("a", tokens(16))
    for worker_id in range(2):
        report(engine, worker_id, incarnation=5)
    engine.add("loading", tokens(16))
    engine.add("saving", tokens(8, start=100))
    plan, _ = engine.step({"saving": 8})
    assert match(engine, "promised", tokens(12)) == 11
    update = report(engine, 1, incarnation=6, num_host_slots=(3,))
    assert update.failed_loads == (FailedLoad(request_id="loading", num_valid_tokens=0),)
    engine.requests["loading"].loading = False
    stats = engine.scheduler.stats()
    assert (stats.num_worker_restarts, stats.num_host_chunks) == (1, 3)
    assert match(engine, "late", tokens(16)) == 0
    engine.scheduler.admit("promised", [[40, 41, 42]], num_loaded_tokens=11)
    old = report(
        engine,
        1,
        JobResult(job_id=plan.of(JobKind.SAVE)[0].job_id, state=FINISHED),
        incarnation=5,
        num_host_slots=(64,),
    )
    assert old.loaded == ()
    assert engine.scheduler.stats().num_host_chunks == 3, "a stale report is ignored"
    engine.step()
    last = plan.of(JobKind.SAVE)[0].job_id + 2
    for worker_id in range(2):
        update = report(engine, worker_id, incarnation=5 + worker_id, oldest_job_id=last, num_host_slots=(3,))
    assert update.failed_loads == (FailedLoad(request_id="promised", num_valid_tokens=0),)
    assert engine.scheduler.stats().num_jobs_in_flight == 0
    engine.scheduler.check_invariants()
    report(engine, 1, incarnation=6, num_host_slots=(64,))
    assert engine.scheduler.stats().num_host_chunks == 64
    engine.scheduler.check_invariants()


@pytest.mark.parametrize(("failed", "num_valid"), [((0,), 4), ((1, 4), 8), ((3,), 16), ((4,), 20)])
def test_a_load_that_begins_inside_a_chunk_is_used_up_to_the_first_hole(failed, num_valid):
    engine = FakeEngine(blocks_per_chunk=2)
    prompt = tokens(24)
    engine.serve("a", prompt)
    hashes: list[BlockHash] = []
    engine.hasher.extend(hashes, prompt)
    assert engine.scheduler.match("b", hashes, num_tokens=24, num_computed_tokens=4).num_tokens == 19
    engine.scheduler.admit("b", [list(range(6))], num_loaded_tokens=19)
    plan, _ = engine.step()
    result = JobResult(job_id=plan.of(JobKind.LOAD)[0].job_id, state=FAILED, error="injected", failed_blocks=failed)
    update = report(engine, 0, result)
    assert update.failed_loads == (FailedLoad(request_id="b", num_valid_tokens=num_valid),)
    assert engine.scheduler.stats().loaded_tokens == num_valid - 4
    engine.scheduler.check_invariants()


def test_of_several_workers_the_first_hole_counts_and_invalid_positions_mean_all():
    engine = FakeEngine(workers=[FakeWorker(0), FakeWorker(1)])
    engine.serve("a", tokens(25))
    for failed, num_valid in ((((4,), (2, 5)), 8), (((4,), (6,)), 0), (((4,), ()), 0)):
        engine.add("b", tokens(25))
        (load,) = engine.step()[0].of(JobKind.LOAD)
        for worker_id, positions in enumerate(failed):
            update = report(
                engine,
                worker_id,
                JobResult(job_id=load.job_id, state=FAILED, error="injected", failed_blocks=positions),
            )
        assert update.failed_loads == (FailedLoad(request_id="b", num_valid_tokens=num_valid),)
        tier_context(engine.scheduler).backoff.clear()
        engine.requests["b"].loading = False
        engine.remove("b")
        engine.scheduler.check_invariants()


def test_a_partly_failed_save_is_published_in_part_and_the_rest_retried_alone():
    engine = FakeEngine(blocks_per_chunk=2, num_staging_blocks=16)
    engine.add("a", tokens(24))
    engine.add("other", tokens(8, start=300))
    plan, _ = engine.step({"a": 24, "other": 8})
    worker = engine.workers[0]
    engine.apply(worker, worker.finish(fail=True, failed_blocks=(3,)))
    assert match(engine, "early", tokens(25)) == 8, "the second chunk is missing, the third is there"
    engine.scheduler.release("early")
    assert match(engine, "b", tokens(9, start=300)) == 8, "the other request's chunk was copied"
    engine.scheduler.release("b")
    plan, _ = engine.step()
    assert [job.num_blocks for job in plan.of(JobKind.SAVE)] == [2]
    engine.settle()
    assert match(engine, "late", tokens(25)) == 24
    engine.scheduler.release("late")
    engine.scheduler.check_invariants()


def test_lost_memory_fails_the_chunks_that_were_in_it_and_no_others():
    engine = FakeEngine(num_blocks=64)
    engine.serve("a", tokens(17))
    engine.add("loading", tokens(17))
    engine.add("saving", tokens(12, start=100))
    plan, _ = engine.step({"saving": 12})
    lost = host_block_ids(plan.of(JobKind.LOAD)[0])[2]
    results = engine.workers[0].finish()
    update = report(engine, 0, *results, lost_slots=((0, lost, lost + 1),))
    assert update.failed_loads == (FailedLoad(request_id="loading", num_valid_tokens=8),)
    engine.requests["loading"].loading = False
    assert match(engine, "b", tokens(13, start=100)) == 12
    engine.scheduler.release("b")
    assert match(engine, "c", tokens(17)) == 8
    engine.scheduler.release("c")
    engine.scheduler.check_invariants()


def test_admitting_a_promise_that_a_reset_revoked_is_a_failed_load():
    engine = FakeEngine()
    engine.serve("a", tokens(12))
    assert match(engine, "b", tokens(12)) == 11
    engine.scheduler.reset()
    engine.scheduler.admit("b", [[1, 2, 3]], num_loaded_tokens=11)
    plan, _ = engine.step()
    assert plan.empty
    assert report(engine).failed_loads == (FailedLoad(request_id="b", num_valid_tokens=0),)
    assert engine.scheduler.stats().staging_reserved_blocks == 0
    engine.scheduler.check_invariants()


def test_a_chunk_whose_save_failed_twice_backs_off_for_every_request():
    engine = FakeEngine(breaker_failures=0, breaker_retry_s=10.0)
    worker = engine.workers[0]
    num_tried = 0
    for i in range(6):
        engine.add(f"r{i}", tokens(8))
        plan, _ = engine.step({f"r{i}": 8})
        num_tried += len(plan.of(JobKind.SAVE))
        engine.apply(worker, worker.finish(fail=True))
        engine.remove(f"r{i}")
    assert num_tried == 2
    engine.add("late", tokens(8))
    assert engine.step({"late": 8})[0].of(JobKind.SAVE) == ()
    engine.clock.now_s += 11
    assert len(engine.step()[0].of(JobKind.SAVE)) == 1, "it is tried again without being named again"
    engine.settle()
    assert not len(tier_context(engine.scheduler).backoff)
    assert match(engine, "b", tokens(9)) == 8


def test_backoff_is_bounded_in_chunks_and_grows_with_each_failure():
    now_s, job_id = 0.0, 0
    backoff = ChunkBackoff(retry_s=10.0, clock=lambda: now_s)
    key = [ChunkKey(b"k")]

    def fail(keys, direction):
        nonlocal job_id
        job_id += 1
        return backoff.failed(keys, direction, job_id=job_id, next_job_id=job_id + 1)

    waits = []
    for _ in range(10):
        fail(key, Direction.SAVE)
        start_s = now_s
        while backoff.copyable_end(key, 0, 1) == 0:
            now_s += 10.0
        waits.append(now_s - start_s)
    assert waits == [0, 10, 20, 40, 80, 160, 320, 640, 640, 640]
    fail(key, Direction.LOAD)
    backoff.succeeded(key, Direction.SAVE)
    assert key[0] in backoff, "only a load clears a chunk that failed to load"
    backoff.succeeded(key, Direction.LOAD)
    assert len(backoff) == 0
    fail([ChunkKey(bytes([i // 256, i % 256])) for i in range(5000)], Direction.SAVE)
    assert len(backoff) == 4096


def test_loads_of_one_chunk_that_fail_together_are_one_failure_of_it():
    engine = FakeEngine(num_blocks=64, num_staging_blocks=64)
    engine.serve("a", tokens(12))
    for name in "bcd":
        engine.add(name, [*tokens(12), ord(name)])
    engine.step()
    worker = engine.workers[0]
    assert len(engine.apply(worker, worker.finish(fail=True)).failed_loads) == 3
    assert engine.add("e", tokens(13)).num_computed == 12, "tried once more"
    engine.step()
    engine.apply(worker, worker.finish(fail=True))
    assert engine.add("f", tokens(13)).num_computed == 0


def test_kv_from_before_a_reset_is_never_saved_even_of_a_request_that_was_never_matched():
    engine = FakeEngine()
    request = FakeRequest("quiet", tokens(8), [1, 2], [])
    engine.grow_hashes(request)
    engine.scheduler.admit("quiet", [request.block_ids], num_loaded_tokens=0)
    engine.scheduler.reset()
    plan = engine.scheduler.plan_step(
        [
            ScheduledRequest(
                request_id="quiet",
                block_tables=[[1, 2]],
                block_hashes=request.hashes,
                num_prompt_tokens=8,
                num_computed_tokens=8,
            )
        ]
    )
    assert plan.of(JobKind.SAVE) == ()


def test_kv_from_before_a_reset_is_never_saved_even_of_a_request_that_was_swapped_in():
    engine = SwapEngine(num_host_chunks=12)
    request = engine.start("a", tokens(9))
    engine.swap_out("a")
    engine.settle()
    engine.swap_in("a")
    engine.settle()
    engine.scheduler.reset()
    assert engine.step([engine.scheduled(request)]).of(JobKind.SAVE) == ()
    engine.swap_out("a")
    engine.settle()
    engine.swap_in("a")
    engine.settle()
    assert engine.step([engine.scheduled(request)]).of(JobKind.SAVE) == (), "nor after it has left and come back"


def test_timeouts_are_in_an_update_without_a_report():
    engine = FakeEngine(job_timeout_s=5.0)
    engine.serve("a", tokens(8))
    engine.add("b", tokens(8))
    engine.step()
    engine.clock.now_s += 6
    engine.step()
    assert engine.scheduler.take_update().failed_loads == (FailedLoad(request_id="b", num_valid_tokens=0),)
    assert engine.scheduler.take_update() == Update()


def test_plans_have_the_next_job_id_so_that_a_worker_can_acknowledge_jobs_that_it_missed():
    engine = FakeEngine()
    assert engine.step()[0].next_job_id == 0
    engine.add("a", tokens(8))
    plan, _ = engine.step({"a": 8})
    assert plan.next_job_id == plan.of(JobKind.SAVE)[0].job_id + 1
    assert engine.step()[0].next_job_id == plan.next_job_id
    assert pickle.loads(pickle.dumps(plan)) == plan


def loading_engine(**settings):
    engine = FakeEngine(job_timeout_s=5.0, **settings)
    engine.serve("a", tokens(8))
    engine.scheduler.apply(StepReport(worker_id=0, results=(), num_host_slots=(64,), incarnation=1000))
    engine.add("b", tokens(8))
    engine.step()
    return engine


@pytest.mark.parametrize("said", [{"incarnation": 999}, {"worker_id": 7}, {"num_host_slots": (-1,)}, {"results": None}])
def test_a_waiting_request_is_told_even_if_no_report_is_applied(said):
    engine = loading_engine()
    engine.clock.now_s += 6
    engine.step()
    assert engine.scheduler.has_jobs, "there is news"
    report = dataclasses.replace(StepReport(worker_id=0, results=(), num_host_slots=(64,), incarnation=1000), **said)
    assert engine.scheduler.apply(report).failed_loads == (FailedLoad(request_id="b", num_valid_tokens=0),)
    assert not engine.scheduler.has_jobs


@pytest.mark.parametrize(
    "said",
    [
        *({"num_host_slots": slots} for slots in ((), (64, 8), [64], 64, (64.0,))),
        *({"lost_slots": lost} for lost in (((1, 0, 4),), ((0, 4),), ((0, 4, 4),), ((-1, 0, 4),), [(0, 0, 4)])),
    ],
)
def test_a_report_of_other_pools_is_rejected_in_one_line(said, caplog):
    engine = FakeEngine()
    engine.serve("a", tokens(13))
    report(engine, **said)
    assert engine.scheduler.stats().num_rejected_reports == 1
    assert "slots" in caplog.text or "memory" in caplog.text
    assert match(engine, "b", tokens(13)) == 12


def test_has_jobs_while_an_update_is_pending():
    engine = FakeEngine()
    engine.serve("a", tokens(8))
    match(engine, "b", tokens(8))
    engine.scheduler.reset()
    engine.scheduler.admit("b", [[1, 2]], num_loaded_tokens=7)
    has_jobs = engine.scheduler.has_jobs
    assert has_jobs
    assert engine.scheduler.take_update().failed_loads == (FailedLoad(request_id="b", num_valid_tokens=0),)
    assert not engine.scheduler.has_jobs
    swaps = SwapEngine()
    swaps.start("a", tokens(9))
    swaps.swap_out("a")
    swaps.settle()
    swaps.scheduler.reset()
    assert swaps.scheduler.has_jobs


def test_a_report_that_acknowledges_unknown_jobs_is_applied_otherwise():
    engine = loading_engine()
    ((job, _),) = engine.workers[0].in_flight
    report = StepReport(
        worker_id=0,
        results=(JobResult(job_id=job.job_id, state=FINISHED),),
        num_host_slots=(64,),
        oldest_job_id=10**9,
        incarnation=1000,
    )
    assert engine.scheduler.apply(report).loaded == ("b",)
    assert engine.scheduler.stats().num_rejected_reports == 1


def test_a_report_cannot_make_the_swap_pool_larger_than_its_setting():
    engine = SwapEngine(swap_gb=0.001)
    most = engine.config.max_swap_blocks(engine.layout)
    before = engine.scheduler.stats().swap_pool_blocks
    for num_blocks in (most + 1, 2**40):
        engine.scheduler.apply(StepReport(worker_id=0, results=(), num_host_slots=(0,), num_swap_blocks=(num_blocks,)))
    assert engine.scheduler.stats().swap_pool_blocks == before
    engine.scheduler.apply(StepReport(worker_id=0, results=(), num_host_slots=(0,), num_swap_blocks=(most,)))
    assert engine.scheduler.stats().swap_pool_blocks == most


def test_a_finished_job_has_no_error():
    engine = loading_engine()
    ((job, _),) = engine.workers[0].in_flight
    for result in (
        JobResult(job_id=job.job_id, state=FINISHED, error="halted"),
        JobResult(job_id=job.job_id, state=FINISHED, failed_blocks=(0,)),
    ):
        assert report(engine, 0, result).loaded == ()
    assert engine.scheduler.stats().num_rejected_reports == 2


def test_the_swap_pool_of_a_restarted_worker_grows_again():
    engine = SwapEngine(pool=(8,))
    base = StepReport(worker_id=0, results=(), num_host_slots=(0,), num_swap_blocks=(8,), incarnation=1)
    engine.scheduler.apply(base)
    engine.start("a", tokens(9))
    engine.swap_out("a")
    engine.settle()
    update = engine.scheduler.apply(dataclasses.replace(base, incarnation=2, num_swap_blocks=(2,)))
    assert update.lost_swaps == ("a",)
    engine.out.clear()
    assert engine.scheduler.stats().swap_pool_blocks == 2
    engine.start("b", tokens(13))
    assert not engine.swap_out("b"), "three blocks"
    engine.scheduler.check_invariants()
    engine.scheduler.apply(dataclasses.replace(base, incarnation=2, num_swap_blocks=(8,)))
    engine.start("c", tokens(9))
    assert engine.swap_out("c")
    engine.scheduler.check_invariants()


def test_kv_from_before_a_reset_is_not_shared_in_the_swap_pool():
    engine = SwapEngine(num_host_chunks=12)
    stale = engine.start("stale", tokens(9))
    engine.step([engine.scheduled(stale)])
    engine.report(engine.workers[0])
    engine.scheduler.reset()
    engine.swap_out("stale")
    engine.settle()
    fresh = engine.start("fresh", tokens(9))
    fresh.contents = [("new", i) for i in range(3)]
    for worker in engine.workers:
        worker.hbm[0].update(zip(fresh.block_ids, fresh.contents, strict=True))
    engine.swap_out("fresh")
    engine.settle()
    engine.swap_in("fresh")
    engine.settle()
    engine.check(fresh)


def test_blocks_of_the_pool_are_not_found_after_a_reset():
    engine = SwapEngine()
    first = engine.start("x", tokens(9))
    engine.swap_out("x")
    engine.settle()
    engine.swap_in("x")
    engine.step()
    engine.scheduler.reset()
    fresh = engine.start("y", tokens(9))
    fresh.contents = [("new", i) for i in range(3)]
    for worker in engine.workers:
        worker.hbm[0].update(zip(fresh.block_ids, fresh.contents, strict=True))
    engine.swap_out("y")
    engine.settle()
    engine.swap_in("y")
    engine.settle()
    engine.check(fresh)
    assert first.hashes == fresh.hashes


def test_finish_forgets_a_swapped_out_request():
    engine = SwapEngine()
    engine.start("a", tokens(9))
    engine.swap_out("a")
    engine.settle()
    engine.scheduler.finish("a")
    engine.out.clear()
    engine.check_empty()


def test_a_request_does_not_load_a_chunk_again_that_failed_for_it_and_others_do():
    engine = FakeEngine(num_blocks=64)
    engine.serve("a", tokens(12))
    worker = engine.workers[0]
    engine.add("b", tokens(12))
    engine.step()
    engine.apply(worker, worker.finish(fail=True, failed_blocks=(1,)))
    engine.remove("b", preempt=True)
    assert engine.add("b", tokens(12)).num_computed == 4, "up to the chunk that failed"
    engine.remove("b")
    assert engine.add("c", tokens(12)).num_computed == 11
    engine.settle()
    engine.add("d", tokens(12))
    assert engine.requests["d"].num_computed == 11, "a success clears it"


def test_memory_lost_under_a_load_that_begins_inside_a_chunk_fails_the_right_blocks():
    engine = FakeEngine(blocks_per_chunk=2)
    prompt = tokens(24)
    engine.serve("a", prompt)
    hashes: list[BlockHash] = []
    engine.hasher.extend(hashes, prompt)
    assert engine.scheduler.match("b", hashes, num_tokens=24, num_computed_tokens=4).num_tokens == 19
    engine.scheduler.admit("b", [list(range(6))], num_loaded_tokens=19)
    (load,) = engine.step()[0].of(JobKind.LOAD)
    lost = host_block_ids(load)[1] // 2  # of the second chunk, whose first block is the load's second
    update = report(engine, 0, *engine.workers[0].finish(), lost_slots=((0, lost, lost + 1),))
    assert update.failed_loads == (FailedLoad(request_id="b", num_valid_tokens=8),)


@interpreted_only
def test_many_failed_saves_in_one_report_take_no_longer_than_one():
    engine = FakeEngine(num_blocks=2000, num_staging_blocks=2000, num_cpu_chunks=2000,
                        workers=[FakeWorker(num_host_chunks=2000)], breaker_failures=0)  # fmt: skip
    for i in range(30):
        engine.add(f"r{i}", tokens(240, start=10_000 * i))
    engine.step({f"r{i}": 240 for i in range(30)})
    worker, looked = engine.workers[0], []
    rewind = save_planner(engine.scheduler).rewind

    def counted(*args):
        looked.append(1)
        return rewind(*args)

    save_planner(engine.scheduler).rewind = counted
    engine.apply(worker, worker.finish(fail=True))
    engine.step()
    assert len(worker.in_flight) > 4, "most of them alone"
    engine.apply(worker, worker.finish(fail=True))
    assert len(looked) == 2


@interpreted_only
def test_a_request_with_a_chunk_that_backs_off_costs_nothing():
    engine = FakeEngine(breaker_failures=0, breaker_retry_s=100.0)
    engine.add("a", tokens(16))
    worker = engine.workers[0]
    for _ in range(2):
        engine.step({"a": 16} if not engine.requests["a"].num_computed else None)
        engine.apply(worker, worker.finish(fail=True))
    engine.step()
    chunk_index(engine.scheduler).touch = None  # type: ignore[assignment]  # would raise
    for _ in range(10):
        assert engine.step()[0].of(JobKind.SAVE) == ()
    del chunk_index(engine.scheduler).touch
    engine.clock.now_s += 101
    assert len(engine.step()[0].of(JobKind.SAVE)) == 1


class Breaking:
    """Makes policies that raise on eviction while `broken`."""

    def __init__(self) -> None:
        self.broken = False

    def __call__(self) -> LRUPolicy:
        policy = LRUPolicy()
        real = policy.evict

        def evict(*args, **fields):
            if self.broken:
                raise RuntimeError("a fault of the policy")
            return real(*args, **fields)

        policy.evict = evict
        return policy


@interpreted_only
def test_jobs_planned_when_a_policy_raised_are_in_no_later_plan():
    """Its blocks may have other owners by then: an early save would publish their KV under the old hashes."""
    breaking = Breaking()
    breaking.broken = True
    engine = FakeEngine(
        num_cpu_chunks=4,
        workers=[FakeWorker(num_host_chunks=4)],
        policy=breaking,
        save_on="compute,preemption",
    )
    old, young = engine.add("old", tokens(12)), engine.add("young", tokens(16, start=500))
    assert old
    assert young
    engine.scheduler.preempt("old", held=dataclasses.replace(engine.held(old), num_computed_tokens=12))
    with pytest.raises(RuntimeError, match="a fault of the policy"):
        engine.scheduler.plan_step([dataclasses.replace(engine.held(young), num_computed_tokens=16)])
    engine.scheduler.check_invariants()
    assert engine.scheduler.stats().num_jobs_in_flight == 0
    assert engine.scheduler.stats().staging_reserved_blocks == 0
    breaking.broken = False
    plan = engine.scheduler.plan_step()
    assert plan.of(JobKind.EARLY_SAVE) == ()
    assert [job.block_ids for job in plan.jobs] == [tuple(young.block_ids)]
    engine.scheduler.check_invariants()


@interpreted_only
def test_a_load_planned_when_a_policy_raised_is_recomputed():
    breaking = Breaking()
    engine = FakeEngine(num_cpu_chunks=4, workers=[FakeWorker(num_host_chunks=4)], policy=breaking)
    engine.add("first", tokens(16))
    engine.step({"first": 16})
    engine.settle()
    found = match(engine, "again", tokens(16))
    assert found == 15
    engine.scheduler.admit("again", [[50, 51, 52, 53]], num_loaded_tokens=found)
    other = engine.add("other", tokens(16, start=500))
    assert other
    breaking.broken = True
    with pytest.raises(RuntimeError, match="a fault of the policy"):
        engine.scheduler.plan_step([dataclasses.replace(engine.held(other), num_computed_tokens=16)])
    assert engine.scheduler.take_update().failed_loads == (FailedLoad(request_id="again", num_valid_tokens=0),)
    engine.scheduler.finish("again")
    breaking.broken = False
    plan = engine.scheduler.plan_step()
    assert (plan.of(JobKind.LOAD), plan.cancelled_job_ids) == ((), ())
    engine.scheduler.check_invariants()


@pytest.fixture
def faulty():
    """A policy, and the names of its methods that raise."""
    names: set[str] = set()

    class FaultyLRU(LRUPolicy):  # type: ignore[misc]
        def touch(self, *args, **kwargs):
            assert "touch" not in names, "the policy is faulty"
            super().touch(*args, **kwargs)

        def remove(self, *args, **kwargs):
            assert "remove" not in names, "the policy is faulty"
            super().remove(*args, **kwargs)

    return FaultyLRU, names


@interpreted_only
def test_a_load_from_lost_memory_fails_although_the_policy_raises(faulty):
    cls, names = faulty
    engine = FakeEngine(policy=cls)
    engine.serve("a", tokens(17))
    engine.serve("removed at once", tokens(17, start=500))
    request = engine.add("again", tokens(17))
    assert request.num_computed == 16
    worker = engine.workers[0]
    worker.lose(0, 64, blocks_per_chunk=1)
    names.add("remove")
    with pytest.raises(AssertionError, match="the policy is faulty"):
        engine.apply(worker, [])
    names.clear()
    failed: list[FailedLoad] = []
    for _ in range(3):
        engine.step()
        failed += engine.apply(worker, worker.finish()).failed_loads
    assert [(load.request_id, load.num_valid_tokens) for load in failed] == [("again", 0)]


@interpreted_only
def test_all_that_a_report_has_lost_is_lost_although_the_policy_raises(faulty):
    cls, names = faulty
    engine = FakeEngine(policy=cls)
    for name, start in (("a", 0), ("b", 500)):
        engine.serve(name, tokens(17, start=start))
    worker = engine.workers[0]
    worker.lose(0, 4, blocks_per_chunk=1)
    worker.lose(4, 64, blocks_per_chunk=1)
    names.add("remove")
    with pytest.raises(AssertionError, match="the policy is faulty"):
        engine.apply(worker, [])
    names.clear()
    assert engine.add("again", tokens(17)).num_computed == 0
    assert engine.add("b again", tokens(17, start=500)).num_computed == 0


@interpreted_only
def test_a_promise_stands_if_the_policy_raises_when_it_is_taken(faulty):
    engine = FakeEngine(num_cpu_chunks=8, workers=[FakeWorker(num_host_chunks=8)], policy=faulty[0])
    engine.serve("first", tokens(16))
    num_found = match(engine, "again", tokens(16))
    faulty[1].add("touch")
    with pytest.raises(AssertionError, match="faulty"):
        engine.scheduler.admit("again", [[50, 51, 52, 53]], num_loaded_tokens=5)
    faulty[1].clear()
    engine.scheduler.check_invariants()
    engine.scheduler.admit("again", [[50, 51, 52, 53]], num_loaded_tokens=num_found)
    (load,) = engine.scheduler.plan_step().of(JobKind.LOAD)
    assert load.num_blocks == 4


@interpreted_only
def test_what_is_taken_of_a_promise_stands_if_the_policy_raises_when_the_rest_is_released(faulty):
    engine = FakeEngine(num_cpu_chunks=8, workers=[FakeWorker(num_host_chunks=8)], policy=faulty[0])
    engine.serve("first", tokens(16))
    match(engine, "again", tokens(16))
    last = chunk_index(engine.scheduler).find(request_table(engine.scheduler)["again"].keys)[3]
    report(engine, 0, lost_slots=((0, last, last + 1),))
    faulty[1].add("remove")
    with pytest.raises(AssertionError, match="faulty"):
        engine.scheduler.admit("again", [[50, 51, 52, 53]], num_loaded_tokens=4)
    faulty[1].clear()
    with pytest.raises(RequestError, match="admits 8 loaded tokens; expected 0 to the 4 promised"):
        engine.scheduler.admit("again", [[50, 51, 52, 53]], num_loaded_tokens=8)
    engine.scheduler.admit("again", [[50, 51, 52, 53]], num_loaded_tokens=4)
    plan, _ = engine.step({})
    (load,) = plan.of(JobKind.LOAD)
    assert load.num_blocks == 1
    engine.scheduler.finish("again")
    engine.settle()
    assert not chunk_states(engine.scheduler).pins, "nothing is pinned any more"


@interpreted_only
@pytest.mark.parametrize("call", ["preempt", "finish"])
def test_a_load_is_cancelled_although_the_policy_raises(faulty, call):
    """The engine has taken the request's blocks back, whatever the call raises: the load would write into others'."""
    engine = FakeEngine(num_cpu_chunks=8, workers=[FakeWorker(num_host_chunks=8)], policy=faulty[0])
    engine.serve("first", tokens(16))
    num_found = match(engine, "again", tokens(16))
    engine.scheduler.admit("again", [[50, 51, 52, 53]], num_loaded_tokens=num_found)
    (load,) = engine.scheduler.plan_step().of(JobKind.LOAD)
    faulty[1].add("touch")
    with pytest.raises(AssertionError, match="faulty"):
        getattr(engine.scheduler, call)("again")
    faulty[1].clear()
    assert engine.scheduler.plan_step().cancelled_job_ids == (load.job_id,)
    engine.scheduler.check_invariants()
    assert request_table(engine.scheduler).get("again") is None


@interpreted_only
@pytest.mark.parametrize("call", ["preempt", "finish"])
@pytest.mark.parametrize("raising", ["touch", "remove"])
def test_a_load_that_waits_is_not_sent_although_the_policy_raises(faulty, call, raising):
    """No worker knows of it: it ends in that call, and nothing of it stays pinned or reserved."""
    worker = FakeWorker(num_host_chunks=8)
    engine = FakeEngine(num_cpu_chunks=8, workers=[worker], policy=faulty[0])
    engine.serve("first", tokens(16))
    num_found = match(engine, "again", tokens(16))
    engine.scheduler.admit("again", [[50, 51, 52, 53]], num_loaded_tokens=num_found)
    if raising == "remove":
        worker.lose(0, 8, blocks_per_chunk=1)  # what is pinned is removed when it is unpinned
        engine.apply(worker, [])
    faulty[1].add(raising)
    with pytest.raises(AssertionError, match="faulty"):
        getattr(engine.scheduler, call)("again")
    faulty[1].clear()
    plan = engine.scheduler.plan_step()
    assert not plan.of(JobKind.LOAD)
    assert not plan.cancelled_job_ids
    assert request_table(engine.scheduler).get("again") is None
    assert engine.scheduler.stats().staging_reserved_blocks == 0
    assert not chunk_states(engine.scheduler).pins, "nothing is pinned any more"
    if raising == "touch":  # else the policy still orders what it was to remove
        engine.scheduler.check_invariants()


@interpreted_only
def test_a_probe_is_given_up_although_the_policy_raises(faulty):
    worker = FakeWorker(num_host_chunks=16)
    engine = FakeEngine(num_cpu_chunks=16, workers=[worker], policy=faulty[0], breaker_failures=1)
    engine.add("first", tokens(16))
    engine.step({"first": 16})
    engine.settle()
    engine.add("failing", tokens(16))
    engine.step()
    engine.apply(worker, worker.finish(fail=True))
    engine.clock.now_s += 1000  # loads are resumed with a probe
    assert match(engine, "probe", tokens(16))
    worker.lose(0, 2, blocks_per_chunk=1)
    engine.apply(worker, [])
    faulty[1].add("remove")
    with pytest.raises(AssertionError, match="faulty"):
        engine.scheduler.release("probe")
    faulty[1].clear()
    assert engine.scheduler.stats().staging_reserved_blocks == 0
    engine.scheduler.finish("probe")
    engine.clock.now_s += 1000
    engine.serve("other", tokens(16, start=1000))
    assert match(engine, "second probe", tokens(16, start=1000)), "or loads were suspended for ever"
