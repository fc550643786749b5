"""A simulated secondary tier: LRU by chunk, with the library's own admission.

It has no prefix rule: a lookup continues in it where the host tier ends, so it may hold the tail of a prefix whose head
is in host memory.
"""

import enum
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import final

from tpu_offload.config import StorageAdmission
from tpu_offload.core.storage_admission import AdmissionFilter
from tpu_offload.types import ChunkKey


class SecondaryMode(enum.Enum):
    """When a chunk is saved to the secondary tier."""

    CASCADE = "cascade"  # when it is saved to the host tier
    DEMOTE = "demote"  # when the host tier evicts it


@final
class SecondaryTier:
    """The chunks of a secondary tier.

    Args:
      num_chunks: capacity.
      admission: which chunks it takes.
    """

    def __init__(self, num_chunks: int, admission: StorageAdmission = StorageAdmission.ALL) -> None:
        self._num_chunks = num_chunks
        self.admission = AdmissionFilter(admission, num_chunks)
        self._chunks: OrderedDict[ChunkKey, None] = OrderedDict()
        self.num_saved = 0
        self.num_evicted = 0

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
                if not self.admission.admits(key):
                    continue
                self.num_saved += 1
                self._chunks[key] = None
            self._chunks.move_to_end(key)
        while len(self._chunks) > self._num_chunks:
            self._chunks.popitem(last=False)
            self.num_evicted += 1
