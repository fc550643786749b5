"""The `file` tier: slots in preallocated files on a local disk. It survives restarts of the engine.

    DIR/worker-N/lock            held by the process that uses the directory
    DIR/worker-N/directory.bin   a header page, then a hint of 64 bytes for each slot
    DIR/worker-N/segment-000.kv  slots of one record each; all space is allocated at the start

The index is in memory. A hint is written after its slot and tells the next start which key is there; one sequential
read of them is all that a start needs. Hints may be wrong, after a crash or a power failure: what counts is the record,
whose header and checksum every read verifies. Nothing is synced except the header of the directory, whose generation
`clear` changes: hints and records of another generation do not count.

Nothing grows after the start, and no file is ever renamed or temporary, so nothing leaks. A directory that was written
under another fingerprint, or with another size of records, is emptied and used again.
"""

import contextlib
import dataclasses
import errno
import logging
import mmap
import os
import re
import threading
from collections.abc import Sequence
from typing import Any, final

import numpy as np

from tpu_offload.config import ENV_PREFIX
from tpu_offload.errors import ConfigError, TransferError
from tpu_offload.storage.contract import StorageSpec, StorageTier
from tpu_offload.storage.directory_lock import allocating, lock
from tpu_offload.storage.format import PAGE_NBYTES, read_header
from tpu_offload.storage.inspection import StoreInspector
from tpu_offload.storage.slot_files import (
    HINT,
    HINT_FIELDS,
    HINT_KEY_NBYTES,
    Segment,
    SlotDirectory,
    directory_nbytes,
    orders,
)
from tpu_offload.values import error_text, one_line

_logger = logging.getLogger(__name__)

_GB = 2**30  # as in the settings
_SEGMENT_NBYTES = 2**30
DIRECTORY_NAME = "directory.bin"
SEGMENT_NAME = re.compile(r"segment-\d{3,}\.kv")
_OPTIONS = "a directory, then name=value separated by commas: min_free_gb (number) and direct (auto or off)"


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FileOptions:
    """`TPU_OFFLOAD_STORAGE_OPTIONS` of this tier: `DIR[,min_free_gb=GB][,direct=off]`.

    Attributes:
      directory: the directory; workers have subdirectories of their own.
      min_free_gb: the start fails if allocating the tier would leave less of the file system free.
      direct: bypass the page cache where the file system can.
    """

    directory: str
    min_free_gb: float = 1.0
    direct: bool = True

    @classmethod
    def parse(cls, text: str) -> "FileOptions":
        """Reads the setting.

        Raises:
          ConfigError: it is not a directory and options.
        """
        directory, *pairs = text.split(",")
        values: dict[str, Any] = {}
        for pair in pairs:
            name, _, value = pair.strip().partition("=")
            try:
                if name in values:
                    raise ValueError
                if name == "min_free_gb" and 0 <= float(value) < float("inf"):
                    values[name] = float(value)
                elif name == "direct" and value in ("auto", "off"):
                    values[name] = value == "auto"
                else:
                    raise ValueError
            except ValueError:
                raise ConfigError(f"{_setting(text)} has {one_line(pair)}; expected {_OPTIONS}") from None
        if not directory.strip():
            raise ConfigError(f"{_setting(text)} names no directory; expected {_OPTIONS}")
        if "\0" in directory:  # from JSON; the system's functions raise ValueError
            raise ConfigError(f"{_setting(one_line(text))} has a null character; expected {_OPTIONS}")
        directory = os.path.expanduser(directory.strip())
        if directory.startswith("~"):  # else it would be one of that name, in whatever the working directory is
            raise ConfigError(f"{_setting(text)}: there is no home directory for ~; expected the path from / on")
        return cls(directory=os.path.abspath(directory), **values)


