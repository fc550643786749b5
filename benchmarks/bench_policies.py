"""What does an eviction policy cost per chunk and per request, compared with LRU?

Each policy has its own index, and all serve the same requests, interleaved in slices, so that changes in machine load
affect all of them. A request looks up its prefix, touches what it uses, saves what is missing and touches all of it
again. `index` is the time for all of that; `policy` is the time inside the policy's calls, including the index's part
of an eviction; `no policy` is the difference. The ratio of `index` to LRU is what an engine would see.

Requests are those of a trace (`--trace`) and synthetic ones, half of which repeat a resident prompt.

  python benchmarks/bench_policies.py --trace conversation_trace.jsonl --json policies.json
"""

import random
import sys
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from common import Spread, Stopwatch, count, in_turn, make_parser, write_json

from tpu_offload import ChunkKey, EvictionPolicy, Residents, Use
from tpu_offload.core.chunk_table import Entries
from tpu_offload.core.index import ChunkIndex
from tpu_offload.core.policies import POLICIES, PriorityPolicy
from tpu_offload.sim import read_traces

type Prompts = list[list[ChunkKey]]
type Figures = dict[str, Spread]


class TimedPolicy(EvictionPolicy):
    """Adds up the seconds inside a policy's calls."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.watch = Stopwatch()

    @property
    def seconds(self) -> float:
        return sum(map(sum, self.watch.seconds.values()))

    def insert(self, use: Use, keys: Sequence[ChunkKey], parent: ChunkKey | None) -> None:
        self.watch("insert", self.policy.insert, use, keys, parent)

    def touch(self, use: Use, keys: Sequence[ChunkKey], num_chunks: int, residents: Residents) -> None:
        self.watch("touch", self.policy.touch, use, keys, num_chunks, residents)

    def evict(self, num_chunks: int, residents: Residents) -> None:
        self.watch("evict", self.policy.evict, num_chunks, residents)

    def resize(self, num_chunks: int) -> None:
        self.policy.resize(num_chunks)

    def remove(self, key: ChunkKey, parent: ChunkKey | None) -> None:
        self.policy.remove(key, parent)

    def became_leaf(self, key: ChunkKey) -> None:
        self.policy.became_leaf(key)

    def clear(self) -> list[Entries]:
        return self.policy.clear()

    def check_invariants(self, leaves: Collection[ChunkKey], residents: Residents) -> None:
        self.policy.check_invariants(leaves, residents)


class Server:
    """An index with one policy."""

    def __init__(self, make: Callable[[], EvictionPolicy], num_chunks: int) -> None:
        self.policy = TimedPolicy(make())
        self.index = ChunkIndex(self.policy)
        self.index.grow(num_chunks)
        self.num_served = 0

    def serve(self, prompts: Prompts) -> tuple[float, float]:
        """Returns the total seconds and those inside the policy."""
        self.policy.watch.seconds.clear()
        start = time.perf_counter()
        index = self.index
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
        return time.perf_counter() - start, self.policy.seconds


def read_trace(path: str) -> tuple[Prompts, int]:
    trace = read_traces([Path(path)])
    return [[trace.keys[block] for block in r.blocks] for r in trace.requests if r.blocks], trace.num_unique_blocks


def make_requests(rng: random.Random, num_chunks: int, prompt_chunks: int, num_requests: int) -> tuple[Prompts, int]:
    """Prompts that fill the tier, and the requests after that."""

    def new() -> list[ChunkKey]:
        return [ChunkKey(rng.randbytes(24)) for _ in range(prompt_chunks)]

    resident = [new() for _ in range(num_chunks // prompt_chunks)]
    requests = [rng.choice(resident) if i % 2 else new() for i in range(num_requests)]
    return resident + requests, len(resident)


def measure(
    makers: dict[str, Callable[[], EvictionPolicy]],
    prompts: Prompts,
    num_chunks: int,
    *,
    num_warm: int,
    num_slices: int,
) -> dict[str, Figures]:
    """Figures by policy; the first `num_warm` requests are not timed."""
    servers = {name: Server(make, num_chunks) for name, make in makers.items()}
    for server in servers.values():
        server.serve(prompts[:num_warm])
    rest = prompts[num_warm:]
    size = -(-len(rest) // num_slices)
    slices = [rest[i : i + size] for i in range(0, len(rest), size)]
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in servers}
    for i, part in enumerate(slices):
        for name in in_turn(list(servers), i):
            seconds[name].append(servers[name].serve(part))
    results: dict[str, Figures] = {name: {} for name in servers}
    for name, figures in results.items():
        for place, kind in enumerate(("index", "policy")):
            us = [1e6 * pair[place] for pair in seconds[name]]
            lru_us = [1e6 * pair[place] for pair in seconds["lru"]]
            figures |= {
                f"{kind}_us_per_request": Spread.of(t / len(part) for t, part in zip(us, slices, strict=True)),
                f"{kind}_us_per_chunk": Spread.of(t / sum(map(len, part)) for t, part in zip(us, slices, strict=True)),
                f"{kind}_ratio_to_lru": Spread.of(t / lru for t, lru in zip(us, lru_us, strict=True)),
            }
    return results


def show(title: str, results: dict[str, Figures]) -> None:
    print(f"{title}; median (p10-p90):")
    for name, figures in results.items():
        cells = [
            f"{kind} {figures[f'{kind}_us_per_chunk'].text()} us/chunk {figures[f'{kind}_us_per_request'].text(1)} "
            f"us/request {figures[f'{kind}_ratio_to_lru'].text()} x lru"
            for kind in ("index", "policy")
        ]
        print(f"  {name:20}", " | ".join(cells), flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=POLICIES, help="beside lru")
    parser.add_argument("--trace", help="Mooncake JSONL; without it synthetic requests only")
    parser.add_argument(
        "--share",
        type=float,
        nargs="+",
        default=[0.01, 0.05, 0.2],
        help="size of the tier as a share of the unique blocks",
    )
    parser.add_argument(
        "--num-chunks", type=count, nargs="+", default=[10_000, 100_000], help="synthetic: size of the tier"
    )
    parser.add_argument(
        "--prompt-chunks", type=count, nargs="+", default=[1, 20, 200], help="synthetic: chunks per prompt"
    )
    parser.add_argument(
        "--chunks-timed", type=count, default=100_000, help="synthetic: chunks of all requests together"
    )
    parser.add_argument("--slices", type=count, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    makers: dict[str, Callable[[], EvictionPolicy]] = {
        name: POLICIES[name] for name in dict.fromkeys(["lru", *args.policies])
    }
    makers["lru with priorities"] = lambda: PriorityPolicy(POLICIES["lru"])
    results: list[dict[str, object]] = []
    if args.trace:
        prompts, num_unique = read_trace(args.trace)
        for share in args.share:
            figures = measure(
                makers, prompts, int(share * num_unique), num_warm=len(prompts) // 4, num_slices=args.slices
            )
            show(f"trace, {share:.1%} of unique blocks", figures)
            results.append({"requests": "trace", "share": share, "policies": figures})
    for num_chunks in args.num_chunks:
        for prompt_chunks in args.prompt_chunks:
            num_requests = max(args.chunks_timed // prompt_chunks, args.slices)
            rng = random.Random(args.seed)
            prompts, num_warm = make_requests(rng, num_chunks, prompt_chunks, num_requests)
            figures = measure(makers, prompts, num_chunks, num_warm=num_warm, num_slices=args.slices)
            show(f"synthetic, {num_chunks} chunks, prompts of {prompt_chunks}", figures)
            row = {"requests": "synthetic", "num_chunks": num_chunks, "prompt_chunks": prompt_chunks}
            results.append({**row, "policies": figures})
    write_json(args, question="cost of eviction policies compared with LRU", results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
