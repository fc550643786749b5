"""Pipeline stages that are spawned, not forked (`VLLM_WORKER_MULTIPROC_METHOD=spawn`).

Nothing of the engine's process is in them: each loads vLLM's plugins, makes its connector and reads its settings anew.
"""

import os

import pytest

from tests.adapters.llm_client import ROOT, Process, conversations, ours
from tests.adapters.test_llm import EMPTY_HBM, GENERATE, NO_PREEMPTION, answers, assert_nothing_leaked
from tests.adapters.test_rank_stages import RANKS, check_end, stats
from tests.adapters.test_stages import STAGES, assert_stages_are_idle

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

TURNS = conversations()


@pytest.fixture(scope="module")
def stages(tmp_path_factory, kept_vllm):
    scripts = ROOT / "scripts" / "vllm_cpu"
    folders = (ROOT, scripts / "stubs", scripts, scripts / "plugin")  # the last one for the processes of the stages
    settings = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "PYTHONPATH": os.pathsep.join(map(str, folders))}
    child = Process(tmp_path_factory.mktemp("vllm-home"), kept_vllm.settings | settings, module="stage_runs")
    yield child
    if not child.has_hung:
        kept_vllm.publish()
    child.close()


def run(stages, steps, **spec):
    outcome = stages.run({"model": "tiny", "engine": STAGES, "steps": steps} | spec)
    assert outcome["error"] is None
    return outcome


def test_answers_equal_those_without_a_connector(stages):
    """Evictions and preemptions, and loads that fail in one stage or destroy its caches."""
    generated, *chats = answers(run(stages, [GENERATE, *TURNS], engine=STAGES | NO_PREEMPTION))
    again = [*EMPTY_HBM, GENERATE]
    faults = [
        {"do": "break_loads", "stage": 0, "times": 2},
        {"do": "break_loads", "stage": 1, "times": 2},
        {"do": "lose_caches", "stage": 1, "skip": [0]},
    ]
    steps = [GENERATE, *again, *TURNS, *(step for fault in faults for step in (*EMPTY_HBM, fault, GENERATE))]
    outcome = run(stages, steps, connector=ours(decode_save=True, num_cpu_chunks=60, breaker_retry_s=0.01))
    assert answers(outcome) == [generated, generated, *chats, *[generated] * 3]
    assert min(outcome["steps"][3]["cached"]) >= 64
    assert outcome["end"]["num_preemptions"] > 0
    assert_nothing_leaked(outcome, failed=True)
    assert_stages_are_idle(outcome)
    found = outcome["end"]["stats"]
    assert found["num_evicted_chunks"] > 0
    assert found["loaded_tokens"] > 500


def test_a_model_that_tpu_inference_runs_with_pytorch(stages):
    """Its stages start only with the plugin of this package, which each process loads."""
    spec = {"model": "gemma3", "engine": STAGES | {"load_format": "dummy", "disable_hybrid_kv_cache_manager": True}}
    weights, shuffle = {"do": "set_random_weights"}, {"do": "shuffle_host_memory", "stage": 1}
    steps = [weights, GENERATE, *EMPTY_HBM, GENERATE, *EMPTY_HBM, shuffle, GENERATE, {"do": "drain"}]
    first, found, wrong = answers(run(stages, steps, connector=ours(), **spec))
    (plain,) = answers(run(stages, [weights, GENERATE], **spec))
    assert first == found == plain
    assert sum(a != b for a, b in zip(plain, wrong, strict=True)) > len(plain) / 2


def test_data_parallel_ranks_in_spawned_stages(stages):
    """The schedulers are forked, as ever."""
    engine = STAGES | {"tensor_parallel_size": 2, "additional_config": RANKS}
    few, many = (engine | {"num_gpu_blocks_override": number} for number in (28, 400))
    env = {"NEW_MODEL_DESIGN": "1", "DP_SCHED_BATCH_PREFILL": "0"}
    expected = answers(run(stages, TURNS, engine=many, env=env))
    first, second, third = TURNS
    empty, broken = {"do": "reset_hbm"}, {"do": "break_loads", "stage": 0, "times": 1}
    steps = [first, empty, second, empty, broken, third]
    outcome = run(stages, steps, engine=few, env=env, connector=ours(decode_save=True, num_cpu_chunks=24))
    assert answers(outcome) == expected
    assert min(stats(outcome, "loaded_blocks")) > 5
    assert sum(stats(outcome, "num_failed_jobs")) > 0
    check_end(outcome)
