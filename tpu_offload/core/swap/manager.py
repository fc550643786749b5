"""Request swap: what of a preempted request is where, from its swap-out until it is back or gone.

    victims = choose_victims(...)              when too few blocks are free for all to go on
    swapped = swap.swap_out(victim, ...)       False: recompute it, with the tokens it has generated as prompt
    plan = scheduler.plan_step(...)            carries the copies; the victim's blocks are others' from this step on
    swap.swap_in(victim, block_tables, ...)     in a later step, into blocks that the engine has granted
    update = scheduler.apply(report)           update.swapped_in: goes on; update.lost_swaps: recompute

A copy out is dispatched before the forward pass of its step and reads the blocks in program order before
anything that this step or a later one writes, so they may be granted to others in the same step. A copy
back is dispatched before the forward pass as well; what the blocks' later owners write comes after it in
program order, so they may be taken away again at any time; and it comes after the copies out, so that a request
may return before those are reported. It is back when all of them are. Therefore no swap is ever cancelled, for a
report wait only the request itself and those that share its blocks, and no staging blocks are taken: copies in
program order need two blocks of HBM, whatever their number.

Of each block there is one copy. What the host tier has is pinned there instead, until the request is back,
and full blocks that another swapped-out request shares are in the pool once.
"""

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import final

from tpu_offload import hashing
from tpu_offload.core.context import TierContext
from tpu_offload.core.jobs import Job, host_blocks
from tpu_offload.core.swap.costs import SwapCosts
from tpu_offload.core.swap.records import PlannedSwaps, Swapped, Where
from tpu_offload.core.tables import read_hashes, read_ids, read_tables
from tpu_offload.core.validate import check_request, read_numbers, read_request_ids
from tpu_offload.errors import RequestError
from tpu_offload.layout import LayerGroupKind
from tpu_offload.metrics import GAUGES, SWAP_FIELDS, OffloadStats
from tpu_offload.types import BlockHash, ChunkKey, CopyPart, Direction, HostStore, JobKind, JobState
from tpu_offload.values import as_integer, one_line

_THRASH_STEPS = 32
_MAX_TOKENS = 2**63 - 1


