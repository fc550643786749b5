"""The object tier in memory, in a directory and on an S3 server: the contract, generations, leftovers, and faults."""

import contextlib
import dataclasses
import http.server
import itertools
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import obstore
import pytest

from tests.storage import servers
from tests.storage.conformance import CHECKS, FORMAT, NUM_CHUNKS, SPEC, key_of, new_record, payload, read, sealed, write
from tests.storage.objects import (
    LATE_S,
    directory_of,
    generation_of,
    marker_of,
    names,
    object_of,
    root_of,
    store_of,
    wait_until_swept,
)
from tests.storage.test_file import expect_sound, run_until_killed
from tpu_offload.errors import ConfigError
from tpu_offload.storage import (
    RecordError,
    UndeletedError,
    object_deletion,
    object_errors,
    object_late_writes,
    object_names,
)
from tpu_offload.storage import object as object_tier
from tpu_offload.storage.object import SWEEPER_NAME, ObjectTier
from tpu_offload.storage.object_store import open_store, where


@pytest.fixture(scope="module")
def shared_server():
    with servers.running(servers.moto) as server:
        yield server


@pytest.fixture(autouse=True)
def credentials(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "kv")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "SECRET")


NUMBERS = itertools.count()


def s3_url(server, bucket, options=""):
    limits = "timeout_s=2&connect_timeout_s=1&retries=1"
    return (
        f"s3://{bucket}/pre/fix?endpoint=http://127.0.0.1:{server.port}&region=us-east-1&allow_http=1&{limits}{options}"
    )


@pytest.fixture(params=["s3", "file"])
def store_url(request, tmp_path):
    """The URL of an empty store."""
    if request.param == "file":
        return f"file://{tmp_path}/a%20directory"
    server, bucket = request.getfixturevalue("shared_server"), f"bucket-{next(NUMBERS)}"
    servers.make_bucket(server.port, bucket)
    return s3_url(server, bucket)


@contextlib.contextmanager
def opened(options, **changes):
    tier = ObjectTier(dataclasses.replace(SPEC, options=options, **changes))
    try:
        yield tier
    finally:
        tier.close()


@pytest.mark.parametrize("check", CHECKS)
def test_conformance(store_url, check):
    check(lambda spec: ObjectTier(dataclasses.replace(spec, options=store_url)))


@pytest.mark.parametrize("check", CHECKS)
def test_conformance_in_memory(check):
    check(lambda spec: ObjectTier(dataclasses.replace(spec, options="memory://")))


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("s3://bucket/a/b/?region=x&endpoint=http://127.0.0.1:1&allow_http=true", "s3://bucket/a/b"),
        ("gs://bucket", "gs://bucket/"),
        ("memory://", "memory://"),
        ("file://{}", "file://{}"),
    ],
)
def test_messages_have_the_url_without_options(tmp_path, url, expected):
    store, _ = open_store(url.format(tmp_path))
    assert where(store) == expected.format(tmp_path)


# --- what is there after a restart --------------------------------------------------------------


def test_keys_are_listed_from_the_oldest_and_bounded(store_url):
    with opened(store_url) as tier:
        for i in range(6):
            write(tier, key_of(i), i)
            if not i:
                time.sleep(1.1)  # S3 gives times in seconds
    with opened(store_url, num_chunks=5) as tier:
        keys = tier.stored_keys()
        assert sorted(keys) == sorted(key_of(i) for i in range(1, 6))
        if directory_of(tier) is not None:
            assert keys == [key_of(i) for i in range(1, 6)]
        assert len(names(tier)) == 1 + 5, "what no longer fits is deleted"


def test_what_others_put_there_is_deleted_or_left(store_url):
    with opened(store_url) as tier:
        write(tier, key_of(1), 1)
        mine = names(tier)
        generation = f"{root_of(tier)}/{generation_of(tier)}"
        obstore.put(store_of(tier), f"{generation}/ab/cd.kv", b"short")
        obstore.put(store_of(tier), f"{generation}/no key", bytes(FORMAT.record_nbytes))
        obstore.put(store_of(tier), f"{root_of(tier)}/0123456789abcdef/ab/cd.kv", bytes(FORMAT.record_nbytes))
        obstore.put(store_of(tier), "another/file", b"of another program")
    with opened(store_url) as tier:
        assert tier.stored_keys() == [key_of(1)]
        wait_until_swept()
        assert names(tier) == sorted([*mine, "another/file"])


def test_a_marker_that_makes_no_sense_begins_anew(store_url, caplog):
    with opened(store_url) as tier:
        write(tier, key_of(1), 1)
        obstore.put(store_of(tier), marker_of(tier), b"../../etc/passwd")
    with opened(store_url) as tier:
        (warning,) = caplog.messages
        assert f"{marker_of(tier)} is damaged or of another version of the format" in warning
        assert not tier.stored_keys()
        wait_until_swept()
        assert names(tier) == [marker_of(tier)]


