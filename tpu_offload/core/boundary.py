"""What engines say, and what reports from other processes say, is looked at here before it changes anything."""

import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any

from tpu_offload.core.requests import CachedPrefix, RequestLimits, ScheduledRequest
from tpu_offload.errors import RequestError
from tpu_offload.types import JobResult, JobState, StepReport

_ENDS = (JobState.FINISHED, JobState.FAILED, JobState.CANCELLED)
_MAX = 2**63 - 1


def report_error(report: Any, *, num_workers: int, num_groups: int, max_swap_blocks: int) -> str:
    """Why a report makes no sense, in one line; empty when it does.

    A job that is not known, or not any more, is no error: reports may be late or doubled.

    Args:
      report: anything.
      num_workers: its worker id is below this.
      num_groups: the layout's layer groups.
      max_swap_blocks: blocks that the swap pool can have of one layer group.
    """
    if type(report) is not StepReport:
        return f"a report is a {type(report).__name__}; expected a StepReport"
    try:
        return _report_error(report, num_workers=num_workers, num_groups=num_groups, max_swap_blocks=max_swap_blocks)
    except AttributeError as e:  # unpickled from something else
        return f"a report has no {e.name}"


def _report_error(report: StepReport, *, num_workers: int, num_groups: int, max_swap_blocks: int) -> str:
    numbers = (report.worker_id, report.num_host_chunks, report.oldest_job_id, report.incarnation)
    if not _are_counts(numbers):
        return f"worker id, chunks, oldest job and incarnation are {numbers!r:.100}; expected integers from 0 on"
    if report.worker_id >= num_workers:
        return f"a report of worker {report.worker_id}; expected 0 to {num_workers - 1}"
    if type(report.results) is not tuple:
        return f"results are a {type(report.results).__name__}; expected a tuple"
    for result in report.results:
        error = _result_error(result)
        if error:
            return error
    return _memory_error(report, num_groups=num_groups, max_swap_blocks=max_swap_blocks)


def check_request(request_id: Any, *counts: Any, names: Sequence[str] = ()) -> None:
    """Raises RequestError unless the id is text and the numbers are integers from 0 on.

    Args:
      request_id: the id.
      counts: the numbers.
      names: what they are called.
    """
    if type(request_id) is not str:
        raise RequestError(f"a request_id is {request_id!r:.100}; expected text")
    for i, value in enumerate(counts):
        if not (type(value) is int and value >= 0) and not _is_index(value):
            raise RequestError(f"request {request_id} has {names[i]}={value!r:.100}; expected an integer from 0 on")


def check_blocks(request_id: str, block_ids: Any) -> None:
    """Raises RequestError unless this is a sequence of block ids: integers from 0 on, numpy's included."""
    check_table(request_id, block_ids)
    if not len(block_ids) or (set(map(type, block_ids)) == {int} and min(block_ids) >= 0):
        return
    bad = [i for i in block_ids if not _is_index(i)]
    if bad:
        raise RequestError(
            f"request {request_id} has block ids like {bad[0]!r:.100}; expected a sequence of integers from 0 on"
        )


def check_table(request_id: str, block_ids: Any) -> None:
    """Raises RequestError unless this is a sequence.

    What is in it is not looked at: in every step that would cost more than the rest of it. Workers do so.
    """
    if type(block_ids) is not list and (
        not _has_length(block_ids) or isinstance(block_ids, (str, bytes, bytearray, dict))
    ):
        raise RequestError(
            f"request {request_id} has block ids {block_ids!r:.100}; expected a sequence of integers from 0 on"
        )


def check_tables(request_id: str, block_ids: Any) -> None:
    """Raises RequestError unless this is a sequence of sequences of block ids."""
    if not _has_length(block_ids) or isinstance(block_ids, dict):
        raise RequestError(f"request {request_id} has block tables {block_ids!r:.100}; expected one a layer group")
    for table in block_ids:
        check_blocks(request_id, table)


def check_scheduled(scheduled: Any) -> None:
    """Raises RequestError unless this is a ScheduledRequest whose fields are what they should be."""
    if (
        type(scheduled) is ScheduledRequest
        and type(scheduled.request_id) is str
        and type(scheduled.num_prompt_tokens) is int
        and type(scheduled.num_computed_tokens) is int
        and scheduled.num_computed_tokens >= 0 <= scheduled.num_prompt_tokens
        and type(scheduled.block_ids) is list
        and type(scheduled.block_hashes) is list
    ):  # nearly always, and an engine may name hundreds in a step
        return
    if type(scheduled) is not ScheduledRequest:
        raise RequestError(f"a step has {scheduled!r:.100}; expected ScheduledRequests")
    request_id = scheduled.request_id
    check_request(
        request_id,
        scheduled.num_prompt_tokens,
        scheduled.num_computed_tokens,
        names=("num_prompt_tokens", "num_computed_tokens"),
    )
    check_hashes(request_id, scheduled.block_hashes)
    check_table(request_id, scheduled.block_ids)


