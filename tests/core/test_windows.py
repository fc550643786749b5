"""Sliding-window groups in the host tier: which checkpoints are saved, found, shared, evicted and lost."""

import dataclasses
from typing import Any

import pytest

from tests.compiled import interpreted_only
from tests.core.fakes import FakeWorker, tokens
from tests.core.window_engine import WindowEngine, window_layout
from tests.core.window_faults import FaultyLife
from tests.core.window_lives import RandomLife
from tests.inside.scheduler import eviction_policy
from tpu_offload import (
    ConfigError,
    LayerGroup,
    LayerGroupKind,
    LayoutError,
    OffloadConfig,
    OffloadScheduler,
    RequestError,
    RequestLimits,
)
from tpu_offload.types import Direction, JobKind


def num_saved_blocks(engine: WindowEngine) -> tuple[int, int]:
    """Blocks of full attention and of windows in all plans so far."""
    parts = [part for plan in engine.plans for job in plan.of(JobKind.SAVE, JobKind.EARLY_SAVE) for part in job.parts]
    full = sum(len(part.block_ids) for part in parts if part.group_id == 0)
    return full, sum(len(part.block_ids) for part in parts) - full


def test_a_prompt_is_loaded_up_to_its_last_block_boundary() -> None:
    engine = WindowEngine((9, 5))
    assert engine.serve("a", tokens(42)) == 0
    # 9 tokens need 2 blocks before a boundary, 5 tokens need 1.
    assert num_saved_blocks(engine) == (10, 3)
    assert engine.serve("b", tokens(42)) == 40
    load = next(job for plan in engine.plans for job in plan.of(JobKind.LOAD))
    assert [(part.group_id, len(part.block_ids)) for part in load.parts] == [(0, 10), (1, 2), (2, 1)]
    assert num_saved_blocks(engine) == (10, 3), "it is all there"


def test_one_token_is_left_to_compute() -> None:
    engine = WindowEngine()
    engine.serve("a", tokens(40))
    assert engine.serve("b", tokens(40)) == 36, "the boundary after the last token is past it"
    assert engine.serve("c", tokens(41)) == 40, "the end of the first prompt is a boundary as well"


def test_prompts_computed_in_pieces_leave_one_checkpoint() -> None:
    engine = WindowEngine()
    engine.serve("a", tokens(42), at_a_time=6)
    assert num_saved_blocks(engine) == (10, 3)
    assert engine.serve("b", tokens(42)) == 40


def test_a_shared_prefix_gets_its_checkpoint_with_the_second_request() -> None:
    engine = WindowEngine()
    shared = tokens(40)
    assert engine.serve("a", shared + tokens(20, start=1000)) == 0
    assert engine.serve("b", shared + tokens(20, start=2000)) == 0, "no checkpoint where the prompts part"
    assert engine.serve("c", shared + tokens(20, start=3000)) == 40
    assert engine.serve("d", shared + tokens(20, start=3000)) == 56


def test_only_what_HBM_lacks_is_loaded() -> None:
    engine = WindowEngine((9, 5))
    engine.serve("a", tokens(42))
    assert engine.serve("b", tokens(42), num_in_hbm=36) == 4
    load = next(job for plan in engine.plans for job in plan.of(JobKind.LOAD))
    assert [(part.group_id, len(part.block_ids)) for part in load.parts] == [(0, 1), (1, 1), (2, 1)]
    assert engine.serve("c", tokens(42), num_in_hbm=40) == 0


def test_generated_tokens_have_one_checkpoint_which_moves() -> None:
    engine = WindowEngine((9, 5), decode_save=True)
    request = engine.add("a", tokens(18))
    assert request is not None
    engine.step({"a": 18})
    for token in range(30):
        assert engine.generate(request, token)
        engine.step({"a": 1})
        engine.settle()
    stats = engine.scheduler.stats()
    assert stats.num_checkpoints == 2, "at the end of the prompt, and of what was generated"
    assert stats.num_window_chunks == 3 + 3
    # A block a group for each boundary: neighbours share the others.
    assert num_saved_blocks(engine) == (12, 3 + 2 * 8)
    turn = [*request.tokens, *tokens(10, start=500)]
    engine.remove("a")
    assert engine.serve("b", turn) == 48


