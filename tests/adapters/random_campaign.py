"""A campaign of random runs under vLLM's real scheduler (`random_runs`), of models of every kind; every byte checked.

python -m tests.adapters.random_campaign --modes windows,states --first-seed 0 --seeds 100 --steps 100

A line of counts for each mode, and one for each violation with the command that repeats it. Exit status 1 if there is
any.
"""

import argparse
import concurrent.futures
import logging
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence

from tests.adapters.cpu_environment import set_environment
from tests.adapters.random_modes import MODES

_BATCH = 10  # seeds that a process runs at a time
_SHOWN = (
    "requests", "preemptions", "aborts", "resets", "blocks saved", "blocks loaded", "window blocks to load",
    "state blocks to load", "evicted chunks", "evicted checkpoints", "failed saves", "failed loads", "lost caches",
    "failed requests", "positions checked", "positions checked in windows",
)  # fmt: skip


def start_process() -> None:
    """Prepares a process for `run_seeds`: the programs that it compiles are compiled once."""
    set_environment()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from tests.kept_programs import compiled_once_each

    compiled_once_each().__enter__()
    logging.disable(logging.CRITICAL)


def run_seeds(mode: str, seeds: Sequence[int], num_steps: int) -> tuple[Counter[str], dict[int, str]]:
    """Runs some seeds of a mode; returns what has happened, and the violations by seed."""
    from tests.adapters.random_runs import RandomRun

    totals: Counter[str] = Counter()
    violations = {}
    for seed in seeds:
        try:
            run = RandomRun(seed, mode)
            run.run(num_steps)
            totals.update(run.counts)
        except Exception as e:  # any exception of the library is a violation
            violations[seed] = f"{type(e).__name__}: {e}".splitlines()[0]
    return totals, violations


def summary(mode: str, counts: Counter[str], num_violations: int, *, seconds: float) -> str:
    """A line of what has happened in a mode."""
    shown = ", ".join(f"{counts[name]} {name}" for name in _SHOWN if counts[name])
    pace = counts["steps"] / max(seconds, 1e-9)
    steps = f"{counts['runs']} runs, {counts['steps']} steps ({pace:.0f} a second)"
    return f"{mode}: {steps}, {shown}; {num_violations} violations"


def run_mode(mode: str, seeds: range, num_steps: int, pool: concurrent.futures.Executor) -> int:
    """Runs a mode and prints what has happened; returns the number of violations."""
    start_s, totals, num_violations = time.monotonic(), Counter[str](), 0
    batches = [seeds[first : first + _BATCH] for first in range(0, len(seeds), _BATCH)]
    for counts, violations in pool.map(run_seeds, *zip(*[(mode, batch, num_steps) for batch in batches], strict=True)):
        totals.update(counts)
        num_violations += len(violations)
        for seed, violation in violations.items():
            again = f"--modes {mode} --first-seed {seed} --seeds 1 --steps {num_steps}"
            print(f"{violation}; to repeat it: python -m tests.adapters.random_campaign {again}", flush=True)
    print(summary(mode, totals, num_violations, seconds=time.monotonic() - start_s), flush=True)
    return num_violations


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.adapters.random_campaign",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--modes", default="", help=f"separated by commas: {','.join(MODES)}")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=100, help="runs of each mode")
    parser.add_argument("--steps", type=int, default=40, help="steps of a run with requests and faults")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    args = parser.parse_args()
    modes = args.modes.split(",") if args.modes else list(MODES)
    unknown = [mode for mode in modes if mode not in MODES]
    if unknown:
        parser.error(f"unknown modes {unknown}; expected some of {list(MODES)}")
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    # Not fork: jax and vLLM have started threads.
    with concurrent.futures.ProcessPoolExecutor(
        args.jobs, mp_context=multiprocessing.get_context("spawn"), initializer=start_process
    ) as pool:
        num_violations = sum([run_mode(mode, seeds, args.steps, pool) for mode in modes])
    print(f"{len(modes)} modes, {len(modes) * len(seeds)} runs, {num_violations} violations")
    return 1 if num_violations else 0


if __name__ == "__main__":
    sys.exit(main())
