"""The scheduler's half of storage: what is written, read and deleted when, its bounds, and every way to fail."""

import dataclasses
import pickle
from typing import Any

import pytest

from tests.compiled import interpreted_only
from tests.core.fakes import BLOCK_SIZE
from tests.inside.scheduler import chunk_index, chunk_states, eviction_policy, job_table, save_planner, storage_planner
from tests.storage import hard_lives
from tests.storage.fakes import StorageEngine, StorageWorker, prompt
from tests.storage.lives import live
from tests.storage.memory_tier import NAME
from tpu_offload import ConfigError, JobResult, JobState, MatchState, OffloadConfig, OffloadScheduler, StepReport
from tpu_offload.core.index import ChunkState
from tpu_offload.core.policies import DensityPolicy
from tpu_offload.types import STORAGE_WRITES, CopyJob, JobKind

A, B, C = prompt(1), prompt(2), prompt(3)
HIT, MISS, ARRIVING = MatchState.HIT, MatchState.MISS, MatchState.ARRIVING


def away(*, num_host_chunks=4, **settings):
    """A was served and is in storage alone: B, or a longer prompt like it, has taken its place in the host tier."""
    engine = StorageEngine(num_host_chunks=num_host_chunks, **settings)
    engine.fill(A)
    engine.fill(prompt(2, num_blocks=num_host_chunks))
    assert not chunk_index(engine.scheduler).find(engine.keys(A))
    return engine


def stored(engine):
    return list(storage_planner(engine.scheduler).records.stored)


def states(engine, tokens):
    return [chunk_index(engine.scheduler).state(key) for key in engine.keys(tokens)]


# --- reset ----------------------------------------------------------------------------------------


def test_a_tier_that_clears_slowly_is_used_again():
    """Each order to clear takes three job timeouts, and waits for the one before."""
    engine = StorageEngine(job_timeout_s=10.0)
    engine.fill(A)
    engine.scheduler.reset()
    (worker,) = engine.workers
    num_steps = 0
    while storage_planner(engine.scheduler).writes.must_clear:
        engine.step()
        num_steps += 1
        assert num_steps < 60, "it is cleared again and again"
        engine.clock.now_s += 5.0
        if num_steps % 6 == 0:
            engine.apply(worker, worker.finish(1))
    assert num_steps > 6, "the first orders timed out"
    engine.fill(B)
    assert set(engine.keys(B)) <= set(stored(engine))


def test_a_tier_that_cannot_be_cleared_is_left_alone_without_a_breaker_too():
    """An order to clear is repeated until it succeeds, so without a limit an idle engine would do nothing else."""
    engine = StorageEngine(breaker_failures=0)
    engine.fill(A)
    engine.scheduler.reset()
    (worker,) = engine.workers
    num_orders = 0
    while engine.scheduler.has_jobs:
        plan, _ = engine.step()
        num_orders += [job.kind for job in plan.jobs].count(JobKind.CLEAR)
        assert num_orders < 10, "it is ordered in every step"
        engine.apply(worker, worker.finish(fail=True))
    assert num_orders == 5


# --- cascade ------------------------------------------------------------------------------------


def test_chunks_are_written_once_every_worker_has_saved_them():
    engine = StorageEngine(num_workers=2)
    engine.add("a", A)
    plan, _ = engine.step({"a": 16})
    assert [job.kind for job in plan.jobs] == [JobKind.SAVE]
    engine.apply(engine.workers[0], engine.workers[0].finish())
    plan, _ = engine.step()
    assert plan.jobs == (), "the other worker has not saved it"
    engine.apply(engine.workers[1], engine.workers[1].finish())
    assert engine.scheduler.has_jobs, "an idle engine goes on, or it would never be written"
    plan, _ = engine.step()
    (job,) = plan.jobs
    assert job.kind is JobKind.CASCADE
    assert [key for key, _ in job.chunks] == engine.keys(A)[: len(job.chunks)]
    assert job.parts == ()
    assert stored(engine) == []
    engine.apply(engine.workers[0], engine.workers[0].finish())
    assert stored(engine) == [], "the other worker has not written it"
    engine.apply(engine.workers[1], engine.workers[1].finish())
    assert set(stored(engine)) == {key for key, _ in job.chunks}
    engine.rest()
    assert set(stored(engine)) == set(engine.keys(A))
    engine.check_storage([A])
    stats = engine.scheduler.stats()
    assert (stats.num_stored_chunks, stats.cascaded_chunks, stats.num_failed_jobs) == (4, 4, 0)
    assert stats.cascaded_nbytes == stats.saved_nbytes > 0


def test_nothing_of_it_without_a_tier():
    engine = StorageEngine(storage_tier="")
    engine.serve("a", A)
    assert not engine.scheduler.has_jobs
    plan, _ = engine.step()
    assert plan.jobs == ()
    assert engine.scheduler.stats().num_stored_chunks == 0


def test_what_is_stored_is_not_written_again():
    engine = away()
    engine.fill(A)
    engine.fill(B)
    assert engine.scheduler.stats().cascaded_chunks == 8


def test_a_cascade_keeps_no_slot_from_saves():
    engine = StorageEngine(num_host_chunks=4)
    engine.serve("a", A)
    engine.step()
    (job,) = engine.workers[0].of_kind(JobKind.CASCADE)
    assert len(job.chunks) == 4
    engine.add("b", B)
    plan, _ = engine.step({"b": 16})
    (save,) = plan.of(JobKind.SAVE)
    assert sorted(save.parts[0].host_block_ids) == sorted(slot for _, slot in job.chunks), "it has read them by then"
    engine.apply(engine.workers[0], engine.workers[0].finish())
    engine.check_storage([A, B])
    engine.scheduler.check_invariants()


