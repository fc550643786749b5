"""The connector in a whole vLLM engine with a tiny model, which `llm_runs` runs in another process."""

import re
from typing import Any

import pytest

from tests.adapters.kv_router import KVRouter
from tests.adapters.llm_client import conversations, ours, tokens
from tests.grids import few, few_setups
from tpu_offload.metrics import METRICS, SWAP_FIELDS

pytestmark = pytest.mark.vllm


PROMPTS = [tokens("kind", 32) + tokens(f"prompt {i}", 50 + i) for i in range(6)]
GENERATE = {"do": "generate", "prompts": PROMPTS}
EMPTY_HBM = [{"do": "drain"}, {"do": "reset_hbm"}]
"""Steps after which only the host tier has hits."""

STAGED = {"save_path": "staged", "load_path": "staged"}
ASYNC = {"async_scheduling": True}
NO_PREEMPTION = {"num_gpu_blocks_override": 400}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


def assert_nothing_leaked(outcome, *, failed=False, wrong_tokens=False):
    end, stats = outcome["end"], outcome["end"]["stats"]
    assert bool(end["wrong_tokens"]) == wrong_tokens, end["wrong_tokens"]
    assert end["num_free_blocks"] == end["num_blocks"] - 1  # the null block
    if end["num_rows"]:  # of states
        assert end["num_free_rows"] == end["num_rows"] - 1
    assert end["num_requests"] == 0
    assert not end["has_jobs"]
    assert not end["has_flights"]
    assert stats["staging_reserved_blocks"] == stats["num_jobs_in_flight"] == 0
    assert stats["num_ignored_results"] == stats["num_timed_out_jobs"] == 0
    assert failed is None or (stats["num_failed_jobs"] > 0) == failed


def answers(outcome):
    return [step["tokens"] for step in outcome["steps"] if isinstance(step, dict) and "tokens" in step]


def num_cached(outcome):
    return sum(sum(step["cached"]) for step in outcome["steps"])


SETUPS = {
    "defaults": ({}, {}, {"skip_jax_precompile": False}, ()),
    "asynchronous loads": ({}, {}, {"sync_load": False}, ()),
    "staged": ({}, {"TPU_OFFLOAD_SAVE_PATH": "staged", "TPU_OFFLOAD_LOAD_PATH": "staged"}, {}, ()),
    "staged, synchronous loads": ({}, {}, STAGED | {"sync_load": True}, ()),
    "async scheduling": (ASYNC, {}, {}, ()),
    "async scheduling, asynchronous loads": (ASYNC, {}, {"sync_load": False}, ()),
    "no prefix caching": ({"enable_prefix_caching": False}, {}, {}, ()),
    "two blocks a chunk": ({}, {}, {"blocks_per_chunk": 2}, ()),
    "chunked prefill": ({"max_num_batched_tokens": 32}, {}, {}, ()),
    "speculation": ({"speculative_config": NGRAM}, {}, {}, ()),
    "speculation, answers saved": ({"speculative_config": NGRAM}, {}, {"decode_save": True}, ()),
    "async scheduling, answers saved": (ASYNC, {}, {"decode_save": True}, ()),
    "two devices": ({"tensor_parallel_size": 2}, {}, {}, ()),
    "little host memory": ({}, {}, {"num_cpu_chunks": 30}, ("num_evicted_chunks",)),
    "little of both, staged": (
        {},
        {},
        {"num_cpu_chunks": 30, "num_staging_blocks": 3, **STAGED},
        ("num_evicted_chunks", "loaded_blocks", "deferred_save_blocks"),
    ),
}


MIXED_SETUPS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "defaults": ({}, {"skip_jax_precompile": False}),
    "staged": ({}, STAGED),
    "async scheduling, answers saved": (ASYNC, {"decode_save": True}),
    "two devices": ({"tensor_parallel_size": 2}, {"num_cpu_chunks": 60}),
    "no prefix caching": ({"enable_prefix_caching": False}, {"decode_save": True}),
}


