"""A storage tier below the host tier, under vLLM's real scheduler."""

import os
import threading
from typing import Any

import msgspec
import pytest
from tpu_inference import utils as tpu_utils
from vllm.lora.request import LoRARequest

from tests.adapters import scheduler_stack
from tests.adapters.hashed_model import BLOCK_SIZE
from tests.adapters.llmd_index import LlmdIndex
from tests.adapters.scheduler_stack import GB, SMALL, Stack, make_stack, prompt
from tests.inside.worker import worker_storage_tier
from tests.storage.memory_tier import FAULTY, SHARED, SharedTier
from tpu_offload import ConfigError
from tpu_offload.adapters.vllm import scheduler_side

pytestmark = pytest.mark.vllm


def make(directory, **settings):
    storage = {"storage_tier": "file", "storage_options": f"{directory},min_free_gb=0", "num_storage_chunks": 64}
    return Stack(**{"num_blocks": 12, **SMALL, **storage, "storage_wait_s": 60.0, **settings})


def test_the_first_request_after_a_restart_is_loaded_from_storage(tmp_path):
    stack, tokens = make(tmp_path), prompt(40, seed=20)
    stack.serve("a", tokens)
    num_stored = stack.offload.stats().num_stored_chunks
    assert num_stored > 0
    assert stack.offload.stats().restored_chunks == 0
    stack.close()
    stack = make(tmp_path)
    request = stack.serve("b", tokens)
    stats = stack.offload.stats()
    assert stats.restored_chunks == num_stored
    assert stats.promoted_chunks > 0
    assert stats.matched_tokens >= 32
    assert request.request_id == "b"
    stack.check_end()
    stack.close()


def make_side_by_side(directory, **settings):
    """Two of `--data-parallel-size 2`: with the same settings, at the same time."""
    of_first = scheduler_stack.make_config

    def of_second(**settings):
        config = of_first(**settings)
        config.parallel_config.data_parallel_index = 1
        return config

    first = make(directory, **settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler_stack, "make_config", of_second)
        return first, make(directory, **settings)


def test_engines_side_by_side_have_parts_of_one_directory(tmp_path):
    for num_restored in (0, 5):
        first, second = make_side_by_side(tmp_path)
        first.serve("a", prompt(40, seed=20))
        second.serve("b", prompt(40, seed=21))
        for stack in (first, second):
            assert stack.offload.stats().restored_chunks == num_restored
            stack.check_end()
            stack.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["worker-0", "worker-1"]


def test_a_router_places_what_storage_has_brought_back(tmp_path):
    """No block of it has been in this engine's HBM before."""
    stack, tokens = make(tmp_path), prompt(40, seed=20)
    stack.serve("a", tokens)
    stack.close()
    stack, index = make(tmp_path, events=True), LlmdIndex(BLOCK_SIZE, tiers=["cpu"])
    publisher = stack.scheduler.kv_event_publisher
    publisher.publish = lambda batch: index.take(msgspec.msgpack.encode(batch))
    stack.serve("b", [*tokens, *prompt(20, seed=3)], max_tokens=1)
    assert stack.offload.stats().promoted_chunks > 0
    stack.serve("c", prompt(20))  # so that all events are published
    assert index.num_tokens(tokens, "cpu") >= 32
    assert (index.num_without_tokens, index.num_ignored) == (0, 0)
    stack.check_end()
    stack.close()


def test_another_revision_finds_nothing(tmp_path):
    stack, tokens = make(tmp_path), prompt(40, seed=20)
    stack.serve("a", tokens)
    stack.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stack.config.model_config, "revision", "other")
        stack = make(tmp_path)
        stack.serve("b", tokens)
    assert stack.offload.stats().restored_chunks == 0
    stack.check_end()
    stack.close()


def adapter(directory):
    """An adapter with other weights than any before it."""
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text('{"r": 8}')
    (directory / "adapter_model.safetensors").write_bytes(os.urandom(10_000))
    return LoRARequest("sql", 1, str(directory))


@pytest.mark.parametrize("what", ["weights", "config", "nothing"])
def test_an_adapter_that_was_trained_anew_finds_nothing(tmp_path, what):
    """Under the same name and in the same directory, which is all that vLLM's hashes cover."""
    lora, tokens = adapter(tmp_path / "adapter"), prompt(40, seed=20)
    stack = make(tmp_path / "kv")
    stack.serve("a", tokens, lora=lora)
    stack.close()
    if what == "weights":
        adapter(tmp_path / "adapter")
    elif what == "config":
        (tmp_path / "adapter" / "adapter_config.json").write_text('{"r": 9}')
    stack = make(tmp_path / "kv")
    stack.serve("b", tokens, lora=lora)
    assert stack.offload.stats().promoted_tokens == (40 if what == "nothing" else 0)
    stack.check_end()
    stack.close()


def test_workers_that_never_report_cost_some_steps_only(tmp_path):
    stack = make(tmp_path)
    for connector in stack.connectors:
        connector.worker_side.take_report = lambda: None
    stack.serve("a", prompt(40, seed=20))
    assert stack.offload is None
    assert stack.num_steps < 40
    stack.close()


