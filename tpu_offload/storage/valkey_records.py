"""Records of a `valkey` tier on one server without TLS: from the caller's memory to the socket, and from it into place.

valkey-glide, which does all else, copies a value to or from memory of its own. With it, reads reached 0.4 to 0.6 of one
TCP stream, and writes 0.36 to 0.5 (docs/measurements.md, "Valkey beside raw TCP").

A thread takes a connection for each record, and returns it: there are never more connections than concurrent reads and
writes. After any failure the connection is closed. If the failure was one of the network, the idle connections are
closed as well: they lead to the same server, and each would fail one more call. The same holds for a server that has
become a replica and refuses writes.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, final

from tpu_offload.storage.resp_connection import Connection, RefusedError, time_left
from tpu_offload.storage.valkey_server import ServerOptions

type _Resolved = Sequence[tuple[int, Any]]
"""Families and addresses."""

_CLOSED = "the tier is closed"
_REPLICA = "READONLY"  # the code of its refusal


@final
class RecordConnections:
    """Reads and writes values; connects by its first call.

    With several addresses it uses the one that is no replica, as valkey-glide does.

    Args:
      server: neither with TLS nor a cluster.
    """

    def __init__(self, server: ServerOptions) -> None:
        self._server = server
        self._hosts = [_Host(host, port) for host, port in server.addresses]
        self._lock = threading.Lock()
        self._idle: list[Connection] = []  # the last one was used last
        self._in_use: set[Connection] = set()
        self._first = 0  # the host that was connected last
        self._is_closed = False

    def read(self, name: bytes, value: memoryview) -> None:
        """Fills all of `value`.

        Args:
          name: the key on the server.
          value: bytes; must not be used after an exception.
        Raises:
          KeyError: the server has no such key.
          OSError: the value has another length, or the server cannot be read within `timeout_s`.
        """
        if not self._call(lambda connection, until_s: connection.get(name, value, until_s)):
            raise KeyError("the server has no such key")

    def write(self, name: bytes, value: memoryview, *, ttl_s: int) -> None:
        """Stores all of `value`, which is not read after the call.

        Args:
          name: the key on the server.
          value: bytes.
          ttl_s: when it expires; 0 for never.
        Raises:
          OSError: the server refuses it, or has not confirmed it within `timeout_s`. It may be stored later, as a whole
            or not at all, if all of it was sent.
        """
        self._call(lambda connection, until_s: connection.set(name, value, until_s, ttl_s=ttl_s))

    def close(self) -> None:
        """Closes all connections. Calls in progress fail soon, later ones at once."""
        with self._lock:
            self._is_closed = True
            for connection in self._in_use:
                connection.interrupt()
        for connection in self._take_idle():
            connection.close()

    # Inside.

    def _call[T](self, call: Callable[[Connection, float], T]) -> T:
        """Calls it with a connection and its deadline."""
        until_s = time.monotonic() + self._server.timeout_s
        try:
            with self._connection(until_s) as connection:
                return call(connection, until_s)
        except OSError as e:
            if isinstance(e, ConnectionError | TimeoutError) or (isinstance(e, RefusedError) and e.code == _REPLICA):
                for connection in self._take_idle():
                    connection.close()
            raise self._error(e) from e

    def _error(self, error: OSError) -> OSError:
        return OSError(_CLOSED if self._is_closed else _text(error))

    @contextlib.contextmanager
    def _connection(self, until_s: float) -> Iterator[Connection]:
        """One for this thread, which is kept unless the block raises."""
        connection = self._reusable() or self._connect(until_s)
        try:
            yield connection
        except BaseException:
            self._drop(connection)
            raise
        with self._lock:
            self._in_use.remove(connection)
            if not self._is_closed:
                self._idle.append(connection)
                return
        connection.close()

    def _reusable(self) -> Connection | None:
        while True:
            with self._lock:
                if self._is_closed:
                    raise OSError(_CLOSED)
                if not self._idle:
                    return None
                connection = self._idle.pop()
                self._in_use.add(connection)
            if connection.is_quiet():
                return connection
            self._drop(connection)

    def _take_idle(self) -> Sequence[Connection]:
        with self._lock:
            idle, self._idle = self._idle, []
        return idle

    def _drop(self, connection: Connection) -> None:
        with self._lock:  # so that `close` does not use the number of another socket
            self._in_use.discard(connection)
            connection.close()

    def _connect(self, until_s: float) -> Connection:
        """A connection to the first host that answers, the last one that did before the others."""
        with self._lock:
            first = self._first
        failures: list[str] = []
        for turn in range(len(self._hosts)):
            number = (first + turn) % len(self._hosts)
            try:
                connection = self._connect_to(self._hosts[number], _share(until_s, len(self._hosts) - turn))
            except OSError as e:
                failures.append(f"{self._hosts[number].name}: {_text(e)}")
            else:
                with self._lock:
                    self._first = number
                return connection
        raise OSError("; ".join(failures))

    def _connect_to(self, host: "_Host", until_s: float) -> Connection:
        connect_until_s = min(until_s, time.monotonic() + self._server.connect_timeout_s)
        addresses = host.addresses(connect_until_s)
        for turn, (family, address) in enumerate(addresses, 1):
            connection = self._new(family)
            try:
                connection.connect(address, _share(connect_until_s, len(addresses) - turn + 1))
                self._log_in(connection, until_s)
                return connection
            except BaseException as e:
                self._drop(connection)
                if not isinstance(e, OSError) or turn == len(addresses):
                    raise
        raise OSError("the name has no address")

    def _new(self, family: int) -> Connection:
        connection = Connection(socket.socket(family, socket.SOCK_STREAM))
        with self._lock:
            if not self._is_closed:
                self._in_use.add(connection)
                return connection
        connection.close()
        raise OSError(_CLOSED)

    def _log_in(self, connection: Connection, until_s: float) -> None:
        server = self._server
        if server.password:
            # Named as valkey-glide does: the default user takes a password also where it needs none.
            user = server.user or "default"
            try:
                connection.ask((b"AUTH", user.encode(), server.password.encode()), until_s)
            except RefusedError as e:  # whose text may have the password
                raise OSError(f"the server refuses the password: {e.code}") from None
        if server.database:
            connection.ask((b"SELECT", b"%d" % server.database), until_s)
        if len(self._hosts) > 1:
            lines = connection.ask((b"INFO", b"replication"), until_s).split()
            if b"role:master" not in lines:
                raise OSError("it is a replica")


@final
class _Host:
    """Looks up a name on a thread, one at a time, because a lookup has no deadline of its own."""

    def __init__(self, host: str, port: int) -> None:
        self.name = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._host, self._port = host, port
        self._lock = threading.Lock()
        self._lookup: Future[_Resolved] | None = None

    def addresses(self, until_s: float) -> _Resolved:
        """All addresses of the host.

        Raises:
          OSError: there are none, or they are not known in time.
        """
        with contextlib.suppress(OSError, UnicodeError):  # it is a name
            return self._look_up(socket.AI_NUMERICHOST)
        with self._lock:
            lookup = self._lookup
            if lookup is None:
                lookup = Future()
                thread = threading.Thread(target=self._resolve, args=(lookup,), daemon=True, name="valkey-lookup")
                try:
                    thread.start()
                except RuntimeError as e:
                    raise OSError(f"the name cannot be looked up: {e}") from e
                self._lookup = lookup
        try:
            return lookup.result(time_left(until_s))
        except TimeoutError:
            raise TimeoutError("looking up the name timed out") from None

    def _resolve(self, lookup: "Future[_Resolved]") -> None:
        try:
            found, error = self._look_up(0), None
        except (OSError, UnicodeError) as e:
            found, error = (), OSError(f"the name cannot be looked up: {e}")
        with self._lock:
            self._lookup = None
        if error is None:
            lookup.set_result(found)
        else:
            lookup.set_exception(error)

    def _look_up(self, flags: int) -> _Resolved:
        found = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM, flags=flags)
        return [(family, address) for family, _, _, _, address in found]


def _text(error: OSError) -> str:
    """What went wrong, in one line."""
    kind = f"{type(error).__name__}: " if isinstance(error, ConnectionError | TimeoutError) else ""
    return f"{kind}{' '.join(str(error).split())}"


def _share(until_s: float, num: int) -> float:
    """The end of the first of so many equal parts of the time that is left."""
    now_s = time.monotonic()
    return now_s + (until_s - now_s) / num
