"""States of linear attention in the host tier: where they are saved, found, evicted and lost."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from tests.core.fakes import BLOCK_SIZE, FakeWorker, tokens
from tests.core.window_engine import NULL, WindowEngine, window_layout
from tests.inside.scheduler import checkpoint_table, host_pools, tier_context
from tpu_offload import (
    BlockHash,
    ChunkKey,
    ConfigError,
    CopyJob,
    CopyPart,
    LayerGroup,
    LayerGroupKind,
    LayoutError,
    OffloadConfig,
    OffloadScheduler,
    PageGroup,
    RequestError,
    Use,
)
from tpu_offload.config import HostSegments
from tpu_offload.core.index import Checkpoint, ChunkIndex
from tpu_offload.core.policies import LRUPolicy
from tpu_offload.core.workers import expected_setups
from tpu_offload.types import Direction, JobKind, Pool, WorkerSetup

GB = 2**30
LAYOUT = window_layout((), has_states=True)
assert LAYOUT.state_group is not None
ROW_NBYTES = LAYOUT.state_group.block_nbytes


def state_engine(windows: tuple[int, ...] = (), *, num_host_states: int = 16, **settings: Any) -> WindowEngine:
    workers = [FakeWorker(num_host_states=num_host_states)]
    return WindowEngine(windows, num_rows=40, workers=workers, **settings)


def state_parts(engine: WindowEngine, *kinds: JobKind) -> list[CopyPart]:
    jobs = [job for plan in engine.plans for job in plan.of(*kinds)]
    return [part for job in jobs for part in job.parts if part.group_id == engine.state_group]


def test_a_prompt_leaves_one_state_at_its_last_block_boundary() -> None:
    engine = state_engine()
    assert engine.serve("a", tokens(42), at_a_time=8) == 0
    saved = state_parts(engine, JobKind.SAVE)
    assert [len(part.block_ids) for part in saved] == [1], "not one at each step's end"
    assert engine.serve("b", tokens(42)) == 40
    assert engine.serve("c", tokens(40)) == 0, "its last boundary is 36, where no state was saved"
    assert engine.serve("d", tokens(40)) == 36
    stats = engine.scheduler.stats()
    assert (stats.num_checkpoints, stats.num_states, stats.num_host_states) == (2, 2, 16)
    assert (stats.num_window_chunks, stats.num_resident_chunks) == (0, 10)


def test_a_load_writes_the_row_before_its_end() -> None:
    engine = state_engine()
    engine.serve("a", tokens(42))
    request = engine.add("b", tokens(60))
    assert request is not None
    assert request.num_computed == 40
    engine.step()
    (part,) = state_parts(engine, JobKind.LOAD)
    assert part.block_ids == (request.tables[-1][9],)
    assert part.host_block_ids == (0,), "rows have places of their own"


def test_a_load_without_a_row_is_refused() -> None:
    engine = state_engine()
    engine.serve("a", tokens(42))
    hashes: Any = []
    engine.hasher.extend(hashes, tokens(42))
    match = engine.scheduler.match("b", hashes, num_tokens=42, num_computed_tokens=0)
    assert match.num_tokens == 40
    tables = [list(range(1, 12)), [5] * 9 + [NULL] * 2]
    with pytest.raises(RequestError, match="request b has no block in layer group 1 at 9; its load needs 9 to 9"):
        engine.scheduler.admit("b", tables, num_loaded_tokens=40)
    engine.scheduler.admit("b", [tables[0], [NULL] * 9 + [7, 8]], num_loaded_tokens=40)
    engine.scheduler.check_invariants()


def test_a_state_inside_a_block_is_never_saved() -> None:
    engine = state_engine(decode_save=True)
    request = engine.add("a", tokens(42))
    assert request is not None
    engine.step({"a": 40})
    engine.step({"a": 2})
    assert request.tables[-1][10] != NULL, "the state after 42 tokens"
    for token in range(5):  # 43 to 47: 44 is a boundary
        assert engine.generate(request, token)
        engine.step({"a": 1})
    engine.settle()
    rows = [part.block_ids for part in state_parts(engine, JobKind.SAVE)]
    assert len(rows) == 2, "at 40 and 44"
    assert engine.scheduler.stats().num_states == 2
    turn = [*request.tokens, *tokens(10, start=500)]
    engine.remove("a")
    assert engine.serve("b", turn) == 44


def test_the_state_of_generated_tokens_moves_with_them() -> None:
    engine = state_engine(decode_save=True)
    request = engine.add("a", tokens(18))
    assert request is not None
    engine.step({"a": 16})
    engine.step({"a": 2})
    for token in range(30):
        assert engine.generate(request, token)
        engine.step({"a": 1})
        engine.settle()
    stats = engine.scheduler.stats()
    assert (stats.num_checkpoints, stats.num_states) == (2, 2), "at the end of the prompt, and of what was generated"


def test_a_state_of_generated_tokens_replaces_those_that_are_still_being_saved() -> None:
    engine = state_engine(decode_save=True)
    request = engine.add("a", tokens(18))
    assert request is not None
    engine.step({"a": 16})
    engine.step({"a": 2})
    engine.settle()
    for token in range(10):
        assert engine.generate(request, token)
        engine.step({"a": 1})
        if token == 3:
            engine.settle()  # the state after 20 tokens; then 24 and 28
    worker = engine.workers[0]
    assert len(worker.in_flight) == 4, "of a chunk and of a state, twice"
    worker.in_flight.append(worker.in_flight.pop(1))  # the state after 24 tokens is late
    engine.apply(worker, worker.finish(3))
    assert engine.scheduler.stats().num_checkpoints == 2, "after the prompt, and after 28 tokens"
    engine.settle()
    stats = engine.scheduler.stats()
    assert (stats.num_checkpoints, stats.num_states) == (2, 2)


@pytest.mark.parametrize("num_in_flight", [1, 3])
def test_states_that_could_not_be_saved_are_forgotten(num_in_flight) -> None:
    """A long request does not keep one for each boundary."""
    index = ChunkIndex(LRUPolicy(), first_slots=(0, 100))
    index.grow(Pool.CHUNKS, 60)
    index.grow(Pool.STATES, 10)
    keys = [ChunkKey(b"%d" % i) for i in range(60)]
    index.complete(keys, index.allocate(Use(0), keys, range(60)), success=True)
    saves: list[tuple[Checkpoint, list[int]]] = []
    for end in range(1, 60):
        begun = index.begin_checkpoint(keys, end, max_chunks=0)
        assert begun is not None
        if saves:
            index.checkpoints.supersede(saves[-1][0], by=begun[0])
        saves.append((begun[0], [piece.slot for piece in begun[1]]))
        if len(saves) == 1:
            index.checkpoints.complete(saves[0][1], success=True)
        elif end > num_in_flight:
            index.checkpoints.complete(saves[-num_in_flight][1], success=False)
        one: Checkpoint | None = begun[0]
        remembered = []
        while one is not None:
            remembered.append(one)
            one = one.superseded
        assert len(remembered) <= num_in_flight + 2
        assert end == 1 or remembered[-1] is saves[0][0], "the last one that was saved"


def test_where_prompts_part_the_second_one_leaves_a_state() -> None:
    engine = state_engine()
    shared = tokens(40)
    assert engine.serve("a", shared + tokens(20, start=1000)) == 0
    # The engine ends a step there: it knows of the prefix as well, from its own cache.
    assert engine.serve("b", shared + tokens(20, start=2000), stops=[40]) == 0
    assert engine.serve("c", shared + tokens(20, start=3000)) == 40


def test_a_match_says_where_a_state_is_missing() -> None:
    """So that an engine whose own cache is empty can end a step there."""
    engine = state_engine()
    shared = tokens(40)
    engine.serve("a", shared + tokens(20, start=1000))

    def junction(name: str, given: list[int]) -> tuple[int, int]:
        hashes: list[BlockHash] = []
        engine.hasher.extend(hashes, given)
        found = engine.scheduler.match(name, hashes, num_tokens=len(given), num_computed_tokens=0)
        engine.scheduler.release(name)
        return found.num_tokens, found.junction_tokens

    assert junction("b", shared + tokens(20, start=2000)) == (0, 40)
    assert junction("c", tokens(20, start=2000)) == (0, 0)
    assert junction("d", shared + tokens(20, start=1000) + tokens(9)) == (60, 0)


def test_what_the_engine_retains_is_saved() -> None:
    engine = state_engine()
    assert engine.serve("a", tokens(61), stops=[20, 36]) == 0
    assert engine.scheduler.stats().num_states == 3, "those, and one at 60"
    assert engine.serve("b", tokens(24)) == 20
    assert engine.serve("c", tokens(45)) == 36


def test_what_it_retains_of_an_answer_stays() -> None:
    engine = state_engine(decode_save=True)
    request = engine.add("a", tokens(18))
    assert request is not None
    engine.step({"a": 16})
    engine.step({"a": 2})
    request.retained = [28]
    for token in range(30):
        assert engine.generate(request, token)
        engine.step({"a": 1})
        engine.settle()
    assert engine.scheduler.stats().num_states == 3, "at the end of the prompt, at 28, and of what was generated"
    engine.remove("a")
    assert engine.serve("b", [*request.tokens[:32], *tokens(10, start=500)]) == 28


def test_what_it_retains_inside_a_chunk_is_not() -> None:
    engine = state_engine(blocks_per_chunk=2)
    assert engine.serve("a", tokens(61), stops=[20, 40, 56]) == 0
    assert engine.scheduler.stats().num_states == 2, "at 40 and 56"
    assert engine.serve("b", tokens(45)) == 40


def test_what_it_retains_inside_a_chunk_is_not_rounded() -> None:
    engine = WindowEngine((5,), blocks_per_chunk=2)
    engine.serve("a", tokens(61), stops=[20, 40])
    assert engine.scheduler.stats().num_checkpoints == 2, "at 40 and 56"


def test_the_least_recently_used_state_goes_first() -> None:
    engine = state_engine(num_host_states=3)
    prompts = {name: tokens(22, start=1000 * i) for i, name in enumerate("abcd")}
    for name in "abc":
        engine.serve(name, prompts[name])
    assert engine.serve("a2", prompts["a"]) == 20
    engine.serve("d", prompts["d"])
    assert engine.serve("b2", prompts["b"]) == 0, "chunks without a state are of no use; computed, it is saved again"
    assert engine.serve("d2", prompts["d"]) == 20
    assert engine.serve("b3", prompts["b"]) == 20
    stats = engine.scheduler.stats()
    assert (stats.num_states, stats.num_evicted_checkpoints, stats.num_evicted_chunks) == (3, 2, 0)


def test_a_state_that_a_load_reads_is_not_evicted() -> None:
    engine = state_engine(num_host_states=1)
    engine.serve("a", tokens(22))
    request = engine.add("b", tokens(22))
    assert request is not None
    assert request.num_computed == 20
    other = engine.add("c", tokens(22, start=500))
    assert other is not None
    engine.step({"c": 20})
    assert engine.scheduler.stats().num_dropped_checkpoints == 1
    engine.settle()
    assert engine.check_bytes(request) > 0


def test_without_room_in_the_staging_buffer_states_are_saved_all_the_same() -> None:
    engine = state_engine(num_staging_blocks=10)
    engine.serve("a", tokens(42))
    (job,) = [job for plan in engine.plans for job in plan.of(JobKind.SAVE) if job.parts[0].group_id == 1]
    assert job.num_staging_blocks == 0
    assert engine.serve("b", tokens(42)) == 40


def test_a_load_that_waits_for_the_staging_buffer_takes_no_room_for_its_state() -> None:
    engine = state_engine(num_staging_blocks=10)
    engine.serve("a", tokens(22))
    for request_id in ("b", "c", "d"):
        assert engine.add(request_id, tokens(22)) is not None
    engine.settle()
    loads = [job for plan in engine.plans for job in plan.of(JobKind.LOAD)]
    assert [(job.num_blocks, job.num_staging_blocks) for job in loads] == [(6, 5)] * 3


def test_a_load_has_the_timeout_for_its_state_too() -> None:
    engine = state_engine(job_timeout_s=10.0)
    engine.serve("a", tokens(42))
    assert engine.add("b", tokens(42)) is not None
    plan, _ = engine.step()
    (load,) = plan.of(JobKind.LOAD)
    assert [len(part.block_ids) for part in load.parts] == [10, 1]
    engine.clock.now_s += 19
    engine.step()
    assert engine.scheduler.stats().num_timed_out_jobs == 0
    engine.clock.now_s += 1
    engine.step()
    assert engine.scheduler.stats().num_timed_out_jobs == 1


@pytest.mark.parametrize("how", ["fails", "is lost", "times out"])
def test_a_state_without_its_bytes_is_not_found(how) -> None:
    engine = state_engine(job_timeout_s=10.0)
    (worker,) = engine.workers
    request = engine.add("a", tokens(42))
    assert request is not None
    engine.step({"a": 40})
    saves: list[CopyJob] = [job for job, _ in worker.in_flight]
    assert [job.parts[0].group_id for job in saves] == [0, 1]
    chunks = worker.finish(1)
    if how == "fails":
        engine.apply(worker, chunks + worker.finish(1, fail=True))
    elif how == "is lost":
        engine.apply(worker, chunks + worker.finish(1))
        assert engine.scheduler.stats().num_states == 1
        worker.lose_states(0, 1)
        engine.apply(worker, [])
    else:
        engine.apply(worker, chunks)
        engine.clock.now_s += 11
        engine.step()
        assert engine.scheduler.stats().num_quarantined_chunks == 1
        engine.apply(worker, worker.finish())
        assert engine.scheduler.stats().num_quarantined_chunks == 0
    engine.remove("a")
    assert engine.serve("b", tokens(42)) == 0
    assert engine.serve("c", tokens(42)) == 40, "saved again"


def test_a_state_that_could_not_be_read_is_dropped() -> None:
    engine = state_engine()
    (worker,) = engine.workers
    engine.serve("a", tokens(42))
    for attempt in ("b", "c"):
        assert engine.add(attempt, tokens(42)) is not None
        engine.step()
        engine.apply(worker, worker.finish(1, fail=True, failed_blocks=(10,)))
        engine.remove(attempt)
    assert engine.scheduler.stats().num_resident_chunks == 10, "its chunks are sound"
    assert engine.serve("d", tokens(42)) == 0
    assert engine.serve("e", tokens(42)) == 40


def test_a_preempted_request_returns_to_its_last_state() -> None:
    engine = state_engine(save_on="preemption")
    request = engine.add("a", tokens(50))
    assert request is not None
    engine.step({"a": 24})
    engine.remove("a", preempt=True)
    engine.step()
    engine.settle()
    assert engine.serve("a", tokens(50)) == 24


def test_the_state_of_a_preempted_request_is_not_saved_from_lost_caches() -> None:
    """Its chunks are in the host tier already, so the state would be found by the next request."""
    engine = state_engine(save_on="compute,preemption")
    assert engine.add("a", tokens(50)) is not None
    engine.step({"a": 24})
    engine.settle()
    engine.remove("a", preempt=True)
    engine.scheduler.mark_caches_lost()
    num_plans = len(engine.plans)
    engine.step()
    engine.settle()
    assert [job for plan in engine.plans[num_plans:] for job in plan.jobs] == []
    assert engine.serve("b", tokens(50)) == 0


def test_one_preempted_inside_a_block_has_no_state_there() -> None:
    engine = state_engine(save_on="preemption")
    assert engine.add("a", tokens(50)) is not None
    engine.step({"a": 26})
    engine.remove("a", preempt=True)
    engine.step()
    engine.settle()
    assert engine.scheduler.stats().num_dropped_checkpoints == 0, "there was nothing to save"
    assert engine.serve("a", tokens(50)) == 0


def test_windows_and_states_together() -> None:
    engine = state_engine((9, 5))
    assert engine.serve("a", tokens(42)) == 0
    assert engine.serve("b", tokens(42)) == 40
    load = next(job for plan in engine.plans for job in plan.of(JobKind.LOAD))
    assert [(part.group_id, len(part.block_ids)) for part in load.parts] == [(0, 10), (1, 2), (2, 1), (3, 1)]


def test_a_reset_frees_all_states() -> None:
    engine = state_engine()
    engine.serve("a", tokens(42))
    engine.scheduler.reset()
    assert engine.scheduler.stats().num_states == 0
    assert engine.serve("b", tokens(42)) == 0
    engine.scheduler.check_invariants()


def test_a_table_that_is_too_short_is_refused() -> None:
    engine = state_engine()
    request = engine.add("a", tokens(42))
    assert request is not None
    held = dataclasses.replace(engine.held(request), num_computed_tokens=40)
    short = dataclasses.replace(held, block_tables=[held.block_tables[0], [NULL] * 9])
    with pytest.raises(
        RequestError, match="9 entries in the block table of layer group 1; expected one for each of 10"
    ):
        engine.scheduler.plan_step([short])


@pytest.mark.parametrize("given", [7, "8", [4, -1], [4.5], [None], {4: 5}])
def test_retained_tokens_that_make_no_sense_are_refused(given) -> None:
    engine = state_engine()
    request = engine.add("a", tokens(42))
    assert request is not None
    held = dataclasses.replace(engine.held(request), num_computed_tokens=40, retained_tokens=given)
    with pytest.raises(RequestError, match="the retained_tokens of request a are"):
        engine.scheduler.plan_step([held])
    engine.scheduler.check_invariants()


@pytest.mark.parametrize("given", [np.array([4, 8]), np.array([8]), np.array([], np.int64), range(8, 9), [8], (8,)])
def test_retained_tokens_of_any_sequence(given) -> None:
    engine = state_engine()
    request = engine.add("a", tokens(42))
    assert request is not None
    engine.scheduler.plan_step([dataclasses.replace(engine.held(request), retained_tokens=given)])
    engine.scheduler.check_invariants()


# Sizes and layouts.


def test_a_loss_of_chunks_that_no_worker_can_have_is_none_of_states() -> None:
    engine = state_engine()
    pools = host_pools(engine.scheduler)
    num_chunks, num_states = tier_context(engine.scheduler).config.host_slots(engine.layout)
    assert pools.slot_range(0, 3, 2**40) == range(3, num_chunks)
    assert pools.slot_range(1, 0, 2) == range(num_chunks, num_chunks + 2)
    assert pools.slot_range(1, 1, 2**40) == range(num_chunks + 1, num_chunks + num_states)


def test_a_worker_with_segments_of_other_sizes_is_an_error() -> None:
    engine = state_engine()
    (expected,) = expected_setups(tier_context(engine.scheduler).config, engine.layout, 1)
    paths = {"save_path": "direct", "load_path": "direct"}
    setup = WorkerSetup(num_processes=1, process_index=0, **(expected | paths | {"segment_slots": (1, 9)}))
    report = dataclasses.replace(engine.workers[0].report(), incarnation=1, setup=setup)
    with pytest.raises(ConfigError, match=r"segment_slots=\(1, 9\), the scheduler has \(.*_HOST_SEGMENT_GB"):
        engine.scheduler.apply(report)


def test_each_pool_can_have_all_segments_but_one() -> None:
    chunk_nbytes = LAYOUT.block_nbytes_per_host
    config = OffloadConfig.create(host_gb=1, blocks_per_chunk=2)
    segments = config.host_segments(LAYOUT)
    assert segments is not None
    assert segments.num_segments == 16
    num_chunks, num_states = segments.segment_slots
    assert num_chunks * 2 * chunk_nbytes <= segments.segment_nbytes <= GB // 16
    assert num_states * ROW_NBYTES <= segments.segment_nbytes
    assert config.host_chunks(LAYOUT) == 15 * num_chunks > 0.9 * GB // (2 * chunk_nbytes)
    assert config.host_states(LAYOUT) == 15 * num_states > 0.9 * GB // ROW_NBYTES
    assert segments.divide(16, (0.5,)) == (8, 8)
    assert segments.divide(16, (0.25,)) == (12, 4)
    assert segments.divide(3, (0.01,)) == (2, 1)
    assert segments.divide(16, (0.25, 0.5)) == (4, 4, 8), "of three pools"
    assert segments.divide(3, (0.9, 0.9)) == (1, 1, 1)
    assert OffloadConfig.create(host_gb=1, state_share=0.9).host_chunks(LAYOUT) == 2 * config.host_chunks(LAYOUT)
    assert OffloadConfig.create(num_cpu_chunks=100).host_segments(window_layout((9,))) is None
    assert OffloadConfig.create(num_cpu_chunks=100).host_states(window_layout((9,))) == 0
    assert OffloadConfig.create(num_cpu_chunks=100).host_chunks(window_layout((9,))) == 100


@pytest.mark.parametrize(
    ("nbytes", "chunk_nbytes", "row_nbytes", "expected"),
    [
        (3200, 10, 100, HostSegments(16, (20, 2), 200)),
        (3200, 100, 30, HostSegments(16, (2, 6), 200)),
        (3200, 10, 900, HostSegments(3, (90, 1), 900)),
        (999, 10, 500, HostSegments(1, (50, 1), 500)),
        (32_000, 10, 100, HostSegments(32, (100, 10), 1000)),
    ],
)
def test_segments_of_both_kinds_take_the_same_memory(
    nbytes: int, chunk_nbytes: int, row_nbytes: int, expected: HostSegments
) -> None:
    planned = HostSegments.plan(nbytes, slot_nbytes=(chunk_nbytes, row_nbytes), segment_nbytes=1000)
    assert planned == expected
    assert planned.num_segments * planned.segment_nbytes <= nbytes
    assert planned.segment_slots[0] * chunk_nbytes <= planned.segment_nbytes
    assert planned.segment_slots[1] * row_nbytes <= planned.segment_nbytes


def test_a_tier_that_is_set_far_too_large_has_states_all_the_same() -> None:
    """It is cut to the memory there is; states are numbered after all chunks that the settings allow."""
    engine = state_engine(num_cpu_chunks=2**31 - 1, state_share=0.001)
    assert engine.scheduler.stats().num_host_chunks == 64
    assert engine.serve("a", tokens(42)) == 0
    assert engine.serve("b", tokens(42)) == 40
    engine = state_engine(num_cpu_chunks=None, host_gb=2**20)
    assert engine.serve("a", tokens(42)) == 0
    assert engine.serve("b", tokens(42)) == 40
    engine.scheduler.check_invariants()


def test_a_tier_too_small_for_a_state_is_refused() -> None:
    pages = PageGroup(layer_ids=(2,), page_shape=(64, 128, 128), dtype="float32")
    layout = dataclasses.replace(
        LAYOUT, groups=(LAYOUT.groups[0], LayerGroup(kind=LayerGroupKind.STATE, page_groups=(pages,)))
    )
    with pytest.raises(ConfigError) as e:
        OffloadScheduler(OffloadConfig.create(host_gb=0.004), layout)
    assert str(e.value) == (
        "TPU_OFFLOAD_HOST_GB=0.004 is less than two segments, one for states and one for chunks, of 8388608 bytes; set "
        "it to at least 0.0078125, or to 0 to turn offloading off"
    )
    OffloadScheduler(OffloadConfig.create(host_gb=0.0078125), layout)


@pytest.mark.parametrize(
    "groups",
    [
        lambda full, state: (state,),
        lambda full, state: (state, full),
        lambda full, state: (full, state, state),
        lambda full, state: (full, dataclasses.replace(state, page_groups=full.page_groups)),
    ],
)
def test_other_orders_of_groups_are_refused(groups) -> None:
    layout = dataclasses.replace(LAYOUT, groups=groups(*LAYOUT.groups))
    with pytest.raises(LayoutError, match="then one of states with its own: set TPU_OFFLOAD_HOST_GB=0"):
        OffloadScheduler(OffloadConfig.create(), layout)


def test_saving_what_hbm_evicts_is_refused() -> None:
    message = "TPU_OFFLOAD_SAVE_ON has eviction: the model has sliding windows or states"
    with pytest.raises(ConfigError, match=message):
        OffloadScheduler(OffloadConfig.create(save_on="eviction"), LAYOUT)


def test_blocks_have_no_part_of_a_state() -> None:
    plain = window_layout(())
    assert LAYOUT.block_nbytes == plain.block_nbytes
    assert LAYOUT.fingerprint() != plain.fingerprint()
    assert LAYOUT.block_size == BLOCK_SIZE


def test_a_late_save_without_staging_blocks_holds_none_of_another():
    """A state alone, since its windows are there already, times out; then a window is saved for another request."""
    worker = FakeWorker(num_host_states=16)
    engine = WindowEngine((9,), num_rows=40, workers=[worker])
    for number, length in enumerate((38, 42, 46)):
        engine.serve(f"p{number}", tokens(length))
    worker.lose_states(*state_of_the_second(engine))
    engine.apply(worker, [])
    again = engine.add("again", tokens(42))
    late = save_of(engine, worker, again, {2})
    assert not late.num_staging_blocks
    worker.in_flight = [entry for entry in worker.in_flight if entry[0].job_id != late.job_id]
    engine.apply(worker, worker.finish())
    engine.clock.now_s += 1000
    engine.step({})
    assert engine.scheduler.stats().num_timed_out_jobs == 1
    engine.clock.now_s += 1000
    other = save_of(engine, worker, engine.add("other", tokens(22, start=5000)), {1, 2})
    assert other.num_staging_blocks
    engine.scheduler.check_invariants()


def state_of_the_second(engine):
    """The range of the row of the second checkpoint, in its pool."""
    checkpoint = list(checkpoint_table(engine.scheduler).values())[1]
    row = checkpoint.slots[-1] - tier_context(engine.scheduler).config.first_slots(engine.layout)[1]
    return row, row + 1


def save_of(engine, worker, request, group_ids):
    """Steps until a save of these groups is planned."""
    for _ in range(60):
        computes = not request.loading and request.num_computed < len(request.tokens)
        plan, _ = engine.step({request.request_id: 8} if computes else {})
        for job in plan.of(JobKind.SAVE):
            if {part.group_id for part in job.parts} == group_ids:
                return job
        engine.apply(worker, worker.finish())
    raise AssertionError("no such save")


@pytest.mark.parametrize("has_states", [True, False])
def test_a_checkpoint_is_the_probe_where_all_chunks_are_in_the_host_tier(has_states: bool) -> None:
    """The same prompts again and again: nothing else is saved that could show that saves work."""
    settings: dict[str, Any] = {"breaker_failures": 3, "breaker_retry_s": 5.0}
    engine = state_engine(**settings) if has_states else WindowEngine((9,), **settings)
    breaker = tier_context(engine.scheduler).breakers[Direction.SAVE]
    worker, prompts, fails = engine.workers[0], [tokens(33, start=100 * i) for i in range(3)], True

    def settle() -> None:
        for _ in range(20):
            engine.step()
            for job, _ in list(worker.in_flight):
                is_piece = all(part.group_id for part in job.parts)
                engine.apply(worker, worker.finish(1, fail=fails and is_piece and job.kind is JobKind.SAVE))

    def serve_all(name: str) -> int:
        engine.clock.now_s += 60
        return sum(engine.serve(f"{name}{i}", prompt) for i, prompt in enumerate(prompts))

    engine.settle = settle
    assert serve_all("a") == serve_all("b") == 0
    assert breaker.num_opened == 1
    fails = False
    for i in range(6):
        serve_all(f"c{i}-")
    assert breaker.closed
    assert serve_all("d") == 3 * 32
    assert engine.scheduler.stats().num_checkpoints == 3
