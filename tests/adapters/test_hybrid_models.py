"""Models with several KV cache groups, without a connector: the tests of the stack on which the connector builds."""

import pytest

from tests.adapters.llm_client import conversations, tokens
from tests.grids import few

pytestmark = pytest.mark.vllm

BLOCK = 16
WINDOW = 64  # of the model "gemma3", in tokens
GROUPS = {"gemma3": 3, "qwen3.5": 4}
MANY_BLOCKS = {"num_gpu_blocks_override": 400}
# Little more than vLLM wants for one request of 256 tokens.
FEW_BLOCKS = {"gemma3": {"num_gpu_blocks_override": 36}, "qwen3.5": {"num_gpu_blocks_override": 24}}
NO_PREFIX_CACHE = {"enable_prefix_caching": False}
CHUNKED = {"max_num_batched_tokens": 32}
ASYNC = {"async_scheduling": True}

CONVERSATIONS = conversations(max_tokens=12)
DOCUMENT = tokens("document", 160)
PROMPTS = [DOCUMENT + tokens(f"question {i}", 20 + i) for i in range(4)]
ONE_BY_ONE = [{"do": "generate", "prompts": [prompt]} for prompt in PROMPTS]

models = pytest.mark.parametrize("model", GROUPS)


def answers(outcome):
    return [step["tokens"] for step in outcome["steps"] if isinstance(step, dict) and "tokens" in step]


def num_cached(outcome):
    return [sum(step["cached"]) for step in outcome["steps"] if isinstance(step, dict) and "cached" in step]


def layout_of(process, model):
    """By group: (kind, window, block size), numbers of its layers, and their arrays; and (dtype, *shape) by array."""
    outcome = process.run({"model": model, "engine": MANY_BLOCKS, "steps": [{"do": "kv_layout"}]})
    assert outcome["error"] is None
    (layout,) = outcome["steps"]
    assert layout["num_blocks"] == 400
    groups = layout["groups"]
    layers = [[int(name.split(".")[2]) for name in group["layers"]] for group in groups]
    kinds = [(group["spec"], group["window"], group["block_size"]) for group in groups]
    return kinds, layers, [group["arrays"] for group in groups], layout["arrays"]


def test_groups_of_windows_share_arrays_with_full_attention(process):
    kinds, layers, indices, arrays = layout_of(process, "gemma3")
    window = ("SlidingWindowSpec", WINDOW, BLOCK)
    assert kinds == [window, window, ("FullAttentionSpec", None, BLOCK)]
    assert layers == [[0, 3], [1, 4], [2, 5]]
    # Layer j of every group is in array j: a block id names the same rows whatever the group.
    assert indices == 3 * [[0, 1]]
    assert arrays == 2 * [[["bfloat16", 400, BLOCK, 2, 2, 128]]]


def test_groups_of_states_have_arrays_of_their_own(process):
    kinds, layers, indices, arrays = layout_of(process, "qwen3.5")
    assert kinds == [*3 * [("MambaSpec", None, BLOCK)], ("FullAttentionSpec", None, BLOCK)]
    assert layers == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert indices == [[0, 1], [2, 3], [4, 5], [6, 7]]
    num_states = 65  # two prompts of 256 tokens at every boundary
    state = [["bfloat16", num_states, 3, 256], ["float32", num_states, 4, 32, 32]]
    assert arrays == 6 * [state] + 2 * [[["bfloat16", 400, BLOCK, 2, 2, 128]]]


@models
def test_prefix_caching_does_not_change_answers(plain, model):
    for steps in (ONE_BY_ONE, CONVERSATIONS):
        cached, computed = (plain(steps, MANY_BLOCKS | more, model) for more in ({}, NO_PREFIX_CACHE))
        assert answers(cached) == answers(computed)
        assert sum(num_cached(cached)) > 0 == sum(num_cached(computed))
    # vLLM keeps windows and states only where a prompt ends, or where a second one was seen to branch off.
    assert num_cached(plain(ONE_BY_ONE, MANY_BLOCKS, model)) == [0, 0, len(DOCUMENT), len(DOCUMENT)]


@pytest.mark.parametrize("model", few(GROUPS, "qwen3.5"))
def test_prefix_caching_on_two_devices(plain, model):
    engine = MANY_BLOCKS | {"tensor_parallel_size": 2}
    cached, computed = (plain(ONE_BY_ONE, engine | more, model) for more in ({}, NO_PREFIX_CACHE))
    assert answers(cached) == answers(computed)
    assert num_cached(cached) == [0, 0, len(DOCUMENT), len(DOCUMENT)]


@models
@pytest.mark.parametrize("more", [{}, CHUNKED], ids=["preemption", "preemption and chunked prefill"])
def test_preemption_does_not_change_answers(plain, model, more):
    expected = plain(CONVERSATIONS, MANY_BLOCKS | NO_PREFIX_CACHE, model)
    outcome = plain(CONVERSATIONS, FEW_BLOCKS[model] | more, model)
    assert answers(outcome) == answers(expected)
    assert outcome["end"]["num_preemptions"] > 0 == expected["end"]["num_preemptions"]
    assert outcome["end"]["num_free_blocks"] == outcome["end"]["num_blocks"] - 1


@models
@pytest.mark.parametrize("more", [CHUNKED, ASYNC], ids=["chunked prefill", "async scheduling"])
def test_scheduling_does_not_change_answers(plain, model, more):
    expected = plain(CONVERSATIONS, MANY_BLOCKS | NO_PREFIX_CACHE, model)
    assert answers(plain(CONVERSATIONS, MANY_BLOCKS | more, model)) == answers(expected)


def test_the_window_is_applied(plain):
    """A model with half the window has the same answers while they fit into it."""
    prompts = [tokens(f"prompt {i}", length) for i, length in enumerate((20, 24, 40, 100, 200))]
    steps = [{"do": "generate", "prompts": prompts}]
    (whole,), (half,) = (answers(plain(steps, MANY_BLOCKS, model)) for model in ("gemma3", "gemma3, half the window"))
    assert [a == b for a, b in zip(whole, half, strict=True)] == [True, True, False, False, False]


@pytest.mark.parametrize(("model", "group"), [(model, group) for model in GROUPS for group in range(GROUPS[model])])
def test_wrong_kv_of_any_group_is_noticed(process, plain, model, group):
    ask = {"do": "generate", "prompts": PROMPTS}
    steps = [ask, {"do": "scramble_hbm", "group": group}, ask]
    outcome = process.run({"model": model, "engine": MANY_BLOCKS, "steps": steps})
    first, num_scrambled, second = outcome["steps"]
    assert num_scrambled > 1
    assert first["tokens"] == answers(plain([ask], MANY_BLOCKS | NO_PREFIX_CACHE, model))[0]
    assert min(second["cached"]) >= len(DOCUMENT)
    assert all(a != b for a, b in zip(first["tokens"], second["tokens"], strict=True))
