"""The connector with a model that has states beside full attention: linear attention, as Qwen3.5 has it."""

from typing import Any

import pytest

from tests.adapters.llm_client import conversations, ours, tokens
from tests.adapters.test_hybrid_models import FEW_BLOCKS, MANY_BLOCKS, NO_PREFIX_CACHE, answers, num_cached
from tests.adapters.test_llm import assert_nothing_leaked

pytestmark = pytest.mark.vllm

MODEL = {"model": "qwen3.5"}
FEW = FEW_BLOCKS["qwen3.5"]
CHUNKED = {"max_num_batched_tokens": 32}
ASYNC = {"async_scheduling": True}
STAGED = {"save_path": "staged", "load_path": "staged"}
DOCUMENT = tokens("document", 160)
PROMPTS = [DOCUMENT + tokens(f"question {i}", 20 + i) for i in range(4)]
EMPTY_HBM = [{"do": "drain"}, {"do": "reset_hbm"}]
GENERATE = {"do": "generate", "prompts": PROMPTS}

SETUPS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "defaults": (FEW, {"skip_jax_precompile": False}, ("num_checkpoints",)),
    "staged": (FEW, STAGED, ()),
    "chunked prefill": (FEW | CHUNKED, {}, ()),
    "async scheduling, answers saved": (ASYNC | {"num_gpu_blocks_override": 28}, {"decode_save": True}, ()),
    "two blocks a chunk": (FEW, {"blocks_per_chunk": 2}, ()),
    "little host memory": (FEW, {"num_cpu_chunks": 40}, ("num_evicted_checkpoints",)),
    "two devices": (FEW | {"tensor_parallel_size": 2}, {}, ()),
}


@pytest.mark.parametrize(("engine", "settings", "counted"), SETUPS.values(), ids=SETUPS)
def test_answers_equal_those_without_a_connector(process, plain, engine, settings, counted):
    steps = conversations(max_tokens=12)
    devices = {"tensor_parallel_size": engine.get("tensor_parallel_size", 1)}  # whose sums differ
    right = plain(steps, MANY_BLOCKS | NO_PREFIX_CACHE | devices, "qwen3.5")
    alone = plain(steps, engine, "qwen3.5")
    connector = ours(**{"num_cpu_chunks": 200} | settings)
    outcome = process.run(MODEL | {"engine": engine, "connector": connector, "steps": steps})
    assert outcome["error"] is None
    print(num_cached(outcome), num_cached(alone), outcome["end"])
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
    right = plain([{"do": "generate", "prompts": [prompt]} for prompt in PROMPTS], MANY_BLOCKS, "qwen3.5")
    outcome = process.run(MODEL | {"engine": MANY_BLOCKS, "connector": ours(), "steps": steps})
    assert outcome["error"] is None
    assert answers(outcome) == answers(right)
    assert num_cached(outcome) == [0, 0, len(DOCUMENT), len(DOCUMENT)]
    assert_nothing_leaked(outcome)
