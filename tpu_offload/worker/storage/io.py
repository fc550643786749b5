"""The copies between the host tier of one process and one of its storage tiers.

The thread that dispatches the model never waits for storage. A cascade copies each slot into a separate array, in
program order after the saves of its step; an I/O thread waits for that array and writes its bytes. For a promotion an
I/O thread reads into a buffer and verifies the records (`storage.format`); `collect` then dispatches the copy into the
slot. A slot holds a chunk or a state: its pool knows how it is copied (`worker.storage.slots`), and the I/O threads
know how its bytes are stored (`worker.storage.record_io`). I/O threads never access segments. Each tier has its own
threads, buffers and bound, so that one that hangs blocks none of the others (`worker.storage.stack`).

Reads and writes use separate threads, so no read waits behind a write; lookups in a shared tier have one of their own
(`worker.storage.lookups`). One thread does all writes and deletions of a key, in the order of their jobs, so a late
write never lands after the deletion that follows it. When storage is cleared, the other threads that write wait.
"""

import functools
import logging
import threading
import time
from collections.abc import Sequence
from typing import Any, final

import jax

from tpu_offload.config import ENV_PREFIX
from tpu_offload.errors import ConfigError
from tpu_offload.storage import RecordFormat, StorageTier
from tpu_offload.storage.format import MAX_KEY_NBYTES
from tpu_offload.types import ChunkKey, CopyJob, CopyPart, JobKind
from tpu_offload.values import as_integer, error_line, one_line
from tpu_offload.worker.arrays import is_ready
from tpu_offload.worker.jobs import WorkerJobs
from tpu_offload.worker.storage.lookups import StorageLookups
from tpu_offload.worker.storage.record_io import StorageItem, StorageRecords
from tpu_offload.worker.storage.slots import SlotPool, pool_of
from tpu_offload.worker.storage.threads import AtLeast, StorageThreads

_logger = logging.getLogger(__name__)

_NO_KEY = ChunkKey(b"\0")  # of a task that concerns no key