def test_a_preempted_request_returns_to_where_it_was() -> None:
    engine = WindowEngine(save_on="preemption")
    request = engine.add("a", tokens(50))
    assert request is not None
    engine.step({"a": 26})
    engine.remove("a", preempt=True)
    engine.step()
    engine.settle()
    assert num_saved_blocks(engine) == (6, 3)
    assert engine.serve("a", tokens(50)) == 24


def test_a_checkpoint_whose_blocks_the_engine_has_freed_is_not_saved() -> None:
    engine = WindowEngine((5,))
    request = engine.add("a", tokens(42))
    assert request is not None
    for _ in range(7):
        engine.step({"a": 6})
        held = engine.held(request)
        assert len(held.block_tables[1]) == len(held.block_tables[0])
    engine.settle()
    assert engine.scheduler.stats().num_dropped_checkpoints == 0
    request.tables[1][9] = 0
    assert engine.scheduler.stats().num_checkpoints == 1


def test_the_load_limit_ends_at_a_checkpoint() -> None:
    engine = WindowEngine()
    engine.serve("a", tokens(22))
    engine.serve("b", tokens(42))
    for limit, loaded in ((None, 40), (40, 40), (39, 20), (20, 20), (19, 0)):
        request = engine.add("c", tokens(42), limits=RequestLimits(max_load_tokens=limit))
        assert request is not None
        assert request.num_computed == loaded, limit
        engine.settle()
        engine.remove("c")


def test_part_of_a_hybrid_load_cannot_be_admitted() -> None:
    engine = WindowEngine()
    engine.serve("a", tokens(42))
    hashes: list[Any] = []
    engine.hasher.extend(hashes, tokens(42))
    assert engine.scheduler.match("b", hashes, num_tokens=42, num_computed_tokens=0).num_tokens == 40
    tables = [list(range(1, 12)), list(range(12, 23)), list(range(23, 34))]
    with pytest.raises(RequestError, match="admits 36 loaded tokens; expected 0 or the 40 promised"):
        engine.scheduler.admit("b", tables, num_loaded_tokens=36)
    tables[1][9] = 0
    with pytest.raises(RequestError, match="has no block in layer group 1 at 9; its load needs 8 to 9"):
        engine.scheduler.admit("b", tables, num_loaded_tokens=40)
    engine.scheduler.release("b")
    engine.scheduler.check_invariants()


@pytest.mark.parametrize("failed_blocks", [(), (0,), (10,), (12,)])
def test_a_failed_load_fails_as_a_whole(failed_blocks) -> None:
    engine = WindowEngine((9, 5))
    engine.serve("a", tokens(42))
    request = engine.add("b", tokens(42))
    assert request is not None
    engine.step()
    engine.apply(engine.workers[0], engine.workers[0].finish(fail=True, failed_blocks=failed_blocks))
    assert (request.num_computed, request.loading) == (0, False)
    engine.scheduler.check_invariants()
    engine.step({"b": 42})
    engine.settle()
    engine.remove("b")
    assert engine.serve("c", tokens(42)) == 40, "it was saved again, or tried again"


@pytest.mark.parametrize("failed_blocks", [(), (0,), (2,)])
def test_a_failed_save_of_windows_leaves_no_checkpoint(failed_blocks) -> None:
    engine = WindowEngine((9, 5))
    engine.add("a", tokens(42))
    engine.step({"a": 42})
    worker = engine.workers[0]
    engine.apply(worker, worker.finish(1))
    engine.apply(worker, worker.finish(1, fail=True, failed_blocks=failed_blocks))
    engine.scheduler.check_invariants()
    stats = engine.scheduler.stats()
    assert (stats.num_checkpoints, stats.num_window_chunks, stats.num_resident_chunks) == (0, 0, 10)
    engine.remove("a")
    assert engine.serve("b", tokens(42)) == 0
    assert engine.serve("c", tokens(42)) == 40