def test_a_candidate_that_was_evicted_is_counted():
    engine = StorageEngine(num_host_chunks=4)
    engine.serve("a", A)
    engine.serve("b", B)
    engine.rest()
    stats = engine.scheduler.stats()
    assert stats.dropped_cascade_chunks > 0
    assert stats.cascaded_chunks + stats.dropped_cascade_chunks == 8
    engine.check_storage([A, B])


def test_more_candidates_than_are_remembered_are_counted(monkeypatch):
    monkeypatch.setattr("tpu_offload.core.storage.writes._MAX_CANDIDATES", 3)
    engine = StorageEngine(num_host_chunks=16)
    engine.serve("a", A)
    assert engine.scheduler.stats().dropped_cascade_chunks == 1
    engine.rest()
    assert set(stored(engine)) == set(engine.keys(A)[1:])


def test_half_of_what_may_be_in_flight_is_written_at_a_time():
    engine = StorageEngine(num_host_chunks=64, max_storage_gb_in_flight=6 * 512 / 2**30)
    assert storage_planner(engine.scheduler).records.max_in_flight == 6
    engine.serve("a", prompt(1, num_blocks=10))
    sizes = []
    while engine.scheduler.has_jobs:
        engine.step()
        sizes.append(sum(len(job.chunks) for job in engine.workers[0].of_kind(JobKind.CASCADE)))
        engine.apply(engine.workers[0], engine.workers[0].finish())
    assert max(sizes) == 3
    assert len(stored(engine)) == 10


# --- promote ------------------------------------------------------------------------------------


def test_a_lookup_has_storage_read_and_finds_it():
    engine = away()
    found = engine.match("a", A)
    assert (found.num_tokens, found.state, found.until_s) == (0, ARRIVING, engine.clock.now_s + 0.5)
    assert states(engine, A) == [ChunkState.PENDING] * 2 + [None] * 2, "half of the host tier at a time"
    plan = engine.turn()
    assert [job.kind for job in plan.jobs] == [JobKind.PROMOTE]
    found = engine.match("a", A)
    assert (found.num_tokens, found.state) == (8, ARRIVING), "and the rest"
    engine.turn()
    found = engine.match("a", A)
    assert (found.num_tokens, found.state) == (15, HIT)
    request = engine.add("a", A)
    assert request.num_computed == 15
    engine.settle()  # compares the bytes
    stats = engine.scheduler.stats()
    assert (stats.promoted_chunks, stats.promoted_tokens, stats.num_stored_chunks) == (4, 16, 8)
    assert stats.promoted_nbytes == stats.cascaded_nbytes // 2
    assert stats.num_dropped_promotions == 0


def test_a_long_prompt_is_evicted_from_its_tail_by_lru():
    """It is written in several jobs, the last of them after its request has ended, and read in several."""
    engine = StorageEngine(num_host_chunks=64, num_storage_chunks=100, storage_eviction_policy="lru")
    tokens = prompt(1, num_blocks=20)
    engine.serve("a", tokens)
    engine.rest()
    assert stored(engine) == engine.keys(tokens)[::-1], "least recently used first"
    engine.fill(prompt(2, num_blocks=60))  # the host tier forgets it
    while engine.match("again", tokens).state is ARRIVING:
        engine.turn()
    engine.serve("again", tokens)
    assert stored(engine)[-20:] == engine.keys(tokens)[::-1]


def test_prefixes_that_wait_to_count_as_used_are_bounded(monkeypatch):
    monkeypatch.setattr("tpu_offload.core.storage.writes._MAX_FINISHED", 2)
    engine = StorageEngine(num_host_chunks=64, num_storage_chunks=100, storage_eviction_policy="lru")
    for name in "abcd":
        engine.add(name, prompt(ord(name), num_blocks=10))
        engine.step({name: 40})
    engine.settle()
    for name in "abcd":  # before any of it is written
        engine.remove(name)
    engine.scheduler.check_invariants()
    engine.rest()
    last = engine.keys(prompt(ord("d"), num_blocks=10))
    assert stored(engine)[-10:] == last[::-1]


def test_a_router_is_told_of_what_storage_has_and_nothing_is_read():
    engine = away()
    ask = engine.scheduler.num_cached_tokens
    hashes = engine.hashes(A)
    assert ask(hashes, num_tokens=16) == 15, "a token is left to compute"
    assert ask(hashes[:2], num_tokens=11) == 8
    assert states(engine, A) == [None] * 4
    storage_planner(engine.scheduler).records.forget(engine.keys(A)[1])
    assert ask(hashes, num_tokens=16) == 4


def test_the_wait_ends_in_time_and_the_chunks_come_all_the_same():
    engine = away(storage_wait_s=3.0, save_wait_s=100.0)
    assert engine.match("a", A).until_s == engine.clock.now_s + 3.0
    engine.clock.now_s += 2.9
    assert engine.match("a", A).state is ARRIVING
    engine.clock.now_s += 0.1
    assert engine.match("a", A).state is MISS
    assert engine.match("b", A).state is ARRIVING, "another request has its own time"
    engine.turn()
    assert engine.match("a", A).num_tokens == 8


def test_who_never_waits_is_told_so():
    engine = away(storage_wait_s=0.0)
    assert engine.match("a", A).state is MISS
    engine.turn()
    assert engine.match("a", A).num_tokens == 8


def test_who_waits_no_more_computes_and_what_is_on_its_way_is_not_saved_again():
    engine = away(num_host_chunks=8)
    assert engine.match("x", A).state is ARRIVING
    engine.add("a", A)
    plan, _ = engine.step({"a": 16})
    (promotion,) = plan.of(JobKind.PROMOTE)
    saved = list(plan.of(JobKind.SAVE))
    assert len(promotion.chunks) + sum(job.num_blocks for job in saved) == 4
    engine.apply(engine.workers[0], engine.workers[0].finish(fail=False))
    engine.rest()
    engine.remove("a")
    assert engine.serve("again", A) == 15


