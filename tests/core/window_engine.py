"""An engine with sliding windows that share the arrays of full attention, and states, as vLLM has them.

Bytes have names: of a block the hash of its tokens and the group, of a row of states all tokens before it.
"""

import dataclasses
import hashlib
import random
from collections.abc import Callable, Iterable
from typing import Any

from tests.core.fakes import BLOCK_SIZE, LAYOUT, POISON, ROWS, Clock, FakeWorker
from tests.resets import draw_from
from tpu_offload import (
    BlockHasher,
    JobResult,
    KVLayout,
    LayerGroup,
    LayerGroupKind,
    OffloadConfig,
    OffloadScheduler,
    PageGroup,
    RequestLimits,
    ScheduledRequest,
    StepPlan,
    Update,
)
from tpu_offload.types import BlockHash

NULL = 0


@dataclasses.dataclass
class WindowRequest:
    """Tables have one entry a block; NULL where the window has passed, or where there is no state."""

    request_id: str
    tokens: list[int]
    hashes: list[BlockHash]
    tables: list[list[int]]
    num_computed: int = 0
    num_prompt: int = 0
    num_in_hbm: int = 0
    loading: bool = False
    stops: frozenset[int] = frozenset()  # token numbers that steps of a model with states end at
    retained: list[int] = dataclasses.field(default_factory=list)


def window_layout(
    windows: tuple[int, ...], layout: KVLayout = LAYOUT, *, has_states: bool = False, state_size: int = 4
) -> KVLayout:
    """A layout of one group with groups of sliding windows that share its arrays, and one of states."""
    first = layout.groups[0]
    groups = [
        LayerGroup(kind=LayerGroupKind.SLIDING_WINDOW, page_groups=first.page_groups, window=window)
        for window in windows
    ]
    if has_states:
        pages = [
            PageGroup(layer_ids=(2, 4), page_shape=(3, 8), dtype="bfloat16"),
            PageGroup(layer_ids=(3, 5), page_shape=(2, 4, state_size), dtype="float32"),
        ]
        groups.append(LayerGroup(kind=LayerGroupKind.STATE, page_groups=tuple(pages)))
    return dataclasses.replace(layout, groups=(first, *groups), null_block=NULL)


class Pool:
    """Free blocks, or rows; number 0 is NULL."""

    def __init__(self, num_blocks: int, rng: random.Random) -> None:
        self.free = list(range(1, num_blocks))
        self.given_back: set[int] = set()  # since the last plan, which may save what they hold
        self.rng = rng

    @property
    def num_cached(self) -> int:
        """Those that may be granted as if the prefix cache had kept them."""
        return len(self.free) - len(self.given_back)

    def grant(self, *, cached: bool = False) -> int:
        """A free block; one that the prefix cache in HBM has had is none that was given back just now."""
        if not cached:
            return self.free.pop()
        block = next(block for block in reversed(self.free) if block not in self.given_back)
        self.free.remove(block)
        return block

    def release(self, blocks: list[int]) -> None:
        held = [block for block in blocks if block != NULL]
        self.free += held
        self.given_back.update(held)
        self.rng.shuffle(self.free)