@final
class RequestSwap:
    """The swapped-out requests of one engine. All calls come from the thread of the engine's scheduler.

    Made by the `OffloadScheduler`, which sends its copies with the plan and hands it their results.

    Args:
      context: the books; with `swap_gb` 0 every request is recomputed.
    """

    def __init__(self, context: TierContext) -> None:
        self._config = context.config
        self._layout = context.layout
        self._index = context.index
        # Whether blocks of the first group stay what they are once they are full, so that a hash can name them.
        self._has_prefix = self._layout.groups[0].kind is LayerGroupKind.FULL_ATTENTION
        self._keys = context.keys
        self._requests = context.requests
        self._pool = context.swap_pool
        self._jobs = PlannedSwaps(context)
        context.jobs.on_end(JobKind.SWAP_OUT, JobKind.SWAP_IN, call=self.ended)
        self._breakers = context.swap_breakers
        self._costs = SwapCosts(self._config.swap_mode)
        self._swapped: dict[str, Swapped] = {}
        self._swapped_in: list[str] = []
        self._lost: list[str] = []
        self._returned_at: dict[str, int] = {}  # step of the last return, of the last steps
        self._num_steps = 0
        self._counts = OffloadStats()

    # Engine events.

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """Tells how fast prompts are computed, for the choice between swap and recompute.

        Args:
          num_tokens: tokens of prompts that one step computed; steps that compute little else count best.
          seconds: what the step took.
        Raises:
          RequestError: these are no numbers.
        """
        count = as_integer(num_tokens)
        try:
            took_s = float(seconds)
        except Exception:  # the object is not ours
            took_s = None
        if count is None or took_s is None:
            raise RequestError(
                f"a step computed {one_line(num_tokens)} tokens in {one_line(seconds)} seconds; expected numbers"
            )
        self._costs.observe_prefill(min(count, _MAX_TOKENS), took_s)

    def swap_out(
        self,
        request_id: str,
        block_tables: Sequence[Sequence[int]],
        block_hashes: Sequence[BlockHash] = (),
        *,
        num_computed_tokens: int,
    ) -> bool:
        """Takes a running request's KV out of HBM, all of it or nothing.

        The engine calls `OffloadScheduler.preempt` after it, whatever the answer, and may grant the blocks to others in
        the very step that is planned next. A token in flight need not be waited for: its KV is not computed.

        Args:
          request_id: a request that is not swapped out.
          block_tables: per layer group, its blocks. Of full attention in token order, at least those that hold computed
            tokens; of a sliding window those that hold anything, in any order that the engine wants back.
          block_hashes: hashes of its full blocks of the first group, as far as they are known. Blocks of equal hashes
            are kept once, as in a prefix cache; an engine in which the bits of a block depend on what else was
            computed in its step, and which minds, gives none.
          num_computed_tokens: leading tokens whose KV the steps dispatched so far compute.
        Returns:
          True if it is swapped out. False if it has to be recomputed: swapping is off or suspended, there is no room,
          nothing is computed, or recompute is faster.
        Raises:
          RequestError: it is swapped out already, or a number makes no sense; nothing was changed.
        """
        (num_computed_tokens,) = check_request(request_id, num_computed_tokens, names=("num_computed_tokens",))
        block_hashes = read_hashes(request_id, block_hashes)
        if request_id in self._swapped:
            raise RequestError(f"request {request_id} is swapped out already; it has no blocks in HBM")
        kept = self._kept_blocks(request_id, block_tables, num_computed_tokens)
        suspended = not all(breaker.admits(request_id) for breaker in self._breakers.values())
        hopeless = num_computed_tokens == 0 or not self._has_kv(request_id)
        if not self._config.swap_enabled or hopeless or suspended:
            self._counts.num_recomputed += 1
            return False
        num_full = 0
        if self._has_prefix and self._is_trusted(request_id):
            num_full = min(num_computed_tokens // self._layout.block_size, len(block_hashes))
        tier_keys, tier_slots = self._find_in_tier(block_hashes[:num_full])
        num_tier = len(tier_keys) * self._config.blocks_per_chunk
        known = self._pool.find(block_hashes[num_tier:num_full])
        shared = {i: block for i, block in enumerate(known, num_tier) if block is not None}
        copied = [i for i in range(num_tier, len(kept[0])) if i not in shared]
        counts = [len(copied), *map(len, kept[1:])]
        if not self._is_worth_it(counts, len(shared), num_computed_tokens - num_tier * self._layout.block_size):
            self._counts.num_recomputed += 1
            self._counts.num_recomputed_faster += 1
            return False
        new = self._pool.allocate(counts)
        if new is None:
            self._counts.num_recomputed += 1
            self._counts.num_recomputed_no_room += 1
            return False
        self._pool.hold((tuple(shared.values()), *[()] * (len(kept) - 1)))
        if tier_keys:
            self._index.pin(tier_keys)
        place = shared | dict(zip(copied, new[0], strict=True))
        swapped = Swapped(
            request_id,
            tier_keys,
            tier_slots,
            host_blocks(tier_slots, blocks_per_chunk=self._config.blocks_per_chunk, num_blocks=num_tier),
            pool_blocks=(tuple(place[i] for i in range(num_tier, len(kept[0]))), *new[1:]),
            writers=self._jobs.writing(list(shared.values())),
        )
        named = [block_hashes[i] for i in copied if i < num_full]
        self._pool.name(new[0][: len(named)], named)
        self._swapped[request_id] = swapped
        sources = [[kept[0][i] for i in copied], *kept[1:]]
        job = self._jobs.plan(swapped, Direction.SAVE, sources, new)
        for breaker in self._breakers.values():
            breaker.begin(request_id)
        self._hand_over(swapped, Direction.SAVE, job)
        if job is not None:
            swapped.writers.add(job.job_id)
        self._counts.num_swapped_out += 1
        self._counts.swap_skipped_blocks += num_tier + len(shared)
        self._counts.num_thrashed_swaps += request_id in self._returned_at
        return True

    def can_return(self, request_id: str) -> bool:
        """Whether `swap_in` may be called: it is swapped out. Its copies out may still be on their way."""
        check_request(request_id)
        swapped = self._swapped.get(request_id)
        return swapped is not None and swapped.where is Where.OUT

    def num_blocks(self, request_id: str) -> tuple[int, ...]:
        """Per layer group, the blocks that a swapped-out request had and needs again.

        Raises:
          RequestError: it is not swapped out.
        """
        return self._get(request_id).num_blocks

    def swap_in(self, request_id: str, block_tables: Sequence[Sequence[int]], *, present: Collection[int] = ()) -> bool:
        """Starts to bring a request back, into blocks that the engine has granted.

        Args:
          request_id: a request that `can_return`.
          block_tables: per layer group, its new blocks, in the order of those it had; further ones are left alone.
          present: numbers of blocks of the first group that hold their KV already, found in HBM by their hashes.
        Returns:
          True if it must wait until an update names it; False if nothing is to be copied, and it is back now.
        Raises:
          RequestError: it cannot return, the blocks are too few, or a number of `present` is none of its full blocks'
            of full attention; nothing was changed.
        """
        if not self.can_return(request_id):
            raise RequestError(f"request {request_id} cannot be swapped in now; ask can_return first")
        swapped = self._swapped[request_id]
        granted = self._granted_blocks(swapped, block_tables)
        present = read_numbers(request_id, "present", present)
        if present and not (self._has_prefix and max(present) < swapped.num_blocks[0]):
            raise RequestError(
                f"request {request_id} is swapped in with the blocks {sorted(present)} present; expected numbers under "
                f"{swapped.num_blocks[0] if self._has_prefix else 0}"
            )
        num_tier = len(swapped.tier_blocks)
        missing = [i for i in range(swapped.num_blocks[0]) if i not in present]
        from_tier = [i for i in missing if i < num_tier]
        from_pool = [i for i in missing if i >= num_tier]
        targets = [[granted[0][i] for i in from_pool], *granted[1:]]
        places = (tuple(swapped.pool_blocks[0][i - num_tier] for i in from_pool), *swapped.pool_blocks[1:])
        tier = CopyPart(
            group_id=0,
            store=HostStore.HOST_TIER,
            block_ids=tuple(granted[0][i] for i in from_tier),
            host_block_ids=tuple(swapped.tier_blocks[i] for i in from_tier),
        )
        swapped.job = self._jobs.plan(swapped, Direction.LOAD, targets, places, tier=tier)
        self._hand_over(swapped, Direction.LOAD, swapped.job)
        self._counts.swap_skipped_blocks += swapped.num_blocks[0] - len(missing)
        swapped.where = Where.RETURNING
        return not self._end_return(swapped)

    def withdraw(self, request_id: str) -> None:
        """Takes the blocks of a request on its way back away again: it is swapped out as before.

        If its KV was lost meanwhile, the next update says so.

        Raises:
          RequestError: it is not on its way back.
        """
        check_request(request_id)
        if request_id in self._lost:
            return
        swapped = self._swapped.get(request_id)
        if swapped is None or swapped.where is not Where.RETURNING:
            raise RequestError(f"request {request_id} is not on its way back; only then it can be withdrawn")
        self._detach(swapped)

    def discard(self, request_ids: Iterable[str]) -> None:
        """Forgets requests, in whatever state: they ended. Those that are not swapped out are passed over.

        Raises:
          RequestError: one is no text; nothing was changed.
        """
        for request_id in read_request_ids(request_ids):
            self.forget(request_id)

    # For the scheduler.

    def forget(self, request_id: str) -> None:
        """See `discard`."""
        swapped = self._swapped.pop(request_id, None)
        if swapped is not None:
            self._detach(swapped)
            self._jobs.release(swapped)
            self._breakers[Direction.LOAD].cancel_probe(request_id)
        self._returned_at.pop(request_id, None)
        for news in (self._lost, self._swapped_in):
            if request_id in news:
                news.remove(request_id)

    def begin_step(self) -> None:
        """A step is planned."""
        self._num_steps += 1
        if self._returned_at:
            self._forget_old_returns()

    def ended(self, job: Job) -> None:
        """What the end of a copy out or back means for its request, and for those that share its blocks."""
        failed = job.state in (JobState.FAILED, JobState.TIMED_OUT)
        if job.direction is Direction.SAVE:
            self._end_out(job, failed=failed)
        else:
            self._end_in(job, failed=failed)
        if not failed:
            self._costs.observe_copy(job.direction, job.nbytes, job.copy_s)
            self._count_moved(job)

    @property
    def has_news(self) -> bool:
        """Whether `take_news` would return anything."""
        return bool(self._swapped_in or self._lost)

    def take_news(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Requests that are back, and those that must be recomputed, since the last call."""
        swapped_in, self._swapped_in = tuple(self._swapped_in), []
        lost, self._lost = tuple(self._lost), []
        return swapped_in, lost

    def grow(self, num_blocks: Sequence[int]) -> None:
        """Every worker has so many blocks of the pool by now, per layer group."""
        self._pool.grow(num_blocks)

    def lose_blocks(self, group_id: int, first: int, end: int) -> None:
        """Memory of the pool is gone: what was in it is lost, and copies to and from there fail."""
        gone = set(range(first, min(end, self._pool.num_blocks[group_id])))
        self._pool.doubt(group_id, gone)
        if group_id == 0:
            self._pool.forget(gone)
        for job in self._jobs:
            if not gone.isdisjoint(job.pool_blocks[group_id]):
                job.mark_failed("the memory of its blocks in the swap pool was lost")
        for swapped in list(self._swapped.values()):
            if not gone.isdisjoint(swapped.pool_blocks[group_id]):
                self._lose(swapped)

    def limit(self, num_blocks: Sequence[int]) -> None:
        """Some worker has no more than this of the pool by now, per layer group; all of it is lost already."""
        self._pool.limit(num_blocks)

    def lose_all(self) -> None:
        """All memory of the pool is gone."""
        for group_id, num_blocks in enumerate(self._pool.num_blocks):
            self.lose_blocks(group_id, 0, num_blocks)

    def lose_caches(self) -> None:
        """All KV in HBM is gone: what was about to be copied out of it fails. What was sent the workers judge."""
        for job in self._jobs:
            if job.direction is Direction.SAVE and job.state is JobState.PLANNED:
                job.mark_failed("the KV caches were lost")

    def lose_slots(self, first: int, end: int) -> None:
        """The same of the host tier."""
        for job in self._jobs:
            if any(first <= slot < end for slot in job.slots):
                job.mark_failed("the host memory of its chunks was lost")
        for swapped in list(self._swapped.values()):
            if any(first <= slot < end for slot in swapped.tier_slots):
                self._lose(swapped)

    def reset(self) -> None:
        """What is swapped out is no longer what the model would compute: all of it must be recomputed."""
        for job in self._jobs:
            job.mark_failed("the cache was reset")
            self._pool.forget(job.pool_blocks[0])
        for swapped in list(self._swapped.values()):
            self._lose(swapped)

    def add_stats(self, stats: OffloadStats) -> OffloadStats:
        """A snapshot with what is counted here."""
        counts, costs = self._counts, self._costs
        return dataclasses.replace(
            stats,
            **{name: getattr(counts, name) for name in _COUNTED},
            swap_pool_blocks=sum(self._pool.num_blocks),
            swap_held_blocks=self._pool.num_held,
            swap_peak_blocks=self._pool.peak_num_held,
            num_swapped_requests=len(self._swapped),
            num_breaker_openings=stats.num_breaker_openings + sum(b.num_opened for b in self._breakers.values()),
            num_open_breakers=stats.num_open_breakers + sum(not b.closed for b in self._breakers.values()),
            swap_out_nbytes_per_s=costs.nbytes_per_s(Direction.SAVE),
            swap_in_nbytes_per_s=costs.nbytes_per_s(Direction.LOAD),
            prefill_tokens_per_s=costs.prefill_tokens_per_s,
        )

    def pins(self) -> Counter[ChunkKey]:
        """The chunks at which pins of swapped-out requests and of copies end. For `check_invariants`."""
        pins = (*(swapped.tier_keys for swapped in self._swapped.values()), *(job.keys for job in self._jobs))
        return Counter(keys[-1] for keys in pins if keys)

    def check_invariants(self) -> None:
        """Raises AssertionError unless requests, copies and pool agree. For tests."""
        holders: list[dict[int, int]] = [{} for _ in self._layout.groups]
        for held in (*self._swapped.values(), *self._jobs, *self._jobs.late):
            for g, group in enumerate(held.pool_blocks):
                for block in group:
                    holders[g][block] = holders[g].get(block, 0) + 1
        self._pool.check_holders(holders)
        for swapped in self._swapped.values():
            assert all(job_id in self._jobs for job_id in swapped.writers), "it waits for a copy that is over"
            returning = swapped.where is Where.RETURNING
            assert returning == bool(swapped.job or (returning and swapped.writers)), "it waits for nothing"
            assert swapped.job is None or not swapped.job.state.ended
        assert not set(self._lost) & set(self._swapped)

    # Inside.

    def _has_kv(self, request_id: str) -> bool:
        """Whether what a request has in HBM is its KV; not after a loss of the caches."""
        request = self._requests.get(request_id)
        return request is None or request.has_kv

    def _is_trusted(self, request_id: str) -> bool:
        """Whether a request's KV is what its hashes say; not if it is of before a reset."""
        request = self._requests.get(request_id)
        return request is None or request.can_save

    def _get(self, request_id: str) -> Swapped:
        check_request(request_id)
        swapped = self._swapped.get(request_id)
        if swapped is None:
            raise RequestError(f"request {request_id} is not swapped out")
        return swapped

    def _kept_blocks(
        self, request_id: str, block_ids: Sequence[Sequence[int]], num_computed_tokens: int
    ) -> list[list[int]]:
        """Per layer group, the blocks that hold computed tokens."""
        groups = self._layout.groups
        tables = read_tables(request_id, block_ids)
        if len(tables) != len(groups):
            raise RequestError(f"request {request_id} has {len(tables)} block tables; expected {len(groups)}")
        needed = -(-num_computed_tokens // self._layout.block_size)
        kept = []
        for group, given in zip(groups, tables, strict=True):
            full = group.kind is LayerGroupKind.FULL_ATTENTION
            if full and len(given) < needed:
                raise RequestError(
                    f"request {request_id} has {len(given)} blocks for {num_computed_tokens} computed tokens; expected "
                    f"{needed}"
                )
            kept.append(read_ids(request_id, given, end=needed if full else None))
        return kept

    def _granted_blocks(self, swapped: Swapped, block_ids: Sequence[Sequence[int]]) -> list[list[int]]:
        """Per layer group, the blocks that a request comes back into."""
        request_id, needed = swapped.request_id, swapped.num_blocks
        tables = read_tables(request_id, block_ids)
        if len(tables) != len(needed) or any(len(given) < n for given, n in zip(tables, needed, strict=True)):
            raise RequestError(
                f"request {request_id} is swapped in into {[len(given) for given in tables]} blocks; expected at "
                f"least {list(needed)}, one number a layer group"
            )
        return [read_ids(request_id, given, end=n) for given, n in zip(tables, needed, strict=True)]

    def _find_in_tier(self, block_hashes: Sequence[BlockHash]) -> tuple[Sequence[ChunkKey], tuple[int, ...]]:
        """Keys and slots of the leading chunks of these full blocks that the host tier has."""
        if not len(self._index):
            return (), ()
        keys = hashing.chunk_keys(
            block_hashes, blocks_per_chunk=self._config.blocks_per_chunk, namespace=self._keys.namespace
        )
        slots = self._index.find(keys)
        return keys[: len(slots)], tuple(slots)

    def _is_worth_it(self, num_copied: Sequence[int], num_shared: int, num_tokens: int) -> bool:
        sizes = [group.block_nbytes for group in self._layout.groups]
        nbytes_out = sum(n * size for n, size in zip(num_copied, sizes, strict=True))
        return self._costs.prefers_swap(
            nbytes_out=nbytes_out, nbytes_in=nbytes_out + num_shared * sizes[0], num_recompute_tokens=num_tokens
        )

    def _detach(self, swapped: Swapped) -> None:
        """It is swapped out as before it was about to come back, if it was."""
        job, swapped.job = swapped.job, None
        swapped.where = Where.OUT
        if job is not None:
            self._jobs.detach(job)

    def _lose(self, swapped: Swapped) -> None:
        """Its KV is gone, or of no use: the engine recomputes it."""
        del self._swapped[swapped.request_id]
        self._detach(swapped)
        self._jobs.release(swapped)
        self._breakers[Direction.LOAD].cancel_probe(swapped.request_id)
        self._lost.append(swapped.request_id)
        self._counts.num_lost_swaps += 1

    def _end_return(self, swapped: Swapped) -> bool:
        """Ends a return for which no copy, back or out, is on its way any more. Whether it did."""
        if swapped.where is not Where.RETURNING or swapped.job is not None or swapped.writers:
            return False
        del self._swapped[swapped.request_id]
        self._jobs.release(swapped)
        self._returned_at.pop(swapped.request_id, None)
        self._returned_at[swapped.request_id] = self._num_steps
        self._counts.num_swapped_in += 1
        return True

    def _hand_over(self, swapped: Swapped, direction: Direction, job: Job | None) -> None:
        """What is tried out is this copy; without one there is nothing to learn."""
        breaker = self._breakers[direction]
        if job is None:
            breaker.cancel_probe(swapped.request_id)
        else:
            breaker.hand_over(swapped.request_id, job.job_id)

    def _end_out(self, job: Job, *, failed: bool) -> None:
        if failed:
            self._pool.forget(job.pool_blocks[0])
            for group_id, blocks in enumerate(job.pool_blocks):
                self._pool.doubt(group_id, blocks)
        else:
            self._pool.trust(job.pool_blocks)
        for swapped in list(self._swapped.values()):
            if job.job_id in swapped.writers:
                swapped.writers.remove(job.job_id)
                if failed:
                    self._lose(swapped)
                elif self._end_return(swapped):
                    self._swapped_in.append(swapped.request_id)

    def _end_in(self, job: Job, *, failed: bool) -> None:
        swapped = self._swapped.get(job.wire.request_id)
        if swapped is None or swapped.job is not job:  # withdrawn, discarded or lost meanwhile
            return
        swapped.job = None
        if failed:
            self._lose(swapped)
        elif self._end_return(swapped):
            self._swapped_in.append(swapped.request_id)

    def _count_moved(self, job: Job) -> None:
        counts = self._counts
        if job.direction is Direction.SAVE:
            counts.swapped_out_blocks += job.wire.num_blocks
            counts.swapped_out_nbytes += job.nbytes
            counts.swap_out_s += job.duration_s
        else:
            counts.swapped_in_blocks += job.wire.num_blocks
            counts.swapped_in_nbytes += job.nbytes
            counts.swap_in_s += job.duration_s

    def _forget_old_returns(self) -> None:
        while self._returned_at:
            request_id = next(iter(self._returned_at))
            if self._num_steps - self._returned_at[request_id] <= _THRASH_STEPS:
                break
            del self._returned_at[request_id]


_COUNTED = SWAP_FIELDS - GAUGES