def test_a_promotion_that_fails_has_its_chunks_saved_by_who_computed_them():
    engine = away()
    engine.match("x", A)
    engine.add("a", A)
    engine.step({"a": 16})
    engine.apply(engine.workers[0], engine.workers[0].finish(fail=True))
    plan, _ = engine.step()
    assert plan.of(JobKind.SAVE), "they are not in the host tier"
    engine.scheduler.check_invariants()


def test_nothing_is_read_past_a_load_limit_or_for_who_takes_nothing():
    from tpu_offload import RequestLimits

    engine = away()
    hashes = engine.hashes(A)
    for limits in (RequestLimits(max_load_tokens=0), RequestLimits(cache=False)):
        found = engine.scheduler.match("a", hashes, num_tokens=16, num_computed_tokens=0, limits=limits)
        assert found.state is MISS
        assert not engine.scheduler.has_jobs


def test_a_prefix_that_hbm_has_is_read_only_with_what_comes_before_it():
    """A chunk is of use only if all before it are in the host tier: so they come too, while there is room."""
    engine = away(num_host_chunks=8)
    engine.scheduler.match("a", engine.hashes(A), num_tokens=16, num_computed_tokens=8)
    assert states(engine, A)[:2] == [ChunkState.PENDING] * 2
    engine.rest()
    engine.scheduler.check_invariants()


def test_a_hole_in_what_is_stored_ends_a_promotion():
    engine = away()
    storage_planner(engine.scheduler).records.forget(engine.keys(A)[1])
    engine.match("a", A)
    assert states(engine, A) == [ChunkState.PENDING, None, None, None]
    engine.rest()
    found = engine.match("a", A)
    assert (found.num_tokens, found.state) == (4, HIT)


def test_promotions_in_flight_are_bounded():
    engine = StorageEngine(num_host_chunks=16, max_storage_gb_in_flight=2 * 512 / 2**30, num_storage_chunks=200)
    for number in (1, 2):
        engine.fill(prompt(number, num_blocks=8))
    engine.fill(prompt(3, num_blocks=16))
    assert engine.match("a", prompt(1, num_blocks=8)).state is ARRIVING
    assert engine.match("b", prompt(2, num_blocks=8)).state is MISS
    assert [len(job.chunks) for job in engine.step()[0].of(JobKind.PROMOTE)] == [2]
    assert engine.scheduler.stats().num_dropped_promotions == 1


def test_chunks_that_no_chain_names_are_not_read():
    """Hashes that say nothing of the tokens before them: the same key twice in a prefix."""
    engine = away(num_host_chunks=8)
    twice = [engine.hashes(A)[0]] * 3
    engine.scheduler.match("a", twice, num_tokens=12, num_computed_tokens=0)
    assert not job_table(engine.scheduler).of(JobKind.PROMOTE)
    engine.scheduler.check_invariants()


# --- room in storage ----------------------------------------------------------------------------


@pytest.mark.parametrize("num_chunks", [1, 3, 7])
def test_storage_never_holds_more_than_it_may(num_chunks):
    engine = StorageEngine(num_storage_chunks=num_chunks, num_host_chunks=8)
    prompts = [prompt(i) for i in range(6)]
    for tokens in prompts:
        engine.fill(tokens)
    assert engine.workers[0].most_stored[0] == num_chunks
    assert len(stored(engine)) == num_chunks
    assert engine.scheduler.stats().num_evicted_storage_chunks > 0
    engine.check_storage(prompts)


def test_the_least_recently_used_goes():
    engine = StorageEngine(num_storage_chunks=8, num_host_chunks=8)
    engine.fill(A)
    engine.fill(B)
    engine.fill(C)  # A leaves the host tier, and half of A storage
    while chunk_index(engine.scheduler).find(engine.keys(B)):
        engine.fill(prompt(9, num_blocks=8))
    kept = [key for tokens in (A, B, C) for key in engine.keys(tokens)[::-1] if key in stored(engine)]
    assert kept == [key for key in stored(engine) if key in kept]


def test_a_deletion_that_fails_is_done_again_and_room_is_not_given_twice():
    engine = StorageEngine(num_storage_chunks=4, num_host_chunks=8)
    engine.fill(A)
    engine.serve("b", B)
    for _ in range(20):
        if not engine.scheduler.has_jobs:
            break
        engine.turn(fail=True)
    else:
        raise AssertionError("an idle engine would spin")
    assert engine.workers[0].most_stored[0] == 4
    assert engine.scheduler.stats().dropped_cascade_chunks > 0
    engine.clock.now_s += 100.0  # the breaker admits again
    engine.fill(C)
    engine.fill(prompt(4))
    assert engine.workers[0].most_stored[0] == 4
    engine.check_storage([A, B, C, prompt(4)])


# --- failures -----------------------------------------------------------------------------------


def test_chunks_that_were_not_written_are_deleted_and_not_asked_for():
    engine = StorageEngine(num_host_chunks=16)
    engine.serve("a", A)
    plan = engine.turn(fail=True, failed_blocks=(1, 2))
    keys = engine.keys(A)
    (job,) = plan.jobs
    assert [key for key, _ in job.chunks] == keys
    assert set(stored(engine)) == {keys[0], keys[3]}
    assert engine.scheduler.stats().failed_storage_chunks == 2
    engine.fill(B)
    assert set(engine.workers[0].storage) == set(stored(engine)), "deleted with the next cascade"


@pytest.mark.parametrize("failed", [(), (0,)])
def test_a_promotion_that_fails_is_a_miss_and_not_asked_for_again(failed):
    engine = away()
    engine.match("a", A)
    engine.turn(fail=True, failed_blocks=failed)
    keys = engine.keys(A)
    gone = keys[:1] if failed else keys[:2]
    assert not set(gone) & set(stored(engine))
    assert states(engine, A)[0] is None
    assert (states(engine, A)[1] is ChunkState.READY) == bool(failed), "what came is kept"
    assert engine.match("a", A).state is MISS
    assert engine.serve("b", A) == 0, "computed, and right"
    engine.rest()
    engine.check_storage([A, B])


