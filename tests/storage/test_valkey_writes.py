"""Writes over the valkey tier's own connections: to a server that lies, is late, refuses or dies, and to a real one."""

import contextlib
import functools
import itertools
import os
import select
import socket
import threading
import time
from typing import Any

import pytest
from glide_sync import GlideClient, GlideClientConfiguration, NodeAddress

from tests.inside.servers import idle, in_use, set_timeout, socket_of
from tests.storage import servers
from tests.storage.fake_valkey import (
    LATE_S,
    OK,
    FakeServer,
    answers,
    connected,
    connections_to,
    in_threads,
    value,
)
from tpu_offload.storage.resp_connection import Connection

NBYTES = 12345
DATA = bytes(i * 7 % 251 for i in range(NBYTES))
LARGE = os.urandom(1 << 20) * 16  # more than sockets hold, with the buffer below
BUFFER_NBYTES = 1 << 16


def write(connections, name=b"key", data=DATA, ttl_s=0):
    connections.write(name, memoryview(data), ttl_s=ttl_s)


def failure(connections, **changes):
    """The message of a write that fails, after which no connection is in use."""
    with pytest.raises(OSError) as caught:  # noqa: PT011
        write(connections, **changes)
    assert type(caught.value) is OSError
    assert not in_use(connections)
    message = str(caught.value.args[0])
    assert message.isprintable()
    return message


def command(data, name=b"key", *more):
    """A write on the wire."""
    words = [b"SET", name, data, *more]
    return b"*%d\r\n" % len(words) + b"".join(map(value, words))


# --- what is sent -------------------------------------------------------------------------------


class Pieces:
    """A socket that takes and gives bytes in pieces of given sizes."""

    def __init__(self, answer, sent, received):
        self.answer, self.sent = answer, b""
        self.sizes, self.received = iter(sent), iter(received)
        self.memories: list[Any] = []

    def setsockopt(self, *option):
        pass

    def settimeout(self, timeout):
        assert timeout > 0

    def setblocking(self, is_blocking):
        assert not is_blocking

    def recv(self, nbytes):
        raise BlockingIOError

    def sendmsg(self, parts):
        assert all(parts) or not self.sent, "nothing is left of what was sent"
        self.memories += [part.obj for part in parts]
        stream = b"".join(parts)
        num = min(next(self.sizes, len(stream)), len(stream))
        self.sent += stream[:num]
        return num

    def recvmsg_into(self, parts):
        (part,) = parts
        num = min(len(part), next(self.received, len(self.answer)), len(self.answer))
        part[:num] = self.answer[:num]
        self.answer = self.answer[num:]
        return num, [], 0, None

    def close(self):
        pass


def connection_of(answer=OK, sent=(), received=()):
    pieces = Pieces(answer, sent, received)
    return Connection(pieces), pieces  # type: ignore[arg-type]


def until():
    return time.monotonic() + LATE_S


@pytest.mark.parametrize("nbytes", [0, 1, 9, 10, 4096])
@pytest.mark.parametrize("ttl_s", [0, 77])
def test_a_value_in_any_pieces(nbytes, ttl_s):
    data, name = DATA[:nbytes], b"a key\r\n"
    expected = command(data, name, *((b"EX", b"77") if ttl_s else ()))
    head_nbytes = expected.index(name) + len(name) + 4
    near = sorted({*range(1, 5), *range(head_nbytes - 2, head_nbytes + 8), *range(len(expected) - 30, len(expected))})
    for first, second in itertools.product(near, [1, 2, 3, nbytes + 1, len(expected)]):
        connection, pieces = connection_of(OK + b"rest", [max(1, first), second])
        connection.set(name, memoryview(data), until(), ttl_s=ttl_s)
        assert pieces.sent == expected
        assert pieces.answer == b"rest", "nothing after the answer is taken"


def test_an_answer_in_any_pieces():
    for sizes in itertools.product(range(1, 6), repeat=3):
        connection, pieces = connection_of(received=sizes)
        connection.set(b"key", memoryview(DATA), until())
        assert pieces.answer == b""
        refused, _ = connection_of(b"-OOM no room\r\n", received=sizes)
        with pytest.raises(OSError, match="OOM no room"):
            refused.set(b"key", memoryview(DATA), until())


