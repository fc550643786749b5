"""The valkey tier on a real server: the contract, sharing, generations, and a server that is late, dead or full."""

import contextlib
import dataclasses
import datetime
import ipaddress
import itertools
import logging
import re
import socket
import threading
import time
from typing import Any

import pytest
from glide_sync import InfoSection

from tests.inside.servers import asker, generation, record_connections, server_key
from tests.storage import servers
from tests.storage.conformance import (
    CHECKS,
    FORMAT,
    NUM_CHUNKS,
    SHARED_CHECKS,
    SPEC,
    gives_back_what_was_written,
    key_of,
    new_record,
    payload,
    read,
    sealed,
    write,
)
from tests.storage.fake_valkey import FakeServer
from tpu_offload.errors import ConfigError
from tpu_offload.storage import valkey
from tpu_offload.storage.valkey import ValkeyTier
from tpu_offload.storage.valkey_records import RecordConnections

LATE_S = 30.0  # a generous end for what should take less than a second


def url(server, options="", scheme="valkey"):
    return f"{scheme}://127.0.0.1:{server.port}?timeout_s=0.3&connect_timeout_s=0.5{options}"


def spec_for(server, options="", **changes):
    return dataclasses.replace(SPEC, options=url(server, options), **changes)


@contextlib.contextmanager
def opened(server, options="", **changes):
    tier = ValkeyTier(spec_for(server, options, **changes))
    try:
        yield tier
    finally:
        tier.close()


def marker_of(tier):
    """The key on the server that has the current generation."""
    return f"{valkey.PREFIX}{tier.spec.fingerprint}:{tier.spec.worker_id}:{valkey.MARKER}"


def exists(tier, keys):
    """Which of these keys are stored."""
    return [bool(n) for n in tier.find([(key,) for key in keys])]


@pytest.fixture
def server():
    with servers.running(servers.valkey()) as server:
        yield server


@pytest.fixture
def always_ask(monkeypatch):
    monkeypatch.setattr(valkey, "_ASK_S", 0.0)


@pytest.mark.parametrize("check", CHECKS + SHARED_CHECKS)
def test_conformance(server, check):
    check(lambda spec: ValkeyTier(dataclasses.replace(spec, options=url(server))))


# --- sharing and generations --------------------------------------------------------------------


def test_engines_share_what_they_write(server):
    with opened(server) as first, opened(server) as second:
        for i in range(0, 6, 2):
            write(first, key_of(i), i)
        assert exists(second, [key_of(i) for i in range(6)]) == [True, False] * 3
        for i in range(0, 6, 2):
            assert read(second, key_of(i)) == payload(i)
        assert exists(first, ()) == []


def test_workers_and_models_are_apart(server):
    with opened(server) as tier, opened(server, worker_id=2) as worker, opened(server, fingerprint="0f" * 16) as model:
        write(tier, key_of(1), 1)
        assert [list(exists(other, [key_of(1)])) for other in (tier, worker, model)] == [[True], [False], [False]]


def test_a_clear_empties_the_tier_of_all_engines(server, always_ask):
    with opened(server) as first, opened(server) as second:
        write(first, key_of(1), 1)
        second.clear()
        for tier in (first, second):
            assert exists(tier, [key_of(1)]) == [False]
        write(first, key_of(2), 2)
        assert read(second, key_of(2)) == payload(2), "both are in the new generation"
    with opened(server) as later:
        assert exists(later, [key_of(1), key_of(2)]) == [False, True]


def test_a_lost_generation_is_written_again(server, always_ask):
    with opened(server) as tier:
        write(tier, key_of(1), 1)
        asker(tier).delete([marker_of(tier)])
        assert read(tier, key_of(1)) == payload(1)
        with opened(server) as other:
            assert read(other, key_of(1)) == payload(1)


