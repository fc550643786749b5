"""What does saving at other times bring, for host tiers smaller and larger than HBM?

The embedded engine serves questions about documents, one after the other. Documents are drawn with a Zipf law, and
some questions are about documents that never come again (--one-off), so that there is something not worth saving. HBM
takes in a part of the documents. For every mode and size of the host tier:

  hbm, host, computed  where the KV of the prompts came from, as shares of their tokens
  gap                  of what could come from the host tier (computed with no tier, not computed with a huge one), how
                       much does: the limit is 1
  saved, loaded        blocks copied for each request

Tokens and log-probabilities of all runs have to be the same.

With --evicted-blocks nothing is served. What the scheduler spends then on a prefix of so many blocks that HBM gives up,
all decisions and no copies, is measured: on the first of its evictions, for which all of it is planned to be saved, and
on a later one, when it is there.

  python benchmarks/bench_save_modes.py --policy lru --host-per-hbm 0.25 0.5 1 2 4 --json save_modes.json
  python benchmarks/bench_save_modes.py --evicted-blocks 512 4096
"""

import argparse
import dataclasses
import json
import platform
import statistics
import sys
import time

import jax
import numpy as np

from tpu_offload import CachedPrefix, JobKind, JobResult, JobState, OffloadConfig, OffloadScheduler, StepReport
from tpu_offload.config import DEFAULT_EVICTION_POLICY
from tpu_offload.engine import Engine, EngineConfig, ModelConfig, Request, SamplingParams
from tpu_offload.layout import KVLayout, LayerGroup, LayerGroupKind

MODEL = ModelConfig(vocab_size=96, num_layers=2, d_model=32, num_heads=4, num_kv_heads=2, head_dim=8, d_ff=48)
BLOCK_SIZE, QUESTION, ANSWER = 16, 20, 4


def make_requests(args):
    rng = np.random.default_rng(args.seed)
    tokens = lambda n: tuple(rng.integers(0, MODEL.vocab_size, n).tolist())  # noqa: E731
    documents = [tokens(args.document_tokens) for _ in range(args.num_documents)]
    shares = 1 / np.arange(1, args.num_documents + 1) ** args.zipf
    numbers = rng.choice(args.num_documents, args.num_requests, p=shares / shares.sum())
    once = rng.random(args.num_requests) < args.one_off
    return [
        Request(
            str(i),
            (tokens(args.document_tokens) if new else documents[number]) + tokens(QUESTION),
            SamplingParams(ANSWER),
        )
        for i, (number, new) in enumerate(zip(numbers, once, strict=True))
    ]


def serve(requests, args, **settings):
    """Where the prompts came from, what was copied, and what was answered."""
    engine = Engine(
        MODEL,
        EngineConfig(
            block_size=BLOCK_SIZE,
            num_blocks=args.hbm_blocks,
            max_num_seqs=2,
            max_model_len=args.document_tokens + QUESTION + ANSWER,
            max_num_batched_tokens=128,
        ),
        offload=OffloadConfig.create(metrics_log_interval=0, **settings) if settings else None,
    )
    engine.warm_up()
    engine.wait_for_host_memory()
    counts, answers = dict.fromkeys(("hbm", "host", "computed"), 0), []
    start = time.perf_counter()
    for request in requests:
        engine.add_request(request)
        while engine.has_unfinished:
            for output in engine.step():
                if output.stats:
                    answers.append((output.tokens, output.logprobs))
                    for source in counts:
                        counts[source] += getattr(output.stats.prompt_tokens, source)
    seconds = time.perf_counter() - start
    total = sum(counts.values())
    found = {source: count / total for source, count in counts.items()} | {"s": seconds}
    stats = engine.offload_stats()
    if stats:
        found |= {name: getattr(stats, f"{name}_blocks") / len(requests) for name in ("saved", "loaded")}
        found["dropped_blocks"] = stats.dropped_save_blocks
    engine.close()
    return found, answers


