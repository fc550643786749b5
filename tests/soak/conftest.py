"""Shared by the tests of the soak."""

import time
from types import SimpleNamespace

import pytest

from tests.soak import soak
from tpu_offload.engine import Engine
from tpu_offload.worker.arrays import is_ready


@pytest.fixture
def direct(monkeypatch):
    """One engine instead of three, because the other paths compile more programs."""
    monkeypatch.setenv("TPU_OFFLOAD_SAVE_PATH", "direct")


@pytest.fixture
def steps_as_time(monkeypatch):
    """Simulated time: an engine step takes 4 ms, everything else none, so a soak is equally long on every machine.

    Copies take real time, so after each step they are given some, or on a busy machine none would end.
    """
    step, now_s = Engine.step, [0.0]

    def sleep(seconds):
        now_s[0] += seconds

    def timed(self):
        sleep(0.004)
        outputs = step(self)
        let_copies_end(self)
        return outputs

    clock = SimpleNamespace(monotonic=lambda: now_s[0], perf_counter=lambda: now_s[0], sleep=sleep)
    monkeypatch.setattr(soak, "time", clock)
    monkeypatch.setattr(Engine, "step", timed)


def let_copies_end(engine):
    """Waits until no copy and no call of storage is in flight, but not for one that is made to be late."""
    if engine._offload is None:
        return
    until_s = time.monotonic() + 0.02
    while time.monotonic() < until_s:
        groups = engine._offload._worker._copies()
        if all(is_ready(array) for copies in groups for array in copies.waiting_on(all_of_them=True)):
            return
        time.sleep(0.0002)
