"""Random runs of vLLM's real scheduler with the real connector: requests, faults, and what must hold after each step.

No wrong byte is read, no token differs, nothing leaks. `random_campaign` is a command that makes many.
"""

import contextlib
import functools
import random
from collections import Counter
from typing import Any

from vllm.distributed.kv_events import AllBlocksCleared
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.request import RequestStatus

from tests.adapters.hashed_model import BLOCK_SIZE, NUM_LAYERS, PAGE_SHAPE, VOCABULARY
from tests.adapters.kv_router import KVRouter
from tests.adapters.random_modes import MODES
from tests.adapters.scheduler_stack import Stack, take_caches
from tests.inside.worker import last_report, tier_groups
from tpu_offload import StepReport
from tpu_offload.types import Direction

BLOCK_NBYTES = NUM_LAYERS * PAGE_SHAPE[0] * PAGE_SHAPE[1] * PAGE_SHAPE[2]
# Less than a block, and a block boundary or just beside it, of one to four blocks.
WINDOWS = (1, 2, 5, 7, 8, 9, 10, 15, 16, 17, 18, 24, 25, 26, 33)


class Faults:
    """Has random copies of the workers raise before they start, and random loads destroy the caches."""

    def __init__(self, stack: Stack, rng: random.Random, rate: float, loss_rate: float) -> None:
        self.rng, self.rate, self.loss_rate = rng, rate, loss_rate
        self.counts: Counter[str] = Counter()
        for worker in stack.workers if rate or loss_rate else ():
            for direction, copier in [item for group in tier_groups(worker) for item in group.copiers.items()]:
                for method in ("save",) if direction is Direction.SAVE else ("load", "resume_load"):
                    if hasattr(copier, method):
                        setattr(copier, method, functools.partial(self.maybe, method, getattr(copier, method)))

    def maybe(self, method, real, *args):
        if self.rng.random() < self.rate:
            self.counts["failed saves" if method == "save" else "failed loads"] += 1
            raise RuntimeError("injected")
        if method != "save" and self.rng.random() < self.loss_rate:
            self.counts["lost caches"] += 1
            take_caches(args[-1])
        return real(*args)


def delay(worker, rng: random.Random, rate: float) -> None:
    """Has the worker observe the end of some copies late."""
    real = worker.poll

    def poll(*, wait: bool = False):
        if not wait and rng.random() < rate:
            last = last_report(worker)
            return StepReport(worker_id=last.worker_id, results=(), num_host_slots=last.num_host_slots)
        return real(wait=wait)

    worker.poll = poll
    for group in tier_groups(worker):

        def end(flight, end_now=group.end):
            # One save ends after another of the same step: of a checkpoint, say, and of the chunks before it.
            if flight.direction is Direction.LOAD or rng.random() >= rate:
                end_now(flight)

        group.end = end


def count_jobs(worker, groups: list[str], counts: Counter[str]) -> None:
    """Counts the blocks of each load and save that the worker is sent, by the kind of their layer group."""
    real = worker.begin_step

    def begin_step(plan, *args, **kwargs):
        for job in plan.jobs:
            for part in job.parts:
                what = "load" if job.direction is Direction.LOAD else "save"
                counts[f"{groups[part.group_id]} blocks to {what}"] += len(part.block_ids)
        return real(plan, *args, **kwargs)

    worker.begin_step = begin_step


def random_windows(rng: random.Random) -> tuple[int, ...]:
    """Layers as of gpt-oss (two groups) or Gemma-3 (three); full attention comes anywhere among them."""
    windows = rng.choices(WINDOWS, k=rng.randint(1, 2))
    if len(windows) == 2 and rng.random() < 0.3:
        windows[1] = windows[0]
    windows.insert(rng.randint(0, len(windows)), 0)
    return tuple(windows)


