"""Which chunks are not READY yet or no longer, and which are pinned.

A pin on the last chunk of a prefix covers all of it, because no chunk is evicted before those that follow it: pinning
ten thousand chunks is one count. Only when chunks under a pin are invalidated, which is rare, are the covered ones
enumerated (`ChunkStates.covered`).
"""

import enum
from collections.abc import Iterable
from typing import final

from tpu_offload.core.index.prefix_tree import PrefixTree
from tpu_offload.types import ChunkKey


class ChunkState(enum.Enum):
    """The state of a resident chunk; a chunk that is not resident has none."""

    PENDING = "pending"  # it has a slot, and its bytes are in flight
    READY = "ready"  # every worker has its bytes
    INVALID = "invalid"  # its bytes are not valid, but a pin covers it: it is removed with the last one


@final
class ChunkStates:
    """The chunks of a tree that are PENDING, INVALID or pinned; all others are READY and unpinned.

    Args:
      tree: the resident chunks.
    Attributes:
      unready: slots of chunks that are PENDING or INVALID.
      invalid: chunks that are INVALID.
      pins: how many pins end at a chunk. Each covers the chunk and all before it.
    """

    def __init__(self, tree: PrefixTree) -> None:
        self._tree = tree
        self.unready: set[int] = set()
        self.invalid: set[ChunkKey] = set()
        self.pins: dict[ChunkKey, int] = {}
        # INVALID chunks that no pin covers, still to be removed; None when they have to be enumerated again.
        self._uncovered: list[ChunkKey] | None = []

    def state(self, key: ChunkKey) -> ChunkState | None:
        """The chunk's state, None when it is not resident."""
        slot = self._tree.slot_of.get(key)
        if slot is None:
            return None
        if slot not in self.unready:
            return ChunkState.READY
        return ChunkState.INVALID if key in self.invalid else ChunkState.PENDING

    def pin(self, tail: ChunkKey) -> None:
        """Adds a pin that ends at this chunk. O(1)."""
        assert self._tree.slot_of[tail] not in self.unready or tail in self.invalid, "only a READY chunk can be pinned"
        self.pins[tail] = self.pins.get(tail, 0) + 1

    def unpin(self, tail: ChunkKey) -> None:
        """Removes a pin that ends at this chunk. O(1)."""
        assert tail in self.pins, "unpinned more often than pinned"
        self.pins[tail] -= 1
        if not self.pins[tail]:
            del self.pins[tail]
            self.coverage_changed()

    def coverage_changed(self) -> None:
        """Pins may cover less than before: one was removed, or a chunk before a pinned one."""
        if self.invalid:
            self._uncovered = None

    def covered(self) -> set[int]:
        """Slots of the chunks that pins cover. O(their number)."""
        covered: set[int] = set()
        slot_of, parents = self._tree.slot_of, self._tree.parents
        for tail in self.pins:
            slot = slot_of.get(tail)
            while slot is not None and slot >= 0 and slot not in covered:
                covered.add(slot)
                slot = parents[slot]
        return covered

    def save(self, slots: Iterable[int]) -> None:
        """New chunks are PENDING."""
        self.unready.update(slots)

    def publish(self, slots: Iterable[int]) -> None:
        """PENDING chunks are READY."""
        self.unready.difference_update(slots)

    def invalidate(self, key: ChunkKey, slot: int) -> None:
        """A READY chunk that a pin covers is INVALID."""
        self.invalid.add(key)
        self.unready.add(slot)

    def removed(self, slot: int) -> None:
        """The chunk in this slot is not resident any more."""
        self.unready.discard(slot)

    def take_uncovered(self, max_chunks: int) -> list[ChunkKey]:
        """Up to `max_chunks` INVALID chunks that no pin covers, for the caller to remove."""
        if self._uncovered is None:
            covered = self.covered()
            # Sorted by slot: the order of a set is not reproducible; mostly tails before heads.
            slot_of = self._tree.slot_of
            self._uncovered = sorted((k for k in self.invalid if slot_of[k] not in covered), key=slot_of.__getitem__)
        taken = self._uncovered[: -max_chunks - 1 : -1]
        del self._uncovered[-max_chunks:]
        self.invalid.difference_update(taken)
        return taken

    @property
    def num_uncovered(self) -> int:
        """INVALID chunks that are known to await `take_uncovered`."""
        return len(self._uncovered or ())

    def pending(self) -> set[ChunkKey]:
        """All PENDING chunks."""
        return {self._tree.keys[slot] for slot in self.unready} - self.invalid

    def clear(self) -> set[int]:
        """All READY chunks are invalidated at once. O(chunks that pins cover or that are not READY).

        INVALID chunks that await `take_uncovered` still do, and no others: what becomes INVALID here is pinned.

        Returns:
          Slots of the chunks that stay: those that are PENDING, and those that are INVALID until unpinned.
        """
        pending = self.unready.difference([self._tree.slot_of[key] for key in self.invalid])
        kept = self.covered() | self.unready
        self.invalid = {self._tree.keys[slot] for slot in kept - pending}
        self.unready = kept
        return set(kept)

    def check_invariants(self) -> None:
        """Raises AssertionError unless only resident chunks have a state, and INVALID ones are covered. O(chunks)."""
        slot_of = self._tree.slot_of
        assert all(num > 0 for num in self.pins.values())
        if not self._uncovered:
            assert {slot_of[key] for key in self.invalid} <= self.covered(), "an invalid chunk outlived its pins"
        assert self.unready <= set(slot_of.values())
        assert all(slot_of[key] in self.unready for key in self.invalid), "an invalid chunk can be found"
