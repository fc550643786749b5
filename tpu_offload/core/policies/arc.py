"""ARC: recency and frequency share the tier, in proportions that adapt to hits on ghosts.

Chunks used once are in one list, those used again in another, each with the least recently used first, and each
with a list of ghosts: keys of chunks that were evicted from it. A chunk that is saved again while its ghost exists
would have been a hit in a longer list, so the target length of that list grows.

The published algorithm makes room for one page at a time, and moves the target for a ghost hit before the eviction for
that page. Here all evictions for a request come first, and its ghost hits are counted as it is inserted. While a
request makes room, the chunks that it will insert count as used once already.

References:
  Megiddo, Modha: "ARC: a self-tuning, low overhead replacement cache", FAST 2003.
"""

from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import final

from tpu_offload.core.chunk_table import Entries
from tpu_offload.core.policies.base import EvictionPolicy, Residents, Use
from tpu_offload.core.policies.queues import ChunkQueue, check_queues
from tpu_offload.types import ChunkKey


@final
class ARCPolicy(EvictionPolicy):
    """ARC at the level of chunks, tails before heads.

    A chunk at the old end of its list that others follow is set aside until they are removed (see `queues`).
    """

    def __init__(self) -> None:
        # T1, T2, B1 and B2 of the paper; the number of a chunk in T1 is the id of its last use.
        self._once = ChunkQueue()
        self._again = ChunkQueue()
        self._once_ghosts: OrderedDict[ChunkKey, None] = OrderedDict()
        self._again_ghosts: OrderedDict[ChunkKey, None] = OrderedDict()
        self._max_chunks = 0
        self._target = 0.0  # of the length of `_once`

    def resize(self, num_chunks: int) -> None:
        """See the base class. O(ghosts removed)."""
        self._max_chunks = num_chunks
        self._target = min(self._target, num_chunks)
        self._forget_ghosts()

    def insert(self, use: Use, keys: Sequence[ChunkKey], parent: ChunkKey | None, depth: int) -> None:
        """See the base class. O(chunks)."""
        once, again = self._once.order, self._again.order
        once_ghosts, again_ghosts = self._once_ghosts, self._again_ghosts
        use_id = use.use_id
        if once_ghosts.keys().isdisjoint(keys) and again_ghosts.keys().isdisjoint(keys):
            once.update(dict.fromkeys(reversed(keys), use_id))
            self._forget_ghosts()
            return
        for key in reversed(keys):
            if key in once_ghosts:
                step = max(1.0, len(again_ghosts) / len(once_ghosts))
                self._target = min(self._max_chunks, self._target + step)
                del once_ghosts[key]
                again[key] = use_id
            elif key in again_ghosts:
                step = max(1.0, len(once_ghosts) / len(again_ghosts))
                self._target = max(0.0, self._target - step)
                del again_ghosts[key]
                again[key] = use_id
            else:
                once[key] = use_id
        self._forget_ghosts()

    def touch(self, use: Use, keys: Sequence[ChunkKey], num_chunks: int, residents: Residents) -> None:
        """See the base class. O(num_chunks)."""
        once, again = self._once.order, self._again.order
        once_aside, again_aside = self._once.aside, self._again.aside
        once_get, to_end = once.get, again.move_to_end
        use_id = use.use_id
        for key in reversed(keys[:num_chunks]):
            if key in again:
                to_end(key)
            elif (last := once_get(key)) is not None:
                # A use counts once, and not at all after a later one: their requests ran concurrently.
                if last < use_id:
                    del once[key]
                    again[key] = use_id
                else:
                    once.move_to_end(key)
            elif key in again_aside:
                again[key] = again_aside.pop(key)
            elif key in once_aside:
                last = once_aside.pop(key)
                (again if last < use_id else once)[key] = max(last, use_id)

    def remove(self, key: ChunkKey, parent: ChunkKey | None) -> None:
        """See the base class. O(1)."""
        self._once.take(key)
        self._again.take(key)
        if parent is not None:
            self.became_leaf(parent)

    def became_leaf(self, key: ChunkKey) -> None:
        """See the base class. O(1)."""
        self._once.recall(key)
        self._again.recall(key)

    def clear(self) -> list[Entries]:
        """See the base class."""
        ghosts: list[Entries] = [self._once_ghosts, self._again_ghosts]
        self._once_ghosts, self._again_ghosts = OrderedDict(), OrderedDict()
        return [*self._once.clear(), *self._again.clear(), *ghosts]

    def evict(self, num_chunks: int, residents: Residents) -> None:
        """See the base class. O(num_chunks + chunks set aside + those that cannot be evicted)."""
        once, again = self._once, self._again
        num_left = num_chunks
        while num_left:
            num_short = int(self._target) - (len(once) + num_chunks - num_left) + 1
            if num_short > 0:  # chunks used once are below their target
                num_evicted = self._evict_again(min(num_left, num_short), residents)
                num_evicted = num_evicted or self._evict_once(num_left, residents)
            else:
                num_evicted = self._evict_once(num_left, residents) or self._evict_again(num_left, residents)
            if not num_evicted:
                break
            num_left -= num_evicted
        once.end_eviction()
        again.end_eviction()
        self._forget_ghosts()

    def _evict_once(self, num_chunks: int, residents: Residents) -> int:
        return self._evict(self._once, self._once_ghosts, num_chunks, residents)

    def _evict_again(self, num_chunks: int, residents: Residents) -> int:
        return self._evict(self._again, self._again_ghosts, num_chunks, residents)

    def _evict(
        self, queue: ChunkQueue, ghosts: OrderedDict[ChunkKey, None], num_chunks: int, residents: Residents
    ) -> int:
        """Evicts consecutive chunks of one prefix, at most this many; 0 when none can be evicted."""
        while queue.order:
            evicted, leaf = queue.evict_run(num_chunks, residents)
            if leaf is not None:
                self.became_leaf(leaf)
            if evicted:
                ghosts.update(dict.fromkeys(evicted))
                return len(evicted)
        return 0

    def _forget_ghosts(self) -> None:
        """As in the paper: T1 and its ghosts together are at most as long as the tier, all four lists twice as long."""
        most, num_once = self._max_chunks, len(self._once)
        while self._once_ghosts and num_once + len(self._once_ghosts) > most:
            self._once_ghosts.popitem(last=False)
        num_left = max(0, 2 * most - num_once - len(self._again) - len(self._once_ghosts))
        while len(self._again_ghosts) > num_left:
            self._again_ghosts.popitem(last=False)

    def check_invariants(self, leaves: Collection[ChunkKey], residents: Residents) -> None:
        """See the base class."""
        check_queues((self._once, self._again), leaves, residents)
        ghosts = [*self._once_ghosts, *self._again_ghosts]
        assert len(set(ghosts)) == len(ghosts) <= 2 * self._max_chunks, "too many ghosts"
        assert not any(key in residents for key in ghosts), "a chunk and its ghost"
