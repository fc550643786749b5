"""Data-parallel ranks in one engine: attention of two ranks on two devices each, in the real engine, on the CPU."""

import os
import selectors
import signal
import subprocess
import sys

import pytest

from tests.adapters.llm_client import ROOT, conversations, ours, tokens
from tests.adapters.test_hybrid_models import NO_PREFIX_CACHE
from tests.adapters.test_llm import assert_nothing_leaked
from tests.grids import few, few_setups
from tests.storage.memory_tier import SHARED
from tpu_offload.metrics import METRICS, SWAP_FIELDS

pytestmark = pytest.mark.vllm

MODEL = "qwen3, 4 heads"
RANKS = {
    "tensor_parallel_size": 4,
    "additional_config": {"sharding": {"sharding_strategy": {"enable_dp_attention": True, "attn_dp_size": 2}}},
}
# Blocks of both ranks. With few, half of the conversations do not fit, and requests are preempted.
FEW, MANY = RANKS | {"num_gpu_blocks_override": 28}, RANKS | {"num_gpu_blocks_override": 400}


@pytest.fixture(scope="module")
def expected(ranked):
    """The answers of an engine without a connector and with blocks for everybody."""
    return answers(ranked.run({"model": MODEL, "engine": MANY, "steps": conversations(max_tokens=20)}))


END = {"do": "drain"}, {"do": "metrics"}, {"do": "log_stats"}


def answers(outcome):
    assert outcome["error"] is None
    return [step["tokens"] for step in outcome["steps"] if isinstance(step, dict) and "tokens" in step]


def check_end(outcome):
    for rank in outcome["end"]["ranks"]:
        assert rank["num_requests"] == 0
        assert not rank["has_jobs"]
        assert rank["num_free_blocks"] == rank["num_blocks"] - 1
    assert not outcome["end"]["has_flights"]
    assert outcome["freed"] == [True, True, True]


def stats(outcome, name):
    return [rank["stats"][name] for rank in outcome["end"]["ranks"]]


@pytest.mark.parametrize("async_scheduling", few([False, True], True))
def test_answers_are_those_without_a_connector_and_both_ranks_load(ranked, expected, async_scheduling):
    steps = conversations(max_tokens=20)
    outcome = ranked.run(
        {
            "model": MODEL,
            "engine": FEW | {"async_scheduling": async_scheduling},
            "connector": ours(decode_save=True, num_cpu_chunks=24),
            "steps": [steps[0], {"do": "reset_hbm"}, steps[1], {"do": "reset_hbm"}, steps[2], *END],
        }
    )
    *_, metrics, log = outcome["steps"]
    for name in outcome["end"]["ranks"][0]["stats"].keys() - SWAP_FIELDS:
        assert metrics[f"vllm:tpu_offload_{METRICS[name].family}"] == int(sum(stats(outcome, name))), name
    assert any("KV Transfer metrics" in line and "Loaded tokens=" in line for line in log)
    assert answers(outcome) == expected
    assert min(stats(outcome, "loaded_blocks")) > 10
    assert min(stats(outcome, "num_evicted_chunks")) > 0, "the host tier was full"
    assert sum(rank["num_preemptions"] for rank in outcome["end"]["ranks"]) > 0
    check_end(outcome)


@pytest.mark.parametrize(
    ("model", "num_saved"), few([("gemma3", "num_window_chunks"), ("qwen3.5", "num_states")], ("qwen3.5", "num_states"))
)
def test_sliding_windows_and_states_of_both_ranks(ranked, model, num_saved):
    """Two ranks on one device each; as many blocks, and rows of states, as without a connector."""
    steps = [
        {"do": "generate", "prompts": [tokens(f"{name} {i}", length) for i in range(4)]}
        for name, length in [("other", 150), ("document", 100)] * 2
    ]
    spec = {"model": model, "engine": MANY | {"tensor_parallel_size": 2, "num_gpu_blocks_override": 60}}
    plain, ours_ = (ranked.run(spec | {"connector": c, "steps": steps}) for c in (None, ours()))
    assert answers(ours_) == answers(plain)
    assert [step["cached"] for step in ours_["steps"][2:]] == [[144] * 4, [96] * 4]
    assert min(stats(ours_, "loaded_blocks")) > 10
    assert min(stats(ours_, num_saved)) > 0
    for name in ("num_blocks", "num_rows"):
        assert len({rank[name] for outcome in (plain, ours_) for rank in outcome["end"]["ranks"]}) == 1
    check_end(ours_)


