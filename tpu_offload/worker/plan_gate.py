"""Admits each plan once and in order, and no plan that was made before the worker's KV caches were lost.

A transport may deliver a plan twice, or after a later one, and an engine that schedules ahead makes plans before it has
the results of the current step. A repeated or late plan would copy blocks and slots that have new owners by then. A
plan that is executed after a loss of the caches would save zeros under the hashes of what they held.

Job ids rise from plan to plan, so `StepPlan.next_job_id` distinguishes a repeated plan from a new one. Epochs identify
the caches that a plan was made for: the scheduler learns of a loss with the worker's next report, and what it planned
before has the previous epoch.
"""

import dataclasses
import logging
from typing import final

from tpu_offload.types import CacheEpoch, StepPlan, WorkerSetup

_logger = logging.getLogger(__name__)


@final
class PlanOrder:
    """The plans of one scheduler that have begun, to recognize those that come again or late."""

    def __init__(self) -> None:
        self._begun_below = 0  # jobs with smaller ids are in plans that were begun
        self._last_step_id = -1  # of the last plan that was begun

    def has_begun(self, plan: StepPlan) -> bool:
        """Whether a plan, or a later one, has begun."""
        if plan.next_job_id > self._begun_below:
            return False
        if plan.jobs:
            return plan.next_job_id > 0
        # Without jobs it is harmless, but it must not replace the current plan.
        has_ids = plan.next_job_id > 0 or self._begun_below > 0
        return has_ids and plan.step_id <= self._last_step_id

    def begin(self, plan: StepPlan) -> None:
        """A plan that has not begun before begins."""
        if plan.next_job_id > self._begun_below:
            self._begun_below = plan.next_job_id
        self._last_step_id = plan.step_id


@final
class PlanGate:
    """The plans that one worker has begun, and the epoch of its caches.

    Args:
      epoch: of the first caches.
      setup: included in reports until the scheduler knows this incarnation of the worker.
    """

    def __init__(self, epoch: CacheEpoch, setup: WorkerSetup) -> None:
        self._epoch = epoch
        self._own_setup = setup
        self._setup: WorkerSetup | None = setup
        self._order = PlanOrder()
        self._num_ignored = 0

    @property
    def epoch(self) -> CacheEpoch:
        """Identifies the worker's present caches."""
        return self._epoch

    @property
    def setup(self) -> WorkerSetup | None:
        """The setup that the next report includes; None once the scheduler knows it."""
        return self._setup

    def mark_caches_lost(self) -> None:
        """The caches are lost and will be replaced: they get a new epoch."""
        self._epoch = dataclasses.replace(self._epoch, num_losses=self._epoch.num_losses + 1)

    def begin(self, plan: StepPlan) -> bool:
        """Begins a plan; False if it, or a later one, has begun before, and must be ignored."""
        if self._order.has_begun(plan):
            self._ignore(plan, "is a duplicate, or older than the last one")
            return False
        self._order.begin(plan)
        self._note_known_incarnation(plan)
        return True

    def has_begun(self, plan: StepPlan) -> bool:
        """See `PlanOrder`."""
        return self._order.has_begun(plan)

    def is_stale(self, plan: StepPlan) -> bool:
        """Whether a plan was made for lost caches, or for an earlier incarnation of this worker."""
        epochs, own = plan.cache_epochs, self._epoch
        if not epochs:
            return False
        if own.worker_id >= len(epochs):
            return True
        return epochs[own.worker_id] != (own.incarnation, own.num_losses)

    def ignore_end(self, plan: StepPlan) -> None:
        """Logs that `end_step` was called for a plan that is not the current one."""
        self._ignore(plan, "is not the current one, or has ended")

    def _note_known_incarnation(self, plan: StepPlan) -> None:
        """Reads from the plan which incarnation of this worker the scheduler knows."""
        epochs, own = plan.cache_epochs, self._epoch
        if own.worker_id >= len(epochs):
            return
        known = epochs[own.worker_id][0]
        if known == own.incarnation:
            self._setup = None
        elif known > own.incarnation:
            self._setup = dataclasses.replace(self._own_setup, rival=known)

    def _ignore(self, plan: StepPlan, why: str) -> None:
        self._num_ignored += 1
        if (
            self._num_ignored.bit_count() == 1
        ):  # 1, 2, 4, 8, ...: a transport that duplicates plans must not fill the log
            _logger.warning("ignored plan %d, which %s (%d ignored so far)", plan.step_id, why, self._num_ignored)
