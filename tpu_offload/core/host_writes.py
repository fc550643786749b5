"""Publishes what a save or a promotion wrote to the host tier: chunks of full attention, or pieces of checkpoints.

Each such job has a `HostWrites`, which makes what every worker has written visible to lookups when the job ends, and
removes the rest.
"""

import abc
from collections.abc import Sequence, Set
from typing import final

from tpu_offload.core.holdings import Holdings
from tpu_offload.core.index import ChunkIndex
from tpu_offload.types import ChunkKey


class HostWrites(abc.ABC):
    """How what is in one kind of slot is published or removed."""

    @abc.abstractmethod
    def publish(self, held: Holdings, bad: Set[int]) -> Sequence[ChunkKey]:
        """The job has ended: lookups find what it has written.

        Args:
          held: what the job holds: the slots that it has written, and their keys.
          bad: those of the slots whose bytes some worker does not have.
        Returns:
          The chunks of full attention that are READY now.
        """

    @abc.abstractmethod
    def remove(self, held: Holdings, bad: Set[int], *, quarantine: bool) -> Sequence[ChunkKey]:
        """After `publish`: removes what is in bad slots. With `quarantine` late copies may still write these.

        Returns:
          The chunks of full attention that are gone.
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

    def publish(self, held: Holdings, bad: Set[int]) -> Sequence[ChunkKey]:
        """See `HostWrites`."""
        keys, slots = _without(held, bad) if bad else (held.keys, held.slots)
        if keys:
            self._index.complete(keys, slots, success=True)
        return keys

    def remove(self, held: Holdings, bad: Set[int], *, quarantine: bool) -> Sequence[ChunkKey]:
        """See `HostWrites`."""
        keys, slots = _without(held, set(held.slots) - bad)
        self._index.complete(keys, slots, success=False, quarantine=quarantine)
        return keys

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

    def publish(self, held: Holdings, bad: Set[int]) -> Sequence[ChunkKey]:
        """See `HostWrites`."""
        good = [slot for slot in held.slots if slot not in bad] if bad else held.slots
        if good:
            self._checkpoints.complete(good, success=True)
        return ()

    def remove(self, held: Holdings, bad: Set[int], *, quarantine: bool) -> Sequence[ChunkKey]:
        """See `HostWrites`."""
        self._checkpoints.complete(sorted(bad), success=False, quarantine=quarantine)
        return ()

    def pending(self, held: Holdings) -> tuple[Sequence[ChunkKey], Sequence[int]]:
        """See `HostWrites`."""
        return (), held.slots


def _without(held: Holdings, slots: Set[int]) -> tuple[Sequence[ChunkKey], Sequence[int]]:
    """The chunks that a job has written, and their slots, but for those in these slots."""
    kept = [i for i, slot in enumerate(held.slots) if slot not in slots]
    return [held.keys[i] for i in kept], [held.slots[i] for i in kept]
