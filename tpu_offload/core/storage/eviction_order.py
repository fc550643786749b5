"""In which order the records of a storage tier are evicted: what each order does, and least recently used first."""

import abc
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Protocol, final

from tpu_offload.core.chunk_table import Discarded
from tpu_offload.core.index.chunk_index import MAX_FREED
from tpu_offload.core.policies import Use
from tpu_offload.types import ChunkKey

type WrittenChunk = tuple[Use, ChunkKey, ChunkKey]
"""The use of the request that saved a chunk, the chunk, and the one before it in its prefix, or `NO_PARENT`."""


class Names(Protocol):
    """Names of records."""

    def __contains__(self, name: object) -> bool: ...

    def __iter__(self) -> Iterator[ChunkKey]: ...

    def __len__(self) -> int: ...


def run_end(names: Names, keys: Sequence[ChunkKey], first: int) -> int:
    """Where the run of chunks ends that are among the names, from `first` on."""
    for i in range(first, len(keys)):
        if keys[i] not in names:
            return i
    return len(keys)


class EvictionOrder(abc.ABC):
    """The stored records of one tier, in the order in which they are evicted.

    Attributes:
      stored: all of them, as they are at any time.
      expects: whether `expect` is of use.
      compares: whether `begin` has to be told what is found above.
    """

    stored: Names
    expects: bool = False
    compares: bool = False

    @abc.abstractmethod
    def expect(self, chunks: Sequence[WrittenChunk]) -> None:
        """Chunks are in the host tier, and are written when it evicts them; of each prefix the head first."""

    @abc.abstractmethod
    def drop_expected(self, name: ChunkKey) -> None:
        """A chunk that may be expected is not written."""

    @abc.abstractmethod
    def add(self, name: ChunkKey) -> None:
        """A record is stored of which nothing else is known; of several the least recently used is added first."""

    @abc.abstractmethod
    def add_written(self, chunks: Sequence[WrittenChunk]) -> None:
        """Chunks were written, of each prefix the head first."""

    @abc.abstractmethod
    def remove(self, name: ChunkKey) -> None:
        """A stored record is not stored any more."""

    @abc.abstractmethod
    def host_evicted(self, chunks: Sequence[WrittenChunk], most: int) -> None:
        """The host tier has evicted these, in a tier that is written then. It is of use if the order `compares`.

        Args:
          chunks: those that the tier has and those that it has not, of each prefix the head first.
          most: how many of those that it has not it would write, the first ones.
        """

    def holds(self, name: ChunkKey) -> bool:
        """Whether a chunk is stored, and the host tier may reckon with that when it evicts."""
        return name in self.stored

    def begin(self, use: Use, keys: Sequence[ChunkKey], num_above: int) -> None:
        """A request uses this prefix, before anything of it is read or written.

        Args:
          use: its use.
          keys: all chunks of its prompt.
          num_above: how many of the first are found in the host tier and nearer tiers, if it `compares`.
        """
        self.use(use, keys)

    @abc.abstractmethod
    def use(self, use: Use, keys: Sequence[ChunkKey]) -> None:
        """A request uses this prefix; those that are not stored are skipped."""

    @abc.abstractmethod
    def touch(self, names: Iterable[ChunkKey]) -> None:
        """Records were read, the last one last."""

    @abc.abstractmethod
    def evict(self, num_records: int, kept: Container[ChunkKey]) -> Sequence[ChunkKey]:
        """Removes so many records, or fewer if `kept` are in the way; returns them, in order."""

    @abc.abstractmethod
    def clear(self) -> None:
        """Nothing is stored."""

    @abc.abstractmethod
    def tidy(self, is_coming: Callable[[ChunkKey], bool]) -> None:
        """Frees some of the memory that `clear` has left, for a millisecond; called in every step.

        Args:
          is_coming: whether an expected chunk is still in the host tier or on its way from it. A few are asked about:
            those that the host tier has lost are dropped in this way.
        """

    @abc.abstractmethod
    def check_invariants(self) -> None:
        """Raises AssertionError unless it is consistent. For tests."""


@final
class RecencyOrder(EvictionOrder):
    """Least recently used first. Of a prefix the head counts as used last, so that its tail is evicted before it."""

    def __init__(self) -> None:
        self._discarded = Discarded()
        self._names: OrderedDict[ChunkKey, None] = OrderedDict()
        self.stored = self._names

    def add(self, name: ChunkKey) -> None:
        """See the base class."""
        self._names[name] = None

    def add_written(self, chunks: Sequence[WrittenChunk]) -> None:
        """See the base class."""
        for _, key, _ in reversed(chunks):
            self._names[key] = None

    def host_evicted(self, chunks: Sequence[WrittenChunk], most: int) -> None:
        """See the base class."""

    def remove(self, name: ChunkKey) -> None:
        """See the base class."""
        del self._names[name]

    def use(self, use: Use, keys: Sequence[ChunkKey]) -> None:
        """See the base class. O(keys)."""
        if self._names:
            self.touch(reversed(keys))

    def touch(self, names: Iterable[ChunkKey]) -> None:
        """See the base class."""
        own = self._names
        for name in names:
            if name in own:
                own.move_to_end(name)

    def evict(self, num_records: int, kept: Container[ChunkKey]) -> Sequence[ChunkKey]:
        """See the base class. Stops at one that is kept: those after it were used later, so most are in flight too."""
        evicted: list[ChunkKey] = []
        while len(evicted) < num_records and self._names:
            name = next(iter(self._names))
            if name in kept:
                break
            del self._names[name]
            evicted.append(name)
        return evicted

    def clear(self) -> None:
        """See the base class."""
        self._discarded.add(self._names)
        self._names = OrderedDict()
        self.stored = self._names

    def expect(self, chunks: Sequence[WrittenChunk]) -> None:
        """See the base class."""

    def drop_expected(self, name: ChunkKey) -> None:
        """See the base class."""

    def tidy(self, is_coming: Callable[[ChunkKey], bool]) -> None:
        """See the base class."""
        if self._discarded:
            self._discarded.free(MAX_FREED)

    def check_invariants(self) -> None:
        """See the base class."""