def test_one_worker_that_fails_is_enough():
    engine = away(num_workers=2)
    engine.match("a", A)
    engine.step()
    engine.apply(engine.workers[0], engine.workers[0].finish())
    assert states(engine, A)[:2] == [ChunkState.PENDING] * 2
    engine.apply(engine.workers[1], engine.workers[1].finish(fail=True, failed_blocks=(1,)))
    assert states(engine, A)[:2] == [ChunkState.READY, None]
    engine.scheduler.check_invariants()


def test_a_late_promotion_leaves_its_slots_in_quarantine():
    engine = away(job_timeout_s=10.0)
    engine.match("a", A)
    engine.step()
    engine.clock.now_s += 10.0
    engine.step()
    engine.scheduler.check_invariants()
    stats = engine.scheduler.stats()
    assert (stats.failed_storage_chunks, stats.num_quarantined_chunks) == (2, 2)
    assert states(engine, A)[:2] == [None, None]
    assert engine.match("a", A).state is MISS
    engine.apply(engine.workers[0], engine.workers[0].finish(1))
    assert engine.scheduler.stats().num_quarantined_chunks == 0
    engine.rest()
    engine.scheduler.check_invariants()


def test_a_read_that_hangs_holds_nothing_of_other_jobs():
    """The report of a late save was lost: its slots are free although the read before it is still in flight."""
    engine = away(job_timeout_s=10.0, num_host_chunks=8)
    engine.match("x", A)
    engine.add("c", C)
    plan, _ = engine.step({"c": 16})
    (promotion,), (save,) = plan.of(JobKind.PROMOTE), plan.of(JobKind.SAVE)
    engine.clock.now_s += 10.0
    engine.step()
    num_read, num_saved = len(promotion.chunks), save.num_blocks
    assert engine.scheduler.stats().num_quarantined_chunks == num_read + num_saved

    def report(*in_flight):
        report = engine.workers[0].report()
        oldest = engine.scheduler.job_ids.stop
        engine.scheduler.apply(dataclasses.replace(report, oldest_job_id=oldest, storage_job_ids=in_flight))
        engine.scheduler.check_invariants()
        return engine.scheduler.stats().num_quarantined_chunks

    assert report(promotion.job_id) == num_read, "a late read may still write its slots"
    assert report(promotion.job_id) == num_read
    assert report() == 0


def test_reads_that_hang_take_no_more_than_half_of_the_host_tier():
    engine = StorageEngine(job_timeout_s=10.0, num_host_chunks=8, num_storage_chunks=64, breaker_failures=0)
    for number in range(8):
        engine.fill(prompt(number))
    for number in range(4):
        engine.match(f"r{number}", prompt(number))
        engine.step()
        engine.clock.now_s += 10.0
        engine.step()
        assert engine.scheduler.stats().num_quarantined_chunks <= 4
        engine.scheduler.check_invariants()
    engine.apply(engine.workers[0], engine.workers[0].finish())
    assert engine.scheduler.stats().num_quarantined_chunks == 0
    assert engine.match("x", prompt(3)).state is ARRIVING, "the tier answers again"
    engine.rest()


def test_a_late_cascade_lets_go_of_its_chunks_and_is_not_kept():
    engine = StorageEngine(job_timeout_s=10.0)
    engine.serve("a", A)
    engine.step()
    engine.clock.now_s += 10.0
    engine.step()
    engine.scheduler.check_invariants()
    assert engine.scheduler.stats().failed_storage_chunks == 4
    engine.apply(engine.workers[0], engine.workers[0].finish())
    late = engine.keys(A)[0]
    assert late not in stored(engine)
    engine.rest()
    engine.fill(B)
    engine.fill(C)
    assert late not in engine.workers[0].storage or late in stored(engine), "it was deleted after it came"


@pytest.mark.parametrize("when", ["before", "planned", "sent"])
@pytest.mark.parametrize("kind", [JobKind.CASCADE, JobKind.PROMOTE])
def test_a_reset_ends_it(kind, when):
    engine = away() if kind is JobKind.PROMOTE else StorageEngine()
    if kind is JobKind.CASCADE:
        engine.serve("a", A)
    elif when != "before":
        engine.match("a", A)
    if when == "sent" or (when == "planned" and kind is JobKind.CASCADE):
        engine.step()
    engine.scheduler.reset()
    engine.scheduler.check_invariants()
    assert stored(engine) == []
    engine.rest()
    assert engine.match("b", A).state is MISS
    assert not job_table(engine.scheduler).of(JobKind.PROMOTE)
    engine.fill(B, name="c")
    engine.fill(C, name="d")
    engine.rest()
    assert set(engine.workers[0].storage) == set(stored(engine)), "what was there is deleted"
    engine.check_storage([B, C])
    assert engine.scheduler.stats().failed_storage_chunks == 0, "nobody's failure"


@pytest.mark.parametrize("kind", [JobKind.CASCADE, JobKind.PROMOTE])
def test_a_worker_that_starts_anew_has_lost_its_storage(kind):
    engine = away(num_workers=2) if kind is JobKind.PROMOTE else StorageEngine(num_workers=2)
    for worker in engine.workers:
        worker.incarnation = 1
        engine.apply(worker, [])
    if kind is JobKind.CASCADE:
        engine.serve("a", A)
    else:
        engine.match("a", A)
    engine.step()
    assert job_table(engine.scheduler).of(kind)
    engine.workers[1] = fresh = StorageWorker(1, incarnation=2)
    fresh.hbm = dict(engine.workers[0].hbm)
    engine.apply(fresh, [])
    assert stored(engine) == []
    assert engine.match("b", A).state is not HIT
    report = fresh.report()
    engine.scheduler.apply(
        StepReport(
            worker_id=1,
            results=(),
            num_host_slots=report.num_host_slots,
            incarnation=2,
            oldest_job_id=engine.scheduler.job_ids.stop,
        )
    )
    engine.rest()
    engine.scheduler.check_invariants()
    assert not set(engine.keys(A)) & set(stored(engine))
    engine.fill(B, name="c")
    engine.fill(C, name="d")
    engine.check_storage([A, B, C])
    assert set(engine.workers[0].storage) == set(stored(engine)), "the other worker has deleted what it had"


