"""What a job writes into the host tier: chunks of full attention, or pieces of checkpoints.

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
      saved: those that lookups find now.
      lost: those that were removed.
    """

    saved: Sequence[ChunkKey]
    lost: Sequence[ChunkKey]


_NO_CHUNKS = Written((), ())


class HostContents(abc.ABC):
    """A kind of contents of slots."""

    @abc.abstractmethod
    def end(self, held: Holdings, bad: Set[int], *, quarantine: bool) -> Written:
        """The job has ended: publishes what it has written, and drops the rest.

        Args:
          held: the slots that it has written, and their keys.
          bad: those of the slots whose bytes some worker does not have.
          quarantine: late copies may still write the bad slots.
        """

    @abc.abstractmethod
    def pending(self, held: Holdings) -> tuple[Sequence[ChunkKey], Sequence[int]]:
        """What is PENDING until the job ends: chunks, and the slots of pieces. For tests."""


@final
class Chunks(HostContents):
    """Chunks of full attention, one in each slot.

    Args:
      index: the chunks of the host tier.
    """

    def __init__(self, index: ChunkIndex) -> None:
        self._index = index

    def end(self, held: Holdings, bad: Set[int], *, quarantine: bool) -> Written:
        """See `HostContents`."""
        keys, slots = held.keys, held.slots
        if not bad:
            self._index.complete(keys, slots, success=True)
            return Written(keys, ())
        good = [i for i, slot in enumerate(slots) if slot not in bad]
        saved = [keys[i] for i in good]
        if good:
            self._index.complete(saved, [slots[i] for i in good], success=True)
        failed = [i for i, slot in enumerate(slots) if slot in bad]
        lost = [keys[i] for i in failed]
        self._index.complete(lost, [slots[i] for i in failed], success=False, quarantine=quarantine)
        return Written(saved, lost)

    def pending(self, held: Holdings) -> tuple[Sequence[ChunkKey], Sequence[int]]:
        """See `HostContents`."""
        return held.keys, ()


@final
class Pieces(HostContents):
    """Pieces of checkpoints, one in each slot. A checkpoint is dropped with any piece of it.

    Args:
      index: as for `Chunks`.
    """

    def __init__(self, index: ChunkIndex) -> None:
        self._checkpoints = index.checkpoints

    def end(self, held: Holdings, bad: Set[int], *, quarantine: bool) -> Written:
        """See `HostContents`."""
        good = [slot for slot in held.slots if slot not in bad] if bad else held.slots
        if good:
            self._checkpoints.complete(good, success=True)
        if bad:
            self._checkpoints.complete(sorted(bad), success=False, quarantine=quarantine)
        return _NO_CHUNKS

    def pending(self, held: Holdings) -> tuple[Sequence[ChunkKey], Sequence[int]]:
        """See `HostContents`."""
        return (), held.slots
