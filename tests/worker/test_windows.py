"""Sliding windows and states from the scheduler to the bytes: a real worker copies blocks and rows."""

import hashlib
import random
from typing import Any

import jax
import numpy as np
import pytest

from tests.caches import random_caches
from tests.core.fakes import POISON, ROWS, tokens
from tests.core.window_engine import WindowEngine
from tests.core.window_lives import RandomLife
from tests.inside.worker import tier_groups
from tpu_offload import (
    ConfigError,
    CopyJob,
    CopyPart,
    JobKind,
    JobResult,
    JobState,
    KVLayout,
    OffloadConfig,
    OffloadWorker,
    StepPlan,
    StepReport,
)
from tpu_offload.kernels import reference
from tpu_offload.memory import host_arena
from tpu_offload.types import Direction
from tpu_offload.worker.backlog import LoadBacklog

pytestmark = pytest.mark.usefixtures("compiled_once")

PAGE_SHAPE = (4, 4, 2, 4)
NUM_LAYERS = 2


@jax.jit
def write_blocks(caches, pages, block_ids):
    return [cache.at[block_ids].set(page) for cache, page in zip(caches, pages, strict=True)]


class NamedBlocks:
    """Blocks on a device, or rows, as if they held names: each name stands for random pages of its own."""

    def __init__(self, caches: list[jax.Array]) -> None:
        self.caches = caches
        self.names: dict[bytes, bytes] = {}  # by the digest of the pages

    def pages(self, name: bytes) -> list[np.ndarray[Any, Any]]:
        rng = np.random.default_rng(list(hashlib.blake2b(name, digest_size=8).digest()))
        pages = [rng.standard_normal(cache.shape[1:]).astype(cache.dtype) for cache in self.caches]
        self.names[self.digest(pages)] = name
        return pages

    @staticmethod
    def digest(pages: list[np.ndarray[Any, Any]]) -> bytes:
        return hashlib.blake2b(b"".join(page.tobytes() for page in pages), digest_size=8).digest()

    def __getitem__(self, block_id: int) -> bytes:
        pages = [reference.as_bytes(cache)[block_id] for cache in self.caches]
        return self.names.get(self.digest(pages), POISON)

    def update(self, writes: list[tuple[int, bytes]]) -> None:
        last = dict(writes)
        if not last:
            return
        size = 1 << (len(last) - 1).bit_length()  # few shapes to compile
        ids = (list(last) * size)[:size]
        pages = zip(*[self.pages(last[block_id]) for block_id in ids], strict=True)
        self.caches[:] = write_blocks(self.caches, [np.stack(page) for page in pages], np.array(ids))


class NamedHbm:
    """The blocks of the attention arrays, and from `ROWS` on the rows of the state arrays."""

    def __init__(self, caches: list[jax.Array], num_states: int) -> None:
        end = len(caches) - num_states
        self.blocks, self.rows = NamedBlocks(caches[:end]), NamedBlocks(caches[end:])

    @property
    def caches(self) -> list[jax.Array]:
        return self.blocks.caches + self.rows.caches

    @caches.setter
    def caches(self, caches: list[jax.Array]) -> None:
        end = len(self.blocks.caches)
        self.blocks.caches, self.rows.caches = caches[:end], caches[end:]

    def __getitem__(self, place: int) -> bytes:
        return self.blocks[place] if place < ROWS else self.rows[place - ROWS]

    def __setitem__(self, place: int, name: bytes) -> None:
        self.update([(place, name)])

    def update(self, writes: list[tuple[int, bytes]]) -> None:
        self.blocks.update([(place, name) for place, name in writes if place < ROWS])
        self.rows.update([(place - ROWS, name) for place, name in writes if place >= ROWS])


