"""The copies of request swap between the caches and the swap pool of one process.

All of them use the direct path. A swap-out must read its blocks before the current step overwrites them, so staging
would gain nothing, and two blocks of HBM are enough.
"""

import contextlib
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any, final

import jax

from tpu_offload.config import OffloadConfig
from tpu_offload.kernels import DirectCopier, TransferSpec
from tpu_offload.layout import KVLayout
from tpu_offload.memory import SegmentLimit
from tpu_offload.types import CopyJob, CopyPart, Direction, HostStore
from tpu_offload.worker.arrays import wait_for_all
from tpu_offload.worker.host_memory import HostMemory, PoolPlan, plan_swap_pool
from tpu_offload.worker.jobs import WorkerJobs
from tpu_offload.worker.page_group_copies import PageGroupCopies, WrapCopier, page_groups_of, unwrapped
from tpu_offload.worker.validate import job_error

_logger = logging.getLogger(__name__)

_MAX_BLOCKS = 1024  # per dispatch; each passes an array of ids of this length
# Measuring waits for the copy, which stalls an engine that runs ahead, so only some copies are measured.
_FIRST_MEASURED, _EVERY_MEASURED = 4, 16

Caches = list[jax.Array]


@final
class SwapCopies:
    """Owns the swap pool of one process. All methods are called by the thread that dispatches the model.

    A copy that fails is reported as a failed result of its job.

    Args:
      config: the settings.
      layout: what a block is made of.
      kv_caches: per layer, dtype[num_blocks, *page_shape]; only shapes and shardings are read.
      jobs: the worker's jobs in flight.
      available: bytes of host memory that the host tier leaves.
      tier: per page group, the copies that read the host tier; empty without one.
      clock: seconds, monotonic.
      wrap_copier: see `OffloadWorker`.
    """

    def __init__(
        self,
        config: OffloadConfig,
        layout: KVLayout,
        kv_caches: Sequence[Any],
        *,
        jobs: WorkerJobs,
        available: int,
        tier: Sequence[PageGroupCopies],
        clock: Callable[[], float],
        wrap_copier: WrapCopier = unwrapped,
    ) -> None:
        self._jobs = jobs
        self._clock = clock
        self._num_copies = dict.fromkeys(Direction, 0)
        self._timeout_s = config.job_timeout_s
        self._tier = list(tier)
        self._groups: list[PageGroupCopies] = []
        pools = plan_swap_pool(config, layout, kv_caches, available)
        if not all(num_blocks for num_blocks, _ in pools):
            return
        page_groups = [
            (group_id, pages.layer_ids, limit, *pool)
            for group_id, (group, pool) in enumerate(zip(layout.groups, pools, strict=True))
            for limit in [SegmentLimit()]
            for pages in group.page_groups
        ]
        with contextlib.ExitStack() as on_error:
            for group_id, layer_ids, limit, num_blocks, (num_segments, segment_blocks) in page_groups:
                caches = [kv_caches[i] for i in layer_ids]
                capacity = min(_MAX_BLOCKS, caches[0].shape[0] // layout.num_ranks)
                spec = TransferSpec.from_caches(caches, segment_blocks=segment_blocks, capacity=capacity)
                pool = PoolPlan(num_blocks, num_segments, segment_blocks, num_segments)
                memory = HostMemory.allocate(spec, pool, limit=limit)
                on_error.callback(memory.arena.close)
                copier = wrap_copier(DirectCopier(spec, memory.arena), memory.arena)
                self._groups.append(
                    PageGroupCopies(
                        group_id=group_id,
                        store=HostStore.SWAP_POOL,
                        layer_ids=layer_ids,
                        memory=memory,
                        copiers=dict.fromkeys(Direction, copier),
                        jobs=jobs,
                        lockstep=not kv_caches[0].sharding.is_fully_addressable,
                    )
                )
            if not config.skip_jax_precompile:
                for copies in self._all():
                    copies.compile()
            on_error.pop_all()

    @property
    def num_blocks_ready(self) -> tuple[int, ...]:
        """Per layer group, the blocks of the pool that are allocated; grows to the size of the pool."""
        ready: dict[int, int] = {}
        for group in self._groups:
            ready[group.group_id] = min(group.memory.num_blocks_ready, ready.get(group.group_id, sys.maxsize))
        return tuple(ready.values())

    @property
    def has_flights(self) -> bool:
        """Whether copies are in flight."""
        return any(copies.flights for copies in self._all())

    @property
    def hbm_nbytes(self) -> int:
        """Most bytes of HBM that the copies take on each device: those of one program, as programs run one by one."""
        return max((group.hbm_nbytes for group in self._groups), default=0)

    def wait_until_allocated(self) -> None:
        """Blocks until the pool is allocated or its allocation has failed; for warm-up, benchmarks and tests."""
        for group in self._groups:
            group.memory.arena.wait_until_allocated()

    def swap(self, jobs: Sequence[CopyJob], kv_caches: Caches) -> None:
        """Dispatches copies out or back.

        Args:
          jobs: the swap jobs.
          kv_caches: all caches; a copy out reads them in program order, a copy back donates those that it writes and
            replaces them in the list.
        Raises:
          CachesLostError: a copy failed after its program had taken the donated caches.
        """
        for job in jobs:
            if job.job_id in self._jobs:
                _logger.warning("job %d is in flight already; the duplicate is ignored", job.job_id)
                continue
            self._jobs.start(job.job_id, writes_caches=job.direction is Direction.LOAD)
            error = self._job_error(job)
            try:
                if not error:
                    self._measured(job, kv_caches)
            finally:
                self._jobs.drop_ref([job.job_id], error)

    def collect(self) -> None:
        """Ends the copies that are complete."""
        for copies in self._all():
            copies.collect()

    def waiting_on(self, *, all_of_them: bool = False) -> list[Any]:
        """The tokens of the copies in flight; `collect` can end each that is ready."""
        return [array for copies in self._all() for array in copies.waiting_on(all_of_them=all_of_them)]

    def take_lost(self) -> tuple[tuple[int, int, int], ...]:
        """Ranges (group_id, first, end) of blocks of the pool lost since the last call."""
        lost = {(group.group_id, *places) for group in self._groups for places in group.memory.arena.take_lost()}
        return tuple(sorted(lost))  # what one page group has lost is useless in the others

    def stop_growing(self) -> None:
        """Stops the allocation of the pool, without waiting for it."""
        for group in self._groups:
            group.memory.arena.stop_growing()

    def close(self) -> None:
        """Frees the pool. The caller has waited for the copies in flight."""
        for copies in self._all():
            copies.flights.clear()
        for group in self._groups:
            group.memory.arena.close()

    # Inside.

    def _all(self) -> list[PageGroupCopies]:
        return [*self._groups, *self._tier]

    def _measured(self, job: CopyJob, kv_caches: Caches) -> None:
        """Dispatches a job, and waits for some of them to measure the copy alone."""
        number = self._num_copies[job.direction]
        self._num_copies[job.direction] += 1
        # Not the first one, which may compile.
        measured = 0 < number <= _FIRST_MEASURED or (number > 0 and number % _EVERY_MEASURED == 0)
        if measured:
            measured = wait_for_all(kv_caches, timeout_s=self._timeout_s)
        start_s = self._clock()
        # All portions, even after one that failed: every host must dispatch the same programs.
        for copies in self._all():
            copies.dispatch(job.direction, copies.by_segment([job]), kv_caches)
        if not measured:
            return
        tokens = [f.waiting_on for copies in self._all() for f in copies.flights if job.job_id in f.moves.job_ids]
        if wait_for_all(tokens, timeout_s=self._timeout_s):
            self._jobs.set_copy_s(job.job_id, self._clock() - start_s)

    def _sources(self, part: CopyPart) -> list[PageGroupCopies]:
        return page_groups_of(self._tier if part.store is HostStore.HOST_TIER else self._groups, part.group_id)

    def _job_error(self, job: CopyJob) -> str:
        """Why a job cannot be started, in one line; empty if it can."""
        error = job_error(job)
        if error:
            return error
        for part in job.parts:
            sources = self._sources(part)
            if not sources or job.direction not in sources[0].copiers:
                return (
                    f"a {job.kind.value} of layer group {part.group_id} of {part.store.value}: this worker has no such "
                    "memory, or only reads it"
                )
            error = next(filter(None, (source.part_error(part, job.direction, job.rank) for source in sources)), "")
            if error:
                return error
        return ""
