"""What is deleted in one storage tier: what it has evicted or lost, and what only some workers have."""

import itertools
import logging
from collections.abc import Callable, Iterable
from typing import final

from tpu_offload.core.jobs import Job
from tpu_offload.core.storage.jobs import ACCOUNT, TierJobs
from tpu_offload.core.storage.records import StoredRecords
from tpu_offload.types import ChunkKey, JobKind

_MAX_DELETES = 256  # a step
_MAX_TRIED_AGAIN = 8  # of those, that the tier has refused to delete before
_MAX_WAITS = 64  # of `retry_s`, until they are tried again
_MAX_REFUSED = 64  # records refused in a row after which eviction stops
_MAX_REFUSED_SHARE = 1 / 16  # likewise of a smaller tier, as a share of its capacity

_logger = logging.getLogger(__name__)


@final
class Deletions:
    """Plans the deletions of one tier, and repeats those that fail.

    A record that the tier refuses to delete, while it answers, is left alone and takes room. A few of these are tried
    again after a while: in a batch with others, so that they hold up nothing, and more often if that succeeds.

    A tier that refuses all deletions would lose all records that can be read, because each one that is refused makes
    room for nothing. So once many were refused one after the other, eviction stops: nothing new is written, and what
    the tier has is still read. Whenever refused records are tried again, so is one more. Eviction goes on when any of
    them is deleted.

    Args:
      records: the tier's.
      jobs: likewise.
      label: of the tier, for the log.
      retry_s: seconds until a refused record is tried again; twice as long each time that all are refused.
      clock: seconds, monotonic.

    Attributes:
      breaker: theirs, and that of the orders to clear the tier.
    """

    def __init__(
        self, records: StoredRecords, jobs: TierJobs, *, label: str, retry_s: float, clock: Callable[[], float]
    ) -> None:
        self.breaker = jobs.make_breaker("deletions in", repeated=True)
        self._records = records
        self._jobs = jobs
        self._label = label
        self._retry_s = self._wait_s = retry_s
        self._clock = clock
        self._retry_at_s = 0.0
        self._tried_again: set[ChunkKey] = set()  # by the job in flight
        self._num_refused = 0  # records since one was deleted; those that are tried again are not counted again
        self._max_refused = min(_MAX_REFUSED, max(1, int(records.capacity * _MAX_REFUSED_SHARE)))

    @property
    def are_refused(self) -> bool:
        """Whether it is of no use to evict records, but for those that `num_tried` asks for."""
        return self._num_refused >= self._max_refused

    def num_tried(self, now_s: float) -> int:
        """How many records are to be evicted only to find out whether the tier deletes them: 1 from time to time."""
        records = self._records
        is_busy = records.to_delete or records.num_deleting
        return int(self.are_refused and now_s >= self._retry_at_s and not is_busy and self.breaker.closed)

    def plan(self, now_s: float) -> None:
        """Plans one batch at a time, which bounds how many deletions are retried after a failure."""
        records = self._records
        if self._num_refused and not (records.undeletable or records.to_delete or records.num_deleting):
            self._num_refused = 0  # what was refused is gone, as after a reset, or was written again
        # Where nothing else is to be deleted, one of them is the probe that closes the breaker.
        may_retry = now_s >= self._retry_at_s and (self.breaker.closed or not records.to_delete)
        refused = records.undeletable if may_retry else ()
        if not (records.to_delete or refused) or records.num_deleting or not self.breaker.admits(ACCOUNT):
            return
        num = min(len(records.to_delete), _MAX_DELETES if self.breaker.closed else 1)
        deleted = [records.to_delete.popitem(last=False)[0] for _ in range(num)]
        again = list(itertools.islice(refused, _MAX_TRIED_AGAIN if self.breaker.closed else 1))
        for name in again:
            del records.undeletable[name]
        self._tried_again = set(again)
        deleted += again
        records.num_deleting = len(deleted)
        self._jobs.plan(JobKind.DELETE, (), (), self.breaker, now_s=now_s, deleted=tuple(deleted))

    def ended(self, job: Job, bad: frozenset[int]) -> None:
        """What could not be deleted is deleted again, after all others; what was refused, later.

        Args:
          job: the job, whose `missing` are the positions of what some worker's tier has refused.
          bad: positions of the keys for which some worker has failed.
        """
        records, tried_again, num_refused = self._records, self._tried_again, 0
        records.num_deleting -= len(job.wire.deleted_keys)
        self._tried_again = set()
        was_refused = self.are_refused
        if len(job.missing.union(bad)) < len(job.wire.deleted_keys):
            self._num_refused = 0
        else:
            self._num_refused += sum([job.wire.deleted_keys[i] not in tried_again for i in job.missing.difference(bad)])
        self._log_change(was_refused)
        for i, name in enumerate(job.wire.deleted_keys):
            if records.knows(name) or name in records.to_delete:  # it was written meanwhile, and that may have failed
                continue
            if i in job.missing or (i in bad and name in tried_again):
                num_refused += name in tried_again
                self._leave_alone(name, is_new=name not in tried_again)
            elif i in bad:
                records.to_delete[name] = None
        if tried_again:
            some_are_gone = num_refused < len(tried_again)
            self._wait_s = self._retry_s if some_are_gone else min(2 * self._wait_s, _MAX_WAITS * self._retry_s)
            self._retry_at_s = 0.0 if some_are_gone else self._clock() + self._wait_s

    def _log_change(self, was_refused: bool) -> None:
        if self.are_refused and not was_refused:
            _logger.warning(
                "storage tier %s refuses to delete its records: nothing new is written until it deletes one, what it "
                "has is still read. Check the permission to delete, holds, and retention periods",
                self._label,
            )
        elif was_refused and not self.are_refused:
            _logger.warning("storage tier %s deletes its records again", self._label)

    def _leave_alone(self, name: ChunkKey, *, is_new: bool) -> None:
        undeletable = self._records.undeletable
        if not undeletable:
            self._retry_at_s = max(self._retry_at_s, self._clock() + self._wait_s)
        undeletable[name] = None
        num = len(undeletable)
        if is_new and num.bit_count() == 1:  # 1, 2, 4, 8, ...: many do not fill the log
            _logger.warning(
                "storage tier %s refuses to delete %d of its records: they take room, and are tried again later",
                self._label,
                num,
            )

    def add_unknown(self, listed: Iterable[ChunkKey]) -> None:
        """Workers have these records; those that the scheduler does not know are deleted.

        If each has others, these are more than the tier may hold: nothing is written until they are gone.
        """
        records = self._records
        if records.is_shared:
            return
        in_flight = (job.wire.deleted_keys for job in self._jobs.of(JobKind.DELETE))
        known = set(itertools.chain.from_iterable(in_flight))  # they are deleted again if that fails
        for name in listed:
            if name not in known and not records.knows(name):
                records.undeletable.pop(name, None)
                records.to_delete[name] = None
