"""The connector with a model that has states beside full attention: linear attention, as Qwen3.5 has it."""

import re

import pytest

from tests.adapters.llm_client import conversations, ours
from tests.adapters.test_checkpoints import ASYNC, DOCUMENT, EMPTY_HBM, GENERATE, PROMPTS, STAGED
from tests.adapters.test_hybrid_models import MANY_BLOCKS, NO_PREFIX_CACHE, answers, num_cached
from tests.adapters.test_llm import assert_nothing_leaked
from tests.grids import few

pytestmark = pytest.mark.vllm

MODEL = {"model": "qwen3.5"}


@pytest.mark.parametrize("group", [0, 1, 2], ids=["attention", "convolution", "delta rule"])
def test_wrong_kv_would_be_noticed(process, plain, group):
    steps = [GENERATE, *EMPTY_HBM, {"do": "shuffle_host_memory", "group": group}, GENERATE]
    outcome = process.run(MODEL | {"engine": MANY_BLOCKS, "connector": ours(), "steps": steps})
    first, second = answers(outcome)
    assert [first] == answers(plain([GENERATE], MANY_BLOCKS | NO_PREFIX_CACHE, "qwen3.5"))
    assert all(a != b for a, b in zip(first, second, strict=True))
    assert min(outcome["steps"][-1]["cached"]) > len(DOCUMENT)
    assert outcome["end"]["num_page_groups"] == 3


@pytest.mark.wide
def test_states_of_answers_are_saved_if_vllm_keeps_them(process, plain):
    """By default it keeps those of prompts only, so the next turn finds no more than the last prompt."""
    engine = MANY_BLOCKS | {"block_size": 16}
    steps = [step for turn in conversations(max_tokens=24)[:2] for step in (turn, *EMPTY_HBM)]
    right = plain(steps, MANY_BLOCKS | NO_PREFIX_CACHE, "qwen3.5")
    past, kept = [], []
    for interval in (0, None, 16):
        spec = {"engine": engine | {"prefix_cache_retention_interval": interval}, "steps": steps}
        outcome = process.run(MODEL | spec | {"connector": ours(num_cpu_chunks=1000, decode_save=True)})
        assert answers(outcome) == answers(right)
        assert_nothing_leaked(outcome)
        first, second = steps[0], steps[3]
        before = [len(first["said"][i]) for i in second["said"]]
        longer = [cached > length for cached, length in zip(outcome["steps"][3]["cached"], before, strict=True)]
        past.append(any(longer))
        assert any(longer) == all(longer)
        kept.append(outcome["end"]["stats"]["num_checkpoints"])
    assert past == [False, True, True]
    # With an interval, all that vLLM keeps; without one it keeps every state, and the library saves what it chooses.
    assert kept[0] < kept[1] < kept[2]


@pytest.mark.parametrize(
    ("settings", "group"), few([({}, 0), ({}, 2), (STAGED, 0)], ({}, 2)), ids=["attention", "states", "staged"]
)
def test_requests_whose_load_fails_are_computed(process, plain, settings, group):
    broken = {"do": "break_loads", "times": 2, "group": group}
    steps = [GENERATE, *EMPTY_HBM, broken, GENERATE, *EMPTY_HBM, GENERATE]
    right = plain([GENERATE], MANY_BLOCKS | NO_PREFIX_CACHE, "qwen3.5")
    outcome = process.run(MODEL | {"engine": MANY_BLOCKS, "connector": ours(**settings), "steps": steps})
    assert answers(outcome) == 3 * answers(right)
    assert_nothing_leaked(outcome, failed=True)
    assert num_cached(outcome)[2] > len(DOCUMENT)


@pytest.mark.parametrize("engine", [{}, ASYNC], ids=["sync", "async"])
def test_aborted_requests(process, plain, engine):
    """One that waits for its load, one that runs, and one that waits to be scheduled."""
    abort = {"0": "WAITING_FOR_REMOTE_KVS", "1": "RUNNING", "5": "WAITING"}
    drive = {"do": "drive", "prompts": PROMPTS + PROMPTS[:2], "abort": abort}
    steps = [GENERATE, *EMPTY_HBM, drive, *EMPTY_HBM, GENERATE]
    outcome = process.run(MODEL | {"engine": MANY_BLOCKS | engine, "connector": ours(), "steps": steps})
    driven = outcome["steps"][3]
    assert sorted(driven["aborted"]) == sorted(map(int, abort))
    assert not driven["hung"]
    (right,), (first, found, last) = answers(plain([GENERATE], MANY_BLOCKS, "qwen3.5")), answers(outcome)
    assert first == last == right
    for i, answer in enumerate(right + right[:2]):
        assert found[i] == (answer[: len(found[i])] if str(i) in abort else answer)
    assert_nothing_leaked(outcome)


def test_a_reset_invalidates_what_was_saved(process, plain):
    """Also what is being loaded then."""
    drive = {"do": "drive", "prompts": PROMPTS, "abort": {}, "reset_when": "WAITING_FOR_REMOTE_KVS"}
    steps = [GENERATE, {"do": "drain"}, {"do": "reset"}, GENERATE, *EMPTY_HBM, drive, *EMPTY_HBM, GENERATE]
    outcome = process.run(MODEL | {"engine": MANY_BLOCKS, "connector": ours(), "steps": steps})
    assert answers(outcome) == 4 * answers(plain([GENERATE], MANY_BLOCKS | NO_PREFIX_CACHE, "qwen3.5"))
    assert num_cached(outcome)[1] == num_cached(outcome)[0]
    assert_nothing_leaked(outcome)


def test_running_requests_are_preempted_and_resumed_at_once(process, plain):
    drive = {"do": "drive", "prompts": PROMPTS[:3], "abort": {}, "max_tokens": 40}
    engine = MANY_BLOCKS | ASYNC
    steps = [drive | {"preempt_at": [5, 20]}, *EMPTY_HBM, GENERATE]
    outcome = process.run(MODEL | {"engine": engine, "connector": ours(decode_save=True), "steps": steps})
    assert answers(outcome) == answers(plain([drive, GENERATE], engine, "qwen3.5"))
    assert_nothing_leaked(outcome)


def test_lost_caches_end_the_engine(process):
    steps = [GENERATE, *EMPTY_HBM, {"do": "lose_caches", "skip": [0], "group": 1}, GENERATE]
    why = "The model has several KV cache groups, for which vLLM cannot compute requests again in new caches"
    with pytest.raises(pytest.fail.Exception, match=why):
        process.run(MODEL | {"engine": MANY_BLOCKS, "connector": ours(), "steps": steps})


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (NO_PREFIX_CACHE, "prefix caching is off: .*; set --enable-prefix-caching"),
        ({"speculative_config": NGRAM}, "speculative decoding: .*; remove --speculative-config"),
    ],
    ids=["no prefix caching", "drafts"],
)
def test_states_that_cannot_be_saved_are_refused(process, engine, message):
    outcome = process.run(MODEL | {"engine": MANY_BLOCKS | engine, "connector": ours(), "steps": []})
    assert re.fullmatch(f"ConfigError: tpu_offload: {message}", outcome["error"])
