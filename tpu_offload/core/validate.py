"""Validates engine calls and worker reports before they change any state.

What comes from outside stays `Any` here: compiled, the fields of a `StepReport` would be checked against their
annotations, with errors that say less (see tpu_offload/native.py). So `kind = type(report)` is compared in place of
`type(report)`, after which mypy would take the report for a `StepReport`.
"""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any, Final, cast

from tpu_offload.config import OffloadConfig, SaveEvent
from tpu_offload.config.environment import env_name
from tpu_offload.core.block_tables import check_sequence, read_tables
from tpu_offload.core.engine_api import CachedPrefix, RequestLimits, ScheduledRequest
from tpu_offload.errors import ConfigError, RequestError
from tpu_offload.layout import KVLayout
from tpu_offload.types import CacheEpoch, CopyJob, JobResult, JobState, StepPlan, StepReport, WorkerSetup
from tpu_offload.values import as_count, one_line

_FINISHED: Final = JobState.FINISHED
_ENDS: Final = (_FINISHED, JobState.FAILED, JobState.CANCELLED)
_MAX: Final = 2**63 - 1
_SMALL: Final = 2**62 - 1  # compiled code compares with it without an object
_MAX_S: Final = float(_MAX)
_LISTS: Final = {list}


def check_scheduler(config: OffloadConfig, layout: KVLayout, num_workers: Any) -> int:
    """Validates the arguments of an `OffloadScheduler`; returns the number of workers as a Python integer.

    Raises:
      ConfigError: one has another type, or there is no worker.
      LayoutError: the host tier is on and does not support the layout.
      ConfigError: a setting does not support its sliding-window groups, states or pipeline stages.
    """
    check_kinds(config, layout)
    count = as_count(num_workers, least=1)
    if count is None:
        raise ConfigError(f"num_workers={one_line(num_workers)}; expected at least 1")
    if layout.stages and len(layout.stages) != count:
        raise ConfigError(f"num_workers={count} for {len(layout.stages)} pipeline stages; expected one for each")
    if layout.stages and config.swap_gb != 0:
        raise ConfigError(
            f"{env_name('swap_gb')}={config.swap_gb}: request swap does not support pipeline stages; set it to 0"
        )
    if config.enabled:
        layout.check_tier()
        if layout.window_groups or layout.state_group is not None:
            _check_checkpoints(config)
    return count


def check_kinds(config: Any, layout: Any) -> None:
    """Raises ConfigError unless these are settings and a layout."""
    for given, kind in ((config, OffloadConfig), (layout, KVLayout)):
        if not isinstance(given, kind):
            raise ConfigError(f"got a {type(given).__name__}; expected the {kind.__name__}")


def _check_checkpoints(config: OffloadConfig) -> None:
    """Raises ConfigError if a setting does not support sliding-window groups and states."""
    if SaveEvent.HBM_EVICTION in config.save_on:
        raise ConfigError(
            f"{env_name('save_on')} has {SaveEvent.HBM_EVICTION.value}: the model has sliding windows or "
            "states, which are gone when HBM evicts a prefix; expected compute, preemption or both"
        )


def report_error(report: Any, *, num_workers: int, num_pools: int, num_groups: int, max_swap_blocks: int) -> str:
    """Why a report is invalid, in one line; empty if it is valid.

    An unknown job is no error: reports may be late or duplicated.

    Args:
      report: anything.
      num_workers: its worker id is below this.
      num_pools: pools of the host tier.
      num_groups: the layout's layer groups.
      max_swap_blocks: blocks that the swap pool can have of one layer group.
    """
    kind = type(report)
    if kind is not StepReport:
        return f"a report is a {kind.__name__}; expected a StepReport"
    try:
        return _report_error(report, num_workers, num_pools, num_groups, max_swap_blocks)
    except AttributeError as e:  # unpickled from something else
        return f"a report has no {e.name}"