def test_host_memory_that_is_lost_under_a_promotion_fails_its_chunks_and_leaves_them_in_storage():
    engine = away()
    engine.match("a", A)
    engine.step()
    (job,) = engine.workers[0].of_kind(JobKind.PROMOTE)
    _, first = job.chunks[0]
    engine.workers[0].lose(first, first + 1, blocks_per_chunk=1)
    engine.apply(engine.workers[0], [])
    engine.apply(engine.workers[0], engine.workers[0].finish())
    assert states(engine, A)[:2] == [None, ChunkState.READY]
    assert set(engine.keys(A)) <= set(stored(engine))
    assert engine.match("a", A).state is ARRIVING, "it is read once more"
    engine.rest()
    assert engine.serve("b", A) > 0


def test_host_memory_that_is_lost_under_a_cascade_is_not_stored():
    engine = StorageEngine(num_host_chunks=16)
    engine.serve("a", A)
    engine.step()
    (job,) = engine.workers[0].of_kind(JobKind.CASCADE)
    slot = job.chunks[2][1]
    engine.workers[0].lose(slot, slot + 1, blocks_per_chunk=1)
    engine.apply(engine.workers[0], [])
    engine.apply(engine.workers[0], engine.workers[0].finish())
    assert engine.keys(A)[2] not in stored(engine)
    assert len(stored(engine)) == 3
    engine.check_storage([A])


@pytest.mark.parametrize("kind", [JobKind.CASCADE, JobKind.PROMOTE])
def test_a_kind_that_keeps_failing_is_suspended_and_tried_again(kind):
    engine = StorageEngine(num_host_chunks=8, breaker_failures=2, breaker_retry_s=5.0, num_storage_chunks=100)
    prompts = [prompt(i) for i in range(1, 8)]
    if kind is JobKind.PROMOTE:
        for tokens in prompts:
            engine.fill(tokens)
    for i, tokens in enumerate(prompts[:4]):
        if kind is JobKind.PROMOTE:
            engine.match(f"m{i}", tokens)
        else:
            engine.serve(f"s{i}", tokens)
        while engine.scheduler.has_jobs:
            engine.turn(fail=True)
    stats = engine.scheduler.stats()
    assert (stats.num_open_breakers, stats.num_breaker_openings) == (1, 1)
    assert not engine.scheduler.has_jobs, "an idle engine rests"
    if kind is JobKind.PROMOTE:
        engine.match("again", prompts[4])
        assert not engine.scheduler.has_jobs
        assert engine.scheduler.stats().num_dropped_promotions > 0
    if kind is JobKind.CASCADE:
        engine.serve("probe", prompts[5])
    engine.clock.now_s += 5.0
    if kind is JobKind.PROMOTE:
        engine.match("probe", prompts[4])
    plan, _ = engine.step()
    assert [len(job.chunks) for job in plan.of(kind) if job.chunks] == [1], "a probe is small"
    for worker in engine.workers:
        engine.apply(worker, worker.finish())
    assert engine.scheduler.stats().num_open_breakers == 0


@interpreted_only
def test_a_plan_that_raises_leaves_nothing_behind():
    engine = away()
    engine.match("a", A)
    save_planner(engine.scheduler).plan = None  # type: ignore[assignment]  # raises when it is called
    with pytest.raises(TypeError):
        engine.scheduler.plan_step()
    engine.scheduler.check_invariants()
    assert states(engine, A) == [None] * 4
    assert set(engine.keys(A)) <= set(stored(engine)), "storage has done nothing wrong"


# --- what goes over the wire --------------------------------------------------------------------


def test_a_job_is_pickled_whole():
    engine = away(num_storage_chunks=8)
    engine.serve("c", C)
    engine.match("a", A)
    seen = []
    while engine.scheduler.has_jobs:
        plan, _ = engine.step()
        seen += plan.jobs
        assert pickle.loads(pickle.dumps(plan)) == plan
        for worker in engine.workers:
            engine.apply(worker, worker.finish())
    assert {job.kind for job in seen} >= {JobKind.CASCADE, JobKind.PROMOTE}
    assert any(job.deleted_keys for job in seen)


def test_kinds_are_dispatched_in_their_order():
    order = list(JobKind)
    assert order.index(JobKind.PROMOTE) < order.index(JobKind.LOAD)
    assert order[-3:] == [JobKind.CLEAR, JobKind.DELETE, JobKind.CASCADE] == [*STORAGE_WRITES]
    assert order[0] is JobKind.DEMOTE, "it reads slots that all others may write"


def test_keys_that_are_deleted_can_fail_one_by_one():
    job = CopyJob(job_id=0, kind=JobKind.DELETE, deleted_keys=(b"b", b"c"))  # type: ignore[arg-type]
    assert (job.num_items, job.num_blocks) == (2, 0)


def test_a_worker_without_the_tier_is_an_error_in_one_line():
    from tests.core.fakes import LAYOUT
    from tpu_offload import WorkerSetup

    config = OffloadConfig.create(storage_tier=NAME, num_storage_chunks=5)
    scheduler = OffloadScheduler(config, LAYOUT)
    setup = WorkerSetup(
        num_processes=1,
        process_index=0,
        fingerprint=LAYOUT.fingerprint().hex(),
        blocks_per_chunk=1,
        staging_blocks=config.staging_blocks(LAYOUT),
        max_load_blocks=config.max_load_blocks(LAYOUT),
        segment_slots=(4,),
        save_path="direct",
        load_path="direct",
        bucket_blocks=(),
        max_swap_blocks=0,
    )
    with pytest.raises(
        ConfigError, match=r"worker 0 has storage_chunks=\(\), the scheduler has \(5,\).*TPU_OFFLOAD_STORAGE_TIER"
    ):
        scheduler.apply(StepReport(worker_id=0, results=(), num_host_slots=(4,), incarnation=1, setup=setup))


