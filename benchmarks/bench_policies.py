"""What does an eviction policy cost, for each chunk and each request, against LRU?

Every policy has an index of its own, and all serve the same requests in turn, a slice of them at a time, so that a
machine that slows down slows all of them. A request looks its prefix up, says what it uses, saves what is missing and
says again what it used. `index` is all of that; `policy` is what is spent inside the policy's calls, with the index's
part of an eviction. `no policy` is the rest, so the ratio to LRU of `index` is what an engine would see.

Requests are those of a trace (`--trace`, see `../shared/traces`), and synthetic ones: half of them repeat one of the
prompts that the tier holds, half are new.

  python benchmarks/bench_policies.py --trace ../shared/traces/conversation_trace.jsonl --json policies.json
"""

import argparse
import json
import platform
import random
import statistics
import sys
import time
from pathlib import Path

from tpu_offload.core.index import ChunkIndex
from tpu_offload.core.policies import POLICIES, EvictionPolicy, PriorityPolicy, Use
from tpu_offload.sim import read_traces

TIMED = ("insert", "touch", "evict")


class Stopwatch:
    """Adds up the seconds of a policy's calls."""

    def __init__(self, policy):
        self.seconds = 0.0
        for name in TIMED:
            setattr(self, name, self._timed(getattr(policy, name)))
        self.resize, self.remove, self.check_invariants = policy.resize, policy.remove, policy.check_invariants
        self.clear, self.uncover = policy.clear, policy.uncover

    def _timed(self, call):
        def timed(*args):
            start = time.perf_counter()
            call(*args)
            self.seconds += time.perf_counter() - start

        return timed


EvictionPolicy.register(Stopwatch)


class Server:
    """One policy and its index."""

    def __init__(self, make, num_chunks):
        self.policy = Stopwatch(make())
        self.index = ChunkIndex(self.policy)
        self.index.grow(num_chunks)
        self.num_served = 0

    def serve(self, prompts):
        """Returns the seconds for everything and those inside the policy."""
        index, before, start = self.index, self.policy.seconds, time.perf_counter()
        for keys in prompts:
            use = Use(self.num_served)
            self.num_served += 1
            num_found = len(index.find(keys))
            index.touch(use, keys, num_found)
            missing, _ = index.missing(keys, num_found, len(keys))
            if missing:
                own = keys[num_found - 1 : num_found] if num_found else ()
                slots = index.allocate(
                    use, keys, missing, protected=own if len(missing) == len(keys) - num_found else keys
                )
                if slots:
                    index.complete([keys[i] for i in missing[: len(slots)]], slots, success=True)
            index.touch(use, keys, len(keys))
        return time.perf_counter() - start, self.policy.seconds - before


def read_trace(path):
    trace = read_traces([Path(path)])
    return [[trace.keys[block] for block in r.blocks] for r in trace.requests if r.blocks], trace.num_unique_blocks


def make_requests(rng, num_chunks, prompt_chunks, num_requests):
    """What fills the tier, and requests after that."""

    def new():
        return [rng.randbytes(24) for _ in range(prompt_chunks)]

    resident = [new() for _ in range(num_chunks // prompt_chunks)]
    requests = [rng.choice(resident) if i % 2 else new() for i in range(num_requests)]
    return resident + requests, len(resident)


def measure(makers, prompts, num_chunks, num_warm, num_slices):
    """Seconds of each slice by policy; the first `num_warm` requests are not timed."""
    servers = {name: Server(make, num_chunks) for name, make in makers.items()}
    for server in servers.values():
        server.serve(prompts[:num_warm])
    rest = prompts[num_warm:]
    size = -(-len(rest) // num_slices)
    slices = [rest[i : i + size] for i in range(0, len(rest), size)]
    seconds = {name: [] for name in servers}
    names = list(servers)
    for i, part in enumerate(slices):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            seconds[name].append(servers[name].serve(part))
    results = {}
    for name in names:
        results[name] = {}
        for place, kind in enumerate(("index", "policy")):
            times = [pair[place] for pair in seconds[name]]
            results[name][f"{kind}_us_per_request"] = summarize(
                [1e6 * s / len(part) for s, part in zip(times, slices, strict=True)]
            )
            results[name][f"{kind}_us_per_chunk"] = summarize(
                [1e6 * s / sum(map(len, part)) for s, part in zip(times, slices, strict=True)]
            )
            results[name][f"{kind}_ratio_to_lru"] = summarize(
                [s / lru[place] for s, lru in zip(times, seconds["lru"], strict=True)]
            )
    return results


def summarize(values):
    deciles = statistics.quantiles(values, n=10) if len(values) > 1 else values * 9
    return {"median": statistics.median(values), "p10": deciles[0], "p90": deciles[-1]}


def show(title, results):
    print(f"{title}; median (p10-p90):")
    for name, figures in results.items():
        cells = [
            f"{kind} {shown(figures[f'{kind}_us_per_chunk'])} us/chunk {shown(figures[f'{kind}_us_per_request'], 1)} "
            f"us/request {shown(figures[f'{kind}_ratio_to_lru'])} x lru"
            for kind in ("index", "policy")
        ]
        print(f"  {name:20}", " | ".join(cells), flush=True)


def shown(figures, digits=2):
    median, low, high = (f"{figures[name]:.{digits}f}" for name in ("median", "p10", "p90"))
    return f"{median} ({low}-{high})"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=POLICIES, help="beside lru")
    parser.add_argument("--trace", help="Mooncake JSONL; without it synthetic requests only")
    parser.add_argument("--share", type=float, nargs="+", default=[0.01, 0.05, 0.2], help="tier by unique blocks")
    parser.add_argument("--num-chunks", type=int, nargs="+", default=[10_000, 100_000], help="synthetic: the tier")
    parser.add_argument("--prompt-chunks", type=int, nargs="+", default=[1, 20, 200], help="synthetic: a prompt")
    parser.add_argument("--chunks-timed", type=int, default=100_000, help="synthetic: chunks of all requests")
    parser.add_argument("--slices", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="write the results to this file")
    args = parser.parse_args()
    makers = {name: POLICIES[name] for name in dict.fromkeys(["lru", *args.policies])}
    makers["lru with priorities"] = lambda: PriorityPolicy(POLICIES["lru"])
    results = []
    if args.trace:
        prompts, num_unique = read_trace(args.trace)
        for share in args.share:
            figures = measure(makers, prompts, int(share * num_unique), len(prompts) // 4, args.slices)
            show(f"trace, {share:.1%} of unique blocks", figures)
            results.append({"requests": "trace", "share": share, "policies": figures})
    for num_chunks in args.num_chunks:
        for prompt_chunks in args.prompt_chunks:
            num_requests = max(args.chunks_timed // prompt_chunks, args.slices)
            rng = random.Random(args.seed)
            prompts, num_warm = make_requests(rng, num_chunks, prompt_chunks, num_requests)
            figures = measure(makers, prompts, num_chunks, num_warm, args.slices)
            show(f"synthetic, {num_chunks} chunks, prompts of {prompt_chunks}", figures)
            row = {"requests": "synthetic", "num_chunks": num_chunks, "prompt_chunks": prompt_chunks}
            results.append({**row, "policies": figures})
    report = {
        "question": "cost of eviction policies against LRU",
        "device": platform.processor() or platform.machine(),
        "versions": {"python": platform.python_version()},
        "settings": vars(args),
        "results": results,
    }
    if args.json:
        with open(args.json, "w") as file:
            json.dump(report, file, indent=2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