def has_setup(report: Any) -> bool:
    """Whether a report has a valid `WorkerSetup`, even if the rest is invalid."""
    kind = type(report)
    if kind is not StepReport:
        return False
    try:
        return _are_counts((report.worker_id, report.incarnation)) and not _setup_error(report.setup)
    except AttributeError:  # unpickled from something else
        return False


def _report_error(report: Any, num_workers: int, num_pools: int, num_groups: int, max_swap_blocks: int) -> str:
    slots = report.num_host_slots
    if type(slots) is not tuple or len(slots) != num_pools:
        return (
            f"slots of the host tier are {one_line(slots)}; expected a tuple with a count for each of {num_pools} pools"
        )
    if not (
        _is_count(report.worker_id)
        and _is_count(report.incarnation)
        and _is_count(report.num_cache_losses)
        and _are_counts(slots)
        and _is_count(report.num_host_segments)
        and _is_count(report.division_id)
        and _is_count(report.oldest_job_id)
    ):
        ids = report.worker_id, report.incarnation, report.num_cache_losses
        numbers = (*ids, *slots, report.num_host_segments, report.division_id, report.oldest_job_id)
        return (
            f"worker, incarnation, losses, memory and oldest job are {one_line(numbers)}; expected integers from 0 on"
        )
    if type(report.storage_job_ids) is not tuple or not _are_counts(report.storage_job_ids):
        return f"storage jobs are {one_line(report.storage_job_ids)}; expected a tuple of integers from 0 on"
    if report.setup is not None:
        error = _setup_error(report.setup)
        if error:
            return error
    elif report.worker_id >= num_workers:  # with a setup it is a ConfigError, which `Workers.check` raises
        return f"a report of worker {report.worker_id}; expected 0 to {num_workers - 1}"
    if type(report.results) is not tuple:
        return f"results are a {type(report.results).__name__}; expected a tuple"
    for result in report.results:
        error = _result_error(result)
        if error:
            return error
    return _memory_error(report, num_pools=num_pools, num_groups=num_groups, max_swap_blocks=max_swap_blocks)


def check_request(request_id: Any, *counts: Any, names: Sequence[str] = ()) -> Sequence[int]:
    """Validates a request id and some counts; returns the counts as Python integers.

    Args:
      request_id: the id.
      counts: integers of Python, numpy or any other type that converts without loss.
      names: the arguments' names, for the error.
    Raises:
      RequestError: the id is not a string, or a count is not a non-negative integer.
    """
    if type(request_id) is not str:
        raise RequestError(f"a request_id is {one_line(request_id)}; expected text")
    for value in counts:
        if type(value) is not int or value < 0:
            break
    else:  # nearly always
        return counts
    return [
        value if type(value) is int and value >= 0 else check_count(f"request {request_id} has {name}", value)
        for name, value in zip(names, counts, strict=True)
    ]


def check_match(
    request_id: Any, block_hashes: Any, *, num_tokens: Any, num_computed_tokens: Any, limits: Any
) -> Sequence[int]:
    """Validates the arguments of `OffloadScheduler.match`; returns the two counts as Python integers.

    Raises:
      RequestError: an argument is invalid. The hashes are not read yet.
    """
    counts = check_request(request_id, num_tokens, num_computed_tokens, names=("num_tokens", "num_computed_tokens"))
    check_sequence(request_id, block_hashes, "block hashes")
    num_tokens, num_computed_tokens = counts
    if num_computed_tokens > num_tokens:
        raise RequestError(f"request {request_id}: {num_computed_tokens=} of {num_tokens=}; expected 0 to num_tokens")
    check_limits(request_id, limits)
    return counts


def check_count(what: str, value: Any) -> int:
    """A non-negative Python integer; else a RequestError whose message begins with `what`."""
    count = as_count(value)
    if count is None:
        raise RequestError(f"{what}={one_line(value)}; expected an integer from 0 on")
    return count


