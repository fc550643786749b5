"""OffloadScheduler, event by event. Many names are those of the behaviours in the design notes."""

import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest

from tests.core.fakes import BLOCK_SIZE, LAYOUT, POISON, FakeEngine, FakeWorker, tokens
from tests.inside.scheduler import request_table
from tests.jobs import host_block_ids
from tpu_offload import (
    BlockHasher,
    FailedLoad,
    JobResult,
    JobState,
    Match,
    MatchState,
    OffloadConfig,
    OffloadScheduler,
    RequestError,
    ScheduledRequest,
    StepReport,
    Update,
)
from tpu_offload.errors import ConfigError
from tpu_offload.types import BlockHash, Direction, JobKind


def test_a_prompt_served_twice_is_loaded_the_second_time() -> None:
    engine = FakeEngine()
    assert engine.serve("a", tokens(18)) == 0
    assert engine.serve("b", tokens(18)) == 16
    stats = engine.scheduler.stats()
    assert (stats.saved_blocks, stats.loaded_blocks, stats.loaded_tokens) == (4, 4, 16)
    assert stats.saved_nbytes == 4 * LAYOUT.block_nbytes
    assert stats.staging_reserved_blocks == 0
    assert stats.save_s == 0.5
    engine.scheduler.check_invariants()


def test_a_full_match_leaves_one_token_to_compute() -> None:
    engine = FakeEngine()
    engine.serve("a", tokens(16))
    assert engine.serve("b", tokens(16)) == 15
    assert engine.scheduler.stats().loaded_blocks == 4, "the last block comes along"


def test_a_prefix_in_hbm_is_not_loaded_again() -> None:
    engine = FakeEngine()
    engine.serve("a", tokens(18))
    hashes: list[BlockHash] = []
    engine.hasher.extend(hashes, tokens(18))
    match = engine.scheduler.match
    assert match("b", hashes, num_tokens=18, num_computed_tokens=8).num_tokens == 8
    assert match("b", hashes, num_tokens=18, num_computed_tokens=16).num_tokens == 0
    within = match("b", hashes, num_tokens=18, num_computed_tokens=17)
    assert within.num_tokens == 0, "inside a block there is nothing to load"
    assert engine.scheduler.stats().staging_reserved_blocks == 0, "asking again replaced the first promise"


def test_another_salt_or_layout_never_matches() -> None:
    engine = FakeEngine()
    engine.serve("a", tokens(16))
    salted: list[BlockHash] = []
    engine.hasher.extend(salted, tokens(16), cache_salt="tenant")
    assert engine.scheduler.match("b", salted, num_tokens=16, num_computed_tokens=0).num_tokens == 0


def test_lookup_pins_so_that_a_promise_cannot_be_evicted() -> None:
    engine = FakeEngine(num_cpu_chunks=4, workers=[FakeWorker(num_host_chunks=4)])
    engine.serve("a", tokens(16))
    hashes: list[BlockHash] = []
    engine.hasher.extend(hashes, tokens(16))
    assert engine.scheduler.match("b", hashes, num_tokens=17, num_computed_tokens=0).num_tokens == 16
    engine.serve("c", tokens(16, start=1000))
    assert engine.scheduler.stats().num_evicted_chunks == 0
    assert engine.scheduler.stats().dropped_save_blocks == 4, "what found no room is counted"
    engine.scheduler.release("b")
    engine.serve("d", tokens(16, start=1000))
    assert engine.scheduler.stats().num_evicted_chunks == 4
    engine.scheduler.check_invariants()


def test_a_chunk_is_loadable_only_after_all_workers_acknowledged_its_save() -> None:
    workers = [FakeWorker(0), FakeWorker(1)]
    engine = FakeEngine(workers=workers)
    a = engine.add("a", tokens(8))
    engine.step({"a": 8})
    engine.apply(workers[0], workers[0].finish())
    b = engine.add("b", tokens(8))
    assert b.num_computed == 0
    engine.remove("b")
    engine.apply(workers[1], workers[1].finish())
    assert engine.add("c", tokens(8)).num_computed == 7
    assert a.num_computed == 8


def test_duplicate_late_and_unknown_results_change_nothing_and_are_counted() -> None:
    workers = [FakeWorker(0), FakeWorker(1)]
    engine = FakeEngine(workers=workers)
    engine.add("a", tokens(8))
    engine.step({"a": 8})
    results = workers[0].finish()
    for _ in range(3):
        engine.apply(workers[0], results)
    has_jobs = engine.scheduler.has_jobs
    assert has_jobs, "one worker has not reported"
    engine.apply(workers[0], [JobResult(job_id=999, state=JobState.FINISHED)])
    engine.apply(workers[1], [JobResult(job_id=results[0].job_id, state=JobState.SENT)])
    engine.scheduler.apply(
        StepReport(
            worker_id=7, results=(JobResult(job_id=results[0].job_id, state=JobState.FINISHED),), num_host_slots=(1000,)
        )
    )
    assert engine.scheduler.stats().num_ignored_results == 3
    assert engine.scheduler.stats().num_rejected_reports == 2
    assert engine.scheduler.stats().num_host_chunks == 64
    engine.apply(workers[1], workers[1].finish())
    assert not engine.scheduler.has_jobs
    engine.scheduler.check_invariants()


class Unnamed:
    def __repr__(self) -> str:
        raise ValueError("no repr")


@pytest.mark.parametrize("value", [np.array([3]), np.array([0, 1]), np.array([]), Unnamed(), (Unnamed(),), [], None])
@pytest.mark.parametrize("name", ["num_swap_blocks", "lost_slots", "lost_swap_blocks", "num_host_slots", "worker_id"])
def test_a_report_of_other_types_is_ignored(name, value):
    engine = FakeEngine()
    engine.scheduler.apply(dataclasses.replace(engine.workers[0].report(), **{name: value}))
    assert engine.scheduler.stats().num_rejected_reports == 1
    engine.scheduler.check_invariants()


@pytest.mark.parametrize("name", ["failed_blocks", "missing_chunks", "num_found", "job_id", "error", "duration_s"])
def test_a_result_of_other_types_is_ignored(name):
    engine = FakeEngine()
    values: list[Any] = [np.array([3]), np.array([]), Unnamed(), None]
    for value in values:
        result = dataclasses.replace(JobResult(job_id=0, state=JobState.FINISHED), **{name: value})
        engine.scheduler.apply(engine.workers[0].report([result]))
    assert engine.scheduler.stats().num_rejected_reports == 4


