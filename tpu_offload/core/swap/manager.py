"""Request swap: copies a preempted request's KV to a pool in host memory, and back when blocks are free again.

    victims = choose_victims(...)              when too few blocks are free for all requests to continue
    swapped = swap.swap_out(victim, ...)       False: recompute it, its generated tokens being part of the prompt
    plan = scheduler.plan_step(...)            carries the copies; from this step on the victim's blocks are free
    swap.swap_in(victim, block_tables, ...)     in a later step, into blocks that the engine has granted
    update = scheduler.apply(report)           update.swapped_in: continue; update.lost_swaps: recompute

A copy out is dispatched before the forward pass of its step and reads the blocks in program order, before this or a
later step writes anything, so the blocks may be granted to other requests in the same step. A copy back is dispatched
before the forward pass too, and after the copies out, so a request may be swapped in before its copy out is reported.
What later owners of its new blocks write comes after it in program order, so those blocks may be taken away at any
time. Therefore no swap is ever cancelled; only the request itself, and those that share its blocks, wait for a report;
and no staging blocks are taken: copies in program order need two blocks of HBM, for any number of blocks.

A block is stored once. What the host tier has is pinned there instead of copied, until the request is back, and full
blocks that several swapped-out requests share are in the pool once.

This file is long because the documentation of every call that an engine makes is here.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any, final

from tpu_offload.core.block_tables import read_hashes
from tpu_offload.core.context import TierContext
from tpu_offload.core.holdings import Holdings
from tpu_offload.core.jobs import Job
from tpu_offload.core.swap.costs import SwapCosts
from tpu_offload.core.swap.placement import Placement, place_blocks
from tpu_offload.core.swap.pool import HostBlocks
from tpu_offload.core.swap.stats import SwapStats
from tpu_offload.core.swap.swapped_request import SwapJobs, SwappedRequest, SwapState
from tpu_offload.core.swap.validate import read_computed_blocks, read_granted_blocks, read_prefill, read_present
from tpu_offload.core.validate import check_request, read_request_ids
from tpu_offload.errors import RequestError
from tpu_offload.layout import LayerGroupKind
from tpu_offload.native import Given
from tpu_offload.types import BlockHash, ChunkKey, Direction, JobKind, JobState, StepPlan


@final
class RequestSwap:
    """The swapped-out requests of one engine. All calls come from the thread of the engine's scheduler.

    Made by the `OffloadScheduler`, which sends its copies with the plan and passes on their results.

    Args:
      context: shared state of the scheduler; with `swap_gb` 0 every request is recomputed.
    """

    def __init__(self, context: TierContext) -> None:
        self._context = context
        self._config = context.config
        self._layout = context.layout
        self._index = context.index
        # Whether a full block of the first group never changes, so that a hash can identify its contents.
        self._has_prefix = self._layout.groups[0].kind is LayerGroupKind.FULL_ATTENTION
        self._requests = context.requests
        self._pool = context.swap_pool
        self._jobs = SwapJobs(context)
        context.jobs.on_end(JobKind.SWAP_OUT, JobKind.SWAP_IN, call=self.ended)
        self._release = context.completion.release
        self._breakers = context.swap_breakers
        self._costs = SwapCosts(self._config.swap_mode)
        self._swapped: dict[str, SwappedRequest] = {}
        self._swapped_in: list[str] = []
        self._lost: list[str] = []
        self._num_steps = 0  # planned
        self._stats = SwapStats(context.counts)

    # Engine events.

    def observe_prefill(self, num_tokens: Given[int], seconds: Given[float], num_attended: Given[float] = 0.0) -> None:
        """Reports the speed of prefill, for the choices between recompute and a swap, or a load.

        Args:
          num_tokens: prompt tokens that one step computed; best of steps that compute little else.
          seconds: duration of the step.
          num_attended: how many tokens each of them attends to, summed over the tokens; 0 if that is not known. With
            it the estimate of long prompts is better.
        Raises:
          RequestError: an argument is not a number.
        """
        num_tokens, seconds, num_attended = read_prefill(num_tokens, seconds, num_attended)
        self._costs.observe_prefill(num_tokens, seconds)
        if math.isfinite(seconds) and math.isfinite(num_attended):
            self._context.costs.observe_prefill(num_tokens, seconds, max(0.0, num_attended))

    def swap_out(
        self,
        request_id: Given[str],
        block_tables: Sequence[Sequence[int]],
        block_hashes: Sequence[BlockHash] = (),
        *,
        num_computed_tokens: Given[int],
    ) -> bool:
        """Swaps a running request out: all of its KV or nothing.

        The engine calls `OffloadScheduler.preempt` afterwards in any case, and may grant the blocks to other
        requests in the step that is planned next. It need not wait for a token in flight: its KV is not computed.

        Args:
          request_id: a request that is not swapped out.
          block_tables: per layer group, its blocks. For full attention in token order, at least those that hold
            computed tokens; for a sliding window all blocks in use, in the order in which the engine wants them back.
          block_hashes: hashes of its full blocks of the first group, as far as they are known. Blocks with equal hashes
            are stored once, as in a prefix cache; an engine whose KV depends on the rest of the batch, and that needs
            exact bits, passes none.
          num_computed_tokens: leading tokens whose KV the steps dispatched so far compute.
        Returns:
          True if it is swapped out. False if it must be recomputed: swap is off or suspended, the pool is full, nothing
          is computed, or recompute is faster.
        Raises:
          RequestError: it is swapped out already, or an argument is invalid; nothing was changed.
        """
        (num_computed_tokens,) = check_request(request_id, num_computed_tokens, names=("num_computed_tokens",))
        block_hashes = read_hashes(request_id, block_hashes)
        if request_id in self._swapped:
            raise RequestError(f"request {request_id} is swapped out already; it has no blocks in HBM")
        blocks = read_computed_blocks(self._layout, request_id, block_tables, num_computed_tokens)
        suspended = not all(breaker.admits(request_id) for breaker in self._breakers.values())
        has_kv = num_computed_tokens > 0 and self._has_kv(request_id)
        if not self._config.swap_enabled or not has_kv or suspended:
            self._stats.count_recompute()
            return False
        placement = place_blocks(
            self._context, blocks, self._shareable_hashes(request_id, block_hashes, num_computed_tokens)
        )
        num_tokens = num_computed_tokens - len(placement.tier_blocks) * self._layout.block_size
        if not self._is_worth_it(placement, num_recompute_tokens=num_tokens):
            self._stats.count_recompute(faster=True)
            return False
        allocated = self._pool.allocate(placement.num_copied)
        if allocated is None:
            self._stats.count_recompute(no_room=True)
            return False
        self._start_swap_out(request_id, placement, allocated)
        return True

    def _start_swap_out(self, request_id: str, placement: Placement, allocated: HostBlocks) -> None:
        """Plans the copy out, and holds and pins what the request comes back from."""
        if request_id in self._lost:  # its last swap; the engine has not waited for the update that says so
            self._lost.remove(request_id)
        shared = tuple(placement.shared.values())
        self._pool.hold((shared, *[()] * (len(allocated) - 1)))
        if placement.tier_keys:
            self._index.pin(placement.tier_keys)
        swapped = SwappedRequest(
            request_id=request_id,
            held=Holdings(
                Direction.LOAD,
                self._breakers[Direction.LOAD],
                probe=request_id,
                keys=placement.tier_keys,
                slots=placement.tier_slots,
                are_pinned=bool(placement.tier_keys),
                pool_blocks=placement.pool_blocks(allocated),
            ),
            tier_blocks=placement.tier_blocks,
            writers=self._jobs.writing(shared),
            step_id=self._num_steps,
            can_save=self._is_trusted(request_id),
        )
        self._pool.set_hashes(allocated[0][: len(placement.hashes)], placement.hashes)
        self._swapped[request_id] = swapped
        for breaker in self._breakers.values():
            breaker.begin(request_id)
        job = self._jobs.plan(swapped, Direction.SAVE, placement.sources, allocated)
        if job is not None:
            swapped.writers.add(job.job_id)
        self._stats.count_swap_out(request_id, num_skipped=len(placement.tier_blocks) + len(shared))

    def can_swap_in(self, request_id: Given[str]) -> bool:
        """Whether `swap_in` may be called: the request is swapped out. Its copy out may still be in flight."""
        check_request(request_id)
        swapped = self._swapped.get(request_id)
        return swapped is not None and swapped.state is SwapState.OUT

    def num_blocks(self, request_id: Given[str]) -> tuple[int, ...]:
        """Per layer group, the number of blocks that a swapped-out request needs to be swapped in.

        Raises:
          RequestError: it is not swapped out, or its KV is lost.
        """
        return self._get(request_id).num_blocks

    def swap_in(
        self, request_id: Given[str], block_tables: Sequence[Sequence[int]], *, present: Collection[int] = ()
    ) -> bool:
        """Starts to copy a request back, into blocks that the engine has granted.

        Args:
          request_id: a request for which `can_swap_in` is true.
          block_tables: per layer group, its new blocks, in the order of those it had; further ones are ignored.
          present: positions in the first block table of blocks that hold their KV already, found in HBM by their
            hashes.
        Returns:
          True if it must wait until an update names it; False if there is nothing to copy and it can run now.
        Raises:
          RequestError: it cannot be swapped in, it has too few blocks, or `present` has a position outside of its
            blocks of full attention; nothing was changed.
        """
        if not self.can_swap_in(request_id):
            raise RequestError(f"request {request_id} cannot be swapped in now; call can_swap_in first")
        swapped = self._swapped[request_id]
        granted = read_granted_blocks(request_id, block_tables, swapped.num_blocks)
        present = read_present(request_id, present, end=swapped.num_blocks[0] if self._has_prefix else 0)
        targets, places, tier = swapped.copies_back(granted, present)
        swapped.job = self._jobs.plan(swapped, Direction.LOAD, targets, places, tier=tier)
        self._stats.count_present(len(present))
        swapped.state = SwapState.RETURNING
        return not self._finish_swap_in(swapped)

    def abort_swap_in(self, request_id: Given[str]) -> None:
        """Aborts a swap-in: the engine may take the blocks away, and the request is swapped out as before.

        If its KV was lost meanwhile, the next update reports that.

        Raises:
          RequestError: it is not being swapped in.
        """
        check_request(request_id)
        if request_id in self._lost:
            return
        swapped = self._swapped.get(request_id)
        if swapped is None or swapped.state is not SwapState.RETURNING:
            raise RequestError(f"request {request_id} is not being swapped in; there is nothing to abort")
        self._detach(swapped)
        request = self._requests.get(request_id)
        if request is not None:
            request.has_kv, request.can_save = True, swapped.can_save

    def discard(self, request_ids: Iterable[str]) -> None:
        """Drops requests that have ended, in any state; ids that are not swapped out are ignored.

        Raises:
          RequestError: an id is not a string; nothing was changed.
        """
        for request_id in read_request_ids(request_ids):
            self.forget(request_id)

    # For the scheduler.

    def forget(self, request_id: str) -> None:
        """Drops one request; see `discard`."""
        swapped = self._swapped.pop(request_id, None)
        if swapped is not None:
            self._detach(swapped)
            self._release(swapped.held)
        self._stats.forget(request_id)
        for news in (self._lost, self._swapped_in):
            if request_id in news:
                news.remove(request_id)

    def begin_step(self) -> None:
        """A step is planned."""
        self._num_steps += 1
        self._stats.begin_step()

    def ended(self, job: Job) -> None:
        """Applies the end of a copy to its request, and to those that share its blocks."""
        failed = job.state in (JobState.FAILED, JobState.TIMED_OUT)
        if job.direction is Direction.SAVE:
            self._copy_out_ended(job, failed=failed)
        else:
            self._copy_back_ended(job, failed=failed)
        if not failed:
            self._costs.observe_copy(job.direction, job.nbytes, job.copy_s)
            self._stats.count_copy(job)

    @property
    def has_news(self) -> bool:
        """Whether `take_news` would return anything."""
        return bool(self._swapped_in or self._lost)

    def take_news(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Requests that were swapped in, and those that must be recomputed, since the last call."""
        swapped_in, self._swapped_in = tuple(self._swapped_in), []
        lost, self._lost = tuple(self._lost), []
        return swapped_in, lost

    def grow(self, num_blocks: Sequence[int]) -> None:
        """Raises the size of the pool to what every worker has allocated by now, per layer group."""
        self._pool.grow(num_blocks)

    def limit(self, num_blocks: Sequence[int]) -> None:
        """Lowers the size of the pool, all of whose contents are lost, to what a new worker has, per layer group."""
        self._pool.limit(num_blocks)

    def mark_blocks_lost(self, group_id: int, first: int, end: int) -> None:
        """Memory of the pool is lost: requests that need it are recomputed, and copies to and from it fail."""
        lost = set(range(first, min(end, self._pool.num_blocks[group_id])))
        self._pool.mark_suspect(group_id, lost)
        if group_id == 0:
            self._pool.clear_hashes(lost)
        for job in self._jobs:
            if not lost.isdisjoint(job.held.pool_blocks[group_id]):
                job.mark_failed("the memory of its blocks in the swap pool was lost")
        for swapped in list(self._swapped.values()):
            if not lost.isdisjoint(swapped.held.pool_blocks[group_id]):
                self._mark_lost(swapped)

    def mark_pool_lost(self) -> None:
        """All memory of the pool is lost."""
        for group_id, num_blocks in enumerate(self._pool.num_blocks):
            self.mark_blocks_lost(group_id, 0, num_blocks)

    def mark_slots_lost(self, first: int, end: int) -> None:
        """Memory of the host tier is lost: as `mark_blocks_lost`."""
        for job in self._jobs:
            if any(first <= slot < end for slot in job.slots):
                job.mark_failed("the host memory of its chunks was lost")
        for swapped in list(self._swapped.values()):
            if any(first <= slot < end for slot in swapped.held.slots):
                self._mark_lost(swapped)

    @property
    def out(self) -> frozenset[str]:
        """Requests that are swapped out and hold no blocks of HBM."""
        return frozenset(name for name, swapped in self._swapped.items() if swapped.state is SwapState.OUT)

    def mark_caches_lost(self) -> None:
        """All KV in HBM is lost: copies out that are not sent yet fail. Workers decide about those that are."""
        for job in self._jobs:
            if job.direction is Direction.SAVE and job.state is JobState.PLANNED:
                job.mark_failed("the KV caches were lost")

    def abort_step(self, plan: StepPlan) -> None:
        """A step has computed nothing: requests that were swapped out after it was planned are lost.

        Those that needed no copy, too: the step has not sampled their next token.
        """
        for job in self._jobs:
            if job.direction is Direction.SAVE and job.job_id >= plan.next_job_id:
                job.make_void("the step that was to compute its KV was aborted")
                self._pool.clear_hashes(job.held.pool_blocks[0])  # later swap-outs have KV of their own
        for swapped in list(self._swapped.values()):
            if swapped.step_id > plan.step_id:
                self._mark_lost(swapped)

    def reset(self) -> None:
        """Invalidates all swapped-out KV, as after a change of weights: every request is recomputed."""
        for job in self._jobs:
            job.make_void("the cache was reset")
            self._pool.clear_hashes(job.held.pool_blocks[0])
        for swapped in list(self._swapped.values()):
            self._mark_lost(swapped)

    def add_stats(self, counts: dict[str, Any]) -> None:
        """Adds the gauges and breakers of request swap to those of a snapshot, which are by name."""
        costs, breakers = self._costs, self._breakers.values()
        counts["num_breaker_openings"] += sum(breaker.num_opened for breaker in breakers)
        counts["num_open_breakers"] += sum(not breaker.closed for breaker in breakers)
        counts.update(
            swap_pool_blocks=sum(self._pool.num_blocks),
            swap_held_blocks=self._pool.num_held,
            swap_peak_blocks=self._pool.peak_num_held,
            num_swapped_requests=len(self._swapped),
            swap_out_nbytes_per_s=costs.nbytes_per_s(Direction.SAVE),
            swap_in_nbytes_per_s=costs.nbytes_per_s(Direction.LOAD),
            prefill_tokens_per_s=costs.prefill_tokens_per_s,
        )

    def pins(self) -> Counter[ChunkKey]:
        """The last chunk of each prefix that a swapped-out request or a copy pins. For `check_invariants`."""
        pins = (*(swapped.held.keys for swapped in self._swapped.values()), *(job.keys for job in self._jobs))
        return Counter(keys[-1] for keys in pins if keys)

    def check_invariants(self) -> None:
        """Raises AssertionError unless requests, copies and pool agree. For tests."""
        holders: list[dict[int, int]] = [{} for _ in self._layout.groups]
        for holder in (*self._swapped.values(), *self._jobs, *self._jobs.late):
            for g, group in enumerate(holder.held.pool_blocks):
                for block in group:
                    holders[g][block] = holders[g].get(block, 0) + 1
        self._pool.check_holders(holders)
        for swapped in self._swapped.values():
            assert all(job_id in self._jobs for job_id in swapped.writers), "it waits for a copy that has ended"
            returning = swapped.state is SwapState.RETURNING
            assert returning == bool(swapped.job or (returning and swapped.writers)), "it waits for nothing"
            assert swapped.job is None or not swapped.job.state.ended
        assert not set(self._lost) & set(self._swapped)

    # Inside.

    def _has_kv(self, request_id: str) -> bool:
        """Whether a request's blocks in HBM hold its KV; not after the caches were lost."""
        request = self._requests.get(request_id)
        return request is None or request.has_kv

    def _is_trusted(self, request_id: str) -> bool:
        """Whether a request's KV is what its hashes say; not if it was computed before a reset."""
        request = self._requests.get(request_id)
        return request is None or request.can_save

    def _get(self, request_id: Given[str]) -> SwappedRequest:
        check_request(request_id)
        swapped = self._swapped.get(request_id)
        if swapped is None:
            raise RequestError(f"request {request_id} is not swapped out, or its KV is lost; call can_swap_in first")
        return swapped

    def _shareable_hashes(
        self, request_id: str, block_hashes: Sequence[BlockHash], num_computed_tokens: int
    ) -> Sequence[BlockHash]:
        """Hashes of the full blocks of the first group; none if other requests must not share those blocks."""
        if not self._has_prefix or not self._is_trusted(request_id):
            return ()
        return block_hashes[: num_computed_tokens // self._layout.block_size]

    def _is_worth_it(self, placement: Placement, *, num_recompute_tokens: int) -> bool:
        sizes = [group.block_nbytes for group in self._layout.groups]
        nbytes_out = sum(n * size for n, size in zip(placement.num_copied, sizes, strict=True))
        return self._costs.prefers_swap(
            nbytes_out=nbytes_out,
            nbytes_in=nbytes_out + len(placement.shared) * sizes[0],
            num_recompute_tokens=num_recompute_tokens,
        )

    def _detach(self, swapped: SwappedRequest) -> None:
        """Aborts the swap-in of a request, if there is one: it is swapped out as before."""
        job, swapped.job, swapped.state = swapped.job, None, SwapState.OUT
        if job is not None:
            self._jobs.detach(job)

    def _mark_lost(self, swapped: SwappedRequest) -> None:
        """The KV of a request is lost or invalid: the engine recomputes it."""
        del self._swapped[swapped.request_id]
        self._detach(swapped)
        self._release(swapped.held)
        self._lost.append(swapped.request_id)
        self._stats.count_lost()

    def _finish_swap_in(self, swapped: SwappedRequest) -> bool:
        """Finishes a swap-in unless a copy, back or out, is still in flight; returns whether it did."""
        if swapped.state is not SwapState.RETURNING or swapped.job is not None or swapped.writers:
            return False
        del self._swapped[swapped.request_id]
        self._release(swapped.held)
        self._stats.count_swap_in(swapped.request_id)
        return True

    def _copy_out_ended(self, job: Job, *, failed: bool) -> None:
        if failed:
            self._pool.clear_hashes(job.held.pool_blocks[0])
            for group_id, blocks in enumerate(job.held.pool_blocks):
                self._pool.mark_suspect(group_id, blocks)
        else:
            self._pool.clear_suspect(job.held.pool_blocks)
        for swapped in list(self._swapped.values()):
            if job.job_id in swapped.writers:
                swapped.writers.remove(job.job_id)
                if failed:
                    self._mark_lost(swapped)
                elif self._finish_swap_in(swapped):
                    self._swapped_in.append(swapped.request_id)

    def _copy_back_ended(self, job: Job, *, failed: bool) -> None:
        swapped = self._swapped.get(job.wire.request_id)
        if swapped is None or swapped.job is not job:  # aborted, discarded or lost meanwhile
            return
        swapped.job = None
        if failed:
            self._mark_lost(swapped)
        elif self._finish_swap_in(swapped):
            self._swapped_in.append(swapped.request_id)
