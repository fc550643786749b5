"""The thirteen behaviours that any KV cache offload has to show, by their names.

Most run the real scheduler over the fakes of `tests.core`, whose memories hold the hash that each block's KV stands
for, so that a wrong byte is seen; what depends on the order of real copies runs the real worker.
"""

import itertools

import jax
import pytest

from tests.core.fakes import BLOCK_SIZE, POISON, FakeEngine, FakeWorker, tokens
from tests.inside.scheduler import chunk_index
from tests.jobs import host_block_ids
from tests.worker.engine import Engine as WorkerEngine
from tests.worker.engine import ending_with
from tpu_offload import FailedLoad, JobState
from tpu_offload.types import BlockHash, JobKind, StepPlan

staged_or_not = pytest.mark.parametrize("staged", [False, True], ids=["direct", "staged"])


def make_engine(*, staged=False, num_workers=1, num_host_chunks=64, **settings) -> FakeEngine:
    workers = [FakeWorker(i, num_host_chunks=num_host_chunks, staged=staged) for i in range(num_workers)]
    return FakeEngine(workers=workers, num_cpu_chunks=num_host_chunks, **settings)


def compute(engine: FakeEngine, name: str, prompt: list[int]) -> StepPlan:
    """Adds a request and computes all of it; its save is in flight afterwards."""
    request = engine.add(name, prompt)
    assert request is not None
    assert not request.loading
    plan, _ = engine.step({name: len(prompt) - request.num_computed})
    return plan


def deliver(engine: FakeEngine, **how):
    """The only worker's copies end."""
    (worker,) = engine.workers
    return engine.apply(worker, worker.finish(**how))


def match(engine: FakeEngine, name: str, prompt: list[int]) -> int:
    hashes: list[BlockHash] = []
    engine.hasher.extend(hashes, prompt)
    return engine.scheduler.match(name, hashes, num_tokens=len(prompt), num_computed_tokens=0).num_tokens


def num_found(engine: FakeEngine, prompt: list[int]) -> int:
    """Tokens that a request for this prompt and one more token would load at this moment."""
    found = match(engine, "asks", [*prompt, 0])
    engine.scheduler.finish("asks")
    return found


def assert_nothing_is_held(engine: FakeEngine) -> None:
    stats = engine.scheduler.stats()
    assert (stats.num_jobs_in_flight, stats.staging_reserved_blocks) == (0, 0)
    chunk_index(engine.scheduler).check_holds(pins={}, pending=set())
    engine.scheduler.check_invariants()


@staged_or_not
def test_01_preempt_fences_pending_saves_and_resume_reloads_exactly_those_blocks(staged) -> None:
    engine = make_engine(staged=staged, num_blocks=5)
    (save,) = compute(engine, "a", tokens(18)).of(JobKind.SAVE)
    engine.remove("a", preempt=True)
    engine.add("b", tokens(20, start=500))  # gets the same five blocks, and computes before the save has landed
    engine.step({"b": 20})
    engine.settle()
    engine.remove("b")
    resumed = engine.add("a", tokens(18))
    assert resumed.num_computed == 16
    plan, _ = engine.step()
    (load,) = plan.of(JobKind.LOAD)
    assert host_block_ids(load) == host_block_ids(save)
    assert load.block_ids == tuple(resumed.block_ids[:4])
    assert engine.settle().loaded == ("a",)  # the fakes compare the bytes


@staged_or_not
def test_02_a_block_granted_again_is_never_saved_with_the_new_owners_bytes(staged) -> None:
    engine = make_engine(staged=staged, num_blocks=4, num_staging_blocks=2)
    compute(engine, "a", tokens(16))  # two of its blocks are being saved, two wait for room
    waiting = engine.requests["a"].block_ids[2:]
    engine.remove("a")
    compute(engine, "b", tokens(16, start=500))
    saved = [block for job, _ in engine.workers[0].in_flight for block in job.block_ids]
    assert not set(saved) & set(waiting), "the staging buffer is full, and they are not a's any more"
    for _ in range(3):  # there is room in the later ones
        engine.settle()
        engine.step()
    engine.settle()
    engine.remove("b")
    assert engine.scheduler.stats().num_resident_chunks == 2 + 4
    assert engine.serve("c", tokens(16)) == 8
    assert POISON not in engine.workers[0].host.values()