def check_scheduled(scheduled: Any, *, num_groups: int) -> ScheduledRequest:
    """Validates a ScheduledRequest, except the contents of its block tables and hashes, which are read later.

    Raises:
      RequestError: it has another type, or a field is invalid.
    """
    kind = type(scheduled)
    if (
        kind is ScheduledRequest
        and type(scheduled.request_id) is str
        and type(scheduled.num_prompt_tokens) is int
        and type(scheduled.num_computed_tokens) is int
        and scheduled.num_computed_tokens >= 0 <= scheduled.num_prompt_tokens
        and (type(scheduled.block_tables) is list or type(scheduled.block_tables) is tuple)
        and len(scheduled.block_tables) == num_groups
        and type(scheduled.block_tables[0]) is list
        and (num_groups == 1 or set(map(type, scheduled.block_tables)) == _LISTS)
        and type(scheduled.block_hashes) is list
    ):  # fast path: nearly always taken, and a step may name hundreds
        return cast(ScheduledRequest, scheduled)
    if kind is not ScheduledRequest:
        raise RequestError(f"a step has {one_line(scheduled)}; expected ScheduledRequests")
    request_id = scheduled.request_id
    num_prompt_tokens, num_computed_tokens = check_request(
        request_id,
        scheduled.num_prompt_tokens,
        scheduled.num_computed_tokens,
        names=("num_prompt_tokens", "num_computed_tokens"),
    )
    check_sequence(request_id, scheduled.block_hashes, "block hashes")
    changed: ScheduledRequest = dataclasses.replace(
        scheduled,
        block_tables=read_tables(request_id, scheduled.block_tables, num_groups=num_groups),
        num_prompt_tokens=num_prompt_tokens,
        num_computed_tokens=num_computed_tokens,
    )
    return changed


def check_iterable(items: Any, what: str, expected: str) -> None:
    """Raises RequestError unless this is an iterable and not a string."""
    try:
        iter(items)
        is_wrong = isinstance(items, (str, bytes, bytearray))
    except TypeError:  # also of an array without dimensions
        is_wrong = True
    if is_wrong:
        raise RequestError(f"{what} {one_line(items)}; expected an iterable of {expected}")


def check_epoch(epoch: Any, *, num_workers: int) -> None:
    """Raises RequestError unless this is a CacheEpoch of an existing worker."""
    kind = type(epoch)
    if kind is not CacheEpoch:
        raise RequestError(f"the KV caches are named by {one_line(epoch)}; expected what OffloadWorker.cache_epoch is")
    if not _are_counts((epoch.worker_id, epoch.incarnation, epoch.num_losses)) or epoch.worker_id >= num_workers:
        raise RequestError(
            f"the KV caches are named by {one_line(epoch)}; expected integers from 0 on, and a worker_id of 0 to "
            f"{num_workers - 1}"
        )


def check_plan(plan: Any, *, num_steps: int, next_job_id: int) -> StepPlan:
    """Raises RequestError unless this is a plan that a scheduler has made, of so many steps and jobs."""
    kind = type(plan)
    if kind is not StepPlan:
        raise RequestError(f"a step is aborted by {one_line(plan)}; expected the StepPlan that plan_step returned")
    if (
        not _are_counts((plan.step_id, plan.next_job_id))
        or plan.step_id >= num_steps
        or plan.next_job_id > next_job_id
        or type(plan.jobs) is not tuple
        or not set(map(type, plan.jobs)) <= {CopyJob}
    ):
        raise RequestError(
            f"plan {one_line(plan.step_id)} is aborted, whose jobs are below {one_line(plan.next_job_id)}; expected "
            f"one of this scheduler's {num_steps} plans, with jobs below {next_job_id}"
        )
    checked: StepPlan = plan
    return checked


def check_limits(request_id: str, limits: Any) -> None:
    """Raises RequestError unless these are limits, or None."""
    if limits is not None and type(limits) is not RequestLimits:
        raise RequestError(f"the limits of request {request_id} are {one_line(limits)}; expected RequestLimits or None")


