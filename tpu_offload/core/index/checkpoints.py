"""Checkpoints: what a request needs beside the chunks of full attention to go on after a chunk of its prefix.

Layers with a sliding window need the last blocks before a token only, and layers with a state the state after that
token. So neither is saved for all of a prefix, but at chunk boundaries where a request is likely to continue. A
checkpoint has, for each window group, the chunks that cover the window before its boundary; and if there is a group of
states, the row after its boundary. These are the checkpoint's pieces. Checkpoints of near boundaries share what they
have in common: a window chunk is stored once, in a slot of the host tier, and freed with the last checkpoint that
contains it. A state is of one boundary only.

A checkpoint is READY once all of its pieces are saved. Lookups also find boundaries for which no checkpoint was saved
but whose pieces are there (see `pieces`); a load makes a checkpoint of what it has found. A checkpoint is dropped as a
whole, because a part of it is of no use at its boundary: the least recently used one when slots are short, one whose
bytes are lost or never arrived, and the one at a full-attention chunk that is removed.

This file is long because saves, lookups, evictions and losses change the same table, and keep its parts consistent.
"""

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Sequence
from typing import NamedTuple, final

from tpu_offload.core.chunk_table import Entries
from tpu_offload.core.index.changes import ChangeLog
from tpu_offload.core.index.pieces import PieceTable
from tpu_offload.core.index.slots import TierSlots
from tpu_offload.piece_keys import PieceKey, chunk_of, piece_key
from tpu_offload.types import ChunkKey, Pool

_SCANNED_AT_ONCE = 512  # boundaries
_MAX_PIECES = 16_384  # pieces that one call of `evict_from` looks at; 1 ms


class NewPiece(NamedTuple):
    """A piece of a checkpoint to be saved: a chunk of a window, or a state.

    Attributes:
      group: its window group, 0 for the first; states come after all windows.
      number: the number in the prefix of the full-attention chunk of the same tokens, of a state the last one before.
      slot: where its bytes go.
    """

    group: int
    number: int
    slot: int


class NewPieceKey(NamedTuple):
    """A piece that a checkpoint would need and that is not resident.

    Attributes:
      group: as in `NewPiece`.
      key: its name.
    """

    group: int
    key: PieceKey


@final
class Checkpoint:
    """The pieces of one boundary.

    Attributes:
      key: the last chunk of full attention before the boundary.
      slots: slots of the pieces, group after group, in token order.
      num_pieces: how many of them each window group has; and, with states, 1.
      num_pending: those that are being saved.
      num_holds: loads that read it, or may.
      superseded: an earlier checkpoint of the same request, which is dropped when this one can be used; None if it
        stays.
      was_loaded: whether a request has loaded it.
      rolls: whether its request will probably supersede it soon.
      was_announced: whether it was announced as READY (see `CheckpointTable`).
      last_use: the last request that used it; the index counts them.
    """

    __slots__ = (
        "key", "last_use", "num_holds", "num_pending", "num_pieces", "rolls", "slots", "superseded", "was_announced",
        "was_loaded",
    )  # fmt: skip

    def __init__(
        self, key: ChunkKey, slots: tuple[int, ...], num_pieces: tuple[int, ...], *, rolls: bool = False
    ) -> None:
        self.key = key
        self.rolls = rolls
        self.was_announced = False
        self.slots = slots
        self.num_pieces = num_pieces
        self.num_pending = self.num_holds = 0
        self.superseded: Checkpoint | None = None
        self.was_loaded = False
        self.last_use = 0


