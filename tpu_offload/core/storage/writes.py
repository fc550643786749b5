"""What is written to one storage tier, and what is deleted there to make room.

A *cascade* writes chunks after their save has finished, or once admission accepts them. A *demotion* writes chunks that
the host tier has evicted; a setting selects one of the two. Checkpoints are written like the chunk before their
boundary, piece by piece, as far as the tier does not have the pieces already.

A demotion reads a slot that belongs to something else already. Its bytes are still the old ones: only the jobs of a
plan write slots, each plan has the demotions of all that was evicted since the last one, and the workers dispatch them
before all other jobs (`JobKind`). So a demotion cannot be repeated in a later step: what has no room is dropped.

Deletions, and the order to clear the tier, are jobs of their own.
"""

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, final

from tpu_offload.config import StorageTierConfig, StorageWriteEvent
from tpu_offload.core.context import TierContext
from tpu_offload.core.index import Checkpoint, ChunkState
from tpu_offload.core.jobs import Job
from tpu_offload.core.policies import Use
from tpu_offload.core.storage.admission import AdmissionFilter
from tpu_offload.core.storage.deletions import Deletions
from tpu_offload.core.storage.eviction_order import WrittenChunk
from tpu_offload.core.storage.jobs import ACCOUNT, TierJobs
from tpu_offload.core.storage.records import Keys, StoredRecords
from tpu_offload.core.storage.write_batch import WriteBatch
from tpu_offload.metrics import TierStats
from tpu_offload.types import ChunkKey, JobKind, JobState

MAX_CASCADES = 8  # slots in a step; the worker dispatches a program for each
MAX_DEMOTIONS = 64  # likewise; they cannot wait for the next step. As many as a promotion reads, and so evicts
_MAX_FINISHED = 64  # requests whose prefix is still being written
_MAX_CANDIDATES = 4096
_MAX_CLEAR_TIMEOUTS = 64  # of the job timeout


class _Victim(NamedTuple):
    """What the host tier has evicted: its slot, and of a chunk the one before it, see `PrefixTree.parent_in`."""

    slot: int
    parent: ChunkKey | None = None


