"""Validates plans from another process before anything is copied."""

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from tpu_offload.types import CopyJob, CopyPart, Direction, HostDivision, HostStore, JobKind, StepPlan

_logger = logging.getLogger(__name__)

_MAX = 2**63 - 1
_NO_EPOCHS = ((-1, -1),)  # of no worker: a plan whose epochs are unreadable is stale for every worker


def sound_plan(plan: Any, *, last: int, num_pools: int) -> StepPlan:
    """The plan without the jobs that have no valid id or kind, which can be neither executed nor reported.

    Other invalid jobs are found by `job_error` and reported as failed.

    Args:
      plan: any object.
      last: replaces an invalid step id.
      num_pools: pools of the worker's host tier.
    """
    if type(plan) is not StepPlan:
        _logger.error("ignored a plan of type %s; expected a StepPlan", type(plan).__name__)
        return StepPlan(step_id=last)
    try:
        return _sound(plan, last=last, num_pools=num_pools)
    except AttributeError as e:  # unpickled from something else
        _logger.error("a plan has no %s: it is ignored", e.name)
        return StepPlan(step_id=last)


def job_error(job: CopyJob) -> str:
    """What is invalid about a job, in one line; empty if nothing is. The caller checks that its ids are in range."""
    try:
        parts = job.parts
        if not (
            type(parts) is tuple
            and type(job.request_id) is str
            and _is_count(job.num_staging_blocks)
            and _is_count(job.rank)
        ):
            return (
                "parts, request, staging blocks and rank are "
                f"{(parts, job.request_id, job.num_staging_blocks, job.rank)!r:.100}; expected a tuple, text and counts"
            )
        num_blocks = 0
        for part in parts:
            if type(part) is not CopyPart or type(part.group_id) is not int or type(part.store) is not HostStore:
                return "one of its parts is not a CopyPart with a layer group and a store"
            error = _ids_error(part.block_ids, part.host_block_ids)
            if error:
                return error
            num_blocks += len(part.block_ids)
        return "it writes one place twice" if num_blocks > 1 and _writes_twice(job) else ""
    except AttributeError as e:
        return f"it has no {e.name}"


def storage_job_error(job: CopyJob, *, slots: Sequence[range], num_ranks: int, num_tiers: int) -> str:
    """Why a storage job is invalid, in one line; empty if it is valid.

    Args:
      job: the job.
      slots: by pool, those whose memory is allocated.
      num_ranks: the worker's data-parallel ranks.
      num_tiers: its storage tiers, of each rank.
    """
    try:
        chunks, deleted = job.chunks, job.deleted_keys
        if type(chunks) is not tuple or type(deleted) is not tuple or job.parts != ():
            return "it has parts, or its chunks or keys are not tuples"
        if not all(type(chunk) is tuple and len(chunk) == 2 for chunk in chunks):
            return "a chunk is not a pair of key and slot"
        keys, named = [key for key, _ in chunks], [slot for _, slot in chunks]
        if not all(type(key) is bytes and key for key in (*keys, *deleted)):
            return "a key is not bytes, or empty"
        if not all(type(slot) is int and any(slot in of_pool for of_pool in slots) for slot in named):
            expected = ", or ".join(f"{of_pool[0]} to {of_pool[-1]}" for of_pool in slots if of_pool)
            return f"slots {named!r:.100}; expected {expected or 'none: no memory is allocated yet'}"
        if len(set(keys)) < len(keys) or len(set(named)) < len(named) or len(set(deleted)) < len(deleted):
            return "a key or a slot occurs twice"
        if type(job.rank) is not int or not 0 <= job.rank < num_ranks:
            return f"rank {job.rank!r:.100}; this worker has {num_ranks}, from 0 on"
        if type(job.tier_id) is not int or not 0 <= job.tier_id < num_tiers:
            return f"tier {job.tier_id!r:.100}; this worker has {num_tiers}, from 0 on"
        if chunks and job.kind in (JobKind.CLEAR, JobKind.DELETE):
            return f"a {job.kind.value} has chunks"
        if bool(deleted) is not (job.kind is JobKind.DELETE):
            return f"keys to delete are {deleted!r:.100}; expected some of a deletion only"
        return _prefixes_error(job)
    except AttributeError as e:
        return f"it has no {e.name}"