def test_engines_that_start_at_once_agree(server, always_ask):
    """Another one writes its generation between the two requests of this one."""
    theirs = "0123456789abcdef"
    with opened(server) as tier:
        client: Any = asker(tier)
        client.delete([marker_of(tier)])
        get = client.get

        def get_before_theirs(key):
            client.get = get
            found = get(key)
            client.set(key, theirs)
            return found

        client.get = get_before_theirs
        assert exists(tier, [key_of(1)]) == [False]
        assert generation(tier) == theirs


def test_a_generation_that_was_left_never_comes_back(server, always_ask):
    with opened(server) as first, opened(server) as second:
        write(first, key_of(1), 1)
        old = generation(first)
        second.clear()
        asker(second).set(marker_of(second), old)  # as an engine does that has not seen the `clear`
        assert exists(second, [key_of(1)]) == [False]
        assert exists(first, [key_of(1)]) == [False]
        assert generation(first) == generation(second) != old


def test_a_clear_while_the_generation_is_read(server, always_ask):
    """The answer is of before the clear, and must not bring it back."""
    with opened(server) as tier:
        write(tier, key_of(1), 1)
        client: Any = asker(tier)
        get, old = client.get, generation(tier)

        def get_before_the_clear(key):
            client.get = get
            found = get(key)
            tier.clear()
            return found

        client.get = get_before_the_clear
        assert exists(tier, [key_of(1)]) == [False]
        assert client.get(marker_of(tier)).decode() == generation(tier) != old


def test_a_clear_without_a_server_is_made_durable_later(server):
    with opened(server) as tier:
        write(tier, key_of(1), 1)
        server.freeze()
        with pytest.raises(OSError, match="timed out"):
            tier.clear()
        server.thaw()
        assert exists(tier, [key_of(1)]) == [False]
    with opened(server) as later:
        assert exists(later, [key_of(1)]) == [False]


@pytest.mark.parametrize(("ttl_s", "least"), [("1000", 900), ("100.5", 50)])
def test_records_expire(server, ttl_s, least):
    with opened(server, f"&ttl_s={ttl_s}") as tier:
        write(tier, key_of(1), 1)
        assert least < asker(tier).ttl(server_key(tier, key_of(1))) <= float(ttl_s) + 1


@pytest.mark.parametrize("ttl_s", ["0.5", "0"])
def test_less_than_a_second_to_live_is_not_for_ever(server, ttl_s):
    with opened(server, f"&ttl_s={ttl_s}") as tier:
        write(tier, key_of(1), 1)
        if ttl_s == "0":
            assert asker(tier).ttl(server_key(tier, key_of(1))) == -1
        else:
            assert asker(tier).ttl(server_key(tier, key_of(1))) in (0, 1, -2), "rounded, or it has expired"


def test_a_start_does_not_list_the_server(server):
    with opened(server) as tier:
        fill(tier, NUM_CHUNKS)
    with opened(server) as later:
        assert later.stored_keys() == ()
        assert exists(later, [key_of(0)]) == [True]
        assert calls_of(later, "scan") == calls_of(later, "keys") == 0


def calls_of(tier, command):
    """How often the server has run a command."""
    text = asker(tier).info([InfoSection.COMMAND_STATS]).decode()
    line = next((line for line in text.split() if line.startswith(f"cmdstat_{command}:")), ":calls=0,")
    return int(line.partition("calls=")[2].partition(",")[0])


def test_a_long_prefix_takes_few_round_trips(server, monkeypatch):
    keys = [b"%d" % i for i in range(4000)]
    with opened(server) as tier:
        for key in keys[:3000]:
            asker(tier).set(server_key(tier, key), b"x")
        trips: list[int] = []
        num_before = calls_of(tier, "touch")
        execute = asker(tier).exec

        def counted(batch, **options):
            trips.append(len(batch.commands))
            return execute(batch, **options)

        monkeypatch.setattr(asker(tier), "exec", counted)
        assert list(tier.find([keys, keys[:2900], [b"other", *keys]])) == [3000, 2900, 0]
        assert len(trips) <= 6
        assert calls_of(tier, "touch") - num_before == sum(trips) < 200, "a request for each range, not for each key"


