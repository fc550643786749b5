"""Queues for policies that order every chunk, under the rule that only the tail of a prefix may be evicted.

The policies of the literature evict whatever is at the old end of a queue. Here that may be a chunk that others
follow. It is then set aside, so that later evictions do not look at it, and returns to the old end when the last of
those is removed: it is the next victim unless it was used in the meantime. On the shared trace that hits as often as
giving it another round, or more often. Chunks that cannot be evicted for another reason (pinned, unfinished) keep
their place. They are few, one for each pin.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from typing import final

from tpu_offload.core.chunk_table import Entries
from tpu_offload.core.policies.base import Residents
from tpu_offload.types import ChunkKey


@final
class ChunkQueue:
    """Resident chunks, the next victim first, each with a number whose meaning is the policy's.

    Attributes:
      order: chunks that await eviction. Policies add and remove chunks as they like.
      aside: chunks that reached the old end of `order` when others followed them.
    """

    __slots__ = ("_kept", "aside", "order")

    def __init__(self) -> None:
        self.order: OrderedDict[ChunkKey, int] = OrderedDict()
        self.aside: dict[ChunkKey, int] = {}
        self._kept: list[tuple[ChunkKey, int]] = []

    def __len__(self) -> int:
        return len(self.order) + len(self.aside) + len(self._kept)

    def take(self, key: ChunkKey) -> int | None:
        """Removes a chunk and returns its number; None when it is not in this queue. O(1)."""
        number = self.order.pop(key, None)
        return self.aside.pop(key, None) if number is None else number

    def clear(self) -> list[Entries]:
        """Removes all chunks; returns what held them. O(1)."""
        held: list[Entries] = [self.order, self.aside]
        self.order, self.aside = OrderedDict(), {}
        return held

    def recall(self, key: ChunkKey) -> None:
        """This chunk may be a leaf now: if it was set aside, it is the next victim. O(1)."""
        number = self.aside.pop(key, None)
        if number is not None:
            self.order[key] = number
            self.order.move_to_end(key, last=False)

    def evict_run(
        self, num_chunks: int, residents: Residents, *, keep: Callable[[ChunkKey, int], bool] | None = None
    ) -> tuple[list[ChunkKey], ChunkKey | None]:
        """Evicts the first chunk of `order`, and the next ones as long as each is the parent of the one before.

        If the first cannot be evicted, it is set aside, or kept out of `order` until `end_eviction`.

        Args:
          num_chunks: at most this many.
          residents: the resident chunks.
          keep: whether a chunk, given its number, is to be kept; not asked about the first.
        Returns:
          The evicted chunks, and the one before them in their prefix if that is a leaf now.
        """
        run = _Run(self.order, num_chunks, keep)
        num_evicted, stopped_at = residents.evict_tail(run.keys[0], num_chunks, until=run, singly=True)
        keys = run.keys
        if num_evicted < len(keys):  # the last of them is pinned or unfinished, or another follows it
            key = keys.pop()
            if residents.is_leaf(key):
                self._kept.append((key, run.number))
            else:
                self.aside[key] = run.number
        elif stopped_at is not None and residents.is_leaf(stopped_at):
            return keys, stopped_at
        return keys, None

    def end_eviction(self) -> None:
        """Returns chunks that cannot be evicted to their places in `order`. O(their number)."""
        for key, number in reversed(self._kept):
            self.order[key] = number
            self.order.move_to_end(key, last=False)
        self._kept.clear()


@final
class _Run:
    """Chunks popped from the old end of an order while an eviction walks up their prefix; tells it where to stop."""

    __slots__ = ("_keep", "_max_chunks", "_order", "keys", "number")

    def __init__(
        self, order: OrderedDict[ChunkKey, int], max_chunks: int, keep: Callable[[ChunkKey, int], bool] | None
    ) -> None:
        self._order = order
        self._max_chunks = max_chunks
        self._keep = keep
        key, self.number = order.popitem(last=False)
        self.keys = [key]

    def __contains__(self, key: object) -> bool:
        """Whether `key` is not the next in the order, or is kept. If neither, it is evicted next and popped here."""
        order = self._order
        if next(iter(order), None) != key or len(self.keys) == self._max_chunks:
            return True
        number = order[key]  # type: ignore[index]
        if self._keep is not None and self._keep(key, number):  # type: ignore[arg-type]
            return True
        del order[key]  # type: ignore[arg-type]
        self.number = number
        self.keys.append(key)  # type: ignore[arg-type]
        return False


def check_queues(queues: Iterable[ChunkQueue], leaves: Collection[ChunkKey], residents: Residents) -> None:
    """Raises AssertionError unless each chunk is resident and in one place, and each leaf in some `order`."""
    ordered = [key for queue in queues for key in queue.order]
    aside = [key for queue in queues for key in queue.aside]
    assert all(key in residents for key in [*ordered, *aside]), "a chunk in a queue is not resident"
    assert len({*ordered, *aside}) == len(ordered) + len(aside), "a chunk is in two places"
    assert set(leaves) <= set(ordered), "a leaf is not in the order: it would never be evicted"
