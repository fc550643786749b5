"""What does swapping a request out and in cost, compared with a memcpy of its bytes and with recompute?

Uses the embedded engine's model and caches, and the library's scheduler and worker. Requests of several lengths are
interleaved, so that changes in machine load affect all of them:

  decide     choosing the victim among --num-running requests, `swap_out` and its plan, on the scheduler's thread
  out, back  from the dispatch of the copy until it has ended
  memcpy     of the same number of bytes, not in any CPU cache; the limit of `out` and `back`
  recompute  prefill of the same number of tokens, in steps of --max-num-batched-tokens

  python benchmarks/bench_swap.py --num-tokens 64 512 4096 --rounds 15 --json swap.json
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from common import Stopwatch, count, make_parser, write_json

from tpu_offload import (
    BlockHash,
    Candidate,
    KVLayout,
    OffloadConfig,
    OffloadScheduler,
    OffloadWorker,
    StepPlan,
    choose_victims,
)
from tpu_offload.engine import EngineConfig, ModelConfig, SamplingParams
from tpu_offload.engine.batch import TokenSpan
from tpu_offload.engine.runner import ModelRunner

GREEDY = SamplingParams(max_tokens=1)


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
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

    def measure(self, num_tokens: int) -> dict[str, float]:
        """Measures each part once, in seconds."""
        swap = self.scheduler.swap
        num_blocks = -(-num_tokens // self.args.block_size)
        blocks = list(range(1, num_blocks + 1))
        target = list(range(num_blocks + 1, 2 * num_blocks + 1))
        hashes = [BlockHash(os.urandom(16)) for _ in blocks]  # new blocks, in no cache
        name = f"r{self.num_requests}"
        self.num_requests += 1
        candidates = self.candidates(name, blocks)
        start = time.perf_counter()
        (victim,) = choose_victims(candidates, num_free=[0]) if num_blocks >= self.args.num_running else (name,)
        assert victim == name
        assert swap.swap_out(name, [blocks], hashes, num_computed_tokens=num_tokens)
        plan = self.scheduler.plan_step()
        seconds = {"decide": time.perf_counter() - start}
        seconds["out"] = self.copy(plan)
        assert swap.swap_in(name, [target])
        seconds["back"] = self.copy(self.scheduler.plan_step())
        seconds["memcpy"] = self.memcpy(num_blocks * self.layout.block_nbytes)
        seconds["recompute"] = self.recompute(num_tokens, blocks)
        return seconds

    def candidates(self, name: str, blocks: list[int]) -> list[Candidate]:
        last = self.engine.num_blocks
        others = [
            Candidate(request_id=f"old{i}", block_tables=[[last - 2 * i - 1, last - 2 * i - 2]], num_new_blocks=[1])
            for i in range(self.args.num_running)
        ]
        return [*others, Candidate(request_id=name, block_tables=[blocks], num_new_blocks=[0])]

    def copy(self, plan: StepPlan) -> float:
        jax.block_until_ready(self.runner.kv_caches)
        start = time.perf_counter()
        self.runner.kv_caches = self.worker.begin_step(plan, self.runner.kv_caches)
        report = self.worker.poll(wait=True)
        seconds = time.perf_counter() - start
        (result,) = report.results
        assert not result.error
        self.scheduler.apply(report)
        return seconds

    def memcpy(self, nbytes: int) -> float:
        at = self.num_requests % (len(self.source) // nbytes) * nbytes
        source, sink = self.source[at : at + nbytes], self.sink[at : at + nbytes]
        start = time.perf_counter()
        np.copyto(sink, source)
        return time.perf_counter() - start

    def recompute(self, num_tokens: int, blocks: list[int]) -> float:
        start = time.perf_counter()
        for at in range(0, num_tokens, self.args.max_num_batched_tokens):
            end = min(num_tokens, at + self.args.max_num_batched_tokens)
            run = TokenSpan(self.tokens[at:end], at, [blocks], GREEDY)
            output = self.runner.step([run])
        output.tokens.block_until_ready()
        return time.perf_counter() - start


def summarize(num_tokens: int, nbytes: int, watch: Stopwatch) -> dict[str, Any]:
    """Prints and returns the figures of one length."""
    ms = watch.spreads(scale=1e3)
    watch.add("swap", "out", "back")
    watch.add("two memcpy", "memcpy", "memcpy")
    row: dict[str, Any] = {"num_tokens": num_tokens, "nbytes": nbytes, "seconds": watch.seconds}
    row |= {f"{name}_ms": spread for name, spread in ms.items()}
    row["recompute_per_swap"] = watch.ratio("recompute", "swap")
    row["memcpy_per_copy"] = watch.ratio("two memcpy", "swap")
    parts = ", ".join(f"{name} {spread.range(3)}" for name, spread in ms.items())
    print(f"{num_tokens} tokens, {nbytes / 2**20:.2f} MiB, ms: {parts}")
    print(
        f"  a swap out and in takes 1/{row['recompute_per_swap'].median:.1f} of recompute and runs at "
        f"{row['memcpy_per_copy'].median:.2f} of memcpy"
    )
    return row


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--num-tokens", type=count, nargs="+", default=[64, 512, 4096])
    parser.add_argument("--num-running", type=count, default=16, help="number of other requests that hold blocks")
    parser.add_argument("--rounds", type=count, default=15)
    parser.add_argument("--block-size", type=count, default=16)
    parser.add_argument("--num-layers", type=count, default=ModelConfig().num_layers)
    parser.add_argument("--max-num-batched-tokens", type=count, default=256)
    args = parser.parse_args(argv)
    bench = Bench(args)
    watches = {n: Stopwatch() for n in args.num_tokens}
    for i in range(args.rounds + 2):
        for n, watch in watches.items():
            for name, seconds in bench.measure(n).items():
                if i >= 2:  # the first two compile, and touch memory
                    watch.record(name, seconds)
    results = [
        summarize(n, -(-n // args.block_size) * bench.layout.block_nbytes, watch) for n, watch in watches.items()
    ]
    write_json(args, question="request swap compared with memcpy and recompute", results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