def test_a_value_is_sent_from_where_it_is():
    memory = bytearray(DATA)
    connection, pieces = connection_of(sent=[10, 100, 1000])
    connection.set(b"key", memoryview(memory)[45:].toreadonly(), until())
    assert sum(part is memory for part in pieces.memories) == 4
    assert pieces.sent == command(DATA[45:])


def test_a_length_is_in_bytes():
    connection, pieces = connection_of(sent=[60, 1])
    connection.set(b"key", memoryview(DATA[:96]).cast("I", (4, 6)), until())
    assert pieces.sent == command(DATA[:96])


def test_no_time_is_left():
    connection, pieces = connection_of()
    with pytest.raises(TimeoutError):
        connection.set(b"key", memoryview(DATA), time.monotonic())
    assert not pieces.sent


def test_reads_and_writes_use_a_connection_again():
    with connected(answers(OK, value(DATA), OK, OK)) as (server, connections):
        write(connections, b"a")
        found = memoryview(bytearray(NBYTES))
        connections.read(b"a", found)
        assert found == DATA
        write(connections, b"\0\r\n", b"")
        write(connections, b"b", DATA[::-1], ttl_s=5)
        (peer,) = server.peers
        assert peer.commands == [
            [b"SET", b"a", DATA],
            [b"GET", b"a"],
            [b"SET", b"\0\r\n", b""],
            [b"SET", b"b", DATA[::-1], b"EX", b"5"],
        ]


def test_a_value_larger_than_all_buffers():
    with connected(answers(OK, OK), buffer_nbytes=BUFFER_NBYTES) as (server, connections):
        for data in (LARGE, LARGE[::-1]):
            write(connections, data=data)
        (peer,) = server.peers
        assert [words[2] == data for words, data in zip(peer.commands, (LARGE, LARGE[::-1]), strict=True)] == [True] * 2


def test_how_much_of_a_value_the_kernel_holds(monkeypatch):
    """On this host; less is slow there, where a segment is large. Over a network the kernel decides."""
    connection = Connection(socket.socket())
    with connected(answers(OK)) as (server, _), contextlib.closing(connection):
        connection.connect(("127.0.0.1", server.port), until())
        assert 1 << 18 <= socket_of(connection).getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) <= 1 << 20
    with connected(answers(OK)) as (server, _), contextlib.closing(Connection(socket.socket())) as connection:
        monkeypatch.setattr(socket.socket, "getpeername", lambda _: ("192.0.2.1", server.port))
        monkeypatch.setattr(socket.socket, "setsockopt", None)  # a call would raise
        connection.connect(("127.0.0.1", server.port), until())


@pytest.mark.parametrize("buffer_nbytes", [1, 1 << 17])
def test_a_small_buffer_of_the_sender(buffer_nbytes):
    """Only some bytes are taken at a time."""
    sizes: list[int] = []

    class Small(socket.socket):
        def setsockopt(self, level, option, number):  # type: ignore[override]
            is_buffer = (level, option) == (socket.SOL_SOCKET, socket.SO_SNDBUF)
            super().setsockopt(level, option, buffer_nbytes if is_buffer else number)

        def sendmsg(self, *args):
            sizes.append(super().sendmsg(*args))
            return sizes[-1]

    data = LARGE[: 1 << 18 if buffer_nbytes == 1 else 1 << 21]
    with connected(answers(OK)) as (server, connections):
        with contextlib.closing(Connection(Small())) as connection:
            connection.connect(("127.0.0.1", server.port), until())
            connection.set(b"key", memoryview(data), until())
        assert len(sizes) > 5
        assert server.peers[0].commands == [[b"SET", b"key", data]]
        assert not idle(connections)


# --- answers that are wrong ---------------------------------------------------------------------

