"""The engine of the rig: requests arrive, load, compute, are preempted or aborted, and finish.

It plans steps ahead of the workers' reports. A request's KV has a seed per block, so the expected contents of a block
follow from the engine's calls alone. Free blocks are overwritten.

Groups with a window have block tables of their own and give back the blocks that the window has passed. A state is in
one row, after the last block that a step has computed, and the next step writes into another one. Blocks and rows are
places; rows are numbered from `ROWS` on.
"""

import dataclasses
import hashlib
import random
from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import final

from tests.multiprocess.messages import BLOCK_SIZE, MAX_ROW_WRITES, MAX_WRITES, NULL_BLOCK, ROWS, Setup
from tpu_offload import BlockHash, CachedPrefix, MatchState, OffloadScheduler, ScheduledRequest, StepPlan, Update

NUM_DOCUMENTS = 6
_MAX_REQUESTS, _MAX_BLOCKS = 8, 7
_FIRST_FILLER_SEED = 2**62  # first seed of the KV that overwrites free blocks


@dataclasses.dataclass(eq=False)
class Request:
    """A request, and the expected contents of its blocks.

    Attributes:
      id: its name.
      hashes: hashes of its blocks.
      tables: per layer group, its blocks in HBM, or rows; NULL_BLOCK where it has none.
      seeds: seeds of the KV in its leading computed or loaded blocks, in the first group.
      loading: its seeds once its load has finished.
      is_stale: it continued after a reset with its KV, so that other requests must not use what it computes.
    """

    id: str
    hashes: list[BlockHash]
    tables: list[list[int]]
    seeds: list[int]
    loading: list[int]
    is_stale: bool = False


@final
class _Pool:
    """Free blocks, or rows.

    Args:
      num: their number.
      first_place: place of number 0.
      rng: chooses which one is granted.
      has_null: whether number 0 is NULL_BLOCK.
    """

    def __init__(self, num: int, first_place: int, rng: random.Random, *, has_null: bool) -> None:
        self.free = list(range(1 if has_null else 0, num))
        self.first_place = first_place
        self.to_overwrite: OrderedDict[int, None] = OrderedDict()  # freed ones
        self._rng = rng

    def take(self) -> int:
        number = self.free.pop(self._rng.randrange(len(self.free)))
        self.to_overwrite.pop(number, None)
        return number

    def give_back(self, number: int) -> None:
        self.free.append(number)
        self.to_overwrite[number] = None


