"""Random lives with windows and states under more faults: restarts, lost caches, partial failures, late results.

python -m tests.core.window_faults --seeds 1000
"""

import random
from collections.abc import Callable
from typing import Any

from tests.core.fakes import BLOCK_SIZE, POISON, FakeWorker
from tests.core.window_engine import WindowEngine
from tests.core.window_lives import RandomLife, run_many
from tpu_offload import CacheEpoch, JobResult, JobState, RequestLimits, StepPlan, StepReport, Update
from tpu_offload.types import Direction


class FaultyWorker(FakeWorker):
    """Runs no plan that was made for other caches, restarts with empty memory, and fails jobs one by one."""

    def __init__(self, worker_id: int, *, num_host_chunks: int, num_host_states: int, staged: bool) -> None:
        super().__init__(worker_id, num_host_chunks=num_host_chunks, num_host_states=num_host_states, staged=staged)
        self.most_host_chunks = num_host_chunks
        self.incarnation, self.num_cache_losses = 1, 0
        self.next_job_id = 0
        self.is_stale = False
        self.keeps_results = False  # some are not reported yet, so none may be acknowledged

    def begin_step(self, plan: StepPlan) -> list[JobResult]:
        self.next_job_id = plan.next_job_id
        known = plan.cache_epochs[self.worker_id]
        self.is_stale = bool(known[0]) and known != (self.incarnation, self.num_cache_losses)
        if self.is_stale:
            return [JobResult(job_id=job.job_id, state=JobState.CANCELLED, error="stale") for job in plan.jobs]
        return super().begin_step(plan)

    def end_step(self, plan: StepPlan) -> None:
        if not self.is_stale:
            super().end_step(plan)

    def finish_some(self, rng: random.Random, fault_rate: float) -> list[JobResult]:
        """Some jobs end, in any order; some of them fail, and some of those in part."""
        results = []
        for _ in range(rng.randint(0, len(self.in_flight))):
            self.in_flight.insert(0, self.in_flight.pop(rng.randrange(len(self.in_flight))))
            num_blocks = self.in_flight[0][0].num_blocks
            fails, failed = rng.random() < fault_rate, tuple[int, ...]()
            if fails and num_blocks > 1 and rng.random() < 0.6:
                failed = tuple(sorted(rng.sample(range(num_blocks), rng.randint(1, num_blocks - 1))))
            results += self.finish(1, fail=fails, failed_blocks=failed)
        return results

    def restart(self, num_host_chunks: int, num_host_states: int) -> None:
        """A new process, with empty memory."""
        self.incarnation += 1
        self.num_cache_losses = self.next_job_id = 0
        self.num_host_chunks, self.num_host_states = num_host_chunks, num_host_states
        self.in_flight, self.lost_slots, self.host = [], [], {}
        self.hbm = dict.fromkeys(self.hbm, POISON)

    def lose_caches(self) -> list[JobResult]:
        """Its blocks hold nothing; loads in flight end as cancelled."""
        self.num_cache_losses += 1
        self.hbm = dict.fromkeys(self.hbm, POISON)
        loads = [entry for entry in self.in_flight if entry[0].direction is Direction.LOAD]
        self.in_flight = [entry for entry in self.in_flight if entry not in loads]
        return [JobResult(job_id=job.job_id, state=JobState.CANCELLED) for job, _ in loads]

    def report(self, results: list[JobResult] | None = None) -> StepReport:
        oldest = 0 if self.keeps_results else min((job.job_id for job, _ in self.in_flight), default=self.next_job_id)
        return StepReport(
            worker_id=self.worker_id,
            results=tuple(results or ()),
            num_host_slots=self.num_host_slots,
            lost_slots=self.take_lost(),
            incarnation=self.incarnation,
            num_cache_losses=self.num_cache_losses,
            oldest_job_id=oldest,
        )


class FaultyEngine(WindowEngine):
    """Takes updates after every step, and preempts all requests when caches are lost."""

    caches_are_lost = False

    def take(self, update: Update) -> None:
        for request_id in update.loaded:
            self.requests[request_id].loading = False
        for failed in update.failed_loads:
            request = self.requests[failed.request_id]
            request.loading, request.num_computed = False, failed.num_valid_tokens
        if update.lost_caches:
            self.preempt_all()

    def preempt_all(self) -> None:
        self.caches_are_lost = False
        for request_id in sorted(self.requests):
            request = self.requests.pop(request_id)
            self.scheduler.preempt(request_id)
            self.release_all(request)

    def apply(self, worker: FakeWorker, results: list[JobResult]) -> Update:
        update = self.scheduler.apply(worker.report(results))
        self.take(update)
        return update

    def step(self, computed: dict[str, int] | None = None) -> tuple[StepPlan, list[list[JobResult]]]:
        stepped = super().step(computed)
        self.take(self.scheduler.take_update())
        return stepped