@pytest.mark.wide
def test_pages_of_two_shapes_on_both_ranks(ranked):
    """With few blocks and a small host tier; with async scheduling, loads of pages of one shape fail on both ranks."""
    first, second, third = conversations(max_tokens=20)
    empty_hbm, broken = {"do": "reset_hbm"}, {"do": "break_loads", "times": 2, "group": 1}
    model = {"model": "gemma4"}
    plain = ranked.run(model | {"engine": MANY | {"tensor_parallel_size": 2}, "steps": [first, second, third]})
    for is_async, steps in (
        (False, [first, empty_hbm, second, empty_hbm, third]),
        (True, [first, empty_hbm, broken, second, empty_hbm, third]),
    ):
        engine = FEW | {"tensor_parallel_size": 2, "async_scheduling": is_async}
        outcome = ranked.run(
            model | {"engine": engine, "connector": ours(decode_save=True, num_cpu_chunks=24), "steps": steps}
        )
        assert answers(outcome) == answers(plain)
        assert outcome["end"]["num_page_groups"] == 2
        assert min(stats(outcome, "loaded_blocks")) > 10
        assert min(stats(outcome, "num_evicted_chunks")) > 0, "the host tier was full"
        assert (sum(stats(outcome, "num_failed_jobs")) > 0) == is_async
        assert sum(rank["num_preemptions"] for rank in outcome["end"]["ranks"]) > 0
        check_end(outcome)


def test_ranks_without_prefix_caching_are_refused(ranked):
    engine = MANY | NO_PREFIX_CACHE
    outcome = ranked.run({"model": MODEL, "engine": engine, "connector": ours(), "steps": []})
    assert "prefix caching is off with 2 data-parallel ranks in one engine" in outcome["error"]


@pytest.mark.parametrize("model", few([MODEL, "gemma3", "qwen3.5", "deepseek"], "gemma3"))
@pytest.mark.parametrize("async_scheduling", few([False, True], True))
def test_another_engine_finds_what_both_ranks_have_in_files(ranked, tmp_path, model, async_scheduling):
    """Each rank has files of its own; in the second engine requests go to the rank that has their prefix there."""
    documents = [tokens(f"document {i}", 100) for i in range(4)]
    read = {"do": "generate", "prompts": documents}
    first = {"do": "generate", "prompts": [tokens("first", 20)]}  # from its step on the ranks know what they have
    engine = MANY | {"num_gpu_blocks_override": 80, "async_scheduling": async_scheduling}
    if model != MODEL:
        engine |= {"tensor_parallel_size": 2}
    if model == "deepseek":
        engine |= {"block_size": 32}
    spec = {"model": model, "engine": engine, "steps": [first, read, {"do": "drain"}]}
    storage = {
        "storage_tier": "file",
        "storage_options": f"{tmp_path / 'kv'},min_free_gb=0",
        "num_storage_chunks": 200,
        "storage_wait_s": 60.0,
    }
    plain = ranked.run(spec)
    one, other = (ranked.run(spec | {"connector": ours(**storage)}) for _ in range(2))
    assert answers(one) == answers(other) == answers(plain)
    assert sorted(path.name for path in (tmp_path / "kv").iterdir()) == ["worker-0", "worker-1"]
    assert min(stats(one, "cascaded_chunks")) > 0
    assert min(stats(other, "restored_chunks")) > 0
    assert min(stats(other, "promoted_chunks")) > 0
    assert other["steps"][1]["cached"] == [96] * 4
    assert sum(stats(other, "num_failed_jobs")) == 0
    check_end(other)