class RealWorker:
    """An `OffloadWorker` with the calls of `FakeWorker`."""

    worker_id = 0

    def __init__(self, layout: KVLayout, caches: list[jax.Array], **settings: Any) -> None:
        num_states = len(layout.state_group.layer_ids) if layout.state_group is not None else 0
        self.blocks = NamedHbm(caches, num_states)
        config = OffloadConfig.create(**({"skip_jax_precompile": True} | settings))
        self.worker = OffloadWorker(config, layout, caches, available=2**30)
        self.worker.wait_until_allocated()
        self.failed: list[JobResult] = []

    @property
    def hbm(self) -> Any:
        return self.blocks

    @hbm.setter
    def hbm(self, blocks: Any) -> None:
        """The engine begins with blocks that hold nothing, as these do."""

    @property
    def in_flight(self) -> list[str]:
        return ["copies"] if self.worker.has_flights else []

    def begin_step(self, plan: StepPlan) -> list[JobResult]:
        self.blocks.caches = self.worker.begin_step(plan, self.blocks.caches)
        return []

    def end_step(self, plan: StepPlan) -> None:
        self.worker.end_step(plan, self.blocks.caches)

    def finish(self, num_jobs: int | None = None, *, fail: bool = False) -> list[JobResult]:
        return []

    def report(self, results: list[JobResult] | None = None) -> StepReport:
        report = self.worker.poll(wait=True)
        self.failed += [result for result in report.results if result.state is JobState.FAILED]
        return report


def real_engine(path: str, windows: tuple[int, ...] = (9, 5), *, num_rows: int = 0, **settings: Any) -> WindowEngine:
    caches = random_caches(
        np.random.default_rng(1), num_blocks=80, num_layers=NUM_LAYERS, page_shape=PAGE_SHAPE, dtype="float32"
    )
    staging = {"num_staging_blocks": 32, "num_cpu_chunks": 40, "host_segment_gb": 1e-5}
    settings = {"save_path": path, "load_path": path} | staging | settings
    groups = [(window, range(NUM_LAYERS)) for window in (0, *windows)]
    shapes = [((3, 8), "bfloat16"), ((2, 4, 4), "float32")] * 2 if num_rows else []
    for shape, dtype in shapes:
        caches += random_caches(
            np.random.default_rng(2), num_blocks=num_rows, num_layers=1, page_shape=shape, dtype=dtype
        )
    layout = KVLayout.from_caches(
        caches, block_size=4, groups=groups, states=range(NUM_LAYERS, len(caches)), null_block=0
    )
    worker: Any = RealWorker(layout, caches, **settings)
    return WindowEngine(windows, num_blocks=80, num_rows=num_rows, workers=[worker], layout=layout, **settings)


@pytest.mark.parametrize("path", ["direct", "staged"])
def test_groups_that_share_arrays_are_saved_and_loaded(path) -> None:
    engine = real_engine(path)
    assert engine.serve("a", tokens(42)) == 0
    assert engine.serve("b", tokens(42)) == 40
    assert engine.serve("c", tokens(42), num_in_hbm=36) == 4
    stats = engine.scheduler.stats()
    assert (stats.num_resident_chunks, stats.num_window_chunks, stats.num_failed_jobs) == (10, 3, 0)


@pytest.mark.parametrize("path", ["direct", "staged"])
def test_states_are_saved_and_loaded(path) -> None:
    engine = real_engine(path, (), num_rows=20)
    assert engine.serve("a", tokens(42)) == 0
    assert engine.serve("b", tokens(42)) == 40
    assert engine.serve("c", tokens(42), num_in_hbm=36) == 4
    stats = engine.scheduler.stats()
    assert (stats.num_resident_chunks, stats.num_states, stats.num_failed_jobs) == (10, 1, 0)
    state = engine.layout.state_group
    assert state is not None
    assert [(pages.page_shape, pages.num_layers) for pages in state.page_groups] == [((3, 8), 2), ((2, 4, 4), 2)]
    assert stats.loaded_nbytes == 11 * engine.layout.block_nbytes + 2 * state.block_nbytes


