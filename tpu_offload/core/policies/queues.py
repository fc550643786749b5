"""Queues for policies that order every chunk, under the rule that only the tail of a prefix may go.

The policies of the literature take whatever is at the old end of a queue. Here that may be a chunk on which
others hang. It is set aside then, out of the way of later evictions, and is back at the old end as soon as
the last of those is gone: its turn has come, so it goes next unless it was used in the meantime. On the shared trace
that hits as often as giving it another round or more often, and an eviction never looks at it again in vain.
Chunks that may not go for another reason (pinned, unfinished) keep their place. They are few, one for each pin.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable
from typing import final

from tpu_offload.core.policies.base import Residents
from tpu_offload.types import ChunkKey


@final
class ChunkQueue:
    """Resident chunks, the next to go first, each with a number that means something to the policy.

    Attributes:
      order: those whose turn has not come. Policies put chunks in and take them out as they like.
      aside: those whose turn came when others hung on them.
    """

    __slots__ = ("_kept", "aside", "order")

    def __init__(self) -> None:
        self.order: OrderedDict[ChunkKey, int] = OrderedDict()
        self.aside: dict[ChunkKey, int] = {}
        self._kept: list[tuple[ChunkKey, int]] = []

    def __len__(self) -> int:
        return len(self.order) + len(self.aside) + len(self._kept)

    def take(self, key: ChunkKey) -> int | None:
        """Takes a chunk out, wherever it is; None when it is not in this queue. O(1)."""
        number = self.order.pop(key, None)
        return self.aside.pop(key, None) if number is None else number

    def recall(self, key: ChunkKey) -> None:
        """Nothing hangs on this chunk any more: if it was set aside, it is the next to go. O(1)."""
        number = self.aside.pop(key, None)
        if number is not None:
            self.order[key] = number
            self.order.move_to_end(key, last=False)

    def evict_first(self, residents: Residents) -> tuple[ChunkKey | None, ChunkKey | None]:
        """Evicts the first chunk of `order`; where it may not go it is kept or set aside until `end_eviction`.

        Returns:
          The chunk that went, None if it may not, and the one before it in its prefix if nothing hangs on that now.
        """
        key, number = self.order.popitem(last=False)
        num_evicted, rest = residents.evict(key, 1)
        if num_evicted:
            return key, rest if rest is not None and residents.is_leaf(rest) else None
        if residents.is_leaf(key):
            self._kept.append((key, number))
        else:
            self.aside[key] = number
        return None, None

    def end_eviction(self) -> None:
        """Gives those that may not go their places back. O(their number)."""
        for key, number in reversed(self._kept):
            self.order[key] = number
            self.order.move_to_end(key, last=False)
        self._kept.clear()


def check_queues(queues: Iterable[ChunkQueue], leaves: Collection[ChunkKey], residents: Residents) -> None:
    """Raises AssertionError unless each chunk is resident and in one place, and each leaf in some `order`."""
    ordered = [key for queue in queues for key in queue.order]
    aside = [key for queue in queues for key in queue.aside]
    assert all(key in residents for key in [*ordered, *aside]), "a chunk that is gone is in a queue"
    assert len({*ordered, *aside}) == len(ordered) + len(aside), "a chunk is in two places"
    assert set(leaves) <= set(ordered), "a leaf is not in the order: it would never be evicted"
