"""The host tier of one process: dispatches saves, loads in portions, and the copies inside the forward pass.

This module decides which blocks are copied in which step, within the staging budget and `max_load_gb_per_step`. The
copies of each page group are in `worker.page_group_copies`, the memory is in `worker.tier_pools`.
"""

import contextlib
import dataclasses
import logging
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, final

import jax

from tpu_offload.config import CopyPath, OffloadConfig
from tpu_offload.kernels import (
    BySegment,
    FusedOutcome,
    FusedPlanner,
    FusedStep,
    Phase,
    fused_sizes,
)
from tpu_offload.layout import KVLayout
from tpu_offload.types import CopyJob, Direction, HostStore, JobKind, StepPlan
from tpu_offload.worker.backlog import BackloggedLoad, LoadBacklog
from tpu_offload.worker.fused_copies import ForwardPassCopies
from tpu_offload.worker.host_memory import HostPlan
from tpu_offload.worker.jobs import WorkerJobs
from tpu_offload.worker.page_group_copies import PageGroupCopies, WrapCopier, page_groups_of
from tpu_offload.worker.staging import StagingUsage
from tpu_offload.worker.tier_pools import TierPools
from tpu_offload.worker.validate import job_error

_logger = logging.getLogger(__name__)

Caches = list[jax.Array]
Batches = list[tuple[PageGroupCopies, BySegment]]
"""Blocks to copy, by page group and segment."""


