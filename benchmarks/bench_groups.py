"""What does a model with several layer groups cost the engine's scheduler thread, compared with one group?

Per layout: a step with nothing to do; the lookup of a prompt of 100 blocks that the host tier has; and its hit as a
whole (lookup, admission, and the plan with its load). A hit of a model with windows also loads the last blocks of each
window group, so beside the hit of a prefix of 100 blocks there is that of a prefix of which 100 blocks are loaded in
all. Rounds are interleaved; ratios are to one group in the same round.

  python benchmarks/bench_groups.py --rounds 2000 --json groups.json
"""

import dataclasses
import gc
import secrets
import sys
from collections.abc import Sequence

from common import Spread, Stopwatch, count, in_turn, make_parser, print_table, write_json
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

BLOCK_SIZE = 16
NULL = 0
NUM_CHUNKS = 1 << 14  # nothing is evicted


@dataclasses.dataclass(frozen=True)
class Case:
    """Layer groups beside one of full attention, and a prompt.

    Attributes:
      name: what the table calls it.
      num_blocks: of the prompt.
      window_blocks: per group with a sliding window, the blocks that the window reaches back.
      has_state: whether there is a group of states.
    """

    name: str
    num_blocks: int
    window_blocks: tuple[int, ...] = ()
    has_state: bool = False

    def layout(self) -> KVLayout:
        pages = (PageGroup(layer_ids=(0,), page_shape=(BLOCK_SIZE, 2, 2, 8), dtype="bfloat16"),)
        groups = [LayerGroup(kind=LayerGroupKind.FULL_ATTENTION, page_groups=pages)]
        windows = [num_blocks * BLOCK_SIZE + 1 for num_blocks in self.window_blocks]
        groups += [
            LayerGroup(kind=LayerGroupKind.SLIDING_WINDOW, page_groups=pages, window=window) for window in windows
        ]
        if self.has_state:
            rows = (
                PageGroup(layer_ids=(1,), page_shape=(3, 64), dtype="bfloat16"),
                PageGroup(layer_ids=(2,), page_shape=(2, 16, 16), dtype="float32"),
            )
            groups.append(LayerGroup(kind=LayerGroupKind.STATE, page_groups=rows))
        return KVLayout(block_size=BLOCK_SIZE, groups=tuple(groups), null_block=NULL if len(groups) > 1 else None)


CASES = (
    Case("one group", 100),
    Case("a window of 8 blocks", 100, (8,)),
    Case("a window of 64 blocks", 100, (64,)),
    Case("2 windows of 64 blocks", 100, (64, 64)),
    Case("5 windows of 8 blocks", 100, (8,) * 5),
    Case("5 windows of 64 blocks", 100, (64,) * 5),
    Case("states", 100, has_state=True),
    Case("2 windows, 100 blocks in all", 34, (33, 33)),
    Case("5 windows, 100 blocks in all", 20, (16,) * 5),
)


class Server:
    """A scheduler whose host tier has one prompt, and workers that copy at once."""

    def __init__(self, case: Case) -> None:
        self.case, self.layout = case, case.layout()
        host_gb = NUM_CHUNKS * self.layout.block_nbytes / 2**30
        config = OffloadConfig.create(host_gb=host_gb, save_path="direct", load_path="direct")
        self.scheduler = OffloadScheduler(config, self.layout)
        self.num_host_slots = config.host_slots(self.layout)
        self.hashes = [BlockHash(secrets.token_bytes(32)) for _ in range(case.num_blocks)]
        self.num_tokens = case.num_blocks * BLOCK_SIZE + 1
        self.watch = Stopwatch()
        self.num_loaded = 0  # blocks of the last hit
        self._finish(None)
        self._save()

    def _finish(self, plan: StepPlan | None) -> None:
        self.scheduler.apply(finish_jobs(plan, num_host_slots=self.num_host_slots))

    def _save(self) -> None:
        scheduler, num_saved = self.scheduler, self.case.num_blocks * BLOCK_SIZE
        scheduler.match("first", self.hashes, num_tokens=self.num_tokens, num_computed_tokens=0)
        scheduler.admit("first", self._tables(0), num_loaded_tokens=0)
        request = ScheduledRequest(
            request_id="first",
            block_tables=self._tables(0),
            block_hashes=self.hashes,
            num_prompt_tokens=self.num_tokens,
            num_computed_tokens=num_saved,
        )
        plan = scheduler.plan_step([request])
        while scheduler.has_jobs:
            self._finish(plan)
            plan = scheduler.plan_step()
        scheduler.finish("first")

    def _tables(self, num_computed: int) -> list[list[int]]:
        """Block tables as vLLM has them: the null block where a group has no block any more."""
        num_blocks, tables = -(-self.num_tokens // BLOCK_SIZE), []
        for i, group in enumerate(self.layout.groups):
            first = 0
            if group.kind is LayerGroupKind.SLIDING_WINDOW:
                first = max(0, num_computed - (group.window or 0) + 1) // BLOCK_SIZE
            elif group.kind is LayerGroupKind.STATE:
                first = self.case.num_blocks - 1
            tables.append([NULL] * first + [1 + i * num_blocks + j for j in range(first, num_blocks)])
        return tables

    def round(self, number: int) -> None:
        """An idle step, and a request whose prompt is in the host tier."""
        scheduler, watch, name = self.scheduler, self.watch, f"request{number}"
        num_found = self.case.num_blocks * BLOCK_SIZE
        tables = self._tables(num_found)
        watch("idle step", scheduler.plan_step)
        found = watch("lookup", scheduler.match, name, self.hashes, num_tokens=self.num_tokens, num_computed_tokens=0)
        assert found.num_tokens == num_found, (self.case, found)
        watch("admission", scheduler.admit, name, tables, num_loaded_tokens=num_found)
        plan = watch("plan", scheduler.plan_step)
        self.num_loaded = sum(len(part.block_ids) for job in plan.jobs for part in job.parts)
        self._finish(plan)
        scheduler.finish(name)


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=count, default=2000)
    args = parser.parse_args(argv)

    servers = [Server(case) for case in CASES]
    gc.collect()
    gc.freeze()
    for number in range(args.rounds + 100):
        if number == 100:  # warm from here on
            for server in servers:
                server.watch = Stopwatch()
        for server in in_turn(servers, number):
            server.round(number)
    base, rows, results = servers[0].watch, [], []
    for server in servers:
        server.watch.add("hit", "lookup", "admission", "plan")
    for server in servers:
        spreads = {name: server.watch.spreads(scale=1e6)[name] for name in ("idle step", "lookup", "hit")}
        ratios = {
            name: Spread.of(a / b for a, b in zip(server.watch.seconds[name], base.seconds[name], strict=True))
            for name in spreads
        }
        row = [server.case.name, str(server.num_loaded)]
        for name, spread in spreads.items():
            row += [spread.text(1), f"{ratios[name].median:.2f}"]
        rows.append(row)
        results.append(
            {"case": server.case.name, "num_loaded": server.num_loaded, "us": spreads, "of_one_group": ratios}
        )
    title = f"Scheduler thread, us, median (p10-p90) of {args.rounds} rounds, and of one group in the same round"
    headers = ("layer groups", "blocks loaded", "idle step", "ratio", "lookup", "ratio", "hit", "ratio")
    print_table(title, headers, rows)
    write_json(args, question=__doc__.splitlines()[0], results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
