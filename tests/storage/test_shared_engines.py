"""Two embedded engines above one shared tier: what one stores, the other finds, whatever the server does meanwhile."""

import contextlib
import dataclasses
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.engine.helpers import TINY, make_request, num_loaded, random_tokens, rounds, serve_rounds, tokens_of
from tests.inside.engine import engine_scheduler, offload_scheduler, offloading, one_worker, set_weights
from tests.inside.scheduler import current_namespace, lookup_planner, storage_planner
from tests.storage import servers
from tests.storage.memory_tier import SHARED, SharedTier
from tests.storage.test_engine import TIGHT, make_offload, serve_slowly, settle, tier_of
from tpu_offload.engine import Engine
from tpu_offload.engine.runner import random_weights
from tpu_offload.types import BlockHash
from tpu_offload.worker import OffloadWorker

pytestmark = pytest.mark.usefixtures("compiled_once")

LATE_S = 60.0  # a busy machine does not reach it


@pytest.fixture(scope="module")
def plain():
    return tokens_of(serve_rounds(Engine(TINY, TIGHT), rounds()))


@pytest.fixture(autouse=True)
def no_servers(monkeypatch):
    monkeypatch.setattr(SharedTier, "servers", {})


@contextlib.contextmanager
def valkey(*, timeout_s=LATE_S):
    with servers.running(servers.valkey()) as server:
        yield server, f"valkey://127.0.0.1:{server.port}?timeout_s={timeout_s}&connect_timeout_s={timeout_s}"


@contextlib.contextmanager
def engine_above(url, *, clock=None, **changes):
    settings = {
        "storage_tier": "valkey",
        "storage_options": url,
        "storage_lookup_wait_s": LATE_S,
        "breaker_failures": 3,
    }
    times = {} if clock is None else {"clock": clock}
    engine = Engine(TINY, TIGHT, offload=make_offload(**(settings | changes)), **times)
    try:
        yield engine
    finally:
        engine.close()


def others(plain, outputs):
    """The tokens that requests of these names have without offloading."""
    return {name: plain[name] for name in outputs}


