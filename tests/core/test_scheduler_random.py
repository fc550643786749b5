"""Random runs of requests over fake memories: no wrong bytes and no leak in any order of events."""

import random
from typing import Any

import pytest

from tests.core.fakes import BLOCK_SIZE, FakeEngine, FakeWorker
from tests.core.router import Router
from tpu_offload import JobKind, StepPlan


class RandomLife:
    """One seed decides everything: arrivals with shared prefixes, step sizes, aborts, faults and delays."""

    def __init__(self, seed: int, *, also_named: float = 0.0, **settings) -> None:
        self.rng = rng = random.Random(seed)
        num_slots = rng.choice([4, 12, 40])
        workers = [
            FakeWorker(i, num_host_chunks=num_slots, staged=rng.random() < 0.5) for i in range(rng.randint(1, 3))
        ]
        self.blocks_per_chunk = rng.choice([1, 1, 2, 3])
        self.engine = FakeEngine(
            num_blocks=rng.randint(10, 40),
            workers=workers,
            seed=seed,
            blocks_per_chunk=self.blocks_per_chunk,
            num_staging_blocks=rng.randint(3, 16),
            num_cpu_chunks=num_slots,
            decode_save=rng.random() < 0.5,
            job_timeout_s=20.0,
            record_events=True,
            **settings,
        )
        others = random.Random(seed)
        self.engine.also_names = lambda: others.random() < also_named
        self.plans: list[StepPlan] = []
        self.undelivered: list[list[Any]] = [[] for _ in workers]
        self.fault_rate = rng.choice([0.0, 0.2])
        self.loss_rate = rng.choice([0.0, 0.0, 0.05])
        self.num_requests = 0
        self.num_loaded_tokens = 0
        self.checked = 0
        self.router = Router(self.engine.scheduler)

    def arrive(self) -> None:
        prompt: list[int] = []
        for _ in range(self.rng.randint(1, 4)):  # a walk in a small tree of shared prefixes
            prompt += [1000 * len(prompt) + self.rng.randint(0, 1)] * self.rng.randint(BLOCK_SIZE, 2 * BLOCK_SIZE)
        self.num_requests += 1
        request = self.engine.add(f"r{self.num_requests}", prompt)
        if request is not None:
            self.num_loaded_tokens += request.num_computed

    def step(self) -> None:
        engine, rng = self.engine, self.rng
        computed = {}
        for request in engine.requests.values():
            left = len(request.tokens) - request.num_computed
            if not request.loading and left and rng.random() < 0.8:
                computed[request.request_id] = rng.randint(1, left)
        engine.clock.now_s += rng.choice([0.1, 0.1, 5.0])
        plan, results = engine.step(computed)
        self.plans.append(plan)
        for i, worker in enumerate(engine.workers):
            if rng.random() < self.loss_rate:
                first = rng.randrange(worker.num_host_chunks)
                worker.lose(first, worker.num_host_chunks, blocks_per_chunk=self.blocks_per_chunk)
            self.undelivered[i] += results[i]
            if rng.random() < 0.6:
                fail = rng.random() < self.fault_rate
                self.undelivered[i] += worker.finish(rng.randint(0, len(worker.in_flight)), fail=fail)
            if rng.random() < 0.7:
                rng.shuffle(self.undelivered[i])
                batch, self.undelivered[i] = self.undelivered[i], []
                engine.apply(worker, batch + (batch[:1] if rng.random() < 0.2 else []))

    def check(self) -> None:
        self.engine.scheduler.check_invariants()
        self.router.check_chunks()
        stats = self.engine.scheduler.stats()
        assert stats.staging_peak_blocks <= stats.staging_budget_blocks
        for request in self.engine.requests.values():
            if not request.loading:
                self.engine.check_bytes(request, request.num_computed)
                self.checked += 1

    def grow(self) -> None:
        """Some requests generate a token, which needs a block now and then."""
        engine = self.engine
        for request in engine.requests.values():
            if request.num_computed == len(request.tokens) and self.rng.random() < 0.5:
                if len(request.tokens) % BLOCK_SIZE == 0:
                    if not engine.free_blocks:
                        continue
                    request.block_ids += engine.grant(1)
                request.tokens.append(self.rng.randint(0, 1))
                engine.grow_hashes(request)

    def run(self, num_steps: int) -> None:
        engine, rng = self.engine, self.rng
        for _ in range(num_steps):
            if rng.random() < 0.5:
                self.arrive()
            self.grow()
            if engine.requests and rng.random() < 0.25:
                gone = engine.remove(rng.choice(sorted(engine.requests)), preempt=rng.random() < 0.3)
                if rng.random() < 0.5:
                    engine.add(gone.request_id, gone.tokens)
            if rng.random() < 0.01:
                engine.scheduler.reset()
                engine.cached.clear()
            self.step()
            self.check()
        for i, worker in enumerate(engine.workers):
            engine.apply(worker, self.undelivered[i])
        engine.settle()
        self.check()
        for request_id in list(engine.requests):
            engine.remove(request_id)
        engine.settle()
        stats = engine.scheduler.stats()
        assert stats.staging_reserved_blocks == 0
        assert stats.num_jobs_in_flight == 0
        engine.scheduler.check_invariants()