@pytest.mark.parametrize("path", ["direct", "staged"])
def test_states_have_a_pool_of_their_own_and_are_copied_directly(path) -> None:
    engine = real_engine(path, (), num_rows=40, num_cpu_chunks=60, host_segment_gb=2e-6)
    worker: Any = engine.workers[0]
    groups = tier_groups(worker.worker)
    of_attention, conv, recurrent = groups
    layout = engine.layout
    assert layout.state_group is not None
    # Half of 60 chunks each, in segments of 2,147 bytes: rows have 352 bytes, blocks 1,024.
    assert (worker.worker.num_host_chunks, worker.worker.num_host_states) == (30, 75)
    assert [group.memory.spec.segment_blocks for group in groups] == [2, 5, 5]
    assert [group.memory.arena.num_segments_ready for group in groups] == [15, 15, 15]
    assert [group.memory.num_segments for group in groups] == [29, 29, 29], "at most"
    assert [type(copier).__name__ for group in (conv, recurrent) for copier in group.copiers.values()] == [
        "DirectCopier"
    ] * 4
    assert of_attention.copiers[Direction.SAVE].stages == (path == "staged")
    prompts = [tokens(6, start=100 * i) for i in range(25)]
    for i, prompt in enumerate(prompts):
        engine.serve(f"a{i}", prompt)
    for i, prompt in enumerate(prompts):
        assert engine.serve(f"b{i}", prompt) == 4, "in every segment"
    assert engine.scheduler.stats().num_failed_jobs == 0


@pytest.mark.parametrize("failing", ["chunks", "states"])
def test_memory_that_one_pool_cannot_have_is_no_limit_of_the_other(failing, monkeypatch) -> None:
    allocate, num_calls = host_arena.pinned_zeros, dict.fromkeys(["chunks", "states"], 0)

    def short_of_memory(struct: jax.ShapeDtypeStruct) -> jax.Array:
        pool = "chunks" if struct.shape[2:] == PAGE_SHAPE else "states"
        num_calls[pool] += 1
        if pool == failing and num_calls[pool] > 4:
            raise MemoryError
        return allocate(struct)

    monkeypatch.setattr(host_arena, "pinned_zeros", short_of_memory)
    engine = real_engine("direct", (), num_rows=40, num_cpu_chunks=60, host_segment_gb=2e-6)
    worker: Any = engine.workers[0]
    report = worker.worker.poll()
    whole = worker.worker.num_host_chunks, worker.worker.num_host_states
    if failing == "chunks":
        assert report.num_host_slots == (8, whole[1])
    else:  # two page groups, whose threads take turns
        num_chunks, num_states = report.num_host_slots
        assert num_chunks == whole[0]
        assert num_states <= 10


def test_a_setup_without_states_has_no_segments_of_them() -> None:
    worker: Any = real_engine("direct").workers[0]
    setup = worker.worker.poll().setup
    assert [num > 0 for num in setup.segment_slots] == [True]


@pytest.mark.parametrize("number", [1, 2])
def test_lost_memory_of_states_is_reported_as_such(number, monkeypatch) -> None:
    engine = real_engine("direct", (), num_rows=40, num_cpu_chunks=60, host_segment_gb=2e-6)
    worker: Any = engine.workers[0]
    for i in range(8):
        engine.serve(f"a{i}", tokens(6, start=100 * i))
    assert engine.scheduler.stats().num_states == 8
    group = tier_groups(worker.worker)[number]
    group.memory.check_segment(1, lost=True)  # rows 5 to 7, of 5 to 9
    report = worker.worker.poll()
    assert report.results == (), "it comes with the result of the copy that failed"
    job = CopyJob(job_id=10**6, kind=JobKind.LOAD, parts=(CopyPart(group_id=1, block_ids=(3,), host_block_ids=(7,)),))
    worker.begin_step(StepPlan(step_id=10**6, jobs=(job,)))
    report = worker.worker.poll()
    assert [result.error for result in report.results] == [
        "segment 1 of host_tier was lost, or never written: host block 7 is empty"
    ]
    assert report.lost_slots == ((1, 5, 10),)
    engine.scheduler.apply(report)
    for i in range(5):
        assert engine.serve(f"b{i}", tokens(6, start=100 * i)) == 4
    hashes: Any = []
    engine.hasher.extend(hashes, tokens(6, start=700))
    assert engine.scheduler.match("c", hashes, num_tokens=6, num_computed_tokens=0).num_tokens == 0