@pytest.mark.parametrize("path", ["direct", "staged", "fused"])
def test_02_on_the_device_a_save_reads_before_the_next_step_writes(path) -> None:
    engine = WorkerEngine(path)
    save = engine.save([0, 1, 2, 3], [4, 5, 6, 7])
    engine.step(saves=[save])
    engine.expect_saved(save)
    engine.scribble()
    assert engine.states() == {save.job_id: JobState.FINISHED}
    engine.check()


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_03_a_chunk_is_loadable_only_after_all_workers_acknowledged_its_save(order) -> None:
    engine = make_engine(num_workers=3)
    compute(engine, "a", tokens(8))
    for i in order:
        assert num_found(engine, tokens(8)) == 0
        engine.apply(engine.workers[i], engine.workers[i].finish())
    assert num_found(engine, tokens(8)) == 8


@pytest.mark.parametrize("end", ["finish", "preempt"])
@pytest.mark.parametrize("when", ["queued", "load planned", "load sent", "load done", "saving", "waiting to be saved"])
def test_04_abort_leaves_no_job_no_pin_no_staging(when, end) -> None:
    engine = make_engine(staged=True, num_staging_blocks=4)
    engine.serve("a", tokens(16))
    if when == "queued":
        assert match(engine, "b", tokens(16)) == 15
        getattr(engine.scheduler, end)("b")
    else:
        if when == "waiting to be saved":
            compute(engine, "first", tokens(16, start=700))
        if "sav" in when:
            compute(engine, "b", tokens(16, start=500))
        else:
            engine.add("b", tokens(16))
        if when in ("load sent", "load done"):
            engine.step()
        done = engine.workers[0].finish() if when == "load done" else []
        engine.remove("b", preempt=end == "preempt")
        engine.apply(engine.workers[0], done)
    engine.settle()
    assert_nothing_is_held(engine)
    assert engine.serve("c", tokens(16)) == 15, "what was there is there"


def test_05_two_that_miss_the_same_prefix_cause_one_save() -> None:
    engine = make_engine()
    for name in "abc":
        engine.add(name, tokens(12))
    together, _ = engine.step({"a": 12, "b": 12})
    later, _ = engine.step({"c": 12})
    assert [job.num_blocks for job in together.of(JobKind.SAVE) + later.of(JobKind.SAVE)] == [3]
    engine.settle()
    assert engine.scheduler.stats().num_resident_chunks == 3


@staged_or_not
def test_05_two_that_hit_it_while_it_loads_cause_two_safe_loads(staged) -> None:
    engine = make_engine(staged=staged)
    engine.serve("a", tokens(12))
    engine.add("b", tokens(13))
    engine.step()
    engine.add("c", tokens(13))
    engine.step()
    assert deliver(engine, num_jobs=1).loaded == ("b",)
    engine.remove("b")
    engine.serve("other", tokens(20, start=500))  # may not take what c still reads
    assert engine.requests["c"].loading is False
    engine.check_bytes(engine.requests["c"], 12)
    engine.remove("c")
    assert_nothing_is_held(engine)


def test_06_the_last_sampled_token_never_completes_a_saved_block() -> None:
    engine = make_engine(decode_save=True)
    engine.also_names = lambda: True
    request = engine.add("a", tokens(7))
    assert request is not None
    engine.step({"a": 7})
    request.tokens.append(7)  # sampled: it fills the second block and is hashed, but its KV comes with the next step
    engine.grow_hashes(request)
    assert len(request.hashes) == 2
    assert engine.step()[0].of(JobKind.SAVE) == ()
    (save,) = engine.step({"a": 1})[0].of(JobKind.SAVE)
    assert save.block_ids == (request.block_ids[1],)


def test_06_rejected_speculative_tokens_are_never_saved() -> None:
    engine = make_engine(decode_save=True)
    engine.also_names = lambda: True
    request = engine.add("a", tokens(8))
    assert request is not None
    engine.step({"a": 8})
    engine.settle()
    request.block_ids.append(engine.free_blocks.pop())
    worker = engine.workers[0]
    worker.hbm[request.block_ids[2]] = POISON  # the KV of four draft tokens, of which one is accepted
    request.tokens += [8]
    request.num_computed = 9
    engine.grow_hashes(request)
    assert engine.step()[0].of(JobKind.SAVE) == ()
    request.tokens += tokens(3, start=90)
    engine.grow_hashes(request)
    assert engine.step()[0].of(JobKind.SAVE) == (), "the hash is known, the KV is that of the rejected ones"
    (save,) = engine.step({"a": 3})[0].of(JobKind.SAVE)
    assert save.block_ids == (request.block_ids[2],)
    engine.settle()
    assert POISON not in worker.host.values()
    assert num_found(engine, request.tokens) == 12