# The last three once found a failure that was reported to a later request of the same id.
@pytest.mark.parametrize("seed", [*range(60), 5269, 6272, 7558])
def test_random_run(seed) -> None:
    life = RandomLife(seed)
    life.run(120)
    assert life.checked > 50


@pytest.mark.parametrize("save_after_sightings", [1, 2])
@pytest.mark.parametrize("save_on", ["eviction", "preemption", "eviction,preemption", "compute,eviction,preemption"])
@pytest.mark.parametrize("seed", range(15))
def test_random_run_that_saves_at_other_times(seed, save_on, save_after_sightings) -> None:
    life = RandomLife(seed, save_on=save_on, save_after_sightings=save_after_sightings)
    life.run(100)
    assert life.checked > 50
    if "compute" not in save_on:
        assert not any(plan.of(JobKind.SAVE) for plan in life.plans)


def test_the_random_runs_do_save_early_and_load_that() -> None:
    for save_on in ("eviction", "preemption"):
        num_early = num_loaded = 0
        for seed in range(15):
            life = RandomLife(seed, save_on=save_on)
            life.run(100)
            num_early += sum(len(plan.of(JobKind.EARLY_SAVE)) for plan in life.plans)
            num_loaded += life.num_loaded_tokens
        assert num_early > 50 < num_loaded, (save_on, num_early, num_loaded)


@pytest.mark.parametrize("seed", range(10))
def test_naming_requests_in_which_nothing_changed_changes_nothing(seed) -> None:
    lives = [RandomLife(seed, also_named=share) for share in (0.0, 0.3, 1.0)]
    for life in lives:
        life.run(80)
    assert lives[0].plans == lives[1].plans == lives[2].plans
    assert lives[0].engine.scheduler.stats() == lives[1].engine.scheduler.stats() == lives[2].engine.scheduler.stats()
    assert any(plan.of(JobKind.SAVE) for plan in lives[0].plans)


def test_the_random_runs_do_load_evict_drop_and_fail() -> None:
    totals = {"loaded": 0, "evicted": 0, "dropped": 0, "failed": 0, "timed_out": 0, "ignored": 0}
    for seed in range(20):
        life = RandomLife(1000 + seed)
        life.run(120)
        stats = life.engine.scheduler.stats()
        totals["loaded"] += stats.loaded_blocks
        totals["evicted"] += stats.num_evicted_chunks
        totals["dropped"] += stats.dropped_save_blocks + stats.dropped_load_blocks
        totals["failed"] += stats.num_failed_jobs
        totals["timed_out"] += stats.num_timed_out_jobs
        totals["ignored"] += stats.num_ignored_results
    assert all(count > 10 for count in totals.values()), totals
