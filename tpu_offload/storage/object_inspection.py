"""Looks into the bucket or directory of an `object` tier."""

import itertools
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import final

import obstore
from obstore.exceptions import BaseError

from tpu_offload.errors import ConfigError
from tpu_offload.storage.inspection import Entry, Fact, Foreign, Generation, StoredRecord, StoreInspector
from tpu_offload.storage.object_deletion import BATCH, delete_objects
from tpu_offload.storage.object_directory import STAGING
from tpu_offload.storage.object_errors import reason
from tpu_offload.storage.object_names import GENERATION, MARKER, key_of, new_generation
from tpu_offload.storage.object_store import open_store, where

_STREAM_NBYTES = 1 << 20
_NO_RANGES = "non-partial response"  # in the error of servers that answer a request for a range with the whole object
_NAME = re.compile(r"([0-9a-f]{32})/(0|[1-9]\d*)/(?:(generation)|([0-9a-f]{16})/(.+))")


@final
class ObjectInspector(StoreInspector):
    """Of an `object` tier's URL. Engines that use it cannot be seen.

    Args:
      options: as `TPU_OFFLOAD_STORAGE_OPTIONS` of the tier.
    Raises:
      ConfigError: it is no such URL, or no such directory.
    """

    def __init__(self, options: str) -> None:
        if options.startswith("memory:"):
            raise ConfigError("memory:// is in the engine's own process, and ends with it; there is nothing to look at")
        self._store, self._directory = open_store(options, create=False)
        self.where = where(self._store)

    def scan(self) -> Iterator[Entry]:
        """See the base class."""
        current: dict[tuple[str, int], str] = {}
        for entry in self._list():
            path, nbytes = entry["path"], entry["size"]
            found = _NAME.fullmatch(path)
            key = key_of(found[5]) if found and found[5] else None
            if found is None or (key is None and not found[3]):
                yield Foreign(nbytes=nbytes)
                continue
            of = found[1], int(found[2])
            if of not in current:
                current[of] = self._current(*of)
            if key is None:
                if current[of]:
                    yield Generation(fingerprint=of[0], worker_id=of[1], name=current[of], is_current=True)
                continue
            yield StoredRecord(
                generation=Generation(
                    fingerprint=of[0], worker_id=of[1], name=found[4], is_current=found[4] == current[of]
                ),
                key=key,
                key_nbytes=len(key),
                nbytes=nbytes,
                place=path,
                written_s=entry["last_modified"].timestamp(),
            )

    def _list(self, prefix: str | None = None) -> "Iterator[obstore.ObjectMeta]":
        try:
            yield from itertools.chain.from_iterable(obstore.list(self._store, prefix, chunk_size=BATCH))
        except (BaseError, OSError) as e:
            raise self._error(e) from e

    def _current(self, fingerprint: str, worker_id: int) -> str:
        """The generation that the store names; empty if there is none."""
        try:
            marker = f"{fingerprint}/{worker_id}/{MARKER}"
            found = bytes(obstore.get(self._store, marker).bytes()).decode("ascii", "replace")
        except FileNotFoundError:
            return ""
        except (BaseError, OSError) as e:
            raise self._error(e) from e
        return found if GENERATION.fullmatch(found) else ""

    def _error(self, error: BaseException) -> OSError:
        return OSError(f"{self.where}: {reason(error)}")

    def read(self, record: StoredRecord, nbytes: int) -> bytes:
        """See the base class."""
        nbytes = min(nbytes, record.nbytes)
        if not nbytes:
            return b""
        try:
            if nbytes == record.nbytes:
                return self._first_bytes(record.place, nbytes)
            try:
                return bytes(obstore.get_range(self._store, record.place, start=0, end=nbytes))
            except BaseError as e:
                if _NO_RANGES not in str(e):
                    raise
                return self._first_bytes(record.place, nbytes)
        except FileNotFoundError as e:
            raise KeyError(record.place) from e
        except (BaseError, OSError) as e:
            raise self._error(e) from e

    def _first_bytes(self, path: str, nbytes: int) -> bytes:
        """Of an object that is requested as a whole."""
        data = bytearray()
        for part in obstore.get(self._store, path).stream(min_chunk_size=min(nbytes, _STREAM_NBYTES)):
            data += part
            if len(data) >= nbytes:
                break
        return bytes(data[:nbytes])

    def facts(self) -> tuple[str, Sequence[Mapping[str, Fact]]]:
        """See the base class: of a directory."""
        if self._directory is None:
            return "directories", []
        staging = [
            os.path.join(directory, name)
            for directory, _, names in os.walk(self._directory)
            for name in names
            if STAGING.search(name)
        ]
        disk = os.statvfs(self._directory)
        return "directories", [
            {
                "directory": str(self._directory),
                "num_unfinished_files": len(staging),
                "disk_free_nbytes": disk.f_bavail * disk.f_frsize,
            }
        ]

    def clear(self, on_deleted: Callable[[int], None]) -> None:
        """See the base class. The new generations are named first; from then on nothing that was stored is found."""
        roots = {f"{found[1]}/{found[2]}" for entry in self._list() if (found := _NAME.fullmatch(entry["path"]))}
        ours = {root: new_generation() for root in sorted(roots)}
        for root, generation in ours.items():
            try:
                obstore.put(self._store, f"{root}/{MARKER}", generation.encode(), use_multipart=False)
            except (BaseError, OSError) as e:
                raise self._error(e) from e
        for root, generation in ours.items():
            # A generation is all the tier's, also what has no name of a key, as for a reset.
            matches = (_NAME.fullmatch(entry["path"]) for entry in self._list(root))
            old = (found[0] for found in matches if found and found[4] not in (None, generation))
            for names in itertools.batched(old, BATCH):
                try:
                    delete_objects(self._store, names)
                except OSError as e:
                    raise OSError(f"{self.where}: {e}") from e
                on_deleted(len(names))
            if self._directory is not None:
                for path in (self._directory / root).iterdir():
                    if GENERATION.fullmatch(path.name) and path.name != generation:
                        shutil.rmtree(path, ignore_errors=True)  # directories, and files that a crash has left

    def close(self) -> None:
        """See the base class."""
