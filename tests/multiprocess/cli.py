"""The command behind `scripts/multiprocess`."""

import logging
import sys
import time
from collections.abc import Sequence

import click

from tests.multiprocess.cluster import Cluster
from tests.multiprocess.draw import draw_setup
from tests.multiprocess.life import Outcome, run_life
from tpu_offload.cli.command import interrupt_once, run_command
from tpu_offload.cli.options import number

_SHOWN = "saved_blocks", "loaded_blocks", "num_failed_jobs", "losses of caches", "restarts"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Returns:
      Exit status, see `run_command`; 1 when a run broke a rule.
    """
    return run_command(_command, argv, prog="multiprocess")


@click.command
@number("--processes", "workers (default 2)", high=16, default=2)
@number("--devices", "of each (default 2)", high=16, default=2)
@number("--runs", "lives to run (default 10)", default=10)
@number("--seed", "of the first run (default 0)", low=0, high=2**63, default=0)
@number("--steps", "of each run (default 80)", default=80)
def _command(processes: int, devices: int, runs: int, seed: int, steps: int) -> int:
    """Runs scheduler and workers in real processes that share one model, with faults of every kind, and compares every
    byte on each of them.
    """
    logging.getLogger("tpu_offload").setLevel(logging.CRITICAL)  # faults are what this is about
    failed: list[int] = []
    cluster: Cluster | None = None
    try:
        for each in range(seed, seed + runs):
            setup = draw_setup(each, num_processes=processes, num_steps=steps)
            start_s = time.monotonic()
            try:
                cluster = cluster or Cluster(processes, devices)
                line, is_ok = _describe(run_life(cluster, setup))
            except Exception as e:  # of the library, or a process that has died
                line, is_ok = f"FAILED: {type(e).__name__}: {e}\n  {setup}", False
                if cluster is not None:
                    cluster.close(by_force=True)
                    cluster = None
            print(f"seed {each} ({time.monotonic() - start_s:.1f} s): {line}", flush=True)
            if not is_ok:
                failed.append(each)
    finally:
        if cluster is not None:
            cluster.close()
    flags = f"--processes {processes} --devices {devices} --steps {steps} --runs 1"
    repeat = f"; repeat the first with: scripts/multiprocess {flags} --seed {failed[0]}" if failed else ""
    shape = f"{processes} processes x {devices} devices"
    print(f"{shape}: {runs} runs of {steps} steps, {len(failed)} failed{repeat}")
    return 1 if failed else 0


def _describe(outcome: Outcome) -> tuple[str, bool]:
    """One line on a run, and whether it kept the rules."""
    if outcome.refused or outcome.violation:
        return f"FAILED: {outcome.refused or outcome.violation}", False
    counts = ", ".join(f"{name.removeprefix('num_').replace('_', ' ')} {outcome.counts[name]}" for name in _SHOWN)
    return f"{outcome.num_checked} blocks right; {counts}", True


if __name__ == "__main__":
    interrupt_once()
    sys.exit(main())
