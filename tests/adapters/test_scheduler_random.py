"""Random requests and faults under vLLM's real scheduler: no wrong byte is read, no token differs, nothing leaks."""

import functools
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.request import RequestStatus

from tests.adapters.hashed_model import NUM_LAYERS, PAGE_SHAPE
from tests.adapters.kv_router import KVRouter
from tests.adapters.scheduler_stack import BLOCK_SIZE, VOCABULARY, Stack, take_caches
from tests.inside import tier_groups
from tpu_offload import StepReport
from tpu_offload.types import Direction

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("compiled_once")]

BLOCK_NBYTES = NUM_LAYERS * PAGE_SHAPE[0] * PAGE_SHAPE[1] * PAGE_SHAPE[2]


class Faults:
    """Has random copies of the workers raise before they start, and random loads destroy the caches."""

    def __init__(self, stack: Stack, rng: random.Random, rate: float, loss_rate: float) -> None:
        self.rng, self.rate, self.loss_rate, self.num_lost = rng, rate, loss_rate, 0
        for worker in stack.workers if rate or loss_rate else ():
            for direction, copier in [item for group in tier_groups(worker) for item in group.copiers.items()]:
                for method in ("save",) if direction is Direction.SAVE else ("load", "resume_load"):
                    if hasattr(copier, method):
                        setattr(copier, method, functools.partial(self.maybe, method, getattr(copier, method)))

    def maybe(self, method, real, *args):
        if self.rng.random() < self.rate:
            raise RuntimeError("injected")
        if method != "save" and self.rng.random() < self.loss_rate:
            self.num_lost += 1
            take_caches(args[-1])
        return real(*args)


def delay(worker, rng: random.Random, rate: float) -> None:
    """Has the worker observe the end of some copies late."""
    real = worker.poll

    def poll(*, wait: bool = False):
        if not wait and rng.random() < rate:
            return StepReport(
                worker_id=worker._report.worker_id, results=(), num_host_chunks=worker._report.num_host_chunks
            )
        return real(wait=wait)

    worker.poll = poll


