"""Turns engine events into step plans, and step reports into updates for the engine.

The life of a request, as calls of the engine:

    found = match(...)        how many tokens past those in HBM can be loaded from the host tier, and whether more are
                              arriving; pins the chunks and, if loads are staged, reserves staging blocks for them
    admit(...)                the engine granted blocks: the promise becomes a load
      (or release(...))       it could not: the promise is released
    plan = plan_step(...)     every step, with the requests that complete a block in it:
                              loads to start, blocks to save, loads to cancel
    update = apply(report)    every step, one report a worker: which requests are loaded or must be recomputed
    abort_step(plan)          its forward pass was not executed, and the engine goes on
    preempt(...)/finish(...)  the request gives its blocks back, at any time
    evict(...)                the prefix cache in HBM is about to evict blocks
    swap                      swaps a preempted request's KV out and back in (see `core.swap`)

The engine may free and grant a request's blocks again as soon as `preempt` or `finish` returns, even while copies of
them are pending. A save planned in step k reads its blocks right after the forward pass of step k, in program order
before anything that a later step writes (see `OffloadWorker.end_step`). The next plan cancels the load of a request
that is gone, and every worker sees that plan before its step may write into the blocks.

A save that found no room, or was lost after it finished, is retried in a later step without being offered again: until
`preempt` or `finish` the request owns its blocks, and their KV does not change. A step costs nothing for requests that
have nothing new.

A job's resources (staging blocks, pins, swap pool blocks) are released in one place (`core.completion`), once: when it
ends, whatever happened to the request. What a load holds before it is a job is released by `core.loading` while it is a
promise, and by `core.transfers` while it waits. A job that timed out keeps its staging blocks and the host memory that
it writes until every worker has finished with it, because bytes may still be moving. A circuit breaker suspends copies
that keep failing (`core.breaker`), and chunks that keep failing back off (`core.chunk_backoff`); the engine computes
what it would have loaded.

This file is long because the documentation of every call that an engine makes is here.
"""

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence

from tpu_offload.config import OffloadConfig
from tpu_offload.core import inspection
from tpu_offload.core.block_tables import read_tables
from tpu_offload.core.context import TierContext
from tpu_offload.core.engine_api import MISS, CachedPrefix, Match, RequestLimits, ScheduledRequest, TierEvent, Update
from tpu_offload.core.host_pools import HostPools
from tpu_offload.core.load_queue import LoadQueue
from tpu_offload.core.loading import LoadPlanner
from tpu_offload.core.policies import EvictionPolicy
from tpu_offload.core.report_handler import ReportHandler
from tpu_offload.core.request_state import RequestState
from tpu_offload.core.save_policy import SaveEvent, SavePolicy, make_save_policy
from tpu_offload.core.saving import NO_OFFERS, Offers, SavePlanner
from tpu_offload.core.storage.stack import StorageStackPlanner
from tpu_offload.core.swap.manager import RequestSwap
from tpu_offload.core.transfers import Transfers
from tpu_offload.core.validate import (
    check_epoch,
    check_match,
    check_plan,
    check_prefix,
    check_request,
    check_scheduled,
    check_scheduler,
)
from tpu_offload.core.workers import Workers, expected_setups
from tpu_offload.errors import RequestError
from tpu_offload.hashing import last_block_hash
from tpu_offload.layout import KVLayout
from tpu_offload.metrics import OffloadStats, StatsLogger, TierStats
from tpu_offload.native import Given
from tpu_offload.types import BlockHash, CacheEpoch, JobKind, StepPlan, StepReport

_NO_UPDATE = Update()


