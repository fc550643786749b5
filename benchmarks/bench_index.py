"""What does the chunk index cost per chunk, by its size and by prompt length?

At each point of the sweep the index is full. Requests then hit and miss it, one at a time. Each is served by the index
alone (`index_*`), by the whole scheduler with staging budget, jobs and reports (`hit`, `miss`), and by the peer's
method, interleaved, so that changes in machine load affect all of them. The peer's method is that of the offload
managers of vLLM and tpu-inference, reimplemented here: one OrderedDict from keys to reference-counted objects, oldest
first; a lookup is one dictionary access per chunk and does not pin; a touch moves every chunk; an allocation evicts
the oldest unreferenced, unprotected chunks. Times are per chunk, with Python's default garbage collection.

  python benchmarks/bench_index.py --num-indexed 1000 100000 1000000 --prompt-chunks 1 100 10000 --json index.json
"""

import gc
import itertools
import random
import sys
import time
import tracemalloc
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from common import Spread, Stopwatch, count, make_parser, write_json
from offload_scheduler import BLOCK_SIZE, LAYOUT, computed, fill, finish_jobs

from tpu_offload import BlockHash, ChunkKey, OffloadConfig, OffloadScheduler, Use
from tpu_offload.core.index import ChunkIndex
from tpu_offload.core.policies import LRUPolicy
from tpu_offload.types import Pool

STAGES = ("match", "admit", "plan", "report", "finish")
PARTS = {  # the stages in each sum
    "hit": tuple(f"hit_{stage}" for stage in STAGES),
    "miss": tuple(f"miss_{stage}" for stage in STAGES),
    "index_hit": ("index_lookup", "index_pin", "index_touch", "index_release"),
    "index_miss": ("index_allocate", "index_complete"),
    "peer_hit": ("peer_lookup", "peer_touch"),
    "peer_miss": ("peer_allocate", "peer_complete"),
    "both": ("hit", "miss"),
    "peer_both": ("peer_hit", "peer_miss"),
}
RATIOS = {
    "index_hit": "peer_hit", "index_miss": "peer_miss", "hit": "peer_hit", "miss": "peer_miss", "both": "peer_both",
}  # fmt: skip


class PeerEntry:
    __slots__ = ("num_references", "slot")

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.num_references = -1  # being written


class PeerIndex:
    """The peer's method, see the module's docstring."""

    def __init__(self, num_slots: int) -> None:
        self.entries: OrderedDict[ChunkKey, PeerEntry] = OrderedDict()
        self.num_slots = num_slots
        self.num_used = 0
        self.free: list[int] = []

    def lookup(self, keys: Sequence[ChunkKey]) -> int:
        count = 0
        for key in keys:
            entry = self.entries.get(key)
            if entry is None or entry.num_references < 0:
                break
            count += 1
        return count

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        for key in reversed(keys):
            if key in self.entries:
                self.entries.move_to_end(key)

    def allocate(self, keys: Sequence[ChunkKey]) -> list[int]:
        new = [key for key in keys if key not in self.entries]
        num_short = len(new) - len(self.free) - (self.num_slots - self.num_used)
        if num_short > 0:
            protected, victims = set(keys), []
            for key, entry in self.entries.items():
                if entry.num_references == 0 and key not in protected:
                    victims.append(key)
                    if len(victims) == num_short:
                        break
            for key in victims:
                self.free.append(self.entries.pop(key).slot)
        slots = []
        for key in new:
            if self.free:
                slot = self.free.pop()
            else:
                slot, self.num_used = self.num_used, self.num_used + 1
            self.entries[key] = PeerEntry(slot)
            slots.append(slot)
        return slots

    def complete(self, keys: Sequence[ChunkKey]) -> None:
        for key in keys:
            entry = self.entries[key]
            if entry.num_references < 0:
                entry.num_references = 0


def fresh[K: bytes](hashes: Sequence[K]) -> list[K]:
    """Copies of the hashes: a request's hashes are never the objects that the index holds."""
    return [type(h)(bytearray(h)) for h in hashes]


def chain(rng: random.Random, num: int) -> list[BlockHash]:
    return [BlockHash(rng.randbytes(16)) for _ in range(num)]


