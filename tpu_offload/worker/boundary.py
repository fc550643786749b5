"""What a plan from another process must be before anything is copied."""

import logging
import operator
from collections.abc import Iterable
from typing import Any

import numpy as np

from tpu_offload.types import Direction, HostStore, StepPlan, SwapJob, SwapPart, TransferJob

_logger = logging.getLogger(__name__)

_MAX = 2**63 - 1
_NO_EPOCHS = ((-1, -1),)  # no worker's: a plan that says nothing that can be read of the caches is for none


def sound_plan(plan: Any, *, last: int) -> StepPlan:
    """The plan, without what cannot be answered because it has no valid job id.

    What is wrong with jobs that have one is found by `transfer_error` and `swap_error`, and reported as their failure.

    Args:
      plan: anything.
      last: stands for a step id that makes no sense.
    """
    if type(plan) is not StepPlan:
        _logger.error("a plan is a %s; expected a StepPlan: nothing of it is done", type(plan).__name__)
        return StepPlan(step_id=last)
    try:
        return _sound(plan, last=last)
    except AttributeError as e:  # unpickled from something else
        _logger.error("a plan has no %s: nothing of it is done", e.name)
        return StepPlan(step_id=last)


def transfer_error(job: TransferJob, direction: Direction) -> str:
    """Why this is no job in this direction, in one line; empty when it is. Whether it is in range is for the caller."""
    try:
        if job.direction is not direction or type(job.group_id) is not int or type(job.request_id) is not str:
            return f"direction, group and request are {(job.direction, job.group_id, job.request_id)!r:.100}"
        if not _is_count(job.num_staging_blocks):
            return f"its staging blocks are {job.num_staging_blocks!r:.100}; expected an integer from 0 on"
        blocks, places = job.block_ids, job.host_block_ids
        error = _ids_error(blocks, places)
        if error:
            return error
        # Two writes to one place in one program have no order.
        written = places if direction is Direction.SAVE else blocks
        return "it writes to one place twice" if len(set(written)) < len(written) else ""
    except AttributeError as e:
        return f"it has no {e.name}"


def swap_error(job: SwapJob, direction: Direction) -> str:
    """The same of a swap."""
    try:
        if job.direction is not direction or type(job.parts) is not tuple:
            return f"direction and parts are {(job.direction, job.parts)!r:.100}"
        error = next(filter(None, map(_part_error, job.parts)), "")
        if error or direction is Direction.LOAD:
            return error
        for group_id in {part.group_id for part in job.parts}:
            places = [place for part in job.parts if part.group_id == group_id for place in part.host_block_ids]
            if len(set(places)) < len(places):
                return "it writes to one place twice"
        return ""
    except AttributeError as e:
        return f"it has no {e.name}"


def _part_error(part: SwapPart) -> str:
    if type(part) is not SwapPart or type(part.group_id) is not int or type(part.store) is not HostStore:
        return "a part of it is no SwapPart of a layer group and a store"
    return _ids_error(part.block_ids, part.host_block_ids)


def _sound(plan: StepPlan, *, last: int) -> StepPlan:
    epochs = plan.cache_epochs if _are_epochs(plan.cache_epochs) else _NO_EPOCHS
    if plan.empty and _is_count(plan.step_id) and _is_count(plan.next_job_id) and epochs is plan.cache_epochs:
        return plan
    fields = (plan.loads, plan.saves, plan.swap_outs, plan.swap_ins, plan.early_saves)
    answered = [_answerable(jobs, kind) for jobs, kind in zip(fields, _KINDS, strict=True)]
    cancelled = plan.cancelled_job_ids if type(plan.cancelled_job_ids) is tuple else ()
    kept = tuple(job_id for job_id in cancelled if _is_count(job_id))
    numbers = plan.step_id, plan.next_job_id
    same = epochs is plan.cache_epochs and kept == plan.cancelled_job_ids and all(map(operator.is_, answered, fields))
    if same and all(map(_is_count, numbers)):
        return plan
    _logger.error("plan %r has jobs without an id, or fields that are no tuples of jobs: left out", plan.step_id)
    loads, saves, outs, ins, early = answered
    step_id = plan.step_id if _is_count(plan.step_id) else last
    next_job_id = plan.next_job_id if _is_count(plan.next_job_id) else 0
    return StepPlan(
        step_id=step_id,
        loads=loads,
        saves=saves,
        cancelled_job_ids=kept,
        swap_outs=outs,
        swap_ins=ins,
        next_job_id=next_job_id,
        early_saves=early,
        cache_epochs=epochs,
    )


_INTS = {int}
_KINDS = (TransferJob, TransferJob, SwapJob, SwapJob, TransferJob)


def _answerable(jobs: Any, kind: Any) -> tuple[Any, ...]:
    if type(jobs) is not tuple or not jobs:
        return jobs if type(jobs) is tuple else ()
    if all(type(job) is kind and _is_count(getattr(job, "job_id", None)) for job in jobs):
        return jobs
    return tuple(job for job in jobs if type(job) is kind and _is_count(getattr(job, "job_id", None)))


def _ids_error(block_ids: Any, host_block_ids: Any) -> str:
    if (
        type(block_ids) is type(host_block_ids) is tuple
        and len(block_ids) == len(host_block_ids)
        and set(map(type, block_ids + host_block_ids)) <= _INTS
    ):  # nearly always, and this is looked at for each job
        return ""
    for name, ids in (("block ids", block_ids), ("host block ids", host_block_ids)):
        if type(ids) is not tuple or not _are_ints(ids):
            return f"{name} are {ids!r:.100}; expected a tuple of integers"
    if len(block_ids) != len(host_block_ids):
        return f"{len(block_ids)} blocks for {len(host_block_ids)} host blocks; expected as many of each"
    return ""


def _are_ints(ids: Iterable[Any]) -> bool:
    kinds = set(map(type, ids))
    return kinds <= _INTS or all(issubclass(kind, np.integer) for kind in kinds - _INTS)


def _are_epochs(epochs: Any) -> bool:
    return type(epochs) is tuple and all(
        type(epoch) is tuple and len(epoch) == 2 and all(map(_is_count, epoch)) for epoch in epochs
    )


def _is_count(n: Any) -> bool:
    return type(n) is int and 0 <= n <= _MAX