class OffloadScheduler:
    """Plans saves and loads for one engine. All calls come from the thread of the engine's scheduler.

    Args:
      config: the settings. With a size of zero nothing is ever matched or saved.
      layout: what a block is made of; with pipeline stages, `KVLayout.of_stages`.
      num_workers: workers that report each step, one for each stage; a job ends when all have reported it.
      policy: makes an eviction policy of the host tier for each priority in use; by default the one in the settings.
      save_policy: what is saved, and when; likewise.
      clock: monotonic seconds.
      record_events: keeps events for `take_events`, which the engine then has to call.
    Raises:
      ConfigError: the staging buffer or the host tier is smaller than one chunk, no workers, or an invalid policy.
      LayoutError: the host tier is on and does not support the layout.
    """

    def __init__(
        self,
        config: Given[OffloadConfig],
        layout: Given[KVLayout],
        *,
        num_workers: Given[int] = 1,
        policy: Callable[[], EvictionPolicy] | None = None,
        save_policy: SavePolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
        record_events: Given[bool] = False,
    ) -> None:
        num_workers = check_scheduler(config, layout, num_workers)
        self._config: OffloadConfig = config
        self._context = context = TierContext.make(
            config, layout, num_workers=num_workers, policy=policy, clock=clock, record_events=bool(record_events)
        )
        self._enabled = config.enabled
        self._has_states = context.has_states
        self._clock = clock
        self._index = context.index
        self._jobs = context.jobs
        self._requests = context.requests
        self._counts = context.counts
        self._save_policy = save_policy or make_save_policy(config)
        self._loads = LoadPlanner(context)
        self._saves = SavePlanner(context, self._save_policy)
        self._queue = LoadQueue(context)
        self._transfers = Transfers(context, queue=self._queue, saves=self._saves)
        self._storage = StorageStackPlanner(context, num_workers=num_workers, mark_lost=self._transfers.mark_lost)
        self._has_storage = bool(self._storage.tiers)
        if self._has_storage:
            self._transfers.on_saved(self._storage.offer)
            self._saves.on_observed(self._storage.observe)
        self._swap = RequestSwap(context)
        self._workers = Workers(
            expected=expected_setups(config, layout, num_workers), clock=clock, warn_after_s=config.job_timeout_s
        )
        self._pools = HostPools(context, num_workers=num_workers, save_policy=self._save_policy)
        self._report_handler = ReportHandler(
            context,
            workers=self._workers,
            pools=self._pools,
            transfers=self._transfers,
            storage=self._storage,
            swap=self._swap,
        )
        self._num_steps = 0
        self._stats_logger = StatsLogger(config.metrics_log_interval)

    # Engine events.

    @property
    def swap(self) -> RequestSwap:
        """Swaps preempted requests' KV out of HBM and back in."""
        return self._swap

    def match(
        self,
        request_id: Given[str],
        block_hashes: Sequence[BlockHash],
        *,
        num_tokens: Given[int],
        num_computed_tokens: Given[int],
        limits: Given[RequestLimits | None] = None,
        can_wait: Given[bool] = True,
    ) -> Match:
        """Looks up how much of a request the host tier can load, and promises it.

        Pins the chunks until `admit` or `release`. A repeated match replaces the earlier one; the last one counts as a
        lookup once the request is admitted or has ended (see `OffloadStats`). Staged loads also reserve staging blocks:
        a load larger than its reservation is copied in portions, over several steps, and one without a reservation
        waits for one after `admit`, for `load_wait_s` at most.

        Args:
          request_id: the request.
          block_hashes: hashes of its full blocks, from the first on.
          num_tokens: tokens that it needs before it can sample the next one.
          num_computed_tokens: leading tokens that are in HBM already.
          limits: the request's own, beside those of the settings. They hold until it ends, or is matched with others.
          can_wait: False for an engine that needs each load to start with the plan that follows: a load without staging
            blocks is then not promised, but ARRIVING. It is served before other loads, and before saves every other
            time.
        Returns:
          Tokens past `num_computed_tokens` that can be loaded, and whether there will be more. One token is always left
          to compute: a request whose every block is in the tier gets one token less, and its last block is loaded all
          the same. MISS if `num_computed_tokens` is not at a block boundary.
        Raises:
          RequestError: the request is waiting for a load, an argument is invalid, there are more hashes than full
            blocks, or fewer or others than in an earlier call for this request; nothing was changed. With a storage
            tier also what an eviction policy raises; nothing is promised then.
        """
        num_tokens, num_computed_tokens = check_match(
            request_id, block_hashes, num_tokens=num_tokens, num_computed_tokens=num_computed_tokens, limits=limits
        )
        if not self._enabled:
            return MISS
        request = self._requests.get_or_new(request_id)
        own_limits = None if limits is None else self._requests.within_defaults(limits)
        num_found = self._loads.match(
            request,
            block_hashes,
            num_tokens=num_tokens,
            num_computed_tokens=num_computed_tokens,
            limits=own_limits,
            can_wait=bool(can_wait) and self._config.load_wait_s > 0,
            had_failed_load=self._transfers.has_failed_load(request_id),
        )
        if own_limits is not None:
            self._requests.set_limits(request_id, own_limits)
        self._requests.add(request)
        self._saves.clear_offer(request)  # it may be granted other blocks
        self._saves.observe(request, len(request.keys))
        if self._has_storage:
            self._storage.note_stored(request)
            try:
                self._storage.promote(request)
            except BaseException:  # a custom eviction policy may raise anything
                self._loads.release(request)
                raise
            self._storage.look_up(request)
        return self._loads.answer(request, num_found, storage=self._storage)

    def num_cached_tokens(self, block_hashes: Sequence[BlockHash], *, num_tokens: Given[int]) -> int:
        """Tokens at the beginning of a prompt that could be loaded, now or once they have been read from storage.

        For a router: promises and changes nothing. Of shared tiers only what is known without asking.

        Args:
          block_hashes: hashes of the full blocks of the prompt, from the first on.
          num_tokens: tokens of the prompt.
        Raises:
          RequestError: an argument is invalid.
        """
        name = "of a router"
        num_tokens, _ = check_match(name, block_hashes, num_tokens=num_tokens, num_computed_tokens=0, limits=None)
        if not self._enabled:
            return 0
        request = self._requests.new(name)
        num_found = self._loads.num_cached_tokens(request, block_hashes, num_tokens=num_tokens)
        return max(num_found, min(self._storage.num_reachable_tokens(request), num_tokens - 1))

    def release(self, request_id: Given[str]) -> None:
        """Releases what `match` promised; does nothing without a promise."""
        check_request(request_id)
        request = self._requests.get(request_id)
        if request is not None:
            self._loads.release(request)
            request.last_match.num_cut_load_blocks = 0  # it will be matched again

    def admit(
        self, request_id: Given[str], block_tables: Sequence[Sequence[int]], *, num_loaded_tokens: Given[int]
    ) -> None:
        """The engine granted blocks. With `num_loaded_tokens` the request now waits for its load.

        A request that was never matched is admitted too, with 0 tokens: from then on a `reset` invalidates the KV in
        its blocks.

        Args:
          request_id: the request.
          block_tables: per layer group, all of its blocks so far, in token order.
          num_loaded_tokens: how many of the promised tokens the engine takes; 0 takes none.
        Raises:
          RequestError: more tokens than promised, too few blocks for them, or an invalid argument; the promise stands.
        """
        (num_loaded_tokens,) = check_request(request_id, num_loaded_tokens, names=("num_loaded_tokens",))
        tables = read_tables(request_id, block_tables, num_groups=self._context.num_groups)
        request = self._requests.get(request_id)
        if request is not None:
            request.arrival.since_s = request.arrival.storage_wait_s = None
        if num_loaded_tokens == 0:
            if request is None:  # from here on it holds blocks: a reset has to find it
                self._requests.add(self._requests.new(request_id))
            else:
                self._loads.release(request)
                self._loads.count_lookup(request)
            return
        if request is None:
            raise RequestError(f"request {request_id} admits {num_loaded_tokens} loaded tokens but was never matched")
        revoked = self._loads.admit_revoked(request, num_loaded_tokens=num_loaded_tokens)
        if revoked is not None:
            self._loads.count_lookup(request)
            self._transfers.add_failed_load(revoked)
            return
        load = self._loads.admit(
            request,
            tables,
            num_loaded_tokens=num_loaded_tokens,
            waits_until_s=self._clock() + self._config.load_wait_s,
        )
        if self._has_storage:
            self._storage.hit(request.use, request.keys[: request.last_match.num_found_chunks])
            if load.held.checkpoint is not None:
                self._storage.hit_checkpoint(load.held.checkpoint)
        self._transfers.queue_load(load)
        self._loads.count_lookup(request)
        self._counts.matched_tokens += num_loaded_tokens

    def evict(self, prefix: Given[CachedPrefix]) -> None:
        """The engine is about to evict blocks of its prefix cache. Costs nothing unless blocks are saved then.

        Called between two plans, before the blocks are granted to another request. The coming plan saves the part of
        the prefix that the host tier lacks, before the step writes anything, as far as there is room. Of several blocks
        of one prefix that are evicted together, the last one is enough.

        Raises:
          RequestError: the prefix is invalid; nothing was changed.
        """
        prefix = check_prefix(prefix)
        if self._enabled and self._save_policy.saves_on(SaveEvent.HBM_EVICTION):
            request = self._requests.new("the prefix cache")
            request.use = request.use.replace(is_request=False)
            request.limit(self._requests.within_defaults(prefix.limits))
            self._saves.early.evict(prefix, request)

    def mark_caches_lost(self, epoch: Given[CacheEpoch | None] = None) -> None:
        """All KV in HBM is gone, as the engine knows before a report says so.

        The engine has to preempt every request that holds blocks, without `held`. Until then none of those blocks is
        saved or swapped out, and loads in flight fail. `Update.lost_caches` reports losses that the engine did not
        know of.

        Args:
          epoch: of the new caches, as `OffloadWorker.cache_epoch` has it after `CachesLostError` or
            `OffloadWorker.mark_caches_lost`. With it the next plan is made for them, and the worker's report of the
            loss changes nothing; without it that worker cancels all planned jobs until its report has arrived.
        Raises:
          RequestError: it is no epoch of one of the workers 0 to num_workers - 1; nothing was changed.
        """
        if epoch is not None:
            check_epoch(epoch, num_workers=len(self._workers))
            known = self._workers.known_epoch(epoch.worker_id)
            if known[0] == epoch.incarnation and known[1] < epoch.num_losses:
                self._workers.set_epoch(epoch)
        self._transfers.mark_caches_lost(swapped_out=self._swap.out)
        self._swap.mark_caches_lost()

    def abort_step(self, plan: Given[StepPlan]) -> None:
        """The forward pass of a plan was not executed, or has failed, and the KV caches are whole: the engine goes on.

        Nothing is saved of what that step, or one that was planned after it, was to compute. Of the requests that these
        plans named nothing is on offer until they are named again; name them for the step that computes their blocks,
        even if no other block is complete then. Requests that were swapped out since that plan are lost
        (`Update.lost_swaps`), and what was preempted or evicted since is not saved. Loads are not affected, and what
        other requests offer is saved by a later plan. `OffloadWorker.abort_step` tells the workers.

        Call it before the next `plan_step`, and before the reports that follow that step. Apply these before the plan
        that computes its tokens: until then the aborted saves are in the way of new ones. Chunks are saved all the same
        if their request stays; a checkpoint is not, nor are chunks of a request that ends before.

        Args:
          plan: from `plan_step`; of several that were not executed the first.
        Raises:
          RequestError: it is not a plan of this scheduler; nothing was changed.
        """
        plan = check_plan(plan, num_steps=self._num_steps, next_job_id=self._jobs.next_job_id)
        self._transfers.abort_step(plan)
        self._swap.abort_step(plan)

    def preempt(self, request_id: Given[str], *, held: Given[ScheduledRequest | None] = None) -> None:
        """The engine takes a request's blocks; it may be matched again later. Unknown requests are fine.

        Args:
          request_id: the request.
          held: the KV that the steps dispatched so far have computed, in blocks that hold it until the coming step. The
            coming plan saves it, if the settings save at preemption. None saves nothing.
        Raises:
          RequestError: `held` is invalid; nothing was changed.
        """
        check_request(request_id)
        if held is not None:
            held = check_scheduled(held, num_groups=self._context.num_groups)
            if held.request_id != request_id:
                raise RequestError(f"request {request_id} is preempted with the blocks of request {held.request_id}")
            if self._enabled:
                num_valid = self._transfers.num_valid_tokens(request_id, held.num_computed_tokens)
                held = dataclasses.replace(held, num_computed_tokens=num_valid)
                self._saves.preempt(self._requests.get_or_new(request_id), held)
        former = self._requests.get(request_id)
        try:
            self._forget(request_id)
        finally:  # also if an eviction policy raises
            if self._swap.can_swap_in(request_id):
                # It returns with the KV that it has. A reset has to find it, and KV that one has invalidated stays so.
                request = self._requests.new(request_id)
                request.can_save = former is None or former.can_save
                self._requests.add(request)

    def finish(self, request_id: Given[str]) -> None:
        """A request ended, in any state, swapped out included. Unknown requests are fine.

        What an eviction policy raises comes out of it, and out of `preempt`; the request is gone all the same.
        """
        check_request(request_id)
        if (request := self._requests.get(request_id)) is not None:
            self._loads.count_lookup(request)
        try:
            self._forget(request_id)
        finally:  # also if an eviction policy raises
            self._transfers.forget(request_id)
            self._saves.forget(request_id)
            self._requests.forget_limits(request_id)
            self._swap.forget(request_id)

    def reset(self) -> None:
        """Invalidates every chunk, because the model would now compute other KV.

        Promises are revoked: the load of a request that is admitted nevertheless fails. Loads in flight fail with the
        next plan; saves in flight are not published. Blocks that requests hold at this moment are no longer saved,
        unless the request is preempted and recomputed.
        """
        # Chunks that a load in flight has pinned stay until it ends; keys of the new namespace never find them.
        self._context.keys.reset()
        for request in self._requests.all():
            self._loads.revoke(request)
            self._saves.clear_offer(request)
            request.start_over(namespace=self._context.keys.namespace)
        self._saves.reset()
        self._transfers.reset()
        self._storage.reset()
        self._context.backoff.clear()
        self._swap.reset()
        self._index.clear()

    # Once a step.

    def plan_step(self, changed: Iterable[ScheduledRequest] = ()) -> StepPlan:
        """Plans the copies of the coming step. O(requests named + requests that wait for room).

        Args:
          changed: at least the requests in which the coming step completes a block: a block becomes full whose tokens
            are all computed then and whose hash and block id are known. Also requests whose blocks changed, or whose
            computed tokens became fewer. The arguments are copied, so the engine may reuse its lists and arrays. They
            hold, and the blocks may be read in any step, until the request is named again, preempted, finished or
            matched again, or the step is aborted. Naming other requests is harmless, but not free; of one named twice
            the last counts. Blocks past the prompt matter only with `decode_save`, and nothing matters unless computed
            blocks are saved (`save_on`).
        Returns:
          The plan for every worker: early saves and loads first, saves after the forward pass.
        Raises:
          RequestError: a request is invalid; nothing was changed for any of them.
        """
        offers = self._saves.read(changed) if self._enabled else NO_OFFERS
        now_s = self._clock()
        self._workers.warn_missing(now_s)
        self._transfers.expire_waiting(now_s)
        self._jobs.expire(now_s)
        self._transfers.flush_losses()
        division = self._pools.plan(now_s) if self._has_states else None
        try:
            cancelled = self._plan_transfers(offers, now_s)
        except BaseException:  # an eviction or save policy may be the engine's own
            self._jobs.fail_planned("planning the step raised an error, so its plan was not sent")
            self._saves.abandon_plan()
            raise
        self._swap.begin_step()
        plan = StepPlan(
            step_id=self._num_steps,
            jobs=self._jobs.take_planned(),
            cancelled_job_ids=cancelled,
            next_job_id=self._jobs.next_job_id,
            cache_epochs=self._workers.epochs,
            division=division,
        )
        self._num_steps += 1
        self._stats_logger.maybe_log(now_s, self.stats)
        return plan

    def apply(self, report: Given[StepReport]) -> Update:
        """Applies one worker's report.

        An invalid report is ignored and counted. Results that match no job in flight (late, duplicate, unknown) are
        counted and otherwise ignored, except that they may release what a job that timed out still holds.

        Raises:
          ConfigError: with the first reports of a worker that was not made for this scheduler: there are more workers
            than `num_workers`, two with one id, or one with other settings. Nothing is offloaded until that is fixed.
        """
        self._report_handler.apply(report)
        return self.take_update()

    def take_update(self) -> Update:
        """The update that is available without a report: timeouts, and loads that a reset failed, since the last call.

        `apply` includes it. An engine whose reports may stop arriving calls this after `plan_step`.
        """
        if not self._has_news:
            return _NO_UPDATE
        loaded, failed_loads, transfers = self._transfers.take_news()
        if not (self._swap.has_news or self._report_handler.has_news):  # nearly always
            return Update(loaded=loaded, failed_loads=failed_loads, transfers=transfers)
        swapped_in, lost_swaps = self._swap.take_news()
        return Update(
            loaded=loaded,
            failed_loads=failed_loads,
            transfers=transfers,
            swapped_in=swapped_in,
            lost_swaps=lost_swaps,
            lost_caches=self._report_handler.take_lost_caches(),
        )

    # State.

    @property
    def has_jobs(self) -> bool:
        """Whether a job is in flight or to be planned, or an update pending: keep calling `plan_step` and `apply`."""
        return bool(self._jobs or self._queue) or self._storage.has_plans or self._has_news

    @property
    def has_loads(self) -> bool:
        """Whether a load from the host tier is planned or in flight; of those that timed out staged ones count, too."""
        return bool(self._jobs.of(JobKind.LOAD) or self._jobs.late(JobKind.LOAD))

    @property
    def job_ids(self) -> range:
        """The ids of jobs in flight are in this range, which ends at the next job's; ids rise."""
        return range(next((job.job_id for job in self._jobs), self._jobs.next_job_id), self._jobs.next_job_id)

    @property
    def has_events(self) -> bool:
        """Whether `take_events` has any left."""
        return self._context.index.has_changes

    def take_events(self) -> list[TierEvent]:
        """Changes of the host tier since the last call, in order; empty without `record_events`.

        A call returns at most 10,000 block hashes, so that none takes long; later calls return the rest.
        """
        return inspection.take_events(self._context)

    def stored_block_hashes(self) -> frozenset[BlockHash]:
        """Of each chunk in storage, the hash of its last block. O(chunks)."""
        namespace = self._context.keys.namespace  # else a record of a window or a state
        return frozenset(last_block_hash(key) for key in self._storage.stored_keys() if key.endswith(namespace))

    def stats(self) -> OffloadStats:
        """A snapshot of the counters; may be taken from another thread."""
        return inspection.snapshot(self._context, queue=self._queue, swap=self._swap, storage=self._storage)

    def tier_stats(self) -> tuple[TierStats, ...]:
        """A snapshot of the counters and gauges of each storage tier, nearest first; as `stats`."""
        return self._storage.tier_stats()

    def check_invariants(self) -> None:
        """Raises AssertionError unless accounts, pins and jobs agree. For tests; O(everything)."""
        self._pools.check_invariants()
        inspection.check_invariants(
            self._context, queue=self._queue, saves=self._saves, swap=self._swap, storage=self._storage
        )

    # Inside.

    @property
    def _has_news(self) -> bool:
        return self._transfers.has_news or self._swap.has_news or self._report_handler.has_news

    def _plan_transfers(self, offers: Offers, now_s: float) -> tuple[int, ...]:
        """Plans saves and loads; returns the ids of loads to cancel."""
        if not self._enabled:
            return ()
        self._saves.offer(offers, step_id=self._num_steps)
        cancelled = self._transfers.plan(now_s) if self._transfers.has_plans else ()
        self._saves.plan(deadline_s=now_s + self._config.job_timeout_s)
        if self._has_storage:
            self._storage.plan(now_s)
        return cancelled

    def _forget(self, request_id: str) -> None:
        request = self._requests.remove(request_id)
        if request is None:
            return
        try:
            self._release_rest(request)
        finally:  # an eviction policy may raise, and the request's blocks are granted to others all the same
            if request.load is not None:
                self._transfers.detach(request.load)

    def _release_rest(self, request: RequestState) -> None:
        """Ends what a request that is in no table any more has, but its load."""
        self._counts.dropped_save_blocks += self._saves.num_dropped(request) * self._config.blocks_per_chunk
        self._saves.clear_offer(request)
        self._transfers.forget_news(request.request_id)
        self._counts.dropped_load_blocks += request.last_match.num_cut_load_blocks
        self._loads.release(request)
        if request.rolling is not None:
            self._index.checkpoints.settle(request.rolling)
        self._index.touch(request.use, request.keys, self._saves.num_used(request))
        if self._has_storage and request.limits.cache:
            self._storage.finish(request.use, request.keys)