def keys_of(hashes: Sequence[BlockHash]) -> list[ChunkKey]:
    return [ChunkKey(h + b"8 bytes.") for h in hashes]  # the length of the keys in the scheduler's index


def serve(scheduler: OffloadScheduler, watch: Stopwatch, name: str, request_id: str, hashes: list[BlockHash]) -> int:
    """Serves one request from match to finish, timing each stage; returns the tokens that were found."""
    num_tokens = len(hashes) * BLOCK_SIZE + 1
    block_ids = list(range(1000, 1000 + len(hashes) + 1))
    found = watch(
        f"{name}_match", scheduler.match, request_id, hashes, num_tokens=num_tokens, num_computed_tokens=0
    ).num_tokens
    watch(f"{name}_admit", scheduler.admit, request_id, [block_ids], num_loaded_tokens=found)
    changed = [] if found else [computed(request_id, block_ids, hashes, num_tokens, num_tokens)]
    num_left, plan_s, report_s = len(hashes), 0.0, 0.0
    while num_left:  # a plan saves a bounded number of chunks
        start_s = watch.clock()
        plan = scheduler.plan_step(changed)
        plan_s += watch.clock() - start_s
        changed = []
        (job,) = plan.jobs
        num_left -= job.num_blocks
        report = finish_jobs(plan, num_host_slots=(scheduler.stats().num_host_chunks,))
        start_s = watch.clock()
        scheduler.apply(report)
        report_s += watch.clock() - start_s
    watch.record(f"{name}_plan", plan_s)
    watch.record(f"{name}_report", report_s)
    watch(f"{name}_finish", scheduler.finish, request_id)
    return found


