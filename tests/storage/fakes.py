"""A scheduler with storage tiers, and workers that move names of bytes, so that a test sees whose KV a block holds."""

import dataclasses
import itertools
import sys
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Sequence
from typing import Any

from tests.core.fakes import BLOCK_SIZE, POISON, ROWS, FakeEngine, FakeWorker
from tests.inside.scheduler import current_namespace, storage_planners
from tests.storage.memory_tier import NAME
from tpu_offload import CopyJob, JobResult, JobState, Match, StepPlan, StepReport
from tpu_offload.core.policies import LRUPolicy
from tpu_offload.piece_keys import PieceKey, part_keys
from tpu_offload.types import STORAGE_WRITES, BlockHash, ChunkKey, JobKind

_SEPARATOR = b"<and>"


class StorageWorker(FakeWorker):
    """Cascades and demotions capture their slots in the step of their plan; promotions land when they are finished.

    What a copy writes is junk from its dispatch to its end.

    Attributes:
      storages: by tier, what it holds.
      most_stored: by tier, the most chunks that it ever held.
      frozen: tiers whose jobs do not end.
      undeletable: records that all tiers refuse to delete.
      blocks_per_chunk: places of a slot.
      first_state: the lowest slot of a state; `num_parts` is how many records one has.
    """

    blocks_per_chunk = 1
    first_state = sys.maxsize
    num_parts = 0

    def __init__(self, worker_id: int = 0, *, num_host_chunks: int = 4, incarnation: int = 0) -> None:
        super().__init__(worker_id, num_host_chunks=num_host_chunks)
        self.incarnation = incarnation
        self.storages: defaultdict[int, dict[ChunkKey, bytes]] = defaultdict(dict)
        self.most_stored: defaultdict[int, int] = defaultdict(int)
        self.frozen: set[int] = set()
        self.undeletable: set[ChunkKey] = set()

    @property
    def storage(self) -> dict[ChunkKey, bytes]:
        """What the nearest tier holds."""
        return self.storages[0]

    def begin_step(self, plan: StepPlan) -> list[JobResult]:
        self._capture(plan, JobKind.DEMOTE)
        results = super().begin_step(plan)
        self.in_flight += [(job, []) for job in plan.of(JobKind.LOOKUP, JobKind.PROMOTE)]
        for job in plan.of(JobKind.PROMOTE):
            self.host.update(
                dict.fromkeys([place for _, slot in job.chunks for place in self.slot_places(slot)], POISON)
            )
        self._spoil(plan, JobKind.EARLY_SAVE)
        return results

    def end_step(self, plan: StepPlan) -> None:
        super().end_step(plan)
        self._spoil(plan, JobKind.SAVE)
        for kind in STORAGE_WRITES:
            self._capture(plan, kind)

    def _capture(self, plan: StepPlan, kind: JobKind) -> None:
        for job in plan.of(kind):
            content = [[self.host[place] for place in self.slot_places(slot)] for _, slot in job.chunks]
            self.in_flight.append((job, [_SEPARATOR.join(blocks) for blocks in content]))

    def slot_places(self, slot: int) -> list[int]:
        """Where a slot is in the host tier."""
        if slot >= self.first_state:
            assert slot - self.first_state < self.num_host_states, "a state in memory that is not there"
            return [ROWS + slot - self.first_state]
        return list(range(slot * self.blocks_per_chunk, (slot + 1) * self.blocks_per_chunk))

    def records(self, key: ChunkKey, slot: int) -> Sequence[ChunkKey]:
        """The records of what is in a slot."""
        return part_keys(PieceKey(key), self.num_parts) if slot >= self.first_state else (key,)

    def _spoil(self, plan: StepPlan, kind: JobKind) -> None:
        for job in plan.of(kind):
            self.host.update(dict.fromkeys(self.places(job), POISON))

    def finish(
        self, num_jobs: int | None = None, *, fail: bool = False, failed_blocks: tuple[int, ...] = ()
    ) -> list[JobResult]:
        results = []
        is_held = [job.kind.of_storage and job.tier_id in self.frozen for job, _ in self.in_flight]
        held = list(itertools.compress(self.in_flight, is_held))
        self.in_flight = [entry for entry, is_one in zip(self.in_flight, is_held, strict=True) if not is_one]
        for job, content in self.in_flight[:num_jobs]:
            if not job.kind.of_storage:
                results += super().finish(1, fail=fail, failed_blocks=failed_blocks)
                continue
            del self.in_flight[0]
            results.append(self._end(job, content, fail=fail, failed_blocks=failed_blocks))
        self.in_flight = held + self.in_flight
        return results

    def _end(self, job: CopyJob, content: list[bytes], *, fail: bool, failed_blocks: tuple[int, ...]) -> JobResult:
        refused = tuple(i for i, key in enumerate(job.deleted_keys) if key in self.undeletable)
        if refused and not fail:
            self._move(job, content, set(refused), fail=True)
            return JobResult(
                job_id=job.job_id,
                state=JobState.FAILED,
                error="refused",
                failed_blocks=refused if len(refused) < job.num_items else (),
                missing_chunks=refused,
            )
        self._move(job, content, set(failed_blocks or range(job.num_items)) if fail else set(), fail=fail)
        if fail:
            return JobResult(job_id=job.job_id, state=JobState.FAILED, error="injected", failed_blocks=failed_blocks)
        found = tuple([num_leading(self.storages[job.tier_id], prefix) for prefix in job.prefixes])
        return JobResult(job_id=job.job_id, state=JobState.FINISHED, num_found=found)

    def _move(self, job: CopyJob, content: list[bytes], bad: set[int], *, fail: bool) -> None:
        storage = self.storages[job.tier_id]
        if job.kind is JobKind.CLEAR and not fail:
            storage.clear()
        for i, key in enumerate(job.deleted_keys):
            if i not in bad:
                storage.pop(key, None)
        for i, (key, slot) in enumerate(job.chunks):
            names = self.records(key, slot)
            if job.kind is JobKind.PROMOTE:
                (found,) = {POISON} if i in bad else {storage[name] for name in names}
                places = self.slot_places(slot)
                blocks = [POISON] * len(places) if i in bad else found.split(_SEPARATOR)
                self.host.update(zip(places, blocks, strict=True))
            else:
                storage.update(dict.fromkeys(names, POISON if i in bad else content[i]))
        self.most_stored[job.tier_id] = max(self.most_stored[job.tier_id], len(storage))

    def of_kind(self, kind: JobKind) -> list[CopyJob]:
        """The jobs in flight of one kind."""
        return [job for job, _ in self.in_flight if job.kind is kind]

    def report(self, results: list[JobResult] | None = None) -> StepReport:
        return dataclasses.replace(super().report(results), incarnation=self.incarnation)


