"""The engine of the rig: requests arrive, load, compute, are preempted or aborted, and finish.

It plans steps ahead of the workers' reports. A request's KV has a seed per block, so the expected contents of a block
follow from the engine's calls alone. Free blocks are overwritten.
"""

import dataclasses
import hashlib
import random
from collections import Counter, OrderedDict
from typing import final

from tests.multiprocess.messages import BLOCK_SIZE, MAX_WRITES, Setup
from tpu_offload import BlockHash, CachedPrefix, OffloadScheduler, ScheduledRequest, StepPlan, Update

NUM_DOCUMENTS = 6
_MAX_REQUESTS, _MAX_BLOCKS = 8, 7
_FIRST_FILLER_SEED = 2**62  # first seed of the KV that overwrites free blocks


@dataclasses.dataclass(eq=False)
class Request:
    """A request, and the expected contents of its blocks.

    Attributes:
      id: its name.
      hashes: hashes of its blocks.
      blocks: its blocks in HBM.
      seeds: seeds of the KV in its leading computed or loaded blocks.
      loading: its seeds once its load has finished.
      is_stale: it continued after a reset with its KV, so that other requests must not use what it computes.
    """

    id: str
    hashes: list[BlockHash]
    blocks: list[int]
    seeds: list[int]
    loading: list[int]
    is_stale: bool = False


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
        self._free = list(range(setup.num_blocks))
        self._to_overwrite: OrderedDict[int, None] = OrderedDict()  # freed blocks to overwrite
        self._cached: dict[int, tuple[list[BlockHash], int]] = {}  # freed blocks that can still be saved
        self._block_of: dict[BlockHash, int] = {}
        self._running: dict[str, Request] = {}
        self._loading: dict[str, Request] = {}
        self._swapped: dict[str, Request] = {}
        self._returning: dict[str, Request] = {}
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
        """Plans a request that loads as much of a document as possible, when there is no other request."""
        self._admit(f"audit {document}", _hashes(document, _MAX_BLOCKS))
        return self._scheduler.plan_step()

    @property
    def is_loading(self) -> bool:
        """Whether a request waits for its load."""
        return bool(self._loading)

    def expected(self) -> dict[int, int]:
        """By block, the seed of its contents after the last planned step."""
        requests = self._running.values()
        return {block: seed for r in requests for block, seed in zip(r.blocks, r.seeds, strict=False)}

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
            self._admit(f"r{self._num_arrived}", _hashes(rng.randrange(NUM_DOCUMENTS), rng.randint(1, _MAX_BLOCKS)))

    def _admit(self, request_id: str, hashes: list[BlockHash]) -> None:
        num_tokens = len(hashes) * BLOCK_SIZE + 1
        found = self._scheduler.match(request_id, hashes, num_tokens=num_tokens, num_computed_tokens=0).num_tokens
        if len(self._free) < len(hashes):
            self._scheduler.release(request_id)
            self._scheduler.finish(request_id)
            return
        if found and self._rng.random() < 0.1:
            found = 0  # an engine may take less than the promise
        request = Request(request_id, hashes, self._take_blocks(len(hashes)), [], [])
        self._scheduler.admit(request_id, [request.blocks], num_loaded_tokens=found)
        request.loading = [self._seed(h) for h in hashes[: found // BLOCK_SIZE]]
        (self._loading if found else self._running)[request_id] = request
        self.counts["requests"] += 1

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
            [request.blocks[:num_computed]],
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
        num_tokens = len(request.hashes) * BLOCK_SIZE
        held = ScheduledRequest(
            request_id=request.id,
            block_tables=[request.blocks],
            block_hashes=request.hashes,
            num_prompt_tokens=num_tokens,
            num_computed_tokens=len(request.seeds) * BLOCK_SIZE,
        )
        self._scheduler.preempt(request.id, held=None if request.is_stale else held)
        self.counts["preempted"] += 1
        self._end(self._running, request)

    def _return(self) -> None:
        for request in list(self._swapped.values()):
            swap = self._scheduler.swap
            fits = len(self._free) >= len(request.hashes) and swap.can_swap_in(request.id)
            if fits and self._rng.random() < 0.2:
                request.blocks = self._take_blocks(len(request.hashes))
                waits = swap.swap_in(request.id, [request.blocks[: swap.num_blocks(request.id)[0]]])
                (self._returning if waits else self._running)[request.id] = self._swapped.pop(request.id)

    def _compute(self) -> tuple[dict[int, int], list[ScheduledRequest]]:
        writes: dict[int, int] = {}
        changed = []
        for request in self._running.values():
            start = len(request.seeds)
            if start < len(request.hashes) and len(writes) < MAX_WRITES - 3 and self._rng.random() < 0.8:
                for i in range(start, min(start + self._rng.randint(1, 3), len(request.hashes))):
                    seed = self._filler_seed() if request.is_stale else self._seed(request.hashes[i])
                    request.seeds.append(seed)
                    writes[request.blocks[i]] = seed
                num_tokens, num_computed = len(request.hashes) * BLOCK_SIZE, len(request.seeds) * BLOCK_SIZE
                changed.append(
                    ScheduledRequest(
                        request_id=request.id,
                        block_tables=[request.blocks],
                        block_hashes=request.hashes,
                        num_prompt_tokens=num_tokens,
                        num_computed_tokens=num_computed,
                    )
                )
        return writes, changed

    def _overwrite_free_blocks(self, writes: dict[int, int]) -> None:
        while self._to_overwrite and len(writes) < MAX_WRITES:
            block_id, _ = self._to_overwrite.popitem(last=False)
            self._evict(block_id)
            writes[block_id] = self._filler_seed()

    def _reset(self) -> None:
        self._scheduler.reset()
        self._epoch += 1
        self._forget_cached()
        for request in self._running.values():
            request.is_stale = bool(request.seeds)
        self.counts["resets"] += 1

    def _loaded(self, request_id: str, num_valid_blocks: int) -> None:
        request = self._running[request_id] = self._loading.pop(request_id)
        request.seeds = request.loading[:num_valid_blocks]
        self.counts["loaded"] += 1

    def _end(self, table: dict[str, Request], request: Request, *, cached: bool = False) -> None:
        del table[request.id]
        self._scheduler.finish(request.id)
        if cached:
            for i in range(len(request.seeds)):
                self._cached[request.blocks[i]] = request.hashes, i + 1
                self._block_of[request.hashes[i]] = request.blocks[i]
        self._give_back(request)

    def _give_back(self, request: Request) -> None:
        for block_id in request.blocks:
            self._free.append(block_id)
            self._to_overwrite[block_id] = None
        request.blocks = []

    def _take_blocks(self, num_blocks: int) -> list[int]:
        blocks = [self._free.pop(self._rng.randrange(len(self._free))) for _ in range(num_blocks)]
        for block_id in blocks:
            self._to_overwrite.pop(block_id, None)
            self._evict(block_id)
        return blocks

    def _evict(self, block_id: int) -> None:
        """Evicts the contents of a free block; the scheduler may save them first."""
        hashes, num_blocks = self._cached.get(block_id, ([], 0))
        if num_blocks and self._block_of.get(hashes[num_blocks - 1]) == block_id:
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
        self._cached.pop(block_id, None)

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
