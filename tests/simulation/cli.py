"""The command behind `scripts/simulate`."""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tests.simulation import campaign, shrink, trace
from tpu_offload.cli.command import Parser, exit_status
from tpu_offload.cli.flags import int_flag
from tpu_offload.cli.terminal import interrupt_once
from tpu_offload.errors import InputError

_PROG = "simulate"
_LINE_INTERVAL_S = 10.0
_MAX_SHOWN = 3  # violations that are cut down; one of each kind


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Returns:
      Exit status: 0, 1 when a rule was broken, 2 for input that cannot be used, 130 when interrupted, 141 when
      nobody reads the output any more.
    """
    return exit_status(_PROG, lambda: _run(_parse(argv)))


def _run(args: argparse.Namespace) -> int:
    if args.replay is not None:
        return _replay(*_load(args.replay))
    if args.seed is not None:
        return _replay_seed(args.seed, args.steps, args.save)
    return _campaign(args)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog=_PROG,
        description="Lets the scheduler live through random lives with faults of every kind, and checks every byte.",
        allow_abbrev=False,
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--seeds", type=int_flag(1), metavar="N", default=200, help="lives to run (default 200)")
    what.add_argument("--seed", type=int_flag(0, 2**63), metavar="K", help="runs this one and tells all of it")
    what.add_argument("--replay", type=Path, metavar="FILE", help="runs a trace that was saved and tells all of it")
    parser.add_argument("--first-seed", type=int_flag(0, 2**63), metavar="K", help="the first (default 0)")
    parser.add_argument(
        "--steps",
        type=int_flag(1),
        metavar="S",
        default=campaign.DEFAULT_STEPS,
        help=f"steps with faults in each life, before it comes to its end (default {campaign.DEFAULT_STEPS})",
    )
    parser.add_argument(
        "--jobs",
        type=int_flag(1, 1024),
        metavar="J",
        default=os.cpu_count() or 1,
        help="processes (default one for each core)",
    )
    parser.add_argument(
        "--save", type=Path, metavar="DIR", default=Path(), help="where to save the traces of violations (default .)"
    )
    args = parser.parse_args(argv)
    if args.first_seed is not None and (args.seed is not None or args.replay is not None):
        other = "--replay" if args.seed is None else "--seed"
        raise InputError(f"argument --first-seed: not allowed with argument {other} (see {_PROG} --help)")
    args.first_seed = args.first_seed or 0
    if not args.save.is_dir():
        raise InputError(f"--save {args.save} is no directory")
    return args


def _load(path: Path) -> tuple[trace.Setup, list[trace.Action]]:
    try:
        return trace.load(path)
    except ValueError as e:
        raise InputError(str(e)) from e


def _campaign(args: argparse.Namespace) -> int:
    """Runs the seeds; a line of totals at the end, also when interrupted."""
    start_s = time.monotonic()
    outcomes: list[campaign.Outcome] = []
    interrupted = False
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    running = campaign.run_campaign(args.first_seed, args.seeds, args.steps, num_jobs=min(args.jobs, args.seeds))
    try:
        with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bars:
            task = bars.add_task("seeds", total=args.seeds)
            next_line_s = start_s + _LINE_INTERVAL_S
            for outcome in running:
                outcomes.append(outcome)
                bars.advance(task, outcome.num_seeds)
                for seed, violation in outcome.violations.items():
                    console.print(f"seed {seed}: {violation}", markup=False, highlight=False, soft_wrap=True)
                if not console.is_terminal and time.monotonic() >= next_line_s:
                    next_line_s = time.monotonic() + _LINE_INTERVAL_S
                    sys.stderr.write(f"{sum(o.num_seeds for o in outcomes)} of {args.seeds} seeds\n")
    except KeyboardInterrupt:
        interrupted = True
    finally:
        running.close()
    seconds = time.monotonic() - start_s
    total = campaign.add_up(outcomes)
    if not interrupted:
        _show_violations(total.violations, args.steps, args.save)
    print(f"{'interrupted: ' if interrupted else ''}{campaign.summary(total, seconds=seconds)}")
    return 130 if interrupted else 1 if total.violations else 0


def _show_violations(violations: dict[int, str], num_steps: int, directory: Path) -> None:
    """One of each kind, cut down."""
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
    print(f"it is saved; replay it with: scripts/simulate --replay {path}")
    print(f"replay all of the seed with: scripts/simulate --seed {seed} --steps {num_steps}\n")


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


if __name__ == "__main__":
    interrupt_once()
    sys.exit(main())
