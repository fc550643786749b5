"""Applies worker reports: host capacity, worker restarts, losses of the KV caches, job completions.

A slot of the host tier, or a block of the swap pool, is usable once every worker has it, and gone when one has lost it:
each chunk has a part on every worker. A worker that was started anew has lost all of them, and its KV caches too.
"""

import logging
from collections.abc import Iterator
from typing import final

from tpu_offload.config import CopyPath
from tpu_offload.core.context import TierContext
from tpu_offload.core.index import touches
from tpu_offload.core.save_policy import SavePolicy
from tpu_offload.core.swap import RequestSwap
from tpu_offload.core.tiering import StoragePlanner
from tpu_offload.core.transfers import Transfers
from tpu_offload.core.validate import has_setup, report_error
from tpu_offload.core.workers import Workers
from tpu_offload.types import CacheEpoch, Direction, StepReport, WorkerSetup

_logger = logging.getLogger(__name__)


@final
class Reports:
    """What is known of each worker, and what follows from its next report.

    Args:
      context: the books.
      workers: those that report each step.
      save_policy: told how large the host tier is.
      transfers: told what was lost of the host tier.
      storage: likewise, and of storage.
      swap: told what was lost of the swap pool.
    """

    def __init__(
        self,
        context: TierContext,
        *,
        workers: Workers,
        save_policy: SavePolicy,
        transfers: Transfers,
        storage: StoragePlanner,
        swap: RequestSwap,
    ) -> None:
        self._num_groups = num_groups = len(context.layout.groups)
        self._max_host_chunks = context.config.host_chunks(context.layout)
        self._max_swap_blocks = context.config.max_swap_blocks(context.layout)
        self._index = context.index
        self._save_policy = save_policy
        self._staging = context.staging
        self._transfers = transfers
        self._storage = storage
        self._swap = swap
        self._requests = context.requests
        self._jobs = context.jobs
        self._counts = context.counts
        self._workers = workers
        self._num_swap_blocks = dict.fromkeys(range(len(workers)), (0,) * num_groups)
        self._num_host_chunks = dict.fromkeys(range(len(workers)), 0)
        self._lost_caches: list[int] = []
        self._repeated: StepReport | None = None  # one that changes nothing when it comes again

    def apply(self, report: StepReport) -> None:
        """Takes one worker's report; one that makes no sense is ignored whole, and counted.

        Raises:
          ConfigError: the worker was not made for this scheduler; nothing of the report was taken.
        """
        if report is self._repeated:  # what a worker next door says in most steps
            return
        error = report_error(
            report,
            num_workers=len(self._workers),
            num_groups=self._num_groups,
            max_swap_blocks=self._max_swap_blocks,
        )
        if error:
            if has_setup(report):  # a worker with other settings may say what cannot be with ours
                self._workers.check(report)
            self._reject(error)
            return
        if self._is_of_an_earlier_life(report):
            self._counts.num_ignored_results += len(report.results)
            return
        self._workers.check(report)
        self._note_life(report)
        self._workers.hear(report)
        if report.setup is not None:
            self._staging.use(dict(_paths(report.setup)))
        self._take(report)

    @property
    def has_news(self) -> bool:
        """Whether `take_lost_caches` would return anything."""
        return bool(self._lost_caches)

    def take_lost_caches(self) -> tuple[int, ...]:
        """The workers that have lost their KV caches since the last call, each once."""
        lost, self._lost_caches = tuple(dict.fromkeys(self._lost_caches)), []
        return lost

    def _take(self, report: StepReport) -> None:
        """Takes a report that makes sense, of the life of its worker that is known."""
        worker_id = report.worker_id
        if report.num_host_chunks > self._num_host_chunks[worker_id]:
            # A slot is usable once every worker has it.
            self._num_host_chunks[worker_id] = report.num_host_chunks
            self._index.grow(min(self._max_host_chunks, *self._num_host_chunks.values()))
            self._save_policy.resize(self._index.num_slots)
        if report.num_swap_blocks:
            self._grow_swap_pool(report)
        for first, end in report.lost_slots:
            self._lose_slots(first, end)
        for group_id, first, end in report.lost_swap_blocks:
            self._swap.lose_blocks(group_id, first, end)
        for result in report.results:
            if not self._jobs.report(worker_id, result):
                self._counts.num_ignored_results += 1
        if report.oldest_job_id <= self._jobs.num_given:
            why = f"worker {worker_id} never reported the result"
            self._counts.num_lost_results += self._jobs.ack_through(worker_id, report.oldest_job_id, why=why)
        else:  # it has been told of jobs that are not ours: another scheduler's, before this one
            self._reject(f"worker {worker_id} is through with job {report.oldest_job_id}, which was never given")
        self._hear_of_losses(report)
        self._transfers.settle()
        if not (report.results or report.lost_slots or report.lost_swap_blocks):
            self._repeated = report

    def _reject(self, error: str) -> None:
        self._counts.num_rejected_reports += 1
        if self._counts.num_rejected_reports.bit_count() == 1:  # 1, 2, 4, 8, ...: whoever sends many fills no log
            count = self._counts.num_rejected_reports
            _logger.error("report %d that makes no sense is ignored, as those before it: %s", count, error)

    def _is_of_an_earlier_life(self, report: StepReport) -> bool:
        """Whether the worker has been started anew since; unless it shows that it still lives (`WorkerSetup.rival`)."""
        if report.worker_id >= len(self._workers) or (report.setup is not None and report.setup.rival):
            return False  # an error, as `Workers.check` says
        known, _ = self._workers.known_epoch(report.worker_id)
        if not report.incarnation or report.incarnation >= known:
            return False
        self._reject(f"stale report from worker {report.worker_id}: incarnation {report.incarnation}, now {known}")
        return True

    def _note_life(self, report: StepReport) -> None:
        """Takes note of the life of its worker that a report is of, and of what follows if that is a new one."""
        known, _ = self._workers.known_epoch(report.worker_id)
        if not report.incarnation or report.incarnation == known:
            return
        if known:
            self._start_anew(report)
            self._lose_caches(report)
        else:  # its first life, as far as anybody knows
            self._workers.set_epoch(
                CacheEpoch(worker_id=report.worker_id, incarnation=report.incarnation, num_losses=0)
            )

    def _hear_of_losses(self, report: StepReport) -> None:
        incarnation, num_losses = self._workers.known_epoch(report.worker_id)
        if report.incarnation == incarnation and report.num_cache_losses > num_losses:
            _logger.error("worker %d has lost its KV caches; what they held is computed again", report.worker_id)
            self._lose_caches(report)

    def _lose_caches(self, report: StepReport) -> None:
        """The KV in HBM is gone on one worker, and with it what all of them have: each block has a part on each."""
        self._workers.set_epoch(
            CacheEpoch(worker_id=report.worker_id, incarnation=report.incarnation, num_losses=report.num_cache_losses)
        )
        self._lost_caches.append(report.worker_id)
        self._transfers.lose_caches()
        self._swap.lose_caches()

    def _start_anew(self, report: StepReport) -> None:
        """A worker has lost its memory: so are all chunks, because each has a part there, and its jobs."""
        worker_id = report.worker_id
        _logger.error("worker %d was started anew; the host tier is empty", worker_id)
        self._counts.num_worker_restarts += 1
        self._swap.lose_slots(0, self._max_host_chunks)
        self._transfers.lose_all()
        self._break_promises(0, self._max_host_chunks)
        self._swap.lose_all()
        self._num_swap_blocks[worker_id] = report.num_swap_blocks or (0,) * self._num_groups
        self._swap.limit(self._num_swap_blocks[worker_id])
        # Not over: plans that were made before this report came may be on their way to the new life.
        self._storage.reset()
        self._transfers.doubt(worker_id, why=f"worker {worker_id} was started anew")
        self._num_host_chunks[worker_id] = report.num_host_chunks
        self._index.limit(report.num_host_chunks)

    def _grow_swap_pool(self, report: StepReport) -> None:
        """A block of the swap pool is usable once every worker has it."""
        self._num_swap_blocks[report.worker_id] = report.num_swap_blocks
        self._swap.grow([min(counts) for counts in zip(*self._num_swap_blocks.values(), strict=True)])

    def _lose_slots(self, first: int, end: int) -> None:
        """Host memory is gone: forgets what was in it and fails what was about to use it."""
        self._swap.lose_slots(first, end)
        self._transfers.lose_slots(first, end)
        self._storage.lose_slots(first, end)
        self._break_promises(first, end)

    def _break_promises(self, first: int, end: int) -> None:
        for request in self._requests.values():
            if request.promise and touches(request.promise.slots, first, end):
                request.promise.lost = True


def _paths(setup: WorkerSetup) -> Iterator[tuple[Direction, CopyPath]]:
    """The paths that a worker uses, as far as it says so."""
    for direction, name in ((Direction.SAVE, setup.save_path), (Direction.LOAD, setup.load_path)):
        for path in CopyPath:
            if path.value == name:
                yield direction, path
