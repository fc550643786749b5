"""Times a job that is in the plan of a model's step."""

import dataclasses
import time

from tpu_offload.cli.model_step import ModelStep
from tpu_offload.cli.transfer_methods import Caches, WorkerCopies
from tpu_offload.errors import TransferError
from tpu_offload.types import StepPlan

_MIN_STEPS = 3


@dataclasses.dataclass(frozen=True, slots=True)
class JobTimes:
    """Seconds of one job; those that were not measured are None."""

    seconds: float | None = None
    dispatch_s: float | None = None
    delay_s: float | None = None
    reported_s: float | None = None
    step_s: float | None = None


def time_steps(
    worker: WorkerCopies, step: ModelStep, plan: StepPlan, caches: Caches, *, num_fused: int
) -> tuple[JobTimes, Caches]:
    """Runs model steps with a job in the first, then as many without.

    Args:
      worker: with nothing in flight.
      step: for these caches.
      plan: has the job.
      caches: donated.
      num_fused: blocks that the first step has to copy itself.
    Raises:
      TransferError: the job failed, or the first step did not copy what it should.
    """
    caches = _run_step(worker, step, worker.idle_plan(), caches)  # none of the timed ones follows a copy
    reported_s, num_steps = None, 0
    start_s = time.perf_counter()
    while reported_s is None or num_steps < _MIN_STEPS:
        caches = _run_step(worker, step, plan, caches, num_fused=num_fused)
        if worker.poll():
            reported_s = time.perf_counter() - start_s
        plan, num_fused = worker.idle_plan(), 0
        num_steps += 1
    middle_s = time.perf_counter()
    for _ in range(num_steps):
        caches = _run_step(worker, step, worker.idle_plan(), caches)
        worker.poll()
    idle_s = time.perf_counter() - middle_s
    delay_s = middle_s - start_s - idle_s
    return JobTimes(delay_s=delay_s, reported_s=reported_s, step_s=idle_s / num_steps), caches


def _run_step(worker: WorkerCopies, step: ModelStep, plan: StepPlan, caches: Caches, *, num_fused: int = 0) -> Caches:
    caches = worker.worker.begin_step(plan, caches, fuse=True)
    fused = worker.worker.fused_step()
    num_runs = fused.inputs.num_saves + fused.inputs.num_loads if fused.inputs else 0  # of one block each
    if num_runs != num_fused:
        raise TransferError(f"the step takes {num_runs} blocks of the job along; expected {num_fused}")
    caches, outcome = step.dispatch(caches, fused)
    worker.worker.end_step(plan, caches, outcome)
    step.wait()
    return caches
