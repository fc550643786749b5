"""StagingBufferManager as a state machine against a plain dict."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tpu_offload.core.staging import StagingBufferManager
from tpu_offload.errors import StagingError
from tpu_offload.types import Direction

LOAD = Direction.LOAD
REQUESTS = ["a", "a#1", ("a", 1), 7]
NOBODY = "nobody"

requests = st.sampled_from(REQUESTS)
directions = st.sampled_from(Direction)
nothing = st.integers(-3, 0)


class StagingMachine(RuleBasedStateMachine):
    """`held` maps each request to its blocks; the manager's other state follows from it."""

    @initialize(budget=st.integers(0, 12))
    def begin(self, budget):
        self.staging = StagingBufferManager(budget)
        self.budget, self.peak = budget, 0
        self.held: dict[tuple[object, Direction], int] = {}

    @property
    def free(self):
        return self.budget - sum(self.held.values())

    def grant(self, request, direction, num):
        """Reserves what may be reserved: one load a request, any number of saves."""
        expected = num if num <= self.free else 0
        assert self.staging.reserve(request, num, direction) == expected
        if expected:
            self.held[request, direction] = self.held.get((request, direction), 0) + expected
        self.peak = max(self.peak, self.budget - self.free)

    def give_back(self, request, direction, num):
        self.staging.release(request, num, direction)
        self.held[request, direction] -= num
        if not self.held[request, direction]:
            del self.held[request, direction]

    def refuse(self, call, request, num, direction):
        """That nothing has changed is for the invariant to see."""
        with pytest.raises(StagingError) as error:
            call(request, num, direction)
        assert repr(request) in str(error.value)
        assert str(num) in str(error.value) or call == self.staging.reserve

    def draw_holder(self, data, *, direction=None):
        return data.draw(st.sampled_from([h for h in self.held if direction in (None, h[1])]))

    @rule(request=requests, direction=directions, num=st.integers(1, 15))
    def reserve(self, request, direction, num):
        if direction is LOAD and (request, LOAD) in self.held:
            self.refuse(self.staging.reserve, request, num, direction)
        else:
            self.grant(request, direction, num)

    @rule(request=requests, direction=directions, over=st.integers(0, 2))
    def reserve_what_is_left_or_a_little_more(self, request, direction, over):
        if self.free + over and not (direction is LOAD and (request, LOAD) in self.held):
            self.grant(request, direction, self.free + over)

    @precondition(lambda self: any(direction is LOAD for _, direction in self.held))
    @rule(data=st.data(), num=st.integers(1, 13))
    def reserve_a_second_load(self, data, num):
        request, _ = self.draw_holder(data, direction=LOAD)
        self.refuse(self.staging.reserve, request, num, LOAD)

    @rule(request=requests, direction=directions, num=nothing, release=st.booleans())
    def reserve_or_release_nothing_or_less(self, request, direction, num, release):
        if release:
            self.refuse(self.staging.release, request, num, direction)
        else:
            self.refuse(self.staging.reserve, request, num, direction)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release_some(self, data):
        request, direction = self.draw_holder(data)
        self.give_back(request, direction, data.draw(st.integers(1, self.held[request, direction])))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), num=st.integers(1, 13))
    def release_all_and_once_more(self, data, num):
        request, direction = self.draw_holder(data)
        self.give_back(request, direction, self.held[request, direction])
        self.refuse(self.staging.release, request, num, direction)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), over=st.integers(1, 12), other_way=st.booleans())
    def release_too_much(self, data, over, other_way):
        """More than it holds in one direction, also where the other direction holds enough."""
        request, direction = self.draw_holder(data)
        if other_way:
            direction = Direction.SAVE if direction is LOAD else LOAD
        self.refuse(self.staging.release, request, self.held.get((request, direction), 0) + over, direction)

    @rule(direction=directions, num=st.integers(1, 13))
    def release_by_one_who_holds_nothing(self, direction, num):
        self.refuse(self.staging.release, NOBODY, num, direction)

    @invariant()
    def agrees_with_the_model(self):
        staging = self.staging
        staging.check_invariants()
        reserved = sum(self.held.values())
        assert (staging.num_blocks, staging.num_reserved) == (self.budget, reserved)
        assert (staging.num_free, staging.peak_num_reserved) == (self.budget - reserved, self.peak)
        for direction in Direction:
            assert staging.total(direction) == sum(num for (_, way), num in self.held.items() if way is direction)
            for request in [*REQUESTS, NOBODY]:
                assert staging.held(request, direction) == self.held.get((request, direction), 0)

    def teardown(self):
        for (request, direction), num in getattr(self, "held", {}).items():
            self.staging.release(request, num, direction)
            assert self.staging.held(request, direction) == 0
        if hasattr(self, "staging"):
            assert (self.staging.num_free, self.staging.num_blocks) == (self.budget, self.budget)


TestStagingMachine = StagingMachine.TestCase
TestStagingMachine.settings = settings(max_examples=100, stateful_step_count=40, derandomize=True, deadline=None)
