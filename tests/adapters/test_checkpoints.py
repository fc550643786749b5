"""The connector with models of several KV cache groups: windows as in Gemma-3, states as in Qwen3.5."""

from typing import Any

import pytest

from tests.adapters.llm_client import conversations, ours, tokens
from tests.adapters.test_hybrid_models import FEW_BLOCKS, MANY_BLOCKS, NO_PREFIX_CACHE, answers, num_cached
from tests.adapters.test_llm import assert_nothing_leaked
from tests.grids import few

pytestmark = pytest.mark.vllm

ASYNC = {"async_scheduling": True}
STAGED = {"save_path": "staged", "load_path": "staged"}
DOCUMENT = tokens("document", 160)
PROMPTS = [DOCUMENT + tokens(f"question {i}", 20 + i) for i in range(4)]
EMPTY_HBM = [{"do": "drain"}, {"do": "reset_hbm"}]
GENERATE = {"do": "generate", "prompts": PROMPTS}

# The engine, beside few blocks; the connector; and statistics that must count something.
SETUPS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "defaults": ({}, {"skip_jax_precompile": False}, ("num_checkpoints",)),
    "staged": ({}, STAGED, ()),
    "chunked prefill": ({"max_num_batched_tokens": 32}, {}, ()),
    "async scheduling, answers saved": (ASYNC, {"decode_save": True}, ()),
    "two blocks a chunk": ({}, {"blocks_per_chunk": 2}, ()),
    "little host memory": ({}, {"num_cpu_chunks": 40}, ("num_evicted_checkpoints",)),
    "two devices": ({"tensor_parallel_size": 2}, {}, ()),
}
ASYNC_BLOCKS = {"gemma3": 44, "qwen3.5": 28}  # a few more; of preemptions see `test_hybrid_failures`
PIECES = {"gemma3": "num_window_chunks", "qwen3.5": "num_states"}


def each_with_one_model():
    """Each setup with one of the models, in turn; with the other it is a campaign's (`-m slow`)."""
    for i, setup in enumerate(SETUPS):
        for j, model in enumerate(PIECES):
            if setup == "async scheduling, answers saved" and model == "qwen3.5":
                yield pytest.param(setup, model)
            else:
                yield pytest.param(setup, model, marks=pytest.mark.slow if (i + j) % 2 else pytest.mark.wide)


@pytest.mark.parametrize(("setup", "model"), each_with_one_model())
def test_answers_equal_those_without_a_connector(process, plain, setup, model):
    changes, settings, counted = SETUPS[setup]
    engine = FEW_BLOCKS[model] | changes
    if "async_scheduling" in changes:
        engine = ASYNC | {"num_gpu_blocks_override": ASYNC_BLOCKS[model]}
    steps = conversations(max_tokens=12)
    devices = {"tensor_parallel_size": engine.get("tensor_parallel_size", 1)}  # whose sums differ
    right = plain(steps, MANY_BLOCKS | NO_PREFIX_CACHE | devices, model)
    alone = plain(steps, engine, model)
    connector = ours(**{"num_cpu_chunks": 200} | settings)
    outcome = process.run({"model": model, "engine": engine, "connector": connector, "steps": steps})
    assert outcome["error"] is None
    assert answers(outcome) == answers(right)
    assert_nothing_leaked(outcome)
    assert sum(num_cached(outcome)) > sum(num_cached(alone))
    stats = outcome["end"]["stats"]
    assert stats["loaded_tokens"] > 0
    for name in (*counted, PIECES[model]):
        assert stats[name] > 0, name


@pytest.mark.parametrize("model", few(PIECES, "gemma3"))
def test_a_shared_document_is_loaded_by_the_third_request(process, plain, model):
    """The first saves it. Of the second only the host tier knows where it parts, and it saves what is needed there."""
    steps = [step for prompt in PROMPTS for step in ({"do": "generate", "prompts": [prompt]}, *EMPTY_HBM)]
    right = plain([{"do": "generate", "prompts": [prompt]} for prompt in PROMPTS], MANY_BLOCKS, model)
    outcome = process.run({"model": model, "engine": MANY_BLOCKS, "connector": ours(), "steps": steps})
    assert outcome["error"] is None
    assert answers(outcome) == answers(right)
    assert num_cached(outcome) == [0, 0, len(DOCUMENT), len(DOCUMENT)]
    assert_nothing_leaked(outcome)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("changes", "model"),
    [
        ({}, "gemma3"),
        (ASYNC, "qwen3.5"),
        pytest.param({}, "qwen3.5", marks=pytest.mark.slow),
        pytest.param(ASYNC, "gemma3", marks=pytest.mark.slow),
    ],
    ids=["sync", "async", "sync, states", "async, windows"],
)
def test_what_the_host_tier_has_lost_or_another_engine_has_computed_comes_from_files(
    process, plain, model, changes, tmp_path
):
    """The second engine finds at its first prompts what the first one stored."""
    steps = [*conversations(max_tokens=12), {"do": "drain"}]
    engine = {"num_gpu_blocks_override": ASYNC_BLOCKS[model]} | changes
    right = plain(conversations(max_tokens=12), MANY_BLOCKS | NO_PREFIX_CACHE, model)
    storage = {
        "storage_tier": "file",
        "storage_options": f"{tmp_path / 'kv'},min_free_gb=0",
        "num_storage_chunks": 1000,
        "storage_wait_s": 60.0,
    }
    settings = {"num_cpu_chunks": 40, "decode_save": True} | storage
    run = {"model": model, "engine": engine, "connector": ours(**settings), "steps": steps}
    first, second = process.run(run), process.run(run)
    by_default = process.run(run | {"connector": ours(**settings, load_mode="auto")})
    for outcome in (first, second, by_default):
        assert outcome["error"] is None
        assert answers(outcome) == answers(right)
        assert_nothing_leaked(outcome)
        assert outcome["end"]["stats"]["num_failed_jobs"] == 0
    assert first["end"]["stats"]["cascaded_chunks"] > 0
    stats = second["end"]["stats"]
    assert stats["restored_chunks"] > 0
    assert stats["promoted_chunks"] > 0
    computed, found = (sum(outcome["steps"][0]["cached"]) for outcome in (first, second))
    assert found > computed, "the first prompts"
