"""Random lives with storage under more faults.

Workers that restart, lost and late reports, partial failures, records that a tier refuses to delete, aborts.

python -m tests.storage.hard_lives --seeds 10000
"""

import dataclasses
import random
from typing import Any

from tests.core.fakes import LAYOUT, POISON
from tests.inside.scheduler import storage_planner, storage_stack_planner, tier_context
from tests.storage.fakes import StorageEngine, StorageWorker
from tests.storage.lives import Life, run_many
from tpu_offload import JobResult, JobState, OffloadStats, StepPlan, StepReport, Update
from tpu_offload.core.workers import expected_setups
from tpu_offload.types import STORAGE_WRITES, ChunkKey, JobKind, WorkerSetup

TORN = b"torn"
"""A record that a killed worker has left half written: listed, and damaged when it is read."""


def live(seed: int, *, num_turns: int = 120) -> OffloadStats:
    """As `tests.storage.lives.live`, under more faults; at the end each worker has what the scheduler takes for stored.

    Returns:
      The scheduler's counters at the end.
    Raises:
      AssertionError: a rule was broken.
      KeyError: what was never written, or is stale, is read or counts as stored.
    """
    return HardLife(random.Random(seed)).run(num_turns)


class HardWorker(StorageWorker):
    """Ends jobs in part and in any order (those of storage in theirs), and restarts with what storage has kept."""

    def __init__(self, worker_id: int = 0, *, num_host_chunks: int = 4, incarnation: int = 1) -> None:
        super().__init__(worker_id, num_host_chunks=num_host_chunks, incarnation=incarnation)
        self.setup: WorkerSetup | None = None
        self.next_job_id = 0
        self.is_stale = False
        self.undelivered: list[JobResult] = []
        self.outbox: list[StepReport] = []
        self.gone: set[ChunkKey] = set()  # what restarts have lost
        self.capacity = 0

    def begin_step(self, plan: StepPlan) -> list[JobResult]:
        self.next_job_id = plan.next_job_id
        known = plan.cache_epochs[self.worker_id]
        self.is_stale = bool(known[0]) and known != (self.incarnation, 0)
        if self.is_stale:
            return [JobResult(job_id=job.job_id, state=JobState.CANCELLED, error="stale") for job in plan.jobs]
        return super().begin_step(plan)

    def end_step(self, plan: StepPlan) -> None:
        if not self.is_stale:
            super().end_step(plan)

    def finish_some(self, rng: random.Random, fault_rate: float) -> list[JobResult]:
        """Some jobs end; some of them fail, and some of those in part."""
        results: list[JobResult] = []
        for _ in range(rng.randint(0, len(self.in_flight))):
            of_storage = [entry for entry in self.in_flight if entry[0].kind.of_storage]
            entry = rng.choice([e for e in self.in_flight if not e[0].kind.of_storage] + of_storage[:1])
            self.in_flight.remove(entry)
            self.in_flight.insert(0, entry)
            job = entry[0]
            num_items = job.num_items if job.kind.of_storage else job.num_blocks
            torn = {
                i for i, (key, _) in enumerate(job.chunks) if job.kind is JobKind.PROMOTE and self._is_unreadable(key)
            }
            fails = rng.random() < fault_rate
            if fails and num_items > 1 and rng.random() < 0.6:
                torn |= set(rng.sample(range(num_items), rng.randint(1, num_items - 1)))
            elif fails:
                torn = set()  # all of it
            results += self.finish(1, fail=fails or bool(torn), failed_blocks=tuple(sorted(torn)))
        return results

    def _is_unreadable(self, key: ChunkKey) -> bool:
        # A promotion that was planned before a restart is sent after it, although it has failed already.
        return self.storage.get(key) == TORN or (key in self.gone and key not in self.storage)

    def restart(self, rng: random.Random) -> None:
        """A new process with empty memory; of the writes in flight some have reached storage, one in part."""
        for job, content in self.in_flight:
            if job.kind in (*STORAGE_WRITES, JobKind.DEMOTE) and rng.random() < 0.5:
                self._move(job, content, set(), fail=False)
                for key, _ in job.chunks[-1:]:
                    self.storage[key] = TORN
                for key, _ in job.chunks[: max(0, len(self.storage) - self.capacity)]:
                    del self.storage[key]  # a tier holds no more, and the write had timed out: others took its room
                break
        self.gone.update(self.storage)
        self.gone.update(key for job, _ in self.in_flight for key, _ in job.chunks)
        loss = rng.choice(["nothing", "nothing", "some", "all"])
        if loss == "all":
            self.storage.clear()
        elif loss == "some":
            for key in [key for key in self.storage if rng.random() < 0.3]:
                del self.storage[key]
        if rng.random() < 0.3:
            key = ChunkKey(rng.randbytes(8))
            if len(self.storage) < self.capacity:  # a tier holds no more, what earlier runs have left included
                self.storage[key] = TORN
        self.incarnation += 1
        self.next_job_id = 0
        self.in_flight, self.lost_slots, self.undelivered, self.host = [], [], [], {}
        self.hbm = dict.fromkeys(self.hbm, POISON)

    def report(self, results: list[JobResult] | None = None) -> StepReport:
        jobs = [job for job, _ in self.in_flight]
        setup = self.setup and dataclasses.replace(self.setup, stored_keys=(tuple(self.storage),))
        return dataclasses.replace(
            super().report(results),
            oldest_job_id=min((job.job_id for job in jobs if not job.kind.of_storage), default=self.next_job_id),
            storage_job_ids=tuple(sorted(job.job_id for job in jobs if job.kind.of_storage)),
            setup=setup if not self.next_job_id else None,  # until a plan has come
        )


