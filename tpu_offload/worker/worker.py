"""The worker: does the copies that a `StepPlan` asks for, and says in a `StepReport` how they ended.

    kv_caches = worker.begin_step(plan, kv_caches)   # early saves, loads
    kv_caches = forward(kv_caches, ...)
    worker.end_step(plan, kv_caches)                 # saves
    report = worker.poll()

With a `fused` path some copies are inside the forward pass instead (see `kernels.fused`):

    kv_caches = worker.begin_step(plan, kv_caches, fuse=True)
    fused = worker.fused_step()
    kv_caches, outcome = forward(kv_caches, fused.segment, fused.inputs, ...)
    worker.end_step(plan, kv_caches, outcome)

Why a block may be overwritten as soon as `end_step` has returned (rule 4 of the design): jax runs what
one thread dispatches as if in order. On TPU and GPU programs run in the order they were dispatched. On
every backend a buffer that is donated, as the next step donates the caches, is not written before the
programs dispatched earlier have read it. So a save dispatched after the forward pass sees what the pass
wrote, and a later step, dispatched after the save, cannot be seen by it. The same holds the other way
round for loads: a forward pass dispatched after a load sees its blocks. Nothing here waits for a copy;
whether it is over is asked of its token, in `poll`.
"""

import dataclasses
import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, final

import jax

from tpu_offload.config import OffloadConfig
from tpu_offload.errors import CachesLostError, ConfigError, LayoutError
from tpu_offload.kernels import FusedOutcome, FusedStep
from tpu_offload.layout import KVLayout
from tpu_offload.memory import available_nbytes, cap_chunks, plan_segments, plan_shared_segments
from tpu_offload.types import CacheEpoch, CopyJob, Direction, JobKind, StepPlan, StepReport, WorkerSetup
from tpu_offload.values import as_count, one_line
from tpu_offload.worker.arrays import is_ready, wait_for_all, wait_for_any
from tpu_offload.worker.group_copies import WrapCopier, unwrapped
from tpu_offload.worker.jobs import WorkerJobs
from tpu_offload.worker.plan_gate import PlanGate
from tpu_offload.worker.storage_io import StorageCopies
from tpu_offload.worker.swapping import SwapCopies
from tpu_offload.worker.tier import TierCopies
from tpu_offload.worker.validate import sound_plan

_logger = logging.getLogger(__name__)

_OFF = "offloading is off on this worker: it has no host pool"
_NO_STORAGE = "this worker has no storage tier"
_MAX_WAIT_S = 1.0  # of one `poll`: what its caller does between two of them, as failing overdue jobs, goes on

Caches = list[jax.Array]


