"""Which plans a worker does: each once, in order, and none that was made before its KV caches were lost.

Plans travel. A transport may deliver one twice, or after a later one, and an engine that schedules ahead has made some
before it hears what became of the step at hand. Done again, or done late, a plan would copy blocks and slots that are
others' by then. Done after a loss of the caches, it would save zeros under the hashes of what they held.

Job ids rise from plan to plan, so `StepPlan.next_job_id` tells a plan that was begun before from a new one. Epochs tell
which caches the scheduler had in mind: it learns of a loss with the worker's next report, and all that it planned until
then names the epoch before.
"""

import dataclasses
import logging
from typing import final

from tpu_offload.types import CacheEpoch, StepPlan, WorkerSetup

_logger = logging.getLogger(__name__)


@final
class PlanGate:
    """What one worker has begun, and which caches it has.

    Args:
      epoch: of the caches that it starts with.
      setup: goes into reports until the scheduler knows this life of the worker.
    """

    def __init__(self, epoch: CacheEpoch, setup: WorkerSetup) -> None:
        self._epoch = epoch
        self._own_setup = setup
        self._setup: WorkerSetup | None = setup
        self._begun_below = 0  # jobs with smaller ids are in plans that were begun
        self._last_step_id = -1  # of the last plan that was begun
        self._num_ignored = 0

    @property
    def epoch(self) -> CacheEpoch:
        """Names the caches that the worker has now."""
        return self._epoch

    @property
    def setup(self) -> WorkerSetup | None:
        """What the next report says; None once the scheduler has heard it."""
        return self._setup

    def lose_caches(self) -> None:
        """The caches are gone; there will be others."""
        self._epoch = dataclasses.replace(self._epoch, num_losses=self._epoch.num_losses + 1)

    def begin(self, plan: StepPlan) -> bool:
        """Takes note that a plan begins; False if it, or a later one, has begun before: nothing of it is to be done."""
        if self.has_begun(plan):
            self._ignore(plan, "came before, or is older than the last one")
            return False
        self._begun_below = max(self._begun_below, plan.next_job_id)
        self._last_step_id = plan.step_id
        self._listen(plan)
        return True

    def has_begun(self, plan: StepPlan) -> bool:
        """Whether a plan is a repetition, or a later one has begun."""
        if plan.next_job_id > self._begun_below:
            return False
        if plan.jobs:
            return plan.next_job_id > 0
        # Without jobs it would do no harm, but it must not take the place of the plan at hand.
        has_ids = plan.next_job_id > 0 or self._begun_below > 0
        return has_ids and plan.step_id <= self._last_step_id

    def is_stale(self, plan: StepPlan) -> bool:
        """Whether a plan was made for caches, or for a life of this worker, that are no more."""
        epochs, own = plan.cache_epochs, self._epoch
        if not epochs:
            return False
        if own.worker_id >= len(epochs):
            return True
        return epochs[own.worker_id] != (own.incarnation, own.num_losses)

    def ignore_end(self, plan: StepPlan) -> None:
        """`end_step` came for a plan that is not the one that has begun, or that has ended."""
        self._ignore(plan, "is not the one that has begun, or has ended")

    def _listen(self, plan: StepPlan) -> None:
        """What a plan shows of what the scheduler knows."""
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
        if self._num_ignored.bit_count() == 1:  # 1, 2, 4, 8, ...: a transport that repeats itself fills no log
            _logger.warning("plan %d %s: ignored (%d so far)", plan.step_id, why, self._num_ignored)