@pytest.mark.parametrize("call", ["write", "read"])
def test_look_ups_do_not_wait_for_records(server, always_ask, call):
    """Records have connections of their own, which are closed here. The generation is read, too."""
    with opened(server) as tier:
        write(tier, key_of(1), 1)
        record_connections(tier).close()
        with pytest.raises(OSError, match="the tier is closed"):
            write(tier, key_of(2), 2) if call == "write" else read(tier, key_of(1))
        assert exists(tier, [key_of(1), key_of(2)]) == [True, False]


@pytest.mark.parametrize("num_nodes", [1, 3])
def test_a_cluster(num_nodes):
    with servers.cluster(num_nodes) as ports:
        hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
        options = f"valkey://{hosts}?cluster=1&timeout_s=10&connect_timeout_s=10"

        def make(spec):
            return ValkeyTier(dataclasses.replace(spec, options=options))

        for check in (*SHARED_CHECKS, gives_back_what_was_written):
            check(make)
            with contextlib.closing(make(SPEC)) as tier:
                assert not isinstance(record_connections(tier), RecordConnections), "keys are on several nodes"
                tier.clear()


def test_a_cluster_that_the_options_do_not_name(caplog):
    """The markers and records of one node alone could still be found there."""
    with servers.cluster(2) as ports:
        for port in ports:
            options = f"valkey://127.0.0.1:{port}"
            assert refused(options, caplog).endswith("is a node of a cluster; add cluster=true to the options")
            with pytest.raises(ConfigError, match="is a node of a cluster"):
                ValkeyTier.open_inspector(options)


def test_a_server_that_is_no_cluster(server, caplog):
    with opened(server, "&cluster=true"):
        (warning,) = caplog.messages
        assert "is it a cluster?" in warning


def test_a_value_of_another_size_cannot_be_read(server):
    with opened(server) as tier:
        for text in (b"short", bytes(FORMAT.record_nbytes + 1)):
            asker(tier).set(server_key(tier, key_of(1)), text)
            with pytest.raises(OSError, match=f"the server has {len(text)} bytes; expected {FORMAT.record_nbytes}"):
                tier.read(key_of(1), new_record())


# --- a server that is late, dead or full --------------------------------------------------------


def calls(tier):
    record = sealed(tier, key_of(1), 1)
    return [
        lambda: tier.write(key_of(1), record),
        lambda: tier.read(key_of(1), new_record()),
        lambda: tier.delete([key_of(1)]),
        lambda: exists(tier, [key_of(1)]),
        tier.clear,
    ]


def test_a_frozen_server_is_an_error_by_the_timeout(server):
    with opened(server) as tier:
        write(tier, key_of(2), 2)
        server.freeze()
        for call in calls(tier):
            start_s = time.monotonic()
            with pytest.raises(OSError, match="timed out"):
                call()
            assert time.monotonic() - start_s < LATE_S
        server.thaw()
        write(tier, key_of(3), 3)
        assert read(tier, key_of(3)) == payload(3)


def test_memory_of_a_write_that_timed_out_is_not_read_later(server):
    with opened(server) as tier:
        write(tier, key_of(2), 2)
        server.freeze()
        record = sealed(tier, key_of(1), 1)
        with pytest.raises(OSError, match="timed out"):
            tier.write(key_of(1), record)
        record[:] = bytes(len(record))
        server.thaw()
        deadline_s = time.monotonic() + LATE_S
        while not exists(tier, [key_of(1)])[0]:
            assert time.monotonic() < deadline_s
        assert read(tier, key_of(1)) == payload(1)


