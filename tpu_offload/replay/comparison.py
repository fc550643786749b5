"""Serves a workload without and with offloading, and compares outputs and numbers of both runs.

Both runs use the same weights, HBM size and order of conversations, after compilation. HBM is too small for the
workload on purpose.
"""

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tpu_offload.config import OffloadConfig
from tpu_offload.engine import Hosts
from tpu_offload.errors import InputError, TransferError
from tpu_offload.hashing import BlockHasher
from tpu_offload.measure import Geometry, measure_copy_rates
from tpu_offload.metrics import SWAP_FIELDS, OffloadStats
from tpu_offload.replay.serving import Record, ServedRun
from tpu_offload.replay.setup import (
    ServingOptions,
    Setup,
    blocks_per_request,
    build_setup,
    build_workload,
    describe,
    host_sizes,
    serve_once,
)
from tpu_offload.replay.timeline import request_columns
from tpu_offload.types import BlockHash

_logger = logging.getLogger(__name__)

DEFAULT_CONCURRENCY = 3


def size_setup(options: ServingOptions, offload: OffloadConfig) -> Setup:
    """Checks options and settings, and sizes HBM and the host tier.

    Raises:
      InputError: an option is invalid.
      ConfigError: a setting is invalid.
    """
    workload = build_workload(options)
    concurrency = options.concurrency or DEFAULT_CONCURRENCY
    needed = blocks_per_request(workload, options)
    num_unique_blocks = workload.num_unique_blocks(options.block_size)
    # Enough for the requests in flight but too small for the workload; if both are not possible, the latter.
    num_blocks = options.num_blocks or max(needed, min(needed * concurrency, num_unique_blocks // 2))
    setup = build_setup(options, offload, workload=workload, concurrency=concurrency, num_blocks=num_blocks)
    if num_blocks >= num_unique_blocks:
        _logger.warning(
            "HBM of %d blocks holds all %d blocks of the workload: offloading will load nothing; lower --num-blocks",
            num_blocks,
            num_unique_blocks,
        )
    if offload.num_cpu_chunks is None and offload.host_gb is None:
        # Not the default of 1024 chunks: a replay knows what it needs, windows included if they were all kept.
        num_host_blocks = num_unique_blocks * len(options.model.group_windows)
        num_chunks = -(-num_host_blocks // offload.blocks_per_chunk)
        sizes = host_sizes(setup, num_chunks=num_chunks, num_states=2 * workload.num_requests)
        offload = offload.model_copy(update=sizes)
    return dataclasses.replace(setup, offload=offload)


def serve_twice(
    setup: Setup,
    *,
    start: Callable[[str], Callable[[], None]],
    stop: Callable[[], bool],
    hosts: Hosts | None = None,
) -> dict[str, Any]:
    """Serves a workload without and with offloading; returns the report.

    Args:
      setup: workload and sizes.
      start: called with the name of each run; returns a function to call after each of its requests.
      stop: called before each step; True ends the run.
      hosts: the processes that run the model in both runs. Then it is served once more, without offloading, in this
        process, and both runs are compared with that one.
    """
    alone = serve_once(setup, None, on_finish=start("one process"), stop=stop)[0] if hosts is not None else None
    baseline, _ = serve_once(setup, None, on_finish=start("baseline"), stop=stop, hosts=hosts)
    offload, stats = serve_once(setup, setup.offload, on_finish=start("offload"), stop=stop, hosts=hosts)
    differences, num_compared = find_differences(baseline.records, offload.records)
    if alone is not None:
        for name, run in ("baseline", baseline), ("offload", offload):
            found, num_both = find_differences(alone.records, run.records, names=("one process", name))
            differences += found
            num_compared = min(num_compared, num_both)
    report = report_runs(setup, baseline, offload, stats or OffloadStats())
    if stats and offload.complete and hosts is None:
        report["offload"]["transfers"]["copy_rates"] = _copy_rates(setup)
    return {
        **report,
        "processes": describe_processes(hosts),
        **outcome([difference.as_dict() for difference in differences], num_compared),
    }


def describe_processes(hosts: Hosts | None) -> dict[str, int]:
    """Which processes ran the model, for the JSON file."""
    return {"num": hosts.num_hosts, "num_devices": hosts.num_devices} if hosts else {"num": 1, "num_devices": 1}


def report_runs(setup: Setup, baseline: ServedRun, offload: ServedRun, stats: OffloadStats) -> dict[str, Any]:
    """What was measured in a run without and one with offloading, for the JSON file."""
    block_size = setup.engine.block_size
    one = run_numbers(baseline, block_size=block_size)
    other = run_numbers(offload, block_size=block_size) | offload_numbers(stats)
    recomputed = one["prompt_tokens"]["recomputed"]
    return {
        **describe(setup),
        "loaded_share_of_recomputed": other["prompt_tokens"]["host"] / recomputed if recomputed else None,
        "host_hits": hit_ttfts(baseline, offload),
        "baseline": one,
        "offload": other,
    }


def _copy_rates(setup: Setup) -> dict[str, Any] | None:
    model = setup.model
    geometry = Geometry(model.num_layers, model.page_shape(setup.engine.block_size), model.kv_dtype)
    try:
        return dataclasses.asdict(measure_copy_rates(setup.offload, geometry))
    except (InputError, TransferError) as e:
        _logger.warning("the copy rates could not be measured: %s", e)
        return None


def percentile(values: Sequence[float], percent: float) -> float | None:
    """An interpolated percentile; None without values."""
    return float(np.percentile(values, percent)) if values else None


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """A request with different tokens or log-probabilities in two runs, and the first position that differs."""

    request_id: str
    position: int
    baseline: tuple[float, ...]
    offload: tuple[float, ...]
    what: str = "token"
    names: tuple[str, str] = ("baseline", "offload")

    def __str__(self) -> str:
        one, other = self.names
        return (
            f"request {self.request_id} differs from {self.what} {self.position} on: {one} "
            f"{list(self.baseline[self.position :][:4])}, {other} {list(self.offload[self.position :][:4])}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Its record in the JSON file."""
        return dataclasses.asdict(self) | {"text": str(self)}


def find_differences(
    baseline: Iterable[Record], offload: Iterable[Record], *, names: tuple[str, str] = ("baseline", "offload")
) -> tuple[list[Difference], int]:
    """Compares the output tokens and, bit for bit, the log-probabilities of requests that both runs finished.

    Returns:
      The requests that differ, in the order of the offload run, and the number of requests compared.
    """
    expected = {record.request_id: record for record in baseline}
    pairs = [(expected[record.request_id], record) for record in offload if record.request_id in expected]
    differences = []
    for one, other in pairs:
        for what, mine, theirs in ("token", one.tokens, other.tokens), ("logprob", one.logprobs, other.logprobs):
            position = _first_difference(mine, theirs)
            if position is not None:
                differences.append(Difference(one.request_id, position, mine, theirs, what, names))
                break
    return differences, len(pairs)


def outcome(differences: Sequence[Mapping[str, Any]], num_compared: int) -> dict[str, Any]:
    """The outcome of the comparison in the JSON file."""
    return {
        # If nothing was compared, the outputs are not known to be identical.
        "outputs_identical": not differences if num_compared else None,
        "num_compared": num_compared,
        "differences": list(differences),
    }


def _first_difference(one: Sequence[float], other: Sequence[float]) -> int | None:
    """The first position at which two sequences differ in any bit; None if there is none."""
    bits, other_bits = np.asarray(one, np.float64).view(np.int64), np.asarray(other, np.float64).view(np.int64)
    length = min(len(bits), len(other_bits))
    differs = np.flatnonzero(bits[:length] != other_bits[:length])
    if len(differs):
        return int(differs[0])
    return length if len(bits) != len(other_bits) else None


def count_recomputed(records: Sequence[Record], *, block_size: int) -> int:
    """Prompt tokens that were computed although an earlier request had computed their KV.

    An unlimited cache would have avoided them: full blocks only, never the whole prompt.
    """
    hasher = BlockHasher(b"", block_size=block_size)
    seen: set[BlockHash] = set()
    num_recomputed = 0
    for record in sorted(records, key=lambda record: record.stats.arrival_s):
        hashes: list[BlockHash] = []
        hasher.extend(hashes, record.prompt_tokens)
        num_known = next((i for i, block_hash in enumerate(hashes) if block_hash not in seen), len(hashes))
        reusable = min(num_known * block_size, len(record.prompt_tokens) - 1)
        sources = record.stats.prompt_tokens
        num_recomputed += max(0, reusable - sources.hbm - sources.host)
        hasher.extend(hashes, record.prompt_tokens + record.tokens[:-1])
        seen.update(hashes)
    return num_recomputed


def served_numbers(run: ServedRun) -> dict[str, Any]:
    """Numbers of any served run in the JSON file. Times without a measurement are None."""
    requests = [record.stats for record in run.records]
    sources = [request.prompt_tokens for request in requests]
    num_generated = sum(len(record.tokens) for record in run.records)
    return {
        "num_requests": len(requests),
        "complete": run.complete,
        "wall_s": run.wall_s,
        "ttft_p50_s": percentile(run.ttfts_s, 50),
        "tokens_per_s": num_generated / run.wall_s if run.wall_s else None,
        "num_generated_tokens": num_generated,
        "prompt_tokens": {
            "computed": sum(source.computed for source in sources),
            "hbm": sum(source.hbm for source in sources),
            "host": sum(source.host for source in sources),
        },
        "num_preemptions": sum(request.num_preemptions for request in requests),
    }


def run_numbers(run: ServedRun, *, block_size: int) -> dict[str, Any]:
    """Numbers of a replay's run in the JSON file."""
    numbers = served_numbers(run)
    num_tokens = numbers["num_generated_tokens"] + sum(len(record.prompt_tokens) for record in run.records)
    numbers["prompt_tokens"]["recomputed"] = count_recomputed(run.records, block_size=block_size)
    return numbers | {
        "ttft_p99_s": percentile(run.ttfts_s, 99),
        "total_tokens_per_s": num_tokens / run.wall_s if run.wall_s else None,
        "requests": request_columns(run.records, start_s=run.start_s),
        "timeline": dict(run.timeline),
    }


def offload_numbers(stats: OffloadStats) -> dict[str, Any]:
    """Numbers that only the offload run has."""
    return {
        "staging": {
            "budget_blocks": stats.staging_budget_blocks,
            "peak_blocks": stats.staging_peak_blocks,
            "dropped_blocks": stats.dropped_save_blocks + stats.dropped_load_blocks,
            "dropped_save_blocks": stats.dropped_save_blocks,
            "dropped_load_blocks": stats.dropped_load_blocks,
        },
        "transfers": {
            "saved_nbytes": stats.saved_nbytes,
            "loaded_nbytes": stats.loaded_nbytes,
            "save_s": stats.save_s,
            "load_s": stats.load_s,
            "num_failed_jobs": stats.num_failed_jobs,
        },
        "host": {
            "num_chunks": stats.num_host_chunks,
            "num_resident_chunks": stats.num_resident_chunks,
            "num_evicted_chunks": stats.num_evicted_chunks,
        },
        "swap": {name: value for name, value in stats.as_dict().items() if name in SWAP_FIELDS},
    }


def hit_ttfts(baseline: ServedRun, offload: ServedRun) -> dict[str, Any]:
    """Time to first token in both runs, over the requests that loaded from the host in the offload run."""
    before = {record.request_id: record.stats.ttft_s for record in baseline.records}
    pairs = [
        (before[record.request_id], record.stats.ttft_s)
        for record in offload.records
        if record.stats.prompt_tokens.host and record.request_id in before
    ]
    return {
        "num_requests": len(pairs),
        "baseline_ttft_p50_s": percentile([one for one, _ in pairs if one is not None], 50),
        "offload_ttft_p50_s": percentile([other for _, other in pairs if other is not None], 50),
    }
