"""Pipeline stages above a storage tier on a server: Valkey, which engines share, or a bucket (rclone's S3).

Each stage stores its part of a chunk under names of its own. These tests need the clients and servers beside vLLM, as
`scripts/vllm_cpu/setup.sh` installs them, and are skipped without.
"""

import pytest

from tests.adapters.llm_client import Process, conversations, ours, tokens
from tests.adapters.test_llm import GENERATE, NO_PREEMPTION, PROMPTS, answers, assert_nothing_leaked
from tests.adapters.test_rank_stages import MANY, check_end, stats
from tests.adapters.test_stages import BLOCK_NBYTES, STAGES, assert_stages_are_idle
from tests.storage import servers

OF_SECOND_STAGE = "tpu_offload:*:1:*:*"  # names of its records, see `storage.valkey`
DELETE = "local n = redis.call('KEYS', ARGV[1]) for _, k in ipairs(n) do redis.call('DEL', k) end return #n"


pytestmark = [pytest.mark.vllm, pytest.mark.slow]

DRAIN = {"do": "drain"}


@pytest.fixture(scope="module")
def stages(tmp_path_factory, kept_vllm):
    settings = {
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",
        "NEW_MODEL_DESIGN": "1",
        "DP_SCHED_BATCH_PREFILL": "0",
        "AWS_ACCESS_KEY_ID": "kv",
        "AWS_SECRET_ACCESS_KEY": "secret",
    }
    child = Process(tmp_path_factory.mktemp("vllm-home"), kept_vllm.settings | settings, module="stage_runs")
    yield child
    if not child.has_hung:
        kept_vllm.publish()
    child.close()


@pytest.fixture
def valkey():
    """A server, and the settings of a tier on it."""
    pytest.importorskip("glide_sync")
    with servers.running(servers.valkey()) as server:
        yield server, tier("valkey", f"valkey://127.0.0.1:{server.port}?timeout_s=30")


@pytest.fixture
def bucket(tmp_path):
    pytest.importorskip("obstore")
    with servers.running(servers.rclone(tmp_path)) as server:
        servers.make_bucket(server.port, "bucket")
        options = "region=us-east-1&allow_http=1&timeout_s=30"
        yield server, tier("object", f"s3://bucket?endpoint=http://127.0.0.1:{server.port}&{options}")


def tier(name, url):
    waits = {"storage_wait_s": 60.0, "storage_lookup_wait_s": 60.0}
    return {"storage_tier": name, "storage_options": url, "num_storage_chunks": 1000, **waits}


def run(stages, steps, settings=None, *, engine=STAGES):
    connector = ours(**settings) if settings is not None else None
    outcome = stages.run({"model": "tiny", "engine": engine, "connector": connector, "steps": steps})
    assert outcome["error"] is None
    return outcome


@pytest.mark.parametrize("server", ["valkey", "bucket"])
def test_another_engine_finds_what_both_stages_have_on_a_server(stages, server, request):
    """The other has a small host tier; reads of it fail in one stage."""
    _, storage = request.getfixturevalue(server)
    settings = storage | {"decode_save": True}  # with room for all: what is evicted early may not be written
    chats = conversations()
    generated, *chatted = answers(run(stages, [GENERATE, *chats], engine=STAGES | NO_PREEMPTION))
    one = run(stages, [*chats, GENERATE, DRAIN], settings)
    steps = [
        {"do": "generate", "prompts": PROMPTS[:4]},
        {"do": "break_reads", "stage": 0, "times": 1},
        {"do": "generate", "prompts": PROMPTS[4:5]},
        {"do": "break_reads", "stage": 1, "times": 1},
        {"do": "generate", "prompts": PROMPTS[5:]},
    ]
    other = run(stages, [*steps, *chats, DRAIN], settings | {"num_cpu_chunks": 40})
    assert answers(one) == [*chatted, generated]
    assert answers(other) == [generated[:4], generated[4:5], generated[5:], *chatted]
    found, (broken_0,), (broken_1,) = (step["cached"] for step in other["steps"][:5:2])
    assert found == [80] * 4
    assert max(broken_0, broken_1) < 80
    for outcome in (one, other):
        assert_nothing_leaked(outcome)
        assert_stages_are_idle(outcome)
    stored, promoted = (outcome["end"]["stats"] for outcome in (one, other))
    assert stored["cascaded_nbytes"] == stored["cascaded_chunks"] * BLOCK_NBYTES > 0
    assert promoted["promoted_nbytes"] == promoted["promoted_chunks"] * BLOCK_NBYTES > 0
    assert promoted["failed_storage_chunks"] == 2
    assert promoted["num_evicted_chunks"] > 0
    assert promoted["loaded_tokens"] > 1000
    assert min(outcome["end"]["num_preemptions"] for outcome in (one, other)) > 0


def test_what_a_server_has_of_one_stage_only_is_computed(stages, valkey):
    """It has evicted the records of the second stage."""
    server, storage = valkey
    (generated,) = answers(run(stages, [GENERATE], engine=STAGES | NO_PREEMPTION))
    one = run(stages, [GENERATE, DRAIN], storage)
    deleted = servers.ask(server.port, "EVAL", DELETE, "0", OF_SECOND_STAGE)
    assert int(deleted.removeprefix(":")) > 10
    last = run(stages, [GENERATE, DRAIN], storage)
    assert answers(one) == answers(last) == [generated]
    assert last["end"]["stats"]["promoted_chunks"] == last["end"]["stats"]["loaded_tokens"] == 0
    assert_stages_are_idle(last)


def test_answers_without_a_server(stages, valkey):
    """It has died before the second engine starts."""
    server, storage = valkey
    one = run(stages, [GENERATE, DRAIN], storage)
    server.kill()
    url = f"valkey://127.0.0.1:{server.port}?timeout_s=0.2&connect_timeout_s=0.2"
    last = run(stages, [GENERATE, DRAIN], storage | {"storage_options": url, "storage_lookup_wait_s": 1.0})
    assert answers(one) == answers(last)
    assert last["end"]["stats"]["promoted_chunks"] == 0
    assert_stages_are_idle(last)


def test_ranks_share_what_they_store_in_both_stages(stages, valkey):
    """Wherever a request is sent, its prefix is there, in the parts of both stages."""
    _, storage = valkey
    prompt = tokens("document", 100)
    steps = [
        {"do": "generate", "prompts": [prompt]},
        DRAIN,
        {"do": "generate", "prompts": [[*prompt, 5 + i] for i in range(4)]},
    ]
    plain, outcome = (run(stages, steps, settings, engine=MANY) for settings in (None, storage))
    assert answers(outcome) == answers(plain)
    assert outcome["steps"][-1]["cached"] == [96] * 4
    assert sorted(stats(outcome, "cascaded_chunks")) == [0, 6]
    assert max(stats(outcome, "promoted_chunks")) > 0
    check_end(outcome)
