"""The connector in a real `vllm serve`, set up as in docs/vllm.md: async scheduling, `recompute`, preemptions.

The tests share a server, which SIGTERM ends; that of which the engine process is killed has a test of its own. The
expected answers are those of an engine without a connector and with enough blocks that no request is preempted.
"""

import asyncio
import dataclasses
import json
import random
import signal
import time

import pytest

from scripts.vllm_cpu.vllm_client import Client, Load, answers, conversation, words
from scripts.vllm_cpu.vllm_server import BLOCK_SIZE, OURS, Folder, Server
from tests.adapters.kv_tree import KVTree
from tests.monitoring.prometheus import as_grafana_asks, configure, is_finite, running
from tests.ports import free_port
from tpu_offload.metrics import METRICS, SWAP_FIELDS, MetricGroup
from tpu_offload.monitoring import ALERTS, ROWS
from tpu_offload.monitoring.expressions import NAMES

pytestmark = pytest.mark.vllm

NUM_BLOCKS, NUM_HOST_BLOCKS = 80, 240
PRESSURE = Load(conversations=8, turns=2, concurrency=8, first=150, answer=56, shared=32)
_QUIET_LIMIT_S = 120.0
_END_LIMIT_S = 60.0


class Served:
    """The server that most tests share."""

    def __init__(self, folder, kept):
        self.folder, self.kept = folder, kept
        self.events_path = folder.path / "tmp" / "events"
        events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"ipc://{self.events_path}"}
        extra = OURS["kv_connector_extra_config"] | {"num_cpu_chunks": NUM_HOST_BLOCKS}
        self.connector = {**OURS, "kv_connector_extra_config": extra}
        self.ours = Server(
            folder,
            num_blocks=NUM_BLOCKS,
            connector=self.connector,
            arguments=["--kv-events-config", json.dumps(events)],
            environ=kept.settings,
        )
        self.tree = KVTree(self.events_path, BLOCK_SIZE)

    def close(self):
        self.ours.kill()
        self.tree.close()

    def ask(self, prompt, **fields):
        """Sends one request to `ours`."""
        return talk(self.ours, lambda client: client.complete(prompt, **fields))

    def empty_hbm(self):
        """Empties HBM. Requires that no request holds a block."""
        self.ours.reset_prefix_cache(external=False)

    def quiet_metrics(self):
        """The metrics of `ours`, once it is idle."""
        idle = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:tpu_offload_in_flight_jobs")
        end_s = time.monotonic() + _QUIET_LIMIT_S
        while any((metrics := self.ours.metrics())[name] for name in idle):
            assert time.monotonic() < end_s, {name: metrics[name] for name in idle}
            time.sleep(0.05)
        return metrics


def talk(server, what):
    async def go():
        async with Client(server.url) as client:
            return await what(client)

    return asyncio.run(go())


def prompt(name, length):
    return words(random.Random(name), length)


def limits(**entries):
    return {"kv_transfer_params": {f"tpu_offload.{name}": value for name, value in entries.items()}}


LIMITS = {
    "none": ({}, 96, 96),
    "cache": (limits(cache=False), 0, 0),
    "unreadable": (limits(cache="no"), 0, 0),
    "unknown": (limits(max_load_token=1), 0, 0),
    "negative": (limits(max_load_tokens=-1), 0, 0),
    "load": (limits(max_load_tokens=40), 32, 96),
    "save": ({"kv_transfer_params": {"max_offload_tokens": 50}}, 48, 48),
    "of others": ({"kv_transfer_params": {"another_connector": 1}}, 96, 96),
}
HITS, GONE = prompt("hits", 100), [prompt(f"gone {i}", 150) for i in range(16)]
LIMITED = {name: prompt(name, 100) for name in LIMITS}


@pytest.fixture(scope="module")
def starting(kept_vllm):
    with Folder() as folder:
        servers = Served(folder, kept_vllm)
        try:
            yield servers
            kept_vllm.publish()
        finally:
            servers.close()


