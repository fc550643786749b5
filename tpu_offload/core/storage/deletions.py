"""What is deleted in one storage tier: what it has evicted or lost, and what only some workers have."""

import itertools
import logging
from collections.abc import Iterable
from typing import final

from tpu_offload.core.jobs import Job
from tpu_offload.core.storage.jobs import ACCOUNT, TierJobs
from tpu_offload.core.storage.records import StoredRecords
from tpu_offload.types import ChunkKey, JobKind

_MAX_DELETES = 256  # a step
_RETRY_AFTER = 1024  # records deleted; after each failure twice as many

_logger = logging.getLogger(__name__)


@final
class Deletions:
    """Plans the deletions of one tier, and repeats those that fail.

    A record that could not be deleted when others were is tried once more, with others or alone. Then it is left alone,
    and takes room; it is tried again after many others.

    Args:
      records: the tier's.
      jobs: likewise.
      label: of the tier, for the log.

    Attributes:
      breaker: theirs, and that of the orders to clear the tier.
    """

    def __init__(self, records: StoredRecords, jobs: TierJobs, *, label: str) -> None:
        self.breaker = jobs.make_breaker("deletions in", repeated=True)
        self._records = records
        self._jobs = jobs
        self._label = label
        self._failed: set[ChunkKey] = set()  # while others were deleted
        self._num_deleted = 0
        self._retry_after = self._retry_at = _RETRY_AFTER  # records deleted, until those left alone are tried again

    def plan(self, now_s: float) -> None:
        """Plans one batch at a time, which bounds how many deletions are retried after a failure."""
        records = self._records
        if records.to_delete and not records.num_deleting and self.breaker.admits(ACCOUNT):
            if self._num_deleted >= self._retry_at and records.undeletable:
                self._try_again()
            records.num_deleting = min(len(records.to_delete), _MAX_DELETES if self.breaker.closed else 1)
            deleted = tuple([records.to_delete.popitem(last=False)[0] for _ in range(records.num_deleting)])
            self._jobs.plan(JobKind.DELETE, (), (), self.breaker, now_s=now_s, deleted=deleted)

    def ended(self, job: Job, bad: frozenset[int]) -> None:
        """What could not be deleted is deleted again, after all others.

        Args:
          job: the job.
          bad: positions of the keys for which some worker has failed.
        """
        records, deleted = self._records, job.wire.deleted_keys
        records.num_deleting -= len(deleted)
        self._num_deleted += len(deleted) - len(bad)
        some_are_gone = len(bad) < len(deleted)
        is_telling = some_are_gone or len(deleted) == 1  # else the tier may not answer
        for i, name in enumerate(deleted):
            if i not in bad:
                self._failed.discard(name)
            elif not records.knows(name):
                if name in self._failed and is_telling:
                    self._leave_alone(name)
                else:
                    if some_are_gone:
                        self._failed.add(name)
                    records.to_delete[name] = None

    def _leave_alone(self, name: ChunkKey) -> None:
        records = self._records
        records.undeletable.add(name)
        self._retry_at = self._num_deleted + self._retry_after
        num = len(records.undeletable)
        if num.bit_count() == 1:  # 1, 2, 4, 8, ...: many do not fill the log
            _logger.warning(
                "storage tier %s cannot delete %d of its records: they take room, and are tried again later",
                self._label,
                num,
            )

    def _try_again(self) -> None:
        """Deletes again what was left alone."""
        records = self._records
        self._retry_after *= 2
        records.to_delete.update(dict.fromkeys(records.undeletable))
        records.undeletable.clear()

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
                records.undeletable.discard(name)
                records.to_delete[name] = None

    def reset(self) -> None:
        """The tier has to be cleared."""
        self._failed.clear()
