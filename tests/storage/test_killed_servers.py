"""An S3 server whose objects are files, killed at any moment and started again: nothing wrong, nothing left over.

What a killed client leaves is in `test_object`; here the client lives, and its calls fail.
"""

import contextlib
import os
import random
import threading
import time

import pytest

from tests.engine.helpers import TINY, make_request, random_tokens, rounds, serve, serve_rounds, tokens_of
from tests.storage import kill_child, servers
from tests.storage.conformance import NUM_CHUNKS, key_of, payload, read, start, write
from tests.storage.shared_child import serve_last_round
from tests.storage.test_engine import TIGHT, make_offload, serve_slowly, settle
from tpu_offload.engine import Engine
from tpu_offload.errors import TransferError
from tpu_offload.storage.object import ObjectTier

# A call that the server does not answer fails at once; none is repeated.
OPTIONS = "region=us-east-1&allow_http=1&timeout_s=20&connect_timeout_s=20&retries=0"


@pytest.fixture(autouse=True)
def credentials(monkeypatch):
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "kv")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "SECRET")


@pytest.fixture
def bucket(tmp_path):
    path = tmp_path / "served" / "bucket"
    path.mkdir(parents=True)
    return path


@pytest.fixture
def server(bucket):
    with servers.running(servers.rclone(bucket.parent)) as server:
        yield server


def url_of(server):
    return f"s3://bucket/pre/fix?endpoint=http://127.0.0.1:{server.port}&{OPTIONS}"


class Client:
    """Calls a tier at random until a call fails, and knows what must be there then.

    Attributes:
      held: numbers of the keys whose write was answered, and nothing after it began to change that.
      maybe: those of which the server may have one or the other.
    """

    def __init__(self, tier, keys, rng):
        self._tier, self._rng = tier, rng
        self.held = {number for number in range(kill_child.NUM_KEYS) if key_of(number) in keys}
        self.maybe: set[int] = set()

    def call(self):
        """One call; raises OSError if the server is gone."""
        rng, held = self._rng, self.held
        number = rng.randrange(kill_child.NUM_KEYS)
        if number in held and rng.random() < 0.5:
            if rng.random() < 0.5:
                assert read(self._tier, key_of(number)) == payload(kill_child.seed_of(number)), "a wrong byte"
                return
            held.discard(number)
            self.maybe.add(number)
            self._tier.delete([key_of(number)])
            self.maybe.discard(number)
        elif number in held or len(held) < NUM_CHUNKS - 1:
            held.discard(number)
            self.maybe.add(number)
            write(self._tier, key_of(number), kill_child.seed_of(number))
            self.maybe.discard(number)
            held.add(number)


def use_until_killed(server, seed):
    """A client of a server that is killed during one of its calls; returns what the client knows."""
    rng = random.Random(seed)
    tier, keys = start(ObjectTier, kill_child.spec_of(url_of(server)))
    client = Client(tier, keys, rng)
    for _ in range(rng.randrange(60)):
        client.call()
    killer = threading.Thread(target=server.kill)
    killer.start()
    with contextlib.suppress(OSError):
        while True:
            client.call()
    killer.join()
    tier.close()
    return client


def kill_often(server, bucket, seeds):
    for seed in seeds:
        client = use_until_killed(server, seed)
        server.start()
        tier, keys = start(ObjectTier, kill_child.spec_of(url_of(server)))
        found = {number for number in range(kill_child.NUM_KEYS) if key_of(number) in keys}
        assert client.held <= found <= client.held | client.maybe
        for number in range(kill_child.NUM_KEYS):
            try:
                assert read(tier, key_of(number)) == payload(kill_child.seed_of(number)), "a wrong byte"
                assert number in found
            except (KeyError, OSError, TransferError):  # gone, or torn
                assert number not in client.held
        tier.delete([key_of(number) for number in client.maybe])  # as the scheduler does with what has failed
        tier.close()
        files = [path for path in bucket.rglob("*") if path.is_file()]
        objects = [path for path in files if not (path.suffix == ".partial" or path.name.startswith(".rclone"))]
        assert len(objects) == len(client.held) + 1, "the chunks and the marker"


def test_killed_at_any_moment(server, bucket):
    kill_often(server, bucket, range(4))


@pytest.mark.slow
def test_killed_a_hundred_times(server, bucket):
    kill_often(server, bucket, range(100, 200))


# --- the engine -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain():
    return tokens_of(serve_rounds(Engine(TINY, TIGHT), rounds()))


@contextlib.contextmanager
def engine_above(server, **changes):
    settings = {
        "storage_tier": "object",
        "storage_options": url_of(server),
        "breaker_failures": 3,
        "breaker_retry_s": 0.01,
        "storage_wait_s": 60.0,
    }
    engine = Engine(TINY, TIGHT, offload=make_offload(**(settings | changes)))
    try:
        yield engine
    finally:
        engine.close()


def test_a_killed_server_that_returns_has_what_was_stored(plain, server):
    """For the engine that goes on, and for the next one."""
    first, second, third = rounds()
    with engine_above(server) as engine:
        outputs = serve_slowly(engine, [first])
        server.kill()
        outputs |= serve_slowly(engine, [second])
        assert engine.offload_stats().failed_storage_chunks > 0
        server.start()
        outputs |= serve_slowly(engine, [third])
        assert tokens_of(outputs) == plain
        for i in range(50):  # until the breakers are closed
            before = engine.offload_stats()
            serve(engine, [make_request(f"later-{i}", random_tokens(100 + i % 10, 40))])
            settle(engine)
            stats = engine.offload_stats()
            if stats.promoted_chunks > before.promoted_chunks and not stats.num_open_breakers:
                break
        else:
            raise AssertionError("nothing is read from a server that is there again")
        serve_slowly(engine, [first, second])
        settle(engine)
        num_stored = engine.offload_stats().num_stored_chunks
    with engine_above(server) as engine:
        assert engine.offload_stats().restored_chunks >= num_stored > 0, "and what a failed write has left"
        found = serve_last_round(engine)
        assert found["tokens"] == {name: plain[name] for name in found["tokens"]}
        assert found["found_tokens"] >= 0.9 * found["stored_tokens_asked_again"] > 0


def serve_while_killed(server, plain, *, num_kills):
    """Serves rounds while the server is killed, and started again, so often; returns the statistics at the end."""
    has_ended = threading.Event()
    rng = random.Random(num_kills)

    def kill():
        try:
            for _ in range(num_kills):
                time.sleep(rng.uniform(0.0, 0.3))
                server.kill()
                time.sleep(rng.uniform(0.0, 0.1))
                server.start()
        finally:
            has_ended.set()

    with engine_above(server) as engine:
        killer = threading.Thread(target=kill)
        killer.start()
        num_rounds = 0
        while not has_ended.is_set() or num_rounds < 2:
            assert tokens_of(serve_slowly(engine, rounds())) == plain
            num_rounds += 1
        killer.join()
        settle(engine)
        stats = engine.offload_stats()
        assert stats.num_jobs_in_flight == 0
        engine.check_invariants()
        return stats


def test_a_server_that_is_killed_under_load(plain, server):
    stats = serve_while_killed(server, plain, num_kills=5)
    assert stats.cascaded_chunks > 0


@pytest.mark.slow
def test_a_server_that_is_killed_a_hundred_times_under_load(plain, server):
    stats = serve_while_killed(server, plain, num_kills=100)
    assert stats.failed_storage_chunks > 0
    assert stats.promoted_chunks > 0
    assert stats.num_breaker_openings > 0
