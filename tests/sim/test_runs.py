"""Runs in several processes."""

import contextlib
import dataclasses
import multiprocessing
import random
import time

import pytest

from tests.sim.traces import chats, make_trace
from tpu_offload.core.policies import POLICIES
from tpu_offload.errors import InputError
from tpu_offload.sim import BOUND, Part, Run, Scene, Setup, belady_hits, no_front, play_all, play_hbm, runs


@pytest.fixture
def trace(tmp_path):
    return make_trace(tmp_path, chats(random.Random(3), num_requests=120))


def all_runs():
    return [Run(policy, 0.1, Setup(size)) for policy in (*POLICIES, BOUND) for size in (30, 50, 90)]


def without_times(results):
    return {number: dataclasses.replace(result, run_s=0) for number, result in results}


def test_processes_change_nothing(trace):
    scene = Scene(trace, split=60, only_second=True, front=play_hbm(trace, 40))
    one = without_times(play_all(scene, all_runs(), num_jobs=1))
    two = without_times(play_all(scene, all_runs(), num_jobs=2))
    assert one == two
    assert sorted(one) == list(range(len(all_runs())))
    assert multiprocessing.active_children() == []


def test_parts_add_up(trace):
    hits = belady_hits(trace, 50)
    result = Scene(trace, split=60, only_second=False, front=no_front(trace)).play(Run(BOUND, 0.1, Setup(50)))
    assert (result.first.num_host_hits, result.second.num_host_hits) == (sum(hits[:60]), sum(hits[60:]))
    assert result.first + result.second == Part(trace.num_blocks, 0, sum(hits), 0)
    only_second = Scene(trace, split=60, only_second=True, front=no_front(trace)).play(Run(BOUND, 0.1, Setup(50)))
    assert only_second.second.num_host_hits >= result.second.num_host_hits


def test_what_is_left_early_ends_its_processes(trace):
    slow = dataclasses.replace(trace, requests=trace.requests * 200)
    scene = Scene(slow, split=0, only_second=False, front=no_front(slow))
    begin_s = time.monotonic()
    results = play_all(scene, [Run("lru", 0.1, Setup(50))] * 400, num_jobs=2)
    with contextlib.closing(results):
        next(results)
        assert len(multiprocessing.active_children()) == 2
    assert multiprocessing.active_children() == []
    assert time.monotonic() - begin_s < 60  # all of it takes many minutes


def kill_first_process():
    multiprocessing.active_children()[0].kill()


def test_a_process_that_is_killed(trace):
    slow = dataclasses.replace(trace, requests=trace.requests * 50)
    scene = Scene(slow, split=0, only_second=False, front=no_front(slow))
    results = play_all(scene, [Run("lru", 0.1, Setup(50))] * 100, num_jobs=2)
    next(results)
    kill_first_process()
    with pytest.raises(InputError, match="--jobs 1"):
        list(results)
    assert runs._scene is None
