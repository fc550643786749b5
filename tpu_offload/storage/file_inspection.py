"""Looks into the directory of a `file` tier, also while an engine uses it.

It takes no lock, except in `clear`. So what it reads may be changing; whoever finds a damaged record reads it again
later. Files are read through the page cache, which is told to forget what was read.
"""

import contextlib
import dataclasses
import fcntl
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import final

import numpy as np

from tpu_offload.errors import ConfigError, TransferError
from tpu_offload.storage.directory_lock import LOCK_NAME, lock
from tpu_offload.storage.file import (
    DIRECTORY_NAME,
    SEGMENT_NAME,
    FileOptions,
    segment_name,
    slots_per_segment,
)
from tpu_offload.storage.format import PAGE_NBYTES, read_header
from tpu_offload.storage.inspection import Damage, Entry, Fact, Foreign, Generation, StoredRecord, StoreInspector
from tpu_offload.storage.slot_files import HINT, DirectoryHeader, orders

_WORKER = re.compile(r"worker-(0|[1-9]\d*)")
_PLACE = re.compile(r"(worker-\d+)/segment-(\d+)\.kv\+(\d+)")


def worker_directories(root: Path) -> list[Path]:
    """Those of a file tier's workers, by their numbers.

    Raises:
      OSError: the directory cannot be read.
    """
    found = (path for path in root.iterdir() if _WORKER.fullmatch(path.name) and path.is_dir())
    return sorted(found, key=worker_id_of)


def worker_id_of(directory: Path) -> int:
    """The number of the worker whose directory it is."""
    return int(directory.name.split("-")[1])


@final
class FileInspector(StoreInspector):
    """Of a `file` tier's directory: all workers' subdirectories.

    Args:
      options: as `TPU_OFFLOAD_STORAGE_OPTIONS` of the tier; only the directory counts.
    Raises:
      ConfigError: it is no such directory, or cannot be read.
    """

    def __init__(self, options: str) -> None:
        self._root = Path(FileOptions.parse(options).directory)
        self.where = str(self._root)
        try:
            self._workers = worker_directories(self._root)
        except OSError as e:
            raise ConfigError(f"{self.where} cannot be read: {e.strerror or e}") from None
        if not self._workers:
            raise ConfigError(
                f"{self.where} is no directory of a file tier: it has no worker-N; "
                "for the directory of an object tier give file://DIR"
            )
        directories = [_Directory(worker) for worker in self._workers]
        self.num_records = sum(len(directory.taken) + len(directory.others) for directory in directories)

    def scan(self) -> Iterator[Entry]:
        """See the base class. The time of the last write is known for a worker, not for its records."""
        for path in sorted(self._root.iterdir()):
            if path not in self._workers:
                yield Foreign(nbytes=path.lstat().st_size)
        for worker in self._workers:
            for path in sorted(worker.iterdir()):
                if path.name not in (DIRECTORY_NAME, LOCK_NAME) and not SEGMENT_NAME.fullmatch(path.name):
                    yield Foreign(nbytes=path.lstat().st_size)
            yield from self._scan_worker(worker)

    def _scan_worker(self, worker: Path) -> Iterator[Entry]:
        directory = _Directory(worker)
        header = directory.header
        if header is None:
            if directory.nbytes:
                yield Damage(place=f"{worker.name}/{DIRECTORY_NAME}", what="header damaged, or of another version")
            return
        if worker.name != f"worker-{header.worker_id}":  # its directory was copied or renamed
            yield Damage(place=f"{worker.name}/{DIRECTORY_NAME}", what=f"of worker {header.worker_id}")
            return
        yield dataclasses.replace(
            _generation(header, header.generation), last_write_s=(worker / DIRECTORY_NAME).stat().st_mtime
        )
        for slot in directory.others.tolist():
            yield self._record(directory, slot, directory.key(slot))
        for key, slot in self._current(directory).items():
            yield self._record(directory, slot, key)

    def _current(self, directory: "_Directory") -> dict[bytes, int]:
        """Slots of the current generation, by key: of several hints with one key the last counts, as for the tier."""
        found: dict[bytes, int] = {}
        for slot in directory.taken.tolist():
            key = directory.key(slot)
            if directory.key_nbytes(slot) > len(key):  # the hint has only its beginning
                with contextlib.suppress(TransferError, OSError):
                    page = self.read(self._record(directory, slot, key), PAGE_NBYTES)
                    whole = read_header(memoryview(page)).key
                    key = whole if whole.startswith(key) else key
            found.pop(key, None)
            found[key] = slot
        return found

    def _record(self, directory: "_Directory", slot: int, key: bytes) -> StoredRecord:
        header = directory.header
        assert header is not None
        slots = slots_per_segment(header.record_nbytes)
        return StoredRecord(
            generation=_generation(header, int(directory.hints["generation"][slot])),
            key=key,
            key_nbytes=max(len(key), directory.key_nbytes(slot)),
            nbytes=header.record_nbytes,
            place=f"{directory.worker}/{segment_name(slot // slots)}+{slot % slots * header.record_nbytes}",
            header_generation=header.generation,
        )

    def read(self, record: StoredRecord, nbytes: int) -> bytes:
        """See the base class."""
        found = _PLACE.fullmatch(record.place)
        assert found, f"a place of another store: {record.place}"
        worker, number, offset = self._root / found[1], int(found[2]), int(found[3])
        nbytes = min(nbytes, record.nbytes)
        with _opened(worker / segment_name(number)) as fd:
            data = _read(fd, nbytes, offset)
            if fd >= 0:
                os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)
        # An engine may have deleted it by now, and given the slot to another.
        slot = number * slots_per_segment(record.nbytes) + offset // record.nbytes
        with _opened(worker / DIRECTORY_NAME) as fd:
            hint = np.frombuffer(_read(fd, HINT.itemsize, PAGE_NBYTES + slot * HINT.itemsize), HINT)
        if not len(hint) or f"{hint['generation'][0]:016x}" != record.generation.name:
            raise KeyError(record.place)
        if not hint["key"][0].tobytes().startswith(record.key[: HINT["key"].itemsize]):
            raise KeyError(record.place)
        return data

    def facts(self) -> tuple[str, Sequence[Mapping[str, Fact]]]:
        """See the base class: of each worker."""
        return "workers", [self._facts(worker) for worker in self._workers]

    def _facts(self, worker: Path) -> Mapping[str, Fact]:
        directory = _Directory(worker)
        header, disk = directory.header, os.statvfs(worker)
        num_used = len(self._current(directory))
        return {
            "worker_id": int(worker.name.split("-")[1]),
            "fingerprint": header.fingerprint if header else None,
            "generation": f"{header.generation:016x}" if header else None,
            "record_nbytes": header.record_nbytes if header else None,
            "num_slots": len(directory.hints),
            "num_used_slots": num_used,
            "num_free_slots": len(directory.hints) - num_used,
            "disk_nbytes": sum(path.lstat().st_blocks * 512 for path in worker.iterdir()),
            "disk_free_nbytes": disk.f_bavail * disk.f_frsize,
            "last_write_s": (worker / DIRECTORY_NAME).stat().st_mtime if directory.nbytes else None,
            "locked_by": _lock_holder(worker),
        }

    def check_unused(self) -> None:
        """See the base class."""
        for worker in self._workers:
            if holder := _lock_holder(worker):
                raise ConfigError(
                    f"{worker} is used by a running engine ({holder}), so nothing was deleted: stop it first, or reset "
                    "its cache"
                )

    def clear(self, on_deleted: Callable[[int], None]) -> None:
        """See the base class. Without a header, the next start begins a generation that was never used before."""
        with contextlib.ExitStack() as locks:
            self.check_unused()
            for worker in self._workers:
                locks.callback(lock(str(worker)).close)
            nums = [len(directory.taken) + len(directory.others) for directory in map(_Directory, self._workers)]
            for worker in self._workers:
                _truncate(worker / DIRECTORY_NAME)
            for worker, num in zip(self._workers, nums, strict=True):
                for path in sorted(worker.iterdir()):
                    if SEGMENT_NAME.fullmatch(path.name):
                        path.unlink()
                on_deleted(num)

    def close(self) -> None:
        """See the base class."""


