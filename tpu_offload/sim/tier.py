"""The host tier of a simulation: the library's own chunk index, asked in the order in which its scheduler asks."""

from collections.abc import Sequence
from typing import final

from tpu_offload.core.index import ChunkIndex
from tpu_offload.core.policies import EvictionPolicy, Use
from tpu_offload.types import ChunkKey


@final
class Tier:
    """Chunks of one block each. What is saved is on its way until `settle`, and cannot be evicted or found before.

    Args:
      policy: decides which chunk goes.
      num_chunks: room.
      record: whether `take_evicted` is asked.
    """

    def __init__(self, policy: EvictionPolicy, *, num_chunks: int, record: bool = False) -> None:
        self._index = ChunkIndex(policy, record=record)
        self._index.grow(num_chunks)
        self._on_the_way: list[tuple[Sequence[ChunkKey], list[int]]] = []
        self.num_saved = 0
        self.num_dropped = 0

    @property
    def num_evicted(self) -> int:
        """Chunks evicted so far."""
        return self._index.num_evicted

    def find(self, keys: Sequence[ChunkKey]) -> int:
        """How many leading chunks of a prefix are here."""
        return len(self._index.find(keys))

    def touch(self, use: Use, keys: Sequence[ChunkKey], num_chunks: int) -> None:
        """A request uses the first chunks of a prefix."""
        if num_chunks:
            self._index.touch(use, keys, num_chunks)

    def pin(self, keys: Sequence[ChunkKey]) -> None:
        """Keeps a prefix that is here, until unpinned."""
        if keys:
            self._index.pin(keys)

    def unpin(self, keys: Sequence[ChunkKey]) -> None:
        """Takes a pin back."""
        if keys:
            self._index.unpin(keys)

    def save(self, use: Use, keys: Sequence[ChunkKey], end: int) -> Sequence[ChunkKey]:
        """Brings the first `end` chunks of a prefix in here, as far as there is room; returns those that are new."""
        missing, _ = self._index.missing(keys, 0, end)
        if not missing:
            return ()
        # Those that are here are the head of the prefix, as nothing is ever lost: the last of them holds the others.
        first = missing[0]
        slots = self._index.allocate(use, keys, missing, protected=keys[max(0, first - 1) : first])
        self.num_dropped += len(missing) - len(slots)
        self.num_saved += len(slots)
        new = keys[first : first + len(slots)]
        if new:
            self._on_the_way.append((new, slots))
        return new

    def settle(self) -> None:
        """The copies of all that was saved are done."""
        for keys, slots in self._on_the_way:
            self._index.complete(keys, slots, success=True)
        self._on_the_way.clear()

    def take_evicted(self) -> list[ChunkKey]:
        """What was evicted since the last call, in order."""
        return [key for keys, found in self._index.take_changes() if not found for key in keys or ()]

    def check_invariants(self) -> None:
        """Raises AssertionError unless index and policy agree. For tests."""
        self._index.check_invariants()
