"""A storage tier in memory that reads at a given rate, for benchmarks of what slow storage costs."""

import threading
import time
from collections.abc import Sequence

from tpu_offload.storage import StorageSpec, StorageTier


class ThrottledTier(StorageTier):
    """Reads take turns, as on one disk; writes and deletions take no time.

    Args:
      spec: `options` is the rate in MB/s.
    """

    def __init__(self, spec: StorageSpec) -> None:
        super().__init__(spec)
        self._s_per_byte = 1e-6 / float(spec.options)
        self._records: dict[bytes, bytes] = {}
        self._lock = threading.Lock()
        self._free_s = 0.0  # when the last read so far ends

    def write(self, key: bytes, record: memoryview) -> None:
        """See `StorageTier`."""
        self._records[key] = bytes(record)

    def read(self, key: bytes, record: memoryview) -> None:
        """See `StorageTier`."""
        found = self._records[key]
        with self._lock:
            end_s = self._free_s = max(self._free_s, time.monotonic()) + len(found) * self._s_per_byte
        time.sleep(max(0.0, end_s - time.monotonic()))
        record[:] = found

    def delete(self, keys: Sequence[bytes]) -> None:
        """See `StorageTier`."""
        for key in keys:
            self._records.pop(key, None)

    def clear(self) -> None:
        """See `StorageTier`."""
        self._records.clear()

    def close(self) -> None:
        """See `StorageTier`."""
        self._records.clear()