def test_ranks_find_what_the_others_have_in_a_shared_tier(ranked):
    """As engines of one server do: wherever a request is sent, its prefix is there."""
    prompt = tokens("document", 100)
    steps = [
        {"do": "generate", "prompts": [prompt]},
        {"do": "drain"},
        {"do": "generate", "prompts": [[*prompt, 5 + i] for i in range(4)]},
    ]
    connector = ours(storage_tier=SHARED, num_storage_chunks=100, storage_wait_s=60.0, storage_lookup_wait_s=60.0)
    spec = {"model": MODEL, "engine": MANY, "steps": steps}
    outcome = ranked.run(spec | {"connector": connector})
    assert answers(outcome) == answers(ranked.run(spec))
    assert outcome["steps"][-1]["cached"] == [96] * 4
    assert sorted(stats(outcome, "cascaded_chunks")) == [0, 6]
    assert max(stats(outcome, "promoted_chunks")) > 0
    check_end(outcome)


def test_copies_to_the_places_of_another_rank_are_noticed(ranked):
    """What was never saved at a place is not loaded from it; loads to the wrong blocks change the answers."""
    documents = {"do": "generate", "prompts": [tokens(f"document {i}", 100) for i in range(4)]}
    others = {"do": "generate", "prompts": [tokens(f"other {i}", 150) for i in range(4)]}
    fault = {"do": "confuse_ranks"}
    right, confused_saves, confused_loads = (
        ranked.run({"model": MODEL, "engine": FEW, "connector": ours(), "steps": [others, *steps]})
        for steps in (
            [documents, others, documents],
            [fault, documents, others, documents],
            [documents, others, fault, documents],
        )
    )
    assert right["steps"][-1]["cached"] == [96] * 4, "routed to the rank that has saved it"
    expected = answers(right)[1]
    assert answers(right)[3] == answers(confused_saves)[3] == expected
    assert max(stats(confused_saves, "num_failed_jobs")) > 0
    assert confused_saves["steps"][-1]["cached"].count(96) == 2
    assert confused_loads["steps"][-1]["cached"] == [96] * 4
    assert sum(a != b for a, b in zip(answers(confused_loads)[3], expected, strict=True)) >= 2


def test_failed_loads_and_lost_caches_are_recomputed(ranked, expected):
    steps = conversations(max_tokens=20)
    outcome = ranked.run(
        {
            "model": MODEL,
            "engine": FEW | {"async_scheduling": True},
            "connector": ours(),
            "steps": [
                steps[0],
                {"do": "reset_hbm"},
                {"do": "break_loads", "times": 2},
                steps[1],
                {"do": "reset_hbm"},
                {"do": "lose_caches", "skip": [1]},
                steps[2],
            ],
        }
    )
    assert answers(outcome) == expected
    assert sum(stats(outcome, "num_failed_jobs")) >= 2
    check_end(outcome)


def test_aborted_requests_and_resets_leave_nothing_behind(ranked):
    prompts = [tokens(f"document {i}", 150) for i in range(6)]
    both = {"do": "generate", "prompts": prompts}
    aborted = {"do": "drive_and_abort", "prompts": prompts, "after": 2}
    outcome = ranked.run(
        {
            "model": MODEL,
            "engine": FEW,
            "connector": ours(max_load_gb_per_step=1e-4),
            "steps": [both, {"do": "reset_hbm"}, aborted, {"do": "reset_hbm"}, both, {"do": "reset"}, both],
        }
    )
    first, second, third = answers(outcome)
    assert first == second == third
    assert outcome["steps"][-1]["cached"] == [0] * 6
    assert min(stats(outcome, "loaded_blocks")) > 0
    check_end(outcome)


def test_a_pause_that_clears_the_cache_while_requests_wait_for_loads(ranked):
    """An error in one rank would leave the answers of the others unread, and end the engine."""
    prompts = [tokens(f"document {i}", 90) for i in range(6)]
    both = {"do": "generate", "prompts": prompts}
    paused = {"do": "drive_and_pause", "prompts": prompts, "after": 1}
    spec = {"model": MODEL, "engine": MANY, "connector": ours()}
    outcome = ranked.run(spec | {"steps": [both, {"do": "drain"}, {"do": "reset_hbm"}, paused]})
    first, second = answers(outcome)
    assert first == second
    assert min(stats(outcome, "loaded_blocks")) > 0
    check_end(outcome)