@pytest.mark.parametrize(("engine", "settings"), few_setups(MIXED_SETUPS, "async scheduling, answers saved"))
def test_layers_with_two_page_shapes(process, engine, settings):
    """As Gemma-4 has them: heads of 128 in its sliding layers, of 256 in the others."""
    spec = {"model": "gemma4", "engine": engine, "steps": conversations()}
    right = process.run(spec | {"engine": engine | NO_PREEMPTION})
    assert right["error"] is None
    outcome = process.run(spec | {"connector": ours(**settings)})
    assert outcome["error"] is None
    assert answers(outcome) == answers(right)
    assert outcome["end"]["num_page_groups"] == 2
    assert outcome["end"]["stats"]["loaded_tokens"] > 0
    assert_nothing_leaked(outcome)


def test_wrong_kv_of_two_page_shapes_would_be_noticed(process):
    steps = [GENERATE, *EMPTY_HBM, {"do": "shuffle_host_memory"}, GENERATE]
    outcome = process.run({"model": "gemma4", "engine": NO_PREEMPTION, "connector": ours(), "steps": steps})
    first, second = answers(outcome)
    assert first != second


@pytest.mark.parametrize(
    ("engine", "env", "settings", "counted"),
    few_setups(
        SETUPS,
        *("defaults", "staged", "async scheduling", "no prefix caching", "speculation, answers saved"),
        *("async scheduling, answers saved", "little of both, staged"),
    ),
)
def test_answers_equal_those_without_a_connector(process, plain, engine, env, settings, counted):
    steps = conversations()
    expected = plain(steps, engine)
    # With async scheduling and preemptions, tpu-inference 0.32 gives wrong answers even without a connector.
    right = plain(steps, engine | NO_PREEMPTION) if engine.get("async_scheduling") else expected
    outcome = process.run({"engine": engine, "env": env, "connector": ours(**settings), "steps": steps})
    assert outcome["error"] is None
    assert answers(outcome) == answers(right)
    assert_nothing_leaked(outcome)
    assert not any("nothing more of it is saved" in line for line in outcome["log"])
    assert num_cached(outcome) > num_cached(expected)
    stats = outcome["end"]["stats"]
    assert stats["saved_blocks"] > 0
    assert stats["loaded_tokens"] > 0
    for name in counted:
        assert stats[name] > 0
    # The engine's memory is freed as without a connector, and so is the host tier's.
    assert outcome["freed"][:2] == expected["freed"]
    assert outcome["freed"][-1]


@pytest.mark.parametrize("engine", [{}, ASYNC], ids=["sync", "async"])
def test_prefill_is_measured(process, plain, engine):
    """Whether it is faster than loads depends on the machine; answers do not."""
    steps = [GENERATE, *EMPTY_HBM, GENERATE]
    engine = engine | NO_PREEMPTION
    outcome = process.run({"engine": engine, "connector": ours(load_mode="auto"), "steps": steps})
    assert outcome["error"] is None
    assert answers(outcome) == answers(plain(steps, engine))
    assert outcome["end"]["stats"]["prefill_tokens_per_s"] > 0
    assert_nothing_leaked(outcome)


def test_preemption(process, plain):
    """Requests that outgrow HBM are preempted, and find their blocks in the host tier."""
    steps = conversations(max_tokens=40)[:1]
    expected = plain(steps, {})
    outcome = process.run({"connector": ours(decode_save=True), "steps": steps})
    assert expected["end"]["num_preemptions"] > 1
    assert outcome["end"]["num_preemptions"] > 1
    assert answers(outcome) == answers(expected)
    assert_nothing_leaked(outcome)
    assert outcome["end"]["stats"]["loaded_tokens"] > 0


def test_sampled_answers(process, plain):
    """One request at a time: on TPU, requests have no seeds."""
    engine = {"max_num_batched_tokens": 128}
    sample = {"do": "sample", "prompts": PROMPTS, "seed": 7, "temperature": 1.0}
    steps = [sample, *EMPTY_HBM, sample]
    outcome = process.run({"engine": engine, "connector": ours(), "steps": steps})
    first, second = answers(outcome)
    assert [first] == answers(plain([sample], engine))
    assert second == first
    assert first != answers(plain([GENERATE], {}))[0]
    assert min(outcome["steps"][-1]["cached"]) >= 64
    assert_nothing_leaked(outcome)