@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
def test_07_chunked_prefill_leaves_no_hole_when_a_step_found_no_room(blocks_per_chunk) -> None:
    engine = make_engine(num_staging_blocks=2, blocks_per_chunk=blocks_per_chunk)
    request = engine.add("a", tokens(24))
    saved: list[int] = []
    for computed in ({"a": 8}, {"a": 4}, {"a": 8}, {"a": 4}, {}, {}, {}):
        plan, _ = engine.step(computed)
        saved += [block for job in plan.of(JobKind.SAVE) for block in job.block_ids]
        assert saved == request.block_ids[: len(saved)], "always the next ones"
        if len(computed) == 0:
            deliver(engine)
        assert num_found(engine, tokens(24)) in range(0, 25, BLOCK_SIZE)
    assert engine.scheduler.stats().deferred_save_blocks > 0
    engine.settle()
    engine.remove("a")
    assert engine.serve("b", tokens(25)) == 24, "a load goes through the two staging blocks in pieces"
    assert engine.scheduler.stats().num_resident_chunks == 6 // blocks_per_chunk


@staged_or_not
def test_08_reset_while_saves_and_loads_fly_serves_nothing_stale(staged) -> None:
    engine = make_engine(staged=staged, num_staging_blocks=16)
    (worker,) = engine.workers
    engine.serve("a", tokens(12))
    loading = engine.add("loading", tokens(12))
    compute(engine, "saving", tokens(12, start=500))
    assert match(engine, "matched", tokens(12)) == 11
    late = worker.in_flight
    engine.scheduler.reset()
    # Whatever the host tier holds, or a late save brings there, is from before.
    worker.host = dict.fromkeys(worker.host, POISON)
    worker.in_flight = [(job, [POISON] * job.num_blocks) for job, _ in late]
    assert num_found(engine, tokens(12)) == 0
    _, [cancelled] = engine.step()
    results = cancelled + worker.finish()
    assert engine.apply(worker, results).failed_loads == (FailedLoad(request_id="loading", num_valid_tokens=0),)
    ignored = engine.scheduler.stats().num_ignored_results
    assert engine.scheduler.apply(worker.report(results)).loaded == ()
    assert engine.scheduler.stats().num_ignored_results == ignored + len(results) == ignored + 2
    assert num_found(engine, tokens(12, start=500)) == 0
    assert engine.scheduler.stats().num_resident_chunks == 0
    for request in (loading, engine.requests["saving"]):
        engine.remove(request.request_id)
    engine.scheduler.finish("matched")
    assert_nothing_is_held(engine)
    assert engine.serve("after", tokens(12)) == 0
    assert engine.serve("again", tokens(12)) == 11, "the bytes were compared"


def test_09_what_a_call_offers_is_never_its_own_victim() -> None:
    engine = make_engine(num_host_chunks=3)
    engine.add("b", tokens(20))
    compute(engine, "a", tokens(12))
    engine.settle()
    engine.remove("a")
    engine.step({"b": 20})
    engine.settle()
    assert engine.scheduler.stats().num_evicted_chunks == 0
    assert num_found(engine, tokens(20)) == 12


def test_09_what_is_pinned_is_never_a_victim_and_a_failed_allocation_evicts_nothing() -> None:
    engine = make_engine(num_host_chunks=4, num_blocks=40)
    engine.serve("a", tokens(16))
    assert match(engine, "pins", tokens(17)) == 16
    compute(engine, "b", tokens(16, start=500))
    engine.settle()
    assert engine.scheduler.stats().num_evicted_chunks == 0
    assert num_found(engine, tokens(16)) > 0
    engine.scheduler.release("pins")
    engine.settle()
    engine.step()
    engine.settle()
    assert engine.scheduler.stats().num_evicted_chunks == 4
    assert num_found(engine, tokens(16, start=500)) == 16


@pytest.mark.parametrize("first_copied", ["a", "b"])
@pytest.mark.parametrize("first_ended", ["a", "b"])
def test_10_recency_follows_requests_not_the_order_in_which_copies_finish(first_ended, first_copied) -> None:
    engine = make_engine(num_host_chunks=4, eviction_policy="lru")
    (worker,) = engine.workers
    prompts = {"a": tokens(8), "b": tokens(8, start=500)}
    for name, prompt in prompts.items():
        compute(engine, name, prompt)
    last_ended = "b" if first_ended == "a" else "a"
    engine.remove(first_ended)
    engine.remove(last_ended)
    if first_copied == "b":
        worker.in_flight.reverse()
    deliver(engine, num_jobs=1)
    deliver(engine)
    engine.serve("c", tokens(8, start=900))
    assert num_found(engine, prompts[first_ended]) == 0
    assert num_found(engine, prompts[last_ended]) == 8


