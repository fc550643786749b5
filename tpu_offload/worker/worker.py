"""The worker: dispatches the copies of a `StepPlan` and reports their results in a `StepReport`.

    kv_caches = worker.begin_step(plan, kv_caches)   # demotions, early saves, swaps, loads
    kv_caches = forward(kv_caches, ...)
    worker.end_step(plan, kv_caches)                 # saves
    report = worker.poll()

With a `fused` path some copies are inside the forward pass (see `kernels.fused`):

    kv_caches = worker.begin_step(plan, kv_caches, fuse=True)
    fused = worker.fused_step()
    kv_caches, outcome = forward(kv_caches, fused.segment, fused.inputs, ...)
    worker.end_step(plan, kv_caches, outcome)

Why a block may be overwritten as soon as `end_step` has returned (rule 4 of docs/architecture.md, "Data flow"):
programs that one thread dispatches take effect in that order. On TPU and GPU they run in that order. On every backend a
donated buffer, and the next step donates the caches, is not written before the programs dispatched earlier have read
it. So a save dispatched after the forward pass reads what the pass wrote, and nothing that a later step writes; and a
forward pass dispatched after a load reads the loaded blocks. No method waits for a copy, unless it says so: `poll`
checks whether its token is ready.

This file is long because the documentation of every call that an engine makes is here.
"""

import dataclasses
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, final

import jax

from tpu_offload.config import OffloadConfig
from tpu_offload.core.validate import check_kinds
from tpu_offload.errors import CachesLostError
from tpu_offload.kernels import FusedOutcome, FusedStep
from tpu_offload.layout import KVLayout
from tpu_offload.memory import available_nbytes
from tpu_offload.types import STORAGE_WRITES, CacheEpoch, CopyJob, JobKind, JobResult, Pool, StepPlan, StepReport
from tpu_offload.worker.arrays import is_ready, wait_for_all, wait_for_any
from tpu_offload.worker.host_memory import HostPlan, plan_host_pools
from tpu_offload.worker.jobs import WorkerJobs
from tpu_offload.worker.page_group_copies import WrapCopier, unwrapped
from tpu_offload.worker.plan_gate import PlanGate
from tpu_offload.worker.setup import check_caches, check_count, describe_setup
from tpu_offload.worker.storage.stack import StorageStack
from tpu_offload.worker.swapping import SwapCopies
from tpu_offload.worker.tier_copies import TierCopies
from tpu_offload.worker.tier_pools import TierPools
from tpu_offload.worker.validate import sound_plan

_logger = logging.getLogger(__name__)

_OFF = "offloading is off on this worker: it has no host pool"
_NO_STORAGE = "this worker has no storage tier"
MAX_CLOSE_S = 20.0  # of the 30 s that Kubernetes leaves a pod to end in
MAX_WAIT_S = 1.0  # in one `poll`, so that its caller can expire overdue jobs in between

Caches = list[jax.Array]


_STORAGE_WRITES = frozenset(STORAGE_WRITES)
_AFTER_PASS = _STORAGE_WRITES | {JobKind.SAVE}  # what `end_step` starts

type _Copies = StorageStack | TierCopies | SwapCopies
type _OfKind = Mapping[JobKind, Sequence[CopyJob]]


