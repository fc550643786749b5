"""Is a benchmark faster or slower than at another commit?

Runs one benchmark in both trees in turn, a process each time, and compares every figure that both of them report:
the ratio of this tree's median to the other commit's, pair by pair, so that a machine that slows down slows both. The
other commit is checked out into a temporary folder; the packages are those of the environment at hand. Above 1 is
slower for seconds, faster for rates. In place of a commit it takes a folder with a tree, such as build/compiled, which
`scripts/test --compiled` makes.

  python benchmarks/compare_commits.py --against HEAD~20 bench_dispatch.py
  python benchmarks/compare_commits.py --against v1 --rounds 5 bench_index.py --num-indexed 100000 --chunks-timed 50000
  python benchmarks/compare_commits.py --against build/compiled bench_groups.py
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from common import Spread, count, make_parser, print_table, write_json

ROOT = Path(__file__).resolve().parent.parent
_LABELS = (
    "case",
    "num_layers",
    "num_indexed",
    "prompt_chunks",
    "path",
    "direction",
    "num_blocks",
    "block_kib",
    "dtype",
)
"""What tells a benchmark's points apart."""


def figures(report: dict[str, Any]) -> dict[str, float]:
    """The medians of a benchmark's JSON file, by point and name."""
    found = {}
    for row in report["results"]:
        point = " ".join(f"{name}={row[name]}" for name in (*_LABELS, "num_devices") if name in row)
        for name, value in _medians(row):
            found[f"{point}: {name}"] = value
    return found


def _medians(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        if isinstance(value.get("median"), int | float):
            yield name, value["median"]
        else:
            for key, inner in value.items():
                yield from _medians(inner, f"{name}.{key}" if name else key)


def check_out(commit: str, folder: Path) -> None:
    """Unpacks a commit of the repository that this tree is in, as build/compiled may be."""
    find = ["git", "rev-parse", "--show-toplevel"]
    top = subprocess.run(find, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    archive = subprocess.run(["git", "archive", commit], cwd=top, check=True, stdout=subprocess.PIPE).stdout
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive, check=True)


def measure(tree: Path, command: Sequence[str], output: Path) -> dict[str, float]:
    """Runs the benchmark of a tree.

    Raises:
      CalledProcessError: it failed; it has said why.
    """
    benchmark, *arguments = command
    subprocess.run(
        [sys.executable, tree / "benchmarks" / benchmark, *arguments, "--json", output],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree)},
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return figures(json.loads(output.read_text()))


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--against", required=True, metavar="COMMIT or FOLDER")
    parser.add_argument("--rounds", type=count, default=5, help="runs in each tree")
    parser.add_argument("--only", default="", metavar="PATTERN", help="figures whose names match")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="a benchmark of this folder, and its arguments")
    args = parser.parse_args(argv)
    if not args.command:
        parser.error("which benchmark? Give its file name, as bench_dispatch.py")
    ratios: dict[str, list[float]] = {}
    values: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        other = Path(args.against).resolve()
        try:
            if not other.is_dir():
                other = Path(folder, "other")
                other.mkdir()
                check_out(args.against, other)
            for number in range(args.rounds):
                print(f"round {number + 1} of {args.rounds}", file=sys.stderr, flush=True)
                found = {tree: measure(tree, args.command, Path(folder, "out.json")) for tree in _order(other, number)}
                for name in found[ROOT].keys() & found[other].keys():
                    here, there = found[ROOT][name], found[other][name]
                    if there and re.search(args.only, name):
                        ratios.setdefault(name, []).append(here / there)
                        values.setdefault(name, []).append((there, here))
        except subprocess.CalledProcessError as e:
            command = " ".join(map(str, e.cmd))
            print(f"compare_commits: {command} failed with exit status {e.returncode}", file=sys.stderr)
            return 1
    rows = []
    for name, some in sorted(ratios.items()):
        before, after = (Spread.of(side) for side in zip(*values[name], strict=True))
        rows.append((name, f"{before.median:.4g}", f"{after.median:.4g}", Spread.of(some).range()))
    print_table(
        f"{args.command[0]}: this tree and {args.against}, {args.rounds} runs each",
        ("", args.against, "here", "ratio, median (min-max)"),
        rows,
    )
    write_json(
        args,
        question="is a benchmark faster or slower than at another commit",
        ratios={name: Spread.of(some) for name, some in ratios.items()},
        values=values,
    )
    return 0


def _order(other: Path, number: int) -> tuple[Path, Path]:
    return (other, ROOT) if number % 2 else (ROOT, other)


if __name__ == "__main__":
    sys.exit(main())