# --- at random ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_at_random(seed):
    live(seed)


@pytest.mark.parametrize("seed", range(20))
def test_at_random_under_more_faults(seed):
    hard_lives.live(seed)


def test_late_results_change_nothing():
    engine = away()
    engine.match("a", A)
    engine.step()
    (job,) = engine.workers[0].of_kind(JobKind.PROMOTE)
    result = JobResult(job_id=job.job_id, state=JobState.FINISHED)
    engine.apply(engine.workers[0], engine.workers[0].finish())
    before = engine.scheduler.stats()
    engine.scheduler.apply(engine.workers[0].report([result]))
    after = engine.scheduler.stats()
    assert after.num_ignored_results == before.num_ignored_results + 1
    assert after.promoted_chunks == before.promoted_chunks


@interpreted_only
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_policy_that_raises_in_insert_leaves_no_chunk_pending(when):
    """No job would ever write those chunks, and lookups would wait for them."""
    engine = away(num_host_chunks=8)
    scheduler = engine.scheduler
    policy = eviction_policy(scheduler)
    insert = policy.insert

    def raises(use, keys, parent, depth):
        if when == "after":
            insert(use, keys, parent, depth)
        raise RuntimeError("injected")

    policy.insert = raises
    with pytest.raises(RuntimeError, match="injected"):
        engine.match("a", A)
    engine.add("c", C)
    with pytest.raises(RuntimeError, match="injected"):
        engine.step({"c": 16})
    del policy.insert
    assert states(engine, A) == states(engine, C) == [None] * 4
    scheduler.check_invariants()
    assert engine.match("a", A).state is ARRIVING
    engine.rest()
    assert engine.match("a", A).num_tokens == 15
    scheduler.release("a")
    scheduler.check_invariants()


@interpreted_only
def test_a_match_whose_eviction_policy_raises_promises_nothing():
    engine = away(num_host_chunks=8)
    shared = [*A[: 2 * BLOCK_SIZE], *prompt(5)]
    engine.fill(shared)  # its first two chunks are found, and those of A after them are in storage
    scheduler = engine.scheduler

    def evict(num_chunks, residents):
        raise RuntimeError("injected")

    policy = eviction_policy(scheduler)
    policy.evict = evict
    with pytest.raises(RuntimeError, match="injected"):
        engine.match("a", A)
    assert chunk_states(scheduler).pins == {}
    scheduler.check_invariants()
    del policy.evict
    assert engine.match("a", A).state is ARRIVING
    scheduler.release("a")
    engine.rest()
    assert engine.match("a", A).num_tokens == 4 * BLOCK_SIZE - 1
    scheduler.release("a")
    scheduler.check_invariants()


def test_a_record_that_cannot_be_deleted_stops_no_others(caplog):
    """It takes room and is tried again later; all else goes on, and the breaker stays closed."""
    engine = StorageEngine(num_storage_chunks=8)
    storage_planner(engine.scheduler).adopt(0, [])
    engine.fill(prompt(0))
    stuck = engine.keys(prompt(0))[-1]
    engine.workers[0].undeletable.add(stuck)
    for i in range(1, 20):
        engine.fill(prompt(i))
        engine.scheduler.check_invariants()
    records = storage_planner(engine.scheduler).records
    assert list(records.undeletable) == [stuck]
    assert not records.to_delete
    assert caplog.text.count("refuses to delete 1 of its records") == 1
    stats = engine.scheduler.stats()
    assert stats.failed_storage_chunks == 1
    assert stats.num_breaker_openings == 0
    assert stats.dropped_cascade_chunks == 0
    assert set(records.stored) >= {*engine.keys(prompt(19))}
    assert max(engine.workers[0].most_stored.values()) <= 8

    storage_planner(engine.scheduler).adopt(0, [*records.stored, stuck])  # it has restarted: another try
    assert list(records.to_delete) == [stuck]
    assert not records.undeletable


def begin_deletion(engine, keys):
    """Storage has these no more, and their deletion has begun."""
    records = storage_planner(engine.scheduler).records
    for key in keys:
        assert key in records.stored
        records.forget(key)
    (job,) = engine.turn(num_jobs=0).of(JobKind.DELETE)
    assert list(job.deleted_keys) == list(keys)
    return records


def test_a_deletion_that_fails_once_is_repeated():
    engine = StorageEngine(num_storage_chunks=8)
    keys = engine.keys(prompt(0))
    for _ in range(3):  # failures with a success between them do not add up
        engine.fill(prompt(0))
        records = begin_deletion(engine, keys[1:])
        engine.turn(fail=True, failed_blocks=(1,))
        assert (list(records.to_delete), records.undeletable) == ([keys[2]], {})
        engine.turn()
        assert keys[2] not in engine.workers[0].storage
        engine.fill(prompt(1))  # so that it is computed and written again
        begin_deletion(engine, engine.keys(prompt(1)))
        engine.turn()


def test_an_outage_that_begins_during_a_deletion_gives_no_record_up():
    engine = StorageEngine(num_storage_chunks=8)
    engine.fill(prompt(0))
    records = begin_deletion(engine, engine.keys(prompt(0)))
    engine.turn(fail=True, failed_blocks=(2, 3))
    engine.turn(fail=True)
    assert not records.undeletable
    engine.turn()
    assert not engine.workers[0].storage


def test_what_one_failed_deletion_of_all_says_is_not_counted():
    """As in an outage: what it could not delete then has not failed while others were deleted."""
    engine = StorageEngine(num_storage_chunks=8)
    engine.fill(prompt(0))
    records = begin_deletion(engine, engine.keys(prompt(0)))
    engine.turn(fail=True)
    engine.turn(fail=True, failed_blocks=(2,))
    assert not records.undeletable
    engine.turn()
    assert not engine.workers[0].storage


