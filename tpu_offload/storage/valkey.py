"""The `valkey` tier: records on a Valkey or Redis server or cluster that engines share.

    TPU_OFFLOAD_STORAGE_OPTIONS=valkeys://host:6379?user=kv&password_file=/run/secrets/kv&ca_file=/etc/ca.pem

A key on the server is `tpu_offload:<fingerprint>:<worker>:<generation>:<key>`: engines of one model and one division
over workers find each other's records. The generation, a random number, is a value on the server. It is read once a
second, so a `clear` by one engine empties the tier of all. An engine never takes up a generation again that it has
left. If the server loses the value, by eviction or by a restart, engines write it again.

The server bounds what is stored: give it `maxmemory` and the policy `allkeys-lru`. What it evicts is a miss.

The client is valkey-glide, except that records on one server without TLS are read and written by `valkey_records`,
which is faster: each call has a connection to itself.

With valkey-glide, writes have a connection of their own, so that no read waits behind a queue of writes. valkey-glide
copies a record before `set` returns, also by a timeout, and `get` copies the answer into the caller's memory before it
returns; neither holds the interpreter's lock. Lookups, deletions and the generation, which are small, wait for no
record: they have another connection, which is always one of valkey-glide.
"""

import contextlib
import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

from glide_sync import (
    AdvancedGlideClientConfiguration,
    AdvancedGlideClusterClientConfiguration,
    BackoffStrategy,
    ClusterScanCursor,
    ConditionalChange,
    ExpirySet,
    ExpiryType,
    GlideClient,
    GlideClientConfiguration,
    GlideClusterClient,
    GlideClusterClientConfiguration,
    GlideError,
    InfoSection,
    Logger,
    LogLevel,
    NodeAddress,
    ServerCredentials,
    TlsAdvancedConfiguration,
)

from tpu_offload.errors import ConfigError
from tpu_offload.storage.contract import StorageSpec, StorageTier
from tpu_offload.storage.inspection import StoreInspector
from tpu_offload.storage.prefix_search import count_leading
from tpu_offload.storage.url_options import SETTING, UrlOptions
from tpu_offload.storage.valkey_full import name_generation
from tpu_offload.storage.valkey_lookups import StoredNames
from tpu_offload.storage.valkey_records import RecordConnections
from tpu_offload.storage.valkey_server import EXAMPLE, SCHEMES, ServerOptions, server_options

_logger = logging.getLogger(__name__)

type Client = GlideClient | GlideClusterClient

MARKER = "generation"
PREFIX = "tpu_offload:"
_ASK_S = 1.0  # how often the generation is read
BATCH = 1000  # keys in one call
_FIND_BATCH = 4096  # keys in one round trip of a lookup
# Signs in an error of the library, which has no types for them, that the server may answer later. For some codes of the
# server it has names of its own.
_ENDED = ("closed the connection", "onnection reset", "unexpectedly terminated", "handshake eof")
_UNREACHABLE = (
    *("timed out", "onnection refused", "os error 11", *_ENDED),
    *("LOADING", "BusyLoading", "BUSY", "CLUSTERDOWN", "ClusterDown", "topology"),
)
_UNABLE = (  # it has answered
    *("OOM", "MISCONF", "NOREPLICAS", "max number of clients"),
    *("MASTERDOWN", "MasterDown", "READONLY", "ReadOnly"),
)