def test_a_pause_in_the_middle_of_loads_waits_for_them(ranked):
    """These are loaded in pieces, one a step: vLLM cannot clear its cache before the last one is written."""
    prompts = [tokens(f"document {i}", 90) for i in range(6)]
    both = {"do": "generate", "prompts": prompts}
    paused = {"do": "drive_and_pause", "prompts": prompts, "after": 1}
    spec = {"model": MODEL, "engine": MANY, "connector": ours(max_load_gb_per_step=1e-5)}
    outcome = ranked.run(spec | {"steps": [both, {"do": "drain"}, {"do": "reset_hbm"}, paused]})
    first, second = answers(outcome)
    assert first == second
    assert outcome["steps"][-1]["num_paused"] > 0
    check_end(outcome)


def test_a_reset_that_fails_in_the_middle_of_loads_does_not_end_the_engine(ranked):
    """It fails in both ranks; the answer of each is read."""
    prompts = [tokens(f"document {i}", 90) for i in range(6)]
    both = {"do": "generate", "prompts": prompts}
    reset = {"do": "drive_and_reset", "prompts": prompts, "after": 1}
    spec = {"model": MODEL, "engine": MANY, "connector": ours(max_load_gb_per_step=1e-5)}
    outcome = ranked.run(spec | {"steps": [both, {"do": "drain"}, {"do": "reset_hbm"}, reset, both]})
    first, second, third = answers(outcome)
    assert first == second == third
    assert "Failed to reset KV cache" in outcome["steps"][-2]["error"]
    check_end(outcome)


LATENT = {"tensor_parallel_size": 2, "max_model_len": 512, "num_gpu_blocks_override": 16}
# By the layout of tpu-inference's pages, the size of a block: both layers, with latents of 64 padded to 128 elements
# and rotary keys of 32 padded to 128 in the packed layout only.
LATENT_PAGES = {
    "packed": ({"block_size": 128}, {}, 2 * 128 * (128 + 128) * 2),
    "turned": ({"block_size": 128}, {"MLA_TRANSPOSE_KV_CACHE": "1"}, 2 * 128 * (128 + 32) * 2),
}


@pytest.mark.parametrize(("engine", "env", "block_nbytes"), few_setups(LATENT_PAGES, "packed"))
def test_latents_come_from_the_host_tier_on_both_ranks(ranked, engine, env, block_nbytes):
    documents = {"do": "generate", "prompts": [tokens(f"document {i}", 300) for i in range(4)]}
    others = {"do": "generate", "prompts": [tokens(f"other {i}", 400) for i in range(4)]}
    steps = [others, documents, others, documents]
    spec = {"model": "deepseek", "engine": RANKS | LATENT | engine, "env": env}
    plain = ranked.run(spec | {"steps": steps})
    assert [step["cached"] for step in plain["steps"]] == [[0] * 4] * 4, "each evicts the other from HBM"
    steps = [*steps, {"do": "shuffle_host_memory"}, others]
    outcome = ranked.run(spec | {"connector": ours(), "steps": steps})
    *got, shuffled = answers(outcome)
    assert got == answers(plain)
    assert [step["cached"] for step in outcome["steps"] if step] == [[0] * 4, [0] * 4, [384] * 4, [256] * 4, [384] * 4]
    assert all(a != b for a, b in zip(shuffled, got[0], strict=True)), "the bytes come from the host tier"
    assert stats(outcome, "loaded_blocks") == [16, 16]
    assert [n / block_nbytes for n in stats(outcome, "saved_nbytes")] == stats(outcome, "saved_blocks")
    check_end(outcome)


