"""What does an eviction policy cost per chunk and per request, compared with LRU?

Each policy has its own index, and all serve the same requests, interleaved in slices, so that changes in machine load
affect all of them. A request looks up its prefix, touches what it uses, saves what is missing and touches all of it
again. `index` is the time for all of that; `policy` is the time inside the policy's calls, including the index's part
of an eviction; `no policy` is the difference. The ratio of `index` to LRU is what an engine would see.

Requests are those of a trace (`--trace`) and synthetic ones, half of which repeat a resident prompt.

`--steady` asks whether cost grows with the tier: at each of these sizes each policy has a process of its own, in which
as many chunks are saved as seven tiers have, so that all that a policy remembers of evicted chunks is full. Then the
processes serve in turn. Memory is what the process has grown by, so the keys count; it is that of index and policy per
chunk that fits the tier. Time is CPU time; a pause of the garbage collector is in the slice in which it comes, and how
long one over everything takes is measured apart.

  python benchmarks/bench_policies.py --trace conversation_trace.jsonl --json policies.json
  python benchmarks/bench_policies.py --policies density --num-chunks --steady 10000 100000 1000000
"""

import argparse
import contextlib
import gc
import multiprocessing
import random
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import psutil
from common import Spread, Stopwatch, count, in_turn, make_parser, write_json

from tpu_offload import ChunkKey, EvictionPolicy, Residents, Use
from tpu_offload.core.chunk_table import Entries
from tpu_offload.core.index import ChunkIndex
from tpu_offload.core.policies import POLICIES, PriorityPolicy
from tpu_offload.sim import read_traces
from tpu_offload.types import Pool

type Prompts = list[list[ChunkKey]]
type Figures = dict[str, Spread]

_FILLS = 7  # tiers of new chunks before `--steady` is timed: one is resident, and density tracks four