@final
class CheckpointTable:
    """All checkpoints, by the chunk before their boundary, least recently used first.

    Args:
      slots: takes back the slots of pieces.
      window_chunks: per window group, how many chunks cover its window.
      is_found: whether lookups find this chunk of full attention.
      has_states: whether each checkpoint has a state.
      changes: records which pieces lookups begin and cease to find, if there is one.

    Attributes:
      has_states: likewise.
      num_evicted: checkpoints evicted so far, by themselves or with their prefix.
      on_ready: called once with each checkpoint that lookups can find, if it will probably not be superseded soon.
      on_evict: called with each READY one that is about to be evicted, unless its memory is about to be given away.
    """

    def __init__(
        self,
        slots: TierSlots,
        window_chunks: Sequence[int],
        *,
        is_found: Callable[[ChunkKey], bool],
        has_states: bool = False,
        changes: ChangeLog | None = None,
    ) -> None:
        self._slots = slots
        self._is_found = is_found
        self.has_states = has_states
        self._table: OrderedDict[ChunkKey, Checkpoint] = OrderedDict()
        self._pending: dict[int, list[Checkpoint]] = {}  # by slot that is being written
        self._pieces = PieceTable(
            slots,
            (*window_chunks, *[1] * has_states),
            has_states=has_states,
            pending=self._pending,
            changes=changes,
        )
        self._held: set[Checkpoint] = set()
        self._unscanned: list[Checkpoint] = []  # by `evict_from`
        self.num_evicted = 0
        self.on_ready: Callable[[Checkpoint], None] | None = None
        self.on_evict: Callable[[Checkpoint], None] | None = None

    def __len__(self) -> int:
        return len(self._table)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._table

    @property
    def num_window_chunks(self) -> int:
        """Slots that window chunks take."""
        return self._pieces.num_slots[Pool.CHUNKS]

    @property
    def num_states(self) -> int:
        """Slots that states take."""
        return self._pieces.num_slots[Pool.STATES] if self.has_states else 0

    def occupied(self) -> set[int]:
        """Slots that pieces take, of either kind. O(their number)."""
        return set(self._pieces.key_of)

    def find(self, keys: Sequence[ChunkKey], first: int, end: int) -> tuple[Checkpoint | None, int, bool]:
        """The last boundary after more than `first` chunks of a prefix, and `end` at most, whose pieces are all READY.

        Returns:
          Its checkpoint, None if there is no such boundary; the boundary, in chunks; and whether a checkpoint at a
          later one, or any if there is none, is being saved. The caller holds the checkpoint before anything changes.
        """
        if end > first:  # nearly always the last one, and keys take time to make
            checkpoint = self._table.get(keys[end - 1])
            if checkpoint is not None and self._is_ready(checkpoint):
                return checkpoint, end, False
        found, boundary, pending_at = self._find_saved(keys, first, end)
        if self._pieces.may_cover:
            covered = self._pieces.last_covered(keys, boundary, end)
            if covered > boundary:
                found, boundary = self._covered(keys, covered), covered
        return found, boundary, pending_at > boundary

    def _find_saved(self, keys: Sequence[ChunkKey], first: int, end: int) -> tuple[Checkpoint | None, int, int]:
        """The last READY checkpoint that was saved, its boundary, and that of the last one which is being saved."""
        table, pending_at = self._table, 0
        while table and end > first:
            start = max(first, end - _SCANNED_AT_ONCE)
            if not table.keys().isdisjoint(keys[start:end]):
                for boundary in range(end, start, -1):
                    checkpoint = table.get(keys[boundary - 1])
                    if checkpoint is None:
                        continue
                    if self._pieces.are_lost(checkpoint.slots):
                        if self._pieces.may_cover:  # the caller looks for all such boundaries
                            continue
                        checkpoint = self._mended(checkpoint, keys, boundary)
                    if checkpoint is not None and not checkpoint.num_pending:
                        return checkpoint, boundary, pending_at
                    if checkpoint is not None:
                        pending_at = max(pending_at, boundary)
            end = start
        return None, first, pending_at

    def _covered(self, keys: Sequence[ChunkKey], end: int) -> Checkpoint | None:
        """A checkpoint, not resident, of the pieces that are there for a boundary; None unless all are READY."""
        slots = self._pieces.ready_slots(keys, end)
        return None if slots is None else Checkpoint(keys[end - 1], tuple(slots), self.num_pieces(end))

    def _mended(self, lost: Checkpoint, keys: Sequence[ChunkKey], end: int) -> Checkpoint | None:
        """What takes the place of a checkpoint with lost pieces: one of the pieces that were saved again since.

        None, and it is dropped, unless all are READY: what is left of it covers no other boundary.
        """
        mended = self._covered(keys, end)
        if mended is None:
            self.drop(lost)
        else:
            mended.was_announced, mended.last_use = lost.was_announced, lost.last_use
            self._pieces.ref(mended.slots)
            self._table[lost.key] = mended
            self._unref(lost)
        return mended

    def _unref(self, checkpoint: Checkpoint) -> None:
        """It is not resident any more: its pieces are not needed, unless something holds it."""
        if not checkpoint.num_holds:
            self._pieces.unref(checkpoint.slots)

    def _is_ready(self, checkpoint: Checkpoint) -> bool:
        return not checkpoint.num_pending and not self._pieces.are_lost(checkpoint.slots)

    def get(self, key: ChunkKey) -> Checkpoint | None:
        """The checkpoint after this chunk, READY or being saved; None if there is none that can become READY."""
        checkpoint = self._table.get(key)
        if checkpoint is not None and self._pieces.are_lost(checkpoint.slots):
            self.drop(checkpoint)
            return None
        return checkpoint

    def num_pieces(self, end: int) -> tuple[int, ...]:
        """How many pieces a checkpoint after `end` chunks has in each window group, and of states."""
        return self._pieces.num_pieces(end)

    def has_piece(self, piece: PieceKey) -> bool:
        """Whether a piece is resident, or being saved."""
        return self._pieces.has(piece)

    def missing_pieces(self, keys: Sequence[ChunkKey], end: int) -> list[NewPieceKey]:
        """What has to be saved for the checkpoint after `end` chunks of a prefix; as `begin` says."""
        num_pieces = self.num_pieces(end)
        known = self._known_slots(keys, end, num_pieces, None)
        pieces = [(group, i) for group, num in enumerate(num_pieces) for i in range(end - num, end)]
        return [
            NewPieceKey(group, piece_key(keys[i], group))
            for (group, i), slot in zip(pieces, known, strict=True)
            if slot is None
        ]

    def pieces_of(self, checkpoint: Checkpoint) -> list[tuple[PieceKey, int]]:
        """The names and the slots of a checkpoint's pieces, while it is resident or held."""
        return [(self._pieces.key_of[slot], slot) for slot in checkpoint.slots]

    def begin(
        self,
        keys: Sequence[ChunkKey],
        end: int,
        *,
        max_chunks: int,
        take: Callable[[Sequence[int]], list[int]],
        before: Checkpoint | None = None,
        rolls: bool = False,
    ) -> tuple[Checkpoint, list[NewPiece]] | None:
        """Begins the save of the checkpoint after `end` chunks of a prefix. There is none yet.

        Args:
          keys: the prefix.
          end: the boundary.
          max_chunks: how many window chunks may be saved for it.
          take: takes this many free slots of each pool, in the order of pools; none if there are fewer of any. It may
            evict other checkpoints.
          before: an earlier checkpoint of this prefix; if it is the one a chunk before, the search is short.
          rolls: see `Checkpoint`.
        Returns:
          The checkpoint, and what has to be saved for it. None, and no checkpoint has begun, if more must be saved or
          there are too few slots.
        """
        key, num_pieces = keys[end - 1], self.num_pieces(end)
        assert key not in self._table, "a checkpoint is saved twice"
        known = self._known_slots(keys, end, num_pieces, before)
        shared = [slot for slot in known if slot is not None]
        num_new = len(known) - len(shared)
        num_states = int(self.has_states and known[-1] is None)
        if num_new - num_states > max_chunks:
            return None
        self._pieces.ref(shared)  # before others are evicted
        try:
            needed = (num_new - num_states, num_states) if self.has_states else (num_new,)
            free = take(needed) if num_new else []
        except BaseException:  # an eviction policy may be the engine's own
            self._pieces.unref(shared)
            raise
        if len(free) < num_new:
            self._pieces.unref(shared)
            return None
        new = iter(free)
        slots = tuple([next(new) if slot is None else slot for slot in known])
        checkpoint = self._table[key] = Checkpoint(key, slots, num_pieces, rolls=rolls)
        saved: list[NewPiece] = []
        if free:
            pieces = [(group, i) for group, num in enumerate(num_pieces) for i in range(end - num, end)]
            saved = [NewPiece(*pieces[at], slots[at]) for at, slot in enumerate(known) if slot is None]
            self._pieces.add([piece_key(keys[number], group) for group, number, _ in saved], free)
            self._pending |= {slot: [] for slot in free}
        if self._pending:
            for slot in slots:
                if slot in self._pending:
                    self._pending[slot].append(checkpoint)
                    checkpoint.num_pending += 1
        self._announce(checkpoint)
        return checkpoint, saved

    def complete(self, slots: Sequence[int], *, success: bool, quarantine: bool = False) -> None:
        """Ends the save of pieces.

        Args:
          slots: theirs.
          success: every worker has their bytes. Otherwise all checkpoints that contain one of them are dropped.
          quarantine: without success: late copies may still write these slots.
        """
        if quarantine and not success:
            self._slots.quarantine(slots)
        self._pieces.saved(slots, success=success)
        for slot in slots:
            for checkpoint in self._pending.pop(slot):
                checkpoint.num_pending -= 1
                if not success:
                    self.drop(checkpoint)
                else:
                    self._drop_superseded(checkpoint)
                    self._announce(checkpoint)
        self._pieces.unref(slots)

    def settle(self, checkpoint: Checkpoint) -> None:
        """It will not be superseded any more: its request has ended, or another has loaded it."""
        checkpoint.rolls = False
        self._announce(checkpoint)

    def supersede(self, earlier: Checkpoint, *, by: Checkpoint) -> None:
        """Drops an earlier checkpoint of the same request once a later one can be used, unless a request loaded it.

        That is when the later one and the chunk before its boundary are READY: the save of either may fail. If another
        waits for the earlier one in the same way, it is dropped with it.
        """
        by.superseded, one = earlier, by
        while (last := one.superseded) is not None:
            if self._is_resident(last):
                one = last
            else:  # its save has failed; a long request could leave many
                one.superseded = last.superseded
        self._drop_superseded(by)

    def publish(self, keys: Iterable[ChunkKey]) -> None:
        """These chunks of full attention are READY: their checkpoints may be of use now."""
        table = self._table
        if table:
            for key in keys:
                if key in table:
                    self._drop_superseded(table[key])
                    self._announce(table[key])

    def touch(self, checkpoint: Checkpoint) -> None:
        """A request used it."""
        if self._is_resident(checkpoint):
            self._table.move_to_end(checkpoint.key)

    def hold(self, checkpoint: Checkpoint) -> None:
        """A load may read it: its slots keep their contents until `release`, even if it is dropped."""
        if not checkpoint.num_holds and not self._is_resident(checkpoint):  # `find` has made it
            self._pieces.ref(checkpoint.slots)
        checkpoint.num_holds += 1
        self._held.add(checkpoint)

    def release(self, checkpoint: Checkpoint) -> None:
        """Ends one hold."""
        assert checkpoint.num_holds > 0, "released more often than held"
        checkpoint.num_holds -= 1
        if not checkpoint.num_holds:
            self._held.remove(checkpoint)
            if not self._is_resident(checkpoint):
                self._pieces.unref(checkpoint.slots)

    def drop(self, checkpoint: Checkpoint) -> None:
        """Frees the slots of its pieces that no other checkpoint needs, once nothing holds it."""
        if not self._is_resident(checkpoint):
            return
        del self._table[checkpoint.key]
        self._unref(checkpoint)
        if not self._pieces.may_cover and checkpoint.slots[-1] not in self._pending:
            # Otherwise lookups find its pieces as long as they are there, and a save announces what it has written.
            self._pieces.hide(checkpoint.slots[-1])

    def adopt(self, checkpoint: Checkpoint) -> Checkpoint:
        """A load uses a checkpoint that `find` has made, and something holds it: it stays, as if it had been saved.

        Returns:
          The one that is resident at its boundary: this one, or one whose save has begun since.
        """
        key = checkpoint.key
        if self._table.get(key) is checkpoint or not self._is_found(key):
            return checkpoint
        resident = self.get(key)
        if resident is None:
            resident = self._table[key] = checkpoint
        return resident

    def evict_at(self, keys: Iterable[ChunkKey], *, keeps_memory: bool = True) -> None:
        """Drops the checkpoints after these chunks, which are being evicted.

        Args:
          keys: the chunks.
          keeps_memory: whether what they hold can still be read; see `on_evict`.
        """
        table = self._table
        if table:
            for key in keys:
                if key in table:
                    self._evict(table[key], keeps_memory=keeps_memory)

    def evict_one(self, protected: Container[ChunkKey]) -> Checkpoint | None:
        """Drops the least recently used checkpoint that nothing holds, saves or protects; None if there is none."""
        for checkpoint in self._table.values():
            if not (checkpoint.num_holds or checkpoint.num_pending or checkpoint.key in protected):
                self._evict(checkpoint, keeps_memory=True)
                return checkpoint
        return None

    def evict_from(self, pool: int, slots: range) -> None:
        """Drops checkpoints with a piece in these slots of a pool, but for those that something holds or saves.

        All of them if these are slots of states, in O(slots). Of slots of chunks some: as many pieces as take 1 ms are
        looked at, and others in later calls, around and around.
        """
        for checkpoint in self._in_chunks(slots) if pool == Pool.CHUNKS else self._in_states(slots):
            if not (checkpoint.num_holds or checkpoint.num_pending):
                self._evict(checkpoint, keeps_memory=False)

    def _in_states(self, slots: range) -> list[Checkpoint]:
        """Resident checkpoints whose state, the last piece, is in these slots. It has the name of their key."""
        names = [self._pieces.key_of[slot] for slot in slots if slot in self._pieces.key_of]
        found = [self._table.get(chunk_of(name)) for name in names]
        return [checkpoint for checkpoint in found if checkpoint is not None and checkpoint.slots[-1] in slots]

    def _in_chunks(self, slots: range) -> list[Checkpoint]:
        """Some of the resident checkpoints with a window chunk in these slots."""
        if not self.num_window_chunks:
            return []
        found, num_left = [], _MAX_PIECES
        if not self._unscanned:
            self._unscanned = [*self._table.values()]
        while self._unscanned and num_left > 0:
            checkpoint = self._unscanned.pop()
            num_left -= len(checkpoint.slots)
            if self._is_resident(checkpoint) and any(map(slots.__contains__, checkpoint.slots)):
                found.append(checkpoint)
        return found

    def lose(self, first: int, end: int) -> None:
        """The bytes in slots `first` to `end - 1` are lost. Lookups do not find their checkpoints any more.

        The saves that write them fail by themselves.
        """
        self._pieces.lose(first, end)

    def lose_pieces(self, slots: Iterable[int]) -> None:
        """The pieces in these slots cannot be read: lookups find no checkpoint that contains one of them."""
        for slot in slots:
            self.lose(slot, slot + 1)

    def clear(self) -> list[Entries]:
        """Drops all. What loads hold or saves write keeps its slots. O(those).

        Returns:
          What held the others, for the caller to free incrementally. The caller frees their slots.
        """
        kept = [slot for slots in (self._pending, *(c.slots for c in self._held)) for slot in slots]
        discarded: list[Entries] = [self._table, *self._pieces.clear(kept)]
        self._table = OrderedDict()
        self._unscanned = []
        return discarded

    def check_invariants(self) -> None:
        """Raises AssertionError unless references, keys and pending slots agree. O(pieces)."""
        refs = dict.fromkeys(self._pending, 1)
        alive = {*self._table.values(), *self._held}
        for checkpoint in alive:
            assert sum(checkpoint.num_pieces) == len(checkpoint.slots)
            is_state = [self._slots.pool_of(slot) == Pool.STATES for slot in checkpoint.slots]
            assert not any(is_state[:-1]), "a window chunk in the slot of a state"
            assert is_state[-1:] == [True] * self.has_states or not self.has_states, "a checkpoint without its state"
            for slot in checkpoint.slots:
                refs[slot] = refs.get(slot, 0) + 1
        self._pieces.check_invariants(refs)
        assert all(key == checkpoint.key for key, checkpoint in self._table.items())
        pending: dict[Checkpoint, int] = {}
        for checkpoints in self._pending.values():
            for checkpoint in checkpoints:
                pending[checkpoint] = pending.get(checkpoint, 0) + 1
        assert all(checkpoint.num_pending == pending.get(checkpoint, 0) for checkpoint in alive)
        assert self._held == {checkpoint for checkpoint in alive if checkpoint.num_holds}

    def check_holds(self, *, holds: dict[Checkpoint, int], pending: set[int]) -> None:
        """Raises AssertionError unless exactly these holds exist, and these slots are being written."""
        assert {checkpoint: checkpoint.num_holds for checkpoint in self._held} == holds
        assert self._pending.keys() == pending

    def _evict(self, checkpoint: Checkpoint, *, keeps_memory: bool) -> None:
        self.num_evicted += 1
        if self.on_evict is not None and keeps_memory and not checkpoint.rolls and self._is_ready(checkpoint):
            self.on_evict(checkpoint)
        self.drop(checkpoint)

    def _announce(self, checkpoint: Checkpoint) -> None:
        """Calls `on_ready` if it is time."""
        if self.on_ready is None or checkpoint.rolls or checkpoint.was_announced or checkpoint.num_pending:
            return
        if self._is_resident(checkpoint) and self._is_found(checkpoint.key):
            checkpoint.was_announced = True
            self.on_ready(checkpoint)

    def _drop_superseded(self, by: Checkpoint) -> None:
        one = by.superseded
        if one is None or by.num_pending or not self._is_resident(by) or not self._is_found(by.key):
            return
        by.superseded = None
        while one is not None:
            if not (one.was_loaded or one.num_holds):
                self.drop(one)
            before, one.superseded = one.superseded, None
            one = before

    def _is_resident(self, checkpoint: Checkpoint) -> bool:
        return self._table.get(checkpoint.key) is checkpoint

    def _known_slots(
        self, keys: Sequence[ChunkKey], end: int, num_pieces: tuple[int, ...], before: Checkpoint | None
    ) -> list[int | None]:
        """The slots of the pieces of a boundary that other checkpoints have; None for those to be saved."""
        is_next = before is not None and end > 1 and before.key == keys[end - 2] and self._is_resident(before)
        if before is None or not is_next or self._pieces.are_lost(before.slots):  # they may have been saved again
            return self._pieces.known_slots(keys, end)
        known: list[int | None] = []
        first = 0
        for group, (num, num_before) in enumerate(zip(num_pieces, before.num_pieces, strict=True)):
            known += before.slots[first + num_before + 1 - num : first + num_before] if num else []
            known += [self._pieces.last_slot(keys[end - 1], group)] if num else []
            first += num_before
        return self._pieces.without_lost(known)
