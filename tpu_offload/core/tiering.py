"""Copies between the host tier and one storage tier: which chunks are written, read and deleted, and when.

Several tiers have a planner each (`core.tier_stack`); here, *storage* is the tier of this one.

A *cascade* writes chunks to storage after their save has finished, or once admission accepts them. A *demotion* writes
chunks that the host tier has evicted; a setting selects one of the two. A *promotion* reads chunks into the host tier
that a lookup needs next; until it ends, the lookup is ARRIVING. All are kinds of job like any other: every worker has
to report them, and they have a deadline and one end.

A demotion reads a slot that belongs to another chunk already. Its bytes are still those of the evicted chunk: only the
jobs of a plan write slots, each plan has the demotions of all chunks evicted since the last one, and the workers
dispatch them before all other jobs (`JobKind`). So a demotion cannot be repeated in a later step: what has no room is
dropped.

The scheduler has the index of what is stored: a set of keys in LRU order. A chunk is stored once every worker has
written it, had it when it started (`adopt`), or has found it in a tier that other engines share (`storage_lookups`). It
occupies storage from the planning of its write until every worker has deleted it, so no private tier ever holds more
than `num_storage_chunks`. A deletion is sent as a cascade without chunks, and so is the order to clear storage.

A reset clears storage: until every worker has reported that, durably, nothing is written and nothing is found. If all
processes die before, what was stored before the reset is found again by a process whose fingerprint is the same, that
is, one with the weights that it was computed with. What was saved after a reset is never found by another process: its
keys are of another namespace (`request_table.KeySpace`), since nobody knows which weights it was computed with.
"""

import dataclasses
import itertools
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Protocol, final

from tpu_offload.config import StorageTierConfig, StorageWriteEvent
from tpu_offload.core.breaker import CircuitBreaker
from tpu_offload.core.context import TierContext
from tpu_offload.core.index import ChunkState, overlaps
from tpu_offload.core.jobs import Job
from tpu_offload.core.request_state import RequestState
from tpu_offload.core.storage_admission import AdmissionFilter
from tpu_offload.core.storage_lookups import StorageLookups
from tpu_offload.metrics import TierStats
from tpu_offload.types import ChunkKey, JobKind, JobState

_WRITES = (JobKind.CASCADE, JobKind.DEMOTE)
STORAGE_JOBS = (JobKind.LOOKUP, JobKind.PROMOTE, *_WRITES)
_ACCOUNT = "storage"  # for the circuit breakers
_MAX_CASCADES = 8  # a step; the worker dispatches a program for each
_MAX_DEMOTIONS = 32  # likewise; they cannot wait for the next step
_MAX_PROMOTIONS = 64  # a job
_MAX_DELETES = 256  # a step
_MAX_CANDIDATES = 4096
_STALLED_S = 2.0  # a promotion in flight for longer than this has probably met a tier that hangs
_MAX_ESTIMATED = 4096  # chunks of a prompt; a long one is judged by its beginning

Keys = OrderedDict[ChunkKey, None]


class TierNeighbors(Protocol):
    """What the planner of a tier knows of the others."""

    def estimate(self, keys: Sequence[ChunkKey], first: int) -> tuple[int, float | None]:
        """How far from `first` on all tiers together have a prefix, and seconds to read it, None if not known."""

    def note_promoted(self, tier_id: int, keys: Sequence[ChunkKey]) -> None:
        """Chunks have come from a tier; they are READY."""

    def knows(self, key: ChunkKey) -> bool:
        """Whether a chunk is resident, in any tier or on its way to one."""


