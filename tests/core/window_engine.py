"""An engine with sliding-window groups that share the arrays of the full one, as vLLM has them, and names for bytes."""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

from tests.core.fakes import BLOCK_SIZE, LAYOUT, POISON, Clock, FakeWorker
from tpu_offload import (
    BlockHasher,
    JobResult,
    KVLayout,
    LayerGroup,
    LayerGroupKind,
    OffloadConfig,
    OffloadScheduler,
    RequestLimits,
    ScheduledRequest,
    StepPlan,
    Update,
)
from tpu_offload.types import BlockHash

NULL = 0


@dataclasses.dataclass
class WindowRequest:
    """Tables have one entry a block; NULL where the window has passed."""

    request_id: str
    tokens: list[int]
    hashes: list[BlockHash]
    tables: list[list[int]]
    num_computed: int = 0
    num_prompt: int = 0
    num_in_hbm: int = 0
    loading: bool = False


def window_layout(windows: tuple[int, ...], layout: KVLayout = LAYOUT) -> KVLayout:
    """A layout of one group with groups of sliding windows that share its arrays."""
    pages = layout.groups[0].page_groups
    groups = [LayerGroup(LayerGroupKind.SLIDING_WINDOW, pages, window) for window in windows]
    return dataclasses.replace(layout, groups=(*layout.groups, *groups), null_block=NULL)


