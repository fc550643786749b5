"""`tpu-offload simulate`: plays request traces through eviction policies, and says how far each is from the best."""

import argparse
from pathlib import Path
from typing import Any

from tpu_offload.cli import report as report_lib
from tpu_offload.core import policies
from tpu_offload.sim import belady_hits, read_traces, replay

_SIZES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


def add_command(commands: Any) -> None:
    """Adds `simulate` to the subcommands of `tpu-offload`."""
    parser = commands.add_parser("simulate", help="play request traces through eviction policies", allow_abbrev=False)
    add = parser.add_argument
    add("--trace", type=Path, metavar="FILE", action="append", required=True, help="JSON lines in the Mooncake format")
    add("--policies", nargs="+", metavar="NAME", help="policies (all, and belady)")
    add("--sizes", type=float, nargs="+", default=_SIZES, metavar="SHARE", help="shares of the unique blocks")
    add("--json", type=Path, metavar="FILE", help="write the results to FILE")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace, argv: list[str]) -> int:
    if args.json is not None:
        report_lib.check_writable(args.json)
    known = dict(getattr(policies, "POLICIES", {"lru": policies.LRUPolicy}))
    default = getattr(policies, "DEFAULT_POLICY", "lru")
    trace = read_traces(args.trace)
    results = []
    for name in args.policies or (*known, "belady"):
        for share in args.sizes:
            num_chunks = max(1, round(share * trace.num_unique_blocks))
            if name == "belady":
                hits = tuple(belady_hits(trace, num_chunks))
            else:
                hits = replay(trace, known[name](), num_chunks=num_chunks).host_hits
            rate = sum(hits) / trace.num_blocks
            print(f"{name:12} {share:6g} {rate:.4f}")  # noqa: T201
            results.append(
                {
                    "policy": name,
                    "default": name == default,
                    "size_share": share,
                    "num_chunks": num_chunks,
                    "prefix_hit_rate": rate,
                }
            )
    if args.json is not None:
        report_lib.write_json(args.json, {"results": results, "argv": argv})
    return 0
