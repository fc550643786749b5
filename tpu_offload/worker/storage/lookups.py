"""Lookups in a shared storage tier, on the worker: which chunks it has, asked on a thread of its own.

An answer is a few numbers, and requests wait for it. So it must not queue behind reads and writes of chunks, which take
a thousand times as long: no other call runs on this thread.
"""

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, final

from tpu_offload.storage import StorageTier
from tpu_offload.types import ChunkKey, CopyJob
from tpu_offload.values import error_line
from tpu_offload.worker.jobs import WorkerJobs
from tpu_offload.worker.storage.threads import AtLeast

_MAX_CALLS = 16  # jobs in flight; the scheduler plans fewer, but no longer counts those that it has given up


@dataclasses.dataclass(slots=True, eq=False)
class _Call:
    """One job.

    Attributes:
      job_id: the job.
      prefixes: what is looked up.
      num_found: the answer, as in `JobResult`.
      error: in one line; empty if nothing failed.
    """

    job_id: int
    prefixes: tuple[tuple[ChunkKey, ...], ...]
    num_found: tuple[int, ...] = ()
    error: str = ""


@final
class StorageLookups:
    """The lookups of one process. All methods are called by the thread that dispatches the model.

    Args:
      tier: the storage tier.
      jobs: the worker's jobs.
      submit: runs a task, which does not raise, on the thread for lookups.
    """

    def __init__(self, tier: StorageTier, jobs: WorkerJobs, *, submit: Callable[[Callable[[], None]], None]) -> None:
        self._tier = tier
        self._jobs = jobs
        self._submit = submit
        self._answered: deque[_Call] = deque()
        self._num_in_flight = 0

    @property
    def has_flights(self) -> bool:
        """Whether any lookup is not collected yet."""
        return self._num_in_flight > 0

    def start(self, jobs: Sequence[CopyJob]) -> None:
        """Starts lookups, valid jobs that hold one reference; too many fail."""
        for job in jobs:
            if not self._tier.is_shared:
                self._jobs.drop_ref([job.job_id], "the storage tier is private: it has no lookups")
            elif self._num_in_flight >= _MAX_CALLS:
                self._jobs.drop_ref([job.job_id], f"{_MAX_CALLS} lookups have no answer yet")
            else:
                self._num_in_flight += 1
                call = _Call(job.job_id, job.prefixes)
                self._submit(lambda call=call: _ask(self._tier, call, self._answered))  # type: ignore[misc]

    def collect(self) -> None:
        """Ends the lookups that were answered."""
        while self._answered:
            call = self._answered.popleft()
            self._num_in_flight -= 1
            self._jobs.set_found(call.job_id, call.num_found)
            self._jobs.drop_ref([call.job_id], call.error)

    def waiting_on(self, *, all_of_them: bool = False) -> list[Any]:
        """An object whose `is_ready` says that `collect` makes progress, or with `all_of_them` that it ends all."""
        if not self._num_in_flight:
            return []
        return [AtLeast(self._answered, self._num_in_flight if all_of_them else 1)]


def _ask(tier: StorageTier, call: _Call, answered: deque[_Call]) -> None:
    """Asks the tier, on its own thread. Never raises."""
    try:
        num_found = tuple(tier.find(call.prefixes))
        lengths = [len(prefix) for prefix in call.prefixes]
        if len(num_found) != len(lengths) or not all(
            type(n) is int and 0 <= n <= most for n, most in zip(num_found, lengths, strict=True)
        ):
            raise ValueError(
                f"find() returned {num_found!r:.100}; expected a number from 0 to each of {lengths!r:.100}"
            )
        call.num_found = num_found
    except BaseException as e:  # the tier may be the user's own, and nothing it raises may end the thread
        call.error = error_line(e)
    answered.append(call)
