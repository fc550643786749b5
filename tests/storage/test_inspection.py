"""What tools see of stores, whoever has written them: listing, damage of every kind, clearing, and engines beside."""

import contextlib
import fcntl
import itertools
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import obstore
import pytest
from glide_sync import GlideClient

from tests.ports import free_port
from tests.storage import servers
from tests.storage.conformance import FORMAT, NUM_CHUNKS, SPEC, new_record, payload, read
from tests.storage.objects import wait_until_swept
from tests.storage.stores import (
    FINGERPRINTS,
    fill,
    finds_nothing,
    holdings,
    num_current,
    open_tier,
    put,
    short_key,
    survey,
    verdicts,
)
from tpu_offload.errors import ConfigError
from tpu_offload.storage import Survey, Verdict, Verification, open_inspector, sample, valkey, verify
from tpu_offload.storage import file as file_module
from tpu_offload.storage.format import PAGE_NBYTES, RecordFormat
from tpu_offload.storage.object_store import open_store
from tpu_offload.storage.url_options import UrlOptions
from tpu_offload.storage.valkey import connector
from tpu_offload.storage.valkey_server import EXAMPLE, SCHEMES, server_options

ROOT = Path(__file__).parents[2]
NBYTES = SPEC.record_nbytes
NUMBERS = itertools.count()


@pytest.fixture(autouse=True)
def credentials(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "kv")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "SECRET")


@pytest.fixture(scope="module")
def s3_server():
    with servers.running(servers.moto) as server:
        yield server


@pytest.fixture(scope="module")
def valkey_server():
    with servers.running(servers.valkey()) as server:
        yield server


@pytest.fixture(scope="module")
def rclone_server(tmp_path_factory):
    """An S3 server that answers a request for a range with the whole object."""
    with servers.running(servers.rclone(tmp_path_factory.mktemp("objects"))) as server:
        yield server


def s3_url(server):
    bucket = f"bucket-{next(NUMBERS)}"
    servers.make_bucket(server.port, bucket)
    return f"s3://{bucket}/pre?endpoint=http://127.0.0.1:{server.port}&region=us-east-1&allow_http=1&retries=0"


def valkey_url(server):
    return f"valkey://127.0.0.1:{server.port}/{next(NUMBERS) % 16}?timeout_s=2"


@pytest.fixture(params=["file", "file://", "s3", "rclone", "valkey"])
def store(request, tmp_path):
    """The options of an empty store."""
    if request.param == "file":
        return str(tmp_path / "kv")
    if request.param == "file://":
        return f"file://{tmp_path}/kv"
    if request.param == "s3":
        return s3_url(request.getfixturevalue("s3_server"))
    if request.param == "rclone":
        return s3_url(request.getfixturevalue("rclone_server"))
    options = valkey_url(request.getfixturevalue("valkey_server"))
    _client(options).flushdb()
    return options


WITH_NAMES = pytest.mark.parametrize("store", ["file://", "s3", "rclone", "valkey"], indirect=True)
"""Stores where a record has a name; in files it has a place."""


def _client(options):
    client = connector(server_options(UrlOptions(options, schemes=SCHEMES, example=EXAMPLE)))()
    assert isinstance(client, GlideClient)
    return client


@contextlib.contextmanager
def inspected(options):
    inspector = open_inspector(options)
    try:
        yield inspector
    finally:
        inspector.close()


@pytest.fixture
def directory(tmp_path):
    """A file tier's directory with four chunks of worker 1, and its segment."""
    fill(str(tmp_path), 4)
    return tmp_path / "worker-1"


def change(path, offset, data):
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def flip(path, offset, bit=0):
    with path.open("rb") as file:
        file.seek(offset)
        (byte,) = file.read(1)
    change(path, offset, bytes([byte ^ 1 << bit]))


# --- any store ------------------------------------------------------------------------------------


