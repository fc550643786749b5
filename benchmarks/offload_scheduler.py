"""Shared by the scheduler benchmarks: a layout, requests, and workers whose copies succeed immediately."""

from collections.abc import Sequence
from typing import Any

from tpu_offload import (
    BlockHash,
    JobResult,
    JobState,
    KVLayout,
    LayerGroup,
    LayerGroupKind,
    OffloadScheduler,
    ScheduledRequest,
    StepPlan,
    StepReport,
)

BLOCK_SIZE = 16
_GROUP = LayerGroup.uniform(LayerGroupKind.FULL_ATTENTION, (0,), (BLOCK_SIZE, 8, 2, 128), "bfloat16")
LAYOUT = KVLayout(block_size=BLOCK_SIZE, groups=(_GROUP,))


def computed(
    request_id: str, block_ids: Sequence[int], block_hashes: Sequence[BlockHash], num_tokens: int, num_computed: int
) -> ScheduledRequest:
    """A request with a prompt of `num_tokens`, of which `num_computed` are computed after this step."""
    return ScheduledRequest(
        request_id=request_id,
        block_tables=[block_ids],
        block_hashes=block_hashes,
        num_prompt_tokens=num_tokens,
        num_computed_tokens=num_computed,
    )


def finish_jobs(plan: StepPlan | None, *, num_host_slots: tuple[int, ...], **fields: Any) -> StepReport:
    """The report of a worker that has finished all jobs of a plan."""
    jobs = plan.jobs if plan else ()
    results = tuple(JobResult(job_id=job.job_id, state=JobState.FINISHED) for job in jobs)
    return StepReport(worker_id=0, results=results, num_host_slots=num_host_slots, **fields)


def fill(scheduler: OffloadScheduler, prompts: Sequence[Sequence[BlockHash]], *, num_host_chunks: int) -> None:
    """Saves prompts, oldest first, in steps of about a thousand blocks."""
    per_step = -(-1000 // len(prompts[0]))
    for start in range(0, len(prompts), per_step):
        changed = [
            computed(f"fill{start + i}", range(len(hashes)), hashes, len(hashes) * BLOCK_SIZE, len(hashes) * BLOCK_SIZE)
            for i, hashes in enumerate(prompts[start : start + per_step])
        ]
        plan = scheduler.plan_step(changed)
        while plan.jobs:
            scheduler.apply(finish_jobs(plan, num_host_slots=(num_host_chunks,)))
            plan = scheduler.plan_step()
        for request in changed:
            scheduler.finish(request.request_id)
