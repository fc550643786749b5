"""Pipeline stages in whole vLLM engines: two processes with two layers and one; `stage_runs` runs them.

Each engine serves many steps, because its start takes longer than they do.
"""

import shutil
from typing import Any

import pytest

from tests.adapters.llm_client import Process, conversations, ours
from tests.adapters.test_llm import EMPTY_HBM, GENERATE, NO_PREEMPTION, PROMPTS, STAGED, answers, assert_nothing_leaked
from tests.grids import few, few_setups

pytestmark = pytest.mark.vllm

STAGES = {"pipeline_parallel_size": 2, "load_format": "auto"}
LONG_ANSWERS = conversations(max_tokens=40)[:1]
BLOCK_NBYTES = 3 * 16384  # of three layers, in both stages
DRIVE = {"do": "drive", "prompts": PROMPTS, "abort": {}}


@pytest.fixture(scope="module")
def stages(tmp_path_factory, kept_vllm):
    # vLLM may have set another method in this process, and processes that are not forked have no stand-ins.
    settings = kept_vllm.settings | {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}
    child = Process(tmp_path_factory.mktemp("vllm-home"), settings, module="stage_runs")
    yield child
    if not child.has_hung:
        kept_vllm.publish()
    child.close()


@pytest.fixture(scope="module")
def right(stages):
    """The answers of two stages without a connector, with HBM for everything: to `GENERATE`, and to conversations."""
    steps = [GENERATE, *conversations(), *LONG_ANSWERS]
    outcome = stages.run({"model": "tiny", "engine": STAGES | NO_PREEMPTION, "steps": steps})
    assert outcome["error"] is None
    assert outcome["end"]["num_preemptions"] == 0
    generated, *chats, long = answers(outcome)
    return {"generate": generated, "chats": chats, "long": long}


def run(stages, steps, *, engine=STAGES, **settings):
    outcome = stages.run({"model": "tiny", "engine": engine, "connector": ours(**settings), "steps": steps})
    assert outcome["error"] is None
    return outcome


def in_files(directory):
    """Settings of a storage tier."""
    options = f"{directory},min_free_gb=0"
    return {"storage_tier": "file", "storage_options": options, "num_storage_chunks": 1000, "storage_wait_s": 60.0}


def assert_stages_are_idle(outcome, *, num_layers=(2, 1)):
    """No copy is in flight, and no stage waits for activations that were not sent."""
    first, second = outcome["end"]["stages"]
    assert (first["num_layers"], second["num_layers"]) == num_layers
    assert first["num_open_loads"] == second["num_open_loads"] == 0
    assert second["num_asked"] == first["num_sent"] > 0
    assert outcome["end"]["num_queued_steps"] == 0


SETUPS = {
    "synchronous loads": ({}, "load"),
    "asynchronous loads": ({"sync_load": False}, "load"),
    "staged": (STAGED, "resume_load"),
}


@pytest.mark.parametrize(("settings", "method"), few_setups(SETUPS, "synchronous loads"))
def test_answers_equal_those_without_a_connector(stages, right, settings, method):
    """Evictions and preemptions, loads that fail or destroy the caches in one stage, resets, aborts."""
    again = [*EMPTY_HBM, GENERATE]
    faults = [
        {"do": "break_loads", "stage": 0, "times": 2, "method": method},
        {"do": "break_loads", "stage": 1, "times": 2, "method": method},
        {"do": "lose_caches", "stage": 0, "skip": [0], "method": method},
        {"do": "lose_caches", "stage": 1, "skip": [1], "method": method},
    ]
    waits = {} if not settings else {"0": "WAITING_FOR_REMOTE_KVS"}
    steps = [
        *(GENERATE, *again, *conversations(), *LONG_ANSWERS, {"do": "reset"}, GENERATE),
        *(step for fault in faults for step in (*EMPTY_HBM, fault, GENERATE, *again)),
        *(*EMPTY_HBM, DRIVE | {"preempt_at": [2, 5]}),
        *(*EMPTY_HBM, DRIVE | {"abort": waits | {"1": "RUNNING", "5": "WAITING"}}, *again),
    ]
    outcome = run(stages, steps, decode_save=True, num_cpu_chunks=60, breaker_retry_s=0.01, **settings)
    *complete, aborted, last = answers(outcome)
    generated = right["generate"]
    assert complete == [generated, generated, *right["chats"], right["long"], *[generated] * 10]
    assert last == generated
    assert sorted(outcome["steps"][-4]["aborted"]) == sorted(map(int, waits | {"1": "", "5": ""}))
    assert all(found == answer[: len(found)] for found, answer in zip(aborted, generated, strict=True))

    assert min(outcome["steps"][3]["cached"]) >= 64
    assert outcome["end"]["num_preemptions"] > 1
    assert_nothing_leaked(outcome, failed=True)
    assert_stages_are_idle(outcome)
    assert [stage["num_host_chunks"] for stage in outcome["end"]["stages"]] == [60, 60]
    stats = outcome["end"]["stats"]
    assert stats["num_evicted_chunks"] > 0
    assert stats["saved_blocks"] > 0
    assert stats["loaded_tokens"] > 0