@pytest.fixture(scope="module")
def expected(process, starting):
    """Right answers: of the conversations by conversation and turn, then 40 tokens for each of the other prompts."""
    talks = {number: conversation(PRESSURE, 1, number) for number in range(PRESSURE.conversations)}
    asked = [HITS, *GONE, *LIMITED.values()]
    turns = [{str(i): next(talk) for i, talk in talks.items()} for _ in range(PRESSURE.turns)]
    outcome = process.run(
        {
            "model": str(starting.folder.model),
            "engine": {
                "load_format": "auto", "max_model_len": 1024, "max_num_seqs": 8, "max_num_batched_tokens": 256,
                "num_gpu_blocks_override": 400,
            },
            "steps": [
                *({"do": "chat", "said": said, "max_tokens": PRESSURE.answer} for said in turns),
                {"do": "generate", "prompts": asked, "max_tokens": 40},
            ],
        }
    )  # fmt: skip
    assert outcome["error"] is None
    assert outcome["end"]["num_preemptions"] == 0
    *chats, others = (step["tokens"] for step in outcome["steps"])
    by_turn = {(i, turn): answer for turn, chat in enumerate(chats) for i, answer in enumerate(chat)}
    return by_turn | {tuple(prompt): answer for prompt, answer in zip(asked, others, strict=True)}


@pytest.fixture(scope="module")
def served(starting, expected):
    """Once they have started, which takes longer than the right answers."""
    starting.ours.wait_until_ready()
    starting.kept.publish()
    end_s = time.monotonic() + _QUIET_LIMIT_S
    while not starting.ours.metrics()["vllm:tpu_offload_host_chunks"]:  # it is allocated in the background
        assert time.monotonic() < end_s
        starting.ask(prompt("first", 20))
    return starting


def test_answers_equal_those_without_a_connector_despite_preemptions(served, expected):
    before = served.ours.metrics()
    found = answers(talk(served.ours, lambda client: client.converse(PRESSURE, seed=1)))
    assert found == {turn: expected[turn] for turn in found}
    assert len({tuple(tokens) for tokens in found.values()}) == PRESSURE.conversations * PRESSURE.turns
    after = served.quiet_metrics()
    assert after["vllm:num_preemptions_total"] - before["vllm:num_preemptions_total"] >= 2
    assert after["vllm:tpu_offload_loaded_tokens_total"] > before["vllm:tpu_offload_loaded_tokens_total"]
    assert "nothing more of it is saved" not in served.ours.log()


def test_hits_and_resets(served, expected):
    """A hit in HBM, one in the host tier when HBM is reset, none when both are."""
    asked = HITS
    whole = len(asked) // BLOCK_SIZE * BLOCK_SIZE
    found = [served.ask(asked), served.ask(asked)]
    served.empty_hbm()
    before = served.ours.metrics()
    found.append(served.ask(asked))
    after = served.quiet_metrics()
    served.ours.reset_prefix_cache(external=True)
    found.append(served.ask(asked))
    assert [answer.cached_tokens for answer in found] == [0, whole, whole, 0]
    assert all(answer.tokens == expected[tuple(asked)][:16] for answer in found)
    for name in ("external_prefix_cache_hits", "tpu_offload_matched_tokens", "tpu_offload_loaded_tokens"):
        assert after[f"vllm:{name}_total"] - before[f"vllm:{name}_total"] == whole, name


@pytest.mark.parametrize("name", LIMITS)
def test_limits_of_a_request(served, expected, name):
    """Sends a prompt twice with these limits, the second time after emptying HBM, then once without limits."""
    asked, (fields, found_by_it, found_later) = LIMITED[name], LIMITS[name]
    found = [served.ask(asked, **fields)]
    for later in (fields, limits(max_save_tokens=0)):
        served.empty_hbm()
        found.append(served.ask(asked, **later))
    assert [answer.cached_tokens for answer in found] == [0, found_by_it, found_later]
    assert all(answer.tokens == expected[tuple(asked)][:16] for answer in found)