def test_all_models_and_workers_are_listed(store):
    one_model = store.startswith(os.sep)  # a file tier has one at a time
    fill(store, 3)
    fill(store, 2, worker_id=0)
    expected = [(FINGERPRINTS[0], 0, True, 2), (FINGERPRINTS[0], 1, True, 3)]
    if not one_model:
        fill(store, 1, fingerprint=FINGERPRINTS[1])
        expected = [(FINGERPRINTS[1], 1, True, 1), *expected]
    with inspected(store) as inspector:
        assert holdings(inspector) == expected
        found = survey(inspector)
        assert (found.num_foreign, found.damages) == (0, [])
        assert found.nbytes == found.num_records * NBYTES
        records = list(Survey().records(inspector.scan()))
        keys = {record.key for record in records if record.generation.worker_id == 1}
        assert keys == {short_key(i) for i in range(3)}
        assert verdicts(inspector) == verdicts(inspector, headers_only=True) == {Verdict.GOOD: len(records)}


def test_ages_are_given_where_they_are_known(store):
    fill(store, 1)
    with inspected(store) as inspector:
        ((of, holding),) = survey(inspector).holdings.items()
    is_known = not store.startswith("valkey")
    assert ((holding.newest_s or of.last_write_s) is not None) == is_known


def test_what_a_reset_left_is_of_another_generation(store):
    tier = open_tier(store)
    for i in range(3):
        put(tier, short_key(i), i)
    stays = not store.startswith(("file:", "s3"))  # an object tier deletes it
    tier.clear()
    put(tier, short_key(7), 7)
    tier.close()
    with inspected(store) as inspector:
        found = verdicts(inspector)
        assert found.pop(Verdict.GOOD) == 1
        assert set(found) <= {Verdict.OTHER_GENERATION}
        assert not stays or sum(found.values()) in (2, 3), "a file tier has used one of the slots"


def test_after_clear_no_engine_finds_anything(store):
    fill(store, 3)
    fill(store, 2, worker_id=0)
    num_deleted: list[int] = []
    with inspected(store) as inspector:
        inspector.check_unused()
        inspector.clear(num_deleted.append)
        assert sum(num_deleted) == 5
        assert survey(inspector).num_records == 0
    for _ in range(2):
        assert finds_nothing(store, 3)
        assert finds_nothing(store, 2, worker_id=0)
    fill(store, 1)
    with inspected(store) as inspector:
        assert verdicts(inspector) == {Verdict.GOOD: 1}


@WITH_NAMES
def test_an_old_generation_is_never_taken_up_again(store):
    """Records that come back from before a clear, by a backup or a write that was late, are not found."""
    fill(store, 1)
    with inspected(store) as inspector:
        (record,) = Survey().records(inspector.scan())
        data = inspector.read(record, NBYTES)
        inspector.clear(lambda num: None)
    if store.startswith("valkey"):
        _client(store).set(record.place.removesuffix(record.key.hex()).encode() + record.key, data)
    else:
        obstore.put(open_store(store)[0], record.place, data)
    with inspected(store) as inspector:
        assert verdicts(inspector) == {Verdict.OTHER_GENERATION: 1}
    assert finds_nothing(store, 1)


def test_a_clear_beside_an_engine_that_shares_a_server(valkey_server, monkeypatch):
    monkeypatch.setattr(valkey, "_ASK_S", 0.0)
    options = valkey_url(valkey_server)
    _client(options).flushdb()
    engine = open_tier(options)
    put(engine, short_key(1), 1)
    with inspected(options) as inspector:
        assert inspector.is_shared
        inspector.clear(lambda num: None)
    with pytest.raises(KeyError):
        read(engine, short_key(1))
    put(engine, short_key(2), 2)
    assert read(engine, short_key(2)) == payload(2), "it goes on in the new generation"
    engine.close()


