"""The files of a worker's directory of the `file` tier: `directory.bin`, with a hint for each slot, and segments."""

import dataclasses
import errno
import logging
import mmap
import os
import secrets
import struct
from collections.abc import Iterator
from typing import Any, final

import numpy as np
import xxhash

from tpu_offload.storage.contract import StorageSpec
from tpu_offload.storage.descriptor import Descriptor
from tpu_offload.storage.format import PAGE_NBYTES, RecordError

_logger = logging.getLogger(__name__)

_MAGIC = b"\x89TPUKVD\n"
_VERSION = 1
_HEADER = struct.Struct("<8sHHIQQQ16s")  # magic, version, worker, 0, record_nbytes, slots, generation, fingerprint
HINT_KEY_NBYTES = 46
HINT = np.dtype([("generation", "<u8"), ("order", "<u8"), ("key_nbytes", "<u2"), ("key", f"V{HINT_KEY_NBYTES}")])
HINT_FIELDS = struct.Struct(f"<QQH{HINT_KEY_NBYTES}s")
_MAX_ORDER = 2**63  # no tier writes as often


def orders(hints: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """When each slot was written, as numbers that grow; 0, before all others, where the number cannot be right.

    So the next number is in range whatever is damaged. Such hints still count: after damage just below `_MAX_ORDER`,
    what is written next has numbers beyond it.
    """
    found: np.ndarray[Any, Any] = np.where(hints["order"] < _MAX_ORDER, hints["order"], np.uint64(0))
    return found


def directory_nbytes(spec: StorageSpec) -> int:
    """The size of `directory.bin`."""
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
class SlotDirectory:
    """`directory.bin`: a header, which is always durable, and hints."""

    def __init__(self, path: str, spec: StorageSpec) -> None:
        self._spec = spec
        self._directory = os.path.dirname(path)
        self._file = Descriptor(path)
        try:
            self.generation = self._read_header()
            if not self.generation:
                self.renew()
            nbytes = directory_nbytes(spec)
            os.ftruncate(self._file.fd, nbytes)
            os.posix_fallocate(self._file.fd, 0, nbytes)  # a hint must have room when others have filled the disk
        except BaseException:
            self.close()
            raise

    def _read_header(self) -> int:
        """The generation; 0 if the directory is new, damaged or not of this spec."""
        page = os.pread(self._file.fd, PAGE_NBYTES, 0)
        header = DirectoryHeader.parse(page)
        spec = self._spec
        if header is None:
            if any(page):
                _logger.warning(
                    "storage directory %s: its index is damaged or of another version of the format; the records are "
                    "discarded",
                    self._directory,
                )
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
        _write(self._file.fd, 0, memoryview(page))
        os.fsync(self._file.fd)
        self.generation = generation

    def read(self) -> "np.ndarray[Any, Any]":
        """The hints of all slots."""
        data = b"".join(self._pieces(self._spec.num_chunks * HINT.itemsize))
        return np.frombuffer(data, HINT)

    def _pieces(self, nbytes: int) -> Iterator[bytes]:
        start = PAGE_NBYTES
        while nbytes and (piece := os.pread(self._file.fd, min(nbytes, 2**24), start)):
            yield piece
            start, nbytes = start + len(piece), nbytes - len(piece)
        yield bytes(nbytes)

    def write(self, slot: int, hint: bytes) -> None:
        """Replaces the hint of a slot."""
        _write(self._file.fd, PAGE_NBYTES + slot * HINT.itemsize, memoryview(hint))

    def close(self) -> None:
        """Closes the file, unless it is closed."""
        self._file.close()


@final
class Segment:
    """One file of slots, allocated in full."""

    def __init__(self, path: str, nbytes: int, *, direct: bool) -> None:
        self.is_direct = False
        self._file = Descriptor(path)
        try:
            os.ftruncate(self._file.fd, min(nbytes, os.fstat(self._file.fd).st_size))
            os.posix_fallocate(self._file.fd, 0, nbytes)
            if direct:
                self._use_direct(path)
        except BaseException:
            self.close()
            raise

    def _use_direct(self, path: str) -> None:
        """Bypasses the page cache if a page can be read and written that way."""
        try:
            direct = Descriptor(path, os.O_DIRECT)
        except OSError as e:
            if e.errno in (errno.EMFILE, errno.ENFILE):  # says nothing of the file system
                raise
            return
        page = memoryview(mmap.mmap(-1, PAGE_NBYTES))
        try:
            _read(direct.fd, 0, page)
            _write(direct.fd, 0, page)  # what was there
        except BaseException as e:
            direct.close()
            if isinstance(e, OSError) and e.errno == errno.EINVAL:
                return
            raise
        self._file.close()
        self._file, self.is_direct = direct, True

    def read(self, offset: int, target: memoryview) -> None:
        """Fills the target from the file.

        Raises:
          RecordError: the file ends before.
          OSError: it cannot be read.
        """
        _read(self._file.fd, offset, target)

    def write(self, offset: int, source: memoryview) -> None:
        """Writes all of the source into the file."""
        _write(self._file.fd, offset, source)

    def close(self) -> None:
        """Closes the file, unless it is closed."""
        self._file.close()


def _read(fd: int, offset: int, target: memoryview) -> None:
    end = offset + len(target)
    try:
        while len(target):
            num_read = os.preadv(fd, [target], offset)
            if not num_read:
                raise OSError(errno.EIO, "the disk returns no bytes")
            offset, target = offset + num_read, target[num_read:]
    except OSError as e:  # EINVAL where direct I/O goes on behind an end within a page
        if os.fstat(fd).st_size < end:
            raise RecordError("the file is shorter than it was made") from e
        raise


def _write(fd: int, offset: int, source: memoryview) -> None:
    while len(source):
        num_written = os.pwritev(fd, [source], offset)
        if not num_written:
            raise OSError(errno.EIO, "the file takes no more bytes")
        offset, source = offset + num_written, source[num_written:]
