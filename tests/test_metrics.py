"""The counters in Prometheus and in the log."""

import dataclasses
import logging
import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tests.core.fakes import FakeEngine, tokens
from tpu_offload import ConfigError, OffloadStats, StatsCollector
from tpu_offload.metrics import (
    GAUGES,
    HISTOGRAMS,
    METRICS,
    SWAP_FIELDS,
    TIER_METRICS,
    MetricKind,
    StatsLogger,
    TierStats,
)

DOCS = Path(__file__).parents[1] / "docs"


def test_prometheus_reads_every_field_at_the_scrape():
    engine = FakeEngine()
    registry = CollectorRegistry()
    registry.register(StatsCollector(engine.scheduler.stats))
    assert registry.get_sample_value("tpu_offload_saved_blocks_total") == 0
    engine.serve("a", tokens(16))
    engine.serve("b", tokens(16))
    assert registry.get_sample_value("tpu_offload_saved_blocks_total") == 4
    assert registry.get_sample_value("tpu_offload_loaded_blocks_total") == 4
    assert registry.get_sample_value("tpu_offload_staging_budget_blocks") == 8
    stats = engine.scheduler.stats()
    for name, spec in METRICS.items():
        assert registry.get_sample_value(f"tpu_offload_{spec.series}") == getattr(stats, name)
    text = generate_latest(registry).decode()
    assert f"# HELP tpu_offload_found_tokens_total {METRICS['found_tokens'].help}\n" in text


def test_every_field_is_declared_and_every_declaration_is_a_family():
    assert [*METRICS] == [field.name for field in dataclasses.fields(OffloadStats)]
    families = [(f.name, f.type, f.documentation) for f in StatsCollector(OffloadStats).collect()]
    assert families == [(f"tpu_offload_{spec.family}", spec.kind.value, spec.help) for spec in METRICS.values()]


@pytest.mark.parametrize("name", METRICS)
def test_names_and_help_follow_the_conventions_of_prometheus(name):
    spec = METRICS[name]
    assert re.fullmatch(r"[a-z]+(_[a-z]+)*", spec.family)
    assert f"_{spec.family}".endswith(f"_{spec.unit}")
    assert not re.search(r"^num_|nbytes|_(s|ms|gb|mib|total)(_|$)", spec.family)
    assert spec.series == spec.family + "_total" * (spec.kind is MetricKind.COUNTER)
    assert [other.family for other in METRICS.values()].count(spec.family) == 1
    assert re.fullmatch(r"[A-Z][^\n|]*\.", spec.help), "a sentence for a table"


def test_names_that_dashboards_use():
    known = {
        "saved_nbytes": "saved_bytes_total",
        "save_s": "save_seconds_total",
        "loaded_tokens": "loaded_tokens_total",
        "num_failed_jobs": "failed_jobs_total",
        "num_swapped_out": "swapped_out_requests_total",
        "num_resident_chunks": "resident_chunks",
        "num_jobs_in_flight": "in_flight_jobs",
        "swap_in_nbytes_per_s": "swap_in_bytes_per_second",
    }
    assert {name: METRICS[name].series for name in known} == known


def test_values_that_can_decrease_are_gauges():
    """A run in which every gauge decreases; counters never do."""
    engine = FakeEngine(num_cpu_chunks=4)
    snapshots = [engine.scheduler.stats()]
    for name in "abc":
        engine.add(name, tokens(16, start=ord(name)))
        engine.step({name: 16})
        snapshots.append(engine.scheduler.stats())
        engine.settle()
        engine.remove(name)
        snapshots.append(engine.scheduler.stats())
    values = {name: [getattr(stats, name) for stats in snapshots] for name in METRICS}
    fallen = {name for name, series in values.items() if series != sorted(series)}
    assert {"staging_reserved_blocks", "num_jobs_in_flight"} <= fallen <= GAUGES
    risen = {name for name, series in values.items() if series[-1] > series[0]}
    assert {"saved_nbytes", "looked_up_tokens", "num_evicted_chunks"} <= risen - GAUGES


def test_every_count_of_a_tier_is_exported_with_its_label():
    assert [field.name for field in dataclasses.fields(TierStats)] == ["tier", *TIER_METRICS]
    tiers = [TierStats(tier="0:file", promoted_chunks=3), TierStats(tier="1:valkey", num_stored_chunks=5)]
    registry = CollectorRegistry()
    registry.register(StatsCollector(OffloadStats, lambda: tiers))
    for name, spec in TIER_METRICS.items():
        assert (spec.kind is MetricKind.GAUGE) == (name in GAUGES)
        for tier in tiers:
            found = registry.get_sample_value(f"tpu_offload_{spec.series}", {"tier": tier.tier})
            assert found == getattr(tier, name) == tier.as_dict()[name]
    with pytest.raises(ConfigError, match="get_tier_stats is a int; expected a function"):
        StatsCollector(OffloadStats, 5)  # type: ignore[arg-type]


