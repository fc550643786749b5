"""The simulated host tier: the library's own chunk index, called in the same order as by its scheduler."""

from collections.abc import Callable, Sequence
from typing import final

from tpu_offload.core.index import ChunkIndex, ChunkState
from tpu_offload.core.policies import EvictionPolicy, Use
from tpu_offload.types import ChunkKey, Pool


@final
class Tier:
    """Chunks of one block each. Copies are in flight until `settle`; until then they can be neither found nor evicted.

    Args:
      policy: decides which chunk is evicted.
      num_chunks: capacity.
      record: whether `take_evicted` will be called.
      is_stored: whether storage has a chunk, which the policy may ask.
    """

    def __init__(
        self,
        policy: EvictionPolicy,
        *,
        num_chunks: int,
        record: bool = False,
        is_stored: Callable[[ChunkKey], bool] | None = None,
    ) -> None:
        self._index = ChunkIndex(policy, record=record)
        if is_stored is not None:
            self._index.set_is_stored(is_stored)
        self._index.grow(Pool.CHUNKS, num_chunks)
        self._on_the_way: list[tuple[Use, Sequence[ChunkKey], list[int]]] = []
        self.num_saved = 0
        self.num_promoted = 0
        self.num_dropped = 0

    @property
    def num_evicted(self) -> int:
        """Chunks evicted so far."""
        return self._index.num_evicted

    def find(self, keys: Sequence[ChunkKey]) -> int:
        """The number of leading chunks of a prefix that are resident."""
        return len(self._index.find(keys))

    def touch(self, use: Use, keys: Sequence[ChunkKey], num_chunks: int) -> None:
        """Records a request's use of the first chunks of a prefix."""
        if num_chunks:
            self._index.touch(use, keys, num_chunks)

    def pin(self, keys: Sequence[ChunkKey]) -> None:
        """Pins a resident prefix."""
        if keys:
            self._index.pin(keys)

    def unpin(self, keys: Sequence[ChunkKey]) -> None:
        """Releases a pin."""
        if keys:
            self._index.unpin(keys)

    def save(self, use: Use, keys: Sequence[ChunkKey], end: int) -> Sequence[ChunkKey]:
        """Saves the first `end` chunks of a prefix as far as there is room; returns the new ones."""
        missing, _ = self._index.missing(keys, 0, end)
        if not missing:
            return ()
        # The resident chunks are the head of the prefix, as nothing is ever lost; protecting the last protects all.
        first = missing[0]
        slots = self._index.allocate(use, keys, missing, protected=keys[max(0, first - 1) : first])
        self.num_dropped += len(missing) - len(slots)
        self.num_saved += len(slots)
        new = keys[first : first + len(slots)]
        if new:
            self._on_the_way.append((use, new, slots))
        return new

    def promote(self, use: Use, keys: Sequence[ChunkKey], first: int, num_chunks: int) -> Sequence[ChunkKey]:
        """Reads chunks of a prefix from `first` on, the first that is missing; returns those that had room."""
        slots = self._index.allocate(
            use, keys, range(first, first + num_chunks), protected=keys[max(0, first - 1) : first]
        )
        new = keys[first : first + len(slots)]
        self.num_promoted += len(new)
        if new:
            self._on_the_way.append((use, new, slots))
        return new

    @property
    def has_copies(self) -> bool:
        """Whether copies are in flight."""
        return bool(self._on_the_way)

    def settle(self) -> list[tuple[Use, Sequence[ChunkKey]]]:
        """Completes all copies in flight; returns their uses and chunks."""
        done: list[tuple[Use, Sequence[ChunkKey]]] = []
        for use, keys, slots in self._on_the_way:
            self._index.complete(keys, slots, success=True)
            done.append((use, keys))
        self._on_the_way.clear()
        return done

    def has(self, key: ChunkKey) -> bool:
        """Whether a chunk is resident."""
        return self._index.state(key) is ChunkState.READY

    def take_evicted(self) -> list[ChunkKey]:
        """The chunks evicted since the last call, in order."""
        return [key for change in self._index.take_changes() if not change.found for key in change.keys or ()]

    def check_invariants(self) -> None:
        """Raises AssertionError unless index and policy agree. For tests."""
        self._index.check_invariants()