@pytest.mark.parametrize("can_wait", [0, None, np.False_, np.True_, 1])
def test_can_wait_of_another_type(can_wait):
    engine = FakeEngine()
    hashes = [BlockHash(b"16 bytes of hash")]
    match = engine.scheduler.match("a", hashes, num_tokens=5, num_computed_tokens=0, can_wait=can_wait)
    assert match.num_tokens == 0


def test_it_says_whether_loads_are_in_flight() -> None:
    worker = FakeWorker()
    engine = FakeEngine(workers=[worker])
    engine.add("a", tokens(18))
    engine.step({"a": 18})
    seen = [engine.scheduler.has_loads]
    engine.apply(worker, worker.finish())
    engine.remove("a")
    engine.add("b", tokens(18))
    engine.step({})
    seen.append(engine.scheduler.has_loads)
    engine.apply(worker, worker.finish())
    seen.append(engine.scheduler.has_loads)
    assert seen == [False, True, False], "not a save, a load, and its end"


def test_two_requests_that_miss_the_same_prefix_cause_one_save() -> None:
    engine = FakeEngine()
    engine.add("a", tokens(12))
    engine.add("b", tokens(12))
    plan, _ = engine.step({"a": 12, "b": 12})
    assert sum(job.num_blocks for job in plan.of(JobKind.SAVE)) == 3


def test_two_requests_that_hit_the_same_prefix_while_it_loads_are_both_safe() -> None:
    engine = FakeEngine()
    engine.serve("a", tokens(12))
    engine.add("b", tokens(13))
    engine.add("c", tokens(13))
    assert sorted(engine.settle().loaded) == ["b", "c"]
    engine.scheduler.check_invariants()


def test_saves_of_a_prefix_that_failed_under_another_request_are_offered_again() -> None:
    engine = FakeEngine()
    engine.add("a", tokens(8))
    engine.add("b", tokens(8))
    engine.step({"a": 8})
    plan, _ = engine.step({"b": 8})
    assert plan.of(JobKind.SAVE) == ()
    worker = engine.workers[0]
    engine.apply(worker, worker.finish(fail=True))
    engine.remove("a")
    plan, _ = engine.step()
    assert [job.num_blocks for job in plan.of(JobKind.SAVE)] == [2]
    engine.settle()
    assert engine.serve("c", tokens(9)) == 8


def test_the_last_sampled_token_never_completes_a_saved_block() -> None:
    engine = FakeEngine(decode_save=True)
    request = engine.add("a", tokens(7))
    assert request is not None
    engine.step({"a": 7})
    request.tokens.append(7)  # sampled: known, hashed, but its KV is not computed
    engine.grow_hashes(request)
    assert len(request.hashes) == 2
    plan, _ = engine.step()
    assert plan.of(JobKind.SAVE) == ()
    plan, _ = engine.step({"a": 1})
    assert [job.num_blocks for job in plan.of(JobKind.SAVE)] == [1]


def test_only_prompts_are_saved_unless_decode_save_is_on() -> None:
    for decode_save, expected in ((False, 2), (True, 4)):
        engine = FakeEngine(decode_save=decode_save)
        request = engine.add("a", tokens(8))
        assert request is not None
        engine.step({"a": 8})
        request.tokens += tokens(8, start=500)
        request.block_ids += [engine.free_blocks.pop() for _ in range(2)]
        engine.grow_hashes(request)
        num_prompt_tokens, num_blocks = 8, 0
        request.num_computed = 16
        plan = engine.scheduler.plan_step([_scheduled(request, num_prompt_tokens)])
        num_blocks = 2 + sum(job.num_blocks for job in plan.of(JobKind.SAVE))
        assert num_blocks == expected


def _scheduled(request, num_prompt_tokens):
    from tpu_offload import ScheduledRequest

    return ScheduledRequest(
        request_id=request.request_id,
        block_tables=[request.block_ids],
        block_hashes=request.hashes,
        num_prompt_tokens=num_prompt_tokens,
        num_computed_tokens=request.num_computed,
    )


def test_chunked_prefill_leaves_no_hole_when_a_step_found_no_staging() -> None:
    engine = FakeEngine(num_staging_blocks=2)
    engine.add("a", tokens(24))
    engine.step({"a": 8})  # takes both staging blocks
    plan, _ = engine.step({"a": 8})
    assert plan.of(JobKind.SAVE) == ()
    assert engine.scheduler.stats().deferred_save_blocks == 2
    worker = engine.workers[0]
    engine.apply(worker, worker.finish())
    plan, _ = engine.step({"a": 8})  # the refused ones come first
    request = engine.requests["a"]
    assert plan.of(JobKind.SAVE)[0].block_ids == tuple(request.block_ids[2:4])
    engine.apply(worker, worker.finish())
    engine.settle()
    engine.step()
    engine.settle()
    engine.remove("a")
    assert engine.scheduler.stats().dropped_save_blocks == 0
    assert engine.scheduler.stats().num_resident_chunks == 6


def test_a_chunk_never_saved_for_want_of_room_counts_once_as_dropped() -> None:
    engine = FakeEngine(num_staging_blocks=2)
    engine.add("a", tokens(20))
    engine.step({"a": 20})
    engine.step()
    engine.remove("a")
    assert engine.scheduler.stats().dropped_save_blocks == 3
    assert engine.scheduler.stats().staging_peak_blocks == 2


def test_a_load_larger_than_the_staging_buffer_is_not_cut() -> None:
    engine = FakeEngine(num_staging_blocks=3)
    engine.add("a", tokens(20))
    engine.step({"a": 20})
    engine.settle()
    engine.step()
    engine.settle()
    engine.remove("a")
    assert engine.serve("b", tokens(20)) == 19
    assert engine.scheduler.stats().dropped_load_blocks == 0
    assert engine.scheduler.stats().staging_peak_blocks == 3


def test_a_load_without_staging_blocks_is_counted_when_the_engine_continues_without_it() -> None:
    engine = FakeEngine(num_staging_blocks=2, load_wait_s=0)
    engine.serve("a", tokens(8))
    engine.add("busy", tokens(9, start=400))
    engine.step({"busy": 9})  # its save holds both staging blocks
    assert engine.add("b", tokens(8)).num_computed == 0
    assert engine.add("waits", tokens(8)).num_computed == 0
    engine.scheduler.release("waits")
    engine.remove("waits")
    engine.remove("b")
    assert engine.scheduler.stats().dropped_load_blocks == 2