def test_lost_slots_of_windows_are_not_loaded() -> None:
    engine = WindowEngine((9, 5))
    engine.serve("a", tokens(42))
    save = next(job for plan in engine.plans for job in plan.of(JobKind.SAVE) if job.parts[0].group_id)
    slot = save.parts[0].host_block_ids[0]
    engine.workers[0].lose(slot, slot + 1, blocks_per_chunk=1)
    engine.apply(engine.workers[0], [])
    assert engine.serve("b", tokens(42)) == 0
    assert engine.serve("c", tokens(42)) == 40
    engine.scheduler.check_invariants()


def test_a_reset_drops_checkpoints_and_keeps_what_a_load_reads() -> None:
    engine = WindowEngine((9, 5))
    engine.serve("a", tokens(42))
    engine.add("b", tokens(42))
    engine.step()
    engine.scheduler.reset()
    engine.scheduler.check_invariants()
    engine.settle()
    assert engine.scheduler.stats().num_window_chunks == 0
    engine.remove("b")
    assert engine.serve("c", tokens(42)) == 0


def test_what_no_request_can_use_is_evicted_first() -> None:
    """Two prompts fill the tier; a third takes the slots of the first, and what is left of it is found by none."""
    engine = WindowEngine((5,), num_cpu_chunks=16, workers=[FakeWorker(num_host_chunks=16)])
    engine.serve("a", tokens(26))
    engine.serve("b", tokens(26, start=100))
    assert engine.scheduler.stats().num_resident_chunks == 12
    engine.serve("c", tokens(14, start=200))
    assert engine.serve("b2", tokens(26, start=100)) == 24
    assert engine.serve("c2", tokens(14, start=200)) == 12
    engine.scheduler.check_invariants()


def test_windows_take_the_share_of_the_tier_that_requests_use() -> None:
    engine = WindowEngine((33,), num_cpu_chunks=64, num_blocks=400)
    for i in range(40):  # 5 chunks of full attention and 5 of windows each
        engine.serve(f"r{i}", tokens(22, start=1000 * i))
    stats = engine.scheduler.stats()
    assert stats.num_resident_chunks + stats.num_window_chunks <= 64
    assert 26 <= stats.num_window_chunks <= 38, "about half"
    found = sum(bool(engine.serve(f"again{i}", tokens(22, start=1000 * i))) for i in range(34, 40))
    assert found == 6, "the last six are whole"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"save_on": "eviction"},
            r"TPU_OFFLOAD_SAVE_ON has eviction: .* gone when HBM evicts a prefix; expected compute, preemption",
        ),
    ],
)
def test_settings_without_window_groups_are_refused(settings, message) -> None:
    with pytest.raises(ConfigError, match=message):
        WindowEngine(**settings)


def test_groups_that_share_arrays_take_the_memory_of_one() -> None:
    layout = window_layout((9, 5))
    layout.check_tier()
    assert layout.block_nbytes == layout.groups[0].block_nbytes, "the groups share their arrays"
    assert [layout.window_blocks(group) for group in layout.window_groups] == [2, 1]
    own = LayerGroup.uniform(LayerGroupKind.SLIDING_WINDOW, (2, 3), (4, 2, 2, 8), "bfloat16", window=9)
    apart = dataclasses.replace(layout, groups=(layout.groups[0], own))
    assert apart.block_nbytes == 2 * layout.block_nbytes
    with pytest.raises(LayoutError, match="groups with sliding windows that share its arrays"):
        apart.check_tier()


@pytest.mark.parametrize("seed", range(60))
def test_random_run(seed) -> None:
    life = RandomLife(seed)
    life.run(100)
    assert life.num_checked > 50


@pytest.mark.parametrize("seed", range(30))
def test_random_run_with_restarts_and_lost_caches(seed) -> None:
    FaultyLife(seed).run(80)


