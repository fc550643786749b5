"""Which call of the scheduler takes longest, with a full host tier and long prompts?

A tier is filled by prompts of `--fill-chunks`. Then prompts of each of `--prompt-chunks` come as new ones, once more as
hits, and leave; a segment of host memory is lost, the cache is reset, filled a little, and a worker starts anew. Each
call is timed alone, in seconds of its thread, so that other programs on the machine count little. With fewer
`--staging-blocks` than a prompt has, hits and saves are cut. Collections of the garbage collector, as Python has it by
default, are part of the call that they interrupt; they are also counted and timed apart, by generation.

  python benchmarks/bench_stalls.py --num-chunks 1000000 --policies density lru --json stalls.json
"""

import argparse
import gc
import hashlib
import itertools
import json
import platform
import sys
import time

import numpy as np

from tpu_offload import (
    BlockHash,
    JobKind,
    JobResult,
    JobState,
    OffloadConfig,
    OffloadScheduler,
    ScheduledRequest,
    StepReport,
)
from tpu_offload.layout import KVLayout, LayerGroup, LayerGroupKind

BLOCK_SIZE = 16
LAYOUT = KVLayout(BLOCK_SIZE, (LayerGroup(LayerGroupKind.FULL_ATTENTION, (0,), (16, 8, 2, 128), "bfloat16"),))
SEGMENTS = 8  # of the host tier; one of them is lost


class Watch:
    """Times calls by name, and collections by generation."""

    def __init__(self):
        self.calls = {}
        self.collections = {generation: [] for generation in range(3)}
        self._start = 0.0
        gc.callbacks.append(self._on_collection)

    def __call__(self, name, function, *args, **kwargs):
        start = time.thread_time()
        result = function(*args, **kwargs)
        self.calls.setdefault(name, []).append((time.thread_time() - start) * 1e3)
        return result

    def _on_collection(self, phase, info):
        if phase == "start":
            self._start = time.thread_time()
        else:
            self.collections[info["generation"]].append((time.thread_time() - self._start) * 1e3)

    def close(self):
        gc.callbacks.remove(self._on_collection)
        return {
            "calls_ms": {name: summarize(times) for name, times in sorted(self.calls.items())},
            "collections_ms": {str(g): summarize(times) for g, times in self.collections.items() if times},
        }


def hash_blocks(seed, num_chunks):
    return [BlockHash(hashlib.blake2b(b"%d.%d" % (seed, i), digest_size=16).digest()) for i in range(num_chunks)]


def summarize(times):
    return {"count": len(times), "max": max(times), "mean": sum(times) / len(times)}


class Engine:
    """Serves prompts, one at a time; copies succeed at once."""

    def __init__(self, num_chunks, *, policy, num_staging, record_events):
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

    def close(self):
        return self.watch.close()

    def apply(self, name, *, results=(), next_job_id=0, **fields):
        report = StepReport(
            worker_id=0,
            results=results,
            num_host_chunks=self.num_chunks,
            oldest_job_id=next_job_id,
            incarnation=self.life,
            **fields,
        )
        self.watch(name, self.scheduler.apply, report)

    def step(self, tag, changed=()):
        """One step: plan, copies, report, events; returns whether there was anything to copy."""
        plan = self.watch(f"plan_step {tag}", self.scheduler.plan_step, changed)
        jobs = (*plan.of(JobKind.LOAD), *plan.of(JobKind.SAVE), *plan.of(JobKind.EARLY_SAVE))
        results = tuple(JobResult(job_id=job.job_id, state=JobState.FINISHED) for job in jobs)
        self.apply(f"apply {tag}", results=results, next_job_id=plan.next_job_id)
        if self.record_events:
            self.watch(f"take_events {tag}", self.scheduler.take_events)
        self.watch(f"stats {tag}", self.scheduler.stats)
        return bool(jobs)

    def serve(self, tag, seed, num_chunks):
        """A prompt from its match to its end: what it does not load it computes, a buffer's worth a step."""
        request_id = f"r{next(self.numbers)}"
        hashes = hash_blocks(seed, num_chunks)
        scheduler, num_tokens, blocks = self.scheduler, num_chunks * BLOCK_SIZE + 1, list(range(num_chunks + 1))
        match = {"num_tokens": num_tokens, "num_computed_tokens": 0}
        found = self.watch(f"match {tag}", scheduler.match, request_id, hashes, **match).num_tokens
        self.watch(f"admit {tag}", scheduler.admit, request_id, blocks, num_loaded_tokens=found)
        self.step(tag)
        done = found // BLOCK_SIZE
        while done < num_chunks:
            done = min(num_chunks, done + self.num_staging)
            self.step(
                tag,
                [
                    ScheduledRequest(
                        request_id=request_id,
                        block_ids=blocks,
                        block_hashes=hashes,
                        num_prompt_tokens=num_tokens,
                        num_computed_tokens=done * BLOCK_SIZE,
                    )
                ],
            )
        while self.step(tag):
            pass
        self.watch(f"finish {tag}", scheduler.finish, request_id)

    def serve_at_once(self, tag, seed, num_chunks):
        """A prompt all of which is on offer in one step."""
        request_id = f"r{next(self.numbers)}"
        hashes = hash_blocks(seed, num_chunks)
        num_tokens, blocks = num_chunks * BLOCK_SIZE, list(range(num_chunks))
        self.step(
            tag,
            [
                ScheduledRequest(
                    request_id=request_id,
                    block_ids=blocks,
                    block_hashes=hashes,
                    num_prompt_tokens=num_tokens,
                    num_computed_tokens=num_tokens,
                )
            ],
        )
        while self.step(tag):
            pass
        self.watch(f"finish {tag}", self.scheduler.finish, request_id)


def measure(policy, args, *, record_events):
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
    engine.apply("apply lost segment", lost_slots=((0, args.num_chunks // SEGMENTS),))
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
    return {"policy": policy, "record_events": record_events, "num_resident": num_resident, **engine.close()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-chunks", type=int, default=10**6, help="size of the host tier")
    parser.add_argument("--policies", nargs="+", default=["density", "lru", "arc", "s3fifo", "wtinylfu"])
    parser.add_argument("--prompt-chunks", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--fill-chunks", type=int, default=1000, help="chunks of the prompts that fill the tier")
    parser.add_argument("--staging-blocks", type=int, default=512)
    parser.add_argument(
        "--num-steps", type=int, default=300, help="steps timed after a loss, which go on with its work"
    )
    parser.add_argument("--repeats", type=int, default=2, help="prompts of each length")
    parser.add_argument("--events", nargs="+", choices=["on", "off"], default=["off", "on"], help="whether recorded")
    parser.add_argument("--json", help="write the results to this file")
    args = parser.parse_args()
    results = []
    for policy, events in itertools.product(args.policies, args.events):
        result = measure(policy, args, record_events=events == "on")
        results.append(result)
        print(
            f"{policy}, events {events}, {result['num_resident']} chunks; ms of calls, max (mean), the longest first:"
        )
        for name, times in sorted(result["calls_ms"].items(), key=lambda item: -item[1]["max"])[:14]:
            print(f"    {name:30s} {times['max']:9.2f} ({times['mean']:.3f}), {times['count']} calls")
        for generation, times in result["collections_ms"].items():
            print(f"    collections, generation {generation}: {times['count']}, max {times['max']:.1f} ms", flush=True)
    report = {
        "question": "longest call",
        "device": platform.processor() or platform.machine(),
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
        "settings": vars(args),
        "results": results,
    }
    if args.json:
        with open(args.json, "w") as file:
            json.dump(report, file, indent=2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