def test_a_server_that_dies_and_returns_empty(server):
    with opened(server) as tier:
        write(tier, key_of(1), 1)
        server.kill()
        for call in calls(tier)[:-1]:
            with pytest.raises(OSError, match="Error"):
                call()
        server.start()
        with pytest.raises(KeyError):
            read_soon(tier, key_of(1))
        write(tier, key_of(1), 2)
        assert read(tier, key_of(1)) == payload(2)


def test_a_server_that_dies_and_returns_intact(tmp_path):
    durable = ("--appendonly", "yes", "--appendfsync", "always", "--dir", str(tmp_path))
    with servers.running(servers.valkey(*durable)) as server, opened(server) as tier:
        write(tier, key_of(1), 1)
        server.kill()
        server.start()
        assert read_soon(tier, key_of(1)) == payload(1)
        with opened(server) as later:
            assert exists(later, [key_of(1)]) == [True]


def test_a_server_that_dies_while_it_is_read(tmp_path):
    """A read gives the right bytes or an error, and those after a restart are right again."""
    durable = ("--appendonly", "yes", "--appendfsync", "always", "--dir", str(tmp_path))
    with servers.running(servers.valkey(*durable)) as server, opened(server) as tier:
        fill(tier, NUM_CHUNKS)
        outcomes: list[list[bool]] = [[], [], []]
        wrong: list[BaseException] = []
        is_over = threading.Event()

        def work(mine):
            for i in itertools.takewhile(lambda _: not is_over.is_set(), itertools.cycle(range(NUM_CHUNKS))):
                try:
                    assert read(tier, key_of(i)) == payload(i)
                except OSError:
                    mine.append(False)
                except BaseException as e:
                    wrong.append(e)
                    return
                else:
                    mine.append(True)

        def wait_for(outcome):
            num, deadline_s = [len(mine) for mine in outcomes], time.monotonic() + LATE_S
            while not all(outcome in mine[n:] for mine, n in zip(outcomes, num, strict=True)):
                assert not wrong, wrong
                assert time.monotonic() < deadline_s

        threads = [threading.Thread(target=work, args=(mine,)) for mine in outcomes]
        for thread in threads:
            thread.start()
        try:
            for _ in range(3):
                wait_for(True)
                server.kill()
                wait_for(False)
                server.start()
            wait_for(True)
        finally:
            is_over.set()
            for thread in threads:
                thread.join(LATE_S)


def read_soon(tier, key):
    """Reads, once the client has found the server again."""
    deadline_s = time.monotonic() + LATE_S
    while True:
        try:
            return read(tier, key)
        except OSError:
            assert time.monotonic() < deadline_s


def fill(tier, num_chunks):
    for i in range(num_chunks):
        write(tier, key_of(i), i)


def test_a_full_server_refuses_and_goes_on(caplog):
    with servers.running(servers.valkey(maxmemory="4mb", policy="noeviction")) as server, opened(server) as tier:
        assert "maxmemory-policy noeviction" in caplog.text
        with pytest.raises(OSError, match="OOM"):
            fill(tier, 1000)
        assert read(tier, key_of(0)) == payload(0)
        tier.delete([key_of(i) for i in range(1000)])
        write(tier, key_of(0), 5)
        assert read(tier, key_of(0)) == payload(5)


def test_a_full_server_that_evicts_nothing_is_cleared(always_ask):
    """It takes the name of a generation once some of the records before it are deleted. Other models keep theirs."""
    with (
        servers.running(servers.valkey(policy="noeviction")) as server,
        opened(server) as tier,
        opened(server, worker_id=2) as other,
    ):
        write(other, key_of(0), 7)
        fill(tier, 60)
        servers.make_full(server.port)
        tier.clear()
        with pytest.raises(KeyError):
            read(tier, key_of(0))
        deadline_s = time.monotonic() + 30
        while True:  # the server frees memory in the background
            try:
                write(tier, key_of(0), 5)
                break
            except OSError:
                assert time.monotonic() < deadline_s
        assert read(tier, key_of(0)) == payload(5)
        assert asker(other).exists([server_key(other, key_of(0))]) == 1


