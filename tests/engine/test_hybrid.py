"""A whole engine with layer groups that share arrays: conversations, compared with a plain engine and a dense model."""

import dataclasses
import random
from typing import Any

import numpy as np
import pytest

from tests.engine.dense import dense_logits
from tests.engine.helpers import SMALL_ENGINE, TINY, make_request, random_tokens, serve
from tests.inside.engine import engine_scheduler, kv_blocks
from tpu_offload import OffloadConfig
from tpu_offload.engine import Engine

pytestmark = pytest.mark.usefixtures("compiled_once")

# Three groups of two layers.
MODEL = dataclasses.replace(TINY, num_layers=6, kv_dtype="float32", sliding_window=10, window_layers=(0, 1, 3, 4))
PLAIN = dataclasses.replace(SMALL_ENGINE, num_blocks=400, enable_prefix_caching=False)
NUM_TURNS = 3


def first_turns(seed):
    """Prompts of several conversations, two of which begin alike; half of them are sampled, some several times."""
    rng = random.Random(seed)
    shared = random_tokens(seed, 13)
    requests = []
    for i in range(5):
        prompt = (shared if i < 2 else ()) + random_tokens(100 * seed + i, rng.randint(1, 25))
        n = 3 if i == 4 else 1
        max_tokens = rng.randint(4, 14)
        requests.append(make_request(f"c{i}", prompt, max_tokens=max_tokens, temperature=float(i % 2), seed=7 * i, n=n))
    return requests


def converse(engine, seed, *, check=False):
    """Serves all conversations; each turn continues the first sample of the last one."""
    requests = first_turns(seed)
    outputs: dict[Any, Any] = {}
    for turn in range(NUM_TURNS):
        for request in requests:
            engine.add_request(request)
        found: dict[Any, Any] = {}
        for _ in range(1000):
            if not engine.has_unfinished:
                break
            found |= {(o.request_id, o.index): o for o in engine.step() if o.finished}
            if check:
                engine.check_invariants()
        assert not engine.has_unfinished, engine.stats()
        outputs |= {(turn, *key): output for key, output in found.items()}
        requests = [
            dataclasses.replace(
                request,
                prompt_tokens=(
                    *request.prompt_tokens, *found[request.request_id, 0].tokens, *random_tokens(turn + seed, turn)
                ),
            )
            for request in requests
        ]  # fmt: skip
    return outputs


def results(outputs):
    return {key: (output.tokens, output.logprobs) for key, output in outputs.items()}


@pytest.fixture(scope="module")
def plain():
    known = {}

    def get(seed):
        if seed not in known:
            known[seed] = converse(Engine(MODEL, PLAIN), seed)
        return known[seed]

    return get


def test_the_plain_engine_agrees_with_the_dense_reference(plain):
    outputs = plain(0)
    (request,) = (request for request in first_turns(0) if request.request_id == "c0")
    tokens = request.prompt_tokens
    for turn in range(NUM_TURNS):
        output = outputs[turn, "c0", 0]
        logits = dense_logits(MODEL, [*tokens, *output.tokens])[len(tokens) - 1 : -1]
        assert output.tokens == tuple(np.argmax(logits, axis=-1).tolist())
        chances = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        np.testing.assert_allclose(output.logprobs, chances.max(-1), atol=1e-3)
        tokens = (*tokens, *output.tokens, *random_tokens(turn, turn))


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("budget", [7, 32])
@pytest.mark.parametrize("seed", range(3))
def test_later_turns_compute_only_what_is_new(plain, seed, budget, asynchronous):
    config = dataclasses.replace(
        PLAIN, enable_prefix_caching=True, max_num_batched_tokens=budget, async_scheduling=asynchronous
    )
    outputs = converse(Engine(MODEL, config), seed, check=True)
    assert results(outputs) == results(plain(seed))
    for turn in range(1, NUM_TURNS):
        for i in range(4):
            sources, before = outputs[turn, f"c{i}", 0].stats.prompt_tokens, outputs[turn - 1, f"c{i}", 0].stats
            known = sum(dataclasses.astuple(before.prompt_tokens)) + len(outputs[turn - 1, f"c{i}", 0].tokens) - 1
            # With async scheduling a step more may have been computed.
            assert known // 4 * 4 <= sources.hbm <= (known + 1) // 4 * 4


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("num_prompt", [29, 31, 32])
def test_the_end_of_a_prompt_is_cached_before_its_windows_move_on(num_prompt, asynchronous):
    config = dataclasses.replace(PLAIN, enable_prefix_caching=True, async_scheduling=asynchronous)
    engine, prompt = Engine(MODEL, config), random_tokens(1, num_prompt)
    for name in ("first", "again"):
        output = serve(engine, [make_request(name, prompt, max_tokens=12)])[name]
    assert output.stats is not None
    assert output.stats.prompt_tokens.hbm == (num_prompt - 1) // 4 * 4


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("swaps", [False, True], ids=["recompute", "swap"])
@pytest.mark.parametrize("seed", range(3))
def test_few_blocks_change_no_token(plain, seed, swaps, asynchronous):
    config = dataclasses.replace(
        PLAIN, enable_prefix_caching=True, num_blocks=55, max_num_batched_tokens=12, async_scheduling=asynchronous,
        num_spare_blocks=0,
    )  # fmt: skip
    offload = OffloadConfig.create(swap_gb=0.001, swap_mode="swap", num_cpu_chunks=0, skip_jax_precompile=True)
    engine = Engine(MODEL, config, offload=offload if swaps else None)
    engine.wait_for_host_memory()
    assert results(converse(engine, seed, check=True)) == results(plain(seed))
    assert engine.stats().num_preemptions > 0
    if swaps:
        stats = engine.offload_stats()
        assert stats is not None
        assert stats.num_swapped_in > 0
        assert stats.num_lost_swaps == 0
    assert kv_blocks(engine_scheduler(engine)).num_free == 55
    engine.close()