def refusing(num_records):
    """Storage has refused to delete so many records. Returns the engine, the worker and the records."""
    engine = StorageEngine(num_host_chunks=64, num_storage_chunks=128, breaker_retry_s=5.0)
    engine.fill(prompt(0, num_blocks=num_records))
    keys = engine.keys(prompt(0, num_blocks=num_records))
    engine.workers[0].undeletable.update(keys)
    records = begin_deletion(engine, keys)
    engine.turn()
    assert list(records.undeletable) == keys
    return engine, engine.workers[0], records


def tried(engine):
    """The keys that the next plan deletes."""
    return [key for job in engine.turn().of(JobKind.DELETE) for key in job.deleted_keys]


def test_what_was_refused_is_tried_again_ever_more_seldom_while_it_is():
    engine, worker, records = refusing(1)
    (key,) = worker.undeletable
    for wait_s in (5, 10, 20, 40, 80, 160, 320, 320, 320):
        engine.clock.now_s += wait_s - 0.1
        assert not tried(engine)
        engine.clock.now_s += 0.2
        assert tried(engine) == [key]
        engine.turn()
        assert list(records.undeletable) == [key]
    worker.undeletable.clear()
    engine.clock.now_s += 330
    assert tried(engine) == [key]
    engine.turn()
    assert not records.undeletable
    assert key not in worker.storage
    assert engine.scheduler.stats().num_breaker_openings == 0


def test_of_many_refused_records_a_few_are_tried_at_a_time_and_all_once_that_succeeds():
    engine, worker, records = refusing(30)
    keys = list(records.undeletable)
    engine.clock.now_s += 5.1
    begin_other = engine.keys(prompt(1))
    engine.fill(prompt(1))
    records.forget(begin_other[0])
    engine.turn()
    assert begin_other[0] not in worker.storage, "others are not held up"
    assert len(records.undeletable) == 30
    engine.clock.now_s += 1000.0
    worker.undeletable = set(keys[-3:])
    for _ in range(20):
        engine.turn()
    assert set(records.undeletable) <= worker.undeletable
    assert set(keys) & set(worker.storage) == worker.undeletable


def test_a_tier_that_refuses_half_of_all_deletions_takes_writes_as_long_as_it_has_room():
    engine = StorageEngine(num_storage_chunks=64)
    worker, records = engine.workers[0], storage_planner(engine.scheduler).records
    for i in range(20):
        worker.undeletable.update(engine.keys(prompt(i))[::2])
        engine.fill(prompt(i))
        engine.scheduler.check_invariants()
    stats = engine.scheduler.stats()
    assert (stats.num_breaker_openings, stats.dropped_cascade_chunks) == (0, 0)
    assert len(records.undeletable) > 10
    assert stats.cascaded_chunks == 80
    assert worker.most_stored[0] <= 64


def test_a_tier_that_refuses_all_deletions_keeps_what_it_has(caplog):
    """As where a policy forbids them, or each fails with an error that seems to be of one record. It gave all up."""
    engine = StorageEngine(num_host_chunks=8, num_storage_chunks=64, breaker_retry_s=5.0)
    worker, records = engine.workers[0], storage_planner(engine.scheduler).records
    for i in range(16):
        engine.fill(prompt(i))
    assert len(records.stored) == 64
    worker.undeletable = set(records.stored)
    for i in range(16, 40):
        engine.fill(prompt(i))
        engine.scheduler.check_invariants()
    assert 64 - 8 <= len(records.stored) < 64, "a sixteenth, and what was evicted in the same step"
    assert len(records.undeletable) == 64 - len(records.stored)
    assert caplog.text.count("refuses to delete its records: nothing new is written") == 1
    assert engine.scheduler.stats().dropped_cascade_chunks > 80
    found = engine.match("a", prompt(8))
    assert found.state is ARRIVING, "what it has is read"
    engine.rest()
    engine.scheduler.finish("a")

    worker.undeletable = set()
    engine.clock.now_s += 330.0
    for _ in range(4):
        engine.turn()
    assert not records.undeletable
    assert caplog.text.count("deletes its records again") == 1
    engine.fill(prompt(50))
    assert set(engine.keys(prompt(50))) <= set(records.stored)
    assert worker.most_stored[0] <= 64


@pytest.mark.parametrize("breaker_retry_s", [1.0, 1e6])
def test_refusals_in_a_tier_that_deletes_others_do_not_add_up(breaker_retry_s, caplog):
    engine = StorageEngine(num_host_chunks=8, num_storage_chunks=64, breaker_retry_s=breaker_retry_s)
    for i in range(30):
        keys = engine.keys(prompt(i))
        engine.fill(prompt(i))
        engine.clock.now_s += 10.0
        engine.workers[0].undeletable.update(keys[3:] if i < 16 else ())
    records = storage_planner(engine.scheduler).records
    assert len(records.undeletable) > 8
    assert set(engine.keys(prompt(29))) <= set(records.stored)
    assert "refuses to delete its records" not in caplog.text


def test_one_refused_record_that_is_tried_again_and_again_counts_once(caplog):
    engine, _, records = refusing(1)
    for _ in range(100):
        engine.clock.now_s += 400.0
        engine.turn()
    assert len(records.undeletable) == 1
    for i in range(1, 50):
        engine.fill(prompt(i))
    assert set(engine.keys(prompt(49))) <= set(records.stored)
    assert "refuses to delete its records" not in caplog.text


