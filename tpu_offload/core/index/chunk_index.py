"""The chunk index of the host tier: lookups, pins, saves, eviction and invalidation of chunks.

Three rules hold. A chunk can be looked up only once its save is complete (READY). A pinned chunk is not evicted. And a
chunk that another resident chunk follows is not evicted either, so every resident prefix stays whole. The one exception
is a failed copy: its chunk is removed at once, and later chunks of its prefix may stay resident. Lookups reach them
again when a request saves the missing chunk; otherwise they age and are evicted.

With window groups or states, a prefix can be used up to a checkpoint only (see `checkpoints`). Windows share the slots
of full attention. When these are short, window chunks are evicted if they have more than their share, which is their
part of the chunks that were saved and loaded of late; otherwise chunks of full attention. Chunks that no checkpoint
follows any more go first. States have slots of their own; when these are short, the least recently used checkpoint is
evicted.

No call takes long, however many chunks there are. `clear` starts with new containers, and large losses are worked off a
slice at a time; `tidy`, which is called in every step, finishes both.

This file is long because all calls of the index are here; most are a few lines, and the work is in the other modules
of this package.
"""

import contextlib
import functools
from collections.abc import Callable, Container, Iterable, Sequence
from typing import final

from tpu_offload.core.chunk_table import Discarded
from tpu_offload.core.index.ages import UseAges
from tpu_offload.core.index.changes import ChangeLog, Changes
from tpu_offload.core.index.checkpoints import Checkpoint, CheckpointTable, NewPiece
from tpu_offload.core.index.chunk_states import ChunkState, ChunkStates
from tpu_offload.core.index.eviction import Evictor
from tpu_offload.core.index.lookup import missing_chunks, resident_slots
from tpu_offload.core.index.pool_balance import PoolBalance
from tpu_offload.core.index.prefix_tree import PrefixTree
from tpu_offload.core.index.slots import SlotAllocator, TierSlots, overlaps
from tpu_offload.core.index.vacating import Vacating
from tpu_offload.core.policies import EvictionPolicy, Use
from tpu_offload.types import ChunkKey, Pool

MAX_REMOVED = 256
"""Chunks that one call removes of those lost together; 1 ms, more where prompts of 100,000 chunks break up."""
MAX_FREED = 4096
"""Entries of containers discarded by `clear` that one call frees; 1 ms."""
_CLEARED = Use(-1)  # chunks that survive a `clear` rank as least recently used