@final
class OffloadWorker:
    """Owns the host pool of one process and copies between it and the KV caches.

    All methods are called by the thread that dispatches the model. A copy that goes wrong ends as a
    FAILED result; the one error that `begin_step` and `end_step` raise is that the caches are gone.

    Args:
      config: the settings.
      layout: what `KVLayout.from_caches` says of the caches.
      kv_caches: per layer, dtype[num_blocks, *page_shape]; only shapes and shardings are read.
      worker_id: goes into every report; 0 to num_workers - 1.
      clock: seconds, monotonic.
      available: bytes of host memory that are left; None finds out.
      fused: the engine runs the fused functions in its own step, so that a path may be `fused`.
      wrap_copier: puts something around the copy paths, but for the copies inside the engine's step; for tests that
        have copies fail.
      incarnation: goes into every report, greater than in those of an earlier life of this worker; None takes the
        time of day, in ns.
    Raises:
      LayoutError: the caches are not those that the layout describes, or the host tier cannot hold their blocks.
      ConfigError: a size in `config` makes no sense for the layout, a path is `fused` and the engine does
        not offer it, a path is `auto` and the profile cannot be used, or the storage tier cannot be made.
      CompileError: a copy program does not compile for these caches, or takes more HBM than `hbm_nbytes` may be. With
        `skip_jax_precompile` the jobs that need it fail instead.
    """

    def __init__(
        self,
        config: OffloadConfig,
        layout: KVLayout,
        kv_caches: Sequence[Any],
        *,
        worker_id: int = 0,
        clock: Callable[[], float] = time.monotonic,
        available: int | None = None,
        fused: bool = False,
        wrap_copier: WrapCopier = unwrapped,
        incarnation: int | None = None,
    ) -> None:
        worker_id = _check_count("worker_id", worker_id)
        incarnation = time.time_ns() if incarnation is None else _check_count("incarnation", incarnation)
        _check_caches(layout, kv_caches)
        self._timeout_s = config.job_timeout_s
        self._jobs = WorkerJobs(clock)
        if config.enabled:
            layout.check_tier()
        if config.enabled or config.swap_enabled:
            available = available_nbytes() if available is None else available
        self._num_host_chunks, segments = 0, (0, 1)
        if config.enabled:
            self._num_host_chunks, segments = _plan_pool(config, layout, kv_caches, available or 0)
        # The last plan, as it was given, and what there is to do of it; None when it has ended.
        self._plan: tuple[StepPlan | None, StepPlan] = None, StepPlan(step_id=0)
        self._tier: TierCopies | None = None
        self._swap: SwapCopies | None = None
        if self._num_host_chunks:
            self._tier = TierCopies(
                config,
                layout,
                kv_caches,
                num_chunks=self._num_host_chunks,
                segments=segments,
                jobs=self._jobs,
                fused=fused,
                wrap_copier=wrap_copier,
            )
        if config.swap_enabled:
            taken = self._num_host_chunks * layout.block_nbytes_per_host * config.blocks_per_chunk
            self._swap = SwapCopies(
                config,
                layout,
                kv_caches,
                jobs=self._jobs,
                available=max(0, (available or 0) - taken),
                tier=self._tier.sources() if self._tier is not None else (),
                clock=clock,
                wrap_copier=wrap_copier,
            )
        self._storage: StorageCopies | None = None
        if config.storage_chunks and self._tier is not None:
            memories = self._tier.memories()
            self._storage = StorageCopies(
                config, layout, kv_caches, memories=memories, jobs=self._jobs, worker_id=worker_id
            )
        setup = _describe(config, layout, kv_caches, self._tier)
        self._gate = PlanGate(CacheEpoch(worker_id=worker_id, incarnation=incarnation, num_losses=0), setup)
        self._report = StepReport(
            worker_id=worker_id, results=(), num_host_chunks=0, incarnation=incarnation, setup=setup
        )

    @property
    def cache_epoch(self) -> CacheEpoch:
        """Names the KV caches that the worker has now; see `OffloadScheduler.lose_caches`."""
        return self._gate.epoch

    def lose_caches(self) -> CacheEpoch:
        """The engine has lost the KV caches for a reason of its own, as a forward pass that took them along.

        Called before the next `begin_step`, with the new caches. What is in flight into the old ones has brought
        nothing, and nothing is done of plans that were made before the scheduler heard of it: by the next report, or
        from the engine (`OffloadScheduler.lose_caches`). `begin_step` does the same before it raises CachesLostError.

        Returns:
          The epoch of the new caches.
        """
        given, plan = self._plan
        self._plan = None, dataclasses.replace(plan, jobs=())
        self._gate.lose_caches()
        self._jobs.lose_loads()
        if self._tier is not None:
            self._tier.abandon_pass()
            self._tier.abandon_backlog()
        if given is not None:
            self._cancel_unbegun(plan)
            self._jobs.see_all_below(plan.next_job_id)
        return self._gate.epoch

    @property
    def num_host_chunks(self) -> int:
        """Chunks that the host pool will have when all of it is allocated; reports say how many it has."""
        return self._num_host_chunks

    def begin_step(
        self, plan: StepPlan, kv_caches: Caches, *, fuse: bool = False, urgent: Collection[int] = ()
    ) -> Caches:
        """Dispatches the early saves and loads of a plan, before the forward pass.

        Also with an empty plan: staged loads that have arrived are written into the caches here.

        Args:
          plan: what the scheduler wants. Jobs in it that make no sense fail. A plan that comes a second time, or after
            a later one, is ignored.
          kv_caches: per layer, dtype[num_blocks, *page_shape]; donated.
          fuse: a forward pass follows that takes `fused_step()` along. Without it nothing waits for one:
            what the fused path would have taken goes by the direct path.
          urgent: ids of loads of the plan that the forward pass computes with, for an engine that does not wait for
            them. If they are not staged they go before all others, whole, whatever `max_load_gb_per_step` is.
        Returns:
          The caches to use from now on.
        Raises:
          CachesLostError: a load failed after its program had taken the donated caches. The only error that
            leaves this class once it is built, here and in `end_step`: without caches there is nothing to go on
            with. All of the plan that had not begun has ended then, and no `end_step` follows; the next plan comes
            with new caches. Plans that were made before the scheduler heard of it may still come: their jobs are
            cancelled.
        """
        given, tier = plan, self._tier
        plan = sound_plan(plan, last=self._plan[1].step_id)
        if not self._gate.begin(plan):
            return kv_caches
        if self._gate.is_stale(plan):
            plan = self._refuse_stale(plan)
        self._plan = given, plan
        if not plan.of(JobKind.SAVE, JobKind.CASCADE):  # else `end_step` starts the last of them
            self._jobs.see_all_below(plan.next_job_id)
            if plan.empty and (tier is None or not (tier.has_flights or tier.awaits_pass)):
                return kv_caches
        if tier is not None:
            tier.abandon_pass()
        kv_caches = list(kv_caches)  # the programs are compiled for a list
        try:
            self._begin(plan, kv_caches, fuse=fuse, urgent=urgent)
        except CachesLostError:
            self.lose_caches()
            raise
        return kv_caches

    def resume_loads(self, kv_caches: Caches) -> Caches:
        """Goes on with the loads that are left, for an engine that waits for a load before its forward pass.

        Called after `begin_step`, any number of times; on several hosts the same number of times on each. There each
        waits for its copies here, in the same order, because which have arrived differs between them.

        Args:
          kv_caches: per layer, dtype[num_blocks, *page_shape]; donated.
        Returns:
          The caches to use from now on.
        Raises:
          CachesLostError: as `begin_step`; the saves of the plan at hand are cancelled.
        """
        if self._tier is None or not self._tier.has_flights:
            return kv_caches
        kv_caches = list(kv_caches)
        try:
            self._tier.resume(kv_caches)
        except CachesLostError:
            self.lose_caches()
            raise
        return kv_caches

    def has_begun(self, plan: StepPlan) -> bool:
        """Whether this plan, or a later one, has begun, so that `begin_step` would ignore it."""
        return self._gate.has_begun(sound_plan(plan, last=self._plan[1].step_id))

    def is_stale(self, plan: StepPlan) -> bool:
        """Whether a plan was made for caches, or for an incarnation, that are gone: its jobs are cancelled."""
        return self._gate.is_stale(plan)

    def _begin(self, plan: StepPlan, kv_caches: Caches, *, fuse: bool, urgent: Collection[int]) -> None:
        """Dispatches what goes before the forward pass; caches that are written are replaced in the list."""
        early, outs, loads, ins = map(plan.of, (JobKind.EARLY_SAVE, JobKind.SWAP_OUT, JobKind.LOAD, JobKind.SWAP_IN))
        # What leaves its blocks is read before anything is written into them: loads, swap-ins, the forward pass.
        if self._tier is None:
            self._refuse((*early, *loads), _OFF)
        elif early:
            self._tier.save_early(early, kv_caches)
        if self._swap is None:
            self._refuse((*outs, *ins), "request swap is off on this worker: it has no swap pool")
        elif outs:
            self._swap.swap(outs, kv_caches)
        promotions = plan.of(JobKind.PROMOTE)
        if self._storage is None:
            self._refuse(promotions, _NO_STORAGE)
        elif promotions:
            self._storage.promote(promotions)
        if self._tier is not None:
            self._tier.begin(plan, kv_caches, fuse=fuse, urgent=urgent)
        if self._swap is not None and ins:
            self._swap.swap(ins, kv_caches)

    def _refuse_stale(self, plan: StepPlan) -> StepPlan:
        """Cancels the jobs of a plan that was made for other caches; returns what is left of it."""
        num_jobs = len(plan.jobs)
        if num_jobs:
            _logger.warning(
                "plan %d was made before the scheduler knew the KV caches of worker %d (epoch %d): its %d jobs are "
                "cancelled",
                plan.step_id, self._gate.epoch.worker_id, self._gate.epoch.num_losses, num_jobs,
            )  # fmt: skip
        self._cancel_unbegun(plan)
        return dataclasses.replace(plan, jobs=())

    def _cancel_unbegun(self, plan: StepPlan) -> None:
        """Each job of a plan that has not begun ends all the same, as nobody's failure."""
        for job in plan.jobs:
            if not self._jobs.knows(job.job_id):
                self._jobs.start(job.job_id)
                self._jobs.cancel(job.job_id, unwritten=True)
                self._jobs.end_part([job.job_id])

    @property
    def offers_fused(self) -> bool:
        """Whether any path is `fused`, so that `fused_step` is worth asking for."""
        return self._tier is not None and self._tier.offers_fused

    def fused_step(self) -> FusedStep:
        """What the forward pass has to copy, after `begin_step(..., fuse=True)`; often nothing.

        Whatever comes of the pass, `end_step` or the next `begin_step` has to follow. The segment is
        donated: a pass that fails takes it along, and its chunks are lost.
        """
        return FusedStep() if self._tier is None else self._tier.fused_step()

    def fused_shapes(self) -> list[FusedStep]:
        """Shape structs of every `fused_step` that copies anything, to compile the engine's step for beforehand."""
        return [] if self._tier is None else self._tier.fused_shapes()

    def end_step(self, plan: StepPlan, kv_caches: Caches, outcome: FusedOutcome | None = None) -> None:
        """Dispatches the saves of a plan, and what it writes to storage, after the forward pass.

        Args:
          plan: the plan that `begin_step` had; any other, or the same one again, is ignored.
          kv_caches: the caches as the forward pass left them; only read.
          outcome: what the forward pass returned of its copies, if it took `fused_step()` along.
        Raises:
          CachesLostError: these caches are gone, because the forward pass has failed or given back others. As in
            `begin_step`, the loss is counted, and the saves of the plan are cancelled.
        """
        given, sound = self._plan
        if plan is given:
            plan = sound
        else:  # unpickled a second time, or not the one that has begun
            plan = sound_plan(plan, last=sound.step_id)
            if given is None or plan.step_id != sound.step_id:
                if plan.of(JobKind.SAVE, JobKind.CASCADE):
                    self._gate.ignore_end(plan)
                return
            if self._gate.is_stale(plan):
                plan = sound
        self._plan = None, sound
        saves = plan.of(JobKind.SAVE)
        if self._tier is None:
            self._refuse(saves, _OFF)
        elif saves or self._tier.awaits_pass:
            try:
                self._tier.end(saves, list(kv_caches), outcome)
            except CachesLostError:
                self._plan = plan, plan  # what has not begun of it ends with the caches
                self.lose_caches()
                raise
            self._jobs.see_all_below(plan.next_job_id)
        cascades = plan.of(JobKind.CASCADE)
        if self._storage is None:
            self._refuse(cascades, _NO_STORAGE)
        elif cascades:
            self._storage.cascade(cascades)
        if cascades:
            self._jobs.see_all_below(plan.next_job_id)

    def poll(self, *, wait: bool = False) -> StepReport:
        """Says what ended since the last call.

        Args:
          wait: for an engine that has nothing to compute: block until a job has ended, or until a staged
            load has arrived and needs the next `begin_step`, but not for longer than about a second. Returns at
            once when nothing is in flight.
        """
        if self.has_flights:
            self._collect()
            until_s = time.monotonic() + _MAX_WAIT_S
            while wait and self.has_flights and not self._jobs.has_results and self._wait_for_one(until_s):
                self._collect()
        num_ready = self._tier.num_chunks_ready if self._tier else 0
        num_swap = self._swap.num_blocks_ready if self._swap else ()
        last = self._report
        oldest, gate = self._jobs.oldest_id, self._gate
        if not self._jobs.has_results and (num_ready, num_swap, oldest, gate.epoch.num_losses, gate.setup) == (
            last.num_host_chunks, last.num_swap_blocks, last.oldest_job_id, last.num_cache_losses, last.setup
        ):  # fmt: skip
            return last
        # A segment is lost only where a job fails, so there is never a loss to tell without a result.
        lost = self._tier.take_lost() if self._tier else ()
        lost_swap = self._swap.take_lost() if self._swap else ()
        results = self._jobs.take_results()
        self._report = StepReport(
            worker_id=last.worker_id,
            results=(),
            num_host_chunks=num_ready,
            lost_slots=(),
            num_swap_blocks=num_swap,
            lost_swap_blocks=(),
            oldest_job_id=oldest,
            incarnation=last.incarnation,
            num_cache_losses=gate.epoch.num_losses,
            setup=gate.setup,
        )
        return dataclasses.replace(self._report, results=results, lost_slots=lost, lost_swap_blocks=lost_swap)

    def take_written_loads(self) -> tuple[int, ...]:
        """Loads whose last write into the caches was dispatched since the last call.

        What is dispatched from now on sees their blocks, so that an engine which takes the word of this process
        only need not wait for their results. Those follow, and until then the host tier keeps the bytes.
        """
        return self._jobs.take_written()

    def wait_until_allocated(self) -> None:
        """Blocks until all host memory is there or its allocation has failed; for warm-up, benchmarks and tests."""
        for copies in (self._tier, self._swap):
            if copies is not None:
                copies.wait_until_allocated()

    @property
    def has_flights(self) -> bool:
        """Whether copies are on their way, so that a later `poll` has more to say."""
        return any(copies.has_flights for copies in self._copies())

    @property
    def hbm_nbytes(self) -> int:
        """Most bytes of HBM that copies take on each device, beside the caches.

        What the compiler says of the programs at hand, and the staging buffer where one is used. Direct copies may take
        two blocks, whatever their number; staged ones the staging buffer and a block; swaps two blocks of the largest
        layer group; each on TPU half a MiB, if that is more. It is those bounds until the programs are compiled (with
        `skip_jax_precompile`, at their first use) and on CPU, where nothing but memory of the host is counted.
        """
        return sum(copies.hbm_nbytes for copies in self._copies())

    def close(self) -> None:
        """Waits for the copies in flight and frees the host pool. Jobs that have not ended never will.

        It waits no longer than a job may take; copies that are on their way after that are left to the runtime.
        """
        waiting_on = [array for copies in self._copies() for array in copies.waiting_on(all_of_them=True)]
        if not wait_for_all(waiting_on, timeout_s=self._timeout_s):
            num_left = sum(not is_ready(array) for array in waiting_on)
            _logger.error("closing with %d copies on their way for more than %g s", num_left, self._timeout_s)
        self._jobs.clear()
        for copies in self._copies():
            copies.close()

    # Inside.

    def _refuse(self, jobs: Iterable[CopyJob], error: str) -> None:
        for job in jobs:
            if not self._jobs.knows(job.job_id):
                self._jobs.start(job.job_id)
                self._jobs.end_part([job.job_id], error)

    def _collect(self) -> None:
        for copies in self._copies():
            copies.collect()

    def _copies(self) -> list[StorageCopies | TierCopies | SwapCopies]:
        return [copies for copies in (self._storage, self._tier, self._swap) if copies is not None]

    def _wait_for_one(self, until_s: float) -> bool:
        """Waits until `poll` can go on with a copy; False when none is of that kind, or the time is up."""
        if self._tier is not None and self._tier.awaits_begin:
            return False
        timeout_s = max(0.0, until_s - time.monotonic())
        waiting_on = [array for copies in self._copies() for array in copies.waiting_on()]
        if self._storage is not None and self._storage.has_flights:
            # Storage may take long, and a load that has arrived needs a begin_step.
            loads = self._tier.waiting_on(all_of_them=True) if self._tier else []
            wait_for_any([*waiting_on, *loads], timeout_s=timeout_s)
            return any(map(is_ready, waiting_on))
        if waiting_on:
            return wait_for_any(waiting_on, timeout_s=timeout_s)
        # What is left needs a begin_step. Wait for it here, or an idle engine would spin.
        wait_for_any(self._tier.waiting_on(all_of_them=True) if self._tier else [], timeout_s=timeout_s)
        return False


