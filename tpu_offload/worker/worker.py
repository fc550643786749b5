"""The worker: does the copies that a `StepPlan` asks for, and says in a `StepReport` how they ended.

    kv_caches = worker.begin_step(plan, kv_caches)   # loads
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
from collections.abc import Callable, Sequence
from typing import Any, final

import jax
import numpy as np

from tpu_offload.config import CopyPath, OffloadConfig
from tpu_offload.errors import CachesLostError, LayoutError, TransferError
from tpu_offload.kernels import (
    Copier,
    DirectCopier,
    Flight,
    FusedOutcome,
    FusedPlanner,
    FusedStep,
    Groups,
    Phase,
    Rows,
    TransferSpec,
    choose_paths,
    fetch_early,
    fused_sizes,
    make_copiers,
)
from tpu_offload.layout import KVLayout
from tpu_offload.memory import HostPool, available_nbytes, cap_chunks, pinned_zeros, plan_segments
from tpu_offload.types import Direction, StepPlan, StepReport, TransferJob
from tpu_offload.worker.arrays import check_alive, is_ready, wait_for_all, wait_for_any
from tpu_offload.worker.boundary import sound_plan, transfer_error
from tpu_offload.worker.jobs import WorkerJobs
from tpu_offload.worker.swapping import SwapCopies, SwapSource, WrapCopier, unwrapped

_logger = logging.getLogger(__name__)

_MAX_WAIT_S = 1.0  # of one `poll`: what its caller does between two of them, as failing overdue jobs, goes on

Caches = list[jax.Array]


@dataclasses.dataclass(slots=True)
class _ForwardPass:
    """What the forward pass at hand copies, and what has to follow it.

    Attributes:
      fused: per direction, the segment and the blocks; a direction that has none is not there.
      saving_job_ids: saves that are dispatched after it, or end after it.
      saves: the blocks of those that it does not copy itself.
    """

    fused: dict[Direction, tuple[int, Rows]]
    saving_job_ids: list[int]
    saves: Groups


@final
class OffloadWorker:
    """Owns the host pool of one process and copies between it and the KV caches.

    All methods are called by the thread that dispatches the model. A copy that goes wrong ends as a
    FAILED result; the one error that `begin_step` raises is that a load took the caches with it.

    Args:
      config: the settings.
      layout: what `KVLayout.from_caches` says of the caches.
      kv_caches: per layer, dtype[num_blocks, *page_shape]; only shapes and shardings are read.
      worker_id: goes into every report.
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
        not offer it, or a path is `auto` and the profile cannot be used.
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
        _check_caches(layout, kv_caches)
        self._wrap_copier = wrap_copier
        self._timeout_s = config.job_timeout_s
        self._jobs = WorkerJobs(clock)
        self._flights: list[Flight] = []
        self._incarnation = time.time_ns() if incarnation is None else incarnation
        self._report = StepReport(worker_id, (), 0, incarnation=self._incarnation)
        if config.enabled:
            layout.check_tier()
        if config.enabled or config.swap_enabled:
            available = available_nbytes() if available is None else available
        self._num_host_chunks = _num_chunks(config, layout, available or 0) if config.enabled else 0
        self._pool: HostPool | None = None
        self._copiers: dict[Direction, Copier] = {}
        self._fused: FusedPlanner | None = None
        self._pass: _ForwardPass | None = None
        self._step_id = 0  # of the last plan
        self._swap: SwapCopies | None = None
        if self._num_host_chunks:
            self._make_tier(config, layout, kv_caches, fused=fused)
        if config.swap_enabled:
            taken = self._num_host_chunks * layout.block_nbytes_per_host * config.blocks_per_chunk
            self._swap = SwapCopies(
                config,
                layout,
                kv_caches,
                jobs=self._jobs,
                available=max(0, (available or 0) - taken),
                tier=self._tier_source() if self._num_host_chunks else None,
                clock=clock,
                wrap_copier=wrap_copier,
            )

    def _make_tier(self, config: OffloadConfig, layout: KVLayout, kv_caches: Sequence[Any], *, fused: bool) -> None:
        """Sets up the host tier's part of this process and the copies to and from it."""
        chunk_nbytes = layout.block_nbytes_per_host * config.blocks_per_chunk
        num_segments, chunks_per_segment = plan_segments(
            self._num_host_chunks, chunk_nbytes=chunk_nbytes, segment_gb=config.host_segment_gb
        )
        self._blocks_per_chunk = config.blocks_per_chunk
        self._num_segments = num_segments
        # By place in the pool: whether what was there is lost, and nothing saved since. A plan that was made before
        # the loss was known asks for it, and would be given the zeros of the new memory.
        self._lost_places = np.zeros(num_segments * chunks_per_segment * config.blocks_per_chunk, np.bool_)
        self._spec = TransferSpec.from_caches(
            kv_caches,
            segment_blocks=chunks_per_segment * config.blocks_per_chunk,
            # No dispatch copies more blocks than there are, however generous the budget: ids are padded to this.
            capacity=min(config.staging_blocks(layout), kv_caches[0].shape[0]),
        )
        # Hosts that share one model must dispatch in one order, and readiness differs between them.
        self._lockstep = not self._spec.cache_sharding.is_fully_addressable
        paths = choose_paths(config, self._spec, fused=fused)  # before memory is taken: it may refuse
        self._pool = HostPool(
            self._spec.segment_structs(),
            num_segments=num_segments,
            chunks_per_segment=chunks_per_segment,
            num_chunks=self._num_host_chunks,
        )
        copiers = make_copiers(paths, self._spec, self._pool, allocate=pinned_zeros, buckets=config.block_size_buckets)
        wrapped = {copier: self._wrap_copier(copier, self._pool) for copier in copiers.values()}
        self._copiers = {direction: wrapped[copier] for direction, copier in copiers.items()}
        if CopyPath.FUSED in paths.values():
            run_blocks = config.blocks_per_chunk
            sizes = fused_sizes(self._spec.capacity, run_blocks=run_blocks, buckets=config.block_size_buckets)
            sizes_of = {d: sizes if path is CopyPath.FUSED else () for d, path in paths.items()}
            self._fused = FusedPlanner(self._spec, run_blocks=run_blocks, sizes=sizes_of)
        if not config.skip_jax_precompile:
            for copier in self._copiers.values():  # a shared one has nothing left to do the second time
                copier.compile()

    def _tier_source(self) -> SwapSource:
        """Where swaps read what the host tier has; directly, as all that they copy."""
        copier = self._copiers[Direction.LOAD]
        if not isinstance(copier, DirectCopier):
            direct = DirectCopier(self._spec, self._store, directions=(Direction.LOAD,))
            copier = self._wrap_copier(direct, self._store)
        return SwapSource(tuple(range(self._spec.num_layers)), self._spec, self._store, copier, self._lost_places)

    @property
    def num_host_chunks(self) -> int:
        """Chunks that the host pool will have when all of it is allocated; reports say how many it has."""
        return self._num_host_chunks

    def begin_step(self, plan: StepPlan, kv_caches: Caches, *, fuse: bool = False) -> Caches:
        """Dispatches the loads of a plan, before the forward pass.

        Also with an empty plan: staged loads that have arrived are written into the caches here.

        Args:
          plan: what the scheduler wants. Jobs in it that make no sense fail.
          kv_caches: per layer, dtype[num_blocks, *page_shape]; donated.
          fuse: a forward pass follows that takes `fused_step()` along. Without it nothing waits for one:
            what the fused path would have taken goes by the direct path.
        Returns:
          The caches to use from now on.
        Raises:
          CachesLostError: a load failed after its program had taken the donated caches. The only error that
            leaves this class once it is built: without caches there is nothing to go on with. All of the plan that
            had not begun has failed then, and no `end_step` follows; the next plan comes with new caches.
        """
        plan = sound_plan(plan, last=self._step_id)
        self._step_id = plan.step_id
        if plan.empty and not self._flights and self._pass is None:
            return kv_caches
        if self._pass is not None:
            self._abandon_pass(self._pass)
        try:
            return self._begin(plan, list(kv_caches), fuse=fuse)  # the programs are compiled for a list
        except CachesLostError:
            self._give_up(plan)
            raise

    def _begin(self, plan: StepPlan, kv_caches: Caches, *, fuse: bool) -> Caches:
        if self._swap is not None and plan.swap_outs:
            self._swap.swap_out(plan.swap_outs, kv_caches)
        for job_id in plan.cancelled_job_ids:
            self._cancel(job_id)
        if self._flights:
            kv_caches = self._resume(kv_caches, plan.step_id)
        if plan.loads or (fuse and plan.saves):
            job_ids, groups = self._accept(plan.loads, Direction.LOAD)
            if fuse and self._fused is not None:
                groups = self._plan_pass(self._fused, plan, groups)
            kv_caches = self._dispatch(job_ids, groups, Direction.LOAD, plan.step_id, kv_caches)
        if plan.swap_ins and self._swap is not None:
            kv_caches = self._swap.swap_in(plan.swap_ins, kv_caches)
        return kv_caches

    def _give_up(self, plan: StepPlan) -> None:
        """The step will not be. Each of its jobs that has not begun gets its end all the same."""
        if self._pass is not None:
            self._abandon_pass(self._pass)
        transfers, swaps = (*plan.loads, *plan.saves), (*plan.swap_outs, *plan.swap_ins)
        for job_id in (*(job.job_id for job in transfers), *(job.job_id for job in swaps)):
            if not self._jobs.knows(job_id):
                self._jobs.start(job_id)
                self._jobs.end_part([job_id], "the KV caches were lost before it was dispatched")

    @property
    def offers_fused(self) -> bool:
        """Whether any path is `fused`, so that `fused_step` is worth asking for."""
        return self._fused is not None

    def fused_step(self) -> FusedStep:
        """What the forward pass has to copy, after `begin_step(..., fuse=True)`; often nothing.

        Whatever comes of the pass, `end_step` or the next `begin_step` has to follow. The segment is
        donated: a pass that fails takes it along, and its chunks are lost.
        """
        if self._fused is None or self._pass is None or not self._pass.fused:
            return FusedStep()
        try:
            save, load = (
                (self._store.segment(group[0]), group[1]) if group else None
                for group in map(self._pass.fused.get, (Direction.SAVE, Direction.LOAD))
            )
        except TransferError as e:  # lost since `begin_step`: a `poll` in between has found out
            self._fail_fused(self._pass, e)
            return FusedStep()
        return self._fused.step(save, load)

    def fused_shapes(self) -> list[FusedStep]:
        """Shape structs of every `fused_step` that copies anything, to compile the engine's step for beforehand."""
        return self._fused.shapes() if self._fused else []

    def end_step(self, plan: StepPlan, kv_caches: Caches, outcome: FusedOutcome | None = None) -> None:
        """Dispatches the saves of a plan, after the forward pass.

        Args:
          plan: the plan that `begin_step` had.
          kv_caches: the caches as the forward pass left them; only read.
          outcome: what the forward pass returned of its copies, if it took `fused_step()` along.
        """
        plan = sound_plan(plan, last=self._step_id)
        if self._pass is not None:
            done, self._pass = self._pass, None
            self._take_outcome(done, outcome)
            self._dispatch(done.saving_job_ids, done.saves, Direction.SAVE, plan.step_id, list(kv_caches))
        elif plan.saves:
            self._dispatch(*self._accept_saves(plan.saves), Direction.SAVE, plan.step_id, list(kv_caches))

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
        num_ready = self._pool.num_chunks_ready if self._pool else 0
        num_swap = self._swap.num_blocks_ready if self._swap else ()
        last = self._report
        if not self._jobs.has_results and num_ready == last.num_host_chunks and num_swap == last.num_swap_blocks:
            return last
        # A segment is lost only where a job fails, so there is never a loss to tell without a result.
        lost = self._pool.take_lost() if self._pool else ()
        lost_swap = self._swap.take_lost() if self._swap else ()
        results = self._jobs.take_results()
        self._report = StepReport(
            last.worker_id, (), num_ready, (), num_swap, (), self._jobs.oldest_id, self._incarnation
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
        if self._pool is not None:
            self._pool.wait_until_allocated()
        if self._swap is not None:
            self._swap.wait_until_allocated()

    @property
    def has_flights(self) -> bool:
        """Whether copies are on their way, so that a later `poll` has more to say."""
        return bool(self._flights) or (self._swap is not None and self._swap.has_flights)

    @property
    def hbm_nbytes(self) -> int:
        """Most bytes of HBM that copies take on each device, beside the caches.

        Direct copies take two blocks, whatever their number; staged ones the staging buffer and a block; swaps two
        blocks of the largest layer group, or a quarter MiB. The tests hold the TPU compiler to this.
        """
        nbytes = self._swap.hbm_nbytes if self._swap else 0
        if self._copiers:
            num_blocks = sum(copier.hbm_blocks for copier in set(self._copiers.values()))
            nbytes += num_blocks * self._spec.block_nbytes_per_device
        return nbytes

    def close(self) -> None:
        """Waits for the copies in flight and frees the host pool. Jobs that have not ended never will.

        It waits no longer than a job may take; copies that are on their way after that are left to the runtime.
        """
        waiting_on = [flight.waiting_on for flight in self._flights]
        waiting_on += self._swap.waiting_on() if self._swap is not None else []
        if not wait_for_all(waiting_on, timeout_s=self._timeout_s):
            num_left = sum(not is_ready(array) for array in waiting_on)
            _logger.error("closing with %d copies on their way for more than %g s", num_left, self._timeout_s)
        self._flights.clear()
        self._jobs.clear()
        if self._swap is not None:
            self._swap.close()
        if self._pool is not None:
            self._pool.close()

    # Dispatch.

    def _accept(self, jobs: Sequence[TransferJob], direction: Direction) -> tuple[list[int], Groups]:
        """Takes up the jobs that are possible: their ids, and their blocks by segment, for one flight each."""
        accepted = []
        for job in jobs:
            if job.job_id in self._jobs:
                _logger.warning("job %d is in flight already; its repetition is ignored", job.job_id)
                continue
            self._jobs.start(job.job_id, job.block_ids)
            error = self._why_impossible(job, direction)
            if error:
                self._jobs.end_part([job.job_id], error)
            else:
                accepted.append(job)
        return [job.job_id for job in accepted], self._rows_by_segment(accepted)

    def _accept_saves(self, jobs: Sequence[TransferJob]) -> tuple[list[int], Groups]:
        """Like `_accept`, but no two jobs share a flight: a plan has several only to keep their failures apart."""
        accepted = [self._accept([job], Direction.SAVE) for job in jobs]
        return [i for job_ids, _ in accepted for i in job_ids], [group for _, groups in accepted for group in groups]

    def _dispatch(
        self, job_ids: Sequence[int], groups: Groups, direction: Direction, step_id: int, kv_caches: Caches
    ) -> Caches:
        """Starts what `_accept` returned."""
        error = "the KV caches were lost while it was dispatched"
        try:
            for segment_id, rows in groups:
                for piece in self._copiers[direction].split(rows):
                    kv_caches = self._start(direction, segment_id, piece, step_id, kv_caches)
            error = ""
            if direction is Direction.LOAD:
                self._jobs.write_part(job_ids)
        finally:
            self._jobs.end_part(job_ids, error)
        return kv_caches

    def _why_impossible(self, job: TransferJob, direction: Direction) -> str:
        """Why a job cannot be started, in one line; empty when it can."""
        error = transfer_error(job, direction)
        if error:
            return error
        if self._pool is None:
            return "offloading is off on this worker: it has no host pool"
        if job.group_id != 0:
            return f"layer group {job.group_id}: this worker has one group, 0"
        if not job.block_ids:
            return ""
        num_ready = self._pool.num_chunks_ready * self._blocks_per_chunk
        for name, ids, limit in (
            ("block ids", job.block_ids, self._spec.num_blocks),
            ("host block ids", job.host_block_ids, num_ready),
        ):
            if min(ids) < 0 or max(ids) >= limit:
                return f"{name} {min(ids)} to {max(ids)}: expected 0 to {limit - 1}"
        if job.direction is Direction.LOAD:
            lost = [i for i in job.host_block_ids if self._lost_places[i]]
            if lost:
                segment_id = lost[0] // self._spec.segment_blocks
                return f"host pool segment {segment_id} was lost, and nothing saved since to host block {lost[0]}"
        return ""

    def _places(self, segment_id: int) -> Any:
        """Which places of a segment are lost; a view."""
        first = segment_id * self._spec.segment_blocks
        return self._lost_places[first : first + self._spec.segment_blocks]

    def _rows_by_segment(self, jobs: Sequence[TransferJob]) -> Groups:
        if not jobs:
            return []
        if len(jobs) == 1:  # by far the most frequent, and cheaper
            job_ids = np.full(jobs[0].num_blocks, jobs[0].job_id, np.int64)
            block_ids, host_ids = (np.array(ids, np.int32) for ids in (jobs[0].block_ids, jobs[0].host_block_ids))
        else:
            job_ids = np.repeat(np.array([j.job_id for j in jobs], np.int64), [j.num_blocks for j in jobs])
            block_ids = np.array([b for j in jobs for b in j.block_ids], np.int32)
            host_ids = np.array([b for j in jobs for b in j.host_block_ids], np.int32)
        if self._num_segments == 1 and len(host_ids):
            return [(0, Rows(job_ids, block_ids, host_ids))]
        segment_ids, places = np.divmod(host_ids, np.int32(self._spec.segment_blocks))
        rows = Rows(job_ids, block_ids, places)
        if len(rows) and segment_ids.min() == segment_ids.max():  # nearly always, and cheaper
            return [(int(segment_ids[0]), rows)]
        return [(int(i), rows.take(segment_ids == i)) for i in np.unique(segment_ids)]

    def _start(self, direction: Direction, segment_id: int, piece: Rows, step_id: int, kv_caches: Caches) -> Caches:
        job_ids = piece.jobs()
        self._jobs.add_part(job_ids)
        try:
            if direction is Direction.SAVE:
                flight = self._copiers[direction].save(segment_id, piece, kv_caches)
                self._places(segment_id)[piece.host_block_ids] = False
            else:
                flight, kv_caches = self._copiers[direction].load(segment_id, piece, kv_caches)
        except Exception as e:
            self._fail(piece, segment_id, e)
            check_alive(kv_caches, e)
        else:
            flight.step_id = step_id
            self._flights.append(flight)
            if direction is Direction.LOAD and flight.phase is Phase.COPYING:
                self._jobs.write_part(job_ids)
        return kv_caches

    # Copies inside the forward pass.

    def _plan_pass(self, planner: FusedPlanner, plan: StepPlan, loads: Groups) -> Groups:
        """Decides what the forward pass copies; returns the loads that are left."""
        job_ids, saves = self._accept_saves(plan.saves)
        fused_saves, saves = planner.take(Direction.SAVE, saves, usable=self._can_fuse)
        # A donated segment cannot be read beside: what is saved into is not loaded from in one step.
        donated = [segment_id for segment_id, _ in fused_saves]
        fused_loads, loads = planner.take(
            Direction.LOAD, loads, usable=lambda i: i not in donated and self._can_fuse(i)
        )
        fused = {d: g[0] for d, g in ((Direction.SAVE, fused_saves), (Direction.LOAD, fused_loads)) if g}
        for _, rows in fused.values():
            self._jobs.add_part(rows.jobs())
        if fused or plan.saves:  # also if none of them is possible: they have been reported
            self._pass = _ForwardPass(fused, job_ids, saves)
        return loads

    def _take_outcome(self, done: _ForwardPass, outcome: FusedOutcome | None) -> None:
        """Turns what the forward pass copied into flights; without an outcome it has not copied."""
        if outcome is None:
            error = "the forward pass that was to copy it did not return; pass its FusedOutcome on"
            self._fail_fused(done, TransferError(error))
            return
        for direction, (segment_id, rows) in done.fused.items():
            saving = direction is Direction.SAVE
            if saving:
                self._store.replace(segment_id, outcome.segment)
                self._places(segment_id)[rows.host_block_ids] = False
            else:
                self._jobs.write_part(rows.jobs())
            token = fetch_early(outcome.save_token if saving else outcome.load_token, self._spec)
            self._flights.append(Flight(direction, segment_id, rows, Phase.COPYING, token, fused=True))

    def _fail_fused(self, done: _ForwardPass, error: Exception) -> None:
        """The forward pass has not copied and will not; what follows it is not touched."""
        fused, done.fused = done.fused, {}
        for segment_id, rows in fused.values():
            self._fail(rows, segment_id, error)

    def _abandon_pass(self, done: _ForwardPass) -> None:
        """The forward pass never came back: its copies have failed, and what was to follow it is not done."""
        self._pass = None
        self._take_outcome(done, None)
        self._jobs.end_part(
            done.saving_job_ids,
            "the forward pass that was to compute its blocks did not return; call end_step after it",
        )

    def _can_fuse(self, segment_id: int) -> bool:
        """Whether a forward pass may be given the segment.

        Not while a save into it is on its way that may yet fail: its failure would become the pass's.
        """
        try:
            self._store.segment(segment_id)
        except TransferError:
            return False
        return not any(
            flight.segment_id == segment_id and flight.direction is Direction.SAVE and not flight.fused
            for flight in self._flights
        )

    @property
    def _store(self) -> HostPool:
        assert self._pool is not None, "nothing is dispatched when offloading is off"
        return self._pool

    # Second halves of staged copies.

    def _resume(self, kv_caches: Caches, step_id: int) -> Caches:
        """Goes on with what has arrived; `step_id` is the plan at hand."""
        for flight in self._in_transit():
            due = flight.step_id < step_id if self._lockstep else is_ready(flight.waiting_on)
            if due and flight.direction is Direction.SAVE:
                self._resume_save(flight)
            elif due:
                kv_caches = self._resume_load(flight, kv_caches)
        return kv_caches

    def _in_transit(self) -> list[Flight]:
        return [flight for flight in self._flights if flight.phase is Phase.TRANSIT]

    def _resume_save(self, flight: Flight) -> None:
        try:
            self._check_arrived(flight)
            self._copiers[flight.direction].resume_save(flight)
        except Exception as e:
            self._drop(flight)
            self._fail(flight.rows, flight.segment_id, e)

    def _resume_load(self, flight: Flight, kv_caches: Caches) -> Caches:
        live = [job_id for job_id in flight.rows.jobs() if not self._jobs.is_cancelled(job_id)]
        self._jobs.end_part(job_id for job_id in flight.rows.jobs() if job_id not in live)
        if not live:
            self._drop(flight)
            return kv_caches
        rows = flight.rows.take(np.isin(flight.rows.job_ids, live))
        try:
            self._check_arrived(flight)
            kv_caches = self._copiers[flight.direction].resume_load(flight, rows, kv_caches)
            self._jobs.write_part(live)
            return kv_caches
        except Exception as e:
            self._drop(flight)
            self._fail(rows, flight.segment_id, e)
            check_alive(kv_caches, e)
            return kv_caches

    def _check_arrived(self, flight: Flight) -> None:
        """Raises what went wrong in transit, before it is written over a segment or the caches."""
        if not self._lockstep:
            flight.waiting_on.block_until_ready()

    def _cancel(self, job_id: int) -> None:
        """Marks a load some of whose blocks are not written yet; any other job goes on to its end."""
        loads = (flight for flight in self._in_transit() if flight.direction is Direction.LOAD)
        self._jobs.cancel(job_id, unwritten=any(job_id in flight.rows.job_ids for flight in loads))

    # Ends.

    def _collect(self) -> None:
        """Goes on with saves that have arrived, and ends the flights that are over."""
        if self._swap is not None:
            self._swap.collect()
        for flight in self._in_transit():
            if self._lockstep or not is_ready(flight.waiting_on):
                continue
            if flight.direction is Direction.SAVE:
                self._resume_save(flight)
            elif all(map(self._jobs.is_cancelled, flight.rows.jobs())):
                self._resume_load(flight, [])  # writes nothing
        for flight in list(self._flights):
            if flight.phase is Phase.COPYING and is_ready(flight.waiting_on):
                self._land(flight)

    def _land(self, flight: Flight) -> None:
        """Ends a flight whose token is ready."""
        self._drop(flight)
        try:
            num_copied = int(np.asarray(flight.waiting_on))
            if num_copied != len(flight.rows):
                raise TransferError(f"the device copied {num_copied} of {len(flight.rows)} blocks")
        except Exception as e:
            # A program that failed on the device has taken the donated segment with it.
            self._fail(flight.rows, flight.segment_id, e, lost=flight.direction is Direction.SAVE)
        else:
            self._jobs.end_part(flight.rows.jobs())

    def _drop(self, flight: Flight) -> None:
        self._flights.remove(flight)
        self._copiers[flight.direction].release(flight)

    def _fail(self, rows: Rows, segment_id: int, error: Exception, *, lost: bool = False) -> None:
        """Ends the jobs' parts in a flight with an error, and gives up the segment if it is gone."""
        message = f"{type(error).__name__}: {error}".splitlines()[0]
        try:
            lost = lost or any(part.is_deleted() for part in self._store.segment(segment_id))
        except TransferError:  # lost before
            lost = False
        if lost:
            self._store.mark_lost(segment_id)
            self._places(segment_id)[:] = True
        for job_id in rows.jobs():
            self._jobs.end_part([job_id], message, block_ids=rows.block_ids[rows.job_ids == job_id].tolist())

    def _wait_for_one(self, until_s: float) -> bool:
        """Waits until `poll` can go on with a flight; False when none is of that kind, or the time is up."""
        timeout_s = max(0.0, until_s - time.monotonic())
        waiting_on = [
            flight.waiting_on
            for flight in self._flights
            if flight.phase is Phase.COPYING or not (self._lockstep or flight.direction is Direction.LOAD)
        ]
        if self._swap is not None:
            waiting_on += self._swap.waiting_on()
        if waiting_on:
            return wait_for_any(waiting_on, timeout_s=timeout_s)
        # What is left needs a begin_step. Wait for it here, or an idle engine would spin.
        wait_for_any([flight.waiting_on for flight in self._flights], timeout_s=timeout_s)
        return False


def _check_caches(layout: KVLayout, kv_caches: Sequence[Any]) -> None:
    windows = layout.windows if len(layout.windows) == len(kv_caches) else ()  # else they differ in any case
    found = KVLayout.from_caches(kv_caches, block_size=layout.block_size, model=layout.model, windows=windows)
    if found != layout:
        raise LayoutError(f"the KV caches are {found}, expected {layout}; describe them with KVLayout.from_caches")


def _num_chunks(config: OffloadConfig, layout: KVLayout, available: int) -> int:
    return cap_chunks(
        config.host_chunks(layout),
        chunk_nbytes=layout.block_nbytes_per_host * config.blocks_per_chunk,
        fraction=config.host_memory_fraction,
        available=available,
    )