def _prefixes_error(job: CopyJob) -> str:
    """What is invalid about the prefixes of a storage job; empty if nothing is."""
    prefixes, is_lookup = job.prefixes, job.kind is JobKind.LOOKUP
    if type(prefixes) is not tuple or bool(prefixes) is not is_lookup:
        return f"prefixes are {prefixes!r:.100}; expected a tuple, with some only of a lookup"
    if is_lookup and job.chunks:
        return "a lookup has chunks"
    if not all(type(prefix) is tuple and prefix for prefix in prefixes):
        return "a prefix is not a tuple, or empty"
    if not all(type(key) is bytes and key for prefix in prefixes for key in prefix):
        return "a key is not bytes, or empty"
    return ""


def _writes_twice(job: CopyJob) -> bool:
    """Whether two blocks are written to one place; within a program such writes have no order."""
    saves = job.direction is Direction.SAVE
    if len(job.parts) == 1:  # nearly always
        places = job.parts[0].host_block_ids if saves else job.parts[0].block_ids
        return len(set(places)) < len(places)
    written: dict[tuple[HostStore | None, int], list[int]] = {}
    for part in job.parts:
        # Loads of one group from two stores write the same caches.
        where = part.store if saves else None, part.group_id
        written.setdefault(where, []).extend(part.host_block_ids if saves else part.block_ids)
    return any(len(set(places)) < len(places) for places in written.values())


def _sound(plan: StepPlan, *, last: int, num_pools: int) -> StepPlan:
    if (
        type(plan.jobs) is tuple
        and (not plan.jobs or all(map(_is_reportable, plan.jobs)))
        and type(plan.cancelled_job_ids) is tuple
        and (not plan.cancelled_job_ids or all(map(_is_count, plan.cancelled_job_ids)))
        and _is_count(plan.step_id)
        and _is_count(plan.next_job_id)
        and _are_epochs(plan.cache_epochs)
        and (plan.division is None or _is_division(plan.division, num_pools))
    ):
        return plan
    cancelled = plan.cancelled_job_ids if type(plan.cancelled_job_ids) is tuple else ()
    _logger.error(
        "plan %r has jobs without a valid id or kind, or fields that are not tuples: they are dropped", plan.step_id
    )
    return StepPlan(
        step_id=plan.step_id if _is_count(plan.step_id) else last,
        jobs=tuple(filter(_is_reportable, plan.jobs)) if type(plan.jobs) is tuple else (),
        cancelled_job_ids=tuple(filter(_is_count, cancelled)),
        next_job_id=plan.next_job_id if _is_count(plan.next_job_id) else 0,
        cache_epochs=plan.cache_epochs if _are_epochs(plan.cache_epochs) else _NO_EPOCHS,
        division=plan.division if _is_division(plan.division, num_pools) else None,
    )


_INTS = {int}


def _is_reportable(job: Any) -> bool:
    """Whether a job has a kind, to be executed, and an id, to be reported."""
    return type(job) is CopyJob and _is_count(getattr(job, "job_id", None)) and type(getattr(job, "kind", 0)) is JobKind


def _ids_error(block_ids: Any, host_block_ids: Any) -> str:
    if (
        type(block_ids) is type(host_block_ids) is tuple
        and len(block_ids) == len(host_block_ids)
        and set(map(type, block_ids + host_block_ids)) <= _INTS
    ):  # nearly always, and checked for each job
        return ""
    for name, ids in (("block ids", block_ids), ("host block ids", host_block_ids)):
        if type(ids) is not tuple or not _are_ints(ids):
            return f"{name} are {ids!r:.100}; expected a tuple of integers"
    if len(block_ids) != len(host_block_ids):
        return f"{len(block_ids)} blocks for {len(host_block_ids)} host blocks; expected the same number of each"
    return ""


def _are_ints(ids: Iterable[Any]) -> bool:
    kinds = set(map(type, ids))
    return kinds <= _INTS or all(issubclass(kind, np.integer) for kind in kinds - _INTS)


def _are_epochs(epochs: Any) -> bool:
    if type(epochs) is not tuple:
        return False
    for epoch in epochs:  # in every step: a generator takes three times as long
        if type(epoch) is not tuple or len(epoch) != 2 or not (_is_count(epoch[0]) and _is_count(epoch[1])):
            return False
    return True


def _is_division(division: Any, num_pools: int) -> bool:
    """Whether it is a division that leaves a segment to each pool, or None."""
    if division is None:
        return True
    if type(division) is not HostDivision:
        return False
    sizes = division.segments
    if type(sizes) is not tuple or len(sizes) != num_pools or not all(map(_is_count, sizes)):
        return False
    return _is_count(division.division_id) and min(sizes) > 0


def _is_count(n: Any) -> bool:
    return type(n) is int and 0 <= n <= _MAX
