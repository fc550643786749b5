"""How long ago evicted chunks were last used, for the balance between the pools of the host tier."""

from collections.abc import Callable, Iterable, Sequence
from typing import final

from tpu_offload.core.chunk_table import ChunkTable, Entries
from tpu_offload.core.policies import Use
from tpu_offload.types import ChunkKey


@final
class UseAges:
    """The last use of resident chunks, counted in requests.

    A request that uses a prefix uses each chunk of it, and prefixes are evicted from their tails. So only the tails of
    uses are recorded, and when one is evicted, the chunk before it was used no earlier.

    Args:
      on_evict: called with a number of chunks that were evicted, and how many requests ago they were last used.
    """

    def __init__(self, on_evict: Callable[[int, int], None]) -> None:
        self._on_evict = on_evict
        self._last_use: ChunkTable[int] = ChunkTable()
        self.now = 0

    def use(self, use: Use, tail: ChunkKey) -> None:
        """A request used a resident chunk and all before it."""
        self.now = max(self.now, use.use_id)
        self._raise(tail, use.use_id)

    def evicted(self, keys: Sequence[ChunkKey], before: ChunkKey | None) -> None:
        """These chunks, tail first, were evicted for lack of slots; `before` is the resident one before them."""
        last_use = self.removed(keys, before)
        if last_use is not None:
            self._on_evict(len(keys), max(0, self.now - last_use))

    def removed(self, keys: Iterable[ChunkKey], before: ChunkKey | None) -> int | None:
        """These chunks were removed for any reason; returns when they were last used, None if that is not known."""
        parts, last_use = self._last_use.parts, -1
        for key in keys:
            last_use = max(last_use, parts[key[0]].pop(key, -1))
        if last_use < 0:
            return None
        if before is not None:
            self._raise(before, last_use)
        return last_use

    def clear(self) -> list[Entries]:
        """Forgets all chunks; returns what held them, for the caller to free incrementally."""
        held: list[Entries] = [*self._last_use.parts]
        self._last_use = ChunkTable()
        return held

    def check_invariants(self, resident: ChunkTable[int]) -> None:
        """Raises AssertionError if a chunk is recorded that is not resident."""
        assert all(key in resident for key in self._last_use), "the last use of a chunk that is not there"

    def _raise(self, key: ChunkKey, use_id: int) -> None:
        part = self._last_use.parts[key[0]]
        part[key] = max(use_id, part.get(key, -1))
