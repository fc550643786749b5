"""How the threads of an object tier make sure that the store names its generation: one asks, the others wait for it."""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import obstore
import pytest

from tests.storage.conformance import SPEC, is_missing, key_of, payload, read, write
from tests.storage.objects import LATE_S, generation_of, marker_of, wait_until_swept
from tpu_offload.storage import object as object_tier
from tpu_offload.storage.object import ObjectTier
from tpu_offload.storage.object_names import new_generation

NUM_WRITERS = 4
OUTAGE = obstore.exceptions.GenericError("HTTP error\n\nDebug source: kind: Timeout")


class Gate:
    """A call of obstore that waits, with the name of the generation, until the test opens it.

    Attributes:
      num_calls: how often the store was asked, the call that waits included.
      began: set once it is.
      error: what the call raises when it is opened.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self._opened = threading.Event()
        self.num_calls = 0
        self.began = threading.Event()
        self.error: Exception | None = None

    def __call__(self, store: Any, path: str, *args: Any, **options: Any) -> Any:
        if not path.endswith("/generation"):
            return self._call(store, path, *args, **options)
        self.num_calls += 1
        self.began.set()
        try:
            return self._call(store, path, *args, **options)
        finally:
            assert self._opened.wait(LATE_S)
            if self.error is not None:
                raise self.error

    def open(self, error: Exception | None = None) -> None:
        self.error = error
        self._opened.set()


class Watched(Future[Any]):
    """Tells how many threads have begun to wait for another's answer."""

    waiting = threading.Semaphore(0)

    def result(self, timeout: float | None = None) -> Any:
        self.waiting.release()
        return super().result(timeout)


@pytest.fixture
def waiting(monkeypatch):
    monkeypatch.setattr(Watched, "waiting", threading.Semaphore(0))
    monkeypatch.setattr(object_tier, "Future", Watched)
    return Watched.waiting


@contextlib.contextmanager
def opened(directory: Path) -> Iterator[ObjectTier]:
    tier = ObjectTier(dataclasses.replace(SPEC, options=f"file://{directory}"))
    try:
        yield tier
    finally:
        tier.close()


def fail_a_call(tier):
    with pytest.raises(KeyError):
        read(tier, key_of(9))


@contextlib.contextmanager
def writers(tier, gate, waiting):
    """One thread that asks the store, and others that write meanwhile and wait for it; their calls."""
    with ThreadPoolExecutor(NUM_WRITERS) as threads:
        calls = [threads.submit(write, tier, key_of(0), 0)]
        try:
            assert gate.began.wait(LATE_S)
            calls += [threads.submit(write, tier, key_of(i), i) for i in range(1, NUM_WRITERS)]
            for _ in range(1, NUM_WRITERS):
                assert waiting.acquire(timeout=LATE_S)
            yield calls
        finally:
            gate.open(gate.error)


@pytest.mark.parametrize("call", ["get", "put"])
def test_a_frozen_store_is_asked_once_for_all_writes_that_wait(tmp_path, monkeypatch, waiting, call):
    """Each asked in turn, so that the last of four waited for four timeouts."""
    with opened(tmp_path) as tier:
        if call == "get":
            fail_a_call(tier)
        else:
            tier._renew()
        with monkeypatch.context() as patch:
            gate = Gate(getattr(obstore, call))
            patch.setattr(obstore, call, gate)
            with writers(tier, gate, waiting) as calls:
                assert tier._lock.acquire(timeout=LATE_S), "it is not held while the store is asked"
                tier._lock.release()
                gate.open(OUTAGE)
            assert [str(call.exception()) for call in calls] == ["GenericError: Timeout"] * NUM_WRITERS
            assert gate.num_calls == 1
            gate.error = None
            write(tier, key_of(1), 1)
            assert gate.num_calls == 2, "a failure leaves the doubt"
        assert generation_of(tier) == tier._generation
        assert read(tier, key_of(1)) == payload(1)


def test_an_answer_counts_for_all_writes_that_wait(tmp_path, monkeypatch, waiting):
    with opened(tmp_path) as tier:
        fail_a_call(tier)
        other = new_generation()
        obstore.put(tier._store, marker_of(tier), other.encode())
        with monkeypatch.context() as patch:
            patch.setattr(obstore, "get", gate := Gate(obstore.get))
            with writers(tier, gate, waiting) as calls:
                gate.open()
            for call in calls:
                call.result()
            assert gate.num_calls == 1
        wait_until_swept()
        assert generation_of(tier) == other
    with opened(tmp_path) as tier:
        assert sorted(tier.stored_keys()) == [key_of(i) for i in range(NUM_WRITERS)], "all have its name"


