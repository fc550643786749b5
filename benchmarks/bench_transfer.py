"""How fast do blocks move between the caches and the host pool, compared with the hardware's limit and the peer?

Sweeps blocks in a job, bytes of a block, layers, dtype, devices, copy path and direction. The base shape is the middle
one of `--block-kib` with the first of the other lists. All block sizes are measured; then layers, dtypes and devices
are varied one at a time, with every other job size. The first of `--paths` is measured everywhere and the others on
the base shape: the full product would take hours. `tpu_offload.measure` defines the figures: interleaved rounds,
ratios within a round, the limit and the peer's method in each round.

  python benchmarks/bench_transfer.py --json transfer.json
  python benchmarks/bench_transfer.py --paths direct --block-kib 1024 --num-blocks 4 16 64 --seconds 20

On a CPU the devices are virtual, as many as the largest value of `--devices`, and the peer's method skips float8: the
CPU backend copies it element by element, which says nothing about an accelerator. The path `fused` has no rate: it is
part of a model step (`--step-ms`), and its figure is the step's delay.
"""

import argparse
import dataclasses
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from common import Spread, count, make_parser, write_json

KIB = 2**10
HEADS, HEAD_DIM = 8, 128
TARGET_LIMIT, TARGET_ONE_BLOCK, TARGET_PEER = 0.8, 0.4, 5.0


@dataclasses.dataclass(frozen=True)
class Point:
    """One shape of the caches."""

    block_kib: int
    num_layers: int
    dtype: str
    num_devices: int

    @property
    def page_shape(self) -> tuple[int, ...] | None:
        """The caches' pages, `[tokens, 8, 2, 128]`; None where a page would be under one token."""
        token_nbytes = HEADS * 2 * HEAD_DIM * (1 if "8" in self.dtype else 2)
        tokens = self.block_kib * KIB // self.num_layers // token_nbytes
        return (tokens, HEADS, 2, HEAD_DIM) if tokens else None

    def __str__(self) -> str:
        return f"{self.block_kib} KiB x {self.num_layers} layers, {self.dtype}, {self.num_devices} device(s)"


