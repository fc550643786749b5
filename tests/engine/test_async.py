"""Async scheduling dispatches a step before the previous step's tokens are read, and gives the same tokens."""

import dataclasses
from typing import Any

import pytest

from tests.engine.helpers import SMALL_ENGINE, TINY, make_request, random_tokens, serve
from tests.inside.engine import active_sequences, engine_scheduler
from tpu_offload import OffloadConfig
from tpu_offload.engine import Engine

ASYNC = dataclasses.replace(SMALL_ENGINE, async_scheduling=True)


def some_requests():
    return [
        make_request(f"r{i}", random_tokens(i, 5 + 9 * i), max_tokens=3 + 7 * i, temperature=0.7 * (i % 2), seed=i)
        for i in range(6)
    ]


def answers(engine, requests):
    outputs = serve(engine, requests)
    return {name: (output.tokens, output.logprobs, output.finish_reason) for name, output in outputs.items()}


@pytest.mark.parametrize("num_blocks", [64, 30])
def test_tokens_are_those_of_synchronous_steps(num_blocks):
    sync, overlapped = (
        Engine(TINY, dataclasses.replace(config, num_blocks=num_blocks)) for config in (SMALL_ENGINE, ASYNC)
    )
    assert answers(overlapped, some_requests()) == answers(sync, some_requests())
    assert overlapped.stats().num_steps <= sync.stats().num_steps + 6  # one more step for each that ends


def test_a_stop_token_ends_a_request_with_another_step_in_flight():
    free = answers(Engine(TINY, SMALL_ENGINE), [make_request("a", random_tokens(0, 9), max_tokens=40)])["a"][0]
    request = make_request("a", random_tokens(0, 9), max_tokens=40, stop_token_ids=(free[10],))
    engine = Engine(TINY, ASYNC)
    tokens, logprobs, _ = answers(engine, [request])["a"]
    assert tokens == free[: free.index(free[10]) + 1]
    assert len(logprobs) == len(tokens)
    assert engine.step() == []
    engine.check_invariants()


def test_a_token_is_read_one_step_after_its_dispatch():
    engine = Engine(TINY, ASYNC)
    engine.add_request(make_request("a", random_tokens(0, 4), max_tokens=3))
    assert engine.step() == []
    assert [len(output.tokens) for output in engine.step()] == [1]
    assert len(active_sequences(engine_scheduler(engine))[0].tokens) == 5
    assert [len(output.tokens) for _ in range(2) for output in engine.step()] == [2, 3]
    assert not engine.has_unfinished


def test_aborting_requests_in_flight():
    engine = Engine(TINY, ASYNC)
    for request in some_requests():
        engine.add_request(request)
    for _ in range(3):
        engine.step()
    engine.abort(*(f"r{i}" for i in range(6)))
    assert engine.step() == []
    engine.check_invariants()
    assert answers(engine, some_requests()) == answers(Engine(TINY, SMALL_ENGINE), some_requests())


@pytest.mark.parametrize("decode_save", [False, True])
def test_with_the_host_tier(decode_save):
    """Saved blocks match their hashes, including those completed by a token in flight."""
    config = OffloadConfig.create(num_cpu_chunks=200, num_staging_blocks=32, decode_save=decode_save)
    engine = Engine(TINY, dataclasses.replace(ASYNC, num_blocks=30), offload=config)
    expected = answers(Engine(TINY, SMALL_ENGINE), some_requests())
    for _ in range(3):
        assert answers(engine, some_requests()) == expected
    stats = engine.offload_stats()
    assert stats.loaded_blocks > 0
    num_full = sum(
        (len(r.prompt_tokens) + len(expected[r.request_id][0]) * decode_save - 1) // 4 for r in some_requests()
    )
    assert stats.num_resident_chunks >= num_full - len(some_requests())  # without the last block of the last step
    engine.close()


def test_warming_up_with_a_step_in_flight_changes_no_token():
    expected = answers(Engine(TINY, SMALL_ENGINE), some_requests())
    engine = Engine(TINY, ASYNC)
    for request in some_requests():
        engine.add_request(request)
    found: dict[str, Any] = {}
    for i in range(200):
        found |= {o.request_id: (o.tokens, o.logprobs, o.finish_reason) for o in engine.step() if o.finished}
        if i % 3 == 0:
            engine.warm_up()
    assert found == expected


def test_no_step_is_wasted_on_a_request_that_ends_with_the_token_in_flight():
    """Nothing is computed after the last token, and no block is allocated for it."""
    engine = Engine(TINY, ASYNC)
    engine.add_request(make_request("a", random_tokens(0, 4), max_tokens=5))
    num_runs = []
    schedule = engine_scheduler(engine).schedule

    def noted():
        num_runs.append(schedule())
        return num_runs[-1]

    engine_scheduler(engine).schedule = noted
    while engine.has_unfinished:
        engine.step()
    assert [len(batch) for batch in num_runs] == [1, 1, 1, 1, 1, 0]


def test_a_block_that_a_token_in_flight_completes_is_saved_as_soon_as_it_is_known():
    """Not only when the next block is complete, which may never happen."""
    config = OffloadConfig.create(num_cpu_chunks=8, num_staging_blocks=8, decode_save=True)
    engine = Engine(TINY, ASYNC, offload=config)
    engine.wait_for_host_memory()
    serve(engine, [make_request("a", random_tokens(0, 4), max_tokens=7)])  # the KV of ten tokens: two blocks
    for _ in range(5):
        engine.step()
    assert engine.offload_stats().saved_blocks == 2
    engine.close()
