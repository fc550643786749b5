"""Looks into the server of a `valkey` tier. A look at a record counts as a use when the server evicts."""

import contextlib
import functools
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

from glide_sync import Batch, ClusterBatch, GlideClusterClient, GlideError, InfoSection

from tpu_offload.storage.inspection import Entry, Fact, Foreign, Generation, StoredRecord, StoreInspector
from tpu_offload.storage.url_options import UrlOptions
from tpu_offload.storage.valkey import (
    MARKER,
    PREFIX,
    Client,
    check_kind,
    connector,
    explained,
    new_generation,
    reason,
    scan_names,
    tls_hint,
)
from tpu_offload.storage.valkey_full import name_generation
from tpu_offload.storage.valkey_server import EXAMPLE, SCHEMES, server_options

_NAME = re.compile(
    rb"%b([0-9a-f]{32}):(0|[1-9]\d*):(?:(%b)|([0-9a-z]{16}):(.+))" % (PREFIX.encode(), MARKER.encode()), re.DOTALL
)


@final
class ValkeyInspector(StoreInspector):
    """Of a `valkey` tier's URL.

    Args:
      options: as `TPU_OFFLOAD_STORAGE_OPTIONS` of the tier.
    Raises:
      ConfigError: it is no such URL, or of a cluster and does not say so.
      OSError: the server does not answer.
    """

    is_shared = True

    def __init__(self, options: str) -> None:
        url = UrlOptions(options, schemes=SCHEMES, example=EXAMPLE)
        self.where = f"{url.scheme}://{url.place}{url.path.rstrip('/')}"
        url.text("ttl_s")  # of writes
        self._server = server_options(url)
        self._client: Client = self._call(connector(self._server))
        self._call(lambda: check_kind(self._client, self.where), is_first=True)

    def _call[T](self, call: Callable[[], T], *, is_first: bool = False) -> T:
        try:
            with _without_its_own_lines():
                return call()
        except GlideError as e:
            error = explained(e, self._server)
            hint = tls_hint(error, self._server) if is_first else ""
            raise OSError(f"{self.where}: {reason(error)}{hint}") from e

    def _names(self) -> Iterator[list[bytes]]:
        batches = scan_names(self._client, PREFIX.encode() + b"*")
        while (names := self._call(lambda: next(batches, None))) is not None:
            yield names

    def scan(self) -> Iterator[Entry]:
        """See the base class. A record may come twice while the server rearranges its table."""
        current: dict[tuple[bytes, bytes], bytes] = {}
        for names in self._names():
            for name, nbytes in zip(names, self._sizes(names), strict=True):
                found = _NAME.fullmatch(name)
                if found is None:
                    yield Foreign(nbytes=nbytes)
                    continue
                of = found[1], found[2]
                if of not in current:
                    marker = b":".join((PREFIX.encode()[:-1], *of, MARKER.encode()))
                    current[of] = self._call(lambda marker=marker: self._client.get(marker)) or b""  # type: ignore[misc]
                if not found[3]:
                    yield self._record(found, nbytes, is_current=found[4] == current[of])
                elif current[of]:
                    yield _generation(*of, current[of], is_current=True)

    def _sizes(self, names: Sequence[bytes]) -> Sequence[int]:
        is_cluster = isinstance(self._client, GlideClusterClient)
        batch: Any = ClusterBatch(is_atomic=False) if is_cluster else Batch(is_atomic=False)
        if not names:
            return ()
        for name in names:
            batch.strlen(name)
        client: Any = self._client
        found = self._call(lambda: client.exec(batch, raise_on_error=False))
        return [size if isinstance(size, int) else 0 for size in found]  # an error if it is no string

    def _record(self, found: "re.Match[bytes]", nbytes: int, *, is_current: bool) -> StoredRecord:
        return StoredRecord(
            generation=_generation(found[1], found[2], found[4], is_current=is_current),
            key=found[5],
            key_nbytes=len(found[5]),
            nbytes=nbytes,
            place=found[0].removesuffix(found[5]).decode() + found[5].hex(),
        )

    def read(self, record: StoredRecord, nbytes: int) -> bytes:
        """See the base class."""
        name = record.place.removesuffix(record.key.hex()).encode() + record.key
        data = self._call(lambda: self._client.getrange(name, 0, nbytes - 1))
        if not data:
            raise KeyError(record.place)
        return data

    def facts(self) -> tuple[str, Sequence[Mapping[str, Fact]]]:
        """See the base class: of each server."""
        sections = [InfoSection.SERVER, InfoSection.MEMORY, InfoSection.STATS]
        found: Any = self._call(lambda: self._client.info(sections))
        nodes = found if isinstance(found, dict) else {self.where.encode(): found}
        return "servers", [_facts(node.decode(), text.decode()) for node, text in sorted(nodes.items())]

    def clear(self, on_deleted: Callable[[int], None]) -> None:
        """See the base class. The new generations are written first; engines take them up within a second.

        A full server that evicts nothing takes them once some of the records are deleted.
        """
        roots = {m[0][: m.end(2)] for names in self._names() for name in names if (m := _NAME.fullmatch(name))}
        ours = {root: new_generation() for root in sorted(roots)}
        old = self._old_names(ours)
        for root, generation in ours.items():
            marker = b":".join((root, MARKER.encode()))
            self._call(functools.partial(name_generation, self._client, marker, generation, old, on_deleted))
        for names in self._old_names(ours):
            if names:
                self._call(lambda names=names: self._client.unlink(names))  # type: ignore[misc]
                on_deleted(len(names))

    def _old_names(self, ours: Mapping[bytes, str]) -> Iterator[list[Any]]:
        """Records of other generations than these, by root, in batches."""
        for names in self._names():
            matches = [found for name in names if (found := _NAME.fullmatch(name)) and not found[3]]
            yield [found[0] for found in matches if found[4] != ours.get(found[0][: found.end(2)], "").encode()]

    def close(self) -> None:
        """See the base class."""
        self._client.close()


@contextlib.contextmanager
def _without_its_own_lines() -> Iterator[None]:
    """Discards what valkey-glide writes to standard error, a line for each call that fails; the exception has it too.

    What others write there meanwhile, such as a bar of progress, comes when the call has ended without an error.
    """
    try:
        stderr = os.dup(2)
    except OSError:  # it is closed
        yield
        return
    # In memory: where nothing can be written, as in a container with a read-only root, there is no temporary file.
    with open(stderr, "wb", 0) as original, open(os.memfd_create("stderr"), "w+b", 0) as kept:
        os.dup2(kept.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
        kept.seek(0)
        shutil.copyfileobj(kept, original)


def _generation(fingerprint: bytes, worker_id: bytes, name: bytes, *, is_current: bool) -> Generation:
    return Generation(
        fingerprint=fingerprint.decode(),
        worker_id=int(worker_id),
        name=name.decode("ascii", "replace"),
        is_current=is_current,
    )


def _facts(node: str, text: str) -> Mapping[str, Fact]:
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)

    def number(name: str) -> int | None:
        return int(fields[name]) if fields.get(name, "").isdecimal() else None

    return {
        "server": node,
        "version": fields.get("valkey_version") or fields.get("redis_version"),
        "maxmemory_nbytes": number("maxmemory"),
        "maxmemory_policy": fields.get("maxmemory_policy"),
        "used_memory_nbytes": number("used_memory"),
        "num_evicted_keys": number("evicted_keys"),
    }
