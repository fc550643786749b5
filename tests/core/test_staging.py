"""StagingBufferManager, case by case; `test_staging_machine` tries them in any order."""

import pytest

from tpu_offload.core.staging import StagingBufferManager
from tpu_offload.errors import StagingError
from tpu_offload.types import Direction

SAVE, LOAD = Direction.SAVE, Direction.LOAD


def test_exact_fit_fits() -> None:
    staging = StagingBufferManager(4)
    assert staging.reserve("a", 4, SAVE) == 4
    assert staging.num_free == 0
    staging.check_invariants()


def test_a_reservation_is_all_or_nothing() -> None:
    staging = StagingBufferManager(4)
    assert staging.reserve("a", 5, SAVE) == 0
    assert staging.held("a", SAVE) == staging.num_reserved == 0
    staging.check_invariants()


def test_saves_of_one_request_add_up_and_totals_split_by_direction() -> None:
    staging = StagingBufferManager(10)
    staging.reserve("a", 2, SAVE)
    staging.reserve("a", 3, SAVE)
    staging.reserve("a", 4, LOAD)
    assert (staging.held("a", SAVE), staging.held("a", LOAD)) == (5, 4)
    assert (staging.total(SAVE), staging.total(LOAD), staging.num_free) == (5, 4, 1)


def test_peak_stays_after_release() -> None:
    staging = StagingBufferManager(10)
    staging.reserve("a", 7, SAVE)
    staging.release("a", 7, SAVE)
    staging.reserve("a", 2, SAVE)
    assert staging.peak_num_reserved == 7
    assert staging.num_free == 8


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.release("a", 4, SAVE), "releases 4 staging blocks of its save but holds 3"),
        (lambda s: s.release("a", 3, LOAD), "releases 3 staging blocks of its load but holds 2"),
        (lambda s: s.release("nobody", 1, SAVE), "'nobody' releases 1 staging blocks but holds none"),
        (lambda s: s.reserve("a", 1, LOAD), "its load of 2 staging blocks is pending"),
        (lambda s: s.reserve("a", 0, SAVE), "reserves 0 staging blocks; expected at least 1"),
        (lambda s: s.reserve("a", -1, SAVE), "reserves -1 staging blocks; expected at least 1"),
        (lambda s: s.release("a", 0, SAVE), "releases 0 staging blocks; expected at least 1"),
    ],
)
def test_errors_leave_the_accounts_as_they_were(call, message) -> None:
    staging = StagingBufferManager(10)
    staging.reserve("a", 3, SAVE)
    staging.reserve("a", 2, LOAD)
    with pytest.raises(StagingError, match=message):
        call(staging)
    assert (staging.held("a", SAVE), staging.held("a", LOAD), staging.num_reserved) == (3, 2, 5)
    staging.check_invariants()


def test_budget_of_zero_grants_nothing_and_a_negative_one_is_an_error() -> None:
    assert StagingBufferManager(0).reserve("a", 1, SAVE) == 0
    with pytest.raises(StagingError, match="-1"):
        StagingBufferManager(-1)
