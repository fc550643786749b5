"""A scheduler with a storage tier, and workers that move names of bytes, so that a test sees whose KV a block holds."""

import dataclasses
from typing import Any

from tests.core.fakes import BLOCK_SIZE, POISON, FakeEngine, FakeWorker
from tests.storage.memory_tier import NAME
from tpu_offload import CopyJob, JobResult, JobState, Match, StepPlan, StepReport
from tpu_offload.core.policies import LRUPolicy
from tpu_offload.types import BlockHash, ChunkKey, JobKind


class StorageWorker(FakeWorker):
    """Cascades and demotions capture their slots in the step of their plan; promotions land when they are finished.

    What a copy writes is junk from its dispatch to its end.
    """

    def __init__(self, worker_id: int = 0, *, num_host_chunks: int = 4, incarnation: int = 0) -> None:
        super().__init__(worker_id, num_host_chunks=num_host_chunks)
        self.incarnation = incarnation
        self.storage: dict[ChunkKey, bytes] = {}
        self.most_stored = 0

    def begin_step(self, plan: StepPlan) -> list[JobResult]:
        self._capture(plan, JobKind.DEMOTE)
        results = super().begin_step(plan)
        self.in_flight += [(job, []) for job in plan.of(JobKind.PROMOTE)]
        for job in plan.of(JobKind.PROMOTE):
            self.host.update(dict.fromkeys([slot for _, slot in job.chunks], POISON))
        self._spoil(plan, JobKind.EARLY_SAVE)
        return results

    def end_step(self, plan: StepPlan) -> None:
        super().end_step(plan)
        self._spoil(plan, JobKind.SAVE)
        self._capture(plan, JobKind.CASCADE)

    def _capture(self, plan: StepPlan, kind: JobKind) -> None:
        self.in_flight += [(job, [self.host[slot] for _, slot in job.chunks]) for job in plan.of(kind)]

    def _spoil(self, plan: StepPlan, kind: JobKind) -> None:
        for job in plan.of(kind):
            self.host.update(dict.fromkeys(self.places(job), POISON))

    def finish(
        self, num_jobs: int | None = None, *, fail: bool = False, failed_blocks: tuple[int, ...] = ()
    ) -> list[JobResult]:
        results = []
        for job, content in self.in_flight[:num_jobs]:
            if not job.kind.of_storage:
                results += super().finish(1, fail=fail, failed_blocks=failed_blocks)
                continue
            del self.in_flight[0]
            self._move(job, content, set(failed_blocks or range(job.num_items)) if fail else set(), fail=fail)
            state, error = (JobState.FAILED, "injected") if fail else (JobState.FINISHED, "")
            results.append(
                JobResult(job_id=job.job_id, state=state, error=error, failed_blocks=failed_blocks if fail else ())
            )
        return results

    def _move(self, job: CopyJob, content: list[bytes], bad: set[int], *, fail: bool) -> None:
        if job.clears_storage and not fail:
            self.storage.clear()
        for i, key in enumerate(job.deleted_keys, len(job.chunks)):
            if i not in bad:
                self.storage.pop(key, None)
        for i, (key, slot) in enumerate(job.chunks):
            if job.kind is JobKind.PROMOTE:
                self.host[slot] = POISON if i in bad else self.storage[key]
            else:
                self.storage[key] = POISON if i in bad else content[i]
        self.most_stored = max(self.most_stored, len(self.storage))

    def of_kind(self, kind: JobKind) -> list[CopyJob]:
        """The jobs in flight of one kind."""
        return [job for job, _ in self.in_flight if job.kind is kind]

    def report(self, results: list[JobResult] | None = None) -> StepReport:
        return dataclasses.replace(super().report(results), incarnation=self.incarnation)


class StorageEngine(FakeEngine):
    """A host tier of four chunks, each of one block, above storage of 16."""

    workers: list[StorageWorker]  # type: ignore[assignment]
    worker_type: type[StorageWorker] = StorageWorker

    def __init__(self, *, num_workers: int = 1, num_host_chunks: int = 4, **settings: Any) -> None:
        workers: list[FakeWorker] = [self.worker_type(i, num_host_chunks=num_host_chunks) for i in range(num_workers)]
        defaults: dict[str, Any] = {
            "storage_tier": NAME,
            "num_storage_chunks": 16,
            "num_cpu_chunks": num_host_chunks,
            "save_path": "direct",
            "load_path": "direct",
        }
        super().__init__(workers=workers, policy=LRUPolicy, num_blocks=64, **(defaults | settings))

    def hashes(self, prompt: list[int]) -> list[BlockHash]:
        hashes: list[BlockHash] = []
        self.hasher.extend(hashes, prompt)
        return hashes

    def keys(self, prompt: list[int]) -> list[ChunkKey]:
        namespace = self.scheduler._context.keys.namespace
        return [ChunkKey(block_hash + namespace) for block_hash in self.hashes(prompt)]

    def match(self, request_id: str, prompt: list[int]) -> Match:
        """Asks, as a request in the queue does, and gives back what was promised."""
        found = self.scheduler.match(request_id, self.hashes(prompt), num_tokens=len(prompt), num_computed_tokens=0)
        self.scheduler.release(request_id)
        self.scheduler.check_invariants()
        return found

    def turn(self, *, fail: bool = False, failed_blocks: tuple[int, ...] = (), num_jobs: int | None = None) -> StepPlan:
        """One step in which nothing is computed, and the results of what is in flight after it."""
        plan, results = self.step()
        self.scheduler.check_invariants()
        for worker, early in zip(self.workers, results, strict=True):
            self.apply(worker, early + worker.finish(num_jobs, fail=fail, failed_blocks=failed_blocks))
            self.scheduler.check_invariants()
        return plan

    def rest(self) -> list[StepPlan]:
        """Steps until an engine without requests would not call any more."""
        plans = []
        while self.scheduler.has_jobs:
            plans.append(self.turn())
            assert len(plans) < 200, "an idle engine never comes to rest"
        return plans

    def fill(self, prompt: list[int], *, name: str = "filler") -> None:
        """Serves a prompt, whose chunks push out those of others, and lets storage come to rest."""
        self.serve(name, prompt)
        self.rest()
        self.scheduler.check_invariants()

    def check_storage(self, prompts: list[list[int]]) -> None:
        """What the scheduler takes for stored is on every worker, with the right bytes."""
        names = dict(pair for prompt in prompts for pair in zip(self.keys(prompt), self.hashes(prompt), strict=True))
        for key in self.scheduler._storage._stored:
            assert [worker.storage.get(key) for worker in self.workers] == [names[key]] * len(self.workers)


def prompt(number: int, *, num_blocks: int = 4) -> list[int]:
    """Prompts of whole blocks that share nothing."""
    return list(range(1000 * number, 1000 * number + BLOCK_SIZE * num_blocks))