class RandomRun:
    """A run that is determined by its seed, but for the moments at which copies end.

    Attributes:
      counts: what has happened; complete when `run` has returned.
    """

    def __init__(self, seed: int, mode_name: str) -> None:
        self.rng = rng = random.Random(seed)
        self.mode = mode = MODES[mode_name]
        self.windows = random_windows(rng) if mode.has_windows else (0,)
        self.num_groups = len(self.windows)  # that share the blocks
        paths = rng.choice(["direct", "staged"] if mode.has_groups else ["direct", "direct", "staged"])
        # There are fewer loads with several groups, so more of them have to fail.
        self.fault_rate = rng.choice([0.0, 0.0, 0.1, 0.3] if mode.has_groups else [0.0, 0.0, 0.1])
        self.stack = Stack(
            num_blocks=self._num_blocks(),
            num_workers=1 if mode.has_stages else rng.choice([1, 1, 2]),
            num_stages=rng.choice([2, 2, 3, 4]) if mode.has_stages else 1,
            async_scheduling=mode.is_async,
            prefix_caching=mode.has_states or rng.random() < 0.5,
            num_spec_tokens=3 if mode.has_drafts else 0,
            guess=lambda: rng.random() < 0.6,
            max_num_batched_tokens=rng.choice([16, 48, 200]),
            max_num_seqs=rng.choice([2, 6]),
            policy="fail" if rng.random() < 0.15 else "recompute",
            num_staging_blocks=rng.choice([2, 6, 40]),
            num_cpu_chunks=self._num_cpu_chunks(),
            blocks_per_chunk=rng.choice([1, 1, 2]),
            decode_save=rng.random() < 0.5,
            save_path=paths,
            load_path=rng.choice([paths, "direct"]),
            sync_load=mode.sync_load,
            max_load_gb_per_step=rng.choice([1.0, 1.0, 2.5 * BLOCK_NBYTES / 2**30]),
            save_wait_s=rng.choice([0.0, 0.5]),
            breaker_failures=rng.choice([5, 1000]),
            eviction_policy=rng.choice(["lru", "lru", "density", "arc"]),
            windows=self.windows,
            mixed_heads=mode.mixed_heads,
            num_rows=rng.choice([4, 6, 14]) if mode.has_states else 0,
            retention_interval=rng.choice([0, 0, None, 2 * BLOCK_SIZE]) if mode.has_groups else None,
            events=seed % 2 == 0,
        )
        self.router = KVRouter() if seed % 2 == 0 else None
        self.published: list[Any] = []
        publisher = self.stack.scheduler.kv_event_publisher
        publisher.publish = lambda batch: self.published.extend(filter(self._is_of_host, batch.events))
        # vLLM publishes the same event, without a medium, when HBM alone is reset.
        self.cleared: list[AllBlocksCleared] = []
        take_events = self.stack.side.take_events

        def take() -> list[Any]:
            events = list(take_events())
            self.cleared += [event for event in events if isinstance(event, AllBlocksCleared)]
            return events

        self.stack.side.take_events = take
        # With several groups, lost caches end the engine.
        loss_rate = 0.0 if mode.has_groups else rng.choice([0.0, 0.1, 0.3])
        self.faults = Faults(self.stack, rng, self.fault_rate, loss_rate)
        self.counts: Counter[str] = self.faults.counts
        groups = ["full", *["window"] * (self.num_groups - 1), "state"]
        rate = rng.choice([0.0, 0.7])
        for worker in self.stack.workers:
            delay(worker, rng, rate)
        count_jobs(self.stack.workers[0], groups, self.counts)
        self.num_added = 0

    def _is_of_host(self, event: Any) -> bool:
        """Whether an event tells of the host tier, or of what HBM has."""
        return not isinstance(event, AllBlocksCleared) or any(event is own for own in self.cleared)

    def _num_blocks(self) -> int:
        if self.mode.has_windows:
            return self.num_groups * self.rng.choice([7, 9, 12])
        return self.rng.choice([12, 12, 16] if self.mode.has_states else [12, 16, 24])

    def _num_cpu_chunks(self) -> int:
        if self.mode.has_states:  # half of them for states
            return self.rng.choice([24, 80, 240])
        return self.rng.choice([12, 40, 160] if self.mode.has_windows else [4, 16, 80])

    @property
    def most_tokens(self) -> int:
        """Of a request, its answer included: one alone has to fit into HBM, with a block to spare in each group."""
        if self.mode.has_windows:
            return (self.stack.num_blocks // self.num_groups - 2) * BLOCK_SIZE
        return (self.stack.num_blocks - 3) * BLOCK_SIZE

    def arrive(self) -> None:
        rng, prompt = self.rng, list[int]()
        known = list(self.stack.requests)
        if known and rng.random() < 0.2:  # the next turn of a conversation
            request_id = rng.choice(known[-8:])
            prompt = [*(self.stack.requests[request_id].prompt_token_ids or ()), *self.stack.outputs[request_id]]
        else:
            for depth in range(rng.randint(1, 4)):  # a walk in a small tree of shared prefixes
                branch = rng.randint(0, 1)
                prompt += [3 + (depth * 2 + branch + i) % VOCABULARY for i in range(rng.randint(1, 2) * BLOCK_SIZE)]
        prompt += [3 + rng.randrange(VOCABULARY) for _ in range(rng.randint(0, 3))]
        self.num_added += 1
        salt = rng.choice([None, None, None, "tenant"])
        self.stack.add(f"r{self.num_added}", prompt[: self.most_tokens - 16], max_tokens=rng.randint(1, 14), salt=salt)

    def run(self, num_steps: int) -> None:
        """Runs it to its end.

        Raises:
          AssertionError: a rule was broken. Whatever else the library raises is a violation, too.
        """
        with contextlib.closing(self.stack):
            self._run(num_steps)

    def _run(self, num_steps: int) -> None:
        stack, rng = self.stack, self.rng
        stack.meanwhile = self.abort
        for _ in range(num_steps):
            if rng.random() < 0.4:
                self.arrive()
            self.abort()
            if rng.random() < 0.03:
                self.reset()
            stack.step()
            stack.side.check_invariants()
            self.check_router()
        stack.drain(max_steps=400 + 4 * num_steps)
        if any(request.status is RequestStatus.FINISHED_ERROR for request in stack.requests.values()):
            assert stack.config.kv_transfer_config.kv_load_failure_policy == "fail"
        stack.check_end()
        assert all(runner.num_checked for runner in stack.runners)
        self.count()

    def check_router(self) -> None:
        """By the events, as much of a prompt can be loaded as lookups find."""
        stack = self.stack
        if self.router is None or stack.offload is None:
            return
        for event in [*self.published, *stack.side.take_events()]:
            self.router.take(event)
        self.published.clear()
        if len(self.router.groups) < len(stack.kv_config.kv_cache_groups):
            return  # it has heard of no block of a group yet, and cannot know that there is such a group
        for request in stack.requests.values():
            hashes, num_tokens = request.block_hashes, request.num_tokens
            found = stack.offload.num_cached_tokens(hashes, num_tokens=num_tokens)
            names = [maybe_convert_block_hash(block_hash) for block_hash in hashes]
            assert self.router.num_host_tokens(names, num_tokens, block_size=BLOCK_SIZE) == found
            self.counts["tokens routed"] += found

    def count(self) -> None:
        """Completes the counts."""
        stack, counts = self.stack, self.counts
        counts["runs"], counts["steps"], counts["requests"] = 1, stack.num_steps, len(stack.requests)
        counts["preemptions"] = sum(request.num_preemptions for request in stack.requests.values())
        counts["failed requests"] = len(stack.errors)
        counts["positions checked"] = sum(runner.num_checked for runner in stack.runners)
        counts["positions checked in windows"] = sum(runner.num_checked_in_windows for runner in stack.runners)
        stats: Any = stack.offload.stats() if stack.offload is not None else None
        if stats is not None:
            counts["blocks loaded"], counts["blocks saved"] = stats.loaded_blocks, stats.saved_blocks
            counts["evicted chunks"] = stats.num_evicted_chunks
            counts["evicted checkpoints"] = stats.num_evicted_checkpoints
            counts["failed jobs"] = stats.num_failed_jobs

    def abort(self) -> None:
        live = [i for i, r in self.stack.scheduler.requests.items() if not r.is_finished()]
        if live and self.rng.random() < 0.04:
            self.counts["aborts"] += 1
            self.stack.abort(self.rng.choice(live))

    def reset(self) -> None:
        scheduler = self.stack.scheduler
        self.counts["resets"] += 1
        held = [r for r in scheduler.requests.values() if any(scheduler.kv_cache_manager.get_block_ids(r.request_id))]
        if any(request.status is not RequestStatus.RUNNING for request in held):
            # Loads hold blocks, and so does a request that waits after part of its load: vLLM cannot reset its own
            # cache then.
            self.stack.scheduler.reset_connector_cache()
        else:
            running = self.rng.random() < 0.5 and not self.stack.in_flight
            both = self.rng.random() < 0.3
            self.stack.scheduler.reset_prefix_cache(reset_running_requests=running, reset_connector=both)