WRONG = {
    "full": (b"-OOM command not allowed when used memory > 'maxmemory'.\r\n", "the server refuses: OOM command not"),
    "a replica": (b"-READONLY You can't write\r\n", "the server refuses: READONLY You can't write"),
    "not here": (b"-MOVED 3999 127.0.0.1:6381\r\n", "the server refuses: MOVED 3999 127.0.0.1:6381"),
    "too early": (b"-LOADING Valkey is loading\r\n", "the server refuses: LOADING Valkey is loading"),
    "logged out": (b"-NOAUTH Authentication required.\r\n", "the server refuses: NOAUTH Authentication required."),
    "no more disk": (b"-MISCONF Valkey is configured to save\r\n", "the server refuses: MISCONF Valkey is"),
    "an odd error": (b"-ERR \xff\x00\n\x1b[1m\r\n", "the server refuses: ERR "),
    "an error and more": (b"-ERR no\r\n+OK\r\n", "the server refuses: ERR no"),
    "no error": (b"-\r\n", "the server refuses:"),
    "not stored": (b"$-1\r\n", "the server answers $-1; is it Valkey or Redis?"),
    "a value": (value(b"OK"), "the server answers $2; is it Valkey or Redis?"),
    "an integer": (b":1\r\n", "the server answers :1; is it Valkey or Redis?"),
    "queued": (b"+QUEUED\r\n", "the server answers +QUEUED; is it Valkey or Redis?"),
    "less than OK": (b"+O\r\n", "the server answers +O; is it Valkey or Redis?"),
    "more than OK": (b"+OKAY\r\n", "the server answers +OKAY; is it Valkey or Redis?"),
    "nearly OK": (b"+OK\n\r\r\n", "the server answers +OK\\n\\r; is it Valkey or Redis?"),
    "another protocol": (b"HTTP/1.1 400 Bad Request\r\n\r\n", "the server answers HTTP/1.1 400 Bad Request"),
    "zeros": (bytes(5000), "the server answers \\x00"),
    "no line": (b"+" + b"O" * 5000, "the server answers +OOOO"),
}


@pytest.mark.parametrize("name", WRONG)
def test_after_a_wrong_answer_the_connection_is_closed(name):
    answer, message = WRONG[name]
    with connected(answers(answer, OK), answers(OK)) as (server, connections):
        assert failure(connections).startswith(message)
        assert not idle(connections)
        write(connections)
        assert [len(peer.commands) for peer in server.peers] == [1, 1]


def test_what_the_server_sends_unasked_is_no_answer():
    with connected(answers(OK + OK, b"-OOM\r\n"), answers(b"-OOM\r\n")) as (server, connections):
        write(connections)
        (connection,) = idle(connections)
        assert select.select([socket_of(connection)], [], [], LATE_S)[0]
        assert failure(connections) == "the server refuses: OOM"
        assert [len(peer.commands) for peer in server.peers] == [1, 1]


REFUSAL = b"-ERR Protocol error: invalid bulk length\r\n"


def refuses(peer):
    """As a server does that does not want so long a value: what is sent further is not received."""
    peer.receive_part(50)
    peer.socket.sendall(REFUSAL)


def refuses_and_receives(peer):
    peer.receive_part(50)
    peer.socket.sendall(REFUSAL)
    peer.receive_rest()


def refuses_and_waits(peer):
    peer.receive_part(50)
    peer.socket.sendall(REFUSAL)
    peer.freeze()