def test_each_stage_loads_its_own_layers(stages):
    """With two devices in each stage."""
    steps = []
    for stage in (0, 1):
        steps += [{"do": "reset"}, GENERATE, *EMPTY_HBM, GENERATE, *EMPTY_HBM]
        steps += [{"do": "shuffle_host_memory", "stage": stage}, GENERATE, {"do": "drain"}]
    outcome = run(stages, steps, engine=STAGES | {"tensor_parallel_size": 2}, num_cpu_chunks=None, host_gb=0.01)
    computed, found, without_stage_0, *again, without_stage_1 = answers(outcome)
    assert [found, *again] == [computed] * 3
    assert min(outcome["steps"][4]["cached"]) >= 64
    for wrong in (without_stage_0, without_stage_1):
        assert sum(a != b for a, b in zip(computed, wrong, strict=True)) > len(computed) / 2
    assert_nothing_leaked(outcome)
    # With several devices in a stage, tpu-inference 0.32 gives each the number of arrays that the first one needs.
    assert_stages_are_idle(outcome, num_layers=(2, 2))
    # Half of the host memory is for each stage.
    stats, num_chunks = outcome["end"]["stats"], int(0.005 * 2**30 / 32768)
    assert [stage["num_host_chunks"] for stage in outcome["end"]["stages"]] == [num_chunks] * 2
    assert stats["num_host_chunks"] == num_chunks
    assert stats["saved_nbytes"] == stats["saved_blocks"] * 2 * 32768


# By model: engine, environment, layers of each stage, page groups of each stage.
PYTORCH_MODELS: dict[str, tuple[dict[str, Any], dict[str, str], tuple[int, int], tuple[int, int]]] = {
    "gemma4": ({}, {"MODEL_IMPL_TYPE": "vllm", "VLLM_PP_LAYER_PARTITION": "3,1"}, (3, 1), (2, 1)),
    "gemma3": ({"disable_hybrid_kv_cache_manager": True}, {}, (3, 3), (1, 1)),
    "deepseek": (
        {
            "block_size": 32,
            "num_gpu_blocks_override": 16,
            "additional_config": {"sharding": {"sharding_strategy": {"enable_dp_attention": True}}},
        },
        {"NEW_MODEL_DESIGN": "1"},
        (1, 1),
        (1, 1),
    ),
}


@pytest.mark.wide
@pytest.mark.parametrize("model", few(PYTORCH_MODELS, "gemma4"))
def test_models_that_tpu_inference_runs_with_pytorch(stages, model):
    """Pages of two shapes, of which one stage has only one; windows in one group; latents on one device a stage."""
    changes, env, num_layers, num_page_groups = PYTORCH_MODELS[model]
    spec = {"model": model, "env": env, "engine": STAGES | {"load_format": "dummy"} | changes}
    weights, chats = {"do": "set_random_weights"}, conversations()
    plain = stages.run(spec | {"engine": spec["engine"] | NO_PREEMPTION, "steps": [weights, *chats, GENERATE]})
    broken = {"do": "break_loads", "stage": 1, "times": 2}
    shuffle = {"do": "shuffle_host_memory", "stage": 1}
    steps = [weights, *chats, GENERATE, *EMPTY_HBM, GENERATE, *EMPTY_HBM, broken, GENERATE]
    connector = ours(decode_save=True, breaker_retry_s=0.01)
    outcome = stages.run(
        spec | {"connector": connector, "steps": [*steps, *EMPTY_HBM, shuffle, GENERATE, {"do": "drain"}]}
    )
    assert outcome["error"] is None
    *got, wrong = answers(outcome)
    *chatted, generated = answers(plain)
    assert got == [*chatted, generated, generated, generated]
    assert sum(a != b for a, b in zip(generated, wrong, strict=True)) > len(generated) / 2
    assert min(outcome["steps"][7]["cached"]) >= 64
    assert outcome["end"]["stats"]["loaded_tokens"] > 500
    assert_nothing_leaked(outcome, failed=True)
    assert_stages_are_idle(outcome, num_layers=num_layers)
    assert tuple(stage["num_page_groups"] for stage in outcome["end"]["stages"]) == num_page_groups