def test_clients_that_disconnect(served, expected):
    """Before the first token, in the middle, or near the end, while other requests are preempted."""
    asked, right_answers = GONE, [expected[tuple(tokens)] for tokens in GONE]

    async def all_at_once(client):
        after = [None, 0, 1, 7, None, 20, 33, 0] * 2
        return await asyncio.gather(
            *(
                client.complete(tokens, answer=40, disconnect_after=n)
                for tokens, n in zip(asked, after, strict=True)
            )
        )  # fmt: skip

    num_ended = served.ours.metrics()["vllm:request_success_total"]
    found = talk(served.ours, all_at_once)
    assert {answer.finish for answer in found} == {"disconnected", "length"}
    for answer, right in zip(found, right_answers, strict=True):
        assert answer.tokens == right[: len(answer.tokens)]
        assert len(answer.tokens) == 40 or answer.finish == "disconnected"
    assert served.quiet_metrics()["vllm:kv_cache_usage_perc"] == 0
    num_ended = served.ours.metrics()["vllm:request_success_total"] - num_ended
    assert sum(answer.finish == "length" for answer in found) <= num_ended < len(found)  # vLLM noticed the disconnects
    served.empty_hbm()
    assert [served.ask(tokens, answer=40).tokens for tokens in asked] == right_answers
    served.empty_hbm()  # they hold no blocks any more