def test_an_evicted_head_is_saved_again_by_the_request_that_still_holds_it() -> None:
    engine = FakeEngine(num_cpu_chunks=4, workers=[FakeWorker(num_host_chunks=4)])
    engine.add("a", tokens(16))
    engine.step({"a": 8})
    engine.settle()
    engine.serve("b", tokens(16, start=1000))  # takes all four slots
    plan, _ = engine.step({"a": 8})
    assert plan.of(JobKind.SAVE)[0].block_ids == tuple(engine.requests["a"].block_ids[:4])
    engine.settle()
    engine.remove("a")
    assert engine.serve("c", tokens(17)) == 16


def test_a_prompt_longer_than_the_host_tier_never_evicts_its_own_head() -> None:
    engine = FakeEngine(num_cpu_chunks=3, workers=[FakeWorker(num_host_chunks=3)])
    engine.add("a", tokens(20))
    engine.step({"a": 20})
    for _ in range(3):
        engine.settle()
        engine.step()
    assert engine.scheduler.stats().num_evicted_chunks == 0
    assert engine.add("b", tokens(20)).num_computed == 12


def test_chunks_lost_while_there_is_no_room_are_counted_too() -> None:
    engine = FakeEngine(num_staging_blocks=2)
    engine.serve("x", tokens(8))
    engine.add("a", tokens(20, start=100))
    engine.step({"a": 20})  # saves two, three find no room
    worker = engine.workers[0]
    engine.apply(worker, worker.finish(fail=True))
    engine.add("y", tokens(8))  # its load takes the staging blocks
    engine.step()
    engine.remove("a")
    assert engine.scheduler.stats().dropped_save_blocks == 5


def test_a_call_never_evicts_a_chunk_that_it_offers() -> None:
    engine = FakeEngine(num_cpu_chunks=3, workers=[FakeWorker(num_host_chunks=3)])
    engine.serve("a", tokens(20))
    assert engine.scheduler.stats().num_evicted_chunks == 0
    assert engine.serve("b", tokens(20)) == 12


@pytest.mark.parametrize("staged", [False, True])
def test_abort_while_loading_leaves_nothing_and_never_writes_into_the_next_owner(staged) -> None:
    engine = FakeEngine(workers=[FakeWorker(staged=staged)], num_blocks=5)
    engine.serve("a", tokens(20))
    engine.add("b", tokens(20))
    engine.step()
    engine.remove("b")
    engine.add("c", tokens(20, start=900))
    worker = engine.workers[0]
    _, [results] = engine.step({"c": 20})
    engine.apply(worker, results + worker.finish())
    engine.check_bytes(engine.requests["c"], 20)
    engine.settle()
    assert engine.scheduler.stats().staging_reserved_blocks == 0
    engine.scheduler.check_invariants()


def test_abort_before_the_load_was_sent_ends_the_job_at_once() -> None:
    engine = FakeEngine()
    engine.serve("a", tokens(20))
    engine.add("b", tokens(20))
    engine.remove("b")
    assert not engine.scheduler.has_jobs
    plan, _ = engine.step()
    assert plan.empty
    engine.scheduler.check_invariants()


def test_abort_while_queued_releases_the_promise() -> None:
    engine = FakeEngine()
    engine.serve("a", tokens(20))
    hashes: list[BlockHash] = []
    engine.hasher.extend(hashes, tokens(20))
    engine.scheduler.match("b", hashes, num_tokens=20, num_computed_tokens=0)
    engine.scheduler.finish("b")
    assert engine.scheduler.stats().staging_reserved_blocks == 0
    engine.scheduler.check_invariants()


def test_a_block_freed_and_granted_again_under_a_pending_save_is_saved_with_its_old_bytes() -> None:
    engine = FakeEngine(num_blocks=2)
    engine.add("a", tokens(8))
    engine.step({"a": 8})
    engine.remove("a")
    engine.add("b", tokens(8, start=100))
    engine.step({"b": 8})
    engine.settle()
    engine.remove("b")
    assert engine.serve("c", tokens(8)) == 7
    assert engine.serve("d", tokens(8, start=100)) == 7


def test_preempt_and_resume_reloads_those_blocks_even_during_its_own_old_load() -> None:
    engine = FakeEngine(num_blocks=12, workers=[FakeWorker(staged=True)])
    engine.serve("a", tokens(16))
    engine.add("b", tokens(18))
    engine.step()
    engine.remove("b", preempt=True)
    assert engine.add("b", tokens(18)).num_computed == 16, "it does not wait for its cancelled load"
    engine.scheduler.check_invariants()
    assert engine.settle().loaded == ("b",)
    engine.check_bytes(engine.requests["b"], 16)


def test_a_failed_load_is_recomputed_by_that_request_only_and_not_retried_forever() -> None:
    engine = FakeEngine(num_blocks=16)
    engine.serve("a", tokens(12))
    engine.serve("other", tokens(12, start=300))
    engine.add("b", tokens(12))
    engine.step()
    worker = engine.workers[0]
    update = engine.apply(worker, worker.finish(fail=True))
    assert update.failed_loads == (FailedLoad(request_id="b", num_valid_tokens=0),)
    assert engine.scheduler.stats().num_failed_jobs == 1
    engine.remove("b")
    assert engine.add("c", tokens(12)).num_computed == 11, "an error may pass: it is tried once more"
    engine.step()
    assert engine.apply(worker, worker.finish(fail=True)).failed_loads == (
        FailedLoad(request_id="c", num_valid_tokens=0),
    )
    assert engine.add("d", tokens(12)).num_computed == 0
    assert engine.add("e", tokens(12, start=300)).num_computed == 11
    engine.scheduler.check_invariants()


def test_a_late_load_is_cancelled_before_the_engine_is_told() -> None:
    engine = FakeEngine(job_timeout_s=5.0, workers=[FakeWorker(staged=True)])
    engine.serve("a", tokens(12))
    engine.add("b", tokens(12))
    engine.step()
    engine.clock.now_s += 6
    plan, [results] = engine.step()
    assert len(plan.cancelled_job_ids) == 1
    worker = engine.workers[0]
    assert engine.apply(worker, []).failed_loads == (FailedLoad(request_id="b", num_valid_tokens=0),)
    assert engine.scheduler.stats().staging_reserved_blocks == 3, "the copy may still run"
    assert engine.scheduler.stats().num_timed_out_jobs == 1
    assert not engine.scheduler.has_jobs
    engine.apply(worker, results)
    assert engine.scheduler.stats().staging_reserved_blocks == 0
    assert engine.scheduler.stats().num_ignored_results == 1
    engine.scheduler.check_invariants()