def check_limits(request_id: str, limits: Any) -> None:
    """Raises RequestError unless these are limits, or None."""
    if limits is not None and type(limits) is not RequestLimits:
        raise RequestError(f"the limits of request {request_id} are {limits!r:.100}; expected RequestLimits, or None")


def check_prefix(prefix: Any) -> None:
    """Raises RequestError unless this is a CachedPrefix whose fields are what they should be."""
    if type(prefix) is not CachedPrefix:
        raise RequestError(f"what is evicted is {prefix!r:.100}; expected a CachedPrefix")
    name = "of a cached prefix"
    check_hashes(name, prefix.block_hashes)
    check_request(name, prefix.num_blocks, prefix.num_prompt_tokens, names=("num_blocks", "num_prompt_tokens"))
    check_limits(name, prefix.limits)
    if not 0 < prefix.num_blocks <= len(prefix.block_hashes) or not callable(prefix.block_of):
        raise RequestError(
            f"a cached prefix has {prefix.num_blocks} blocks, {len(prefix.block_hashes)} hashes and "
            f"{prefix.block_of!r:.100} to find blocks; expected at least a block, as many hashes, and a function"
        )


def check_hashes(request_id: str, block_hashes: Any) -> None:
    """Raises RequestError unless this is a sequence; its items are looked at by whoever makes keys of them."""
    if type(block_hashes) is not list and (
        not _has_length(block_hashes) or isinstance(block_hashes, (str, bytes, bytearray, dict))
    ):
        kind = type(block_hashes).__name__
        raise RequestError(f"the block hashes of request {request_id} are a {kind}; expected a sequence of bytes")


def check_keys(request_id: str, keys: Sequence[Any]) -> None:
    """Raises RequestError unless all of these are bytes."""
    kinds = set(map(type, keys)) - {bytes}
    if kinds:
        raise RequestError(f"request {request_id} has a block hash of type {kinds.pop().__name__}; expected bytes")


def _is_index(value: Any) -> bool:
    """Whether this is an integer from 0 on, of Python or of numpy."""
    try:
        return not isinstance(value, bool) and operator.index(value) >= 0
    except TypeError:
        return False


def _has_length(items: Any) -> bool:
    return hasattr(items, "__len__") and hasattr(items, "__getitem__")


def _result_error(result: Any) -> str:
    if type(result) is not JobResult:
        return f"a result is a {type(result).__name__}; expected a JobResult"
    if not _are_counts((result.job_id,)):
        return f"a result of job {result.job_id!r:.100}; expected an integer from 0 on"
    if not isinstance(result.state, JobState) or result.state not in _ENDS:
        return f"job {result.job_id} ended as {result.state!r:.100}; expected finished, failed or cancelled"
    if type(result.error) is not str:
        return f"the error of job {result.job_id} is a {type(result.error).__name__}; expected text"
    seconds = (result.duration_s, result.copy_s)
    if not all(type(s) in (float, int) and math.isfinite(s) and s >= 0 for s in seconds):
        return f"job {result.job_id} took {seconds!r:.100} seconds; expected numbers from 0 on"
    failed = result.failed_blocks
    if failed != () and (type(failed) is not tuple or not _are_counts(failed)):
        return f"the failed blocks of job {result.job_id} are {failed!r:.100}; expected positions from 0 on"
    if result.state is JobState.FINISHED and (result.error or failed):
        return f"job {result.job_id} finished with an error: {result.error!r:.100}, failed blocks {failed!r:.100}"
    return ""


def _memory_error(report: StepReport, *, num_groups: int, max_swap_blocks: int) -> str:
    """What is wrong with what it says of host memory."""
    blocks, lost, lost_blocks = report.num_swap_blocks, report.lost_slots, report.lost_swap_blocks
    if type(blocks) is not tuple or len(blocks) not in (0, num_groups) or not _are_counts(blocks):
        return f"blocks of the swap pool are {blocks!r:.100}; expected a count for each of {num_groups} layer groups"
    if blocks and max(blocks) > max_swap_blocks:
        return f"blocks of the swap pool are {blocks!r:.100}; expected at most {max_swap_blocks}"
    if type(lost) is not tuple or not all(type(r) is tuple and len(r) == 2 and _is_range(*r) for r in lost):
        return f"lost slots are {lost!r:.100}; expected ranges (first, end)"
    if type(lost_blocks) is not tuple or not all(
        type(r) is tuple and len(r) == 3 and _are_counts(r[:1]) and r[0] < num_groups and _is_range(*r[1:])
        for r in lost_blocks
    ):
        return f"lost swap blocks are {lost_blocks!r:.100}; expected ranges (group, first, end)"
    return ""


def _are_counts(numbers: Iterable[Any]) -> bool:
    return all(type(n) is int and 0 <= n <= _MAX for n in numbers)


def _is_range(first: Any, end: Any) -> bool:
    return _are_counts((first, end)) and first < end
