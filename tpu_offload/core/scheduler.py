"""Turns engine events into step plans, and step reports into what the engine should know.

The life of a request, as the engine tells it:

    found = match(...)        how many tokens past those in HBM can come from the host tier, and whether more are
                              arriving; pins the chunks and, if loads are staged, reserves staging blocks for them
    admit(...)                the engine granted blocks: the promise becomes a load
      (or release(...))       it could not: the promise is given back
    plan = plan_step(...)     every step, with the requests that complete a block in it:
                              loads to start, blocks to save, loads to cancel
    update = apply(report)    every step, one report a worker: which requests are loaded or must recompute
    preempt(...)/finish(...)  the request gives its blocks back, at any time
    evict(...)                the prefix cache in HBM is about to give blocks to others
    swap                      takes a preempted request's KV out and back (see `core.swap`)

The engine may free and grant a request's blocks again as soon as `preempt` or `finish` returns, also
under pending copies. A save planned in step k reads its blocks right after the forward pass of step k,
in program order before anything that a later step writes (see `OffloadWorker.end_step`). A load of a
request that is gone is cancelled by the next plan, which every worker sees before it lets that step
write into the blocks.

What was to be saved and found no room, or was saved and lost, is saved by a later step without the
engine saying so again. It may be: until `preempt` or `finish` the blocks are the request's own, and
their KV, computed once, stays. Steps cost nothing for requests about which there is no news.

What a job holds (staging blocks, pins, places in the swap pool) is given back at one place (`core.completion`), once:
when every worker has reported the job, or when its time is over. Until then the bytes may still be moving, whatever
became of the request. Copies that keep failing are suspended for a while (`core.breaker`), chunks that keep failing are
left alone (`core.chunk_backoff`); the engine computes what it would have loaded.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from tpu_offload import hashing
from tpu_offload.config import OffloadConfig
from tpu_offload.core.context import TierContext
from tpu_offload.core.engine_api import (
    MISS,
    CachedPrefix,
    Match,
    RequestLimits,
    ScheduledRequest,
    TierEvent,
    TierEventKind,
    Update,
)
from tpu_offload.core.index import Changes, ChunkState
from tpu_offload.core.jobs import Job, WaitingLoad
from tpu_offload.core.load_queue import LoadQueue
from tpu_offload.core.loading import LoadPlanner
from tpu_offload.core.policies import EvictionPolicy, PriorityPolicy, Use, check_maker, find_policy
from tpu_offload.core.reports import Reports
from tpu_offload.core.request_state import RequestState
from tpu_offload.core.save_policy import SaveEvent, SavePolicy, make_save_policy
from tpu_offload.core.saving import NO_SAVES, Offer, SavePlanner
from tpu_offload.core.staging import Staging, StagingBufferManager
from tpu_offload.core.swap import RequestSwap
from tpu_offload.core.tables import check_sequence, read_tables
from tpu_offload.core.tiering import StoragePlanner
from tpu_offload.core.transfers import TRANSFERS, Transfers
from tpu_offload.core.validate import (
    check_epoch,
    check_iterable,
    check_limits,
    check_prefix,
    check_request,
    check_scheduled,
)
from tpu_offload.core.workers import Workers
from tpu_offload.errors import ConfigError, RequestError
from tpu_offload.layout import KVLayout
from tpu_offload.metrics import OffloadStats, StatsLogger
from tpu_offload.types import (
    BlockHash,
    CacheEpoch,
    ChunkKey,
    Direction,
    StepPlan,
    StepReport,
)
from tpu_offload.values import as_count, one_line

_NO_UPDATE = Update()
_NO_OFFERS: Mapping[str, tuple[RequestState, Offer]] = {}
_MAX_EVENT_CHUNKS = 10_000


class OffloadScheduler:
    """Plans saves and loads for one engine. All calls come from the thread of the engine's scheduler.

    Args:
      config: the settings. With a size of zero nothing is ever matched or saved.
      layout: what a block is made of.
      num_workers: workers that report each step; a job ends when all have reported it.
      policy: makes eviction policies of the host tier, one for each priority in use: a class, mostly. By default the
        one that the settings name.
      save_policy: what is saved, and when; likewise.
      clock: monotonic seconds.
      record_events: keeps what `take_events` returns; somebody has to call it then.
    Raises:
      ConfigError: the staging buffer or the host tier is smaller than one chunk, there is no worker, or no eviction
        policy can be made.
      LayoutError: the host tier is on and cannot hold such blocks.
    """

    def __init__(
        self,
        config: OffloadConfig,
        layout: KVLayout,
        *,
        num_workers: int = 1,
        policy: Callable[[], EvictionPolicy] | None = None,
        save_policy: SavePolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
        record_events: bool = False,
    ) -> None:
        for given, kind in ((config, OffloadConfig), (layout, KVLayout)):
            if not isinstance(given, kind):
                raise ConfigError(f"got a {type(given).__name__}; expected the {kind.__name__}")
        given_workers, num_workers = num_workers, as_count(num_workers) or 0
        self._config = config
        self._enabled = config.enabled
        self._layout = layout
        if num_workers < 1:
            raise ConfigError(f"num_workers={one_line(given_workers)}; expected at least 1")
        if self._enabled:
            layout.check_tier()
        self._staging = StagingBufferManager(config.staging_blocks(layout) if self._enabled else 0)
        staging = Staging(self._staging, {direction: config.path_for(direction) for direction in Direction})
        if policy is None:
            policy = find_policy(config.eviction_policy)
        else:
            check_maker(policy, what="policy")
        self._context = context = TierContext.make(
            config,
            layout,
            num_workers=num_workers,
            staging=staging,
            policy=PriorityPolicy(policy),
            clock=clock,
            record_events=record_events,
        )
        self._index = context.index
        self._jobs = context.jobs
        self._requests = context.requests
        self._counts = context.counts
        self._save_policy = save_policy or make_save_policy(config)
        self._limits = RequestLimits(
            max_save_tokens=config.max_save_tokens or None, max_load_tokens=config.max_load_tokens or None
        )
        self._limits_of: dict[str, RequestLimits] = {}  # of unfinished requests that came with some
        self._loads = LoadPlanner(context)
        self._saves = SavePlanner(context, self._save_policy)
        self._queue = LoadQueue(context)
        self._transfers = Transfers(context, queue=self._queue, saves=self._saves)
        self._storage = StoragePlanner(context, lose=self._transfers.lose)
        self._transfers.on_saved(self._storage.offer)
        self._swap = RequestSwap(context)
        self._workers = Workers(
            num_workers,
            own={
                "fingerprint": layout.fingerprint().hex(),
                "blocks_per_chunk": config.blocks_per_chunk if self._enabled else 0,
                "staging_blocks": self._staging.num_blocks,
                "max_load_blocks": config.max_load_blocks(layout) if self._enabled else 0,
                "bucket_blocks": tuple(config.block_size_buckets),
                "max_swap_blocks": config.max_swap_blocks(layout),
                "storage_chunks": config.storage_chunks,
            },
            clock=clock,
            patience_s=config.job_timeout_s,
        )
        self._reports = Reports(
            context,
            workers=self._workers,
            save_policy=self._save_policy,
            transfers=self._transfers,
            storage=self._storage,
            swap=self._swap,
        )
        self._num_requests_seen = 0
        self._num_steps = 0
        self._clock = clock
        self._stats_logger = StatsLogger(config.metrics_log_interval)

    # Engine events.

    @property
    def swap(self) -> RequestSwap:
        """Takes preempted requests' KV out of HBM and back."""
        return self._swap

    def match(
        self,
        request_id: str,
        block_hashes: Sequence[BlockHash],
        *,
        num_tokens: int,
        num_computed_tokens: int,
        limits: RequestLimits | None = None,
        can_wait: bool = True,
    ) -> Match:
        """Finds how much of a request the host tier can load, and holds it ready.

        Pins the chunks until `admit` or `release`. Asking again replaces the earlier answer; the last one counts as a
        lookup, once the request is admitted or has ended (see `OffloadStats`). Staged loads also reserve staging
        blocks; one that is larger than what it gets goes through that in pieces, over several steps, and one that gets
        none waits for some after `admit`, for `load_wait_s` at most.

        Args:
          request_id: the request.
          block_hashes: hashes of its full blocks, from the first on.
          num_tokens: tokens that it needs before it can sample the next one.
          num_computed_tokens: leading tokens that are in HBM already.
          limits: the request's own, beside those of the settings. They hold until it ends, or is matched with others.
          can_wait: False for an engine that needs each load to go with the plan that follows: one that would have to
            wait for staging blocks is not promised then, but ARRIVING. Its turn comes before that of others, and before
            that of saves every other time.
        Returns:
          Tokens past `num_computed_tokens` that can be loaded, and whether there will be more. One token is always left
          to compute, so a request whose every block is here gets one less; its last block is loaded all the same. MISS
          if `num_computed_tokens` is not at a block boundary.
        Raises:
          RequestError: the request is waiting for a load, an argument makes no sense, or the hashes are not
            those that an earlier match of this request had; nothing was changed.
        """
        num_tokens, num_computed_tokens = check_request(
            request_id, num_tokens, num_computed_tokens, names=("num_tokens", "num_computed_tokens")
        )
        check_sequence(request_id, block_hashes, "block hashes")
        if num_computed_tokens > num_tokens:
            raise RequestError(
                f"request {request_id}: {num_computed_tokens=} of {num_tokens=}; expected 0 to num_tokens"
            )
        check_limits(request_id, limits)
        if not self._enabled:
            return MISS
        request = self._request(request_id)
        own_limits = None if limits is None else limits.within(self._limits)
        num_found = self._loads.match(
            request,
            block_hashes,
            num_tokens=num_tokens,
            num_computed_tokens=num_computed_tokens,
            limits=own_limits,
            can_wait=can_wait and self._config.load_wait_s > 0,
            had_failed_load=self._transfers.has_failed_load(request_id),
        )
        if own_limits is not None:
            self._limits_of[request_id] = own_limits
        self._requests[request_id] = request
        self._saves.withdraw(request)  # it may be given other blocks
        self._saves.see(request, len(request.keys))
        self._storage.promote(request)
        return self._loads.answer(request, num_found, storage=self._storage)

    def release(self, request_id: str) -> None:
        """Gives back what `match` promised; without a promise it does nothing."""
        check_request(request_id)
        request = self._requests.get(request_id)
        if request is not None:
            self._loads.release(request)
            request.num_cut_load_blocks = 0  # it will be matched again

    def admit(self, request_id: str, block_tables: Sequence[Sequence[int]], *, num_loaded_tokens: int) -> None:
        """The engine granted blocks. With `num_loaded_tokens` the request now waits for its load.

        A request that was never matched is admitted all the same, with 0 tokens: a `reset` makes worthless what
        the requests hold that it knows.

        Args:
          request_id: the request.
          block_tables: per layer group, all of its blocks so far, in token order.
          num_loaded_tokens: how many of the promised tokens the engine takes; 0 takes none.
        Raises:
          RequestError: more tokens than promised, too few blocks for them, or an argument that makes no sense; the
            promise stands.
        """
        (num_loaded_tokens,) = check_request(request_id, num_loaded_tokens, names=("num_loaded_tokens",))
        tables = read_tables(request_id, block_tables, num_groups=self._context.num_groups)
        request = self._requests.get(request_id)
        if request is not None:
            request.arriving_since_s = None
        if num_loaded_tokens == 0:
            if request is None:  # from here on it holds blocks: a reset has to find it
                self._requests[request_id] = self._request(request_id)
            else:
                self._loads.release(request)
                self._count_lookup(request)
            return
        if request is None:
            raise RequestError(f"request {request_id} admits {num_loaded_tokens} loaded tokens but was never matched")
        revoked = self._loads.admit_revoked(request, num_loaded_tokens=num_loaded_tokens)
        if revoked is not None:
            self._count_lookup(request)
            self._transfers.tell_failed(revoked)
            return
        load = self._loads.admit(
            request,
            tables,
            num_loaded_tokens=num_loaded_tokens,
            waits_until_s=self._clock() + self._config.load_wait_s,
        )
        self._transfers.send(load)
        self._count_lookup(request)
        self._counts.matched_tokens += num_loaded_tokens

    def evict(self, prefix: CachedPrefix) -> None:
        """The engine is about to grant blocks of its prefix cache to somebody else. Costs nothing unless saved then.

        Called between two plans, before the blocks are granted. The coming plan saves what the host tier has not got of
        the prefix, before the step writes anything, as far as there is room. Of several blocks of one prefix that go at
        a time, the last one is enough.

        Raises:
          RequestError: what is said of the prefix makes no sense; nothing was changed.
        """
        prefix = check_prefix(prefix)
        if self._enabled and self._save_policy.saves_on(SaveEvent.HBM_EVICTION):
            request = self._new_request("the prefix cache")
            request.limit(prefix.limits.within(self._limits))
            self._saves.leaving.evict(prefix, request)

    def lose_caches(self, epoch: CacheEpoch | None = None) -> None:
        """All KV in HBM is gone, as the engine knows before a report says so.

        Everybody who holds blocks has to be preempted, without `held`. Until then nothing of them is saved or swapped
        out, and loads on their way end as failed. `Update.lost_caches` says the same of what the engine did not know.

        Args:
          epoch: of the new caches, as `OffloadWorker.cache_epoch` has it after `CachesLostError` or
            `OffloadWorker.lose_caches`. With it the next plan is made for them, and the report is no news; without it
            that worker cancels what is planned until its report has come.
        Raises:
          RequestError: the epoch is none of a worker's; nothing was changed.
        """
        if epoch is not None:
            check_epoch(epoch, num_workers=len(self._workers))
            known = self._workers.known_epoch(epoch.worker_id)
            if known[0] == epoch.incarnation and known[1] < epoch.num_losses:
                self._workers.set_epoch(epoch)
        self._transfers.lose_caches()
        self._swap.lose_caches()

    def preempt(self, request_id: str, *, held: ScheduledRequest | None = None) -> None:
        """The engine takes a request's blocks; it may be matched again later. Unknown requests are fine.

        Args:
          request_id: the request.
          held: what the steps dispatched so far have computed of it, in blocks that hold it until the coming step. That
            is saved with the coming plan, if the settings have KV saved at preemption. None saves nothing.
        Raises:
          RequestError: what is said of the request makes no sense; nothing was changed.
        """
        check_request(request_id)
        if held is not None:
            held = check_scheduled(held, num_groups=self._context.num_groups)
            if held.request_id != request_id:
                raise RequestError(f"request {request_id} is preempted and holds what request {held.request_id} held")
            if self._enabled:
                self._saves.preempt(self._request(request_id), held)
        former = self._requests.get(request_id)
        self._forget(request_id)
        if self._swap.can_return(request_id):
            # It comes back with the KV that it has. A reset has to find it, and what one has made worthless stays so.
            request = self._requests[request_id] = self._request(request_id)
            request.saving = former is None or former.saving

    def finish(self, request_id: str) -> None:
        """A request ended, in whatever state it was, also swapped out. Unknown requests are fine."""
        check_request(request_id)
        if (request := self._requests.get(request_id)) is not None:
            self._count_lookup(request)
        self._forget(request_id)
        self._transfers.forget(request_id)
        self._saves.forget(request_id)
        self._limits_of.pop(request_id, None)
        self._swap.forget(request_id)

    def reset(self) -> None:
        """Forgets every chunk, because what they hold is no longer what the model would compute.

        Promises are taken back: who admits one nevertheless is told that its load failed. Loads in flight fail with
        the next plan; saves in flight are not published. Blocks that requests hold at this moment are not saved any
        more, unless the request is preempted and computed again.
        """
        # Chunks that a load in flight has pinned stay until it ends; keys of a new namespace never find them.
        self._context.keys.reset()
        for request in self._requests.values():
            self._loads.revoke(request)
            self._saves.withdraw(request)
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
          changed: at least the requests in which the coming step completes a block: one becomes full
            whose tokens are all computed then and whose hash and block id are known. Also one whose blocks
            changed, or whose computed tokens became fewer. What is said of a request stands, whatever becomes of the
            lists and arrays that said it, and its blocks may be read in any step, until it is named again, preempted,
            finished or matched again. Naming others is harmless, but not free; of one named twice the last counts.
            Blocks past the prompt matter only with `decode_save`, and nothing of it does where nothing is saved when
            it is computed (`save_on`).
        Returns:
          The plan for every worker: early saves and loads first, saves after the forward pass.
        Raises:
          RequestError: what is said of some request makes no sense; nothing was changed, also not of the others.
        """
        offers = self._read(changed) if self._enabled else _NO_OFFERS
        now_s = self._clock()
        self._workers.miss(now_s)
        self._transfers.expire_waiting(now_s)
        self._jobs.expire(now_s)
        self._transfers.settle()
        try:
            cancelled = self._plan_transfers(offers, now_s)
        except BaseException:  # an eviction or save policy may be anybody's
            self._jobs.fail_planned("the step that it was planned for was never sent: planning raised an error")
            raise
        self._swap.begin_step()
        plan = StepPlan(
            step_id=self._num_steps,
            jobs=self._jobs.send(),
            cancelled_job_ids=cancelled,
            next_job_id=self._jobs.num_given,
            cache_epochs=self._workers.epochs,
        )
        self._num_steps += 1
        self._stats_logger.maybe_log(now_s, self.stats)
        return plan

    def apply(self, report: StepReport) -> Update:
        """Takes one worker's report.

        One that makes no sense is ignored whole, and counted. Results that fit no job in flight (late, doubled,
        unknown) change nothing and are counted, but for what they say of memory that nobody writes any more.

        Raises:
          ConfigError: with the first reports of a worker that was not made for this scheduler: there are more workers
            than `num_workers`, two with one id, or one with other settings. Nothing is offloaded until that is mended.
        """
        self._reports.apply(report)
        return self.take_update()

    def take_update(self) -> Update:
        """What there is to tell without a report: what timed out, or a reset gave up, since the last call.

        `apply` tells it as well. An engine whose reports may stop coming calls this after `plan_step`.
        """
        if not self._has_news:
            return _NO_UPDATE
        loaded, failed_loads, transfers = self._transfers.take_news()
        swapped_in, lost_swaps = self._swap.take_news()
        return Update(
            loaded=loaded,
            failed_loads=failed_loads,
            transfers=transfers,
            swapped_in=swapped_in,
            lost_swaps=lost_swaps,
            lost_caches=self._reports.take_lost_caches(),
        )

    # State.

    @property
    def has_jobs(self) -> bool:
        """Whether any job is planned, in flight or due, or there is news, so that plans and updates should go on."""
        return bool(self._jobs or self._queue) or self._storage.has_plans or self._has_news

    def take_events(self) -> list[TierEvent]:
        """What changed in the host tier since the last call, in order; nothing without `record_events`.

        Of more than 10,000 chunks the next calls tell, so that no call takes long.
        """
        events = []
        for kind, changes in itertools.groupby(self._index.take_changes(_MAX_EVENT_CHUNKS), key=_event_kind):
            keys = itertools.chain.from_iterable(keys or () for keys, _ in changes)
            events.append(TierEvent(kind=kind, block_hashes=tuple(map(hashing.last_block_hash, keys))))
        return events

    def stats(self) -> OffloadStats:
        """A snapshot of the counters; may be taken from another thread."""
        breakers = self._context.breakers.values()
        stats = dataclasses.replace(
            self._counts,
            staging_budget_blocks=self._staging.num_blocks,
            staging_reserved_blocks=self._staging.num_reserved,
            staging_peak_blocks=self._staging.peak_num_reserved,
            num_host_chunks=self._index.num_slots,
            num_resident_chunks=len(self._index),
            num_evicted_chunks=self._index.num_evicted,
            num_jobs_in_flight=len(self._jobs) + len(self._queue),
            num_quarantined_chunks=self._index.num_quarantined_slots,
            num_breaker_openings=sum(breaker.num_opened for breaker in breakers),
            num_open_breakers=sum(not breaker.closed for breaker in breakers),
        )
        return self._storage.add_stats(self._swap.add_stats(stats))

    def check_invariants(self) -> None:
        """Raises AssertionError unless accounts, pins and jobs agree. For tests; O(everything)."""
        self._staging.check_invariants()
        self._index.check_invariants()
        held: dict[tuple[str, Direction], int] = {}
        self._swap.check_invariants()
        self._storage.check_invariants()
        pins: dict[ChunkKey, int] = dict(self._swap.pins())
        for key in self._storage.pins():
            pins[key] = pins.get(key, 0) + 1
        pending: list[ChunkKey] = self._storage.pending()
        loads: list[Job | WaitingLoad] = [*self._queue]
        for job in self._jobs.of(*TRANSFERS):
            account = job.account, job.direction
            held[account] = held.get(account, 0) + job.wire.num_staging_blocks
            if job.direction is Direction.SAVE:
                pending += job.keys
            else:
                loads.append(job)
        for waiting in self._queue:
            held[waiting.account, Direction.LOAD] = waiting.num_staging_blocks
            assert self._requests[waiting.request_id].load is waiting, "a load waits that nobody waits for"
        for request in self._requests.values():
            if request.promise:
                held[request.account, Direction.LOAD] = request.promise.num_staging_blocks
        for keys in (
            *(load.keys for load in loads),
            *(request.promise.keys for request in self._requests.values() if request.promise),
        ):
            pins[keys[-1]] = pins.get(keys[-1], 0) + 1
            assert not any(self._index.state(key) is ChunkState.PENDING for key in keys), "a load of what is not there"
        self._saves.check_invariants(self._requests.values())
        assert sum(held.values()) == self._staging.num_reserved
        assert all(self._staging.held(account, direction) == n for (account, direction), n in held.items())
        self._index.check_holds(pins=pins, pending=set(pending))
        late = [slot for job in self._jobs.late(*TRANSFERS) for slot in job.slots[: len(job.keys)]]
        late += self._storage.late_slots()
        counts = self._counts
        assert counts.matched_tokens <= counts.found_tokens <= counts.looked_up_tokens, "found what was not looked up"
        assert len(late) == self._index.num_quarantined_slots, "a slot in quarantine that no copy may write"

    # Inside.

    @property
    def _has_news(self) -> bool:
        return self._transfers.has_news or self._swap.has_news or self._reports.has_news

    def _plan_transfers(self, offers: Mapping[str, tuple[RequestState, Offer]], now_s: float) -> tuple[int, ...]:
        """Plans saves and loads; returns the ids of loads that are taken back."""
        if not self._enabled:
            return ()
        cancelled: tuple[int, ...] = ()
        for request, offer in offers.values():
            self._saves.offer(request, offer)
            self._requests[request.request_id] = request
        if self._transfers.has_plans:
            cancelled = self._transfers.plan(now_s)
        saves = self._saves.plan(deadline_s=now_s + self._config.job_timeout_s)
        if saves is not NO_SAVES:
            self._counts.deferred_save_blocks += saves.num_refused_chunks * self._config.blocks_per_chunk
            self._counts.dropped_save_blocks += saves.num_dropped_chunks * self._config.blocks_per_chunk
        self._storage.plan(now_s)
        return cancelled

    def _request(self, request_id: str) -> RequestState:
        """The request of this id, or a new one; that is for the caller to keep."""
        return self._requests.get(request_id) or self._new_request(request_id)

    def _new_request(self, request_id: str) -> RequestState:
        number = self._num_requests_seen
        self._num_requests_seen += 1
        account, namespace = f"{request_id}#{number}", self._context.keys.namespace
        request = RequestState(request_id, account=account, use=Use(number), namespace=namespace)
        request.limit(self._limits_of.get(request_id, self._limits))
        return request

    def _forget(self, request_id: str) -> None:
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        self._counts.dropped_save_blocks += self._saves.num_dropped(request) * self._config.blocks_per_chunk
        self._saves.withdraw(request)
        self._transfers.forget_news(request_id)
        self._counts.dropped_load_blocks += request.num_cut_load_blocks
        self._loads.release(request)
        self._index.touch(request.use, request.keys, max(request.num_saved_chunks, request.num_found_chunks))
        if request.load is not None:
            self._transfers.detach(request.load)

    def _count_lookup(self, request: RequestState) -> None:
        """Counts what its last match looked up, unless it is counted."""
        self._counts.looked_up_tokens += request.num_looked_up_tokens
        self._counts.found_tokens += request.num_found_tokens
        request.num_looked_up_tokens = request.num_found_tokens = 0

    def _read(self, changed: Iterable[ScheduledRequest]) -> Mapping[str, tuple[RequestState, Offer]]:
        """What the engine says of its requests, by their ids: all of it is looked at before any of it counts."""
        if type(changed) is list or type(changed) is tuple:
            if not changed:  # nearly always
                return _NO_OFFERS
        else:
            check_iterable(changed, "a step names", "ScheduledRequests")
        offers: dict[str, tuple[RequestState, Offer]] = {}
        for named in changed:
            scheduled = check_scheduled(named, num_groups=self._context.num_groups)
            request_id = scheduled.request_id
            request = self._requests.get(request_id) or self._new_request(request_id)
            offer = self._saves.read(request, scheduled)
            if offer is not None:
                offers[request_id] = request, offer
            elif offers:
                offers.pop(request_id, None)
        return offers


def _event_kind(change: Changes) -> TierEventKind:
    keys, found = change
    if keys is None:
        return TierEventKind.CLEARED
    return TierEventKind.STORED if found else TierEventKind.REMOVED