@final
class ValkeyTier(StorageTier):
    """Records on a server that several engines share.

    A server that does not answer at the start, or is full, is a warning: every call fails until it can. One that
    refuses, by its password, permissions or certificate, a replica alone, and a host without an address, are errors.

    Args:
      spec: `options` is a URL, see the module. `num_chunks` does not matter; the server has its own bound.
    Raises:
      ConfigError: the options are wrong, or the server refuses.
    """

    is_shared = True

    @classmethod
    def open_inspector(cls, options: str) -> StoreInspector:
        """As in `StorageTier`."""
        from tpu_offload.storage.valkey_inspection import ValkeyInspector

        return ValkeyInspector(options)

    def __init__(self, spec: StorageSpec) -> None:
        super().__init__(spec)
        options = UrlOptions(spec.options, schemes=SCHEMES, example=EXAMPLE)
        self._where = f"{options.scheme}://{options.place}"
        self._ttl_s = math.ceil(options.number("ttl_s", 0, least=0, most=2**31))  # the server counts seconds
        self._server = server = server_options(options)
        connect = connector(server)
        self._root = f"{PREFIX}{spec.fingerprint}:{spec.worker_id}:"
        self._marker = f"{self._root}{MARKER}".encode()
        self._lock = threading.Lock()
        self._generation = ""  # unknown until the server has answered
        self._is_published = True
        self._left: set[str] = set()  # generations
        self._asked_s = -_ASK_S
        self._num_clears = 0
        self._records: RecordConnections | _GlideRecords
        self._askers: Client
        try:
            self._askers = connect()
            self._names = StoredNames(self._askers, self._where)
            through_glide = server.use_tls or server.is_cluster
            self._records = _GlideRecords(connect(), connect()) if through_glide else RecordConnections(server)
            check_kind(self._askers, self._where)
            self._prefix()
            self._check_bound()
            self._check_permissions()
        except GlideError as e:
            self._check_unreachable(e)
        except OSError as e:
            self._check_unreachable(e.__cause__ or e)

    def _check_unreachable(self, error: BaseException) -> None:
        """Logs that the server does not answer; raises ConfigError if it has refused."""
        error = explained(error, self._server)
        if any(sign in str(error) for sign in _UNABLE):
            _logger.warning(
                "storage tier: %s accepts no records now (%s); it is used once it does", self._where, reason(error)
            )
            return
        if not any(sign in str(error) for sign in _UNREACHABLE):
            raise ConfigError(f"{SETTING}: {self._where} cannot be used: {reason(error)}") from None
        _logger.warning(
            "storage tier: %s does not answer (%s); it is used once it answers%s",
            self._where,
            reason(error),
            tls_hint(error, self._server),
        )

    def _check_permissions(self) -> None:
        """Calls what lookups, writes and deletions need, so that it changes nothing; the generation was read before.

        Raises:
          GlideError: the user has no permission.
        """
        nothing = f"{self._root}nothing"
        self._names.count([[nothing.encode()]])
        self._askers.set(nothing, "", conditional_set=ConditionalChange.ONLY_IF_EXISTS)
        self._askers.unlink([nothing])

    def _check_bound(self) -> None:
        """Logs a server that will not make room when it is full."""
        found = self._askers.info([InfoSection.MEMORY])
        text = b"\n".join(found.values()) if isinstance(found, dict) else found
        fields = dict(line.split(":", 1) for line in text.decode().split() if ":" in line)
        bound, policy = fields.get("maxmemory", "0"), fields.get("maxmemory_policy", "")
        if bound == "0" or not policy.startswith("allkeys-"):
            _logger.warning(
                "storage tier: %s has maxmemory %s and maxmemory-policy %s; set a bound and allkeys-lru, or it runs "
                "out of memory",
                self._where,
                bound,
                policy or "unknown",
            )

    def write(self, key: bytes, record: memoryview) -> None:
        """See `StorageTier.write`."""
        self._records.write(self._prefix() + key, record, ttl_s=self._ttl_s)

    def read(self, key: bytes, record: memoryview) -> None:
        """See `StorageTier.read`."""
        self._records.read(self._prefix() + key, record)

    def delete(self, keys: Sequence[bytes]) -> None:
        """See `StorageTier.delete`."""
        prefix = self._prefix()
        for i in range(0, len(keys), BATCH):
            names: list[Any] = [prefix + key for key in keys[i : i + BATCH]]
            _call(lambda names=names: self._askers.unlink(names))  # type: ignore[misc]

    def find(self, prefixes: Sequence[Sequence[bytes]]) -> Sequence[int]:
        """See `StorageTier.find`."""
        prefix = self._prefix()
        return count_leading(prefixes, lambda groups: self._count(prefix, groups))

    def clear(self) -> None:
        """See `StorageTier.clear`. It empties the tier of every engine; the server evicts the records in time."""
        with self._lock:
            self._left.add(self._generation)
            self._generation = new_generation()
            self._num_clears += 1
            self._is_published = False
        self._ask()

    def unregister(self) -> None:
        """See `StorageTier.unregister`."""
        _call(lambda: self._askers.unlink([self._marker]))

    def close(self) -> None:
        """See `StorageTier.close`."""
        self._records.close()
        self._askers.close()

    # Inside.

    def _prefix(self) -> bytes:
        """Of this generation's keys, which is read from the server at most once a second.

        Raises:
          OSError: the server does not answer, and it is time to ask or the generation is unknown.
        """
        now_s = time.monotonic()
        with self._lock:
            is_due = now_s - self._asked_s >= _ASK_S or not self._is_published
            if is_due:
                self._asked_s = now_s  # other threads go on with the one that is known
        if is_due or not self._generation:
            self._ask()
        return f"{self._root}{self._generation}:".encode()

    def _ask(self) -> None:
        """Takes up the generation of the server, or gives it ours."""
        with self._lock:
            ours, is_published, num_clears = self._generation, self._is_published, self._num_clears
        found = _call(lambda: self._agree(ours, is_published))
        with self._lock:
            if self._num_clears == num_clears:  # else the answer is of before the `clear`
                if self._generation and found != self._generation:
                    self._left.add(self._generation)
                self._generation, self._is_published = found, True

    def _agree(self, ours: str, is_published: bool) -> str:
        client = self._askers
        found = client.get(self._marker) if is_published else None
        if is_published and found is None:  # no engine has set a generation, or the server has lost it
            ours = ours or new_generation()
            client.set(self._marker, ours, conditional_set=ConditionalChange.ONLY_IF_DOES_NOT_EXIST)
            found = client.get(self._marker)  # another engine may have been first
        theirs = (found or b"").decode("ascii", "replace")
        if len(theirs) == len(new_generation()) and theirs.isalnum() and theirs not in self._left:
            return theirs
        if ours in self._left:  # by a `clear` since this began, which names another
            return ours
        ours = ours or new_generation()
        name_generation(client, self._marker, ours, self._names_of_others(ours), on_deleted=lambda num: None)
        return ours

    def _names_of_others(self, generation: str) -> Iterator[list[bytes]]:
        """The records of other generations, in batches."""
        kept = (self._marker, f"{self._root}{generation}:".encode())
        for names in scan_names(self._askers, f"{self._root}*".encode()):
            yield [name for name in names if not name.startswith(kept)]

    def _count(self, prefix: bytes, groups: Sequence[Sequence[bytes]]) -> list[int]:
        """How many keys of each group are stored, in one round trip for each 4,096 keys."""
        counts: list[int] = []
        first = num_keys = 0
        for end, group in enumerate(groups, 1):
            num_keys += len(group)
            if num_keys >= _FIND_BATCH or end == len(groups):
                names = [[prefix + key for key in keys] for keys in groups[first:end]]
                counts += _call(lambda names=names: self._names.count(names))  # type: ignore[misc]
                first, num_keys = end, 0
        return counts