def test_a_replica_alone_is_refused(server, caplog):
    with servers.running(servers.valkey("--replicaof", "127.0.0.1", str(server.port))) as replica:
        assert "No primary node found" in refused(url(replica), caplog)


def test_a_server_that_is_full_at_the_start_is_used_once_it_has_room(caplog, always_ask):
    with servers.running(servers.valkey(maxmemory="1kb", policy="noeviction")) as server, opened(server) as tier:
        (warning,) = caplog.messages
        assert "accepts no records now (RequestError: OOM" in warning
        for _ in range(2):
            with pytest.raises(OSError, match="OOM"):
                write(tier, key_of(1), 1)
        servers.ask(server.port, "CONFIG", "SET", "maxmemory", "64mb")
        write(tier, key_of(1), 1)
        assert read(tier, key_of(1)) == payload(1)


def test_what_the_server_evicts_is_missing(caplog):
    with servers.running(servers.valkey(maxmemory="4mb")) as server, opened(server) as tier:
        assert not caplog.text
        fill(tier, 600)
        found = exists(tier, [key_of(i) for i in range(600)])
        assert 0 < sum(found) < 600
        with pytest.raises(KeyError):
            read(tier, key_of(found.index(False)))
        assert read(tier, key_of(599)) == payload(599)


# --- start --------------------------------------------------------------------------------------


def test_a_server_that_is_not_there_yet(server, caplog):
    server.kill()
    with opened(server) as tier:
        (warning,) = caplog.messages
        assert "does not answer" in warning
        assert "\n" not in warning
        with pytest.raises(OSError, match="Error"):
            read(tier, key_of(1))
        server.start()
        with pytest.raises(KeyError):
            read_soon(tier, key_of(1))
        write(tier, key_of(1), 1)
        assert read(tier, key_of(1)) == payload(1)


def test_a_server_that_still_loads_its_data_is_used_once_it_has(tmp_path, caplog, always_ask):
    slow = ("--key-load-delay", "50000", "--loading-process-events-interval-bytes", "1024", "--dir", str(tmp_path))
    with servers.running(servers.valkey(*slow)) as server:
        with opened(server) as tier:
            fill(tier, 400)
        servers.ask(server.port, "SAVE")
        server.kill()
        server.start()
        with opened(server) as tier:
            (warning,) = caplog.messages
            assert "does not answer" in warning
            servers.ask(server.port, "CONFIG", "SET", "key-load-delay", "0")
            assert read_soon(tier, key_of(399)) == payload(399)


def refused(options, caplog):
    with pytest.raises(ConfigError) as caught:
        ValkeyTier(dataclasses.replace(SPEC, options=options))
    assert "\n" not in str(caught.value)
    assert "SECRET" not in str(caught.value) + caplog.text
    return str(caught.value)