def points(args: argparse.Namespace) -> dict[Point, tuple[list[str], list[int]]]:
    """The sweep: each shape once, with its paths and job sizes."""
    base = Point(sorted(args.block_kib)[len(args.block_kib) // 2], args.num_layers[0], args.dtype[0], args.devices[0])
    axes = {
        "block_kib": args.block_kib,
        "num_layers": args.num_layers,
        "dtype": args.dtype,
        "num_devices": args.devices,
    }
    todo: dict[Point, tuple[list[str], list[int]]] = {}
    for axis, values in axes.items():
        for value in values:
            point = dataclasses.replace(base, **{axis: value})
            sizes = args.num_blocks if axis == "block_kib" else args.num_blocks[::2]
            sizes = [n for n in sizes if n * point.block_kib <= args.max_job_mib * KIB]
            if point.page_shape and sizes:
                todo.setdefault(point, (args.paths if point == base else args.paths[:1], sizes))
    return todo


def measure(
    point: Point, paths: list[str], sizes: list[int], args: argparse.Namespace, seconds: float
) -> list[dict[str, Any]]:
    """Measures all job sizes of one shape; returns rows for the file and the table."""
    import jax

    from tpu_offload.config import CopyPath
    from tpu_offload.measure import Geometry, TransferBench, as_json
    from tpu_offload.types import Direction

    started_s = time.monotonic()
    assert point.page_shape is not None
    geometry = Geometry(point.num_layers, point.page_shape, point.dtype, point.num_devices)
    bench = TransferBench(
        geometry,
        sizes=sizes,
        paths=[CopyPath(path) for path in paths],
        directions=[Direction(direction) for direction in args.directions],
        with_peer=not (jax.default_backend() == "cpu" and "float8" in point.dtype),
        step_s=args.step_ms / 1e3,
    )
    rows = []
    try:
        for i, size in enumerate(sizes):
            left_s = seconds - (time.monotonic() - started_s)
            # Ten times the blocks take about ten times as long; the square root leaves time for all sizes.
            share = size**0.5 / sum(n**0.5 for n in sizes[i:])
            for one in bench.measure(size, seconds=left_s * share, max_rounds=args.rounds):
                rows.append(dataclasses.asdict(point) | as_json(one))
    finally:
        bench.close()
    for failure in bench.failures:
        print(f"  {failure.path.value} {failure.direction.value}s failed: {failure.error}", flush=True)
    return rows


def show(row: dict[str, Any]) -> None:
    delay = f", delay {row['delay_s']['median'] * 1e3:.2f} ms" if row["delay_s"] else ""
    if not row["gb_per_s"]:  # part of a step, without its own time
        print(f"  {row['path']:6} {row['direction']} {row['num_blocks']:4} blocks{delay}, {row['num_rounds']} rounds")
        return
    limit, rate = row["of_limit"], row["gb_per_s"]["median"]
    peer = f"{row['of_peer']['median']:6.2f}" if row["of_peer"] else "     -"
    bare = f", of program {row['of_program']['median']:.2f}" if row["of_program"] else ""
    floor = f", of floor {row['of_floor']['median']:.2f}" if row["of_floor"] else ""
    print(
        f"  {row['path']:6} {row['direction']} {row['num_blocks']:4} blocks {rate:7.2f} GB/s, of limit "
        f"{limit['median']:.2f} ({limit['p10']:.2f}-{limit['p90']:.2f}){bare}{floor}, of peer {peer}{delay}, "
        f"{row['num_rounds']} rounds",
        flush=True,
    )


def targets(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line per target of the direct path and direction: the minimum and the median of the medians."""
    lines: list[dict[str, Any]] = []
    for direction in ("save", "load"):
        mine = [row for row in rows if (row["path"], row["direction"]) == ("direct", direction)]
        large = [row for row in mine if row["num_blocks"] >= 4 and row["block_kib"] >= KIB]
        one = [row for row in mine if (row["num_blocks"], row["block_kib"]) == (1, KIB)]
        for name, chosen, ratio, target in (
            ("jobs of >= 4 blocks of >= 1 MiB, ratio to the limit", large, "of_limit", TARGET_LIMIT),
            ("one block of 1 MiB, ratio to the limit", one, "of_limit", TARGET_ONE_BLOCK),
            ("jobs of >= 4 blocks of >= 1 MiB, ratio to the peer's method", large, "of_peer", TARGET_PEER),
        ):
            values = [row[ratio]["median"] for row in chosen if row[ratio]]
            if not values:
                continue
            spread = Spread.of(values)
            num_met = sum(value >= target for value in values)
            lines.append(
                {
                    "text": f"direct {direction}s, {name}: min {spread.min:.2f}, median {spread.median:.2f} "
                    f"(target {target:g}: {num_met} of {len(values)} shapes)",
                    "direction": direction,
                    "what": name,
                    "min": spread.min,
                    "median": spread.median,
                    "target": target,
                    "num_met": num_met,
                    "num_shapes": len(values),
                }
            )
    return lines


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--paths", nargs="+", choices=["direct", "staged", "fused"], default=["direct", "staged"])
    add("--directions", nargs="+", choices=["save", "load"], default=["save", "load"])
    add("--num-blocks", type=count, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128], help="blocks in a job")
    add("--block-kib", type=count, nargs="+", default=[64, 256, 1024, 4096, 16384], help="KiB of a block, all layers")
    add("--num-layers", type=count, nargs="+", default=[8, 2, 32, 64], help="the first one is in the base shape")
    add("--dtype", nargs="+", default=["bfloat16", "float8_e4m3fn"], help="the first one is in the base shape")
    add(
        "--devices",
        type=count,
        nargs="+",
        default=[1, 8],
        help="devices that a page is sharded over; the first one is in the base shape",
    )
    add("--max-job-mib", type=count, default=128, help="skip larger jobs")
    add("--rounds", type=count, default=15, help="maximum number per shape and job size")
    add("--seconds", type=float, default=330, help="approximate duration of the whole sweep")
    add("--step-ms", type=float, default=0, help="also measure the delay of model steps of this duration")
    args = parser.parse_args(argv)
    if "fused" in args.paths and not args.step_ms:
        parser.error("fused is measured as part of a model step: set --step-ms")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    # jax reads it when it creates the CPU backend, so it is set before any import of jax.
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        flag = f"--xla_force_host_platform_device_count={max(args.devices)}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
    started_s = time.monotonic()
    todo = points(args)
    rows: list[dict[str, Any]] = []
    for i, (point, (paths, sizes)) in enumerate(todo.items()):
        left_s = args.seconds - (time.monotonic() - started_s)
        print(f"[{time.monotonic() - started_s:4.0f} s] {i + 1} of {len(todo)}: {point}", flush=True)
        found = measure(point, paths, sizes, args, max(0.0, left_s / (len(todo) - i)))
        for row in found:
            show(row)
        rows += found
    lines = targets(rows)
    print()
    for line in lines:
        print(line["text"])
    write_json(args, question="transfer speed", targets=lines, results=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