def test_a_full_server_that_evicts_nothing_is_cleared():
    with servers.running(servers.valkey(policy="noeviction")) as server:
        url = f"valkey://127.0.0.1:{server.port}?timeout_s=60"
        deleted: list[int] = []
        for worker_id in (0, 1):
            fill(url, 60, worker_id=worker_id)
        servers.make_full(server.port)
        with contextlib.closing(open_inspector(url)) as inspector:
            num_stored = survey(inspector).num_records
            inspector.clear(deleted.append)
            assert survey(inspector).num_records == 0
        assert sum(deleted) == num_stored == 120


def test_a_server_where_no_file_can_be_written(monkeypatch):
    """As in a container with a read-only root."""
    with servers.running(servers.valkey()) as server:
        url = f"valkey://127.0.0.1:{server.port}"
        fill(url, 3)
        monkeypatch.setattr(tempfile, "tempdir", "/no/such/directory")
        with contextlib.closing(open_inspector(url)) as inspector:
            assert num_current(inspector) == 3


def test_a_cluster(tmp_path):
    """Of one node: the client's calls are other ones."""
    settings = ("--cluster-enabled", "yes", "--dir", str(tmp_path), "--cluster-require-full-coverage", "no")
    with servers.running(servers.valkey(*settings)) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
            connection.sendall(b"CLUSTER ADDSLOTSRANGE 0 16383\r\n")
            assert connection.recv(100).startswith(b"+OK")
        options = f"valkey://127.0.0.1:{server.port}?cluster=true&timeout_s=5&connect_timeout_s=5"
        fill(options, 5)
        fill(options, 3, fingerprint=FINGERPRINTS[1])
        with inspected(options) as inspector:
            assert holdings(inspector) == [(FINGERPRINTS[1], 1, True, 3), (FINGERPRINTS[0], 1, True, 5)]
            assert verdicts(inspector) == {Verdict.GOOD: 8}
            _, (facts,) = inspector.facts()
            assert facts["maxmemory_policy"] == "allkeys-lru"
            inspector.clear(lambda num: None)
            assert survey(inspector).num_records == 0
        assert finds_nothing(options, 5)


def test_a_clear_beside_an_engine_of_an_object_tier(tmp_path):
    """It cannot be seen. It finds nothing any more; what it writes once it has noticed that, its next start finds."""
    options = f"file://{tmp_path}/kv"
    engine = open_tier(options)
    put(engine, short_key(1), 1)
    with inspected(options) as inspector:
        inspector.clear(lambda num: None)
    put(engine, short_key(3), 3)  # not noticed yet
    with pytest.raises(KeyError):
        read(engine, short_key(1))
    put(engine, short_key(2), 2)
    assert read(engine, short_key(2)) == payload(2)
    wait_until_swept()
    assert len(list((tmp_path / "kv").rglob("*.kv"))) == 1, "what it had written before it noticed is deleted"
    engine.close()
    engine = open_tier(options)
    assert list(engine.stored_keys()) == [short_key(2)]
    engine.close()


# --- damage -----------------------------------------------------------------------------------------


@WITH_NAMES
def test_damage_in_objects_and_values_is_counted(store):
    """By kind: a flipped bit in a payload and in a header, a truncated one, another key's, another version's."""
    fill(store, 6)
    with inspected(store) as inspector:
        records = sorted(Survey().records(inspector.scan()), key=lambda record: record.key)
        datas = [bytearray(inspector.read(record, NBYTES)) for record in records]
        datas[0][PAGE_NBYTES + 77] ^= 4
        datas[1][24] ^= 1
        del datas[2][-PAGE_NBYTES:]
        datas[3] = bytearray(datas[5])
        datas[4][8] = 99
        for record, data in zip(records, datas, strict=True):
            if store.startswith("valkey"):
                name = record.place.removesuffix(record.key.hex()).encode() + record.key
                _client(store).set(name, bytes(data))
            else:
                obstore.put(open_store(store)[0], record.place, bytes(data))
        damaged = {Verdict.DAMAGED: 3, Verdict.MISPLACED: 1, Verdict.OTHER_VERSION: 1, Verdict.GOOD: 1}
        assert verdicts(inspector) == damaged
        by_header = {Verdict.DAMAGED: 1, Verdict.MISPLACED: 1, Verdict.OTHER_VERSION: 1, Verdict.GOOD: 3}
        assert verdicts(inspector, headers_only=True) == by_header