def test_generated_tokens_are_saved_with_decode_save(process, plain):
    engine = {"enable_prefix_caching": False}
    steps = conversations(max_tokens=24)[:2]
    expected = plain(steps, engine)
    for decode_save in (False, True):
        outcome = process.run({"engine": engine, "connector": ours(decode_save=decode_save), "steps": steps})
        assert answers(outcome) == answers(expected)
        assert_nothing_leaked(outcome)
        first, second = steps
        before = [len(first["said"][i]) for i in second["said"]]
        past = [cached > length for cached, length in zip(outcome["steps"][1]["cached"], before, strict=True)]
        assert any(past) == all(past) == decode_save


def test_the_bytes_come_from_the_host_tier(process, plain):
    shuffle = {"do": "shuffle_host_memory"}
    outcome = process.run({"connector": ours(), "steps": [GENERATE, *EMPTY_HBM, shuffle, GENERATE]})
    first, second = answers(outcome)
    assert [first] == answers(plain([GENERATE], {}))
    assert all(a != b for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("engine", "settings", "method"),
    [
        ({}, {}, "load"),
        ({}, {"sync_load": False}, "load"),
        (ASYNC, {}, "load"),
        (ASYNC, {"sync_load": False}, "load"),
        ({}, STAGED, "resume_load"),
    ],
    ids=["synchronous", "asynchronous", "async scheduling", "async scheduling, asynchronous", "staged"],
)
def test_failed_loads_are_recomputed(process, plain, engine, settings, method):
    steps = [GENERATE, *EMPTY_HBM, {"do": "break_loads", "times": 2, "method": method}, GENERATE]
    connector = ours(**settings, breaker_retry_s=0.01)  # the shared prefix may have failed twice, and backs off
    outcome = process.run({"engine": engine, "connector": connector, "steps": [*steps, *EMPTY_HBM, GENERATE]})
    assert answers(outcome) == answers(plain([GENERATE], engine)) * 3
    assert_nothing_leaked(outcome, failed=True)
    assert outcome["end"]["stats"]["loaded_tokens"] > 0  # the last time


@pytest.mark.parametrize("skip", [[0], [2]])
@pytest.mark.parametrize(
    ("engine", "settings", "method"),
    [
        ({}, {}, "load"),
        ({}, {"sync_load": False}, "load"),
        (ASYNC, {}, "load"),
        (ASYNC, {"sync_load": False}, "load"),
        (ASYNC, STAGED, "resume_load"),
    ],
    ids=[
        "synchronous",
        "asynchronous",
        "async scheduling",
        "async scheduling, asynchronous",
        "async scheduling, staged",
    ],
)
def test_a_load_destroys_the_caches(process, plain, engine, settings, method, skip):
    steps = [GENERATE, *EMPTY_HBM, {"do": "lose_caches", "skip": skip, "method": method}, GENERATE]
    outcome = process.run({"engine": engine, "connector": ours(**settings), "steps": [*steps, *EMPTY_HBM, GENERATE]})
    assert answers(outcome) == answers(plain([GENERATE], engine)) * 3
    assert_nothing_leaked(outcome, failed=True)
    assert sum("took the KV caches with it" in line for line in outcome["log"]) == len(skip)


@pytest.mark.parametrize("sync", [False, True])
def test_with_the_policy_fail_a_failed_load_ends_its_request(process, plain, sync):
    steps = [GENERATE, *EMPTY_HBM, {"do": "break_loads", "times": 1}, GENERATE, GENERATE]
    outcome = process.run({"connector": ours(policy="fail", sync_load=sync), "steps": steps})
    ((expected,), (first, broken, again)) = answers(plain([GENERATE], {})), answers(outcome)
    assert first == again == expected
    finish = outcome["steps"][-2]["finish"]
    assert 0 < finish.count("error") < len(finish)
    for end, found, answer in zip(finish, broken, expected, strict=True):
        assert found == ([] if end == "error" else answer)
    assert_nothing_leaked(outcome, failed=True)
    assert any("kv_load_failure_policy" in line for line in outcome["log"])