def test_the_random_runs_do_load_evict_drop_and_fail() -> None:
    totals = dict.fromkeys(("loaded", "windows", "evicted", "dropped", "failed", "timed_out", "routed"), 0)
    for seed in range(20):
        life = RandomLife(1000 + seed)
        life.run(100)
        stats = life.engine.scheduler.stats()
        loads = [job for plan in life.engine.plans for job in plan.jobs if job.direction is Direction.LOAD]
        totals["windows"] += sum(len(part.block_ids) for job in loads for part in job.parts[1:])
        totals["loaded"] += stats.loaded_blocks
        totals["evicted"] += stats.num_evicted_checkpoints
        totals["dropped"] += stats.num_dropped_checkpoints
        totals["failed"] += stats.num_failed_jobs
        totals["timed_out"] += stats.num_timed_out_jobs
        totals["routed"] += life.num_routed
    assert all(count > 10 for count in totals.values()), totals


class Raised(Exception):
    """What a custom eviction policy may raise."""


def raise_once(engine: WindowEngine, monkeypatch: pytest.MonkeyPatch, *, calls: int) -> None:
    """Has the eviction policy raise when it is called for the `calls`-th time from now on."""
    policy, left = eviction_policy(engine.scheduler), [calls]
    evict = policy.evict

    def raising(*args: Any) -> None:
        left[0] -= 1
        if not left[0]:
            raise Raised
        evict(*args)

    monkeypatch.setattr(policy, "evict", raising)


def full_tier(windows: tuple[int, ...]) -> WindowEngine:
    engine = WindowEngine(windows, num_cpu_chunks=16, workers=[FakeWorker(num_host_chunks=16)])
    engine.serve("x", tokens(50, start=900))
    return engine


@interpreted_only
def test_a_plan_that_raised_leaves_nothing_to_save_of_windows(monkeypatch) -> None:
    """The engine may free these blocks before the next plan."""
    engine = full_tier((5,))
    engine.add("a", tokens(26))
    raise_once(engine, monkeypatch, calls=1)
    with pytest.raises(Raised):
        engine.step({"a": 26})
    plan = engine.scheduler.plan_step([])
    assert {part.group_id for job in plan.jobs for part in job.parts} == {0}


@interpreted_only
def test_a_policy_that_raises_for_windows_leaks_no_slot(monkeypatch) -> None:
    engine = full_tier((5, 9))
    engine.add("a", tokens(18))
    engine.add("b", tokens(18, start=300))
    raise_once(engine, monkeypatch, calls=4)  # two for the chunks of full attention, then for the second checkpoint
    with pytest.raises(Raised):
        engine.step({"a": 18, "b": 18})
    engine.scheduler.check_invariants()
    for request_id in ("a", "b"):
        engine.remove(request_id)
    engine.step()
    engine.settle()


def test_a_window_chunk_that_cannot_be_read_is_written_again(monkeypatch) -> None:
    """Although another checkpoint has it too."""
    engine = WindowEngine((9,))
    engine.serve("a", tokens(42))
    engine.serve("b", tokens(46))
    engine.add("c", tokens(42))
    engine.step()
    worker = engine.workers[0]
    engine.apply(worker, worker.finish(fail=True, failed_blocks=(11,)))
    engine.step({"c": 42})
    engine.settle()
    engine.remove("c")
    slots = [part.host_block_ids for plan in engine.plans for job in plan.of(JobKind.LOAD) for part in job.parts[1:]]
    assert engine.serve("d", tokens(42)) == 40
    again = [part.host_block_ids for plan in engine.plans for job in plan.of(JobKind.LOAD) for part in job.parts[1:]]
    assert again[-1][-1] != slots[0][-1]
    assert again[-1][0] == slots[0][0]