def test_what_is_not_ours_is_counted_and_stays(store):
    fill(store, 1)
    if store.startswith(os.sep):
        (Path(store) / "notes.txt").write_text("12345")
        (Path(store) / "worker-1" / "core").write_text("123")
    elif store.startswith("valkey"):
        client = _client(store)
        client.set(b"tpu_offload:strange", b"12345")
        client.set(b"tpu_offload:\xff\x00", b"123")
        client.set(b"another", b"of another program")
    else:
        opened = open_store(store)[0]
        obstore.put(opened, "notes.txt", b"12345")
        obstore.put(opened, f"{FINGERPRINTS[0]}/1/x.kv", b"123")
    with inspected(store) as inspector:
        for _ in range(2):
            found = survey(inspector)
            assert (found.num_foreign, found.foreign_nbytes) == (2, 8)
            inspector.clear(lambda num: None)


@pytest.mark.parametrize("seed", range(3))
def test_every_flipped_bit_of_a_file_is_found(tmp_path, directory, seed):
    """Header or payload; padding has no bytes that count."""
    rng = random.Random(seed)
    with inspected(str(tmp_path)) as inspector:
        for _ in range(40):
            slot = rng.randrange(4)
            place = rng.choice([rng.randrange(PAGE_NBYTES), PAGE_NBYTES + rng.randrange(FORMAT.payload_nbytes)])
            offset = slot * NBYTES + place
            bit = rng.randrange(8)
            flip(directory / "segment-000.kv", offset, bit)
            found = verdicts(inspector)
            assert found.pop(Verdict.GOOD) == 3
            assert set(found) <= {Verdict.DAMAGED, Verdict.OTHER_VERSION}
            flip(directory / "segment-000.kv", offset, bit)
        assert verdicts(inspector) == {Verdict.GOOD: 4}


def test_a_truncated_or_missing_segment(tmp_path, monkeypatch):
    monkeypatch.setattr(file_module, "_SEGMENT_NBYTES", 2 * NBYTES)
    fill(str(tmp_path), 6)
    segments = sorted((tmp_path / "worker-1").glob("*.kv"))
    os.truncate(segments[0], NBYTES + 100)
    segments[1].unlink()
    with inspected(str(tmp_path)) as inspector:
        assert verdicts(inspector) == {Verdict.GOOD: 3, Verdict.DAMAGED: 3}


def test_slots_that_were_swapped_and_files_of_others(tmp_path, directory):
    segment = directory / "segment-000.kv"
    data = segment.read_bytes()
    change(segment, 0, data[NBYTES : 2 * NBYTES] + data[:NBYTES])
    other = RecordFormat(fingerprint=b"x" * 16, worker_id=1, num_shards=2, payload_nbytes=FORMAT.payload_nbytes)
    with inspected(str(tmp_path)) as inspector:
        (generation,) = survey(inspector).holdings
        record = new_record()
        other.seal(record, short_key(2), generation=int(generation.name, 16))
        change(segment, 2 * NBYTES, record)
        assert verdicts(inspector) == {Verdict.MISPLACED: 3, Verdict.GOOD: 1}


def test_records_that_are_older_than_their_hints(tmp_path, directory):
    """As a power failure may leave them."""
    data = (directory / "segment-000.kv").read_bytes()
    tier = open_tier(str(tmp_path))
    tier.clear()
    for i in range(4):
        put(tier, short_key(i), i)
    tier.close()
    change(directory / "segment-000.kv", 0, data)
    with inspected(str(tmp_path)) as inspector:
        assert holdings(inspector) == [(FINGERPRINTS[0], 1, True, 4)]
        assert verdicts(inspector) == {Verdict.OTHER_GENERATION: 4}