def check_prefix(prefix: Any) -> CachedPrefix:
    """Validates a CachedPrefix, except its hashes, which are read later; returns it with Python integers.

    Raises:
      RequestError: it has another type, or a field is invalid.
    """
    kind = type(prefix)
    if kind is not CachedPrefix:
        raise RequestError(f"what is evicted is {one_line(prefix)}; expected a CachedPrefix")
    name = "of a cached prefix"
    check_sequence(name, prefix.block_hashes, "block hashes")
    num_blocks, num_prompt_tokens = check_request(
        name, prefix.num_blocks, prefix.num_prompt_tokens, names=("num_blocks", "num_prompt_tokens")
    )
    if type(prefix.limits) is not RequestLimits:
        raise RequestError(f"the limits {name} are {one_line(prefix.limits)}; expected RequestLimits")
    if not 0 < num_blocks <= len(prefix.block_hashes) or not callable(prefix.block_of):
        raise RequestError(
            f"a cached prefix has {num_blocks} blocks, {len(prefix.block_hashes)} hashes and "
            f"block_of={one_line(prefix.block_of)}; expected at least one block, a hash for each, and a function"
        )
    changed: CachedPrefix = dataclasses.replace(prefix, num_blocks=num_blocks, num_prompt_tokens=num_prompt_tokens)
    return changed


def read_request_ids(request_ids: Any) -> list[str]:
    """Validates request ids; an error that the engine's iterator raises propagates."""
    check_iterable(request_ids, "ids of requests are", "text")
    read = list(request_ids)
    for request_id in read:
        check_request(request_id)
    return read


def read_numbers(request_id: str, name: str, numbers: Any) -> frozenset[int]:
    """Validates a collection of non-negative integers, in any order."""
    if not isinstance(numbers, Collection) or isinstance(numbers, (str, bytes, bytearray)):
        raise RequestError(f"request {request_id} has {name}={one_line(numbers)}; expected numbers of blocks")
    try:
        items = list(numbers)
    except Exception as e:  # the object is not ours
        raise RequestError(f"request {request_id} has {name}={one_line(numbers)}, which cannot be read") from e
    return frozenset(check_count(f"request {request_id} has, in {name}, number", n) for n in items)


def _result_error(result: Any) -> str:
    kind = type(result)
    if kind is not JobResult:
        return f"a result is a {kind.__name__}; expected a JobResult"
    if not _is_count(result.job_id):
        return f"a result of job {one_line(result.job_id)}; expected an integer from 0 on"
    state = result.state
    if state is not _FINISHED and (not isinstance(state, JobState) or state not in _ENDS):
        return f"job {result.job_id} ended as {one_line(result.state)}; expected finished, failed or cancelled"
    if type(result.error) is not str:
        return f"the error of job {result.job_id} is a {type(result.error).__name__}; expected text"
    seconds = duration_s, copy_s = result.duration_s, result.copy_s
    are_plain = type(duration_s) is float is type(copy_s) and 0.0 <= duration_s < _MAX_S > copy_s >= 0.0
    if not are_plain and not _are_seconds(seconds):
        return f"job {result.job_id} took {one_line(seconds)} seconds; expected numbers from 0 on"
    failed = result.failed_blocks
    if type(failed) is not tuple or not _are_counts(failed):
        return f"the failed blocks of job {result.job_id} are {one_line(failed)}; expected positions from 0 on"
    missing = result.missing_chunks
    if type(missing) is not tuple or not _are_counts(missing):
        return f"the missing chunks of job {result.job_id} are {one_line(missing)}; expected positions from 0 on"
    num_found = result.num_found
    if type(num_found) is not tuple or not _are_counts(num_found):
        return f"lookup {result.job_id} has found {one_line(num_found)}; expected a tuple of integers from 0 on"
    if state is _FINISHED and (result.error or failed):
        return f"job {result.job_id} finished with an error: {one_line(result.error)}, failed blocks {one_line(failed)}"
    return ""


