"""What does a conversation cost with sliding windows or states: bytes saved and loaded a turn, and kept?

The scheduler plans a conversation of many turns; HBM has lost everything between two turns. The bytes in its plans are
counted. Beside it, for sliding windows the same with full-length layer groups, as vLLM has them for a connector without
`SupportsHMA`: every token is kept in every group. For states, the same with a state saved after every block. No bytes
are copied, so any model's shape will do.

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
NUM_CHUNKS = 1 << 16  # nothing is evicted
STEP_TOKENS = 2048


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model.

    Attributes:
      num_layers: layers a group.
      windows: of its groups with sliding windows.
      num_kv_heads: heads of keys and values.
      head_dim: width of a head.
      dtype: of the KV.
      block_size: tokens in a block.
      num_state_layers: layers with a state.
      conv: shape of the convolution's part of one layer's state, in bfloat16.
      recurrent: shape of its recurrent part, in float32.
    """

    num_layers: int
    windows: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    block_size: int = 16
    num_state_layers: int = 0
    conv: tuple[int, ...] = ()
    recurrent: tuple[int, ...] = ()

    def layout(self, *, full_length: bool) -> KVLayout:
        """The layer groups as vLLM has them: window groups share the arrays of the full one, or are as long."""
        arrays = self.num_layers * (1 + len(self.windows) if full_length else 1)
        page = (self.block_size, self.num_kv_heads, 2, self.head_dim)
        pages = (PageGroup(layer_ids=tuple(range(arrays)), page_shape=page, dtype=self.dtype),)
        windows = () if full_length else self.windows
        groups = [
            LayerGroup(kind=LayerGroupKind.SLIDING_WINDOW, page_groups=pages, window=window) for window in windows
        ]
        full = LayerGroup(kind=LayerGroupKind.FULL_ATTENTION, page_groups=pages)
        if self.num_state_layers:
            first, end = range(arrays, arrays + self.num_state_layers), arrays + 2 * self.num_state_layers
            state_pages = (
                PageGroup(layer_ids=tuple(first), page_shape=self.conv, dtype="bfloat16"),
                PageGroup(layer_ids=tuple(range(first.stop, end)), page_shape=self.recurrent, dtype="float32"),
            )
            groups.append(LayerGroup(kind=LayerGroupKind.STATE, page_groups=state_pages))
        return KVLayout(block_size=self.block_size, groups=(full, *groups), null_block=NULL)


SHAPES = {
    "gemma-3-27b": Shape(10, (1024,) * 6, 16, 128),
    "gpt-oss-120b": Shape(18, (128,), 8, 64),
    "qwen3.5-397b": Shape(
        15,
        (),
        2,
        256,
        dtype="float8_e4m3fn",
        block_size=256,
        num_state_layers=45,
        conv=(3, 12_288),
        recurrent=(64, 128, 128),
    ),
}