@final
class FileTier(StorageTier):
    """Slots in preallocated files.

    Raises:
      ConfigError: the options are invalid, another process uses the directory, or it cannot be written or allocated.
    """

    @classmethod
    def open_inspector(cls, options: str) -> StoreInspector:
        """As in `StorageTier`."""
        from tpu_offload.storage.file_inspection import FileInspector

        return FileInspector(options)

    def __init__(self, spec: StorageSpec) -> None:
        super().__init__(spec)
        options = FileOptions.parse(spec.options)
        self._mutex = threading.Lock()  # for the index; never held during I/O
        self._index: dict[bytes, int] = {}
        self._order = 0  # of the last write
        self._segments: list[Segment] = []
        self._segment_slots = slots_per_segment(spec.record_nbytes)
        path = os.path.join(options.directory, f"worker-{spec.worker_id}")
        try:
            os.makedirs(path, exist_ok=True)
            self._lock = lock(path)
            try:
                with allocating(options.directory):  # workers that start together each count what the others take
                    self._allocate(path, options)
            except BaseException:
                self.close()
                raise
        except OSError as e:
            raise ConfigError(
                f"{_setting(spec.options)}: the directory cannot be used ({error_text(e)}); expected a directory on a "
                "disk that this process can write to"
            ) from e
        self.generation = self._directory.generation
        self._free = list(range(spec.num_chunks - 1, -1, -1))
        if options.direct and not all(segment.is_direct for segment in self._segments):
            _logger.warning("%s: the file system has no direct I/O; the page cache is used", path)

    def _allocate(self, path: str, options: FileOptions) -> None:
        """Makes the files. If that fails, what was added is freed; what a smaller tier drops is gone."""
        sizes = self._check_space(path, options)
        before = {name: _sizes(os.path.join(path, name))[0] for name in (DIRECTORY_NAME, *sizes)}
        try:
            self._directory = SlotDirectory(os.path.join(path, DIRECTORY_NAME), self.spec)
            for name, nbytes in sizes.items():
                self._segments.append(Segment(os.path.join(path, name), nbytes, direct=options.direct))
        except BaseException:
            for name, nbytes in before.items():
                _shrink(os.path.join(path, name), nbytes)
            raise

    def _check_space(self, path: str, options: FileOptions) -> dict[str, int]:
        """Deletes segments that are too many; returns the names and sizes of all, if there is space for them."""
        spec, slots = self.spec, self._segment_slots
        sizes = {
            segment_name(first // slots): min(slots, spec.num_chunks - first) * spec.record_nbytes
            for first in range(0, spec.num_chunks, slots)
        }
        for name in os.listdir(path):
            if SEGMENT_NAME.fullmatch(name) and name not in sizes:
                os.unlink(os.path.join(path, name))
        allocated = sum(_sizes(os.path.join(path, name))[1] for name in (*sizes, DIRECTORY_NAME))
        needed = sum(sizes.values()) + directory_nbytes(spec) - allocated
        disk = os.statvfs(path)
        free = disk.f_bavail * disk.f_frsize
        if needed > 0 and needed + options.min_free_gb * _GB > free:
            raise ConfigError(
                f"{_setting(spec.options)}: {spec.num_chunks} chunks need {needed / _GB:.2f} GB more, and "
                f"{options.min_free_gb:g} GB have to stay free; {free / _GB:.2f} GB are free: reduce "
                f"the tier ({ENV_PREFIX}STORAGE_GB or _NUM_STORAGE_CHUNKS) or free some space"
            )
        return sizes

    def stored_keys(self) -> Sequence[bytes]:
        """See the base class."""
        hints = self._directory.read()
        taken = np.flatnonzero(hints["generation"] == self.generation)
        written = orders(hints[taken])
        taken = taken[np.argsort(written, kind="stable")]
        prefixes, lengths = hints["key"][taken].tobytes(), hints["key_nbytes"][taken].tolist()
        for i, (slot, nbytes) in enumerate(zip(taken.tolist(), lengths, strict=True)):
            start = i * HINT_KEY_NBYTES
            key = prefixes[start : start + nbytes] if nbytes <= HINT_KEY_NBYTES else self._key_of(slot)
            if key:
                self._index.pop(key, None)  # the later one counts
                self._index[key] = slot
        used = set(self._index.values())
        self._free = [slot for slot in range(self.spec.num_chunks - 1, -1, -1) if slot not in used]
        self._order = int(written.max(initial=0))
        return list(self._index)

    def _key_of(self, slot: int) -> bytes:
        """The key of a slot, from its record, since it is too long for the hint; empty if it cannot be told."""
        page = memoryview(mmap.mmap(-1, PAGE_NBYTES))
        try:
            self._segment(slot).read(self._offset(slot), page)
            header = read_header(page)
        except (OSError, TransferError):
            return b""
        return header.key if header.generation == self.generation else b""

    def write(self, key: bytes, record: memoryview) -> None:
        """See the base class."""
        with self._mutex:
            slot = self._index.pop(key, None)
            if slot is None:
                if not self._free:
                    raise OSError(errno.ENOSPC, f"all {self.spec.num_chunks} slots are taken")
                slot = self._free.pop()
            self._order += 1
            order = self._order
        try:
            self._segment(slot).write(self._offset(slot), record)
            self._directory.write(slot, HINT_FIELDS.pack(self.generation, order, len(key), key[:HINT_KEY_NBYTES]))
        except BaseException:
            with self._mutex:
                self._free.append(slot)
            raise
        with self._mutex:
            self._index[key] = slot

    def read(self, key: bytes, record: memoryview) -> None:
        """See the base class."""
        with self._mutex:
            slot = self._index[key]
        self._segment(slot).read(self._offset(slot), record)

    def delete(self, keys: Sequence[bytes]) -> None:
        """See the base class."""
        error: OSError | None = None
        for key in keys:
            with self._mutex:
                slot = self._index.pop(key, None)
            if slot is None:
                continue
            try:
                self._directory.write(slot, bytes(HINT.itemsize))
            except OSError as e:  # then the next start lists the key, and its record is intact, or another's
                error = e
            with self._mutex:
                self._free.append(slot)
        if error is not None:
            raise error

    def clear(self) -> None:
        """See the base class. From here on hints and records of before are of another generation."""
        with self._mutex:
            self._index.clear()
            self._free = list(range(self.spec.num_chunks - 1, -1, -1))
        self._directory.renew()
        self.generation = self._directory.generation

    def close(self) -> None:
        """See the base class. Does nothing if it is closed."""
        for segment in self._segments:
            segment.close()
        self._segments = []
        if (directory := getattr(self, "_directory", None)) is not None:
            directory.close()
        self._lock.close()

    def _segment(self, slot: int) -> Segment:
        return self._segments[slot // self._segment_slots]

    def _offset(self, slot: int) -> int:
        return slot % self._segment_slots * self.spec.record_nbytes


def slots_per_segment(record_nbytes: int) -> int:
    """Slots of records of this size in all segments but the last."""
    return max(1, _SEGMENT_NBYTES // record_nbytes)


def segment_name(number: int) -> str:
    """The name of a segment's file."""
    return f"segment-{number:03}.kv"


def _sizes(path: str) -> tuple[int, int]:
    """The bytes that a file has, and those that it takes on the disk; none if it is missing."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return 0, 0
    return found.st_size, found.st_blocks * 512


def _shrink(path: str, nbytes: int) -> None:
    """Frees what a file has beyond so many bytes, and one that had none, as far as the disk does it."""
    with contextlib.suppress(OSError):
        if os.stat(path).st_size >= nbytes:  # a failed allocation may have added space, but no length
            os.truncate(path, nbytes)  # also one that goes: it may be open
        if not nbytes:
            os.unlink(path)


def _setting(text: str) -> str:
    return f"{ENV_PREFIX}STORAGE_OPTIONS={one_line(text)[1:-1]}"
