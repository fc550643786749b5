"""The embedded engine above a small file tier above a real Valkey server: which one gives back, faults, restart."""

import contextlib

import pytest

from tests.engine.helpers import TINY, make_request, num_loaded, random_tokens, serve_rounds, tokens_of
from tests.storage import servers, stores
from tests.storage.test_engine import TIGHT, make_offload, serve_slowly
from tpu_offload.engine import Engine
from tpu_offload.storage import open_inspector

FILE_CHUNKS = 40  # three prompts; the host tier has two


def requests(*numbers, turn):
    """Prompts of 12 or 13 blocks, by number."""
    return [[make_request(f"{turn}-{i}", random_tokens(i, 48 + i), max_tokens=6, seed=i)] for i in numbers]


FIRST = requests(0, 1, 2, 3, 4, 5, turn="first")
NEAR = requests(3, turn="near")  # out of the host tier, and in the file tier
FAR = requests(0, 1, turn="far")  # out of the file tier, too


@pytest.fixture(scope="module")
def plain():
    return tokens_of(serve_rounds(Engine(TINY, TIGHT), FIRST + NEAR + FAR))


@contextlib.contextmanager
def server_and_url(*, timeout_s=60.0):
    """A server, and a URL with a timeout that a busy machine does not reach unless the test wants it to."""
    with servers.running(servers.valkey()) as server:
        yield server, f"valkey://127.0.0.1:{server.port}?timeout_s={timeout_s}&connect_timeout_s={timeout_s}"


@contextlib.contextmanager
def engine_above(directory, url, **changes):
    settings = {
        "storage_tier": ("file", "valkey"),
        "storage_options": (f"{directory},min_free_gb=0", url),
        "num_storage_chunks": (FILE_CHUNKS, 256),
        "breaker_failures": 3,
        "storage_wait_s": 5.0,
    }
    engine = Engine(TINY, TIGHT, offload=make_offload(**(settings | changes)))
    try:
        yield engine
    finally:
        engine.close()


def promoted(engine):
    """By tier, the chunks that it gave back."""
    return [tier.promoted_chunks for tier in engine.tier_stats()]


def test_what_the_file_tier_has_evicted_comes_from_the_server(plain, tmp_path):
    with server_and_url() as (_, url), engine_above(tmp_path, url) as engine:
        outputs = serve_slowly(engine, FIRST)
        assert promoted(engine) == [0, 0]
        outputs |= serve_slowly(engine, NEAR)
        near, far = promoted(engine)
        assert near > 0
        assert far == 0
        outputs |= serve_slowly(engine, FAR)
        assert promoted(engine)[1] > 0
        assert tokens_of(outputs) == plain
        stats, tiers = engine.offload_stats(), engine.tier_stats()
        assert stats.num_failed_jobs == 0
        assert stats.num_evicted_storage_chunks > 0
        assert tiers[0].num_stored_chunks <= FILE_CHUNKS < tiers[1].num_stored_chunks
        again = serve_slowly(engine, requests(4, turn="again"))
        assert num_loaded(again) > 0


def test_what_came_from_the_server_is_in_the_file_tier_next_time(tmp_path):
    with server_and_url() as (_, url), engine_above(tmp_path, url) as engine:
        serve_slowly(engine, FIRST)
        serve_slowly(engine, requests(0, turn="far"))
        assert promoted(engine)[1] > 0
        serve_slowly(engine, requests(4, 5, turn="between"))  # pushes it out of the host tier
        before = promoted(engine)
        serve_slowly(engine, requests(0, turn="near"))
        assert promoted(engine)[0] > before[0]
        assert promoted(engine)[1] == before[1]


@pytest.mark.parametrize("fault", ["freeze", "kill"])
def test_while_the_server_does_not_answer_the_file_tier_goes_on(plain, tmp_path, fault):
    with server_and_url(timeout_s=0.2) as (server, url), engine_above(tmp_path, url) as engine:
        outputs = serve_slowly(engine, FIRST)
        before = engine.tier_stats()
        getattr(server, fault)()
        outputs |= serve_slowly(engine, NEAR + FAR)
        assert tokens_of(outputs) == plain
        near, far = engine.tier_stats()
        assert near.promoted_chunks > 0
        assert near.cascaded_chunks > before[0].cascaded_chunks
        assert (near.failed_storage_chunks, near.num_open_breakers) == (0, 0)
        assert far.failed_storage_chunks > 0
        serve_slowly(engine, requests(6, 7, turn="more"))
        assert engine.tier_stats()[1].num_open_breakers > 0
        assert engine.tier_stats()[0].num_open_breakers == 0
        if fault == "freeze":
            server.thaw()


def test_a_restart_finds_what_each_tier_has(plain, tmp_path):
    with server_and_url() as (_, url):
        with engine_above(tmp_path, url) as engine:
            serve_slowly(engine, FIRST)
            stored = [tier.num_stored_chunks for tier in engine.tier_stats()]
        with engine_above(tmp_path, url) as engine:
            assert [tier.num_stored_chunks for tier in engine.tier_stats()] == [stored[0], 0], (
                "the server is asked later"
            )
            assert engine.offload_stats().restored_chunks == stored[0]
            third = serve_slowly(engine, NEAR)
            near, far = promoted(engine)
            assert near > 0
            assert far == 0
            third |= serve_slowly(engine, FAR)
            assert promoted(engine)[1] > 0
            assert tokens_of(third) == {name: plain[name] for name in tokens_of(third)}


def test_a_restart_without_the_directory_finds_what_the_server_has(plain, tmp_path):
    """A new machine: the file tier fills again from what is read."""
    with server_and_url() as (_, url):
        with engine_above(tmp_path / "old", url) as engine:
            serve_slowly(engine, FIRST)
        with engine_above(tmp_path / "new", url) as engine:
            outputs = tokens_of(serve_slowly(engine, NEAR))
            assert outputs == {name: plain[name] for name in outputs}
            assert promoted(engine)[0] == 0 < promoted(engine)[1]
            assert engine.tier_stats()[0].num_stored_chunks >= promoted(engine)[1]


def test_a_reset_empties_both(tmp_path):
    with server_and_url() as (_, url), engine_above(tmp_path, url) as engine:
        serve_slowly(engine, FIRST[:2])
        assert all(tier.num_stored_chunks for tier in engine.tier_stats())
        engine.reset_cache()
        serve_slowly(engine, FIRST[2:3])
        stats = engine.tier_stats()
        assert stats[1].num_stored_chunks == stats[0].num_stored_chunks > 0
        assert promoted(engine) == [0, 0]
    assert stores.num_current(open_inspector(str(tmp_path))) == stats[0].num_stored_chunks