@final
class Engine:
    """The engine: requests and blocks. A request is in the table of its state.

    Args:
      setup: the setup of the run.
      scheduler: the real scheduler.
    """

    def __init__(self, setup: Setup, scheduler: OffloadScheduler) -> None:
        self.counts: Counter[str] = Counter()
        self._setup = setup
        self._scheduler = scheduler
        self._rng = random.Random(f"{setup.seed} engine")
        self._windows = 0, *setup.windows  # per layer group with attention
        self._state_group = len(self._windows) if setup.num_rows else -1
        self._num_groups = len(self._windows) + bool(setup.num_rows)
        self._blocks = _Pool(setup.num_blocks, 0, self._rng, has_null=self._num_groups > 1)
        self._rows = _Pool(setup.num_rows, ROWS, self._rng, has_null=True)
        self._cached: dict[int, tuple[list[BlockHash], int]] = {}  # freed blocks that can still be saved
        self._block_of: dict[BlockHash, int] = {}
        self._running: dict[str, Request] = {}
        self._loading: dict[str, Request] = {}
        self._swapped: dict[str, Request] = {}
        self._returning: dict[str, Request] = {}
        self._has_storage = bool(setup.settings.get("storage_tier"))
        self.is_arriving = False  # the request of the last `plan_audit`
        self._epoch = 0
        self._num_arrived = 0
        self._num_fillers = 0

    def plan(self) -> tuple[StepPlan, dict[int, int]]:
        """Plans a step; returns the plan, and the seed of the KV written into each block."""
        if self._rng.random() < self._setup.reset:
            self._reset()
        for _ in range(2):
            self._arrive()
        self._leave()
        self._return()
        writes, changed = self._compute()
        self._overwrite_free_blocks(writes)
        plan = self._scheduler.plan_step(changed)
        self.take(self._scheduler.take_update())
        return plan, writes

    def plan_end(self) -> StepPlan:
        """Ends all requests; returns the plan after that."""
        for table in (self._running, self._loading, self._swapped, self._returning):
            for request in list(table.values()):
                self._end(table, request)
        return self._scheduler.plan_step()

    def plan_audit(self, document: int) -> StepPlan:
        """Plans a request that loads as much of a document as possible, when there is no other request.

        Again as long as it `is_arriving`.
        """
        self.is_arriving = not self._admit(f"audit {document}", _hashes(document, _MAX_BLOCKS), patience=1.0)
        return self._scheduler.plan_step()

    @property
    def is_loading(self) -> bool:
        """Whether a request waits for its load."""
        return bool(self._loading)

    def expected(self) -> dict[int, int]:
        """By place, the seed of its contents after the last planned step."""
        return {
            self._place(group, request.tables[group][p]): self._seed_of(request, group, p)
            for request in self._running.values()
            for group in range(self._num_groups)
            for p in self._needed(group, len(request.seeds))
        }

    def take(self, update: Update) -> None:
        """Processes an update."""
        for request_id in update.loaded:
            if request_id in self._loading:
                self._loaded(request_id, _MAX_BLOCKS)
        for failed in update.failed_loads:
            if failed.request_id in self._loading:
                self._loaded(failed.request_id, failed.num_valid_tokens // BLOCK_SIZE)
                self.counts["failed loads"] += 1
        for request_id in update.swapped_in:
            if request_id in self._returning:
                self._running[request_id] = self._returning.pop(request_id)
                self.counts["swapped in"] += 1
        for request_id in update.lost_swaps:
            for table in (self._returning, self._swapped):
                if request_id in table:
                    self._end(table, table[request_id])
                    self.counts["lost swaps"] += 1

    def lose_caches(self) -> None:
        """A worker has lost its caches: preempts all requests with blocks, which restart as new requests."""
        self._forget_cached()
        for table in (self._running, self._loading, self._returning):
            for request in list(table.values()):
                self._scheduler.preempt(request.id)
                self._end(table, request)

    # Internals.

    def _arrive(self) -> None:
        rng = self._rng
        if len(self._running) + len(self._loading) < _MAX_REQUESTS and rng.random() < 0.7:
            self._num_arrived += 1
            request_id = f"r{self._num_arrived}"
            hashes = _hashes(rng.randrange(NUM_DOCUMENTS), rng.randint(1, _MAX_BLOCKS))
            if not self._admit(request_id, hashes, patience=0.8 if self._has_storage else 0.0):
                self._scheduler.finish(request_id)  # a later one may find what arrives

    def _admit(self, request_id: str, hashes: list[BlockHash], *, patience: float) -> bool:
        """Admits a request if there is room.

        Returns:
          False if it waits for what is on its way from storage, which it does with a probability of `patience`.
        """
        num_tokens = len(hashes) * BLOCK_SIZE + 1
        match = self._scheduler.match(request_id, hashes, num_tokens=num_tokens, num_computed_tokens=0)
        if match.state is MatchState.ARRIVING and self._rng.random() < patience:
            self.counts["arriving"] += 1
            return False
        found = match.num_tokens
        if not self._has_room(len(hashes)):
            self._scheduler.release(request_id)
            self._scheduler.finish(request_id)
            return True
        if found and self._rng.random() < 0.1:
            found = 0  # an engine may take less than the promise
        num_found = found // BLOCK_SIZE
        request = Request(request_id, hashes, self._grant(num_found, len(hashes)), [], [])
        self._scheduler.admit(request_id, request.tables, num_loaded_tokens=found)
        request.loading = [self._seed(h) for h in hashes[:num_found]]
        (self._loading if found else self._running)[request_id] = request
        self.counts["requests"] += 1
        return True

    def _leave(self) -> None:
        rng = self._rng
        for request in list(self._loading.values()):
            if rng.random() < 0.06:
                self.counts["aborted loads"] += 1
                self._end(self._loading, request)
        for request in list(self._running.values()):
            if rng.random() > 0.14:
                continue
            if rng.random() < 0.5:
                self._swap_out(request)
            elif rng.random() < 0.5:
                self._preempt(request)
            else:
                self._end(self._running, request, cached=not request.is_stale)

    def _swap_out(self, request: Request) -> None:
        num_computed = len(request.seeds)
        taken = self._scheduler.swap.swap_out(
            request.id,
            self._in_use(request),
            request.hashes[:num_computed],
            num_computed_tokens=num_computed * BLOCK_SIZE,
        )
        self._scheduler.preempt(request.id)
        if taken:
            self._give_back(self._running.pop(request.id))
            self._swapped[request.id] = request
            self.counts["swapped out"] += 1
        else:
            self._end(self._running, request)

    def _preempt(self, request: Request) -> None:
        self._scheduler.preempt(request.id, held=None if request.is_stale else self._scheduled(request))
        self.counts["preempted"] += 1
        self._end(self._running, request)

    def _return(self) -> None:
        for request in list(self._swapped.values()):
            swap = self._scheduler.swap
            fits = self._has_room(len(request.hashes)) and swap.can_swap_in(request.id)
            if fits and self._rng.random() < 0.2:
                request.tables = self._grant(len(request.seeds), len(request.hashes))
                waits = swap.swap_in(request.id, self._in_use(request))
                (self._returning if waits else self._running)[request.id] = self._swapped.pop(request.id)

    def _compute(self) -> tuple[dict[int, int], list[ScheduledRequest]]:
        writes: dict[int, int] = {}
        changed = []
        num_places = len(self._windows)
        for request in self._running.values():
            start = len(request.seeds)
            num_writes = sum(place < ROWS for place in writes)
            fits = num_writes < (MAX_WRITES - 3) * num_places and (self._state_group < 0 or self._rows.free)
            if start < len(request.hashes) and fits and self._rng.random() < 0.8:
                end = min(start + self._rng.randint(1, 3), len(request.hashes))
                self._give_back_passed(request, start)
                for i in range(start, end):
                    request.seeds.append(self._filler_seed() if request.is_stale else self._seed(request.hashes[i]))
                for group in range(num_places):
                    for p in range(start, end):
                        writes[request.tables[group][p]] = self._seed_of(request, group, p)
                if self._state_group >= 0:
                    row = request.tables[-1][end - 1] = self._take(self._rows)
                    writes[ROWS + row] = self._seed_of(request, self._state_group, end - 1)
                changed.append(self._scheduled(request))
        return writes, changed

    def _scheduled(self, request: Request) -> ScheduledRequest:
        num_computed = len(request.seeds) * BLOCK_SIZE
        return ScheduledRequest(
            request_id=request.id,
            block_tables=request.tables,
            block_hashes=request.hashes,
            num_prompt_tokens=len(request.hashes) * BLOCK_SIZE,
            num_computed_tokens=num_computed,
            retained_tokens=(num_computed,) if self._num_groups > 1 and num_computed else (),
        )

    def _overwrite_free_blocks(self, writes: dict[int, int]) -> None:
        for pool, most in (self._blocks, MAX_WRITES * len(self._windows)), (self._rows, MAX_ROW_WRITES):
            room = most - sum((place >= ROWS) == (pool is self._rows) for place in writes)
            for _ in range(min(room, len(pool.to_overwrite))):
                number, _ = pool.to_overwrite.popitem(last=False)
                self._evict(pool.first_place + number)
                writes[pool.first_place + number] = self._filler_seed()

    # Layer groups.

    def _needed(self, group: int, num_computed: int) -> range:
        """Positions of the blocks that tokens after so many blocks depend on."""
        if group == self._state_group:
            return range(max(0, num_computed - 1), num_computed)
        window = self._windows[group]
        first = max(0, num_computed * BLOCK_SIZE - window + 1) // BLOCK_SIZE if window else 0
        return range(first, num_computed)

    def _in_use(self, request: Request) -> list[list[int]]:
        """Per layer group, the blocks that the next token depends on."""
        return [
            [table[p] for p in self._needed(group, len(request.seeds))] for group, table in enumerate(request.tables)
        ]

    def _has_room(self, num_blocks: int) -> bool:
        # Each request may need a row in every step.
        needs_row = self._state_group >= 0 and len(self._rows.free) <= 2 * _MAX_REQUESTS
        return len(self._blocks.free) >= num_blocks * len(self._windows) and not needs_row

    def _grant(self, num_computed: int, num_blocks: int) -> list[list[int]]:
        """Tables of a request whose first blocks are loaded or swapped in."""
        tables = []
        for group in range(len(self._windows)):
            first = self._needed(group, num_computed).start
            tables.append([NULL_BLOCK] * first + [self._take(self._blocks) for _ in range(first, num_blocks)])
        if self._state_group >= 0:
            tables.append([NULL_BLOCK] * num_blocks)
            for p in self._needed(self._state_group, num_computed):
                tables[-1][p] = self._take(self._rows)
        return tables

    def _give_back_passed(self, request: Request, start: int) -> None:
        """Gives back what no step from block `start` on depends on."""
        for group, table in enumerate(request.tables):
            if group:
                self._give_back_at(request, group, range(min(len(table), self._needed(group, start).start)))

    def _give_back_at(self, request: Request, group: int, positions: Iterable[int]) -> None:
        pool, table = self._rows if group == self._state_group else self._blocks, request.tables[group]
        for p in positions:
            if table[p] != NULL_BLOCK or self._num_groups == 1:
                pool.give_back(table[p])
                table[p] = NULL_BLOCK

    def _place(self, group: int, number: int) -> int:
        return ROWS + number if group == self._state_group else number

    def _seed_of(self, request: Request, group: int, position: int) -> int:
        """The seed of the contents of a block, or of the state after it."""
        return request.seeds[position] + (group << 64)

    def _reset(self) -> None:
        self._scheduler.reset()
        self._epoch += 1
        self._forget_cached()
        for request in self._running.values():
            request.is_stale = bool(request.seeds)
        self.counts["resets"] += 1

    def _loaded(self, request_id: str, num_valid_blocks: int) -> None:
        request = self._loading[request_id]
        if num_valid_blocks < len(request.loading) and self._num_groups > 1 and not self._restart(request):
            return
        self._running[request_id] = self._loading.pop(request_id)
        request.seeds = request.loading[:num_valid_blocks]
        self.counts["loaded"] += 1

    def _restart(self, request: Request) -> bool:
        """Begins a request anew whose load has failed: it needs the blocks that the windows had passed.

        Returns:
          Whether it has them; if not, it has ended.
        """
        self._scheduler.preempt(request.id)
        self._give_back(request)
        if not self._has_room(len(request.hashes)):
            self._end(self._loading, request)
            return False
        request.tables = self._grant(0, len(request.hashes))
        self._scheduler.admit(request.id, request.tables, num_loaded_tokens=0)
        return True

    def _end(self, table: dict[str, Request], request: Request, *, cached: bool = False) -> None:
        del table[request.id]
        self._scheduler.finish(request.id)
        if cached and self._num_groups == 1:  # with several, HBM's evictions are not saved
            for p in range(len(request.seeds)):
                self._cached[request.tables[0][p]] = request.hashes, p + 1
                self._block_of[request.hashes[p]] = request.tables[0][p]
        self._give_back(request)

    def _give_back(self, request: Request) -> None:
        for group, table in enumerate(request.tables):
            self._give_back_at(request, group, range(len(table)))
        request.tables = []

    def _take(self, pool: _Pool) -> int:
        number = pool.take()
        self._evict(pool.first_place + number)
        return number

    def _evict(self, place: int) -> None:
        """Evicts the contents of a free block or row; the scheduler may save them first."""
        hashes, num_blocks = self._cached.pop(place, ([], 0))
        if num_blocks and self._block_of.get(hashes[num_blocks - 1]) == place:
            self._scheduler.evict(
                CachedPrefix(
                    block_hashes=hashes,
                    num_blocks=num_blocks,
                    block_of=lambda group_id, block_hash: self._block_of.get(block_hash),
                    num_prompt_tokens=num_blocks * BLOCK_SIZE,
                )
            )
            del self._block_of[hashes[num_blocks - 1]]
            self.counts["evicted"] += 1

    def _forget_cached(self) -> None:
        self._cached.clear()
        self._block_of.clear()

    def _seed(self, block_hash: BlockHash) -> int:
        """The seed of a block's KV, which depends on the prefix and the weights."""
        return int.from_bytes(hashlib.blake2b(block_hash + b"%d" % self._epoch, digest_size=7).digest())

    def _filler_seed(self) -> int:
        self._num_fillers += 1
        return _FIRST_FILLER_SEED + self._num_fillers


def _hashes(document: int, num_blocks: int) -> list[BlockHash]:
    """Hashes of the leading blocks of a document."""
    hashes, last = [], b"document %d" % document
    for i in range(num_blocks):
        last = hashlib.blake2b(last + b"%d" % i, digest_size=16).digest()
        hashes.append(BlockHash(last))
    return hashes