@final
class ChunkIndex:
    """Chunk keys to slots. Starts without slots; `grow` adds them as the host pool is allocated.

    Args:
      policy: decides which chunk is evicted. The index owns it from here on.
      record: records what `take_changes` returns.
      window_chunks: per window group, how many chunks cover its window.
      first_slots: by pool, the number of its first slot. With a pool of states, each checkpoint has one.
      balance: with states: is told what is evicted for lack of slots.

    Attributes:
      checkpoints: those of the resident prefixes. What takes slots or needs the chunks, too, are methods of the index:
        `begin_checkpoint`, `use_checkpoint`, `touch_checkpoint`.
    """

    def __init__(
        self,
        policy: EvictionPolicy,
        *,
        record: bool = False,
        window_chunks: Sequence[int] = (),
        first_slots: Sequence[int] = (0,),
        balance: PoolBalance | None = None,
    ) -> None:
        self._policy = policy
        self._tree = PrefixTree()
        self._states = ChunkStates(self._tree)
        self._tier_slots = TierSlots(first_slots)
        self._slots = self._tier_slots.pools[Pool.CHUNKS]
        self._changes = ChangeLog() if record else None
        self.checkpoints = CheckpointTable(
            self._tier_slots,
            window_chunks,
            is_found=lambda key: self.state(key) is ChunkState.READY,
            has_states=len(first_slots) > Pool.STATES,
            changes=self._changes,
        )
        self._balance = balance
        self._ages = UseAges(functools.partial(balance.note_evicted, Pool.CHUNKS)) if balance is not None else None
        self._evictor = Evictor(
            self._tree, self._states, self._slots, changes=self._changes, on_evict=self._note_evicted
        )
        self._vacating = Vacating(self._tree, self._states, self.checkpoints, evict=self._evict)
        self._num_used = [0, 0]  # chunks of full attention and of windows that were saved and loaded of late
        self._lost_slots: list[range] = []  # lookups end there; their chunks are still to be invalidated
        self._discarded = Discarded()
        self._on_evict: Callable[[Sequence[ChunkKey], Sequence[int]], None] | None = None

    def num_slots(self, pool: int) -> int:
        """Usable slots of a pool, occupied or not."""
        return self._tier_slots.pools[pool].num_usable

    @property
    def num_free_slots(self) -> int:
        """Slots that `allocate` hands out without evicting."""
        return len(self._slots.free)

    def pool_of(self, slot: int) -> int:
        """The pool of a slot."""
        return self._tier_slots.pool_of(slot)

    def count_in(self, pool: int, slots: Sequence[int]) -> int:
        """How many of these slots are of a pool."""
        return self._tier_slots.count(slots, pool)

    @property
    def num_requests(self) -> int:
        """With states: requests so far, as ages of evicted entries count them."""
        return self._ages.now if self._ages is not None else 0

    def use_counts(self) -> tuple[int, list[int]]:
        """With states: `num_requests`, and by pool its free slots, in one call because it is hot."""
        assert self._ages is not None
        return self._ages.now, [pool.free.num for pool in self._tier_slots.pools]

    @property
    def num_quarantined_slots(self) -> int:
        """Slots that a late copy may still write."""
        return self._tier_slots.num_quarantined

    @property
    def num_evicted(self) -> int:
        """Chunks evicted so far."""
        return self._evictor.num_evicted

    @property
    def has_changes(self) -> bool:
        """Whether `take_changes` has something to return."""
        return bool(self._changes)

    @property
    def has_lost_slots(self) -> bool:
        """Whether chunks of lost slots are still resident, so that `tidy` will invalidate more."""
        return bool(self._lost_slots)

    @property
    def num_deferred(self) -> int:
        """Work that is left for `tidy`: chunks to remove, and entries to free. For tests."""
        return sum(map(len, self._lost_slots)) + self._states.num_uncovered + len(self._discarded)

    def __len__(self) -> int:
        return len(self._tree)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._tree

    def has_any(self, keys: Sequence[ChunkKey]) -> bool:
        """Whether any of these chunks is resident."""
        return self._tree.has_any(keys)

    def on_evict(self, call: Callable[[Sequence[ChunkKey], Sequence[int]], None]) -> None:
        """Registers the one callback for chunks that a policy evicts, tail first, and the slot of each.

        Their bytes are intact until the next plan is carried out: no copy that was sent before it writes these slots.
        """
        assert self._on_evict is None, "a second callback for evictions"
        self._on_evict = call

    def set_is_stored(self, is_stored: Callable[[ChunkKey], bool]) -> None:
        """The policy may ask whether storage has a chunk, too; see `Residents.is_stored`."""
        self._evictor.is_stored = is_stored

    def on_checkpoints(self, *, ready: Callable[[Checkpoint], None], evict: Callable[[Checkpoint], None]) -> None:
        """Registers the callbacks for checkpoints, see `CheckpointTable`."""
        self.checkpoints.on_ready, self.checkpoints.on_evict = ready, evict

    def has_usable(self, slot: int) -> bool:
        """Whether a slot is usable: its memory is there, and is not about to be given away."""
        return self._tier_slots.has_usable(slot)

    def grow(self, pool: int, num_slots: int) -> None:
        """Raises the number of slots of a pool to `num_slots`; a smaller number changes nothing."""
        slots = self._tier_slots.pools[pool]
        if num_slots > slots.num_usable:
            slots.grow(num_slots)
            if pool == Pool.CHUNKS:
                self._policy.resize(num_slots)

    def shrink(self, pool: int, num_slots: int) -> None:
        """Lowers the number of slots of a pool: a worker has fewer, or memory is to be moved.

        What is in the others has been invalidated, or `vacate` follows. Slots that a pin or an unfinished copy holds
        become unusable when it ends. `grow` adds them again. O(1) after a `clear`.
        """
        slots = self._tier_slots.pools[pool]
        slots.shrink(num_slots)
        if pool == Pool.CHUNKS:
            self._policy.resize(slots.num_usable)

    def vacate(self, pool: int, num_slots: int) -> bool:
        """Evicts what is in slots of a pool from `num_slots` on, after `shrink`: some of it, as much as can be now.

        Returns:
          Whether nothing uses them any more. Until then it is called again in later steps.
        """
        slots = self._tier_slots.pools[pool]
        held = slots.held_from(num_slots)
        if held and pool == Pool.CHUNKS:
            self._vacating.evict_chunks(held)
        elif held:
            self.checkpoints.evict_from(pool, held)
        return _forget_if_vacated(slots, num_slots)

    def state(self, key: ChunkKey) -> ChunkState | None:
        """The chunk's state, None when it is not resident."""
        return self._states.state(key)

    def find(self, keys: Sequence[ChunkKey], first: int = 0) -> list[int]:
        """Slots of the READY chunks of a prefix from chunk `first` on, up to the first that is not READY.

        Looks up a logarithm of the keys, unless chunks of this prefix were lost.
        """
        slots = resident_slots(self._tree, keys, first)
        unready = self._states.unready
        if unready and not unready.isdisjoint(slots):
            del slots[next(i for i, slot in enumerate(slots) if slot in unready) :]
        for lost in self._lost_slots:
            if overlaps(slots, lost.start, lost.stop):
                del slots[next(i for i, slot in enumerate(slots) if slot in lost) :]
        return slots

    def missing(self, keys: Sequence[ChunkKey], first: int, end: int) -> tuple[Sequence[int], int]:
        """Which of the chunks `first` to `end - 1` of a prefix are to be saved: those that are not resident.

        Returns:
          Their indices in `keys`, ascending, and the end of the search: `end`, or the first chunk that is INVALID. That
          one cannot be saved again before its last pin is gone, and no lookup would reach what follows it.
        """
        invalid = self._states.invalid
        if invalid and not invalid.isdisjoint(keys[first:end]):
            end = next(i for i in range(first, end) if keys[i] in invalid)
        if first >= end:
            return (), end
        return missing_chunks(self._tree, keys, first, end), end

    def parent_in(self, slot: int) -> ChunkKey | None:
        """See `PrefixTree.parent_in`; what was in the slot last was evicted by the call that is under way."""
        return self._tree.parent_in(slot)

    def pin(self, keys: Sequence[ChunkKey]) -> None:
        """Pins consecutive chunks of one prefix, and the resident ones before them, until unpinned. O(1).

        Those before may be PENDING: after a failed copy a chunk can be saved again below others that stayed resident.
        The chunks themselves are READY, or pinned by the caller already: a pin may be shortened while chunks under it
        are INVALID.
        """
        self._states.pin(keys[-1])

    def unpin(self, keys: Sequence[ChunkKey], *, sweep: bool = True) -> None:
        """Removes one pin of these keys, or of others with the same last one. O(1).

        INVALID chunks are removed with the last pin that covers them; without `sweep` only when `sweep` is called. That
        costs, while there are any, O(chunks that pins cover) once for all calls before it.
        """
        self._states.unpin(keys[-1])
        if sweep and self._states.invalid:
            self.sweep()

    def sweep(self) -> None:
        """Removes INVALID chunks that no pin covers any more, `MAX_REMOVED` of them at most."""
        self._remove_all(self._states.take_uncovered(MAX_REMOVED))

    def touch(self, use: Use, keys: Sequence[ChunkKey], num_chunks: int) -> None:
        """A request used the first `num_chunks` of `keys`, head first; those that are not resident are skipped."""
        self._policy.touch(use, keys, num_chunks, self._evictor)
        if self._ages is not None:
            for i in range(num_chunks - 1, -1, -1):
                if keys[i] in self._tree:
                    self._ages.use(use, keys[i])
                    break

    def allocate(
        self, use: Use, keys: Sequence[ChunkKey], indices: Sequence[int], *, protected: Container[ChunkKey] = ()
    ) -> list[int]:
        """Gives slots to chunks that are about to be saved, evicting others where it must.

        Args:
          use: the saving request's.
          keys: a prefix, head first.
          indices: the chunks to save, ascending: they are not resident, and those in between are.
          protected: chunks that must not be evicted, nor those before them in their prefixes: the last ones of the
            caller's own. One of them covers the chunk before the first one to save.
        Returns:
          Slots for as many of them as possible, from the first on; those chunks are PENDING now. Evicts exactly the
          chunks that these slots need, and none when there are none.
        """
        if len(indices) > len(self._slots.free):
            self._make_room(len(indices), protected)
        slots = self._slots.free.take(len(indices))
        num_chunks = len(slots)
        if not num_chunks:
            return slots
        self._count_used(0, num_chunks)
        if self._discarded:  # new chunks take no more memory than discarded ones give back
            self._discarded.free(4 * num_chunks)
        if (highest := slots[0] if num_chunks == 1 else max(slots)) >= len(self._tree.keys):
            self._tree.reserve(highest + 1, max_slots=self._slots.num_known)
        self._states.save(slots)
        first = indices[0]
        try:
            if indices[num_chunks - 1] - first == num_chunks - 1:
                new = [keys[first]] if num_chunks == 1 else list(keys[first : first + num_chunks])
                parent = keys[first - 1] if first else None
                self._tree.insert(parent, new, slots)
                self._policy.insert(use, new, parent, first)
            else:
                self._insert_with_holes(use, keys, indices[:num_chunks], slots)
        except BaseException:  # the policy may be the user's own
            self._take_back([keys[i] for i in indices[:num_chunks]], slots)
            raise
        if self._ages is not None:
            self._ages.use(use, keys[indices[num_chunks - 1]])
        return slots

    def complete(
        self, keys: Sequence[ChunkKey], slots: Sequence[int], *, success: bool, quarantine: bool = False
    ) -> None:
        """Ends the save of PENDING chunks, in the order of their allocation: publishes or removes them.

        Args:
          keys: the chunks.
          slots: the slot of each.
          success: every worker has their bytes, so they become READY.
          quarantine: without success: late copies may still write their slots, which are not handed out before
            `end_quarantine`.
        """
        assert slots[0] in self._states.unready, "only a pending chunk completes"
        assert self._tree.slot_of.get(keys[0]) == slots[0], "a chunk completes in its own slot"
        if success:
            self._states.publish(slots)
            self.checkpoints.publish(keys)
            if self._changes is not None:
                self._changes.add(keys, found=True)
            return
        if quarantine:
            self._tier_slots.quarantine(slots)
        try:
            self._remove_all(reversed(keys))  # tails first, which leaves few orphans
        finally:
            if self._states.invalid:
                self._states.coverage_changed()
                self.sweep()

    # Checkpoints.

    def begin_checkpoint(
        self,
        keys: Sequence[ChunkKey],
        end: int,
        *,
        max_chunks: int,
        before: Checkpoint | None = None,
        rolls: bool = False,
    ) -> tuple[Checkpoint, list[NewPiece]] | None:
        """Begins the save of the checkpoint after `end` resident chunks of a prefix; see `CheckpointTable.begin`."""

        def take(needed: Sequence[int]) -> list[int]:
            return self._take(needed, protected=(keys[end - 1],))

        begun = self.checkpoints.begin(keys, end, max_chunks=max_chunks, take=take, before=before, rolls=rolls)
        if begun is not None:
            self._count_used(1, self._tier_slots.count([piece.slot for piece in begun[1]], Pool.CHUNKS))
            self._note_used(begun[0])
        return begun

    def use_checkpoint(self, checkpoint: Checkpoint, num_chunks: int) -> None:
        """A request loads a checkpoint, and `num_chunks` chunks of full attention before it."""
        resident = self.checkpoints.adopt(checkpoint)
        resident.was_loaded = True
        self.checkpoints.settle(resident)
        self.touch_checkpoint(resident)
        self._count_used(0, num_chunks)
        self._count_used(1, len(checkpoint.slots) - self.checkpoints.has_states)

    def touch_checkpoint(self, checkpoint: Checkpoint) -> None:
        """A request used this checkpoint, or would have saved it."""
        self.checkpoints.touch(checkpoint)
        self._note_used(checkpoint)

    def end_quarantine(self, slots: Sequence[int]) -> None:
        """No copy will write these slots any more: they are free."""
        self._tier_slots.end_quarantine(slots)

    def invalidate_slots(self, first: int, end: int) -> list[ChunkKey]:
        """The bytes in slots `first` to `end - 1` are lost: lookups find their chunks no more.

        Returns:
          The chunks that were invalidated, as by `invalidate`. Of many slots these are some; `tidy` returns the others.
          The caller handles PENDING ones.
        """
        slots = range(first, min(end, len(self._tree.keys)))
        if slots:
            self._lost_slots.append(slots)
        self.checkpoints.lose(first, end)
        return self._invalidate_lost()

    def invalidate(self, keys: Iterable[ChunkKey]) -> list[ChunkKey]:
        """Removes READY chunks from the lookups for good. Those that a pin covers keep their slots until unpinned.

        Returns:
          The chunks that were invalidated; the others were not resident, PENDING or INVALID already.
        """
        invalidated = [key for key in keys if self.state(key) is ChunkState.READY]
        covered = self._states.covered() if invalidated and self._states.pins else ()
        if self._changes is not None:
            self._changes.add(invalidated, found=False)
        uncovered: list[ChunkKey] = []
        for key in invalidated:
            slot = self._tree.slot_of[key]
            if slot in covered:
                self._states.invalidate(key, slot)
            else:
                uncovered.append(key)
        self._remove_all(uncovered)
        return invalidated

    def clear(self) -> None:
        """Invalidates every READY chunk. O(chunks that pins cover or that are not READY), however many are resident.

        All slots but those of these chunks are free at once, and low ones are handed out first again.
        """
        kept = self._states.clear()
        if self._changes is not None:
            self._discarded.add(self._changes.clear())
        ages = self._ages.clear() if self._ages is not None else ()
        for container in (*self._tree.clear(kept), *self.checkpoints.clear(), *ages):
            self._discarded.add(container)
        self._lost_slots = []
        self._tier_slots.clear(kept | self.checkpoints.occupied())
        try:
            for container in self._policy.clear():  # it may raise: the slots are free by then
                self._discarded.add(container)
        finally:
            for keys, parent, depth in self._tree.paths():
                self._policy.insert(_CLEARED, keys, parent, depth)

    def tidy(self) -> list[ChunkKey]:
        """Continues the work that large losses and `clear` deferred, for 3 ms at most.

        Returns:
          The chunks that were invalidated.
        """
        if self._discarded:
            self._discarded.free(MAX_FREED)
        if self._states.invalid:
            self.sweep()
        return self._invalidate_lost() if self._lost_slots else []

    def take_changes(self, max_keys: int | None = None) -> list[Changes]:
        """What lookups began and ceased to find since the last call, in order.

        Args:
          max_keys: how many chunks and pieces; the next call returns the rest, if there are more.
        """
        return [] if self._changes is None else self._changes.take(max_keys)

    def check_invariants(self) -> None:
        """Raises AssertionError unless tree, states, slots and policy agree. O(chunks + slots)."""
        self._tree.check_invariants()
        self._states.check_invariants()
        self.checkpoints.check_invariants()
        self._tier_slots.check_invariants([*self._tree.slot_of.values(), *self.checkpoints.occupied()])
        self._policy.check_invariants(self._tree.leaves(), self._evictor)
        if self._ages is not None:
            self._ages.check_invariants(self._tree.slot_of)

    def check_holds(
        self, *, pins: dict[ChunkKey, int], pending: set[ChunkKey], quarantined: Iterable[int] | None = None
    ) -> None:
        """Raises AssertionError unless pins end at exactly these chunks, this often, and these are PENDING.

        Nor if the slots in quarantine are not exactly `quarantined`, unless that is None.
        """
        assert self._states.pins == pins
        assert self._states.pending() == pending
        if quarantined is not None:
            assert self._tier_slots.quarantined == set(quarantined), "a quarantined slot that no copy may write"

    def _take(self, needed: Sequence[int], protected: Container[ChunkKey]) -> list[int]:
        """Takes this many free slots of each pool, evicting where it must; none if there are fewer.

        Never evicts for more than half of the slots of chunks: that would mostly be in vain.
        """
        pools = self._tier_slots.pools
        if any(num > slots.num_usable for num, slots in zip(needed, pools, strict=True)):
            return []
        num_chunks = needed[0]
        if num_chunks > len(self._slots.free) and num_chunks <= self._slots.num_usable // 2:
            self._make_room(num_chunks, protected)
        if num_chunks > len(self._slots.free):
            return []
        for pool in range(1, len(pools)):
            if not self._evict_pieces(pool, needed[pool], protected):
                return []
        return [slot for num, slots in zip(needed, pools, strict=True) for slot in slots.free.take(num)]

    def _evict_pieces(self, pool: int, num_slots: int, protected: Container[ChunkKey]) -> bool:
        """Evicts checkpoints until this many slots of another pool than that of chunks are free; whether they are."""
        free = self._tier_slots.pools[pool].free
        while len(free) < num_slots and (checkpoint := self.checkpoints.evict_one(protected)) is not None:
            if self._balance is not None and self._ages is not None:
                self._balance.note_evicted(Pool(pool), 1, max(0, self._ages.now - checkpoint.last_use))
        return len(free) >= num_slots

    def _make_room(self, num_slots: int, protected: Container[ChunkKey]) -> None:
        """Evicts until this many slots are free, or nothing more can be evicted."""
        num_window = self.checkpoints.num_window_chunks
        used = self._num_used
        if num_window and num_window * (used[0] + used[1]) > self._slots.num_usable * used[1]:
            self._evict_checkpoints(num_slots, protected)
        if num_slots > len(self._slots.free):
            self._evict_chunks(num_slots, protected)
            if num_window:
                self._evict_checkpoints(num_slots, protected)

    def _evict_chunks(self, num_slots: int, protected: Container[ChunkKey]) -> None:
        """Has the policy evict until this many slots are free, or nothing more can be evicted."""
        self._evictor.protected = protected
        num_before = -1
        # More than once only while slots are vacated: those of some evicted chunks are not usable.
        while (num_short := num_slots - len(self._slots.free)) > 0 and self._evictor.num_evicted > num_before:
            num_before = self._evictor.num_evicted
            self._policy.evict(num_short, self._evictor)
        self._evictor.protected = ()

    def _evict_checkpoints(self, num_slots: int, protected: Container[ChunkKey]) -> None:
        """Evicts checkpoints, and the chunks that no request can use without them, until this many slots are free."""
        free = self._slots.free
        while len(free) < num_slots and (checkpoint := self.checkpoints.evict_one(protected)) is not None:
            key: ChunkKey | None = checkpoint.key
            while key is not None and len(free) < num_slots and key not in protected and self._is_useless(key):
                if self._on_evict is not None and not self._lost_slots:
                    self._on_evict((key,), (self._tree.slot_of[key],))
                key = self._evict(key)

    def _is_useless(self, key: ChunkKey) -> bool:
        """Whether a chunk can be evicted, and neither another chunk nor a checkpoint follows it."""
        slot = self._tree.slot_of.get(key)
        return (
            slot is not None
            and self._evictor.is_leaf(key)
            and key not in self._states.pins
            and slot not in self._states.unready
            and key not in self.checkpoints
        )

    def _evict(self, key: ChunkKey) -> ChunkKey | None:
        """Evicts one chunk for another reason than the policy's; returns the one before it, if that is resident."""
        slot, parent = self._tree.remove(key)
        self._slots.free_first((slot,))
        self._evictor.num_evicted += 1
        self.checkpoints.evict_at((key,), keeps_memory=False)  # while slots are vacated; else there is none
        if self._ages is not None:
            self._ages.removed((key,), parent)
        if self._changes is not None:
            self._changes.add((key,), found=False)
        self._policy.remove(key, parent)  # it may raise: all else is done
        return parent

    def _note_evicted(self, keys: Sequence[ChunkKey], slots: Sequence[int], before: ChunkKey | None) -> None:
        """Chunks were evicted, tail first, by the policy; `before` is the resident one before them."""
        if self._on_evict is not None and not self._lost_slots:  # else they may be among the lost ones
            self._on_evict(keys, slots)
        self.checkpoints.evict_at(keys)
        if self._ages is not None:
            self._ages.evicted(keys, before)

    def _note_used(self, checkpoint: Checkpoint) -> None:
        """A request uses a checkpoint."""
        if self._ages is not None:
            checkpoint.last_use = self._ages.now

    def _count_used(self, kind: int, num_chunks: int) -> None:
        """Counts chunks of full attention (0) or of windows (1) that were saved or loaded; earlier ones count less."""
        used = self._num_used
        used[kind] += num_chunks
        if used[0] + used[1] > 4 * self._slots.num_usable:
            used[:] = used[0] // 2, used[1] // 2

    def _insert_with_holes(
        self, use: Use, keys: Sequence[ChunkKey], indices: Sequence[int], slots: Sequence[int]
    ) -> None:
        """Inserts the chunks `indices` of a prefix, which are not consecutive."""
        starts = [i for i, index in enumerate(indices) if i == 0 or index != indices[i - 1] + 1]
        for start, end in zip(starts, [*starts[1:], len(indices)], strict=True):
            first = indices[start]
            parent = keys[first - 1] if first else None
            new = [keys[i] for i in indices[start:end]]
            self._tree.insert(parent, new, slots[start:end])
            self._policy.insert(use, new, parent, first)

    def _take_back(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
        """The policy raised when chunks were inserted: no job will write them, so they are not resident.

        The policy is told of those that it accepted; what it has recorded of the others is left to it.
        """
        for key, slot in reversed(list(zip(keys, slots, strict=True))):
            parent = self._tree.remove(key)[1] if self._tree.slot_of.get(key) == slot else None
            self._states.removed(slot)
            self._slots.release(slot)
            with contextlib.suppress(Exception):  # it may not know the chunk
                self._policy.remove(key, parent)

    def _remove_all(self, keys: Iterable[ChunkKey]) -> None:
        """Removes all of these, also if the policy raises for one: no job will end the others."""
        error: Exception | None = None
        for key in keys:
            try:
                self._remove(key)
            except Exception as e:
                error = error or e
        if error is not None:
            raise error

    def _remove(self, key: ChunkKey) -> None:
        """Removes a chunk whose bytes are lost or never arrived."""
        slot, parent = self._tree.remove(key)
        self._states.removed(slot)
        self._slots.release(slot)
        if self._ages is not None:
            self._ages.removed((key,), parent)
        checkpoint = self.checkpoints.get(key)
        if checkpoint is not None:
            self.checkpoints.drop(checkpoint)
        self._policy.remove(key, parent)  # it may raise: all else is done

    def _invalidate_lost(self) -> list[ChunkKey]:
        """Invalidates chunks in lost slots, `MAX_REMOVED` of them at most."""
        num_left, keys = MAX_REMOVED, []
        column, slot_of = self._tree.keys, self._tree.slot_of
        while self._lost_slots and num_left:
            slots = self._lost_slots.pop()
            if len(slots) > num_left:
                self._lost_slots.append(slots[:-num_left])
                slots = slots[-num_left:]
            num_left -= len(slots)
            # Mostly tails before heads, which leaves few orphans.
            found = [(column[slot], slot) for slot in reversed(slots)]
            keys += [key for key, slot in found if key is not None and slot_of.get(key) == slot]
        return self.invalidate(keys)


def _forget_if_vacated(slots: SlotAllocator, num_slots: int) -> bool:
    """Whether nothing holds the slots from the `num_slots`-th on; then later calls do not look at them any more."""
    if slots.held_from(num_slots):
        return False
    slots.forget_from(num_slots)
    return True
