"""Sliding windows and states in storage: which records are written and read, and what requests get of them."""

import itertools
from typing import Any

import pytest

from tests.compiled import interpreted_only
from tests.core.fakes import BLOCK_SIZE
from tests.core.window_engine import WindowEngine, window_layout
from tests.inside.scheduler import (
    checkpoint_table,
    chunk_index,
    current_namespace,
    forget_confirmations,
    request_table,
    storage_planner,
    storage_planners,
    tier_context,
    write_candidates,
)
from tests.storage.checkpoint_lives import (
    CheckpointLife,
    CheckpointWorker,
    SharedCheckpointLife,
    SharedCheckpointWorker,
    attach,
)
from tests.storage.memory_tier import NAME
from tpu_offload import BlockHasher, Match, MatchState, OffloadConfig, OffloadScheduler
from tpu_offload.core.index import Checkpoint
from tpu_offload.core.storage.records import StoredRecords
from tpu_offload.piece_keys import piece_key
from tpu_offload.types import BlockHash, ChunkKey, JobKind

A, B = (list(range(first, first + 6 * BLOCK_SIZE + 2)) for first in (1000, 2000))


def make(
    *, num_rows: int = 0, num_host_chunks: int = 18, workers: list[Any] | None = None, **settings: Any
) -> WindowEngine:
    """A small host tier above storage of 200 records."""
    states = 3 if num_rows else 0
    workers = workers or [CheckpointWorker(num_host_chunks=num_host_chunks, num_host_states=states, staged=False)]
    defaults: dict[str, Any] = {
        "storage_tier": NAME,
        "num_storage_chunks": 200,
        "num_cpu_chunks": num_host_chunks,
        "save_path": "direct",
        "load_path": "direct",
    }
    windows = () if num_rows else (9, 5)
    layout = window_layout(windows, has_states=num_rows > 0, state_size=20)
    engine = WindowEngine(windows, num_rows=num_rows, workers=workers, layout=layout, **(defaults | settings))
    attach(engine)
    return engine


@pytest.fixture(params=[0, 40], ids=["windows", "states"])
def num_rows(request):
    return request.param


def worker_of(engine: WindowEngine) -> CheckpointWorker:
    (worker,) = engine.workers
    assert isinstance(worker, CheckpointWorker)
    return worker


def hashes(engine: WindowEngine, tokens: list[int]) -> list[BlockHash]:
    found: list[BlockHash] = []
    engine.hasher.extend(found, tokens)
    return found


def end_key(engine: WindowEngine, tokens: list[int], num_chunks: int) -> ChunkKey:
    return ChunkKey(hashes(engine, tokens)[num_chunks - 1] + current_namespace(engine.scheduler))


def end_keys(engine: WindowEngine, tokens: list[int]) -> list[ChunkKey]:
    return [end_key(engine, tokens, 1 + i) for i in range(len(hashes(engine, tokens)))]


def match(engine: WindowEngine, name: str, tokens: list[int]) -> Match:
    found = engine.scheduler.match(name, hashes(engine, tokens), num_tokens=len(tokens), num_computed_tokens=0)
    engine.scheduler.release(name)
    engine.scheduler.check_invariants()
    return found


def rest(engine: WindowEngine) -> list[Any]:
    """Steps until an idle engine has nothing to do; returns the plans."""
    plans = []
    while engine.scheduler.has_jobs or any(worker.in_flight for worker in engine.workers):
        plan, results = engine.step()
        plans.append(plan)
        for worker, early in zip(engine.workers, results, strict=True):
            engine.apply(worker, early + worker.finish())
        engine.scheduler.check_invariants()
        assert len(plans) < 200, "an idle engine never comes to rest"
    return plans


def serve(engine: WindowEngine, name: str, tokens: list[int]) -> int:
    loaded = engine.serve(name, tokens)
    rest(engine)
    return loaded


def push_out(engine: WindowEngine) -> None:
    """Other prompts take the host tier."""
    for i in range(12):
        serve(engine, f"other {i}", list(range(10_000 + 1000 * i, 10_000 + 1000 * i + 6 * BLOCK_SIZE)))


