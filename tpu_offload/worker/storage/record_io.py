"""What the I/O threads of a storage tier do: slots to records and back, deletions, and clearing.

All records of a tier have one length. A chunk has one record, padded if it is shorter. The bytes of a state are divided
evenly over several (`piece_keys`), of which the last is padded; the padding is checked as all other bytes are.
"""

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import final

import numpy as np

from tpu_offload.storage import RecordFormat, StorageTier, UndeletedError
from tpu_offload.storage.format import PAGE_NBYTES, RecordError
from tpu_offload.types import ChunkKey
from tpu_offload.values import error_line
from tpu_offload.worker.storage.slots import Bytes, Payload, SlotPool

# Buffers for writes stay, and begin at a huge page: numpy asks for such pages, and the kernel hands each to the disk in
# one piece instead of 512. Writes of 2 and 4 MiB take 16 and 7 % less CPU time.
_HUGE_PAGE_NBYTES = 2**21


@dataclasses.dataclass(slots=True, eq=False)
class StorageItem:
    """One task of an I/O thread: to read or write one slot, to delete some keys, or to clear storage.

    Attributes:
      job_id: its job.
      positions: of the slot or keys in the job, as in `JobResult.failed_blocks`.
      keys: of what is in the slot, or those to delete; none to clear storage.
      slot: the slot; None for a deletion or to clear storage.
      pool: the slot's pool; None without a slot.
      payload: for a cascade, the copy of the slot, dropped once it is packed; for a promotion, what was read and
        verified.
      is_read: whether, for a promotion, the payload is what was read and verified.
      is_missing: whether, for a promotion, the tier does not have all of its records, or one is damaged; for a
        deletion, whether it has refused to delete what `failed` says.
      error: in one line; empty if nothing failed.
      failed: positions that the error concerns; empty for all.
      began_s: when its job was dispatched; `time.monotonic`, like the next one.
      ended_s: when its bytes had been read.
    """

    job_id: int
    positions: tuple[int, ...]
    keys: tuple[ChunkKey, ...]
    slot: int | None = None
    pool: SlotPool | None = None
    payload: Payload | None = None
    is_read: bool = False
    is_missing: bool = False
    error: str = ""
    failed: tuple[int, ...] = ()
    began_s: float = dataclasses.field(default_factory=time.monotonic)
    ended_s: float = 0.0

    @property
    def num_records(self) -> int:
        """Records that are on their way to or from the tier with it."""
        return 0 if self.pool is None else self.pool.num_records


@final
class StorageRecords:
    """The methods and state of the I/O threads. Each method appends its item to `done`, and never raises.

    Args:
      tier: the tier.
      record_format: of what is stored.
    """

    def __init__(self, tier: StorageTier, record_format: RecordFormat) -> None:
        self.tier = tier
        self.done: deque[StorageItem] = deque()
        self._format = record_format
        self._local = threading.local()

    def write(self, item: StorageItem) -> None:
        """Writes the records of a slot, once its payload is ready, until one fails."""
        try:
            self._write(item)
        except BaseException as e:  # the tier may be the user's own, and nothing it raises may end the thread
            item.error = error_line(e)
        self.done.append(item)

    def read(self, item: StorageItem) -> None:
        """Reads the records of a slot, and verifies each to be the one that was written for its key."""
        try:
            self._read(item)
        except BaseException as e:  # as above
            item.error, item.is_missing = error_line(e), isinstance(e, RecordError)
        self.done.append(item)

    def clear(self, item: StorageItem) -> None:
        """Empties the tier."""
        try:
            self.tier.clear()
        except BaseException as e:  # as above
            item.error = error_line(e)
        self.done.append(item)

    def delete(self, item: StorageItem) -> None:
        """Deletes keys."""
        try:
            self.tier.delete(item.keys)
        except UndeletedError as e:
            item.error = error_line(e)
            places = zip(item.positions, item.keys, strict=True)
            item.failed = tuple(position for position, key in places if key in e.keys)
            item.is_missing = bool(item.failed)  # else it has not told which
        except BaseException as e:  # as above
            item.error = error_line(e)
        self.done.append(item)

    # Inside.

    def _write(self, item: StorageItem) -> None:
        pool, payload, (key,) = item.pool, item.payload, item.keys
        assert pool is not None
        assert payload is not None
        record = self._buffer("record", self._format.record_nbytes)
        room = record[PAGE_NBYTES : PAGE_NBYTES + self._format.payload_nbytes]
        if not pool.num_parts:  # straight into the record
            pool.pack(payload, room[: pool.payload_nbytes])
            item.payload = None
            room[pool.payload_nbytes :] = 0
            self._write_record(key, record)
            return
        parts = self._buffer("parts", pool.num_records * len(room))
        pool.pack(payload, parts[: pool.payload_nbytes])
        item.payload = None
        parts[pool.payload_nbytes :] = 0
        for part_key, part in zip(pool.record_keys(key), np.split(parts, pool.num_records), strict=True):
            np.copyto(room, part)
            self._write_record(part_key, record)

    def _write_record(self, key: ChunkKey, record: Bytes) -> None:
        view = memoryview(record)
        self._format.seal(view, key, generation=self.tier.generation)
        self.tier.write(key, view.toreadonly())

    def _read(self, item: StorageItem) -> None:
        pool, (key,) = item.pool, item.keys
        assert pool is not None
        generation = self.tier.generation  # before the reads: one that overlaps a `clear` is not used
        # The arrays that are made of a buffer keep it, or have their own copy; so it is never used again.
        record = aligned(self._format.record_nbytes, PAGE_NBYTES)
        found = record[PAGE_NBYTES : PAGE_NBYTES + self._format.payload_nbytes]
        source = found if not pool.num_parts else aligned(pool.num_records * len(found), PAGE_NBYTES)
        parts = np.split(source, pool.num_records)
        for record_key, part in zip(pool.record_keys(key), parts, strict=True):
            view = memoryview(record)
            try:
                self.tier.read(record_key, view)
            except KeyError:  # a server may evict what it likes, so this is no failure
                item.is_missing = True
                return
            _take_back(view)
            self._format.verify(memoryview(record), record_key, generation=generation)
            if pool.num_parts:
                np.copyto(part, found)
        item.payload = pool.unpack(source[: pool.payload_nbytes])  # here, because it may copy
        item.is_read, item.ended_s = True, time.monotonic()

    def _buffer(self, name: str, nbytes: int) -> Bytes:
        """A buffer of the calling thread, made on first use."""
        buffer: Bytes | None = getattr(self._local, name, None)
        if buffer is None:
            buffer = aligned(nbytes, _HUGE_PAGE_NBYTES)
            setattr(self._local, name, buffer)
        return buffer


def _take_back(view: memoryview) -> None:
    """Ends a tier's use of a record that it has read, so that it cannot change bytes once they are verified.

    Python does not count slices and numpy arrays of the record: a tier that keeps one can still write into it.

    Raises:
      ValueError: it still has a buffer of the view, as a client in C may.
    """
    try:
        view.release()
    except BufferError as e:
        raise ValueError("the tier's read() has kept its record; expected no use of it after the call") from e


def aligned(nbytes: int, alignment: int) -> Bytes:
    """Memory that is not cleared, from a multiple of `alignment` bytes on."""
    memory: Bytes = np.empty(nbytes + alignment, np.uint8)
    start = -memory.ctypes.data % alignment
    return memory[start : start + nbytes]


def record_payload_nbytes(pools: Sequence[SlotPool]) -> int:
    """The length of the payload of every record, such that each slot of these pools fits into its records."""
    return max(-(-pool.payload_nbytes // pool.num_records) for pool in pools)
