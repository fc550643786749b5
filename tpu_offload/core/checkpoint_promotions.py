"""Which checkpoint a request gets from storage: for models with sliding windows or states.

Such a request can use a prefix up to a checkpoint only. So storage is read for it only if there is a boundary, behind
the one that it can use already, before which every chunk and every piece of whose checkpoint is in the host tier or in
a storage tier, whichever. The last such boundary is its target. Its chunks are read first, over several steps if need
be, and then the pieces that the host tier lacks, all at once: fewer are of no use.
"""

from collections.abc import Iterator, Sequence
from typing import final

from tpu_offload.core.context import TierContext
from tpu_offload.core.index import ChunkState, NewPieceKey
from tpu_offload.core.request_state import RequestState
from tpu_offload.core.tiering import StoragePlanner
from tpu_offload.types import ChunkKey

_SCANNED_AT_ONCE = 512  # boundaries
_MAX_ASKED = 16  # boundaries; a prefix that was stored mostly ends with a checkpoint
_USABLE = (ChunkState.PENDING, ChunkState.READY)


@final
class CheckpointPromotions:
    """Finds targets and reads pieces.

    Args:
      context: the scheduler's shared state.
      tiers: nearest first.
    """

    def __init__(self, context: TierContext, tiers: Sequence[StoragePlanner]) -> None:
        self._index = context.index
        self._counts = context.counts
        self._tiers = tiers

    def find_target(self, request: RequestState) -> int:
        """The target of a request after its last match, in chunks; 0 if there is none."""
        keys, first, most = request.keys, request.checkpoint_chunk, request.last_boundary
        reach: int | None = None
        for boundary in self._boundaries(keys, first, most):
            if not self._has_pieces(keys, boundary):
                continue
            if reach is None:
                reach = self.reach(keys, request.num_found_chunks, boundary)
            if boundary <= reach:
                return boundary
        return 0

    def _boundaries(self, keys: Sequence[ChunkKey], first: int, end: int) -> Iterator[int]:
        """Boundaries after `first` chunks at which a tier may have a checkpoint, the last one first."""
        stored = [ends for tier in self._tiers if (ends := tier.records.may_end_at())]
        while stored and end > first:
            start = max(first, end - _SCANNED_AT_ONCE)
            if not all(ends.keys().isdisjoint(keys[start:end]) for ends in stored):
                yield from (b for b in range(end, start, -1) if any(keys[b - 1] in ends for ends in stored))
            end = start

    def reach(self, keys: Sequence[ChunkKey], first: int, end: int) -> int:
        """How far chunks go on from `first` that are in the host tier, on their way there, or in storage."""
        while first < end and (
            self._index.state(keys[first]) in _USABLE or any(keys[first] in t.records.stored for t in self._tiers)
        ):
            first += 1
        return first

    def _has_pieces(self, keys: Sequence[ChunkKey], boundary: int) -> bool:
        if self._index.checkpoint(keys[boundary - 1]) is not None:
            return True
        return all(self._source(piece) is not None for piece in self._index.missing_pieces(keys, boundary))

    def _source(self, piece: NewPieceKey) -> StoragePlanner | None:
        """The nearest tier that has a piece."""
        for tier in self._tiers:
            if tier.records.has(tier.records.of_piece(piece.key, piece.group)):
                return tier
        return None

    def unknown_records(
        self, keys: Sequence[ChunkKey], first: int, end: int, tier: StoragePlanner
    ) -> list[list[ChunkKey]]:
        """For each of the last boundaries after `first` chunks and up to `end`, the records that no tier has.

        The last boundary first; none for those whose checkpoint is in the host tier.
        """
        unknown: list[list[ChunkKey]] = []
        for boundary in range(end, max(first, end - _MAX_ASKED), -1):
            if self._index.checkpoint(keys[boundary - 1]) is None:
                missing = [p for p in self._index.missing_pieces(keys, boundary) if self._source(p) is None]
                names = [name for piece in missing for name in tier.records.of_piece(piece.key, piece.group)]
                if names:
                    unknown.append(names)
        return unknown

    def read_s(self, keys: Sequence[ChunkKey], boundary: int) -> float | None:
        """Seconds to read the pieces of a target; None if it is not known."""
        total_s = 0.0
        if self._index.checkpoint(keys[boundary - 1]) is None:
            for tier, pieces in self._by_tier(self._index.missing_pieces(keys, boundary)).items():
                names = [name for piece in pieces for name in tier.records.of_piece(piece.key, piece.group)]
                seconds = tier.reads.read_s(len(names))
                if seconds is None:
                    return None
                total_s += seconds
        return total_s

    def _by_tier(self, pieces: Sequence[NewPieceKey]) -> dict[StoragePlanner, list[NewPieceKey]]:
        by_tier: dict[StoragePlanner, list[NewPieceKey]] = {}
        for piece in pieces:
            if (tier := self._source(piece)) is not None:
                by_tier.setdefault(tier, []).append(piece)
        return by_tier

    def promote(self, request: RequestState, boundary: int) -> None:
        """Plans the promotion of the pieces of a target, once all chunks before it are in the host tier, or will be."""
        keys, index = request.keys, self._index
        if index.checkpoint(keys[boundary - 1]) is not None:
            return
        missing, end = index.missing(keys, 0, boundary)
        if missing or end < boundary:
            return
        wanted = index.missing_pieces(keys, boundary)
        by_tier = self._by_tier(wanted)
        if sum(map(len, by_tier.values())) < len(wanted):  # something was evicted meanwhile
            return
        for tier, pieces in by_tier.items():
            names = [name for piece in pieces for name in tier.records.of_piece(piece.key, piece.group)]
            num_slots = sum(not tier.records.is_state(piece.group) for piece in pieces)
            if not tier.reads.has_room_for(len(names), num_slots):
                self._counts.num_dropped_promotions += 1
                return
        begun = index.begin_checkpoint(keys, boundary, max_chunks=len(wanted))
        if begun is None:
            self._counts.num_dropped_promotions += 1
            return
        slot_of = dict(index.pieces_of(begun[0]))
        for tier, pieces in by_tier.items():
            slots = [slot_of[piece.key] for piece in pieces]
            tier.reads.read_pieces([piece.key for piece in pieces], slots, end=keys[boundary - 1])