def wait(engine: WindowEngine, name: str, tokens: list[int]) -> tuple[Match, list[Any]]:
    """Matches until storage has nothing more to read."""
    plans: list[Any] = []
    found = match(engine, name, tokens)
    while found.state is MatchState.ARRIVING:
        assert len(plans) < 20
        plan, results = engine.step()
        plans.append(plan)
        for worker, early in zip(engine.workers, results, strict=True):
            engine.apply(worker, early + worker.finish())
        found = match(engine, name, tokens)
    return found, plans


def away(**settings: Any) -> WindowEngine:
    """Prompt A is in storage, and not in the host tier."""
    engine = make(**settings)
    serve(engine, "a", A)
    push_out(engine)
    return engine


@pytest.mark.parametrize("write_on", ["save", "eviction"])
def test_what_the_host_tier_has_lost_comes_from_storage(num_rows, write_on):
    engine = away(num_rows=num_rows, storage_write_on=write_on)
    before = engine.scheduler.stats().promoted_chunks
    found, _ = wait(engine, "again", A)
    assert (found.state, found.num_tokens) == (MatchState.HIT, 6 * BLOCK_SIZE)
    assert engine.scheduler.stats().promoted_chunks > before + 6, "chunks of full attention, and pieces"
    assert serve(engine, "again", A) == 6 * BLOCK_SIZE


def test_a_router_is_told_of_the_last_checkpoint_in_storage(num_rows):
    engine = away(num_rows=num_rows)
    hashes: list[BlockHash] = []
    engine.hasher.extend(hashes, A)
    assert engine.scheduler.num_cached_tokens(hashes, num_tokens=len(A) + 1) == 6 * BLOCK_SIZE
    assert engine.scheduler.num_cached_tokens(hashes, num_tokens=6 * BLOCK_SIZE) < 6 * BLOCK_SIZE


def test_an_eviction_policy_is_not_told_of_storage(num_rows):
    """Its chunks alone are of no use: a prefix ends at a checkpoint, which may not be there."""
    engine = away(num_rows=num_rows)
    match(engine, "again", A)
    assert storage_planner(engine.scheduler).records.knows(end_key(engine, A, 6))
    assert request_table(engine.scheduler)["again"].use.num_in_storage == 0


def test_chunks_without_a_checkpoint_are_not_read(num_rows):
    engine = away(num_rows=num_rows)
    records = storage_planner(engine.scheduler).records
    for end, name in list(records.may_end_at().items()):
        if end == end_key(engine, A, 6):
            records.forget(name)
    before = engine.scheduler.stats().promoted_chunks
    found, plans = wait(engine, "again", A)
    assert (found.state, plans) == (MatchState.MISS, [])
    assert found.junction_tokens == 6 * BLOCK_SIZE, "it saves the checkpoint that is missing"
    assert engine.scheduler.stats().promoted_chunks == before


def test_a_checkpoint_behind_chunks_of_the_host_tier_is_read_alone(num_rows):
    engine = make(num_rows=num_rows, num_host_chunks=60)
    serve(engine, "a", A)
    index = chunk_index(engine.scheduler)
    checkpoint = index.checkpoints.get(end_key(engine, A, 6))
    assert checkpoint is not None
    index.checkpoints.drop(checkpoint)
    found, plans = wait(engine, "again", A)
    assert (found.state, found.num_tokens) == (MatchState.HIT, 6 * BLOCK_SIZE)
    (job,) = [job for plan in plans for job in plan.of(JobKind.PROMOTE)]
    assert len(job.chunks) == (1 if num_rows else 3), "a state; or two window chunks and one"
    assert all(name not in index for name, _ in job.chunks)


def test_a_restarted_engine_finds_checkpoints(num_rows):
    engine = away(num_rows=num_rows)
    worker = worker_of(engine)
    other = make(num_rows=num_rows)
    worker_of(other).storages[0].update(worker.storages[0])
    planner = storage_planner(other.scheduler)
    planner.adopt(0, list(worker.storages[0]))
    assert set(planner.stored_keys()) == set(worker.storages[0])
    found, _ = wait(other, "a", A)
    assert (found.state, found.num_tokens) == (MatchState.HIT, 6 * BLOCK_SIZE)
    assert serve(other, "a", A) == 6 * BLOCK_SIZE


