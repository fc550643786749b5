"""What vLLM's statistics, its Prometheus endpoint and its KV events are told."""

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from tests.adapters.scheduler_stack import BLOCK_SIZE, SMALL, Stack, make_stack, prompt, save_prompt
from tpu_offload.adapters.vllm import TPUOffloadConnector

pytestmark = pytest.mark.vllm


def test_the_tier_of_a_hit_is_host_memory():
    connector = Stack(num_blocks=8, **SMALL).scheduler.connector
    assert connector.get_external_cache_hit_sources(None, 7) == {CacheHitSource.HOST: 7}


def collect_stats(stack: Stack, run) -> list:
    found, take = [], stack.side.take_stats

    def taken():
        stats = take()
        if stats is not None:
            found.append(stats.to_dict())
        return stats

    stack.side.take_stats = taken
    run()
    return found


def test_statistics_add_up_and_reach_prometheus():
    stack = make_stack()
    collect_stats(stack, lambda: None)

    def run():
        tokens = save_prompt(stack, "a")
        stack.serve("b", tokens)

    before = stack.offload.stats()
    payloads = collect_stats(stack, run)
    after = stack.offload.stats()
    registry = CollectorRegistry()
    kinds = {
        kind: lambda kind=kind, **kwargs: kind(registry=registry, **kwargs) for kind in (Gauge, Counter, Histogram)
    }
    metrics = TPUOffloadConnector.build_prom_metrics(stack.config, kinds, ["model_name", "engine"], {0: ["m", "0"]})
    total = TPUOffloadConnector.build_kv_connector_stats()
    for payload in payloads:
        metrics.observe(payload, 0)
        total = total.aggregate(TPUOffloadConnector.build_kv_connector_stats(dict(payload)))
    labels = {"model_name": "m", "engine": "0"}
    for name in ("loaded_tokens", "saved_nbytes", "loaded_nbytes", "matched_tokens"):
        grown = getattr(after, name) - getattr(before, name)
        assert grown > 0, name
        assert registry.get_sample_value(f"vllm:tpu_offload_{name}_total", labels) == grown
        assert total.data[name] == grown
    assert registry.get_sample_value("vllm:tpu_offload_staging_peak_blocks", labels) == after.staging_peak_blocks
    assert registry.get_sample_value("vllm:tpu_offload_load_seconds_count", labels) == 1
    line = total.reduce()
    assert line["Loaded tokens"] == 40
    assert not total.is_empty()


def test_no_statistics_while_nothing_happens():
    stack = make_stack()
    stack.side.take_stats()
    assert stack.side.take_stats() is None


def test_events_tell_what_the_host_tier_holds():
    stack = Stack(num_blocks=12, events=True, num_staging_blocks=16, num_cpu_chunks=6)
    published = []
    stack.scheduler.kv_event_publisher.publish = lambda batch: published.extend(batch.events)
    for i in range(5):
        stack.serve(f"r{i}", prompt(24, seed=i))
    held = set()
    for event in published:
        if getattr(event, "medium", None) != "CPU":
            continue
        if isinstance(event, BlockStored):
            assert event.block_size == BLOCK_SIZE
            assert not held & set(event.block_hashes)
            held |= set(event.block_hashes)
        else:
            assert isinstance(event, BlockRemoved)
            assert held >= set(event.block_hashes)
            held -= set(event.block_hashes)
    assert len(held) == stack.offload.stats().num_resident_chunks == 6
    stored = [h for e in published if isinstance(e, BlockStored) and e.medium == "GPU" for h in e.block_hashes]
    assert held <= set(stored)
    stack.scheduler.reset_connector_cache()
    stack.serve("last", prompt(8, seed=70))
    assert sum(isinstance(event, AllBlocksCleared) for event in published) == 1


def test_roles_are_kept_apart():
    stack = Stack(num_blocks=8, **SMALL)
    with pytest.raises(AssertionError, match="reached the scheduler role"):
        stack.scheduler.connector.start_load_kv(None)
    worker = stack.connectors[0]
    assert worker.role is KVConnectorRole.WORKER
    with pytest.raises(AssertionError, match="reached the worker role"):
        worker.reset_cache()
