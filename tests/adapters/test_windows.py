"""The connector with a model of several KV cache groups: sliding windows beside full attention, as Gemma-3 has them."""

from typing import Any

import pytest

from tests.adapters.llm_client import conversations, ours, tokens
from tests.adapters.test_hybrid_models import FEW_BLOCKS, MANY_BLOCKS, NO_PREFIX_CACHE, answers, num_cached
from tests.adapters.test_llm import assert_nothing_leaked

pytestmark = pytest.mark.vllm

MODEL = {"model": "gemma3"}
FEW = FEW_BLOCKS["gemma3"]
CHUNKED = {"max_num_batched_tokens": 32}
ASYNC = {"async_scheduling": True}
STAGED = {"save_path": "staged", "load_path": "staged"}
DOCUMENT = tokens("document", 160)
PROMPTS = [DOCUMENT + tokens(f"question {i}", 20 + i) for i in range(4)]
EMPTY_HBM = [{"do": "drain"}, {"do": "reset_hbm"}]
GENERATE = {"do": "generate", "prompts": PROMPTS}

SETUPS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "defaults": (FEW, {"skip_jax_precompile": False}, ("num_checkpoints", "num_window_chunks")),
    "staged": (FEW, STAGED, ()),
    "chunked prefill": (FEW | CHUNKED, {}, ()),
    "async scheduling, answers saved": (ASYNC | {"num_gpu_blocks_override": 44}, {"decode_save": True}, ()),
    "two blocks a chunk": (FEW, {"blocks_per_chunk": 2}, ()),
    "little host memory": (FEW, {"num_cpu_chunks": 40}, ("num_evicted_checkpoints",)),
    "two devices": (FEW | {"tensor_parallel_size": 2}, {}, ()),
}


@pytest.mark.parametrize(("engine", "settings", "counted"), SETUPS.values(), ids=SETUPS)
def test_answers_equal_those_without_a_connector(process, plain, engine, settings, counted):
    steps = conversations(max_tokens=12)
    devices = {"tensor_parallel_size": engine.get("tensor_parallel_size", 1)}  # whose sums differ
    right = plain(steps, MANY_BLOCKS | NO_PREFIX_CACHE | devices, "gemma3")
    alone = plain(steps, engine, "gemma3")
    connector = ours(**{"num_cpu_chunks": 200} | settings)
    outcome = process.run(MODEL | {"engine": engine, "connector": connector, "steps": steps})
    assert outcome["error"] is None
    assert answers(outcome) == answers(right)
    assert_nothing_leaked(outcome)
    assert sum(num_cached(outcome)) > sum(num_cached(alone))
    stats = outcome["end"]["stats"]
    assert stats["loaded_tokens"] > 0
    for name in counted:
        assert stats[name] > 0, name


def test_a_shared_document_is_loaded_by_the_third_request(process, plain):
    """The first saves it, the second the windows where the prompts part."""
    steps = [step for prompt in PROMPTS for step in ({"do": "generate", "prompts": [prompt]}, *EMPTY_HBM)]
    right = plain([{"do": "generate", "prompts": [prompt]} for prompt in PROMPTS], MANY_BLOCKS, "gemma3")
    outcome = process.run(MODEL | {"engine": MANY_BLOCKS, "connector": ours(), "steps": steps})
    assert answers(outcome) == answers(right)
    assert num_cached(outcome) == [0, 0, len(DOCUMENT), len(DOCUMENT)]
    assert_nothing_leaked(outcome)


def test_wrong_kv_would_be_noticed(process):
    steps = [GENERATE, *EMPTY_HBM, {"do": "shuffle_host_memory"}, GENERATE]
    first, second = answers(process.run(MODEL | {"engine": MANY_BLOCKS, "connector": ours(), "steps": steps}))
    assert first != second


@pytest.mark.parametrize("settings", [{}, STAGED], ids=["direct", "staged"])
def test_requests_whose_load_fails_are_computed(process, plain, settings):
    steps = [GENERATE, *EMPTY_HBM, {"do": "break_loads", "times": 2}, GENERATE, *EMPTY_HBM, GENERATE]
    right = plain([GENERATE], MANY_BLOCKS | NO_PREFIX_CACHE, "gemma3")
    outcome = process.run(MODEL | {"engine": MANY_BLOCKS, "connector": ours(**settings), "steps": steps})
    assert answers(outcome) == 3 * answers(right)
    assert_nothing_leaked(outcome, failed=True)
    assert num_cached(outcome)[2] > len(DOCUMENT)


def test_a_reset_invalidates_what_was_saved(process, plain):
    steps = [GENERATE, {"do": "drain"}, {"do": "reset"}, GENERATE]
    outcome = process.run(MODEL | {"engine": MANY_BLOCKS, "connector": ours(), "steps": steps})
    assert answers(outcome) == 2 * answers(plain([GENERATE], MANY_BLOCKS | NO_PREFIX_CACHE, "gemma3"))
    assert outcome["end"]["stats"]["loaded_tokens"] == 0
    assert_nothing_leaked(outcome)


def test_lost_caches_end_the_engine(process):
    steps = [GENERATE, *EMPTY_HBM, {"do": "lose_caches", "skip": [0]}, GENERATE]
    why = "The model has several KV cache groups, for which vLLM cannot compute requests anew in new caches"
    with pytest.raises(pytest.fail.Exception, match=why):
        process.run(MODEL | {"engine": MANY_BLOCKS, "connector": ours(), "steps": steps})
