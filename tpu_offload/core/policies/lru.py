"""Least recently used, by request, the tail of a prefix before its head.

A request that uses a prefix uses each chunk of it, so a chunk is never less recent than those that follow
it. That is why only the tails of uses are ordered: a use of ten thousand chunks moves one key. Eviction
takes the oldest tail and continues towards the head. Each chunk on the way has the recency of the tail
that was evicted last, unless it is itself the tail of a use, which is later in the order.
"""

from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import final

from tpu_offload.core.chunk_table import Entries
from tpu_offload.core.policies.base import EvictionPolicy, Residents, Use
from tpu_offload.types import ChunkKey


@final
class LRUPolicy(EvictionPolicy):
    """Evicts the chunk whose last use is longest ago."""

    evicts_by_age = True

    def __init__(self) -> None:
        # Last chunks of uses, least recent first. Every leaf is among them; the others are leftovers of uses that a
        # longer one followed, or will be leaves when the chunks after them, used earlier, have been evicted.
        self._tails: OrderedDict[ChunkKey, None] = OrderedDict()

    def insert(self, use: Use, keys: Sequence[ChunkKey], parent: ChunkKey | None, depth: int) -> None:
        """See the base class. O(1)."""
        self._tails[keys[-1]] = None

    def touch(self, use: Use, keys: Sequence[ChunkKey], num_chunks: int, residents: Residents) -> None:
        """See the base class. O(1 + chunks at the end that are not resident)."""
        for i in range(num_chunks - 1, -1, -1):
            key = keys[i]
            if key in residents:
                self._tails[key] = None
                self._tails.move_to_end(key)
                return

    def remove(self, key: ChunkKey, parent: ChunkKey | None) -> None:
        """See the base class. O(1)."""
        self._tails.pop(key, None)
        if parent is not None:
            self.became_leaf(parent)

    def became_leaf(self, key: ChunkKey) -> None:
        """See the base class. O(1). As this is rare, the chunk counts as recent."""
        self._tails.setdefault(key, None)

    def clear(self) -> list[Entries]:
        """See the base class."""
        tails, self._tails = self._tails, OrderedDict()
        return [tails]

    def evict(self, num_chunks: int, residents: Residents) -> None:
        """See the base class. O(num_chunks + tails that cannot be evicted)."""
        tails = self._tails
        kept: dict[ChunkKey, None] = {}  # in order, older than all that is still in `tails`
        while num_chunks and tails:
            key, _ = tails.popitem(last=False)
            num_evicted, stopped_at = residents.evict_tail(key, num_chunks, until=tails)
            num_chunks -= num_evicted
            if stopped_at is None or stopped_at in tails:
                continue
            # With nothing older left, the chunks that follow it were used later: it is evicted right after them.
            if kept or residents.is_leaf(stopped_at):
                kept.pop(stopped_at, None)  # kept for an earlier use: this one counts
                kept[stopped_at] = None
        for key in reversed(kept):
            if key in residents:  # one that was no leaf may have been evicted after those that followed it
                tails[key] = None
                tails.move_to_end(key, last=False)

    def check_invariants(self, leaves: Collection[ChunkKey], residents: Residents) -> None:
        """See the base class."""
        assert all(key in residents for key in self._tails), "a chunk in the order is not resident"
        assert all(key in self._tails for key in leaves), "a leaf is not in the order: it would never be evicted"
