"""W-TinyLFU: a chunk that leaves the window stays only if it was used more often than what it would push out.

Chunks enter a window, 1 % of the tier, least recently used first. The main part, the rest, has chunks on probation
and, up to four fifths of it, protected ones that were used again there. What leaves the window is held against the
next to go of the main part, by how often a sketch has seen them used; the loser is evicted, on a tie the newcomer.

The published algorithm decides about one entry at a time, and an entry of the request that it is working on can be
the loser. Here a request's chunks all come in, so more of them than the window is long push some of the main part out
without a comparison, and the window stays longer than its share until chunks that win have refilled the main part:
into that gap also goes a chunk of the window that is used again. Protected are four fifths of what the main part really
has, or nothing could prove itself on probation while it is short (0.0545 against 0.0584 of the blocks of the shared
trace at 0.5 %).

References:
  Einziger, Friedman, Manes: "TinyLFU: a highly efficient cache admission policy", ACM ToS 13 (2017).
"""

from collections.abc import Collection, Sequence
from typing import final

from tpu_offload.core.policies.base import EvictionPolicy, Residents, Use
from tpu_offload.core.policies.queues import ChunkQueue, check_queues
from tpu_offload.core.policies.sketch import CountSketch
from tpu_offload.types import ChunkKey

_WINDOW_SHARE = 0.01
_PROTECTED_SHARE = 0.8


@final
class WTinyLFUPolicy(EvictionPolicy):
    """W-TinyLFU at the level of chunks, tails before heads.

    A chunk at the old end of its queue on which others hang is set aside until they are gone (see `queues`).
    """

    def __init__(self) -> None:
        # The number of a chunk is the last use that counted.
        self._window = ChunkQueue()
        self._probation = ChunkQueue()
        self._protected = ChunkQueue()
        self._queues = (self._protected, self._probation, self._window)
        self._sketch = CountSketch()
        self._max_chunks = self._max_window = self._max_main = 0

    def resize(self, num_chunks: int) -> None:
        """See the base class. O(num_chunks) where the sketch grows."""
        self._max_chunks = num_chunks
        self._max_window = max(1, int(num_chunks * _WINDOW_SHARE))
        self._max_main = max(0, num_chunks - self._max_window)
        self._sketch.resize(num_chunks)

    @property
    def _num_main(self) -> int:
        return len(self._probation) + len(self._protected)

    def insert(self, use: Use, keys: Sequence[ChunkKey], parent: ChunkKey | None) -> None:
        """See the base class. O(chunks)."""
        self._sketch.add(keys)
        window, probation = self._window, self._probation
        order = window.order
        order.update(dict.fromkeys(reversed(keys), use.use_id))
        if len(window) + self._num_main < self._max_chunks:  # it is filling up: there is nothing to compare with
            for _ in range(min(len(window) - self._max_window, len(order))):
                key, number = order.popitem(last=False)
                probation.order[key] = number

    def touch(self, use: Use, keys: Sequence[ChunkKey], num_chunks: int, residents: Residents) -> None:
        """See the base class. O(num_chunks)."""
        window, probation, protected = self._window, self._probation, self._protected
        use_id = use.use_id
        counted: list[ChunkKey] = []
        room = self._max_main - self._num_main
        for key in reversed(keys[:num_chunks]):
            for queue in self._queues:
                last = queue.take(key)
                if last is not None:
                    break
            else:
                continue
            if last < use_id:  # a use counts once, and not at all after a later one: they ran side by side
                counted.append(key)
                last = use_id
                if queue is probation:
                    queue = protected
                elif queue is window and room > 0:
                    queue = probation
                    room -= 1
            queue.order[key] = last
        self._sketch.add(counted)
        for _ in range(min(len(protected) - int(_PROTECTED_SHARE * self._num_main), len(protected.order))):
            key, last = protected.order.popitem(last=False)
            probation.order[key] = last

    def remove(self, key: ChunkKey, parent: ChunkKey | None) -> None:
        """See the base class. O(1)."""
        for queue in self._queues:
            queue.take(key)
            if parent is not None:
                queue.recall(parent)

    def evict(self, num_chunks: int, residents: Residents) -> None:
        """See the base class. O(num_chunks + chunks that win, are set aside or may not go)."""
        window, probation = self._window, self._probation
        while num_chunks:
            main = probation if probation.order else self._protected
            # The chunks that this makes room for will be in the window, which then is too long.
            if window.order and main.order and len(window) + num_chunks > self._max_window:
                candidate = next(iter(window.order))
                if self._wins(candidate, next(iter(main.order))):
                    if self._num_main >= self._max_main:
                        if not self._evict(main, residents):
                            continue
                        num_chunks -= 1
                    number = window.take(candidate)
                    assert number is not None
                    probation.order[candidate] = number
                    continue
                num_chunks -= self._evict(window, residents)
            elif main.order or window.order:
                num_chunks -= self._evict(main if main.order else window, residents)
            else:
                break
        for queue in self._queues:
            queue.end_eviction()

    def _wins(self, candidate: ChunkKey, victim: ChunkKey) -> bool:
        return self._sketch.estimate(candidate) > self._sketch.estimate(victim)

    def _evict(self, queue: ChunkQueue, residents: Residents) -> bool:
        gone, leaf = queue.evict_first(residents)
        if leaf is not None:
            for other in self._queues:
                other.recall(leaf)
        return gone is not None

    def check_invariants(self, leaves: Collection[ChunkKey], residents: Residents) -> None:
        """See the base class."""
        check_queues(self._queues, leaves, residents)
