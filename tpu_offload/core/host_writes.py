"""Publishes what a save or a promotion wrote to the host tier: chunks of full attention, or pieces of checkpoints.

Saves and promotions have one of these. When such a job ends, it makes what every worker has written visible to
lookups, and removes the rest.
"""

import abc
from collections.abc import Sequence, Set
from typing import NamedTuple, final

from tpu_offload.core.holdings import Holdings
from tpu_offload.core.index import ChunkIndex
from tpu_offload.types import ChunkKey


class Written(NamedTuple):
    """What became of the chunks of full attention that a job has written.

    Attributes:
      published: those that lookups find now.
      removed: the others.
    """

    published: Sequence[ChunkKey]
    removed: Sequence[ChunkKey]


_NO_CHUNKS = Written((), ())


class HostWrites(abc.ABC):
    """How what is in one kind of slot is published or removed."""

    @abc.abstractmethod
    def end(self, held: Holdings, bad: Set[int], *, quarantine: bool) -> Written:
        """The job has ended: publishes what it has written, and drops the rest.

        Args:
          held: what the job holds: the slots that it has written, and their keys.
          bad: those of the slots whose bytes some worker does not have.
          quarantine: late copies may still write the bad slots.
        """

    @abc.abstractmethod
    def pending(self, held: Holdings) -> tuple[Sequence[ChunkKey], Sequence[int]]:
        """What is PENDING until the job ends: chunks, and the slots of pieces. For tests."""


@final
class ChunkWrites(HostWrites):
    """Chunks of full attention, one in each slot.

    Args:
      index: the chunks of the host tier.
    """

    def __init__(self, index: ChunkIndex) -> None:
        self._index = index

    def end(self, held: Holdings, bad: Set[int], *, quarantine: bool) -> Written:
        """See `HostWrites`."""
        keys, slots = held.keys, held.slots
        if not bad:
            self._index.complete(keys, slots, success=True)
            return Written(keys, ())
        good = [i for i, slot in enumerate(slots) if slot not in bad]
        published = [keys[i] for i in good]
        if good:
            self._index.complete(published, [slots[i] for i in good], success=True)
        failed = [i for i, slot in enumerate(slots) if slot in bad]
        removed = [keys[i] for i in failed]
        self._index.complete(removed, [slots[i] for i in failed], success=False, quarantine=quarantine)
        return Written(published, removed)

    def pending(self, held: Holdings) -> tuple[Sequence[ChunkKey], Sequence[int]]:
        """See `HostWrites`."""
        return held.keys, ()


@final
class PieceWrites(HostWrites):
    """Pieces of checkpoints, one in each slot. A checkpoint is dropped with any piece of it.

    Args:
      index: as for `ChunkWrites`.
    """

    def __init__(self, index: ChunkIndex) -> None:
        self._checkpoints = index.checkpoints

    def end(self, held: Holdings, bad: Set[int], *, quarantine: bool) -> Written:
        """See `HostWrites`."""
        good = [slot for slot in held.slots if slot not in bad] if bad else held.slots
        if good:
            self._checkpoints.complete(good, success=True)
        if bad:
            self._checkpoints.complete(sorted(bad), success=False, quarantine=quarantine)
        return _NO_CHUNKS

    def pending(self, held: Holdings) -> tuple[Sequence[ChunkKey], Sequence[int]]:
        """See `HostWrites`."""
        return (), held.slots