def test_a_damaged_directory_is_named(tmp_path, directory):
    flip(directory / "directory.bin", 100)
    with inspected(str(tmp_path)) as inspector:
        found = survey(inspector)
        assert [damage.place for damage in found.damages] == ["worker-1/directory.bin"]
        inspector.clear(lambda num: None)
        assert not survey(inspector).damages
    assert finds_nothing(str(tmp_path), 4)


def test_a_directory_of_another_worker_is_named(tmp_path, directory):
    shutil.copytree(directory, tmp_path / "worker-2")
    with inspected(str(tmp_path)) as inspector:
        found = survey(inspector)
        assert [(damage.place, damage.what) for damage in found.damages] == [("worker-2/directory.bin", "of worker 1")]
        assert found.num_records == 4
    assert finds_nothing(str(tmp_path), 4, worker_id=2)


def test_of_two_hints_with_one_key_the_later_counts(tmp_path, directory):
    hints = (directory / "directory.bin").read_bytes()[PAGE_NBYTES:]
    change(directory / "directory.bin", PAGE_NBYTES + 4 * 64, hints[:64])
    with inspected(str(tmp_path)) as inspector:
        assert survey(inspector).num_records == 4
        _, (facts,) = inspector.facts()
        assert (facts["num_slots"], facts["num_used_slots"], facts["num_free_slots"]) == (NUM_CHUNKS, 4, NUM_CHUNKS - 4)


def test_keys_that_are_longer_than_a_hint(tmp_path):
    tier = open_tier(str(tmp_path))
    keys = [bytes(100) + bytes([i]) * 50 for i in range(3)]
    for i, key in enumerate(keys):
        put(tier, key, i)
    tier.close()
    with inspected(str(tmp_path)) as inspector:
        assert sorted(record.key for record in Survey().records(inspector.scan())) == keys
        assert verdicts(inspector) == {Verdict.GOOD: 3}
        segment = tmp_path / "worker-1" / "segment-000.kv"
        flip(segment, 80)
        assert verdicts(inspector) == {Verdict.GOOD: 2, Verdict.DAMAGED: 1}


# --- beside an engine -------------------------------------------------------------------------------


def test_a_running_engine_is_seen_and_keeps_its_chunks(tmp_path):
    tier = open_tier(str(tmp_path))
    put(tier, short_key(1), 1)
    with inspected(str(tmp_path)) as inspector:
        assert verdicts(inspector) == {Verdict.GOOD: 1}
        _, (facts,) = inspector.facts()
        assert facts["locked_by"] == f"pid {os.getpid()}"
        for refused in (inspector.check_unused, lambda: inspector.clear(lambda num: None)):
            with pytest.raises(ConfigError, match=rf"worker-1 is used by a running engine \(pid {os.getpid()}\)"):
                refused()
        assert read(tier, short_key(1)) == payload(1)
        tier.close()
        _, (facts,) = inspector.facts()
        assert facts["locked_by"] is None
    tier = open_tier(str(tmp_path))
    assert read(tier, short_key(1)) == payload(1)
    tier.close()


def test_no_worker_is_cleared_while_one_is_used(tmp_path):
    fill(str(tmp_path), 2, worker_id=0)
    tier = open_tier(str(tmp_path), worker_id=3)
    with inspected(str(tmp_path)) as inspector:
        with pytest.raises(ConfigError, match="worker-3 is used"):
            inspector.clear(lambda num: None)
        assert verdicts(inspector) == {Verdict.GOOD: 2}
    tier.close()


