"""Simulated storage tiers below the host tier, nearest first: LRU by chunk, with the library's own admission.

They have no prefix rule: a lookup continues in them where the host tier ends, so they may hold the tail of a prefix
whose head is in host memory.
"""

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import final

from tpu_offload.config import StorageAdmission, StorageWriteEvent
from tpu_offload.core.storage_admission import AdmissionFilter
from tpu_offload.core.storage_writes import records_kept_free
from tpu_offload.types import ChunkKey


@dataclasses.dataclass(frozen=True, slots=True)
class StorageSetup:
    """One storage tier.

    Attributes:
      num_chunks: capacity; capacity beyond the blocks of the trace takes no memory.
      write_on: when chunks are written to it.
      admission: which chunks it takes.
    """

    num_chunks: int
    write_on: StorageWriteEvent = StorageWriteEvent.SAVE
    admission: StorageAdmission = StorageAdmission.ALL


@final
class StorageTier:
    """The chunks of a storage tier.

    Args:
      setup: what it is.
      num_occurrences: blocks of the trace, each time it occurs; bounds the sketch of its admission.
    """

    def __init__(self, setup: StorageSetup, num_occurrences: int) -> None:
        self._num_chunks = num_chunks = min(setup.num_chunks, num_occurrences)
        self.demotes = setup.write_on is StorageWriteEvent.HOST_EVICTION
        if self.demotes:
            self._num_chunks -= records_kept_free(num_chunks)
        self._admission = AdmissionFilter(setup.admission, num_chunks)
        self._chunks: OrderedDict[ChunkKey, None] = OrderedDict()
        self.num_saved = 0
        self.num_evicted = 0

    def observe(self, keys: Sequence[ChunkKey], in_host: Sequence[ChunkKey], *, is_hit: bool) -> None:
        """Counts a request's use of its prefix; takes what is in the host tier and is admitted only now.

        Args:
          keys: its prefix.
          in_host: what the host tier has of it.
          is_hit: whether it loads that.
        """
        self.touch(keys)
        self._admission.observe(keys)
        if is_hit:
            self._admission.hit(in_host)
        if self._admission.depends_on_uses and not self.demotes:
            self.save(reversed(in_host))

    def find(self, keys: Sequence[ChunkKey], first: int) -> int:
        """The number of resident chunks of a prefix, from chunk `first` up to the first missing one."""
        for i in range(first, len(keys)):
            if keys[i] not in self._chunks:
                return i - first
        return len(keys) - first if first < len(keys) else 0

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        """Records a use of a prefix. The head is touched last, so that the tail is evicted first."""
        for key in reversed(keys):
            if key in self._chunks:
                self._chunks.move_to_end(key)

    def save(self, keys: Iterable[ChunkKey]) -> None:
        """Saves chunks that admission accepts, given tail first; resident ones are only touched."""
        for key in keys:
            if key not in self._chunks:
                if not self._admission.admits(key):
                    continue
                self.num_saved += 1
                self._chunks[key] = None
            self._chunks.move_to_end(key)
        while len(self._chunks) > self._num_chunks:
            self._chunks.popitem(last=False)
            self.num_evicted += 1


@final
class StorageStack:
    """The storage tiers of a replay.

    Args:
      setups: the tiers, nearest first.
      num_occurrences: see `StorageTier`.
    """

    def __init__(self, setups: Sequence[StorageSetup], num_occurrences: int) -> None:
        self.tiers = [StorageTier(setup, num_occurrences) for setup in setups]

    @property
    def demotes(self) -> bool:
        """Whether `demote` has to be called with what the host tier evicts."""
        return any(tier.demotes for tier in self.tiers)

    def observe(self, keys: Sequence[ChunkKey], in_host: Sequence[ChunkKey], *, is_hit: bool) -> None:
        """See `StorageTier.observe`."""
        for tier in self.tiers:
            tier.observe(keys, in_host, is_hit=is_hit)

    def find(self, keys: Sequence[ChunkKey], first: int) -> list[int]:
        """From which tier each chunk of a prefix from `first` on is read, up to the first that no tier has.

        The nearest tier that has the next chunk gives the run that it has; the next run may come from another one.
        """
        sources: list[int] = []
        while first + len(sources) < len(keys):
            runs = (tier.find(keys, first + len(sources)) for tier in self.tiers)
            tier_id, num = next(((i, num) for i, num in enumerate(runs) if num), (0, 0))
            if not num:
                break
            sources += [tier_id] * num
        return sources

    def save(self, keys: Sequence[ChunkKey], source_of: Callable[[ChunkKey], int | None]) -> None:
        """Offers what was saved to the host tier to the tiers that are written then.

        Args:
          keys: head first.
          source_of: the tier that a chunk was read from, which only nearer ones are offered; None if it was computed.
        """
        for i, tier in enumerate(self.tiers):
            if not tier.demotes:
                tier.save([key for key in reversed(keys) if (found := source_of(key)) is None or found > i])

    def demote(self, keys: Sequence[ChunkKey]) -> None:
        """Offers what the host tier has evicted, tail first, to the tiers that are written then."""
        for tier in self.tiers:
            if tier.demotes:
                tier.save(keys)

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        """Records a use of a prefix."""
        for tier in self.tiers:
            tier.touch(keys)