def test_a_call_that_fails_while_the_store_is_asked_is_a_doubt_of_its_own(tmp_path, monkeypatch, waiting):
    with opened(tmp_path) as tier, monkeypatch.context() as patch:
        fail_a_call(tier)
        patch.setattr(obstore, "get", gate := Gate(obstore.get))
        with ThreadPoolExecutor(1) as threads:
            first = threads.submit(write, tier, key_of(0), 0)
            assert gate.began.wait(LATE_S)
            fail_a_call(tier)
            gate.open()
            first.result()
        write(tier, key_of(1), 1)
        assert gate.num_calls == 2
        write(tier, key_of(2), 2)
        assert gate.num_calls == 2, "there is no doubt any more"


def test_a_store_that_was_cleared_is_noticed_within_a_minute_without_a_miss(tmp_path, monkeypatch):
    """An engine wrote on into a generation that nobody would list again, until it happened to read what was gone."""
    now_s = 1000.0
    monkeypatch.setattr(object_tier, "monotonic", lambda: now_s)
    with opened(tmp_path) as tier:
        write(tier, key_of(0), 0)
        ObjectTier.open_inspector(f"file://{tmp_path}").clear(lambda num: None)
        with monkeypatch.context() as patch:
            patch.setattr(obstore, "get", gate := Gate(obstore.get))
            gate.open()
            now_s += 59
            write(tier, key_of(1), 1)
            assert gate.num_calls == 0
            now_s += 1
            write(tier, key_of(2), 2)
            now_s += 59
            write(tier, key_of(3), 3)
            assert gate.num_calls == 1, "it is asked once a minute"
        wait_until_swept()
    with opened(tmp_path) as tier:
        assert sorted(tier.stored_keys()) == [key_of(2), key_of(3)]


def test_an_engine_warns_of_another_one_with_its_prefix(tmp_path, monkeypatch, caplog):
    """Replicas of a deployment have the same settings, and each deletes what the others store."""
    now_s = 1000.0
    monkeypatch.setattr(object_tier, "monotonic", lambda: now_s)

    def warnings(tier, number):
        nonlocal now_s
        now_s += 60
        write(tier, key_of(number), number)
        lines = [record.message for record in caplog.records if "another engine has started there" in record.message]
        caplog.clear()
        return lines

    def start_another(marker):
        written_ns = marker.stat().st_mtime_ns
        while marker.stat().st_mtime_ns == written_ns:  # times may be as coarse as 10 ms
            with opened(tmp_path) as other:
                write(other, key_of(7), 7)

    with opened(tmp_path) as tier:
        marker = tmp_path / marker_of(tier)
        assert warnings(tier, 0) == []
        tier.clear()
        assert warnings(tier, 1) == warnings(tier, 2) == []
        ObjectTier.open_inspector(f"file://{tmp_path}").clear(lambda num: None)
        assert warnings(tier, 3) == warnings(tier, 4) == []
        marker.unlink()
        assert warnings(tier, 5) == warnings(tier, 6) == []
        start_another(marker)
        (line,) = warnings(tier, 8)
        assert line.startswith(f"storage tier: file://{tmp_path}: ")
        assert warnings(tier, 9) == [], "once for each start"
        wait_until_swept()
    with opened(tmp_path) as tier:
        start_another(marker)  # of two that start together, too
        assert len(warnings(tier, 10)) == 1
    with opened(tmp_path) as tier:
        assert warnings(tier, 11) == warnings(tier, 12) == []


def test_an_answer_of_before_a_clear_is_not_used(tmp_path, monkeypatch, waiting):
    """The worker keeps them apart; if it did not, a cleared generation would have its name back."""
    with opened(tmp_path) as tier:
        write(tier, key_of(1), 1)
        before = tier._generation
        fail_a_call(tier)
        with monkeypatch.context() as patch:
            patch.setattr(obstore, "get", gate := Gate(obstore.get))
            with ThreadPoolExecutor(2) as threads:
                writing = threads.submit(write, tier, key_of(2), 2)
                assert gate.began.wait(LATE_S)
                clearing = threads.submit(tier.clear)
                assert waiting.acquire(timeout=LATE_S)
                gate.open()
                writing.result()
                clearing.result()
        wait_until_swept()
        assert generation_of(tier) == tier._generation != before
        assert is_missing(tier, key_of(1))