def test_a_marker_that_is_damaged_while_the_tier_is_open_is_written_again(store_url, caplog):
    with opened(store_url) as tier:
        write(tier, key_of(1), 1)
        obstore.put(store_of(tier), marker_of(tier), b"../../etc/passwd")
        tier._is_doubtful = True  # as after a failed write
        write(tier, key_of(2), 2)
        assert read(tier, key_of(1)) == payload(1)
        assert not caplog.messages
    with opened(store_url) as tier:
        assert sorted(tier.stored_keys()) == [key_of(1), key_of(2)]


def test_a_clear_leaves_nothing(store_url):
    with opened(store_url) as tier:
        for i in range(NUM_CHUNKS):
            write(tier, key_of(i), i)
        tier.clear()
        write(tier, key_of(1), 50)
        wait_until_swept()
        assert len(names(tier)) == 2
        assert read(tier, key_of(1)) == payload(50)
    with opened(store_url) as tier:
        assert tier.stored_keys() == [key_of(1)]


def test_a_clear_without_a_thread_to_delete_counts_and_the_next_one_deletes_all(store_url, monkeypatch, caplog):
    """It failed after it had named a new generation, was repeated for ever, and forgot what it had to delete."""
    with opened(store_url) as tier:
        write(tier, key_of(0), 0)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse_to_start)
            for i in range(2):
                tier.clear()
                assert "cannot be deleted (RuntimeError: can't start new thread)" in caplog.messages[i]
                write(tier, key_of(1), 50 + i)
                assert read(tier, key_of(1)) == payload(50 + i)
        assert len(names(tier)) == 4
        tier.clear()
        wait_until_swept()
        assert names(tier) == [marker_of(tier)]


def refuse_to_start(thread):
    raise RuntimeError("can't start new thread")


def close_while_deleting(tier, begin, monkeypatch, *, in_batches):
    """Closes a tier while its sweep is in the first call that deletes; returns how many such calls there were."""
    begun, is_closing, calls = threading.Event(), threading.Event(), []

    def slow(call):
        def wrapped(*args, **kwargs):
            if threading.current_thread().name == SWEEPER_NAME:
                if not (in_batches or isinstance(args[-1], str)):
                    raise FileNotFoundError
                calls.append(args)
                begun.set()
                assert is_closing.wait(LATE_S)
            return call(*args, **kwargs)

        return wrapped

    with monkeypatch.context() as patch:
        patch.setattr(obstore, "delete", slow(obstore.delete))
        patch.setattr(os, "unlink", slow(os.unlink))
        begin()
        assert begun.wait(LATE_S)
        threading.Timer(0.5, is_closing.set).start()
        tier.close()
    return len(calls)


def test_a_file_that_cannot_be_used_is_named(tmp_path):
    """Not only what is wrong with it: the directory itself may be all right, as what an engine of another user left."""
    path = tmp_path / SPEC.fingerprint
    path.write_text("")
    with pytest.raises(ConfigError) as caught, opened(f"file://{tmp_path}"):
        pass
    assert f"{path}/{SPEC.worker_id}" in str(caught.value)
    assert "may read and write all" in str(caught.value)
    assert "os error" not in str(caught.value)


@pytest.mark.parametrize("in_batches", [True, False])  # False: as a server that has lost an object of each
def test_a_close_waits_for_one_call_and_the_next_start_deletes_the_rest(store_url, monkeypatch, in_batches):
    for module in (object_tier, object_deletion):
        monkeypatch.setattr(module, "BATCH", 2)
    with opened(store_url) as tier:
        for i in range(NUM_CHUNKS):
            write(tier, key_of(i), i)
        assert close_while_deleting(tier, tier.clear, monkeypatch, in_batches=in_batches) == 1
        left = names(tier)
        assert len(left) > 2
    with opened(store_url) as tier:
        assert close_while_deleting(tier, tier.stored_keys, monkeypatch, in_batches=in_batches) == 1
        assert 1 < len(names(tier)) < len(left)
    with opened(store_url) as tier:
        assert not tier.stored_keys()
        wait_until_swept()
        assert names(tier) == [marker_of(tier)]
        if (directory := directory_of(tier)) is not None:
            assert [path.name for path in (directory / root_of(tier)).iterdir()] == ["generation"]