class FaultyLife(RandomLife):
    """One seed decides everything."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        sizes = [rng.choice([8, 12, 20, 60]) for _ in range(rng.randint(1, 3))]
        self.workers = [
            FaultyWorker(i, num_host_chunks=size, num_host_states=rng.choice([1, 3, 8]), staged=rng.random() < 0.5)
            for i, size in enumerate(sizes)
        ]
        self.has_states = rng.random() < 0.4
        windows = rng.choice([(9,), (5,), (9, 5), (17, 9), (12, 3), (1, 40), (13, 13), (2,), (25,)])
        if self.has_states and rng.random() < 0.7:
            windows = ()
        self.blocks_per_chunk = rng.choice([1, 1, 2, 3])
        path = rng.choice(["staged", "direct"])
        workers: Any = self.workers
        self.engine: FaultyEngine = FaultyEngine(
            windows,
            num_blocks=rng.randint(40, 200),
            num_rows=rng.randint(6, 40) if self.has_states else 0,
            workers=workers,
            seed=seed,
            save_path=path,
            load_path=path,
            blocks_per_chunk=self.blocks_per_chunk,
            num_staging_blocks=rng.choice([8, 20, 60, 100]),
            num_cpu_chunks=max(sizes),
            decode_save=rng.random() < 0.5,
            save_on=rng.choice(["compute", "compute,preemption"]),
            job_timeout_s=rng.choice([8.0, 20.0]),
            breaker_failures=rng.choice([3, 1000]),
            save_wait_s=rng.choice([0.0, 1.0]),
            load_wait_s=rng.choice([0.5, 10.0]),
            eviction_policy=rng.choice(["lru", "density", "arc"]),
        )
        self.undelivered: list[list[JobResult]] = [[] for _ in sizes]
        self.fault_rate = rng.choice([0.0, 0.1, 0.4])
        self.loss_rate = rng.choice([0.0, 0.0, 0.05])
        self.restart_rate = rng.choice([0.0, 0.0, 0.01, 0.03])
        self.cache_loss_rate = rng.choice([0.0, 0.0, 0.01])
        self.watch()

    def arrive(self) -> None:
        rng, engine = self.rng, self.engine
        self.num_requests += 1
        prompt, in_hbm = self.prompt(), 0
        if rng.random() < 0.3:
            in_hbm = rng.randrange(len(prompt)) // BLOCK_SIZE * BLOCK_SIZE
        number = self.num_requests if rng.random() < 0.7 else rng.randint(1, self.num_requests)
        request_id = f"r{number}"
        if request_id in engine.requests:
            return
        engine.scheduler.finish(request_id)
        limits = None
        if rng.random() < 0.2:
            limits = RequestLimits(
                max_load_tokens=rng.choice([None, 0, 7, 20, 33]),
                max_save_tokens=rng.choice([None, 0, 9, 21]),
                priority=rng.randint(0, 2),
                cache=rng.random() < 0.9,
            )
        engine.between_match_and_admit = self.surprise if rng.random() < 0.1 else None
        request = engine.add(request_id, prompt, num_in_hbm=in_hbm, limits=limits, stops=self.stops(prompt))
        engine.between_match_and_admit = None
        if request is not None:
            self.num_loaded += request.num_computed - in_hbm
        engine.take(engine.scheduler.take_update())

    def surprise(self) -> None:
        """Something happens to a request that was matched and not admitted yet."""
        engine, rng = self.engine, self.rng
        what: Callable[[], None] = rng.choice([engine.scheduler.reset, self.lose_slots, self.step_idly])
        what()
        engine.scheduler.check_invariants()

    def lose_slots(self) -> None:
        worker = self.rng.choice(self.workers)
        self.lose_memory(worker)
        self.deliver(worker, [])

    def step_idly(self) -> None:
        _, results = self.engine.step()
        for undelivered, early in zip(self.undelivered, results, strict=True):
            undelivered += early

    def deliver(self, worker: FaultyWorker, results: list[JobResult]) -> None:
        worker.keeps_results = bool(self.undelivered[worker.worker_id])
        self.engine.apply(worker, results)
        worker.keeps_results = False

    def step(self) -> None:
        engine, rng = self.engine, self.rng
        computed = self.tokens_to_compute()
        engine.clock.now_s += rng.choice([0.1, 0.1, 0.5, 5.0])
        _, results = engine.step(computed)
        for worker, undelivered, early in zip(self.workers, self.undelivered, results, strict=True):
            undelivered += early
            if rng.random() < 0.6:
                undelivered += worker.finish_some(rng, self.fault_rate)
            if rng.random() < self.loss_rate:
                self.lose_slots()
            if rng.random() < 0.7:
                rng.shuffle(undelivered)
                batch = list(undelivered)
                undelivered.clear()
                self.deliver(worker, batch)
        for worker in self.workers:
            self.break_down(worker)

    def break_down(self, worker: FaultyWorker) -> None:
        engine, rng = self.engine, self.rng
        if rng.random() < self.restart_rate:
            worker.restart(
                rng.choice([worker.num_host_chunks, worker.num_host_chunks // 2 + 2, worker.most_host_chunks]),
                rng.choice([worker.num_host_states, 1, 8]),
            )
            self.undelivered[worker.worker_id].clear()
            self.deliver(worker, [])
            assert not engine.requests
        elif rng.random() < self.cache_loss_rate:
            self.undelivered[worker.worker_id] += worker.lose_caches()
            if rng.random() < 0.5:  # the engine knows before the report says so
                epoch = CacheEpoch(
                    worker_id=worker.worker_id, incarnation=worker.incarnation, num_losses=worker.num_cache_losses
                )
                engine.scheduler.mark_caches_lost(epoch)
                engine.take(engine.scheduler.take_update())
                engine.preempt_all()
            self.deliver(worker, [])
            engine.preempt_all()

    def run(self, num_steps: int) -> None:
        super().run(num_steps)
        engine = self.engine
        for worker in self.workers:  # what timed out is released when every worker is done with it
            engine.step()
            engine.clock.now_s += 5
            self.deliver(worker, [])
        engine.settle()
        assert engine.scheduler.stats().num_quarantined_chunks == 0
        engine.scheduler.reset()
        engine.scheduler.check_invariants()
        stats = engine.scheduler.stats()
        assert (stats.num_window_chunks, stats.num_states) == (0, 0), "a piece of a checkpoint that nothing holds"


if __name__ == "__main__":
    run_many(FaultyLife, __doc__)
