"""Copies between the host tier and one storage tier, as the scheduler plans them.

Several tiers have a planner each (`core.storage.stack`); here, *storage* is the tier of this one. What is written and
deleted is decided in `core.storage.writes`, what is read in `core.storage.reads`, and what a shared tier is asked for
in `core.storage.lookups`. All are kinds of job like any other: every worker has to report them, and they have a
deadline and one end.

The scheduler has the index of what is stored (`core.storage.records`). A record is stored once every worker has written
it, had it when it started (`adopt`), or has found it in a tier that other engines share. It occupies storage from the
planning of its write until every worker has deleted it, so no private tier ever holds more than its size.

A reset clears storage: until every worker has reported that, durably, nothing is written and nothing is found. If all
processes die before, what was stored before the reset is found again by a process whose fingerprint is the same, that
is, one with the weights that it was computed with. What was saved after a reset is never found by another process: its
keys are of another namespace (`request_table.KeySpace`), since it is not known which weights it was computed with.
"""

import dataclasses
import itertools
import logging
import math
from collections.abc import Callable, Sequence
from typing import final

from tpu_offload.config import StorageTierConfig
from tpu_offload.core.context import TierContext
from tpu_offload.core.index import ChunkState, overlaps
from tpu_offload.core.jobs import Job
from tpu_offload.core.policies import Use
from tpu_offload.core.storage.confirmations import Confirmations
from tpu_offload.core.storage.jobs import STORAGE_JOBS, WRITES, TierJobs
from tpu_offload.core.storage.lookups import LookupPlanner
from tpu_offload.core.storage.reads import StorageReads, TierNeighbors
from tpu_offload.core.storage.records import StoredRecords
from tpu_offload.core.storage.writes import StorageWrites
from tpu_offload.metrics import TierStats
from tpu_offload.types import ChunkKey, JobKind

_logger = logging.getLogger(__name__)


