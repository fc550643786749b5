"""How other caches keep chunks in files, re-made: the system calls of one chunk, without what lies above them.

None of them has a checksum or a header.

References:
  vLLM 0.33, the `fs` tier of `vllm/v1/kv_offload`: a raw file a chunk, written to a temporary file and renamed.
  LMCache 0.5, `fs_l2_adapter.py`: the same with O_DIRECT; `local_disk_backend.py`: a raw file written in place.
"""

import os
from pathlib import Path
from typing import final

_READ_ONLY = os.O_RDONLY | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC


@final
class FilePerChunk:
    """One raw file a chunk.

    Args:
      directory: for the files.
      payload_nbytes: bytes of a chunk.
      direct: with O_DIRECT; buffers are page-aligned then.
      renamed: written to a temporary file first, else in place.
    """

    def __init__(self, directory: Path, payload_nbytes: int, *, direct: bool, renamed: bool) -> None:
        directory.mkdir()
        self.record_nbytes = payload_nbytes
        self._directory, self._renamed = directory, renamed
        self._flags = os.O_DIRECT if direct else 0

    def write(self, number: int, record: memoryview) -> None:
        path = self._directory / f"{number:032x}.bin"
        target = path.with_suffix(".tmp") if self._renamed else path
        fd = os.open(target, _NEW | self._flags | (os.O_EXCL if self._renamed else os.O_TRUNC), 0o600)
        try:
            if os.write(fd, record) != len(record):
                raise OSError("a short write")
        finally:
            os.close(fd)
        if self._renamed:
            os.replace(target, path)

    def read(self, number: int, record: memoryview) -> None:
        fd = os.open(self._directory / f"{number:032x}.bin", _READ_ONLY | self._flags)
        try:
            if os.preadv(fd, [record], 0) != len(record):
                raise OSError("a short read")
        finally:
            os.close(fd)

    def settle(self) -> None:
        """What was written is on the disk, and no longer in the page cache."""
        for path in self._directory.iterdir():
            fd = os.open(path, _READ_ONLY)
            try:
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)

    def close(self) -> None:
        """Nothing is open."""
