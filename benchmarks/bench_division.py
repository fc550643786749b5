"""What is it worth that memory moves between chunks and states: the hit rate, beside every fixed division?

The scheduler alone serves made-up traffic that changes: many short conversations, where states need most of the host
tier; few long documents, where KV does; and the conversations again. Then, from an empty tier, prompts of which states
and KV need the same. HBM keeps nothing. A state takes as much as the KV of 12,288 tokens, about as in Qwen3.5-397B with
an fp8 KV cache. No bytes are copied.

  python benchmarks/bench_division.py --json division.json
"""

import dataclasses
import hashlib
import operator
import random
import sys
from collections.abc import Sequence
from typing import Any

from common import count, make_parser, print_table, write_json
from offload_scheduler import finish_jobs

from tpu_offload import (
    BlockHash,
    KVLayout,
    LayerGroup,
    LayerGroupKind,
    OffloadConfig,
    OffloadScheduler,
    PageGroup,
    ScheduledRequest,
    StepPlan,
)
from tpu_offload.core.index import PoolBalance

BLOCK_SIZE = 1024
KV_NBYTES = 15_728_640  # of a block
STATE_BLOCKS = 12  # a state takes as much as the KV of so many blocks
GB = 2**30
LAYOUT = KVLayout(
    block_size=BLOCK_SIZE,
    groups=(
        LayerGroup(
            kind=LayerGroupKind.FULL_ATTENTION,
            page_groups=(PageGroup(layer_ids=(0,), page_shape=(KV_NBYTES,), dtype="int8"),),
        ),
        LayerGroup(
            kind=LayerGroupKind.STATE,
            page_groups=(PageGroup(layer_ids=(1,), page_shape=(KV_NBYTES * STATE_BLOCKS,), dtype="int8"),),
        ),
    ),
    null_block=0,
)


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Requests that return at random.

    Attributes:
      name: of the phase.
      num_prompts: that many are in use at a time.
      num_blocks: of a prompt at first.
      more_blocks: that each request adds to its prompt.
      num_turns: requests of a prompt; then another one takes its place.
    """

    name: str
    num_prompts: int
    num_blocks: int
    more_blocks: int = 0
    num_turns: int = 10**9


CONVERSATIONS = Traffic("conversations", num_prompts=800, num_blocks=2, more_blocks=1, num_turns=6)
DOCUMENTS = Traffic("documents", num_prompts=160, num_blocks=90)
BALANCED = Traffic("balanced", num_prompts=600, num_blocks=STATE_BLOCKS)
PHASES = (CONVERSATIONS, DOCUMENTS, CONVERSATIONS)


class Server:
    """Serves requests with the scheduler and a worker that does everything at once.

    Args:
      share: of the host tier that states have at first.
      host_gb: size of the host tier.
      moves: whether memory moves.
      policy: eviction policy of chunks.
    """

    def __init__(self, *, share: float, host_gb: float, moves: bool, policy: str) -> None:
        config = OffloadConfig.create(
            host_gb=host_gb, state_share=share, eviction_policy=policy, save_path="direct", load_path="direct"
        )
        segments = config.host_segments(LAYOUT)
        assert segments is not None
        self.segments = segments
        self.sizes = segments.divide(segments.num_segments, (share,))
        self.division_id = 0
        self.scheduler = OffloadScheduler(config, LAYOUT)
        if not moves:  # as if nothing were ever evicted: there is no setting for it
            pools: Any = self.scheduler._pools
            pools._moves._balance = PoolBalance((1, 1), unit=1)
        self.num_requests = 0
        self.run(self.scheduler.plan_step())

    def serve(self, hashes: Sequence[BlockHash]) -> int:
        """Serves a prompt of these blocks and one more token; returns how many blocks are loaded."""
        name, self.num_requests = f"r{self.num_requests}", self.num_requests + 1
        num_blocks, num_tokens = len(hashes), len(hashes) * BLOCK_SIZE + 1
        found = self.scheduler.match(name, hashes, num_tokens=num_tokens, num_computed_tokens=0).num_tokens
        rows = [2 if end == found // BLOCK_SIZE else 0 for end in range(1, num_blocks)]
        tables = [range(1, num_blocks + 1), [*rows, 1]]
        self.scheduler.admit(name, tables, num_loaded_tokens=found)
        self.run(self.scheduler.plan_step())
        held = ScheduledRequest(
            request_id=name,
            block_tables=tables,
            block_hashes=hashes,
            num_prompt_tokens=num_tokens,
            num_computed_tokens=num_tokens - 1,
        )
        self.run(self.scheduler.plan_step([held]))
        self.scheduler.finish(name)
        return found // BLOCK_SIZE

    def run(self, plan: StepPlan) -> None:
        if plan.division is not None:
            self.sizes = plan.division.segments
            self.division_id = plan.division.division_id
        report = finish_jobs(
            plan,
            num_host_slots=tuple(map(operator.mul, self.sizes, self.segments.segment_slots)),
            num_host_segments=self.segments.num_segments,
            division_id=self.division_id,
        )
        self.scheduler.apply(report)

    @property
    def share(self) -> float:
        return self.sizes[1] / sum(self.sizes)


class Phase:
    """Prompts of one kind of traffic, drawn in an order that depends on the seed only."""

    def __init__(self, traffic: Traffic, number: int, seed: int) -> None:
        self.traffic = traffic
        self.prefix = f"{seed} {number} {traffic.name}"
        self.rng = random.Random(self.prefix)
        self.num_turns = [self.rng.randrange(min(traffic.num_turns, 100)) for _ in range(traffic.num_prompts)]
        self.number_of = list(range(traffic.num_prompts))
        self.num_prompts = traffic.num_prompts
        self.hashes: dict[int, list[BlockHash]] = {}

    def next_prompt(self) -> list[BlockHash]:
        traffic, place = self.traffic, self.rng.randrange(self.traffic.num_prompts)
        if self.num_turns[place] >= traffic.num_turns:
            self.hashes.pop(self.number_of[place], None)
            self.num_turns[place], self.number_of[place] = 0, self.num_prompts
            self.num_prompts += 1
        number, turn = self.number_of[place], self.num_turns[place]
        self.num_turns[place] += 1
        hashes = self.hashes.setdefault(number, [])
        for i in range(len(hashes), traffic.num_blocks + turn * traffic.more_blocks):
            text = f"{self.prefix} {number} {i}".encode()
            hashes.append(BlockHash(hashlib.blake2b(text, digest_size=16).digest()))
        return hashes


def measure_all(args: Any, *, share: float, moves: bool) -> list[dict[str, Any]]:
    """Hit rates of the phases, and of balanced traffic alone."""
    return [phase for phases in (PHASES, (BALANCED,)) for phase in measure(args, phases, share=share, moves=moves)]


def measure(args: Any, traffics: Sequence[Traffic], *, share: float, moves: bool) -> list[dict[str, Any]]:
    """Hit rates of consecutive phases: of the part in which a division is learned, and of the rest."""
    server = Server(share=share, host_gb=args.host_gb, moves=moves, policy=args.policy)
    phases = []
    for number, traffic in enumerate(traffics):
        phase, loaded, offered = Phase(traffic, number, args.seed), [0, 0], [0, 0]
        for i in range(args.requests):
            hashes, is_rest = phase.next_prompt(), i >= args.requests * args.learning
            loaded[is_rest] += server.serve(hashes)
            offered[is_rest] += len(hashes)
        stats = server.scheduler.stats()
        phases.append(
            {
                "traffic": traffic.name,
                "share": server.share,
                "learning_hit_rate": loaded[0] / max(1, offered[0]),
                "hit_rate": loaded[1] / offered[1],
                "moved_segments": stats.num_moved_segments,
            }
        )
    return phases


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table and writes the file."""
    parser = make_parser(__doc__)
    parser.add_argument("--host-gb", type=float, default=160.0, help="size of the host tier (160)")
    parser.add_argument("--requests", type=count, default=5000, help="requests in each phase (5000)")
    parser.add_argument("--learning", type=float, default=1 / 3, help="part of a phase that is learning time (1/3)")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.12, 0.2, 0.35, 0.5, 0.65, 0.8, 0.88])
    parser.add_argument("--policy", default="density", help="eviction policy of chunks (density)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    runs = {"moving": measure_all(args, share=0.5, moves=True)}
    runs |= {f"{share:g}": measure_all(args, share=share, moves=False) for share in args.shares}
    names = [f"{number + 1} {traffic.name}" for number, traffic in enumerate((*PHASES, BALANCED))]
    rows = []
    for number, name in enumerate(names):
        rates = {run: phases[number]["hit_rate"] for run, phases in runs.items()}
        best = max((run for run in runs if run != "moving"), key=rates.__getitem__)
        moving = runs["moving"][number]
        rows.append(
            [name, f"{rates['moving']:.3f}", f"{moving['learning_hit_rate']:.3f}", f"{moving['share']:.2f}",
             f"{rates.get('0.5', float('nan')):.3f}", f"{rates[best]:.3f} ({best})", str(moving["moved_segments"])]
        )  # fmt: skip
    headers = [
        "phase",
        "moving",
        "while learning",
        "its share then",
        "fixed 0.5",
        "best fixed",
        "segments moved so far",
    ]
    print_table("part of the prompts' blocks that is loaded", headers, rows)
    write_json(args, question="the hit rate with memory that moves, and with fixed divisions", runs=runs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
