"""Admission to the storage tier: which chunks are worth a write.

Most chunks that are saved are never read again: three quarters of them in the trace of docs/tiers.md. Writing all of
them takes bandwidth from reads, wears flash, and evicts chunks from storage that would have been read.

Sightings and hits are counted approximately, in a sketch, because they are of use only if they are remembered for
longer than the host tier keeps the chunks.
"""

from collections.abc import Sequence
from typing import final

from tpu_offload.config import StorageAdmission
from tpu_offload.core.sketch import Sketch
from tpu_offload.types import ChunkKey


@final
class AdmissionFilter:
    """Counts the uses of chunks that admission depends on.

    A chunk is never admitted without the chunks before it in its prefix: each use counts for them too.

    Args:
      admission: the setting.
      num_chunks: capacity of storage. The counts cover about the last ten times as many uses.
    """

    def __init__(self, admission: StorageAdmission, num_chunks: int) -> None:
        self._counts_sightings = admission is StorageAdmission.SECOND_SIGHTING
        self._counts_hits = admission is StorageAdmission.AFTER_HIT
        self._least = 2 if self._counts_sightings else 1
        self._sketch = Sketch(num_chunks) if self.depends_on_uses else None

    @property
    def depends_on_uses(self) -> bool:
        """Whether a chunk may be admitted later that is not admitted now."""
        return self._counts_sightings or self._counts_hits

    def observe(self, keys: Sequence[ChunkKey]) -> None:
        """A request contains these chunks; called once for each request."""
        if self._counts_sightings and self._sketch is not None:
            self._sketch.add(keys)

    def hit(self, keys: Sequence[ChunkKey]) -> None:
        """A request loads the last of these chunks from the host tier; they are a prefix."""
        if self._counts_hits and self._sketch is not None:
            self._sketch.add(keys)

    def admits(self, key: ChunkKey) -> bool:
        """Whether storage takes a chunk now."""
        return self._sketch is None or self._sketch.count(key) >= self._least
