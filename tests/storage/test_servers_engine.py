"""The embedded engine above a server that freezes, dies, returns or is full: fewer hits, the same tokens."""

import contextlib
import os
import time

import pytest

from tests.engine.helpers import TINY, make_request, random_tokens, rounds, serve, serve_rounds, tokens_of
from tests.storage import servers
from tests.storage.shared_child import serve_last_round
from tests.storage.test_engine import TIGHT, make_offload, serve_slowly, settle
from tpu_offload.engine import Engine
from tpu_offload.storage import valkey as valkey_tier


@pytest.fixture(scope="module")
def plain():
    return tokens_of(serve_rounds(Engine(TINY, TIGHT), rounds()))


@contextlib.contextmanager
def valkey(**limits):
    with servers.running(servers.valkey(**limits)) as server:
        yield server, "valkey", f"valkey://127.0.0.1:{server.port}?timeout_s=0.2&connect_timeout_s=0.2"


@contextlib.contextmanager
def s3():
    with servers.running(servers.moto) as server:
        servers.make_bucket(server.port, "bucket")
        options = "region=us-east-1&allow_http=1&timeout_s=0.5&connect_timeout_s=0.2&retries=0"
        yield server, "object", f"s3://bucket?endpoint=http://127.0.0.1:{server.port}&{options}"


@pytest.fixture(autouse=True)
def credentials(monkeypatch):
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "kv")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "SECRET")


@pytest.fixture(params=[valkey, s3])
def storage(request):
    with request.param() as found:
        yield found


@contextlib.contextmanager
def engine_above(tier, options, **changes):
    settings = {"storage_tier": tier, "storage_options": options, "breaker_failures": 3, "storage_wait_s": 5.0}
    engine = Engine(TINY, TIGHT, offload=make_offload(**(settings | changes)))
    try:
        yield engine
    finally:
        engine.close()


def test_conversations_return_through_a_server(plain, storage):
    _, tier, options = storage
    with engine_above(tier, options) as engine:
        assert tokens_of(serve_slowly(engine, rounds())) == plain
        stats = engine.offload_stats()
        assert stats.cascaded_chunks > 0
        assert stats.promoted_chunks > 0


@pytest.mark.parametrize("fault", ["freeze", "kill"])
def test_a_server_that_does_not_answer_costs_hits_and_no_token(plain, storage, fault):
    server, tier, options = storage
    first, second, third = rounds()
    with engine_above(tier, options) as engine:
        outputs = serve_slowly(engine, [first])
        getattr(server, fault)()
        outputs |= serve_slowly(engine, [second, third])
        assert tokens_of(outputs) == plain
        stats = engine.offload_stats()
        assert stats.failed_storage_chunks > 0
        assert stats.num_breaker_openings > 0
        if fault == "freeze":
            server.thaw()


def test_a_server_that_returns_is_used_again(plain):
    first, second, third = rounds()
    with valkey() as (server, tier, options), engine_above(tier, options, breaker_retry_s=0.01) as engine:
        outputs = serve_slowly(engine, [first])
        server.kill()
        outputs |= serve_slowly(engine, [second])
        failed = engine.offload_stats().failed_storage_chunks
        assert failed > 0
        server.start()
        outputs |= serve_slowly(engine, [third])
        assert tokens_of(outputs) == plain
        for i in range(50):  # until the breakers are closed
            before = engine.offload_stats()
            serve(engine, [make_request(f"later-{i}", random_tokens(100 + i % 10, 40))])
            settle(engine)
            stats = engine.offload_stats()
            if stats.promoted_chunks > before.promoted_chunks and not stats.num_open_breakers:
                return
        raise AssertionError("nothing is read from a server that is there again")


def test_a_restart_finds_what_an_s3_server_has(plain):
    with s3() as (_, tier, options):
        options = options.replace("timeout_s=0.5", "timeout_s=60").replace("timeout_s=0.2", "timeout_s=60")
        with engine_above(tier, options, storage_wait_s=60.0) as engine:
            serve_slowly(engine, rounds()[:2])
            num_stored = engine.offload_stats().num_stored_chunks
        with engine_above(tier, options, storage_wait_s=60.0) as engine:
            assert engine.offload_stats().restored_chunks == num_stored > 0
            found = serve_last_round(engine)
            assert found["tokens"] == {name: plain[name] for name in found["tokens"]}
            assert found["promoted"] > 0
            assert found["found_tokens"] >= 0.9 * found["stored_tokens_asked_again"] > 0


@pytest.mark.parametrize("policy", ["allkeys-lru", "noeviction"])
def test_a_server_that_is_full(plain, policy):
    with valkey(maxmemory="1500kb", policy=policy) as (_, tier, options), engine_above(tier, options) as engine:
        assert tokens_of(serve_slowly(engine, rounds())) == plain
        stats = engine.offload_stats()
        if policy == "noeviction":
            assert stats.failed_storage_chunks > 0
        else:
            assert stats.missing_storage_chunks > 0
            assert (stats.failed_storage_chunks, stats.num_breaker_openings) == (0, 0), "it may evict what it likes"


def test_a_new_engine_finds_what_all_others_have_in_host_memory(monkeypatch):
    """A server evicts first what is never read from it. Here it has lost everything."""
    monkeypatch.setattr(valkey_tier, "_ASK_S", 0.0)  # the generation is lost, too
    head, later_s = random_tokens(1, 40), [0.0]

    def request(number):
        return make_request(f"request-{number}", head + random_tokens(2 + number, 20))

    with valkey(maxmemory="3mb") as (server, _, options):
        options = options.replace("timeout_s=0.2", "timeout_s=60")
        offload = make_offload(storage_tier="valkey", storage_options=options, storage_lookup_wait_s=60.0)
        old = Engine(TINY, TIGHT, offload=offload, clock=lambda: time.perf_counter() + later_s[0])
        try:
            serve_slowly(old, [[request(0)]])
            servers.ask(server.port, "FLUSHALL")  # eviction is not exact
            later_s[0] = 120.0
            serve_slowly(old, [[request(1)], [request(2)]])
            stats = old.offload_stats()
            assert stats.vanished_storage_chunks >= 10
            assert (stats.missing_storage_chunks, stats.failed_storage_chunks) == (0, 0), "it has read none of them"
            new = Engine(TINY, TIGHT, offload=offload)
            try:
                serve_slowly(new, [[request(3)]])
                assert new.offload_stats().found_storage_chunks == 10, "the head"
            finally:
                new.close()
        finally:
            old.close()