@pytest.mark.parametrize("fault", ["fails", "is missing"])
def test_a_piece_that_cannot_be_read_is_computed(num_rows, fault):
    engine = away(num_rows=num_rows)
    worker = worker_of(engine)
    records = storage_planner(engine.scheduler).records
    (name,) = [name for end, name in records.may_end_at().items() if end == end_key(engine, A, 6)]
    found = match(engine, "again", A)
    while found.state is MatchState.ARRIVING:
        _, results = engine.step()
        is_piece = any(name.startswith(key) for job in worker.of_kind(JobKind.PROMOTE) for key, _ in job.chunks)
        engine.apply(worker, results[0] + worker.finish(fail=is_piece))
        found = match(engine, "again", A)
        if is_piece:
            break
    assert found.state is MatchState.MISS
    assert name not in records.stored
    rest(engine)
    assert serve(engine, "again", A) == 0
    assert serve(engine, "and again", A) == 6 * BLOCK_SIZE
    assert name in records.stored, "it was written again"


def test_a_piece_is_not_read_twice_at_a_time(num_rows):
    """A restart of a worker empties the host tier and fails the read, which goes on until the others report it."""
    engine = away(num_rows=num_rows)
    worker = worker_of(engine)
    held: list[Any] = []
    found = match(engine, "again", A)
    while not held:
        assert found.state is MatchState.ARRIVING
        _, results = engine.step()
        held = [entry for entry in worker.in_flight if entry[0].chunks[0][0] not in end_keys(engine, A)]
        worker.in_flight = [entry for entry in worker.in_flight if entry not in held]
        engine.apply(worker, results[0] + worker.finish())
        found = match(engine, "again", A)
    chunk_index(engine.scheduler).clear()
    reads: list[ChunkKey] = []
    for _ in range(10):
        found = match(engine, "again", A)
        plan, results = engine.step()
        reads += [key for job in plan.of(JobKind.PROMOTE) for key, _ in job.chunks]
        engine.apply(worker, results[0] + worker.finish())
    assert found.state is MatchState.ARRIVING
    assert reads == end_keys(engine, A), "chunks, and no pieces"
    worker.in_flight = held
    engine.apply(worker, worker.finish(fail=True))
    engine.scheduler.check_invariants()
    rest(engine)


def test_a_hole_before_a_checkpoint_makes_it_useless(num_rows):
    engine = away(num_rows=num_rows)
    storage_planner(engine.scheduler).records.forget(end_key(engine, A, 3))
    before = engine.scheduler.stats().promoted_chunks
    found, _ = wait(engine, "again", A)
    assert found.state is MatchState.MISS
    assert engine.scheduler.stats().promoted_chunks == before, "what no checkpoint follows is not read"
    assert found.junction_tokens == 2 * BLOCK_SIZE, "so far storage has it"


def test_no_piece_is_read_once_another_was_evicted_for_the_chunks_before_it():
    """Of a window block that only the host tier has; its checkpoint goes with the chunk that is evicted."""
    engine, other = make(num_host_chunks=9), make()  # six chunks, and the three window blocks of a checkpoint
    serve(engine, "b", [*A[: 5 * BLOCK_SIZE], *B[5 * BLOCK_SIZE :]])
    serve(other, "a", A)
    storage = worker_of(engine).storages[0]
    storage.update(worker_of(other).storages[0])
    storage_planner(engine.scheduler).adopt(0, list(storage))
    index, records = chunk_index(engine.scheduler), storage_planner(engine.scheduler).records
    assert index.num_free_slots == 0
    last = end_key(engine, A, 6)
    shared, first, second = (piece_key(end_key(engine, A, n), group) for n, group in ((5, 0), (6, 0), (6, 1)))
    assert index.checkpoints.has_piece(shared)
    assert records.has([last, first, second])
    records.forget(shared)
    rest(engine)
    before = engine.scheduler.stats()
    found = match(engine, "again", A)
    assert found.state is MatchState.ARRIVING, "all that the checkpoint needs was there"
    assert not index.checkpoints.has_piece(shared), "the chunk before it has taken its slot"
    found, plans = wait(engine, "again", A)
    assert [key for plan in plans for job in plan.of(JobKind.PROMOTE) for key, _ in job.chunks] == [last]
    assert (found.state, found.junction_tokens) == (MatchState.MISS, 6 * BLOCK_SIZE)
    assert index.checkpoints.get(last) is None
    after = engine.scheduler.stats()
    assert after.num_dropped_promotions == before.num_dropped_promotions
    assert serve(engine, "again", A) == 0
    assert serve(engine, "and again", A) == 6 * BLOCK_SIZE


