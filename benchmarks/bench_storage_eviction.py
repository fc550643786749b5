"""What does a storage tier hit with each eviction policy, by its size, and what does the policy cost?

It simulates the tiers with `density` in the host tier: for each kind of generated traffic (`traffic.py`) or trace,
and each pair of sizes, the hit rates of host tier and storage together after the learning time, and how much better or
worse each policy is than `lru`, where a hit in storage counts 1 and where it counts less (`--storage-worth`).

`--cost` fills a tier with prompts that never return, several times over, as the scheduler does: each is used, written
in batches of 8 chunks, for each of which as many are evicted, and used again at its end. With `auto` the host tier is
half as large. With `--write-on eviction` it is written when a host tier of a fifth of the size, or with `auto` of the
same size, evicts it, as least recently used. Memory is what the process has grown by, names of records included; CPU
time is per chunk.

  python benchmarks/bench_storage_eviction.py --sizes 0.02:0.1 0.05:0.2 --json eviction.json
  python benchmarks/bench_storage_eviction.py --cost --num-chunks 1000000
"""

import argparse
import gc
import multiprocessing
import random
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import traffic
from bench_regret import SETUPS, read_kind
from common import count, make_parser, print_table, write_json

from tpu_offload import Use
from tpu_offload.config import SaveEvent, StorageEvictionPolicy, StorageWriteEvent
from tpu_offload.core.index import NO_PARENT
from tpu_offload.core.policies.base import STORAGE_WORTH
from tpu_offload.core.policies.density import DensityPolicy
from tpu_offload.core.storage.eviction_order import EvictionOrder, WrittenChunk
from tpu_offload.core.storage.order_choice import AUTO_RATIO, make_order
from tpu_offload.core.storage.writes import MAX_CASCADES
from tpu_offload.sim import StorageSetup, TierSetup, Trace, no_hbm, read_traces, replay, simulate_hbm
from tpu_offload.types import ChunkKey

LRU = StorageEvictionPolicy.LRU.value
POLICIES = [policy.value for policy in StorageEvictionPolicy]
FILLS = 6  # as many chunks are written as the tier holds, so often: density tracks four times as many
LEAST_CHUNKS = 100


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--cost", action="store_true", help="what the policies cost, and not what they hit")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=[LRU, "density"], help="of storage")
    kinds = [*traffic.KINDS, traffic.CHANGING]
    parser.add_argument("--kinds", nargs="*", choices=[*kinds, *traffic.HELD_OUT], default=kinds)
    parser.add_argument("--trace", type=Path, nargs="+", default=[], help="traces, beside the generated traffic")
    parser.add_argument(
        "--sizes", type=_pair, nargs="+", default=[(0.02, 0.1)], help="HOST:STORAGE, shares of the blocks"
    )
    parser.add_argument("--setup", choices=SETUPS, default="host", help="whether HBM is in front, see bench_regret.py")
    parser.add_argument("--hbm-share", type=float, default=0.05, help="of the blocks")
    parser.add_argument("--write-on", choices=[event.value for event in StorageWriteEvent], default="save")
    parser.add_argument("--storage-worth", type=float, default=STORAGE_WORTH, help="of a hit in storage")
    parser.add_argument("--seeds", type=count, default=1)
    parser.add_argument("--learn", type=float, default=0.3, help="share of the requests that do not count")
    parser.add_argument("--num-chunks", type=count, nargs="+", default=[100_000], help="of the tier, for `--cost`")
    parser.add_argument("--prompt-chunks", type=count, default=24)
    args = parser.parse_args(argv)
    rows = _compare_cost(args) if args.cost else _compare_hits(args)
    write_json(args, question="what a storage tier hits with each eviction policy, and what it costs", results=rows)
    return 0