def test_what_is_written_after_all_objects_were_deleted_is_found_by_the_next_start(store_url):
    """By somebody else, or by a lifecycle rule: the name of the generation is gone with them."""
    with opened(store_url) as tier:
        write(tier, key_of(1), 1)
        obstore.delete(store_of(tier), names(tier))
        with pytest.raises(KeyError):
            read(tier, key_of(1))
        write(tier, key_of(2), 2)
    with opened(store_url) as tier:
        assert tier.stored_keys() == [key_of(2)]
        assert read(tier, key_of(2)) == payload(2)


def test_a_bucket_that_was_made_anew_is_used_as_before():
    with own_server() as (server, url):
        with opened(url) as tier:
            write(tier, key_of(1), 1)
            server.kill()
            with pytest.raises(OSError, match="Connection refused"):
                read(tier, key_of(1))
            server.start()
            servers.make_bucket(server.port, "bucket")
            write(tier, key_of(2), 2)
        with opened(url) as tier:
            assert tier.stored_keys() == [key_of(2)]


def test_files_of_a_killed_writer_are_removed(tmp_path):
    with opened(f"file://{tmp_path}") as tier:
        write(tier, key_of(1), 1)
        (path,) = tmp_path.rglob("*.kv")
        path.with_name(path.name + "#1").write_bytes(b"half")
        path.with_name("ff.kv#23").write_bytes(b"half")
    with opened(f"file://{tmp_path}") as tier:
        assert tier.stored_keys() == [key_of(1)]
        assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 2


def kill_often(url, seeds):
    for seed in seeds:
        lines = run_until_killed(url, seed)
        with opened(url) as tier:
            keys = tier.stored_keys()
            expect_sound(tier, keys, lines)
            wait_until_swept()
            assert names(tier) == sorted([marker_of(tier), *(object_of(tier, key) for key in keys)]), (
                "nothing else is left"
            )
            if (directory := directory_of(tier)) is not None:
                assert len([path for path in directory.rglob("*") if path.is_file()]) == len(keys) + 1


def test_killed_at_any_moment(store_url):
    kill_often(store_url, range(3))


@pytest.mark.slow
def test_killed_a_hundred_times(store_url):
    kill_often(store_url, range(100, 200))


def test_an_object_of_another_size_is_damaged(store_url):
    with opened(store_url) as tier:
        for nbytes in (0, 5, FORMAT.record_nbytes + 1):
            obstore.put(store_of(tier), object_of(tier, key_of(1)), bytes(nbytes))
            with pytest.raises(RecordError, match=f"the store has {nbytes} bytes; expected {FORMAT.record_nbytes}"):
                tier.read(key_of(1), new_record())


