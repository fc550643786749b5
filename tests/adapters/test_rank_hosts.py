"""Data-parallel ranks on several hosts in the real engine: each rank's KV is on the device of one of two hosts.

Hosts as in `test_hosts`: processes with a real tpu-inference worker each, and a stand-in for Ray's executor, which
joins the outputs of connectors as vLLM's executors do.
"""

import shutil

import pytest

from tests.adapters.llm_client import Process, conversations, ours, tokens
from tests.storage import servers

pytestmark = pytest.mark.slow

RANKS = {
    "tensor_parallel_size": 2,
    "additional_config": {"sharding": {"sharding_strategy": {"enable_dp_attention": True, "attn_dp_size": 2}}},
    "num_gpu_blocks_override": 60,  # of both ranks
    "async_scheduling": True,  # the default on several hosts
}
# Without the connector, tpu-inference 0.32 answers wrongly with async scheduling if a request is preempted.
PLAIN = RANKS | {"async_scheduling": False}
TURNS = conversations()
AGAIN = [{"do": "forget"}, *TURNS]
CONNECTOR = ours(num_cpu_chunks=64, host_segment_gb=2e-4)  # host 1 has memory for fewer


@pytest.fixture(scope="module")
def hosts(tmp_path_factory, kept_vllm):
    settings = {"TPU_MULTIHOST_BACKEND": "ray", "NEW_MODEL_DESIGN": "1", "DP_SCHED_BATCH_PREFILL": "0"}
    process = Process(
        tmp_path_factory.mktemp("vllm-home"), kept_vllm.settings_of_another() | settings, module="hosts_runs"
    )
    yield process
    process.close()


def answers(outcome):
    assert not outcome["error"]
    return [step["tokens"] for step in outcome["steps"] if isinstance(step, dict) and "tokens" in step]


def stats(outcome):
    return [step for step in outcome["steps"] if isinstance(step, dict) and "ranks" in step]


def of_ranks(stat, name):
    return [rank[name] for rank in stat["ranks"]]


def test_both_ranks_load_what_only_their_host_has(hosts):
    """With copies that fail on one host, a worker that is started anew, and a host that dies."""
    expected = answers(hosts.run({"engine": PLAIN, "steps": TURNS}))
    steps = [
        *(*TURNS, *AGAIN, {"do": "drain"}, {"do": "stats"}),
        {"do": "fail", "host": 1, "rates": {"load": 0.3, "save": 0.2, "slow": 0.5}},
        *(*AGAIN, {"do": "drain"}, {"do": "stats"}),
        {"do": "restart", "host": 1},
        *(*AGAIN, *AGAIN, {"do": "drain"}, {"do": "stats"}),
        {"do": "kill", "host": 1},
    ]
    outcome = hosts.run({"engine": RANKS, "connector": CONNECTOR, "steps": steps})
    assert answers(outcome) == 5 * expected
    right, failed, restarted = stats(outcome)
    assert min(of_ranks(right, "loaded_blocks")) > 10
    assert of_ranks(right, "num_failed_jobs") == [0, 0]
    larger, smaller = right["num_host_chunks_of"]
    assert of_ranks(right, "num_host_chunks") == [smaller, smaller]
    assert larger > smaller
    assert min(of_ranks(failed, "num_failed_jobs")) > 0, "one program copies for both ranks"
    assert of_ranks(restarted, "num_worker_restarts") == [1, 1]
    assert min(of_ranks(restarted, "loaded_blocks")) > max(of_ranks(failed, "loaded_blocks"))
    assert outcome["steps"][-1] == "HostsError: host 1 of 2 has died (SIGKILL)"


