"""What one job writes to a storage tier, as it is collected."""

from collections import OrderedDict
from typing import final

from tpu_offload.core.storage.eviction_order import WrittenChunk
from tpu_offload.core.storage.records import Keys, StoredRecords
from tpu_offload.types import ChunkKey


@final
class WriteBatch:
    """What one job writes.

    Args:
      records: the tier's.
      max_slots: most slots.
      room: most records.

    Attributes:
      keys, slots: what is written.
      names: its records.
      chunks: of what is written, the chunks of full attention whose place in their prefixes is known.
    """

    def __init__(self, records: StoredRecords, *, max_slots: int, room: int) -> None:
        self._records = records
        self._num_slots_left, self._room = max_slots, room
        self.keys: list[ChunkKey] = []
        self.slots: list[int] = []
        self.names: Keys = OrderedDict()
        self.chunks: dict[ChunkKey, WrittenChunk] = {}

    @property
    def is_full(self) -> bool:
        """Whether nothing more fits."""
        return self._num_slots_left <= 0 or self._room <= 0

    def add(self, key: ChunkKey, slot: int) -> bool:
        """Adds what is in a slot, unless the tier has it already; False if it does not fit."""
        names = self._records.of_slot(key, slot)
        if names[0] in self.names or self._records.has(names):  # checkpoints share pieces
            return True
        if self._num_slots_left <= 0 or len(names) > self._room or any(map(self._records.writing.__contains__, names)):
            return False
        self._num_slots_left -= 1
        self._room -= len(names)
        self.keys.append(key)
        self.slots.append(slot)
        self.names.update(dict.fromkeys(names))
        return True
