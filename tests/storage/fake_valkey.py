"""A server for tests of the valkey tier's own connections that answers what a script says, right or wrong."""

import contextlib
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

from tpu_offload.storage.valkey_records import RecordConnections
from tpu_offload.storage.valkey_server import ServerOptions

LATE_S = 30.0  # a generous end for what should take less than a second


def value(data: bytes) -> bytes:
    """A value on the wire."""
    return b"$%d\r\n%b\r\n" % (len(data), data)


OK, NONE = b"+OK\r\n", b"$-1\r\n"


@final
class Peer:
    """The server's end of one connection.

    Args:
      end: its socket.
    Attributes:
      commands: all that have been received, as words.
    """

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self.commands: list[list[bytes]] = []
        self._file = end.makefile("rb")

    def receive(self) -> list[bytes]:
        """The next command; none if the client has closed the connection."""
        num = self._file.readline()
        if not num:
            return []
        words = [self._file.read(int(self._file.readline()[1:]) + 2)[:-2] for _ in range(int(num[1:]))]
        self.commands.append(words)
        return words

    def receive_part(self, nbytes: int) -> bytes:
        """So many bytes of what the client sends."""
        return self._file.read(nbytes)

    def receive_rest(self) -> bytes:
        """All that the client sends until it closes the connection."""
        return self._file.read()

    def wait_for_end(self) -> None:
        """Waits until the client has closed the connection; what it sends until then is ignored."""
        while self._file.read(1):
            pass

    def freeze(self) -> None:
        """Receives nothing until either end ends the connection."""
        poll = select.poll()
        poll.register(self.socket, 0)
        poll.poll(1000 * LATE_S)

    def reset(self) -> None:
        """Ends the connection as a server does that is killed with data in its buffers."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    def close(self) -> None:
        """Ends the connection."""
        self._file.close()
        self.socket.close()


type Script = Callable[[Peer], None]


def answers(*replies: bytes) -> Script:
    """Sends one reply to each command, and then nothing."""

    def script(peer: Peer) -> None:
        for reply in replies:
            if not peer.receive():
                return
            peer.socket.sendall(reply)
        peer.wait_for_end()

    return script


@final
class FakeServer:
    """A server that gives each connection to the next script, and all further ones to the last.

    Args:
      scripts: what to do.
      host: to listen on.
      buffer_nbytes: of what has arrived and was not received; None for the system's default.
    Attributes:
      peers: the connections, in their order.
      threads: those that run the scripts, in the same order.
    """

    def __init__(self, *scripts: Script, host: str = "127.0.0.1", buffer_nbytes: int | None = None) -> None:
        self.peers: list[Peer] = []
        self.errors: list[BaseException] = []
        self._scripts: Sequence[Script] = scripts
        self.threads: list[threading.Thread] = []
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        if buffer_nbytes is not None:  # connections inherit it
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_nbytes)
        self.port = int(self._listener.getsockname()[1])
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def _accept(self) -> None:
        while True:
            try:
                end = self._listener.accept()[0]
            except OSError:
                return
            peer = Peer(end)
            script = self._scripts[min(len(self.peers), len(self._scripts) - 1)]
            self.peers.append(peer)
            self.threads.append(threading.Thread(target=self._run, args=(script, peer), daemon=True))
            self.threads[-1].start()

    def _run(self, script: Script, peer: Peer) -> None:
        try:
            script(peer)
        except (OSError, ValueError):  # the client, or the test, has closed it
            pass
        except BaseException as e:
            self.errors.append(e)
        finally:
            with contextlib.suppress(OSError):
                peer.close()

    def close(self) -> None:
        """Ends all connections; again does nothing. Raises what a script has raised."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._accepting.join()
        for peer in self.peers:
            with contextlib.suppress(OSError):
                peer.socket.shutdown(socket.SHUT_RDWR)
        for thread in self.threads:
            thread.join()
        assert not self.errors, self.errors


def connections_to(*hosts: Any, timeout_s: float = LATE_S, **options: Any) -> RecordConnections:
    """To these fake servers, or addresses."""
    addresses = tuple(("127.0.0.1", host.port) if isinstance(host, FakeServer) else host for host in hosts)
    return RecordConnections(ServerOptions(addresses=addresses, timeout_s=timeout_s, **options))


@contextlib.contextmanager
def connected(
    *scripts: Script, host: str = "127.0.0.1", buffer_nbytes: int | None = None, **options: Any
) -> Iterator[tuple[FakeServer, RecordConnections]]:
    """A server with these scripts, and what uses it."""
    server = FakeServer(*scripts, host=host, buffer_nbytes=buffer_nbytes)
    connections = connections_to((host, server.port), **options)
    try:
        yield server, connections
    finally:
        connections.close()
        server.close()


def in_threads(num: int, call: Callable[[int], object]) -> None:
    """Calls it with 0 to `num` - 1, at once; raises if one raises or does not end."""
    errors: list[BaseException] = []

    def work(i: int) -> None:
        try:
            call(i)
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LATE_S)
        assert not thread.is_alive()
    assert not errors, errors