def test_a_late_save_is_not_published_and_its_slots_wait_for_the_report() -> None:
    engine = FakeEngine(job_timeout_s=5.0, num_cpu_chunks=3, workers=[FakeWorker(num_host_chunks=3)])
    engine.add("a", tokens(12))
    engine.step({"a": 12})
    engine.clock.now_s += 6
    engine.remove("a")
    engine.add("b", tokens(12, start=50))
    plan, _ = engine.step({"b": 12})
    assert plan.of(JobKind.SAVE) == (), "the slots may still be written"
    stats = engine.scheduler.stats()
    assert (stats.num_quarantined_chunks, stats.staging_reserved_blocks) == (3, 3)
    worker = engine.workers[0]
    engine.apply(worker, worker.finish())
    stats = engine.scheduler.stats()
    assert (stats.num_quarantined_chunks, stats.staging_reserved_blocks) == (0, 0)
    assert engine.add("c", tokens(12)).num_computed == 0
    assert engine.scheduler.stats().num_timed_out_jobs == 1
    engine.scheduler.check_invariants()


def test_reset_while_saves_and_loads_are_in_flight_serves_nothing_stale() -> None:
    engine = FakeEngine(num_blocks=32)
    engine.serve("a", tokens(12))
    engine.add("loading", tokens(12))
    engine.add("saving", tokens(12, start=100))
    engine.step({"saving": 12})
    hashes: list[BlockHash] = []
    engine.hasher.extend(hashes, tokens(12))
    engine.scheduler.match("matched", hashes, num_tokens=12, num_computed_tokens=0)
    engine.scheduler.reset()
    found = engine.scheduler.match("x", hashes, num_tokens=12, num_computed_tokens=0)
    assert found.num_tokens == 0, "pinned ones neither"
    with pytest.raises(RequestError, match="to the 0 promised"):
        engine.scheduler.admit("matched", [[1, 2, 3]], num_loaded_tokens=12)
    worker = engine.workers[0]
    update = engine.apply(worker, worker.finish())
    assert update.failed_loads == (FailedLoad(request_id="loading", num_valid_tokens=0),)
    engine.add("half", tokens(12, start=200))
    engine.step({"half": 4})
    engine.scheduler.reset()
    plan, _ = engine.step({"half": 8})
    assert plan.of(JobKind.SAVE) == (), "KV from before the reset is not saved after it"
    engine.settle()
    assert engine.scheduler.stats().num_resident_chunks == 0
    engine.remove("half")
    engine.remove("saving")
    engine.remove("loading")
    engine.scheduler.check_invariants()
    assert engine.serve("after", tokens(12)) == 0
    assert engine.serve("again", tokens(12)) == 11


def test_admitting_fewer_tokens_than_promised_releases_the_rest() -> None:
    engine = FakeEngine(blocks_per_chunk=2)
    engine.serve("a", tokens(24))
    hashes: list[BlockHash] = []
    engine.hasher.extend(hashes, tokens(24))
    assert engine.scheduler.match("b", hashes, num_tokens=24, num_computed_tokens=4).num_tokens == 19
    engine.scheduler.admit("b", [list(range(6))], num_loaded_tokens=8)
    engine.scheduler.check_invariants()
    assert engine.scheduler.stats().staging_reserved_blocks == 2


def test_invalid_engine_calls_are_errors_that_change_nothing() -> None:
    engine = FakeEngine()
    engine.serve("a", tokens(16))
    hashes: list[BlockHash] = []
    engine.hasher.extend(hashes, tokens(16))
    scheduler = engine.scheduler
    with pytest.raises(RequestError, match="expected 0 to"):
        scheduler.match("b", hashes, num_tokens=4, num_computed_tokens=8)
    scheduler.match("b", hashes, num_tokens=16, num_computed_tokens=0)
    with pytest.raises(RequestError, match="99 loaded tokens; expected 0 to the 15 promised"):
        scheduler.admit("b", [[1, 2, 3, 4]], num_loaded_tokens=99)
    with pytest.raises(RequestError, match="has 1 blocks; its load needs 4"):
        scheduler.admit("b", [[1]], num_loaded_tokens=15)
    scheduler.check_invariants()
    scheduler.admit("b", [[1, 2, 3, 4]], num_loaded_tokens=15)
    with pytest.raises(RequestError, match="in flight"):
        scheduler.match("b", hashes, num_tokens=16, num_computed_tokens=0)
    scheduler.finish("nobody")
    scheduler.preempt("nobody")
    scheduler.release("nobody")
    scheduler.check_invariants()


def test_nothing_happens_when_a_size_is_zero() -> None:
    for setting in ("num_staging_blocks", "staging_buffer_tokens", "num_cpu_chunks"):
        scheduler = OffloadScheduler(OffloadConfig.create(**{setting: 0}), LAYOUT)
        engine = FakeEngine()
        hashes: list[BlockHash] = []
        engine.hasher.extend(hashes, tokens(16))
        assert scheduler.match("a", hashes, num_tokens=16, num_computed_tokens=0).num_tokens == 0
        scheduler.admit("a", [[0, 1, 2, 3]], num_loaded_tokens=0)
        request = engine.add("a", tokens(16))
        request.num_computed = 16
        assert scheduler.plan_step([_scheduled(request, 16)]).empty
        assert scheduler.stats().dropped_save_blocks == 0


def test_a_staging_buffer_under_one_chunk_is_an_error_with_the_remedy() -> None:
    config = OffloadConfig.create(num_staging_blocks=3, blocks_per_chunk=4, load_path="staged")
    with pytest.raises(ConfigError, match=r"TPU_OFFLOAD_NUM_STAGING_BLOCKS=3 .* at least 4"):
        OffloadScheduler(config, LAYOUT)


def test_plans_and_reports_survive_pickling() -> None:
    engine = FakeEngine()
    engine.serve("a", tokens(16))
    engine.add("b", tokens(16))
    engine.add("c", tokens(8, start=77))
    plan, _ = engine.step({"c": 8})
    assert plan.of(JobKind.LOAD)
    assert plan.of(JobKind.SAVE)
    assert pickle.loads(pickle.dumps(plan)) == plan
    report = engine.workers[0].report(engine.workers[0].finish())
    assert pickle.loads(pickle.dumps(report)) == report


