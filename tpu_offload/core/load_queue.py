"""Loads whose blocks the engine has granted, until a plan contains them.

The next plan contains them all, except staged loads without free staging blocks: those wait in order, for a bounded
time. A load gets its job id when it is planned, so that ids rise from plan to plan.
"""

from collections.abc import Iterator
from typing import final

from tpu_offload.core.context import TierContext
from tpu_offload.core.jobs import Job
from tpu_offload.core.promises import WaitingLoad
from tpu_offload.types import Direction, JobKind


@final
class LoadQueue:
    """The waiting loads, first in, first out.

    Args:
      context: the scheduler's shared state.
    """

    def __init__(self, context: TierContext) -> None:
        self._jobs = context.jobs
        self._staging = context.staging
        self._release = context.completion.release
        self._breaker = context.breakers[Direction.LOAD]
        self._timeout_s = context.config.job_timeout_s
        self._num_unstaged_groups = sum([not group.is_staged for group in context.groups])
        self._max_blocks_per_step = context.config.max_load_blocks(context.layout)
        self._waiting: list[WaitingLoad] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[WaitingLoad]:
        return iter(self._waiting)

    def add(self, load: WaitingLoad) -> None:
        """Queues a load."""
        self._waiting.append(load)

    def remove(self, load: WaitingLoad) -> None:
        """Drops a load and releases what it holds."""
        self._waiting.remove(load)
        if not self._waiting:
            self._staging.wait_for_loads(queued=False)
        self._release(load.held)

    def overdue(self, now_s: float) -> list[WaitingLoad]:
        """Loads that have waited too long for staging blocks, or wait while loads are suspended."""
        if not self._staging.stages(Direction.LOAD):
            return []
        return [
            load
            for load in self._waiting
            if self._lacks_staging(load) and (now_s >= load.waits_until_s or not self._breaker.admits(load.held.probe))
        ]

    def start(self, now_s: float) -> list[Job]:
        """Turns the loads that have staging blocks, or need none, into jobs of the coming plan."""
        if not self._staging.stages(Direction.LOAD):
            loads, self._waiting = self._waiting, []
            self._staging.wait_for_loads(queued=False)
            return [self._plan_job(load, now_s) for load in loads]
        jobs: list[Job] = []
        kept: list[WaitingLoad] = []
        for load in self._waiting:
            if self._lacks_staging(load) and not kept:
                load.held.num_staging_blocks = self._staging.reserve_load(
                    load.held.account, load.num_staged_blocks, next_in_line=True
                )
            if self._lacks_staging(load):
                kept.append(load)
            else:
                jobs.append(self._plan_job(load, now_s))
        self._waiting = kept
        self._staging.wait_for_loads(queued=bool(kept))
        return jobs

    def _lacks_staging(self, load: WaitingLoad) -> bool:
        return not load.held.num_staging_blocks and self._staging.stages(Direction.LOAD)

    def _plan_job(self, load: WaitingLoad, now_s: float) -> Job:
        num_portions = 1 + self._num_unstaged_groups  # the row of a state may need a step of its own
        if at_a_time := load.held.num_staging_blocks or self._max_blocks_per_step:
            num_portions += (load.num_staged_blocks - 1) // at_a_time
        job = self._jobs.plan(
            JobKind.LOAD,
            load.parts,
            load.held,
            request=load.request_id,
            num_valid_tokens=load.num_valid_tokens,
            deadline_s=now_s + self._timeout_s * num_portions,
        )
        job.failed_blocks = load.failed_blocks
        job.all_failed, job.error = load.all_failed, load.error
        return job