def refusing_all(num_storage_chunks=64):
    """A full tier that has refused some deletions, so that it does not evict any more; and its records."""
    engine = StorageEngine(num_host_chunks=8, num_storage_chunks=num_storage_chunks, breaker_retry_s=5.0)
    for i in range(num_storage_chunks // 4):
        engine.fill(prompt(i))
    records = storage_planner(engine.scheduler).records
    engine.workers[0].undeletable = set(records.stored)
    for i in range(100, 110):
        engine.fill(prompt(i))
    assert records.undeletable
    assert not set(engine.keys(prompt(109))) & set(records.stored)
    return engine, records


def test_a_tier_that_has_refused_deletions_evicts_again_after_a_reset():
    engine, records = refusing_all()
    engine.workers[0].undeletable = set()
    engine.scheduler.reset()
    for i in range(30):
        engine.fill(prompt(i))
    assert set(engine.keys(prompt(29))) <= set(records.stored)


def test_a_tier_of_which_a_part_is_held_evicts_again_once_it_finds_others():
    """As where objects of a time range are locked: those are the oldest in a row."""
    engine, records = refusing_all()
    held = {key for i in range(5) for key in engine.keys(prompt(i))}
    engine.workers[0].undeletable = held
    for i in range(30):
        engine.clock.now_s += 400.0
        engine.fill(prompt(200 + i))
        engine.turn()
    assert set(engine.keys(prompt(229))) <= set(records.stored)
    assert set(records.undeletable) <= held
    engine.fill(prompt(300))
    assert set(engine.keys(prompt(300))) <= set(records.stored), "at once"


def test_a_record_that_was_written_again_while_its_deletion_was_refused_counts_once():
    engine = StorageEngine(num_storage_chunks=8)
    engine.fill(prompt(0))
    keys = engine.keys(prompt(0))
    engine.workers[0].undeletable.add(keys[3])
    records = begin_deletion(engine, keys[3:])
    records.forget(keys[3])  # as when a write that has begun since has failed
    engine.turn()
    assert (list(records.to_delete), list(records.undeletable)) == (keys[3:], [])
    assert records.room == 8 - 3 - 1


def test_an_outage_while_refused_records_are_tried_again_gives_none_up():
    engine, worker, records = refusing(4)
    worker.undeletable.clear()
    engine.clock.now_s += 5.1
    engine.turn(fail=True)
    engine.turn()
    assert len(records.undeletable) == 4
    assert not records.to_delete
    engine.clock.now_s += 10.1
    engine.turn()
    engine.turn()
    assert not records.undeletable
    assert not worker.storage


def test_while_nothing_can_be_deleted_no_record_is_given_up():
    """As when the store does not answer: they are deleted once it does."""
    engine = StorageEngine(num_storage_chunks=8)
    engine.fill(prompt(0))
    worker = engine.workers[0]
    for i in range(1, 12):
        engine.serve("filler", prompt(i))
        for _ in range(6):
            plan, results = engine.step()
            fails = bool(plan.of(JobKind.DELETE))
            engine.apply(worker, results[0] + worker.finish(fail=fails))
    records = storage_planner(engine.scheduler).records
    assert records.to_delete
    assert not records.undeletable
    engine.clock.now_s += 1000.0
    for i in range(12, 16):
        engine.fill(prompt(i))
        engine.clock.now_s += 1000.0
    engine.rest()
    assert set(engine.workers[0].storage) == set(records.stored)


def test_a_tier_full_of_refused_records_is_of_use_again_after_an_outage():
    """Nothing else is to be deleted, so one of them is the probe that closes the breaker of deletions."""
    engine = StorageEngine(
        num_host_chunks=9, num_storage_chunks=4, job_timeout_s=8.0, breaker_failures=3, breaker_retry_s=5.0
    )
    worker, planner = engine.workers[0], storage_planner(engine.scheduler)
    records, breaker = planner.records, planner.writes.deletions.breaker
    engine.fill(prompt(1, num_blocks=4))
    worker.undeletable = set(worker.storage)
    for i in range(4):
        engine.fill(prompt(2 + i, num_blocks=4))
    assert len(records.undeletable) == 4
    assert records.room == 0
    worker.frozen = {0}
    while not breaker.num_opened:
        engine.clock.now_s += 9.0
        engine.turn()
    assert not records.to_delete
    worker.frozen = set()
    for _ in range(20):  # the tier answers, and refuses
        engine.clock.now_s += 330
        was_closed = breaker.closed
        assert len(tried(engine)) <= (8 if was_closed else 1)
    assert breaker.closed
    assert len(records.undeletable) == 4
    worker.undeletable = set()
    for _ in range(4):
        engine.clock.now_s += 330
        engine.turn()
    assert not records.undeletable
    engine.fill(prompt(9, num_blocks=4))
    engine.fill(prompt(9, num_blocks=4))
    assert len(stored(engine)) == 4


@pytest.mark.parametrize("case", ["", "suspended", "written on eviction", "never waits", "reads are slow"])
def test_the_host_tier_evicts_first_what_storage_has(case):
    """By density, among equals; not what could not be read, or where nothing is lost by an eviction."""
    settings: dict[str, dict[str, Any]] = {
        "written on eviction": {"storage_write_on": "eviction"},
        "never waits": {"storage_wait_s": 0.0},
        "reads are slow": {"load_mode": "recompute"},
    }
    engine = StorageEngine(num_host_chunks=6, policy=DensityPolicy, **settings.get(case, {}))
    prompts = [prompt(i, num_blocks=1) for i in range(6)]
    for one in prompts:
        engine.fill(one)
    planner = storage_planner(engine.scheduler)
    for key in engine.keys(prompts[0]) + engine.keys(prompts[1]):
        planner.records.forget(key)
    engine.rest()
    if case == "suspended":
        breaker = planner.reads.breaker
        while not breaker.num_opened:
            breaker.failed(0, "a test")
    engine.match("again", prompts[3])
    engine.fill(prompt(6, num_blocks=2))
    kept = [i for i, one in enumerate(prompts) if states(engine, one) == [ChunkState.READY]]
    assert kept == ([2, 3, 4, 5] if case else [0, 1, 4, 5])