@interpreted_only
@pytest.mark.parametrize("when", ["promised", "waiting"])
def test_a_load_whose_window_slots_are_lost_fails(when, monkeypatch) -> None:
    engine = WindowEngine((9, 5))
    engine.serve("a", tokens(42))
    worker = engine.workers[0]
    save = next(job for plan in engine.plans for job in plan.of(JobKind.SAVE) if job.parts[0].group_id)
    slot = save.parts[0].host_block_ids[0]
    match = engine.scheduler.match

    def lose() -> None:
        worker.lose(slot, slot + 1, blocks_per_chunk=1)
        engine.scheduler.apply(worker.report())

    def match_and_lose(*args: Any, **kwargs: Any) -> Any:
        found = match(*args, **kwargs)
        lose()
        return found

    if when == "promised":
        monkeypatch.setattr(engine.scheduler, "match", match_and_lose)
    request = engine.add("b", tokens(42))
    assert request is not None
    if when == "waiting":
        lose()
    engine.step()
    engine.apply(worker, worker.finish())
    assert (request.num_computed, request.loading) == (0, False)


def test_a_checkpoint_that_cannot_fit_evicts_nothing() -> None:
    worker = FakeWorker(num_host_chunks=80)
    engine = WindowEngine((200,), num_blocks=600, num_staging_blocks=200, num_cpu_chunks=80, workers=[worker])
    for i in range(3):
        engine.serve(f"small {i}", tokens(22, start=1000 * i))
    engine.serve("large", tokens(170, start=50_000))  # 42 chunks, and as many of windows: over half of the tier
    assert [engine.serve(f"again {i}", tokens(22, start=1000 * i)) for i in range(3)] == [20, 20, 20]
    assert engine.scheduler.stats().num_dropped_checkpoints == 1


def test_an_invalid_table_at_a_preemption_changes_nothing() -> None:
    engine = WindowEngine(save_on="preemption")
    request = engine.add("a", tokens(50))
    assert request is not None
    engine.step({"a": 26})
    held = engine.held(request)
    full, first, second = held.block_tables
    broken = dataclasses.replace(held, block_tables=[full, first[:3], second])
    with pytest.raises(RequestError, match="3 entries in the block table of layer group 1; expected one for each of 6"):
        engine.scheduler.preempt("a", held=broken)
    assert engine.scheduler.plan_step([]).empty


def test_the_save_limit_is_a_boundary() -> None:
    engine = WindowEngine()
    limits = RequestLimits(max_save_tokens=30)
    for name, loaded in (("a", 0), ("b", 28)):
        request = engine.add(name, tokens(30) + tokens(20, start=500), limits=limits)
        assert request is not None
        assert request.num_computed == loaded
        engine.settle()
        engine.step({name: 50 - loaded})
        engine.settle()
        engine.remove(name)


def test_window_blocks_that_were_freed_count_as_dropped() -> None:
    """A chunk of four blocks begins before the window of five tokens does."""
    engine = WindowEngine((5,), blocks_per_chunk=4)
    engine.serve("a", tokens(42), at_a_time=5)
    stats = engine.scheduler.stats()
    assert (stats.num_checkpoints, stats.num_dropped_checkpoints) == (0, 1)
    engine.serve("b", tokens(42, start=500))
    assert engine.scheduler.stats().num_checkpoints == 1


def test_parts_of_a_failed_save_are_mapped_to_their_chunks() -> None:
    engine = WindowEngine((9, 17), blocks_per_chunk=2)
    engine.add("a", tokens(26))
    engine.step({"a": 26})
    worker = engine.workers[0]
    (save,) = [job for job in engine.plans[-1].of(JobKind.SAVE) if job.parts[0].group_id]
    assert [len(part.block_ids) for part in save.parts] == [2, 4]
    engine.apply(worker, worker.finish(1))
    engine.apply(worker, worker.finish(1, fail=True, failed_blocks=(5,)))
    engine.scheduler.check_invariants()
    assert engine.scheduler.stats().num_checkpoints == 0
    engine.settle()