def state_load(job_id: int, num_blocks: int) -> CopyJob:
    blocks = tuple(range(num_blocks))
    parts = (
        CopyPart(group_id=0, block_ids=blocks, host_block_ids=blocks),
        CopyPart(group_id=1, block_ids=(7,), host_block_ids=(3,)),
    )
    return CopyJob(job_id=job_id, kind=JobKind.LOAD, parts=parts)


def blocks_and_rows(pieces: list[CopyJob]) -> list[tuple[int, int, int]]:
    def count(job: CopyJob, group_id: int) -> int:
        return sum(len(part.block_ids) for part in job.parts if part.group_id == group_id)

    return [(job.job_id, count(job, 0), count(job, 1)) for job in pieces]


def test_a_row_takes_the_time_of_many_blocks() -> None:
    backlog = LoadBacklog(max_blocks_per_step=10, sizes={1: 8})
    pieces, done = backlog.take([state_load(0, 10)], step_id=0, room=None)
    assert (blocks_and_rows(pieces), done) == ([(0, 10, 0)], [])
    assert [(group_id, places.tolist()) for group_id, places in next(iter(backlog)).places_left()] == [
        (0, []),
        (1, [3]),
    ]
    pieces, done = backlog.take([state_load(1, 3)], step_id=1, room=None)
    assert (blocks_and_rows(pieces), done) == ([(0, 0, 1), (1, 2, 0)], [0]), "the other gets what is left"
    pieces, done = backlog.take([], step_id=2, room=None)
    assert (blocks_and_rows(pieces), done) == ([(1, 1, 1)], [1])


def test_a_row_larger_than_a_step_is_copied_alone_once_its_load_is_the_oldest() -> None:
    backlog = LoadBacklog(max_blocks_per_step=6, sizes={1: 8})
    pieces, done = backlog.take([state_load(0, 2), state_load(1, 2)], step_id=0, room=None)
    assert (blocks_and_rows(pieces), done) == ([(0, 2, 0), (1, 2, 0)], [])
    pieces, done = backlog.take([], step_id=1, room=None)
    assert (blocks_and_rows(pieces), done) == ([(0, 0, 1)], [0])
    pieces, done = backlog.take([], step_id=2, room=None)
    assert (blocks_and_rows(pieces), done) == ([(1, 0, 1)], [1])


@pytest.mark.parametrize("seed", range(5))
def test_a_step_copies_no_more_than_it_may_but_for_the_oldest_row(seed) -> None:
    rng = random.Random(seed)
    most, row = rng.choice([5, 10, 33]), rng.choice([2, 8, 40])
    backlog = LoadBacklog(max_blocks_per_step=most, sizes={1: row})
    left = {job_id: rng.randint(1, 60) for job_id in range(20)}
    copied: dict[int, list[int]] = {job_id: [0, 0] for job_id in left}
    for step_id in range(1000):
        new = [state_load(job_id, left.pop(job_id)) for job_id in list(left)[: rng.randint(0, 2)]]
        pieces, _ = backlog.take(new, step_id=step_id, room=None)
        counts = blocks_and_rows(pieces)
        assert sum(blocks + rows * row for _, blocks, rows in counts) <= max(most, row)
        for job_id, blocks, rows in counts:
            copied[job_id][0] += blocks
            copied[job_id][1] += rows
        if not left and not backlog:
            break
    assert all(rows == 1 for _, rows in copied.values())
    assert not backlog


