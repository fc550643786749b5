"""What is read from one storage tier into the host tier: promotions.

A promotion reads chunks that a lookup needs next, or the pieces of a checkpoint. Until it ends, the lookup is ARRIVING.
"""

import dataclasses
import itertools
from collections.abc import Callable, Container, Mapping, Sequence, Set
from typing import Protocol, final

from tpu_offload.config import StorageTierConfig
from tpu_offload.core.context import TierContext
from tpu_offload.core.host_writes import ChunkWrites, HostWrites, PieceWrites
from tpu_offload.core.jobs import Job
from tpu_offload.core.policies import Use
from tpu_offload.core.request_state import RequestState
from tpu_offload.core.storage.jobs import ACCOUNT, TierJobs
from tpu_offload.core.storage.records import StoredRecords
from tpu_offload.metrics import TierStats
from tpu_offload.types import ChunkKey, JobKind, JobState, Pool

MAX_PROMOTIONS = 64  # a job
_STALLED_S = 2.0  # a promotion in flight for longer than this has probably met a tier that hangs
_MAX_RUN = 4096  # chunks that are looked at together; what is read of a long prompt is judged by its beginning


class TierNeighbors(Protocol):
    """What the planner of a tier knows of the others."""

    def note_promoted(self, tier_id: int, chunks: Mapping[ChunkKey, Use]) -> None:
        """Chunks have come from a tier, for these uses; they are READY."""

    def is_readable(self, key: ChunkKey) -> bool:
        """Whether a chunk is resident, on its way to a tier, or in one that can be read."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Reading:
    """A promotion in flight.

    Attributes:
      planned_s: when it was planned.
      nbytes: bytes in flight then, its own included.
      end: the chunk before the checkpoint whose pieces it reads; None if it reads chunks of full attention.
      use: that of the request for which it reads those.
    """

    planned_s: float
    nbytes: int
    end: ChunkKey | None
    use: Use | None


@final
class StorageReads:
    """Plans the promotions of one tier.

    Args:
      context: the scheduler's shared state.
      tier: the settings of the tier.
      num_tiers: how many there are.
      records: the tier's.
      jobs: likewise.
      own_counts: likewise.
      mark_lost: called with the chunks of failed promotions, see `Transfers.mark_lost`.
      neighbors: the other tiers, and this one.

    Attributes:
      breaker: suspends promotions while they fail.
    """

    def __init__(
        self,
        context: TierContext,
        tier: StorageTierConfig,
        *,
        num_tiers: int,
        records: StoredRecords,
        jobs: TierJobs,
        own_counts: TierStats,
        mark_lost: Callable[[Sequence[ChunkKey]], None],
        neighbors: TierNeighbors,
    ) -> None:
        self._tier_id = tier.tier_id
        self._index = context.index
        self._chunks, self._pieces = ChunkWrites(context.index), PieceWrites(context.index)
        self._counts = context.counts
        self._own_counts = own_counts
        self._clock = context.clock
        self._costs = context.costs
        self._num_tiers = num_tiers
        self._records = records
        self._jobs = jobs
        self._mark_lost = mark_lost
        self._neighbors = neighbors
        self._chunk_tokens = context.blocks_per_chunk * context.block_size
        self._chunk_nbytes = context.blocks_per_chunk * context.layout.block_nbytes
        self.breaker = jobs.make_breaker("promotions from")
        self._retry_s = context.config.breaker_retry_s
        self._failed: set[ChunkKey] = set()  # records whose last read has failed
        self._reading: dict[int, _Reading] = {}  # by job in flight
        self._num_slots = 0  # of chunks that promotions in flight write

    def promote(self, request: RequestState, *, end: int | None = None) -> None:
        """Plans a promotion of stored chunks that follow those that the request's last match found.

        These chunks are PENDING from now on. All chunks before them are resident: the index allocates no others.

        Args:
          request: the request.
          end: the boundary of the checkpoint that it wants, for which it has been decided to read. None for a model
            without checkpoints.
        """
        first, keys, stored = request.last_match.num_found_chunks, request.keys, self._records.stored
        last = len(keys) if end is None else end
        if not stored or request.last_match.at_load_limit or first >= last or keys[first] not in stored:
            return
        if self._index.state(keys[first]) is not None:
            return
        if end is None and self.are_admitted and not self._prefers_promotion(request):
            self._counts.num_skipped_promotions += 1
            return
        room = self.room
        missing, stop = self._index.missing(keys, 0, min(last, first + room))
        indices = list(itertools.takewhile(lambda i: keys[i] in stored, missing))[:room]
        wanted = {keys[i] for i in indices}
        if not indices or len(wanted) < len(indices) or any(key in self._index for key in wanted):
            # No room, an earlier chunk is not stored, or the hashes are not chained.
            self._counts.num_dropped_promotions += not room
            return
        protected = _protected(keys, indices, stop, is_whole=len(missing) == stop - missing[0])
        slots = self._index.allocate(request.use, keys, indices, protected=protected)
        if not slots:
            self._counts.num_dropped_promotions += 1
            return
        self._plan([keys[i] for i in indices[: len(slots)]], slots, self._chunks, use=request.use)

    def read_pieces(self, pieces: Sequence[ChunkKey], slots: Sequence[int], *, end: ChunkKey) -> None:
        """Plans the promotion of pieces of the checkpoint after this chunk, which are PENDING."""
        self._plan(pieces, slots, self._pieces, end=end)

    def _plan(
        self,
        keys: Sequence[ChunkKey],
        slots: Sequence[int],
        writes: HostWrites,
        *,
        end: ChunkKey | None = None,
        use: Use | None = None,
    ) -> None:
        names = self._records.of_slots(keys, slots)
        self._records.touch(reversed(names))  # the head last, so that tails are evicted first
        self._records.promoting.update(names)
        self._num_slots += self._num_chunk_slots(slots)
        now_s = self._clock()
        job = self._jobs.plan(JobKind.PROMOTE, keys, slots, self.breaker, writes=writes, now_s=now_s)
        self._reading[job.job_id] = _Reading(now_s, len(self._records.promoting) * self._chunk_nbytes, end, use)

    def _num_chunk_slots(self, slots: Sequence[int]) -> int:
        return self._index.count_in(Pool.CHUNKS, slots)

    @property
    def are_admitted(self) -> bool:
        """Whether its reads are not suspended."""
        return self.breaker.admits(ACCOUNT)

    @property
    def _max_slots(self) -> int:
        """Slots that promotions may hold: of half of the host tier an equal share, which no other tier can hold up."""
        return self._index.num_slots(Pool.CHUNKS) // (2 * self._num_tiers)

    @property
    def _slots_left(self) -> int:
        """Slots that further promotions may take; one that timed out has its slots until its reads have ended."""
        num_late = sum([self._num_chunk_slots(job.slots) for job in self._jobs.late()])
        return self._max_slots - self._num_slots - num_late

    @property
    def room(self) -> int:
        """Chunks that a promotion may read now, by the share of the host tier and what may be in flight."""
        if not self.are_admitted:
            return 0
        room = max(0, min(MAX_PROMOTIONS, self._records.room_in_flight, self._slots_left))
        return room if self.breaker.closed else min(room, 1)

    def has_room_for(self, num_records: int, num_slots: int) -> bool:
        """Whether so many records may be read now, into so many slots of chunks. A checkpoint is read as a whole."""
        return self.are_admitted and num_records <= self._records.room_in_flight and num_slots <= self._slots_left

    def may_fit(self, num_records: int, num_slots: int) -> bool:
        """Likewise, if nothing else is read, however much is written."""
        return num_records <= self._records.max_read and num_slots <= self._max_slots

    # Estimates.

    def _prefers_promotion(self, request: RequestState) -> bool:
        """Whether what this tier has after the chunks that a match found is read, and not computed."""
        first = request.last_match.num_found_chunks
        end, num_read = self.run(request.keys, first, len(request.keys))
        recompute_s = self._costs.recompute_s(first * self._chunk_tokens, end * self._chunk_tokens)
        return self._costs.prefers_promotion(self._tier_id, self.read_s(num_read), recompute_s)

    def run(self, keys: Sequence[ChunkKey], first: int, last: int) -> tuple[int, int]:
        """Where the run of chunks ends that this tier has from `first` on, and how many of them are still to be read.

        The others are being read. While promotions are suspended, it has only these. A long run ends early, and goes on
        where it ends.
        """
        promoting, end, size = self._records.promoting, first, 1
        stored: Container[ChunkKey] = self._records.stored if self.are_admitted else ()
        last, goes_on = min(last, first + _MAX_RUN), True
        while goes_on and end < last:
            for key in keys[end : min(last, end + size)]:  # ever longer slices: most runs are empty or long
                if key not in stored and key not in promoting:
                    goes_on = False
                    break
                end += 1
            size *= 8
        num_promoting = len(promoting.intersection(keys[first:end])) if promoting else 0
        return end, end - first - num_promoting

    def read_s(self, num_records: int) -> float | None:
        """Seconds to read so many records after those in flight; None if it is not known."""
        most = max(1, min(MAX_PROMOTIONS, self._records.max_in_flight, self._max_slots))
        nbytes = (num_records + len(self._records.promoting)) * self._chunk_nbytes
        return self._costs.promotion_s(self._tier_id, nbytes, num_jobs=max(1, -(-num_records // most)))

    # Ends.

    def ended(self, job: Job, bad: Container[int]) -> None:
        """Publishes what every worker has read and removes the rest, from storage too if it is damaged or gone.

        What else could not be read may be intact, as while a server does not answer. It rests: requests compute it, and
        later ones read it again. If that fails as well while others of the job can be read, it is deleted.
        """
        names = self._records.of_slots(job.keys, job.slots)
        self._records.promoting.difference_update(names)
        self._num_slots -= self._num_chunk_slots(job.slots)
        reading = self._reading.pop(job.job_id)
        if job.state is JobState.FINISHED and not job.missing:
            # A report comes at the end of a step, which may be long after the end of the read.
            seconds = job.copy_s or self._clock() - reading.planned_s
            self._costs.observe_promotion(self._tier_id, reading.nbytes, seconds)
        self._publish(job, {slot for i, slot in enumerate(job.slots) if i in bad}, reading.use)
        some_were_read = not all(i in bad for i in range(len(job.keys)))
        for i, (key, slot) in enumerate(zip(job.keys, job.slots, strict=True)):
            if i in bad and (i in job.missing or job.copy_failed):
                self._give_up(key, slot, is_gone=i in job.missing, some_were_read=some_were_read)
        if self._failed:
            self._failed.difference_update(name for name in names if name in self._records.stored)

    def _publish(self, job: Job, bad: Set[int], use: Use | None) -> None:
        """Publishes what is in the slots of a promotion, and removes what is in bad ones."""
        good = [slot for slot in job.slots if slot not in bad]
        self._own_counts.promoted_chunks += len(good)
        self._counts.promoted_nbytes += self._records.nbytes(good)
        assert job.writes is not None, "a promotion writes the host tier"
        published = job.writes.publish(job.held, bad)
        if published:
            self._counts.promoted_tokens += len(published) * self._chunk_tokens
            assert use is not None, "chunks are read for a request"
            self._neighbors.note_promoted(self._tier_id, dict.fromkeys(published, use))
        if bad:
            self._mark_lost(job.writes.remove(job.held, bad, quarantine=job.state is JobState.TIMED_OUT))

    def _give_up(self, key: ChunkKey, slot: int, *, is_gone: bool, some_were_read: bool) -> None:
        """What is gone, or could not be read again, is deleted; what could not be read for the first time rests."""
        records, failed = self._records, self._failed
        for name in records.of_slot(key, slot):
            if name not in records.stored:
                continue
            if is_gone or (some_were_read and name in failed):
                failed.discard(name)
                records.forget(name)
            else:
                if len(failed) >= records.capacity:
                    failed.clear()  # most of them were evicted since
                failed.add(name)
                records.rest(name, self._clock() + self._retry_s)

    # State.

    def is_stalled(self, now_s: float) -> bool:
        """Whether a promotion in flight has taken so long that the tier probably hangs."""
        oldest = next(iter(self._reading.values()), None)  # jobs are in the order of their planning
        return oldest is not None and now_s - oldest.planned_s > _STALLED_S

    def promotes_checkpoint(self, key: ChunkKey) -> bool:
        """Whether a promotion is reading pieces of the checkpoint after this chunk."""
        return any(reading.end == key for reading in self._reading.values())

    def pending(self, *, pieces: bool) -> list[tuple[ChunkKey, int]]:
        """What promotions have made PENDING, chunks or pieces, and the slots."""
        jobs = [job for job in self._jobs.of(JobKind.PROMOTE) if (self._reading[job.job_id].end is not None) == pieces]
        return [chunk for job in jobs for chunk in zip(job.keys, job.slots, strict=True)]


def _protected(keys: Sequence[ChunkKey], indices: Sequence[int], end: int, *, is_whole: bool) -> Container[ChunkKey]:
    """Chunks of a prefix that an allocation for these indices must not evict: those before and between them."""
    first = indices[0]
    if not is_whole:
        return set(keys[max(0, first - 1) : end])
    return (keys[first - 1],) if first else ()