class WindowEngine:
    """Computes prompts in steps of any size. Frees window blocks and rows before a step, as vLLM does.

    Args:
      windows: of the window groups, in tokens.
      num_blocks: one pool for all groups of attention; block 0 is NULL.
      num_rows: rows of states; row 0 is NULL. 0 for a model without them.
    """

    def __init__(
        self,
        windows: tuple[int, ...] = (9, 5),
        *,
        num_blocks: int = 200,
        num_rows: int = 0,
        workers: list[FakeWorker] | None = None,
        seed: int = 0,
        layout: KVLayout | None = None,
        **settings: Any,
    ) -> None:
        self.layout = layout or window_layout(windows, has_states=num_rows > 0)
        self.windows = (0, *windows)
        self.state_group = len(self.windows) if num_rows else -1
        self.num_groups = len(self.windows) + bool(num_rows)
        self.clock = Clock()
        self.workers = workers or [FakeWorker(num_host_states=16)]
        staged = {"save_path": "staged", "load_path": "staged", "num_staging_blocks": 64, "num_cpu_chunks": 64}
        config = OffloadConfig.create(**(staged | settings))
        self.scheduler = OffloadScheduler(
            config,
            self.layout,
            num_workers=len(self.workers),
            clock=self.clock,
            record_events=True,
        )
        draw_from(f"{seed}", self.scheduler)
        self.hasher = BlockHasher(self.layout.fingerprint(), block_size=BLOCK_SIZE)
        self.rng = random.Random(seed)
        self.between_match_and_admit: Callable[[], None] | None = None
        self.blocks, self.rows = Pool(num_blocks, self.rng), Pool(max(1, num_rows), self.rng)
        self.num_rows = num_rows
        self.requests: dict[str, WindowRequest] = {}
        self.plans: list[StepPlan] = []
        for worker in self.workers:
            worker.hbm = dict.fromkeys([*range(num_blocks), *range(ROWS, ROWS + num_rows)], POISON)
            worker.state_group_id = self.state_group
            self.scheduler.apply(worker.report())

    # What blocks hold.

    @staticmethod
    def name(block_hash: BlockHash, group: int) -> bytes:
        return block_hash + b"/" + bytes((group,))

    @staticmethod
    def state_name(tokens: list[int]) -> bytes:
        return b"state after " + hashlib.blake2b(repr(tokens).encode(), digest_size=16).digest()

    def pool(self, group: int) -> Pool:
        return self.rows if group == self.state_group else self.blocks

    def first_visible(self, group: int, num_computed: int) -> int:
        """The first block that the next token attends to."""
        window = self.windows[group]
        return max(0, num_computed - window + 1) // BLOCK_SIZE if window else 0

    def check_bytes(self, request: WindowRequest) -> int:
        """Asserts that the next token of a request sees the KV of exactly its tokens; returns the blocks checked."""
        checked = 0
        for group, table in enumerate(request.tables):
            if group == self.state_group:
                if request.num_computed:
                    row = table[(request.num_computed - 1) // BLOCK_SIZE]
                    name = self.state_name(request.tokens[: request.num_computed])
                    for worker in self.workers:
                        assert worker.hbm[ROWS + row] == name, f"{request.request_id}: state at {request.num_computed}"
                        checked += 1
                continue
            for i in range(self.first_visible(group, request.num_computed), request.num_computed // BLOCK_SIZE):
                for worker in self.workers:
                    found = worker.hbm[table[i]]
                    assert found == self.name(request.hashes[i], group), f"{request.request_id}: {group=} block {i}"
                    checked += 1
        return checked

    # Requests.

    def add(
        self,
        request_id: str,
        tokens: list[int],
        *,
        num_in_hbm: int = 0,
        limits: RequestLimits | None = None,
        stops: Iterable[int] = (),
    ) -> WindowRequest | None:
        """Matches and admits a request whose first `num_in_hbm` tokens HBM has; None if blocks are short."""
        hashes: list[BlockHash] = []
        self.hasher.extend(hashes, tokens)
        if self.blocks.num_cached < num_in_hbm // BLOCK_SIZE * len(self.windows) or (
            self.num_rows and not self.rows.num_cached
        ):
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
        if len(self.blocks.free) < num_blocks * len(self.windows) or (
            self.num_rows and self.num_rows <= 4 * (len(self.requests) + 1)
        ):
            self.scheduler.release(request_id)
            return None
        request = WindowRequest(request_id, list(tokens), hashes, [], num_computed, len(tokens), num_in_hbm, found > 0)
        request.stops = frozenset([(len(tokens) - 1) // BLOCK_SIZE * BLOCK_SIZE, *stops])
        request.retained = sorted(stops)
        for group in range(len(self.windows)):  # what a prefix cache in HBM has
            first = self.first_visible(group, num_in_hbm)  # as a failed load needs it
            cached = [self.blocks.grant(cached=True) for _ in range(first, num_in_hbm // BLOCK_SIZE)]
            request.tables.append([NULL] * first + cached)
            for worker in self.workers:
                names = [self.name(block_hash, group) for block_hash in hashes[first:]]
                worker.hbm.update(list(zip(cached, names, strict=False)))
        for table in request.tables:
            table += [self.blocks.grant() for _ in range(len(table), num_blocks)]
        if self.num_rows:
            request.tables.append([NULL] * num_blocks)
            self.grant_states(request, num_in_hbm, num_computed)
        self.scheduler.admit(request_id, request.tables, num_loaded_tokens=found)
        self.requests[request_id] = request
        return request

    def grant_states(self, request: WindowRequest, num_in_hbm: int, num_computed: int) -> None:
        """The row that the prefix cache in HBM has, and the one that a load writes."""
        states = request.tables[-1]
        if num_in_hbm:
            states[num_in_hbm // BLOCK_SIZE - 1] = row = self.rows.grant(cached=True)
            for worker in self.workers:
                worker.hbm[ROWS + row] = self.state_name(request.tokens[:num_in_hbm])
        if num_computed > num_in_hbm:
            states[num_computed // BLOCK_SIZE - 1] = self.rows.grant()

    def held(self, request: WindowRequest) -> ScheduledRequest:
        return ScheduledRequest(
            request_id=request.request_id,
            block_tables=[list(table) for table in request.tables],
            block_hashes=list(request.hashes),
            num_prompt_tokens=request.num_prompt,
            num_computed_tokens=request.num_in_hbm if request.loading else request.num_computed,
            retained_tokens=request.retained,
        )

    def remove(self, request_id: str, *, preempt: bool = False) -> WindowRequest:
        request = self.requests.pop(request_id)
        if preempt:
            self.scheduler.preempt(request_id, held=self.held(request))
        else:
            self.scheduler.finish(request_id)
        self.release_all(request)
        return request

    def release_all(self, request: WindowRequest) -> None:
        for group, table in enumerate(request.tables):
            self.pool(group).release(table)

    def generate(self, request: WindowRequest, token: int) -> bool:
        """Adds a token to compute; False if a block is missing for it."""
        if len(request.tokens) % BLOCK_SIZE == 0:
            if len(self.blocks.free) < len(self.windows):
                return False
            for group, table in enumerate(request.tables):
                table.append(NULL if group == self.state_group else self.blocks.grant())
        request.tokens.append(token)
        self.hasher.extend(request.hashes, request.tokens)
        return True

    def step(self, computed: dict[str, int] | None = None) -> tuple[StepPlan, list[list[JobResult]]]:
        """One step that computes this many more tokens of these requests."""
        scheduled: list[ScheduledRequest] = []
        writes: list[tuple[int, bytes]] = []
        for request_id, num_tokens in (computed or {}).items():
            request = self.requests[request_id]
            assert not request.loading
            self.check_bytes(request)
            start, request.num_computed = request.num_computed, self.end_of_step(request, num_tokens)
            for group, table in enumerate(request.tables):
                if group == self.state_group:
                    writes.append(self.step_state(request, start))
                    continue
                passed = self.first_visible(group, start)
                self.blocks.release(table[:passed])
                table[:passed] = [NULL] * passed
                for i in range(start // BLOCK_SIZE, -(-request.num_computed // BLOCK_SIZE)):
                    is_full = (i + 1) * BLOCK_SIZE <= request.num_computed
                    writes.append((table[i], self.name(request.hashes[i], group) if is_full else b"not full yet"))
            if request.num_computed // BLOCK_SIZE > start // BLOCK_SIZE:
                scheduled.append(self.held(request))
        plan = self.scheduler.plan_step(scheduled)
        self.blocks.given_back.clear()
        self.rows.given_back.clear()
        self.plans.append(plan)
        results = []
        for worker in self.workers:
            results.append(worker.begin_step(plan))
            worker.hbm.update(writes)
            worker.end_step(plan)
        return plan, results

    def end_of_step(self, request: WindowRequest, num_tokens: int) -> int:
        """How many tokens are computed after a step; one of a model with states ends where a state is wanted."""
        start, end = request.num_computed, request.num_computed + num_tokens
        if self.num_rows:
            stops = [stop for stop in request.stops if start < stop < end]
            if start % BLOCK_SIZE:
                stops.append(min(end, start + -start % BLOCK_SIZE))
            end = min([end, *stops])
        return end

    def step_state(self, request: WindowRequest, start: int) -> tuple[int, bytes]:
        """The row that a step writes, and what it writes there. It frees what the step before has read."""
        table, column = request.tables[-1], (request.num_computed - 1) // BLOCK_SIZE
        passed = max(0, (start - 1) // BLOCK_SIZE)
        self.rows.release(table[:passed])
        table[:passed] = [NULL] * passed
        if table[column] == NULL:
            table[column] = self.rows.grant()
        return ROWS + table[column], self.state_name(request.tokens[: request.num_computed])

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

    def serve(
        self,
        request_id: str,
        tokens: list[int],
        *,
        at_a_time: int = 0,
        num_in_hbm: int = 0,
        stops: Iterable[int] = (),
    ) -> int:
        """Runs one request to its end; returns how many tokens were loaded."""
        request = self.add(request_id, tokens, num_in_hbm=num_in_hbm, stops=stops)
        assert request is not None
        num_loaded = request.num_computed - num_in_hbm
        self.settle()
        while request.num_computed < len(tokens):
            left = len(tokens) - request.num_computed
            self.step({request_id: min(left, at_a_time or left)})
            self.settle()
        self.remove(request_id)
        return num_loaded
