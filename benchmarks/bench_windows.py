"""What does a conversation cost with sliding-window layers: bytes saved and loaded a turn, and kept in the host tier?

The scheduler plans a conversation of many turns; HBM has lost everything between two turns. The bytes in its plans are
counted. Beside it, the same with full-length layer groups, as vLLM has them for a connector without `SupportsHMA`:
every token is kept in every group. No bytes are copied, so any model's shape will do.

  python benchmarks/bench_windows.py --json windows.json
"""

import dataclasses
import random
import sys
from collections.abc import Sequence
from typing import Any

from common import count, make_parser, print_table, write_json
from offload_scheduler import finish_jobs

from tpu_offload import (
    BlockHash,
    BlockHasher,
    KVLayout,
    LayerGroup,
    LayerGroupKind,
    OffloadConfig,
    OffloadScheduler,
    PageGroup,
    ScheduledRequest,
    StepPlan,
)
from tpu_offload.types import Direction

NULL = 0
BLOCK_SIZE = 16
NUM_CHUNKS = 1 << 20  # nothing is evicted
STEP_TOKENS = 2048


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model: layers a group, the windows of its groups, heads of keys and values, and the width of a head."""

    num_layers: int
    windows: tuple[int, ...]
    num_kv_heads: int
    head_dim: int

    def layout(self, *, full_length: bool) -> KVLayout:
        """The layer groups as vLLM has them: window groups share the arrays of the full one, or are as long."""
        arrays = self.num_layers * (1 + len(self.windows) if full_length else 1)
        page = (BLOCK_SIZE, self.num_kv_heads, 2, self.head_dim)
        pages = (PageGroup(tuple(range(arrays)), page, "bfloat16"),)
        windows = () if full_length else self.windows
        groups = [LayerGroup(LayerGroupKind.SLIDING_WINDOW, pages, window) for window in windows]
        full = LayerGroup(LayerGroupKind.FULL_ATTENTION, pages)
        return KVLayout(BLOCK_SIZE, (full, *groups), null_block=NULL)


SHAPES = {
    "gemma-3-27b": Shape(10, (1024,) * 6, 16, 128),
    "gpt-oss-120b": Shape(18, (128,), 8, 64),
}


class Conversation:
    """One conversation, turn after turn, with the scheduler alone."""

    def __init__(self, layout: KVLayout, *, decode_save: bool) -> None:
        self.layout = layout
        config = OffloadConfig.create(
            num_cpu_chunks=NUM_CHUNKS, save_path="direct", load_path="direct", decode_save=decode_save
        )
        self.scheduler = OffloadScheduler(config, layout)
        self.scheduler.apply(finish_jobs(None, num_host_chunks=NUM_CHUNKS))
        self.hasher = BlockHasher(layout.fingerprint(), block_size=BLOCK_SIZE)
        self.tokens: list[int] = []
        self.hashes: list[BlockHash] = []
        self.num_turns = 0
        self.nbytes = dict.fromkeys(Direction, 0)

    def turn(self, prompt: Sequence[int], answer: Sequence[int]) -> dict[str, int]:
        """Serves one turn; returns the bytes saved and loaded, the tokens loaded, and the bytes then kept."""
        name, self.nbytes = f"turn {self.num_turns}", dict.fromkeys(Direction, 0)
        self.num_turns += 1
        self.tokens += prompt
        num_prompt = len(self.tokens)
        self.hasher.extend(self.hashes, self.tokens)
        found = self.scheduler.match(name, self.hashes, num_tokens=num_prompt, num_computed_tokens=0).num_tokens
        self.scheduler.admit(name, self.tables(num_prompt, start=found), num_loaded_tokens=found)
        self.run(self.scheduler.plan_step())
        num_computed = found
        while num_computed < num_prompt:
            start, num_computed = num_computed, min(num_prompt, num_computed + STEP_TOKENS)
            self.step(name, num_prompt, start, num_computed)
        for token in answer:
            self.tokens.append(token)
            self.hasher.extend(self.hashes, self.tokens)
            if len(self.tokens) % BLOCK_SIZE == 0:
                self.step(name, num_prompt, len(self.tokens) - 1, len(self.tokens))
        self.scheduler.finish(name)
        stats = self.scheduler.stats()
        kept = (stats.num_resident_chunks + stats.num_window_chunks) * self.layout.block_nbytes
        return {
            "saved_nbytes": self.nbytes[Direction.SAVE],
            "loaded_nbytes": self.nbytes[Direction.LOAD],
            "loaded_tokens": found,
            "computed_tokens": num_prompt - found,
            "kept_nbytes": kept,
        }

    def step(self, name: str, num_prompt: int, start: int, end: int) -> None:
        held = ScheduledRequest(
            request_id=name,
            block_tables=self.tables(end, start=start),
            block_hashes=self.hashes,
            num_prompt_tokens=num_prompt,
            num_computed_tokens=end,
        )
        self.run(self.scheduler.plan_step([held]))

    def run(self, plan: StepPlan) -> None:
        """All jobs of a plan succeed at once."""
        for job in plan.jobs:
            self.nbytes[job.direction] += job.num_blocks * self.layout.block_nbytes
        self.scheduler.apply(finish_jobs(plan, num_host_chunks=NUM_CHUNKS))

    def tables(self, num_tokens: int, *, start: int) -> list[list[int]]:
        """Per group, a block for each that tokens from `start` on attend to or write."""
        num_blocks, tables = -(-num_tokens // BLOCK_SIZE), []
        for number, group in enumerate(self.layout.groups):
            first = max(0, start - group.window + 1) // BLOCK_SIZE if group.window else 0
            tables.append([NULL] * first + [1 + number * num_blocks + i for i in range(first, num_blocks)])
        return tables


def measure(shape: Shape, args: Any, *, full_length: bool, decode_save: bool) -> dict[str, Any]:
    """A conversation's bytes: in all, and of each turn."""
    rng = random.Random(args.seed)
    conversation = Conversation(shape.layout(full_length=full_length), decode_save=decode_save)
    turns = [
        conversation.turn(
            [rng.randrange(1 << 17) for _ in range(args.prompt_tokens)],
            [rng.randrange(1 << 17) for _ in range(args.answer_tokens)],
        )
        for _ in range(args.turns)
    ]
    sums = {name: sum(turn[name] for turn in turns) for name in turns[0] if name != "kept_nbytes"}
    return sums | {"kept_nbytes": turns[-1]["kept_nbytes"], "turns": turns}


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table and writes the file."""
    parser = make_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--turns", type=count, default=20)
    parser.add_argument("--prompt-tokens", type=count, default=600, help="new tokens a turn")
    parser.add_argument("--answer-tokens", type=count, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    rows, results = [], []
    for model in args.models:
        for decode_save in (False, True):
            windows, full = (
                measure(SHAPES[model], args, full_length=is_full, decode_save=decode_save) for is_full in (False, True)
            )
            results.append({"model": model, "decode_save": decode_save, "windows": windows, "full_length": full})
            for name, found in (("windows", windows), ("full length", full)):
                row = [model, "prompts and answers" if decode_save else "prompts", name]
                row += [f"{found[f'{what}_nbytes'] / 2**30:.2f}" for what in ("saved", "loaded", "kept")]
                rows.append([*row, f"{found['computed_tokens']:,}"])
    headers = ["model", "saved", "layer groups", "saved GiB", "loaded GiB", "kept GiB", "tokens computed"]
    print_table(f"a conversation of {args.turns} turns", headers, rows, num_labels=3)
    write_json(args, question="bytes of a conversation with sliding windows", results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