class CuttingHandler(http.server.BaseHTTPRequestHandler):
    """An S3 server, of which bodies of records end in the middle."""

    objects: ClassVar[dict[str, bytes]] = {}

    def do_PUT(self):
        self.objects[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(200, {"ETag": '"1"'})

    def do_POST(self):  # deletions
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer_xml("<DeleteResult><Deleted><Key>x</Key></Deleted></DeleteResult>")

    def do_GET(self):
        if "list-type" in self.path:
            self._answer_xml("<ListBucketResult></ListBucketResult>")
            return
        data = self.objects.get(self.path)
        if data is None:
            self._answer(404, {})
            return
        self._answer(200, {"ETag": '"1"', "Content-Length": str(len(data)), "Last-Modified": self.date_time_string()})
        self.wfile.write(data[: len(data) // 2] if self.path.endswith(".kv") else data)

    def _answer_xml(self, text):
        data = text.encode()
        self._answer(200, {"Content-Length": str(len(data))})
        self.wfile.write(data)

    def _answer(self, status, headers):
        self.send_response(status)
        for name, value in ({"Content-Length": "0"} | headers).items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *args):
        pass


@pytest.mark.usefixtures("credentials")
def test_a_connection_that_is_lost_within_a_record_says_nothing_of_it():
    CuttingHandler.objects.clear()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), CuttingHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        options = f"s3://bucket/prefix?endpoint={endpoint}&region=us-east-1&allow_http=true&retries=0"
        with opened(options) as tier:
            write(tier, key_of(1), 1)
            with pytest.raises(OSError, match="Error: "):  # and no RecordError
                tier.read(key_of(1), new_record())
        server.shutdown()


def test_records_of_many_parts(store_url, monkeypatch):
    monkeypatch.setattr(object_tier, "_STREAM_NBYTES", 100)
    with opened(store_url) as tier:
        write(tier, key_of(1), 1)
        assert read(tier, key_of(1)) == payload(1)


def test_a_write_that_arrives_after_its_deletion_is_deleted_once_more(store_url, monkeypatch):
    """The bucket grew past the size of the tier, by an object for each write that had timed out."""
    now_s, put, late = 1000.0, obstore.put, []
    monkeypatch.setattr(object_late_writes, "monotonic", lambda: now_s)

    def arrive_late(store, path, data, **options):
        late.append((path, bytes(data)))
        raise OUTAGE

    with opened(store_url) as tier:
        for i in range(3):
            write(tier, key_of(i), i)
        with monkeypatch.context() as patch:
            patch.setattr(obstore, "put", arrive_late)
            for i in (3, 4):
                with pytest.raises(OSError, match="Timeout"):
                    write(tier, key_of(i), i)
        tier.delete([key_of(3), key_of(4)])
        for path, data in late:
            put(tier._store, path, data)
        now_s += 59
        tier.delete([key_of(0)])
        assert len(names(tier)) == 1 + 4, "they may come still later"
        write(tier, key_of(4), 4)
        now_s += 1
        tier.delete([key_of(1)])
        assert names(tier) == sorted([marker_of(tier), *(object_of(tier, key_of(i)) for i in (2, 4))])
        assert read(tier, key_of(4)) == payload(4), "it was written again"


def test_an_outage_while_late_writes_are_deleted_is_no_failure_of_others(store_url, monkeypatch):
    now_s = 1000.0
    monkeypatch.setattr(object_late_writes, "monotonic", lambda: now_s)
    with opened(store_url) as tier:
        write(tier, key_of(0), 0)
        with monkeypatch.context() as patch:
            patch.setattr(obstore, "put", Failing(1, obstore.put))
            with pytest.raises(OSError, match="Timeout"):
                write(tier, key_of(1), 1)
        obstore.put(store_of(tier), object_of(tier, key_of(1)), b"late")
        now_s += 60
        with monkeypatch.context() as patch:
            patch.setattr(obstore, "delete", Failing(1, obstore.delete, num_first=1))
            tier.delete([key_of(0)])
        assert names(tier) == sorted([marker_of(tier), object_of(tier, key_of(1))])
        now_s += 60
        tier.delete([])
        assert names(tier) == [marker_of(tier)]


def test_a_key_that_is_written_while_its_late_object_is_deleted_stays(store_url, monkeypatch):
    """The deletion ended after the write, and the record was gone."""
    now_s, began, goes_on = 1000.0, threading.Event(), threading.Event()
    monkeypatch.setattr(object_late_writes, "monotonic", lambda: now_s)
    delete = obstore.delete

    def delete_late(store, paths):
        if began.is_set() or key_name not in (paths, *paths):
            return delete(store, paths)
        began.set()
        assert goes_on.wait(LATE_S)
        return delete(store, paths)

    with opened(store_url) as tier, ThreadPoolExecutor(2) as threads:
        write(tier, key_of(0), 0)
        key_name = object_of(tier, key_of(1))
        with monkeypatch.context() as patch:
            patch.setattr(obstore, "put", Failing(1, obstore.put))
            with pytest.raises(OSError, match="Timeout"):
                write(tier, key_of(1), 1)
        now_s += 60
        monkeypatch.setattr(obstore, "delete", delete_late)
        deleting = threads.submit(tier.delete, [key_of(0)])
        assert began.wait(LATE_S)
        writing = threads.submit(write, tier, key_of(1), 1)
        write(tier, key_of(2), 2)  # others do not wait
        assert not writing.done()
        goes_on.set()
        deleting.result()
        writing.result()
        now_s += 60
        tier.delete([key_of(2)])
        assert read(tier, key_of(1)) == payload(1)


def test_late_writes_are_deleted_a_few_at_a_time(store_url, monkeypatch):
    """On a store without batches each is a request."""
    now_s, keys = 1000.0, [key_of(i) for i in range(40)]
    monkeypatch.setattr(object_late_writes, "monotonic", lambda: now_s)
    with opened(store_url) as tier:
        with monkeypatch.context() as patch:
            patch.setattr(obstore, "put", Failing(len(keys), obstore.put))
            for key in keys:
                with pytest.raises(OSError, match="Timeout"):
                    tier.write(key, sealed(tier, key, 0))
        for key in keys:
            obstore.put(store_of(tier), object_of(tier, key), b"late")
        now_s += 60
        for num_left in (24, 8, 0, 0):
            tier.delete([key_of(100)])
            assert len(names(tier)) == 1 + num_left


class Failing:
    """A call of obstore that fails so many times, after some first calls."""

    def __init__(self, num_failures, call, *, num_first=0):
        self.num_left, self.call, self.num_first = num_failures, call, num_first

    def __call__(self, *args, **options):
        self.num_first -= 1
        if self.num_left and self.num_first < 0:
            self.num_left -= 1
            raise OUTAGE
        return self.call(*args, **options)


def test_deletion_in_batches(store_url, monkeypatch):
    monkeypatch.setattr(object_deletion, "BATCH", 3)
    with opened(store_url) as tier:
        for i in range(8):
            write(tier, key_of(i), i)
        tier.delete([key_of(i) for i in range(20)])
        assert names(tier) == [marker_of(tier)]


def test_names_and_keys():
    for key in (b"a", b"ab", bytes(101), bytes(256), *map(key_of, range(4))):
        name = object_names.name_of(key)
        assert object_names.key_of(name) == key
        assert max(map(len, name.split("/"))) <= 200
    for name in ("", "ab", "ab.kv", "ab/cd", "ab/CD.kv", "ab/c.kv", "abc/d.kv", "ab/cd.kv#1", "ab/ cd.kv"):
        assert object_names.key_of(name) is None


# --- faults -------------------------------------------------------------------------------------


def calls(tier):
    record = sealed(tier, key_of(1), 1)
    return [
        lambda: tier.write(key_of(1), record),
        lambda: tier.read(key_of(1), new_record()),
        lambda: tier.delete([key_of(1)]),
        tier.clear,
    ]


@contextlib.contextmanager
def own_server():
    with servers.running(servers.moto) as server:
        servers.make_bucket(server.port, "bucket")
        yield server, s3_url(server, "bucket")


@pytest.mark.wide
def test_a_server_that_freezes_dies_and_returns_empty():
    with own_server() as (server, url), opened(url) as tier:
        write(tier, key_of(1), 1)
        server.freeze()
        for call in (calls(tier)[0], calls(tier)[1], tier.clear):
            start_s = time.monotonic()
            with pytest.raises(OSError, match="Timeout"):
                call()
            assert time.monotonic() - start_s < LATE_S
        server.thaw()
        tier.clear()
        wait_until_swept()
        assert names(tier) == [marker_of(tier)]
        with pytest.raises(KeyError):
            read(tier, key_of(1))
        write(tier, key_of(2), 2)
        assert read(tier, key_of(2)) == payload(2)
        server.kill()
        for call in calls(tier):
            with pytest.raises(OSError, match="Connection refused"):
                call()
        server.start()
        with pytest.raises(OSError, match="NoSuchBucket"):
            write(tier, key_of(2), 2)


def test_a_server_that_is_not_there_yet(caplog):
    with own_server() as (server, url):
        with opened(url) as tier:
            write(tier, key_of(1), 1)
        server.freeze()
        with opened(url) as tier:
            (warning,) = caplog.messages
            assert "does not answer (GenericError: Timeout); it starts empty" in warning
            assert not tier.stored_keys()
            server.thaw()
            write(tier, key_of(2), 2)
        with opened(url) as tier:
            assert tier.stored_keys() == [key_of(2)], "a new generation began"
            wait_until_swept()
            assert len(names(tier)) == 2


def test_a_listing_that_fails_begins_anew(store_url, monkeypatch, caplog):
    with opened(store_url) as tier:
        write(tier, key_of(1), 1)

    def fail(*args, **kwargs):
        raise obstore.exceptions.GenericError("HTTP error\n\nDebug source: kind: Timeout")

    with opened(store_url) as tier, monkeypatch.context() as patch:
        patch.setattr(obstore, "list", fail)
        assert not tier.stored_keys()
        assert "cannot be listed (GenericError: Timeout)" in caplog.text
        with pytest.raises(KeyError):
            read(tier, key_of(1))
        write(tier, key_of(2), 2)
    with opened(store_url) as tier:
        assert tier.stored_keys() == [key_of(2)]


def keep(monkeypatch, *kept):
    """Objects that cannot be deleted, as immutable files and those under a legal hold; returns what is asked for."""
    delete, asked = obstore.delete, []

    def refuse(store, paths):
        paths = [paths] if isinstance(paths, str) else list(paths)
        asked.append(paths)
        delete(store, [path for path in paths if path not in kept])
        if held := [path for path in paths if path in kept]:
            text = f"Generic S3 error: DeleteObjects request failed for key {held[0]}"
            raise obstore.exceptions.GenericError(f'{text}\n\nDebug source: message: "Access Denied"')

    monkeypatch.setattr(obstore, "delete", refuse)
    return asked


def test_an_object_that_cannot_be_deleted_does_not_keep_the_others(store_url, monkeypatch):
    monkeypatch.setattr(object_deletion, "BATCH", 3)
    keys = [key_of(i) for i in range(7)]
    with opened(store_url) as tier:
        for i, key in enumerate(keys):
            write(tier, key, i)
        held = [object_of(tier, key_of(i)) for i in (1, 5)]
        with monkeypatch.context() as patch:
            keep(patch, *held)
            with pytest.raises(UndeletedError, match="Access Denied") as caught:
                tier.delete(keys)
            assert caught.value.keys == {key_of(1), key_of(5)}
            assert names(tier) == sorted([marker_of(tier), *held])
        tier.delete(keys)
        assert names(tier) == [marker_of(tier)]


OUTAGE = obstore.exceptions.GenericError("HTTP error\n\nDebug source: kind: Timeout")
DENIED = obstore.exceptions.PermissionDeniedError("status code: 403 Forbidden: <Code>AccessDenied</Code>")


def answer(status, code, error=obstore.exceptions.GenericError):
    return error(f"Server returned non-2xx status code: {status} X: <Error><Code>{code}</Code></Error>")


PASSING = [
    OUTAGE,
    answer(503, "ServiceUnavailable"),
    answer(429, "SlowDown"),
    answer(408, "RequestTimeout"),
    answer(400, "RequestTimeout"),
    answer(409, "OperationAborted", obstore.exceptions.AlreadyExistsError),
    obstore.exceptions.GenericError("Server returned error response: <DeleteResult><Error><Code>SlowDown</Code>"),
]
OF_ALL = [
    *PASSING,
    obstore.exceptions.UnauthenticatedError("x"),
    answer(400, "ExpiredToken"),
    answer(403, "RequestTimeTooSkewed", obstore.exceptions.PermissionDeniedError),
    answer(404, "NoSuchBucket", FileNotFoundError),
    obstore.exceptions.GenericError(
        "Generic LocalFileSystem error: Unable to delete /kv/x: Read-only file system (os error 30)\n\nDebug source:"
    ),
]
OF_ONE = [
    obstore.exceptions.GenericError("Generic LocalFileSystem error: /kv/x: Input/output error (os error 5)"),
    obstore.exceptions.GenericError(
        "Generic LocalFileSystem error: /not connected (os error 30)/x: Operation not permitted (os error 1)"
    ),
    obstore.exceptions.GenericError("<Error><Code>AccessDenied</Code><Message>disk not connected</Message></Error>"),
]


def fail_deletions(monkeypatch, error):
    asked = []

    def fail(store, paths):
        asked.append(paths)
        raise error

    monkeypatch.setattr(obstore, "delete", fail)
    return asked


@pytest.mark.parametrize("error", OF_ALL, ids=lambda error: str(error)[-40:])
def test_a_store_that_fails_whatever_is_deleted_is_asked_once(store_url, monkeypatch, error):
    """Most counted as refusals of single objects: a full tier gave up all that it had within seconds."""
    with opened(store_url) as tier:
        asked = fail_deletions(monkeypatch, error)
        with pytest.raises(OSError) as caught:  # noqa: PT011 - any but the one below
            tier.delete([key_of(i) for i in range(40)])
        assert not isinstance(caught.value, UndeletedError)
        assert len(asked) == 1


@pytest.mark.parametrize("error", [DENIED, *OF_ONE], ids=lambda error: str(error)[-40:])
def test_a_store_that_refuses_each_object_is_asked_for_all(store_url, monkeypatch, error):
    """One by one, unless the whole batch is forbidden."""
    keys = [key_of(i) for i in range(40)]
    with opened(store_url) as tier:
        asked = fail_deletions(monkeypatch, error)
        with pytest.raises(UndeletedError) as caught:
            tier.delete(keys)
        assert caught.value.keys == set(keys)
        num_single = sum(isinstance(paths, str) for paths in asked)
        assert num_single == (0 if error is DENIED and directory_of(tier) is None else 40)


@pytest.mark.parametrize("error", PASSING, ids=lambda error: str(error)[-40:])
@pytest.mark.parametrize("call", ["get", "put", "delete", "list"])
def test_a_store_that_is_overloaded_at_the_start_does_not_answer(tmp_path, monkeypatch, caplog, call, error):
    def fail(*args, **kwargs):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(obstore, call, fail)
        tier = ObjectTier(dataclasses.replace(SPEC, options=f"file://{tmp_path}"))
    with contextlib.closing(tier):
        assert call == "list" or "not answer" in caplog.text
        write(tier, key_of(1), 1)
        assert read(tier, key_of(1)) == payload(1)


def test_a_store_that_may_not_be_listed_is_refused(store_url, monkeypatch):
    """Each start would discard what the last one has written, and leave its objects."""

    def fail(*args, **kwargs):
        raise answer(403, "AccessDenied")

    monkeypatch.setattr(obstore, "list", fail)
    with pytest.raises(ConfigError, match="what it stores cannot be listed: GenericError: AccessDenied"):
        ObjectTier(dataclasses.replace(SPEC, options=store_url))


def test_an_outage_in_the_middle_leaves_what_was_not_deleted_before(tmp_path, monkeypatch):
    delete, num_calls, keys = obstore.delete, itertools.count(), [key_of(i) for i in range(5)]

    def fail(store, paths):
        if next(num_calls) == 2:
            raise OUTAGE
        delete(store, paths)

    with opened(f"file://{tmp_path}") as tier:
        for i, key in enumerate(keys):
            write(tier, key, i)
        monkeypatch.setattr(obstore, "delete", fail)
        with pytest.raises(OSError, match="Timeout") as caught:
            tier.delete(keys)
        assert not isinstance(caught.value, UndeletedError)
        assert len(names(tier)) == 1 + 3


def test_an_earlier_object_that_cannot_be_deleted_does_not_keep_the_others(store_url, monkeypatch, caplog):
    """Of its own batch, of the batches after it, and of other generations."""
    for module in (object_tier, object_deletion):
        monkeypatch.setattr(module, "BATCH", 2)
    with opened(store_url) as tier:
        for i in range(6):
            write(tier, key_of(i), i)
        before = f"{root_of(tier)}/{generation_of(tier)}"
        held, *_ = sorted(name for name in names(tier) if name.startswith(before))
        obstore.put(store_of(tier), f"{root_of(tier)}/ffffffffffffffff/ab/cd.kv", b"x")
    unlink = os.unlink

    def refuse(path):
        if str(path).endswith(held):
            raise PermissionError(path)
        unlink(path)

    with monkeypatch.context() as patch, opened(store_url) as tier:
        keep(patch, held)
        patch.setattr(os, "unlink", refuse)
        patch.setattr(tier, "_generation", "eeeeeeeeeeeeeeee")
        tier.stored_keys()
        wait_until_swept()
        assert names(tier) == sorted([marker_of(tier), held])
        assert "objects of earlier generations cannot be deleted" in caplog.text


def test_a_surplus_object_that_cannot_be_deleted_does_not_cost_what_is_stored(store_url, monkeypatch, caplog):
    with opened(store_url) as tier:
        write(tier, key_of(1), 1)
        strange = [f"{root_of(tier)}/{generation_of(tier)}/{i}" for i in range(3)]
        for path in strange:
            obstore.put(store_of(tier), path, b"x")
    with opened(store_url) as tier:
        with monkeypatch.context() as patch:
            keep(patch, strange[1])
            assert tier.stored_keys() == [key_of(1)]
        (warning,) = caplog.messages
        assert "1 of 3 surplus objects cannot be deleted (" in warning
        assert "Access Denied" in warning
        assert read(tier, key_of(1)) == payload(1)
    with opened(store_url) as tier:
        assert tier.stored_keys() == [key_of(1)]
        assert names(tier) == sorted([marker_of(tier), object_of(tier, key_of(1))]), "the next start has tried again"


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is read-only for root")
def test_a_directory_that_is_read_only(tmp_path):
    tmp_path.chmod(0o500)
    assert "Permission denied" in refused(f"file://{tmp_path}/a")


def refused(options):
    with pytest.raises(ConfigError) as caught:
        ObjectTier(dataclasses.replace(SPEC, options=options))
    assert "\n" not in str(caught.value)
    assert "SECRET" not in str(caught.value)
    return str(caught.value)


def test_a_bucket_that_is_missing(shared_server):
    assert "NoSuchBucket" in refused(s3_url(shared_server, "nowhere"))


def test_objects_that_can_be_written_and_not_read(shared_server):
    """As moto has it for requests without a signature."""
    servers.make_bucket(shared_server.port, "write-only")
    assert "PermissionDenied" in refused(s3_url(shared_server, "write-only", "&anonymous=1"))


def fail_to_delete(monkeypatch, error):
    def fail(store, paths):
        raise error

    monkeypatch.setattr(obstore, "delete", fail)


HELD = obstore.exceptions.GenericError('DeleteObjects request failed\n\nDebug source: message: "Access Denied"')


@pytest.mark.parametrize("error", [DENIED, HELD])
def test_objects_that_can_be_written_and_not_deleted(store_url, monkeypatch, error):
    """The tier started, and once it was full it took no more writes."""
    with opened(store_url) as tier:
        write(tier, key_of(1), 1)
    fail_to_delete(monkeypatch, error)
    expected = "what it stores cannot be deleted: "
    assert expected in refused(store_url)
    assert expected in refused(store_url.replace("pre/fix", "new").replace("a%20directory", "new"))


def test_a_start_leaves_no_object_of_its_own(store_url, monkeypatch):
    """And tries deletions on one that no other start knows."""
    put, written = obstore.put, []

    def noted(store, path, *args, **options):
        written.append(path)
        return put(store, path, *args, **options)

    monkeypatch.setattr(obstore, "put", noted)
    for _ in range(2):
        with opened(store_url) as tier:
            assert names(tier) == [marker_of(tier)]
    (one, another) = [path for path in written if path != marker_of(tier)]
    assert one != another


def test_a_start_goes_on_if_another_has_deleted_its_object(store_url, monkeypatch, caplog):
    with monkeypatch.context() as patch:
        fail_to_delete(patch, FileNotFoundError("gone"))
        with opened(store_url) as tier:
            write(tier, key_of(1), 1)
            assert len(names(tier)) == 3
    assert not caplog.messages
    with opened(store_url) as tier:
        assert tier.stored_keys() == [key_of(1)]
        wait_until_swept()
        assert len(names(tier)) == 2, "as after a start that was killed"


def test_a_start_whose_deletion_has_no_answer_keeps_what_is_stored(store_url, monkeypatch, caplog):
    with opened(store_url) as tier:
        write(tier, key_of(1), 1)
    with monkeypatch.context() as patch:
        fail_to_delete(patch, OUTAGE)
        tier = ObjectTier(dataclasses.replace(SPEC, options=store_url))
    assert "has not answered whether it deletes what it stores (GenericError: Timeout)" in caplog.text
    assert tier.stored_keys() == [key_of(1)]
    write(tier, key_of(2), 2)
    assert [read(tier, key_of(i)) for i in (1, 2)] == [payload(1), payload(2)]
    tier.close()


def test_no_credentials(shared_server, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1/169.254.169.254")
    message = refused(s3_url(shared_server, "bucket-0"))
    assert "no credentials in the environment" in message


def test_a_reason_is_what_went_wrong_without_the_request():
    text = "Generic S3 error: Error performing GET http://host/b/kv/0a.kv in 2.4ms, after 2 retries - HTTP error: body"
    error = obstore.exceptions.GenericError(f"{text}\n\nDebug source:\nGeneric")
    assert object_errors.reason(error) == "GenericError: HTTP error: body"
    text = "Generic S3 error: Error performing PUT http://169.254.169.254/latest/api/token in 2ms - 403 Forbidden"
    assert "no credentials in the environment" in object_errors.reason(obstore.exceptions.GenericError(text))


def test_https_where_there_is_none(shared_server, caplog):
    url = s3_url(shared_server, "bucket-0").replace("endpoint=http:", "endpoint=https:")
    with contextlib.suppress(ConfigError), opened(url) as tier:
        assert len(caplog.messages) == 1
        with pytest.raises(OSError, match="Error"):
            read(tier, key_of(1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "expected gs://, s3://, file://, memory://, such as gs://bucket/prefix"),
        ("/mnt/disk", "expected gs://"),
        ("az://container", "expected gs://"),
        ("s3://", "has no bucket"),
        ("s3://AKID:SECRET@bucket", "has a user or password before the host"),
        ("s3://AKID:SECRET/x@bucket", "has a user or password before the host"),
        ("s3://AKID:a#SECRET@bucket", "has a user or password before the host"),
        ("s3://bucket?endpoint=https://AKID:SECRET@host", "endpoint has a user or password; take it out"),
        ("gs://bucket?endpoint=https://AKID:SECRET/x@host", "endpoint has a user or password; take it out"),
        ("file:///dev/null/\x1b[31m", r"file:///dev/null/\x1b[31m cannot be opened"),
        ("s3://bucket?secret_access_key=SECRET", "has no option 'secret_access_key'"),
        ("s3://bucket?endpont=x", "did you mean endpoint?"),
        ("gs://bucket?anonymous=true", "anonymous='true'; expected false with gs://: writes need credentials"),
        ("s3://bucket?retries=-1", "retries='-1'; expected a number from 0 to 100"),
        ("s3://bucket?ca_file=/no/such/file", "a file that can be read"),
        ("s3://bucket?ca_file=/dev/null&endpoint=https://127.0.0.1:1", ""),
        ("s3://bucket?allow_http=x", "expected true or false"),
        ("s3://bucket?region=us-east-1&endpoint=http://127.0.0.1:1", "cannot be"),
        ("s3://bucket?region=us-east-1&endpoint=https://no-such-host.invalid", "failed to lookup address"),
        ("file://relative/path", "expected an absolute path"),
        ("file:///", "expected an absolute path"),
        ("file:///dev/null/x", "cannot be opened"),
        ("file:///mnt?timeout_s=1", "has no option 'timeout_s'"),
        ("memory://?x=1", "has no option 'x'"),
    ],
)
def test_wrong_options_are_one_clear_line(options, message):
    text = refused(options)
    assert text.startswith("TPU_OFFLOAD_STORAGE_OPTIONS")
    assert message in text