@final
class _Directory:
    """A worker's `directory.bin`, as it is at this moment.

    Attributes:
      worker: the subdirectory's name.
      nbytes: its length; 0 if there is none.
      header: None if there is none, or it is damaged.
      hints: of all slots; none without a header.
      taken: slots of the current generation, those written first coming first.
      others: slots of other generations.
    """

    def __init__(self, worker: Path) -> None:
        self.worker = worker.name
        try:
            data = (worker / DIRECTORY_NAME).read_bytes()
        except FileNotFoundError:
            data = b""
        self.nbytes = len(data)
        self.header = DirectoryHeader.parse(data[:PAGE_NBYTES])
        num_slots = max(0, len(data) - PAGE_NBYTES) // HINT.itemsize if self.header else 0
        self.hints = np.frombuffer(data, HINT, num_slots, PAGE_NBYTES if num_slots else 0)
        current = self.header.generation if self.header else 0
        generations = self.hints["generation"]
        self.others = np.flatnonzero((generations != current) & (generations != 0))
        taken = np.flatnonzero((generations == current) & (generations != 0))
        self.taken = taken[np.argsort(orders(self.hints[taken]), kind="stable")]

    def key_nbytes(self, slot: int) -> int:
        return int(self.hints["key_nbytes"][slot])

    def key(self, slot: int) -> bytes:
        """The key, as far as the hint has it."""
        data: bytes = self.hints["key"][slot].tobytes()
        return data[: self.key_nbytes(slot)]


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    """A descriptor to read from; -1 if there is no such file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield -1
        return
    try:
        yield fd
    finally:
        os.close(fd)


def _read(fd: int, nbytes: int, offset: int) -> bytes:
    """So many bytes, or those up to the end of the file."""
    data = bytearray()
    while fd >= 0 and len(data) < nbytes and (piece := os.pread(fd, nbytes - len(data), offset + len(data))):
        data += piece
    return bytes(data)


def _generation(header: DirectoryHeader, number: int) -> Generation:
    return Generation(
        fingerprint=header.fingerprint,
        worker_id=header.worker_id,
        name=f"{number:016x}",
        is_current=number == header.generation,
    )


def _lock_holder(worker: Path) -> str | None:
    """Which process has locked the directory; None if none has.

    It takes the lock for an instant. An engine that starts then tries again.
    """
    try:
        fd = os.open(worker / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.pread(fd, 20, 0).decode(errors="replace").strip() or "a process"
    finally:
        os.close(fd)
    return None


def _truncate(path: Path) -> None:
    """Empties a file durably, if there is one."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
