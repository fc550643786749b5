"""Applies worker reports: host capacity, worker restarts, losses of the KV caches, job completions.

Every worker holds a shard of each chunk. So a slot of the host tier, or a block of the swap pool, is usable once every
worker has allocated it, and lost when one worker has lost it. A restarted worker has lost all of them, and its KV
caches too.
"""

import logging
from collections.abc import Iterator
from typing import final

from tpu_offload.config import CopyPath
from tpu_offload.core.context import TierContext
from tpu_offload.core.host_pools import HostPools
from tpu_offload.core.storage.stack import StorageStackPlanner
from tpu_offload.core.swap.manager import RequestSwap
from tpu_offload.core.transfers import Transfers
from tpu_offload.core.validate import has_setup, report_error
from tpu_offload.core.workers import Workers
from tpu_offload.types import CacheEpoch, Direction, StepReport, WorkerSetup

_logger = logging.getLogger(__name__)


@final
class ReportHandler:
    """Applies the reports of all workers.

    Args:
      context: the scheduler's shared state.
      workers: those that report each step.
      pools: is told the capacity of the host tier.
      transfers: is told losses of the host tier.
      storage: likewise, and restarts of workers.
      swap: is told losses of the swap pool.
    """

    def __init__(
        self,
        context: TierContext,
        *,
        workers: Workers,
        pools: HostPools,
        transfers: Transfers,
        storage: StorageStackPlanner,
        swap: RequestSwap,
    ) -> None:
        self._num_groups = num_groups = len(context.layout.groups)
        self._num_pools = context.num_pools
        self._pools = pools
        self._max_swap_blocks = context.config.max_swap_blocks(context.layout)
        self._staging = context.staging
        self._transfers = transfers
        self._storage = storage
        self._swap = swap
        self._requests = context.requests
        self._jobs = context.jobs
        self._counts = context.counts
        self._workers = workers
        self._num_swap_blocks = dict.fromkeys(range(len(workers)), (0,) * num_groups)
        self._lost_caches: list[int] = []
        self._idempotent: StepReport | None = None  # the last report, if applying it again would change nothing

    def apply(self, report: StepReport) -> None:
        """Applies one worker's report; an invalid one is ignored and counted.

        Raises:
          ConfigError: the worker was not made for this scheduler; nothing of the report was applied.
        """
        if report is self._idempotent:  # a worker in this process sends the same object in most steps
            return
        error = report_error(
            report,
            num_workers=len(self._workers),
            num_pools=self._num_pools,
            num_groups=self._num_groups,
            max_swap_blocks=self._max_swap_blocks,
        )
        if error:
            if has_setup(report):  # with the settings of another scheduler the report may well be invalid
                self._workers.check(report)
            self._reject(error)
            return
        if self._is_stale(report):
            self._counts.num_ignored_results += len(report.results)
            return
        self._workers.check(report)
        self._check_incarnation(report)
        self._workers.note_report(report)
        if report.setup is not None:
            self._staging.use(dict(_paths(report.setup)))
        self._apply_valid(report)

    @property
    def has_news(self) -> bool:
        """Whether `take_lost_caches` would return anything."""
        return bool(self._lost_caches)

    def take_lost_caches(self) -> tuple[int, ...]:
        """The workers that have lost their KV caches since the last call, each once."""
        if not self._lost_caches:
            return ()
        lost, self._lost_caches = tuple(dict.fromkeys(self._lost_caches)), []
        return lost

    def _apply_valid(self, report: StepReport) -> None:
        """Applies a valid report from the current incarnation of its worker."""
        worker_id = report.worker_id
        self._pools.apply(report)
        if report.num_swap_blocks:
            self._grow_swap_pool(report)
        error: Exception | None = None
        for pool, first, end in report.lost_slots:
            slots = self._pools.slot_range(pool, first, end)
            try:
                self._mark_slots_lost(slots.start, slots.stop)
            except Exception as e:  # of an eviction policy: the rest of the report counts all the same
                error = error or e
        for group_id, first, end in report.lost_swap_blocks:
            self._swap.mark_blocks_lost(group_id, first, end)
        for result in report.results:
            if not self._jobs.report(worker_id, result):
                self._counts.num_ignored_results += 1
        if report.oldest_job_id <= self._jobs.next_job_id:
            num_lost = self._jobs.ack_through(worker_id, report.oldest_job_id, but=report.storage_job_ids)
            if num_lost:
                self._counts.num_lost_results += num_lost
        else:  # the worker has run jobs of another scheduler, before this one
            self._reject(
                f"worker {worker_id} acknowledges jobs before {report.oldest_job_id}; the next one is "
                f"{self._jobs.next_job_id}"
            )
        self._check_cache_losses(report)
        self._transfers.flush_losses()
        if not (report.results or report.lost_slots or report.lost_swap_blocks):
            self._idempotent = report
        if error is not None:
            raise error

    def _reject(self, error: str) -> None:
        self._counts.num_rejected_reports += 1
        if self._counts.num_rejected_reports.bit_count() == 1:  # 1, 2, 4, 8, ...: many do not fill the log
            count = self._counts.num_rejected_reports
            _logger.error("ignored an invalid report (%d so far): %s", count, error)

    def _is_stale(self, report: StepReport) -> bool:
        """Whether the report is from before a restart of its worker, and not from a rival (`WorkerSetup.rival`)."""
        if report.worker_id >= len(self._workers) or (report.setup is not None and report.setup.rival):
            return False  # `Workers.check` raises a ConfigError
        known, _ = self._workers.known_epoch(report.worker_id)
        if not report.incarnation or report.incarnation >= known:
            return False
        self._reject(f"stale report from worker {report.worker_id}: incarnation {report.incarnation}, current {known}")
        return True

    def _check_incarnation(self, report: StepReport) -> None:
        """Records the incarnation of a worker, and handles a restart."""
        known, _ = self._workers.known_epoch(report.worker_id)
        if not report.incarnation or report.incarnation == known:
            return
        if known:
            self._handle_restart(report)
            self._handle_cache_loss(report)
        else:  # its first report
            self._workers.set_epoch(
                CacheEpoch(worker_id=report.worker_id, incarnation=report.incarnation, num_losses=0)
            )
            self._adopt_stored(report)

    def _check_cache_losses(self, report: StepReport) -> None:
        incarnation, num_losses = self._workers.known_epoch(report.worker_id)
        if report.incarnation == incarnation and report.num_cache_losses > num_losses:
            _logger.error("worker %d has lost its KV caches: requests are computed again, or end", report.worker_id)
            self._handle_cache_loss(report)

    def _handle_cache_loss(self, report: StepReport) -> None:
        """One worker has lost its KV caches, and with them a shard of every block."""
        self._workers.set_epoch(
            CacheEpoch(worker_id=report.worker_id, incarnation=report.incarnation, num_losses=report.num_cache_losses)
        )
        self._lost_caches.append(report.worker_id)
        self._transfers.mark_caches_lost(swapped_out=self._swap.out)
        self._swap.mark_caches_lost()

    def _handle_restart(self, report: StepReport) -> None:
        """A worker has lost its memory: a shard of every chunk, and its jobs."""
        worker_id = report.worker_id
        _logger.error("worker %d has restarted; the host tier is empty", worker_id)
        self._counts.num_worker_restarts += 1
        self._swap.mark_slots_lost(0, self._pools.end_slot)
        self._transfers.mark_tier_lost()
        self._mark_promises_lost(0, self._pools.end_slot)
        self._swap.mark_pool_lost()
        self._num_swap_blocks[worker_id] = report.num_swap_blocks or (0,) * self._num_groups
        self._swap.limit(self._num_swap_blocks[worker_id])
        self._adopt_stored(report)
        # The jobs have not ended: plans made before this report may still reach the new incarnation.
        self._transfers.fail_in_flight(worker_id, why=f"worker {worker_id} has restarted")
        # What it has allocated may be more than before; the rest of the report is applied next and raises these.
        self._pools.restart(report)

    def _adopt_stored(self, report: StepReport) -> None:
        """A worker has started: what its storage tiers have."""
        self._storage.adopt(report.worker_id, report.setup)

    def _grow_swap_pool(self, report: StepReport) -> None:
        """A block of the swap pool is usable once every worker has it."""
        self._num_swap_blocks[report.worker_id] = report.num_swap_blocks
        self._swap.grow([min(counts) for counts in zip(*self._num_swap_blocks.values(), strict=True)])

    def _mark_slots_lost(self, first: int, end: int) -> None:
        """Host memory is gone: drops its chunks and fails the jobs and promises that use it."""
        self._swap.mark_slots_lost(first, end)
        self._storage.mark_slots_lost(first, end)
        self._mark_promises_lost(first, end)
        self._transfers.mark_slots_lost(first, end)  # last: an eviction policy may raise

    def _mark_promises_lost(self, first: int, end: int) -> None:
        for request in self._requests.all():
            promise = request.promise
            if promise is not None and promise.held.touches(first, end):
                promise.lost = True


def _paths(setup: WorkerSetup) -> Iterator[tuple[Direction, CopyPath]]:
    """The copy paths that a worker reports."""
    for direction, name in ((Direction.SAVE, setup.save_path), (Direction.LOAD, setup.load_path)):
        for path in CopyPath:
            if path.value == name:
                yield direction, path