@final
class TierCopies:
    """Copies between the caches and the host tier. All methods are called by the thread that dispatches the model.

    A copy that fails is reported as a failed result of its job.

    Args:
      config: the settings.
      layout: what a block is made of.
      kv_caches: per layer, dtype[num_blocks, *page_shape]; only shapes and shardings are read.
      pools: the sizes of the pool of chunks, which is not empty, and of that of states, if the layout has them.
      jobs: the worker's jobs in flight.
      fused: the engine runs the fused copies in its own step.
      wrap_copier: see `OffloadWorker`.

    Attributes:
      pools: the memory.
    """

    def __init__(
        self,
        config: OffloadConfig,
        layout: KVLayout,
        kv_caches: Sequence[Any],
        *,
        pools: HostPlan,
        jobs: WorkerJobs,
        fused: bool,
        wrap_copier: WrapCopier,
    ) -> None:
        self._jobs = jobs
        # A row of states counts as the blocks of attention that take as long.
        rows = {}
        if layout.state_group is not None:
            rows[len(layout.groups) - 1] = -(-layout.state_group.block_nbytes // layout.block_nbytes)
        self._backlog = LoadBacklog(max_blocks_per_step=config.max_load_blocks(layout), sizes=rows)
        self.pools = TierPools(
            config,
            layout,
            kv_caches,
            pools=pools,
            jobs=jobs,
            fused=fused,
            wrap_copier=wrap_copier,
            on_fail=self._backlog.fail,
        )
        self._groups = self.pools.groups
        self._lockstep = self.pools.lockstep
        self._step_id = -1  # rises with every `begin` and `resume`
        self._num_ranks = layout.num_ranks
        # Layer groups that share arrays share the pool: to a copy, a block is a row of these arrays, of any group.
        self._pool_of = layout.first_with_arrays
        self._groups_share_pools = any(first != group_id for group_id, first in enumerate(self._pool_of))
        staging_blocks = config.staging_blocks(layout)
        self._staging = StagingUsage(
            staging_blocks,
            flights=lambda: ((group.group_id, group.flights) for group in self._groups),
            lockstep=self._lockstep,
        )
        self._stages = any(group.copiers[Direction.LOAD].stages for group in self._groups)
        with contextlib.ExitStack() as on_error:
            on_error.callback(self.pools.close)
            self._fused = self._make_fused(config, staging_blocks)
            if not config.skip_jax_precompile:
                for copies in self._groups:
                    copies.compile()
            on_error.pop_all()

    def _make_fused(self, config: OffloadConfig, staging_blocks: int) -> ForwardPassCopies | None:
        paths, blocks_per_chunk = self.pools.paths, config.blocks_per_chunk
        if CopyPath.FUSED not in paths.values():
            return None
        assert len(self._groups) == 1, "fused copies support one page group"
        spec = self._groups[0].memory.spec
        sizes = fused_sizes(spec.capacity, blocks_per_chunk=blocks_per_chunk, buckets=config.block_size_buckets)
        sizes_of = {d: sizes if path is CopyPath.FUSED else () for d, path in paths.items()}
        planner = FusedPlanner(spec, blocks_per_chunk=blocks_per_chunk, sizes=sizes_of)
        return ForwardPassCopies(self._groups[0], planner, jobs=self._jobs, staging_blocks=staging_blocks)

    @property
    def has_flights(self) -> bool:
        """Whether copies are in flight or in the backlog."""
        if self._backlog:
            return True
        for group in self._groups:  # noqa: SIM110 - as in `OffloadWorker.has_flights`
            if group.flights:
                return True
        return False

    @property
    def hbm_nbytes(self) -> int:
        """Most bytes of HBM that the copies take on each device."""
        return self.pools.hbm_nbytes

    @property
    def awaits_begin(self) -> bool:
        """Whether the next `begin` can dispatch a load without waiting for a copy in flight."""
        if not self._stages or self._lockstep:
            return bool(self._backlog)
        return self._staging.room > 0 and any(self._room(load) > 0 for load in self._backlog)

    @property
    def awaits_pass(self) -> bool:
        """Whether a forward pass was planned and has not returned yet."""
        return self._fused is not None and self._fused.awaits_pass

    @property
    def offers_fused(self) -> bool:
        """Whether any path is `fused`."""
        return self._fused is not None

    def close(self) -> None:
        """Frees the pools. The caller has waited for the copies in flight."""
        self._backlog.clear()
        self.pools.close()

    # Steps.

    def save_early(self, jobs: Sequence[CopyJob], kv_caches: Caches) -> None:
        """Dispatches the early saves, before the rest of the plan. They are never inside the forward pass."""
        self._fail_lost_loads()
        self._save(jobs, kv_caches)

    def begin(
        self,
        plan: StepPlan,
        jobs: Mapping[JobKind, Sequence[CopyJob]],
        kv_caches: Caches,
        *,
        fuse: bool,
        urgent: Collection[int] = (),
    ) -> None:
        """Cancels jobs, resumes the copies that have arrived, and dispatches loads, including those in the backlog.

        Args:
          plan: says which jobs are cancelled.
          jobs: its jobs, of which the loads and saves are read.
          kv_caches: all caches; donated, and replaced in the list.
          fuse: the forward pass that follows takes `fused_step()`.
          urgent: ids of the loads that the pass reads, see `OffloadWorker.begin_step`.
        Raises:
          CachesLostError: a load failed after its program had taken the donated caches.
        """
        self._step_id = max(self._step_id + 1, plan.step_id)
        for job_id in plan.cancelled_job_ids:
            self._cancel(job_id)
        for group in self._groups:
            if group.flights:
                group.resume(kv_caches, step_id=self._step_id)
        loads = jobs.get(JobKind.LOAD, ())
        if plan.cancelled_job_ids:
            loads = self._without_cancelled(plan, loads)
        saves = jobs.get(JobKind.SAVE, ()) if fuse and self._fused is not None else ()
        if loads or self._backlog or saves:
            job_ids, portions = self._next_loads(loads, urgent)
            batches = self._by_group(portions)
            if fuse and self._fused is not None:
                accepted = self._accept(saves)
                own = [batch for job in accepted for batch in self._groups[0].by_segment([job])]
                loads_left = batches[0][1] if batches else []
                left = self._fused.plan([job.job_id for job in accepted], own, loads_left, has_saves=bool(saves))
                batches = [(self._groups[0], left)]
            self._load(job_ids, batches, kv_caches)

    def _without_cancelled(self, plan: StepPlan, loads: Sequence[CopyJob]) -> Sequence[CopyJob]:
        """The loads of a plan without those that it cancels itself, which end here."""
        for job in loads:
            if job.job_id in plan.cancelled_job_ids and job.job_id not in self._jobs:
                self._jobs.start(job.job_id, writes_caches=True)
                self._jobs.cancel(job.job_id, unwritten=True)
                self._jobs.drop_ref([job.job_id])
        return [job for job in loads if job.job_id not in plan.cancelled_job_ids]

    def end(self, saves: Sequence[CopyJob], kv_caches: Caches, outcome: FusedOutcome | None) -> None:
        """Dispatches the saves, except the blocks that the forward pass has copied."""
        if self._fused is not None and self._fused.awaits_pass:
            job_ids, groups = self._fused.end(outcome)
            self._dispatch(job_ids, [(self._groups[0], groups)], Direction.SAVE, kv_caches)
        else:
            self._save(saves, kv_caches)

    def fused_step(self) -> FusedStep:
        """See `OffloadWorker.fused_step`."""
        return self._fused.step() if self._fused else FusedStep()

    def fused_shapes(self) -> list[FusedStep]:
        """See `OffloadWorker.fused_shapes`."""
        return self._fused.shapes() if self._fused else []

    def abandon_pass(self) -> None:
        """The forward pass never returned: its copies have failed, and the saves that were to follow it fail too."""
        if self._fused is not None:
            self._fused.abandon()

    def abort_pass(self) -> None:
        """The forward pass was not executed: as `abandon_pass`, but the saves are cancelled."""
        if self._fused is not None:
            self._fused.abort()

    def abandon_backlog(self) -> None:
        """The caches are lost: cancels every load in the backlog."""
        for load in self._backlog:
            self._backlog.drop(load.job.job_id)
            self._jobs.cancel(load.job.job_id, unwritten=True)
            self._jobs.drop_ref([load.job.job_id])

    def resume(self, kv_caches: Caches) -> None:
        """Resumes the copies that have arrived, and dispatches more of the backlog, as if in a separate step.

        In lockstep it resumes all copies that were dispatched before, and waits for them.
        """
        self._step_id += 1
        for group in self._groups:
            group.resume(kv_caches, step_id=self._step_id)
        if self._backlog:
            job_ids, portions = self._next_loads(())
            self._load(job_ids, self._by_group(portions), kv_caches)

    def collect(self) -> None:
        """Dispatches the second halves of saves that have arrived, and ends the flights that are complete."""
        for group in self._groups:
            group.collect()
        self._end_failed_loads()

    def waiting_on(self, *, all_of_them: bool = False) -> list[Any]:
        """The arrays whose readiness lets `collect` make progress; or all, including those that need `begin`."""
        return [array for group in self._groups for array in group.waiting_on(all_of_them=all_of_them)]

    # Dispatch.

    def _accept(self, jobs: Sequence[CopyJob]) -> list[CopyJob]:
        """Starts the valid jobs and fails the others."""
        accepted = []
        for job, error in zip(jobs, self._errors_of(jobs), strict=True):
            if job.job_id in self._jobs:
                _logger.warning("job %d is in flight already; the duplicate is ignored", job.job_id)
                continue
            if not error and self._groups_share_pools:
                job = self._in_pools(job)
                error = job_error(job)  # a block of two groups
            parts = () if error else job.parts
            self._jobs.start(job.job_id, parts, writes_caches=job.direction is Direction.LOAD)
            if error:
                self._jobs.drop_ref([job.job_id], error)
            else:
                accepted.append(job)
        return accepted

    def _in_pools(self, job: CopyJob) -> CopyJob:
        """A valid job with the parts of all layer groups that share a pool under the first of these."""
        pool_of = self._pool_of
        if all(pool_of[part.group_id] == part.group_id for part in job.parts):
            return job
        parts = tuple(dataclasses.replace(part, group_id=pool_of[part.group_id]) for part in job.parts)
        return dataclasses.replace(job, parts=parts)

    def _errors_of(self, jobs: Sequence[CopyJob]) -> list[str]:
        """Why each of these jobs, all of one direction, cannot be started, in one line; empty if it can."""
        errors = [self._job_error(job) for job in jobs]
        valid = [job for job, error in zip(jobs, errors, strict=True) if not error]
        for group in self._groups:  # the places of all of them together: a step may have many small jobs
            parts = [
                (job.rank, part)
                for job in valid
                for part in job.parts
                if self._pool_of[part.group_id] == group.group_id
            ]
            if parts and not group.can_copy(parts, valid[0].direction):
                return [error or self._places_error(job) for job, error in zip(jobs, errors, strict=True)]
        return errors

    def _job_error(self, job: CopyJob) -> str:
        """What is wrong with a job but the places that it reads and writes; empty if nothing is."""
        error = job_error(job)
        if error:
            return error
        if not 0 <= job.rank < self._num_ranks:
            return f"a {job.kind.value} of rank {job.rank}; this worker has {self._num_ranks}"
        for part in job.parts:
            if part.store is not HostStore.HOST_TIER or not 0 <= part.group_id < len(self._pool_of):
                return (
                    f"a {job.kind.value} of layer group {part.group_id} in {part.store.value}; this worker has "
                    f"{len(self._pool_of)} in {HostStore.HOST_TIER.value}"
                )
        return ""

    def _places_error(self, job: CopyJob) -> str:
        """Which block of a job without other errors cannot be copied, in one line; empty if all can."""
        for part in job.parts:
            for group in page_groups_of(self._groups, self._pool_of[part.group_id]):
                error = group.part_error(part, job.direction, job.rank)
                if error:
                    return error
        return ""

    def _by_group(self, jobs: Sequence[CopyJob]) -> Batches:
        return [(group, group.by_segment(jobs)) for group in self._groups] if jobs else []

    def _save(self, jobs: Sequence[CopyJob], kv_caches: Caches) -> None:
        """Dispatches saves. No two of a rank share a flight: it plans several jobs only to isolate their failures."""
        accepted = self._accept(jobs)
        flights = [[job] for job in accepted] if self._num_ranks == 1 else _one_of_each_rank(accepted)
        batches = [batch for together in flights for batch in self._by_group(together)]
        self._dispatch([job.job_id for job in accepted], batches, Direction.SAVE, kv_caches)

    def _load(self, job_ids: Sequence[int], batches: Batches, kv_caches: Caches) -> None:
        self._dispatch(job_ids, batches, Direction.LOAD, kv_caches)
        self._end_failed_loads()

    def _dispatch(self, job_ids: Sequence[int], batches: Batches, direction: Direction, kv_caches: Caches) -> None:
        """Dispatches copies, the last ones of the jobs `job_ids`."""
        error = "the KV caches were lost while it was dispatched"
        try:
            for group, by_segment in batches:
                group.dispatch(direction, by_segment, kv_caches, step_id=self._step_id)
            error = ""
            if direction is Direction.LOAD:
                self._jobs.mark_written(job_ids)
        finally:
            self._jobs.drop_ref(job_ids, error)

    # Loads in portions.

    def _next_loads(self, new: Sequence[CopyJob], urgent: Collection[int] = ()) -> tuple[list[int], list[CopyJob]]:
        """Loads to dispatch now, from plan and backlog: ids of those then fully dispatched, and what to copy."""
        self._fail_lost_loads()
        if self._stages and self._lockstep:
            self._await_portions()
        accepted = self._accept(new)
        portions, job_ids = self._backlog.take(
            accepted,
            step_id=self._step_id,
            room=self._room if self._stages else None,
            staging_room=self._staging.room if self._stages else sys.maxsize,
            urgent=urgent,
        )
        return job_ids, portions

    def _room(self, load: BackloggedLoad) -> int:
        return self._staging.room_of(load, step_id=self._step_id)

    def _await_portions(self) -> None:
        """Ends the portions of loads that were dispatched two steps ago, and written one step ago.

        Hosts complete them at different times but must choose the same next portions. So each host waits here for the
        device, which has nearly always finished them by now.
        """
        for group in self._groups:
            for flight in list(group.flights):
                is_written = flight.phase is Phase.COPYING and flight.num_staged and flight.step_id <= self._step_id - 2
                if is_written and any(job_id in self._backlog for job_id in flight.moves.jobs()):
                    group.end(flight)  # reads its token, and so waits

    def _fail_lost_loads(self) -> None:
        """Fails loads whose host memory is lost, before other chunks are written there, which they would read."""
        if not self._backlog:  # nearly always
            return
        for load in self._backlog:
            lost = (
                group.memory.lost[load.job.rank, places].any()
                for group_id, places in load.places_left()
                for group in page_groups_of(self._groups, group_id)
            )
            if any(lost):
                self._backlog.fail(load.job.job_id, "the host memory of its chunks was lost")
        self._end_failed_loads()

    def _end_failed_loads(self) -> None:
        """Ends the failed loads of the backlog without dispatching the rest: blocks after a hole are useless."""
        if self._backlog:
            for load in self._backlog.take_failed():
                left = [(part.group_id, block_id) for part in load.parts_left() for block_id in part.block_ids]
                self._jobs.drop_ref([load.job.job_id], load.error, failed=left)

    def _cancel(self, job_id: int) -> None:
        """Cancels a load if some of its blocks are not written yet; any other job ends as it would have."""
        loads = (
            flight for group in self._groups for flight in group.in_transit() if flight.direction is Direction.LOAD
        )
        is_left = self._backlog.drop(job_id) is not None
        self._jobs.cancel(job_id, unwritten=is_left or any(job_id in flight.moves.job_ids for flight in loads))
        if is_left:
            self._jobs.drop_ref([job_id])


def _one_of_each_rank(jobs: Iterable[CopyJob]) -> list[list[CopyJob]]:
    """Splits jobs so that no two of a rank are together."""
    together: list[list[CopyJob]] = []
    num_jobs: Counter[int] = Counter()
    for job in jobs:
        place = num_jobs[job.rank]
        num_jobs[job.rank] += 1
        if place == len(together):
            together.append([])
        together[place].append(job)
    return together