def test_a_state_without_one_of_its_records_is_none():
    engine = away(num_rows=40)
    records = storage_planner(engine.scheduler).records
    first = records.may_end_at()[end_key(engine, A, 6)]
    records.forget(ChunkKey(first[:-1] + b"\1"))
    assert wait(engine, "again", A)[0].state is MatchState.MISS
    serve(engine, "again", A)
    assert len([name for name in records.stored if name.startswith(first[:-2])]) == worker_of(engine).num_parts


def test_pieces_are_read_after_all_chunks_before_them(num_rows):
    """Three records may be in flight, so the chunks take two reads."""
    nbytes = make(num_rows=num_rows).layout.block_nbytes
    engine = away(num_rows=num_rows, max_storage_gb_in_flight=6 * nbytes / 2**30)
    found = match(engine, "again", A)
    kinds = []
    while found.state is MatchState.ARRIVING:
        plan, results = engine.step()
        index = chunk_index(engine.scheduler)
        for job in plan.of(JobKind.PROMOTE):
            kinds.append([key in index for key, _ in job.chunks])
            if not all(kinds[-1]):
                assert all(index.state(end_key(engine, A, i + 1)) is not None for i in range(6))
        engine.apply(engine.workers[0], results[0] + engine.workers[0].finish())
        found = match(engine, "again", A)
    assert (found.state, found.num_tokens) == (MatchState.HIT, 6 * BLOCK_SIZE)
    assert all(len(set(kind)) == 1 for kind in kinds), "chunks or pieces"


def test_what_two_checkpoints_share_is_written_once():
    engine = make(num_host_chunks=60)
    request = engine.add("a", A)
    assert request is not None
    request.retained = [4 * BLOCK_SIZE, 5 * BLOCK_SIZE]
    engine.step({"a": 6 * BLOCK_SIZE})
    writes = [job for plan in rest(engine) for job in plan.of(JobKind.CASCADE)]
    keys = [key for job in writes for key, _ in job.chunks]
    assert len(keys) == len(set(keys)) > 6
    assert {end_key(engine, A, n) for n in (4, 5, 6)} <= storage_planner(engine.scheduler).records.may_end_at().keys()


