"""The copies between the host tier of one process and one of its storage tiers.

The thread that dispatches the model never waits for storage. A cascade copies each slot into a separate array, in
program order after the saves of its step; an I/O thread waits for that array and writes its bytes. For a promotion an
I/O thread reads into a buffer and verifies the record (`storage.format`); `collect` then dispatches the copy into the
slot. I/O threads never access segments. Each tier has its own threads, buffers and bound, so that one that hangs blocks
none of the others (`worker.storage_stack`).

Reads and writes use separate threads, so no read waits behind a write; look-ups in a shared tier have one of their own
(`worker.storage_lookups`). One thread does all writes and deletions of a key, in the order of their jobs, so a late
write never lands after the deletion that follows it. When storage is cleared, the other threads that write wait.
"""

import dataclasses
import functools
import logging
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, final

import jax
import numpy as np

from tpu_offload.config import ENV_PREFIX
from tpu_offload.errors import ConfigError, TransferError
from tpu_offload.kernels import SlotCopier
from tpu_offload.storage import RecordFormat, StorageTier
from tpu_offload.storage.format import PAGE_NBYTES
from tpu_offload.types import ChunkKey, CopyJob, CopyPart
from tpu_offload.worker.arrays import is_ready
from tpu_offload.worker.host_memory import HostMemory, error_line
from tpu_offload.worker.jobs import WorkerJobs
from tpu_offload.worker.storage_lookups import StorageLookups

_logger = logging.getLogger(__name__)

_NUM_THREADS = 3  # for reads, and as many for writes: two keep a disk busy while one computes a checksum
# Buffers for writes stay, and begin at a huge page: numpy asks for such pages, and the kernel hands each to the disk in
# one piece instead of 512. Writes of 2 and 4 MiB take 16 and 7 % less CPU time.
_HUGE_PAGE_NBYTES = 2**21
_NO_KEY = ChunkKey(b"\0")  # of a task that concerns no key
_STOP_CHECK_S = 0.1

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclasses.dataclass(slots=True, eq=False)
class _Item:
    """One task of an I/O thread: to read or write one chunk, to delete some keys, or to clear storage.

    Attributes:
      job_id: its job.
      positions: of the chunk or keys in the job, as in `JobResult.failed_blocks`.
      keys: the chunk's key, or those to delete; none to clear storage.
      slot: the chunk's; None for a deletion or to clear storage.
      payload: per page group; for a cascade, the copy of the slot, dropped once it is packed; for a promotion, what was
        read and verified.
      is_read: whether, for a promotion, the payload is what was read and verified.
      is_missing: whether, for a promotion, the tier does not have the chunk.
      error: in one line; empty if nothing failed.
      began_s: when its job was dispatched; `time.monotonic`, like the next one.
      ended_s: when its bytes had been read.
    """

    job_id: int
    positions: tuple[int, ...]
    keys: tuple[ChunkKey, ...]
    slot: int | None = None
    payload: list[list[jax.Array]] | None = None
    is_read: bool = False
    is_missing: bool = False
    error: str = ""
    began_s: float = dataclasses.field(default_factory=time.monotonic)
    ended_s: float = 0.0


