"""A whole engine with states: conversations, compared with a plain engine and a dense model."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from tests.engine.dense import dense_logits
from tests.engine.helpers import SMALL_ENGINE, STATEFUL, make_request, random_tokens, serve
from tests.engine.test_hybrid import NUM_TURNS, converse, first_turns, results
from tests.inside.engine import engine_scheduler, kv_blocks, state_rows
from tpu_offload import OffloadConfig
from tpu_offload.engine import Engine

pytestmark = pytest.mark.usefixtures("compiled_once")

MODEL = dataclasses.replace(STATEFUL, kv_dtype="float32")
PLAIN = dataclasses.replace(SMALL_ENGINE, num_blocks=400, enable_prefix_caching=False)
CACHING = dataclasses.replace(PLAIN, enable_prefix_caching=True, num_states=60)


@pytest.fixture(scope="module")
def plain():
    return {seed: converse(Engine(MODEL, PLAIN), seed) for seed in range(2)}


def test_the_plain_engine_agrees_with_the_dense_reference(plain):
    (request,) = (request for request in first_turns(0) if request.request_id == "c0")
    tokens = request.prompt_tokens
    for turn in range(NUM_TURNS):
        output = plain[0][turn, "c0", 0]
        logits = dense_logits(MODEL, [*tokens, *output.tokens])[len(tokens) - 1 : -1]
        assert output.tokens == tuple(np.argmax(logits, axis=-1).tolist())
        chances = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        np.testing.assert_allclose(output.logprobs, chances.max(-1), atol=1e-3)
        tokens = (*tokens, *output.tokens, *random_tokens(turn, turn))


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("budget", [7, 32])
@pytest.mark.parametrize("seed", range(2))
def test_later_turns_compute_only_what_is_new(plain, seed, budget, asynchronous):
    config = dataclasses.replace(CACHING, max_num_batched_tokens=budget, async_scheduling=asynchronous)
    outputs = converse(Engine(MODEL, config), seed, check=True)
    assert results(outputs) == results(plain[seed])
    for turn in range(1, NUM_TURNS):
        for i in range(4):
            sources, before = outputs[turn, f"c{i}", 0].stats.prompt_tokens, outputs[turn - 1, f"c{i}", 0].stats
            known = sum(dataclasses.astuple(before.prompt_tokens)) + len(outputs[turn - 1, f"c{i}", 0].tokens) - 1
            # With async scheduling a step more may have been computed.
            assert known // 4 * 4 <= sources.hbm <= (known + 1) // 4 * 4


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("num_prompt", [29, 31, 32, 33])
def test_the_end_of_a_prompt_is_cached(plain, num_prompt, asynchronous):
    config = dataclasses.replace(CACHING, async_scheduling=asynchronous)
    engine, prompt = Engine(MODEL, config), random_tokens(1, num_prompt)
    outputs = [serve(engine, [make_request(name, prompt, max_tokens=12)])[name] for name in ("first", "again")]
    assert outputs[0].tokens == outputs[1].tokens
    assert outputs[1].stats is not None
    assert outputs[1].stats.prompt_tokens.hbm == (num_prompt - 1) // 4 * 4


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("swaps", [False, True], ids=["recompute", "swap"])
@pytest.mark.parametrize("seed", range(2))
def test_few_blocks_and_rows_change_no_token(plain, seed, swaps, asynchronous):
    config = dataclasses.replace(
        CACHING, num_blocks=45, num_states=8, max_num_batched_tokens=12, async_scheduling=asynchronous,
        num_spare_blocks=0,
    )  # fmt: skip
    offload = OffloadConfig.create(swap_gb=0.001, swap_mode="swap", num_cpu_chunks=0, skip_jax_precompile=True)
    engine = Engine(MODEL, config, offload=offload if swaps else None)
    engine.wait_for_host_memory()
    assert results(converse(engine, seed, check=True)) == results(plain[seed])
    assert engine.stats().num_preemptions > 0
    if swaps:
        stats = engine.offload_stats()
        assert stats is not None
        assert stats.num_swapped_in > 0
        assert stats.num_lost_swaps == 0
    blocks = kv_blocks(engine_scheduler(engine))
    assert blocks.num_free == 45
    states = state_rows(blocks)
    assert states is not None
    assert states.num_free == 8
    engine.close()


@pytest.mark.parametrize("num_prompt", [24, 25])
def test_samples_share_a_state_at_a_block_boundary(num_prompt):
    """The other samples continue before the last token of the prompt; after 24 tokens there is a state to share."""
    outputs = []
    for config in (PLAIN, CACHING):
        engine = Engine(MODEL, config)
        for n in (1, 3):
            request = make_request(f"n={n}", random_tokens(1, num_prompt), temperature=1.0, n=n)
            engine.add_request(request)
        found: dict[Any, Any] = {}
        while engine.has_unfinished:
            found |= {(o.request_id, o.index): o for o in engine.step() if o.finished}
            engine.check_invariants()
        outputs.append(found)
    assert results(outputs[0]) == results(outputs[1])
    shared = {n: [o[("n=3", i)].stats.prompt_tokens.hbm for i in (1, 2)] for n, o in enumerate(outputs)}
    assert shared[0] == ([24, 24] if num_prompt == 25 else [0, 0]), "without a prefix cache"
    assert shared[1] == ([24, 24] if num_prompt == 25 else [20, 20])
