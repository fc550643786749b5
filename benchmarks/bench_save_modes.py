"""What does saving at other times bring, for host tiers smaller and larger than HBM?

The embedded engine serves questions about documents, one after the other. Documents are drawn with a Zipf law, and
some questions are about documents that never come again (--one-off), so that there is something not worth saving. HBM
takes in a part of the documents. For every mode and size of the host tier:

  hbm, host, computed  where the KV of the prompts came from, as shares of their tokens
  gap                  of what could come from the host tier (computed with no tier, not computed with a huge one), how
                       much does: the limit is 1
  saved, loaded        blocks copied for each request

Tokens and log-probabilities of all runs have to be the same.

  python benchmarks/bench_save_modes.py --host-per-hbm 0.25 0.5 1 2 4 --json save_modes.json
"""

import argparse
import json
import platform
import sys
import time

import jax
import numpy as np

from tpu_offload import OffloadConfig
from tpu_offload.engine import Engine, EngineConfig, ModelConfig, Request, SamplingParams

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
    parser.add_argument("--json")
    args = parser.parse_args()
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
    if args.json:
        device = jax.devices()[0]
        report = {
            "device": {"platform": device.platform, "kind": device.device_kind},
            "versions": {"python": platform.python_version(), "jax": jax.__version__},
            "argv": sys.argv[1:],
            "results": results,
        }
        with open(args.json, "w") as file:
            json.dump(report, file, indent=2)


if __name__ == "__main__":
    main()
