"""Which checkpoint a request gets from storage: for models with sliding windows or states.

Such a request can use a prefix up to a checkpoint only. Its target is the last boundary past the one that it can use
already for which all chunks before it, and all pieces of its checkpoint, are in the host tier or in some storage tier.
Without a target nothing is read. The chunks of the target are read first, over several steps if need be, and then the
pieces that the host tier lacks, all at once: fewer are of no use.
"""

import logging
from collections.abc import Iterator, Sequence
from typing import final

from tpu_offload.config.environment import env_name
from tpu_offload.config.storage_tiers import STORAGE_SIZES
from tpu_offload.core.context import TierContext
from tpu_offload.core.index import ChunkIndex, ChunkState, NewPieceKey
from tpu_offload.core.request_state import RequestState
from tpu_offload.core.storage.planner import StoragePlanner
from tpu_offload.piece_keys import piece_key
from tpu_offload.types import ChunkKey

_logger = logging.getLogger(__name__)

_SCANNED_AT_ONCE = 512  # boundaries
_MAX_ASKED = 16  # boundaries; a prefix that was stored mostly ends with a checkpoint
_USABLE = (ChunkState.PENDING, ChunkState.READY)


@final
class CheckpointPromotions:
    """Finds targets and reads pieces.

    A tier whose reads are suspended counts as one that has nothing: a farther one may have the same.

    Args:
      context: the scheduler's shared state.
      tiers: nearest first.
    """

    def __init__(self, context: TierContext, tiers: Sequence[StoragePlanner]) -> None:
        self._index = context.index
        self._counts = context.counts
        self._clock = context.clock
        self._tiers = tiers
        num_parts = context.config.records_per_state(context.layout)
        self._warn_of_small_tiers(sum(context.window_chunks) + num_parts)

    def _warn_of_small_tiers(self, num_records: int) -> None:
        """Those that no checkpoint of a long prompt fits into, or through."""
        for tier in self._tiers:
            label, capacity, num_read = tier.stats().tier, tier.records.capacity, tier.records.max_read
            if capacity < num_records:
                _logger.warning(
                    "storage tier %s has room for %d records, and a checkpoint of this model takes up to %d: larger "
                    "ones are not stored; make it larger (%s or %s)",
                    label, capacity, num_records, *map(env_name, STORAGE_SIZES),
                )  # fmt: skip
            elif num_read < num_records:
                _logger.warning(
                    "storage tier %s reads %d records at a time, and a checkpoint of this model takes up to %d, which "
                    "are read together: larger ones are never read; raise %s",
                    label, num_read, num_records, env_name("max_storage_gb_in_flight"),
                )  # fmt: skip

    def find_target(self, request: RequestState) -> int:
        """The target of a request after its last match, in chunks; 0 if there is none, or it can never be read."""
        keys, end = request.keys, request.last_match.last_boundary
        tiers = self._readable()
        pieces = _Pieces(self._index, tiers, keys)
        for boundary in _boundaries(tiers, keys, request.last_match.checkpoint_chunk, end):
            if boundary > end:
                continue
            if self._index.checkpoints.get(keys[boundary - 1]) is None:
                missing = pieces.last_missing(boundary)
                if missing is not None:
                    end = missing  # all boundaries in between need it, too
                    continue
            end = self.reach(keys, request.last_match.num_found_chunks, boundary)
            if boundary <= end:
                return boundary if self._may_fit(keys, boundary) else 0
        return 0

    def _readable(self) -> list[StoragePlanner]:
        """The tiers that can read now, nearest first, but those whose reads hang last."""
        tiers = [tier for tier in self._tiers if tier.reads.are_admitted]
        if len(tiers) > 1:
            now_s = self._clock()
            tiers.sort(key=lambda tier: tier.reads.is_stalled(now_s))
        return tiers

    def reach(self, keys: Sequence[ChunkKey], first: int, end: int) -> int:
        """How far chunks go on from `first` that are in the host tier, on their way there, or can be read."""
        tiers = self._readable()
        while first < end and (
            self._index.state(keys[first]) in _USABLE or any(keys[first] in t.records.stored for t in tiers)
        ):
            first += 1
        return first

    def _may_fit(self, keys: Sequence[ChunkKey], boundary: int) -> bool:
        """Whether the pieces that the host tier lacks could be read, all at once, if nothing else were in flight."""
        if self._index.checkpoints.get(keys[boundary - 1]) is not None:
            return True
        by_tier = self._by_tier(self._index.checkpoints.missing_pieces(keys, boundary))
        return all(tier.reads.may_fit(*_sizes(tier, pieces)) for tier, pieces in by_tier.items())

    def unknown_records(
        self, keys: Sequence[ChunkKey], first: int, end: int, tier: StoragePlanner
    ) -> list[list[ChunkKey]]:
        """For each of the last boundaries after `first` chunks and up to `end`, the records that no tier can read.

        The last boundary first; none for those whose checkpoint is in the host tier.
        """
        unknown: list[list[ChunkKey]] = []
        tiers = self._readable()
        for boundary in range(end, max(first, end - _MAX_ASKED), -1):
            if self._index.checkpoints.get(keys[boundary - 1]) is None:
                missing = [
                    p for p in self._index.checkpoints.missing_pieces(keys, boundary) if _source(p, tiers) is None
                ]
                names = _names(tier, missing)
                if names:
                    unknown.append(names)
        return unknown

    def read_s(self, keys: Sequence[ChunkKey], boundary: int) -> float | None:
        """Seconds to read the pieces of a target; None if it is not known."""
        total_s = 0.0
        if self._index.checkpoints.get(keys[boundary - 1]) is None:
            for tier, pieces in self._by_tier(self._index.checkpoints.missing_pieces(keys, boundary)).items():
                num_records, _ = _sizes(tier, pieces)
                seconds = tier.reads.read_s(num_records)
                if seconds is None:
                    return None
                total_s += seconds
        return total_s

    def _by_tier(self, pieces: Sequence[NewPieceKey]) -> dict[StoragePlanner, list[NewPieceKey]]:
        by_tier: dict[StoragePlanner, list[NewPieceKey]] = {}
        tiers = self._readable()
        for piece in pieces:
            if (tier := _source(piece, tiers)) is not None:
                by_tier.setdefault(tier, []).append(piece)
        return by_tier

    def promote(self, request: RequestState, boundary: int) -> None:
        """Plans the promotion of the pieces of a target, once all chunks before it are in the host tier, or will be."""
        keys, index = request.keys, self._index
        if index.checkpoints.get(keys[boundary - 1]) is not None:
            return
        missing, end = index.missing(keys, 0, boundary)
        if missing or end < boundary:
            return
        wanted = index.checkpoints.missing_pieces(keys, boundary)
        by_tier = self._by_tier(wanted)
        if sum(map(len, by_tier.values())) < len(wanted):  # something was evicted meanwhile
            return
        # After a worker's restart the host tier has no pieces, and reads of them that have failed are still in flight.
        if any(tier.records.are_read(_names(tier, pieces)) for tier, pieces in by_tier.items()):
            return
        for tier, pieces in by_tier.items():
            if not tier.reads.has_room_for(*_sizes(tier, pieces)):
                self._counts.num_dropped_promotions += 1
                return
        begun = index.begin_checkpoint(keys, boundary, max_chunks=len(wanted))
        if begun is None:
            self._counts.num_dropped_promotions += 1
            return
        slot_of = dict(index.checkpoints.pieces_of(begun[0]))
        for tier, pieces in by_tier.items():
            slots = [slot_of[piece.key] for piece in pieces]
            tier.reads.read_pieces([piece.key for piece in pieces], slots, end=keys[boundary - 1])


