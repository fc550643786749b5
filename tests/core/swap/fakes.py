"""A scheduler with swap over fake memories: every block of HBM and host memory holds the name of its bytes."""

import dataclasses
import random

from tests.core.fakes import BLOCK_SIZE, LAYOUT, POISON, Clock
from tests.inside.scheduler import job_table
from tests.jobs import host_block_ids
from tpu_offload import (
    BlockHasher,
    HostStore,
    JobResult,
    JobState,
    KVLayout,
    LayerGroup,
    LayerGroupKind,
    OffloadConfig,
    OffloadScheduler,
    ScheduledRequest,
    StepPlan,
    StepReport,
    Update,
)
from tpu_offload.types import BlockHash, Direction, JobKind

FULL = LAYOUT.groups[0]
WINDOW = LayerGroup.uniform(LayerGroupKind.SLIDING_WINDOW, (2,), (4, 2, 2, 8), "bfloat16", window=8)
HYBRID = KVLayout(block_size=BLOCK_SIZE, groups=(FULL, WINDOW))
WINDOWS_ONLY = KVLayout(block_size=BLOCK_SIZE, groups=(WINDOW,))
FINISHED, FAILED = JobState.FINISHED, JobState.FAILED


class FakeSwapWorker:
    """Executes a plan at once, in the order of the real worker, and reports it when asked."""

    def __init__(self, worker_id: int = 0, *, num_blocks: tuple[int, ...], num_host_chunks: int = 0) -> None:
        self.worker_id = worker_id
        self.num_blocks = num_blocks
        self.num_host_chunks = num_host_chunks
        self.blocks_per_chunk = 1
        self.hbm: list[dict[int, object]] = [{} for _ in num_blocks]
        self.pool: list[dict[int, object]] = [{} for _ in num_blocks]
        self.tier: dict[int, object] = {}
        self.unreported: list[JobResult] = []
        self.lost: list[tuple[int, int, int]] = []
        self.lost_slots: list[tuple[int, int, int]] = []
        self.plans: list[StepPlan] = []

    def begin_step(self, plan: StepPlan, *, failing=lambda job: False) -> None:
        self.plans.append(plan)
        for job in (*plan.of(JobKind.SWAP_OUT), *plan.of(JobKind.SWAP_IN)):
            failed = failing(job)
            for part in job.parts:
                hbm = self.hbm[part.group_id]
                host = self.tier if part.store is HostStore.HOST_TIER else self.pool[part.group_id]
                for block, place in zip(part.block_ids, part.host_block_ids, strict=True):
                    if job.direction is Direction.SAVE:
                        assert part.store is HostStore.SWAP_POOL
                        host[place] = POISON if failed else hbm[block]
                    elif not failed:
                        hbm[block] = host[place]
            state = FAILED if failed else FINISHED
            self.unreported.append(
                JobResult(job_id=job.job_id, state=state, error="injected" if failed else "", duration_s=0.5)
            )
        for job in plan.of(JobKind.LOAD):
            self.hbm[0].update(zip(job.block_ids, [self.tier[i] for i in host_block_ids(job)], strict=True))
            self.unreported.append(JobResult(job_id=job.job_id, state=FINISHED))

    def end_step(self, plan: StepPlan) -> None:
        for job in plan.of(JobKind.SAVE):
            self.tier.update(zip(host_block_ids(job), [self.hbm[0][b] for b in job.block_ids], strict=True))
            self.unreported.append(JobResult(job_id=job.job_id, state=FINISHED))

    def lose(self, group_id: int, first: int, end: int) -> None:
        self.pool[group_id].update(dict.fromkeys(range(first, end), POISON))
        self.lost.append((group_id, first, end))

    def lose_slots(self, first: int, end: int) -> None:
        k = self.blocks_per_chunk
        self.tier.update(dict.fromkeys(range(first * k, end * k), POISON))
        self.lost_slots.append((0, first, end))

    def report(self, results: list[JobResult] | None = None) -> StepReport:
        """What is unreported, or these of it."""
        if results is None:
            results = self.unreported
        self.unreported = [result for result in self.unreported if result not in results]
        lost, self.lost = tuple(self.lost), []
        lost_slots, self.lost_slots = tuple(self.lost_slots), []
        return StepReport(
            worker_id=self.worker_id,
            results=tuple(results),
            num_host_slots=(self.num_host_chunks,),
            lost_slots=lost_slots,
            num_swap_blocks=self.num_blocks,
            lost_swap_blocks=lost,
        )


