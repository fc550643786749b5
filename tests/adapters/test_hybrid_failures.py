"""What goes wrong with models of several KV cache groups, and of two page shapes: preemption, aborts, resets, failures.

Gemma-3-like (windows), Gemma-4-like (pages of two shapes) and Qwen3.5-like (states), of which `test_states` has more.
"""

from typing import Any

import pytest

from tests.adapters.llm_client import conversations, ours, tokens
from tests.adapters.test_checkpoints import ASYNC, DOCUMENT, EMPTY_HBM, GENERATE, PROMPTS
from tests.adapters.test_hybrid_models import MANY_BLOCKS, NO_PREFIX_CACHE, answers, num_cached
from tests.adapters.test_llm import assert_nothing_leaked
from tests.grids import few

pytestmark = pytest.mark.vllm

MODELS = ["gemma3", "gemma4"]
SCHEDULING: list[Any] = [pytest.param({}, id="sync"), pytest.param(ASYNC, id="async")]


def long_answers(num_requests, max_tokens):
    prompts = [tokens(f"prompt {i}", 60 + i) for i in range(num_requests)]
    return [{"do": "generate", "prompts": prompts, "max_tokens": max_tokens}] * 2


# By model and scheduling: HBM's blocks, and a workload that does not fit.
SCARCE = {
    ("gemma3", "sync"): (36, long_answers(4, 100)),
    ("gemma3", "async"): (44, long_answers(6, 150)),
    ("gemma4", "sync"): (24, conversations(max_tokens=12)),
    ("gemma4", "async"): (24, conversations(max_tokens=12)),
    ("qwen3.5", "sync"): (24, conversations(max_tokens=12)),
    ("qwen3.5", "async"): (28, conversations(max_tokens=12)),
}


@pytest.mark.parametrize(("model", "scheduling"), few(SCARCE, ("qwen3.5", "async")))
def test_requests_that_are_preempted_and_a_host_tier_that_evicts(process, plain, model, scheduling):
    num_blocks, steps = SCARCE[model, scheduling]
    engine = {"num_gpu_blocks_override": num_blocks} | (ASYNC if scheduling == "async" else {})
    connector = ours(num_cpu_chunks=40, decode_save=True)
    outcome = process.run({"model": model, "engine": engine, "connector": connector, "steps": steps})
    assert outcome["error"] is None
    assert answers(outcome) == answers(plain(steps, MANY_BLOCKS | NO_PREFIX_CACHE, model))
    assert outcome["end"]["num_preemptions"] > 0
    assert outcome["end"]["stats"]["num_evicted_chunks"] > 0
    assert_nothing_leaked(outcome)


@pytest.mark.parametrize("engine", SCHEDULING)
@pytest.mark.parametrize("model", MODELS)
def test_aborted_requests(process, plain, model, engine):
    abort = {"0": "WAITING_FOR_REMOTE_KVS", "1": "RUNNING", "5": "WAITING"}
    drive = {"do": "drive", "prompts": PROMPTS + PROMPTS[:2], "abort": abort}
    steps = [GENERATE, *EMPTY_HBM, drive, *EMPTY_HBM, GENERATE]
    spec = {"model": model, "engine": MANY_BLOCKS | engine, "connector": ours(sync_load=False), "steps": steps}
    outcome = process.run(spec)
    assert sorted(outcome["steps"][3]["aborted"]) == sorted(map(int, abort))
    (right,), (first, driven, last) = answers(plain([GENERATE], MANY_BLOCKS, model)), answers(outcome)
    assert first == last == right
    for i, expected in enumerate(right + right[:2]):
        assert driven[i] == (expected[: len(driven[i])] if str(i) in abort else expected)
    assert_nothing_leaked(outcome)


@pytest.mark.parametrize("engine", SCHEDULING)
@pytest.mark.parametrize("model", MODELS)
def test_a_reset_while_requests_are_loaded(process, plain, model, engine):
    """With async scheduling their loads fail, and they are computed."""
    drive = {"do": "drive", "prompts": PROMPTS, "abort": {}, "reset_when": "WAITING_FOR_REMOTE_KVS"}
    steps = [GENERATE, {"do": "drain"}, {"do": "reset"}, GENERATE, *EMPTY_HBM, drive, *EMPTY_HBM, GENERATE]
    spec = {"model": model, "engine": MANY_BLOCKS | engine, "connector": ours(sync_load=False), "steps": steps}
    outcome = process.run(spec)
    assert answers(outcome) == 4 * answers(plain([GENERATE], MANY_BLOCKS | NO_PREFIX_CACHE, model))
    assert_nothing_leaked(outcome, failed=None)


@pytest.mark.parametrize("model", MODELS)
def test_a_request_that_is_preempted_with_a_token_on_its_way(process, plain, model):
    drive = {"do": "drive", "prompts": PROMPTS[:3], "abort": {}, "max_tokens": 40}
    engine = MANY_BLOCKS | ASYNC
    steps = [drive | {"preempt_at": [5, 20]}, *EMPTY_HBM, GENERATE]
    outcome = process.run({"model": model, "engine": engine, "connector": ours(decode_save=True), "steps": steps})
    assert answers(outcome) == answers(plain([drive, GENERATE], engine, model))
    assert_nothing_leaked(outcome)


@pytest.mark.parametrize("engine", SCHEDULING)
@pytest.mark.parametrize(
    ("model", "page_group", "settings"),
    [("gemma3", 0, {}), ("gemma4", 1, {}), ("gemma4", 0, {"sync_load": False}), ("qwen3.5", 2, {})],
)
def test_loads_that_fail_in_one_page_group(process, plain, model, page_group, settings, engine):
    broken = {"do": "break_loads", "times": 2, "group": page_group}
    steps = [GENERATE, *EMPTY_HBM, broken, GENERATE, *EMPTY_HBM, GENERATE]
    connector = ours(breaker_retry_s=0.01, **settings)
    outcome = process.run({"model": model, "engine": MANY_BLOCKS | engine, "connector": connector, "steps": steps})
    assert answers(outcome) == 3 * answers(plain([GENERATE], MANY_BLOCKS | NO_PREFIX_CACHE, model))
    assert_nothing_leaked(outcome, failed=True)
    assert num_cached(outcome)[2] > len(DOCUMENT)
