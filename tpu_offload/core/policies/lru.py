"""Least recently used, by request, the tail of a prefix before its head."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import final

from tpu_offload.core.policies.base import EvictionPolicy
from tpu_offload.types import ChunkKey


@final
class LRUPolicy(EvictionPolicy):
    """Evicts the chunk whose last use is longest ago.

    One use of a prefix moves its chunks to the recent end tail first, so that its head is the most
    recent of all. Going through the order from the old end then meets every tail before its head.
    """

    def __init__(self) -> None:
        self._order: OrderedDict[ChunkKey, None] = OrderedDict()  # least recent first

    def insert(self, keys: Sequence[ChunkKey]) -> None:
        """See the base class. O(len(keys))."""
        for key in reversed(keys):
            self._order[key] = None

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        """See the base class. O(len(keys))."""
        order = self._order
        for key in reversed(keys):
            if key in order:
                order.move_to_end(key)

    def remove(self, key: ChunkKey) -> None:
        """See the base class. O(1)."""
        del self._order[key]

    def victims(self, num_chunks: int, choose: Callable[[ChunkKey], bool]) -> list[ChunkKey]:
        """See the base class. O(num_chunks + candidates refused)."""
        chosen: list[ChunkKey] = []
        if num_chunks < 1:
            return chosen
        for key in self._order:
            if choose(key):
                chosen.append(key)
                if len(chosen) == num_chunks:
                    break
        return chosen

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._order
