"""What does the chunk index cost for each chunk, as it grows and as prompts get longer?

At each point of the sweep the index is full. Requests then hit and miss it, one at a time, and each is done
by the index alone (`index_*`), by the whole scheduler with staging budget, jobs and reports (`hit`, `miss`), and
by the peer's method, in turn, so that a machine that slows down slows all of them. The peer's method is that of
the offload managers of vLLM and tpu-inference, written anew here: one OrderedDict from keys to objects with a
reference count, oldest first; a lookup is a dictionary access a chunk and pins nothing; a touch moves every
chunk; an allocation evicts from the old end what nothing refers to and nobody protects. Times are for each
chunk, garbage collection as Python has it by default.

  python benchmarks/bench_index.py --num-indexed 1000 100000 1000000 --prompt-chunks 1 100 10000 --json index.json
"""

import argparse
import gc
import itertools
import json
import platform
import random
import statistics
import sys
import time
import tracemalloc
from collections import OrderedDict

import numpy as np

from tpu_offload import (
    JobKind,
    JobResult,
    JobState,
    OffloadConfig,
    OffloadScheduler,
    ScheduledRequest,
    StepReport,
    hashing,
)
from tpu_offload.core.index import ChunkIndex
from tpu_offload.core.policies import LRUPolicy, Use
from tpu_offload.layout import KVLayout, LayerGroup, LayerGroupKind

BLOCK_SIZE = 16
LAYOUT = KVLayout(BLOCK_SIZE, (LayerGroup(LayerGroupKind.FULL_ATTENTION, (0,), (16, 8, 2, 128), "bfloat16"),))
QUOTED = {"lookup": 0.10, "touch": 0.07, "allocate_1e5": 1.0, "allocate_1e6": 1.7}  # us a chunk, measured elsewhere


class PeerEntry:
    __slots__ = ("num_references", "slot")

    def __init__(self, slot):
        self.slot = slot
        self.num_references = -1  # being written


class PeerIndex:
    """The peer's method; see the top of the file."""

    def __init__(self, num_slots):
        self.entries = OrderedDict()
        self.num_slots = num_slots
        self.num_used = 0
        self.free = []

    def lookup(self, keys):
        count = 0
        for key in keys:
            entry = self.entries.get(key)
            if entry is None or entry.num_references < 0:
                break
            count += 1
        return count

    def touch(self, keys):
        for key in reversed(keys):
            if key in self.entries:
                self.entries.move_to_end(key)

    def allocate(self, keys):
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

    def complete(self, keys):
        for key in keys:
            entry = self.entries[key]
            if entry.num_references < 0:
                entry.num_references = 0


class Stopwatch:
    """Collects seconds under names."""

    def __init__(self):
        self.seconds = {}

    def __call__(self, name, function, *args, **kwargs):
        start = time.perf_counter()
        result = function(*args, **kwargs)
        self.seconds.setdefault(name, []).append(time.perf_counter() - start)
        return result

    def add(self, name, *parts):
        self.seconds[name] = [sum(times) for times in zip(*(self.seconds[part] for part in parts), strict=True)]


def fresh(hashes):
    """Equal bytes in other objects: a request's hashes are never the objects that the index holds."""
    return [bytes(bytearray(h)) for h in hashes]


def chain(rng, num):
    return [rng.randbytes(16) for _ in range(num)]


def fill(index, peer, keys):
    index.complete(keys, index.allocate(Use(0), keys, range(len(keys))), success=True)
    peer.allocate(keys)
    peer.complete(keys)