@pytest.mark.parametrize("data", [DATA, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("script", [refuses, refuses_and_receives])
def test_a_refusal_before_all_is_sent(script, data):
    with connected(script, answers(OK), buffer_nbytes=BUFFER_NBYTES) as (_, connections):
        message = failure(connections, data=data)
        assert message == "the server refuses: ERR Protocol error: invalid bulk length"
        assert not idle(connections)
        write(connections)


def test_a_refusal_of_a_server_that_then_receives_nothing():
    with connected(refuses_and_waits, answers(OK), timeout_s=0.5, buffer_nbytes=BUFFER_NBYTES) as (_, connections):
        assert failure(connections, data=LARGE) == "the server refuses: ERR Protocol error: invalid bulk length"
        set_timeout(connections, LATE_S)
        write(connections)


@pytest.mark.parametrize("said", [OK, b"-ERR but no end", b"+OK\r\n-ERR late\r\n", b"$-1\r\n", b"\0" * 600])
def test_what_is_said_before_all_is_sent_is_no_success(said):
    def script(peer):
        peer.receive_part(50)
        peer.socket.sendall(said)

    with connected(script, answers(OK), buffer_nbytes=BUFFER_NBYTES) as (_, connections):
        assert failure(connections, data=LARGE).startswith(("ConnectionResetError: ", "BrokenPipeError: "))
        write(connections)


# --- a server that ends or is late --------------------------------------------------------------


def ends(num_received, said=b"", *, by_reset):
    """Receives so much, all if it is None, sends so much of an answer, and ends the connection."""

    def script(peer):
        peer.receive() if num_received is None else peer.receive_part(num_received)
        peer.socket.sendall(said)
        peer.reset() if by_reset else peer.close()

    return script


STAGES = [(0, b""), (5, b""), (40, b""), (1 << 20, b""), (None, b""), (None, b"+"), (None, b"+OK\r"), (None, b"-ERR n")]


@pytest.mark.parametrize("by_reset", [False, True], ids=["closed", "reset"])
@pytest.mark.parametrize("stage", STAGES, ids=range(len(STAGES)))
def test_a_server_that_ends_within_a_write(stage, by_reset):
    with connected(ends(*stage, by_reset=by_reset), answers(OK), buffer_nbytes=BUFFER_NBYTES) as (_, connections):
        message = failure(connections, data=LARGE)  # with the address, if connecting already fails
        assert "ConnectionResetError: " in message or "BrokenPipeError: " in message
        assert not idle(connections)
        write(connections)


def two_idle(connections, both):
    """Makes two connections, which are then idle; the scripts wait at the barrier before they answer."""
    in_threads(2, lambda _: write(connections))
    assert len(idle(connections)) == both.parties


@pytest.mark.parametrize(
    ("end", "num_connections"),
    [
        (lambda peer: peer.reset(), 3),
        (lambda peer: peer.socket.sendall(b"-READONLY You can't write against a read only replica.\r\n"), 3),
        (lambda peer: peer.socket.sendall(b"-OOM\r\n"), 2),
    ],
    ids=["network", "replica", "full"],
)
def test_which_failures_end_idle_connections(end, num_connections):
    both = threading.Barrier(2)

    def first_answer(peer):
        peer.receive()
        both.wait(LATE_S)
        peer.socket.sendall(OK)
        peer.receive()
        if next(calls) == 0:
            end(peer)
        else:
            peer.socket.sendall(OK)
        peer.wait_for_end()

    calls = itertools.count()
    with connected(first_answer, first_answer, answers(OK)) as (server, connections):
        two_idle(connections, both)
        failure(connections)
        assert len(idle(connections)) == 3 - num_connections
        write(connections)
        assert len(server.peers) == num_connections


def test_a_server_that_has_become_a_replica_is_left():
    def role(name):
        return value(b"# Replication\r\nrole:%b\r\n" % name)

    old = FakeServer(answers(role(b"master"), OK, b"-READONLY replica\r\n"), answers(role(b"slave")))
    new = FakeServer(answers(role(b"master"), OK))
    with contextlib.closing(connections_to(old, new)) as connections:
        write(connections)
        assert failure(connections) == "the server refuses: READONLY replica"
        write(connections, data=LARGE)
        assert new.peers[0].commands[1] == [b"SET", b"key", LARGE]
    old.close()
    new.close()


def silent(peer):
    peer.receive()
    peer.wait_for_end()


def frozen(peer):
    peer.freeze()


def slow(peer):
    """A few bytes at a time, each long before any timeout."""
    with contextlib.suppress(OSError):
        while peer.receive_part(1 << 14):
            time.sleep(0.01)


@pytest.mark.parametrize("script", [silent, frozen, slow])
def test_the_timeout_is_for_the_whole_write(script):
    with connected(script, answers(OK), timeout_s=0.3, buffer_nbytes=BUFFER_NBYTES) as (_, connections):
        start_s = time.monotonic()
        assert failure(connections, data=LARGE) == "TimeoutError: timed out"
        assert time.monotonic() - start_s < LATE_S / 2
        assert not idle(connections)
        set_timeout(connections, LATE_S)
        write(connections)


def test_a_late_answer_is_not_that_of_a_later_write():
    def late(peer):
        peer.receive()
        if peer.receive():
            peer.socket.sendall(OK + OK)

    with connected(late, answers(b"-OOM\r\n"), timeout_s=0.3) as (server, connections):
        assert failure(connections) == "TimeoutError: timed out"
        set_timeout(connections, LATE_S)
        assert failure(connections) == "the server refuses: OOM"
        assert [len(peer.commands) for peer in server.peers] == [1, 1]


def test_memory_of_a_write_that_timed_out_is_not_read_later():
    """What has not been sent by then never is, so the server has no whole command."""
    may_receive = threading.Event()
    received: list[bytes] = []

    def script(peer):
        may_receive.wait(LATE_S)
        received.append(peer.receive_rest())

    memory = bytearray(LARGE)
    with connected(script, timeout_s=0.3, buffer_nbytes=BUFFER_NBYTES) as (server, connections):
        assert failure(connections, data=memory) == "TimeoutError: timed out"
        memory[:] = bytes(len(memory))
        may_receive.set()
        server.threads[0].join(LATE_S)
        (stream,) = received
        assert len(stream) > BUFFER_NBYTES // 2
        assert len(stream) < len(LARGE)
        assert command(LARGE).startswith(stream)


@pytest.mark.parametrize("stage", ["sending", "sent"])
def test_a_close_ends_writes_in_progress(stage):
    arrived = threading.Barrier(3)

    def script(peer):
        peer.receive() if stage == "sent" else peer.receive_part(1000)
        arrived.wait(LATE_S)
        peer.wait_for_end() if stage == "sent" else peer.freeze()

    with connected(script, timeout_s=3600, buffer_nbytes=BUFFER_NBYTES) as (_, connections):

        def close(i):
            if i < 2:
                with pytest.raises(OSError, match="the tier is closed"):
                    write(connections, data=LARGE)
            else:
                arrived.wait(LATE_S)
                connections.close()

        in_threads(3, close)
        assert failure(connections) == "the tier is closed"


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_write_that_is_interrupted_leaves_no_connection(monkeypatch, error):
    """Half of a value is sent: whatever follows would be taken for the rest."""
    with connected(answers(OK, OK), answers(OK)) as (server, connections):
        write(connections)

        def interrupted(self, parts, until_s):
            self._socket.sendmsg([parts[0], parts[1][:100]])
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(Connection, "_send", interrupted)
            with pytest.raises(error):
                write(connections)
        assert not idle(connections)
        assert not in_use(connections)
        write(connections)
        assert server.peers[1].commands == [[b"SET", b"key", DATA]]


def test_no_connections_are_left_open():
    def num_open():
        return len(os.listdir("/proc/self/fd"))

    scripts = [answers(OK, b"-OOM\r\n"), refuses, ends(100, by_reset=True), silent, answers(OK)]
    with connected(*scripts, buffer_nbytes=BUFFER_NBYTES) as (server, connections):
        before = num_open()
        write(connections)
        set_timeout(connections, 0.3)
        for _ in range(4):
            failure(connections, data=LARGE)
        server.close()
        for _ in range(3):
            failure(connections)
        connections.close()
        assert num_open() < before + 1


def test_threads_share_connections():
    """Each value arrives whole under its own name, by no more connections than there are threads."""
    stored: dict[bytes, bytes] = {}

    def serve(peer):
        while words := peer.receive():
            if words[0] == b"SET":
                stored[words[1]] = words[2]
            peer.socket.sendall(OK if words[0] == b"SET" else value(stored[words[1]]))

    with connected(serve, buffer_nbytes=BUFFER_NBYTES) as (server, connections):

        def work(thread):
            for i in range(20):
                data = b"%d.%02d" % (thread, i) * 100_000
                write(connections, data[:4], data)
                found = memoryview(bytearray(len(data)))
                connections.read(data[:4], found)
                assert found == data

        in_threads(4, work)
        assert len(stored) == 80
        assert all(data == name * 100_000 for name, data in stored.items())
        assert 1 <= len(server.peers) <= 4
        assert len(idle(connections)) == len(server.peers)


# --- a real server ------------------------------------------------------------------------------


@contextlib.contextmanager
def glide(server):
    config = GlideClientConfiguration([NodeAddress("127.0.0.1", server.port)], request_timeout=int(1000 * LATE_S))
    client = GlideClient.create(config)
    try:
        yield client
    finally:
        client.close()


SIZES = [0, 1, 2, 16383, 16384, 16385, 32767, 32768, 32769, (1 << 20) + 4096, (16 << 20) + 1]


def test_what_is_written_is_what_valkey_glide_writes():
    with (
        servers.running(servers.valkey(maxmemory="400mb")) as server,
        contextlib.closing(connections_to(("127.0.0.1", server.port))) as connections,
        glide(server) as client,
    ):
        for nbytes, ttl_s in itertools.product(SIZES, (0, 1000)):
            data = memoryview(LARGE + b"!")[:nbytes]
            ours, theirs = b"ours\r\n\0%d" % nbytes, b"theirs%d" % nbytes
            client.set(ours, b"an earlier value")
            connections.write(ours, data, ttl_s=ttl_s)
            client.set(theirs, data.tobytes())
            for name in (ours, theirs):
                assert client.get(name) == data
                found = memoryview(bytearray(nbytes))
                connections.read(name, found)
                assert found == data
            assert client.ttl(ours) in ((-1,) if not ttl_s else range(900, 1001))
            assert client.custom_command(["OBJECT", "ENCODING", ours]) == client.custom_command(
                ["OBJECT", "ENCODING", theirs]
            )
        assert len(idle(connections)) == 1
        client.delete([ours, theirs])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("--proto-max-bulk-len", "1mb"), "invalid bulk length"),
        (("--requirepass", "x"), "unauthenticated bulk length"),
        (("--maxmemory", "2mb"), "OOM command not allowed"),
    ],
)
def test_why_a_real_server_refuses(settings, message):
    """The first two end the connection while the value is sent."""
    with (
        servers.running(servers.valkey("--maxmemory-policy", "noeviction", *settings)) as server,
        contextlib.closing(connections_to(("127.0.0.1", server.port))) as connections,
    ):
        for _ in range(3):
            text = ""
            for _ in range(5):  # a server that is full knows it by the second value
                with contextlib.suppress(AssertionError, pytest.fail.Exception):
                    text = text or failure(connections, data=LARGE)
            assert message in text
            assert not idle(connections)