def test_passwords(tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    (tmp_path / "right").write_text("SECRET-right\n")
    (tmp_path / "wrong").write_text("SECRET-wrong\n")
    with servers.running(servers.valkey("--requirepass", "SECRET-right")) as server:
        assert "NOAUTH" in refused(url(server), caplog)
        assert "WRONGPASS" in refused(url(server, f"&password_file={tmp_path}/wrong"), caplog)
        assert "WRONGPASS" in refused(url(server, f"&user=kv&password_file={tmp_path}/right"), caplog)
        with opened(server, f"&password_file={tmp_path}/right") as tier:
            with pytest.raises(KeyError):
                read(tier, key_of(1))
            asker(tier).custom_command(["ACL", "SETUSER", "kv", "on", ">SECRET-right", "~tpu_offload:*", "+@all"])
            asker(tier).custom_command(["ACL", "SETUSER", "no", "on", ">SECRET-right", "~other:*", "+@all"])
            write(tier, key_of(1), 1)
        with opened(server, f"&user=kv&password_file={tmp_path}/right") as tier:
            assert read(tier, key_of(1)) == payload(1)
        assert "No permissions to access a key" in refused(
            url(server, f"&user=no&password_file={tmp_path}/right"), caplog
        )
        with opened(server, f"&password_file={tmp_path}/right") as tier:
            for command in ("unlink", "get", "set", "info"):
                rules = [">SECRET-right", "~tpu_offload:*", "+@all", f"-{command}"]
                asker(tier).custom_command(["ACL", "SETUSER", f"no-{command}", "on", *rules])
        for command in ("unlink", "get", "set", "info"):
            line = refused(url(server, f"&user=no-{command}&password_file={tmp_path}/right"), caplog)
            assert f"no permissions to run the '{command}' command" in line
    assert "SECRET" not in caplog.text


@pytest.mark.parametrize("command", ["touch", "exists"])
def test_one_of_two_commands_is_enough_for_lookups(server, tmp_path, caplog, command):
    (tmp_path / "password").write_text("SECRET\n")
    with opened(server) as tier:
        rules = [">SECRET", "~tpu_offload:*", "+info", "+get", "+set", "+unlink", f"+{command}"]
        asker(tier).custom_command(["ACL", "SETUSER", f"may-{command}", "on", *rules])
        with opened(server, f"&user=may-{command}&password_file={tmp_path}/password") as other:
            write(other, key_of(1), 1)
            assert exists(other, [key_of(1), key_of(2)]) == [True, False]
    lines = [line.getMessage() for line in caplog.records if "TOUCH" in line.getMessage()]
    assert len(lines) == (command == "exists"), "it is said once"


def test_a_user_who_loses_a_permission_looks_up_all_the_same(server, tmp_path, caplog):
    (tmp_path / "password").write_text("SECRET\n")
    with opened(server) as tier:
        asker(tier).custom_command(["ACL", "SETUSER", "kv", "on", ">SECRET", "~tpu_offload:*", "+@all"])
        with opened(server, f"&user=kv&password_file={tmp_path}/password") as other:
            write(other, key_of(1), 1)
            asker(tier).custom_command(["ACL", "SETUSER", "kv", "-touch"])
            assert exists(other, [key_of(1), key_of(2)]) == [True, False]
            asker(tier).custom_command(["ACL", "SETUSER", "kv", "-exists"])
            with pytest.raises(OSError, match="no permissions to run the 'exists' command"):
                exists(other, [key_of(1)])
    assert caplog.text.count("may not TOUCH") == 1


def test_a_lookup_counts_as_a_use(server):
    with opened(server) as tier:
        write(tier, key_of(1), 1)
        name = server_key(tier, key_of(1))
        while not asker(tier).object_idletime(name):
            time.sleep(0.1)
        assert exists(tier, [key_of(1)]) == [True]
        assert asker(tier).object_idletime(name) == 0


def test_a_password_that_the_server_does_not_need(server, tmp_path):
    (tmp_path / "password").write_text("SECRET\n")
    with opened(server, f"&password_file={tmp_path}/password") as tier:
        write(tier, key_of(1), 1)
        assert read(tier, key_of(1)) == payload(1)


def says(text):
    def script(peer):
        peer.receive()
        peer.socket.sendall(text)

    return script


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (b"-DENIED Valkey is running in protected mode\r\n", "DENIED"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "the server answers HTTP/1.1 400 Bad Request"),
    ],
)
def test_what_a_server_says_before_it_ends_the_connection(text, shown, caplog):
    with contextlib.closing(FakeServer(says(text))) as server:
        assert shown in refused(url(server), caplog)
        with pytest.raises(OSError, match=re.escape(shown)):
            list(ValkeyTier.open_inspector(url(server)).scan())


def resets(peer):
    peer.receive()
    peer.reset()


