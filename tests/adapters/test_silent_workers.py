"""Workers whose reports are lost, late or duplicated, and saves that keep failing: all requests are served."""

import contextlib
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.v1.request import RequestStatus

from tests.adapters.scheduler_stack import SMALL, Stack, prompt, reports_of
from tests.inside.worker import hold_loads, tier_group
from tpu_offload.adapters.vllm import TPUOffloadConnector
from tpu_offload.adapters.vllm.messages import ReportMessage
from tpu_offload.types import Direction

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("compiled_once")]

TIMEOUT_S = 5.0


def make(**kwargs) -> Stack:
    """An engine whose steps take a second each."""
    settings = {"num_blocks": 24, **SMALL, "job_timeout_s": TIMEOUT_S, **kwargs}
    stack = Stack(**settings, clock=lambda: float(stack.num_steps))
    stack.serve("warm", prompt(8, seed=99))
    return stack


class FaultyRelay:
    """Loses, duplicates or delays the reports of one worker."""

    def __init__(self, stack: Stack, fate: str, worker: int = 1) -> None:
        self.stack, self.fate, self.worker, self.num_seen = stack, fate, worker, 0
        self.held: list[Any] = []
        stack.tamper = self.tamper

    def tamper(self, results):
        result = results[self.worker]
        message = reports_of(result)
        self.num_seen += message is not None
        if self.fate == "never" or (self.fate == "every second one" and message and self.num_seen % 2):
            self.stack.replace_reports(result, None)
        elif self.fate == "duplicated" and message:
            self.stack.replace_reports(result, ReportMessage(reports=message.reports * 2))
        elif self.fate in ("late", "too late"):
            self.held.append(message)
            due = self.held.pop(0) if len(self.held) > (3 if self.fate == "late" else 2 * TIMEOUT_S) else None
            self.stack.replace_reports(result, due)
        return results


@pytest.mark.parametrize("fate", ["never", "every second one", "duplicated", "late", "too late"])
@pytest.mark.parametrize(
    ("sync_load", "async_scheduling", "load_path"),
    [
        (False, False, "direct"),
        (True, False, "direct"),
        (False, True, "direct"),
        (True, True, "direct"),
        (False, False, "staged"),
    ],
)
def test_requests_are_served_and_nothing_leaks(fate, sync_load, async_scheduling, load_path):
    stack = make(num_workers=2, sync_load=sync_load, async_scheduling=async_scheduling, load_path=load_path)
    stack.serve("a", prompt(40))
    relay = FaultyRelay(stack, fate)
    for turn in range(3):
        stack.scheduler.reset_prefix_cache()
        for i in range(3):
            stack.add(f"r{turn}.{i}", [*prompt(40), *prompt(16, seed=turn)][: 40 + 8 * i + 1], max_tokens=3 + i)
        stack.drain(max_steps=60)
    assert not stack.errors
    assert all(len(tokens) == stack.requests[name].max_tokens for name, tokens in stack.outputs.items())
    stack.check_end(silent_worker=fate == "never")
    # The worker's reports arrive again: quarantined chunks are released, and there are hits.
    relay.fate = "delivered"
    stack.num_steps += 100  # an open breaker retries
    stack.serve("probe", prompt(8, seed=61))
    stack.serve("again", prompt(24, seed=60))
    stack.scheduler.reset_prefix_cache()
    loaded_before = stack.offload.stats().loaded_blocks
    stack.serve("and again", [*prompt(24, seed=60), 7])
    stats = stack.offload.stats()
    assert stats.num_quarantined_chunks == 0
    assert stats.loaded_blocks == loaded_before + 3
    stack.check_end()


