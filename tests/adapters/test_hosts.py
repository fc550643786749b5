"""Real vLLM on two hosts: processes with a real tpu-inference worker each, which share one model.

The engine sends every host the same pickled call; vLLM's `KVOutputAggregator` joins their reports. Host 1 has less
memory than host 0.
"""

import pytest

from tests.adapters.llm_client import Process, conversations, ours

pytestmark = pytest.mark.slow

ENGINE = {"tensor_parallel_size": 2}
TURNS = conversations()
AGAIN = [{"do": "forget"}, *TURNS]
CONNECTOR = ours(num_cpu_chunks=64, host_segment_gb=1e-4)  # with memory for 64 chunks, and for fewer on host 1


@pytest.fixture(scope="module")
def outcome(tmp_path_factory, kept_vllm):
    settings = kept_vllm.settings_of_another() | {"TPU_MULTIHOST_BACKEND": "ray"}
    process = Process(tmp_path_factory.mktemp("vllm-home"), settings, module="hosts_runs")
    steps = [
        *TURNS,
        {"do": "stats"},
        {"do": "fail", "host": 1, "rates": {"load": 0.3, "save": 0.2, "slow": 0.5}},
        *AGAIN,
        {"do": "stats"},
        {"do": "restart", "host": 1},
        *AGAIN,
        *AGAIN,
        {"do": "stats"},
        {"do": "kill", "host": 1},
    ]
    outcome = process.run({"engine": ENGINE, "connector": CONNECTOR, "steps": steps})
    process.close()
    assert not outcome["error"]
    return outcome["steps"]


@pytest.fixture(scope="module")
def rounds(outcome):
    """The answers of each round of the conversations: three turns."""
    answers = [step for step in outcome if isinstance(step, dict) and "tokens" in step]
    return [answers[i : i + 3] for i in range(0, len(answers), 3)]


@pytest.fixture(scope="module")
def stats(outcome):
    return [step for step in outcome if isinstance(step, dict) and "saved_blocks" in step]


def test_tokens_equal_those_of_one_process(plain, rounds):
    expected = [step["tokens"] for step in plain(TURNS, ENGINE)["steps"]]
    for answers in rounds:
        assert [step["tokens"] for step in answers] == expected


def test_prompts_are_loaded(plain, rounds, stats):
    without = sum(sum(step["cached"]) for step in plain(TURNS, ENGINE)["steps"])
    assert sum(sum(step["cached"]) for step in rounds[0]) > without
    assert stats[0]["loaded_blocks"] > 0
    assert stats[0]["num_failed_jobs"] == 0


def test_the_host_with_less_memory_decides(stats):
    larger, smaller = stats[0]["num_host_chunks_of"]
    assert stats[0]["num_host_chunks"] == smaller < larger


def test_copies_that_fail_on_one_host(stats):
    assert stats[1]["num_failed_jobs"] > 3


def test_a_worker_that_was_started_anew(rounds, stats):
    assert stats[2]["num_worker_restarts"] == 1
    assert stats[2]["loaded_blocks"] > stats[1]["loaded_blocks"]


def test_a_host_that_dies_ends_the_engine(outcome):
    assert outcome[-1] == "HostsError: host 1 of 2 has died (SIGKILL)"
