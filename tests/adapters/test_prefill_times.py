"""Prefill is measured on vLLM's steps, in simulated time, and decides between loads and recompute."""

from typing import Any

import pytest

from tests.adapters.scheduler_stack import SMALL, Stack, prompt
from tests.compiled import interpreted_only
from tests.inside.scheduler import tier_context
from tpu_offload.adapters.vllm.prefill_times import PrefillTimes, PrefillWork, prefill_work

pytestmark = [pytest.mark.vllm, interpreted_only]

TOKEN_S, ATTENDED_S = 0.001, 0.000_01


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Device:
    """Runs the steps of a stack one after the other; each takes as long as its tokens say.

    Args:
      stall_s: of further seconds that a step takes, by its number.
    """

    def __init__(self, stack, clock, *, stall_s=lambda step: 0.0):
        self.clock, self.stall_s = clock, stall_s
        self.ends: list[float] = []
        self.measured: list[tuple[int, float, float]] = []
        self.steps: list[list[tuple[int, int]]] = []
        self.free_s = 0.0
        execute, update = stack.execute, stack.scheduler.update_from_output
        stack.offload.swap.observe_prefill = lambda *args: self.measured.append(args)

        def run(output):
            result = execute(output)
            spans = []
            for request_id, num in output.num_scheduled_tokens.items():
                end = stack.scheduler.requests[request_id].num_computed_tokens
                spans.append((end - num, end))
            seconds = self.stall_s(len(self.steps)) + sum(
                (end - first) * (TOKEN_S + (first + end) / 2 * ATTENDED_S) for first, end in spans
            )
            self.steps.append(spans)
            self.free_s = max(self.free_s, clock.now_s) + seconds
            self.ends.append(self.free_s)
            return result

        def end(output, result):
            clock.now_s = max(clock.now_s, self.ends.pop(0))
            return update(output, result)

        stack.execute, stack.scheduler.update_from_output = run, end


def make(*, warm=True, **settings):
    clock = Clock()
    stack = Stack(**{"num_blocks": 40, **SMALL, "load_mode": "auto", **settings}, clock=clock)
    if warm:
        stack.serve("first", prompt(4, seed=1))  # with it the layout comes
    return stack, clock


def seconds_of(first, end):
    return (end - first) * (TOKEN_S + (first + end) / 2 * ATTENDED_S)


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
def test_prompts_are_measured(async_scheduling):
    """Also in steps that are dispatched while the one before is still running."""
    stack, clock = make(async_scheduling=async_scheduling)
    device = Device(stack, clock)
    stack.add("a", prompt(60, seed=2), max_tokens=2)
    stack.meanwhile = lambda: None
    stack.drain()
    chunks = [span for spans in device.steps for span in spans if span[1] - span[0] > 1]
    assert len(chunks) >= 2, "the prompt takes several steps"
    if async_scheduling:  # these are measured together
        assert len(device.measured) < len(chunks)
    else:
        assert [num_tokens for num_tokens, *_ in device.measured] == [end - first for first, end in chunks]
    num_tokens, seconds, num_attended = map(sum, zip(*device.measured, strict=True))
    assert num_tokens == sum(end - first for first, end in chunks)
    assert num_attended == sum((end - first) * (first + end) / 2 for first, end in chunks)
    assert seconds == pytest.approx(sum(seconds_of(first, end) for first, end in chunks))
    stack.close()


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
def test_time_without_steps_does_not_count(async_scheduling):
    stack, clock = make(async_scheduling=async_scheduling)
    device = Device(stack, clock)
    for i in range(3):
        clock.now_s += 1000.0
        stack.serve(str(i), prompt(12, seed=30 + i), max_tokens=1)
    assert [seconds for _, seconds, _ in device.measured] == pytest.approx([seconds_of(0, 12)] * 3)
    stack.close()


def test_decodes_are_not_measured():
    stack, clock = make()
    device = Device(stack, clock)
    stack.serve("a", prompt(9, seed=2), max_tokens=20)
    assert len(device.steps) >= 20
    assert len(device.measured) == 1
    stack.close()


def test_steps_with_loads_are_not_measured():
    stack, clock = make(num_blocks=16, sync_load=True)
    tokens = prompt(40, seed=3)
    stack.serve("a", tokens)
    for i in range(3):  # takes its blocks in HBM
        stack.serve(f"other {i}", prompt(40, seed=10 + i))
    device = Device(stack, clock)
    matched = stack.offload.stats().matched_tokens
    stack.serve("b", (*tokens, *prompt(12, seed=4)), max_tokens=1)
    assert stack.offload.stats().matched_tokens > matched, "it was loaded"
    assert any(end - first > 1 for spans in device.steps for first, end in spans), "and a prompt computed with it"
    assert not device.measured
    stack.serve("c", prompt(12, seed=5), max_tokens=1)
    assert len(device.measured) == 1
    stack.close()


def test_it_costs_nothing_where_nothing_is_compared():
    for settings in ({"load_mode": "load"}, {"load_mode": "recompute"}):
        stack, clock = make(**settings)
        device = Device(stack, clock)
        stack.serve("a", prompt(40, seed=2))
        assert not device.measured
        stack.close()