def _pair(text: str) -> tuple[float, float]:
    """Parses `HOST:STORAGE`."""
    try:
        host, storage = map(float, text.split(":"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r}; expected two shares of the blocks, such as 0.02:0.1") from None
    return host, storage


# --- hits -----------------------------------------------------------------------------------------


def _traces(args: argparse.Namespace) -> Iterator[tuple[str, Trace]]:
    for path in args.trace:
        yield str(path), read_traces([path])
    for kind in args.kinds:
        for seed in range(args.seeds):
            yield f"{kind}, seed {seed}", read_kind(kind, seed)


def _compare_hits(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for name, trace in _traces(args):
        first = int(args.learn * len(trace.requests))
        num_blocks = sum(len(request.blocks) for request in trace.requests[first:])
        has_hbm, save_on = SETUPS[args.setup]
        hbm_result = simulate_hbm(trace, round(args.hbm_share * trace.num_unique_blocks)) if has_hbm else no_hbm(trace)
        for host, storage in args.sizes:
            row: dict[str, Any] = {"traffic": name, "host": host, "storage": storage}
            for policy in args.policies:
                setup = _setup(trace, host, storage, policy, StorageWriteEvent(args.write_on), save_on)
                outcome = replay(trace, DensityPolicy(), setup, hbm_result=hbm_result)
                hits = [sum(tier[first:]) / num_blocks for tier in (outcome.host_hits, outcome.storage[0].hits)]
                row[policy] = {"host": hits[0], "storage": hits[1], "num_written": outcome.storage[0].num_written}
            rows.append(row)
            print(f"{name}, {host:g} above {storage:g}", file=sys.stderr)
    _print_hits(rows, args)
    return rows


def _setup(
    trace: Trace, host: float, storage: float, policy: str, write_on: StorageWriteEvent, save_on: SaveEvent
) -> TierSetup:
    num_unique = trace.num_unique_blocks
    tier = StorageSetup(max(1, round(storage * num_unique)), write_on, eviction=StorageEvictionPolicy(policy))
    return TierSetup(max(LEAST_CHUNKS, round(host * num_unique)), save_on=save_on, storage=(tier,))


def _print_hits(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    base, *others = args.policies
    table = []
    for row in rows:
        cells = [f"{row[policy]['host'] + row[policy]['storage']:.4f}" for policy in args.policies]
        for policy in others:
            for worth in (1.0, args.storage_worth):
                cells.append(f"{_worth(row[policy], worth) - _worth(row[base], worth):+.4f}")
        table.append([row["traffic"], f"{row['host']:g}:{row['storage']:g}", *cells])
    gains = [f"{policy} - {base}, {worth:g}" for policy in others for worth in (1.0, args.storage_worth)]
    print_table("Hit rate of all tiers, and gains", ["traffic", "sizes", *args.policies, *gains], table)


def _worth(rates: dict[str, float], of_storage: float) -> float:
    return rates["host"] + of_storage * rates["storage"]


# --- cost -----------------------------------------------------------------------------------------


def _compare_cost(args: argparse.Namespace) -> list[dict[str, Any]]:
    context = multiprocessing.get_context("spawn")
    rows = []
    for num_chunks in args.num_chunks:
        for policy in args.policies:
            with context.Pool(1) as pool:  # a process of its own, so that memory is that of one policy
                rows.append(pool.apply(_cost, (policy, num_chunks, args.prompt_chunks, args.write_on)))
    print_table(
        "Cost of the order of eviction",
        ["policy", "chunks", "bytes/chunk", "us/chunk", "of these evict", "gc.collect ms", "clear ms"],
        [
            [
                row["policy"],
                f"{row['num_chunks']:,}",
                f"{row['bytes_per_chunk']:.0f}",
                f"{row['us_per_chunk']:.2f}",
                f"{row['evict_us_per_chunk']:.2f}",
                f"{row['gc_collect_ms']:.0f}",
                f"{row['clear_ms']:.1f}",
            ]
            for row in rows
        ],
    )
    return rows


def _cost(policy: str, num_chunks: int, prompt_chunks: int, write_on: str) -> dict[str, Any]:
    rng, process, demotes = random.Random(0), psutil.Process(), write_on == StorageWriteEvent.HOST_EVICTION.value
    is_auto = policy == StorageEvictionPolicy.AUTO.value
    num_host = num_chunks // (1 if is_auto else AUTO_RATIO) if demotes else 0  # `auto` compares in a small tier
    gc.collect()
    before = process.memory_info().rss
    order = make_order(
        StorageEvictionPolicy(policy),
        capacity=num_chunks,
        num_above=num_host or num_chunks // 2,
        demotes=demotes,
        label="the tier",
    )
    host: deque[list[WrittenChunk]] = deque()
    total_s = evict_s = 0.0
    num_written = use_id = 0
    while num_written < FILLS * num_chunks:
        keys = [ChunkKey(rng.randbytes(20)) for _ in range(prompt_chunks)]
        use_id += 1
        start_s = time.thread_time()
        evict_s += _serve(order, Use(use_id), keys, num_chunks, host, num_host)
        total_s += time.thread_time() - start_s
        num_written += len(keys)
    start_s = time.perf_counter()
    gc.collect()
    collect_s = time.perf_counter() - start_s
    nbytes = process.memory_info().rss - before
    start_s = time.perf_counter()
    order.clear()
    return {
        "policy": policy,
        "num_chunks": num_chunks,
        "bytes_per_chunk": nbytes / num_chunks,
        "us_per_chunk": total_s / num_written * 1e6,
        "evict_us_per_chunk": evict_s / num_written * 1e6,
        "gc_collect_ms": collect_s * 1e3,
        "clear_ms": (time.perf_counter() - start_s) * 1e3,
    }


def _serve(
    order: EvictionOrder,
    use: Use,
    keys: list[ChunkKey],
    num_chunks: int,
    host: deque[list[WrittenChunk]],
    num_host: int,
) -> float:
    """A request that computes its whole prompt, which is written; returns the seconds that evictions took.

    If there is a host tier, `host`, of `num_host` chunks, what it evicts is written instead.
    """
    evict_s = 0.0
    chunks = [(use, key, keys[i - 1] if i else NO_PARENT) for i, key in enumerate(keys)]
    order.begin(use, keys, 0)
    if num_host:
        order.expect(chunks)
        host.append(chunks)
        chunks = host.popleft() if len(host) * len(keys) > num_host else []
    for first in range(0, len(chunks), MAX_CASCADES):
        batch = chunks[first : first + MAX_CASCADES]
        if num_host:
            order.host_evicted(batch, len(batch))
        start_s = time.thread_time()
        order.evict(len(order.stored) + len(batch) - num_chunks, ())
        evict_s += time.thread_time() - start_s
        order.add_written(batch)
    order.use(use, keys)
    return evict_s


if __name__ == "__main__":
    sys.exit(main())