@final
class StorageCopies:
    """Owns one storage tier of one process. All methods are called by the thread that dispatches the model.

    A copy that fails is reported as a failed chunk of its job.

    Args:
      tier: the tier, which the caller closes only if this raises.
      label: its name, for log lines and threads.
      memories: per page group, the host tier.
      copiers: likewise, what copies its slots; shared with the other tiers.
      record_format: of what is stored.
      max_in_flight: most chunks on their way to and from the tier.
      blocks_per_chunk: blocks in a slot.
      jobs: the worker's jobs.
    Raises:
      ConfigError: the tier cannot list what it has stored.
    """

    def __init__(
        self,
        tier: StorageTier,
        *,
        label: str,
        memories: Sequence[HostMemory],
        copiers: Sequence[SlotCopier],
        record_format: RecordFormat,
        max_in_flight: int,
        blocks_per_chunk: int,
        jobs: WorkerJobs,
    ) -> None:
        self._label = label
        self._memories = list(memories)
        self._copiers = list(copiers)
        self._jobs = jobs
        self._blocks_per_chunk = blocks_per_chunk
        self._max_in_flight = max_in_flight
        self._io = _StorageIO(tier, self._copiers, record_format)
        self._stored_keys = self._list_stored_keys()
        self._readers, self._writers = _Threads(f"storage-read-{label}"), _Threads(f"storage-write-{label}")
        self._askers = _Threads(f"storage-look-up-{label}", num_threads=int(self.is_shared))
        self._lookups = StorageLookups(tier, jobs, submit=functools.partial(self._askers.submit, _NO_KEY))
        self._num_in_io = 0  # items submitted to I/O threads and not yet collected
        self._num_chunks = 0  # chunks in flight: each holds a payload or a buffer
        self._landing: list[tuple[_Item, list[jax.Array]]] = []  # items that are written into slots, and tokens

    @property
    def is_shared(self) -> bool:
        """Whether other engines use the tier, too."""
        return self._io.tier.is_shared

    @property
    def stored_keys(self) -> tuple[ChunkKey, ...]:
        """What earlier incarnations of this worker left in storage, oldest first."""
        return self._stored_keys

    @property
    def has_flights(self) -> bool:
        """Whether copies are in flight."""
        return bool(self._num_in_io or self._landing or self._lookups.has_flights)

    @property
    def is_landing(self) -> bool:
        """Whether a chunk that was read is being written to its slot."""
        return bool(self._landing)

    def look_up(self, jobs: Sequence[CopyJob]) -> None:
        """Starts to ask which chunks the tier has. The jobs are valid, and of this tier."""
        self._lookups.start(self._accept(jobs))

    def promote(self, jobs: Sequence[CopyJob]) -> None:
        """Starts to read chunks. The jobs are valid, and of this tier."""
        for job in self._accept(jobs):
            for position, (key, slot) in enumerate(job.chunks):
                item = self._begin(job, (position,), (key,), slot=slot)
                if not item.error:
                    self._readers.submit(key, functools.partial(self._io.read, item))
            self._jobs.drop_ref([job.job_id])

    def cascade(self, jobs: Sequence[CopyJob]) -> None:
        """Starts to clear the tier or delete keys, then dispatches copies of slots and starts to write them."""
        for job in self._accept(jobs):
            if job.clears_storage:
                item = self._begin(job, (), ())
                self._writers.submit_alone(functools.partial(self._io.clear, item))
            deleted: dict[int, list[int]] = {}
            for i, key in enumerate(job.deleted_keys):
                deleted.setdefault(self._writers.index(key), []).append(i)
            for numbers in deleted.values():
                positions = tuple(len(job.chunks) + i for i in numbers)
                item = self._begin(job, positions, tuple(job.deleted_keys[i] for i in numbers))
                self._writers.submit(item.keys[0], functools.partial(self._io.delete, item))
            for position, (key, slot) in enumerate(job.chunks):
                item = self._begin(job, (position,), (key,), slot=slot)
                if not item.error and self._cut(item, slot):
                    self._writers.submit(key, functools.partial(self._io.write, item))
            self._jobs.drop_ref([job.job_id])

    def collect(self) -> None:
        """Dispatches the writes of chunks that were read into their slots, and ends finished items."""
        self._lookups.collect()
        while self._io.done:
            item = self._io.done.popleft()
            self._num_in_io -= 1
            if item.is_read:
                self._land(item)
                continue
            if item.is_missing:
                self._jobs.add_missing(item.job_id, item.positions)
            self._end(item, item.error)
        landing, self._landing = self._landing, []
        for item, tokens in landing:
            if all(map(is_ready, tokens)):
                self._end_landing(item, tokens)
            else:
                self._landing.append((item, tokens))

    def waiting_on(self, *, all_of_them: bool = False) -> list[Any]:
        """Objects whose `is_ready` lets `collect` make progress; with `all_of_them`, all that it waits for."""
        if not self.has_flights:
            return []
        waits: list[Any] = [token for _, tokens in self._landing for token in tokens]
        waits += self._lookups.waiting_on(all_of_them=all_of_them)
        num_done = self._num_in_io if all_of_them else 1
        return [*waits, _Done(self._io.done, num_done)] if self._num_in_io else waits

    def stop(self) -> None:
        """Has the threads end, dropping queued items; `close` waits for them. The caller has waited for the copies."""
        self._landing.clear()
        for threads in self._threads():
            threads.stop()

    def close(self, until_s: float) -> None:
        """Ends the threads and closes the tier, unless it still hangs at `until_s`, in `time.monotonic`."""
        self.stop()
        have_ended = [threads.join(until_s) for threads in self._threads()]
        if not all(have_ended):
            _logger.error(
                "storage tier %s hangs: closed without waiting for its I/O threads; it was not closed itself",
                self._label,
            )
            return
        try:
            self._io.tier.close()
        except Exception as e:  # the tier may be the user's own
            _logger.error("storage tier %s failed to close: %s", self._label, error_line(e))

    # Inside.

    def _threads(self) -> tuple["_Threads", ...]:
        return self._readers, self._writers, self._askers

    def _list_stored_keys(self) -> tuple[ChunkKey, ...]:
        tier = self._io.tier
        if tier.is_shared:  # the scheduler asks for what it needs
            return ()
        try:
            keys = tuple(map(ChunkKey, tier.stored_keys()))
        except Exception as e:  # the tier may be the user's own
            raise ConfigError(
                f"{ENV_PREFIX}STORAGE_TIER={type(tier).__name__}: what it has stored cannot be listed ({error_line(e)})"
            ) from e
        if keys:
            _logger.info("storage tier %s holds %d chunks of an earlier run", self._label, len(keys))
        return keys

    def _accept(self, jobs: Sequence[CopyJob]) -> Sequence[CopyJob]:
        """Starts jobs, which the caller has checked."""
        for job in jobs:
            # `WorkerJobs` reports failed blocks: here the chunks and keys, identified by their positions.
            positions = tuple(range(job.num_items))
            parts = (CopyPart(block_ids=positions, host_block_ids=positions),)
            self._jobs.start(job.job_id, parts, of_storage=True)
        return jobs

    def _begin(
        self, job: CopyJob, positions: tuple[int, ...], keys: tuple[ChunkKey, ...], *, slot: int | None = None
    ) -> _Item:
        """Makes an item, with a reference to its job. An item with an error has ended.

        The scheduler plans within the bound, but no longer counts copies that timed out, which still hold memory.
        """
        item = _Item(job.job_id, positions, keys, slot)
        self._jobs.add_ref([job.job_id])
        self._num_in_io += 1
        self._num_chunks += slot is not None
        if self._num_chunks > self._max_in_flight:
            self._drop(item, f"more than {self._max_in_flight} chunks in flight to and from {self._label}")
        return item

    def _drop(self, item: _Item, error: str) -> None:
        item.error = error
        self._num_in_io -= 1
        self._end(item, error)

    def _end(self, item: _Item, error: str = "") -> None:
        self._num_chunks -= item.slot is not None
        item.payload = None
        self._jobs.drop_ref([item.job_id], error, failed=[(0, position) for position in item.positions])

    def _place(self, slot: int, memory: HostMemory) -> tuple[int, int]:
        """The segment, and the position in it, of the first block of a slot."""
        return divmod(slot * self._blocks_per_chunk, memory.spec.segment_blocks)

    def _cut(self, item: _Item, slot: int) -> bool:
        """Dispatches the copy of a slot; False if that failed and the item has ended."""
        first = slot * self._blocks_per_chunk
        try:
            payload = []
            for memory, copier in zip(self._memories, self._copiers, strict=True):
                if memory.lost[:, first : first + self._blocks_per_chunk].any():
                    raise TransferError(f"slot {slot} was lost, or never written")
                payload.append(copier.read(*self._place(slot, memory)))
            item.payload = payload
        except Exception as e:
            self._drop(item, error_line(e))
            return False
        return True

    def _land(self, item: _Item) -> None:
        """Dispatches the copy of a chunk that was read into its slot."""
        self._jobs.raise_copy_s(item.job_id, item.ended_s - item.began_s)
        assert item.payload is not None
        assert item.slot is not None
        tokens = []
        for memory, copier, payload in zip(self._memories, self._copiers, item.payload, strict=True):
            segment_id, first = self._place(item.slot, memory)
            try:
                tokens.append(copier.write(segment_id, first, payload))
            except Exception as e:
                memory.check_segment(segment_id, lost=False)
                item.error = error_line(e)
                break
            memory.mark(segment_id, slice(first, first + self._blocks_per_chunk), lost=False)
        item.payload = None
        if tokens:  # even of a chunk that failed in a later page group: they tell whether segments are lost
            self._landing.append((item, tokens))
        else:
            self._end(item, item.error)

    def _end_landing(self, item: _Item, tokens: Sequence[jax.Array]) -> None:
        assert item.slot is not None
        error = item.error
        for memory, token in zip(self._memories, tokens, strict=False):  # fewer, if the chunk failed on its way
            segment_id, first = self._place(item.slot, memory)
            try:
                end = int(np.asarray(token))
                if end != first + self._blocks_per_chunk:
                    raise TransferError(f"the device copied up to {end}; expected {first + self._blocks_per_chunk}")
            except Exception as e:  # a program that fails on the device destroys the donated segment
                memory.check_segment(segment_id, lost=True)
                error = error or error_line(e)
        self._end(item, error)


