"""Shared by the tests of the soak."""

from types import SimpleNamespace

import pytest

from tests.inside.engine import one_worker
from tests.inside.worker import worker_storage
from tests.soak import soak
from tpu_offload.engine import Engine
from tpu_offload.worker.arrays import wait_for_all


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
    """Waits until no copy is in flight, and a while for calls of storage; not for what is made to be late."""
    if engine.offload_stats() is None:
        return
    worker = one_worker(engine)
    storage = worker_storage(worker)
    others = [copies for copies in worker._copies if copies is not storage]
    copied = [getattr(token, "array", token) for copies in others for token in copies.waiting_on(all_of_them=True)]
    assert wait_for_all(copied, timeout_s=60.0)  # without it a busy machine would have other loads and preemptions
    wait_for_all(storage.waiting_on(all_of_them=True) if storage is not None else [], timeout_s=0.02)