@final
class StorageWrites:
    """Plans cascades, demotions and deletions of one tier.

    Args:
      context: the scheduler's shared state.
      tier: the settings of the tier.
      records: the tier's.
      jobs: likewise.
      own_counts: likewise.

    Attributes:
      demotes: whether what is evicted is written, instead of what is saved.
      deletions: what is deleted to make room.
    """

    def __init__(
        self,
        context: TierContext,
        tier: StorageTierConfig,
        *,
        records: StoredRecords,
        jobs: TierJobs,
        own_counts: TierStats,
    ) -> None:
        self._index = context.index
        self._counts = context.counts
        self._own_counts = own_counts
        self._records = records
        self._jobs = jobs
        self._has_checkpoints = bool(context.checkpoint_groups)
        self._writes = jobs.make_breaker("cascades to")
        self.deletions = Deletions(
            records, jobs, label=tier.label, retry_s=context.config.breaker_retry_s, clock=context.clock
        )
        # Saved chunks to write, and the uses for which they were saved; oldest first.
        self._candidates: OrderedDict[ChunkKey, Use] = OrderedDict()
        self._checkpoints: Keys = OrderedDict()  # likewise, the chunks before saved checkpoints
        self._written: dict[int, dict[ChunkKey, WrittenChunk]] = {}  # by job in flight; none with checkpoints
        self._newest = Use(-1)  # of the last request observed
        self._finished: deque[tuple[ChunkKey, Use, Sequence[ChunkKey]]] = deque()  # see `finish`; the last chunk, all
        self._checkpoints_first = False  # whose turn it is
        self._victims: dict[ChunkKey, _Victim] = {}  # evicted since the last plan; tails first
        self.demotes = tier.write_on is StorageWriteEvent.HOST_EVICTION
        self._admission = AdmissionFilter(tier.admission, records.capacity)
        self._must_clear = self._is_clearing = False
        self._num_clear_timeouts = 1  # that the next order to clear may take: a tier may need longer, each time

    # What may be written.

    def observe(self, use: Use, keys: Sequence[ChunkKey], first: int) -> None:
        """A request contains these chunks; those before `first` were recorded before. O(keys)."""
        self._newest = use
        new = keys[first:]  # others were offered with their own uses, or are when they are saved
        self._admission.observe(new)
        self._offer_admitted(use, new)

    def hit(self, use: Use, keys: Sequence[ChunkKey]) -> None:
        """A request loads the last of these chunks, a prefix, from the host tier. O(keys)."""
        self._admission.hit(keys)
        self._offer_admitted(use, keys)

    def offer(self, chunks: Mapping[ChunkKey, Use]) -> None:
        """Chunks are in the host tier for these uses: admitted ones are candidates for a cascade, or expected."""
        if self.demotes:
            if self._records.expects:
                self._expect(chunks)
            return
        new = [key for key in chunks if not self._records.knows(key)]
        admitted = [key for key in new if self._admission.admits(key)]
        self._counts.rejected_storage_chunks += len(new) - len(admitted)
        for key in admitted:
            self._candidates[key] = chunks[key]
        self._limit(self._candidates)

    def _expect(self, chunks: Mapping[ChunkKey, Use]) -> None:
        """Chunks are in the host tier: those that admission accepts are written when it evicts them."""
        expected: list[WrittenChunk] = []
        for key, use in chunks.items():
            found = self._index.find((key,)) if self._admission.admits(key) else ()
            parent = self._index.parent_in(found[0]) if found else None
            if parent is not None:
                expected.append((use, key, parent))
        self._records.expect(expected)

    def is_coming(self, key: ChunkKey) -> bool:
        """Whether an expected chunk is in the host tier, or on its way from there."""
        records = self._records
        return key in self._index or key in self._victims or key in records.writing or key in records.host_evicted

    def finish(self, use: Use, keys: Sequence[ChunkKey]) -> None:
        """A request with this prefix has ended: it counts as used once the last chunk of it is written. O(keys).

        Long prefixes are written in batches, the head first, so that a restart finds what is there of them. Without
        this the head would be evicted before the rest, which is of no use without it.
        """
        last = next((key for key in reversed(keys) if self._is_underway(key)), None)
        if last is not None:
            self._finished.append((last, use, keys))
            if len(self._finished) <= _MAX_FINISHED:
                return
            _, use, keys = self._finished.popleft()
        self._records.use(use, keys)

    def _is_underway(self, key: ChunkKey) -> bool:
        return key in self._candidates or key in self._records.writing

    def offer_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Makes a saved checkpoint a candidate, if admission accepts the chunk before it, and the tier can hold it."""
        if self.demotes or not self._admission.admits(checkpoint.key):
            return
        if sum(map(self._records.num_records, checkpoint.slots)) > self._records.capacity:
            self._counts.dropped_cascade_chunks += 1
            return
        self._checkpoints[checkpoint.key] = None
        self._limit(self._checkpoints)

    def drop_candidate(self, key: ChunkKey) -> None:
        """Another engine has stored this chunk."""
        self._candidates.pop(key, None)

    def _limit(self, candidates: OrderedDict[ChunkKey, Any]) -> None:
        while len(candidates) > _MAX_CANDIDATES:
            candidates.popitem(last=False)
            self._counts.dropped_cascade_chunks += 1

    def _offer_admitted(self, use: Use, keys: Sequence[ChunkKey]) -> None:
        """Offers chunks that admission accepts now, and had rejected when they were saved."""
        if not self._admission.depends_on_uses or (self.demotes and not self._records.expects):
            return
        state, admits = self._index.state, self._admission.admits
        admitted = [key for key in keys if admits(key) and state(key) is ChunkState.READY]
        self.offer(dict.fromkeys(admitted, use))
        if self._has_checkpoints:
            for key in admitted:
                checkpoint = self._index.checkpoints.get(key)
                if checkpoint is not None and not (checkpoint.rolls or checkpoint.num_pending):
                    self.offer_checkpoint(checkpoint)

    def note_evicted(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
        """The host tier has evicted chunks, tail first: the next plan demotes those that admission accepts."""
        for key, slot in zip(keys, slots, strict=True):
            parent, is_known = self._index.parent_in(slot), self._records.knows(key)
            if is_known or self._admission.admits(key):
                self._records.note_host_evicted(key, parent)
                if not is_known:
                    self._victims[key] = _Victim(slot, parent)
            else:
                self._counts.rejected_storage_chunks += 1
                self._records.drop_expected(key)

    def note_evicted_checkpoint(self, checkpoint: Checkpoint) -> None:
        """The host tier is about to evict a checkpoint; likewise."""
        if not self._admission.admits(checkpoint.key):
            return
        pieces = self._index.checkpoints.pieces_of(checkpoint)
        new = [p for p in pieces if not all(map(self._records.knows, self._records.of_slot(*p)))]
        if len(new) > MAX_DEMOTIONS:  # a part of it would be of no use
            self._counts.dropped_demotion_chunks += len(new)
        else:
            self._victims.update((piece, _Victim(slot)) for piece, slot in new)

    # Planning.

    @property
    def has_plans(self) -> bool:
        """Whether `plan` would plan a job or drop candidates, so that an idle engine should call it."""
        if self._must_clear:
            return not self._is_clearing and self.deletions.breaker.admits(ACCOUNT)
        return bool(self._candidates or self._checkpoints) and self._writes.admits(ACCOUNT)

    @property
    def must_clear(self) -> bool:
        """Whether the tier has to be emptied before anything else."""
        return self._must_clear

    def plan(self, now_s: float) -> None:
        """Plans the deletions and the cascade or demotion of the coming step."""
        records = self._records
        if self._must_clear:
            self._drop_victims(list(self._victims))
            self._victims = {}  # their slots are written from this step on
            if self.has_plans:
                self._plan_clear(now_s)
            return
        records.begin_demotion(self._newest, MAX_DEMOTIONS if self._writes.closed else 0)
        is_wanted = bool(self._candidates or self._checkpoints or self._victims)
        if not (is_wanted or records.to_delete or records.undeletable):
            return
        writes = is_wanted and self._writes.admits(ACCOUNT)
        if writes:
            self._evict()
        if self._victims:  # before the deletions, which are dispatched later: none of them may delete what it writes
            self._plan_demotion(now_s, may_write=writes)
        self._counts.num_evicted_storage_chunks += records.evict(self.deletions.num_tried(now_s))
        self.deletions.plan(now_s)
        if writes:
            self._plan_cascade(now_s)

    def _plan_clear(self, now_s: float) -> None:
        """Nothing else is planned before it has succeeded."""
        self._is_clearing = True
        timeouts = self._num_clear_timeouts
        self._jobs.plan(JobKind.CLEAR, (), (), self.deletions.breaker, now_s=now_s, num_timeouts=timeouts)

    def _plan_demotion(self, now_s: float, *, may_write: bool) -> None:
        """Plans to write what was evicted since the last plan, what is nearest to its head first; drops the rest."""
        victims, self._victims = list(reversed(self._victims.items())), {}
        batch = WriteBatch(self._records, max_slots=MAX_DEMOTIONS, room=self._room_to_write() if may_write else 0)
        use = self._newest.replace(is_request=False, priority=0)  # for those that were not expected
        dropped: list[ChunkKey] = []
        for key, (slot, parent) in victims:
            # Memory that is given away with this plan cannot be read any more.
            if not self._index.has_usable(slot) or not batch.add(key, slot):
                dropped.append(key)
            elif parent is not None:
                batch.chunks[key] = use, key, parent
        self._drop_victims(dropped[::-1])
        self._plan_writes(JobKind.DEMOTE, batch, now_s)

    def _drop_victims(self, keys: Sequence[ChunkKey]) -> None:
        """These are not written, and are gone; tails first."""
        self._counts.dropped_demotion_chunks += len(keys)
        for key in keys:
            self._records.drop_expected(key)

    def _plan_cascade(self, now_s: float) -> None:
        # No pins: the workers read the slots in this very step, in program order before a later step can write them.
        batch = WriteBatch(self._records, max_slots=MAX_CASCADES, room=self._room_to_write())
        # They take turns: under load there are always more chunks, and neither is of use without the other.
        if not self._checkpoints_first:
            self._add_chunks(batch)
        self._add_checkpoints(batch)
        if self._checkpoints_first and (batch.keys or not self._checkpoints):  # else they wait for room
            self._add_chunks(batch)
            self._checkpoints_first = False
        elif batch.keys:  # a step without room is nobody's turn
            self._checkpoints_first = True
        is_full = self._records.room <= 0 and not self._records.num_deleting  # and no room will come
        if not batch.keys and (is_full or self._records.is_idle):
            self._drop_candidates()
        self._plan_writes(JobKind.CASCADE, batch, now_s)

    def _add_chunks(self, batch: WriteBatch) -> None:
        while self._candidates and not batch.is_full:
            key, use = self._candidates.popitem(last=False)
            found = self._index.find((key,))
            if found:  # one record, which no job writes: it fits
                batch.add(key, found[0])
                parent = self._index.parent_in(found[0])
                if parent is not None:
                    batch.chunks[key] = use, key, parent
            else:
                self._counts.dropped_cascade_chunks += 1

    def _add_checkpoints(self, batch: WriteBatch) -> None:
        while self._checkpoints and not batch.is_full:
            key = next(iter(self._checkpoints))
            checkpoint = self._index.checkpoints.get(key)
            if checkpoint is not None and not checkpoint.num_pending:
                fitted = [batch.add(piece, slot) for piece, slot in self._index.checkpoints.pieces_of(checkpoint)]
                if not all(fitted):
                    break  # the rest of it follows
            else:
                self._counts.dropped_cascade_chunks += 1
            del self._checkpoints[key]

    def _plan_writes(self, kind: JobKind, batch: WriteBatch, now_s: float) -> None:
        if batch.keys:
            for name in batch.names:
                self._records.to_delete.pop(name, None)
                self._records.undeletable.pop(name, None)
                self._records.resting.pop(name, None)
                self._records.remove(name)  # a part of a state that has lost others
            self._records.writing.update(batch.names)
            job = self._jobs.plan(kind, batch.keys, batch.slots, self._writes, now_s=now_s)
            self._written[job.job_id] = {} if self._has_checkpoints else batch.chunks

    def _drop_candidates(self) -> None:
        """No room will come for the candidates, and an idle engine must not retry forever."""
        self._counts.dropped_cascade_chunks += len(self._candidates) + len(self._checkpoints)
        self._candidates.clear()
        self._checkpoints.clear()
        self._note_written()

    def _room_to_write(self) -> int:
        """Records that may be written now; one slot's while a probe decides whether writes are resumed."""
        room = self._records.room_to_write
        return room if self._writes.closed else min(room, self._records.max_per_slot)

    def _evict(self) -> None:
        """Evicts records if the tier will have too little room for what is to be written.

        Demotions cannot wait for the end of a deletion: room is kept free for those of the next step.
        """
        records = self._records
        num_written = min(len(self._candidates), MAX_CASCADES)
        if self._checkpoints:
            num_written += self._num_missing(next(iter(self._checkpoints)))
        if self.demotes:
            num_written = min(MAX_DEMOTIONS, max(1, records.capacity // 4))
        short = num_written - records.room - len(records.to_delete) - records.num_deleting
        if not self.deletions.are_refused:
            self._counts.num_evicted_storage_chunks += records.evict(short)

    def _num_missing(self, key: ChunkKey) -> int:
        """Records of a checkpoint that the tier does not have, as far as one step writes them."""
        checkpoint = self._index.checkpoints.get(key)
        pieces = self._index.checkpoints.pieces_of(checkpoint) if checkpoint is not None else ()
        names = [name for piece, slot in pieces for name in self._records.of_slot(piece, slot)]
        return min(sum(not self._records.knows(name) for name in names), self._records.max_in_flight // 2)

    # Ends, resets and losses.

    def ended(self, job: Job, bad: frozenset[int]) -> None:
        """A write, a deletion or a clearing has ended.

        Args:
          job: the job.
          bad: positions of the chunks or keys for which some worker has failed.
        """
        if job.kind is JobKind.CLEAR:
            self._is_clearing = False
            self._must_clear = job.all_failed
            if job.state is JobState.TIMED_OUT:
                self._num_clear_timeouts = min(2 * self._num_clear_timeouts, _MAX_CLEAR_TIMEOUTS)
            return
        if job.kind is JobKind.DELETE:
            self.deletions.ended(job, bad)
            self._note_written()
        else:
            self._end_write(job, bad)
        if self.demotes:
            self._evict()

    def _end_write(self, job: Job, bad: frozenset[int]) -> None:
        """What every worker has written is stored; the rest is deleted again."""
        records, chunks = self._records, self._written.pop(job.job_id)
        written: list[WrittenChunk] = []
        for i, (key, slot) in reversed(list(enumerate(zip(job.keys, job.slots, strict=True)))):
            names = records.of_slot(key, slot)
            records.writing.difference_update(names)
            if i not in bad and key in chunks:
                written.append(chunks[key])
                names = ()
            for name in reversed(names):  # the head last, so that tails are evicted first
                if i in bad:
                    records.forget(name)
                    records.drop_expected(name)
                else:
                    records.add(name)
            if i not in bad:
                self._own_counts.cascaded_chunks += 1
                self._counts.cascaded_nbytes += records.nbytes((slot,))
        records.add_written(written[::-1])
        self._note_written()

    def _note_written(self) -> None:
        """The prefixes of requests count as used that are not being written any more."""
        while self._finished and not self._is_underway(self._finished[0][0]):
            _, use, keys = self._finished.popleft()
            self._records.use(use, keys)

    def reset(self) -> None:
        """The tier has to be cleared."""
        self._must_clear = True
        self._finished.clear()
        self._candidates.clear()
        self._checkpoints.clear()

    def forget_candidates(self) -> None:
        """A worker has restarted: host memory is gone."""
        self._finished.clear()
        self._candidates.clear()
        self._checkpoints.clear()
        self._victims.clear()

    def mark_slots_lost(self, first: int, end: int) -> None:
        """Host memory is gone: what was evicted from it cannot be written."""
        self._victims = {key: victim for key, victim in self._victims.items() if not first <= victim.slot < end}

    def check_invariants(self) -> None:
        """Raises AssertionError unless the tables are bounded, and hold no chunk that is being written. For tests."""
        assert max(len(self._candidates), len(self._checkpoints)) <= _MAX_CANDIDATES
        assert len(self._finished) <= _MAX_FINISHED
        assert self._records.writing.isdisjoint(self._candidates), "a chunk would be written while it is being written"
