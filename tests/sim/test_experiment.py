"""Simulations in several processes."""

import contextlib
import dataclasses
import multiprocessing
import os
import pickle
import random
import signal
from multiprocessing import util as spawning

import pytest

from tests.sim.traces import chats, make_trace
from tpu_offload.core.policies import POLICIES
from tpu_offload.errors import InputError
from tpu_offload.sim import BOUND, Case, Experiment, HitCounts, TierSetup, belady_hits, no_hbm, run_all, simulate_hbm
from tpu_offload.sim import experiment as experiment_module


@pytest.fixture
def trace(tmp_path):
    return make_trace(tmp_path, chats(random.Random(3), num_requests=120))


def all_runs():
    return [Case(policy, 0.1, TierSetup(size)) for policy in (*POLICIES, BOUND) for size in (30, 50, 90)]


def without_times(results):
    return {number: dataclasses.replace(result, run_s=0) for number, result in results}


def test_processes_change_nothing(trace):
    experiment = Experiment(trace, split=60, only_second=True, hbm_result=simulate_hbm(trace, 40))
    one = without_times(run_all(experiment, all_runs(), num_jobs=1))
    two = []
    for number_and_result in run_all(experiment, all_runs(), num_jobs=2, blocks_a_process=1):
        two.append(number_and_result)
        assert len(multiprocessing.active_children()) in (1, 2)
    assert one == without_times(two)
    assert sorted(one) == list(range(len(all_runs())))
    assert multiprocessing.active_children() == []


def num_processes(experiment, runs, **kwargs):
    """The number of processes when the first result arrives."""
    with contextlib.closing(run_all(experiment, runs, **kwargs)) as results:
        next(results)
        return len(multiprocessing.active_children())


def test_no_process_without_work_for_it(trace):
    experiment = Experiment(trace, split=60, only_second=False, hbm_result=no_hbm(trace))
    runs = all_runs()
    assert num_processes(experiment, runs, num_jobs=100) == 0
    assert num_processes(experiment, runs, num_jobs=1, blocks_a_process=1) == 0
    assert num_processes(experiment, runs[:2], num_jobs=100, blocks_a_process=1) == 2
    assert num_processes(experiment, runs, num_jobs=100, blocks_a_process=trace.num_blocks * len(runs) // 3) == 3
    assert num_processes(experiment, runs, num_jobs=100, blocks_a_process=trace.num_blocks * len(runs)) == 0


def test_parts_add_up(trace):
    hits = belady_hits(trace, 50)
    result = Experiment(trace, split=60, only_second=False, hbm_result=no_hbm(trace)).run(
        Case(BOUND, 0.1, TierSetup(50))
    )
    assert (result.first.num_host_hits, result.second.num_host_hits) == (sum(hits[:60]), sum(hits[60:]))
    assert result.first + result.second == HitCounts(trace.num_blocks, 0, sum(hits), ())


@pytest.mark.parametrize("num_hbm_blocks", [0, 40])
def test_with_a_split_each_part_has_its_own_bound(trace, num_hbm_blocks):
    hbm_result = simulate_hbm(trace, num_hbm_blocks) if num_hbm_blocks else no_hbm(trace)
    case = Case(BOUND, 0.1, TierSetup(50))
    whole = Experiment(trace, split=60, only_second=False, hbm_result=hbm_result).run(case)
    split = Experiment(trace, split=60, only_second=True, hbm_result=hbm_result).run(case)
    before = dataclasses.replace(trace, requests=trace.requests[:60])
    hbm_result_before = simulate_hbm(before, num_hbm_blocks) if num_hbm_blocks else no_hbm(before)
    alone = Experiment(before, split=60, only_second=False, hbm_result=hbm_result_before).run(case)
    assert split.first == alone.first
    assert split.first.num_host_hits >= whole.first.num_host_hits > 0
    assert split.second.num_host_hits >= whole.second.num_host_hits
    assert split.second.num_host_hits == sum(belady_hits(trace, 50, first_counted=60, hbm_result=hbm_result)[60:])
    nothing_before = Experiment(trace, split=0, only_second=True, hbm_result=hbm_result).run(case)
    assert nothing_before.first == HitCounts(0, 0, 0, ())


@pytest.mark.wide
def test_closing_it_early_ends_its_processes(trace):
    slow = dataclasses.replace(trace, requests=trace.requests * 200)
    experiment = Experiment(slow, split=0, only_second=False, hbm_result=no_hbm(slow))
    results = run_all(experiment, [Case("lru", 0.1, TierSetup(50))] * 400, num_jobs=2)
    with contextlib.closing(results):
        next(results)
        assert len(multiprocessing.active_children()) == 2
    assert multiprocessing.active_children() == []  # a full run takes many minutes


def kill_first_process():
    multiprocessing.active_children()[0].kill()


def test_a_process_that_is_killed(trace):
    slow = dataclasses.replace(trace, requests=trace.requests * 50)
    experiment = Experiment(slow, split=0, only_second=False, hbm_result=no_hbm(slow))
    results = run_all(experiment, [Case("lru", 0.1, TierSetup(50))] * 100, num_jobs=2)
    next(results)
    kill_first_process()
    with pytest.raises(InputError, match="--jobs 1"):
        list(results)
    assert experiment_module._experiment is None


def test_a_process_that_is_killed_before_it_has_read_what_it_shall_do(trace, monkeypatch):
    """As by SIGTERM to all processes of a service, or for want of memory. The parent must not write to it for ever."""
    slow = dataclasses.replace(trace, requests=trace.requests * 50)
    experiment = Experiment(slow, split=0, only_second=False, hbm_result=no_hbm(slow))
    assert len(pickle.dumps(experiment)) > 2**17, "more than a pipe holds"
    start = spawning.spawnv_passfds

    def start_and_kill(path, args, fds):
        pid = start(path, args, fds)
        if any(b"spawn_main" in os.fsencode(arg) for arg in args):  # not that of semaphores
            os.kill(pid, signal.SIGKILL)
        return pid

    def expire(number, frame):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, expire)
    signal.alarm(60)
    try:
        monkeypatch.setattr(spawning, "spawnv_passfds", start_and_kill)
        with pytest.raises(InputError, match="--jobs 1"):
            list(run_all(experiment, [Case("lru", 0.1, TierSetup(50))] * 100, num_jobs=2))
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