@pytest.mark.parametrize("blocks_per_chunk", [2, 3])
def test_chunks_of_several_blocks_save_whole_chunks_and_load_unaligned_ends(blocks_per_chunk) -> None:
    engine = FakeEngine(blocks_per_chunk=blocks_per_chunk)
    engine.serve("a", tokens(7 * BLOCK_SIZE))
    saved = 7 // blocks_per_chunk * blocks_per_chunk
    assert engine.scheduler.stats().saved_blocks == saved
    hashes: list[BlockHash] = []
    engine.hasher.extend(hashes, tokens(7 * BLOCK_SIZE))
    # One block in HBM already: the first chunk's other blocks are loaded from inside its slot.
    num_tokens = engine.scheduler.match("b", hashes, num_tokens=28, num_computed_tokens=BLOCK_SIZE).num_tokens
    assert num_tokens == (saved - 1) * BLOCK_SIZE
    engine.scheduler.admit("b", [list(range(10, 17))], num_loaded_tokens=num_tokens)
    plan, _ = engine.step()
    job = plan.of(JobKind.LOAD)[0]
    assert job.block_ids == tuple(range(11, 10 + saved))
    worker = engine.workers[0]
    assert [worker.host[i] for i in host_block_ids(job)] == hashes[1:saved]
    assert POISON not in worker.host.values()


def test_a_load_in_pieces_may_be_cut_inside_a_chunk() -> None:
    engine = FakeEngine(blocks_per_chunk=2, num_staging_blocks=3)
    engine.add("a", tokens(16))
    engine.step({"a": 16})
    engine.settle()
    engine.step()
    engine.settle()
    engine.remove("a")
    assert engine.serve("b", tokens(17)) == 16
    engine.scheduler.check_invariants()


def test_slots_become_usable_when_every_worker_has_them() -> None:
    workers = [FakeWorker(0, num_host_chunks=2), FakeWorker(1, num_host_chunks=5)]
    engine = FakeEngine(workers=workers)
    assert engine.scheduler.stats().num_host_chunks == 2
    workers[0].num_host_chunks = 9
    engine.apply(workers[0], [])
    assert engine.scheduler.stats().num_host_chunks == 5


def test_recency_follows_requests_not_the_order_in_which_copies_finish() -> None:
    engine = FakeEngine(num_cpu_chunks=4, workers=[FakeWorker(num_host_chunks=4)], eviction_policy="lru")
    engine.add("long", tokens(8))
    engine.step({"long": 8})
    engine.settle()
    engine.serve("short", tokens(8, start=100))
    engine.remove("long")  # used until now, so "short" is the older one
    engine.serve("new", tokens(8, start=200))
    assert engine.add("a", tokens(9)).num_computed == 8
    assert engine.add("b", tokens(9, start=100)).num_computed == 0


def test_a_save_without_room_is_retried_without_the_engine_naming_the_request() -> None:
    engine = FakeEngine(num_staging_blocks=2)
    request = engine.add("a", tokens(20))
    engine.step({"a": 20})
    worker = engine.workers[0]
    saved = []
    for _ in range(3):
        engine.apply(worker, worker.finish())
        plan = engine.scheduler.plan_step()
        saved += [b for job in plan.of(JobKind.SAVE) for b in job.block_ids]
        worker.end_step(plan)
    assert saved == request.block_ids[2:]
    engine.apply(worker, worker.finish())
    assert engine.scheduler.plan_step().empty
    assert engine.scheduler.stats().num_resident_chunks == 5


def test_a_failed_save_is_retried_without_the_engine_naming_the_request() -> None:
    engine = FakeEngine()
    request = engine.add("a", tokens(12))
    engine.step({"a": 12})
    worker = engine.workers[0]
    engine.apply(worker, worker.finish(fail=True))
    plan = engine.scheduler.plan_step()
    assert [job.block_ids for job in plan.of(JobKind.SAVE)] == [tuple(request.block_ids)]
    assert engine.scheduler.plan_step().empty, "once"


class _Unreadable(list):
    """A block table that must not be read."""

    def __getitem__(self, i):
        raise AssertionError("read after the request gave up its blocks")


@pytest.mark.parametrize("end", ["finish", "preempt", "match", "reset"])
def test_a_request_that_gave_up_its_blocks_is_never_read_again(end) -> None:
    engine = FakeEngine(num_staging_blocks=2)
    request = engine.add("a", tokens(20))
    engine.step({"a": 20})  # saves two, wants to save three more
    request.block_ids = _Unreadable(request.block_ids)
    engine.scheduler.plan_step([_scheduled(request, 20)])
    if end == "match":
        engine.scheduler.match("a", request.hashes, num_tokens=20, num_computed_tokens=0)
    elif end == "reset":
        engine.scheduler.reset()
    else:
        getattr(engine.scheduler, end)("a")
    worker = engine.workers[0]
    for _ in range(3):
        engine.scheduler.apply(worker.report(worker.finish(fail=True)))
        assert engine.scheduler.plan_step().empty
        engine.scheduler.check_invariants()


def test_a_step_in_which_nothing_changed_touches_no_request() -> None:
    engine = FakeEngine(num_blocks=64)
    requests = [engine.add(f"r{i}", tokens(8, start=100 * i)) for i in range(16)]
    engine.step({request.request_id: 8 for request in requests})
    while engine.scheduler.has_jobs:
        engine.settle()
        engine.step()
    for request in request_table(engine.scheduler).all():
        request.block_table = request.keys = _Unreadable()
    assert engine.scheduler.plan_step().empty


def test_a_block_table_that_grows_in_place_is_read_as_far_as_it_was_offered() -> None:
    engine = FakeEngine(num_staging_blocks=2, decode_save=True)
    request = engine.add("a", tokens(12))
    assert request is not None
    engine.step({"a": 12})
    request.block_ids.append(engine.free_blocks.pop())  # granted, not computed
    request.tokens += tokens(4, start=50)
    engine.grow_hashes(request)
    worker = engine.workers[0]
    engine.apply(worker, worker.finish())
    plan = engine.scheduler.plan_step()
    assert [job.block_ids for job in plan.of(JobKind.SAVE)] == [tuple(request.block_ids[2:3])]
    engine.apply(worker, worker.finish())
    assert engine.scheduler.plan_step().empty