def test_latents_come_from_the_host_tiers(hosts):
    documents = {"do": "chat", "said": {f"document {i}": tokens(f"document {i}", 300) for i in range(4)}}
    size = {"block_size": 128, "max_model_len": 512}
    spec = {"model": "deepseek", "engine": RANKS | size}
    plain = {"model": "deepseek", "engine": PLAIN | size, "steps": [documents, {"do": "forget"}, documents]}
    expected = answers(hosts.run(plain))
    steps = [documents, {"do": "drain"}, {"do": "forget"}, documents, {"do": "stats"}]
    # A segment has blocks of two documents, which change places.
    steps += [{"do": "shuffle_host_memory"}, {"do": "forget"}, documents]
    outcome = hosts.run(spec | {"connector": ours(num_cpu_chunks=64, host_segment_gb=6e-4), "steps": steps})
    *got, shuffled = answers(outcome)
    assert got == expected
    assert outcome["steps"][3]["cached"] == [256] * 4
    assert of_ranks(stats(outcome)[0], "loaded_blocks") == [4, 4]
    assert all(a != b for a, b in zip(shuffled, expected[0], strict=True)), "the bytes come from the host tiers"


def storage(name, options):
    waits = {"storage_wait_s": 60.0, "storage_lookup_wait_s": 60.0}
    tier = {"storage_tier": name, "storage_options": options, "num_storage_chunks": 1000}
    return ours(num_cpu_chunks=64, host_segment_gb=2e-4, **tier, **waits)


@pytest.mark.wide
def test_another_engine_finds_what_both_ranks_have_in_the_files_of_their_hosts(hosts, tmp_path):
    """Each host has files of the rank whose devices it has; what is lost of one rank is computed again."""
    documents = {"do": "chat", "said": {f"document {i}": tokens(f"document {i}", 100) for i in range(4)}}
    # From the step of the first prompts on the ranks know what they have.
    steps = [
        {"do": "chat", "said": {"first": [5] * 20, "second": [6] * 20}},
        documents,
        {"do": "drain"},
        {"do": "stats"},
    ]
    spec = {"engine": RANKS, "connector": storage("file", f"{tmp_path / 'kv'},min_free_gb=0"), "steps": steps}
    expected = answers(hosts.run({"engine": PLAIN, "steps": steps[:2]}))
    one, other = (hosts.run(spec) for _ in range(2))
    assert sorted(path.name for path in (tmp_path / "kv").iterdir()) == ["worker-0", "worker-3"]
    shutil.rmtree(tmp_path / "kv" / "worker-3")
    last = hosts.run(spec)
    for outcome in (one, other, last):
        assert answers(outcome) == expected
        assert of_ranks(stats(outcome)[0], "num_failed_jobs") == [0, 0]
        assert of_ranks(stats(outcome)[0], "failed_storage_chunks") == [0, 0]
    assert min(of_ranks(stats(one)[0], "cascaded_chunks")) > 5
    assert of_ranks(stats(other)[0], "restored_chunks") == of_ranks(stats(one)[0], "cascaded_chunks")
    assert min(of_ranks(stats(other)[0], "promoted_chunks")) > 5
    assert other["steps"][1]["cached"] == [96] * 4
    kept, lost = of_ranks(stats(last)[0], "restored_chunks")
    assert lost == 0 < kept


@pytest.mark.wide
def test_ranks_share_on_a_server_what_their_hosts_store(hosts):
    """On whatever host a request is served, its prefix is found, and every host can read it."""
    pytest.importorskip("glide_sync")
    prompt = tokens("document", 100)
    steps = [
        {"do": "chat", "said": {"one": prompt}},
        {"do": "drain"},
        {"do": "chat", "said": {f"other {i}": [*prompt, 5 + i] for i in range(4)}},
        {"do": "stats"},
    ]
    expected = answers(hosts.run({"engine": PLAIN, "steps": [steps[0], steps[2]]}))
    with servers.running(servers.valkey()) as server:
        connector = storage("valkey", f"valkey://127.0.0.1:{server.port}?timeout_s=30")
        outcome = hosts.run({"engine": RANKS, "connector": connector, "steps": steps})
    assert answers(outcome) == expected
    assert outcome["steps"][2]["cached"] == [96] * 4
    (end,) = stats(outcome)
    assert sorted(of_ranks(end, "cascaded_chunks")) == [0, 6]
    assert max(of_ranks(end, "promoted_chunks")) > 0
    assert of_ranks(end, "failed_storage_chunks") == [0, 0]
