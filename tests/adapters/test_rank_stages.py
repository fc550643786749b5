"""Data-parallel ranks in pipeline stages, in the real engine: two stages of two devices, one device for each rank.

A rank has a scheduler in a process of its own, a stage has a worker in another; every stage has a part of what every
rank saves.
"""

import shutil

import pytest

from tests.adapters.llm_client import Process, conversations, ours, tokens

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

RANKS = {"sharding": {"sharding_strategy": {"enable_dp_attention": True, "attn_dp_size": 2}}}
MANY = {
    "pipeline_parallel_size": 2,
    "tensor_parallel_size": 2,
    "additional_config": RANKS,
    "load_format": "auto",
    "num_gpu_blocks_override": 400,  # of both ranks
}
FEW = MANY | {"num_gpu_blocks_override": 28}
TURNS = conversations(max_tokens=20)
EMPTY_HBM = {"do": "reset_hbm"}
DOCUMENTS = {"do": "generate", "prompts": [tokens(f"document {i}", 100) for i in range(4)], "max_tokens": 20}
SETTINGS = {"decode_save": True, "num_cpu_chunks": 24, "breaker_retry_s": 0.01}


@pytest.fixture(scope="module")
def stages(tmp_path_factory, kept_vllm):
    settings = {"VLLM_WORKER_MULTIPROC_METHOD": "fork", "NEW_MODEL_DESIGN": "1", "DP_SCHED_BATCH_PREFILL": "0"}
    child = Process(tmp_path_factory.mktemp("vllm-home"), kept_vllm.settings | settings, module="stage_runs")
    yield child
    if not child.has_hung:
        kept_vllm.publish()
    child.close()


@pytest.fixture(scope="module")
def expected(stages):
    """The answers of an engine without a connector and with blocks for everybody."""
    return answers(run(stages, TURNS, engine=MANY))


def run(stages, steps, *, engine=FEW, model="tiny", **spec):
    outcome = stages.run({"model": model, "engine": engine, "steps": steps} | spec)
    assert outcome["error"] is None
    return outcome


def answers(outcome):
    return [step["tokens"] for step in outcome["steps"] if isinstance(step, dict) and "tokens" in step]


def stats(outcome, name):
    return [rank["stats"][name] for rank in outcome["end"]["ranks"]]


def check_end(outcome):
    """No copy is in flight, and no stage waits for activations that were not sent."""
    for rank in outcome["end"]["ranks"]:
        assert rank["num_requests"] == 0
        assert not rank["has_jobs"]
        assert rank["num_free_blocks"] == rank["num_blocks"] - 1
    first, second = outcome["end"]["stages"]
    assert not outcome["end"]["has_flights"]
    assert first["num_open_loads"] == second["num_open_loads"] == 0
    assert second["num_asked"] == first["num_sent"] > 0


def test_answers_are_those_without_a_connector_and_both_ranks_load(stages, expected):
    first, second, third = TURNS
    steps = [first, EMPTY_HBM, second, EMPTY_HBM, third]
    outcome = run(stages, steps, connector=ours(**SETTINGS))
    assert answers(outcome) == expected
    assert min(stats(outcome, "loaded_blocks")) > 10
    assert min(stats(outcome, "num_evicted_chunks")) > 0, "the host tier was full"
    assert min(rank["num_preemptions"] for rank in outcome["end"]["ranks"]) > 0
    assert stats(outcome, "num_failed_jobs") == [0, 0]
    assert [stage["num_host_chunks"] for stage in outcome["end"]["stages"]] == [24, 24]
    check_end(outcome)


@pytest.mark.parametrize("fault", [{"do": "break_loads", "times": 2}, {"do": "lose_caches", "skip": [1]}])
def test_loads_that_fail_or_destroy_the_caches_in_either_stage(stages, expected, fault):
    first, second, third = TURNS
    steps = [first, EMPTY_HBM, fault | {"stage": 0}, second, EMPTY_HBM, fault | {"stage": 1}, third]
    outcome = run(stages, steps, connector=ours(**SETTINGS))
    assert answers(outcome) == expected
    assert min(stats(outcome, "num_failed_jobs")) > 0, "one program copies for both ranks"
    assert min(stats(outcome, "loaded_blocks")) > 5
    check_end(outcome)