def _check_caches(layout: KVLayout, kv_caches: Sequence[Any]) -> None:
    windows = layout.windows if len(layout.windows) == len(kv_caches) else ()  # else they differ in any case
    found = KVLayout.from_caches(kv_caches, block_size=layout.block_size, model=layout.model, windows=windows)
    if found != layout:
        raise LayoutError(f"the KV caches are {found}, expected {layout}; describe them with KVLayout.from_caches")


def _check_count(name: str, value: Any) -> int:
    count = as_count(value)
    if count is None or count >= 2**63:
        raise ConfigError(f"{name}={one_line(value)}; expected an integer from 0 on")
    return count


def _describe(
    config: OffloadConfig, layout: KVLayout, kv_caches: Sequence[Any], tier: TierCopies | None
) -> WorkerSetup:
    """What the scheduler compares with its own settings and with the other workers'."""
    processes = {device.process_index for device in kv_caches[0].sharding.device_set}
    paths = {direction: tier.paths[direction].value if tier else "" for direction in Direction}
    return WorkerSetup(
        num_processes=len(processes),
        process_index=jax.process_index(),
        fingerprint=layout.fingerprint().hex(),
        blocks_per_chunk=config.blocks_per_chunk if config.enabled else 0,
        staging_blocks=config.staging_blocks(layout) if config.enabled else 0,
        max_load_blocks=config.max_load_blocks(layout) if config.enabled else 0,
        segment_chunks=tier.segment_chunks if tier else 0,
        save_path=paths[Direction.SAVE],
        load_path=paths[Direction.LOAD],
        bucket_blocks=tuple(config.block_size_buckets),
        max_swap_blocks=config.max_swap_blocks(layout),
        storage_chunks=config.storage_chunks,
    )


def _plan_pool(
    config: OffloadConfig, layout: KVLayout, kv_caches: Sequence[Any], available: int
) -> tuple[int, tuple[int, int]]:
    """How many chunks the host pool has, how many segments, and how many chunks are in each."""
    wanted, chunk_nbytes = config.host_chunks(layout), layout.block_nbytes_per_host * config.blocks_per_chunk
    fitting = cap_chunks(wanted, chunk_nbytes=chunk_nbytes, fraction=config.host_memory_fraction, available=available)
    if kv_caches[0].sharding.is_fully_addressable:
        return fitting, plan_segments(fitting, chunk_nbytes=chunk_nbytes, segment_gb=config.host_segment_gb)
    segments = plan_shared_segments(wanted, fitting, chunk_nbytes=chunk_nbytes, segment_gb=config.host_segment_gb)
    return min(fitting, segments[0] * segments[1]), segments