class SharedWorker(StorageWorker):
    """Its storage is shared, so what is to be read may be gone, and what a failed write has left is not deleted.

    Attributes:
      num_found: per chunk, how often this worker has found or written it.
      num_missed: how often it was to read it and could not.
    """

    def __init__(self, worker_id: int = 0, *, num_host_chunks: int = 4, incarnation: int = 0) -> None:
        super().__init__(worker_id, num_host_chunks=num_host_chunks, incarnation=incarnation)
        self.num_found: Counter[ChunkKey] = Counter()
        self.num_missed: Counter[ChunkKey] = Counter()

    def _end(self, job: CopyJob, content: list[bytes], *, fail: bool, failed_blocks: tuple[int, ...]) -> JobResult:
        is_read = job.kind is JobKind.PROMOTE
        gone = tuple([i for i, chunk in enumerate(job.chunks) if not self._has_all(*chunk)])
        if fail or not is_read or not gone:
            result = super()._end(job, content, fail=fail, failed_blocks=failed_blocks)
            for prefix, num_found in zip(job.prefixes, result.num_found, strict=False):
                self.num_found.update(prefix[:num_found])
            self.num_found.update([key for key, _ in job.chunks if not (fail or is_read)])
            return result
        self.num_missed.update([job.chunks[i][0] for i in gone])
        self._move(job, content, set(gone), fail=True)
        return JobResult(job_id=job.job_id, state=JobState.FINISHED, missing_chunks=gone)

    def _has_all(self, key: ChunkKey, slot: int) -> bool:
        return not any(POISON in self.storage.get(name, POISON) for name in self.records(key, slot))


def num_leading(stored: Container[ChunkKey], keys: Iterable[ChunkKey]) -> int:
    """How many leading keys are stored."""
    return len(list(itertools.takewhile(stored.__contains__, keys)))


class StorageEngine(FakeEngine):
    """A host tier of four chunks, each of one block, above storage of 16, or of what `sizes` says for each tier."""

    workers: list[StorageWorker]  # type: ignore[assignment]
    worker_type: type[StorageWorker] = StorageWorker

    def __init__(
        self, *, num_workers: int = 1, num_host_chunks: int = 4, sizes: tuple[int, ...] = (16,), **settings: Any
    ) -> None:
        workers: list[FakeWorker] = [self.worker_type(i, num_host_chunks=num_host_chunks) for i in range(num_workers)]
        defaults: dict[str, Any] = {
            "storage_tier": (NAME,) * len(sizes),
            "num_storage_chunks": sizes,
            "num_cpu_chunks": num_host_chunks,
            "save_path": "direct",
            "load_path": "direct",
            "policy": LRUPolicy,
        }
        super().__init__(workers=workers, num_blocks=64, **(defaults | settings))

    def hashes(self, prompt: list[int]) -> list[BlockHash]:
        hashes: list[BlockHash] = []
        self.hasher.extend(hashes, prompt)
        return hashes

    def keys(self, prompt: list[int]) -> list[ChunkKey]:
        namespace = current_namespace(self.scheduler)
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
        """What the scheduler takes for stored in a tier is there on every worker, with the right bytes."""
        names = dict(pair for prompt in prompts for pair in zip(self.keys(prompt), self.hashes(prompt), strict=True))
        for tier in storage_planners(self.scheduler):
            for key in tier.stored_keys():
                found = [worker.storages[tier.tier_id].get(key) for worker in self.workers]
                assert found == [names[key]] * len(self.workers)


class SharedEngine(StorageEngine):
    """Storage is shared: `others_store` and `others_drop` are what other engines and the server do."""

    worker_type = SharedWorker

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for worker in self.workers:
            for tier in storage_planners(self.scheduler):
                tier.adopt(worker.worker_id, (), is_shared=True)

    def others_store(self, prompt: list[int], *numbers: int, workers: Iterable[int] | None = None) -> None:
        """Some chunks of a prompt, all without `numbers`, are in the storage of some workers, by default of all."""
        chunks = list(zip(self.keys(prompt), self.hashes(prompt), strict=True))
        for worker_id in range(len(self.workers)) if workers is None else workers:
            self.workers[worker_id].storage.update([chunks[i] for i in numbers] if numbers else chunks)

    def others_drop(self, prompt: list[int], *numbers: int) -> None:
        """Likewise, chunks that are gone."""
        keys = self.keys(prompt)
        for worker in self.workers:
            for key in [keys[i] for i in numbers] if numbers else keys:
                worker.storage.pop(key, None)


def prompt(number: int, *, num_blocks: int = 4) -> list[int]:
    """Prompts of whole blocks that share nothing."""
    return list(range(1000 * number, 1000 * number + BLOCK_SIZE * num_blocks))
