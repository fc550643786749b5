"""What does a step cost the host with data-parallel ranks, each with a scheduler of its own and all with one worker?

Each rank has 32 requests. In a step each saves one block, and in another each loads one. In vLLM the schedulers run in
processes of their own, side by side; the worker merges their plans, dispatches, and splits the report. The caches are
tiny, so that the copies take little. In each round every number of ranks runs once, in another order each time.

  XLA_FLAGS=--xla_force_host_platform_device_count=8 python benchmarks/bench_ranks.py
"""

import argparse
import sys
import time
from collections.abc import Sequence

import jax
import numpy as np
from common import Stopwatch, count, in_turn, make_parser, print_table, write_json
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tpu_offload import CopyJob, CopyPart, JobKind, KVLayout, OffloadConfig, OffloadWorker, RankPlans, StepPlan

_PHASES = ("merge", "begin_step", "end_step", "split")


class Ranks:
    """The worker of some ranks."""

    def __init__(self, num_ranks: int, args: argparse.Namespace) -> None:
        mesh = Mesh(np.array(jax.devices()[:num_ranks]), ("rank",))
        sharding = NamedSharding(mesh, PartitionSpec("rank"))
        shape = num_ranks * args.requests, 4, 2, 8
        self._caches = [jax.device_put(np.zeros(shape, np.float32), sharding) for _ in range(args.num_layers)]
        layout = KVLayout.from_caches(self._caches, block_size=4)
        self._worker = OffloadWorker(OffloadConfig.create(num_cpu_chunks=args.requests), layout, self._caches)
        self._worker.wait_until_allocated()
        self._num_ranks, self._num_requests = num_ranks, args.requests
        self._ranks = RankPlans(num_ranks)
        self._step_id, self._next_job_id = 0, 1

    def step(self, kind: JobKind, times: Stopwatch, name: str) -> None:
        """One step in which every request of every rank saves, or loads, one block."""
        plans = [self._plan(kind) for _ in range(self._num_ranks)]
        self._step_id += 1
        self._next_job_id += self._num_requests
        plan = times(f"{name} merge", self._ranks.merge, plans)
        self._caches = times(f"{name} begin_step", self._worker.begin_step, plan, self._caches)
        times(f"{name} end_step", self._worker.end_step, plan, self._caches)
        jax.block_until_ready(self._caches)
        report = self._worker.poll(wait=True)
        reports = times(f"{name} split", self._ranks.split, report)
        while self._worker.has_flights:
            report = self._worker.poll(wait=True)
            reports = self._ranks.split(report)
        assert all(report.oldest_job_id == self._next_job_id for report in reports), "a job has not ended"

    def _plan(self, kind: JobKind) -> StepPlan:
        """A load is a job of each request; saves are one job of all."""
        blocks, first = range(self._num_requests), self._next_job_id
        groups = [tuple(blocks)] if kind is JobKind.SAVE else [(block,) for block in blocks]
        jobs = tuple(
            CopyJob(
                job_id=first + i,
                kind=kind,
                parts=(CopyPart(block_ids=group, host_block_ids=group),),
                request_id="" if kind is JobKind.SAVE else f"request {i}",
            )
            for i, group in enumerate(groups)
        )
        return StepPlan(step_id=self._step_id, jobs=jobs, next_job_id=first + self._num_requests)


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--ranks", type=count, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--requests", type=count, default=32, help="requests of each rank")
    parser.add_argument("--num-layers", type=count, default=32)
    parser.add_argument("--rounds", type=count, default=30)
    args = parser.parse_args(argv)
    if max(args.ranks) > len(jax.devices()):
        parser.error(f"--ranks {max(args.ranks)}: {len(jax.devices())} devices found")
    setups = {num_ranks: Ranks(num_ranks, args) for num_ranks in args.ranks}
    times = Stopwatch(time.perf_counter)
    for number in range(args.rounds + 2):
        for num_ranks in in_turn(args.ranks, number):
            for kind in (JobKind.SAVE, JobKind.LOAD):
                setups[num_ranks].step(kind, times, f"{num_ranks} {kind.value}")
        if number == 1:  # the first calls
            times.seconds.clear()
    spreads = times.spreads(scale=1e6)
    results = [
        {"num_ranks": n, "kind": kind.value, **{phase: spreads[f"{n} {kind.value} {phase}"] for phase in _PHASES}}
        for n in args.ranks
        for kind in (JobKind.SAVE, JobKind.LOAD)
    ]
    table = [[f"{r['num_ranks']} {r['kind']}", *(r[phase].text(0) for phase in _PHASES)] for r in results]
    title = f"{args.requests} requests a rank, {args.num_layers} layers, us, median (p10-p90) of {args.rounds} rounds"
    print_table(title, ("ranks", *_PHASES), table)
    write_json(args, question="host time of a step with data-parallel ranks", results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