def test_every_series_in_the_docs_exists():
    series = {spec.series for specs in (METRICS, TIER_METRICS) for spec in specs.values()}
    series |= {spec.family for spec in HISTOGRAMS.values()}
    series |= {f"{spec.family}_{part}" for spec in HISTOGRAMS.values() for part in ("bucket", "sum", "count")}
    for page in (*DOCS.glob("*.md"), DOCS.parent / "README.md"):
        named = re.findall(r"\bvllm:tpu_offload_(\w+)", page.read_text())
        assert set(named) <= series, page.name


def test_a_snapshot_does_not_change_with_the_counters():
    engine = FakeEngine()
    before = engine.scheduler.stats()
    engine.serve("a", tokens(16))
    assert before.saved_blocks == 0
    assert engine.scheduler.stats().saved_blocks == 4


def test_one_log_line_per_interval_and_none_without_activity(caplog):
    caplog.set_level(logging.INFO, logger="tpu_offload.metrics")
    stats = OffloadStats(saved_nbytes=5 << 20, loaded_tokens=7)
    log = StatsLogger(10.0)
    for now_s in (100.0, 105.0, 111.0):
        log.maybe_log(now_s, lambda: stats)
    assert len(caplog.messages) == 1
    assert "saved 5 MiB" in caplog.messages[0]
    stats.loaded_nbytes = 1
    log.maybe_log(122.0, lambda: stats)
    assert len(caplog.messages) == 2


def test_the_log_line_names_suspended_copies_and_quarantined_chunks(caplog):
    caplog.set_level(logging.INFO, logger="tpu_offload.metrics")
    stats = OffloadStats(num_failed_jobs=5, num_open_breakers=1, num_quarantined_chunks=3)
    StatsLogger(10.0).maybe_log(100.0, lambda: stats)
    assert "5 jobs failed, kinds of copies suspended: 1, 3 chunks in quarantine" in caplog.text


@pytest.mark.parametrize("name", ["failed_storage_chunks", "num_failed_storage_lookups"])
def test_the_log_line_reports_failures_of_storage_that_has_done_nothing_else(caplog, name):
    caplog.set_level(logging.INFO, logger="tpu_offload.metrics")
    StatsLogger(10.0).maybe_log(100.0, lambda: OffloadStats(**{name: 2}))
    assert "storage 0 records (chunks: 0 written, 0 read, 0 dropped; 2 chunks and lookups failed)" in caplog.text


def test_an_interval_of_zero_never_logs(caplog):
    caplog.set_level(logging.INFO, logger="tpu_offload.metrics")
    StatsLogger(0.0).maybe_log(100.0, lambda: OffloadStats(saved_nbytes=1))
    assert caplog.messages == []


def test_the_difference_of_two_snapshots():
    earlier = OffloadStats(saved_blocks=3, save_s=1.5, staging_peak_blocks=9, num_jobs_in_flight=4)
    later = OffloadStats(saved_blocks=10, save_s=2.0, staging_peak_blocks=11, num_jobs_in_flight=1)
    assert later.since(earlier) == OffloadStats(
        saved_blocks=7, save_s=0.5, staging_peak_blocks=11, num_jobs_in_flight=1
    )


def test_the_log_line_reports_swaps_if_there_is_a_pool(caplog):
    caplog.set_level(logging.INFO)
    logger = StatsLogger(1.0)
    logger.maybe_log(1.0, lambda: OffloadStats(num_failed_jobs=1))
    assert "swap" not in caplog.text
    stats = OffloadStats(
        swap_pool_blocks=64, swap_held_blocks=9, num_swapped_out=5, num_swapped_requests=2, num_thrashed_swaps=1,
        num_recomputed=3, num_lost_swaps=1,
    )  # fmt: skip
    logger.maybe_log(3.0, lambda: stats)
    text = "swapped out 5 requests (2 are out, 1 thrashed), recomputed 4, swap pool 9/64 blocks"
    assert text in caplog.text


def test_swap_fields_are_fields():
    assert {name for name in OffloadStats().as_dict() if "swap" in name} <= SWAP_FIELDS
    assert set(OffloadStats().as_dict()) >= SWAP_FIELDS | GAUGES