def test_a_block_table_may_change_after_the_call() -> None:
    engine = FakeEngine(num_staging_blocks=2)
    request = engine.add("a", tokens(20))
    engine.step({"a": 20})
    named = tuple(request.block_ids)
    request.block_ids[:] = [99] * 3  # the list of whoever comes next
    worker = engine.workers[0]
    for first in (2, 4):
        engine.apply(worker, worker.finish())
        plan = engine.scheduler.plan_step()
        assert [block for job in plan.of(JobKind.SAVE) for block in job.block_ids] == list(named[first : first + 2])
        worker.end_step(plan)
    engine.apply(worker, worker.finish())
    assert engine.scheduler.plan_step().empty
    engine.scheduler.check_invariants()


def test_naming_a_request_again_replaces_its_blocks() -> None:
    engine = FakeEngine(num_staging_blocks=2)
    request = engine.add("a", tokens(20))
    engine.step({"a": 20})
    worker = engine.workers[0]
    engine.apply(worker, worker.finish())
    moved = [request.block_ids[0], *(block + 10 for block in request.block_ids[1:])]
    named = dataclasses.replace(_scheduled(request, 20), block_tables=[moved])
    plan = engine.scheduler.plan_step([named])
    assert [job.block_ids for job in plan.of(JobKind.SAVE)] == [tuple(moved[2:4])]


def test_naming_a_request_again_with_fewer_tokens_clears_the_offer() -> None:
    engine = FakeEngine(num_staging_blocks=2)
    request = engine.add("a", tokens(20))
    engine.step({"a": 20})
    request.num_computed = 12
    worker = engine.workers[0]
    engine.apply(worker, worker.finish())
    plan = engine.scheduler.plan_step([_scheduled(request, 20)])
    assert [job.block_ids for job in plan.of(JobKind.SAVE)] == [tuple(request.block_ids[2:3])]
    worker.end_step(plan)
    engine.apply(worker, worker.finish())
    assert engine.scheduler.plan_step().empty
    engine.remove("a")
    assert engine.scheduler.stats().dropped_save_blocks == 0


def test_a_cleared_offer_is_no_drop() -> None:
    engine = FakeEngine(num_staging_blocks=2)
    request = engine.add("a", tokens(20))
    engine.step({"a": 20})
    assert engine.scheduler.plan_step([dataclasses.replace(_scheduled(request, 20), num_computed_tokens=8)]).empty
    engine.remove("a")
    assert engine.scheduler.stats().dropped_save_blocks == 0


def test_requests_of_one_step_share_a_save_and_after_a_failure_each_has_its_own() -> None:
    engine = FakeEngine()
    for name in "abc":
        engine.add(name, tokens(8, start=ord(name) * 100))
    plan, _ = engine.step(dict.fromkeys("abc", 8))
    assert [job.num_blocks for job in plan.of(JobKind.SAVE)] == [6]
    worker = engine.workers[0]
    engine.apply(worker, worker.finish(fail=True))
    plan, _ = engine.step()
    assert [job.num_blocks for job in plan.of(JobKind.SAVE)] == [2, 2, 2]
    engine.scheduler.check_invariants()
    a, *others = worker.finish()
    engine.apply(worker, [JobResult(job_id=a.job_id, state=JobState.FAILED, error="again"), *others])
    assert engine.scheduler.plan_step().empty, "it fails for ever, and takes no other down"
    assert engine.scheduler.stats().num_resident_chunks == 4
    engine.scheduler.check_invariants()


def test_refused_saves_are_retried_in_the_order_of_waiting() -> None:
    engine = FakeEngine(num_staging_blocks=2)
    for name in "abc":
        engine.add(name, tokens(8, start=ord(name) * 100))
        engine.step({name: 8})
    worker = engine.workers[0]
    for name in "bc":
        engine.apply(worker, worker.finish())
        plan, _ = engine.step()
        assert [job.block_ids for job in plan.of(JobKind.SAVE)] == [tuple(engine.requests[name].block_ids)]


def test_a_promise_whose_host_memory_was_lost_can_be_admitted_in_part() -> None:
    engine = FakeEngine()
    engine.serve("a", tokens(16))
    hashes: list[BlockHash] = []
    engine.hasher.extend(hashes, tokens(16))
    assert engine.scheduler.match("b", hashes, num_tokens=17, num_computed_tokens=0).num_tokens == 16
    engine.scheduler.apply(StepReport(worker_id=0, results=(), num_host_slots=(64,), lost_slots=((0, 0, 64),)))
    engine.scheduler.admit("b", [[0, 1]], num_loaded_tokens=8)
    engine.scheduler.check_invariants()
    engine.scheduler.finish("b")
    engine.scheduler.check_invariants()
    assert engine.scheduler.stats().num_resident_chunks == 0


def test_blocks_that_are_not_granted_yet_are_not_saved() -> None:
    engine = FakeEngine()
    request = engine.add("a", tokens(16))
    request.num_computed = 16
    request.block_ids = request.block_ids[:2]
    plan = engine.scheduler.plan_step([_scheduled(request, 16)])
    assert plan.of(JobKind.SAVE)[0].block_ids == tuple(request.block_ids)


def test_a_load_that_one_worker_fails_and_another_never_reports_times_out() -> None:
    workers = [FakeWorker(0), FakeWorker(1)]
    engine = FakeEngine(workers=workers, job_timeout_s=5.0)
    engine.serve("a", tokens(12))
    engine.add("b", tokens(12))
    engine.step()
    assert engine.apply(workers[0], workers[0].finish(fail=True)).failed_loads == ()
    engine.clock.now_s += 6
    plan, [_, late] = engine.step()
    assert len(plan.cancelled_job_ids) == 1
    assert engine.apply(workers[0], []).failed_loads == (FailedLoad(request_id="b", num_valid_tokens=0),)
    assert engine.scheduler.stats().num_failed_jobs == 1
    engine.apply(workers[1], late)
    assert not engine.scheduler.has_jobs
    assert engine.add("c", tokens(12)).num_computed == 0, "what timed out is not offered again"
    engine.scheduler.check_invariants()


