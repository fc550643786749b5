"""A worker and an engine that move names of bytes, so that a test can see which KV a block holds."""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

from tpu_offload import (
    BlockHasher,
    CachedPrefix,
    CopyJob,
    CopyPart,
    FailedLoad,
    JobResult,
    JobState,
    KVLayout,
    LayerGroup,
    LayerGroupKind,
    OffloadConfig,
    OffloadScheduler,
    RequestLimits,
    ScheduledRequest,
    StepPlan,
    StepReport,
    Update,
)
from tpu_offload.core.policies import EvictionPolicy
from tpu_offload.core.save_policy import SavePolicy
from tpu_offload.types import BlockHash, Direction, JobKind

BLOCK_SIZE = 4
LAYOUT = KVLayout(
    block_size=BLOCK_SIZE, groups=(LayerGroup.uniform(LayerGroupKind.FULL_ATTENTION, (0, 1), (4, 2, 2, 8), "bfloat16"),)
)
POISON = b"poison"
ROWS = 10**9
"""Rows of states have numbers of their own; the tables of a `FakeWorker` have them from here on."""


class Clock:
    """Seconds that pass only when a test advances them."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class FakeWorker:
    """Applies plans to dicts. `staged` saves land and staged loads are written in a later step.

    A save captures its blocks in the step of its plan, as the real worker's program order does.
    """

    def __init__(
        self, worker_id: int = 0, *, num_host_chunks: int = 64, num_host_states: int = 0, staged: bool = False
    ) -> None:
        self.worker_id = worker_id
        self.num_host_chunks = num_host_chunks
        self.num_host_states = num_host_states
        self.num_host_segments = self.division_id = 0
        self.state_group_id = -1  # without states
        self.staged = staged
        self.hbm: dict[int, bytes] = {}
        self.host: dict[int, bytes] = {}
        self.in_flight: list[tuple[CopyJob, list[bytes]]] = []
        self.lost_slots: list[tuple[int, int, int]] = []

    def blocks(self, job: CopyJob) -> list[int]:
        """Blocks in HBM, part after part; rows of states are numbered from `ROWS` on."""
        return [self._row(part) + block_id for part in job.parts for block_id in part.block_ids]

    def places(self, job: CopyJob) -> list[int]:
        """Likewise, places in the host tier; this worker has all of those of states."""
        for part in job.parts:
            if part.group_id == self.state_group_id:
                assert max(part.host_block_ids) < self.num_host_states, "a state in memory that is not there"
        return [self._row(part) + place for part in job.parts for place in part.host_block_ids]

    def _row(self, part: CopyPart) -> int:
        return ROWS if part.group_id == self.state_group_id else 0

    def begin_step(self, plan: StepPlan) -> list[JobResult]:
        results = []
        for job in plan.of(JobKind.EARLY_SAVE):
            self.in_flight.append((job, [self.hbm[b] for b in self.blocks(job)]))
        for job_id in plan.cancelled_job_ids:
            for entry in list(self.in_flight):
                if entry[0].job_id == job_id:
                    self.in_flight.remove(entry)
                    results.append(JobResult(job_id=job_id, state=JobState.CANCELLED))
        for job in plan.of(JobKind.LOAD):
            content = [self.host[i] for i in self.places(job)]
            self.in_flight.append((job, content))
            if not self.staged:
                self.hbm.update(zip(self.blocks(job), content, strict=True))
        return results

    def end_step(self, plan: StepPlan) -> None:
        for job in plan.of(JobKind.SAVE):
            self.in_flight.append((job, [self.hbm[b] for b in self.blocks(job)]))

    def finish(
        self, num_jobs: int | None = None, *, fail: bool = False, failed_blocks: tuple[int, ...] = ()
    ) -> list[JobResult]:
        """Completes the oldest jobs, all by default; those that fail copy all but `failed_blocks`, or nothing."""
        results = []
        for job, content in self.in_flight[:num_jobs]:
            is_save = job.direction is Direction.SAVE
            where, ids = (self.host, self.places(job)) if is_save else (self.hbm, self.blocks(job))
            if fail:
                where.update((ids[i], POISON) for i in failed_blocks or range(len(ids)))
            if is_save or self.staged:
                copied = [i for i in range(len(ids)) if not fail or (failed_blocks and i not in failed_blocks)]
                where.update((ids[i], content[i]) for i in copied)
            state = JobState.FAILED if fail else JobState.FINISHED
            results.append(
                JobResult(
                    job_id=job.job_id,
                    state=state,
                    error="injected" if fail else "",
                    duration_s=0.5,
                    failed_blocks=failed_blocks if fail else (),
                )
            )
        del self.in_flight[: len(results)]
        return results

    def lose(self, first: int, end: int, *, blocks_per_chunk: int) -> None:
        """Zeroes the bytes in these slots; the next report contains the loss."""
        self.host.update(dict.fromkeys(range(first * blocks_per_chunk, end * blocks_per_chunk), POISON))
        self.lost_slots.append((0, first, end))

    def lose_states(self, first: int, end: int) -> None:
        """Likewise, these rows of states."""
        self.host.update(dict.fromkeys(range(ROWS + first, ROWS + end), POISON))
        self.lost_slots.append((1, first, end))

    def report(self, results: list[JobResult] | None = None) -> StepReport:
        return StepReport(
            worker_id=self.worker_id,
            results=tuple(results or ()),
            num_host_slots=self.num_host_slots,
            num_host_segments=self.num_host_segments,
            division_id=self.division_id,
            lost_slots=self.take_lost(),
        )

    @property
    def num_host_slots(self) -> tuple[int, ...]:
        """By pool, those that it has allocated."""
        has_states = self.state_group_id >= 0
        return (self.num_host_chunks, self.num_host_states) if has_states else (self.num_host_chunks,)

    def take_lost(self) -> tuple[tuple[int, int, int], ...]:
        """The ranges that have been lost since the last call."""
        lost, self.lost_slots = tuple(self.lost_slots), []
        return lost


@dataclasses.dataclass
class FakeRequest:
    request_id: str
    tokens: list[int]
    block_ids: list[int]
    hashes: list[BlockHash]
    num_computed: int = 0
    loading: bool = False
    num_named_blocks: int = 0
    limits: RequestLimits | None = None


class FakeEngine:
    """The smallest engine: a block table a request, prefill in chunks.

    Its prefix cache is never looked up: it is there to be evicted. What a request had computed is cached when it ends,
    until the blocks are granted again.

    A step names the requests that complete a block in it, and others for which `also_names()` is true.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 32,
        workers: list[FakeWorker] | None = None,
        seed: int = 0,
        policy: Callable[[], EvictionPolicy] | None = None,
        save_policy: SavePolicy | None = None,
        record_events: bool = False,
        **settings: Any,
    ) -> None:
        staged = {"save_path": "staged", "load_path": "staged"}  # so that the staging buffer bounds what is planned
        settings = staged | {"num_staging_blocks": 8, "num_cpu_chunks": 64} | settings
        self.clock = Clock()
        self.workers = workers or [FakeWorker()]
        self.scheduler = OffloadScheduler(
            OffloadConfig.create(**settings),
            LAYOUT,
            num_workers=len(self.workers),
            policy=policy,
            save_policy=save_policy,
            clock=self.clock,
            record_events=record_events,
        )
        self.hasher = BlockHasher(LAYOUT.fingerprint(), block_size=BLOCK_SIZE)
        self.rng = random.Random(seed)
        self.also_names = lambda: False
        self.free_blocks = list(range(num_blocks))
        self.cached: dict[int, tuple[FakeRequest, int]] = {}  # by block: whose it was, and its number there
        self.requests: dict[str, FakeRequest] = {}
        for worker in self.workers:
            worker.hbm = dict.fromkeys(range(num_blocks), POISON)
            self.scheduler.apply(worker.report())

    def grow_hashes(self, request: FakeRequest) -> None:
        self.hasher.extend(request.hashes, request.tokens)

    def grant(self, num_blocks: int) -> list[int]:
        """Takes free blocks, and evicts the prefixes cached in them."""
        granted = [self.free_blocks.pop() for _ in range(num_blocks)]
        block_of = {request.hashes[i]: block_id for block_id, (request, i) in self.cached.items()}
        for block_id in granted:
            if block_id in self.cached:
                request, i = self.cached[block_id]
                limits = request.limits or RequestLimits()
                self.scheduler.evict(
                    CachedPrefix(
                        block_hashes=request.hashes,
                        num_blocks=i + 1,
                        block_of=lambda group_id, block_hash: block_of.get(block_hash),
                        num_prompt_tokens=len(request.tokens),
                        limits=limits,
                    )
                )
        for block_id in granted:
            self.cached.pop(block_id, None)
        return granted

    def held(self, request: FakeRequest) -> ScheduledRequest:
        return ScheduledRequest(
            request_id=request.request_id,
            block_tables=[request.block_ids],
            block_hashes=request.hashes,
            num_prompt_tokens=len(request.tokens),
            num_computed_tokens=request.num_computed,
        )

    def add(
        self, request_id: str, tokens: list[int], *, limits: RequestLimits | None = None, cache_salt: str = ""
    ) -> FakeRequest | None:
        """Matches and admits a request; None when the blocks are not there."""
        hashes: list[BlockHash] = []
        self.hasher.extend(hashes, tokens, cache_salt=cache_salt)
        num_loaded = self.scheduler.match(
            request_id, hashes, num_tokens=len(tokens), num_computed_tokens=0, limits=limits
        ).num_tokens
        num_blocks = -(-len(tokens) // BLOCK_SIZE)
        if num_blocks > len(self.free_blocks):
            self.scheduler.release(request_id)
            return None
        request = FakeRequest(request_id, list(tokens), self.grant(num_blocks), hashes, limits=limits)
        self.scheduler.admit(request_id, [request.block_ids], num_loaded_tokens=num_loaded)
        request.loading = num_loaded > 0
        request.num_computed = num_loaded
        self.requests[request_id] = request
        return request

    def remove(self, request_id: str, *, preempt: bool = False) -> FakeRequest:
        request = self.requests.pop(request_id)
        if preempt:
            self.scheduler.preempt(request_id, held=self.held(request))
        else:
            self.scheduler.finish(request_id)
        if not request.loading:
            self.cached |= {request.block_ids[i]: (request, i) for i in range(request.num_computed // BLOCK_SIZE)}
        self.free_blocks += request.block_ids
        self.rng.shuffle(self.free_blocks)
        return request

    def step(self, computed: dict[str, int] | None = None) -> tuple[StepPlan, list[list[JobResult]]]:
        """Runs one step that computes this many more tokens of these requests."""
        scheduled, writes = [], []
        for request_id, num_tokens in (computed or {}).items():
            request = self.requests[request_id]
            assert not request.loading
            first = request.num_computed // BLOCK_SIZE
            request.num_computed += num_tokens
            for i in range(first, request.num_computed // BLOCK_SIZE):
                writes.append((request.block_ids[i], request.hashes[i]))
        for request in self.requests.values():
            num_blocks = min(request.num_computed // BLOCK_SIZE, len(request.hashes), len(request.block_ids))
            if not request.loading and (num_blocks != request.num_named_blocks or self.also_names()):
                request.num_named_blocks = num_blocks
                scheduled.append(
                    ScheduledRequest(
                        request_id=request.request_id,
                        block_tables=[request.block_ids],
                        block_hashes=request.hashes,
                        num_prompt_tokens=len(request.tokens),
                        num_computed_tokens=request.num_computed,
                    )
                )
        plan = self.scheduler.plan_step(scheduled)
        results = []
        for worker in self.workers:
            results.append(worker.begin_step(plan))
            worker.hbm.update(writes)
            worker.end_step(plan)
        return plan, results

    def apply(self, worker: FakeWorker, results: list[JobResult]) -> Update:
        update = self.scheduler.apply(worker.report(results))
        for request_id in update.loaded:
            request = self.requests[request_id]
            request.loading = False
            self.check_bytes(request, request.num_computed)
        for failed in update.failed_loads:
            request = self.requests[failed.request_id]
            request.loading = False
            request.num_computed = failed.num_valid_tokens
        return update

    def check_bytes(self, request: FakeRequest, num_tokens: int) -> None:
        """Asserts that the request's blocks hold the KV of exactly its tokens, on every worker."""
        for worker in self.workers:
            for i in range(num_tokens // BLOCK_SIZE):
                assert worker.hbm[request.block_ids[i]] == request.hashes[i], f"{request.request_id} block {i}"

    def settle(self) -> Update:
        """Finishes all jobs, on all workers, until none is in flight."""
        loaded: list[str] = []
        failed: list[FailedLoad] = []
        num_steps = 0
        while self.scheduler.stats().num_jobs_in_flight or any(worker.in_flight for worker in self.workers):
            num_steps += 1
            assert num_steps < 1000, "a job never ends"
            _, results = self.step()
            for worker, early in zip(self.workers, results, strict=True):
                update = self.apply(worker, early + worker.finish())
                loaded += update.loaded
                failed += update.failed_loads
        return Update(loaded=tuple(loaded), failed_loads=tuple(failed))

    def serve(self, request_id: str, tokens: list[int]) -> int:
        """Runs one request to its end; returns how many tokens were loaded."""
        request = self.add(request_id, tokens)
        assert request is not None
        num_loaded = request.num_computed
        self.settle()
        self.step({request_id: len(tokens) - request.num_computed})
        self.settle()
        self.check_bytes(request, len(tokens))
        self.remove(request_id)
        return num_loaded


def tokens(num: int, *, start: int = 0) -> list[int]:
    return list(range(start, start + num))