def serve(scheduler, watch, name, request_id, hashes):
    """One request from its match to its end; its stages are timed one by one."""
    num_tokens = len(hashes) * BLOCK_SIZE + 1
    block_ids = list(range(1000, 1000 + len(hashes) + 1))
    sizes = {"num_tokens": num_tokens, "num_computed_tokens": 0}
    found = watch(f"{name}_match", scheduler.match, request_id, hashes, **sizes).num_tokens
    watch(f"{name}_admit", scheduler.admit, request_id, block_ids, num_loaded_tokens=found)
    changed = (
        []
        if found
        else [
            ScheduledRequest(
                request_id=request_id,
                block_ids=block_ids,
                block_hashes=hashes,
                num_prompt_tokens=num_tokens,
                num_computed_tokens=num_tokens,
            )
        ]
    )
    plan = watch(f"{name}_plan", scheduler.plan_step, changed)
    (job,) = plan.of(JobKind.LOAD) or plan.of(JobKind.SAVE)
    assert job.num_blocks == len(hashes)
    report = StepReport(
        worker_id=0,
        results=(JobResult(job_id=job.job_id, state=JobState.FINISHED),),
        num_host_chunks=scheduler.stats().num_host_chunks,
    )
    watch(f"{name}_report", scheduler.apply, report)
    watch(f"{name}_finish", scheduler.finish, request_id)
    return found