@pytest.mark.parametrize(
    ("engine", "settings"),
    [({}, STAGED), (ASYNC, {}), (ASYNC, {"sync_load": False}), ({}, {})],
    ids=["staged", "async scheduling", "async scheduling, asynchronous", "synchronous"],
)
def test_aborted_requests(process, plain, engine, settings):
    """A request that waits for its load, one that runs, and one that waits to be scheduled."""
    abort = {"0": "WAITING_FOR_REMOTE_KVS", "1": "RUNNING", "5": "WAITING"}
    if not settings:
        del abort["0"]
    drive = {"do": "drive", "prompts": PROMPTS, "abort": abort}
    steps = [GENERATE, *EMPTY_HBM, drive, *EMPTY_HBM, GENERATE]
    outcome = process.run({"engine": engine, "connector": ours(**settings), "steps": steps})
    driven = outcome["steps"][3]
    assert sorted(driven["aborted"]) == sorted(map(int, abort))
    assert not driven["hung"]
    ((expected,), (first, found, last)) = answers(plain([GENERATE], engine)), answers(outcome)
    assert first == last == expected
    for i, answer in enumerate(expected):
        assert found[i] == (answer[: len(found[i])] if str(i) in abort else answer)
    assert_nothing_leaked(outcome)


def test_reset(process, plain):
    """Nothing is found afterwards, and what is on its way then is computed again."""
    drive = {"do": "drive", "prompts": PROMPTS, "abort": {}, "reset_when": "WAITING_FOR_REMOTE_KVS"}
    steps = [GENERATE, {"do": "drain"}, {"do": "reset"}, GENERATE, *EMPTY_HBM, drive, *EMPTY_HBM, GENERATE]
    outcome = process.run({"connector": ours(sync_load=False), "steps": steps})
    assert answers(outcome) == answers(plain([GENERATE], {})) * 4
    assert outcome["steps"][2] is True
    assert outcome["steps"][3]["cached"] == outcome["steps"][0]["cached"]
    assert_nothing_leaked(outcome)


@pytest.mark.parametrize(
    "settings", [{}, {"sync_load": False}, {"patch_runner": False}], ids=["default", "async", "plain"]
)
@pytest.mark.parametrize("pause", [False, True], ids=["reset", "pause"])
def test_running_requests_are_preempted_and_resumed_at_once(process, plain, settings, pause):
    """vLLM has dropped the tokens that were on the way, or taken them; the runner has neither done."""
    drive = {"do": "drive", "prompts": PROMPTS[:3], "abort": {}, "max_tokens": 40}
    connector = ours(decode_save=not settings, **settings)
    preempt = {**drive, "preempt_at": [5, 20], "pause": pause}
    outcome = process.run({"engine": ASYNC, "connector": connector, "steps": [preempt, *EMPTY_HBM, GENERATE]})
    driven = outcome["steps"][0]
    assert not driven["hung"]
    expected = plain([drive, GENERATE], ASYNC)
    restored = "patch_runner" not in settings
    assert restored == (answers(outcome) == answers(expected))
    assert_nothing_leaked(outcome, failed=None if not restored else False, wrong_tokens=not restored)


def test_the_next_engine_in_the_process_starts_empty(process, plain):
    cached = plain([GENERATE], {})["steps"][0]["cached"]
    for num_chunks in (64, 20):
        outcome = process.run({"connector": ours(num_cpu_chunks=num_chunks), "steps": [GENERATE]})
        assert answers(outcome) == answers(plain([GENERATE], {}))
        assert outcome["steps"][0]["cached"] == cached
        assert outcome["end"]["num_host_chunks"] == num_chunks
        assert all(outcome["freed"])
    assert process.run({"steps": [GENERATE]})["steps"] == plain([GENERATE], {})["steps"]


def test_the_next_engine_may_be_created_before_the_first_ends(process, plain):
    engine = {"block_size": 32, "num_gpu_blocks_override": 16}
    replace = {"do": "replace", "spec": {"engine": engine, "connector": ours(num_cpu_chunks=20)}}
    outcome = process.run(
        {"connector": ours(), "steps": [GENERATE, *EMPTY_HBM, replace, GENERATE, *EMPTY_HBM, GENERATE]}
    )
    assert answers(outcome) == answers(plain([GENERATE], {})) + answers(plain([GENERATE], engine)) * 2
    assert outcome["steps"][4]["cached"] == plain([GENERATE], engine)["steps"][0]["cached"]
    assert min(outcome["steps"][-1]["cached"]) >= 64
    assert outcome["end"]["num_host_chunks"] == 20
    assert_nothing_leaked(outcome)
    assert all(outcome["freed"])


