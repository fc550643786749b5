"""The interface of a storage tier: records by key, for one worker.

The scheduler decides which chunks are written, read, and deleted to make room; a tier only stores bytes. It need not
detect corruption: the reader verifies each record (`storage.format`), and lost or changed bytes are a miss.
"""

import abc
import dataclasses
from collections.abc import Iterable, Sequence
from typing import ClassVar, final

from tpu_offload.errors import ConfigError
from tpu_offload.storage.inspection import StoreInspector


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StorageSpec:
    """The parameters of a tier.

    Attributes:
      record_nbytes: size of every record; a multiple of `format.PAGE_NBYTES`.
      num_chunks: capacity; the most keys that the scheduler has in the tier at a time, including those being written or
        deleted. A private tier holds no more, what earlier incarnations left included. Of a size in GB it is what fits
        if a record takes 64 bytes more, for an index.
      worker_id: the worker; each holds its own shards of the chunks, under the same keys. In a private tier each
        data-parallel rank of a worker counts as one, and so do the workers of other engines that are started with the
        same settings: what is stored is its own.
      fingerprint: of the model and all else that the bytes depend on, 16 bytes in hex. A tier never gives back what was
        written under another one.
      options: `TPU_OFFLOAD_STORAGE_OPTIONS`, for the tier to interpret.
    """

    record_nbytes: int
    num_chunks: int
    worker_id: int
    fingerprint: str
    options: str


@final
class UndeletedError(OSError):
    """A call of `StorageTier.delete` has deleted all but some of its keys, which the store refuses to delete.

    Not for a store that does not answer: deletions are suspended after a few other errors, and not after this one.

    Args:
      why: what went wrong, for a log line.
      keys: those that may still be stored; all others of the call are not.
    """

    def __init__(self, why: str, keys: Iterable[bytes]) -> None:
        super().__init__(why)
        self.keys = frozenset(keys)


class StorageTier(abc.ABC):
    """Records by key. A ConfigError from the constructor stops the engine's start.

    `write`, `read`, `delete`, `find` and `clear` may block. Several I/O threads call them concurrently, never the
    thread that dispatches the model. Writes and deletions of one key are never concurrent, and nothing is written or
    deleted during `clear`. A read may be concurrent with them only after it timed out or storage was cleared; its
    result is ignored then. `find` may be concurrent with anything. An exception fails the chunks of that call only;
    while calls keep failing, they are suspended for increasing intervals.

    Attributes:
      is_shared: other processes write to it too, so that it may hold keys that were not written by this process. It
        is asked with `find` what it has; a private tier lists it with `stored_keys`, once.
      generation: the header of every record carries the generation of its writing, and a record of another generation
        is not used. A tier that cannot erase everything durably in one step changes it in `clear`, to a number that was
        never used before. 0 if it is not needed.
    """

    is_shared: ClassVar[bool] = False
    generation: int = 0

    def __init__(self, spec: StorageSpec) -> None:
        """Makes a tier."""
        self.spec = spec

    @classmethod
    def open_inspector(cls, options: str) -> StoreInspector:
        """Opens what tiers with these options have stored, of any model and worker, for `tpu-offload tier`.

        A tier need not have it.

        Args:
          options: as in `StorageSpec`.
        Raises:
          ConfigError: the options are wrong, or there is nothing of such a tier.
          OSError: the store does not answer.
        """
        raise ConfigError(f"{cls.__name__} cannot be inspected; expected a class that implements open_inspector()")

    @abc.abstractmethod
    def write(self, key: bytes, record: memoryview) -> None:
        """Stores a record, replacing the key's earlier one.

        Args:
          key: at most `format.MAX_KEY_NBYTES` bytes.
          record: `record_nbytes` bytes, read-only, page-aligned; must not be used after the call.
        Raises:
          OSError: the record is not stored; what was there before may be gone.
        """

    @abc.abstractmethod
    def read(self, key: bytes, record: memoryview) -> None:
        """Fills all of `record`.

        Args:
          key: the key.
          record: `record_nbytes` bytes, writable, page-aligned; must not be used after the call, nor kept: a read whose
            buffer is still in use then has failed.
        Raises:
          KeyError: there is no such key, which is no failure: a server may evict what it likes.
          RecordError: there is a record, of another size: it is deleted, as one whose bytes are damaged.
          OSError: the bytes cannot be read; the record may be intact.
        """

    @abc.abstractmethod
    def delete(self, keys: Sequence[bytes]) -> None:
        """Deletes keys; unknown ones are ignored. One that cannot be deleted does not keep the others.

        Raises:
          UndeletedError: its keys may still be stored, and are tried again later; the others are not stored.
          OSError: any of them may still be stored.
        """

    def stored_keys(self) -> Sequence[bytes]:
        """Keys that earlier incarnations of this worker left and that may be readable, each once.

        Called once, before all other calls, by the thread that makes the tier. They count against `num_chunks`. Those
        that were written first come first, as far as the tier knows. An entry may turn out to be unreadable; it is then
        deleted. A tier that keeps nothing returns none. Not called if the tier `is_shared`: a start must not depend on
        how many keys others have stored.
        """
        return ()

    def find(self, prefixes: Sequence[Sequence[bytes]]) -> Sequence[int]:
        """Counts, for each of these prefixes, the leading keys that are stored. Required if the tier `is_shared`.

        One thread calls it, which makes no other calls: an answer must not wait for the bytes of records, so a tier
        with connections has one of its own for it. `prefix_search.count_leading` needs few round trips. The answer is a
        hint: a key may be gone by the time it is read, and may be stored a moment after it was not found.

        The scheduler also asks for what it knows, if requests use it without reading it, one key a prefix. So a store
        that evicts what was not used for long should count what is found as used.

        Args:
          prefixes: at most a few thousand keys each; the later keys of one are of little use without the earlier ones.
        Returns:
          For each prefix a number from 0 to its length.
        Raises:
          OSError: the tier cannot tell. It is asked less often while that continues.
        """
        raise NotImplementedError("a shared storage tier has to implement find()")

    @abc.abstractmethod
    def clear(self) -> None:
        """Empties the tier, durably: nothing stored before is ever listed or read again, also after a restart.

        Raises:
          OSError: something may still be stored. It is called again before anything is written.
        """

    def unregister(self) -> None:
        """Removes what else is in the store of this worker, all of whose records are deleted: as if it had not started.

        For the check of a store, by a worker of no engine, which then closes the tier. A tier need not have it.

        Raises:
          OSError: something may be left.
        """
        return

    @abc.abstractmethod
    def close(self) -> None:
        """Releases the tier's resources. Called once, after all other calls have returned, on a thread of its own.

        It is abandoned if it has not ended after five seconds.
        """