def test_what_another_engine_stores_later_is_found(plain):
    """The second engine has started before the first one computes anything."""
    with valkey() as (_, url), engine_above(url) as second, engine_above(url) as first:
        assert second.offload_stats().restored_chunks == 0
        serve_slowly(first, rounds()[:1])
        num_stored = first.offload_stats().num_stored_chunks
        assert num_stored > 60
        outputs = serve_slowly(second, rounds()[1:2])
        assert tokens_of(outputs) == others(plain, outputs)
        stats = second.offload_stats()
        assert stats.found_storage_chunks >= 0.9 * num_stored
        assert stats.promoted_chunks >= 0.9 * num_stored
        assert num_loaded(outputs) >= 0.9 * sum(len(r.prompt_tokens) // 4 * 4 for r in rounds()[1])
        assert stats.num_failed_jobs == stats.num_failed_storage_lookups == 0
        outputs = serve_slowly(first, rounds()[2:])
        assert tokens_of(outputs) == others(plain, outputs), "and what the second has written changes nothing"


def test_all_at_once(plain):
    """Both serve the same requests, each a step at a time, and store what the other is about to ask for."""
    with valkey() as (_, url), engine_above(url) as first, engine_above(url) as second:
        found = {}
        for requests in rounds():
            for engine in (first, second):
                for request in requests:
                    engine.add_request(request)
            while first.has_unfinished or second.has_unfinished:
                for engine in (first, second):
                    for output in engine.step():
                        if output.finished:
                            found[id(engine), output.request_id] = output.tokens
                    engine.check_invariants()
        assert {name: plain[name[1]] for name in found} == found
        assert len(found) == 2 * len(plain)


def test_a_process_that_has_started_before(plain):
    with valkey() as (_, url):
        child = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.storage.shared_child", url],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert child.stdout.readline() == "ready\n"
            with engine_above(url) as engine:
                serve_slowly(engine, rounds()[:2])
                num_stored = engine.offload_stats().num_stored_chunks
            out, _ = child.communicate("go\n", timeout=300)
        finally:
            child.kill()
            child.wait()
    found = json.loads(out)
    assert found["restored"] == 0
    assert found["found"] >= 0.9 * num_stored > 60
    assert found["promoted"] >= 0.9 * num_stored
    assert found["failed"] == 0
    assert {name: tuple(tokens) for name, tokens in found["tokens"].items()} == others(plain, found["tokens"])


def test_a_turn_after_one_that_was_generated_here_is_found():
    """The chunk with the end of the first prompt and the answer is in HBM only: generated tokens are not saved."""
    prompt = random_tokens(1, 42)
    first = make_request("1", prompt, max_tokens=7)
    with valkey() as (_, url):
        with engine_above(url) as engine:
            answer = serve_slowly(engine, [[first]])["1"].tokens
            second = make_request("2", (*prompt, *answer, *random_tokens(2, 24)))
            expected = serve_slowly(engine, [[second]])["2"].tokens
        with engine_above(url) as engine:
            assert serve_slowly(engine, [[first]])["1"].tokens == answer
            output = serve_slowly(engine, [[second]])["2"]
            assert output.tokens == expected
            sources = output.stats.prompt_tokens
            assert sources.hbm > len(prompt), "the answer is in HBM"
            assert sources.computed <= TIGHT.block_size


def test_a_restart_asks(plain):
    with valkey() as (_, url):
        with engine_above(url) as engine:
            serve_slowly(engine, rounds()[:1])
            num_stored = engine.offload_stats().num_stored_chunks
        with engine_above(url) as engine:
            assert engine.offload_stats().num_stored_chunks == 0
            outputs = serve_slowly(engine, rounds()[1:2])
            assert tokens_of(outputs) == others(plain, outputs)
            assert engine.offload_stats().promoted_chunks >= 0.9 * num_stored


@pytest.mark.parametrize("where", ["head", "middle", "tail"])
def test_the_server_has_evicted_a_part_of_each_prefix(plain, where):
    with valkey() as (_, url), engine_above(url) as second, engine_above(url) as first:
        (request,) = rounds()[0][:1]
        serve_slowly(first, [[request]])
        hashes: list[BlockHash] = []
        engine_scheduler(first)._hasher.extend(hashes, request.prompt_tokens)
        keys = [block_hash + current_namespace(offload_scheduler(first)) for block_hash in hashes]
        assert len(keys) == 10
        gone = {"head": 0, "middle": 5, "tail": 9}[where]
        tier_of(first).delete([keys[gone]])
        outputs = serve_slowly(second, [rounds()[1][:1]])
        assert tokens_of(outputs) == others(plain, outputs)
        assert num_loaded(outputs) == 4 * gone
        stats = second.offload_stats()
        assert stats.found_storage_chunks == stats.promoted_chunks == gone
        assert stats.failed_storage_chunks == 0, "nothing was read in vain"


@pytest.mark.parametrize("fault", ["freeze", "kill"])
def test_a_server_that_does_not_answer_costs_a_few_waits(plain, fault):
    with valkey(timeout_s=0.2) as (server, url):
        settings = {"storage_lookup_wait_s": 0.05, "breaker_retry_s": 1e6}
        with engine_above(url, **settings) as engine:
            waits = count_waits(engine)
            getattr(server, fault)()
            outputs = serve_slowly(engine, rounds()[:2])
            assert tokens_of(outputs) == others(plain, outputs)
            stats = engine.offload_stats()
            assert stats.num_failed_storage_lookups == 3
            assert not lookup_planner(storage_planner(offload_scheduler(engine))).breaker.closed
            assert len(waits) <= 3, "requests that have waited"
            if fault == "freeze":
                server.thaw()


def count_waits(engine, clock=time.monotonic):
    """When an engine has requests wait, by request, on this clock; grows."""
    waits: dict[str, list[float]] = {}
    look_up = offloading(engine).look_up

    def counted(sequence, *, num_computed_tokens):
        found = look_up(sequence, num_computed_tokens=num_computed_tokens)
        if found is None:
            waits.setdefault(sequence.sequence_id, []).append(clock())
        return found

    offloading(engine).look_up = counted
    return waits


class Ticks:
    """A clock that goes on by a millisecond each time that it is read."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        self.now_s += 0.001
        return self.now_s


def test_a_look_up_that_hangs_costs_one_bounded_wait(plain):
    clock = Ticks()
    with engine_above("", storage_tier=SHARED, clock=clock, storage_lookup_wait_s=0.03) as engine:
        tier_of(engine).gates["find"] = gate = threading.Event()
        waits = count_waits(engine, clock)
        outputs = serve_rounds(engine, [[request] for request in rounds()[0]])
        assert tokens_of(outputs) == others(plain, outputs)
        ((name, times),) = waits.items()
        assert name == rounds()[0][0].request_id, "from then on the lookup is late, and nobody waits for it"
        assert times[-1] - times[0] <= 0.03 + 0.01
        gate.set()
        stats = engine.offload_stats()
        assert stats.num_failed_storage_lookups == 0, "it is not over"


def test_an_idle_engine_does_not_spin():
    """It sleeps until the lookup is answered, in a few calls."""
    with engine_above("", storage_tier=SHARED) as engine:
        tier_of(engine).gates["find"] = gate = threading.Event()
        worker, polls = one_worker(engine), []
        poll = worker.poll

        def recorded(*, wait=False, wait_s=1.0):
            polls.append(wait)
            return OffloadWorker.poll(worker, wait=wait, wait_s=wait_s)

        worker.poll = recorded
        engine.add_request(rounds()[0][0])
        timer = threading.Timer(0.2, gate.set)
        timer.start()
        while not lookup_planner(storage_planner(offload_scheduler(engine)))._missing:
            engine.step()
        timer.join()
        worker.poll = poll
        assert polls[0]
        assert len(polls) < 70, "each one waits for the answer, a second at most"
        while engine.has_unfinished:
            engine.step()


NEW_WEIGHTS = 1


def test_engines_that_get_new_weights_one_after_the_other():
    """Each is reset then, while the other reads and writes what it knows; a third one finds nothing of before."""
    weights = [random_weights(dataclasses.replace(TINY, seed=seed)) for seed in (TINY.seed, NEW_WEIGHTS)]
    expected = []
    for of_model in weights:
        engine = Engine(TINY, TIGHT)
        set_weights(engine, of_model)
        expected.append(tokens_of(serve_rounds(engine, rounds())))
    with valkey() as (_, url), engine_above(url) as first, engine_above(url) as second:
        versions = {id(first): 0, id(second): 0}

        def serve_at_once():
            """A step each at a time; first is a round ahead."""
            running = {id(first): 1, id(second): 0}
            for engine in (first, second):
                for request in rounds()[running[id(engine)]]:
                    engine.add_request(request)
            while first.has_unfinished or second.has_unfinished:
                for engine in (first, second):
                    for output in engine.step():
                        if output.finished:
                            right = expected[versions[id(engine)]][output.request_id]
                            assert output.tokens == right, f"{output.request_id} with weights {versions[id(engine)]}"
                    engine.check_invariants()

        serve_at_once()
        for engine in (first, second):
            versions[id(engine)] = NEW_WEIGHTS
            set_weights(engine, weights[NEW_WEIGHTS])
            engine.reset_cache()
            serve_at_once()
        serve_at_once()
        for engine in (first, second):
            settle(engine)
            assert engine.offload_stats().promoted_chunks > 0
        with engine_above(url) as third:
            outputs = serve_rounds(third, rounds()[:1])
            assert tokens_of(outputs) == others(expected[0], outputs)
            assert third.offload_stats().found_storage_chunks == 0


def test_no_engine_deletes_what_another_has_stored(plain):
    """Neither because it does not know a chunk, nor to stay within its own number of chunks."""
    with valkey() as (_, url), engine_above(url) as first:
        serve_slowly(first, rounds()[:1])
        keys = sorted(storage_planner(offload_scheduler(first)).records.stored)
        with engine_above(url, num_storage_chunks=20) as second:
            assert tokens_of(serve_slowly(second, rounds())) == plain
            stats = second.offload_stats()
            assert stats.found_storage_chunks > 20 >= stats.num_stored_chunks
            assert stats.num_evicted_storage_chunks > 0
        assert list(tier_of(first).find([(key,) for key in keys])) == [1] * len(keys)