@final
class _GlideRecords:
    """Records with TLS or of a cluster."""

    def __init__(self, readers: Client, writers: Client) -> None:
        self._readers, self._writers = readers, writers

    def read(self, name: bytes, value: memoryview) -> None:
        """As `RecordConnections.read`."""
        found = _call(lambda: self._readers.get(name, buffer=value))
        if found is None:
            raise KeyError("the server has no such key")
        if int(found) != len(value):
            raise OSError(f"the server has {int(found)} bytes; expected {len(value)}")

    def write(self, name: bytes, value: memoryview, *, ttl_s: int) -> None:
        """As `RecordConnections.write`."""
        expiry = ExpirySet(ExpiryType.SEC, ttl_s) if ttl_s else None
        _call(lambda: self._writers.set(name, value, expiry=expiry))

    def close(self) -> None:
        """Closes the connections."""
        self._readers.close()
        self._writers.close()


def _call[T](call: Callable[[], T]) -> T:
    try:
        return call()
    except GlideError as e:
        raise OSError(reason(e)) from e


def scan_names(client: Client, pattern: bytes) -> Iterator[list[bytes]]:
    """The names of a server, or of all of a cluster, in batches. One may come twice.

    Raises:
      GlideError: the server does not answer.
    """
    if isinstance(client, GlideClusterClient):
        nodes: Any = ClusterScanCursor()  # type: ignore[no-untyped-call]
        while not nodes.is_finished():
            answer: Any = client.scan(nodes, match=pattern, count=BATCH)
            nodes = answer[0]
            yield answer[1]
        return
    cursor: Any = b"0"
    while True:
        found: Any
        cursor, found = client.scan(cursor, match=pattern, count=BATCH)
        yield found
        if cursor == b"0":
            return