@final
class _StorageIO:
    """The methods and state of the I/O threads. Each method appends its item to `done`, and never raises."""

    def __init__(self, tier: StorageTier, copiers: Sequence[SlotCopier], record_format: RecordFormat) -> None:
        self.tier = tier
        self.done: deque[_Item] = deque()
        self._copiers = copiers
        self._format = record_format
        self._local = threading.local()

    def write(self, item: _Item) -> None:
        """Writes a chunk, once its payload is ready."""
        (key,) = item.keys
        try:
            record: Bytes | None = getattr(self._local, "record", None)
            if record is None:
                record = self._local.record = _aligned(self._format.record_nbytes, _HUGE_PAGE_NBYTES)
            start = PAGE_NBYTES
            for copier, payload in zip(self._copiers, item.payload or (), strict=True):
                copier.pack(payload, record[start : start + copier.payload_nbytes])
                start += copier.payload_nbytes
            item.payload = None
            view = memoryview(record)
            self._format.seal(view, key, generation=self.tier.generation)
            self.tier.write(key, view.toreadonly())
        except BaseException as e:  # the tier may be the user's own, and nothing it raises may end the thread
            item.error = error_line(e)
        self.done.append(item)

    def read(self, item: _Item) -> None:
        """Reads a chunk and verifies that it is the record that was written for the key."""
        (key,) = item.keys
        try:
            record = _aligned(self._format.record_nbytes, PAGE_NBYTES)
            view = memoryview(record)
            generation = self.tier.generation  # before the read: one that overlaps a `clear` is not used
            try:
                self.tier.read(key, view)
            except KeyError:  # a server may evict what it likes, so this is no failure
                item.is_missing = True
                self.done.append(item)
                return
            self._format.verify(view, key, generation=generation)
            # Here, because it may copy. The arrays have their own copy, or keep the buffer.
            item.payload, start = [], PAGE_NBYTES
            for copier in self._copiers:
                item.payload.append(copier.unpack(record[start : start + copier.payload_nbytes]))
                start += copier.payload_nbytes
            item.is_read, item.ended_s = True, time.monotonic()
        except BaseException as e:  # as above
            item.error = error_line(e)
        self.done.append(item)

    def clear(self, item: _Item) -> None:
        """Empties the tier."""
        try:
            self.tier.clear()
        except BaseException as e:  # as above
            item.error = error_line(e)
        self.done.append(item)

    def delete(self, item: _Item) -> None:
        """Deletes keys."""
        try:
            self.tier.delete(item.keys)
        except BaseException as e:  # as above
            item.error = error_line(e)
        self.done.append(item)