class Conversation:
    """One conversation, turn after turn, with the scheduler alone.

    Args:
      layout: the model's.
      decode_save: whether answers are saved.
      dense: whether a state is saved after every block.
    """

    def __init__(self, layout: KVLayout, *, decode_save: bool, dense: bool = False) -> None:
        self.layout = layout
        self.dense = dense
        self.block_size = layout.block_size
        config = OffloadConfig.create(
            host_gb=NUM_CHUNKS * layout.block_nbytes / 2**30,
            save_path="direct",
            load_path="direct",
            decode_save=decode_save,
        )
        self.num_host_slots = config.host_slots(layout)
        self.scheduler = OffloadScheduler(config, layout)
        self.scheduler.apply(finish_jobs(None, num_host_slots=self.num_host_slots))
        self.hasher = BlockHasher(layout.fingerprint(), block_size=self.block_size)
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
            start, num_computed = num_computed, self.end_of_step(num_computed, num_prompt)
            self.step(name, num_prompt, start, num_computed)
        for token in answer:
            self.tokens.append(token)
            self.hasher.extend(self.hashes, self.tokens)
            if len(self.tokens) % self.block_size == 0:
                self.step(name, num_prompt, len(self.tokens) - 1, len(self.tokens))
        self.scheduler.finish(name)
        stats = self.scheduler.stats()
        kept = (stats.num_resident_chunks + stats.num_window_chunks) * self.layout.block_nbytes
        if self.layout.state_group is not None:
            kept += stats.num_states * self.layout.state_group.block_nbytes
        return {
            "saved_nbytes": self.nbytes[Direction.SAVE],
            "loaded_nbytes": self.nbytes[Direction.LOAD],
            "loaded_tokens": found,
            "computed_tokens": num_prompt - found,
            "kept_nbytes": kept,
        }

    def end_of_step(self, start: int, num_prompt: int) -> int:
        """Where a step of the prompt ends: with states also at the last block boundary, and if dense at each."""
        end, size = min(num_prompt, start + STEP_TOKENS), self.block_size
        if self.layout.state_group is None:
            return end
        boundary = (start // size + 1 if self.dense else (num_prompt - 1) // size) * size
        return boundary if start < boundary < end else end

    def step(self, name: str, num_prompt: int, start: int, end: int) -> None:
        held = ScheduledRequest(
            request_id=name,
            block_tables=self.tables(end, start=start),
            block_hashes=self.hashes,
            num_prompt_tokens=num_prompt,
            num_computed_tokens=end,
            retained_tokens=[end] if self.dense else (),
        )
        self.run(self.scheduler.plan_step([held]))

    def run(self, plan: StepPlan) -> None:
        """All jobs of a plan succeed at once."""
        for job in plan.jobs:
            for part in job.parts:
                # Groups of attention share the arrays; a row has its own.
                self.nbytes[job.direction] += len(part.block_ids) * self.layout.groups[part.group_id].block_nbytes
        self.scheduler.apply(finish_jobs(plan, num_host_slots=self.num_host_slots))

    def tables(self, num_tokens: int, *, start: int) -> list[list[int]]:
        """Per group, a block for each that tokens from `start` on attend to or write."""
        num_blocks, tables = -(-num_tokens // self.block_size), []
        for number, group in enumerate(self.layout.groups):
            first = max(0, start - group.window + 1) // self.block_size if group.window else 0
            if group.kind is LayerGroupKind.STATE:
                first = (num_tokens - 1) // self.block_size
                if start and start % self.block_size == 0:  # of a load that ends there
                    first = min(first, start // self.block_size - 1)
            tables.append([NULL] * first + [1 + number * num_blocks + i for i in range(first, num_blocks)])
        return tables


def measure(shape: Shape, args: Any, *, plain: bool, decode_save: bool) -> dict[str, Any]:
    """A conversation's bytes: in all, and of each turn; `plain` is what others do."""
    rng = random.Random(args.seed)
    dense = plain and shape.num_state_layers > 0
    layout = shape.layout(full_length=plain and not dense)
    conversation = Conversation(layout, decode_save=decode_save, dense=dense)
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
            shape = SHAPES[model]
            ours, plain = (measure(shape, args, plain=plain, decode_save=decode_save) for plain in (False, True))
            names = ("last boundary", "every block") if shape.num_state_layers else ("windows", "full length")
            results.append({"model": model, "decode_save": decode_save} | dict(zip(names, (ours, plain), strict=True)))
            for name, found in zip(names, (ours, plain), strict=True):
                row = [model, "prompts and answers" if decode_save else "prompts", name]
                row += [f"{found[f'{what}_nbytes'] / 2**30:.2f}" for what in ("saved", "loaded", "kept")]
                rows.append([*row, f"{found['computed_tokens']:,}"])
    headers = ["model", "saved", "checkpoints", "saved GiB", "loaded GiB", "kept GiB", "tokens computed"]
    print_table(f"a conversation of {args.turns} turns", headers, rows, num_labels=3)
    write_json(args, question="bytes of a conversation with sliding windows or states", results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
