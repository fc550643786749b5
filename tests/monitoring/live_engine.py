"""The embedded engine serving requests, and its real counts on two endpoints: as vLLM's, and as another engine's.

vLLM's names, labels and histograms are given to the counts of the library here as the vLLM adapter does it;
tests/adapters/test_serve.py compares the names with those of the real vLLM. Its own counters are fed with the engine's.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from tests.engine.helpers import SMALL_ENGINE, TINY, make_request, random_tokens
from tests.inside.engine import engine_scheduler, kv_blocks, offload_scheduler, offloading, one_worker
from tests.inside.worker import tier_group
from tpu_offload import FinishedTransfer, OffloadConfig, OffloadScheduler, StatsCollector, StepReport, Update
from tpu_offload.engine import Engine, RequestOutput
from tpu_offload.metrics import LOAD_DURATION, METRICS, PREFIX, SAVE_DURATION, SWAP_FIELDS, VLLM_PREFIX, HistogramSpec
from tpu_offload.monitoring.expressions import VLLM_SERIES
from tpu_offload.types import Direction

_LABELS = {"model_name": "m", "engine": "0"}
_NUM_PROMPTS = 6
SMALL = dataclasses.replace(SMALL_ENGINE, num_blocks=34)
_SWAPS = {PREFIX + METRICS[name].family for name in SWAP_FIELDS}


@final
class AsVllm(Collector):
    """What another collector exports, with vLLM's names and labels, without the series of request swap."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def collect(self) -> Iterable[Metric]:
        """The families."""
        for family in self._collector.collect():
            if family.name in _SWAPS:
                continue
            found = Metric(f"vllm:{family.name}", family.documentation, family.type)
            for sample in family.samples:
                found.add_sample(f"vllm:{sample.name}", _LABELS | sample.labels, sample.value)
            yield found


@final
class OwnSeries:
    """vLLM's own series, those that the dashboard shows, and the durations of copies."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = tuple(_LABELS)

        def add(kind: Any, name: str, *more: str) -> Any:
            family = VLLM_SERIES[name].removesuffix("_total").removesuffix("_bucket")
            metric = kind(family, name, (*labels, *more), registry=registry)
            return metric if more else metric.labels(**_LABELS)

        def durations(spec: HistogramSpec) -> Any:
            name = VLLM_PREFIX + spec.family
            return Histogram(name, spec.help, labels, registry=registry, buckets=spec.buckets_s).labels(**_LABELS)

        self._durations = {Direction.SAVE: durations(SAVE_DURATION), Direction.LOAD: durations(LOAD_DURATION)}
        self._counters = {name: add(Counter, name) for name in VLLM_SERIES if name.startswith(("pre", "ext", "prompt"))
                          and name != "prompt_tokens_by_source"}  # fmt: skip
        self._by_source = add(Counter, "prompt_tokens_by_source", "source")
        self._usage = add(Gauge, "kv_cache_usage")
        self._first_token = add(Histogram, "time_to_first_token_bucket")

    def observe_transfers(self, transfers: Iterable[FinishedTransfer]) -> None:
        """Adds copies that ended."""
        for transfer in transfers:
            if transfer.direction in self._durations:
                self._durations[transfer.direction].observe(transfer.duration_s)

    def observe_output(self, output: RequestOutput) -> None:
        """Adds a request that ended."""
        tokens = output.stats.prompt_tokens
        total = tokens.computed + tokens.hbm + tokens.host
        counts = {
            "prompt_tokens": total,
            "prompt_tokens_cached": tokens.hbm + tokens.host,
            "prefix_cache_queries": total,
            "prefix_cache_hits": tokens.hbm,
            "external_prefix_cache_queries": total - tokens.hbm,
            "external_prefix_cache_hits": tokens.host,
            "preemptions": output.stats.num_preemptions,
        }
        assert counts.keys() == self._counters.keys()
        for name, count in counts.items():
            self._counters[name].inc(count)
        sources = {"local_compute": tokens.computed, "local_cache_hit": tokens.hbm, "external_kv_transfer": tokens.host}
        for source, count in sources.items():
            self._by_source.labels(**_LABELS, source=source).inc(count)
        if output.stats.ttft_s is not None:
            self._first_token.observe(output.stats.ttft_s)

    def observe_step(self, usage: float) -> None:
        """Sets the share of HBM in use."""
        self._usage.set(usage)


class _Tapped:
    """A scheduler whose transfers are observed."""

    def __init__(self, scheduler: OffloadScheduler, series: OwnSeries) -> None:
        self._scheduler, self._series = scheduler, series

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    def apply(self, report: StepReport) -> Update:
        return self._observed(self._scheduler.apply(report))

    def take_update(self) -> Update:
        return self._observed(self._scheduler.take_update())

    def _observed(self, update: Update) -> Update:
        self._series.observe_transfers(update.transfers)
        return update


@final
class LiveEngine:
    """An engine with a small HBM and host tier, files and request swap, which serves the same prompts in turn.

    Args:
      folder: of its storage tier.
    """

    def __init__(self, folder: Path) -> None:
        offload = OffloadConfig.create(
            num_cpu_chunks=40,
            num_staging_blocks=16,
            load_path="staged",
            storage_tier="file",
            storage_options=f"{folder},min_free_gb=0,direct=off",
            num_storage_chunks=256,
            load_mode="load",  # else the machine's speed decides
            swap_gb=0.001,
            swap_mode="swap",
            skip_jax_precompile=True,
        )
        self.engine = Engine(TINY, SMALL, offload=offload)
        self.engine.wait_for_host_memory()
        collector = StatsCollector(self._stats, self.engine.tier_stats)
        self.own_registry, self.vllm_registry = CollectorRegistry(), CollectorRegistry()
        self.own_registry.register(collector)
        self.vllm_registry.register(AsVllm(collector))
        self.series = OwnSeries(self.vllm_registry)
        self._tap_transfers()
        self._ids = itertools.count()

    def _stats(self) -> Any:
        return self.engine.offload_stats()

    def _tap_transfers(self) -> None:
        offload: Any = offloading(self.engine)
        offload._scheduler = _Tapped(offload_scheduler(self.engine), self.series)

    def serve_round(self) -> None:
        """Serves known prompts and new ones, more at once than HBM holds."""
        for i in range(_NUM_PROMPTS):
            number = next(self._ids)
            prompt = random_tokens(i if i % 3 else number, 40 + 3 * i)
            self.engine.add_request(make_request(f"r{number}", prompt, max_tokens=12 + 6 * (i % 3)))
        while self.engine.has_unfinished:
            for output in self.engine.step():
                if output.finished:
                    self.series.observe_output(output)
            self.series.observe_step(1 - kv_blocks(engine_scheduler(self.engine)).num_free / SMALL.num_blocks)
        self.engine.check_invariants()

    def fail_next_save(self) -> None:
        """The next save raises when it is dispatched."""
        copier: Any = tier_group(one_worker(self.engine)).copiers[Direction.SAVE]

        def fails_once(*args):
            del copier.save
            raise RuntimeError("injected")

        copier.save = fails_once


@contextlib.contextmanager
def endpoint(registry: CollectorRegistry) -> Iterator[str]:
    """The address of an endpoint on the loopback device, until the end of the block."""
    server, thread = start_http_server(0, "127.0.0.1", registry)
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