@final
class _Threads:
    """Daemon threads with a queue each. All tasks of a key run on one of them, in order.

    They hold no reference to this object, so they end when it is garbage-collected.
    """

    def __init__(self, name: str, *, num_threads: int = _NUM_THREADS) -> None:
        self._queues: list[queue.SimpleQueue[Callable[[], None] | None]] = []
        self._threads: list[threading.Thread] = []
        self._stop = threading.Event()
        for i in range(num_threads):
            tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
            thread = threading.Thread(
                target=_run, args=(tasks, self._stop), name=f"tpu_offload-{name}-{i}", daemon=True
            )
            self._queues.append(tasks)
            self._threads.append(thread)
            thread.start()
        self._finalizer = weakref.finalize(self, _stop_threads, self._queues, self._stop)

    def index(self, key: ChunkKey) -> int:
        """The thread of a key."""
        return key[0] % len(self._queues)

    def submit(self, key: ChunkKey, task: Callable[[], None]) -> None:
        """Queues a task, which must not raise."""
        self._queues[self.index(key)].put(task)

    def submit_alone(self, task: Callable[[], None]) -> None:
        """Queues a task that runs after all earlier ones of every thread, and before all later ones."""
        last, *others = self._queues
        arrived = [threading.Event() for _ in others]
        done = threading.Event()
        for tasks, event in zip(others, arrived, strict=True):
            tasks.put(functools.partial(_stand_by, event, done, self._stop))
        last.put(functools.partial(_run_alone, task, arrived, done, self._stop))

    def stop(self) -> None:
        """Has the threads end, dropping queued tasks."""
        self._finalizer()

    def join(self, until_s: float) -> bool:
        """Waits for stopped threads; False if some are still running at `until_s`."""
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)


