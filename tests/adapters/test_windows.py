"""The connector with a model of several KV cache groups: sliding windows beside full attention, as Gemma-3 has them."""

import pytest

from tests.adapters.llm_client import conversations, ours
from tests.adapters.test_checkpoints import ASYNC, DOCUMENT, EMPTY_HBM, GENERATE, STAGED
from tests.adapters.test_hybrid_models import MANY_BLOCKS, NO_PREFIX_CACHE, answers, num_cached
from tests.adapters.test_llm import assert_nothing_leaked
from tests.grids import few

pytestmark = pytest.mark.vllm

MODEL = {"model": "gemma3"}


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


@pytest.mark.parametrize("scheduling", few([{}, ASYNC], ASYNC), ids=["sync", "async"])
def test_without_prefix_caching(process, plain, scheduling):
    """vLLM hashes prompts for the connector alone, and every hit is one in the host tier."""
    drain, chats = {"do": "drain"}, conversations(max_tokens=12)
    right = answers(plain([*chats, GENERATE], MANY_BLOCKS | NO_PREFIX_CACHE, "gemma3"))
    steps = [*chats, GENERATE, drain, {"do": "break_loads", "times": 2}, GENERATE, drain, GENERATE]
    engine = {"num_gpu_blocks_override": 44} | NO_PREFIX_CACHE | scheduling
    connector = ours(decode_save=True, breaker_retry_s=0.01)  # the document may fail twice, and backs off
    outcome = process.run(MODEL | {"engine": engine, "connector": connector, "steps": steps})
    assert outcome["error"] is None
    assert answers(outcome) == [*right, right[-1], right[-1]]
    assert_nothing_leaked(outcome, failed=True)
    assert outcome["end"]["num_preemptions"] > 0
    assert num_cached(outcome)[-1] == 4 * (len(DOCUMENT) + 16)
    assert outcome["end"]["stats"]["loaded_tokens"] >= sum(num_cached(outcome)) > 2000


def test_a_reset_invalidates_what_was_saved(process, plain):
    steps = [GENERATE, {"do": "drain"}, {"do": "reset"}, GENERATE]
    outcome = process.run(MODEL | {"engine": MANY_BLOCKS, "connector": ours(), "steps": steps})
    assert answers(outcome) == 2 * answers(plain([GENERATE], MANY_BLOCKS | NO_PREFIX_CACHE, "gemma3"))
    assert outcome["end"]["stats"]["loaded_tokens"] == 0
    assert_nothing_leaked(outcome)


def test_lost_caches_end_the_engine(process):
    steps = [GENERATE, *EMPTY_HBM, {"do": "lose_caches", "skip": [0]}, GENERATE]
    why = "The model has several KV cache groups, for which vLLM cannot compute requests again in new caches"
    with pytest.raises(pytest.fail.Exception, match=why):
        process.run(MODEL | {"engine": MANY_BLOCKS, "connector": ours(), "steps": steps})
