"""Reads over the valkey tier's own connections on a server that lies, is late, dies, or is not there."""

import contextlib
import itertools
import os
import select
import socket
import threading
import time
from typing import Any

import pytest

from tests.inside.servers import idle, in_use, set_timeout, socket_of
from tests.storage.fake_valkey import (
    LATE_S,
    NONE,
    OK,
    FakeServer,
    Peer,
    answers,
    connected,
    connections_to,
    in_threads,
    value,
)
from tpu_offload.storage.resp_connection import Connection
from tpu_offload.storage.valkey_server import ServerOptions

NBYTES = 12345
DATA = bytes(i * 7 % 251 for i in range(NBYTES))
OTHER = bytes(NBYTES)


def read(reader, name=b"key", nbytes=NBYTES):
    found = memoryview(bytearray(b"\x5a" * nbytes))
    reader.read(name, found)
    return bytes(found)


def failure(reader, expected=OSError, **changes):
    """The message of a read that fails."""
    with pytest.raises(expected) as caught:
        read(reader, **changes)
    assert type(caught.value) is expected
    message = str(caught.value.args[0])
    assert message
    assert message.isprintable()
    return message


def wait_until_readable(reader):
    """Until what the server has sent to the idle connection, or its end, has arrived."""
    (connection,) = idle(reader)
    assert select.select([socket_of(connection)], [], [], LATE_S)[0]


# --- what is received ---------------------------------------------------------------------------


class Pieces:
    """A socket that receives a stream in pieces of given sizes."""

    def __init__(self, stream, sizes):
        self.left, self.sizes, self.sent = stream, iter(sizes), b""

    def setsockopt(self, *option):
        pass

    def settimeout(self, timeout):
        assert timeout > 0

    def sendmsg(self, parts):
        self.sent += b"".join(parts)
        return sum(map(len, parts))

    def recvmsg_into(self, parts):
        size = min(next(self.sizes, len(self.left)), len(self.left))
        num = 0
        for part in parts:
            some = self.left[: min(len(part), size - num)]
            part[: len(some)] = some
            self.left = self.left[len(some) :]
            num += len(some)
        return num, [], 0, None

    def close(self):
        pass


def connection_of(stream, sizes):
    pieces = Pieces(stream, sizes)
    return Connection(pieces), pieces  # type: ignore[arg-type]


@pytest.mark.parametrize("nbytes", [9, 10, 99, 4096])
def test_a_value_in_any_pieces(nbytes):
    data = DATA[:nbytes]
    stream = value(data)
    near = [*range(1, 12), *range(nbytes - 4, len(stream) + 1)]
    for first, second in itertools.product(near, [*range(1, 12), nbytes, len(stream)]):
        connection, pieces = connection_of(stream + b"rest", [first, second])
        found = memoryview(bytearray(nbytes))
        assert connection.get(b"a key\r\n", found, time.monotonic() + LATE_S)
        assert found == data
        assert pieces.left == b"rest", "nothing after the value is taken"
        assert pieces.sent == b"*2\r\n$3\r\nGET\r\n$7\r\na key\r\n\r\n"


def test_no_such_key_in_any_pieces():
    for sizes in itertools.product(range(1, 6), repeat=3):
        connection, pieces = connection_of(NONE, sizes)
        assert not connection.get(b"key", memoryview(bytearray(NBYTES)), time.monotonic() + LATE_S)
        assert pieces.left == b""


def test_a_connection_is_used_again():
    with connected(answers(value(DATA), NONE, value(OTHER), NONE, value(DATA))) as (server, reader):
        assert read(reader, b"a") == DATA
        assert failure(reader, KeyError) == "the server has no such key"
        assert read(reader, b"\0\r\n") == OTHER
        assert failure(reader, KeyError) == "the server has no such key"
        assert read(reader, b"a") == DATA
        assert [words[0] for words in server.peers[0].commands] == [b"GET"] * 5
        assert server.peers[0].commands[2][1] == b"\0\r\n"
        assert len(server.peers) == 1


# --- answers that are wrong ---------------------------------------------------------------------

