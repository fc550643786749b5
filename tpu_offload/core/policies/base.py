"""What an eviction policy is asked, and what it is told."""

import abc
import dataclasses
from collections.abc import Collection, Container, Sequence
from typing import final

from tpu_offload.core.big_tables import Entries
from tpu_offload.types import ChunkKey


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Use:
    """One request's use of chunks: all that a policy is told between its match and its end is the same use.

    Attributes:
      use_id: grows from one use to the next; never used again.
      priority: what a request of higher priority uses is kept longer than all that only lower ones have used.
      num_in_hbm: so many leading chunks of its prompt were in HBM: this tier was not asked for them.
    """

    use_id: int
    priority: int = 0
    num_in_hbm: int = 0


class Residents(abc.ABC):
    """The resident chunks as a policy may see and evict them. The chunk index implements it."""

    @abc.abstractmethod
    def __contains__(self, key: ChunkKey) -> bool:
        """Whether the chunk is resident. O(1)."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """How many chunks are resident. O(1)."""

    @abc.abstractmethod
    def is_leaf(self, key: ChunkKey) -> bool:
        """Whether no resident chunk hangs on this resident one. O(1)."""

    @abc.abstractmethod
    def evict(
        self, key: ChunkKey, num_chunks: int, *, stop: Container[ChunkKey] = (), singly: bool = False
    ) -> tuple[int, ChunkKey | None]:
        """Evicts a chunk and then, from tail to head, those before it in its prefix.

        It ends at a chunk that may not go now (pinned, unfinished, or another chunk hangs on it).

        Args:
          key: a resident chunk.
          num_chunks: at most this many, at least 1.
          stop: chunks to end at, `key` itself excepted.
          singly: `stop` is asked about each chunk once, when it is the next to go, and one that it lets go does go,
            unless it may not. Else it may be asked about chunks of which most will not go.
        Returns:
          How many went, and the resident chunk it ended at; None when the prefix is gone to its head.
        """


class EvictionPolicy(abc.ABC):
    """Orders the resident chunks by how little they would be missed.

    The chunk index owns the chunks and calls the policy, always from the scheduler's thread. The policy
    stores keys only. It is told of whole prefixes, head first, because a chunk is worth nothing
    without every chunk before it: nothing but the tail of a prefix can be evicted. So a policy that
    orders prefixes may look at their tails only and pay nothing for each chunk, and one that orders
    chunks has all their keys.

    A request is told of several times: when it loads, with each part of it that is saved, at its end. They
    carry the same `Use`, so that a policy that counts uses counts one.
    """

    def resize(self, num_chunks: int) -> None:  # noqa: B027 (most do not ask)
        """The tier has room for this many chunks from now on; told before any chunk, and whenever it changes."""

    @abc.abstractmethod
    def insert(self, use: Use, keys: Sequence[ChunkKey], parent: ChunkKey | None) -> None:
        """A request saved these chunks and uses them and all before them. They follow each other, head first.

        Args:
          use: the request's.
          keys: at least one; none is known. A chunk that hung on one of them before that was lost hangs on it again.
          parent: the chunk before them, which is resident; None when they begin a prompt, or it has another priority.
        """

    @abc.abstractmethod
    def touch(self, use: Use, keys: Sequence[ChunkKey], num_chunks: int, residents: Residents) -> None:
        """A request used the first `num_chunks` of `keys`, head first. Those that are not resident are passed over."""

    @abc.abstractmethod
    def remove(self, key: ChunkKey, parent: ChunkKey | None) -> None:
        """A chunk is gone for another reason than `evict`: its bytes were lost or never came.

        Args:
          key: the chunk.
          parent: the chunk before it in its prefix, if that is resident; it may be a leaf now.
        """

    @abc.abstractmethod
    def uncover(self, key: ChunkKey) -> None:
        """A chunk of this policy may be a leaf now: one of another priority, and policy, that hung on it is gone."""

    @abc.abstractmethod
    def clear(self) -> list[Entries]:
        """All chunks are gone, and so is what was known of any that went before. What was learnt stays. O(1).

        Those that outlive it are inserted again. By their first use, `use_id` -1, they are older than all others.

        Returns:
          What it held, to which it keeps no reference: dicts, sets, lists and deques that the caller empties bit by
          bit, because a million entries are not freed in a moment.
        """

    @abc.abstractmethod
    def evict(self, num_chunks: int, residents: Residents) -> None:
        """Evicts up to `num_chunks` chunks by `residents.evict`; fewer only when no more may go."""

    @abc.abstractmethod
    def check_invariants(self, leaves: Collection[ChunkKey], residents: Residents) -> None:
        """Raises AssertionError unless it knows only resident chunks and can reach every one. For tests.

        Args:
          leaves: the resident chunks that no other hangs on.
          residents: all of them.
        """
