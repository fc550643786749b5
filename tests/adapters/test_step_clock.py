"""Time without steps, as with data-parallel ranks that have nothing to compute."""

import pytest

from tpu_offload.adapters.vllm.step_clock import StepClock

pytestmark = pytest.mark.vllm


def test_only_the_time_of_steps_passes():
    now = [100.0]
    clock = StepClock(lambda: now[0])
    for step_s in (0.5, 0.5, 600.0, 0.25):
        now[0] += step_s
        clock.step()
    assert clock() == pytest.approx(100.0 + 0.5 + 0.5 + 1.0 + 0.25)
    now[0] += 3600.0
    assert clock() == pytest.approx(103.25), "the engine is idle, or its step takes long: a second passes at most"
    clock.step()
    assert clock() == pytest.approx(103.25)
