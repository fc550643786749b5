"""Queues for policies that order every chunk, under the rule that only the tail of a prefix may go.

The policies of the literature take whatever is at the old end of a queue. Here that may be a chunk on which
others hang. It is set aside then, out of the way of later evictions, and is back at the old end as soon as
the last of those is gone: its turn has come, so it goes next unless it was used in the meantime. On the shared trace
that hits as often as giving it another round or more often, and an eviction never looks at it again in vain.
Chunks that may not go for another reason (pinned, unfinished) keep their place. They are few, one for each pin.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from typing import final

from tpu_offload.core.big_tables import Entries
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

    def clear(self) -> list[Entries]:
        """Forgets all; returns what it held. O(1)."""
        held: list[Entries] = [self.order, self.aside]
        self.order, self.aside = OrderedDict(), {}
        return held

    def recall(self, key: ChunkKey) -> None:
        """Nothing hangs on this chunk any more: if it was set aside, it is the next to go. O(1)."""
        number = self.aside.pop(key, None)
        if number is not None:
            self.order[key] = number
            self.order.move_to_end(key, last=False)

    def evict_run(
        self, num_chunks: int, residents: Residents, *, stays: Callable[[ChunkKey, int], bool] | None = None
    ) -> tuple[list[ChunkKey], ChunkKey | None]:
        """Evicts the first chunk of `order`, and those that come next as long as each hangs on the one after it.

        If the first may not go, it is kept or set aside until `end_eviction`.

        Args:
          num_chunks: at most this many.
          residents: where they are.
          stays: whether a chunk, with its number, is not to go now; not asked about the first.
        Returns:
          The chunks that went, and the one before them in their prefix if nothing hangs on that now.
        """
        run = _Run(self.order, num_chunks, stays)
        num_evicted, rest = residents.evict(run.keys[0], num_chunks, stop=run, singly=True)
        keys = run.keys
        if num_evicted < len(keys):  # the last of them is pinned or unfinished, or another hangs on it
            key = keys.pop()
            if residents.is_leaf(key):
                self._kept.append((key, run.number))
            else:
                self.aside[key] = run.number
        elif rest is not None and residents.is_leaf(rest):
            return keys, rest
        return keys, None

    def end_eviction(self) -> None:
        """Gives those that may not go their places back. O(their number)."""
        for key, number in reversed(self._kept):
            self.order[key] = number
            self.order.move_to_end(key, last=False)
        self._kept.clear()


@final
class _Run:
    """Chunks popped from the old end of an order, and what an eviction that walks up their prefix is to stop at."""

    __slots__ = ("_max_chunks", "_order", "_stays", "keys", "number")

    def __init__(
        self, order: OrderedDict[ChunkKey, int], max_chunks: int, stays: Callable[[ChunkKey, int], bool] | None
    ) -> None:
        self._order = order
        self._max_chunks = max_chunks
        self._stays = stays
        key, self.number = order.popitem(last=False)
        self.keys = [key]

    def __contains__(self, key: object) -> bool:
        """Whether `key` is not the next in the order, or stays; if it goes, it is popped."""
        order = self._order
        if next(iter(order), None) != key or len(self.keys) == self._max_chunks:
            return True
        number = order[key]  # type: ignore[index]
        if self._stays is not None and self._stays(key, number):  # type: ignore[arg-type]
            return True
        del order[key]  # type: ignore[arg-type]
        self.number = number
        self.keys.append(key)  # type: ignore[arg-type]
        return False


def check_queues(queues: Iterable[ChunkQueue], leaves: Collection[ChunkKey], residents: Residents) -> None:
    """Raises AssertionError unless each chunk is resident and in one place, and each leaf in some `order`."""
    ordered = [key for queue in queues for key in queue.order]
    aside = [key for queue in queues for key in queue.aside]
    assert all(key in residents for key in [*ordered, *aside]), "a chunk that is gone is in a queue"
    assert len({*ordered, *aside}) == len(ordered) + len(aside), "a chunk is in two places"
    assert set(leaves) <= set(ordered), "a leaf is not in the order: it would never be evicted"
