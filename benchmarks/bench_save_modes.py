"""What do the save modes gain, for host tiers smaller and larger than HBM?

The embedded engine serves questions about documents, one at a time. Documents are drawn by a Zipf law, and some are
never repeated (--one-off), so that some blocks are not worth saving. HBM holds a part of the documents. For every mode
and size of the host tier:

  hbm, host, computed  where the KV of the prompts came from, as shares of their tokens
  gap                  share of the avoidable prefill (computed without a tier, not computed with a huge one) that is
                       avoided: the limit is 1
  saved, loaded        blocks copied per request

Tokens and log-probabilities of all runs must be equal.

With --evicted-blocks nothing is served. It measures the scheduler's time (decisions only, no copies) when HBM evicts a
prefix of that many blocks: for the first eviction, which plans to save all of it, and for a later one, when the host
tier has it.

  python benchmarks/bench_save_modes.py --policy lru --host-per-hbm 0.25 0.5 1 2 4 --json save_modes.json
  python benchmarks/bench_save_modes.py --evicted-blocks 512 4096
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from common import Stopwatch, count, make_parser, write_json
from offload_scheduler import BLOCK_SIZE, LAYOUT, finish_jobs

from tpu_offload import BlockHash, CachedPrefix, OffloadConfig, OffloadScheduler
from tpu_offload.config import DEFAULT_EVICTION_POLICY
from tpu_offload.engine import Engine, EngineConfig, ModelConfig, Request, SamplingParams

MODEL = ModelConfig(vocab_size=96, num_layers=2, d_model=32, num_heads=4, num_kv_heads=2, head_dim=8, d_ff=48)
QUESTION, ANSWER = 20, 4

type Answers = list[tuple[tuple[int, ...], tuple[float, ...]]]


def make_requests(args: argparse.Namespace) -> list[Request]:
    rng = np.random.default_rng(args.seed)

    def tokens(num: int) -> tuple[int, ...]:
        return tuple(rng.integers(0, MODEL.vocab_size, num).tolist())

    documents = [tokens(args.document_tokens) for _ in range(args.num_documents)]
    shares = 1 / np.arange(1, args.num_documents + 1) ** args.zipf
    numbers = rng.choice(args.num_documents, args.num_requests, p=shares / shares.sum())
    once = rng.random(args.num_requests) < args.one_off
    return [
        Request(
            request_id=str(i),
            prompt_tokens=(tokens(args.document_tokens) if new else documents[number]) + tokens(QUESTION),
            sampling=SamplingParams(max_tokens=ANSWER),
        )
        for i, (number, new) in enumerate(zip(numbers, once, strict=True))
    ]


def serve(requests: Sequence[Request], args: argparse.Namespace, **settings: Any) -> tuple[dict[str, Any], Answers]:
    """Sources of the prompt tokens, copied blocks, and outputs."""
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
    counts = dict.fromkeys(("hbm", "host", "computed"), 0)
    answers: Answers = []
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
    found: dict[str, Any] = {source: num / total for source, num in counts.items()} | {"s": seconds}
    stats = engine.offload_stats()
    if stats:
        found |= {name: getattr(stats, f"{name}_blocks") / len(requests) for name in ("saved", "loaded")}
        found["dropped_blocks"] = stats.dropped_save_blocks
    engine.close()
    return found, answers


def measure_evictions(args: argparse.Namespace) -> list[dict[str, Any]]:
    results = []
    for num_blocks in args.evicted_blocks:
        seconds = evict(num_blocks, args).spreads(scale=1)
        first_s, later_s = seconds["first_eviction_s"].median, seconds["later_eviction_s"].median
        results.append({"num_blocks": num_blocks, "first_eviction_s": first_s, "later_eviction_s": later_s})
        print(
            f"prefix of {num_blocks} blocks: first eviction {1e3 * first_s:.2f} ms, a later one {1e6 * later_s:.1f} us"
        )
    return results


def evict(num_blocks: int, args: argparse.Namespace) -> Stopwatch:
    """The scheduler's seconds for the first eviction of a prefix, including the plan, and for a later one."""
    num_host_chunks = args.repeats * num_blocks
    scheduler = OffloadScheduler(
        OffloadConfig.create(
            save_on="eviction",
            eviction_policy=args.policy,
            num_staging_blocks=num_blocks,
            num_cpu_chunks=num_host_chunks,
            metrics_log_interval=0,
        ),
        LAYOUT,
    )
    scheduler.apply(finish_jobs(None, num_host_slots=(num_host_chunks,)))
    rng = np.random.default_rng(args.seed)
    watch = Stopwatch()
    for _ in range(args.repeats):
        hashes = [BlockHash(rng.bytes(32)) for _ in range(num_blocks)]
        blocks = {block_hash: i for i, block_hash in enumerate(hashes)}

        def block_of(group_id: int, block_hash: BlockHash, blocks: dict[BlockHash, int] = blocks) -> int | None:
            return blocks.get(block_hash)

        prefix = CachedPrefix(
            block_hashes=hashes,
            num_blocks=num_blocks,
            block_of=block_of,
            num_prompt_tokens=num_blocks * BLOCK_SIZE,
        )
        watch("evict", scheduler.evict, prefix)
        plan = watch("plan", scheduler.plan_step)
        assert sum(job.num_blocks for job in plan.jobs) == num_blocks
        scheduler.apply(finish_jobs(plan, num_host_slots=(num_host_chunks,)))
        later = [dataclasses.replace(prefix, num_blocks=num_blocks - i) for i in range(1, min(num_blocks, 51))]
        start = time.perf_counter()
        for shorter in later:  # HBM evicts the tail first, block by block
            scheduler.evict(shorter)
        watch.record("later_eviction_s", (time.perf_counter() - start) / len(later))
        assert not scheduler.plan_step().jobs
    watch.add("first_eviction_s", "evict", "plan")
    return watch