def test_a_checkpoint_that_is_soon_superseded_is_not_written(num_rows):
    """Only the last one of a request that generates is, when it ends."""
    engine = make(num_rows=num_rows, num_host_chunks=60, decode_save=True)
    request = engine.add("a", A)
    assert request is not None
    engine.step({"a": 6 * BLOCK_SIZE})
    engine.settle()
    engine.step({"a": 2})
    for i in range(4 * BLOCK_SIZE):
        engine.settle()
        assert engine.generate(request, i)
        engine.step({"a": 1})
    rest(engine)
    ends = storage_planner(engine.scheduler).records.may_end_at()
    num_before = len(ends)
    engine.remove("a")
    rest(engine)
    assert len(ends) > num_before
    last = request.hashes[request.num_computed // BLOCK_SIZE - 1] + current_namespace(engine.scheduler)
    assert last in ends


def test_chunks_and_pieces_may_be_in_different_tiers(num_rows):
    engine = make(num_rows=num_rows, num_host_chunks=18, storage_tier=(NAME, NAME), num_storage_chunks=(200, 200))
    serve(engine, "a", A)
    push_out(engine)
    near, far = storage_planners(engine.scheduler)
    namespace = current_namespace(engine.scheduler)
    for name in list(near.records.stored):
        if name.endswith(namespace):
            near.records.forget(name)
    for name in list(far.records.stored):
        if not name.endswith(namespace):
            far.records.forget(name)
    rest(engine)
    found, plans = wait(engine, "again", A)
    assert (found.state, found.num_tokens) == (MatchState.HIT, 6 * BLOCK_SIZE)
    assert {job.tier_id for plan in plans for job in plan.of(JobKind.PROMOTE)} == {0, 1}
    assert serve(engine, "again", A) == 6 * BLOCK_SIZE


def test_a_reset_clears_checkpoints_too(num_rows):
    engine = away(num_rows=num_rows)
    engine.scheduler.reset()
    rest(engine)
    records = storage_planner(engine.scheduler).records
    assert not records.stored
    assert not records.may_end_at()
    assert not worker_of(engine).storages[0]
    assert wait(engine, "again", A)[0].state is MatchState.MISS


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_a_tier_that_is_too_small_for_a_checkpoint_comes_to_rest(num_rows, num_chunks, caplog):
    """Its pieces would take turns for ever: each is evicted for another."""
    engine = make(num_rows=num_rows, num_storage_chunks=num_chunks)
    assert f"has room for {num_chunks} records, and a checkpoint of this model takes up to 3" in caplog.text
    serve(engine, "a", A)
    serve(engine, "b", B)
    assert not storage_planner(engine.scheduler).records.may_end_at()


@pytest.mark.parametrize("num_steps", [1, 2, 3])
@pytest.mark.parametrize("num_chunks", [5, 9])
def test_an_idle_engine_comes_to_rest_however_long_copies_take(num_chunks, num_steps):
    """One record may be written at a time: chunks and checkpoints take turns in the steps that have room for one."""
    engine = WindowEngine(
        num_blocks=400,
        workers=[CheckpointWorker(num_host_chunks=200, staged=False)],
        storage_tier=NAME,
        num_storage_chunks=num_chunks,
        num_cpu_chunks=200,
        num_staging_blocks=400,
        max_storage_gb_in_flight=1e-9,
    )
    attach(engine)
    for i in range(6):
        engine.serve(f"r{i}", list(range(1000 * i, 1000 * i + 12 * BLOCK_SIZE + 1)))
    for step in itertools.count():
        if not (engine.scheduler.has_jobs or engine.workers[0].in_flight):
            break
        _, (results,) = engine.step()
        engine.apply(engine.workers[0], results + (engine.workers[0].finish() if step % num_steps == 0 else []))
        assert step < 200 * num_steps, "an idle engine never comes to rest"
    assert engine.scheduler.stats().num_stored_chunks == num_chunks


def test_a_tier_that_is_as_large_as_a_checkpoint_is_written(caplog):
    engine = make(num_storage_chunks=3)
    assert "a checkpoint of this model" not in caplog.text
    serve(engine, "a", A)
    stats = engine.scheduler.stats()
    assert (stats.cascaded_chunks, stats.dropped_cascade_chunks) == (9, 0), "six chunks, two of a window and one"


def last_checkpoint(engine: WindowEngine) -> Checkpoint:
    return next(reversed(checkpoint_table(engine.scheduler).values()))


@pytest.mark.parametrize(("num_rows", "max_gb"), [(0, 1.0), (40, 1.0), (40, 1e-9)])
def test_checkpoints_are_written_however_many_chunks_wait(num_rows, max_gb):
    """Each step completes 20 chunks; it writes eight slots at most, or one state."""
    host = {"num_host_chunks": 200, "num_host_states": 20 if num_rows else 0}
    layout = window_layout(() if num_rows else (9, 5), has_states=num_rows > 0, state_size=20)
    settings: dict[str, Any] = {
        "storage_tier": NAME,
        "num_storage_chunks": 2000,
        "num_cpu_chunks": 200,
        "num_staging_blocks": 400,
    }
    engine = WindowEngine(
        () if num_rows else (9, 5),
        num_rows=num_rows,
        num_blocks=400,
        workers=[CheckpointWorker(**host, staged=False)],
        layout=layout,
        **settings,
        max_storage_gb_in_flight=max_gb,
    )
    attach(engine)
    tier = storage_planner(engine.scheduler)
    for i in range(12):
        tokens = list(range(1000 * i, 1000 * i + 20 * BLOCK_SIZE + 1))
        request = engine.add("a", tokens)
        assert request is not None
        while request.num_computed < len(tokens):
            _, results = engine.step({"a": len(tokens) - request.num_computed})
            engine.apply(engine.workers[0], results[0] + engine.workers[0].finish())
        engine.remove("a")
        assert write_candidates(tier)
    assert len(tier.records.may_end_at()) >= 3
    rest(engine)


def test_what_can_never_be_read_as_a_whole_is_not_begun(caplog):
    """Two records may be in flight, one each way, and a checkpoint has three."""
    engine = away(max_storage_gb_in_flight=1e-9)
    assert "reads 1 records at a time" in caplog.text
    before = engine.scheduler.stats().promoted_chunks
    found, plans = wait(engine, "again", A)
    assert (found.state, plans) == (MatchState.MISS, [])
    assert engine.scheduler.stats().promoted_chunks == before, "not the chunks before it either"


def test_a_far_tier_is_read_while_reads_from_the_near_one_are_suspended(num_rows):
    engine = away(num_rows=num_rows, storage_tier=(NAME, NAME), num_storage_chunks=(200, 200), breaker_failures=1)
    near, far = storage_planners(engine.scheduler)
    assert set(near.records.stored) == set(far.records.stored)
    near.reads.breaker.failed(-1, "injected")
    found, plans = wait(engine, "again", A)
    assert (found.state, found.num_tokens) == (MatchState.HIT, 6 * BLOCK_SIZE)
    assert {job.tier_id for plan in plans for job in plan.of(JobKind.PROMOTE)} == {1}


def test_nothing_is_begun_while_all_reads_are_suspended(num_rows):
    engine = away(num_rows=num_rows, breaker_failures=1)
    storage_planner(engine.scheduler).reads.breaker.failed(-1, "injected")
    found, plans = wait(engine, "again", A)
    assert (found.state, found.junction_tokens, plans) == (MatchState.MISS, 0, [])


@interpreted_only
def test_pieces_are_looked_up_once_however_many_boundaries_lack_one(monkeypatch):
    """The last piece of a long window was evicted, so 99 boundaries behind it look like those of a checkpoint."""
    num_groups, num_chunks = 2, 100
    layout = window_layout((num_chunks * BLOCK_SIZE - BLOCK_SIZE + 1,) * num_groups)
    config = OffloadConfig.create(storage_tier=NAME, num_storage_chunks=2000, num_cpu_chunks=8, save_on="compute")
    scheduler = OffloadScheduler(config, layout)
    assert tier_context(scheduler).window_chunks == (num_chunks - 1,) * num_groups
    block_hashes: list[BlockHash] = []
    BlockHasher(layout.fingerprint(), block_size=BLOCK_SIZE).extend(block_hashes, list(range(300 * BLOCK_SIZE)))
    records = storage_planner(scheduler).records
    keys = [ChunkKey(block_hash + current_namespace(scheduler)) for block_hash in block_hashes]
    for key in [*keys, *(piece_key(key, group) for key in keys[101:199] for group in range(num_groups))]:
        records.add(key)
    assert len(records.may_end_at()) == num_chunks - 2
    calls: list[Any] = []

    def has(self: StoredRecords, names: Any) -> bool:
        calls.append(names)
        return {*names} <= set(self.stored)

    monkeypatch.setattr(StoredRecords, "has", has)
    found = scheduler.match("a", block_hashes, num_tokens=300 * BLOCK_SIZE, num_computed_tokens=0)
    assert found.state is MatchState.MISS
    assert 0 < len(calls) <= num_chunks


def test_a_checkpoint_that_one_step_cannot_demote_is_not_demoted_in_part():
    worker = CheckpointWorker(num_host_chunks=200, staged=False)
    config: dict[str, Any] = {"storage_tier": NAME, "num_storage_chunks": 200, "storage_write_on": "eviction"}
    engine = WindowEngine((80 * BLOCK_SIZE,), workers=[worker], num_staging_blocks=200, num_cpu_chunks=200, **config)
    attach(engine)
    serve(engine, "a", list(range(85 * BLOCK_SIZE + 1)))
    index = chunk_index(engine.scheduler)
    assert len(last_checkpoint(engine).slots) == 80
    assert index.checkpoints.evict_one(()) is not None
    assert not [job for plan in rest(engine) for job in plan.of(JobKind.DEMOTE)]
    assert engine.scheduler.stats().dropped_demotion_chunks == 80


def test_a_state_has_as_many_records_as_it_needs():
    engine = make(num_rows=40)
    layout, config = engine.layout, tier_context(engine.scheduler).config
    assert layout.state_group is not None
    assert config.records_per_state(layout) == -(-layout.state_group.block_nbytes // layout.block_nbytes)
    serve(engine, "a", A)
    records = storage_planner(engine.scheduler).records
    namespace = current_namespace(engine.scheduler)
    parts = [name for name in records.stored if not name.endswith(namespace)]
    assert len(parts) == config.records_per_state(layout) * len(records.may_end_at()) > 0


def test_settings_with_windows_and_storage_are_accepted():
    config = OffloadConfig.create(storage_tier=NAME, num_storage_chunks=8, num_cpu_chunks=8)
    OffloadScheduler(config, make().layout)


@pytest.mark.parametrize("seed", range(60))
def test_random_lives(seed):
    CheckpointLife(seed).run(100)


@pytest.mark.parametrize("seed", range(40))
def test_random_lives_with_a_shared_tier(seed):
    SharedCheckpointLife(seed).run(100)


def test_random_lives_read_checkpoints():
    lives = [CheckpointLife(seed) for seed in range(60, 80)]
    for life in lives:
        life.run(100)
    assert sum(life.num_promoted for life in lives) > 30
    assert sum(life.num_loaded for life in lives) > 100


# Shared tiers.


def make_shared(num_rows: int) -> WindowEngine:
    worker = SharedCheckpointWorker(num_host_chunks=18, num_host_states=3 if num_rows else 0, staged=False)
    return share(make(num_rows=num_rows, workers=[worker]))


def share(engine: WindowEngine) -> WindowEngine:
    for worker in engine.workers:
        storage_planner(engine.scheduler).adopt(worker.worker_id, (), is_shared=True)
    return engine


def test_an_engine_finds_the_checkpoints_of_another(num_rows):
    first = away(num_rows=num_rows)
    other = share(make(num_rows=num_rows))
    worker_of(other).storages[0] = worker_of(first).storages[0]
    found, plans = wait(other, "a", A)
    assert (found.state, found.num_tokens) == (MatchState.HIT, 6 * BLOCK_SIZE)
    lookups = [job for plan in plans for job in plan.of(JobKind.LOOKUP)]
    assert len(lookups) == 2, "first for the chunks, then for the pieces"
    assert serve(other, "a", A) == 6 * BLOCK_SIZE


def test_an_engine_finds_the_checkpoint_of_a_shared_prefix(num_rows):
    """It is not at the end of its own prompt."""
    first = make(num_rows=num_rows)
    serve(first, "a", A[: 3 * BLOCK_SIZE + 1])
    other = share(make(num_rows=num_rows))
    worker_of(other).storages[0] = worker_of(first).storages[0]
    tokens = A[: 3 * BLOCK_SIZE] + B
    found, _ = wait(other, "b", tokens)
    assert (found.state, found.num_tokens) == (MatchState.HIT, 3 * BLOCK_SIZE)
    assert serve(other, "b", tokens) == 3 * BLOCK_SIZE


def test_checkpoints_that_nobody_has_are_asked_for_once(num_rows):
    first = away(num_rows=num_rows)
    namespace = current_namespace(first.scheduler)
    chunks = {name: content for name, content in worker_of(first).storages[0].items() if name.endswith(namespace)}
    other = share(make(num_rows=num_rows))
    worker_of(other).storages[0].update(chunks)
    found, plans = wait(other, "a", A)
    assert found.state is MatchState.MISS
    assert [len(plan.of(JobKind.LOOKUP)) for plan in plans] == [1, 1]
    assert found.junction_tokens == 6 * BLOCK_SIZE
    assert wait(other, "a", A)[1] == [], "not again"
    assert not any(plan.of(JobKind.PROMOTE) for plan in plans)


def test_a_piece_that_a_server_has_evicted_is_missing(num_rows):
    first = away(num_rows=num_rows)
    other = make_shared(num_rows)
    worker_of(other).storages[0] = worker_of(first).storages[0]
    found = match(other, "a", A)
    records = storage_planner(other.scheduler).records
    while found.state is MatchState.ARRIVING and not records.may_end_at():
        _, results = other.step()
        other.apply(other.workers[0], results[0] + other.workers[0].finish())
        found = match(other, "a", A)
    for name in records.may_end_at().values():
        worker_of(other).storages[0].pop(name, None)
    assert wait(other, "a", A)[0].state is MatchState.MISS
    assert other.scheduler.stats().num_failed_jobs == 0


def asked_again(plans: list[Any]) -> set[ChunkKey]:
    """The names that these plans ask for, each by itself."""
    lookups = [job for plan in plans for job in plan.of(JobKind.LOOKUP)]
    assert all(len(prefix) == 1 for job in lookups for prefix in job.prefixes)
    return {prefix[0] for job in lookups for prefix in job.prefixes}


def use_later(engine: WindowEngine, name: str, tokens: list[int]) -> list[Any]:
    """A request with this prompt comes once nothing is confirmed any more; the plans until all is done."""
    forget_confirmations(storage_planner(engine.scheduler))
    match(engine, name, tokens)
    plans = rest(engine)
    engine.scheduler.finish(name)
    return plans


def test_a_checkpoint_of_which_a_server_has_evicted_a_record_is_written_again(num_rows):
    """What is in the host tier is never read from the server, so it evicts it first; new engines would find nothing."""
    engine = make_shared(num_rows)
    serve(engine, "a", A)
    records = storage_planner(engine.scheduler).records
    stored = set(records.stored)
    pieces = {name for name in stored if not name.endswith(current_namespace(engine.scheduler))}
    last = list(records.may_end_at().values())
    assert last, "no checkpoint was written"
    assert pieces
    match(engine, "soon", A)
    assert not asked_again(rest(engine)), "all was written a short while ago"
    engine.scheduler.finish("soon")

    assert asked_again(use_later(engine, "b", A)) >= set(last), "of the last checkpoint"
    assert set(records.stored) == stored, "all is there"

    for name in last:
        del worker_of(engine).storages[0][name]
    use_later(engine, "c", A)
    assert set(records.stored) == stored
    assert worker_of(engine).storages[0].keys() >= stored, "it was written again"
    assert engine.scheduler.stats().vanished_storage_chunks == len(last)
    other = share(make(num_rows=num_rows))
    worker_of(other).storages[0] = worker_of(engine).storages[0]
    assert wait(other, "a", A)[0].num_tokens == 6 * BLOCK_SIZE


def test_a_checkpoint_that_is_gone_from_the_host_tier_is_forgotten(num_rows):
    engine = make_shared(num_rows)
    serve(engine, "a", A)
    records = storage_planner(engine.scheduler).records
    last = list(records.may_end_at().values())
    for name in last:
        del worker_of(engine).storages[0][name]
    forget_confirmations(storage_planner(engine.scheduler))
    match(engine, "b", A)
    plan, results = engine.step()
    assert asked_again([plan]) >= set(last)
    engine.scheduler.finish("b")
    checkpoints = chunk_index(engine.scheduler).checkpoints
    for key in records.may_end_at():
        checkpoint = checkpoints.get(key)
        assert checkpoint is not None
        checkpoints.drop(checkpoint)
    engine.apply(engine.workers[0], results[0] + engine.workers[0].finish())
    assert engine.scheduler.stats().vanished_storage_chunks == len(last)
    assert not set(last) & set(records.stored)
    assert not any(plan.of(JobKind.CASCADE) for plan in rest(engine))