@pytest.mark.parametrize("load_path", ["direct", "staged"])
def test_an_idle_engine_stops_stepping_although_a_worker_never_reports(load_path):
    stack = make(num_workers=2, load_path=load_path)
    FaultyRelay(stack, "never")
    stack.serve("a", prompt(40))
    assert stack.num_steps < 30
    assert not stack.scheduler.has_requests()
    assert not stack.side.has_jobs
    stats = stack.offload.stats()
    assert stats.num_timed_out_jobs == 1
    assert stats.num_quarantined_chunks == 5  # its copies may still be running
    stack.serve("b", prompt(40, seed=3))
    stack.check_end()


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_worker_whose_load_never_arrives(async_scheduling):
    stack = make(num_workers=2, load_path="staged", async_scheduling=async_scheduling)
    stack.serve("a", prompt(40))
    stack.scheduler.reset_prefix_cache()
    stuck = stack.workers[1]
    release = hold_loads(tier_group(stuck))
    stack.add("other", prompt(16, seed=4), max_tokens=20)
    request = stack.add("b", prompt(41))
    for _ in range(int(TIMEOUT_S)):
        stack.step()
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert len(stack.outputs["other"]) >= 3
    for _ in range(4):
        stack.step()
    assert request.status is not RequestStatus.WAITING_FOR_REMOTE_KVS
    release()
    stack.drain(max_steps=60)
    assert stack.offload.stats().num_timed_out_jobs == 1
    assert len(stack.outputs["b"]) == 3
    stack.check_end()


@contextlib.contextmanager
def failing_saves(stack: Stack, worker: int, fail):
    copier = tier_group(stack.workers[worker]).copiers[Direction.SAVE]
    copier.save = fail
    yield
    del copier.save


class Metrics:
    """vLLM's Prometheus endpoint."""

    def __init__(self, stack: Stack) -> None:
        self.registry = CollectorRegistry()
        kinds = {
            kind: lambda kind=kind, **kwargs: kind(registry=self.registry, **kwargs)
            for kind in (Gauge, Counter, Histogram)
        }
        self.prom = TPUOffloadConnector.build_prom_metrics(stack.config, kinds, ["engine"], {0: ["0"]})
        self.total = TPUOffloadConnector.build_kv_connector_stats()
        take = stack.side.take_stats

        def taken():
            stats = take()
            if stats is not None:
                self.prom.observe(stats.to_dict(), 0)
                self.total = self.total.aggregate(TPUOffloadConnector.build_kv_connector_stats(dict(stats.data)))
            return stats

        stack.side.take_stats = taken

    def __getitem__(self, name: str) -> float | None:
        return self.registry.get_sample_value(f"vllm:tpu_offload_{name}", {"engine": "0"})


@pytest.mark.parametrize("num_workers", [1, 2])
def test_saves_that_keep_failing_are_suspended_until_they_succeed(num_workers):
    stack = make(num_workers=num_workers, breaker_failures=3, breaker_retry_s=40.0)
    metrics = Metrics(stack)
    calls = 0

    def count(*args):
        nonlocal calls
        calls += 1
        raise RuntimeError("injected")

    with failing_saves(stack, num_workers - 1, count):
        for i in range(8):
            stack.serve(f"r{i}", prompt(24, seed=i))
        assert calls == 3
        assert metrics["open_breakers"] == 1
        assert metrics["breaker_openings_total"] == 1
        assert metrics.total.reduce()["Copy kinds suspended"] == 1
        assert stack.offload.stats().num_resident_chunks == 1  # that of the warm-up
        assert not stack.errors
    assert stack.num_steps < 40
    stack.num_steps += 50
    stack.serve("probe", prompt(24, seed=50))
    stack.serve("more", prompt(24, seed=51))
    assert metrics["open_breakers"] == 0
    assert metrics["breaker_openings_total"] == 1
    stack.scheduler.reset_prefix_cache()
    stack.serve("hit", [*prompt(24, seed=51), 7])
    assert stack.offload.stats().loaded_blocks == 3
    stack.check_end()


def test_failures_are_on_the_metrics_endpoint():
    stack = make(num_workers=2)
    metrics = Metrics(stack)
    relay = FaultyRelay(stack, "never")
    stack.serve("a", prompt(40))
    assert metrics["timed_out_jobs_total"] == 1
    assert metrics["quarantined_chunks"] == 5
    relay.fate = "every second one"
    relay.num_seen = 0
    stack.add("b", prompt(16, seed=3), max_tokens=8)
    for _ in range(3):
        stack.step()
    relay.fate = "delivered"
    stack.add("c", prompt(16, seed=4), max_tokens=8)
    stack.drain()
    assert metrics["lost_results_total"] == 1
    assert metrics["quarantined_chunks"] == 0
    for name in ("rejected_reports_total", "worker_restarts_total", "breaker_openings_total"):
        assert metrics[name] == 0
    stack.check_end()