class RandomRun:
    """A run that is determined by its seed."""

    def __init__(self, seed: int, mode: str) -> None:
        self.rng = rng = random.Random(seed)
        self.mode = mode
        is_async = mode in ("async", "sync and async", "states and async")
        has_stages = mode in ("stages", "stages and sync")
        has_states = mode in ("states", "states and async")
        paths = rng.choice(["direct", "direct", "staged"])
        self.fault_rate = rng.choice([0.0, 0.0, 0.1])
        self.stack = Stack(
            num_blocks=rng.choice([12, 12, 16] if has_states else [12, 16, 24]),
            num_workers=1 if has_stages else rng.choice([1, 1, 2]),
            num_stages=rng.choice([2, 2, 3, 4]) if has_stages else 1,
            async_scheduling=is_async,
            prefix_caching=has_states or rng.random() < 0.5,
            num_spec_tokens=3 if mode == "speculative" else 0,
            guess=lambda: rng.random() < 0.6,
            max_num_batched_tokens=rng.choice([16, 48, 200]),
            max_num_seqs=rng.choice([2, 6]),
            policy="fail" if rng.random() < 0.15 else "recompute",
            num_staging_blocks=rng.choice([2, 6, 40]),
            num_cpu_chunks=rng.choice([24, 80, 240] if has_states else [4, 16, 80]),  # half of them for states
            blocks_per_chunk=rng.choice([1, 1, 2]),
            decode_save=rng.random() < 0.5,
            save_path=paths,
            load_path=rng.choice([paths, "direct"]),
            sync_load=mode in ("sync", "sync and async", "stages and sync"),
            max_load_gb_per_step=rng.choice([1.0, 1.0, 2.5 * BLOCK_NBYTES / 2**30]),
            save_wait_s=rng.choice([0.0, 0.5]),
            num_rows=rng.choice([4, 6, 14]) if has_states else 0,
            retention_interval=rng.choice([0, 0, None, 2 * BLOCK_SIZE]) if has_states else None,
            events=seed % 2 == 0,
        )
        self.router = KVRouter() if seed % 2 == 0 else None
        self.published: list[Any] = []
        publisher = self.stack.scheduler.kv_event_publisher
        publisher.publish = lambda batch: self.published.extend(batch.events)
        self.num_routed = 0  # tokens that lookups and the router found
        loss_rate = rng.choice([0.0, 0.0, 0.1])
        # With states, lost caches end the engine.
        self.faults = Faults(self.stack, rng, self.fault_rate, 0.0 if has_states else loss_rate)
        rate = rng.choice([0.0, 0.7])
        for worker in self.stack.workers:
            delay(worker, rng, rate)
        self.num_added = 0

    def arrive(self) -> None:
        rng, prompt = self.rng, []
        for depth in range(rng.randint(1, 4)):  # a walk in a small tree of shared prefixes
            branch = rng.randint(0, 1)
            prompt += [3 + (depth * 2 + branch + i) % VOCABULARY for i in range(rng.randint(1, 2) * BLOCK_SIZE)]
        prompt += [3 + rng.randrange(VOCABULARY) for _ in range(rng.randint(0, 3))]
        limit = (self.stack.num_blocks - 3) * BLOCK_SIZE
        self.num_added += 1
        salt = rng.choice([None, None, None, "tenant"])
        self.stack.add(f"r{self.num_added}", prompt[: limit - 16], max_tokens=rng.randint(1, 14), salt=salt)

    def run(self, num_steps: int) -> None:
        stack, rng = self.stack, self.rng
        stack.meanwhile = self.abort
        for _ in range(num_steps):
            if rng.random() < 0.4:
                self.arrive()
            self.abort()
            if rng.random() < 0.02:
                self.reset()
            stack.step()
            stack.side.check_invariants()
            self.check_router()
        stack.drain()
        if any(request.status is RequestStatus.FINISHED_ERROR for request in stack.requests.values()):
            assert stack.config.kv_transfer_config.kv_load_failure_policy == "fail"
        stack.check_end()
        assert all(runner.num_checked for runner in stack.runners)
        stack.close()

    def check_router(self) -> None:
        """By the events, as much of a prompt can be loaded as lookups find."""
        stack = self.stack
        if self.router is None or stack.offload is None:
            return
        for event in [*self.published, *stack.side.take_events()]:
            self.router.take(event)
        self.published.clear()
        for request in stack.requests.values():
            hashes, num_tokens = request.block_hashes, request.num_tokens
            found = stack.offload.num_cached_tokens(hashes, num_tokens=num_tokens)
            names = [maybe_convert_block_hash(block_hash) for block_hash in hashes]
            assert self.router.num_host_tokens(names, num_tokens, block_size=BLOCK_SIZE) == found
            self.num_routed += found

    def abort(self) -> None:
        live = [i for i, r in self.stack.scheduler.requests.items() if not r.is_finished()]
        if live and self.rng.random() < 0.04:
            self.stack.abort(self.rng.choice(live))

    def reset(self) -> None:
        scheduler = self.stack.scheduler
        held = [r for r in scheduler.requests.values() if any(scheduler.kv_cache_manager.get_block_ids(r.request_id))]
        if any(request.status is not RequestStatus.RUNNING for request in held):
            # Loads hold blocks, and so does a request that waits after part of its load: vLLM cannot reset its own
            # cache then.
            self.stack.scheduler.reset_connector_cache()
        else:
            running = self.rng.random() < 0.5 and not self.stack.in_flight
            self.stack.scheduler.reset_prefix_cache(reset_running_requests=running, reset_connector=True)


# "sync" refers to loads, "async" to scheduling.
_loads = {
    "plain": 0, "sync": 0, "async": 0, "sync and async": 0, "speculative": 0, "stages": 0, "stages and sync": 0,
}  # fmt: skip
_losses = dict.fromkeys(_loads, 0)
_state_loads = {"states": 0, "states and async": 0}
_routed = dict.fromkeys(_loads | _state_loads, 0)
_settings = settings(deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("mode", list(_state_loads))
@settings(_settings, max_examples=25)
@given(seed=st.integers(0, 10**6))
def test_random_run_with_states(mode, seed):
    run = RandomRun(seed, mode)
    run.run(40)
    _state_loads[mode] += run.stack.offload.stats().loaded_blocks
    _routed[mode] += run.num_routed


@pytest.mark.parametrize("mode", list(_loads))
@settings(_settings, max_examples=50)
@given(seed=st.integers(0, 10**6))
def test_random_run(mode, seed):
    run = RandomRun(seed, mode)
    run.run(40)
    _loads[mode] += run.stack.offload.stats().loaded_blocks
    _losses[mode] += run.faults.num_lost
    _routed[mode] += run.num_routed


def test_the_runs_loaded_blocks_and_lost_caches():
    assert all(num_blocks > 100 for num_blocks in _loads.values()), _loads
    assert all(_losses.values()), _losses
    assert all(num_blocks > 25 for num_blocks in _state_loads.values()), _state_loads
    assert all(num_tokens > 1000 for num_tokens in _routed.values()), _routed