def test_stages_are_not_measured():
    stack, clock = make(num_stages=2)
    device = Device(stack, clock)
    stack.serve("a", prompt(40, seed=2))
    assert not device.measured
    stack.close()


def test_several_workers_report_a_step_once():
    stack, clock = make(num_workers=2)
    device = Device(stack, clock)
    stack.serve("a", prompt(12, seed=2), max_tokens=1)
    assert [num_tokens for num_tokens, *_ in device.measured] == [12]
    stack.close()


def test_a_stall_hardly_counts():
    """Such as the compilation of a shape that was not used before."""
    estimates: list[Any] = []
    for stall_s in (lambda step: 0.0, lambda step: 30.0 * (step % 7 == 3)):
        stack, clock = make()
        device = Device(stack, clock, stall_s=stall_s)
        del stack.offload.swap.observe_prefill
        for i in range(12):
            stack.serve(str(i), prompt(20 + i, seed=100 + i), max_tokens=1)
        assert any(stall_s(step) for step in range(len(device.steps))) == bool(estimates)
        estimates.append(tier_context(stack.offload).costs.recompute_s(0, 1000))
        stack.close()
    assert estimates[0] == pytest.approx(seconds_of(0, 1000), rel=0.01)
    assert estimates[1] == pytest.approx(estimates[0], rel=0.01)


@pytest.mark.parametrize("load_mode", ["auto", "load"])
def test_slow_loads_are_not_made(load_mode):
    """The measured prefill is what they are compared with."""
    stack, clock = make(num_blocks=16, load_mode=load_mode)
    device, tokens = Device(stack, clock), prompt(40, seed=3)
    del stack.offload.swap.observe_prefill
    stack.serve("a", tokens)
    for i in range(3):  # takes its blocks in HBM
        stack.serve(f"other {i}", prompt(40, seed=10 + i))
    costs = tier_context(stack.offload).costs
    for num_mb in (1, 2, 4, 8):
        costs.observe_load(num_mb * 10**6, 1000.0 * num_mb + 5.0)
    assert (costs.recompute_s(0, 40) is not None) == (load_mode == "auto")
    num_steps, before = len(device.steps), stack.offload.stats()
    stack.serve("b", tokens, max_tokens=1)
    after = stack.offload.stats()
    num_computed = sum(end - first for spans in device.steps[num_steps:] for first, end in spans)
    if load_mode == "auto":
        assert after.skipped_load_tokens > before.skipped_load_tokens
        assert num_computed >= 40
    else:
        assert after.loaded_tokens > before.loaded_tokens
        assert num_computed < 40
    stack.close()


# --- parts ------------------------------------------------------------------------------------------


def test_the_work_of_a_step():
    assert prefill_work([(0, 100, True)]) == PrefillWork(num_tokens=100, num_attended=5000.0)
    both = prefill_work([(0, 100, True), (50, 70, True), (200, 201, False)])
    assert both == PrefillWork(num_tokens=120, num_attended=5000.0 + 20 * 60)
    assert prefill_work([]) is None
    assert prefill_work([(7, 8, False)]) is None
    assert prefill_work([(0, 18, True), *((1, 2, False) for _ in range(2))]) is not None
    assert prefill_work([(0, 17, True), *((1, 2, False) for _ in range(2))]) is None, "a tenth is not of prompts"
    assert prefill_work([(0, 100, True), (1599, 1600, False)]) is not None
    assert prefill_work([(0, 100, True), (1600, 1601, False)]) is None, "a decode with a long context"


def work(num_tokens):
    return PrefillWork(num_tokens=num_tokens, num_attended=10.0 * num_tokens)


def test_successive_steps_are_measured_together():
    """The end of the first is seen late: when the second has run for a while."""
    clock = Clock()
    times = PrefillTimes(clock)
    times.begin(1, work(5))
    times.begin(2, work(5))
    clock.now_s += 1.5
    assert times.end(1) is None
    clock.now_s += 0.5
    assert times.end(2) == (work(10), 2.0)
    assert times.end(2) is None, "told twice"


def test_no_more_than_eight_steps_are_measured_together():
    clock = Clock()
    times = PrefillTimes(clock)
    times.begin(0, work(1))
    found = []
    for step_id in range(1, 20):
        times.begin(step_id, work(1))
        clock.now_s += 1.0
        found.append(times.end(step_id - 1))
    assert [one for one in found if one] == [(work(8), 8.0)] * 2


def test_another_step_ends_what_is_measured_together():
    clock = Clock()
    times = PrefillTimes(clock)
    times.begin(1, work(5))
    times.begin(2, None)
    clock.now_s += 1.0
    assert times.end(1) is None
    times.begin(3, work(7))
    clock.now_s += 4.0
    assert times.end(2) == (work(5), 1.0)
    clock.now_s += 2.0
    assert times.end(3) == (work(7), 2.0), "from the end of the second on"


def test_steps_whose_end_nobody_told_are_forgotten():
    clock = Clock()
    times = PrefillTimes(clock)
    for step_id in range(5):
        times.begin(step_id, work(1))
    clock.now_s += 5.0
    assert times.end(3) is None, "it would have the time of all of them"
    assert times.end(2) is None
    clock.now_s += 1.0
    assert times.end(4) == (work(1), 1.0)
