"""Data-parallel ranks in one engine: attention of two ranks on two devices each, in the real engine, on the CPU."""

import pytest

from tests.adapters.llm_client import Process, conversations, ours, tokens

pytestmark = pytest.mark.vllm

MODEL = "qwen3, 4 heads"
RANKS = {
    "tensor_parallel_size": 4,
    "additional_config": {"sharding": {"sharding_strategy": {"enable_dp_attention": True, "attn_dp_size": 2}}},
}
# Blocks of both ranks. With few, half of the conversations do not fit, and requests are preempted.
FEW, MANY = RANKS | {"num_gpu_blocks_override": 28}, RANKS | {"num_gpu_blocks_override": 400}


@pytest.fixture(scope="module")
def ranked(tmp_path_factory, kept_vllm):
    settings = {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "NEW_MODEL_DESIGN": "1",
        "DP_SCHED_BATCH_PREFILL": "0",  # it looks at the clock
    }
    child = Process(tmp_path_factory.mktemp("vllm-home"), kept_vllm.settings | settings)
    yield child
    child.close()


@pytest.fixture(scope="module")
def expected(ranked):
    """The answers of an engine without a connector and with blocks for everybody."""
    return answers(ranked.run({"model": MODEL, "engine": MANY, "steps": conversations(max_tokens=20)}))


def answers(outcome):
    assert outcome["error"] is None
    return [step["tokens"] for step in outcome["steps"] if isinstance(step, dict)]


def check_end(outcome):
    for rank in outcome["end"]["ranks"]:
        assert rank["num_requests"] == rank["num_active"] == rank["num_awaited"] == 0
        assert not rank["has_jobs"]
        assert rank["num_free_blocks"] == rank["num_blocks"] - 1
    assert not outcome["end"]["has_flights"]
    assert outcome["freed"] == [True, True, True]


def stats(outcome, name):
    return [rank["stats"][name] for rank in outcome["end"]["ranks"]]


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_answers_are_those_without_a_connector_and_both_ranks_load(ranked, expected, async_scheduling):
    steps = conversations(max_tokens=20)
    outcome = ranked.run(
        {
            "model": MODEL,
            "engine": FEW | {"async_scheduling": async_scheduling},
            "connector": ours(decode_save=True, num_cpu_chunks=24),
            "steps": [steps[0], {"do": "reset_hbm"}, steps[1], {"do": "reset_hbm"}, steps[2]],
        }
    )
    assert answers(outcome) == expected
    assert min(stats(outcome, "loaded_blocks")) > 10
    assert min(stats(outcome, "num_evicted_chunks")) > 0, "the host tier was full"
    assert sum(rank["num_preemptions"] for rank in outcome["end"]["ranks"]) > 0
    check_end(outcome)


@pytest.mark.parametrize(("model", "num_saved"), [("gemma3", "num_window_chunks"), ("qwen3.5", "num_states")])
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
