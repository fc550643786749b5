"""The command behind `scripts/soak`."""

import argparse
import functools
import sys
from collections.abc import Sequence
from typing import NoReturn

from tests.soak import report as soak_report
from tests.soak.plan import DEFAULT_CONCURRENCY, DEFAULT_NUM_REQUESTS, DEFAULT_NUM_TURNS, ENGINE, MODEL, build_plan
from tests.soak.soak import soak
from tpu_offload.cli.command import Parser, end_process, exit_status
from tpu_offload.cli.console import ReportConsole
from tpu_offload.cli.devices import check_backend
from tpu_offload.cli.flags import int_flag
from tpu_offload.cli.output import check_writable
from tpu_offload.cli.replay_flags import MODEL_FLAGS, add_serving_flags
from tpu_offload.cli.replay_setup import make_report
from tpu_offload.cli.terminal import interrupt_once
from tpu_offload.config import OffloadConfig

_PROG = "soak"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Returns:
      Exit status, see `exit_status`; 1 when something was found that must not be.
    """
    given = sys.argv[1:] if argv is None else list(argv)
    return exit_status(_PROG, lambda: _run(given))


def _run(argv: list[str]) -> int:
    args = _parse(argv)
    if args.json is not None:
        check_writable(args.json)
    offload = OffloadConfig.from_env()
    check_backend()
    plan = build_plan(args, offload)
    return soak_report.tell(ReportConsole(), make_report(functools.partial(soak, plan), args.json, argv))


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog=_PROG,
        description="Serves a workload again and again while copies, messages and requests go wrong; looks for wrong "
        "tokens, memory that grows and engines that hang. The TPU_OFFLOAD_* variables apply. Exit status 1 when "
        "anything is found.",
        allow_abbrev=False,
    )
    seconds = parser.add_mutually_exclusive_group(required=True)
    seconds.add_argument("seconds", type=int_flag(1), nargs="?", metavar="SECONDS", help="how long to go on")
    seconds.add_argument("--seconds", type=int_flag(1), dest="seconds_flag", metavar="SECONDS", help="the same")
    add_serving_flags(
        parser,
        defaults={name: str(value) for name, value in ENGINE.items()}
        | {name: str(getattr(MODEL, name)) for name in MODEL_FLAGS}
        | {
            "workload": "a mix of both",
            "requests": str(DEFAULT_NUM_REQUESTS),
            "turns": str(DEFAULT_NUM_TURNS),
            "concurrency": str(DEFAULT_CONCURRENCY),
            "num_blocks": "half of the prompts in flight",
        },
    )
    parser.set_defaults(**ENGINE)
    args = parser.parse_args(argv)
    args.seconds = args.seconds or args.seconds_flag
    return args


def run() -> NoReturn:
    """Runs the command as a process of its own."""
    interrupt_once()
    end_process(main())


if __name__ == "__main__":
    run()