@final
class OffloadWorker:
    """Owns the host pool of one process and copies between it and the KV caches.

    All methods are called by the thread that dispatches the model. A copy that fails is reported as a FAILED result;
    `begin_step`, `end_step` and `resume_loads` raise only if the caches are lost.

    Args:
      config: the settings.
      layout: the result of `KVLayout.from_caches` for these caches.
      kv_caches: per layer, dtype[num_blocks, *page_shape]; only shapes and shardings are read.
      worker_id: included in every report; 0 to num_workers - 1.
      holder_id: numbers what the worker has in private storage tiers. Workers of several engines that are given the
        same directory or prefix each need a different one. None for worker_id.
      clock: seconds, monotonic.
      available: free bytes of host memory; None measures them.
      fused: the engine runs the fused copies in its own step, so a path may be `fused`.
      wrap_copier: wraps the copiers, except the copies inside the engine's step; for tests in which copies fail.
      incarnation: included in every report, at least 1; greater than in any earlier incarnation of this worker. None
        takes the time of day, in ns.
    Raises:
      LayoutError: the layout does not describe these caches, or the host tier cannot hold their blocks.
      ConfigError: a size in `config` is invalid for the layout, a path is `fused` and the engine does not support it,
        a path is `auto` and the profile cannot be used, or the storage tier cannot be made.
      CompileError: a copy program does not compile for these caches, or takes more HBM than its bound. With
        `skip_jax_precompile` the jobs that need it fail instead.
    """

    def __init__(
        self,
        config: OffloadConfig,
        layout: KVLayout,
        kv_caches: Sequence[Any],
        *,
        worker_id: int = 0,
        holder_id: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        available: int | None = None,
        fused: bool = False,
        wrap_copier: WrapCopier = unwrapped,
        incarnation: int | None = None,
    ) -> None:
        worker_id = check_count("worker_id", worker_id)
        holder_id = worker_id if holder_id is None else check_count("holder_id", holder_id)
        incarnation = time.time_ns() if incarnation is None else check_count("incarnation", incarnation, least=1)
        check_kinds(config, layout)
        check_caches(layout, kv_caches)
        self._timeout_s = config.job_timeout_s
        self._jobs = WorkerJobs(clock)
        if config.enabled:
            layout.check_tier()
        if config.enabled or config.swap_enabled:
            available = available_nbytes() if available is None else available
        pools = plan_host_pools(config, layout, kv_caches, available or 0)
        self._num_host_slots = pools.num_first_slots
        self._no_memory = (0,) * len(pools.pools), 0, 0
        # The last plan, as it was passed (None once it has ended), and without its invalid or stale jobs.
        self._plan: tuple[StepPlan | None, StepPlan] = None, StepPlan(step_id=0)
        self._tier: TierCopies | None = None
        self._swap: SwapCopies | None = None
        self._storage: StorageStack | None = None
        try:
            self._tier = self._make_tier(config, layout, kv_caches, pools=pools, fused=fused, wrap_copier=wrap_copier)
            if config.swap_enabled:
                left = max(0, (available or 0) - pools.nbytes)
                self._swap = self._make_swap(
                    config, layout, kv_caches, available=left, clock=clock, wrap_copier=wrap_copier
                )
            self._storage = self._make_storage(config, layout, worker_id=worker_id, holder_id=holder_id)
            setup = describe_setup(config, layout, kv_caches, self._tier, self._storage)
        except BaseException:  # whoever keeps it, to log it or to try again, keeps what was made
            self._close_copies()
            raise
        self._copies: list[_Copies] = [c for c in (self._storage, self._tier, self._swap) if c is not None]
        self._is_closed = False
        self._gate = PlanGate(CacheEpoch(worker_id=worker_id, incarnation=incarnation, num_losses=0), setup)
        self._reported: tuple[Any, ...] = self._no_memory, (), 0, (), 0, setup  # the last `_state` that was reported
        self._report: StepReport | None = None  # of this state, once it was made

    def _make_tier(
        self,
        config: OffloadConfig,
        layout: KVLayout,
        kv_caches: Sequence[Any],
        *,
        pools: HostPlan,
        fused: bool,
        wrap_copier: WrapCopier,
    ) -> TierCopies | None:
        if not all(self._num_host_slots):
            return None
        return TierCopies(config, layout, kv_caches, pools=pools, jobs=self._jobs, fused=fused, wrap_copier=wrap_copier)

    def _make_swap(
        self,
        config: OffloadConfig,
        layout: KVLayout,
        kv_caches: Sequence[Any],
        *,
        available: int,
        clock: Callable[[], float],
        wrap_copier: WrapCopier,
    ) -> SwapCopies:
        return SwapCopies(
            config,
            layout,
            kv_caches,
            jobs=self._jobs,
            available=available,
            tier=self._tier.pools.sources() if self._tier is not None else (),
            clock=clock,
            wrap_copier=wrap_copier,
        )

    def _make_storage(
        self, config: OffloadConfig, layout: KVLayout, *, worker_id: int, holder_id: int
    ) -> StorageStack | None:
        if not config.has_storage or self._tier is None:
            return None
        return StorageStack(
            config,
            layout,
            memories=self._tier.pools.memories(),
            jobs=self._jobs,
            worker_id=worker_id,
            holder_id=holder_id,
        )

    @property
    def cache_epoch(self) -> CacheEpoch:
        """Identifies the worker's present KV caches; see `OffloadScheduler.mark_caches_lost`."""
        return self._gate.epoch

    def mark_caches_lost(self) -> CacheEpoch:
        """The engine has lost the KV caches in another way, such as a failed forward pass that donated them.

        Called before the next `begin_step`, with the new caches. Loads in flight are cancelled, and so are the jobs of
        plans that were made before the scheduler knew of the loss, from the next report or from the engine
        (`OffloadScheduler.mark_caches_lost`). `begin_step` does the same before it raises CachesLostError.

        Returns:
          The epoch of the new caches.
        """
        given, plan = self._plan
        self._plan = None, dataclasses.replace(plan, jobs=())
        self._gate.mark_caches_lost()
        self._jobs.cancel_loads()
        if self._tier is not None:
            self._tier.abandon_pass()
            self._tier.abandon_backlog()
        if given is not None:
            self._cancel_unbegun(plan.jobs)
            self._jobs.raise_watermark(plan.next_job_id)
        return self._gate.epoch

    @property
    def num_host_chunks(self) -> int:
        """Chunks that the host pool will have when it is fully allocated; reports say how many it has now.

        With states that is at first: later memory moves between chunks and states (`HostDivision`).
        """
        return self._num_host_slots[Pool.CHUNKS]

    @property
    def num_host_states(self) -> int:
        """Likewise, rows of states; 0 for a layout without them."""
        return sum(self._num_host_slots[Pool.STATES :])

    def begin_step(
        self, plan: StepPlan, kv_caches: Caches, *, fuse: bool = False, urgent: Collection[int] = ()
    ) -> Caches:
        """Dispatches what a plan has before the forward pass: demotions, early saves, swaps and loads; starts reads.

        Call it with an empty plan too: staged loads that have arrived are written into the caches here.

        Args:
          plan: from the scheduler. Invalid jobs in it fail. A plan that comes a second time, or after a later one, is
            ignored.
          kv_caches: per layer, dtype[num_blocks, *page_shape]; donated.
          fuse: the forward pass that follows takes `fused_step()`. Without it nothing waits for the pass, and what the
            fused path would have copied uses the direct path.
          urgent: ids of the plan's loads that the forward pass reads, for an engine that does not wait for loads. If
            they are not staged they are dispatched first and whole, whatever `max_load_gb_per_step` is.
        Returns:
          The caches to use from now on.
        Raises:
          CachesLostError: a load failed after its program had taken the donated caches. With `end_step` and
            `resume_loads`, the only methods that raise after construction: without caches the engine cannot continue.
            Every job of the plan that had not begun is cancelled, and no `end_step` follows; the next plan comes with
            new caches. Plans that were made before the scheduler knew of the loss may still come: their jobs are
            cancelled.
        """
        given, tier = plan, self._tier
        plan = self._sound(plan)
        if not self._gate.begin(plan):
            return kv_caches
        if plan.division is not None and tier is not None:
            tier.pools.divide(plan.division)
        if self._gate.is_stale(plan):
            plan = self._refuse_stale(plan)
        self._plan = given, plan
        jobs = plan.by_kind()
        if _AFTER_PASS.isdisjoint(jobs):  # else `end_step` starts the last of them
            self._jobs.raise_watermark(plan.next_job_id)
            if plan.empty and (tier is None or not (tier.has_flights or tier.awaits_pass)):
                return kv_caches  # nearly always
        if tier is not None:
            tier.abandon_pass()
        kv_caches = list(kv_caches)  # the programs are compiled for a list
        try:
            self._begin(plan, jobs, kv_caches, fuse=fuse, urgent=urgent)
        except CachesLostError:
            self.mark_caches_lost()
            raise
        return kv_caches

    def resume_loads(self, kv_caches: Caches) -> Caches:
        """Continues the loads in progress, for an engine that waits for a load before its forward pass.

        Called after `begin_step`, any number of times; on several hosts the same number of times on each. There each
        host waits here for its copies, in the same order, because which have arrived differs between hosts.

        Args:
          kv_caches: per layer, dtype[num_blocks, *page_shape]; donated.
        Returns:
          The caches to use from now on.
        Raises:
          CachesLostError: as in `begin_step`; the saves of the current plan are cancelled.
        """
        if self._tier is None or not self._tier.has_flights:
            return kv_caches
        kv_caches = list(kv_caches)
        try:
            self._tier.resume(kv_caches)
        except CachesLostError:
            self.mark_caches_lost()
            raise
        return kv_caches

    def has_begun(self, plan: StepPlan) -> bool:
        """Whether this plan, or a later one, has begun, so that `begin_step` would ignore it."""
        return self._gate.has_begun(self._sound(plan))

    def is_stale(self, plan: StepPlan) -> bool:
        """Whether a plan was made for lost caches or for an earlier incarnation: its jobs are cancelled."""
        return self._gate.is_stale(plan)

    def _begin(self, plan: StepPlan, jobs: _OfKind, kv_caches: Caches, *, fuse: bool, urgent: Collection[int]) -> None:
        """Dispatches the copies before the forward pass; caches that are written are replaced in the list."""
        early, loads = jobs.get(JobKind.EARLY_SAVE, ()), jobs.get(JobKind.LOAD, ())
        outs, ins = jobs.get(JobKind.SWAP_OUT, ()), jobs.get(JobKind.SWAP_IN, ())
        # Demotions read slots before saves and promotions of this plan, or of a later one, write them.
        demotions = jobs.get(JobKind.DEMOTE, ())
        if self._storage is None:
            self._refuse(demotions, _NO_STORAGE)
        elif demotions:
            self._storage.write(demotions)
        # Early saves and swap-outs read their blocks before loads, swap-ins or the forward pass write them.
        if self._tier is None:
            self._refuse((*early, *loads), _OFF)
        elif early:
            self._tier.save_early(early, kv_caches)
        if self._swap is None:
            self._refuse((*outs, *ins), "request swap is off on this worker: it has no swap pool")
        elif outs:
            self._swap.swap(outs, kv_caches)
        lookups, promotions = jobs.get(JobKind.LOOKUP, ()), jobs.get(JobKind.PROMOTE, ())
        if self._storage is None:
            self._refuse((*lookups, *promotions), _NO_STORAGE)
        elif lookups or promotions:
            self._storage.look_up(lookups)
            self._storage.promote(promotions)
        if self._tier is not None:
            # A segment that a promotion is being written to must not go into the pass: it may be lost.
            is_landing = self._storage is not None and self._storage.is_landing
            self._tier.begin(plan, jobs, kv_caches, fuse=fuse and not is_landing, urgent=urgent)
        if self._swap is not None and ins:
            self._swap.swap(ins, kv_caches)

    def _refuse_stale(self, plan: StepPlan) -> StepPlan:
        """Cancels the jobs of a plan that was made for other caches; returns the plan without them."""
        num_jobs = len(plan.jobs)
        if num_jobs:
            _logger.warning(
                "plan %d was made before the scheduler knew the KV caches of worker %d (epoch %d): its %d jobs are "
                "cancelled",
                plan.step_id, self._gate.epoch.worker_id, self._gate.epoch.num_losses, num_jobs,
            )  # fmt: skip
        self._cancel_unbegun(plan.jobs)
        return dataclasses.replace(plan, jobs=())

    def _cancel_unbegun(self, jobs: Iterable[CopyJob]) -> None:
        """Ends each of these jobs that has not begun, as cancelled."""
        for job in jobs:
            if not self._jobs.knows(job.job_id):
                self._jobs.start(job.job_id)
                self._jobs.cancel(job.job_id, unwritten=True)
                self._jobs.drop_ref([job.job_id])

    @property
    def offers_fused(self) -> bool:
        """Whether any path is `fused`, so that `fused_step` may have copies."""
        return self._tier is not None and self._tier.offers_fused

    def fused_step(self) -> FusedStep:
        """What the forward pass has to copy, after `begin_step(..., fuse=True)`; often nothing.

        `end_step`, `abort_step` or the next `begin_step` must follow even if the pass fails. The segment is donated: a
        pass that fails once it is dispatched destroys it, and its chunks are lost.
        """
        return FusedStep() if self._tier is None else self._tier.fused_step()

    def fused_shapes(self) -> list[FusedStep]:
        """Shape structs of every `fused_step` that copies anything, for compiling the engine's step in advance."""
        return [] if self._tier is None else self._tier.fused_shapes()

    def end_step(self, plan: StepPlan, kv_caches: Caches, outcome: FusedOutcome | None = None) -> None:
        """Dispatches the saves of a plan, and its copies to storage, after the forward pass.

        Args:
          plan: the plan that was passed to `begin_step`; any other, or the same one again, is ignored.
          kv_caches: the caches that the forward pass returned; only read.
          outcome: the result of its copies, if the forward pass took `fused_step()`.
        Raises:
          CachesLostError: these caches are deleted, because the forward pass has failed or returned others. As in
            `begin_step`, the loss is counted, and the saves of the plan are cancelled.
        """
        current = self._take_current(plan)
        if current is None:
            return
        plan, jobs = current, current.by_kind()
        saves = jobs.get(JobKind.SAVE, ())
        if self._tier is None:
            self._refuse(saves, _OFF)
        elif saves or self._tier.awaits_pass:
            try:
                self._tier.end(saves, list(kv_caches), outcome)
            except CachesLostError:
                self._plan = plan, plan  # so that its saves are cancelled
                self.mark_caches_lost()
                raise
            self._jobs.raise_watermark(plan.next_job_id)
        if not _STORAGE_WRITES.isdisjoint(jobs):
            self._write_storage(plan)

    def abort_step(self, plan: StepPlan) -> None:
        """In place of `end_step`: the forward pass was not executed, or has failed, and the KV caches are whole.

        The saves of the plan are cancelled. Copies that were to be inside the pass have failed; loads that `begin_step`
        has dispatched have not. Copies to storage are dispatched: they read host memory. The scheduler has to know, too
        (`OffloadScheduler.abort_step`): otherwise it plans the saves again. Caches that are lost need
        `mark_caches_lost` instead.

        Args:
          plan: as for `end_step`.
        """
        current = self._take_current(plan)
        if current is None:
            return
        if self._tier is not None and self._tier.awaits_pass:  # then all saves have begun
            self._tier.abort_pass()
        else:
            self._cancel_unbegun(current.of(JobKind.SAVE))
        self._write_storage(current)

    def poll(self, *, wait: bool = False, wait_s: float = MAX_WAIT_S) -> StepReport:
        """Reports the jobs that ended since the last call.

        Args:
          wait: for an engine that has nothing to compute: block until a job has ended, or until a staged load has
            arrived and needs the next `begin_step`, for at most about a second. Returns at once if nothing is in
            flight.
          wait_s: waits no longer than this, for an engine that has something to do by then.
        """
        if self.has_flights:
            self._collect()
            until_s = time.monotonic() + min(wait_s, MAX_WAIT_S) if wait else 0.0
            while wait and self.has_flights and not self._jobs.has_results and self._wait_for_one(until_s):
                self._collect()
        state = self._state()
        if not self._jobs.has_results and state == self._reported:
            if self._report is None:
                self._report = self._make_report(state)
            return self._report
        # A segment is lost only when a job fails, so without results there is no loss to report yet. A loss in one page
        # group may come before the job's result; until then the checks of jobs refuse its places.
        lost = self._tier.pools.take_lost() if self._tier else ()
        lost_swap = self._swap.take_lost() if self._swap else ()
        self._reported, self._report = state, None
        return self._make_report(state, self._jobs.take_results(), lost_slots=lost, lost_swap_blocks=lost_swap)

    def take_written_loads(self) -> tuple[int, ...]:
        """Loads whose last write into the caches was dispatched since the last call.

        Programs dispatched from now on read the loaded blocks, so an engine with one worker need not wait for the
        results. Those follow, and until then the chunks stay pinned in the host tier.
        """
        return self._jobs.take_written()

    def wait_until_allocated(self) -> None:
        """Blocks until all host memory is allocated or allocation has failed; for warm-up, benchmarks and tests."""
        for pool in self._pools():
            pool.wait_until_allocated()

    @property
    def has_flights(self) -> bool:
        """Whether copies are in flight, so that a later `poll` has more to report."""
        for copies in self._copies:  # noqa: SIM110 - in every step, and a generator takes 2 us of 20
            if copies.has_flights:
                return True
        return False

    @property
    def hbm_nbytes(self) -> int:
        """Most bytes of HBM that copies take on each device, beside the caches.

        The temporaries of the programs, as compiled, and the staging buffer if a path uses it. The bounds of these
        temporaries are two blocks for direct copies, whatever their number, one block for staged ones, and two blocks
        of the largest page group for swaps; each on TPU at least 4 MiB for each page group. The bounds are reported
        until the programs are compiled (with `skip_jax_precompile`, at their first use), and on CPU, where the compiler
        counts host memory.
        """
        return sum(copies.hbm_nbytes for copies in self._copies)

    def close(self) -> None:
        """Waits for the copies in flight and frees the host pool. Jobs that have not ended are never reported.

        It waits at most the job timeout or `MAX_CLOSE_S`; copies still in flight then are left to the runtime. Calls
        after the first do nothing.
        """
        if self._is_closed:
            return
        waiting_on = [array for copies in self._copies for array in copies.waiting_on(all_of_them=True)]
        timeout_s = min(self._timeout_s, MAX_CLOSE_S)
        if not wait_for_all(waiting_on, timeout_s=timeout_s):
            num_left = sum(not is_ready(array) for array in waiting_on)
            _logger.error("closing with %d copies still in flight after %g s", num_left, timeout_s)
        self._jobs.clear()
        self._close_copies()
        self._is_closed = True  # not before: what was interrupted can be repeated

    # Inside.

    def _take_current(self, plan: StepPlan) -> StepPlan | None:
        """The valid part of the plan that has begun, which ends now; None if this is another one."""
        given, sound = self._plan
        if plan is given:
            plan = sound
        else:  # unpickled a second time, or not the one that has begun
            plan = self._sound(plan)
            if given is None or plan.step_id != sound.step_id:
                if plan.of(JobKind.SAVE, *STORAGE_WRITES):
                    self._gate.ignore_end(plan)
                return None
            if self._gate.is_stale(plan):
                plan = sound
        self._plan = None, sound
        return plan

    def _write_storage(self, plan: StepPlan) -> None:
        """Dispatches the copies of a plan to storage, the last of its jobs to begin."""
        writes = plan.of(*STORAGE_WRITES)
        if self._storage is None:
            self._refuse(writes, _NO_STORAGE)
        else:
            self._storage.write(writes)
        self._jobs.raise_watermark(plan.next_job_id)

    def _sound(self, plan: StepPlan) -> StepPlan:
        """The valid part of a plan from the engine."""
        return sound_plan(plan, last=self._plan[1].step_id, num_pools=len(self._num_host_slots))

    def _state(self) -> tuple[Any, ...]:
        """What reports say beside what has ended; mostly the same as last time."""
        tier, swap, jobs, gate = self._tier, self._swap, self._jobs, self._gate
        memory = tier.pools.advance() if tier is not None else self._no_memory
        num_swap = swap.num_blocks_ready if swap is not None else ()
        return memory, num_swap, jobs.oldest_id, jobs.storage_ids, gate.epoch.num_losses, gate.setup

    def _make_report(self, state: tuple[Any, ...], results: tuple[JobResult, ...] = (), **lost: Any) -> StepReport:
        """A report of a `_state`, of the jobs that ended, and of what was lost."""
        memory, num_swap, oldest_id, storage_ids, num_losses, setup = state
        return StepReport(
            worker_id=self._gate.epoch.worker_id,
            results=results,
            num_host_slots=memory[0],
            num_host_segments=memory[1],
            division_id=memory[2],
            num_swap_blocks=num_swap,
            oldest_job_id=oldest_id,
            storage_job_ids=storage_ids,
            incarnation=self._gate.epoch.incarnation,
            num_cache_losses=num_losses,
            setup=setup,
            **lost,
        )

    def _refuse(self, jobs: Iterable[CopyJob], error: str) -> None:
        for job in jobs:
            if not self._jobs.knows(job.job_id):
                self._jobs.start(job.job_id)
                self._jobs.drop_ref([job.job_id], error)

    def _close_copies(self) -> None:
        for pool in self._pools():  # all of them, before the first is waited for
            pool.stop_growing()
        for copies in (self._storage, self._tier, self._swap):
            if copies is not None:
                copies.close()

    def _collect(self) -> None:
        for copies in self._collectable():
            copies.collect()

    def _collectable(self) -> list[_Copies]:
        """All copies, but not storage while a forward pass may have the segment that it would write."""
        awaits_pass = self._tier is not None and self._tier.awaits_pass
        return [copies for copies in self._copies if not (awaits_pass and copies is self._storage)]

    def _pools(self) -> list[TierPools | SwapCopies]:
        tier = self._tier.pools if self._tier is not None else None
        return [pools for pools in (tier, self._swap) if pools is not None]

    def _wait_for_one(self, until_s: float) -> bool:
        """Waits until `poll` can make progress; False if no copy lets it, or the time is up."""
        if self._tier is not None and self._tier.awaits_begin:
            return False
        timeout_s = until_s - time.monotonic()
        if timeout_s <= 0.0:
            return False
        collectable = self._collectable()
        waiting_on = [array for copies in collectable for array in copies.waiting_on()]
        if self._storage in collectable and self._storage.has_flights:
            # Storage may take long, and a load that has arrived needs a begin_step.
            loads = self._tier.waiting_on(all_of_them=True) if self._tier else []
            wait_for_any([*waiting_on, *loads], timeout_s=timeout_s)
            return any(map(is_ready, waiting_on))
        if waiting_on:
            return wait_for_any(waiting_on, timeout_s=timeout_s)
        # The rest needs a begin_step. Wait for it here, or an idle engine would spin.
        wait_for_any(self._tier.waiting_on(all_of_them=True) if self._tier else [], timeout_s=timeout_s)
        return False