def test_tpu_inference_cannot_run_its_own_gemma_4_in_stages(stages):
    """Without a connector: the second stage looks for its KV at the numbers of the whole model's layers."""
    with pytest.raises(
        pytest.fail.Exception, match=r"models/jax/gemma4.py(.*\n)*.*IndexError: list index out of range"
    ):
        stages.run({"model": "gemma4", "engine": STAGES | {"load_format": "dummy"}, "steps": [GENERATE]})


@pytest.mark.wide
def test_another_engine_finds_what_both_stages_have_in_files(stages, right, tmp_path):
    """Each stage has files of its own. What one of them has lost, or cannot read, is computed in both."""
    settings = in_files(tmp_path / "kv") | {"num_cpu_chunks": 40, "decode_save": True}
    drain, chats = {"do": "drain"}, conversations()
    one = run(stages, [*chats, *LONG_ANSWERS, GENERATE, drain], **settings)
    # Some chunks were evicted before they could be written, which ones is a matter of time. These are written now.
    rest = run(stages, [GENERATE, drain], **settings | {"num_cpu_chunks": 200})
    assert rest["end"]["stats"]["dropped_cascade_chunks"] == 0
    assert sorted(path.name for path in (tmp_path / "kv").iterdir()) == ["worker-0", "worker-1"]
    steps = [
        {"do": "generate", "prompts": PROMPTS[:4]},
        {"do": "break_reads", "stage": 0, "times": 1},
        {"do": "generate", "prompts": PROMPTS[4:5]},
        {"do": "break_reads", "stage": 1, "times": 1},
        {"do": "generate", "prompts": PROMPTS[5:]},
    ]
    other = run(stages, [*steps, *chats, *LONG_ANSWERS, drain], **settings)
    shutil.rmtree(tmp_path / "kv" / "worker-1")
    last = run(stages, [GENERATE, drain], **settings)

    generated, chatted = right["generate"], [*right["chats"], right["long"]]
    assert answers(one) == [*chatted, generated]
    assert answers(rest) == [generated]
    assert answers(other) == [generated[:4], generated[4:5], generated[5:], *chatted]
    assert answers(last) == [generated]
    found, (broken_0,), (broken_1,) = (step["cached"] for step in other["steps"][:5:2])
    assert found == [80] * 4
    assert 32 <= min(broken_0, broken_1) <= max(broken_0, broken_1) < 80, "the prefix of all and what precedes the hole"
    for outcome in (one, other, last):
        assert_nothing_leaked(outcome)
        assert_stages_are_idle(outcome)
    assert min(outcome["end"]["num_preemptions"] for outcome in (one, other)) > 0
    stored, promoted, lost = (outcome["end"]["stats"] for outcome in (one, other, last))
    assert stored["cascaded_nbytes"] == stored["cascaded_chunks"] * BLOCK_NBYTES > 0
    assert promoted["restored_chunks"] == rest["end"]["stats"]["num_stored_chunks"] >= stored["num_stored_chunks"] > 0
    assert promoted["promoted_nbytes"] == promoted["promoted_chunks"] * BLOCK_NBYTES > 0
    assert promoted["loaded_tokens"] > stored["loaded_tokens"] > 0
    assert promoted["failed_storage_chunks"] == 2
    assert lost["restored_chunks"] == lost["loaded_tokens"] == 0


@pytest.mark.wide
def test_records_of_other_layers_are_not_found(stages, tmp_path):
    """After the model was divided in another way. All stages have two KV arrays then as before, on two devices each."""
    engine = STAGES | {"pipeline_parallel_size": 4, "tensor_parallel_size": 2}
    steps = [{"do": "generate", "prompts": PROMPTS[:4]}, {"do": "drain"}]

    def run_divided(partition, connector=None):
        spec = {"model": "tiny, 7 layers", "env": {"VLLM_PP_LAYER_PARTITION": partition}, "engine": engine}
        outcome = stages.run(spec | {"connector": connector, "steps": steps})
        assert outcome["error"] is None
        assert [stage["num_layers"] for stage in outcome["end"]["stages"]] == [2] * 4
        return outcome

    before, after, again = (
        run_divided(partition, ours(**in_files(tmp_path))) for partition in ("2,2,2,1", "2,2,1,2", "2,2,1,2")
    )
    # Another division may round otherwise, with and without the connector.
    assert answers(before) == answers(run_divided("2,2,2,1"))
    assert answers(after) == answers(again) == answers(run_divided("2,2,1,2"))
    assert before["end"]["stats"]["cascaded_chunks"] > 5
    assert after["end"]["stats"]["restored_chunks"] == 0
    assert again["end"]["stats"]["restored_chunks"] > 5