def measure(num_indexed, num_chunks, *, num_requests, seed):
    rng = random.Random(seed)
    config = OffloadConfig.create(num_cpu_chunks=num_indexed, num_staging_blocks=2 * num_chunks)
    scheduler = OffloadScheduler(config, LAYOUT)
    scheduler.apply(StepReport(worker_id=0, results=(), num_host_chunks=num_indexed))
    namespace = hashing.key_namespace(LAYOUT.fingerprint(), blocks_per_chunk=1)
    alone, peer = ChunkIndex(LRUPolicy()), PeerIndex(num_indexed)
    alone.grow(num_indexed)
    resident = []
    for _ in range(num_indexed // num_chunks):
        hashes = chain(rng, num_chunks)
        keys = [h + namespace for h in hashes]
        scheduler._index.complete(keys, scheduler._index.allocate(Use(0), keys, range(num_chunks)), success=True)
        fill(alone, peer, keys)
        resident.append(hashes)
    del hashes, keys
    start = time.perf_counter()
    gc.collect()
    collection_s = time.perf_counter() - start

    watch = Stopwatch()
    for i in range(num_requests):
        hashes = rng.choice(resident)
        assert serve(scheduler, watch, "hit", f"hit{i}", fresh(hashes)) == num_chunks * BLOCK_SIZE
        keys = [h + namespace for h in hashes]
        slots = watch("index_lookup", alone.find, keys)
        watch("index_pin", alone.pin, keys)
        watch("index_touch", alone.touch, Use(i), keys, len(keys))
        watch("index_release", alone.unpin, keys)
        keys = fresh(keys)
        assert len(slots) == watch("peer_lookup", peer.lookup, keys) == num_chunks
        watch("peer_touch", peer.touch, keys)
    for i in range(num_requests):
        hashes = chain(rng, num_chunks)
        assert serve(scheduler, watch, "miss", f"miss{i}", fresh(hashes)) == 0
        keys = [h + namespace for h in hashes]
        slots = watch("index_allocate", alone.allocate, Use(num_requests + i), keys, range(num_chunks))
        watch("index_complete", alone.complete, keys, slots, success=True)
        keys = fresh(keys)
        peer.lookup(keys)
        assert len(slots) == len(watch("peer_allocate", peer.allocate, keys)) == num_chunks
        watch("peer_complete", peer.complete, keys)
    assert alone.num_evicted == num_requests * num_chunks
    watch.add("hit", "hit_match", "hit_admit", "hit_plan", "hit_report", "hit_finish")
    watch.add("miss", "miss_match", "miss_admit", "miss_plan", "miss_report", "miss_finish")
    watch.add("index_hit", "index_lookup", "index_pin", "index_touch", "index_release")
    watch.add("index_miss", "index_allocate", "index_complete")
    watch.add("peer_hit", "peer_lookup", "peer_touch")
    watch.add("peer_miss", "peer_allocate", "peer_complete")
    watch.add("both", "hit", "miss")
    watch.add("peer_both", "peer_hit", "peer_miss")
    microseconds = {name: summarize([1e6 * s / num_chunks for s in watch.seconds[name]]) for name in watch.seconds}
    ratios = {
        name: summarize([a / b for a, b in zip(watch.seconds[name], watch.seconds[other], strict=True)])
        for name, other in (
            ("index_hit", "peer_hit"),
            ("index_miss", "peer_miss"),
            ("hit", "peer_hit"),
            ("miss", "peer_miss"),
            ("both", "peer_both"),
        )
    }
    return {"num_indexed": num_indexed, "prompt_chunks": num_chunks, "num_requests": num_requests,
            "us_per_chunk": microseconds, "ratio_to_peer": ratios, "gc_collect_s": collection_s}  # fmt: skip


def memory(num_indexed, num_chunks):
    """Bytes for each indexed chunk, its key included; and what a full garbage collection takes with them."""
    result = {}
    for name in ("ours", "peer"):
        rng = random.Random(0)
        gc.collect()
        tracemalloc.start()
        index, peer = ChunkIndex(LRUPolicy()), PeerIndex(num_indexed)
        index.grow(num_indexed)
        for _ in range(num_indexed // num_chunks):
            keys = [rng.randbytes(24) for _ in range(num_chunks)]
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
    return {"num_indexed": num_indexed, "prompt_chunks": num_chunks, **result}


def summarize(values):
    deciles = statistics.quantiles(values, n=10) if len(values) > 1 else values * 9
    return {"median": statistics.median(values), "p10": deciles[0], "p90": deciles[-1]}


def show(name, figures):
    return f"{name} {figures['median']:.2f} ({figures['p10']:.2f}-{figures['p90']:.2f})"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-indexed", type=int, nargs="+", default=[10**3, 10**4, 10**5, 10**6], help="chunks")
    parser.add_argument("--prompt-chunks", type=int, nargs="+", default=[1, 10, 100, 1000, 10000])
    parser.add_argument(
        "--chunks-timed", type=int, default=100_000, help="chunks a point, as far as 15 to 1000 requests allow"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="write the results to this file")
    args = parser.parse_args()
    results = []
    for num_indexed, num_chunks in itertools.product(args.num_indexed, args.prompt_chunks):
        if num_chunks > num_indexed:
            continue
        num_requests = min(max(args.chunks_timed // num_chunks, 15), 1000)
        result = measure(num_indexed, num_chunks, num_requests=num_requests, seed=args.seed)
        results.append(result)
        us, ratios = result["us_per_chunk"], result["ratio_to_peer"]
        print(f"{num_indexed} chunks indexed, prompts of {num_chunks}; us a chunk, median (p10-p90):")
        for names in (
            ("hit", "hit_match", "hit_admit", "hit_plan", "hit_report", "hit_finish"),
            ("miss", "miss_match", "miss_admit", "miss_plan", "miss_report", "miss_finish"),
            ("index_lookup", "index_pin", "index_touch", "index_release", "index_allocate", "index_complete"),
            ("peer_lookup", "peer_touch", "peer_allocate", "peer_complete"),
        ):
            print("   ", ", ".join(show(name, us[name]) for name in names))
        print("    ours / peer:", ", ".join(show(name, ratios[name]) for name in ratios), flush=True)
    sizes = [memory(n, 100) for n in args.num_indexed]
    for size in sizes:
        figures = [
            f"{name} {size[name]['bytes_per_chunk']:.0f} bytes a chunk, gc.collect() {size[name]['gc_collect_s']:.3f} s"
            for name in ("ours", "peer")
        ]
        print(f"{size['num_indexed']} chunks indexed:", ", ".join(figures))
    report = {
        "question": "index cost per chunk",
        "device": platform.processor() or platform.machine(),
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
        "settings": vars(args),
        "quoted_peer_us_per_chunk": QUOTED,
        "results": results,
        "memory": sizes,
    }
    if args.json:
        with open(args.json, "w") as file:
            json.dump(report, file, indent=2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