def _run(tasks: queue.SimpleQueue[Callable[[], None] | None], stop: threading.Event) -> None:
    while (task := tasks.get()) is not None:
        if not stop.is_set():
            task()
        task = None  # free its buffers while the queue is empty


def _stand_by(arrived: threading.Event, done: threading.Event, stop: threading.Event) -> None:
    arrived.set()
    _wait(done, stop)


def _run_alone(
    task: Callable[[], None], arrived: Sequence[threading.Event], done: threading.Event, stop: threading.Event
) -> None:
    if all(_wait(event, stop) for event in arrived):
        task()
    done.set()


def _wait(event: threading.Event, stop: threading.Event) -> bool:
    """Waits for an event that never comes once the threads are stopped."""
    while not event.wait(_STOP_CHECK_S):
        if stop.is_set():
            return False
    return True


def _stop_threads(queues: Sequence[queue.SimpleQueue[Callable[[], None] | None]], stop: threading.Event) -> None:
    stop.set()
    for tasks in queues:
        tasks.put(None)


class _Done:
    """Ready once I/O threads have finished `num_items` items that are not collected yet."""

    def __init__(self, done: deque[_Item], num_items: int) -> None:
        self._done = done
        self._num_items = num_items

    def is_ready(self) -> bool:
        """Like `jax.Array.is_ready`."""
        return len(self._done) >= self._num_items


def _aligned(nbytes: int, alignment: int) -> Bytes:
    memory = np.empty(nbytes + alignment, np.uint8)
    start = -memory.ctypes.data % alignment
    return memory[start : start + nbytes]