WRONG = {
    "an error": (b"-ERR no way\r\n", "the server refuses: ERR no way"),
    "not here": (b"-MOVED 3999 127.0.0.1:6381\r\n", "the server refuses: MOVED 3999 127.0.0.1:6381"),
    "too early": (b"-LOADING Valkey is loading\r\n", "the server refuses: LOADING Valkey is loading"),
    "logged out": (b"-NOAUTH Authentication required.\r\n", "the server refuses: NOAUTH Authentication required."),
    "a long error": (b"-ERR " + b"x" * 400 + b"\r\n", "the server refuses: ERR xxxx"),
    "an odd error": (b"-ERR \xff\x00\n\x1b[1m\r\n", "the server refuses: ERR "),
    "an error and more": (b"-ERR no\r\n" + value(DATA), "the server refuses: ERR no"),
    "shorter": (value(b"short"), f"the server has 5 bytes; expected {NBYTES}"),
    "empty": (value(b""), f"the server has 0 bytes; expected {NBYTES}"),
    "a byte less": (value(DATA[:-1]), f"the server has {NBYTES - 1} bytes; expected {NBYTES}"),
    "a byte more": (value(DATA + b"x"), f"the server has {NBYTES + 1} bytes; expected {NBYTES}"),
    "much longer": (value(DATA * 100), f"the server has {NBYTES * 100} bytes; expected {NBYTES}"),
    "no key and more": (NONE + value(DATA), "the server answers $-1"),
    "less than nothing": (b"$-5\r\n", "the server answers $-5; is it Valkey or Redis?"),
    "no length": (b"$\r\n", "the server answers $; is it Valkey or Redis?"),
    "no number": (b"$1x\r\n", "the server answers $1x; is it Valkey or Redis?"),
    "an integer": (b":12345\r\n", "the server answers :12345; is it Valkey or Redis?"),
    "an array": (b"*1\r\n" + value(DATA), "the server answers *1"),
    "another protocol": (b"HTTP/1.1 400 Bad Request\r\n\r\n", "the server answers HTTP/1.1 400 Bad Request"),
    "zeros": (bytes(5000), "the server answers \\x00"),
    "no line": (b"$" + b"1" * 5000, "the server answers $1111"),
    "another end": (b"$%d\r\n%b\n\r" % (NBYTES, DATA), "the server answers \\n\\r; is it Valkey or Redis?"),
    "no end": (b"$%d\r\n%b$9" % (NBYTES, DATA), "the server answers $9; is it Valkey or Redis?"),
}


@pytest.mark.parametrize("name", WRONG)
def test_after_a_wrong_answer_the_connection_is_closed(name):
    answer, message = WRONG[name]
    with connected(answers(answer, value(OTHER)), answers(value(DATA))) as (server, reader):
        assert failure(reader).startswith(message)
        assert not idle(reader)
        assert not in_use(reader)
        assert read(reader) == DATA
        assert [len(peer.commands) for peer in server.peers] == [1, 1]


def ends(part, *, by_reset):
    """Sends so much of an answer, and ends the connection."""

    def script(peer):
        peer.receive()
        peer.socket.sendall(part)
        peer.reset() if by_reset else peer.close()

    return script


PARTS = [b"", b"$", b"$12", b"$12345\r\n", value(DATA)[:6000], value(DATA)[:-2], value(DATA)[:-1], b"-ERR", b"$-1\r"]


@pytest.mark.parametrize("by_reset", [False, True], ids=["closed", "reset"])
@pytest.mark.parametrize("part", PARTS, ids=range(len(PARTS)))
def test_a_server_that_ends_within_an_answer(part, by_reset):
    with connected(ends(part, by_reset=by_reset), answers(value(DATA))) as (_, reader):
        assert failure(reader).startswith(("ConnectionResetError: ", "BrokenPipeError: "))
        assert not in_use(reader)
        assert read(reader) == DATA


def test_what_the_server_sends_unasked_is_no_answer():
    unasked = answers(value(DATA) + value(OTHER), value(DATA))
    with connected(unasked, answers(value(DATA))) as (server, reader):
        assert read(reader) == DATA
        wait_until_readable(reader)
        assert read(reader) == DATA
        assert len(server.peers) == 2


