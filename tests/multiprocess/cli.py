"""The command behind `scripts/multiprocess`."""

import functools
import logging
import time

import click

from tests.multiprocess.cluster import Cluster
from tests.multiprocess.draw import draw_setup
from tests.multiprocess.run import Outcome, run_setup
from tpu_offload.cli.command import run_command, run_process
from tpu_offload.cli.options import number

_SHOWN = "saved_blocks", "loaded_blocks", "num_failed_jobs", "losses of caches", "restarts"


@click.command
@number("--processes", "number of workers (2)", high=16, default=2)
@number("--devices", "devices per worker (2)", high=16, default=2)
@number("--runs", "number of runs (10)", default=10)
@number("--seed", "seed of the first run (0)", low=0, high=2**63, default=0)
@number("--steps", "steps per run (80)", default=80)
def _command(processes: int, devices: int, runs: int, seed: int, steps: int) -> int:
    """Runs the scheduler with workers in real processes that share one model, with faults of every kind, and compares
    every byte in each process. Exit status 1 if a run broke a rule.
    """
    logging.getLogger("tpu_offload").setLevel(logging.CRITICAL)  # injected faults would flood the log
    failed: list[int] = []
    cluster: Cluster | None = None
    try:
        for each in range(seed, seed + runs):
            setup = draw_setup(each, num_processes=processes, num_devices=devices, num_steps=steps)
            start_s = time.monotonic()
            try:
                cluster = cluster or Cluster(processes, devices)
                line, is_ok = _describe(run_setup(cluster, setup))
            except Exception as e:  # an error of the library, or a dead process
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
    """The outcome in one line, and whether it kept the rules."""
    if outcome.refused or outcome.violation:
        return f"FAILED: {outcome.refused or outcome.violation}", False
    counts = ", ".join(f"{name.removeprefix('num_').replace('_', ' ')} {outcome.counts[name]}" for name in _SHOWN)
    return f"{outcome.num_checked} blocks right; {counts}", True


main = functools.partial(run_command, _command, prog="multiprocess")

if __name__ == "__main__":
    run_process(main)