@dataclasses.dataclass
class Running:
    """A request in HBM: its tokens, how many are computed, its blocks."""

    name: str
    tokens: list[int]
    hashes: list[BlockHash]
    num_computed: int = 0
    block_ids: list[int] = dataclasses.field(default_factory=list)
    ring: list[int] = dataclasses.field(default_factory=list)
    contents: list[object] = dataclasses.field(default_factory=list)  # what its blocks must hold
    ring_contents: list[object] = dataclasses.field(default_factory=list)


class SwapEngine:
    """Requests that run, leave and come back; every byte that comes back is looked at."""

    def __init__(
        self, *, layout=LAYOUT, pool=(16,), num_workers=1, num_hbm=64, num_host_chunks=0, seed=0, ring=3, **settings
    ) -> None:
        if len(layout.groups) == 2 and len(pool) == 1:
            pool = (*pool, *pool)
        defaults = {"swap_gb": 1.0, "swap_mode": "swap", "num_cpu_chunks": num_host_chunks, "num_staging_blocks": 64}
        self.config = OffloadConfig.create(**(defaults | settings))
        self.layout = layout
        self.clock = Clock()
        self.rng = random.Random(seed)
        self.scheduler = OffloadScheduler(self.config, layout, num_workers=num_workers, clock=self.clock)
        self.swap = self.scheduler.swap
        self.hasher = BlockHasher(layout.fingerprint(), block_size=BLOCK_SIZE)
        self.ring_blocks = ring if len(layout.groups) == 2 else 0
        self.only_ring = ring if layout.groups[0].kind is LayerGroupKind.SLIDING_WINDOW else 0
        self.workers = [FakeSwapWorker(i, num_blocks=pool, num_host_chunks=num_host_chunks) for i in range(num_workers)]
        self.free = [list(range(num_hbm)) for _ in layout.groups]
        self.running: dict[str, Running] = {}
        self.out: dict[str, Running] = {}
        self.returning: dict[str, Running] = {}
        self.num_written = 0
        self.failing = lambda job: False
        for worker in self.workers:
            worker.blocks_per_chunk = self.config.blocks_per_chunk
            worker.hbm = [dict.fromkeys(range(num_hbm), POISON) for _ in layout.groups]
            self.scheduler.apply(worker.report())

    @property
    def has_unsent_outs(self) -> bool:
        """Whether blocks that look free are yet to be copied out by the coming step."""
        return any(job.state is JobState.PLANNED for job in job_table(self.scheduler).of(JobKind.SWAP_OUT))

    # Requests.

    def start(self, name: str, tokens: list[int], *, num_computed: int | None = None) -> Running:
        """A request with computed tokens (all but the last one) in HBM. Not offered to the tier."""
        assert not self.has_unsent_outs, "it would write into blocks that the coming step copies out"
        request = Running(name, list(tokens), [])
        self.hasher.extend(request.hashes, tokens)
        request.num_computed = len(tokens) - 1 if num_computed is None else num_computed
        num_blocks = -(-len(tokens) // BLOCK_SIZE)
        for i in range(min(num_blocks, self.only_ring or num_blocks)):
            full = (i + 1) * BLOCK_SIZE <= request.num_computed and not self.only_ring
            request.contents.append(request.hashes[i] if full else self.write(name, i))
        request.ring_contents = [self.write(name, f"ring {i}") for i in range(min(num_blocks, self.ring_blocks))]
        self._grant(request)
        for worker in self.workers:
            worker.hbm[0].update(zip(request.block_ids, request.contents, strict=True))
            if self.ring_blocks:
                worker.hbm[1].update(zip(request.ring, request.ring_contents, strict=True))
        self.running[name] = request
        return request

    def write(self, name, what) -> object:
        self.num_written += 1
        return (name, what, self.num_written)

    def scheduled(self, request: Running) -> ScheduledRequest:
        return ScheduledRequest(
            request_id=request.name,
            block_tables=[request.block_ids],
            block_hashes=request.hashes,
            num_prompt_tokens=len(request.tokens),
            num_computed_tokens=request.num_computed,
        )

    def swap_out(self, name: str) -> bool:
        request = self.running.pop(name)
        swapped = self.swap.swap_out(
            name, self._tables(request), request.hashes, num_computed_tokens=request.num_computed
        )
        self.scheduler.preempt(name)
        self._free(request)
        if swapped:
            self.out[name] = request
        return swapped

    def swap_in(self, name: str, *, present=()) -> bool:
        request = self.out.pop(name)
        self._grant(request)
        for worker in self.workers:
            for i in present:
                worker.hbm[0][request.block_ids[i]] = request.contents[i]
        waits = self.swap.swap_in(name, self._tables(request), present=present)
        if waits:
            self.returning[name] = request
        else:
            self.running[name] = request
            self.check(request)
        return waits

    def fits(self, name: str) -> bool:
        """Whether HBM has room for a request that is out."""
        needed = len(self.out[name].contents), len(self.out[name].ring_contents)
        return all(n <= len(free) for n, free in zip(needed, self.free, strict=False))

    def abort_swap_in(self, name: str) -> None:
        self.swap.abort_swap_in(name)
        request = self.returning.pop(name)
        self._free(request)
        self.out[name] = request

    def discard(self, *names: str) -> None:
        self.swap.discard(names)
        for name in names:
            for where in (self.running, self.out, self.returning):
                request = where.pop(name, None)
                if request is not None:
                    self._free(request)
                    self.scheduler.finish(name)

    # Steps.

    def step(self, changed=()) -> StepPlan:
        plan = self.scheduler.plan_step(changed)
        for worker in self.workers:
            worker.begin_step(plan, failing=self.failing)
            # New owners of free blocks write them in this very step.
            for g, free in enumerate(self.free):
                worker.hbm[g].update(dict.fromkeys(free, POISON))
            worker.end_step(plan)
        self.scheduler.check_invariants()
        return plan

    def report(self, worker: FakeSwapWorker, results: list[JobResult] | None = None) -> Update:
        update = self.scheduler.apply(worker.report(results))
        self.scheduler.check_invariants()
        for name in update.swapped_in:
            request = self.returning.pop(name)
            self.running[name] = request
            self.check(request)
        for name in update.lost_swaps:
            request = self.out.pop(name) if name in self.out else self.returning.pop(name)
            self._free(request)
        return update

    def settle(self) -> list[Update]:
        """Steps and reports until nothing is in flight."""
        updates = []
        for _ in range(100):
            self.step()
            updates += [self.report(worker) for worker in self.workers]
            if not self.scheduler.stats().num_jobs_in_flight:
                return updates
        raise AssertionError("a job never ends")

    def check(self, request: Running) -> None:
        """Its blocks hold what they held when it left, on every worker."""
        num_blocks = -(-request.num_computed // BLOCK_SIZE) if not self.only_ring else len(request.contents)
        for worker in self.workers:
            found = [worker.hbm[0][b] for b in request.block_ids[:num_blocks]]
            assert found == request.contents[:num_blocks], request.name
            if self.ring_blocks:
                assert [worker.hbm[1][b] for b in request.ring] == request.ring_contents, request.name

    def check_empty(self) -> None:
        """Nothing is held any more."""
        stats = self.scheduler.stats()
        assert (stats.swap_held_blocks, stats.num_swapped_requests, stats.num_jobs_in_flight) == (0, 0, 0)
        assert self.swap.pins() == {}
        self.scheduler.check_invariants()

    def _tables(self, request: Running) -> list[list[int]]:
        return [request.block_ids, request.ring] if self.ring_blocks else [request.block_ids]

    def _grant(self, request: Running) -> None:
        assert not request.block_ids
        for g, num_blocks in enumerate((len(request.contents), len(request.ring_contents))[: len(self.free)]):
            self.rng.shuffle(self.free[g])
            blocks = [self.free[g].pop() for _ in range(num_blocks)]
            if g:
                request.ring = blocks
            else:
                request.block_ids = blocks

    def _free(self, request: Running) -> None:
        self.free[0] += request.block_ids
        request.block_ids = []
        if self.ring_blocks:
            self.free[1] += request.ring
            request.ring = []