def connector(server: ServerOptions) -> Callable[[], Client]:
    """Makes clients, each of which connects by its first call."""
    tls = TlsAdvancedConfiguration(None, *server.certificates) if any(server.certificates) else None
    common: dict[str, Any] = {
        "addresses": [NodeAddress(host, port) for host, port in server.addresses],
        "use_tls": server.use_tls,
        "credentials": ServerCredentials(server.password, server.user or None) if server.password else None,
        "request_timeout": int(1000 * server.timeout_s),
        # The first attempt tells why; later ones are made by each call.
        "reconnect_strategy": BackoffStrategy(num_of_retries=0, factor=100, exponent_base=2),
        "lazy_connect": True,
    }
    connect_ms = int(1000 * server.connect_timeout_s)
    # Its log goes to standard error, and what it says comes back with each error.
    Logger.init(LogLevel.OFF)
    if server.is_cluster:
        advanced = AdvancedGlideClusterClientConfiguration(connect_ms, tls)
        config = GlideClusterClientConfiguration(**common, advanced_config=advanced)
        return lambda: GlideClusterClient.create(config)
    alone = GlideClientConfiguration(
        **common,
        database_id=server.database,
        advanced_config=AdvancedGlideClientConfiguration(connect_ms, tls),
    )
    return lambda: GlideClient.create(alone)


def check_kind(client: Client, where: str) -> None:
    """Finds a client of one server that is a node of a cluster, where it would reach only some of the keys.

    Raises:
      ConfigError: it is.
      GlideError: the server does not answer.
    """
    if isinstance(client, GlideClient) and b"cluster_enabled:1" in client.info([InfoSection.CLUSTER]):
        raise ConfigError(f"{SETTING}: {where} is a node of a cluster; add cluster=true to the options")


def explained(error: BaseException, server: ServerOptions) -> BaseException:
    """What the server says before it ends a connection, which valkey-glide does not tell; else the error as it is."""
    has_ended = any(sign in str(error) for sign in _ENDED)
    if not has_ended or server.use_tls or server.is_cluster:
        return error
    with contextlib.closing(RecordConnections(server)) as connections:
        try:
            connections.read(f"{PREFIX}nothing".encode(), memoryview(bytearray(512)))  # room for what it says
        except KeyError:  # it has come back
            return error
        except OSError as e:
            return e
    return error


def tls_hint(error: BaseException, server: ServerOptions) -> str:
    """What to look at if a connection ends, or nothing is said: one end may have TLS and the other not.

    A server that does not accept the client's certificate, or misses it, says so after the handshake of TLS 1.3, and
    valkey-glide tells only that the connection has ended.
    """
    has_ended = any(sign in str(error) for sign in _ENDED)
    if not server.use_tls:
        return "; does it expect TLS?" if has_ended else ""
    if has_ended:
        return "; does it have TLS, and accept the client's certificate (cert_file, key_file)?"
    return "; does it have TLS?" if "timed out" in str(error) else ""


def new_generation() -> str:
    """The name of a generation that was never used before."""
    return secrets.token_hex(8)


def reason(error: BaseException) -> str:
    """What went wrong, in one line."""
    text = " ".join(str(error).split())[:200]
    hint = "; is it a cluster?" if "topology" in text else ""
    return f"{type(error).__name__}: {text}{hint}"
