"""The command behind `scripts/simulate`."""

import functools
import os
import time
from pathlib import Path

import click

from tests.simulation import campaign, shrink, trace
from tpu_offload.cli.command import run_command, run_process
from tpu_offload.cli.options import Command, input_file, number, option
from tpu_offload.cli.tables import progress
from tpu_offload.errors import InputError

_MAX_SHOWN = 3  # number of violations that are shrunk; one of each kind
_DIRECTORY = click.Path(exists=True, file_okay=False, path_type=Path)


_EXCLUSIVE = [
    ("seeds", "seed", "replay"),
    ("first_seed", "seed"),
    ("first_seed", "replay"),
    ("several_groups", "seed"),
    ("several_groups", "replay"),
]


@click.command(cls=Command, exclusive=_EXCLUSIVE)
@number("--seeds", "number of runs (200)", default=200)
@number("--seed", "run this seed and print every event", low=0, high=2**63)
@option("--replay", input_file, "FILE", "run a saved trace and print every event")
@number("--first-seed", "seed of the first run (0)", low=0, high=2**63, default=0)
@number("--steps", f"steps with faults in each run ({campaign.DEFAULT_STEPS})", default=campaign.DEFAULT_STEPS)
@number("--jobs", "processes (one per core)", high=1024, default=os.cpu_count() or 1)
@click.option("--groups", "several_groups", is_flag=True, help="skip the seeds whose model has only full attention")
@option("--save", _DIRECTORY, "DIR", "where to save the traces of violations (.)", default=Path())
def _command(
    seeds: int,
    seed: int | None,
    replay: Path | None,
    first_seed: int,
    steps: int,
    jobs: int,
    several_groups: bool,
    save: Path,
) -> int:
    """Runs the scheduler in random simulations with faults of every kind, and checks every byte.

    Exit status 1 if a rule was broken.
    """
    if replay is not None:
        return _replay(*_load(replay))
    if seed is not None:
        return _replay_seed(seed, steps, save)
    return _campaign(
        range(first_seed, first_seed + seeds),
        steps,
        num_jobs=min(jobs, seeds),
        several_groups=several_groups,
        save=save,
    )


def _load(path: Path) -> tuple[trace.Setup, list[trace.Action]]:
    try:
        return trace.load(path)
    except ValueError as e:
        raise InputError(str(e)) from e


def _campaign(seeds: range, num_steps: int, *, num_jobs: int, several_groups: bool, save: Path) -> int:
    """Runs the seeds; prints a line of totals at the end, also on an interrupt."""
    start_s = time.monotonic()
    outcomes: list[campaign.Outcome] = []
    interrupted = False
    running = campaign.run_campaign(seeds[0], len(seeds), num_steps, num_jobs=num_jobs, several_groups=several_groups)
    try:
        with progress(len(seeds), what="seeds") as start:
            on_finish = start("seeds")
            for outcome in running:
                outcomes.append(outcome)
                for _ in range(outcome.num_seeds):
                    on_finish()
                for seed, violation in outcome.violations.items():
                    click.echo(f"seed {seed}: {violation}", err=True)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        running.close()
    seconds = time.monotonic() - start_s
    total = campaign.add_up(outcomes)
    if not interrupted:
        _show_violations(total.violations, num_steps, save)
    print(f"{'interrupted: ' if interrupted else ''}{campaign.summary(total, seconds=seconds)}")
    return 130 if interrupted else 1 if total.violations else 0


def _show_violations(violations: dict[int, str], num_steps: int, directory: Path) -> None:
    """Prints a shrunk trace for a violation of each kind."""
    kinds: dict[str, int] = {}
    for seed in sorted(violations):
        kinds.setdefault(shrink.kind_of(violations[seed]), seed)
    for seed in list(kinds.values())[:_MAX_SHOWN]:
        _show_minimal(seed, num_steps, directory)


def _show_minimal(seed: int, num_steps: int, directory: Path) -> None:
    setup, actions, violation = shrink.minimal(*trace.generate(seed, num_steps))
    path = directory / f"simulate-seed-{seed}.json"
    trace.save(path, setup, actions)
    print(f"\nseed {seed}: {violation}")
    print(f"a minimal trace of {len(actions)} actions:")
    print("\n".join(shrink.explain(setup, actions)))
    print(f"saved; replay it with: scripts/simulate --replay {path}")
    print(f"replay the whole run with: scripts/simulate --seed {seed} --steps {num_steps}\n")


def _replay_seed(seed: int, num_steps: int, directory: Path) -> int:
    setup, actions = trace.generate(seed, num_steps)
    status = _replay(setup, actions)
    if status:
        _show_minimal(seed, num_steps, directory)
    return status


def _replay(setup: trace.Setup, actions: list[trace.Action]) -> int:
    print("\n".join(shrink.explain(setup, actions)))
    violation, _ = shrink.failure(setup, actions)
    if not violation:
        print("no violation")
    return 1 if violation else 0


main = functools.partial(run_command, _command, prog="simulate")

if __name__ == "__main__":
    run_process(main)
