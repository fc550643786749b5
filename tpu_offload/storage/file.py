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

import dataclasses
import errno
import logging
import mmap
import os
import re
import secrets
import struct
import threading
from collections.abc import Iterator, Sequence
from typing import Any, final

import numpy as np
import xxhash

from tpu_offload.config import ENV_PREFIX
from tpu_offload.errors import ConfigError, TransferError
from tpu_offload.storage.contract import StorageSpec, StorageTier
from tpu_offload.storage.directory_lock import lock, unlock
from tpu_offload.storage.format import PAGE_NBYTES, read_header
from tpu_offload.storage.inspection import StoreInspector
from tpu_offload.values import one_line

_logger = logging.getLogger(__name__)

_GB = 2**30  # as in the settings
_SEGMENT_NBYTES = 2**30
_MAGIC = b"\x89TPUKVD\n"
_VERSION = 1
_HEADER = struct.Struct("<8sHHIQQQ16s")  # magic, version, worker, 0, record_nbytes, slots, generation, fingerprint
_HINT_KEY_NBYTES = 46
HINT = np.dtype([("generation", "<u8"), ("order", "<u8"), ("key_nbytes", "<u2"), ("key", f"V{_HINT_KEY_NBYTES}")])
_HINT_FIELDS = struct.Struct(f"<QQH{_HINT_KEY_NBYTES}s")
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
        return cls(directory=os.path.abspath(os.path.expanduser(directory.strip())), **values)


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
        self._segments: list[_Segment] = []
        self._segment_slots = slots_per_segment(spec.record_nbytes)
        path = os.path.join(options.directory, f"worker-{spec.worker_id}")
        try:
            os.makedirs(path, exist_ok=True)
            self._lock = lock(path)
            try:
                sizes = self._check_space(path, options)
                self._directory = _Directory(os.path.join(path, DIRECTORY_NAME), spec)
                for name, nbytes in sizes.items():
                    self._segments.append(_Segment(os.path.join(path, name), nbytes, direct=options.direct))
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
        allocated = sum(_allocated_nbytes(os.path.join(path, name)) for name in (*sizes, DIRECTORY_NAME))
        needed = sum(sizes.values()) + _directory_nbytes(spec) - allocated
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
        taken = taken[np.argsort(hints["order"][taken], kind="stable")]
        prefixes, lengths = hints["key"][taken].tobytes(), hints["key_nbytes"][taken].tolist()
        for i, (slot, nbytes) in enumerate(zip(taken.tolist(), lengths, strict=True)):
            start = i * _HINT_KEY_NBYTES
            key = prefixes[start : start + nbytes] if nbytes <= _HINT_KEY_NBYTES else self._key_of(slot)
            if key:
                self._index.pop(key, None)  # the later one counts
                self._index[key] = slot
        used = set(self._index.values())
        self._free = [slot for slot in range(self.spec.num_chunks - 1, -1, -1) if slot not in used]
        self._order = int(hints["order"][taken[-1]]) if len(taken) else 0
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
            self._directory.write(slot, _HINT_FIELDS.pack(self.generation, order, len(key), key[:_HINT_KEY_NBYTES]))
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
        """See the base class."""
        for segment in self._segments:
            segment.close()
        self._segments = []
        if (directory := getattr(self, "_directory", None)) is not None:
            directory.close()
        unlock(self._lock)

    def _segment(self, slot: int) -> "_Segment":
        return self._segments[slot // self._segment_slots]

    def _offset(self, slot: int) -> int:
        return slot % self._segment_slots * self.spec.record_nbytes


def _directory_nbytes(spec: StorageSpec) -> int:
    return PAGE_NBYTES + spec.num_chunks * HINT.itemsize


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryHeader:
    """The header page of `directory.bin`.

    Attributes:
      worker_id: the worker.
      record_nbytes: size of every record.
      generation: hints and records of another one do not count.
      fingerprint: in hexadecimal.
    """

    worker_id: int
    record_nbytes: int
    generation: int
    fingerprint: str

    @classmethod
    def parse(cls, page: bytes) -> "DirectoryHeader | None":
        """Reads the page; None if it is short, damaged or of another version."""
        if len(page) < PAGE_NBYTES or xxhash.xxh3_64_digest(page[:-8]) != page[-8:]:
            return None
        magic, version, worker_id, zero, record_nbytes, _, generation, fingerprint = _HEADER.unpack_from(page)
        if (magic, version, zero) != (_MAGIC, _VERSION, 0):
            return None
        return cls(
            worker_id=worker_id, record_nbytes=record_nbytes, generation=generation, fingerprint=fingerprint.hex()
        )


@final
class _Directory:
    """`directory.bin`: a header, which is always durable, and hints."""

    def __init__(self, path: str, spec: StorageSpec) -> None:
        self._spec = spec
        self._directory = os.path.dirname(path)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self.generation = self._read_header()
            if not self.generation:
                self.renew()
            nbytes = _directory_nbytes(spec)
            os.ftruncate(self._fd, nbytes)
            os.posix_fallocate(self._fd, 0, nbytes)  # a hint must have room when others have filled the disk
        except BaseException:
            self.close()
            raise

    def _read_header(self) -> int:
        """The generation; 0 if the directory is new, damaged or not of this spec."""
        header = DirectoryHeader.parse(os.pread(self._fd, PAGE_NBYTES, 0))
        spec = self._spec
        if header is None:
            return 0
        found = header.worker_id, header.record_nbytes, header.fingerprint
        if found != (spec.worker_id, spec.record_nbytes, spec.fingerprint):
            _logger.warning(
                "storage directory %s: the records of another model or other settings are discarded; use one directory "
                "per model",
                self._directory,
            )
            return 0
        return header.generation

    def renew(self) -> None:
        """Begins a generation that was never used before, durably: all that was stored is invalid."""
        spec, generation = self._spec, secrets.randbits(63) | 1
        page = bytearray(PAGE_NBYTES)
        _HEADER.pack_into(
            page, 0, _MAGIC, _VERSION, spec.worker_id, 0, spec.record_nbytes, spec.num_chunks, generation,
            bytes.fromhex(spec.fingerprint),
        )  # fmt: skip
        page[-8:] = xxhash.xxh3_64_digest(page[:-8])
        _write(self._fd, 0, memoryview(page))
        os.fsync(self._fd)
        self.generation = generation

    def read(self) -> "np.ndarray[Any, Any]":
        """The hints of all slots."""
        data = b"".join(self._pieces(self._spec.num_chunks * HINT.itemsize))
        return np.frombuffer(data, HINT)

    def _pieces(self, nbytes: int) -> Iterator[bytes]:
        start = PAGE_NBYTES
        while nbytes and (piece := os.pread(self._fd, min(nbytes, 2**24), start)):
            yield piece
            start, nbytes = start + len(piece), nbytes - len(piece)
        yield bytes(nbytes)

    def write(self, slot: int, hint: bytes) -> None:
        _write(self._fd, PAGE_NBYTES + slot * HINT.itemsize, memoryview(hint))

    def close(self) -> None:
        os.close(self._fd)


@final
class _Segment:
    """One file of slots, allocated in full."""

    def __init__(self, path: str, nbytes: int, *, direct: bool) -> None:
        self.is_direct = False
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o600)
        try:
            os.ftruncate(self._fd, min(nbytes, os.fstat(self._fd).st_size))
            os.posix_fallocate(self._fd, 0, nbytes)
            if direct:
                self._use_direct(path, flags)
        except BaseException:
            self.close()
            raise

    def _use_direct(self, path: str, flags: int) -> None:
        """Bypasses the page cache if a page can be read and written that way."""
        try:
            fd = os.open(path, flags | os.O_DIRECT)
        except OSError:
            return
        page = memoryview(mmap.mmap(-1, PAGE_NBYTES))
        try:
            _read(fd, 0, page)
            _write(fd, 0, page)  # what was there
        except OSError as e:
            os.close(fd)
            if e.errno == errno.EINVAL:
                return
            raise
        os.close(self._fd)
        self._fd, self.is_direct = fd, True

    def read(self, offset: int, target: memoryview) -> None:
        _read(self._fd, offset, target)

    def write(self, offset: int, source: memoryview) -> None:
        _write(self._fd, offset, source)

    def close(self) -> None:
        os.close(self._fd)


def error_text(error: OSError) -> str:
    """An error of the operating system, in a few words."""
    return f"{type(error).__name__}: {one_line(error)}"


def _read(fd: int, offset: int, target: memoryview) -> None:
    while len(target):
        num_read = os.preadv(fd, [target], offset)
        if not num_read:
            raise OSError(errno.EIO, "the file is shorter than it was made")
        offset, target = offset + num_read, target[num_read:]


def _write(fd: int, offset: int, source: memoryview) -> None:
    while len(source):
        num_written = os.pwritev(fd, [source], offset)
        if not num_written:
            raise OSError(errno.EIO, "the file takes no more bytes")
        offset, source = offset + num_written, source[num_written:]


def slots_per_segment(record_nbytes: int) -> int:
    """Slots of records of this size in all segments but the last."""
    return max(1, _SEGMENT_NBYTES // record_nbytes)


def segment_name(number: int) -> str:
    """The name of a segment's file."""
    return f"segment-{number:03}.kv"


def _allocated_nbytes(path: str) -> int:
    try:
        return os.stat(path).st_blocks * 512
    except FileNotFoundError:
        return 0


def _setting(text: str) -> str:
    return f"{ENV_PREFIX}STORAGE_OPTIONS={one_line(text)[1:-1]}"
