"""`tpu-offload simulate`: plays request traces through eviction policies, and says how far each is from the best."""

import argparse
import contextlib
import dataclasses
import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from tpu_offload.cli.flags import float_flag, int_flag, list_flag
from tpu_offload.cli.output import check_writable, write_file, write_json
from tpu_offload.cli.simulate_plot import check_plottable, draw
from tpu_offload.cli.simulate_sizes import (
    Size,
    Unit,
    add_model_flags,
    chunk_nbytes,
    gb_flag,
    share_flag,
    size_flag,
)
from tpu_offload.config import SaveEvent
from tpu_offload.core.policies import POLICIES, find_policy
from tpu_offload.errors import ConfigError, InputError
from tpu_offload.sim import (
    BOUND,
    Case,
    Experiment,
    Result,
    SecondaryMode,
    TierSetup,
    Trace,
    no_front,
    play_hbm,
    read_traces,
    run_all,
)

_logger = logging.getLogger(__name__)

_SIZES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_SAVE_EVENTS = (SaveEvent.COMPUTE, SaveEvent.HBM_EVICTION)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `tpu-offload simulate`, and the function that runs it, to its parser."""
    parser.description = (
        "Plays the prompts of request traces through host tiers of several sizes with several eviction "
        "policies, and beside them the best that could be done (belady). docs/simulator.md says more."
    )
    _add_trace_flags(parser)
    _add_tier_flags(parser)
    add_model_flags(parser)
    add = parser.add_argument
    add("--json", type=Path, metavar="FILE", help="write the results to FILE")
    add("--plot", type=Path, metavar="FILE", help="draw hit rate against size into FILE (.png, .svg or .pdf)")
    num_cores = os.cpu_count() or 1
    add("--jobs", type=int_flag(1, 1024), default=num_cores, metavar="N", help=f"processes ({num_cores})")
    parser.set_defaults(run=_run)


def _add_trace_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--trace",
        type=Path,
        nargs="+",
        action="extend",
        required=True,
        metavar="FILE",
        help="JSON lines in the Mooncake format; several are played side by side",
    )
    add("--trace-block-tokens", type=int_flag(1), default=512, metavar="N", help="tokens that an id stands for (512)")
    add("--start", type=float_flag(0), default=0.0, metavar="S", help="leave out requests before this second (0)")
    add("--end", type=float_flag(0), default=float("inf"), metavar="S", help="leave out those from this second on")
    add(
        "--split",
        type=float_flag(0),
        metavar="S",
        help="count hits only from this second on; below 1, from this part of the played time on",
    )


def _add_tier_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    names = ", ".join((*POLICIES, BOUND))
    add(
        "--policies",
        type=list_flag(_policy),
        nargs="+",
        metavar="NAME",
        help=f"of {names} (all of them), or module:Class",
    )
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument(
        "--sizes",
        type=list_flag(share_flag),
        nargs="+",
        metavar="SHARE",
        help=f"sizes of the host tier as shares of the unique blocks ({' '.join(f'{size:g}' for size in _SIZES)})",
    )
    sizes.add_argument("--sizes-gb", type=list_flag(gb_flag), nargs="+", metavar="GB", help="the same in GB")
    what = "a share of the unique blocks (0.05), a number of chunks (9000) or GB (40GB)"
    add("--hbm", type=size_flag, metavar="SIZE", help=f"put a prefix cache in HBM in front: {what}")
    events = [event.value for event in _SAVE_EVENTS]
    add("--save-on", choices=events, default=events[0], help=f"when blocks are saved ({events[0]})")
    add("--save-after-sightings", type=int_flag(1, 15), default=1, metavar="N", help="save what N requests had (1)")
    add("--secondary", type=size_flag, metavar="SIZE", help="put a secondary tier behind, sized likewise")
    modes = [mode.value for mode in SecondaryMode]
    add("--secondary-mode", choices=modes, help=f"fill it on save, or when the host tier evicts ({modes[0]})")


def _policy(name: str) -> str:
    if ":" in name:
        try:
            find_policy(name)
        except ConfigError as e:
            raise argparse.ArgumentTypeError(str(e)) from e
    elif name not in POLICIES and name != BOUND:
        raise argparse.ArgumentTypeError(f"{name!r}; expected one of {', '.join((*POLICIES, BOUND))}, or module:Class")
    return name


def _run(args: argparse.Namespace, argv: list[str]) -> int:
    from tpu_offload.cli import simulate_report  # imports rich, which takes time that `--help` need not

    _check(args)
    nbytes = chunk_nbytes(args)
    trace = _read(args)
    sizes = _flat(args.sizes or args.sizes_gb) or [Size(size, Unit.SHARE) for size in _SIZES]
    runs = _runs(args, sizes, num_unique_blocks=trace.num_unique_blocks, nbytes=nbytes)
    num_hbm_blocks = _num_chunks(args.hbm, trace.num_unique_blocks, nbytes)
    front = play_hbm(trace, num_hbm_blocks) if num_hbm_blocks else no_front(trace)
    experiment = Experiment(trace, split=_split(args, trace), only_second=args.split is not None, front=front)
    results = _play(experiment, runs, num_jobs=args.jobs)
    report = {
        "results": simulate_report.as_json(experiment, results, chunk_nbytes=nbytes),
        "traces": [str(path) for path in args.trace],
        **simulate_report.describe(experiment, num_hbm_blocks=num_hbm_blocks, chunk_nbytes=nbytes),
        "save_on": args.save_on,
        "save_after_sightings": args.save_after_sightings,
        "secondary_mode": args.secondary_mode,
        "argv": argv,
    }
    if args.json is not None:
        write_json(args.json, report)
    if args.plot is not None:
        write_file(args.plot, draw(report, args.plot.suffix))
    simulate_report.tell(report)
    return 0


def _check(args: argparse.Namespace) -> None:
    """What can be known to be wrong before anything is read."""
    _check_outputs(args)
    if args.plot is not None:
        check_plottable(args.plot)
    if args.save_on != SaveEvent.COMPUTE.value and args.hbm is None:
        raise InputError(f"--save-on {args.save_on} does nothing without an HBM; give its size with --hbm")
    if args.secondary_mode and args.secondary is None:
        raise InputError(f"--secondary-mode {args.secondary_mode} does nothing without --secondary")
    args.secondary_mode = args.secondary_mode or SecondaryMode.CASCADE.value


def _check_outputs(args: argparse.Namespace) -> None:
    """Each file that is written can be, and is none that is read and not the other one, whatever it is called."""
    taken = {os.path.realpath(path): f"the trace {path} is read from" for path in args.trace}
    for flag, path in (("--json", args.json), ("--plot", args.plot)):
        if path is None:
            continue
        owner = taken.get(os.path.realpath(path))
        if owner:
            raise InputError(f"{flag} {path} is the file that {owner}; expected another file")
        taken[os.path.realpath(path)] = f"{flag} {path} is written to"
        check_writable(path)


def _read(args: argparse.Namespace) -> Trace:
    trace = read_traces(args.trace, block_tokens=args.trace_block_tokens)
    for note in trace.notes:
        _logger.warning("%s", note)
    trace = trace.between(args.start, args.end)
    if not trace.num_blocks:
        raise InputError("no request has a block: every list of hash_ids is empty")
    return trace


def _split(args: argparse.Namespace, trace: Trace) -> int:
    """How many requests come before the split, by default the middle of the time."""
    split = 0.5 if args.split is None else args.split
    first_s, last_s = trace.requests[0].time_s, trace.duration_s
    split_s = first_s + split * (last_s - first_s) if split < 1 else split
    num_requests = trace.num_before(split_s)
    if args.split is not None and not any(request.blocks for request in trace.requests[num_requests:]):
        raise InputError(f"--split {args.split:g}: no block comes after it; the last request is at {last_s:g} s")
    return num_requests


def _runs(args: argparse.Namespace, sizes: Iterable[Size], *, num_unique_blocks: int, nbytes: int | None) -> list[Case]:
    common = TierSetup(
        num_chunks=0,
        save_on=SaveEvent(args.save_on),
        num_sightings=args.save_after_sightings,
        num_secondary_chunks=_num_chunks(args.secondary, num_unique_blocks, nbytes),
        secondary_mode=SecondaryMode(args.secondary_mode),
    )
    shares_and_setups = []
    for size in sizes:
        num_chunks = _num_chunks(size, num_unique_blocks, nbytes)
        share = size.value if size.unit is Unit.SHARE else num_chunks / num_unique_blocks
        shares_and_setups.append((share, dataclasses.replace(common, num_chunks=num_chunks)))
    policies = _flat(args.policies) or (*POLICIES, BOUND)
    return [Case(policy, share, setup) for policy in policies for share, setup in dict.fromkeys(shares_and_setups)]


def _num_chunks(size: Size | None, num_unique_blocks: int, nbytes: int | None) -> int:
    return size.num_chunks(num_unique_blocks=num_unique_blocks, chunk_nbytes=nbytes) if size else 0


def _flat[T](lists: Sequence[Sequence[T]] | None) -> list[T]:
    """All values of a flag that may be given with spaces, commas or both, each once."""
    return list(dict.fromkeys(value for values in lists or () for value in values))


def _play(experiment: Experiment, runs: Sequence[Case], *, num_jobs: int) -> list[Result]:
    from tpu_offload.cli.console import progress

    results: dict[int, Result] = {}
    with (
        progress(len(runs), what="runs") as start,
        contextlib.closing(run_all(experiment, runs, num_jobs=num_jobs)) as all_,
    ):
        on_finish = start("simulate")
        for number, result in all_:
            results[number] = result
            on_finish()
    return [results[number] for number in range(len(runs))]