def test_11_of_ten_chunks_saved_three_fail_and_seven_are_used_up_to_the_first_hole() -> None:
    engine = make_engine(num_staging_blocks=10)
    compute(engine, "a", tokens(40))
    deliver(engine, fail=True, failed_blocks=(4, 6, 9))
    assert engine.scheduler.stats().num_resident_chunks == 7
    assert num_found(engine, tokens(40)) == 16
    (save,) = engine.step()[0].of(JobKind.SAVE)
    assert save.block_ids == tuple(engine.requests["a"].block_ids[i] for i in (4, 6, 9))
    engine.settle()
    engine.remove("a")
    assert engine.serve("b", tokens(41)) == 40


@staged_or_not
@pytest.mark.parametrize(("failed_blocks", "num_valid_tokens"), [((7, 8, 9), 28), ((5, 6, 9), 20)])
def test_11_of_ten_chunks_loaded_three_fail_and_seven_are_used_up_to_the_first_hole(
    failed_blocks, num_valid_tokens, staged
) -> None:
    engine = make_engine(staged=staged, num_staging_blocks=10)
    engine.serve("a", tokens(40))
    engine.add("b", tokens(41))
    engine.step()
    update = deliver(engine, fail=True, failed_blocks=failed_blocks)
    assert update.failed_loads == (FailedLoad(request_id="b", num_valid_tokens=num_valid_tokens),)
    engine.check_bytes(engine.requests["b"], num_valid_tokens)
    engine.step({"b": 41 - num_valid_tokens})
    engine.settle()
    engine.check_bytes(engine.requests["b"], 40)
    engine.remove("b")
    assert_nothing_is_held(engine)


def test_12_a_failed_load_ends_in_recompute_for_that_request_only_and_is_not_tried_for_ever() -> None:
    engine = make_engine()
    prompt, healthy = tokens(12), tokens(12, start=500)
    engine.serve("a", prompt)
    engine.serve("other", healthy)
    engine.add("b", prompt)
    engine.add("c", healthy)
    engine.step()
    assert deliver(engine, num_jobs=1, fail=True).failed_loads == (FailedLoad(request_id="b", num_valid_tokens=0),)
    assert deliver(engine).loaded == ("c",)
    engine.remove("c")
    engine.step({"b": 12})
    engine.settle()
    engine.check_bytes(engine.requests["b"], 12)
    engine.remove("b")
    num_loads = 0
    for i in range(10):  # whatever is offered fails again, and nobody saves it anew
        request = engine.add(f"again{i}", prompt)
        num_loads += request.loading
        if request.loading:
            engine.step()
            deliver(engine, fail=True)
        engine.remove(f"again{i}")
        engine.settle()
    assert num_loads <= 2
    assert engine.serve("well", healthy) == 11
    assert_nothing_is_held(engine)


def test_13_a_damaged_stored_chunk_is_detected_removed_and_a_miss() -> None:
    """The host tier only: a segment of its memory is lost, and what was there must not be taken for KV.

    Chunks in files or on a server, whose bytes are checked when they are read, have no tier to be in yet.
    """
    engine = make_engine()
    (worker,) = engine.workers
    engine.serve("a", tokens(16))
    worker.lose(1, 2, blocks_per_chunk=1)
    engine.apply(worker, [])
    assert num_found(engine, tokens(16)) == 4
    assert engine.scheduler.stats().num_resident_chunks == 3
    assert engine.serve("b", tokens(17)) == 4, "a miss from there on; the bytes were compared"
    assert engine.serve("c", tokens(17)) == 16, "it was saved again"


def test_13_a_copy_that_did_less_than_asked_is_detected_and_its_memory_given_up() -> None:
    engine = WorkerEngine()
    engine.saver.save = ending_with(engine.saver.save, jax.numpy.int32(1))  # the program says that it copied one block
    engine.step(saves=[engine.save([0, 1], [0, 1])])
    report = engine.worker.poll(wait=True)
    assert [result.state for result in report.results] == [JobState.FAILED]
    assert "copied 1 of 2 blocks" in report.results[0].error
    assert report.lost_slots == ((0, 0, 4),), "all chunks of that segment"


def test_13_a_transient_error_leaves_the_chunk_and_a_second_one_removes_it() -> None:
    engine = make_engine()
    engine.serve("a", tokens(12))
    for num_left in (12, 0):
        engine.add("b", tokens(13))
        engine.step()
        assert deliver(engine, fail=True).failed_loads == (FailedLoad(request_id="b", num_valid_tokens=0),)
        engine.remove("b")
        assert num_found(engine, tokens(12)) == num_left
    assert engine.scheduler.stats().num_resident_chunks == 0
    assert_nothing_is_held(engine)


def test_13_a_transient_error_that_passes_costs_one_miss() -> None:
    engine = make_engine()
    engine.serve("a", tokens(12))
    engine.add("b", tokens(13))
    engine.step()
    deliver(engine, fail=True)
    engine.remove("b")
    for name in "cde":
        assert engine.serve(name, tokens(13)) == 12