@final
class StorageCopies:
    """Owns one storage tier of one process. All methods are called by the thread that dispatches the model.

    A slot whose copy fails is reported as a failed chunk of its job; its contents are undefined.

    Args:
      tier: the tier, which the caller closes only if this raises.
      label: its name, for log lines and threads.
      pools: the slots of chunks, then those of states if there are any.
      record_format: of what is stored; the slots of all pools fit into their records.
      max_in_flight: most records on their way to and from the tier.
      jobs: the worker's jobs.
    Raises:
      ConfigError: the tier cannot list what it has stored.
    """

    def __init__(
        self,
        tier: StorageTier,
        *,
        label: str,
        pools: Sequence[SlotPool],
        record_format: RecordFormat,
        max_in_flight: int,
        jobs: WorkerJobs,
    ) -> None:
        self._label = label
        self._pools = pools
        self._jobs = jobs
        self._max_in_flight = max_in_flight
        self._io = StorageRecords(tier, record_format)
        self._check_generation()
        self._stored_keys = self._list_stored_keys()
        self._readers, self._writers = StorageThreads(f"storage-read-{label}"), StorageThreads(f"storage-write-{label}")
        self._askers = StorageThreads(f"storage-lookup-{label}", num_threads=int(self.is_shared))
        self._lookups = StorageLookups(tier, jobs, submit=functools.partial(self._askers.submit, _NO_KEY))
        self._num_in_io = 0  # items submitted to I/O threads and not yet collected
        self._num_records = 0  # in flight: each holds its part of a payload or a buffer
        self._landing: list[tuple[StorageItem, list[jax.Array]]] = []  # items that are written into slots, and tokens
        self._has_closed = False
        self._closing: threading.Thread | None = None

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
        """Whether what was read is being written to its slot."""
        return bool(self._landing)

    def look_up(self, jobs: Sequence[CopyJob]) -> None:
        """Starts to ask which chunks the tier has. The jobs are valid, and of this tier."""
        self._lookups.start(self._accept(jobs))

    def promote(self, jobs: Sequence[CopyJob]) -> None:
        """Starts to read into slots. The jobs are valid, and of this tier."""
        for job in self._accept(jobs):
            for position, (key, slot) in enumerate(job.chunks):
                item = self._begin(job, (position,), (key,), slot=slot)
                if not item.error:
                    self._readers.submit(key, functools.partial(self._io.read, item))
            self._jobs.drop_ref([job.job_id])

    def write(self, jobs: Sequence[CopyJob]) -> None:
        """Starts to clear the tier and to delete keys; dispatches copies of slots and starts to write them."""
        for job in self._accept(jobs):
            if job.kind is JobKind.CLEAR:
                item = self._begin(job, (), ())
                self._writers.submit_alone(functools.partial(self._io.clear, item))
            deleted: dict[int, list[int]] = {}
            for i, key in enumerate(job.deleted_keys):
                deleted.setdefault(self._writers.index(key), []).append(i)
            for numbers in deleted.values():
                item = self._begin(job, tuple(numbers), tuple(job.deleted_keys[i] for i in numbers))
                self._writers.submit(item.keys[0], functools.partial(self._io.delete, item))
            for position, (key, slot) in enumerate(job.chunks):
                item = self._begin(job, (position,), (key,), slot=slot)
                if not item.error and self._cut(item):
                    self._writers.submit(key, functools.partial(self._io.write, item))
            self._jobs.drop_ref([job.job_id])

    def collect(self) -> None:
        """Dispatches the writes of what was read into its slots, and ends finished items."""
        self._lookups.collect()
        while self._io.done:
            item = self._io.done.popleft()
            self._num_in_io -= 1
            if item.is_read:
                self._land(item)
                continue
            if item.is_missing:
                self._jobs.add_missing(item.job_id, item.failed or item.positions)
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
        return [*waits, AtLeast(self._io.done, num_done)] if self._num_in_io else waits

    def stop(self) -> None:
        """Has the threads end, dropping queued items; `close` waits for them. The caller has waited for the copies."""
        self._landing.clear()
        for threads in self._threads():
            threads.stop()

    def close(self, until_s: float) -> None:
        """Ends the threads and begins to close the tier, unless it still hangs at `until_s`, in `time.monotonic`.

        Calls after that do nothing.
        """
        if self._has_closed:
            return
        self.stop()
        have_ended = [threads.join(until_s) for threads in self._threads()]
        if not all(have_ended):
            _logger.error(
                "storage tier %s does not respond: its I/O threads were abandoned, and the tier was left open",
                self._label,
            )
            return
        self._has_closed = True
        args = self._io.tier, self._label
        closing = threading.Thread(target=close_tier, args=args, name="tpu_offload-storage-close", daemon=True)
        try:
            closing.start()
        except RuntimeError:  # no thread is left, or the interpreter is ending
            close_tier(*args)
            return
        self._closing = closing

    def end_close(self, until_s: float) -> None:
        """Waits for the `close` of the tier, which `close` has begun, until then."""
        if self._closing is None:
            return
        self._closing.join(max(0.0, until_s - time.monotonic()))
        if self._closing.is_alive():
            _logger.error("storage tier %s does not respond: its close() has not ended, and was abandoned", self._label)

    # Inside.

    def _threads(self) -> tuple[StorageThreads, ...]:
        return self._readers, self._writers, self._askers

    def _check_generation(self) -> None:
        try:
            given: Any = self._io.tier.generation
        except Exception as e:  # the tier may be the user's own
            raise ConfigError(f"{ENV_PREFIX}STORAGE_TIER: {self._label} has no generation ({error_line(e)})") from e
        generation = as_integer(given)
        if generation is None or not 0 <= generation < 2**64:
            raise ConfigError(
                f"{ENV_PREFIX}STORAGE_TIER: {self._label} has generation={one_line(given)}; expected an integer from 0 "
                "to 2**64 - 1"
            )

    def _list_stored_keys(self) -> tuple[ChunkKey, ...]:
        tier = self._io.tier
        if tier.is_shared:  # the scheduler asks for what it needs
            return ()
        try:
            keys = tuple(map(ChunkKey, tier.stored_keys()))
        except Exception as e:  # the tier may be the user's own
            raise ConfigError(
                f"{ENV_PREFIX}STORAGE_TIER: what {self._label} has stored cannot be listed ({error_line(e)})"
            ) from e
        wrong = [key for key in keys if type(key) is not bytes or not 0 < len(key) <= MAX_KEY_NBYTES]
        if wrong:
            raise ConfigError(
                f"{ENV_PREFIX}STORAGE_TIER: stored_keys() of {self._label} has {one_line(wrong[0])}, a "
                f"{type(wrong[0]).__name__}; expected bytes, 1 to {MAX_KEY_NBYTES} of them, as they were written"
            )
        if keys:
            _logger.info("storage tier %s holds %d records of an earlier run", self._label, len(keys))
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
    ) -> StorageItem:
        """Makes an item, with a reference to its job. An item with an error has ended.

        The scheduler plans within the bound, but no longer counts copies that timed out, which still hold memory.
        """
        pool = None if slot is None else pool_of(self._pools, slot)
        item = StorageItem(job.job_id, positions, keys, slot, pool)
        self._jobs.add_ref([job.job_id])
        self._num_in_io += 1
        self._num_records += item.num_records
        if self._num_records > self._max_in_flight:
            self._drop(item, f"more than {self._max_in_flight} records in flight to and from {self._label}")
        return item

    def _drop(self, item: StorageItem, error: str) -> None:
        item.error = error
        self._num_in_io -= 1
        self._end(item, error)

    def _end(self, item: StorageItem, error: str = "") -> None:
        self._num_records -= item.num_records
        item.payload = None
        failed = item.failed or item.positions
        self._jobs.drop_ref([item.job_id], error, failed=[(0, position) for position in failed])

    def _cut(self, item: StorageItem) -> bool:
        """Dispatches the copy of a slot; False if that failed and the item has ended."""
        assert item.pool is not None
        assert item.slot is not None
        try:
            item.payload = item.pool.read(item.slot)
        except Exception as e:
            self._drop(item, error_line(e))
            return False
        return True

    def _land(self, item: StorageItem) -> None:
        """Dispatches the copy of what was read into its slot."""
        self._jobs.raise_copy_s(item.job_id, item.ended_s - item.began_s)
        assert item.pool is not None
        assert item.slot is not None
        assert item.payload is not None
        tokens, item.error = item.pool.write(item.slot, item.payload)
        item.payload = None
        if tokens:
            self._landing.append((item, tokens))
        else:
            self._end(item, item.error)

    def _end_landing(self, item: StorageItem, tokens: Sequence[jax.Array]) -> None:
        assert item.pool is not None
        assert item.slot is not None
        error = item.pool.end_write(item.slot, tokens)
        self._end(item, item.error or error)


def close_tier(tier: StorageTier, label: str) -> None:
    """Closes a tier, which may be the user's own; an error is logged."""
    try:
        tier.close()
    except Exception as e:
        _logger.error("storage tier %s failed to close: %s", label, error_line(e))
