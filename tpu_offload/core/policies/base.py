"""What an eviction policy is asked, and what it is told."""

import abc
from collections.abc import Callable, Sequence

from tpu_offload.types import ChunkKey


class EvictionPolicy(abc.ABC):
    """Orders the resident chunks by how little they would be missed.

    The chunk index owns the chunks and calls the policy, always from the scheduler's thread. The policy
    stores keys only. It is told of whole prefixes, head first, because a chunk is worth nothing
    without every chunk before it: it has to offer the tail of a prefix before its head.
    """

    @abc.abstractmethod
    def insert(self, keys: Sequence[ChunkKey]) -> None:
        """Chunks became resident. They follow each other in one prefix, head first; none is known."""

    @abc.abstractmethod
    def touch(self, keys: Sequence[ChunkKey]) -> None:
        """A request used this prefix, head first. Keys that are not resident are passed over."""

    @abc.abstractmethod
    def remove(self, key: ChunkKey) -> None:
        """A chunk is gone, evicted or not.

        Raises:
          KeyError: the chunk is not known.
        """

    @abc.abstractmethod
    def victims(self, num_chunks: int, choose: Callable[[ChunkKey], bool]) -> list[ChunkKey]:
        """Names up to `num_chunks` chunks to evict, and changes nothing.

        Args:
          num_chunks: how many slots are wanted.
          choose: asked once about each candidate, in the order of the policy. True makes it a victim;
            False means that it may not go now (pinned, unfinished, or other chunks hang on it).
        Returns:
          The chosen ones in eviction order; fewer than `num_chunks` when no more may go.
        """

    @abc.abstractmethod
    def __len__(self) -> int:
        """Number of resident chunks."""

    @abc.abstractmethod
    def __contains__(self, key: ChunkKey) -> bool:
        """Whether the chunk is known to be resident."""