@pytest.mark.parametrize("sent", [False, True])
def test_a_load_in_flight_at_a_reset_is_cancelled_by_the_next_plan(sent) -> None:
    engine = FakeEngine(workers=[FakeWorker(staged=True)])
    engine.serve("a", tokens(12))
    engine.add("b", tokens(12))
    if sent:
        engine.step()
    engine.scheduler.reset()
    plan, (results,) = engine.step()
    assert len(plan.cancelled_job_ids) == sent
    assert plan.of(JobKind.LOAD) == ()
    assert engine.apply(engine.workers[0], results).failed_loads == (FailedLoad(request_id="b", num_valid_tokens=0),)
    assert not engine.scheduler.has_jobs
    engine.scheduler.check_invariants()


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_reset_makes_void_has_not_failed(caplog, fails) -> None:
    """An alert would fire with every new set of weights. Copies that did fail count, reset or not."""
    engine = FakeEngine(num_blocks=32)
    engine.serve("a", tokens(12))
    engine.add("loading", tokens(12))
    engine.add("saving", tokens(12, start=100))
    engine.step({"saving": 12})
    engine.scheduler.reset()
    worker = engine.workers[0]
    num_ended = len(worker.in_flight)
    assert num_ended == 2
    engine.apply(worker, worker.finish(fail=fails))
    assert not engine.scheduler.has_jobs
    assert engine.scheduler.stats().num_failed_jobs == len(caplog.records) == (num_ended if fails else 0)


def test_a_match_is_arriving_while_the_next_chunk_is_being_saved() -> None:
    engine = FakeEngine()
    engine.add("a", tokens(12))
    engine.step({"a": 12})
    worker = engine.workers[0]
    hashes: list[BlockHash] = []
    engine.hasher.extend(hashes, tokens(12))

    def match(name: str, num_computed_tokens: int = 0) -> Match:
        return engine.scheduler.match(name, hashes, num_tokens=12, num_computed_tokens=num_computed_tokens)

    assert match("b") == Match(num_tokens=0, state=MatchState.ARRIVING, until_s=engine.clock.now_s + 0.5)
    assert match("c", 12) == Match(num_tokens=0, state=MatchState.MISS), "nothing comes next"
    engine.apply(worker, worker.finish())
    assert match("b") == Match(num_tokens=11, state=MatchState.HIT)


def test_a_save_is_waited_for_at_most_save_wait_s() -> None:
    engine = FakeEngine(save_wait_s=2.0)
    engine.serve("first", tokens(8))
    engine.add("a", tokens(16))
    engine.settle()
    engine.step({"a": 8})
    hashes: list[BlockHash] = []
    engine.hasher.extend(hashes, tokens(16))

    def match() -> Match:
        return engine.scheduler.match("b", hashes, num_tokens=16, num_computed_tokens=0)

    start_s = engine.clock.now_s
    assert match() == Match(num_tokens=8, state=MatchState.ARRIVING, until_s=start_s + 2.0), "the rest is being saved"
    engine.clock.now_s += 1.5
    engine.scheduler.release("b")
    assert match() == Match(num_tokens=8, state=MatchState.ARRIVING, until_s=start_s + 2.0), "the wait began before"
    engine.clock.now_s += 0.5
    assert match() == Match(num_tokens=8, state=MatchState.HIT)
    engine.scheduler.admit("b", [[40, 41, 42, 43]], num_loaded_tokens=8)
    engine.scheduler.preempt("b")
    assert match().until_s == engine.clock.now_s + 2.0, "it has been served since"
    engine.scheduler.release("b")
    engine.scheduler.check_invariants()


def test_an_engine_does_not_have_to_wait_for_a_save() -> None:
    engine = FakeEngine(save_wait_s=0.0)
    engine.add("a", tokens(12))
    engine.step({"a": 12})
    hashes: list[BlockHash] = []
    engine.hasher.extend(hashes, tokens(12))
    assert engine.scheduler.match("b", hashes, num_tokens=12, num_computed_tokens=0).state is MatchState.MISS


def test_an_update_names_the_transfers_that_ended() -> None:
    workers = [FakeWorker(0), FakeWorker(1)]
    engine = FakeEngine(workers=workers)
    engine.add("a", tokens(12))
    engine.step({"a": 12})
    assert engine.apply(workers[0], workers[0].finish()).transfers == ()
    (transfer,) = engine.apply(workers[1], workers[1].finish()).transfers
    assert (transfer.direction, transfer.num_blocks, transfer.duration_s) == (Direction.SAVE, 3, 0.5)
    assert engine.apply(workers[1], []) == Update()


def test_the_failure_of_an_old_load_is_not_reported_to_the_request_that_returned() -> None:
    engine = FakeEngine(job_timeout_s=5.0, workers=[FakeWorker(staged=True)], num_blocks=16)
    engine.serve("a", tokens(12))
    engine.serve("x", tokens(12, start=500))
    engine.add("b", tokens(12))
    engine.step()
    engine.clock.now_s += 6
    _, [cancelled] = engine.step()  # b's load is overdue; the next report would say so
    engine.remove("b", preempt=True)
    assert engine.add("b", tokens(12, start=500)).num_computed == 11
    engine.step()
    assert engine.apply(engine.workers[0], cancelled) == Update()
    assert engine.settle().loaded == ("b",)


def test_a_save_that_keeps_failing_backs_off_and_its_slots_are_used_last() -> None:
    engine = FakeEngine()
    engine.add("a", tokens(8))
    used: set[int] = set()
    engine.step({"a": 8})
    for _ in range(10):
        worker = engine.workers[0]
        used.update(i for job, _ in worker.in_flight for i in host_block_ids(job))
        engine.apply(worker, worker.finish(fail=True))
        engine.step()
    assert engine.scheduler.stats().num_failed_jobs == 2
    assert len(used) == 4, "other slots the second time"
    engine.scheduler.check_invariants()


def test_a_failed_load_leaves_no_hole_in_saved_prefixes() -> None:
    engine = FakeEngine()
    engine.add("holder", tokens(24))
    engine.step({"holder": 20})
    engine.settle()
    worker = engine.workers[0]
    for _ in range(2):
        engine.add("b", tokens(12))
        engine.step()
        engine.apply(worker, worker.finish(fail=True))
        engine.remove("b")
    plan, _ = engine.step({"holder": 4})
    assert plan.of(JobKind.SAVE) == (), (
        "the first three failed twice and back off, and the others follow them in the prefix"
    )
    engine.clock.now_s += 6
    plan, _ = engine.step()
    assert plan.of(JobKind.SAVE)[0].num_blocks == 4, "the three that the failed load gave up, and the new one"
    engine.settle()
    assert engine.add("c", tokens(25)).num_computed == 24


