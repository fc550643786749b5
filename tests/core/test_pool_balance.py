"""The rule by which memory moves between chunks and states."""

import pytest

from tpu_offload.core.index import PoolBalance, PoolMove
from tpu_offload.types import Pool

CHUNKS, STATES = Pool


def balance(*, unit: int = 1, chunks_by_age: bool = True) -> PoolBalance:
    """Segments of 20 chunks or 10 states."""
    rule = PoolBalance((20, 10), unit=unit, chunks_by_age=chunks_by_age)
    rule.restart(0)
    return rule


def evict(rule: PoolBalance, pool: Pool, num: int, *, age: int) -> None:
    for _ in range(num):
        rule.note_evicted(pool, 1, age)


def choose(
    rule: PoolBalance, now: int, *, segments: tuple[int, int] = (8, 8), free: tuple[int, int] = (0, 0)
) -> Pool | None:
    move = move_of(rule, now, segments=segments, free=free)
    return None if move is None else move.taker


def move_of(
    rule: PoolBalance, now: int, *, segments: tuple[int, int] = (8, 8), free: tuple[int, int] = (0, 0)
) -> PoolMove | None:
    return rule.choose(now=now, num_segments=segments, num_free=free)


@pytest.mark.parametrize("young", Pool)
def test_the_pool_that_evicts_younger_entries_gets_memory(young: Pool) -> None:
    rule = balance()
    evict(rule, young, 30, age=50)
    evict(rule, Pool(1 - young), 30, age=200)
    assert choose(rule, 100) is young
    assert choose(rule, 200) is None, "a new window"


@pytest.mark.parametrize(("old", "expected"), [(100, None), (130, None), (145, STATES)])
def test_a_move_that_would_not_pay_is_not_made(old: int, expected: Pool | None) -> None:
    """Of 8 segments each, with ages in proportion: 100 * 9/8 * 1.1 = 123.75, and 141.4 * 7/8 = 123.75."""
    rule = balance()
    evict(rule, STATES, 30, age=100)
    evict(rule, CHUNKS, 30, age=old)
    assert choose(rule, 1000) is expected


def test_balanced_traffic_moves_nothing() -> None:
    rule = balance()
    for now in range(0, 10_000, 10):
        evict(rule, STATES, 5, age=95 + now % 7)
        evict(rule, CHUNKS, 9, age=105 - now % 7)
        assert choose(rule, now) is None


def test_a_window_is_long_enough_for_the_last_move_to_show() -> None:
    rule = balance()
    assert choose(rule, 0) is None
    evict(rule, STATES, 30, age=400)
    evict(rule, CHUNKS, 30, age=4000)
    assert choose(rule, 99) is None
    assert choose(rule, 100) is STATES, "a quarter of the age of the states"


def test_a_few_evictions_are_no_reason() -> None:
    rule = balance(unit=2)
    evict(rule, STATES, 19, age=10)
    evict(rule, CHUNKS, 39, age=1000)
    assert choose(rule, 1000) is None
    evict(rule, STATES, 1, age=10)
    assert choose(rule, 1000) is STATES


def test_free_memory_goes_to_the_pool_that_evicts() -> None:
    rule = balance()
    evict(rule, STATES, 10, age=100)
    assert choose(rule, 10, free=(40, 0)) is None
    assert choose(rule, 20, free=(30, 0)) is None
    assert choose(rule, 25, free=(30, 0)) is STATES
    evict(rule, STATES, 10, age=100)
    assert choose(rule, 60, free=(29, 0)) is None, "they were free at the end of the window only"


def test_a_pool_that_evicts_nothing_for_long_gives_memory() -> None:
    rule = balance()
    for now in range(0, 110, 10):
        evict(rule, STATES, 10, age=100)
        assert choose(rule, now) is None
    evict(rule, STATES, 10, age=100)
    assert choose(rule, 130) is STATES


def test_states_that_are_evicted_with_their_chunks_only_give_none() -> None:
    """They are evicted with their chunks, so none is evicted by itself; that does not mean that they live longer."""
    rule = balance()
    for now in range(0, 10_000, 10):
        evict(rule, CHUNKS, 20, age=100)
        assert choose(rule, now, free=(0, 5)) is None


@pytest.mark.parametrize(
    ("ages", "segments", "expected"),
    [
        ((100, 400), (40, 40), 10),  # even after 24 segments; a quarter of 40
        ((100, 150), (40, 40), 4),  # even after 8
        ((100, 900), (3, 77), 3),  # no more than it has
        ((100, 150), (8, 8), 1),
    ],
)
def test_the_larger_the_difference_the_more_moves(
    ages: tuple[int, int], segments: tuple[int, int], expected: int
) -> None:
    rule = balance()
    evict(rule, CHUNKS, 30, age=ages[0])
    evict(rule, STATES, 30, age=ages[1])
    assert move_of(rule, 1000, segments=segments) == PoolMove(CHUNKS, STATES, expected)


def test_half_of_what_is_free_moves() -> None:
    rule = balance()
    evict(rule, CHUNKS, 30, age=100)
    assert move_of(rule, 1000, segments=(40, 40), free=(0, 60)) == PoolMove(CHUNKS, STATES, 3)


def test_with_other_policies_chunks_get_what_is_free_only() -> None:
    rule = balance(chunks_by_age=False)
    evict(rule, CHUNKS, 30, age=100)
    evict(rule, STATES, 30, age=400)
    assert choose(rule, 1000) is None
    evict(rule, CHUNKS, 30, age=100)
    assert choose(rule, 2000, free=(0, 15)) is CHUNKS
    evict(rule, CHUNKS, 30, age=400)
    evict(rule, STATES, 30, age=100)
    assert choose(rule, 3000) is STATES


@pytest.mark.parametrize(("segments", "expected"), [((2, 8), STATES), ((1, 9), None)])
def test_the_last_segment_stays(segments: tuple[int, int], expected: Pool | None) -> None:
    rule = balance()
    evict(rule, STATES, 30, age=10)
    assert choose(rule, 100, segments=segments, free=(100, 0)) is expected


def test_what_was_evicted_before_a_move_does_not_count() -> None:
    rule = balance()
    evict(rule, STATES, 30, age=10)
    rule.restart(500)
    assert choose(rule, 600, free=(100, 100)) is None
