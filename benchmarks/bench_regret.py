"""How much is the default eviction policy behind the best of the others, on which traffic and at which size?

For each kind of generated traffic (`traffic.py`), each seed, and each size of the host tier, every policy is simulated.
Hits count after the learning time only, the first part of the requests. The regret of a cell is the hit rate of the
best other policy less that of the default; negative where the default is the best. A cell is a kind, a setup and a
size; its regret is the mean over the seeds, because one seed alone says how the dice fell, and its spread the standard
deviation of the regrets of the seeds, all against the policy that is best on the whole. Worst first.

Setups: `host` has the host tier alone; `hbm` has a prefix cache in HBM in front (`--hbm-share`), and blocks are saved
when they are computed; `evicted` the same, and they are saved when HBM evicts them. With `--storage` there is a storage
tier below, and the hits of both tiers count: one in storage, which has to be read, as a part of one in the host tier
(`--storage-worth`; 1 counts all alike). Those of the host tier are shown apart. The storage tier evicts by the policy
that `--storage-policy` names; `same` is that of the host tier.

  python benchmarks/bench_regret.py --json regret.json
  python benchmarks/bench_regret.py --trace conversation_trace.jsonl --halves --kinds --setups host hbm
"""

import argparse
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import traffic
from common import count, make_parser, print_table, write_json

from tpu_offload.config import DEFAULT_EVICTION_POLICY, SaveEvent, StorageEvictionPolicy, StorageWriteEvent
from tpu_offload.core.policies import POLICIES
from tpu_offload.core.policies.base import STORAGE_WORTH
from tpu_offload.sim import Trace, no_hbm, read_traces, simulate_hbm
from tpu_offload.sim.experiment import Case, Experiment, run_all
from tpu_offload.sim.replay import TierSetup
from tpu_offload.sim.storage import StorageSetup

SETUPS = {  # whether there is HBM in front, and when blocks are saved
    "host": (False, SaveEvent.COMPUTE),
    "hbm": (True, SaveEvent.COMPUTE),
    "evicted": (True, SaveEvent.HBM_EVICTION),
}
DEFAULT = DEFAULT_EVICTION_POLICY.value
LEAST_CHUNKS = 100
SAME = "same"


class Cell(NamedTuple):
    """What is compared, over all seeds; `kind` may be the path of a trace, `size` is a share of the unique blocks."""

    kind: str
    setup: str
    size: float


def read_kind(kind: str, seed: int) -> Trace:
    """Generated traffic, by way of its file format."""
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.writelines(json.dumps(line) + "\n" for line in traffic.lines(kind, seed=seed))
        file.flush()
        return read_traces([Path(file.name)])


def traces_of(args: argparse.Namespace) -> Iterator[tuple[str, int, Trace]]:
    """The traffic to compare on: name, seed and trace."""
    for path in args.trace:
        trace = read_traces([path])
        yield str(path), 0, trace
        if args.halves:
            half = trace.duration_s / 2
            yield f"{path}, first half", 0, trace.between(0, half)
            yield f"{path}, second half", 0, trace.between(half, math.inf)
    for kind in args.kinds:
        for seed in range(args.first_seed, args.first_seed + args.seeds):
            yield kind, seed, read_kind(kind, seed)


class Rates(NamedTuple):
    """Shares of the prompt blocks after the learning time that hit: in any tier behind HBM, and in the host tier."""

    all: float
    host: float

    def worth(self, of_storage: float) -> float:
        """As a share that hits in the host tier: what hits in storage counts so much."""
        return self.host + of_storage * (self.all - self.host)


def rates_of(trace: Trace, setup: str, args: argparse.Namespace) -> Iterator[tuple[float, str, Rates]]:
    """The rates of each size and policy."""
    has_hbm, save_on = SETUPS[setup]
    num_blocks = trace.num_unique_blocks
    hbm_result = simulate_hbm(trace, max(1, int(args.hbm_share * num_blocks))) if has_hbm else no_hbm(trace)
    split = int(args.learn * len(trace.requests))
    experiment = Experiment(trace, split=split, only_second=True, hbm_result=hbm_result)
    write_on = StorageWriteEvent(args.storage_write_on)

    def setup_of(size: float, policy: str) -> TierSetup:
        eviction = StorageEvictionPolicy(policy if args.storage_policy == SAME else args.storage_policy)
        storage = [
            StorageSetup(max(1, round(share * num_blocks)), write_on, eviction=eviction) for share in args.storage
        ]
        return TierSetup(max(LEAST_CHUNKS, round(size * num_blocks)), save_on=save_on, storage=tuple(storage))

    cases = [Case(policy, size, setup_of(size, policy)) for size in args.sizes for policy in POLICIES]
    for i, result in run_all(experiment, cases, num_jobs=args.jobs):
        second = result.second
        num_hits = second.num_host_hits + sum(second.num_storage_hits)
        rates = (num / max(1, second.num_blocks) for num in (num_hits, second.num_host_hits))
        yield cases[i].size_share, cases[i].policy, Rates(*rates)


