"""The interface of a storage tier: bytes by key, for one worker.

The scheduler decides which chunks are written, read, and deleted to make room; a tier only stores bytes. It need not
detect corruption: the reader verifies a checksum, and lost or changed bytes are a miss.
"""

import abc
import dataclasses
from collections.abc import Sequence
from typing import final


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StorageSpec:
    """The parameters of a tier.

    Attributes:
      payload_nbytes: size of every value.
      num_chunks: capacity; the most keys that the tier holds at a time, including those being written or deleted.
      worker_id: the worker; each holds its own shards of the chunks, under the same keys.
      fingerprint: of the model and all else that the bytes depend on, in hex. Bytes written under another one are
        invalid.
      options: `TPU_OFFLOAD_STORAGE_OPTIONS`, for the tier to interpret.
    """

    payload_nbytes: int
    num_chunks: int
    worker_id: int
    fingerprint: str
    options: str


class StorageTier(abc.ABC):
    """Payloads by key. A ConfigError from the constructor stops the engine's start.

    `write`, `read` and `delete` may block. Several I/O threads call them concurrently, never the thread that dispatches
    the model. Writes and deletions of one key are never concurrent. A read may be concurrent with them only after it
    timed out or storage was cleared; its result is ignored then. An exception fails the chunks of that call only; while
    calls keep failing, they are suspended for increasing intervals.
    """

    def __init__(self, spec: StorageSpec) -> None:
        """Makes a tier. Values that an earlier incarnation of this worker wrote are never read."""
        self.spec = spec

    @abc.abstractmethod
    def write(self, key: bytes, payload: memoryview) -> None:
        """Stores `payload_nbytes` bytes, replacing the key's earlier value.

        Args:
          key: at most a few hundred bytes.
          payload: read-only, page-aligned; must not be used after the call.
        Raises:
          OSError: the payload is not stored.
        """

    @abc.abstractmethod
    def read(self, key: bytes, payload: memoryview) -> None:
        """Fills all of `payload`.

        Args:
          key: the key.
          payload: `payload_nbytes` bytes, writable, page-aligned; must not be used after the call.
        Raises:
          KeyError: there is no such key.
          OSError: the bytes cannot be read.
        """

    @abc.abstractmethod
    def delete(self, keys: Sequence[bytes]) -> None:
        """Deletes keys; unknown ones are ignored.

        Raises:
          OSError: some of them may still be stored.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Releases the tier's resources. Called once, after all other calls have returned."""
