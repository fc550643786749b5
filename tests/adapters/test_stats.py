"""vLLM's statistics, its Prometheus endpoint and its KV events."""

import functools
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, multiprocess, values
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.metrics.stats import PrefixCacheStats

from tests.adapters.scheduler_stack import BLOCK_SIZE, SMALL, Stack, hold_saves, make_stack, prompt, save_prompt
from tpu_offload import TierStats
from tpu_offload.adapters.vllm import TPUOffloadConnector
from tpu_offload.adapters.vllm.scheduler_side import STATS_STEPS
from tpu_offload.adapters.vllm.stats import OffloadConnectorStats, RankStats, tier_counts
from tpu_offload.metrics import METRICS, MetricGroup

pytestmark = pytest.mark.vllm


def test_the_source_of_a_hit_is_host_memory():
    connector = Stack(num_blocks=8, **SMALL).scheduler.connector
    assert connector.get_external_cache_hit_sources(None, 7) == {CacheHitSource.HOST: 7}


def test_several_api_servers_have_an_endpoint_together(tmp_path, monkeypatch):
    """The scheduler sends each interval to one of them, so the newest value of a gauge is the right one."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    config = make_stack().config
    for pid, num_open in ((1, 1), (2, 0)):
        monkeypatch.setattr(values, "ValueClass", values.MultiProcessValue(lambda pid=pid: pid))
        own = CollectorRegistry()
        kinds = {kind: functools.partial(kind, registry=own) for kind in (Gauge, Counter, Histogram)}
        metrics = TPUOffloadConnector.build_prom_metrics(config, kinds, ["model_name", "engine"], {0: ["m", "0"]})
        metrics.observe({"num_open_breakers": num_open, "saved_blocks": 5, "num_stored_chunks@0:file": 2}, 0)
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    labels = {"model_name": "m", "engine": "0"}
    assert registry.get_sample_value("vllm:tpu_offload_open_breakers", labels) == 0
    assert registry.get_sample_value("vllm:tpu_offload_saved_blocks_total", labels) == 10
    pids = [sample.labels for metric in registry.collect() for sample in metric.samples if "pid" in sample.labels]
    assert pids == [], "a series for each process, of which all but one are out of date"


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
    for name in ("looked_up_tokens", "found_tokens", "matched_tokens", "loaded_tokens", "saved_nbytes", "load_s"):
        grown = getattr(after, name) - getattr(before, name)
        assert grown > 0, name
        assert registry.get_sample_value(f"vllm:tpu_offload_{METRICS[name].series}", labels) == pytest.approx(grown)
        assert total.data[name] == pytest.approx(grown)
    assert registry.get_sample_value("vllm:tpu_offload_staging_peak_blocks", labels) == after.staging_peak_blocks
    assert registry.get_sample_value("vllm:tpu_offload_load_duration_seconds_count", labels) == 1
    families = {family.name: (family.type, family.documentation) for family in registry.collect()}
    for spec in METRICS.values():
        expected = None if spec.group is MetricGroup.SWAP else (spec.kind.value, spec.help)
        assert families.get(f"vllm:tpu_offload_{spec.family}") == expected
    line = total.reduce()
    assert line["Loaded tokens"] == 40
    assert not total.is_empty()


def test_each_storage_tier_has_series_with_its_label():
    registry = CollectorRegistry()
    kinds = {
        kind: lambda kind=kind, **kwargs: kind(registry=registry, **kwargs) for kind in (Gauge, Counter, Histogram)
    }
    config = make_stack().config
    metrics = TPUOffloadConnector.build_prom_metrics(config, kinds, ["model_name", "engine"], {0: ["m", "0"]})
    first = (TierStats(tier="0:file", promoted_chunks=3, num_stored_chunks=7), TierStats(tier="1:valkey"))
    later = (TierStats(tier="0:file", promoted_chunks=5), TierStats(tier="1:valkey", promoted_chunks=1))
    total = OffloadConnectorStats.of({}, [], tier_counts(first, ()))
    total.aggregate(OffloadConnectorStats.of({}, [], tier_counts(later, first)))
    metrics.observe(total.data, 0)

    def of(name, tier):
        labels = {"model_name": "m", "engine": "0", "tier": tier}
        return registry.get_sample_value(f"vllm:tpu_offload_tier_{name}", labels)

    assert (of("promoted_chunks_total", "0:file"), of("promoted_chunks_total", "1:valkey")) == (5, 1)
    assert (of("stored_chunks", "0:file"), of("stored_chunks", "1:valkey")) == (0, 0)


@pytest.fixture
def vllm_lookups(monkeypatch):
    """Queries and hits, in tokens, that vLLM has counted for the connector."""
    found, record = [0, 0], PrefixCacheStats.record

    def counting(self, num_tokens, num_hits, preempted, **kwargs):
        if "hits_by_source" in kwargs:  # other calls are for its own prefix cache
            found[0] += num_tokens
            found[1] += num_hits
        record(self, num_tokens, num_hits, preempted, **kwargs)

    monkeypatch.setattr(PrefixCacheStats, "record", counting)
    return found


def lookups(stack: Stack) -> tuple[int, int, int]:
    stats = stack.offload.stats()
    return stats.looked_up_tokens, stats.found_tokens, stats.matched_tokens


@pytest.mark.parametrize("sync_load", [True, False])
def test_a_request_that_waits_is_looked_up_once_as_vllm_counts_it(vllm_lookups, sync_load):
    """It is matched in every step while its prefix is being saved, and again while vLLM has no blocks for it."""
    stack = make_stack(prefix_caching=False, sync_load=sync_load, save_wait_s=100.0, num_blocks=24, max_num_seqs=2)
    before = lookups(stack)
    vllm_lookups[:] = 0, 0
    matched, match = [], stack.side.match

    def counting(request, *args):
        found = match(request, *args)
        matched.append((request.request_id, found[0]))
        return found

    stack.side.match = counting
    held = hold_saves(stack)
    tokens = prompt(40)
    first = stack.add("a", tokens, max_tokens=2)
    while not first.is_finished():
        stack.step()
    stack.add("b", tokens, max_tokens=2)
    for _ in range(5):
        stack.step()
    assert matched.count(("b", None)) == 5
    assert lookups(stack)[0] - before[0] == 40
    held.clear()
    for i in range(4):
        stack.add(f"c{i}", [*tokens, *prompt(80, seed=i)], max_tokens=2)
    stack.drain()
    assert len(matched) > 11, "some found no blocks and were matched again"
    looked_up, found, taken = (one - other for one, other in zip(lookups(stack), before, strict=True))
    assert [looked_up, taken] == vllm_lookups
    assert (looked_up, found) == (2 * 40 + 4 * 120, 39 + 4 * 40)
    stack.check_end()


@pytest.mark.parametrize(("limit", "counted"), [(None, (40, 39, 39)), (20, (16, 16, 16)), (0, (0, 0, 0))])
def test_tokens_beyond_the_load_limit_are_not_looked_up(limit, counted):
    stack = make_stack(prefix_caching=False)
    tokens = save_prompt(stack, "a")
    before = lookups(stack)
    params = {} if limit is None else {"tpu_offload.max_load_tokens": limit}
    stack.serve("b", tokens, extra_args={"kv_transfer_params": params})
    assert tuple(one - other for one, other in zip(lookups(stack), before, strict=True)) == counted


def test_no_statistics_while_nothing_happens():
    stack = make_stack()
    stack.side.take_stats()
    assert stack.side.take_stats() is None


def test_steps_share_a_snapshot_while_requests_run():
    stack = make_stack()
    tokens = save_prompt(stack, "a")
    given: list[int] = []
    take = stack.side.take_stats

    def taken():
        stats = take()
        given.append(stats.data.get("looked_up_tokens", 0) if stats is not None else -1)
        return stats

    stack.side.take_stats = taken
    request = stack.add("b", tokens[:16], max_tokens=2 * STATS_STEPS)
    while not request.is_finished() and len(given) < STATS_STEPS:
        stack.step()
    assert given == [-1] * (STATS_STEPS - 1) + [16]
    stack.abort("b")
    stack.add("c", prompt(16, seed=5), max_tokens=2)
    stack.drain()
    del given[:STATS_STEPS]
    assert sum(count for count in given if count >= 0) == 16, "counts that wait for a request that may never come"


def test_events_match_the_contents_of_the_host_tier():
    stack = Stack(num_blocks=12, events=True, num_staging_blocks=16, num_cpu_chunks=6)
    published = []
    stack.scheduler.kv_event_publisher.publish = lambda batch: published.extend(batch.events)
    for i in range(5):
        stack.serve(f"r{i}", prompt(24, seed=i))
    held: set[Any] = set()
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


def test_a_call_for_the_other_role_is_an_error():
    stack = Stack(num_blocks=8, **SMALL)
    with pytest.raises(AssertionError, match="reached the scheduler role"):
        stack.scheduler.connector.start_load_kv(None)
    worker = stack.connectors[0]
    assert worker.role is KVConnectorRole.WORKER
    with pytest.raises(AssertionError, match="reached the worker role"):
        worker.reset_cache()


def test_the_gauges_of_a_rank_stay_while_it_reports_nothing():
    ranks = RankStats(2)
    assert ranks.join([None, None]) is None
    one = {"saved_blocks": 3, "num_resident_chunks": 3, "num_stored_chunks@file": 1, "save_duration_seconds": [0.1]}
    other = {"saved_blocks": 1, "num_resident_chunks": 5, "save_duration_seconds": [0.2, 0.3]}
    assert ranks.join([one, other]) == {
        "saved_blocks": 4,
        "num_resident_chunks": 8,
        "num_stored_chunks@file": 1,
        "save_duration_seconds": [0.1, 0.2, 0.3],
    }
    later = ranks.join([None, {"saved_blocks": 2, "num_resident_chunks": 7, "save_duration_seconds": []}])
    assert later == {
        "saved_blocks": 2,
        "num_resident_chunks": 10,
        "num_stored_chunks@file": 1,
        "save_duration_seconds": [],
    }
    assert one["save_duration_seconds"] == [0.1], "what was reported is not changed"
    assert ranks.join([None, None]) is None