def test_settings_of_the_connector_take_precedence_over_the_environment(process):
    env = {"TPU_OFFLOAD_HOST_GB": "0.001", "TPU_OFFLOAD_BLOCKS_PER_CHUNK": "2"}
    outcome = process.run({"env": env, "connector": ours(num_cpu_chunks=16), "steps": [GENERATE]})
    assert outcome["end"]["num_host_chunks"] == 16
    assert outcome["end"]["stats"]["num_resident_chunks"] == outcome["end"]["stats"]["saved_blocks"] / 2


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"connector": ours(host_gbs=1)}, "host_gbs is not a setting of tpu_offload; did you mean"),
        ({"connector": ours(), "env": {"TPU_OFFLOAD_HOST_GBS": "1"}}, "TPU_OFFLOAD_HOST_GBS is not a setting"),
        ({"connector": ours(host_gb=1)}, "set the same size; set only one of them"),
        ({"connector": ours(load_path="fused")}, "TPU_OFFLOAD_LOAD_PATH=fused: this engine does not"),
        ({"connector": ours(role="kv_producer")}, 'kv_role is "kv_producer"; set it to "kv_both"'),
    ],
    ids=["unknown", "unknown variable", "two sizes", "fused", "role"],
)
def test_unsupported_configurations_are_refused_at_start(process, spec, message):
    error = process.run(spec | {"steps": []})["error"]
    assert error.startswith("ConfigError: ")
    assert message in error
    assert "\n" not in error


def test_too_little_hbm(process, plain):
    """The engine does not start, says what to set, and with that it starts."""
    staging = STAGED | {"staging_buffer_gb": 4 / 1024}
    spec = {"connector": ours(**staging), "hbm_nbytes": 16 << 20, "steps": [GENERATE]}
    by_memory = {"num_gpu_blocks_override": 0, "gpu_memory_utilization": 0.9}
    error = process.run(spec | {"engine": by_memory})["error"]
    assert error.startswith("ConfigError: tpu_offload: copies need 0.0039")
    utilization = re.search(r"set --gpu-memory-utilization to at most ([\d.]+) ", error)
    buffer_gb = re.search(r"TPU_OFFLOAD_STAGING_BUFFER_GB to at most ([\d.]+),", error)
    assert utilization
    assert buffer_gb
    for changed in (
        {"engine": by_memory | {"gpu_memory_utilization": float(utilization[1])}},
        {"engine": by_memory, "connector": ours(**staging | {"staging_buffer_gb": float(buffer_gb[1])})},
    ):
        outcome = process.run(spec | changed)
        assert outcome["error"] is None
        assert answers(outcome) == answers(plain([GENERATE], {}))


@pytest.mark.parametrize(
    ("model", "mib"), few([("qwen3", 20), ("gemma4", 40), ("gemma3", 40), ("qwen3.5", 60)], first=1)
)
def test_vllm_gets_as_many_blocks_as_without_a_connector(process, model, mib):
    by_memory = {"num_gpu_blocks_override": 0, "gpu_memory_utilization": 0.9}
    spec = {"model": model, "engine": by_memory, "hbm_nbytes": mib << 20, "steps": [GENERATE]}
    process.run(spec | {"steps": []})  # loads the weights, which later engines share
    alone = process.run(spec)
    ours_too = process.run(spec | {"connector": ours(num_cpu_chunks=16)})
    assert (alone["error"], ours_too["error"]) == (None, None)
    without, with_it = ([run["end"][name] for name in ("num_blocks", "num_rows")] for run in (alone, ours_too))
    print(f"{model}: blocks and rows of states {without} without a connector, {with_it} with it")
    assert without == with_it
    assert without[0] > 20
    assert answers(alone) == answers(ours_too)