def test_a_worker_with_too_little_hbm_is_closed(tmp_path, monkeypatch):
    """Whoever keeps the error, to try again, keeps what was made."""
    stack = make(tmp_path)
    connector, runner = stack.connectors[0], stack.runners[0]
    with monkeypatch.context() as patch:
        patch.setattr(tpu_utils, "hbm_usage_bytes", lambda devices: [(GB, GB) for _ in devices])
        with pytest.raises(ConfigError, match="of HBM") as error:
            connector.register_runner(runner)
    with monkeypatch.context() as patch:
        patch.setattr(tpu_utils, "hbm_usage_bytes", lambda devices: [(0, GB) for _ in devices])
        connector.register_runner(runner)
    assert error.value is not None
    stack.close()


@pytest.fixture
def servers(monkeypatch):
    monkeypatch.setattr(SharedTier, "servers", {})


def make_shared(**settings):
    return make("", storage_tier=SHARED, storage_options="", storage_lookup_wait_s=60.0, **settings)


def tiers(stack):
    return [worker_storage_tier(connector.worker_side.worker) for connector in stack.connectors]


def test_engines_side_by_side_share_what_they_store(servers):
    both = make_side_by_side("", storage_tier=SHARED, storage_options="")
    specs = [tier.spec for stack in both for tier in tiers(stack)]
    assert specs[0] == specs[1]
    for stack in both:
        stack.close()


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_what_another_engine_stores_later_is_loaded(servers, async_scheduling):
    """Requests wait in vLLM's queue for the answer, and then for the read; each prefix is asked for once."""
    later = make_shared(async_scheduling=async_scheduling)
    later.serve("early", prompt(12, seed=99))  # it has started, and knows its workers
    first = make_shared()
    tokens = prompt(40, seed=20)
    first.serve("a", tokens)
    num_stored = first.offload.stats().num_stored_chunks
    assert num_stored == 5
    (tier,) = tiers(later)
    tier.asked.clear()
    for name in ("b", "c"):
        later.add(name, tokens)
    later.drain()
    stats = later.offload.stats()
    assert stats.found_storage_chunks >= 0.9 * num_stored
    assert stats.promoted_chunks >= 0.9 * num_stored
    assert stats.matched_tokens >= 32
    assert len(tier.asked) == 1, "two requests with one prefix"
    assert stats.num_failed_jobs == 0
    for stack in (first, later):
        stack.check_end()
        stack.close()


def test_requests_wait_no_longer_than_they_may(servers):
    """The lookup hangs: steps go on, and after the wait the request is computed."""
    now_s = [100.0]
    stack = make_shared(clock=lambda: now_s[0])
    stack.serve("early", prompt(12, seed=99))
    (tier,) = tiers(stack)
    tier.gates["find"] = gate = threading.Event()
    request = stack.add("a", prompt(40, seed=20))
    for _ in range(5):
        stack.step()
        assert request.num_computed_tokens == 0
        assert stack.side.has_jobs, "an engine that has nothing else to do goes on"
    now_s[0] += 60.0
    for _ in range(20):
        stack.step()
    assert request.is_finished()
    gate.set()
    stack.drain()
    stack.check_end()
    stack.close()


def test_after_a_long_time_without_requests_a_reset_empties_the_storage():
    storage = {"storage_tier": FAULTY, "storage_options": "x", "num_storage_chunks": 64}
    now_s = [1000.0]
    stack = make_stack(**storage, num_blocks=24, clock=lambda: now_s[0])
    stack.serve("a", prompt(80, seed=20))
    stack.drain()
    assert stack.offload.stats().num_stored_chunks >= 10
    now_s[0] += 1e6  # it is idle
    stack.side.reset()
    assert stack.side.needs_steps
    stack.drain()
    assert stack.offload.stats().num_stored_chunks == 0
    stack.check_end()
    stack.close()


def test_a_step_that_takes_long_is_not_silence():
    """What it has saved is written after it, as after any other step."""
    now_s = [1000.0]
    storage = {"storage_tier": FAULTY, "storage_options": "x", "num_storage_chunks": 64}
    stack = make_stack(**storage, num_blocks=24, clock=lambda: now_s[0])
    tier: Any = worker_storage_tier(stack.workers[0])
    tier.gates["write"] = gate = threading.Event()
    stack.add("a", prompt(80, seed=20))
    while stack.scheduler.requests:
        assert stack.side.needs_steps == stack.side.has_jobs
        stack.step()
        now_s[0] += scheduler_side.MAX_SILENT_S
    assert stack.side.has_jobs
    assert stack.side.needs_steps
    gate.set()
    stack.drain()
    assert stack.offload.stats().num_stored_chunks >= 10
    stack.check_end()
    stack.close()


def test_an_engine_does_not_go_on_with_steps_for_a_disk_that_hangs(monkeypatch):
    """A pause, which waits until there is nothing to do, would take several job timeouts."""
    monkeypatch.setattr(scheduler_side, "MAX_SILENT_S", 0.2)
    storage = {"storage_tier": FAULTY, "storage_options": "x", "num_storage_chunks": 64}
    stack = make_stack(**storage, num_blocks=24)
    tier: Any = worker_storage_tier(stack.workers[0])
    tier.gates["write"] = gate = threading.Event()
    stack.serve("a", prompt(80, seed=20))
    assert stack.side.has_jobs
    gate.set()
    stack.serve("b", prompt(20, seed=3))
    assert not stack.side.has_jobs
    assert stack.offload.stats().num_stored_chunks >= 10
    stack.check_end()
    stack.close()
