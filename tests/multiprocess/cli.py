"""The command behind `scripts/multiprocess`."""

import argparse
import logging
import sys
import time
from collections.abc import Sequence

from tests.multiprocess.cluster import Cluster
from tests.multiprocess.draw import draw_setup
from tests.multiprocess.life import Outcome, run_life
from tpu_offload.cli.flags import int_flag
from tpu_offload.cli.terminal import interrupt_once

_PROG = "multiprocess"
_SHOWN = "saved_blocks", "loaded_blocks", "num_failed_jobs", "losses of caches", "restarts"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Returns:
      Exit status: 0, 1 when a run broke a rule, 2 for flags that cannot be used, 130 when interrupted.
    """
    args = _parse(argv)
    logging.getLogger("tpu_offload").setLevel(logging.CRITICAL)  # faults are what this is about
    failed: list[int] = []
    processes: Cluster | None = None
    try:
        for seed in range(args.seed, args.seed + args.runs):
            setup = draw_setup(seed, num_processes=args.processes, num_steps=args.steps)
            start_s = time.monotonic()
            try:
                processes = processes or Cluster(args.processes, args.devices)
                line, is_ok = _describe(run_life(processes, setup))
            except Exception as e:  # of the library, or a process that has died
                line, is_ok = f"FAILED: {type(e).__name__}: {e}\n  {setup}", False
                if processes is not None:
                    processes.close(by_force=True)
                    processes = None
            print(f"seed {seed} ({time.monotonic() - start_s:.1f} s): {line}", flush=True)
            if not is_ok:
                failed.append(seed)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    finally:
        if processes is not None:
            processes.close()
    shape = f"{args.processes} processes x {args.devices} devices"
    print(f"{shape}: {args.runs} runs of {args.steps} steps, {len(failed)} failed" + _repeat(args, failed))
    return 1 if failed else 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=_PROG,
        description="Runs scheduler and workers in real processes that share one model, with faults of every kind, "
        "and compares every byte on each of them.",
        allow_abbrev=False,
    )
    parser.add_argument("--processes", type=int_flag(1, 16), metavar="N", default=2, help="workers (default 2)")
    parser.add_argument("--devices", type=int_flag(1, 16), metavar="N", default=2, help="of each (default 2)")
    parser.add_argument("--runs", type=int_flag(1), metavar="N", default=10, help="lives to run (default 10)")
    parser.add_argument("--seed", type=int_flag(0, 2**63), metavar="K", default=0, help="of the first run (default 0)")
    parser.add_argument("--steps", type=int_flag(1), metavar="S", default=80, help="of each run (default 80)")
    return parser.parse_args(argv)


def _describe(outcome: Outcome) -> tuple[str, bool]:
    """One line on a run, and whether it kept the rules."""
    if outcome.refused or outcome.violation:
        return f"FAILED: {outcome.refused or outcome.violation}", False
    counts = ", ".join(f"{name.removeprefix('num_').replace('_', ' ')} {outcome.counts[name]}" for name in _SHOWN)
    return f"{outcome.num_checked} blocks right; {counts}", True


def _repeat(args: argparse.Namespace, failed: Sequence[int]) -> str:
    if not failed:
        return ""
    flags = f"--processes {args.processes} --devices {args.devices} --steps {args.steps} --runs 1"
    return f"; repeat the first with: scripts/multiprocess {flags} --seed {failed[0]}"


if __name__ == "__main__":
    interrupt_once()
    sys.exit(main())