def test_metrics_events_and_name(process):
    engine = {"kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"}}
    steps = [GENERATE, *EMPTY_HBM, GENERATE, {"do": "drain"}]
    looks = [{"do": name} for name in ("metrics", "log_stats", "events", "registered")]
    outcome = process.run(
        {
            "engine": engine,
            "connector": ours(num_cpu_chunks=16),
            "steps": [{"do": "record_events"}, *steps, *looks],
        }
    )
    metrics, log, events, registered = outcome["steps"][-4:]
    stats = outcome["end"]["stats"]

    assert not [name for name in metrics if "swap" in name]  # vLLM does not swap
    for name in stats.keys() - SWAP_FIELDS:
        assert metrics[f"vllm:tpu_offload_{METRICS[name].family}"] == int(stats[name])  # so vLLM's snapshot has it
    assert stats["saved_nbytes"] > 0 < stats["loaded_nbytes"]
    assert metrics["vllm:tpu_offload_save_duration_seconds"] > 0
    assert metrics["vllm:tpu_offload_load_duration_seconds"] > 0
    (line,) = [line for line in log if "KV Transfer metrics" in line]
    assert f"Loaded tokens={stats['loaded_tokens']}" in line

    router = KVRouter()
    router.take_json(events, cleared=False)  # HBM is emptied, the host tier is not
    assert router.groups == {0: ("full_attention", None)}
    assert len(router.host[0]) == stats["num_resident_chunks"] == 16
    assert stats["num_evicted_chunks"] > 0

    assert "TPUHostOffloadConnector" in registered


LONG_ANSWERS = conversations(max_tokens=40)[:1]


def test_tpu_inference_still_loses_tokens(plain):
    """If this fails, `RunnerTokens` has nothing to restore any more: see docs/upstream."""
    outcome, expected = plain(LONG_ANSWERS, ASYNC), plain(LONG_ANSWERS, ASYNC | NO_PREEMPTION)
    assert outcome["end"]["num_preemptions"] > 1
    assert answers(outcome) != answers(expected)
    assert outcome["end"]["wrong_tokens"]
    assert not expected["end"]["wrong_tokens"]


@pytest.mark.parametrize("settings", [{}, STAGED], ids=["direct", "staged"])
def test_preemption_with_async_scheduling(process, plain, settings):
    expected = plain(LONG_ANSWERS, ASYNC | NO_PREEMPTION)
    connector = ours(decode_save=True, **settings)
    outcome = process.run({"engine": ASYNC, "connector": connector, "steps": LONG_ANSWERS})
    assert expected["end"]["num_preemptions"] == 0
    assert outcome["end"]["num_preemptions"] > 1
    assert answers(outcome) == answers(expected)
    assert_nothing_leaked(outcome)
    assert outcome["end"]["stats"]["saved_blocks"] > 0
    assert sum("lost the in-flight token" in line for line in outcome["log"]) == 1
    assert not any("nothing more of it is saved" in line for line in outcome["log"])


@pytest.mark.parametrize("restore", [True, False])
def test_saved_kv_was_computed_on_the_tokens_of_its_key(process, plain, restore):
    """Each conversation continues, one at a time, from its blocks in the host tier."""
    said = {str(i): tokens(f"continued {i}", 5) for i in range(8)}
    continued = [{"do": "chat", "said": {i: said[i]}, "max_tokens": 6} for i in said]
    connector = ours(decode_save=True, patch_runner=restore)
    steps = [*LONG_ANSWERS, *EMPTY_HBM, *continued]
    outcome = process.run({"engine": ASYNC, "connector": connector, "steps": steps})
    assert outcome["end"]["num_preemptions"] > 1
    first, *rest = answers(outcome)
    asked = LONG_ANSWERS[0]["said"]
    histories = [asked[i] + answer + said[i] for i, answer in zip(asked, first, strict=True)]
    clean = [{"do": "generate", "prompts": [history], "max_tokens": 6} for history in histories]
    assert rest == answers(plain(clean, ASYNC | NO_PREEMPTION))
    if restore:
        assert all(step["cached"][0] > len(asked[i]) for i, step in zip(asked, outcome["steps"][-8:], strict=True))
    else:
        assert any("nothing more of it is saved" in line for line in outcome["log"])
    assert_nothing_leaked(outcome, failed=not restore, wrong_tokens=not restore)