def test_an_idle_connection_that_the_server_has_closed_is_not_used():
    with connected(ends(value(DATA), by_reset=False), ends(value(OTHER), by_reset=True), answers(value(DATA))) as (
        server,
        reader,
    ):
        for expected in (DATA, OTHER, DATA):
            assert read(reader) == expected
            if len(server.peers) < 3:
                wait_until_readable(reader)
        assert len(server.peers) == 3


def test_after_a_failure_of_the_network_no_idle_connection_is_used():
    both = threading.Barrier(2)

    def first_answer(peer):
        peer.receive()
        both.wait(LATE_S)
        peer.socket.sendall(value(DATA))
        if peer.receive():
            peer.reset()

    with connected(first_answer, first_answer, answers(value(OTHER))) as (server, reader):
        in_threads(2, lambda _: read(reader))
        assert len(idle(reader)) == 2
        failure(reader)
        assert not idle(reader)
        assert read(reader) == OTHER
        assert len(server.peers) == 3


# --- time ---------------------------------------------------------------------------------------


def silent(peer):
    peer.receive()
    peer.wait_for_end()


def drips(peer):
    """A few bytes at a time, each long before any timeout."""
    peer.receive()
    answer = value(DATA)
    for i in range(0, len(answer), 20):
        peer.socket.sendall(answer[i : i + 20])
        time.sleep(0.01)


@pytest.mark.parametrize("script", [silent, drips])
def test_the_timeout_is_for_the_whole_read(script):
    with connected(script, answers(value(DATA)), timeout_s=0.3) as (_, reader):
        start_s = time.monotonic()
        assert failure(reader) == "TimeoutError: timed out"
        assert time.monotonic() - start_s < LATE_S
        assert not idle(reader)
        set_timeout(reader, LATE_S)
        assert read(reader) == DATA


def test_a_late_answer_is_not_that_of_a_later_read():
    """It would come when the next read has asked on the same connection."""

    def late(peer):
        peer.receive()
        if peer.receive():
            peer.socket.sendall(value(OTHER) + value(DATA))

    with connected(late, answers(value(DATA)), timeout_s=0.3) as (server, reader):
        failure(reader)
        set_timeout(reader, LATE_S)
        assert read(reader) == DATA
        assert [len(peer.commands) for peer in server.peers] == [1, 1]


def test_a_host_that_does_not_accept_connections():
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, contextlib.ExitStack() as stack:
        for _ in range(3):  # the queue is full; further requests are dropped
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        start_s = time.monotonic()
        with contextlib.closing(connections_to(full.getsockname(), connect_timeout_s=0.3)) as reader:
            assert failure(reader).endswith("timed out")
            assert not in_use(reader)
        assert time.monotonic() - start_s < LATE_S / 2, "by the timeout of connections, which is shorter"


@pytest.mark.parametrize("stage", ["login", "value"])
def test_a_close_ends_reads_in_progress(stage):
    asked = threading.Barrier(3)

    def script(peer):
        peer.receive()
        if stage == "value":
            peer.socket.sendall(value(DATA)[:6000])
        asked.wait(LATE_S)
        peer.wait_for_end()

    with connected(script, database=1 if stage == "login" else 0, timeout_s=3600) as (_, reader):

        def close(i):
            if i < 2:
                assert failure(reader) == "the tier is closed"
            else:
                asked.wait(LATE_S)
                reader.close()

        in_threads(3, close)
        assert failure(reader) == "the tier is closed"
        assert not in_use(reader)


def test_a_connection_of_a_read_that_outlives_the_tier_is_closed(monkeypatch):
    get = Connection.get
    used: list[Connection] = []

    def get_before_the_end(connection, *args):
        found = get(connection, *args)
        used.append(connection)
        reader.close()
        return found

    monkeypatch.setattr(Connection, "get", get_before_the_end)
    with connected(answers(value(DATA))) as (server, reader):
        assert read(reader) == DATA
        (connection,) = used
        assert socket_of(connection).fileno() == -1
        assert len(server.peers) == 1