class Bench:
    """Three full indexes: in a scheduler, alone, and by the peer's method."""

    def __init__(self, num_indexed: int, num_chunks: int, *, seed: int) -> None:
        self.num_indexed, self.num_chunks = num_indexed, num_chunks
        self.rng = random.Random(seed)
        self.watch = Stopwatch()
        config = OffloadConfig.create(num_cpu_chunks=num_indexed, num_staging_blocks=max(2 * num_chunks, 2000))
        self.scheduler = OffloadScheduler(config, LAYOUT)
        self.scheduler.apply(finish_jobs(None, num_host_slots=(num_indexed,)))
        self.alone, self.peer = ChunkIndex(LRUPolicy()), PeerIndex(num_indexed)
        self.alone.grow(Pool.CHUNKS, num_indexed)
        self.resident = [chain(self.rng, num_chunks) for _ in range(num_indexed // num_chunks)]
        fill(self.scheduler, self.resident, num_host_chunks=num_indexed)
        for hashes in self.resident:
            keys = keys_of(hashes)
            self.alone.complete(keys, self.alone.allocate(Use(0), keys, range(num_chunks)), success=True)
            self.peer.allocate(keys)
            self.peer.complete(keys)

    def hit(self, i: int) -> None:
        watch, alone, peer = self.watch, self.alone, self.peer
        hashes = self.rng.choice(self.resident)
        assert serve(self.scheduler, watch, "hit", f"hit{i}", fresh(hashes)) == self.num_chunks * BLOCK_SIZE
        keys = keys_of(hashes)
        slots = watch("index_lookup", alone.find, keys)
        watch("index_pin", alone.pin, keys)
        watch("index_touch", alone.touch, Use(i), keys, len(keys))
        watch("index_release", alone.unpin, keys)
        keys = fresh(keys)
        assert len(slots) == watch("peer_lookup", peer.lookup, keys) == self.num_chunks
        watch("peer_touch", peer.touch, keys)

    def miss(self, i: int) -> None:
        watch, alone, peer = self.watch, self.alone, self.peer
        hashes = chain(self.rng, self.num_chunks)
        assert serve(self.scheduler, watch, "miss", f"miss{i}", fresh(hashes)) == 0
        keys = keys_of(hashes)
        slots = watch("index_allocate", alone.allocate, Use(i), keys, range(self.num_chunks))
        watch("index_complete", alone.complete, keys, slots, success=True)
        keys = fresh(keys)
        peer.lookup(keys)
        assert len(slots) == len(watch("peer_allocate", peer.allocate, keys)) == self.num_chunks
        watch("peer_complete", peer.complete, keys)

    def measure(self, num_requests: int) -> dict[str, Any]:
        gc.collect()
        collections = Stopwatch()
        collections("all", gc.collect)
        for i in range(num_requests):
            self.hit(i)
        for i in range(num_requests, 2 * num_requests):
            self.miss(i)
        assert self.alone.num_evicted == num_requests * self.num_chunks
        for name, parts in PARTS.items():
            self.watch.add(name, *parts)
        return {
            "num_indexed": self.num_indexed,
            "prompt_chunks": self.num_chunks,
            "num_requests": num_requests,
            "us_per_chunk": self.watch.spreads(scale=1e6 / self.num_chunks),
            "ratio_to_peer": {name: self.watch.ratio(name, other) for name, other in RATIOS.items()},
            "gc_collect_s": collections.seconds["all"][0],
        }


def memory(num_indexed: int, num_chunks: int) -> dict[str, Any]:
    """Bytes per indexed chunk, including its key, and the time of a full garbage collection with them."""
    result: dict[str, Any] = {"num_indexed": num_indexed, "prompt_chunks": num_chunks}
    for name in ("ours", "peer"):
        rng = random.Random(0)
        gc.collect()
        tracemalloc.start()
        index, peer = ChunkIndex(LRUPolicy()), PeerIndex(num_indexed)
        index.grow(Pool.CHUNKS, num_indexed)
        for _ in range(num_indexed // num_chunks):
            keys = [ChunkKey(rng.randbytes(24)) for _ in range(num_chunks)]
            if name == "ours":
                index.complete(keys, index.allocate(Use(0), keys, range(num_chunks)), success=True)
            else:
                peer.allocate(keys)
                peer.complete(keys)
        del keys
        size, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        gc.collect()
        start = time.perf_counter()
        gc.collect()
        result[name] = {"bytes_per_chunk": size / num_indexed, "gc_collect_s": time.perf_counter() - start}
        del index, peer
    return result


def show(result: dict[str, Any]) -> None:
    us: dict[str, Spread] = result["us_per_chunk"]
    print(
        f"{result['num_indexed']} chunks indexed, prompts of {result['prompt_chunks']}; us per chunk, median (p10-p90):"
    )
    for names in (
        ("hit", *PARTS["hit"]),
        ("miss", *PARTS["miss"]),
        (*PARTS["index_hit"], *PARTS["index_miss"]),
        (*PARTS["peer_hit"], *PARTS["peer_miss"]),
    ):
        print("   ", ", ".join(f"{name} {us[name].text()}" for name in names))
    ratios = ", ".join(f"{name} {ratio.text()}" for name, ratio in result["ratio_to_peer"].items())
    print("    ours / peer:", ratios, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--num-indexed", type=count, nargs="+", default=[10**3, 10**4, 10**5, 10**6], help="chunks")
    parser.add_argument("--prompt-chunks", type=count, nargs="+", default=[1, 10, 100, 1000, 10000])
    parser.add_argument(
        "--chunks-timed", type=count, default=100_000, help="chunks per point, within 15 to 1000 requests"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    results = []
    for num_indexed, num_chunks in itertools.product(args.num_indexed, args.prompt_chunks):
        if num_chunks <= num_indexed:
            num_requests = min(max(args.chunks_timed // num_chunks, 15), 1000)
            results.append(Bench(num_indexed, num_chunks, seed=args.seed).measure(num_requests))
            show(results[-1])
    sizes = [memory(n, min(n, 100)) for n in args.num_indexed]
    for size in sizes:
        figures = [
            f"{name} {size[name]['bytes_per_chunk']:.0f} bytes/chunk, gc.collect() {size[name]['gc_collect_s']:.3f} s"
            for name in ("ours", "peer")
        ]
        print(f"{size['num_indexed']} chunks indexed:", ", ".join(figures))
    write_json(args, question="index cost per chunk", results=results, memory=sizes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