def compare(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each cell and worth of storage, the one with the largest regret first."""
    rates: dict[Cell, dict[str, list[Rates]]] = {}
    for name, seed, trace in traces_of(args):
        for setup in args.setups:
            print(f"{name}, seed {seed}, {setup}", file=sys.stderr)
            for size, policy, rate in rates_of(trace, setup, args):
                cell = Cell(name, setup, size)
                rates.setdefault(cell, {}).setdefault(policy, []).append(rate)
    rows = [_row(cell, found, worth) for worth in args.storage_worth for cell, found in rates.items()]
    return sorted(rows, key=lambda row: -row["regret"])


def _row(cell: Cell, rates: dict[str, list[Rates]], worth: float) -> dict[str, Any]:
    worths = {policy: [rate.worth(worth) for rate in found] for policy, found in rates.items()}
    means = {policy: statistics.fmean(found) for policy, found in worths.items()}
    default = means.pop(DEFAULT)
    best = max(means, key=lambda policy: means[policy])
    regrets = [other - own for other, own in zip(worths[best], worths[DEFAULT], strict=True)]
    return {
        **cell._asdict(),
        "storage_worth": worth,
        "default": default,
        "best_other": best,
        "rates": means,
        "host_rates": {policy: statistics.fmean(rate.host for rate in found) for policy, found in rates.items()},
        "regret": means[best] - default,
        "spread": statistics.stdev(regrets) if len(regrets) > 1 else None,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    kinds = [*traffic.KINDS, traffic.CHANGING]
    parser.add_argument("--trace", type=Path, nargs="+", default=[], help="traces, beside the generated traffic")
    parser.add_argument("--halves", action="store_true", help="also each half of a trace, alone")
    all_kinds = [*kinds, *traffic.HELD_OUT]
    parser.add_argument("--kinds", nargs="*", choices=all_kinds, default=kinds, help="default: all not held out")
    parser.add_argument("--setups", nargs="+", choices=SETUPS, default=list(SETUPS))
    parser.add_argument("--sizes", type=_share, nargs="+", default=[0.005, 0.02, 0.1, 0.3], help="shares of the blocks")
    parser.add_argument("--hbm-share", type=_share, default=0.05, help="size of HBM, as a share of the blocks")
    parser.add_argument("--storage", type=_share, nargs="+", default=[], help="sizes of storage tiers, nearest first")
    parser.add_argument(
        "--storage-worth",
        type=_part,
        nargs="+",
        default=[STORAGE_WORTH],
        help="what a hit in storage counts, where one in the host tier counts 1; of several each has a table",
    )
    policies = [policy.value for policy in StorageEvictionPolicy]
    parser.add_argument("--storage-policy", choices=[*policies, SAME], default=policies[0], help="of the storage tiers")
    events = [event.value for event in StorageWriteEvent]
    parser.add_argument("--storage-write-on", choices=events, default=events[0], help="when storage is written")
    parser.add_argument("--seeds", type=count, default=3, help="seeds of each kind")
    parser.add_argument("--first-seed", type=int, default=0, help="the first of them")
    parser.add_argument("--learn", type=_share, default=0.3, help="share of the requests that do not count")
    parser.add_argument("--jobs", type=count, default=2, help="processes")
    parser.add_argument("--rows", type=count, default=20, help="rows to print")
    args = parser.parse_args(argv)
    if not args.trace and not args.kinds:
        parser.error("--kinds names none, and there is no --trace; expected at least one")
    for path in args.trace:
        if not path.is_file():
            parser.error(f"--trace: there is no file {path}")
    rows = compare(args)
    for worth in args.storage_worth:
        _print([row for row in rows if row["storage_worth"] == worth], args, worth)
    write_json(args, question="how far the default eviction policy is behind the best of the others", results=rows)
    return 0


def _print(rows: list[dict[str, Any]], args: argparse.Namespace, worth: float) -> None:
    storage = bool(args.storage)
    counted = f", a hit in storage counts {worth:g}" if storage else ""
    print_table(
        f"{DEFAULT}: regret in {len(rows)} cells, the worst first{counted}",
        ["traffic", "setup", "size", DEFAULT, "best other", "", "regret", "spread", *(["host hits", ""] * storage)],
        [
            [
                row["kind"],
                row["setup"],
                f"{row['size']:g}",
                f"{row['default']:.4f}",
                row["best_other"],
                f"{row['rates'][row['best_other']]:.4f}",
                f"{row['regret']:+.4f}",
                "" if row["spread"] is None else f"{row['spread']:.4f}",
                *([f"{row['host_rates'][policy]:.4f}" for policy in (DEFAULT, row["best_other"])] * storage),
            ]
            for row in rows[: args.rows]
        ],
        num_labels=2,
    )
    for least in (0.002, 0.004, 0.01):
        print(f"cells with a regret over {least:g}: {sum(row['regret'] > least for row in rows)} of {len(rows)}")


def _share(text: str) -> float:
    share = _number(text)
    if not 0 <= share < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}; expected a share, at least 0 and below 1")
    return share


def _part(text: str) -> float:
    part = _number(text)
    if not 0 <= part <= 1:
        raise argparse.ArgumentTypeError(f"got {text!r}; expected a number from 0 to 1")
    return part


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return -1


if __name__ == "__main__":
    sys.exit(main())