def test_a_window_has_at_least_one_token() -> None:
    with pytest.raises(LayoutError, match="a sliding window of 0 tokens; expected at least 1"):
        window_layout((9, 0)).check_tier()


def test_checkpoints_that_were_not_evicted_do_not_count(caplog) -> None:
    engine = WindowEngine((9, 5))
    engine.add("a", tokens(42))
    engine.step({"a": 42})
    worker = engine.workers[0]
    engine.apply(worker, worker.finish(1, fail=True))
    engine.settle()
    assert engine.scheduler.stats().num_evicted_checkpoints == 0
    WindowEngine((200,), num_cpu_chunks=20, blocks_per_chunk=3)
    assert "the host tier has 20 chunks, and the windows of this model take 17 at each boundary" in caplog.text
    assert "the windows take 50 blocks and a chunk 3" in caplog.text


def test_a_checkpoint_that_the_tier_has_is_not_dropped() -> None:
    """A request returns to a prefix in HBM beyond it, so that its window blocks before it are gone."""
    engine = WindowEngine((5,), save_on="compute", decode_save=True)
    request = engine.add("a", tokens(9))
    assert request is not None
    engine.step({"a": 9})
    engine.settle()
    for token in range(8):
        engine.generate(request, token)
    engine.step({"a": 8})
    engine.settle()
    held = engine.held(request)
    engine.remove("a", preempt=True)
    stats = engine.scheduler.stats()
    assert (stats.num_checkpoints, stats.num_dropped_checkpoints) == (2, 0)
    full, window = [[*range(1, 6)], [0, 0, 0, 14, 15]]
    engine.scheduler.match("a", held.block_hashes, num_tokens=17, num_computed_tokens=16)
    engine.scheduler.admit("a", [full, window], num_loaded_tokens=0)
    engine.scheduler.plan_step(
        [dataclasses.replace(held, block_tables=[full, window], num_prompt_tokens=9, num_computed_tokens=17)]
    )
    assert engine.scheduler.stats().num_dropped_checkpoints == 0


def test_windows_take_the_staging_blocks_that_are_left() -> None:
    """Of four: one for a preempted request, two for another that is computed, and one for windows."""
    engine = WindowEngine((5,), save_on="compute,preemption", num_staging_blocks=4)
    request = engine.add("a", tokens(10))
    assert request is not None
    engine.step({"a": 10})
    engine.settle()
    for token in range(2):
        engine.generate(request, token)
    engine.step({"a": 2})
    engine.settle()
    before = engine.scheduler.stats().num_dropped_checkpoints
    assert engine.add("b", tokens(10, start=500)) is not None
    engine.remove("a", preempt=True)
    plan, _ = engine.step({"b": 10})
    assert [(job.kind, job.num_blocks, job.num_staging_blocks) for job in plan.jobs] == [
        (JobKind.EARLY_SAVE, 1, 1),
        (JobKind.EARLY_SAVE, 1, 1),
        (JobKind.SAVE, 2, 2),
    ]
    assert engine.scheduler.stats().num_dropped_checkpoints == before + 1
    engine.settle()


def test_windows_from_before_a_reset_are_not_saved() -> None:
    """Although another request has saved the chunks before their boundary since."""
    engine = WindowEngine()
    assert engine.add("a", tokens(42)) is not None
    engine.step({"a": 24})
    engine.settle()
    engine.scheduler.reset()
    assert engine.serve("b", tokens(40) + tokens(18, start=500)) == 0
    assert engine.scheduler.stats().num_checkpoints == 1
    engine.step({"a": 18})
    engine.settle()
    assert engine.scheduler.stats().num_checkpoints == 1
    engine.remove("a")


