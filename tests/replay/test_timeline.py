"""Samples of a run: their number is bounded, they span the run, and the last one is the end."""

import itertools
from types import SimpleNamespace

import pytest

from tpu_offload.metrics import OffloadStats
from tpu_offload.replay.timeline import Timeline


class Run:
    """An engine of which only the number of steps is known, and a clock."""

    def __init__(self, *, offload=True):
        self.now_s = 100.0
        self.num_steps = 0
        self._offload = offload

    def stats(self):
        return SimpleNamespace(num_active=self.num_steps, num_waiting=0)

    def offload_stats(self):
        return OffloadStats(saved_nbytes=10 * self.num_steps) if self._offload else None


def sampled(run, *, num_steps, step_s=0.004, **sizes):
    timeline = Timeline(run, clock=lambda: run.now_s, **sizes)
    for _ in range(num_steps):
        run.now_s += step_s
        run.num_steps += 1
        timeline.sample()
    return timeline.columns()


@pytest.mark.parametrize("num_steps", [0, 1, 7, 199, 5000, 40_000])
def test_the_number_of_samples_is_bounded(num_steps):
    run = Run()
    columns = sampled(run, num_steps=num_steps, interval_s=0.02, max_samples=100)
    at_s = columns["at_s"]
    assert len(at_s) <= 101
    if num_steps >= 5000:
        assert len(at_s) >= 50
    assert at_s == sorted(at_s)
    assert columns["saved_nbytes"][-1] == 10 * num_steps, "the end of the run is in it"
    assert at_s[-1] == pytest.approx(0.004 * num_steps)
    assert columns["saved_nbytes"] == [10 * n for n in columns["num_active"]]
    gaps = [other - one for one, other in itertools.pairwise(at_s)]
    assert max(gaps, default=0.0) <= 2.1 * max(0.02, 0.004 * num_steps / 50), "even"


def test_an_engine_without_the_library_has_its_own_counts_only():
    assert set(sampled(Run(offload=False), num_steps=3)) == {"at_s", "num_active", "num_waiting"}
