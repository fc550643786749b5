"""StagingBufferManager: unit cases, and a hypothesis machine against a plain dict."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tpu_offload.core.staging import StagingBufferManager
from tpu_offload.errors import StagingError
from tpu_offload.types import Direction

SAVE, LOAD = Direction.SAVE, Direction.LOAD


def test_exact_fit_fits() -> None:
    staging = StagingBufferManager(4)
    assert staging.reserve("a", 4, SAVE) == 4
    assert staging.num_free == 0
    staging.check_invariants()


def test_too_much_is_all_or_nothing_unless_partial() -> None:
    staging = StagingBufferManager(4)
    assert staging.reserve("a", 5, SAVE) == 0
    assert staging.num_reserved == 0
    assert staging.reserve("a", 5, SAVE, partial=True) == 4
    assert staging.reserve("b", 1, LOAD, partial=True) == 0
    assert staging.held("b", LOAD) == 0
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
    assert StagingBufferManager(0).reserve("a", 1, SAVE, partial=True) == 0
    with pytest.raises(StagingError, match="-1"):
        StagingBufferManager(-1)


class StagingMachine(RuleBasedStateMachine):
    BUDGET = 12

    def __init__(self) -> None:
        super().__init__()
        self.staging = StagingBufferManager(self.BUDGET)
        self.model: dict[tuple[str, Direction], int] = {}
        self.peak = 0

    requests = st.sampled_from(["a", "b", "c"])
    counts = st.integers(-1, 15)
    directions = st.sampled_from(Direction)

    @rule(request=requests, num=counts, direction=directions, partial=st.booleans())
    def reserve(self, request: str, num: int, direction: Direction, partial: bool) -> None:
        free = self.BUDGET - sum(self.model.values())
        if num < 1 or (direction is LOAD and (request, LOAD) in self.model):
            with pytest.raises(StagingError):
                self.staging.reserve(request, num, direction, partial=partial)
            return
        expected = num if num <= free else (free if partial else 0)
        assert self.staging.reserve(request, num, direction, partial=partial) == expected
        if expected:
            self.model[request, direction] = self.model.get((request, direction), 0) + expected
        self.peak = max(self.peak, sum(self.model.values()))

    @rule(request=requests, num=counts, direction=directions)
    def release(self, request: str, num: int, direction: Direction) -> None:
        held = self.model.get((request, direction), 0)
        if num < 1 or num > held:
            with pytest.raises(StagingError):
                self.staging.release(request, num, direction)
            return
        self.staging.release(request, num, direction)
        self.model[request, direction] = held - num
        if held == num:
            del self.model[request, direction]

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.staging.check_invariants()
        assert self.staging.num_reserved == sum(self.model.values())
        assert self.staging.peak_num_reserved == self.peak
        for request in "abc":
            for direction in Direction:
                assert self.staging.held(request, direction) == self.model.get((request, direction), 0)


TestStagingMachine = StagingMachine.TestCase