def compare_modes(args: argparse.Namespace) -> list[dict[str, Any]]:
    requests = make_requests(args)
    plain, answers = serve(requests, args)
    most, _ = serve(requests, args, num_cpu_chunks=20 * args.num_requests)
    print(f"computed without a host tier: {plain['computed']:.3f}, with a huge one: {most['computed']:.3f}")
    results: list[dict[str, Any]] = [
        {"mode": None, "host_per_hbm": 0} | plain,
        {"mode": None, "host_per_hbm": None} | most,
    ]
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
            assert said == answers, f"{mode} changes the outputs"
            found["gap"] = (plain["computed"] - found["computed"]) / (plain["computed"] - most["computed"])
            results.append({"mode": mode, "host_per_hbm": share} | found)
            print(
                f"host {share:4g} x HBM, {mode:12}: hbm {found['hbm']:.3f}, host {found['host']:.3f}, computed "
                f"{found['computed']:.3f}, gap {found['gap']:.2f}, blocks per request saved {found['saved']:.2f}, "
                f"loaded {found['loaded']:.2f}",
                flush=True,
            )
    return results


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--modes", nargs="+", default=["compute", "compute:2", "eviction", "eviction:2"])
    parser.add_argument("--host-per-hbm", type=float, nargs="+", default=[0.25, 0.5, 1, 2, 4])
    parser.add_argument("--hbm-blocks", type=count, default=100)
    parser.add_argument("--num-documents", type=count, default=60)
    parser.add_argument("--document-tokens", type=count, default=160)
    parser.add_argument("--num-requests", type=count, default=600)
    parser.add_argument("--zipf", type=float, default=0.8)
    parser.add_argument("--one-off", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--policy", default=DEFAULT_EVICTION_POLICY.value, help="eviction policy of the host tier")
    parser.add_argument(
        "--evicted-blocks",
        type=count,
        nargs="+",
        metavar="N",
        help="instead measure evictions of prefixes of N blocks, 2 or more",
    )
    parser.add_argument("--repeats", type=count, default=25, help="evictions per length")
    args = parser.parse_args(argv)
    if min(args.evicted_blocks or [2]) < 2:
        parser.error("--evicted-blocks: expected at least 2, a prefix of one block has no later eviction")
    results = measure_evictions(args) if args.evicted_blocks else compare_modes(args)
    write_json(args, question="what save modes gain", results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
