"""The `object` tier: records as objects of a bucket, a directory or memory, through obstore.

    TPU_OFFLOAD_STORAGE_OPTIONS=s3://bucket/prefix?endpoint=https://host&region=us-east-1

An object is named `<fingerprint>/<worker>/<generation>/<key>.kv`, the key in hexadecimal. Keys are hashes, so names
spread over the key range of a bucket. The object `<fingerprint>/<worker>/generation` names the current generation, a
random number: `clear` overwrites it, and what other generations left is never listed or read again, and deleted in the
background. After a call has failed or a record was missing, and once a minute, an engine looks at that object again
before it writes. It may be gone with all else, and is written again then, or `tpu-offload tier clear` has named
another, which is taken up. Every start writes it, so its time tells an engine that another one has started beside it.

A record is one PUT, never a multipart upload, of which a crash would leave parts behind. obstore reads the caller's
memory without copying it. After a timeout the HTTP client may go on reading it for a moment, so that the object, if it
is stored at all, has other bytes; readers verify every record. And it may be stored after it was deleted
(`object_late_writes`).
"""

import contextlib
import itertools
import logging
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from datetime import datetime
from time import monotonic
from typing import final

import numpy as np
import obstore
from obstore.exceptions import BaseError
from obstore.store import MemoryStore

from tpu_offload.errors import ConfigError
from tpu_offload.storage.contract import StorageSpec, StorageTier, UndeletedError
from tpu_offload.storage.format import RecordError
from tpu_offload.storage.inspection import StoreInspector
from tpu_offload.storage.object_deletion import BATCH, LeftObjectsError, delete_objects, write_and_delete
from tpu_offload.storage.object_directory import directories_of, make_directory, remove_staging_files, remove_tree
from tpu_offload.storage.object_errors import may_answer_later, reason
from tpu_offload.storage.object_late_writes import LateWrites
from tpu_offload.storage.object_names import GENERATION, MARKER, key_of, name_of, new_generation, new_probe
from tpu_offload.storage.object_store import open_store, where
from tpu_offload.storage.url_options import SETTING

_logger = logging.getLogger(__name__)

_STREAM_NBYTES = 1 << 20
_NAMED_S = 60.0  # for which the store names the same generation, as far as an engine knows
SWEEPER_NAME = "tpu_offload-storage-sweep"  # of the threads that delete earlier generations
_MAX_LATE_AT_ONCE = 16
_OF_BEFORE = "objects of earlier generations"
_ANOTHER = "storage tier: %s: another engine has started there; each deletes what the other stores: give each a prefix"
_FULL = "No space left"  # on a directory's disk


