"""The contract of eviction policies, and what they see of the resident chunks."""

import abc
from collections.abc import Callable, Collection, Container, Sequence
from typing import ClassVar, Final, final

from tpu_offload.core.chunk_table import Entries
from tpu_offload.native import Given, mypyc_attr
from tpu_offload.types import ChunkKey

STORAGE_WORTH: Final = 0.75  # until times are measured: as if a read took a quarter of the time to compute


@final
class Use:
    """One request's use of chunks: all calls to a policy between its match and its end have the same `use_id`.

    A save because HBM evicts blocks has a `Use` of its own, though no request uses the chunks then.

    Attributes:
      use_id: increases from one use to the next; unique.
      priority: chunks that a request of higher priority used are kept longer than those that only lower ones used.
      num_in_hbm: how many leading chunks of its prompt were in HBM, so that this tier was not asked for them.
      num_in_storage: how many leading chunks of its prompt were in storage when it was matched; they may be here, or in
        HBM, as well. 0 where a storage tier takes what this tier evicts, and for models with windows or states.
      storage_worth: what a hit there is worth, where one here is worth 1: the share of the time to compute these chunks
        that a read of them saves; 0 if they would not be read.
      is_request: False for a save because HBM evicts blocks.
    """

    __slots__ = ("is_request", "num_in_hbm", "num_in_storage", "priority", "storage_worth", "use_id")

    # Not a dataclass: the constructor of one is not compiled, and each request makes a use.
    def __init__(
        self,
        use_id: int,
        priority: int = 0,
        num_in_hbm: int = 0,
        is_request: bool = True,
        num_in_storage: int = 0,
        storage_worth: float = STORAGE_WORTH,
    ) -> None:
        self.use_id: Final = use_id
        self.priority: Final = priority
        self.num_in_hbm: Final = num_in_hbm
        self.is_request: Final = is_request
        self.num_in_storage: Final = num_in_storage
        self.storage_worth: Final = storage_worth

    def replace(
        self,
        *,
        priority: int | None = None,
        num_in_hbm: int | None = None,
        is_request: bool | None = None,
        num_in_storage: int | None = None,
        storage_worth: float | None = None,
    ) -> "Use":
        """The same use with other attributes; those that are None stay."""
        return Use(
            self.use_id,
            self.priority if priority is None else priority,
            self.num_in_hbm if num_in_hbm is None else num_in_hbm,
            self.is_request if is_request is None else is_request,
            self.num_in_storage if num_in_storage is None else num_in_storage,
            self.storage_worth if storage_worth is None else storage_worth,
        )

    def __repr__(self) -> str:
        others = f"priority={self.priority}, num_in_hbm={self.num_in_hbm}, is_request={self.is_request}"
        storage = f"num_in_storage={self.num_in_storage}, storage_worth={self.storage_worth:g}"
        return f"Use({self.use_id}, {others}, {storage})"