@pytest.mark.wide
def test_conversations_of_a_model_with_latents(ranked):
    steps = conversations(max_tokens=20)
    engine = RANKS | {"tensor_parallel_size": 2, "block_size": 32, "async_scheduling": True}
    spec = {"model": "deepseek", "steps": [steps[0], {"do": "reset_hbm"}, steps[1], {"do": "reset_hbm"}, steps[2]]}
    plain = ranked.run(spec | {"engine": engine | {"num_gpu_blocks_override": 200}})
    outcome = ranked.run(
        spec
        | {
            "engine": engine | {"num_gpu_blocks_override": 18},
            "connector": ours(decode_save=True, num_cpu_chunks=12),
        }
    )
    assert answers(outcome) == answers(plain)
    assert min(stats(outcome, "loaded_blocks")) > 5
    assert min(stats(outcome, "num_evicted_chunks")) > 0, "the host tier was full"
    assert sum(rank["num_preemptions"] for rank in outcome["end"]["ranks"]) > 0
    check_end(outcome)


@pytest.mark.wide
def test_latents_on_one_device_with_and_without_prefix_caching(ranked):
    """One rank is an engine without ranks: it has vLLM's own scheduler."""
    steps, only_rank = conversations(max_tokens=20), {"sharding": {"sharding_strategy": {"enable_dp_attention": True}}}
    engine = {"additional_config": only_rank, "block_size": 32, "num_gpu_blocks_override": 200}
    plain = ranked.run({"model": "deepseek", "engine": engine, "steps": steps})
    engine["num_gpu_blocks_override"] = 10
    for changes in ({}, NO_PREFIX_CACHE):
        connector = ours(decode_save=True, num_cpu_chunks=12)
        outcome = ranked.run({"model": "deepseek", "engine": engine | changes, "connector": connector, "steps": steps})
        assert answers(outcome) == answers(plain)
        assert_nothing_leaked(outcome)
        assert outcome["end"]["stats"]["loaded_blocks"] > 5
        assert outcome["end"]["stats"]["num_evicted_chunks"] > 0, "the host tier was full"
        assert outcome["end"]["num_preemptions"] > 0


@pytest.mark.wide
def test_latents_get_as_many_blocks_as_without_a_connector(ranked):
    """Of as many as tpu-inference finds room for."""
    step = {"do": "generate", "prompts": [tokens("a", 40)]}
    engine = RANKS | LATENT | {"block_size": 32, "num_gpu_blocks_override": None, "gpu_memory_utilization": 0.4}
    spec = {"model": "deepseek", "engine": engine, "hbm_nbytes": 64 << 20, "steps": [step]}
    ranked.run(spec)  # loads the weights, which later engines share
    plain, outcome = ranked.run(spec), ranked.run(spec | {"connector": ours()})
    assert plain["error"] is outcome["error"] is None
    counts = [[rank["num_blocks"] for rank in run["end"]["ranks"]] for run in (plain, outcome)]
    assert counts[0] == counts[1]
    assert min(counts[0]) > 100


@pytest.mark.wide
def test_tpu_inference_mixes_blocks_of_latents_that_are_no_whole_packs(ranked):
    """Without a connector, with the prefix cache alone: why `settings` refuses such blocks."""
    head = tokens("head", 48)
    first, second = ({"do": "generate", "prompts": 2 * [head + tokens(tail, 80)]} for tail in "ab")
    steps = [first, second, first]
    for block_size, is_wrong in ((16, True), (32, False)):
        engine = RANKS | LATENT | {"block_size": block_size, "num_gpu_blocks_override": 200}
        before, _, after = answers(ranked.run({"model": "deepseek", "engine": engine, "steps": steps}))
        assert (before != after) == is_wrong
    engine = RANKS | LATENT | {"block_size": 16, "num_gpu_blocks_override": 200}
    outcome = ranked.run({"model": "deepseek", "engine": engine, "connector": ours(), "steps": []})
    assert "set --block-size to a multiple of 32" in outcome["error"]


def test_schedulers_end_with_the_process_that_forked_them():
    """Also when that is killed, as it is if a test fails: they wait for commands for ever."""
    code = """
import os, time
from tests.adapters.llm_probes import die_with_parent
die_with_parent()
if os.fork() == 0:
    print(os.getpid(), flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT, text=True) as parent:
        scheduler = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
    with selectors.DefaultSelector() as selector:
        selector.register(scheduler, selectors.EVENT_READ)
        has_ended = bool(selector.select(60))
    if not has_ended:
        signal.pidfd_send_signal(scheduler, signal.SIGKILL)
    os.close(scheduler)
    assert has_ended