class TimedPolicy(EvictionPolicy):
    """Adds up the seconds inside a policy's calls."""

    def __init__(self, policy: EvictionPolicy, clock: Callable[[], float]) -> None:
        self.policy = policy
        self.watch = Stopwatch(clock)

    @property
    def seconds(self) -> float:
        return sum(map(sum, self.watch.seconds.values()))

    def insert(self, use: Use, keys: Sequence[ChunkKey], parent: ChunkKey | None, depth: int) -> None:
        self.watch("insert", self.policy.insert, use, keys, parent, depth)

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
    """An index with one policy; `clock` in seconds."""

    def __init__(
        self,
        make: Callable[[], EvictionPolicy],
        num_chunks: int,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._clock = clock
        self.policy = TimedPolicy(make(), clock)
        self.index = ChunkIndex(self.policy)
        self.index.grow(Pool.CHUNKS, num_chunks)
        self.num_served = 0

    def serve(self, prompts: Prompts) -> tuple[float, float]:
        """Returns the total seconds and those inside the policy."""
        self.policy.watch.seconds.clear()
        start = self._clock()
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
        return self._clock() - start, self.policy.seconds


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


class Slice(NamedTuple):
    """What serving a slice took: microseconds by chunk or request, and the longest request in milliseconds."""

    index_us_per_chunk: float
    policy_us_per_chunk: float
    evict_us_per_evicted_chunk: float
    longest_ms: float


class SteadyServer:
    """A full tier; half of its requests repeat one of the newest prompts, which are half of the tier."""

    def __init__(self, policy: str, num_chunks: int, prompt_chunks: int) -> None:
        self._rng = random.Random(0)
        self._prompt_chunks = prompt_chunks
        self._num_prompts = 0
        self._num_repeated = max(1, num_chunks // prompt_chunks // 2)
        gc.collect()
        before = _resident_bytes()
        self._server = Server(POLICIES[policy], num_chunks, clock=time.thread_time)
        for _ in range(-(-_FILLS * num_chunks // prompt_chunks)):
            self._server.serve([self._new()])
        gc.collect()  # which also untracks tuples of keys
        self.bytes_per_chunk = (_resident_bytes() - before) / num_chunks
        start = time.thread_time()
        gc.collect()
        self.gc_collect_ms = (time.thread_time() - start) * 1e3

    def serve(self, num_chunks: int) -> Slice:
        """Serves requests with so many chunks."""
        server = self._server
        prompts = [self._new() if i % 2 else self._repeated() for i in range(max(2, num_chunks // self._prompt_chunks))]
        num_evicted = server.index.num_evicted
        index_s = policy_s = evict_s = longest_s = 0.0
        for prompt in prompts:
            seconds, in_policy_s = server.serve([prompt])
            index_s, policy_s, longest_s = index_s + seconds, policy_s + in_policy_s, max(longest_s, seconds)
            evict_s += sum(server.policy.watch.seconds.get("evict", ()))
        us = 1e6 / sum(map(len, prompts))
        num_evicted = server.index.num_evicted - num_evicted
        return Slice(index_s * us, policy_s * us, evict_s * 1e6 / max(1, num_evicted), longest_s * 1e3)

    def _new(self) -> list[ChunkKey]:
        self._num_prompts += 1
        return self._keys(self._num_prompts)

    def _repeated(self) -> list[ChunkKey]:
        return self._keys(self._num_prompts - self._rng.randrange(self._num_repeated))

    def _keys(self, number: int) -> list[ChunkKey]:
        """New objects each time, as those of an engine are."""
        data = random.Random(number).randbytes(24 * self._prompt_chunks)
        return [ChunkKey(data[i : i + 24]) for i in range(0, len(data), 24)]


def _resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def serve_steadily(parent: Connection, policy: str, num_chunks: int, prompt_chunks: int) -> None:
    """A process of `--steady`: sends its memory, then serves as many chunks as it is told each time, until none."""
    server = SteadyServer(policy, num_chunks, prompt_chunks)
    parent.send((server.bytes_per_chunk, server.gc_collect_ms))
    while num := parent.recv():
        parent.send(server.serve(num))


@contextlib.contextmanager
def steady_processes(
    cases: Sequence[tuple[str, int]], prompt_chunks: int
) -> Iterator[dict[tuple[str, int], Connection]]:
    """Processes that are ready to serve, by policy and size; they are filled one after the other."""
    context = multiprocessing.get_context("spawn")
    children: dict[tuple[str, int], Connection] = {}
    processes = []
    try:
        for case in cases:
            children[case], theirs = context.Pipe()
            process = context.Process(target=serve_steadily, args=(theirs, *case, prompt_chunks), daemon=True)
            process.start()
            processes.append(process)
            theirs.close()
            children[case].poll(None)
        yield children
        for child in children.values():
            child.send(0)
    finally:
        for process in processes:
            process.join(10)
            process.terminate()


def measure_steady(policies: Sequence[str], prompt_chunks: int, args: argparse.Namespace) -> list[dict[str, object]]:
    """One row for each policy and size."""
    cases = [(policy, size) for size in args.steady for policy in policies]
    slices: dict[tuple[str, int], list[Slice]] = {case: [] for case in cases}
    with steady_processes(cases, prompt_chunks) as children:
        filled = {case: child.recv() for case, child in children.items()}
        for i in range(args.slices):
            for case in in_turn(cases, i):
                children[case].send(-(-args.chunks_timed // args.slices))
                slices[case].append(children[case].recv())
    rows: list[dict[str, object]] = []
    for case in cases:
        policy, size = case
        figures = {name: Spread.of(getattr(one, name) for one in slices[case]) for name in Slice._fields}
        row = {"requests": "steady", "policy": policy, "num_chunks": size, "prompt_chunks": prompt_chunks}
        num_bytes, gc_ms = filled[case]
        rows.append({**row, "bytes_per_chunk": num_bytes, "gc_collect_ms": gc_ms, **figures})
        texts = [
            f"{policy:10} {num_bytes:.0f} bytes/chunk",
            f"index {figures['index_us_per_chunk'].text()} us/chunk",
            f"policy {figures['policy_us_per_chunk'].text()} us/chunk",
            f"evict {figures['evict_us_per_evicted_chunk'].text()} us/evicted chunk",
            f"longest request {figures['longest_ms'].max:.1f} ms",
            f"gc.collect() {gc_ms:.0f} ms",
        ]
        print(f"steady, {size} chunks, prompts of {prompt_chunks}:", " | ".join(texts), flush=True)
    return rows


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
        "--num-chunks", type=count, nargs="*", default=[10_000, 100_000], help="synthetic: sizes of the tier"
    )
    parser.add_argument("--steady", type=count, nargs="+", default=[], help="sizes of the tier in steady state")
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
    for prompt_chunks in args.prompt_chunks if args.steady else ():
        results += measure_steady(list(dict.fromkeys(["lru", *args.policies])), prompt_chunks, args)
    write_json(args, question="cost of eviction policies compared with LRU", results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