def test_an_engine_that_starts_while_a_tool_looks_waits_an_instant(tmp_path, monkeypatch):
    """A tool has the lock for the first try of the engine."""
    fill(str(tmp_path), 1)
    fd = os.open(tmp_path / "worker-1" / "lock", os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_SH)
    monkeypatch.setattr(time, "sleep", lambda seconds: fcntl.flock(fd, fcntl.LOCK_UN))
    open_tier(str(tmp_path)).close()
    os.close(fd)


def test_a_record_that_was_being_written_is_read_again(tmp_path, directory, monkeypatch):
    segment, good = directory / "segment-000.kv", (directory / "segment-000.kv").read_bytes()
    flip(segment, PAGE_NBYTES + 1)
    with inspected(str(tmp_path)) as inspector:
        verification = Verification(inspector, headers_only=False)
        seen, read = set(), inspector.read

        def written_meanwhile(record, nbytes):
            if record in seen:
                change(segment, 0, good)
            seen.add(record)
            return read(record, nbytes)

        monkeypatch.setattr(inspector, "read", written_meanwhile)
        verification.run(Survey().records(inspector.scan()), on_record=lambda: None, stops=lambda: False)
        assert +verification.counts == {Verdict.GOOD: 4}
        assert not verification.suspects


def test_a_record_that_was_deleted_or_replaced_meanwhile_is_gone(tmp_path):
    tier = open_tier(str(tmp_path))
    for i in range(NUM_CHUNKS):
        put(tier, short_key(i), i)
    with inspected(str(tmp_path)) as inspector:
        records = list(Survey().records(inspector.scan()))
        tier.delete([short_key(0), short_key(1)])
        put(tier, short_key(100), 100)
        verification = Verification(inspector, headers_only=False)
        verification.run(records, on_record=lambda: None, stops=lambda: False)
        assert +verification.counts == {Verdict.GOOD: NUM_CHUNKS - 2, Verdict.GONE: 2}
    tier.close()


# --- verification -----------------------------------------------------------------------------------


def test_reads_that_fail_in_a_row_end_it(tmp_path, directory, monkeypatch):
    fill(str(tmp_path), NUM_CHUNKS, worker_id=0)
    with inspected(str(tmp_path)) as inspector:

        def fail(record, nbytes):
            raise OSError("dead")

        monkeypatch.setattr(inspector, "read", fail)
        with pytest.raises(OSError, match=r"8 reads in a row failed, .*dead.*gave up after 8 records"):
            verdicts(inspector)
        num = itertools.count()
        monkeypatch.setattr(
            inspector, "read", lambda record, nbytes: fail(record, nbytes) if next(num) % 7 else bytes(NBYTES)
        )
        monkeypatch.setattr(verify, "NUM_THREADS", 1)
        found = verdicts(inspector)
        assert set(found) == {Verdict.UNREADABLE, Verdict.DAMAGED}


def test_it_holds_few_records_at_a_time(tmp_path, directory):
    """It asks for no more than it can hold, however many there are."""
    with inspected(str(tmp_path)) as inspector:
        (first, *_) = Survey().records(inspector.scan())
        num_given = num_done = most = 0

        def records():
            nonlocal num_given, most
            for _ in range(200):
                num_given += 1
                most = max(most, num_given - num_done)
                yield first

        def on_record():
            nonlocal num_done
            num_done += 1

        Verification(inspector, headers_only=False).run(records(), on_record=on_record, stops=lambda: False)
        assert num_done == 200
        assert most <= 2 * verify.NUM_THREADS + 1


def test_it_stops_when_it_is_told(tmp_path, directory):
    with inspected(str(tmp_path)) as inspector:
        verification = Verification(inspector, headers_only=False)
        done: list[None] = []
        records = Survey().records(inspector.scan())
        verification.run(records, on_record=lambda: done.append(None), stops=lambda: len(done) == 2)
        assert verification.counts.total() == 2


