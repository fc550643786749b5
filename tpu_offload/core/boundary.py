"""What a report from another process must be before it changes anything."""

import math
from collections.abc import Iterable
from typing import Any

from tpu_offload.types import JobResult, JobState, StepReport

_ENDS = (JobState.FINISHED, JobState.FAILED, JobState.CANCELLED)
_MAX = 2**63 - 1


def report_error(report: Any, *, num_workers: int, num_groups: int, num_jobs: int) -> str:
    """Why a report makes no sense, in one line; empty when it does.

    A job that is not known, or not any more, is no error: reports may be late or doubled.

    Args:
      report: anything.
      num_workers: its worker id is below this.
      num_groups: the layout's layer groups.
      num_jobs: no job was ever given this id or a greater one.
    """
    if type(report) is not StepReport:
        return f"a report is a {type(report).__name__}; expected a StepReport"
    numbers = (report.worker_id, report.num_host_chunks, report.oldest_job_id, report.incarnation)
    if not _are_counts(numbers):
        return f"worker id, chunks, oldest job and incarnation are {numbers!r:.100}; expected integers from 0 on"
    if report.worker_id >= num_workers:
        return f"a report of worker {report.worker_id}; expected 0 to {num_workers - 1}"
    if report.oldest_job_id > num_jobs:
        return f"the oldest job is {report.oldest_job_id}, but there were {num_jobs} so far"
    if type(report.results) is not tuple:
        return f"results are a {type(report.results).__name__}; expected a tuple"
    for result in report.results:
        error = _result_error(result)
        if error:
            return error
    return _memory_error(report, num_groups=num_groups)


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
    return ""


def _memory_error(report: StepReport, *, num_groups: int) -> str:
    """What is wrong with what it says of host memory."""
    blocks, lost, lost_blocks = report.num_swap_blocks, report.lost_slots, report.lost_swap_blocks
    if type(blocks) is not tuple or len(blocks) not in (0, num_groups) or not _are_counts(blocks):
        return f"blocks of the swap pool are {blocks!r:.100}; expected a count for each of {num_groups} layer groups"
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