@pytest.mark.parametrize("fail", [False, True])
def test_a_checkpoint_is_superseded_once_the_chunk_before_the_later_one_is_saved(fail) -> None:
    engine = WindowEngine((9, 5), decode_save=True)
    request = engine.add("a", tokens(18))
    assert request is not None
    engine.step({"a": 18})
    for token in range(6):
        engine.generate(request, token)
        engine.step({"a": 1})
        engine.settle()
    for token in range(4):
        engine.generate(request, token)
        engine.step({"a": 1})
    worker = engine.workers[0]
    assert len(worker.in_flight) == 2, "of a chunk of full attention, and of windows"
    worker.in_flight.reverse()
    engine.apply(worker, worker.finish(1))
    stats = engine.scheduler.stats()
    assert stats.num_checkpoints == 3, "after the prompt, after 24 tokens, and after 28, which is of no use yet"
    engine.apply(worker, worker.finish(1, fail=fail))
    engine.scheduler.check_invariants()
    assert engine.scheduler.stats().num_checkpoints == 2
    said = list(request.tokens)
    engine.remove("a")
    assert engine.serve("b", [*said, *tokens(10, start=500)]) == (24 if fail else 28)


def test_a_checkpoint_that_was_loaded_is_not_superseded() -> None:
    engine = WindowEngine((9, 5), decode_save=True)
    request = engine.add("a", tokens(18))
    assert request is not None
    engine.step({"a": 18})
    for token in range(6):
        engine.generate(request, token)
        engine.step({"a": 1})
        engine.settle()
    said = list(request.tokens)
    assert engine.serve("b", [*said, *tokens(10, start=500)]) == 24
    for token in range(4):
        engine.generate(request, token)
        engine.step({"a": 1})
        engine.settle()
    assert engine.serve("c", [*said, *tokens(10, start=600)]) == 24
    engine.remove("a")


def test_a_staged_load_reserves_staging_blocks_for_windows() -> None:
    engine = WindowEngine((9, 5))
    engine.serve("a", tokens(42))
    engine.add("b", tokens(42))
    assert engine.scheduler.stats().staging_reserved_blocks == 10 + 2 + 1
    engine.settle()
    engine.remove("b")


def test_a_load_that_timed_out_is_not_saved_at_a_preemption() -> None:
    """Although no update has told the engine yet, which says that it holds what was to be loaded."""
    engine = WindowEngine(save_on="compute,preemption", job_timeout_s=10.0)
    engine.serve("a", tokens(42))
    request = engine.add("b", tokens(42))
    assert request is not None
    engine.step()
    engine.clock.now_s += 20
    engine.step()
    held = dataclasses.replace(engine.held(request), num_computed_tokens=40)
    engine.scheduler.preempt("b", held=held)
    assert not engine.scheduler.plan_step([]).of(JobKind.EARLY_SAVE)


def test_a_layout_whose_block_tables_have_no_null_block_is_refused() -> None:
    """The block that freed entries name, such as 0, would be saved as the KV of the window."""
    layout = dataclasses.replace(window_layout((9,)), null_block=None)
    with pytest.raises(LayoutError, match="windows or states need null_block: the id in block tables"):
        OffloadScheduler(OffloadConfig.create(num_cpu_chunks=8), layout)
    OffloadScheduler(OffloadConfig.create(num_cpu_chunks=0), layout)
    OffloadScheduler(OffloadConfig.create(num_cpu_chunks=8), dataclasses.replace(layout, null_block=-1))


@pytest.mark.parametrize(
    ("num_blocks", "path", "is_said"), [(19, "staged", True), (20, "staged", False), (19, "direct", False)]
)
def test_a_staging_buffer_that_is_smaller_than_the_windows_is_warned_about(num_blocks, path, is_said, caplog) -> None:
    """Two windows of 41 tokens take 20 blocks together, and a checkpoint is saved at once."""
    settings: dict[str, Any] = {"save_path": path, "load_path": path, "num_staging_blocks": num_blocks}
    engine = WindowEngine((41, 41), num_blocks=400, **settings)
    text = "the staging buffer has 19 blocks, and the windows of this model take 20 at each boundary"
    assert (text in caplog.text) == is_said
    found = [engine.serve(name, tokens(81), at_a_time=40) for name in "abcd"]
    assert (found[-1] == 0) == is_said
