"""The storage tiers below the host tier, one planner for each, nearest first.

All copies are between the host tier and one storage tier; nothing is copied from one storage tier to another. Each
planner decides on its own what its tier takes, evicts and gives back, with breakers, bounds and deadlines of its own.
So a tier that is dead, frozen or full changes nothing for the others.

What they do together: a lookup is answered by the nearest tier that has the next chunk and can read it now; tiers whose
reads hang are tried last. The tier reads the run of chunks that it has; the next run may come from another one. What
has come from a tier is offered, as if it had been saved, to the nearer ones and to those that take what the host tier
evicts. A request waits once for all of them. Of several shared tiers only the nearest is asked what other engines have
stored.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from tpu_offload.core.context import TierContext
from tpu_offload.core.index import Checkpoint
from tpu_offload.core.jobs import Job
from tpu_offload.core.policies import Use
from tpu_offload.core.policies.base import STORAGE_WORTH
from tpu_offload.core.request_state import RequestState
from tpu_offload.core.storage.checkpoint_promotions import CheckpointPromotions
from tpu_offload.core.storage.jobs import STORAGE_JOBS
from tpu_offload.core.storage.planner import StoragePlanner
from tpu_offload.core.storage.records import StoredRecords
from tpu_offload.metrics import TierStats
from tpu_offload.types import ChunkKey, JobKind, WorkerSetup


@final
class StorageStackPlanner:
    """Plans the copies to and from all storage tiers; does nothing without any.

    Args:
      context: the scheduler's shared state.
      num_workers: workers that report each step.
      mark_lost: called with the chunks of failed promotions, see `Transfers.mark_lost`.
    Raises:
      ConfigError: a tier is smaller than one chunk.
    """

    def __init__(
        self, context: TierContext, *, num_workers: int, mark_lost: Callable[[Sequence[ChunkKey]], None]
    ) -> None:
        sizes = context.config.storage_chunks(context.layout)
        above = itertools.accumulate(sizes, initial=context.config.host_chunks(context.layout) if sizes else 0)
        self._tiers = tuple(
            StoragePlanner(
                context,
                tier,
                num_chunks=num_chunks,
                num_above=num_above,
                num_tiers=len(sizes),
                num_workers=num_workers,
                mark_lost=mark_lost,
                neighbors=self,
            )
            for tier, num_chunks, num_above in zip(context.config.storage_tiers, sizes, above, strict=False)
        )
        self._clock = context.clock
        self._wait_s = context.config.storage_wait_s
        self._index = context.index
        self._counts = context.counts
        self._costs = context.costs
        self._chunk_tokens = context.blocks_per_chunk * context.block_size
        self._demoting = [tier for tier in self._tiers if tier.writes.demotes]
        self._saves_time = True  # to read the last prompt of which a tier had something
        self._readable: list[StoredRecords] = []  # of the tiers that could be read at the last match
        context.jobs.on_end(*STORAGE_JOBS, call=self._ended)
        if self._demoting:
            context.index.on_evict(self._note_evicted)
        elif self._tiers and self._wait_s and not context.checkpoint_groups:
            context.index.set_is_stored(self._has)
        self._checkpoints: CheckpointPromotions | None = None
        if self._tiers and context.checkpoint_groups:
            self._checkpoints = CheckpointPromotions(context, self._tiers)
            context.index.on_checkpoints(ready=self._offer_checkpoint, evict=self._note_evicted_checkpoint)

    @property
    def tiers(self) -> tuple[StoragePlanner, ...]:
        """The planners, nearest first."""
        return self._tiers

    # Planning: see the methods of `StoragePlanner`.

    def observe(self, use: Use, keys: Sequence[ChunkKey], first: int) -> None:
        """A request contains these chunks; those before `first` were recorded before. O(keys)."""
        compares = not first and any(tier.records.compares for tier in self._tiers)
        num_above = len(self._index.find(keys)) if compares else 0
        for tier in self._tiers:
            tier.observe(use, keys, first, num_above)
            if compares and tier is not self._tiers[-1]:
                num_above = tier.records.find(keys, num_above)

    def finish(self, use: Use, keys: Sequence[ChunkKey]) -> None:
        """A request with this prefix has ended. O(keys)."""
        for tier in self._tiers:
            tier.writes.finish(use, keys)

    def hit(self, use: Use, keys: Sequence[ChunkKey]) -> None:
        """A request loads the last of these chunks, a prefix, from the host tier. O(keys)."""
        for tier in self._tiers:
            tier.writes.hit(use, keys)

    def hit_checkpoint(self, checkpoint: Checkpoint) -> None:
        """A request loads a checkpoint from the host tier."""
        pieces = self._index.checkpoints.pieces_of(checkpoint)
        for tier in self._tiers:
            for piece, slot in pieces:
                tier.records.touch(tier.records.of_slot(piece, slot))

    def offer(self, saved: Mapping[ChunkKey, Use]) -> None:
        """Chunks were saved, for these uses; each tier that is written then takes those that it admits."""
        for tier in self._tiers:
            tier.writes.offer(saved)

    def note_stored(self, request: RequestState) -> None:
        """Notes in a request's use what storage has of its prompt, for eviction policies; for each match.

        O(chunks that it has and had not at the last match). Not where a tier takes what the host tier evicts: there an
        eviction loses nothing. Nor where requests never wait for storage, or with windows and states, where a prefix is
        of use only with a checkpoint.
        """
        if self._demoting or self._checkpoints is not None or not self._wait_s:
            return
        first = request.use.num_in_storage
        end, load_s = self.estimate(request.keys, first, len(request.keys))
        if end > first:
            recompute_s = self._costs.recompute_s(first * self._chunk_tokens, end * self._chunk_tokens)
            worth = self._costs.storage_worth(load_s, recompute_s, default=STORAGE_WORTH)
            self._saves_time = worth > 0
            if first:
                worth += (request.use.storage_worth - worth) * first / end
            request.use = request.use.replace(num_in_storage=end, storage_worth=worth)
        now_s = self._clock()
        self._readable = [t.records for t in self._tiers if self._saves_time and t.may_read_at(now_s)]

    def promote(self, request: RequestState) -> None:
        """Plans a promotion of the chunks after those that the request's last match found, from one tier.

        A tier whose reads hang is asked last: its breaker opens only after several of them have timed out. With windows
        or states only what leads to a checkpoint is read, and the checkpoint.
        """
        now_s = self._clock()
        for tier in self._tiers:
            tier.records.end_rest(now_s)  # an idle engine makes no plans
        end: int | None = None
        if self._checkpoints is not None and not (end := self._choose_target(request, self._checkpoints)):
            return
        tiers: Sequence[StoragePlanner] = self._tiers
        if len(tiers) > 1:
            tiers = sorted(tiers, key=lambda tier: tier.reads.is_stalled(now_s))
        for tier in tiers:
            tier.reads.promote(request, end=end)  # the next one finds the chunk PENDING if this one reads it
        if self._checkpoints is not None and end:
            self._checkpoints.promote(request, end)

    def _choose_target(self, request: RequestState, checkpoints: CheckpointPromotions) -> int:
        """The boundary for which storage is read for a request; 0 for none."""
        if request.last_match.at_load_limit:
            return 0
        keys, first = request.keys, request.last_match.num_found_chunks
        target = checkpoints.find_target(request)
        if not target:
            # Where storage has a longer prefix and no checkpoint, the request saves one.
            known = checkpoints.reach(keys, first, request.last_match.last_boundary)
            if known > max(first, request.last_match.checkpoint_chunk):
                request.last_match.junction_chunk = known
            return 0
        request.last_match.target_chunk = target
        has_next = (tier for tier in self._tiers if first < target and tier.records.knows(keys[first]))
        tier = next(has_next, self._tiers[0])
        if not self._costs.prefers_promotion(tier.tier_id, *self._target_estimates(request, checkpoints)):
            self._counts.num_skipped_promotions += 1
            request.last_match.target_chunk = 0
        return request.last_match.target_chunk

    def _estimates(self, request: RequestState) -> tuple[float | None, float | None]:
        """Seconds to read what the tiers have after the chunks that a match found, and to compute it."""
        if self._checkpoints is not None and request.last_match.target_chunk:
            return self._target_estimates(request, self._checkpoints)
        first = request.last_match.num_found_chunks
        end, load_s = self.estimate(request.keys, first, len(request.keys))
        return load_s, self._costs.recompute_s(first * self._chunk_tokens, end * self._chunk_tokens)

    def _target_estimates(
        self, request: RequestState, checkpoints: CheckpointPromotions
    ) -> tuple[float | None, float | None]:
        """Seconds to read all that a request lacks up to its target, and to compute it."""
        keys, target = request.keys, request.last_match.target_chunk
        _, chunks_s = self.estimate(keys, request.last_match.num_found_chunks, target)
        pieces_s = checkpoints.read_s(keys, target)
        load_s = None if chunks_s is None or pieces_s is None else chunks_s + pieces_s
        return load_s, self._costs.recompute_s(
            request.last_match.checkpoint_chunk * self._chunk_tokens, target * self._chunk_tokens
        )

    def promotes_target(self, request: RequestState) -> bool:
        """Whether the pieces of a request's target are being read."""
        end = request.last_match.target_chunk
        return bool(end) and any(tier.reads.promotes_checkpoint(request.keys[end - 1]) for tier in self._tiers)

    def num_reachable_tokens(self, request: RequestState) -> int:
        """Tokens at the beginning of a prompt that the host tier and storage have, as far as it is known.

        After a lookup of it in the host tier.
        """
        if not self._tiers:
            return 0
        if self._checkpoints is not None:
            return self._checkpoints.find_target(request) * self._chunk_tokens
        end, _ = self.estimate(request.keys, request.last_match.num_found_chunks, len(request.keys))
        return end * self._chunk_tokens

    def look_up(self, request: RequestState) -> None:
        """Has the nearest shared tier asked for the chunks after those known here; see `LookupPlanner.ask`."""
        tier = next((tier for tier in self._tiers if tier.records.is_shared), None)
        if tier is None:
            return
        tier.lookups.ask(request)
        if (
            self._checkpoints is not None
            and request.arrival.awaited_lookup is None
            and not request.last_match.at_load_limit
        ):
            self._look_up_checkpoints(request, tier, self._checkpoints)

    def _look_up_checkpoints(
        self, request: RequestState, tier: StoragePlanner, checkpoints: CheckpointPromotions
    ) -> None:
        """Has the tier asked for the last checkpoints of what is known of a prompt, once for each length."""
        first = max(request.last_match.checkpoint_chunk, request.last_match.target_chunk)
        end = checkpoints.reach(request.keys, request.last_match.num_found_chunks, request.last_match.last_boundary)
        if end > max(first, request.arrival.num_asked_boundaries):
            request.arrival.num_asked_boundaries = end
            asked = checkpoints.unknown_records(request.keys, first, end, tier)
            if asked:
                tier.lookups.ask_pieces(request, asked, first=first, end=end)

    def wait_s(self, request: RequestState, otherwise_s: float) -> float:
        """How long a request waits for the PENDING chunk after those found; `otherwise_s` if no tier is read for it."""
        key = request.keys[request.last_match.num_found_chunks]
        for tier in self._tiers:
            if key in tier.records.promoting:
                return self.read_wait_s(request)
        return otherwise_s

    def read_wait_s(self, request: RequestState) -> float:
        """How long a request waits for what is being read: not longer than computing takes, where that is known.

        Once for all that the tiers have of the request together, or for what it lacks up to its target.
        """
        wait_s = request.arrival.storage_wait_s
        if wait_s is None:
            estimates = self._estimates(request)
            wait_s = request.arrival.storage_wait_s = self._costs.storage_wait_s(*estimates, default_s=self._wait_s)
        return wait_s

    @property
    def has_plans(self) -> bool:
        """Whether `plan` would plan a job or drop candidates, so that an idle engine should call it."""
        return bool(self._tiers) and any(tier.has_plans for tier in self._tiers)

    def plan(self, now_s: float) -> None:
        """Plans the deletions and the cascades or demotions of the coming step."""
        for tier in self._tiers:
            tier.plan(now_s)

    # Resets and losses.

    def reset(self) -> None:
        """The stored KV is invalid: has all tiers cleared and fails their jobs in flight."""
        for tier in self._tiers:
            tier.reset()

    def adopt(self, worker_id: int, setup: WorkerSetup | None) -> None:
        """A worker has started, for the first time or again, and lists what its tiers have."""
        for i, tier in enumerate(self._tiers):
            if setup is None:
                tier.adopt(worker_id, ())
            else:
                tier.adopt(worker_id, setup.stored_keys[i], is_shared=setup.shares_storage[i])

    def mark_slots_lost(self, first: int, end: int) -> None:
        """Host memory is gone: fails the chunks that jobs read from or write to it."""
        for tier in self._tiers:
            tier.mark_slots_lost(first, end)

    # What a tier, or the host tier, knows of the others.

    def _has(self, key: ChunkKey) -> bool:
        """Whether a chunk is of use in storage, too, so that the host tier loses less by evicting it."""
        for records in self._readable:  # noqa: SIM110 - for each chunk that the host tier evicts
            if records.holds(key):
                return True
        return False

    def estimate(self, keys: Sequence[ChunkKey], first: int, end: int) -> tuple[int, float | None]:
        """How far from `first` on, at most to `end`, the tiers together have a prefix, and seconds to read it.

        The nearest tier that has a chunk counts, with the run of chunks that it has. None if the time is not known.
        """
        num_read: dict[StoragePlanner, int] = {}
        while first < end:
            for tier in self._tiers:
                run_end, num = tier.reads.run(keys, first, end)
                if run_end > first:
                    break
            else:
                break
            first, num_read[tier] = run_end, num_read.get(tier, 0) + num
        total_s = 0.0
        for tier, num in num_read.items():
            seconds = tier.reads.read_s(num)
            if seconds is None:
                return first, None
            total_s += seconds
        return first, total_s

    def note_promoted(self, tier_id: int, chunks: Mapping[ChunkKey, Use]) -> None:
        """Chunks have come from a tier, and are READY: the nearer ones, which do not have them, may take them.

        So may those that take what the host tier evicts.
        """
        for tier in self._tiers:
            if tier.tier_id < tier_id or tier.writes.demotes:
                tier.writes.offer(chunks)

    def is_readable(self, key: ChunkKey) -> bool:
        """Whether a chunk is resident, on its way to a tier, or in one that can be read."""
        return self._index.state(key) is not None or any(tier.may_read(key) for tier in self._tiers)

    # Inside.

    def _ended(self, job: Job) -> None:
        ended = self._tiers[job.wire.tier_id]
        ended.ended(job)
        has_failed = job.kind is JobKind.PROMOTE and bool(job.copy_failed or job.missing)
        if has_failed and not ended.records.is_shared:
            for tier in self._tiers:  # a farther one may have the same
                tier.lookups.look_again()

    def _note_evicted(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
        for tier in self._demoting:
            tier.writes.note_evicted(keys, slots)

    def _note_evicted_checkpoint(self, checkpoint: Checkpoint) -> None:
        for tier in self._demoting:
            tier.writes.note_evicted_checkpoint(checkpoint)

    def _offer_checkpoint(self, checkpoint: Checkpoint) -> None:
        for tier in self._tiers:
            tier.writes.offer_checkpoint(checkpoint)

    # State.

    def add_stats(self, counts: dict[str, Any]) -> None:
        """Adds the counts, gauges and breakers of all tiers to those of a snapshot, which are by name."""
        for tier in self._tiers:
            counts["num_breaker_openings"] += tier.num_breaker_openings
            for name, value in tier.stats().as_dict().items():
                counts[name] += value

    def tier_stats(self) -> tuple[TierStats, ...]:
        """A snapshot of each tier, nearest first."""
        return tuple(tier.stats() for tier in self._tiers)

    def stored_keys(self) -> set[ChunkKey]:
        """Records that any tier has."""
        return set().union(*(tier.stored_keys() for tier in self._tiers))

    def pending(self) -> list[ChunkKey]:
        """Chunks that promotions have made PENDING."""
        return [key for tier in self._tiers for key, _ in tier.reads.pending(pieces=False)]

    def pending_pieces(self) -> set[int]:
        """Slots of pieces of checkpoints that promotions have made PENDING."""
        return {slot for tier in self._tiers for _, slot in tier.reads.pending(pieces=True)}

    def late_slots(self) -> list[int]:
        """Slots that late promotions may still write."""
        return [slot for tier in self._tiers for slot in tier.late_slots()]

    def check_invariants(self) -> None:
        """Raises AssertionError unless the tiers agree with the jobs in flight. For tests."""
        for tier in self._tiers:
            tier.check_invariants()
        pending = self.pending()
        assert len(set(pending)) == len(pending), "two tiers read one chunk"
