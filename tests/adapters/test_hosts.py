"""Real vLLM on two hosts: processes with a real tpu-inference worker each, which share one model.

The engine sends every host the same pickled call; vLLM's `KVOutputAggregator` joins their reports. Host 1 has less
memory than host 0.
"""

import pytest

from tests.adapters.llm_client import Process, conversations, ours, tokens

pytestmark = pytest.mark.slow

ENGINE = {"tensor_parallel_size": 2}
TURNS = conversations()
AGAIN = [{"do": "forget"}, *TURNS]
SETTINGS = {"num_cpu_chunks": 64, "host_segment_gb": 1e-4}  # with memory for 64 chunks, and for fewer on host 1
CONNECTOR = ours(**SETTINGS)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory, kept_vllm):
    """Starts the engine's process; each run starts those of the hosts."""
    settings = kept_vllm.settings_of_another() | {"TPU_MULTIHOST_BACKEND": "ray"}
    process = Process(tmp_path_factory.mktemp("vllm-home"), settings, module="hosts_runs")
    yield process
    process.close()


@pytest.fixture(
    scope="module", params=[True, pytest.param(False, marks=pytest.mark.wide)], ids=["async scheduling", "without"]
)
def outcome(request, hosts):
    """Async scheduling is the default where vLLM runs on several hosts."""
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
    engine = ENGINE | {"async_scheduling": request.param}
    outcome = hosts.run({"engine": engine, "connector": CONNECTOR, "steps": steps})
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
    """Without async scheduling: with it and without the connector, tpu-inference 0.32 answers wrongly if preempted."""
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


def test_another_engine_finds_what_both_hosts_have_in_files(plain, hosts, tmp_path):
    """Each host has files of its own, with its devices' part of each chunk."""
    storage = {
        "storage_tier": "file",
        "storage_options": f"{tmp_path / 'kv'},min_free_gb=0",
        "num_storage_chunks": 200,
        "storage_wait_s": 60.0,
    }
    spec = {
        "engine": ENGINE,
        "connector": ours(**SETTINGS | storage),
        "steps": [*TURNS, {"do": "drain"}, {"do": "stats"}],
    }
    expected = [step["tokens"] for step in plain(TURNS, ENGINE)["steps"]]
    one, other = (hosts.run(spec) for _ in range(2))
    for outcome in (one, other):
        assert not outcome["error"]
        assert [step["tokens"] for step in outcome["steps"] if step and "tokens" in step] == expected
    assert sorted(path.name for path in (tmp_path / "kv").iterdir()) == ["worker-0", "worker-1"]
    before, after = one["steps"][-1], other["steps"][-1]
    assert before["cascaded_chunks"] > 10
    assert after["restored_chunks"] == before["cascaded_chunks"]
    assert after["promoted_chunks"] > 5
    assert (before["num_failed_jobs"], after["num_failed_jobs"]) == (0, 0)
    cached = [sum(sum(step["cached"]) for step in run["steps"] if step and "cached" in step) for run in (one, other)]
    assert cached[1] > cached[0]


@pytest.mark.parametrize("model", ["gemma3", "gemma4"])
def test_sliding_windows_and_pages_of_two_shapes(hosts, model):
    engine = ENGINE | {"num_gpu_blocks_override": 60}
    spec = {"model": model, "engine": engine}
    expected = [step["tokens"] for step in hosts.run(spec | {"steps": TURNS})["steps"]]
    connector = ours(num_cpu_chunks=96, host_segment_gb=2e-4)
    steps = [*TURNS, {"do": "drain"}, *AGAIN, {"do": "stats"}]
    outcome = hosts.run(spec | {"connector": connector, "steps": steps})
    assert [step["tokens"] for step in outcome["steps"] if step and "tokens" in step] == 2 * expected
    end = outcome["steps"][-1]
    assert end["loaded_blocks"] > 0
    assert end["num_failed_jobs"] == 0
    assert (end["num_window_chunks"] > 0) == (model == "gemma3")


@pytest.mark.wide
def test_states(hosts):
    """As with tpu-inference's own executors, the engine learns from the workers how many states there are."""
    engine = ENGINE | {"num_gpu_blocks_override": 400, "async_scheduling": True}
    document = {"do": "chat", "said": {"document": tokens("document", 200)}}
    spec = {"model": "qwen3.5", "engine": engine}
    steps = [document, {"do": "drain"}, {"do": "forget"}, document]
    one = {"model": "qwen3.5", "engine": engine | {"async_scheduling": False}, "steps": [document]}
    expected = [step["tokens"] for step in hosts.run(one)["steps"]]
    outcome = hosts.run(
        spec | {"connector": ours(num_cpu_chunks=96, host_segment_gb=2e-4), "steps": [*steps, {"do": "stats"}]}
    )
    assert not outcome["error"]
    first, *_, again, end = outcome["steps"]
    assert [first["tokens"], again["tokens"]] == 2 * expected
    assert again["cached"] == [192]
    assert end["loaded_blocks"] == 192 // 16 + 1, "and a state"
    assert end["num_checkpoints"] > 0
    assert end["num_failed_jobs"] == 0