def test_lost_host_memory_is_invalidated_everywhere_before_it_can_be_read() -> None:
    engine = FakeEngine(num_blocks=40)
    worker = engine.workers[0]
    engine.add("holder", tokens(13))
    engine.step({"holder": 13})
    engine.settle()
    engine.add("loading", tokens(9))
    engine.step()
    hashes: list[BlockHash] = []
    engine.hasher.extend(hashes, tokens(9))
    assert engine.scheduler.match("matched", hashes, num_tokens=9, num_computed_tokens=0).num_tokens == 8
    engine.add("saving", tokens(8, start=700))
    engine.step({"saving": 8})
    report = StepReport(worker_id=0, results=tuple(worker.finish()), num_host_slots=(64,), lost_slots=((0, 0, 64),))
    assert engine.scheduler.apply(report).failed_loads == (FailedLoad(request_id="loading", num_valid_tokens=0),)
    engine.requests["loading"].loading = False
    assert engine.scheduler.match("late", hashes, num_tokens=9, num_computed_tokens=0).num_tokens == 0
    engine.scheduler.admit("matched", [[30, 31]], num_loaded_tokens=8)
    plan, _ = engine.step()
    assert [job.num_blocks for job in plan.of(JobKind.SAVE)] == [2], "a load reads the other three slots"
    update = engine.scheduler.apply(worker.report(worker.finish()))
    assert update.failed_loads == (FailedLoad(request_id="matched", num_valid_tokens=0),), (
        "zeros were copied, whatever the worker says"
    )
    engine.scheduler.check_invariants()
    plan, _ = engine.step()
    assert [job.num_blocks for job in plan.of(JobKind.SAVE)] == [3], (
        "a request that still holds the blocks saves them again"
    )


def test_a_request_id_used_again_for_other_tokens_is_an_error() -> None:
    engine = FakeEngine()
    engine.serve("a", tokens(16))
    hashes: list[BlockHash] = []
    engine.hasher.extend(hashes, tokens(16))
    engine.scheduler.match("b", hashes, num_tokens=16, num_computed_tokens=0)
    others: list[BlockHash] = []
    engine.hasher.extend(others, tokens(16, start=50))
    with pytest.raises(RequestError, match=r"the hash of block 3 differs from that of an earlier call"):
        engine.scheduler.match("b", others, num_tokens=16, num_computed_tokens=0)
    engine.scheduler.check_invariants()
    engine.scheduler.finish("b")
    assert engine.scheduler.match("b", others, num_tokens=16, num_computed_tokens=0).num_tokens == 0


def test_a_request_id_used_again_for_a_shorter_prompt_is_an_error() -> None:
    engine = FakeEngine()
    engine.serve("a", tokens(16))
    match = engine.scheduler.match
    match("b", hashes_of(engine, tokens(16)), num_tokens=16, num_computed_tokens=0)
    others = hashes_of(engine, tokens(8, start=50))
    with pytest.raises(RequestError, match=r"the hash of block 1 differs from that of an earlier call"):
        match("b", others, num_tokens=8, num_computed_tokens=0)  # it was promised the KV of the first prompt
    named = ScheduledRequest(
        request_id="b", block_tables=[[8, 9]], block_hashes=others, num_prompt_tokens=8, num_computed_tokens=8
    )
    with pytest.raises(RequestError, match=r"the hash of block 1 differs from that of an earlier call"):
        engine.scheduler.plan_step([named])
    # Tokens 8 and 9 are not those of the first prompt, and in no full block.
    with pytest.raises(RequestError, match=r"request b has 2 block hashes, and had at least 4 in an earlier call"):
        match("b", hashes_of(engine, tokens(8)), num_tokens=10, num_computed_tokens=0)
    engine.scheduler.check_invariants()
    engine.scheduler.finish("b")
    assert match("b", hashes_of(engine, tokens(8)), num_tokens=10, num_computed_tokens=0).num_tokens == 8


def test_more_block_hashes_than_full_blocks_are_an_error() -> None:
    """As of a hasher whose blocks are smaller than the cache's: hash 3 covers 8 tokens, and block 3 ends after 16."""
    engine = FakeEngine()
    hashes: list[BlockHash] = []
    BlockHasher(LAYOUT.fingerprint(), block_size=BLOCK_SIZE // 2).extend(hashes, tokens(16))
    expected = r"request a has 8 block hashes for 16 tokens; expected at most 4, .*: make the hasher with block_size=4"
    with pytest.raises(RequestError, match=expected):
        engine.scheduler.match("a", hashes, num_tokens=16, num_computed_tokens=0)
    assert engine.scheduler.match("a", hashes[:4], num_tokens=16, num_computed_tokens=0).num_tokens == 0
    engine.scheduler.check_invariants()


def hashes_of(engine: FakeEngine, prompt: list[int]) -> list[BlockHash]:
    hashes: list[BlockHash] = []
    engine.hasher.extend(hashes, prompt)
    return hashes


def test_a_scheduler_without_workers_is_an_error() -> None:
    with pytest.raises(ConfigError, match="num_workers=0; expected at least 1"):
        OffloadScheduler(OffloadConfig.create(), LAYOUT, num_workers=0)


def test_a_report_of_more_slots_than_configured_adds_none() -> None:
    engine = FakeEngine(num_cpu_chunks=8)
    engine.apply(FakeWorker(0, num_host_chunks=40), [])
    assert engine.scheduler.stats().num_host_chunks == 8


def test_a_load_may_follow_a_chunk_that_is_being_saved_again():
    """Chunk 0 was lost and is being saved again when a request that has it in HBM loads the chunks after it."""
    engine = FakeEngine(num_staging_blocks=16)
    engine.serve("a", tokens(13))
    (worker,) = engine.workers
    worker.lose(0, 1, blocks_per_chunk=1)
    engine.apply(worker, [])
    again = engine.add("b", tokens(13))
    engine.step({"b": 13})
    matched = engine.scheduler.match("c", again.hashes, num_tokens=13, num_computed_tokens=4).num_tokens
    assert matched == 8
    engine.scheduler.check_invariants()
    engine.scheduler.release("c")
    engine.settle()
    engine.scheduler.check_invariants()


def test_a_request_that_waits_during_a_reset_is_saved_when_it_runs():
    engine = FakeEngine()
    hashes: list[BlockHash] = []
    engine.hasher.extend(hashes, tokens(8))
    engine.scheduler.match("a", hashes, num_tokens=8, num_computed_tokens=0)
    engine.scheduler.release("a")
    engine.scheduler.reset()
    engine.add("a", tokens(8))
    plan, _ = engine.step({"a": 8})
    assert plan.of(JobKind.SAVE)
