"""Models with several KV cache groups, without a connector: the tests of the stack on which the connector builds."""

import pytest

from tests.adapters.llm_client import conversations, tokens

pytestmark = pytest.mark.vllm

WINDOW = 64  # of the model "gemma3", in tokens
BLOCK = 16
MANY_BLOCKS = {"num_gpu_blocks_override": 400}
FEW_BLOCKS = {"num_gpu_blocks_override": 36}  # 34 are the least for one request of 256 tokens, and the null block
NO_PREFIX_CACHE = {"enable_prefix_caching": False}
CHUNKED = {"max_num_batched_tokens": 32}
ASYNC = {"async_scheduling": True}

CONVERSATIONS = conversations(max_tokens=12)
DOCUMENT = tokens("document", 160)  # 10 blocks, of which a window spans 5
PROMPTS = [DOCUMENT + tokens(f"question {i}", 20 + i) for i in range(4)]
ONE_BY_ONE = [{"do": "generate", "prompts": [prompt]} for prompt in PROMPTS]


def answers(outcome):
    return [step["tokens"] for step in outcome["steps"] if isinstance(step, dict) and "tokens" in step]


def num_cached(outcome):
    return [sum(step["cached"]) for step in outcome["steps"] if isinstance(step, dict) and "cached" in step]


def test_groups_and_arrays(process):
    outcome = process.run({"model": "gemma3", "engine": MANY_BLOCKS, "steps": [{"do": "kv_layout"}]})
    assert outcome["error"] is None
    (layout,) = outcome["steps"]
    groups = [(group["spec"], group["window"], group["block_size"]) for group in layout["groups"]]
    window = ("SlidingWindowSpec", WINDOW, BLOCK)
    assert groups == [window, window, ("FullAttentionSpec", None, BLOCK)]
    # Layer j of every group is in array j: a block id names the same rows whatever the group.
    assert [group["arrays"] for group in layout["groups"]] == 3 * [[0, 1]]
    layers = [name.split(".")[2] for group in layout["groups"] for name in group["layers"]]
    assert layers == ["0", "3", "1", "4", "2", "5"]
    assert layout["arrays"] == 2 * [[["bfloat16", layout["num_blocks"], BLOCK, 2, 2, 128]]]
    assert layout["num_blocks"] == 400


def test_prefix_caching_does_not_change_answers(plain):
    for steps in (ONE_BY_ONE, CONVERSATIONS):
        cached, computed = (plain(steps, MANY_BLOCKS | more, "gemma3") for more in ({}, NO_PREFIX_CACHE))
        assert answers(cached) == answers(computed)
        assert sum(num_cached(cached)) > 0 == sum(num_cached(computed))
    # vLLM keeps windows only where a prompt ends, or where a second one was seen to branch off.
    assert num_cached(plain(ONE_BY_ONE, MANY_BLOCKS, "gemma3")) == [0, 0, len(DOCUMENT), len(DOCUMENT)]


@pytest.mark.parametrize("engine", [CHUNKED, {}, ASYNC], ids=["chunked prefill", "preemption", "async scheduling"])
def test_scheduling_does_not_change_answers(plain, engine):
    expected = plain(CONVERSATIONS, MANY_BLOCKS | NO_PREFIX_CACHE, "gemma3")
    outcome = plain(CONVERSATIONS, FEW_BLOCKS | engine, "gemma3")
    assert answers(outcome) == answers(expected)


def test_the_window_is_applied(plain):
    """A model with half the window has the same answers while they fit into it."""
    prompts = [tokens(f"prompt {i}", length) for i, length in enumerate((20, 24, 40, 100, 200))]
    steps = [{"do": "generate", "prompts": prompts}]
    (whole,), (half,) = (answers(plain(steps, MANY_BLOCKS, model)) for model in ("gemma3", "gemma3, half the window"))
    assert [a == b for a, b in zip(whole, half, strict=True)] == [True, True, False, False, False]


@pytest.mark.parametrize("group", range(3))
def test_wrong_kv_of_any_group_is_noticed(process, plain, group):
    ask = {"do": "generate", "prompts": PROMPTS}
    outcome = process.run(
        {"model": "gemma3", "engine": MANY_BLOCKS, "steps": [ask, {"do": "scramble_hbm", "group": group}, ask]}
    )
    first, num_scrambled, second = outcome["steps"]
    assert num_scrambled > 1
    assert first["tokens"] == answers(plain([ask], MANY_BLOCKS | NO_PREFIX_CACHE, "gemma3"))[0]
    assert min(second["cached"]) >= len(DOCUMENT)
    assert all(a != b for a, b in zip(first["tokens"], second["tokens"], strict=True))
