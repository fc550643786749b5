"""Shared by the tests of the soak."""

from types import SimpleNamespace

import pytest

from tests.soak import soak
from tpu_offload.engine import Engine


@pytest.fixture
def direct(monkeypatch):
    """One engine instead of three, because the other paths compile more programs."""
    monkeypatch.setenv("TPU_OFFLOAD_SAVE_PATH", "direct")


@pytest.fixture
def steps_as_time(monkeypatch):
    """Simulated time: an engine step takes 4 ms, everything else none, so a soak is equally long on every machine."""
    step, now_s = Engine.step, [0.0]

    def sleep(seconds):
        now_s[0] += seconds

    def timed(self):
        sleep(0.004)
        return step(self)

    clock = SimpleNamespace(monotonic=lambda: now_s[0], perf_counter=lambda: now_s[0], sleep=sleep)
    monkeypatch.setattr(soak, "time", clock)
    monkeypatch.setattr(Engine, "step", timed)