def _setup_error(setup: Any) -> str:
    """Why the worker's settings are invalid; empty if they are valid."""
    kind = type(setup)
    if kind is not WorkerSetup:
        return f"the setup of a worker is a {kind.__name__}; expected a WorkerSetup"
    counts = (
        setup.num_processes,
        setup.process_index,
        setup.blocks_per_chunk,
        setup.staging_blocks,
        setup.max_load_blocks,
        setup.max_swap_blocks,
        setup.rival,
    )
    names = setup.fingerprint, setup.save_path, setup.load_path
    tuples = setup.bucket_blocks, setup.segment_slots
    if (
        not _are_counts(counts)
        or not all(type(name) is str for name in names)
        or not all(type(entries) is tuple and _are_counts(entries) for entries in tuples)
    ):
        return f"the setup of a worker is {one_line(setup)}; expected counts and names"
    return _storage_error(setup)


def _storage_error(setup: Any) -> str:
    """Why a worker's fields about storage are invalid, with one entry for each tier; empty if they are valid."""
    chunks, stored, shares = setup.storage_chunks, setup.stored_keys, setup.shares_storage
    if not all(type(entries) is tuple for entries in (chunks, stored, shares)) or not _are_counts(chunks):
        return f"the storage of a worker has the sizes {one_line(chunks)}; expected tuples, and of sizes counts"
    if not len(chunks) == len(stored) == len(shares):
        return f"a worker has {len(chunks)} sizes of tiers, {len(stored)} lists of keys and {len(shares)} that share"
    for listed in stored:
        if listed is not None and (type(listed) is not tuple or not all(type(key) is bytes and key for key in listed)):
            return "the stored keys of a worker are not tuples of bytes, or None"
    if not all(type(is_shared) is bool for is_shared in shares):
        return f"the setup of a worker has shares_storage={one_line(shares)}; expected a bool for each tier"
    return ""


def _memory_error(report: Any, *, num_pools: int, num_groups: int, max_swap_blocks: int) -> str:
    """Why the report's host memory fields are invalid; empty if they are valid."""
    blocks, lost_blocks, lost_slots = report.num_swap_blocks, report.lost_swap_blocks, report.lost_slots
    are_tuples = type(blocks) is tuple and type(lost_blocks) is tuple and type(lost_slots) is tuple
    if are_tuples and not (blocks or lost_blocks or lost_slots):  # nearly always
        return ""
    if type(blocks) is not tuple or len(blocks) not in (0, num_groups) or not _are_counts(blocks):
        return f"blocks of the swap pool are {one_line(blocks)}; expected a count for each of {num_groups} layer groups"
    if blocks and max(blocks) > max_swap_blocks:
        return f"blocks of the swap pool are {one_line(blocks)}; expected at most {max_swap_blocks}"
    if not _are_ranges(lost_slots, num_pools):
        return f"lost slots are {one_line(lost_slots)}; expected ranges (pool, first, end) in {num_pools} pools"
    if not _are_ranges(lost_blocks, num_groups):
        return f"lost swap blocks are {one_line(lost_blocks)}; expected ranges (group, first, end)"
    return ""


def _are_ranges(lost: Any, num: int) -> bool:
    """Whether these are ranges (number, first, end) with numbers below `num`."""
    return type(lost) is tuple and all(
        type(r) is tuple and len(r) == 3 and _are_counts(r[:1]) and r[0] < num and _is_range(*r[1:]) for r in lost
    )


def _are_counts(numbers: tuple[Any, ...]) -> bool:
    for n in numbers:  # noqa: SIM110 - a generator takes three times as long, and each step makes several such calls
        if not _is_count(n):
            return False
    return True


def _is_count(n: Any) -> bool:
    return type(n) is int and n >= 0 and (n <= _SMALL or n <= _MAX)


def _are_seconds(numbers: tuple[Any, ...]) -> bool:
    return all(type(n) in (float, int) and 0 <= n < _MAX for n in numbers)


def _is_range(first: Any, end: Any) -> bool:
    return _are_counts((first, end)) and first < end