@pytest.mark.parametrize(
    ("script", "said"), [(says(b""), "the server closed the connection"), (resets, "reset by peer")]
)
def test_a_server_that_ends_connections_at_once(script, said, caplog):
    """As a proxy does in front of a server that is not there, and one with TLS."""
    with contextlib.closing(FakeServer(script)) as server, opened(server):
        (warning,) = caplog.messages
        assert said in warning
        assert warning.endswith("it is used once it answers; does it expect TLS?")


@pytest.mark.parametrize(
    "answer", [b"$-1\r\n", b"-LOADING the dataset\r\n", b"-MASTERDOWN no link\r\n", b"-READONLY a replica\r\n"]
)
def test_a_server_that_comes_back_while_it_is_asked_why(answer, caplog):
    """It has ended the connection of valkey-glide, and then answers, or will do so soon: that is no refusal."""

    def script(peer):
        if peer.receive()[:1] == [b"GET"]:
            peer.socket.sendall(answer)

    with contextlib.closing(FakeServer(script)) as server, opened(server):
        (warning,) = caplog.messages
        assert "it is used once it" in warning


@pytest.mark.parametrize("options", ["valkeys://127.0.0.1:{}", "valkey://127.0.0.1:{}?cluster=true"])
def test_a_proxy_with_tls_or_a_cluster_that_ends_connections_at_once(options, caplog):
    def script(peer):
        peer.receive_part(1)

    with contextlib.closing(FakeServer(script)) as server:
        tier = ValkeyTier(dataclasses.replace(SPEC, options=options.format(server.port)))
        tier.close()
        (warning,) = caplog.messages
        assert "it is used once it answers" in warning


def test_a_server_that_has_too_many_clients_is_used_once_it_has_not(caplog):
    with servers.running(servers.valkey("--maxclients", "2")) as server, contextlib.ExitStack() as held:
        for _ in range(2):
            client = held.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            client.sendall(b"PING\r\n")
            assert client.recv(100) == b"+PONG\r\n"
        with opened(server) as tier:
            (warning,) = caplog.messages
            assert "it is used once it" in warning
            held.close()
            with pytest.raises(KeyError):
                read_soon(tier, key_of(1))


def test_a_server_without_tls(server, caplog):
    tier = ValkeyTier(dataclasses.replace(SPEC, options=url(server, scheme="valkeys")))
    (warning,) = caplog.messages
    assert warning.endswith("does it have TLS?")
    with pytest.raises(OSError, match="Error"):
        read(tier, key_of(1))
    tier.close()


def make_certificate(folder, name):
    """A certificate that is its own authority, and its key."""
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    (folder / f"{name}.pem").write_bytes(certificate.public_bytes(pem))
    (folder / f"{name}.key").write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )


def test_tls(server, tmp_path, caplog):
    make_certificate(tmp_path, "own")
    make_certificate(tmp_path, "other")
    with servers.tls_proxy(server.port, tmp_path / "own.pem", tmp_path / "own.key") as port:
        proxied = servers.Server(lambda port: ())
        proxied.port = port
        options = url(proxied, f"&ca_file={tmp_path}/own.pem&ttl_s=1000", scheme="valkeys")
        with contextlib.closing(ValkeyTier(dataclasses.replace(SPEC, options=options))) as tier:
            assert not isinstance(record_connections(tier), RecordConnections), "it has no TLS"
            write(tier, key_of(1), 1)
            assert read(tier, key_of(1)) == payload(1)
            assert 900 < asker(tier).ttl(server_key(tier, key_of(1))) <= 1000
            asker(tier).set(server_key(tier, key_of(1)), b"short")
            with pytest.raises(OSError, match="the server has 5 bytes"):
                tier.read(key_of(1), new_record())
        for wrong in ("", f"&ca_file={tmp_path}/other.pem"):
            assert "certificate" in refused(url(proxied, wrong, scheme="valkeys"), caplog)


