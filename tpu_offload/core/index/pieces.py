"""The pieces of checkpoints, window chunks and states: by name and by slot, and how many need each.

Checkpoints of near boundaries share window chunks. So pieces may cover a boundary for which no checkpoint was saved: a
prompt shorter than the window can continue at each of its boundaries, not only at its last one. Lookups find those,
too, so they agree with a router that follows the tier's events.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, final

from tpu_offload.core.chunk_table import ChunkTable, Entries
from tpu_offload.core.index.changes import ChangeLog
from tpu_offload.core.index.slots import TierSlots
from tpu_offload.piece_keys import PieceKey, group_suffix, piece_key
from tpu_offload.types import ChunkKey


@final
class PieceTable:
    """All pieces. A piece is READY once it is saved, until it is lost or nothing needs it.

    Args:
      slots: takes back the slots of pieces.
      most_pieces: how many pieces the checkpoint of a long prefix has in each window group; and, with states, 1.
      has_states: whether the last group is one of states.
      pending: slots that are being written.
      changes: records which pieces become READY and cease to be, if there is one.

    Attributes:
      key_of: the name of what is in each slot.
      num_slots: by pool, slots that pieces take.
      may_cover: whether pieces may cover a boundary without a checkpoint. Not those of one boundary only.
    """

    def __init__(
        self,
        slots: TierSlots,
        most_pieces: tuple[int, ...],
        *,
        has_states: bool,
        pending: Container[int],
        changes: ChangeLog | None,
    ) -> None:
        self._slots = slots
        self._most_pieces = most_pieces
        self._pending = pending
        self._changes = changes
        self._slot_of: ChunkTable[int] = ChunkTable()  # by name
        self.key_of: dict[int, PieceKey] = {}
        # By slot: the checkpoints that contain it, while they are resident or held, and the save that writes it.
        self._num_refs: dict[int, int] = {}
        self._lost: set[int] = set()  # slots whose bytes are lost, until no checkpoint contains them
        self.num_slots = [0] * len(slots.pools)
        self._widest = max(((most, group) for group, most in enumerate(most_pieces)), default=(0, 0))
        self.may_cover = not has_states and max(most_pieces, default=0) != 1

    def num_pieces(self, end: int) -> tuple[int, ...]:
        """How many pieces a checkpoint after `end` chunks has in each window group, and of states."""
        return tuple([min(end, most) for most in self._most_pieces])

    def has(self, name: PieceKey) -> bool:
        """Whether a piece is READY or being saved."""
        slot = self._slot_of.get(name)
        return slot is not None and slot not in self._lost

    def are_lost(self, slots: Sequence[int]) -> bool:
        """Whether the bytes of one of these slots are lost."""
        return bool(self._lost) and not self._lost.isdisjoint(slots)

    def known_slots(self, keys: Sequence[ChunkKey], end: int) -> list[int | None]:
        """The slots of the pieces of the boundary after `end` chunks, group after group; None for those not there."""
        known: list[int | None] = []
        for group, most in enumerate(self._most_pieces):
            known += [self._slot_of.get(piece_key(keys[i], group)) for i in range(max(0, end - most), end)]
        return self.without_lost(known)

    def last_slot(self, key: ChunkKey, group: int) -> int | None:
        """The slot of the piece of one chunk, even if its bytes are lost; None if there is none."""
        return self._slot_of.get(piece_key(key, group))

    def without_lost(self, slots: list[int | None]) -> list[int | None]:
        """Slots with None in place of those whose bytes are lost."""
        return [None if slot in self._lost else slot for slot in slots] if self._lost else slots

    def ready_slots(self, keys: Sequence[ChunkKey], end: int) -> list[int] | None:
        """Likewise as `known_slots`, if all pieces are READY; else None."""
        slots = [slot for slot in self.known_slots(keys, end) if slot is not None and slot not in self._pending]
        return slots if len(slots) == sum(self.num_pieces(end)) else None

    def last_covered(self, keys: Sequence[ChunkKey], first: int, end: int) -> int:
        """The last boundary after more than `first` chunks, and `end` at most, of which all pieces are READY.

        `first` if there is none. Looks at each piece once, and mostly at one of as many as a window has.
        """
        if not self.key_of and any(self._most_pieces):
            return first
        ready_from = [end] * len(self._most_pieces)  # by group: those from here on to the boundary are
        boundary, group = self._skip(keys, first, end), 0
        while boundary > first and group < len(ready_from):
            start = max(0, boundary - self._most_pieces[group])
            missing = self._first_missing(keys, group, start, min(ready_from[group], boundary))
            ready_from[group] = start
            if missing is None:
                group += 1
            else:  # all boundaries between this one and the missing piece need it
                boundary, group = self._skip(keys, first, missing), 0
        return max(first, boundary)

    def _skip(self, keys: Sequence[ChunkKey], first: int, boundary: int) -> int:
        """The last boundary, from this one down, with the first and the last chunk of the widest window.

        These are looked up first, because without the first one none of as many boundaries is covered as the window has
        chunks. `first` or less if there is no such boundary.
        """
        most, group = self._widest
        parts, suffix = self._slot_of.parts, group_suffix(group)
        while most and boundary > first:
            start = boundary - most if boundary > most else 0
            key = keys[start]
            if key + suffix not in parts[key[0]]:
                boundary = start
                continue
            key = keys[boundary - 1]
            if key + suffix in parts[key[0]]:
                break
            boundary -= 1
        return boundary

    def _first_missing(self, keys: Sequence[ChunkKey], group: int, first: int, end: int) -> int | None:
        """The first of the pieces of chunks `first` to `end - 1` that is not READY."""
        parts: Sequence[Mapping[Any, int]] = self._slot_of.parts  # by the bytes of a name
        suffix, pending, lost = group_suffix(group), self._pending, self._lost
        for i in range(first, end):
            key = keys[i]
            slot = parts[key[0]].get(key + suffix)
            if slot is None or slot in pending or slot in lost:
                return i
        return None

    def add(self, names: Sequence[PieceKey], slots: Sequence[int]) -> None:
        """Pieces are about to be saved, for one checkpoint: that and the save need them."""
        for name, slot in zip(names, slots, strict=True):
            self._slot_of[name], self.key_of[slot] = slot, name
            self._num_refs[slot] = 2
            self.num_slots[self._slots.pool_of(slot)] += 1

    def saved(self, slots: Sequence[int], *, success: bool) -> None:
        """The save of these pieces has ended; the reference of the save stays."""
        named = ((self.key_of[slot], slot) for slot in slots)
        current = (name for name, slot in named if self._slot_of.get(name) == slot)  # else another slot has it, or none
        if success:
            self._note(current, found=True)
        else:  # nothing finds them from now on, even if their slots are still needed
            for name in current:
                del self._slot_of[name]

    def ref(self, slots: Iterable[int]) -> None:
        """A checkpoint needs these."""
        for slot in slots:
            self._num_refs[slot] += 1

    def unref(self, slots: Iterable[int]) -> None:
        """Removes one reference of each slot, and frees those that have none left."""
        freed: list[int] = []
        removed: list[PieceKey] = []
        num_refs = self._num_refs
        for slot in slots:
            num_refs[slot] -= 1
            if not num_refs[slot]:
                del num_refs[slot]
                self.num_slots[self._slots.pool_of(slot)] -= 1
                name = self.key_of.pop(slot)
                if self._slot_of.get(name) == slot:
                    del self._slot_of[name]
                    if slot not in self._lost:
                        removed.append(name)
                self._lost.discard(slot)
                freed.append(slot)
        self._slots.free_first(freed)
        self._note(removed, found=False)

    def hide(self, slot: int) -> None:
        """Nothing finds the piece in this slot any more, if there is one. A load may still read it."""
        name = self.key_of.get(slot)
        if name is not None and self._slot_of.get(name) == slot:
            del self._slot_of[name]
            if slot not in self._lost:
                self._note([name], found=False)

    def lose(self, first: int, end: int) -> None:
        """The bytes in slots `first` to `end - 1` are lost. The saves that write them fail by themselves."""
        used, lost = self.key_of, range(first, end)
        candidates = lost if len(lost) <= len(used) else used
        slots = [s for s in candidates if s in used and s in lost and s not in self._pending and s not in self._lost]
        self._lost.update(slots)
        self._note((used[slot] for slot in slots if self._slot_of.get(used[slot]) == slot), found=False)

    def clear(self, kept: Iterable[int]) -> list[Entries]:
        """Nothing is found any more; those of `kept` keep their slots, with a reference for each time they are named.

        Returns:
          What held the others.
        """
        discarded: list[Entries] = [*self._slot_of.parts, self.key_of, self._num_refs]
        key_of = self.key_of
        self._slot_of, self.key_of, self._num_refs = ChunkTable(), {}, {}
        for slot in kept:
            self._num_refs[slot] = self._num_refs.get(slot, 0) + 1
            self.key_of[slot] = key_of[slot]
        self.num_slots = self._count(self.key_of)
        self._lost.intersection_update(self.key_of)
        return discarded

    def check_invariants(self, refs: dict[int, int]) -> None:
        """Raises AssertionError unless slots have these references, and names and slots agree. O(pieces)."""
        assert self._num_refs == refs, "a slot is counted wrongly"
        assert self.key_of.keys() == refs.keys()
        assert self.num_slots == self._count(refs)
        assert all(self.key_of[self._slot_of[name]] == name for name in self._slot_of)

    def _count(self, slots: Iterable[int]) -> list[int]:
        """By pool, how many of these slots are of it."""
        slots = [*slots]
        return [self._slots.count(slots, pool) for pool in range(len(self._slots.pools))]

    def _note(self, names: Iterable[PieceKey], *, found: bool) -> None:
        if self._changes is not None:
            self._changes.add(tuple(names), found=found, of_pieces=True)