class HardEngine(StorageEngine):
    """Takes reports one by one, and drops all requests when a worker has lost their KV."""

    workers: list[HardWorker]  # type: ignore[assignment]
    worker_type = HardWorker

    def take(self, report: StepReport) -> None:
        """A report arrives."""
        update = self.scheduler.apply(report)
        self.scheduler.check_invariants()
        self.use(update)

    def use(self, update: Update) -> None:
        """What the scheduler says of the requests."""
        if update.lost_caches:
            for name in sorted(self.requests):
                self.requests[name].loading = True  # nothing of it is cached
                self.remove(name)
            return
        for name in update.loaded:
            request = self.requests[name]
            request.loading = False
            self.check_bytes(request, request.num_computed)
        for failed in update.failed_loads:
            request = self.requests[failed.request_id]
            request.loading, request.num_computed = False, failed.num_valid_tokens


class HardLife(Life):
    """One seed decides everything. With one tier."""

    engine: HardEngine
    tier_numbers = (1,)

    def make_engine(self, **settings: Any) -> StorageEngine:
        engine = HardEngine(**settings)
        expected = expected_setups(tier_context(engine.scheduler).config, LAYOUT, len(engine.workers))
        for worker in engine.workers:
            (worker.capacity,) = settings["sizes"]
            worker.setup = WorkerSetup(
                **expected[worker.worker_id],
                num_processes=1,
                process_index=0,
                shares_storage=(False,),
                segment_slots=(settings["num_host_chunks"],),
                save_path="direct",
                load_path="direct",
            )
        self.restart_rate = self.rng.choice([0.0, 0.01, 0.04])
        self.message_fault_rate = self.rng.choice([0.0, 0.1])
        self.refusals = random.Random(repr(self.rng.getstate()))  # so that `rng` draws what it drew without them
        self.refusal_rate = self.refusals.choice([0.0, 0.0, 0.2])
        return engine

    def step_workers(self, early: list[list[JobResult]]) -> None:
        """Some jobs end, and some reports arrive: late, twice, or never."""
        engine, rng = self.engine, self.rng
        engine.use(engine.scheduler.take_update())
        for worker, results in zip(engine.workers, early, strict=True):
            worker.undelivered += results + worker.finish_some(rng, self.fault_rate)
            assert len(worker.storage) <= worker.capacity, "a worker has more than storage has room for"
            if rng.random() < 0.8:
                self._send(worker)
            if rng.random() < 0.8:
                self._deliver(worker)

    def _send(self, worker: HardWorker) -> None:
        rng = self.rng
        rng.shuffle(worker.undelivered)
        report = worker.report(worker.undelivered)
        worker.undelivered = []
        if report.lost_slots or rng.random() >= self.message_fault_rate:
            worker.outbox.append(report)
        if worker.outbox and rng.random() < self.message_fault_rate:
            worker.outbox.append(dataclasses.replace(worker.outbox[-1], lost_slots=()))

    def _deliver(self, worker: HardWorker) -> None:
        reports, worker.outbox = worker.outbox, []
        for report in reports:
            self.engine.take(report)

    def disturb_more(self) -> None:
        """Requests are aborted, workers restart."""
        engine, rng = self.engine, self.rng
        if engine.requests and rng.random() < 0.05:
            engine.remove(rng.choice(sorted(engine.requests)))
        for worker in engine.workers:
            if self.refusals.random() < self.refusal_rate:
                worker.undeletable = {key for key in worker.storage if self.refusals.random() < 0.3}
            if rng.random() < self.restart_rate:
                self._deliver(worker)
                worker.restart(rng)
                engine.take(worker.report())
                assert not engine.requests, "their KV is lost"

    def tell(self, worker: StorageWorker) -> None:
        """A worker has lost memory."""
        assert isinstance(worker, HardWorker)
        self._send(worker)
        self._deliver(worker)

    def check_storage(self) -> None:
        engine = self.engine
        names = {
            key: name
            for prompt in self.prompts
            for key, name in zip(engine.keys(prompt), engine.hashes(prompt), strict=True)
        }
        for key in storage_stack_planner(engine.scheduler).stored_keys():
            for worker in engine.workers:
                assert worker.storage[key] in (names[key], TORN)

    def end(self) -> None:
        """Without faults everything ends, and storage has what counts as stored, and nothing else."""
        engine, planner = self.engine, storage_planner(self.engine.scheduler)
        for name in list(engine.requests):
            engine.remove(name)
        records = planner.records
        for worker in engine.workers:
            worker.undeletable = set()
        for _ in range(100):
            engine.clock.now_s += 60.0
            _, early = engine.step()
            for worker, results in zip(engine.workers, early, strict=True):
                worker.undelivered += results + worker.finish()
                worker.outbox.append(worker.report(worker.undelivered))
                worker.undelivered = []
                self._deliver(worker)
            stats = engine.scheduler.stats()
            left = records.to_delete or records.undeletable or records.resting
            if not (stats.num_jobs_in_flight or left or planner.has_plans):
                break
        assert (stats.num_jobs_in_flight, stats.num_quarantined_chunks) == (0, 0), "a job has no end"
        self.check_storage()
        for worker in engine.workers:
            assert worker.storage.keys() == set(planner.records.stored), "storage has what nobody knows"
            assert len(worker.storage) <= worker.capacity


if __name__ == "__main__":
    run_many(live, __doc__)