def test_a_server_that_does_not_accept_the_clients_certificate(server, tmp_path, caplog):
    """It has TLS. What it says comes after the handshake, and valkey-glide does not tell it."""
    for name in ("own", "client", "other"):
        make_certificate(tmp_path, name)

    def options(name):
        mine = f"&cert_file={tmp_path}/{name}.pem&key_file={tmp_path}/{name}.key" if name else ""
        return url(proxied, f"&ca_file={tmp_path}/own.pem{mine}", scheme="valkeys")

    with servers.tls_proxy(
        server.port, tmp_path / "own.pem", tmp_path / "own.key", clients=tmp_path / "client.pem"
    ) as port:
        proxied = servers.Server(lambda port: ())
        proxied.port = port
        for name in ("", "other"):
            caplog.clear()
            ValkeyTier(dataclasses.replace(SPEC, options=options(name))).close()
            (warning,) = caplog.messages
            assert warning.endswith("accept the client's certificate (cert_file, key_file)?")
            with pytest.raises(OSError, match="accept the client's certificate"):
                ValkeyTier.open_inspector(options(name))
        with contextlib.closing(ValkeyTier(dataclasses.replace(SPEC, options=options("client")))) as tier:
            write(tier, key_of(1), 1)
            assert read(tier, key_of(1)) == payload(1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "expected valkey://, valkeys://, redis://, rediss://, such as valkey://host:6379"),
        ("/mnt/disk", "expected valkey://"),
        ("s3://bucket", "expected valkey://"),
        ("valkey://", "such as valkey://host:6379"),
        ("valkey://host:0", "such as valkey://host:6379"),
        ("valkey://host:x,other", "such as valkey://host:6379"),
        ("valkey://host:1#x", "expected valkey://"),
        ("valkey://[::1", "is not a URL"),
        ("valkey://bob:SECRET@host:1", "has a user or password before the host"),
        ("valkey://:x/SECRET@host:1", "has a user or password before the host"),
        ("valkey://:x?SECRET@host:1", "has a user or password before the host"),
        ("valkey://:x#SECRET@host:1", "has a user or password before the host"),
        ("valkey://host:1?timeout=1", "has no option 'timeout'; did you mean timeout_s?"),
        ("valkey://host:1?password=SECRET", "has no option 'password'"),
        ("valkey://host:1?timeout_s=0", "timeout_s='0'; expected a number from 0.01 to 3600"),
        ("valkey://host:1?timeout_s=nan", "expected a number"),
        ("valkey://host:1?timeout_s=1&timeout_s=2", "an option is given twice"),
        ("valkey://host:1?cluster=maybe", "cluster='maybe'; expected true or false"),
        ("valkey://host:1?timeout_s", "is not a URL with options"),
        ("valkey://host:1/a", "expected the number of a database"),
        ("valkey://host:1/9999999999", "expected the number of a database"),
        ("valkey://host:1/1?cluster=1", "none for a cluster"),
        ("valkey://host:1?user=bob", "without password_file"),
        ("valkey://host:1?password_file=/no/such/file", "a file that can be read"),
        ("valkey://host:1?password_file=/dev/null", "password_file is empty"),
        ("valkey://host:1?user=bob&password_file=/dev/null", "password_file is empty"),
        ("valkeys://host:1?ca_file=/dev/null", "ca_file has no certificate"),
        (f"valkeys://host:1?cert_file={__file__}", "cert_file and key_file belong together"),
        (f"valkeys://host:1?key_file={__file__}", "cert_file and key_file belong together"),
        (f"valkey://host:1?key_file={__file__}", "certificates without TLS"),
        ("valkey://no-such-host.invalid:1", "failed to lookup address"),
    ],
)
def test_wrong_options_are_one_clear_line(options, message, caplog):
    text = refused(options, caplog)
    assert text.startswith("TPU_OFFLOAD_STORAGE_OPTIONS")
    assert message in text