def test_a_sample_has_each_record_with_the_same_probability(tmp_path):
    fill(str(tmp_path), 8)
    with inspected(str(tmp_path)) as inspector:
        records = list(Survey().records(inspector.scan()))
    assert sample(records, 20, random.Random(1)) == records
    rng, counts = random.Random(2), dict.fromkeys((record.key for record in records), 0)
    for _ in range(2000):
        chosen = sample(records, 3, rng)
        assert len({record.key for record in chosen}) == 3
        for record in chosen:
            counts[record.key] += 1
    assert all(650 < count < 850 for count in counts.values()), counts


# --- what cannot be opened --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("{path}", "is no directory of a file tier: it has no worker-N"),
        ("{path}/none", "cannot be read: No such file"),
        ("{path},size=4", "has 'size=4'"),
        ("file://{path}/none", "cannot be opened"),
        ("memory://", "ends with it"),
        ("ftp://host", "'ftp':// is no storage tier; expected a directory, or one of valkey://"),
        ("valkey://host?ttl=1", "has no option 'ttl'; did you mean ttl_s"),
        ("s3://bucket?regio=x", "has no option 'regio'"),
    ],
)
def test_what_is_no_store_is_one_line(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message) as caught:
        open_inspector(options.format(path=tmp_path))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "none").exists()


def test_the_two_kinds_of_directories_are_told_apart(tmp_path):
    fill(str(tmp_path / "a"), 1)
    for start in (open_inspector, open_tier):
        with pytest.raises(ConfigError, match="is the directory of a file tier: give it without file://"):
            start(f"file://{tmp_path}/a")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["worker-1"]
    fill(f"file://{tmp_path}/b", 1)
    with pytest.raises(ConfigError, match="for the directory of an object tier give file://DIR"):
        open_inspector(str(tmp_path / "b"))


def test_stores_that_do_not_answer_are_errors():
    port = free_port()
    for options in (
        f"valkey://127.0.0.1:{port}?timeout_s=0.3",
        f"s3://bucket?endpoint=http://127.0.0.1:{port}&allow_http=1&retries=0&region=x",
    ):
        with pytest.raises(OSError, match=r"127\.0\.0\.1|bucket") as caught, inspected(options) as inspector:
            survey(inspector)
        assert "\n" not in str(caught.value)


def test_it_needs_no_jax(tmp_path):
    fill(str(tmp_path), 1)
    code = (
        "import sys; from tpu_offload.storage import *; i = open_inspector(sys.argv[1]); s = Survey(); "
        "s.count(i.scan()); assert s.num_records == 1; assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, timeout=120, check=True)


def test_it_stops_while_the_store_does_not_answer(tmp_path, directory, monkeypatch):
    """It waited for the read, and the process for those that had begun after it."""
    asked, answers = threading.Event(), threading.Event()

    def hang(record, nbytes):
        asked.set()
        assert answers.wait(60)
        raise KeyError(record.place)

    with inspected(str(tmp_path)) as inspector:
        monkeypatch.setattr(inspector, "read", hang)
        verification = Verification(inspector, headers_only=False)
        try:
            records = Survey().records(inspector.scan())
            verification.run(records, on_record=pytest.fail, stops=asked.is_set)
            assert asked.is_set()
            assert not verification.counts
        finally:
            answers.set()


def test_it_stops_while_it_looks_for_the_second_time(tmp_path, directory, monkeypatch):
    answers, num_read = threading.Event(), 0

    def read(record, nbytes):
        nonlocal num_read
        num_read += 1
        if num_read > 4:
            assert answers.wait(60)
        return b"damaged"

    with inspected(str(tmp_path)) as inspector:
        (first, *_) = Survey().records(inspector.scan())
        monkeypatch.setattr(inspector, "read", read)
        verification = Verification(inspector, headers_only=False)
        try:
            verification.run([first] * 4, on_record=lambda: None, stops=lambda: num_read > 4)
            assert verification.counts == {Verdict.DAMAGED: 4}
            assert len(verification.suspects) == 4
        finally:
            answers.set()
