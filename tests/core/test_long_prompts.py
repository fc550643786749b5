"""Prompts longer than the staging buffer are loaded whole, on both paths, within the bound and without starvation."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.fakes import BLOCK_SIZE, LAYOUT, FakeEngine, FakeWorker, tokens
from tpu_offload import (
    FailedLoad,
    JobResult,
    JobState,
    MatchState,
    OffloadConfig,
    OffloadScheduler,
    RequestLimits,
    ScheduledRequest,
    StepReport,
)
from tpu_offload.config import CopyPath
from tpu_offload.core import saving
from tpu_offload.core.staging import Staging, StagingBufferManager
from tpu_offload.types import BlockHash, Direction, JobKind

NUM_TOKENS = 100_000
HASHES = [BlockHash(i.to_bytes(16, "little")) for i in range(NUM_TOKENS // BLOCK_SIZE)]
DIRECT: dict[str, Any] = {"save_path": "direct", "load_path": "direct"}


def resident(**config) -> OffloadScheduler:
    """A scheduler whose host tier holds a prompt of 100,000 tokens."""
    num_chunks = len(HASHES)
    scheduler = OffloadScheduler(OffloadConfig.create(num_cpu_chunks=num_chunks, **config), LAYOUT)
    scheduler.apply(StepReport(worker_id=0, results=(), num_host_slots=(num_chunks,)))
    changed = [
        ScheduledRequest(
            request_id="a",
            block_tables=[list(range(num_chunks))],
            block_hashes=HASHES,
            num_prompt_tokens=NUM_TOKENS,
            num_computed_tokens=NUM_TOKENS,
        )
    ]
    for _ in range(2000):
        plan = scheduler.plan_step(changed)
        changed = []
        if not plan.of(JobKind.SAVE):
            break
        results = tuple(JobResult(job_id=job.job_id, state=JobState.FINISHED) for job in plan.of(JobKind.SAVE))
        scheduler.apply(
            StepReport(worker_id=0, results=results, num_host_slots=(num_chunks,), oldest_job_id=plan.next_job_id)
        )
    scheduler.finish("a")
    assert scheduler.stats().num_resident_chunks == num_chunks
    return scheduler


def report_of(plan, **fields) -> StepReport:
    results = tuple(JobResult(job_id=job.job_id, state=JobState.FINISHED) for job in plan.jobs)
    return StepReport(
        worker_id=0, results=results, num_host_slots=(len(HASHES),), oldest_job_id=plan.next_job_id, **fields
    )


@pytest.mark.parametrize("path", ["direct", "fused"])
def test_three_long_prompts_in_one_step_are_loaded_whole_and_take_no_staging(path) -> None:
    scheduler = resident(save_path=path, load_path=path)
    for name in "bcd":
        found = scheduler.match(name, HASHES, num_tokens=NUM_TOKENS, num_computed_tokens=0).num_tokens
        assert found == NUM_TOKENS - 1
        scheduler.admit(name, [list(range(len(HASHES)))], num_loaded_tokens=found)
    plan = scheduler.plan_step()
    assert [(job.num_blocks, job.num_staging_blocks) for job in plan.of(JobKind.LOAD)] == [(len(HASHES), 0)] * 3
    scheduler.check_invariants()
    assert scheduler.apply(report_of(plan)).loaded == tuple("bcd")
    stats = scheduler.stats()
    assert (stats.staging_peak_blocks, stats.dropped_load_blocks, stats.dropped_save_blocks) == (0, 0, 0)


@pytest.mark.parametrize("path", ["staged", "auto"])
def test_three_long_prompts_through_a_small_staging_buffer_take_turns(path, tmp_path) -> None:
    scheduler = resident(save_path=path, load_path=path, num_staging_blocks=512, copy_profile=tmp_path / "profile")
    for name in "bcd":
        found = scheduler.match(name, HASHES, num_tokens=NUM_TOKENS, num_computed_tokens=0).num_tokens
        assert found == NUM_TOKENS - 1
        scheduler.admit(name, [list(range(len(HASHES)))], num_loaded_tokens=found)
    scheduler.check_invariants()
    first = scheduler.plan_step()
    assert [(job.request_id, job.num_staging_blocks) for job in first.of(JobKind.LOAD)] == [("b", 256), ("c", 256)], (
        "half each"
    )
    sent = list(first.of(JobKind.LOAD))
    loaded: list[str] = []
    plan = first
    for _ in range(10):
        loaded += scheduler.apply(report_of(plan)).loaded
        plan = scheduler.plan_step()
        sent += plan.of(JobKind.LOAD)
        scheduler.check_invariants()
    assert loaded == list("bcd")
    assert [job.job_id for job in sent] == sorted(job.job_id for job in sent)
    stats = scheduler.stats()
    assert stats.dropped_load_blocks == 0
    assert stats.staging_peak_blocks <= 512
    assert stats.staging_reserved_blocks == 0


def long_engine(**config) -> FakeEngine:
    """A prompt of ten blocks is in the host tier, and the staging buffer has four."""
    engine = FakeEngine(num_staging_blocks=4, num_blocks=64, **config)
    engine.add("a", tokens(40))
    engine.step({"a": 40})
    for _ in range(4):
        engine.settle()
        engine.step()
    engine.settle()
    engine.remove("a")
    assert engine.scheduler.stats().num_resident_chunks == 10
    return engine


def fill(engine: FakeEngine) -> None:
    """A save holds all staging blocks."""
    engine.add("busy", tokens(17, start=400))
    engine.step({"busy": 17})
    assert engine.scheduler.stats().staging_reserved_blocks == 4


def test_a_load_without_staging_blocks_waits_for_them() -> None:
    engine = long_engine()
    fill(engine)
    assert engine.add("b", tokens(40)).num_computed == 39
    plan, _ = engine.step()
    assert not plan.of(JobKind.LOAD)
    assert engine.scheduler.has_jobs
    engine.apply(engine.workers[0], engine.workers[0].finish())
    plan, _ = engine.step()
    assert [job.num_staging_blocks for job in plan.of(JobKind.LOAD)] == [2]
    assert engine.settle().loaded == ("b",)
    assert engine.scheduler.stats().dropped_load_blocks == 0


def test_it_waits_no_longer_than_load_wait_s() -> None:
    engine = long_engine(load_wait_s=3.0)
    fill(engine)
    engine.add("b", tokens(40))
    engine.step()
    engine.clock.now_s += 3
    plan, _ = engine.step()
    assert not plan.of(JobKind.LOAD)
    assert engine.apply(engine.workers[0], []).failed_loads == (FailedLoad(request_id="b", num_valid_tokens=0),)
    assert engine.scheduler.stats().dropped_load_blocks == 10
    assert engine.scheduler.stats().num_failed_jobs == 0, "nothing was tried"
    engine.scheduler.check_invariants()
    engine.settle()
    engine.remove("b")
    assert engine.serve("c", tokens(40)) == 39


@pytest.mark.parametrize("end", ["finish", "preempt", "reset"])
def test_a_load_that_waits_can_be_given_up(end) -> None:
    engine = long_engine()
    fill(engine)
    engine.add("b", tokens(40))
    engine.step()
    if end == "reset":
        engine.scheduler.reset()
        assert engine.apply(engine.workers[0], []).failed_loads == (FailedLoad(request_id="b", num_valid_tokens=0),)
    else:
        engine.remove("b", preempt=end == "preempt")
    engine.scheduler.check_invariants()
    engine.settle()
    plan, _ = engine.step()
    assert not plan.of(JobKind.LOAD)
    assert engine.scheduler.stats().staging_reserved_blocks == 0
    assert not engine.scheduler.has_jobs


def test_slots_that_are_lost_while_a_load_waits_end_it_at_the_first_of_them() -> None:
    engine = long_engine()
    fill(engine)
    request = engine.add("b", tokens(40))
    assert request is not None
    engine.step()
    worker = engine.workers[0]
    worker.lose(6, 7, blocks_per_chunk=1)
    engine.apply(worker, worker.finish())
    engine.scheduler.check_invariants()
    update = engine.settle()
    assert update.failed_loads == (FailedLoad(request_id="b", num_valid_tokens=6 * BLOCK_SIZE),)
    engine.check_bytes(request, 6 * BLOCK_SIZE)


def test_an_engine_that_cannot_wait_gets_arriving() -> None:
    engine = long_engine()
    fill(engine)
    hashes: list[BlockHash] = []
    engine.hasher.extend(hashes, tokens(40))

    def match(name):
        found = engine.scheduler.match(name, hashes, num_tokens=40, num_computed_tokens=0, can_wait=False)
        return found.num_tokens, found.state

    assert match("b") == (0, MatchState.ARRIVING)
    engine.step()
    assert match("b") == (0, MatchState.ARRIVING)
    engine.apply(engine.workers[0], engine.workers[0].finish())
    assert match("c") == (0, MatchState.ARRIVING), "b asked first in this step"
    engine.step()
    assert match("b") == (39, MatchState.HIT)
    engine.scheduler.release("b")


def test_a_load_in_pieces_has_the_timeout_for_each_piece() -> None:
    engine = long_engine(job_timeout_s=10.0)
    engine.add("b", tokens(40))
    plan, _ = engine.step()
    assert plan.of(JobKind.LOAD)[0].num_staging_blocks == 2, "five pieces"
    engine.clock.now_s += 49
    engine.step()
    assert engine.scheduler.stats().num_timed_out_jobs == 0
    engine.clock.now_s += 1
    plan, _ = engine.step()
    assert len(plan.cancelled_job_ids) == 1
    assert engine.scheduler.stats().num_timed_out_jobs == 1


def test_a_younger_job_with_an_earlier_deadline_times_out_first() -> None:
    engine = long_engine(job_timeout_s=10.0)
    engine.add("b", tokens(40))
    engine.step()
    engine.add("short", tokens(8, start=900))
    engine.step({"short": 8})  # a save, planned after the load
    engine.clock.now_s += 11
    engine.step()
    assert engine.scheduler.stats().num_timed_out_jobs == 1
    assert engine.requests["b"].loading


def test_direct_saves_are_not_deferred_by_the_staging_budget() -> None:
    engine = FakeEngine(num_staging_blocks=4, num_blocks=64, **DIRECT)
    engine.add("a", tokens(40))
    plan, _ = engine.step({"a": 40})
    assert [job.num_blocks for job in plan.of(JobKind.SAVE)] == [10]
    stats = engine.scheduler.stats()
    assert (stats.deferred_save_blocks, stats.staging_reserved_blocks) == (0, 0)


def test_auto_is_bounded_as_staged_until_a_worker_reports_its_path() -> None:
    staging = Staging(StagingBufferManager(4), dict.fromkeys(Direction, CopyPath.AUTO))
    assert staging.room_for_saves() == 4
    staging.use({Direction.SAVE: CopyPath.DIRECT})
    assert not staging.stages(Direction.SAVE)
    assert staging.stages(Direction.LOAD)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.integers(0, 10_000))
def test_saves_and_loads_do_not_starve_each_other(budget, seed) -> None:
    """Endless saves and loads exceed the budget: every load gets its turn, and saves continue."""
    rng = random.Random(seed)
    buffer = StagingBufferManager(budget)
    staging = Staging(buffer, dict.fromkeys(Direction, CopyPath.STAGED))
    waiting: list[tuple[str, int, int]] = []
    held: list[tuple[int, str, int, Direction]] = []
    num_loads = num_saved = last_saved = 0
    for step in range(150):
        for entry in [entry for entry in held if entry[0] <= step]:
            held.remove(entry)
            buffer.release(*entry[1:])
        for _ in range(rng.randint(0, 2)):
            waiting.append((f"load {num_loads}", rng.randint(1, 3 * budget), step))
            num_loads += 1
        while waiting:
            name, size, _ = waiting[0]
            granted = staging.reserve_load(name, size, next_in_line=True)
            if not granted:
                break
            held.append((step + rng.randint(1, 3), name, granted, Direction.LOAD))
            del waiting[0]
        staging.wait_for_loads(queued=bool(waiting))
        room, wanted = staging.room_for_saves(), rng.randint(1, 2 * budget)
        num_blocks = min(room, wanted)
        if num_blocks:
            staging.reserve_save("saves", num_blocks)
            held.append((step + rng.randint(1, 3), "saves", num_blocks, Direction.SAVE))
            num_saved, last_saved = num_saved + num_blocks, step
        staging.end_plan(saves_wait=num_blocks < wanted)
        buffer.check_invariants()
        assert step - last_saved <= 8, "saves starve"
        assert not waiting or step - waiting[0][2] <= 12 * (len(waiting) + 4), "a load starves"
    assert num_saved
    assert buffer.peak_num_reserved <= budget


@pytest.mark.parametrize("seed", range(12))
def test_long_prompts_in_a_random_run(seed) -> None:
    """Prompts of up to thirty blocks through buffers of two to six, with failures, aborts, resets and late jobs."""
    rng = random.Random(seed)
    workers = [FakeWorker(i, num_host_chunks=80, staged=True) for i in range(rng.choice([1, 2]))]
    engine = FakeEngine(
        num_staging_blocks=rng.choice([2, 4, 6]),
        num_cpu_chunks=80,
        num_blocks=120,
        job_timeout_s=20.0,
        load_wait_s=rng.choice([0.0, 3.0, 30.0]),
        breaker_failures=0,
        workers=workers,
        seed=seed,
    )
    number = 0
    for _ in range(150):
        engine.clock.now_s += rng.choice([0.1, 0.1, 1.0, 6.0])
        if len(engine.requests) < 3:
            number += 1
            engine.add(f"r{number}", tokens(4 * rng.randint(8, 30), start=1000 * rng.randint(0, 2)))
        ready = {
            name: min(40, len(request.tokens) - request.num_computed)
            for name, request in engine.requests.items()
            if not request.loading and request.num_computed < len(request.tokens)
        }
        _, early = engine.step(ready)
        for worker, results in zip(workers, early, strict=True):
            if rng.random() < 0.7:
                failed = rng.random() < 0.1
                results = results + worker.finish(rng.randint(0, 3), fail=failed)
            engine.apply(worker, results)
        engine.scheduler.check_invariants()
        if rng.random() < 0.15 and engine.requests:
            engine.remove(rng.choice(sorted(engine.requests)), preempt=rng.random() < 0.3)
        if rng.random() < 0.02:
            engine.scheduler.reset()
            engine.cached.clear()
        engine.scheduler.check_invariants()
    engine.settle()
    for name in list(engine.requests):
        engine.remove(name)
    engine.settle()
    stats = engine.scheduler.stats()
    assert (stats.staging_reserved_blocks, stats.num_jobs_in_flight) == (0, 0)
    assert stats.staging_peak_blocks <= stats.staging_budget_blocks
    assert stats.loaded_blocks > 10


# --- saves ----------------------------------------------------------------------------------------


@pytest.fixture
def few_at_once(monkeypatch) -> None:
    monkeypatch.setattr(saving, "MAX_CHUNKS_PER_PLAN", 6)


def saved_blocks(plan) -> list[int]:
    return [block for job in plan.of(JobKind.SAVE) for block in job.block_ids]


def test_a_long_prompt_that_is_new_to_the_host_tier_is_saved_by_several_plans() -> None:
    scheduler = OffloadScheduler(OffloadConfig.create(num_cpu_chunks=8000, **DIRECT), LAYOUT)
    scheduler.apply(StepReport(worker_id=0, results=(), num_host_slots=(8000,)))
    num_blocks = 2 * saving.MAX_CHUNKS_PER_PLAN + 1000
    prompt = ScheduledRequest(
        request_id="a",
        block_tables=[range(num_blocks)],
        block_hashes=HASHES[:num_blocks],
        num_prompt_tokens=num_blocks * 4,
        num_computed_tokens=num_blocks * 4,
    )
    plans = [scheduler.plan_step([prompt]), *(scheduler.plan_step() for _ in range(3))]
    assert [len(saved_blocks(plan)) for plan in plans] == [
        saving.MAX_CHUNKS_PER_PLAN,
        saving.MAX_CHUNKS_PER_PLAN,
        1000,
        0,
    ]
    assert [block for plan in plans for block in saved_blocks(plan)] == list(range(num_blocks))
    for plan in plans:
        scheduler.apply(report_of(plan))
    scheduler.check_invariants()
    scheduler.finish("a")
    assert scheduler.stats().dropped_save_blocks == 0
    found = scheduler.match("b", prompt.block_hashes, num_tokens=10**6, num_computed_tokens=0)
    assert found.num_tokens == num_blocks * 4


@pytest.mark.usefixtures("few_at_once")
@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
@pytest.mark.parametrize("paths", [DIRECT, {"num_staging_blocks": 100}])
def test_the_bound_of_a_plan_is_in_chunks_even_with_a_large_staging_buffer(paths, blocks_per_chunk) -> None:
    engine = FakeEngine(num_blocks=64, blocks_per_chunk=blocks_per_chunk, **paths)
    num_blocks = 6 * blocks_per_chunk
    num_tokens = 2 * num_blocks * BLOCK_SIZE
    request = engine.add("a", tokens(num_tokens))
    assert saved_blocks(engine.step({"a": num_tokens})[0]) == request.block_ids[:num_blocks]
    assert engine.scheduler.stats().deferred_save_blocks == num_blocks
    assert saved_blocks(engine.step()[0]) == request.block_ids[num_blocks:]
    engine.settle()
    assert engine.add("b", tokens(num_tokens + 1)).num_computed == num_tokens


@pytest.mark.usefixtures("few_at_once")
@pytest.mark.parametrize("preempt", [False, True])
def test_unsaved_chunks_of_a_request_that_gives_its_blocks_back_are_dropped_and_counted(preempt) -> None:
    engine = FakeEngine(**DIRECT)
    engine.add("a", tokens(10 * BLOCK_SIZE))
    engine.step({"a": 10 * BLOCK_SIZE})
    engine.remove("a", preempt=preempt)
    engine.scheduler.check_invariants()
    assert engine.step()[0].empty
    assert engine.scheduler.stats().dropped_save_blocks == 4
    engine.settle()
    assert engine.add("b", tokens(10 * BLOCK_SIZE + 1)).num_computed == 6 * BLOCK_SIZE


@pytest.mark.usefixtures("few_at_once")
def test_early_saves_are_not_bounded() -> None:
    engine = FakeEngine(save_on="preemption", **DIRECT)
    engine.add("a", tokens(10 * BLOCK_SIZE))
    engine.step({"a": 10 * BLOCK_SIZE})
    blocks = engine.remove("a", preempt=True).block_ids
    (job,) = engine.step()[0].of(JobKind.EARLY_SAVE)
    assert list(job.block_ids) == blocks
    assert engine.scheduler.stats().dropped_save_blocks == 0


@pytest.mark.usefixtures("few_at_once")
def test_a_long_prompt_delays_no_shorter_one() -> None:
    engine = FakeEngine(num_blocks=64, **DIRECT)
    long = engine.add("long", tokens(20 * BLOCK_SIZE))
    first = saved_blocks(engine.step({"long": 20 * BLOCK_SIZE})[0])
    short = [engine.add(name, tokens(2 * BLOCK_SIZE, start=1000 * i)) for i, name in enumerate("abc", 1)]
    plan, _ = engine.step(dict.fromkeys("ab", 2 * BLOCK_SIZE))
    assert saved_blocks(plan) == [*short[0].block_ids, *short[1].block_ids, *long.block_ids[6:8]]
    plan, _ = engine.step({"c": 2 * BLOCK_SIZE})
    assert saved_blocks(plan) == [*short[2].block_ids, *long.block_ids[8:12]]
    assert first == long.block_ids[:6]


@pytest.mark.usefixtures("few_at_once")
def test_priority_still_decides_the_order() -> None:
    engine = FakeEngine(num_blocks=64, **DIRECT)
    long = engine.add("long", tokens(10 * BLOCK_SIZE), limits=RequestLimits(priority=1))
    engine.add("short", tokens(BLOCK_SIZE, start=1000))
    plan, _ = engine.step({"short": BLOCK_SIZE, "long": 10 * BLOCK_SIZE})
    assert saved_blocks(plan) == long.block_ids[:6]


@pytest.mark.usefixtures("few_at_once")
def test_after_the_host_tier_is_lost_requests_save_again_over_several_plans() -> None:
    engine = FakeEngine(num_blocks=64, **DIRECT)
    held: list[int] = []
    for i in range(5):
        held += engine.add(f"r{i}", tokens(4 * BLOCK_SIZE, start=1000 * i)).block_ids
        engine.step({f"r{i}": 4 * BLOCK_SIZE})
    engine.settle()
    engine.workers[0].lose(0, 64, blocks_per_chunk=1)
    engine.apply(engine.workers[0], [])
    saved = [saved_blocks(engine.step()[0]) for _ in range(5)]
    assert [len(blocks) for blocks in saved] == [6, 6, 6, 2, 0]
    assert sorted(block for blocks in saved for block in blocks) == sorted(held)
    engine.settle()


@pytest.mark.usefixtures("few_at_once")
def test_saves_that_the_plan_has_no_room_for_do_not_wait_for_the_staging_buffer() -> None:
    """Otherwise loads would yield to them, forever if they never take staging blocks."""
    engine = FakeEngine(num_blocks=64, save_path="direct", load_path="staged", num_staging_blocks=2)
    engine.serve("a", tokens(2 * BLOCK_SIZE, start=1000))
    engine.add("long", tokens(40 * BLOCK_SIZE))
    engine.step({"long": 40 * BLOCK_SIZE})
    for name in "bcd":
        request = engine.add(name, tokens(2 * BLOCK_SIZE + 1, start=1000))
        assert request.num_computed == 2 * BLOCK_SIZE
        plan, _ = engine.step()
        assert (len(plan.of(JobKind.LOAD)), len(saved_blocks(plan))) == (1, 6)
        engine.apply(engine.workers[0], engine.workers[0].finish())
        engine.remove(name)