@final
class ObjectTier(StorageTier):
    """Records as objects. Private to one engine: two of them need a prefix each.

    If the store does not answer at the start, the tier starts empty, with a new generation, and is used once the store
    answers. A store that refuses is an error.

    Args:
      spec: `options` is a URL, see the module.
    Raises:
      ConfigError: the options are wrong, or the store refuses the bucket, the credentials, a write or a deletion.
    """

    @classmethod
    def open_inspector(cls, options: str) -> StoreInspector:
        """As in `StorageTier`."""
        from tpu_offload.storage.object_inspection import ObjectInspector

        return ObjectInspector(options)

    def __init__(self, spec: StorageSpec) -> None:
        super().__init__(spec)
        self._store, self._directory = open_store(spec.options)
        self._root = f"{spec.fingerprint}/{spec.worker_id}"
        self._marker = f"{self._root}/{MARKER}"
        self._lock = threading.Lock()
        self._generation = new_generation()
        self._is_published = False
        self._is_doubtful = False  # whether the store may name another one by now
        self._checked_s = monotonic()  # when it was asked last
        self._marked_at: datetime | None = None  # by the store's clock; None from a PUT of ours until it is asked
        self._naming: Future[OSError | None] | None = None  # of the thread that asks it, what went wrong
        self._earlier: set[str] = set()  # generations to delete
        self._late = LateWrites()
        self._sweepers: list[threading.Thread] = []
        self._stop = threading.Event()
        self._start()

    def _start(self) -> None:
        """Adopts the generation that the store names, or names a new one there."""
        try:
            is_new = not self._adopt()
            try:
                self._publish()  # also what is there already: writes may be refused, and it gets no older than records
                self._adopt()  # for the time of the marker, and to find that reads are refused
                self._check_deletion()
                self._check_listing()
            except (BaseError, OSError) as e:
                if is_new or _FULL not in str(e):
                    raise
                self._is_published = True  # it was before
                _logger.warning("storage tier: %s is full (%s); what it has is found", where(self._store), reason(e))
        except (BaseError, OSError) as e:
            self._check_unreachable(e.__cause__ or e)
            self._generation, self._is_published = new_generation(), False

    def _check_deletion(self) -> None:
        """Deletes an object that no other process knows. A tier that may not would take no writes once it is full."""
        try:
            write_and_delete(self._store, f"{self._root}/{new_probe()}")
        except (BaseError, OSError) as e:
            if not may_answer_later(e):
                raise self._refused(e, "what it stores cannot be deleted: ") from None
            _logger.warning(
                "storage tier: %s has not answered whether it deletes what it stores (%s); the next start asks again",
                where(self._store),
                reason(e),
            )

    def _check_listing(self) -> None:
        """Finds out whether listing is refused: then each start would discard what the last one has written."""
        try:
            next(iter(obstore.list(self._store, f"{self._root}/{self._generation}", chunk_size=1)), None)
        except (BaseError, OSError) as e:
            if not may_answer_later(e):
                raise self._refused(e, "what it stores cannot be listed: ") from None

    def _adopt(self) -> bool:
        found = self._named()
        if found is None:
            return False
        if not GENERATION.fullmatch(found):
            _logger.warning(
                "storage tier: %s: %s is damaged or of another version of the format; the records of before are "
                "discarded",
                where(self._store),
                self._marker,
            )
            return False
        self._generation = found
        return True

    def _named(self) -> str | None:
        """What the store names as the generation, maybe damaged, or None; warns of another engine that wrote it."""
        try:
            result = obstore.get(self._store, self._marker)
            found = bytes(result.bytes()).decode("ascii", "replace")
        except FileNotFoundError as e:
            if "NoSuchBucket" in str(e):
                raise
            return None
        before, self._marked_at = self._marked_at, result.meta["last_modified"]
        if before not in (None, self._marked_at) and found == self._generation:
            _logger.warning(_ANOTHER, where(self._store))
        return found

    def _check_unreachable(self, error: BaseException) -> None:
        """Logs that the store does not answer; raises ConfigError if it never will."""
        if not may_answer_later(error):
            raise self._refused(error) from None
        _logger.warning(
            "storage tier: %s does not answer (%s); it starts empty, and is used once it answers",
            where(self._store),
            reason(error),
        )

    def _refused(self, error: BaseException, what: str = "") -> ConfigError:
        expected = "" if self._directory is None else "; expected a directory where this process may read and write all"
        return ConfigError(f"{SETTING}: {where(self._store)} cannot be used: {what}{reason(error)}{expected}")

    def write(self, key: bytes, record: memoryview) -> None:
        """See `StorageTier.write`."""
        self._make_directory()
        self._name_generation()
        # In memory it would keep the caller's memory as the object.
        data = np.array(record) if isinstance(self._store, MemoryStore) else record
        self._late.begin(key)
        try:
            obstore.put(self._store, self._name(key), data, use_multipart=False)
        except (BaseError, OSError) as e:
            self._is_doubtful = True
            self._late.failed(key)
            raise OSError(reason(e)) from e

    def read(self, key: bytes, record: memoryview) -> None:
        """See `StorageTier.read`."""
        target, end = np.frombuffer(record, np.uint8), 0
        try:
            result = obstore.get(self._store, self._name(key))
            if (nbytes := result.meta["size"]) != len(target):  # by the store's word; an outage cuts the body only
                raise RecordError(f"the store has {nbytes} bytes; expected {len(target)}")
            for part in result.stream(min_chunk_size=_STREAM_NBYTES):
                data = np.frombuffer(part, np.uint8)
                start, end = end, end + len(data)
                np.copyto(target[start:end], data)  # without the interpreter's lock
        except FileNotFoundError as e:
            self._is_doubtful = True
            raise KeyError(reason(e)) from e
        except (BaseError, OSError, ValueError) as e:  # ValueError: more bytes than there is room for
            self._is_doubtful = True
            raise OSError(reason(e)) from e
        if end != len(target):
            raise OSError(f"the store sent {end} bytes of {len(target)}")

    def delete(self, keys: Sequence[bytes]) -> None:
        """See `StorageTier.delete`."""
        keys_by_name = {self._name(key): key for key in keys}
        try:
            delete_objects(self._store, list(keys_by_name))
        except LeftObjectsError as e:
            if e.is_outage:
                raise OSError(str(e)) from e
            raise UndeletedError(str(e), [keys_by_name[name] for name in e.names]) from e
        self._delete_late()

    def _delete_late(self) -> None:
        """Deletes a few objects that have arrived after their deletion."""
        late = {self._name(key): key for key in self._late.take_due(_MAX_LATE_AT_ONCE)}
        left: list[bytes] = []
        try:
            delete_objects(self._store, list(late))
        except LeftObjectsError as e:
            left = [late[name] for name in e.names]
        finally:
            self._late.ended(list(late.values()), left)

    def stored_keys(self) -> Sequence[bytes]:
        """The newest `num_chunks` keys of this generation; everything else of this worker is deleted.

        What cannot be deleted stays until the next start. A store that does not answer has no keys, and a new
        generation begins.
        """
        if not self._is_published:
            return ()
        try:
            kept, surplus, others = self._listing()
        except (BaseError, OSError) as e:
            _logger.warning("storage tier: %s cannot be listed (%s); it starts empty", where(self._store), reason(e))
            self._renew()
            return ()
        self._delete_surplus(surplus)
        self._sweep(others)
        return kept

    def clear(self) -> None:
        """See `StorageTier.clear`. Objects are deleted in the background."""
        self._renew()
        try:
            self._name_generation()
        finally:
            if self._is_published or self._directory is not None:  # on a full disk only deletions make room
                with self._lock:
                    earlier, self._earlier = self._earlier, set()
                self._sweep(earlier)

    def unregister(self) -> None:
        """See `StorageTier.unregister`."""
        if self._directory is None:
            delete_objects(self._store, [self._marker])
            return
        root = self._directory / self._root
        remove_tree(root, self._stop)
        with contextlib.suppress(OSError):  # the model has other workers
            root.parent.rmdir()

    def close(self) -> None:
        """See `StorageTier.close`."""
        self._stop.set()
        for sweeper in self._sweepers:
            sweeper.join()  # at most one call of the store or the file system

    # Inside.

    def _name(self, key: bytes) -> str:
        return f"{self._root}/{self._generation}/{name_of(key)}"

    def _listing(self) -> tuple[list[bytes], list[str], set[str]]:
        """The keys to keep, oldest first; other objects of this generation; and other generations."""
        prefix = f"{self._root}/{self._generation}/"
        found, surplus, others = [], [], set()
        if self._directory is not None:
            others |= directories_of(self._directory / self._root)  # also those without files
        for entry in itertools.chain.from_iterable(obstore.list(self._store, self._root, chunk_size=BATCH)):
            path = entry["path"]
            generation, *names = path.removeprefix(f"{self._root}/").split("/")
            key = key_of(path.removeprefix(prefix))
            if path == self._marker:
                continue
            if names and generation != self._generation:
                others.add(generation)
            elif key is None or entry["size"] != self.spec.record_nbytes:
                surplus.append(path)
            else:
                found.append((entry["last_modified"], key))
        found.sort()
        first = max(0, len(found) - self.spec.num_chunks)
        surplus += [self._name(key) for _, key in found[:first]]
        return [key for _, key in found[first:]], surplus, others - {self._generation}

    def _delete_surplus(self, names: Sequence[str]) -> None:
        """Deletes what the start has no use for: the keys that it has found count all the same."""
        try:
            if self._directory is not None:
                remove_staging_files(self._directory / self._root)
        except OSError as e:
            self._warn_of_leftovers("files of a killed writer", e)
        try:
            delete_objects(self._store, names)
        except LeftObjectsError as e:
            self._warn_of_leftovers(f"{len(e.names)} of {len(names)} surplus objects", e)

    def _renew(self) -> None:
        """Begins a new generation, which `_publish` makes durable."""
        with self._lock:
            self._earlier.add(self._generation)
            self._late.clear()
            self._generation = new_generation()
            self._is_published = False

    def _name_generation(self) -> None:
        """Makes sure that the store names the current generation.

        One thread at a time asks the store, without the lock. Those that come meanwhile wait for it, and fail if it
        does: each would wait for a dead server as long, one after another.
        """
        while True:
            with self._lock:
                naming = self._naming
                if naming is None:
                    self._is_doubtful |= monotonic() - self._checked_s >= _NAMED_S
                    if self._is_published and not self._is_doubtful:
                        return
                    self._naming = mine = Future[OSError | None]()
                    break
            if (error := naming.result()) is not None:
                raise OSError(str(error)) from error
        failure: OSError | None = None
        try:
            self._check_named()
            self._publish()
        except OSError as e:
            failure = e
            raise
        finally:
            with self._lock:
                self._naming = None
            mine.set_result(failure)

    def _check_named(self) -> None:
        """Finds out whether the store still names this generation, if it may not."""
        with self._lock:
            before = self._generation
            if not (self._is_doubtful and self._is_published):
                return
            self._is_doubtful = False  # before the answer: a call that fails from here on is a doubt of its own
            self._checked_s = monotonic()
        try:
            found = self._named()
        except (BaseError, OSError) as e:
            self._is_doubtful = True
            raise OSError(reason(e)) from e
        with self._lock:
            if self._generation != before:  # cleared meanwhile
                return
            self._is_published = found is not None and bool(GENERATION.fullmatch(found))
            if found is not None and self._is_published:
                self._generation = found
            after = self._generation
        if before != after:  # what was written meanwhile under the earlier name is never read again
            self._sweep([before])

    def _make_directory(self) -> None:
        """Of a tier in a directory, which may have been deleted with all that it had."""
        if self._directory is not None and make_directory(self._directory):
            self._is_doubtful = True

    def _publish(self) -> None:
        """Names the current generation in the store, unless it is named already."""
        with self._lock:
            generation = self._generation
            if self._is_published:
                return
        self._make_directory()
        try:
            self._marked_at = None
            obstore.put(self._store, self._marker, generation.encode(), use_multipart=False)
        except (BaseError, OSError) as e:
            raise OSError(reason(e)) from e
        with self._lock:
            self._is_published = self._generation == generation

    def _sweep(self, generations: Iterable[str]) -> None:
        """Deletes earlier generations in the background, until `close`; the next start finds what is left."""
        if not (old := sorted(generations)):
            return
        sweeper = threading.Thread(target=self._run_sweep, args=(old,), name=SWEEPER_NAME, daemon=True)
        try:
            sweeper.start()
        except RuntimeError as e:  # no thread is left; the new generation counts all the same
            with self._lock:
                self._earlier.update(old)  # the next `clear` tries again, too
            self._warn_of_leftovers(_OF_BEFORE, e)
            return
        with self._lock:
            self._sweepers = [*(thread for thread in self._sweepers if thread.is_alive()), sweeper]

    def _run_sweep(self, generations: Sequence[str]) -> None:
        left: dict[str, BaseException] = {}
        for generation in generations:
            try:
                self._remove(generation)
            except (BaseError, OSError) as e:
                left[generation] = e
        if left:
            with self._lock:
                self._earlier.update(left)  # the next `clear` tries again, too
            self._warn_of_leftovers(_OF_BEFORE, next(iter(left.values())))

    def _remove(self, generation: str) -> None:
        """Deletes all of a generation that can be deleted."""
        if self._stop.is_set():
            return
        root = f"{self._root}/{generation}"
        if self._directory is not None:
            remove_tree(self._directory / root, self._stop)
            return
        error: LeftObjectsError | None = None
        pages = iter(obstore.list(self._store, root, chunk_size=BATCH))
        while not self._stop.is_set() and (entries := next(pages, None)) is not None:
            try:
                delete_objects(self._store, [entry["path"] for entry in entries], self._stop)
            except LeftObjectsError as e:
                error = e
        if error is not None:
            raise error

    def _warn_of_leftovers(self, what: str, error: BaseException) -> None:
        _logger.warning(
            "storage tier: %s: %s cannot be deleted (%s); the next start tries again",
            where(self._store),
            what,
            reason(error),
        )
