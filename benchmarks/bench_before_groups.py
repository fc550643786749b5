"""What does a step, or a hit, cost beside the code of before there were layer groups (075fa9d)?

That code has another interface, so `compare_commits.py` cannot compare them. It runs in a process of its own, in turn
with `bench_groups.py`'s cases: an idle step, and the hit of a prompt of 100 blocks (lookup, admission, and the plan
with its load). Its models had one group, so all cases are compared with that.

  python benchmarks/bench_before_groups.py --rounds 20 --json before.json
  PYTHONPATH=build/compiled python build/compiled/benchmarks/bench_before_groups.py      after scripts/test --compiled
"""

import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench_groups import CASES, Server
from common import Spread, count, make_parser, print_table, write_json
from compare_commits import check_out

COMMIT = "075fa9d"
STEPS = 20  # in a round
WARM_UP = 200  # steps
# Prints the seconds of `STEPS` idle steps and hits as JSON, for each line that it reads.
BEFORE = f"""
import gc, json, secrets, sys, time
from tpu_offload import OffloadConfig, OffloadScheduler
from tpu_offload.core.requests import ScheduledRequest
from tpu_offload.layout import KVLayout, LayerGroup, LayerGroupKind
from tpu_offload.types import JobResult, JobState, StepReport

layout = KVLayout(16, (LayerGroup(LayerGroupKind.FULL_ATTENTION, (0,), (16, 2, 2, 8), "bfloat16"),))
config = OffloadConfig.create(num_cpu_chunks=1 << 14, save_path="direct", load_path="direct")
scheduler = OffloadScheduler(config, layout)
hashes, num_tokens, blocks = [secrets.token_bytes(32) for _ in range(100)], 1601, list(range(1, 102))

def finish(plan):
    jobs = (*plan.loads, *plan.saves) if plan else ()
    scheduler.apply(StepReport(0, tuple(JobResult(job.job_id, JobState.FINISHED) for job in jobs), 1 << 14))

def step(name):
    tables, begun = list(blocks), time.perf_counter()
    scheduler.plan_step()
    idle = time.perf_counter()
    found = scheduler.match(name, hashes, num_tokens=num_tokens, num_computed_tokens=0)
    scheduler.admit(name, tables, num_loaded_tokens=found)
    plan = scheduler.plan_step()
    end = time.perf_counter()
    assert len(plan.loads[0].block_ids) == 100
    finish(plan)
    scheduler.finish(name)
    return idle - begun, end - idle

finish(None)
scheduler.match("first", hashes, num_tokens=num_tokens, num_computed_tokens=0)
scheduler.admit("first", blocks, num_loaded_tokens=0)
plan = scheduler.plan_step([ScheduledRequest("first", blocks, hashes, num_tokens, 1600)])
while scheduler.has_jobs:
    finish(plan)
    plan = scheduler.plan_step()
scheduler.finish("first")
for i in range({WARM_UP}):
    step("warm" + str(i))
gc.collect()
gc.freeze()
for line in sys.stdin:
    print(json.dumps([step(line.strip() + str(i)) for i in range({STEPS})]), flush=True)
"""


class Before:
    """The process with the code of before."""

    def __init__(self, tree: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", BEFORE],
            cwd=tree,
            env=os.environ | {"PYTHONPATH": str(tree)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def round(self, number: int) -> tuple[float, float]:
        """The medians of a round: seconds of an idle step, and of a hit.

        Raises:
          RuntimeError: the process has ended; it has said why.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"round{number}.\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process with {COMMIT} has ended with exit status {self._process.wait()}")
        idle, hit = zip(*json.loads(line), strict=True)
        return statistics.median(idle), statistics.median(hit)

    def close(self) -> None:
        self._process.communicate()


def measure(server: Server, first: int) -> tuple[float, float]:
    """The medians of a round of today's code."""
    seconds = server.watch.seconds
    for i in range(STEPS):
        server.round(first + i)
    hits = [sum(phases) for phases in zip(*(seconds[p][-STEPS:] for p in ("lookup", "admission", "plan")), strict=True)]
    return statistics.median(seconds["idle step"][-STEPS:]), statistics.median(hits)


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=count, default=20)
    args = parser.parse_args(argv)
    servers = [Server(case) for case in CASES]
    for number in range(WARM_UP):
        for server in servers:
            server.round(number)
    gc.collect()
    gc.freeze()
    ratios: dict[str, list[tuple[float, float]]] = {case.name: [] for case in CASES}
    seconds: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        check_out(COMMIT, Path(folder))
        before = Before(Path(folder))
        try:
            for number in range(args.rounds):
                idle, hit = before.round(number)
                seconds.append((idle, hit))
                for server in servers:
                    idle_now, hit_now = measure(server, WARM_UP + number * STEPS)
                    ratios[server.case.name].append((idle_now / idle, hit_now / hit))
        finally:
            before.close()
    idles, hits = (Spread.of(1e6 * one for one in column) for column in zip(*seconds, strict=True))
    rows, results = [], []
    for server in servers:
        idle_ratio, hit_ratio = (Spread.of(column) for column in zip(*ratios[server.case.name], strict=True))
        rows.append((server.case.name, str(server.num_loaded), idle_ratio.range(), hit_ratio.range()))
        results.append({"case": server.case.name, "idle step": idle_ratio, "hit": hit_ratio})
    print_table(
        f"Of {COMMIT}, whose idle step takes {idles.text(1)} us and whose hit {hits.text(1)} us, median (p10-p90)",
        ("layer groups", "blocks loaded", "idle step, median (min-max)", "hit, median (min-max)"),
        rows,
    )
    write_json(args, question=__doc__.splitlines()[0], results=results, before_us={"idle step": idles, "hit": hits})
    return 0


if __name__ == "__main__":
    sys.exit(main())