def evict(num_blocks, args):
    """Seconds of the scheduler for the first eviction of a prefix, the plan included, and for a later one."""
    shape = (BLOCK_SIZE, MODEL.num_kv_heads, 2, MODEL.head_dim)
    layout = KVLayout(BLOCK_SIZE, (LayerGroup(LayerGroupKind.FULL_ATTENTION, (0, 1), shape, "bfloat16"),))
    scheduler = OffloadScheduler(
        OffloadConfig.create(
            save_on="eviction",
            eviction_policy=args.policy,
            num_staging_blocks=num_blocks,
            num_cpu_chunks=args.repeats * num_blocks,
            metrics_log_interval=0,
        ),
        layout,
    )
    report = StepReport(worker_id=0, results=(), num_host_chunks=args.repeats * num_blocks)
    scheduler.apply(report)
    rng = np.random.default_rng(args.seed)
    seconds = {"first_eviction_s": [], "later_eviction_s": []}
    for _ in range(args.repeats):
        hashes = [rng.bytes(32) for _ in range(num_blocks)]
        blocks = {block_hash: i for i, block_hash in enumerate(hashes)}
        prefix = CachedPrefix(
            block_hashes=hashes, num_blocks=num_blocks, block_of=blocks.get, num_prompt_tokens=num_blocks * BLOCK_SIZE
        )
        start = time.perf_counter()
        scheduler.evict(prefix)
        plan = scheduler.plan_step()
        seconds["first_eviction_s"].append(time.perf_counter() - start)
        assert sum(len(job.block_ids) for job in plan.of(JobKind.EARLY_SAVE)) == num_blocks
        results = tuple(JobResult(job_id=job.job_id, state=JobState.FINISHED) for job in plan.of(JobKind.EARLY_SAVE))
        scheduler.apply(StepReport(worker_id=0, results=results, num_host_chunks=report.num_host_chunks))
        later = [dataclasses.replace(prefix, num_blocks=num_blocks - i) for i in range(1, min(num_blocks, 51))]
        start = time.perf_counter()
        for shorter in later:  # HBM gives up the tail first, block by block
            scheduler.evict(shorter)
        seconds["later_eviction_s"].append((time.perf_counter() - start) / len(later))
        assert not scheduler.plan_step().of(JobKind.EARLY_SAVE)
    return {name: statistics.median(values) for name, values in seconds.items()}


def measure_evictions(args):
    results = []
    for num_blocks in args.evicted_blocks:
        results.append({"num_blocks": num_blocks} | evict(num_blocks, args))
        first_s, later_s = results[-1]["first_eviction_s"], results[-1]["later_eviction_s"]
        print(
            f"prefix of {num_blocks} blocks: first eviction {1e3 * first_s:.2f} ms, a later one {1e6 * later_s:.1f} us"
        )
    return results


def compare_modes(args):
    requests = make_requests(args)
    plain, answers = serve(requests, args)
    most, _ = serve(requests, args, num_cpu_chunks=20 * args.num_requests)
    print(f"without a host tier {plain['computed']:.3f} is computed, with a huge one {most['computed']:.3f}")
    results = [{"mode": None, "host_per_hbm": 0} | plain, {"mode": None, "host_per_hbm": None} | most]
    for share in args.host_per_hbm:
        for mode in args.modes:
            events, _, sightings = mode.partition(":")
            found, said = serve(
                requests,
                args,
                save_on=events,
                save_after_sightings=int(sightings or 1),
                eviction_policy=args.policy,
                num_cpu_chunks=max(1, round(share * args.hbm_blocks)),
            )
            assert said == answers, f"{mode} changes what is answered"
            found["gap"] = (plain["computed"] - found["computed"]) / (plain["computed"] - most["computed"])
            results.append({"mode": mode, "host_per_hbm": share} | found)
            print(
                f"host {share:4g} x HBM, {mode:12}: hbm {found['hbm']:.3f}, host {found['host']:.3f}, computed "
                f"{found['computed']:.3f}, gap {found['gap']:.2f}, blocks a request saved {found['saved']:.2f}, "
                f"loaded {found['loaded']:.2f}",
                flush=True,
            )
    return results


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", default=["compute", "compute:2", "eviction", "eviction:2"])
    parser.add_argument("--host-per-hbm", type=float, nargs="+", default=[0.25, 0.5, 1, 2, 4])
    parser.add_argument("--hbm-blocks", type=int, default=100)
    parser.add_argument("--num-documents", type=int, default=60)
    parser.add_argument("--document-tokens", type=int, default=160)
    parser.add_argument("--num-requests", type=int, default=600)
    parser.add_argument("--zipf", type=float, default=0.8)
    parser.add_argument("--one-off", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--policy", default=DEFAULT_EVICTION_POLICY.value, help="eviction policy of the host tier")
    parser.add_argument("--evicted-blocks", type=int, nargs="+", metavar="N", help="measure evictions instead")
    parser.add_argument("--repeats", type=int, default=25, help="evictions of each length")
    parser.add_argument("--json")
    args = parser.parse_args()
    results = measure_evictions(args) if args.evicted_blocks else compare_modes(args)
    if args.json:
        device = jax.devices()[0]
        report = {
            "device": {"platform": device.platform, "kind": device.device_kind},
            "versions": {"python": platform.python_version(), "jax": jax.__version__},
            "policy": args.policy,
            "argv": sys.argv[1:],
            "results": results,
        }
        with open(args.json, "w") as file:
            json.dump(report, file, indent=2)


if __name__ == "__main__":
    main()