@final
class StoragePlanner:
    """Plans the copies to and from one tier.

    Args:
      context: the scheduler's shared state.
      tier: the settings of the tier.
      num_chunks: its capacity, in records.
      num_above: the most chunks in the host tier and the nearer tiers.
      num_tiers: how many there are.
      num_workers: workers that report each step.
      mark_lost: called with the chunks of failed promotions, see `Transfers.mark_lost`.
      neighbors: the other tiers, and this one.

    Attributes:
      tier_id: its place, 0 for the nearest.
      records: what is stored, and in flight.
      writes: what is written and deleted.
      reads: what is read.
      lookups: what a shared tier is asked for.
      confirmations: what it is asked for again.
    """

    def __init__(
        self,
        context: TierContext,
        tier: StorageTierConfig,
        *,
        num_chunks: int,
        num_above: int,
        num_tiers: int,
        num_workers: int,
        mark_lost: Callable[[Sequence[ChunkKey]], None],
        neighbors: TierNeighbors,
    ) -> None:
        self.tier_id = tier.tier_id
        self._own_counts = TierStats(tier=tier.label)
        self._counts = context.counts
        self._index = context.index
        self._clock = context.clock
        max_in_flight = tier.max_chunks_in_flight(context.layout, blocks_per_chunk=context.blocks_per_chunk)
        self.records = records = StoredRecords(
            context, tier, capacity=num_chunks, max_in_flight=max_in_flight, num_above=num_above
        )
        self._jobs = jobs = TierJobs(context, tier, records)
        self.writes = StorageWrites(context, tier, records=records, jobs=jobs, own_counts=self._own_counts)
        self.reads = StorageReads(
            context,
            tier,
            num_tiers=num_tiers,
            records=records,
            jobs=jobs,
            own_counts=self._own_counts,
            mark_lost=mark_lost,
            neighbors=neighbors,
        )
        self.confirmations = Confirmations(
            context, records, offer=self.writes.offer, offer_checkpoint=self.writes.offer_checkpoint
        )
        self.lookups = LookupPlanner(
            context,
            tier,
            capacity=num_chunks,
            breaker=jobs.make_breaker("lookups in"),
            is_readable=neighbors.is_readable,
            add_found=self.add_found,
            confirmations=self.confirmations,
        )
        self._listings: dict[int, Sequence[ChunkKey] | None] = {}  # by worker, until all have started
        self._num_workers = num_workers
        self._has_adopted = False

    # Planning.

    def observe(self, use: Use, keys: Sequence[ChunkKey], first: int, num_above: int) -> None:
        """A request contains these chunks; those before `first` were recorded before. O(keys).

        Args:
          use: its use.
          keys: all that is known of its prompt.
          first: see above.
          num_above: how many of the first are found in the host tier and nearer tiers, where some tier has to know.
        """
        if not first:  # the request counts once, and what it computes when it is written
            self.records.begin(use, keys, num_above)
            self.confirmations.use(use, keys)
        self.writes.observe(use, keys, first)

    def add_found(self, keys: Sequence[ChunkKey]) -> None:
        """Other engines have stored this prefix. What has no room is left out, from the tail on."""
        records = self.records
        new = [key for key in keys if not (records.knows(key) or key in records.to_delete)]
        self._counts.num_evicted_storage_chunks += records.evict(len(new) - records.room)
        for key in reversed(new[: max(0, records.room)]):  # the head last, so that tails are evicted first
            self.writes.drop_candidate(key)
            records.add(key)
        self.confirmations.note(keys)

    def may_read(self, key: ChunkKey) -> bool:
        """Whether a chunk is being written, or is stored and could be read now, or in the tier that would be asked."""
        if key not in self.records.stored:
            return key in self.records.writing
        return self.may_read_at(self._clock())

    def may_read_at(self, now_s: float) -> bool:
        """Whether what is stored could be read now, or the tier is the one that would be asked."""
        return self.records.is_shared or (self.reads.are_admitted and not self.reads.is_stalled(now_s))

    @property
    def has_plans(self) -> bool:
        """Whether `plan` would plan a job or drop candidates, so that an idle engine should call it."""
        return self.writes.has_plans or (self.lookups.has_plans and not self.writes.must_clear)

    def plan(self, now_s: float) -> None:
        """Plans the deletions, the cascade or demotion, and the lookup of the coming step."""
        self.records.end_rest(now_s)
        self.records.tidy(self.writes.is_coming)
        if not self.writes.must_clear:
            self.lookups.plan(now_s)
        self.writes.plan(now_s)

    # Resets and losses.

    def reset(self) -> None:
        """The stored KV is invalid: has storage cleared and fails the jobs in flight."""
        self.lookups.reset()
        self.writes.reset()
        self.records.clear()
        for job in self._jobs.of(*STORAGE_JOBS):
            job.make_void("storage was cleared")

    def adopt(self, worker_id: int, listed: Sequence[ChunkKey] | None, *, is_shared: bool = False) -> None:
        """A worker has started, for the first time or again, and has these records in storage, oldest first.

        A record is stored if all workers have it. Jobs in flight fail: the worker has lost them. A tier that other
        engines share lists nothing and is asked. It makes room by itself: what this one no longer knows is not deleted.
        What this one knows is stored nevertheless: the worker's process has lost none of it. None: this worker stores
        no part of a record.
        """
        records = self.records
        if is_shared:
            records.share()
        self.writes.forget_candidates()
        self._fail_jobs(f"worker {worker_id} has restarted")
        if is_shared:
            self.lookups.enable()
            return
        if not self._has_adopted:
            self._listings[worker_id] = listed
            if len(self._listings) < self._num_workers:
                return
            self._restore([listing for listing in self._listings.values() if listing is not None])
            self._has_adopted, self._listings = True, {}
        elif listed is not None:
            records.end_rest(math.inf)
            own = set(listed)
            for name in [name for name in records.stored if name not in own]:
                records.forget(name)
            self.writes.deletions.add_unknown(listed)

    def _restore(self, listings: Sequence[Sequence[ChunkKey]]) -> None:
        """Takes what all workers have as stored."""
        if self.writes.must_clear or not listings:  # it is from before the reset, or no worker stores any of it
            return
        first, *others = listings
        common = set(first).intersection(*others)
        restored = [name for name in first if name in common and self.records.belongs(name)]
        for name in restored:
            self.records.add(name)
        self._counts.restored_chunks += len(restored)
        if len(restored) < len(common):
            _logger.info(
                "storage tier %s: %d of the %d records of earlier runs can be found; the others, of another model or "
                "saved after a reset, are deleted",
                self._own_counts.tier, len(restored), len(common),
            )  # fmt: skip
        self.writes.deletions.add_unknown([name for listing in listings for name in listing])

    def _fail_jobs(self, why: str) -> None:
        for job in self._jobs.of(*STORAGE_JOBS):
            job.mark_failed(why)

    def mark_slots_lost(self, first: int, end: int) -> None:
        """Host memory is gone: fails what jobs read from or write to it."""
        self.writes.mark_slots_lost(first, end)
        for job in self._jobs.of(*STORAGE_JOBS):
            if overlaps(job.slots, first, end):
                job.error = job.error or "the host memory of its chunks was lost"
                job.failed_blocks |= {i for i, slot in enumerate(job.slots) if first <= slot < end}

    def ended(self, job: Job) -> None:
        """A job of this tier has ended."""
        if job.kind is JobKind.LOOKUP:
            self.lookups.ended(job)
            return
        bad = frozenset(range(job.wire.num_items)) if job.all_failed else job.failed_blocks
        if job.copy_failed:
            self._own_counts.failed_storage_chunks += len(bad) or 1  # 1: deleting all of it
        if job.kind is JobKind.DELETE:
            self._own_counts.failed_storage_chunks += len(job.missing.difference(bad))
        if job.kind is JobKind.PROMOTE:
            self._counts.missing_storage_chunks += len(job.missing.difference(bad))
            bad = job.missing.union(bad)
            self.reads.ended(job, bad)
        else:
            self.writes.ended(job, bad)
        if self.records.is_shared:
            good = [i for i in range(len(job.keys)) if i not in bad]
            names = self.records.of_slots([job.keys[i] for i in good], [job.slots[i] for i in good])
            self.confirmations.note(names)

    # State.

    @property
    def num_breaker_openings(self) -> int:
        """How often its copies were suspended."""
        return sum(breaker.num_opened for breaker in self._jobs.breakers)

    def stats(self) -> TierStats:
        """A snapshot of its counts and gauges."""
        return dataclasses.replace(
            self._own_counts,
            num_stored_chunks=len(self.records.stored),
            num_storage_chunks=self.records.capacity,
            num_open_breakers=sum(not breaker.closed for breaker in self._jobs.breakers),
        )

    def stored_keys(self) -> list[ChunkKey]:
        """Records that are stored."""
        return list(self.records.stored)

    def late_slots(self) -> list[int]:
        """Slots that late promotions may still write."""
        return [slot for job in self._jobs.late() for slot in job.slots]

    def check_invariants(self) -> None:
        """Raises AssertionError unless the sets agree with the jobs in flight. For tests."""
        records, writes = self.records, self._jobs.of(*WRITES)
        records.check_invariants()
        self.writes.check_invariants()
        self.lookups.check_invariants()
        pending = self.reads.pending(pieces=False)
        reads = [*pending, *self.reads.pending(pieces=True)]
        assert records.promoting == set(itertools.chain.from_iterable(records.of_slot(*chunk) for chunk in reads))
        written = [name for job in writes for name in records.of_slots(job.keys, job.slots)]
        assert sorted(records.writing) == sorted(written), "two jobs write one record"
        assert records.num_deleting == sum(len(job.wire.deleted_keys) for job in writes)
        assert all(self._index.state(key) is ChunkState.PENDING for key, _ in pending)
