"""An S3 server that is killed and returns with what it has: below a tier, and below the embedded engine."""

import dataclasses
import os
import random

import pytest

from tests.engine.helpers import TINY, rounds, serve_rounds, tokens_of
from tests.storage import killed_server, server_kills
from tests.storage.conformance import NUM_CHUNKS, SPEC, key_of, payload, read, write
from tests.storage.killed_server import TierLife
from tests.storage.shared_child import serve_last_round
from tests.storage.test_engine import TIGHT, make_offload, serve_slowly
from tpu_offload.engine import Engine
from tpu_offload.errors import TransferError
from tpu_offload.storage.object import ObjectTier


@pytest.fixture(autouse=True)
def credentials(monkeypatch):
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    for name, value in killed_server.CREDENTIALS.items():
        monkeypatch.setenv(name, value)


def tier_above_a_server_that_is_killed(directory, *, num_kills, seed):
    with killed_server.store(directory) as server:
        life = TierLife(directory, server, seed)
        for _ in range(num_kills):
            life.live()
            life.check()
    return life.counts


def test_what_was_acknowledged_is_there_after_the_server_was_killed(tmp_path):
    counts = tier_above_a_server_that_is_killed(tmp_path, num_kills=4, seed=1)
    assert counts["failed"] == 4 * killed_server.NUM_THREADS


def test_a_record_that_the_server_has_lost_in_part_is_refused(tmp_path):
    with killed_server.store(tmp_path) as server:
        tier = ObjectTier(dataclasses.replace(SPEC, options=killed_server.url(server.port)))
        for i in range(NUM_CHUNKS):
            write(tier, key_of(i), i)
        server.kill()
        for i in range(1, NUM_CHUNKS):
            killed_server.damage(killed_server.file_of(tmp_path, tier, key_of(i)), random.Random(i))
        server.start()
        assert read(tier, key_of(0)) == payload(0)
        for i in range(1, NUM_CHUNKS):
            with pytest.raises((OSError, TransferError)):
                read(tier, key_of(i))
        tier.close()


@pytest.mark.slow
def test_the_server_of_a_tier_is_killed_a_hundred_times(tmp_path):
    counts = tier_above_a_server_that_is_killed(tmp_path, num_kills=100, seed=2)
    assert counts["refused"] > 10


def test_a_new_engine_finds_what_a_server_had_that_was_killed_in_between(tmp_path):
    plain = tokens_of(serve_rounds(Engine(TINY, TIGHT), rounds()))
    with killed_server.store(tmp_path) as server:
        settings = {"storage_tier": "object", "storage_options": killed_server.url(server.port)}
        engine = Engine(TINY, TIGHT, offload=make_offload(**settings))
        serve_slowly(engine, rounds()[:2])
        num_stored = engine.offload_stats().num_stored_chunks
        server.kill()
        engine.close()
        server.start()
        engine = Engine(TINY, TIGHT, offload=make_offload(**settings))
        assert engine.offload_stats().restored_chunks == num_stored > 0
        found = serve_last_round(engine)
        assert found["tokens"] == {name: plain[name] for name in found["tokens"]}
        assert found["found_tokens"] >= 0.9 * found["stored_tokens_asked_again"] > 0
        engine.close()


def test_an_engine_whose_server_is_killed_and_returns():
    counts = server_kills.run(2, 0)
    assert counts.openings >= counts.kills == 2
    assert min(counts.read_chunks, counts.failed_chunks, counts.restored_chunks) > 0


@pytest.mark.slow
def test_the_server_of_an_engine_is_killed_a_hundred_times():
    counts = server_kills.run(100, 1)
    assert counts.openings >= counts.kills == 100
    assert min(counts.frozen, counts.damaged_objects, counts.restarts, counts.restarts_beside_a_dead_server) > 0
    assert max(counts.threads) <= counts.threads[0] + 1  # one that deletes earlier generations
    assert max(counts.descriptors) <= counts.descriptors[0] + 16  # connections that the client keeps open