def test_events_match_what_lookups_find(served):
    tree = served.tree
    tree.wait_for_subscription(lambda: served.ask(prompt("hello", 40)))
    served.ours.reset_prefix_cache(external=True)
    turns = [*talk(served.ours, lambda c: c.converse(PRESSURE, seed=5))]
    turns += talk(served.ours, lambda c: c.converse(PRESSURE, seed=6))
    resident = served.quiet_metrics()["vllm:tpu_offload_resident_chunks"]
    tree.follow_until(lambda: len(tree.host) == resident)
    assert 0 < len(tree.host) <= NUM_HOST_BLOCKS
    assert tree.num_removed > 0
    whole = [turn.prompt + turn.answer.tokens for turn in turns if turn.turn == PRESSURE.turns - 1]
    expected = [min(tree.num_host_tokens(tokens), (len(tokens) - 1) // BLOCK_SIZE * BLOCK_SIZE) for tokens in whole]
    assert len(set(expected)) > 2
    found = []
    for tokens in whole:
        served.empty_hbm()
        found.append(served.ask(tokens, answer=1, **limits(max_save_tokens=0)).cached_tokens)
    assert found == expected
    for index in (tree.llmd, tree.llmd_host):
        for tokens, num_cached in zip(whole, expected, strict=True):
            assert min(index.num_tokens(tokens, "cpu"), (len(tokens) - 1) // BLOCK_SIZE * BLOCK_SIZE) == num_cached
        assert index.num_without_tokens == 0


def test_prometheus_has_data_for_the_dashboard(served, tmp_path):
    """What this engine cannot have is named: it has no storage tiers, and vLLM has no request swap."""
    load = dataclasses.replace(PRESSURE, conversations=3, concurrency=3)
    wanted, instance = set(), served.ours.url.removeprefix("http://")
    for query in (query for row in ROWS for panel in row.panels for query in panel.queries):
        if not any(name.startswith("tier.") or name in SWAP_FIELDS for name in query.expression.names):
            wanted.add(as_grafana_asks(query, instance, window="2m"))
    assert len(wanted) > 50
    config = configure(tmp_path, {"vllm": instance})
    with running(config, tmp_path, free_port()) as prometheus:
        for seed in range(20, 30):
            for _ in range(2):  # computed and saved, then loaded
                served.empty_hbm()
                talk(served.ours, lambda c, seed=seed: c.converse(load, seed=seed))
            wanted -= {text for text in wanted if is_finite(prometheus.query(text))}
            if not wanted:
                break
        assert not wanted
        names = {name for alert in ALERTS for name in alert.expression.names}
        absent = {name for name in names if not prometheus.query(NAMES[name])}
        assert absent == {name for name in names if name.startswith("tier.") or name in SWAP_FIELDS}
        assert prometheus.query('ALERTS{alertstate="firing"}') == []


def test_metrics_agree_with_each_other(served):
    metrics = {name.removeprefix("vllm:tpu_offload_"): value for name, value in served.quiet_metrics().items()}
    text = served.ours.request("GET", "/metrics")[1]
    series = [line for line in text.splitlines() if line.startswith("vllm:tpu_offload_")]
    assert series
    assert all('model_name="m"' in line and 'engine="0"' in line for line in series)
    assert not [line for line in series if "swap" in line]
    for spec in METRICS.values():
        assert (spec.series in metrics) == (spec.group is not MetricGroup.SWAP), spec.series
        assert spec.group is MetricGroup.SWAP or f"# HELP vllm:tpu_offload_{spec.series} {spec.help}\n" in text

    num_loaded, num_saved = metrics["loaded_blocks_total"], metrics["saved_blocks_total"]
    assert num_loaded > 0 < num_saved
    assert metrics["loaded_bytes_total"] / num_loaded == metrics["saved_bytes_total"] / num_saved == 32768
    assert metrics["loaded_tokens_total"] == num_loaded * BLOCK_SIZE
    assert metrics["looked_up_tokens_total"] > metrics["found_tokens_total"] >= metrics["matched_tokens_total"]
    assert metrics["matched_tokens_total"] >= metrics["loaded_tokens_total"]
    assert metrics["host_chunks"] == NUM_HOST_BLOCKS
    assert 0 < metrics["resident_chunks"] <= num_saved - metrics["evicted_chunks_total"]
    assert metrics["load_duration_seconds_count"] > 0 < metrics["save_duration_seconds_count"]
    assert metrics["load_duration_seconds_sum"] == pytest.approx(metrics["load_seconds_total"])
    for name in ("failed_jobs", "timed_out_jobs", "ignored_results", "rejected_reports", "lost_results"):
        assert metrics[f"{name}_total"] == 0, name
    assert metrics["worker_restarts_total"] == metrics["open_breakers"] == 0
    assert metrics["quarantined_chunks"] == metrics["staging_reserved_blocks"] == 0


async def _streams_when(server, strike):
    """The outcomes of streams when `strike` is called in the middle of them. Hanging ones are cancelled."""
    num_before = server.metrics()["vllm:generation_tokens_total"]
    async with Client(server.url) as client:
        streams = [asyncio.create_task(client.complete(prompt(f"last {i}", 90), answer=900)) for i in range(12)]
        while server.metrics()["vllm:generation_tokens_total"] < num_before + 20:
            await asyncio.sleep(0.02)
        await asyncio.to_thread(strike)
        _, waiting = await asyncio.wait(streams, timeout=2)
        for stream in waiting:
            stream.cancel()
        return await asyncio.gather(*streams, return_exceptions=True)


def _assert_nothing_leaked(server, shared_memory):
    assert server.wait_for_processes() == []
    assert [path for path in shared_memory if path.exists()] == []
    with pytest.raises(ConnectionError):
        server.request("GET", "/health")


def test_sigterm(served):
    """vLLM aborts running requests, and waits until its clients have disconnected."""
    shared_memory, engine = served.ours.shared_memory(), served.ours.engine()

    def strike():
        served.ours.send(signal.SIGTERM)
        end_s = time.monotonic() + _END_LIMIT_S
        while engine in served.ours.processes():
            assert time.monotonic() < end_s
            time.sleep(0.05)

    streams = asyncio.run(_streams_when(served.ours, strike))
    assert all(isinstance(stream, BaseException) or stream.finish == "abort" for stream in streams)
    assert served.ours.wait() == 0
    _assert_nothing_leaked(served.ours, shared_memory)


@pytest.mark.wide
def test_the_engine_process_is_killed(starting):
    environ = starting.kept.settings_of_another()
    with Server(starting.folder, num_blocks=NUM_BLOCKS, connector=starting.connector, environ=environ) as doomed:
        doomed.wait_until_ready()
        shared_memory = doomed.shared_memory()
        streams = asyncio.run(_streams_when(doomed, doomed.engine().kill))
        assert all(isinstance(stream, BaseException) for stream in streams)
        doomed.wait()
        assert "EngineDeadError" in doomed.log()
        _assert_nothing_leaked(doomed, shared_memory)