@mypyc_attr(allow_interpreted_subclasses=True)
class Residents(abc.ABC):
    """The resident chunks as a policy may see and evict them. The chunk index implements it.

    Attributes:
      is_stored: whether storage has a resident chunk, too, so that its eviction loses less. O(1). None without storage,
        where a storage tier takes what this tier evicts, and for models with windows or states.
    """

    is_stored: Callable[[ChunkKey], bool] | None = None

    @abc.abstractmethod
    def __contains__(self, key: ChunkKey) -> bool:
        """Whether the chunk is resident. O(1)."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """How many chunks are resident. O(1)."""

    @abc.abstractmethod
    def is_leaf(self, key: ChunkKey) -> bool:
        """Whether no resident chunk follows this resident one. O(1)."""

    @abc.abstractmethod
    def evict_tail(
        self, key: ChunkKey, max_chunks: Given[int], *, until: Container[ChunkKey] = (), singly: Given[bool] = False
    ) -> tuple[int, ChunkKey | None]:
        """Evicts a chunk and then, from tail to head, those before it in its prefix.

        It stops at a chunk that cannot be evicted now: pinned, unfinished, or followed by another chunk.

        Args:
          key: a resident chunk.
          max_chunks: at most this many, at least 1.
          until: chunks to stop at, `key` itself excepted.
          singly: `until` is asked about each chunk once, when it is the next victim; unless it contains that chunk, the
            chunk is evicted if it can be. Else `until` may be asked about chunks most of which are not evicted.
        Returns:
          How many were evicted, and the resident chunk it stopped at; None when the prefix is evicted to its head.
        """


@mypyc_attr(allow_interpreted_subclasses=True)
class EvictionPolicy(abc.ABC):
    """Orders the resident chunks by how little they would be missed.

    The chunk index owns the chunks and calls the policy, always from the scheduler's thread. The policy
    stores keys only. It gets whole prefixes, head first, because a chunk is worth nothing without every
    chunk before it: only the tail of a prefix can be evicted. So a policy that orders prefixes may look
    at their tails only and pay nothing for each chunk, and one that orders chunks has all their keys.

    One request causes several calls: when it loads, for each part of it that is saved, and at its end. They
    carry the same `Use`, so that a policy that counts uses counts one.

    Attributes:
      evicts_by_age: whether it evicts the chunks first whose last use is longest ago. Then the age of what it evicts
        says what more memory is worth, and in a tier with states chunks may get memory by it.
    """

    evicts_by_age: ClassVar[bool] = False

    def resize(self, num_chunks: int) -> Given[None]:  # noqa: B027 (most need no size)
        """The tier has room for this many chunks from now on. Called before any chunk, and at each change."""

    @abc.abstractmethod
    def insert(self, use: Use, keys: Sequence[ChunkKey], parent: ChunkKey | None, depth: int) -> Given[None]:
        """A request saved these chunks, and uses them and all before them.

        Args:
          use: the request's.
          keys: consecutive chunks of a prefix, head first, at least one; none is resident. Orphans of a chunk that was
            lost before are its children again.
          parent: the resident chunk before them; None when they begin a prompt, or when it has another priority.
          depth: how many chunks of the prompt come before them. After `clear` those whose predecessors are gone are
            inserted as if they began it.
        """

    @abc.abstractmethod
    def touch(self, use: Use, keys: Sequence[ChunkKey], num_chunks: int, residents: Residents) -> Given[None]:
        """A request used the first `num_chunks` of `keys`, head first. Those that are not resident are skipped."""

    @abc.abstractmethod
    def remove(self, key: ChunkKey, parent: ChunkKey | None) -> Given[None]:
        """A chunk was removed for another reason than `evict`: its bytes were lost or never arrived.

        Args:
          key: the chunk.
          parent: the chunk before it in its prefix, if that is resident; it may be a leaf now.
        """

    @abc.abstractmethod
    def became_leaf(self, key: ChunkKey) -> Given[None]:
        """A chunk may be a leaf now: one that followed it, and that another priority's policy ordered, was removed."""

    @abc.abstractmethod
    def clear(self) -> Given[list[Entries]]:
        """Forgets all chunks, resident and evicted ones. Learned statistics stay. O(1).

        Chunks that stay resident are inserted again. By their first use, `use_id` -1, they are older than all others.

        Returns:
          What it held, to which it keeps no reference: dicts, sets, lists and deques that the caller empties
          incrementally, because freeing a million entries takes long.
        """

    @abc.abstractmethod
    def evict(self, num_chunks: int, residents: Residents) -> Given[None]:
        """Evicts up to `num_chunks` chunks by `residents.evict_tail`; fewer only when no more can be evicted."""

    @abc.abstractmethod
    def check_invariants(self, leaves: Collection[ChunkKey], residents: Residents) -> None:
        """Raises AssertionError unless it knows only resident chunks and can reach every one. For tests.

        Args:
          leaves: the resident chunks that no other follows.
          residents: all of them.
        """
