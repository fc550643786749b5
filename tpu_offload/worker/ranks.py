"""Data-parallel ranks: merges the plans of their schedulers into one for their worker, and splits its reports.

Each rank has requests, blocks, slots and an `OffloadScheduler` of its own, whose plans number jobs from the beginning.
The worker copies for all ranks with the same programs. It knows a job by an id of its own, given here in the order in
which jobs arrive, so that what ids mean to it (see `StepPlan.next_job_id`) holds for the merged plan, too.

    plan = ranks.merge(plans)                        # one of each rank
    kv_caches = worker.begin_step(plan, kv_caches)
    ...
    reports = ranks.split(worker.poll())             # one for each rank

Slots need no translation: each rank has the same number of them, in its own part of each segment.
"""

import dataclasses
import itertools
from collections.abc import Sequence, Set
from typing import final

from tpu_offload.errors import ConfigError
from tpu_offload.types import CopyJob, JobResult, StepPlan, StepReport, WorkerSetup
from tpu_offload.values import as_count, one_line
from tpu_offload.worker.plan_gate import PlanOrder


@final
class RankPlans:
    """The plans of all ranks of one worker. All calls come from the thread that dispatches the model.

    Args:
      num_ranks: as in `KVLayout.num_ranks`.
    """

    def __init__(self, num_ranks: int) -> None:
        count = as_count(num_ranks, least=1)
        if count is None:
            raise ConfigError(f"num_ranks={one_line(num_ranks)}; expected at least 1, as KVLayout.num_ranks")
        self._ranks = [_Rank() for _ in range(count)]
        self._jobs: dict[int, tuple[_Rank, int]] = {}  # those that have not ended, by the worker's id, ascending
        self._next_id = 1
        self._merged = StepPlan(step_id=0, next_job_id=1)

    def merge(self, plans: Sequence[StepPlan]) -> StepPlan:
        """One plan with the jobs of all.

        Args:
          plans: the plans of one step, by rank. What has been merged before is left out; if that is all of them, the
            last merged plan is returned again, which the worker ignores.
        Raises:
          ValueError: not one StepPlan of each rank.
        """
        if not isinstance(plans, Sequence) or any(type(plan) is not StepPlan for plan in plans):
            raise ValueError(f"the plans of data-parallel ranks are {one_line(plans)}; expected StepPlans")
        if len(plans) != len(self._ranks):
            raise ValueError(f"plans of {len(plans)} data-parallel ranks; expected {len(self._ranks)}, one of each")
        new = [of.is_new(plan) for of, plan in zip(self._ranks, plans, strict=True)]
        if not any(new):
            return self._merged
        jobs: list[CopyJob] = []
        cancelled: list[int] = []
        for rank, (of, plan) in enumerate(zip(self._ranks, plans, strict=True)):
            if new[rank]:
                of.begin(plan)
                jobs += [self._given_id(job, of, rank) for job in plan.jobs]
                cancelled += [of.ids[job_id] for job_id in plan.cancelled_job_ids if job_id in of.ids]
        known = [plan.cache_epochs for plan in plans if plan.cache_epochs]
        self._merged = StepPlan(
            step_id=self._merged.step_id + 1,
            jobs=tuple(jobs),
            cancelled_job_ids=tuple(cancelled),
            next_job_id=self._next_id,
            # Of each worker what the rank knows that knows least: if that is of lost caches, none of the plans is run.
            cache_epochs=tuple(map(min, zip(*known, strict=False))),
        )
        return self._merged

    def job_id(self, rank: int, job_id: int) -> int:
        """The worker's id of a job of the last plan of a rank; -1 if it has ended."""
        return self._ranks[rank].ids.get(job_id, -1)

    def split(self, report: StepReport) -> list[StepReport]:
        """The report for each rank: of its own jobs, and of the memory, which is the same for all.

        Args:
          report: of the worker; each is split once, in their order.
        """
        results: dict[int, list[JobResult]] = {id(of): [] for of in self._ranks}
        setups = self._setups(report.setup)
        for result in report.results:
            if result.job_id in self._jobs:
                of, job_id = self._end(result.job_id)
                results[id(of)].append(dataclasses.replace(result, job_id=job_id))
        storage_ids = frozenset(report.storage_job_ids)
        unknown = list(itertools.takewhile(report.oldest_job_id.__gt__, self._jobs))
        for own_id in unknown:
            if own_id not in storage_ids:
                self._end(own_id)  # it was never begun
        return [
            dataclasses.replace(
                report,
                results=tuple(results[id(of)]),
                oldest_job_id=of.oldest_id(storage_ids),
                storage_job_ids=of.own(storage_ids),
                setup=setup,
            )
            for of, setup in zip(self._ranks, setups, strict=True)
        ]

    def _setups(self, setup: WorkerSetup | None) -> list[WorkerSetup | None]:
        """The worker's setup for each rank, with what is stored of it."""
        num_ranks = len(self._ranks)
        if setup is None or not setup.stored_keys:
            return [setup] * num_ranks
        num_tiers = len(setup.stored_keys) // num_ranks
        first_tiers = [rank * num_tiers for rank in range(num_ranks)]
        return [dataclasses.replace(setup, stored_keys=setup.stored_keys[i : i + num_tiers]) for i in first_tiers]

    def _given_id(self, job: CopyJob, of: "_Rank", rank: int) -> CopyJob:
        own_id, self._next_id = self._next_id, self._next_id + 1
        of.ids[job.job_id] = own_id
        self._jobs[own_id] = of, job.job_id
        return dataclasses.replace(job, job_id=own_id, rank=rank)

    def _end(self, own_id: int) -> tuple["_Rank", int]:
        of, job_id = self._jobs.pop(own_id)
        del of.ids[job_id]
        return of, job_id


@dataclasses.dataclass(slots=True, eq=False)
class _Rank:
    """One rank.

    Attributes:
      order: its plans that were merged.
      last: the last of them.
      next_job_id: the highest of any of them.
      ids: the worker's ids of its jobs that have not ended, by its own.
    """

    order: PlanOrder = dataclasses.field(default_factory=PlanOrder)
    last: StepPlan | None = None
    next_job_id: int = 0
    ids: dict[int, int] = dataclasses.field(default_factory=dict)

    def is_new(self, plan: StepPlan) -> bool:
        """Whether a plan has not been merged, and no later one."""
        # As long as a rank has planned no job, its plans have nothing by which a late one could be recognized.
        return plan != self.last and not self.order.has_begun(plan)

    def begin(self, plan: StepPlan) -> None:
        """A new plan is merged."""
        self.order.begin(plan)
        self.last = plan
        self.next_job_id = max(self.next_job_id, plan.next_job_id)

    def own(self, worker_ids: Set[int]) -> tuple[int, ...]:
        """Its own ids of those of its jobs that are among the worker's ids."""
        return tuple([job_id for job_id, own_id in self.ids.items() if own_id in worker_ids]) if worker_ids else ()

    def oldest_id(self, storage_ids: Set[int]) -> int:
        """See `StepReport.oldest_job_id`.

        Args:
          storage_ids: the worker's ids of jobs to and from storage.
        """
        return min((i for i, own_id in self.ids.items() if own_id not in storage_ids), default=self.next_job_id)
