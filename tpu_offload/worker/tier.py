"""The copies between the KV caches and the host tier of one process: direct, staged, and inside the forward pass.

A copy is a flight: dispatched here, over when its token is ready, which is asked in `collect`. A job is over with the
last of its flights (see `worker.jobs`). Where a program that fails takes a segment of the host pool along, the segment
is given up, and nothing is read from it before something has been saved there again.
"""

import dataclasses
import logging
import sys
from collections.abc import Collection, Sequence
from typing import Any, final

import jax
import numpy as np

from tpu_offload.config import CopyPath, OffloadConfig
from tpu_offload.errors import TransferError
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
    direct_spec,
    fetch_early,
    fused_sizes,
    make_copiers,
)
from tpu_offload.layout import KVLayout
from tpu_offload.memory import pinned_zeros
from tpu_offload.types import Direction, StepPlan, TransferJob
from tpu_offload.worker.arrays import check_alive, is_ready
from tpu_offload.worker.backlog import BackloggedLoad, LoadBacklog
from tpu_offload.worker.boundary import transfer_error
from tpu_offload.worker.host_memory import HostMemory, check_copied, error_line
from tpu_offload.worker.jobs import WorkerJobs
from tpu_offload.worker.swapping import SwapSource, WrapCopier

_logger = logging.getLogger(__name__)

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
class TierCopies:
    """Owns the host pool of one process. All methods are called by the thread that dispatches the model.

    A copy that goes wrong ends as a failed result of its job.

    Args:
      config: the settings.
      layout: what a block is made of.
      kv_caches: per layer, dtype[num_blocks, *page_shape]; only shapes and shardings are read.
      num_chunks: size of the host pool, at least 1.
      segments: how many segments it has, and the chunks in each.
      jobs: told of the jobs.
      fused: the engine runs the fused functions in its own step.
      wrap_copier: see `OffloadWorker`.
    """

    def __init__(
        self,
        config: OffloadConfig,
        layout: KVLayout,
        kv_caches: Sequence[Any],
        *,
        num_chunks: int,
        segments: tuple[int, int],
        jobs: WorkerJobs,
        fused: bool,
        wrap_copier: WrapCopier,
    ) -> None:
        self._jobs = jobs
        self._wrap_copier = wrap_copier
        self._flights: list[Flight] = []
        self._fused: FusedPlanner | None = None
        self._pass: _ForwardPass | None = None
        num_segments, chunks_per_segment = segments
        self._blocks_per_chunk = config.blocks_per_chunk
        self._num_segments = num_segments
        self.segment_chunks = chunks_per_segment
        self._spec = TransferSpec.from_caches(
            kv_caches,
            segment_blocks=chunks_per_segment * config.blocks_per_chunk,
            # No staged dispatch copies more blocks than there are, however generous the budget.
            capacity=min(config.staging_blocks(layout), kv_caches[0].shape[0]),
        )
        self._staging_blocks = config.staging_blocks(layout)
        self._backlog = LoadBacklog(max_blocks_per_step=config.max_load_blocks(layout))
        self._step_id = -1  # rises with every `begin`, also where one plan has several
        self._timeout_s = config.job_timeout_s
        # Hosts that share one model must dispatch in one order, and readiness differs between them.
        self._lockstep = not self._spec.cache_sharding.is_fully_addressable
        self.paths = paths = choose_paths(config, self._spec, fused=fused)  # before memory is taken: it may refuse
        self._memory = HostMemory.allocate(
            self._spec, num_segments=num_segments, chunks_per_segment=chunks_per_segment, num_chunks=num_chunks
        )
        self._pool = self._memory.pool
        copiers = make_copiers(paths, self._spec, self._pool, allocate=pinned_zeros, buckets=config.block_size_buckets)
        wrapped = {copier: self._wrap_copier(copier, self._pool) for copier in copiers.values()}
        self._copiers = {direction: wrapped[copier] for direction, copier in copiers.items()}
        if CopyPath.FUSED in paths.values():
            blocks_per_chunk = config.blocks_per_chunk
            sizes = fused_sizes(
                self._spec.capacity, blocks_per_chunk=blocks_per_chunk, buckets=config.block_size_buckets
            )
            sizes_of = {d: sizes if path is CopyPath.FUSED else () for d, path in paths.items()}
            self._fused = FusedPlanner(self._spec, blocks_per_chunk=blocks_per_chunk, sizes=sizes_of)
        if not config.skip_jax_precompile:
            for copier in self._copiers.values():  # a shared one has nothing left to do the second time
                copier.compile()

    def source(self) -> SwapSource:
        """Where swaps read what the host tier has; directly, as all that they copy."""
        copier = self._copiers[Direction.LOAD]
        if not isinstance(copier, DirectCopier):
            direct = DirectCopier(direct_spec(self._spec), self._pool, directions=(Direction.LOAD,))
            copier = self._wrap_copier(direct, self._pool)
        return SwapSource(tuple(range(self._spec.num_layers)), self._memory, copier)

    @property
    def num_chunks_ready(self) -> int:
        """Chunks of the pool whose memory is there; grows to the size of the pool."""
        return self._pool.num_chunks_ready

    @property
    def has_flights(self) -> bool:
        """Whether copies are on their way, or have yet to begin."""
        return bool(self._flights or self._backlog)

    @property
    def awaits_begin(self) -> bool:
        """Whether the next `begin` has something to dispatch, whatever comes of the copies on their way."""
        if not self._copiers[Direction.LOAD].stages or self._lockstep:
            return bool(self._backlog)
        return self._staging_room > 0 and any(self._room(load) > 0 for load in self._backlog)

    @property
    def awaits_pass(self) -> bool:
        """Whether a forward pass was planned that has not come back."""
        return self._pass is not None

    @property
    def offers_fused(self) -> bool:
        """Whether any path is `fused`."""
        return self._fused is not None

    @property
    def hbm_nbytes(self) -> int:
        """Most bytes of HBM that the copies take on each device."""
        return sum(copier.hbm_nbytes for copier in set(self._copiers.values()))

    def take_lost(self) -> tuple[tuple[int, int], ...]:
        """Ranges (first, end) of slots lost since the last call."""
        return self._pool.take_lost()

    def wait_until_allocated(self) -> None:
        """Blocks until all of the pool is there or its allocation has failed."""
        self._pool.wait_until_allocated()

    def close(self) -> None:
        """Frees the pool. Whoever owns this has waited for the copies in flight for as long as it wants to."""
        self._flights.clear()
        self._backlog.clear()
        self._pool.close()

    # What the worker asks in a step.

    def save_early(self, plan: StepPlan, kv_caches: Caches) -> None:
        """Dispatches the early saves, before anything else of the plan. They are never inside the forward pass."""
        self._fail_lost_loads()
        self._dispatch(*self._accept_saves(plan.early_saves), Direction.SAVE, kv_caches)

    def begin(self, plan: StepPlan, kv_caches: Caches, *, fuse: bool, urgent: Collection[int] = ()) -> Caches:
        """Takes back what is cancelled, goes on with what has arrived, and dispatches the loads, also of earlier plans.

        Args:
          plan: its loads, saves and cancelled jobs.
          kv_caches: all caches; donated.
          fuse: a forward pass follows that takes copies along.
          urgent: ids of loads that the pass needs, see `OffloadWorker.begin_step`.
        Returns:
          The caches to use from now on.
        Raises:
          CachesLostError: a load failed after its program had taken the donated caches.
        """
        self._step_id = max(self._step_id + 1, plan.step_id)
        for job_id in plan.cancelled_job_ids:
            self._cancel(job_id)
        if self._flights:
            kv_caches = self._resume(kv_caches)
        if plan.loads or self._backlog or (fuse and plan.saves):
            job_ids, groups = self._next_loads(plan.loads, urgent)
            if fuse and self._fused is not None:
                groups = self._plan_pass(self._fused, plan, groups)
            kv_caches = self._dispatch(job_ids, groups, Direction.LOAD, kv_caches)
            self._end_failed_loads()
        return kv_caches

    def end(self, plan: StepPlan, kv_caches: Caches, outcome: FusedOutcome | None) -> None:
        """Dispatches the saves, but for those that the forward pass has taken along."""
        if self._pass is not None:
            done, self._pass = self._pass, None
            self._take_outcome(done, outcome)
            self._dispatch(done.saving_job_ids, done.saves, Direction.SAVE, kv_caches)
        elif plan.saves:
            self._dispatch(*self._accept_saves(plan.saves), Direction.SAVE, kv_caches)

    def fused_step(self) -> FusedStep:
        """See `OffloadWorker.fused_step`."""
        if self._fused is None or self._pass is None or not self._pass.fused:
            return FusedStep()
        try:
            save, load = (
                (self._pool.segment(group[0]), group[1]) if group else None
                for group in map(self._pass.fused.get, (Direction.SAVE, Direction.LOAD))
            )
        except TransferError as e:  # lost since `begin_step`: a `poll` in between has found out
            self._fail_fused(self._pass, e)
            return FusedStep()
        return self._fused.step(save, load)

    def fused_shapes(self) -> list[FusedStep]:
        """See `OffloadWorker.fused_shapes`."""
        return self._fused.shapes() if self._fused else []

    def abandon_pass(self) -> None:
        """The forward pass never came back: its copies have failed, and what was to follow it is not done."""
        if self._pass is None:
            return
        done, self._pass = self._pass, None
        self._take_outcome(done, None)
        self._jobs.end_part(
            done.saving_job_ids,
            "the forward pass that was to compute its blocks did not return; call end_step after it",
        )

    def abandon_backlog(self) -> None:
        """The caches are gone: nothing more is dispatched of any load, and it is nobody's failure."""
        for load in self._backlog:
            self._backlog.drop(load.job.job_id)
            self._jobs.cancel(load.job.job_id, unwritten=True)
            self._jobs.end_part([load.job.job_id])

    # Dispatch.

    def _accept(self, jobs: Sequence[TransferJob], direction: Direction) -> list[TransferJob]:
        """Takes up the jobs that are possible."""
        accepted = []
        for job in jobs:
            if job.job_id in self._jobs:
                _logger.warning("job %d is in flight already; its repetition is ignored", job.job_id)
                continue
            error = self._why_impossible(job, direction)
            block_ids = () if error else job.block_ids
            self._jobs.start(job.job_id, block_ids, writes_caches=direction is Direction.LOAD)
            if error:
                self._jobs.end_part([job.job_id], error)
            else:
                accepted.append(job)
        return accepted

    def _next_loads(self, new: Sequence[TransferJob], urgent: Collection[int] = ()) -> tuple[list[int], Groups]:
        """Loads to dispatch now, the plan's and those that are left: ids of those that end, and blocks by segment."""
        self._fail_lost_loads()
        stages = self._copiers[Direction.LOAD].stages
        if stages and self._lockstep:
            self._await_pieces()
        accepted = self._accept(new, Direction.LOAD)
        pieces, job_ids = self._backlog.take(
            accepted,
            step_id=self._step_id,
            room=self._room if stages else None,
            staging_room=self._staging_room,
            urgent=urgent,
        )
        return job_ids, self._rows_by_segment(pieces)

    @property
    def _staging_room(self) -> int:
        """Blocks that all copies together may stage now. Not asked on several hosts, where flights end in no order."""
        return sys.maxsize if self._lockstep else self._staging_blocks - sum(f.num_staged for f in self._flights)

    def _room(self, load: BackloggedLoad) -> int:
        """Blocks of a staged load that may be dispatched now."""
        allowed = load.job.num_staging_blocks or self._staging_blocks
        if self._lockstep:
            return allowed - sum(size for step_id, size in load.pieces if step_id > self._step_id - 2)
        staged = (flight.rows.job_ids for flight in self._flights if flight.num_staged)
        return allowed - sum(int(np.count_nonzero(job_ids == load.job.job_id)) for job_ids in staged)

    def _await_pieces(self) -> None:
        """Ends the pieces of loads that were dispatched two steps ago, and written one step ago.

        When they are over differs between hosts, and the next pieces must not: so each host waits for them, which the
        device has nearly always done by now.
        """
        for flight in list(self._flights):
            is_written = flight.phase is Phase.COPYING and flight.num_staged and flight.step_id <= self._step_id - 2
            if is_written and any(job_id in self._backlog for job_id in flight.rows.jobs()):
                self._land(flight)  # asks for its token, and so waits

    def _fail_lost_loads(self) -> None:
        """Loads whose host memory is gone have failed, before anything else can be written there and read by them."""
        for load in self._backlog:
            if self._memory.lost[load.host_block_ids[load.num_dispatched :]].any():
                self._backlog.fail(load.job.job_id, "the host memory of its chunks was lost")
        self._end_failed_loads()

    def _end_failed_loads(self) -> None:
        """What is left of loads that have failed is not dispatched any more: blocks after a hole are of no use."""
        if self._backlog:
            for load in self._backlog.take_failed():
                self._jobs.end_part([load.job.job_id], load.error, block_ids=load.block_ids_left)

    def _accept_saves(self, jobs: Sequence[TransferJob]) -> tuple[list[int], Groups]:
        """Like `_accept`, but no two jobs share a flight: a plan has several only to keep their failures apart."""
        accepted = self._accept(jobs, Direction.SAVE)
        return [j.job_id for j in accepted], [group for j in accepted for group in self._rows_by_segment([j])]

    def _dispatch(self, job_ids: Sequence[int], groups: Groups, direction: Direction, kv_caches: Caches) -> Caches:
        """Starts copies; these are the jobs of which nothing is left to start then."""
        error = "the KV caches were lost while it was dispatched"
        try:
            for segment_id, rows in groups:
                for piece in self._copiers[direction].split(rows):
                    kv_caches = self._start(direction, segment_id, piece, kv_caches)
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
            lost = [i for i in job.host_block_ids if self._memory.lost[i]]
            if lost:
                segment_id = lost[0] // self._spec.segment_blocks
                return f"host pool segment {segment_id} was lost, or never saved to: nothing is in host block {lost[0]}"
        return ""

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

    def _start(self, direction: Direction, segment_id: int, piece: Rows, kv_caches: Caches) -> Caches:
        job_ids, copier = piece.jobs(), self._copiers[direction]
        self._jobs.add_part(job_ids)
        try:
            self._check_staging(copier, len(piece))
            if direction is Direction.SAVE:
                flight = copier.save(segment_id, piece, kv_caches)
                self._memory.mark(segment_id, piece.host_block_ids, lost=False)
            else:
                flight, kv_caches = copier.load(segment_id, piece, kv_caches)
        except Exception as e:
            self._fail(piece, segment_id, e)
            check_alive(kv_caches, e)
        else:
            flight.step_id = self._step_id
            self._flights.append(flight)
            if direction is Direction.LOAD and flight.phase is Phase.COPYING:
                self._jobs.write_part(job_ids)
        return kv_caches

    def _check_staging(self, copier: Copier, num_blocks: int) -> None:
        """Raises TransferError if a copy would take more HBM than the staging buffer has.

        The scheduler plans within the budget, but it gives up on copies that are late, and these still take theirs. Not
        on hosts that share one model: which flights are over differs between them, and what they dispatch must not.
        """
        if not copier.stages or self._lockstep or self._jobs.oldest_age_s <= self._timeout_s:
            return
        num_staged = sum(flight.num_staged for flight in self._flights)
        if num_staged + num_blocks > self._staging_blocks:
            raise TransferError(
                f"the staging buffer of {self._staging_blocks} blocks holds {num_staged} of copies that are late; no "
                f"room for {num_blocks}"
            )

    # Copies inside the forward pass.

    def _plan_pass(self, planner: FusedPlanner, plan: StepPlan, loads: Groups) -> Groups:
        """Decides what the forward pass copies; returns the loads that are left."""
        job_ids, saves = self._accept_saves(plan.saves)
        fused_saves, saves = planner.take(Direction.SAVE, saves, usable=self._can_fuse)
        # A donated segment cannot be read beside: what is saved into is not loaded from in one step.
        donated = [segment_id for segment_id, _ in fused_saves]
        # The step holds both in HBM, at most what staging may take.
        room = self._staging_blocks - sum(len(rows) for _, rows in fused_saves)
        fused_loads, loads = planner.take(
            Direction.LOAD, loads, usable=lambda i: i not in donated and self._can_fuse(i), max_blocks=room
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
                self._pool.replace(segment_id, outcome.segment)
                self._memory.mark(segment_id, rows.host_block_ids, lost=False)
            else:
                self._jobs.write_part(rows.jobs())
            token = fetch_early(outcome.save_token if saving else outcome.load_token, self._spec)
            self._flights.append(Flight(direction, segment_id, rows, Phase.COPYING, token, fused=True))

    def _fail_fused(self, done: _ForwardPass, error: Exception) -> None:
        """The forward pass has not copied and will not; what follows it is not touched."""
        fused, done.fused = done.fused, {}
        for segment_id, rows in fused.values():
            self._fail(rows, segment_id, error)

    def _can_fuse(self, segment_id: int) -> bool:
        """Whether a forward pass may be given the segment.

        Not while a save into it is on its way that may yet fail: its failure would become the pass's.
        """
        try:
            self._pool.segment(segment_id)
        except TransferError:
            return False
        return not any(
            flight.segment_id == segment_id and flight.direction is Direction.SAVE and not flight.fused
            for flight in self._flights
        )

    # Second halves of staged copies.

    def resume(self, kv_caches: Caches) -> Caches:
        """Goes on with what has arrived, and with the loads that are left, as if in a step of its own.

        On hosts that share a model: with all that was dispatched before, and waits for it.
        """
        self._step_id += 1
        kv_caches = self._resume(kv_caches)
        if self._backlog:
            job_ids, groups = self._next_loads(())
            kv_caches = self._dispatch(job_ids, groups, Direction.LOAD, kv_caches)
            self._end_failed_loads()
        return kv_caches

    def _resume(self, kv_caches: Caches) -> Caches:
        """Goes on with what has arrived."""
        for flight in self._in_transit():
            due = flight.step_id < self._step_id if self._lockstep else is_ready(flight.waiting_on)
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
        is_left = self._backlog.drop(job_id) is not None
        self._jobs.cancel(job_id, unwritten=is_left or any(job_id in flight.rows.job_ids for flight in loads))
        if is_left:
            self._jobs.end_part([job_id])

    # Ends.

    def collect(self) -> None:
        """Goes on with saves that have arrived, and ends the flights that are over."""
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
        self._end_failed_loads()

    def _land(self, flight: Flight) -> None:
        """Ends a flight whose token is ready."""
        self._drop(flight)
        try:
            check_copied(flight)
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
        self._memory.give_up(segment_id, lost=lost)
        for job_id in rows.jobs():
            self._jobs.end_part([job_id], error_line(error), block_ids=rows.block_ids[rows.job_ids == job_id].tolist())
            self._backlog.fail(job_id, error_line(error))

    def waiting_on(self, *, all_of_them: bool = False) -> list[Any]:
        """The arrays whose readiness lets `collect` go on; or all, those that need a `begin` included."""
        return [
            flight.waiting_on
            for flight in self._flights
            if all_of_them
            or flight.phase is Phase.COPYING
            or not (self._lockstep or flight.direction is Direction.LOAD)
        ]