def test_no_connections_are_left_open():
    def num_open():
        return len(os.listdir("/proc/self/fd"))

    scripts = [answers(value(DATA), b"-ERR\r\n"), ends(b"$1", by_reset=False), silent, answers(value(DATA))]
    with connected(*scripts) as (server, reader):
        before = num_open()
        read(reader)
        set_timeout(reader, 0.3)
        for _ in range(3):
            failure(reader)
        server.close()
        for _ in range(3):
            failure(reader)
        reader.close()
        assert num_open() < before + 1


def test_threads_share_connections():
    """Each gets the answer to its own question, by no more connections than there are threads."""

    def serve(peer):
        while words := peer.receive():
            peer.socket.sendall(value(words[1] * 3000) if words[1] != b"none" else NONE)

    with connected(serve) as (server, reader):

        def work(thread):
            for i in range(50):
                name = b"%d.%02d" % (thread, i)
                assert read(reader, name, 12000) == name * 3000
                if i % 7 == thread:
                    failure(reader, KeyError, name=b"none")

        in_threads(4, work)
        assert 1 <= len(server.peers) <= 4
        assert len(idle(reader)) == len(server.peers)
        for _ in range(3):
            read(reader, b"1.23", 12000)
        num_missing = sum(i % 7 == thread for thread in range(4) for i in range(50))
        assert sum(len(peer.commands) for peer in server.peers) == 4 * 50 + num_missing + 3


# --- login and addresses ------------------------------------------------------------------------


def test_login():
    script = answers(OK, OK, value(DATA), value(OTHER))
    with connected(script, user="kv", password="pass word", database=12) as (server, reader):
        assert read(reader) == DATA
        assert read(reader) == OTHER
        assert server.peers[0].commands == [
            [b"AUTH", b"kv", b"pass word"],
            [b"SELECT", b"12"],
            [b"GET", b"key"],
            [b"GET", b"key"],
        ]
    with connected(answers(OK, value(DATA)), password="p") as (server, reader):
        assert read(reader) == DATA
        assert server.peers[0].commands == [[b"AUTH", b"default", b"p"], [b"GET", b"key"]]


@pytest.mark.parametrize(
    ("replies", "message"),
    [
        ([b"-WRONGPASS invalid username-password pair\r\n"], "the server refuses the password: WRONGPASS"),
        ([b"-ERR unknown command 'AUTH' with args 'SECRET'\r\n"], "the server refuses the password: ERR"),
        ([OK, b"-ERR DB index is out of range\r\n"], "the server refuses: ERR DB index is out of range"),
        ([b"$3\r\nabcde"], "the server answers de"),
        ([b"*2\r\n"], "the server answers *2"),
        ([b"$99999999\r\n"], "the server answers $99999999"),
    ],
)
def test_a_login_that_is_refused(replies, message):
    with connected(answers(*replies), answers(OK, OK, value(DATA)), password="SECRET", database=1) as (server, reader):
        text = failure(reader)
        assert text.startswith(f"127.0.0.1:{server.port}: {message}")
        assert "SECRET" not in text
        assert not in_use(reader)
        assert read(reader) == DATA


def test_the_password_is_not_shown():
    assert "SECRET" not in repr(ServerOptions(addresses=(("h", 1),), password="SECRET"))


ROLE = {role: value(b"# Replication\r\nrole:%b\r\nconnected_slaves:0\r\n" % role) for role in (b"master", b"slave")}


def test_of_several_servers_the_one_that_is_no_replica_is_read():
    gone = FakeServer(silent)
    gone.close()
    replica = FakeServer(answers(ROLE[b"slave"]))
    primary = FakeServer(answers(ROLE[b"master"], value(DATA), b"-ERR\r\n"), answers(ROLE[b"master"], value(OTHER)))
    with contextlib.closing(connections_to(gone, replica, primary)) as reader:
        assert read(reader) == DATA
        failure(reader)
        assert read(reader) == OTHER
        assert [len(server.peers) for server in (replica, primary)] == [1, 2], "the last one is asked first"
        assert replica.peers[0].commands == [[b"INFO", b"replication"]]
        primary.close()
        failure(reader)
        text = failure(reader)
        assert text.startswith(
            f"127.0.0.1:{primary.port}: ConnectionRefusedError: [Errno 111] Connection refused; 127."
        )
        assert f"; 127.0.0.1:{gone.port}: ConnectionRefusedError: " in text
        assert text.endswith(f"; 127.0.0.1:{replica.port}: it is a replica")
    replica.close()