class WindowEngine:
    """Computes prompts in steps of any size. Frees window blocks before a step, as vLLM does.

    Args:
      windows: of the window groups, in tokens.
      num_blocks: one pool for all groups; block 0 is NULL.
    """

    def __init__(
        self,
        windows: tuple[int, ...] = (9, 5),
        *,
        num_blocks: int = 200,
        workers: list[FakeWorker] | None = None,
        seed: int = 0,
        layout: KVLayout | None = None,
        **settings: Any,
    ) -> None:
        self.layout = layout or window_layout(windows)
        self.windows = (0, *windows)
        self.clock = Clock()
        self.workers = workers or [FakeWorker()]
        staged = {"save_path": "staged", "load_path": "staged", "num_staging_blocks": 64, "num_cpu_chunks": 64}
        self.scheduler = OffloadScheduler(
            OffloadConfig.create(**(staged | settings)),
            self.layout,
            num_workers=len(self.workers),
            clock=self.clock,
            record_events=True,
        )
        self.hasher = BlockHasher(self.layout.fingerprint(), block_size=BLOCK_SIZE)
        self.rng = random.Random(seed)
        self.between_match_and_admit: Callable[[], None] | None = None
        self.free_blocks = list(range(1, num_blocks))
        self.given_back: set[int] = set()  # since the last plan, which may save what they hold
        self.requests: dict[str, WindowRequest] = {}
        self.plans: list[StepPlan] = []
        for worker in self.workers:
            worker.hbm = dict.fromkeys(range(num_blocks), POISON)
            self.scheduler.apply(worker.report())

    # What blocks hold.

    @staticmethod
    def name(block_hash: BlockHash, group: int) -> bytes:
        return block_hash + b"/" + bytes((group,))

    def first_visible(self, group: int, num_computed: int) -> int:
        """The first block that the next token attends to."""
        window = self.windows[group]
        return max(0, num_computed - window + 1) // BLOCK_SIZE if window else 0

    def check_bytes(self, request: WindowRequest) -> int:
        """Asserts that the next token of a request sees the KV of exactly its tokens; returns the blocks checked."""
        checked = 0
        for group, table in enumerate(request.tables):
            for i in range(self.first_visible(group, request.num_computed), request.num_computed // BLOCK_SIZE):
                for worker in self.workers:
                    found = worker.hbm[table[i]]
                    assert found == self.name(request.hashes[i], group), f"{request.request_id}: {group=} block {i}"
                    checked += 1
        return checked

    # Requests.

    def grant(self, *, cached: bool = False) -> int:
        """A free block; one that the prefix cache in HBM has had is none that was given back just now."""
        if not cached:
            return self.free_blocks.pop()
        block = next(block for block in reversed(self.free_blocks) if block not in self.given_back)
        self.free_blocks.remove(block)
        return block

    def release(self, blocks: list[int]) -> None:
        held = [block for block in blocks if block != NULL]
        self.free_blocks += held
        self.given_back.update(held)
        self.rng.shuffle(self.free_blocks)

    def add(
        self, request_id: str, tokens: list[int], *, num_in_hbm: int = 0, limits: RequestLimits | None = None
    ) -> WindowRequest | None:
        """Matches and admits a request whose first `num_in_hbm` tokens HBM has; None if blocks are short."""
        hashes: list[BlockHash] = []
        self.hasher.extend(hashes, tokens)
        if len(self.free_blocks) - len(self.given_back) < num_in_hbm // BLOCK_SIZE * len(self.windows):
            num_in_hbm = 0
        found = self.scheduler.match(
            request_id, hashes, num_tokens=len(tokens), num_computed_tokens=num_in_hbm, limits=limits
        ).num_tokens
        if self.between_match_and_admit is not None:
            self.between_match_and_admit()
        num_computed = num_in_hbm + found
        assert num_computed < len(tokens)
        assert not found or num_computed % BLOCK_SIZE == 0
        num_blocks = -(-len(tokens) // BLOCK_SIZE)
        if len(self.free_blocks) < num_blocks * len(self.windows):
            self.scheduler.release(request_id)
            return None
        request = WindowRequest(request_id, list(tokens), hashes, [], num_computed, len(tokens), num_in_hbm, found > 0)
        for group in range(len(self.windows)):  # what a prefix cache in HBM has
            first = self.first_visible(group, num_in_hbm)  # as a failed load needs it
            cached = [self.grant(cached=True) for _ in range(first, num_in_hbm // BLOCK_SIZE)]
            request.tables.append([NULL] * first + cached)
            for worker in self.workers:
                names = [self.name(block_hash, group) for block_hash in hashes[first:]]
                worker.hbm.update(list(zip(cached, names, strict=False)))
        for table in request.tables:
            table += [self.grant() for _ in range(len(table), num_blocks)]
        self.scheduler.admit(request_id, request.tables, num_loaded_tokens=found)
        self.requests[request_id] = request
        return request

    def held(self, request: WindowRequest) -> ScheduledRequest:
        return ScheduledRequest(
            request_id=request.request_id,
            block_tables=[list(table) for table in request.tables],
            block_hashes=list(request.hashes),
            num_prompt_tokens=request.num_prompt,
            num_computed_tokens=request.num_in_hbm if request.loading else request.num_computed,
        )

    def remove(self, request_id: str, *, preempt: bool = False) -> WindowRequest:
        request = self.requests.pop(request_id)
        if preempt:
            self.scheduler.preempt(request_id, held=self.held(request))
        else:
            self.scheduler.finish(request_id)
        self.release([block for table in request.tables for block in table])
        return request

    def generate(self, request: WindowRequest, token: int) -> bool:
        """Adds a token to compute; False if a block is missing for it."""
        if len(request.tokens) % BLOCK_SIZE == 0:
            if len(self.free_blocks) < len(self.windows):
                return False
            for table in request.tables:
                table.append(self.grant())
        request.tokens.append(token)
        self.hasher.extend(request.hashes, request.tokens)
        return True

    def step(self, computed: dict[str, int] | None = None) -> tuple[StepPlan, list[list[JobResult]]]:
        """One step that computes this many more tokens of these requests."""
        scheduled, writes = [], []
        for request_id, num_tokens in (computed or {}).items():
            request = self.requests[request_id]
            assert not request.loading
            self.check_bytes(request)
            start, request.num_computed = request.num_computed, request.num_computed + num_tokens
            for group, table in enumerate(request.tables):
                passed = self.first_visible(group, start)
                self.release(table[:passed])
                table[:passed] = [NULL] * passed
                for i in range(start // BLOCK_SIZE, -(-request.num_computed // BLOCK_SIZE)):
                    is_full = (i + 1) * BLOCK_SIZE <= request.num_computed
                    writes.append((table[i], self.name(request.hashes[i], group) if is_full else b"not full yet"))
            if request.num_computed // BLOCK_SIZE > start // BLOCK_SIZE:
                scheduled.append(self.held(request))
        plan = self.scheduler.plan_step(scheduled)
        self.given_back.clear()
        self.plans.append(plan)
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
            assert self.check_bytes(request)
        for failed in update.failed_loads:
            request = self.requests[failed.request_id]
            request.loading = False
            request.num_computed = failed.num_valid_tokens
        return update

    def settle(self) -> None:
        """Finishes all jobs, on all workers, until none is in flight."""
        num_steps = 0
        while self.scheduler.stats().num_jobs_in_flight or any(worker.in_flight for worker in self.workers):
            num_steps += 1
            assert num_steps < 1000, "a job never ends"
            _, results = self.step()
            for worker, early in zip(self.workers, results, strict=True):
                self.apply(worker, early + worker.finish())
        self.scheduler.check_invariants()

    def serve(self, request_id: str, tokens: list[int], *, at_a_time: int = 0, num_in_hbm: int = 0) -> int:
        """Runs one request to its end; returns how many tokens were loaded."""
        request = self.add(request_id, tokens, num_in_hbm=num_in_hbm)
        assert request is not None
        num_loaded = request.num_computed - num_in_hbm
        self.settle()
        while request.num_computed < len(tokens):
            left = len(tokens) - request.num_computed
            self.step({request_id: min(left, at_a_time or left)})
            self.settle()
        self.remove(request_id)
        return num_loaded