def test_a_load_with_a_row_that_fits_a_step_is_one_piece() -> None:
    backlog = LoadBacklog(max_blocks_per_step=18, sizes={1: 8})
    job = state_load(0, 10)
    assert backlog.take([job], step_id=0, room=None) == ([job], [0])
    backlog = LoadBacklog(max_blocks_per_step=17, sizes={1: 8})
    assert len(backlog.take([job], step_id=0, room=None)[1]) == 0


def test_staged_loads_do_not_count_rows_so() -> None:
    backlog = LoadBacklog(max_blocks_per_step=0, sizes={1: 8})
    pieces, done = backlog.take([state_load(0, 3)], step_id=0, room=lambda load: 2)
    assert (blocks_and_rows(pieces), done) == ([(0, 2, 0)], [])
    assert [places.tolist() for _, places in next(iter(backlog)).places_left()] == [[2], [3]]
    pieces, done = backlog.take([], step_id=1, room=lambda load: 1)
    assert (blocks_and_rows(pieces), done) == ([(0, 1, 1)], [0]), "the row is not staged"


class RealLife(RandomLife):
    """The random lives of the scheduler's tests, with a real worker that neither fails nor is late."""

    def __init__(self, seed: int, path: str) -> None:
        self.rng = rng = random.Random(seed)
        self.blocks_per_chunk = rng.choice([1, 1, 2])
        self.has_states = seed % 2 == 1
        self.engine = real_engine(
            path,
            (() if seed % 4 == 1 else (9,)) if self.has_states else rng.choice([(9,), (9, 5), (12, 3)]),
            num_rows=24 if self.has_states else 0,
            num_cpu_chunks=rng.choice([12, 40]),
            blocks_per_chunk=self.blocks_per_chunk,
            num_staging_blocks=rng.randint(8, 30),
            decode_save=rng.random() < 0.5,
            save_on="compute,preemption",
        )
        self.undelivered = [[]]
        self.fault_rate = self.loss_rate = 0.0
        self.watch()


@pytest.mark.parametrize("path", ["direct", "staged"])
@pytest.mark.parametrize("seed", range(4))
def test_random_run(seed, path) -> None:
    life = RealLife(seed, path)
    life.run(60)
    assert life.num_checked > 100
    worker: Any = life.engine.workers[0]
    assert worker.failed == [], "a reset may fail loads in flight, but no copy fails"


def test_the_random_runs_do_load() -> None:
    lives = [RealLife(seed, "direct") for seed in range(8)]
    for life in lives:
        life.run(60)
    assert sum(life.num_loaded for life in lives) > 50


def test_a_block_of_two_groups_is_refused() -> None:
    engine = real_engine("direct")
    engine.serve("a", tokens(42))  # host blocks 0 to 2 hold something
    parts = (
        CopyPart(group_id=0, block_ids=(3, 4), host_block_ids=(0, 1)),
        CopyPart(group_id=2, block_ids=(4,), host_block_ids=(2,)),
    )
    worker: Any = engine.workers[0]
    worker.begin_step(StepPlan(step_id=10**6, jobs=(CopyJob(job_id=99, kind=JobKind.LOAD, parts=parts),)))
    (result,) = worker.report().results
    assert result.state is JobState.FAILED
    assert result.error == "it writes one place twice"
    other = CopyPart(group_id=3, block_ids=(4,), host_block_ids=(2,))
    worker.begin_step(StepPlan(step_id=10**6 + 1, jobs=(CopyJob(job_id=100, kind=JobKind.LOAD, parts=(other,)),)))
    (result,) = worker.report().results
    assert "layer group 3 in host_tier; this worker has 3" in result.error


def test_fused_copies_are_refused() -> None:
    with pytest.raises(ConfigError, match="for 3 layer groups; fused copies support one: set direct or staged"):
        real_engine("fused")