def test_a_server_that_hangs_leaves_time_for_the_others():
    hangs, primary = FakeServer(silent), FakeServer(answers(ROLE[b"master"], value(DATA)))
    with contextlib.closing(connections_to(hangs, primary, timeout_s=4.0)) as reader:
        assert read(reader) == DATA
    hangs.close()
    primary.close()


def test_a_server_that_is_not_there_is_found_later():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        with contextlib.closing(connections_to(listener.getsockname())) as reader:
            assert "ConnectionRefusedError: " in failure(reader)
            listener.listen()

            def serve():
                with contextlib.closing(Peer(listener.accept()[0])) as peer:
                    answers(value(DATA))(peer)

            serving = threading.Thread(target=serve, daemon=True)
            serving.start()
            assert read(reader) == DATA
        serving.join(LATE_S)
        assert not serving.is_alive()


@pytest.mark.skipif(not os.path.exists("/proc/net/if_inet6"), reason="needs IPv6")
def test_ipv6():
    with connected(answers(value(DATA), b"-ERR\r\n"), host="::1") as (server, reader):
        assert read(reader) == DATA
    with contextlib.closing(connections_to(("::1", server.port))) as reader:
        assert failure(reader).startswith(f"[::1]:{server.port}: ConnectionRefusedError: ")


@pytest.fixture
def names(monkeypatch):
    """Addresses by name, instead of those of the system; a function is called, an exception is raised."""
    found: dict[str, Any] = {}
    look_up = socket.getaddrinfo

    def getaddrinfo(host, port, **options):
        if options.get("flags") or host not in found:
            return look_up(host, port, **options)
        known = found[host]() if callable(found[host]) else found[host]
        if isinstance(known, Exception):
            raise known
        return [entry for ip, number in known for entry in look_up(ip, number, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return found


def test_a_name_with_several_addresses(names):
    server = FakeServer(answers(value(DATA)))
    gone = FakeServer(silent)
    gone.close()
    names["kv"] = [("127.0.0.1", gone.port), ("127.0.0.1", server.port)]
    with contextlib.closing(connections_to(("kv", 1))) as reader:
        assert read(reader) == DATA
    server.close()
    with contextlib.closing(connections_to(("kv", 1))) as reader:
        assert failure(reader).startswith("kv:1: ConnectionRefusedError: ")


@pytest.mark.parametrize("error", [socket.gaierror(-2, "Name or service not known"), UnicodeError("label too long")])
def test_a_name_without_an_address(names, error):
    names["kv"] = error
    with contextlib.closing(connections_to(("kv", 1))) as reader:
        for _ in range(2):
            assert failure(reader) == f"kv:1: the name cannot be looked up: {error}"


def test_a_name_that_has_no_addresses(names):
    names["kv"] = []
    with contextlib.closing(connections_to(("kv", 1))) as reader:
        assert failure(reader) == "kv:1: the name has no address"


def test_a_name_service_that_hangs(names):
    """A read gives up in time, and there is one thread for all of them; a later read looks the name up again."""
    server = FakeServer(answers(value(DATA)))
    may_answer = threading.Event()
    num_lookups = itertools.count()

    def slowly():
        next(num_lookups)
        may_answer.wait(LATE_S)
        return [("127.0.0.1", server.port)]

    names["kv"] = slowly
    with contextlib.closing(connections_to(("kv", 1), timeout_s=0.3)) as reader:
        in_threads(4, lambda _: failure(reader))
        assert failure(reader) == "kv:1: TimeoutError: looking up the name timed out"
        assert next(num_lookups) == 1
        (lookup,) = (thread for thread in threading.enumerate() if thread.name == "valkey-lookup")
        may_answer.set()
        lookup.join(LATE_S)
        assert not lookup.is_alive()
        assert read(reader) == DATA
        assert next(num_lookups) == 3
    server.close()