@final
class StoragePlanner:
    """Plans cascades, demotions and promotions of one tier.

    Args:
      context: the scheduler's shared state.
      tier: the settings of the tier.
      num_chunks: its capacity.
      num_tiers: how many there are.
      num_workers: workers that report each step.
      mark_lost: called with the chunks of failed promotions, see `Transfers.mark_lost`.
      neighbors: the other tiers, and this one.
    """

    def __init__(
        self,
        context: TierContext,
        tier: StorageTierConfig,
        *,
        num_chunks: int,
        num_tiers: int,
        num_workers: int,
        mark_lost: Callable[[Sequence[ChunkKey]], None],
        neighbors: TierNeighbors,
    ) -> None:
        config, layout = context.config, context.layout
        self.tier_id = tier.tier_id
        self._own_counts = TierStats(tier=tier.label)
        self._neighbors = neighbors
        self._index = context.index
        self._jobs = context.jobs
        self._counts = context.counts
        self._clock = context.clock
        self._mark_lost = mark_lost
        self._timeout_s = config.job_timeout_s
        self._wait_s = config.storage_wait_s
        self._num_chunks = num_chunks
        self._num_tiers = num_tiers
        self._max_in_flight = tier.max_chunks_in_flight(layout, blocks_per_chunk=config.blocks_per_chunk)
        self._chunk_tokens = config.blocks_per_chunk * layout.block_size
        self._chunk_nbytes = config.blocks_per_chunk * layout.block_nbytes
        self._writes, self._reads, self._deletions = self._breakers = [
            CircuitBreaker(
                what, num_failures=config.breaker_failures, retry_s=config.breaker_retry_s, clock=context.clock
            )
            for what in (f"cascades to {tier.label}", f"promotions from {tier.label}", f"deletions in {tier.label}")
        ]
        self._stored: Keys = OrderedDict()  # least recently used first
        self._candidates: Keys = OrderedDict()  # saved chunks to write, oldest first
        self._victims: dict[ChunkKey, int] = {}  # evicted since the last plan, and their slots; tails first
        self.demotes = tier.write_on is StorageWriteEvent.HOST_EVICTION
        self._admission = AdmissionFilter(tier.admission, self._num_chunks)
        self._to_delete: Keys = OrderedDict()
        # The jobs in flight write, read and delete these.
        self._writing: set[ChunkKey] = set()
        self._promoting: set[ChunkKey] = set()
        self._num_deleting = 0
        self._must_clear = self._is_clearing = False
        self._keys = context.keys
        self._listings: dict[int, Sequence[ChunkKey]] = {}  # by worker, until all have started
        self._num_workers = num_workers
        self._has_adopted = self._is_shared = False
        # By promotion in flight: when it was planned, and the bytes in flight then, its own included.
        self._reading: dict[int, tuple[float, int]] = {}
        self._costs = context.costs
        self._label = tier.label
        self._lookups = StorageLookups(
            context, tier, capacity=num_chunks, is_known=neighbors.knows, add_found=self._add_found
        )
        self._breakers.append(self._lookups.breaker)

    # Planning.

    def observe(self, keys: Sequence[ChunkKey], first: int) -> None:
        """A request contains these chunks; those before `first` were recorded before. O(keys)."""
        if self._stored:
            for key in reversed(keys):  # the head last, so that tails are evicted first
                if key in self._stored:
                    self._stored.move_to_end(key)
        self._admission.observe(keys[first:])
        self._offer_admitted(keys)

    def hit(self, keys: Sequence[ChunkKey]) -> None:
        """A request loads the last of these chunks, a prefix, from the host tier. O(keys)."""
        self._admission.hit(keys)
        self._offer_admitted(keys)

    def offer(self, keys: Sequence[ChunkKey]) -> None:
        """Makes saved chunks candidates for a cascade, as far as admission accepts them."""
        if self.demotes:
            return
        new = [key for key in keys if key not in self._stored and key not in self._writing]
        admitted = [key for key in new if self._admission.admits(key)]
        self._counts.rejected_storage_chunks += len(new) - len(admitted)
        self._candidates.update(dict.fromkeys(admitted))
        while len(self._candidates) > _MAX_CANDIDATES:
            self._candidates.popitem(last=False)
            self._counts.dropped_cascade_chunks += 1

    def _offer_admitted(self, keys: Sequence[ChunkKey]) -> None:
        """Makes chunks candidates that admission accepts now, and had rejected when they were saved."""
        if self.demotes or not self._admission.depends_on_uses:
            return
        state, admits = self._index.state, self._admission.admits
        self.offer([key for key in keys if admits(key) and state(key) is ChunkState.READY])

    def note_evicted(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
        """The host tier has evicted chunks, tail first: the next plan demotes those that admission accepts."""
        for key, slot in zip(keys, slots, strict=True):
            if key in self._stored or key in self._writing:
                continue
            if self._admission.admits(key):
                self._victims[key] = slot
            else:
                self._counts.rejected_storage_chunks += 1

    def promote(self, request: RequestState) -> None:
        """Plans a promotion of stored chunks that follow those that the request's last match found.

        These chunks are PENDING from now on. All chunks before them are resident: the index allocates no others.
        """
        first, keys = request.num_found_chunks, request.keys
        if not self._stored or request.at_load_limit or first >= len(keys) or keys[first] not in self._stored:
            return
        if self._index.state(keys[first]) is not None:
            return
        if not self._costs.prefers_promotion(self.tier_id, *self._estimates(request)):
            self._counts.num_skipped_promotions += 1
            return
        room = self._promotion_room()
        missing, end = self._index.missing(keys, 0, min(len(keys), first + room))
        indices = list(itertools.takewhile(lambda i: keys[i] in self._stored, missing))[:room]
        wanted = {keys[i] for i in indices}
        if not indices or len(wanted) < len(indices) or any(key in self._index for key in wanted):
            # No room, an earlier chunk is not stored, or the hashes are not chained.
            self._counts.num_dropped_promotions += not room
            return
        protected = _protected(keys, indices, end, is_whole=len(missing) == end - missing[0])
        slots = self._index.allocate(request.use, keys, indices, protected=protected)
        if not slots:
            self._counts.num_dropped_promotions += 1
            return
        promoted = [keys[i] for i in indices[: len(slots)]]
        for key in promoted:
            self._stored.move_to_end(key)
        self._promoting.update(promoted)
        now_s = self._clock()
        job = self._plan(JobKind.PROMOTE, promoted, slots, self._reads, now_s=now_s)
        self._reading[job.job_id] = now_s, len(self._promoting) * self._chunk_nbytes

    @property
    def is_shared(self) -> bool:
        """Whether other engines use the tier, too."""
        return self._is_shared

    def look_up(self, request: RequestState) -> None:
        """Has a shared tier asked for the chunks after those known here; sets `RequestState.lookup_wait_s`."""
        self._lookups.ask(request)

    def knows(self, key: ChunkKey) -> bool:
        """Whether a chunk is stored, or is being written."""
        return key in self._stored or key in self._writing

    def _add_found(self, keys: Sequence[ChunkKey]) -> None:
        """Other engines have stored this prefix. What has no room is left out, from the tail on."""
        new = [key for key in keys if not (key in self._stored or key in self._writing or key in self._to_delete)]
        while self._room() < len(new) and self._stored:
            key = next(iter(self._stored))
            if key in self._promoting:  # those after it were used later, so most are in flight as well
                break
            del self._stored[key]
            self._counts.num_evicted_storage_chunks += 1
        for key in reversed(new[: max(0, self._room())]):  # the head last, so that tails are evicted first
            self._candidates.pop(key, None)
            self._stored[key] = None

    def wait_s(self, request: RequestState, otherwise_s: float) -> float:
        """How long a request waits for the PENDING chunk after those found; `otherwise_s` if it is not being promoted.

        For all that the tiers have of the request together: not longer than computing it takes, where that is known.
        """
        if request.keys[request.num_found_chunks] not in self._promoting:
            return otherwise_s
        if request.storage_wait_s is None:
            estimates = self._estimates(request, of_all_tiers=True)
            request.storage_wait_s = self._costs.storage_wait_s(*estimates, default_s=self._wait_s)
        return request.storage_wait_s

    def _estimates(self, request: RequestState, *, of_all_tiers: bool = False) -> tuple[float | None, float | None]:
        """Seconds to read what this tier, or all, have after the chunks that a match found, and to compute it."""
        first = request.num_found_chunks
        end, load_s = self.estimate(request.keys, first)
        if of_all_tiers:
            end, rest_s = self._neighbors.estimate(request.keys, end)
            load_s = None if load_s is None or rest_s is None else load_s + rest_s
        return load_s, self._costs.recompute_s(first * self._chunk_tokens, end * self._chunk_tokens)

    def estimate(self, keys: Sequence[ChunkKey], first: int) -> tuple[int, float | None]:
        """Where the run of chunks ends that this tier has from `first` on, and seconds to read it."""
        end, num_read = first, 0
        while end < len(keys) and end - first < _MAX_ESTIMATED:
            key = keys[end]
            if key not in self._promoting:
                if key not in self._stored:
                    break
                num_read += 1
            end += 1
        most = max(1, min(_MAX_PROMOTIONS, self._max_in_flight, self._max_promoting))
        nbytes = (num_read + len(self._promoting)) * self._chunk_nbytes
        return end, self._costs.promotion_s(self.tier_id, nbytes, num_jobs=max(1, -(-num_read // most)))

    @property
    def has_plans(self) -> bool:
        """Whether `plan` would plan a job or drop candidates, so that an idle engine should call it."""
        if self._must_clear:
            return not self._is_clearing and self._deletions.admits(_ACCOUNT)
        return (bool(self._candidates) and self._writes.admits(_ACCOUNT)) or self._lookups.has_plans

    def plan(self, now_s: float) -> None:
        """Plans the deletions and the cascade or demotion of the coming step."""
        if self._must_clear:
            self._counts.dropped_demotion_chunks += len(self._victims)
            self._victims = {}  # their slots are written from this step on
            self._plan_clear(now_s)
            return
        self._lookups.plan(now_s)
        if not (self._candidates or self._victims or self._to_delete):
            return
        writes = bool(self._candidates or self._victims) and self._writes.admits(_ACCOUNT)
        if writes:
            self._evict()
        if self._victims:  # before the deletions, which are dispatched later: none of them may delete what it writes
            self._plan_demotion(now_s, may_write=writes)
        # One batch at a time, which bounds how many deletions are retried after a failure.
        if self._to_delete and not self._num_deleting and self._deletions.admits(_ACCOUNT):
            self._num_deleting = min(len(self._to_delete), _MAX_DELETES if self._deletions.closed else 1)
            deleted = tuple([self._to_delete.popitem(last=False)[0] for _ in range(self._num_deleting)])
            self._plan(JobKind.CASCADE, (), (), self._deletions, now_s=now_s, deleted=deleted)
        if writes:
            self._plan_cascade(now_s)

    def _plan_clear(self, now_s: float) -> None:
        """Nothing else is planned before it has succeeded."""
        if not self._is_clearing and self._deletions.admits(_ACCOUNT):
            self._is_clearing = True
            self._plan(JobKind.CASCADE, (), (), self._deletions, now_s=now_s, clears=True)

    def _plan_demotion(self, now_s: float, *, may_write: bool) -> None:
        """Plans to write the chunks evicted since the last plan, those nearest to their heads first; drops the rest."""
        room = self._cascade_room(_MAX_DEMOTIONS) if may_write else 0
        victims, self._victims = list(reversed(self._victims.items())), {}
        chunks = [chunk for chunk in victims if chunk[0] not in self._stored][: max(0, room)]
        self._counts.dropped_demotion_chunks += len(victims) - len(chunks)
        if chunks:
            keys, slots = zip(*chunks, strict=True)
            for key in keys:
                self._to_delete.pop(key, None)
            self._writing.update(keys)
            self._plan(JobKind.DEMOTE, keys, slots, self._writes, now_s=now_s)

    def _plan_cascade(self, now_s: float) -> None:
        # No pins: the workers read the slots in this very step, in program order before a later step can write them.
        keys: list[ChunkKey] = []
        slots: list[int] = []
        room = self._cascade_room(_MAX_CASCADES)
        while self._candidates and len(keys) < room:
            key, _ = self._candidates.popitem(last=False)
            found = self._index.find((key,))
            if not found:
                self._counts.dropped_cascade_chunks += 1
                continue
            self._to_delete.pop(key, None)
            keys.append(key)
            slots += found
        if keys:
            self._writing.update(keys)
            self._plan(JobKind.CASCADE, keys, slots, self._writes, now_s=now_s)
        elif self._room() <= 0 and not self._num_deleting:
            self._drop_candidates()

    def _drop_candidates(self) -> None:
        """No room will come for the candidates, and an idle engine must not retry forever."""
        self._counts.dropped_cascade_chunks += len(self._candidates)
        self._candidates.clear()

    # Resets and losses.

    def reset(self) -> None:
        """The stored KV is invalid: has storage cleared and fails the jobs in flight."""
        self._must_clear = True
        self._lookups.reset()
        self._candidates.clear()
        self._to_delete.clear()
        self._stored.clear()
        self._fail_jobs("storage was cleared")

    def adopt(self, worker_id: int, listed: Sequence[ChunkKey], *, is_shared: bool = False) -> None:
        """A worker has started, for the first time or again, and has these chunks in storage, oldest first.

        A chunk is stored if all workers have it. Jobs in flight fail: the worker has lost them. A tier that other
        engines share lists nothing and is asked. It makes room by itself: what this one no longer knows is not deleted.
        What this one knows is stored nevertheless: the worker's process has lost none of it.
        """
        self._is_shared = self._is_shared or is_shared
        self._candidates.clear()
        self._victims.clear()
        self._fail_jobs(f"worker {worker_id} has restarted")
        if is_shared:
            self._lookups.enable()
            return
        if not self._has_adopted:
            self._listings[worker_id] = listed
            if len(self._listings) < self._num_workers:
                return
            self._restore(list(self._listings.values()))
            self._has_adopted, self._listings = True, {}
        else:
            own = set(listed)
            for key in [key for key in self._stored if key not in own]:
                self._forget(key)
            self._delete_unknown(listed)

    def _restore(self, listings: Sequence[Sequence[ChunkKey]]) -> None:
        """Takes what all workers have as stored."""
        if self._must_clear:  # it is from before the reset
            return
        first, *others = listings
        common = set(first).intersection(*others)
        restored = [key for key in first if key in common and key.endswith(self._keys.namespace)]
        self._stored.update(dict.fromkeys(restored))
        self._counts.restored_chunks += len(restored)
        self._delete_unknown(itertools.chain(*listings))

    def _delete_unknown(self, listed: Iterable[ChunkKey]) -> None:
        if self._is_shared:
            return
        for key in listed:
            if key not in self._stored and key not in self._writing:
                self._to_delete[key] = None
        if self._room() < 0:  # the workers have different chunks, as if they were of different engines
            self.reset()

    def _fail_jobs(self, why: str) -> None:
        for job in self._own_jobs(*STORAGE_JOBS):
            job.mark_failed(why)

    def mark_slots_lost(self, first: int, end: int) -> None:
        """Host memory is gone: fails the chunks that jobs read from or write to it."""
        self._victims = {key: slot for key, slot in self._victims.items() if not first <= slot < end}
        for job in self._own_jobs(*STORAGE_JOBS):
            if overlaps(job.slots, first, end):
                job.error = job.error or "the host memory of its chunks was lost"
                job.failed_blocks.update(i for i, slot in enumerate(job.slots) if first <= slot < end)

    # Inside.

    def _own_jobs(self, *kinds: JobKind) -> list[Job]:
        """The jobs in flight of this tier."""
        return [job for job in self._jobs.of(*kinds) if job.wire.tier_id == self.tier_id]

    @property
    def _max_promoting(self) -> int:
        """Slots that promotions may hold: of half of the host tier an equal share, which no other tier can hold up."""
        return self._index.num_slots // (2 * self._num_tiers)

    def _promotion_room(self) -> int:
        """Chunks that a promotion may read now, by the share of the host tier and what may be in flight."""
        if not self._reads.admits(_ACCOUNT):
            return 0
        in_flight = self._max_in_flight - len(self._writing) - len(self._promoting)
        room = min(_MAX_PROMOTIONS, in_flight, self._max_promoting - len(self._promoting))
        return max(0, room if self._reads.closed else min(room, 1))

    def _cascade_room(self, max_chunks: int) -> int:
        """Chunks that may be written now, at most so many. At least half of what may be in flight is for promotions."""
        in_flight = self._max_in_flight // 2 - len(self._writing)
        both = self._max_in_flight - len(self._writing) - len(self._promoting)
        room = min(max_chunks, in_flight, both, self._room())
        return room if self._writes.closed else min(room, 1)

    def _room(self) -> int:
        """Free capacity of storage, in chunks."""
        taken = len(self._stored) + len(self._writing) + len(self._to_delete) + self._num_deleting
        return self._num_chunks - taken

    def _evict(self) -> None:
        """Evicts least recently used chunks from storage if it will have too little room for what is to be written.

        Demotions cannot wait for the end of a deletion: room is kept free for those of the next step.
        """
        num_written = min(len(self._candidates), _MAX_CASCADES)
        if self.demotes:
            num_written = min(_MAX_DEMOTIONS, max(1, self._num_chunks // 4))
        deleted_later = len(self._to_delete) + self._num_deleting
        short = num_written - self._room() - deleted_later
        while short > 0 and self._stored:
            key = next(iter(self._stored))
            if key in self._promoting:  # those after it were used later, so most are in flight as well
                break
            self._forget(key)
            self._counts.num_evicted_storage_chunks += 1
            short -= 1

    def _forget(self, key: ChunkKey) -> None:
        """A chunk is not stored any more; every worker has to delete its shard, unless others may read it."""
        self._stored.pop(key, None)
        if not self._is_shared:
            self._to_delete[key] = None

    def _plan(
        self,
        kind: JobKind,
        keys: Sequence[ChunkKey],
        slots: Sequence[int],
        breaker: CircuitBreaker,
        *,
        now_s: float,
        deleted: tuple[ChunkKey, ...] = (),
        clears: bool = False,
    ) -> Job:
        label = "everything" if clears else f"{len(deleted)} keys to delete" if deleted else f"{len(keys)} chunks"
        job = self._jobs.plan(
            kind,
            (),
            request=f"{label} in {self._label}",
            keys=tuple(keys),
            slots=tuple(slots),
            deleted_keys=deleted,
            clears_storage=clears,
            tier_id=self.tier_id,
            nbytes=len(keys) * self._chunk_nbytes,
            breaker=breaker,
            deadline_s=now_s + self._timeout_s,
        )
        breaker.begin(job.job_id)
        return job

    def ended(self, job: Job) -> None:
        """A job of this tier has ended."""
        if job.kind is JobKind.LOOKUP:
            self._lookups.ended(job)
            return
        bad = set(range(job.wire.num_items)) if job.all_failed else job.failed_blocks
        if job.copy_failed:
            num_failed = sum(i < len(job.keys) for i in bad)
            self._counts.failed_storage_chunks += num_failed
            self._own_counts.failed_storage_chunks += num_failed
        if job.kind is JobKind.PROMOTE:
            self._counts.missing_storage_chunks += len(job.missing.difference(bad))
            self._end_promotion(job, job.missing.union(bad))
        else:
            self._end_cascade(job, bad)

    def _end_promotion(self, job: Job, bad: Container[int]) -> None:
        """Publishes the chunks that every worker has read and removes the others, from storage too if it failed."""
        self._promoting.difference_update(job.keys)
        planned_s, nbytes = self._reading.pop(job.job_id)
        if job.state is JobState.FINISHED and not job.missing:
            # A report comes at the end of a step, which may be long after the end of the read.
            self._costs.observe_promotion(self.tier_id, nbytes, job.copy_s or self._clock() - planned_s)
        chunks = list(zip(job.keys, job.slots, strict=True))
        good = [chunk for i, chunk in enumerate(chunks) if i not in bad]
        lost = [chunk for i, chunk in enumerate(chunks) if i in bad]
        if good:
            self._index.complete(*zip(*good, strict=True), success=True)
            self._counts.promoted_chunks += len(good)
            self._counts.promoted_nbytes += len(good) * self._chunk_nbytes
            self._counts.promoted_tokens += len(good) * self._chunk_tokens
            self._own_counts.promoted_chunks += len(good)
            self._neighbors.note_promoted(self.tier_id, [key for key, _ in good])
        if lost:
            keys, slots = zip(*lost, strict=True)
            self._index.complete(keys, slots, success=False, quarantine=job.state is JobState.TIMED_OUT)
            self._mark_lost(keys)
            gone = keys if job.copy_failed else [job.keys[i] for i in job.missing]
            for key in gone:
                if key in self._stored:
                    self._forget(key)

    def _end_cascade(self, job: Job, bad: Container[int]) -> None:
        """Chunks that every worker has written are stored; the others, and failed deletions, are deleted again."""
        if job.wire.clears_storage:
            self._is_clearing = False
            self._must_clear = job.all_failed
            return
        self._writing.difference_update(job.keys)
        for i, key in reversed(list(enumerate(job.keys))):  # the head last, so that tails are evicted first
            if i in bad:
                self._forget(key)
            else:
                self._stored[key] = None
                self._counts.cascaded_chunks += 1
                self._own_counts.cascaded_chunks += 1
                self._counts.cascaded_nbytes += self._chunk_nbytes
        deleted = job.wire.deleted_keys
        self._num_deleting -= len(deleted)
        kept = [key for i, key in enumerate(deleted, len(job.keys)) if i in bad]
        for key in kept:
            if key not in self._stored and key not in self._writing:
                self._to_delete[key] = None
        if kept:
            self._drop_candidates()
        if self.demotes:
            self._evict()

    # State.

    @property
    def num_breaker_openings(self) -> int:
        """How often its copies were suspended."""
        return sum(breaker.num_opened for breaker in self._breakers)

    def stats(self) -> TierStats:
        """A snapshot of its counts and gauges."""
        return dataclasses.replace(
            self._own_counts,
            num_stored_chunks=len(self._stored),
            num_open_breakers=sum(not breaker.closed for breaker in self._breakers),
        )

    def is_stalled(self, now_s: float) -> bool:
        """Whether a promotion in flight has taken so long that the tier probably hangs."""
        oldest = next(iter(self._reading.values()), None)  # jobs are in the order of their planning
        return oldest is not None and now_s - oldest[0] > _STALLED_S

    def promotes(self, key: ChunkKey) -> bool:
        """Whether a promotion is reading a chunk."""
        return key in self._promoting

    def stored_keys(self) -> list[ChunkKey]:
        """Chunks that are stored, least recently used first."""
        return list(self._stored)

    def pending(self) -> list[ChunkKey]:
        """Chunks that promotions have made PENDING."""
        return [key for job in self._own_jobs(JobKind.PROMOTE) for key in job.keys]

    def late_slots(self) -> list[int]:
        """Slots that late promotions may still write."""
        late = [job for job in self._jobs.late(*STORAGE_JOBS) if job.wire.tier_id == self.tier_id]
        return [slot for job in late for slot in job.slots]

    def check_invariants(self) -> None:
        """Raises AssertionError unless the sets agree with the jobs in flight. For tests."""
        jobs = self._own_jobs(*_WRITES)
        assert self._promoting == set(self.pending())
        assert sorted(self._writing) == sorted(key for job in jobs for key in job.keys), "two jobs write one chunk"
        assert self._num_deleting == sum(len(job.wire.deleted_keys) for job in jobs)
        assert self._room() >= 0, "storage holds more than it may"
        assert not self._writing & self._stored.keys()
        assert not (self._writing | self._stored.keys()) & self._to_delete.keys(), "what is stored would be deleted"
        assert all(self._index.state(key) is ChunkState.PENDING for key in self._promoting)
        assert len(self._candidates) <= _MAX_CANDIDATES
        self._lookups.check_invariants()


def _protected(keys: Sequence[ChunkKey], indices: Sequence[int], end: int, *, is_whole: bool) -> Container[ChunkKey]:
    """Chunks of a prefix that an allocation for these indices must not evict: those before and between them."""
    first = indices[0]
    if not is_whole:
        return set(keys[max(0, first - 1) : end])
    return (keys[first - 1],) if first else ()