def test_aborted_requests_and_resets_leave_nothing_behind(stages):
    prompts = [tokens(f"document {i}", 150) for i in range(6)]
    both = {"do": "generate", "prompts": prompts}
    aborted = {"do": "drive_and_abort", "prompts": prompts, "after": 2}
    steps = [both, EMPTY_HBM, aborted, EMPTY_HBM, both, {"do": "reset"}, both]
    outcome = run(stages, steps, connector=ours(max_load_gb_per_step=1e-4))
    first, second, third = answers(outcome)
    assert first == second == third
    assert outcome["steps"][-1]["cached"] == [0] * 6
    assert min(stats(outcome, "loaded_blocks")) > 0
    check_end(outcome)


@pytest.mark.parametrize(
    ("model", "changes", "env"),
    [
        ("tiny", {}, {}),
        ("deepseek", {"load_format": "dummy", "block_size": 32}, {}),
        ("gemma4", {"load_format": "dummy"}, {"MODEL_IMPL_TYPE": "vllm", "VLLM_PP_LAYER_PARTITION": "3,1"}),
    ],
)
def test_each_stage_loads_its_own_layers_of_both_ranks(stages, model, changes, env):
    """Heads, latents, pages of two shapes: the bytes of each request come from the host memory of both stages."""
    spec = {"engine": MANY | changes, "model": model, "env": env}
    weights = [] if model == "tiny" else [{"do": "set_random_weights"}]
    (computed,) = answers(run(stages, [*weights, DOCUMENTS], **spec))
    steps = [*weights, DOCUMENTS, {"do": "drain"}, EMPTY_HBM, DOCUMENTS]
    for stage in (0, 1):
        steps += [EMPTY_HBM, {"do": "shuffle_host_memory", "stage": stage}, DOCUMENTS, {"do": "reset"}, DOCUMENTS]
        steps += [{"do": "drain"}]
    outcome = run(stages, steps, connector=ours(), **spec)
    first, found, without_stage_0, again, without_stage_1, last = answers(outcome)
    assert first == found == again == last == computed
    cached = [step["cached"] for step in outcome["steps"] if isinstance(step, dict) and "cached" in step]
    assert cached[1] == cached[2] == cached[4] == [96] * 4
    assert min(stats(outcome, "loaded_blocks")) > 5
    for wrong in (without_stage_0, without_stage_1):
        assert sum(a != b for a, b in zip(computed, wrong, strict=True)) > 1
    check_end(outcome)


def test_another_engine_finds_what_both_ranks_have_in_the_files_of_both_stages(stages, tmp_path):
    """What one stage has lost of one rank is computed again, in both stages."""
    storage = {
        "storage_tier": "file",
        "storage_options": f"{tmp_path / 'kv'},min_free_gb=0",
        "num_storage_chunks": 200,
        "storage_wait_s": 60.0,
    }
    first = {"do": "generate", "prompts": [tokens("first", 20)]}  # from its step on the ranks know what they have
    spec = {"engine": MANY, "connector": ours(**storage)}
    steps = [first, DOCUMENTS, {"do": "drain"}]
    plain = run(stages, steps[:2], engine=MANY)
    one, other = (run(stages, steps, **spec) for _ in range(2))
    assert sorted(path.name for path in (tmp_path / "kv").iterdir()) == [f"worker-{i}" for i in range(4)]
    shutil.rmtree(tmp_path / "kv" / "worker-2")  # the first rank's, in the second stage
    last = run(stages, steps, **spec)
    assert answers(one) == answers(other) == answers(last) == answers(plain)
    assert min(stats(one, "cascaded_chunks")) > 0
    assert min(stats(other, "promoted_chunks")) > 0
    assert other["steps"][1]["cached"] == [96] * 4
    lost, kept = stats(last, "restored_chunks")
    assert lost == 0 < kept
    for outcome in (one, other, last):
        assert sum(stats(outcome, "num_failed_jobs")) == 0
        check_end(outcome)