@final
class _Pieces:
    """Which pieces of a prefix are in the host tier or in storage. Each is looked up once.

    Args:
      index: of the host tier.
      tiers: those that can read.
      keys: the prefix.
    """

    def __init__(self, index: ChunkIndex, tiers: Sequence[StoragePlanner], keys: Sequence[ChunkKey]) -> None:
        self._index = index
        self._tiers = tiers
        self._keys = keys
        self._lowest: dict[int, int] = {}  # by group: from here on to the last boundary asked for, all are there

    def last_missing(self, boundary: int) -> int | None:
        """The number of a missing piece of a boundary, such that none of its group is missing after it; or None.

        Boundaries are asked for in descending order.
        """
        for group, num in enumerate(self._index.checkpoints.num_pieces(boundary)):
            lowest = min(boundary, self._lowest.get(group, boundary))
            while lowest > boundary - num and self._has(group, lowest - 1):
                lowest -= 1
            self._lowest[group] = lowest
            if lowest > boundary - num:
                return lowest - 1
        return None

    def _has(self, group: int, number: int) -> bool:
        piece = NewPieceKey(group, piece_key(self._keys[number], group))
        return self._index.checkpoints.has_piece(piece.key) or _source(piece, self._tiers) is not None


def _source(piece: NewPieceKey, tiers: Sequence[StoragePlanner]) -> StoragePlanner | None:
    """The first of these tiers that has a piece."""
    for tier in tiers:
        if tier.records.has(tier.records.of_piece(piece.key, piece.group)):
            return tier
    return None


def _names(tier: StoragePlanner, pieces: Sequence[NewPieceKey]) -> list[ChunkKey]:
    """The records of pieces."""
    return [name for piece in pieces for name in tier.records.of_piece(piece.key, piece.group)]


def _sizes(tier: StoragePlanner, pieces: Sequence[NewPieceKey]) -> tuple[int, int]:
    """Of pieces: how many records they have, and the slots of chunks that they take."""
    return len(_names(tier, pieces)), sum(tier.records.takes_chunk(piece.group) for piece in pieces)


def _boundaries(tiers: Sequence[StoragePlanner], keys: Sequence[ChunkKey], first: int, end: int) -> Iterator[int]:
    """Boundaries after `first` chunks at which one of these tiers may have a checkpoint, the last one first."""
    stored = [ends for tier in tiers if (ends := tier.records.may_end_at())]
    while stored and end > first:
        start = max(first, end - _SCANNED_AT_ONCE)
        if not all(ends.keys().isdisjoint(keys[start:end]) for ends in stored):
            yield from (b for b in range(end, start, -1) if any(keys[b - 1] in ends for ends in stored))
        end = start
