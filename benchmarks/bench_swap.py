"""What does it take to swap a request out and back, beside a memcpy of its bytes and beside computing it again?

The embedded engine's model with its caches, and the library's scheduler and worker. For requests of several lengths,
taking turns, so that a machine that slows down slows all of them:

  decide     choosing the victim among --num-running requests, `swap_out` and its plan, on the scheduler's thread
  out, back  from the dispatch of the copy until it is over
  memcpy     of as many bytes that no cache has; the limit of `out` and of `back`
  recompute  prefill of as many tokens, in steps of --max-num-batched-tokens

  python benchmarks/bench_swap.py --num-tokens 64 512 4096 --rounds 15 --json swap.json
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time

import jax
import numpy as np

from tpu_offload import Candidate, KVLayout, OffloadConfig, OffloadScheduler, OffloadWorker, choose_victims
from tpu_offload.engine import EngineConfig, ModelConfig, SamplingParams
from tpu_offload.engine.batch import TokenSpan
from tpu_offload.engine.runner import ModelRunner

GREEDY = SamplingParams(1)


class Bench:
    def __init__(self, args):
        self.args = args
        longest = max(args.num_tokens)
        num_blocks = 2 * -(-longest // args.block_size) + 2 * args.num_running
        self.engine = EngineConfig(
            block_size=args.block_size,
            num_blocks=num_blocks,
            max_num_seqs=4,
            max_model_len=longest + 1,
            max_num_batched_tokens=args.max_num_batched_tokens,
        )
        self.model = ModelConfig(num_layers=args.num_layers)
        self.runner = ModelRunner(self.model, self.engine)
        self.runner.warm_up()
        self.layout = KVLayout.from_caches(self.runner.kv_caches, block_size=args.block_size)
        config = OffloadConfig.create(swap_gb="auto", swap_mode="swap", num_cpu_chunks=0)
        self.scheduler = OffloadScheduler(config, self.layout)
        self.worker = OffloadWorker(config, self.layout, self.runner.kv_caches)
        self.worker.wait_until_allocated()
        self.scheduler.apply(self.worker.poll())
        self.tokens = np.random.default_rng(0).integers(0, self.model.vocab_size, longest).tolist()
        self.num_requests = 0
        size = max(2**28, 4 * num_blocks * self.layout.block_nbytes)
        self.source, self.sink = np.ones(size, np.uint8), np.ones(size, np.uint8)

    def measure(self, num_tokens):
        """Seconds of each part, once."""
        swap = self.scheduler.swap
        num_blocks = -(-num_tokens // self.args.block_size)
        blocks, target = list(range(num_blocks)), list(range(num_blocks, 2 * num_blocks))
        hashes = [os.urandom(16) for _ in blocks]  # nobody has these blocks
        name = f"r{self.num_requests}"
        self.num_requests += 1
        last = self.engine.num_blocks
        candidates = [
            Candidate(request_id=f"old{i}", block_ids=[[last - 2 * i - 1, last - 2 * i - 2]], num_new_blocks=[1])
            for i in range(self.args.num_running)
        ]
        candidates.append(Candidate(request_id=name, block_ids=[blocks], num_new_blocks=[0]))
        seconds = {}
        start = time.perf_counter()
        (victim,) = choose_victims(candidates, num_free=[0]) if num_blocks >= self.args.num_running else (name,)
        assert victim == name
        assert swap.swap_out(name, [blocks], hashes, num_computed_tokens=num_tokens)
        plan = self.scheduler.plan_step()
        seconds["decide"] = time.perf_counter() - start
        seconds["out"] = self.copy(plan)
        assert swap.swap_in(name, [target])
        seconds["back"] = self.copy(self.scheduler.plan_step())
        nbytes = num_blocks * self.layout.block_nbytes
        at = self.num_requests % (len(self.source) // nbytes) * nbytes
        source, sink = self.source[at : at + nbytes], self.sink[at : at + nbytes]
        start = time.perf_counter()
        np.copyto(sink, source)
        seconds["memcpy"] = time.perf_counter() - start
        start = time.perf_counter()
        for at in range(0, num_tokens, self.args.max_num_batched_tokens):
            run = TokenSpan(
                self.tokens[at : min(num_tokens, at + self.args.max_num_batched_tokens)], at, blocks, GREEDY
            )
            output = self.runner.step([run])
        output.tokens.block_until_ready()
        seconds["recompute"] = time.perf_counter() - start
        return seconds

    def copy(self, plan):
        jax.block_until_ready(self.runner.kv_caches)
        start = time.perf_counter()
        self.runner.kv_caches = self.worker.begin_step(plan, self.runner.kv_caches)
        report = self.worker.poll(wait=True)
        seconds = time.perf_counter() - start
        (result,) = report.results
        assert not result.error
        self.scheduler.apply(report)
        return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-tokens", type=int, nargs="+", default=[64, 512, 4096])
    parser.add_argument("--num-running", type=int, default=16, help="other requests that hold blocks")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--num-layers", type=int, default=ModelConfig().num_layers)
    parser.add_argument("--max-num-batched-tokens", type=int, default=256)
    parser.add_argument("--json")
    args = parser.parse_args()
    bench = Bench(args)
    rounds = {n: [] for n in args.num_tokens}
    for i in range(args.rounds + 2):
        for n in args.num_tokens:
            seconds = bench.measure(n)
            if i >= 2:  # the first two compile, and touch memory
                rounds[n].append(seconds)
    results = []
    for n, measured in rounds.items():
        nbytes = -(-n // args.block_size) * bench.layout.block_nbytes
        row = {"num_tokens": n, "nbytes": nbytes, "rounds": measured}
        parts = []
        for name in measured[0]:
            times = sorted(1e3 * seconds[name] for seconds in measured)
            row[f"{name}_ms"] = statistics.median(times)
            parts.append(f"{name} {statistics.median(times):.3f} ({times[0]:.3f}-{times[-1]:.3f})")
        row["recompute_per_swap"] = statistics.median(s["recompute"] / (s["out"] + s["back"]) for s in measured)
        row["memcpy_per_copy"] = statistics.median(2 * s["memcpy"] / (s["out"] + s["back"]) for s in measured)
        results.append(row)
        print(f"{n} tokens, {nbytes / 2**20:.2f} MiB, ms: {', '.join(parts)}")
        print(
            f"  a swap out and back takes 1/{row['recompute_per_swap']:.1f} of recompute and runs at "
            f"{row['memcpy_per_copy']:.2f} of memcpy"
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
