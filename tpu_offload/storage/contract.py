"""What a storage tier is: bytes by key, for one worker.

The scheduler decides what is in it: which chunks are written, which of them are deleted to make room, and which are
read. A tier only keeps bytes. It need not be trusted with them: whoever reads compares a checksum, and what a tier has
lost or changed is a miss.
"""

import abc
import dataclasses
from collections.abc import Sequence
from typing import final


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StorageSpec:
    """What a tier is made for.

    Attributes:
      payload_nbytes: bytes of each value. All are of this size.
      num_chunks: most keys that the tier holds at a time, those being written and deleted included.
      worker_id: the worker whose part of the chunks it holds; workers share no keys.
      fingerprint: names the model and all else that payloads depend on, in hex. Bytes that were written under another
        are of no use.
      options: `TPU_OFFLOAD_STORAGE_OPTIONS`, for the tier to interpret.
    """

    payload_nbytes: int
    num_chunks: int
    worker_id: int
    fingerprint: str
    options: str


class StorageTier(abc.ABC):
    """Payloads by key. A constructor that raises ConfigError ends the engine's start.

    `write`, `read` and `delete` may block. They are called from several I/O threads at once, never from the thread that
    dispatches the model. No two calls for one key are made at once, but for a `read` beside a `write` or `delete` whose
    result nobody waits for any more: it may raise, or read anything. An error of any kind fails the chunks of that call
    and nothing else; calls that keep failing are suspended for a while.
    """

    def __init__(self, spec: StorageSpec) -> None:
        """Makes a tier. What an earlier incarnation of this worker has left in it is never read."""
        self.spec = spec

    @abc.abstractmethod
    def write(self, key: bytes, payload: memoryview) -> None:
        """Stores `payload_nbytes` bytes, in place of those that the key had.

        Args:
          key: at most a few hundred bytes.
          payload: read-only, page-aligned; not to be used after the call.
        Raises:
          OSError: it is not stored.
        """

    @abc.abstractmethod
    def read(self, key: bytes, payload: memoryview) -> None:
        """Fills all of `payload`.

        Args:
          key: the key.
          payload: `payload_nbytes` bytes, writable, page-aligned; not to be used after the call.
        Raises:
          KeyError: there is no such key.
          OSError: the bytes cannot be read.
        """

    @abc.abstractmethod
    def delete(self, keys: Sequence[bytes]) -> None:
        """Deletes what is there of these keys; others are no error.

        Raises:
          OSError: some may still be there.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Ends the use of the tier. Called once, when no other call is in progress, or will be."""