def test_a_replica_refuses():
    with (
        servers.running(servers.valkey()) as primary,
        servers.running(servers.valkey("--replicaof", f"127.0.0.1 {primary.port}")) as replica,
        contextlib.closing(connections_to(("127.0.0.1", replica.port))) as connections,
    ):
        assert failure(connections).startswith("the server refuses: ")
        write_both = connections_to(("127.0.0.1", replica.port), ("127.0.0.1", primary.port))
        with contextlib.closing(write_both):
            write(write_both)


def test_a_server_that_dies_while_it_is_written(tmp_path):
    """A value is there as a whole, or not at all; after a restart it is written again."""
    durable = ("--appendonly", "yes", "--appendfsync", "no", "--dir", str(tmp_path))
    values = [os.urandom(64) * (1 << 15) for _ in range(4)]
    with (
        servers.running(servers.valkey(*durable)) as server,
        contextlib.closing(connections_to(("127.0.0.1", server.port))) as connections,
    ):
        for turn in range(3):
            written, is_over = itertools.count(), threading.Event()

            def work(i, written=written, is_over=is_over):
                for data in itertools.cycle(values):
                    try:
                        write(connections, b"%d" % i, data)
                        next(written)
                    except OSError:
                        assert is_over.is_set()
                        return

            def kill(turn=turn, written=written, is_over=is_over):
                deadline_s = time.monotonic() + LATE_S
                while next(written) < 8 + turn:
                    assert time.monotonic() < deadline_s
                    time.sleep(0.01)
                is_over.set()
                server.kill()

            calls = [*(functools.partial(work, i) for i in range(3)), kill]
            in_threads(4, lambda i, calls=calls: calls[i]())  # type: ignore[misc]
            server.start()
            found = memoryview(bytearray(len(values[0])))
            for i in range(3):
                with contextlib.suppress(KeyError):
                    read_soon(connections, b"%d" % i, found)
                    assert found in values
            write(connections)


def read_soon(connections, name, found):
    """Reads, once the server has loaded what it keeps."""
    deadline_s = time.monotonic() + LATE_S
    while True:
        try:
            return connections.read(name, found)
        except OSError:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
