"""Which scheduler call takes longest, with a full host tier and long prompts?

The tier is filled by prompts of `--fill-chunks`. Then prompts of each length in `--prompt-chunks` are served, first as
misses, then as hits; a segment of host memory is lost, the cache is reset and partly refilled, and a worker restarts.
Each call is timed separately, in CPU time of its thread, so that other processes matter little. With fewer
`--staging-blocks` than a prompt has, hits and saves are truncated. Garbage collections (Python's defaults) count for
the call that they interrupt; they are also counted and timed separately, by generation.

  python benchmarks/bench_stalls.py --num-chunks 1000000 --policies density lru --json stalls.json
"""

import argparse
import gc
import hashlib
import itertools
import sys
import time
from collections.abc import Sequence
from typing import Any

from common import Spread, Stopwatch, count, make_parser, write_json
from offload_scheduler import BLOCK_SIZE, LAYOUT, computed, finish_jobs

from tpu_offload import BlockHash, OffloadConfig, OffloadScheduler, ScheduledRequest, StepPlan

SEGMENTS = 8  # segments of the host tier; one is lost


class Watch(Stopwatch):
    """Times calls by name, and garbage collections by generation."""

    def __init__(self) -> None:
        super().__init__(time.thread_time)
        self.collections = Stopwatch(time.thread_time)
        self._start_s = 0.0
        gc.callbacks.append(self._on_collection)

    def _on_collection(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._start_s = time.thread_time()
        else:
            self.collections.record(str(info["generation"]), time.thread_time() - self._start_s)

    def close(self) -> dict[str, dict[str, Spread]]:
        gc.callbacks.remove(self._on_collection)
        return {"calls_ms": self.spreads(scale=1e3), "collections_ms": self.collections.spreads(scale=1e3)}


def hash_blocks(seed: int, num_chunks: int) -> list[BlockHash]:
    return [BlockHash(hashlib.blake2b(b"%d.%d" % (seed, i), digest_size=16).digest()) for i in range(num_chunks)]


class Engine:
    """Serves prompts one at a time; copies succeed immediately."""

    def __init__(self, num_chunks: int, *, policy: str, num_staging: int, record_events: bool) -> None:
        config = OffloadConfig.create(
            num_cpu_chunks=num_chunks,
            num_staging_blocks=num_staging,
            metrics_log_interval=0,
            eviction_policy=policy,
            job_timeout_s=1e6,
        )
        self.scheduler = OffloadScheduler(config, LAYOUT, record_events=record_events)
        self.record_events = record_events
        self.num_chunks, self.num_staging = num_chunks, num_staging
        self.life = 1
        self.watch = Watch()
        self.numbers = itertools.count()
        self.apply("first report")

    def apply(self, name: str, plan: StepPlan | None = None, **fields: Any) -> None:
        next_job_id = plan.next_job_id if plan else 0
        report = finish_jobs(
            plan, num_host_slots=(self.num_chunks,), oldest_job_id=next_job_id, incarnation=self.life, **fields
        )
        self.watch(name, self.scheduler.apply, report)

    def step(self, tag: str, changed: Sequence[ScheduledRequest] = ()) -> bool:
        """One step: plan, copies, report, events; returns whether anything was copied."""
        plan = self.watch(f"plan_step {tag}", self.scheduler.plan_step, changed)
        self.apply(f"apply {tag}", plan)
        if self.record_events:
            self.watch(f"take_events {tag}", self.scheduler.take_events)
        self.watch(f"stats {tag}", self.scheduler.stats)
        return bool(plan.jobs)

    def serve(self, tag: str, seed: int, num_chunks: int) -> None:
        """Serves a prompt from match to finish: computes what it does not load, a staging buffer's worth per step."""
        request_id = f"r{next(self.numbers)}"
        hashes = hash_blocks(seed, num_chunks)
        num_tokens, blocks = num_chunks * BLOCK_SIZE + 1, list(range(num_chunks + 1))
        found = self.watch(
            f"match {tag}", self.scheduler.match, request_id, hashes, num_tokens=num_tokens, num_computed_tokens=0
        ).num_tokens
        self.watch(f"admit {tag}", self.scheduler.admit, request_id, [blocks], num_loaded_tokens=found)
        self.step(tag)
        done = found // BLOCK_SIZE
        while done < num_chunks:
            done = min(num_chunks, done + self.num_staging)
            self.step(tag, [computed(request_id, blocks, hashes, num_tokens, done * BLOCK_SIZE)])
        self.end(tag, request_id)

    def serve_at_once(self, tag: str, seed: int, num_chunks: int) -> None:
        """Serves a prompt whose chunks are all offered in one step."""
        request_id = f"r{next(self.numbers)}"
        num_tokens = num_chunks * BLOCK_SIZE
        hashes, blocks = hash_blocks(seed, num_chunks), list(range(num_chunks))
        self.step(tag, [computed(request_id, blocks, hashes, num_tokens, num_tokens)])
        self.end(tag, request_id)

    def end(self, tag: str, request_id: str) -> None:
        while self.step(tag):
            pass
        self.watch(f"finish {tag}", self.scheduler.finish, request_id)


def measure(policy: str, args: argparse.Namespace, *, record_events: bool) -> dict[str, Any]:
    gc.collect()
    engine = Engine(args.num_chunks, policy=policy, num_staging=args.staging_blocks, record_events=record_events)
    seeds = itertools.count(1)
    for _ in range(args.num_chunks // args.fill_chunks):
        engine.serve("while filling", next(seeds), args.fill_chunks)
    for num_chunks in args.prompt_chunks:
        for _ in range(args.repeats):
            engine.serve(f"{num_chunks} new", seed := next(seeds), num_chunks)
            engine.serve(f"{num_chunks} hit", seed, num_chunks)
        engine.serve_at_once(f"{num_chunks} at once", next(seeds), num_chunks)
    num_resident = engine.scheduler.stats().num_resident_chunks
    engine.apply("apply lost segment", lost_slots=((0, 0, args.num_chunks // SEGMENTS),))
    for _ in range(args.num_steps):
        engine.step("after lost segment")
    engine.watch("reset", engine.scheduler.reset)
    for _ in range(args.num_steps):
        engine.step("after reset")
    for _ in range(args.num_chunks // args.fill_chunks // 2):
        engine.serve("after reset", next(seeds), args.fill_chunks)
    engine.life += 1
    engine.apply("apply restart")
    for _ in range(args.num_steps):
        engine.step("after restart")
    return {"policy": policy, "record_events": record_events, "num_resident": num_resident, **engine.watch.close()}


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--num-chunks", type=count, default=10**6, help="size of the host tier")
    parser.add_argument("--policies", nargs="+", default=["density", "lru", "arc", "s3fifo", "wtinylfu"])
    parser.add_argument("--prompt-chunks", type=count, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--fill-chunks", type=count, default=1000, help="chunks of the prompts that fill the tier")
    parser.add_argument("--staging-blocks", type=count, default=512)
    parser.add_argument(
        "--num-steps", type=count, default=300, help="steps timed after a loss, which continue its deferred work"
    )
    parser.add_argument("--repeats", type=count, default=2, help="prompts per length")
    parser.add_argument(
        "--events", nargs="+", choices=["on", "off"], default=["off", "on"], help="whether events are recorded"
    )
    args = parser.parse_args(argv)
    results = []
    for policy, events in itertools.product(args.policies, args.events):
        result = measure(policy, args, record_events=events == "on")
        results.append(result)
        print(f"{policy}, events {events}, {result['num_resident']} chunks; ms per call, max (mean), longest first:")
        for name, times in sorted(result["calls_ms"].items(), key=lambda item: -item[1].max)[:14]:
            print(f"    {name:30s} {times.max:9.2f} ({times.mean:.3f}), {times.num} calls")
        for generation, times in sorted(result["collections_ms"].items()):
            print(f"    collections, generation {generation}: {times.num}, max {times.max:.1f} ms", flush=True)
    write_json(args, question="longest call", results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
