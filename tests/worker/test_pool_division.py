"""Segments of host memory that move between the pools of a real worker."""

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from tests.core.fakes import tokens
from tests.inside.worker import arena_segments, host_tier, tier_groups
from tests.worker.test_windows import PAGE_SHAPE, real_engine
from tpu_offload import HostDivision, OffloadWorker, StepPlan
from tpu_offload.kernels.reference import as_bytes
from tpu_offload.memory import SegmentLimit, host_arena
from tpu_offload.worker.pool_division import HostPool, PoolDivision


def engine_and_worker() -> tuple[Any, OffloadWorker]:
    """A host tier of 30 segments of two chunks or five states, half of them for each."""
    engine: Any = real_engine("direct", (), num_rows=40, num_cpu_chunks=60, host_segment_gb=2e-6)
    worker = engine.workers[0].worker
    worker.wait_until_allocated()
    return engine, worker


def arenas(worker: Any) -> list[Any]:
    return [group.memory.arena for group in tier_groups(worker)]


def nbytes(worker: OffloadWorker) -> int:
    """Bytes of host memory that both pools have."""
    return sum(stripe.nbytes for arena in arenas(worker) for segment in arena_segments(arena) for stripe in segment)


def divide(worker: OffloadWorker, number: int, chunks: int, states: int) -> None:
    division = HostDivision(division_id=number, segments=(chunks, states))
    worker.begin_step(StepPlan(step_id=10**6 + number, division=division), [])


def settle(worker: OffloadWorker, most: int) -> tuple[int, int]:
    """Polls until nothing is allocated or freed any more; asserts the bound of memory all the time."""
    for _ in range(5):
        worker.poll()
        worker.wait_until_allocated()
        assert nbytes(worker) <= most
    report = worker.poll()
    num_chunks, num_states = report.num_host_slots
    return num_chunks, num_states


def test_both_pools_together_never_have_more_memory() -> None:
    _, worker = engine_and_worker()
    most = 30 * 2048
    assert nbytes(worker) <= most
    for number, chunks in enumerate((10, 29, 1, 15), 1):
        divide(worker, number, chunks, 30 - chunks)
        assert settle(worker, most) == (chunks * 2, (30 - chunks) * 5)
        assert worker.poll().division_id == number
    divide(worker, 9, 29, 29)
    chunks, states = settle(worker, most)
    assert chunks // 2 + states // 5 == 30, "a plan that is wrong gets no more memory either"


def test_a_freed_segment_is_freed_and_the_others_keep_their_bytes() -> None:
    engine, worker = engine_and_worker()
    for i in range(15):
        engine.serve(f"a{i}", tokens(6, start=100 * i))
    of_chunks = arenas(worker)[0]
    freed = [stripe for segment in arena_segments(of_chunks)[10:] for stripe in segment]
    before = [as_bytes(np.asarray(stripe)) for segment in arena_segments(of_chunks)[:10] for stripe in segment]
    divide(worker, 1, 10, 20)
    assert settle(worker, 30 * 2048) == (20, 100)
    assert all(stripe.is_deleted() for stripe in freed)
    after = [as_bytes(np.asarray(stripe)) for segment in arena_segments(of_chunks) for stripe in segment]
    np.testing.assert_equal(after, before)


def test_an_older_division_is_ignored() -> None:
    _, worker = engine_and_worker()
    divide(worker, 5, 10, 20)
    worker.begin_step(StepPlan(step_id=10**7, division=HostDivision(division_id=4, segments=(20, 10))), [])
    assert settle(worker, 30 * 2048) == (20, 100)


@pytest.mark.parametrize(
    "division",
    ["x", *[HostDivision(division_id=1, segments=segments) for segments in ((0, 30), (30,), (9, 9, 9), (-1, 30))]],
)
def test_a_division_that_is_none_is_ignored(division: Any) -> None:
    _, worker = engine_and_worker()
    worker.begin_step(StepPlan(step_id=10**6, division=division), [])
    assert settle(worker, 30 * 2048) == (30, 75)


def test_a_segment_that_cannot_be_allocated_lowers_what_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    _, worker = engine_and_worker()
    assert worker.poll().num_host_segments == 30
    allocate = host_arena.pinned_zeros

    def short_of_memory(struct: jax.ShapeDtypeStruct) -> jax.Array:
        if struct.shape[2:] != PAGE_SHAPE:
            raise MemoryError
        return allocate(struct)

    monkeypatch.setattr(host_arena, "pinned_zeros", short_of_memory)
    divide(worker, 1, 10, 20)
    assert settle(worker, 30 * 2048) == (20, 75)
    assert worker.poll().num_host_segments == 25
    divide(worker, 2, 12, 13)
    assert settle(worker, 30 * 2048) == (24, 65)


def test_a_segment_in_use_is_freed_later() -> None:
    worker: Any = engine_and_worker()[1]
    group: Any = tier_groups(worker)[0]

    class Flight:
        segment_id = 12

    divide(worker, 1, 10, 20)
    group.flights.append(Flight())
    for _ in range(3):
        host_tier(worker).pools.advance()
    assert group.memory.arena.num_segments_ready == 15
    group.flights.clear()
    assert settle(worker, 30 * 2048) == (20, 100)


def test_allocation_that_a_division_cut_goes_on_after_the_next_one() -> None:
    class Arena:
        """Allocates a segment in each `step`."""

        def __init__(self, num_ready: int, limit: SegmentLimit) -> None:
            self.num_segments_ready, self.limit, self.target = num_ready, limit, 8

        @property
        def growing(self) -> bool:
            return self.num_segments_ready < min(self.target, self.limit.num_segments)

        def grow(self, num_segments: int) -> None:
            self.target = num_segments

        def can_free(self, first: int) -> bool:
            return not self.growing

        def step(self) -> None:
            self.target = self.target if self.growing else self.num_segments_ready
            self.num_segments_ready += self.growing

    def pool(num_ready: int) -> tuple[HostPool, Arena]:
        limit = SegmentLimit()
        arena = Arena(num_ready, limit)
        copies: Any = SimpleNamespace(memory=SimpleNamespace(arena=arena, free_from=lambda first: None), flights=[])
        return HostPool([copies], limit, 8), arena

    (chunks, chunk_arena), (states, state_arena) = pool(2), pool(8)
    division = PoolDivision((chunks, states), num_segments=16)
    for number, num_segments in ((1, 6), (2, 8)):
        division.begin(HostDivision(division_id=number, segments=(num_segments, 8)))
        division.advance()
        chunk_arena.step()
    for _ in range(20):
        division.advance()
        chunk_arena.step()
        state_arena.step()
    assert (chunk_arena.num_segments_ready, chunks.num_allowed) == (8, 8)
