"""`tpu-offload bench`: measures the copy paths on this machine and writes down which is best.

The file that it writes is what `TPU_OFFLOAD_COPY_PROFILE` points to, and all that a person has to send for
others to see how the machine does.
"""

import argparse
import contextlib
import dataclasses
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax

from tpu_offload.cli import bench_report
from tpu_offload.cli.devices import check_backend, device_errors
from tpu_offload.cli.flags import float_flag, int_flag
from tpu_offload.cli.output import check_writable, write_json
from tpu_offload.cli.terminal import stop_on_interrupt
from tpu_offload.cli.transfer_figures import PATHS, Failure, Figures
from tpu_offload.cli.transfer_methods import Geometry
from tpu_offload.cli.transfer_rates import TransferBench, num_walked_blocks
from tpu_offload.config import CopyPath
from tpu_offload.errors import InputError
from tpu_offload.memory import available_nbytes

DEFAULT_OUTPUT = Path("tpu-offload-profile.json")
DTYPES = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float16", "float32", "int8")
_NUM_KV_HEADS, _HEAD_DIM = 8, 128  # of Llama-3-8B
_COMPILE_SHARE = 0.6  # of the time, for model steps with fused copies to compile
_MEMORY_SHARE = 0.6  # of the memory that is free, for everything that is measured with


@dataclasses.dataclass(frozen=True, slots=True)
class _Defaults:
    """What depends on the platform: a CPU is there to try the command, and should be done in seconds."""

    num_layers: int
    block_size: int
    seconds: float
    step_ms: float


_ON_CPU = _Defaults(num_layers=8, block_size=16, seconds=60, step_ms=2)
_ON_ACCELERATOR = _Defaults(num_layers=32, block_size=128, seconds=100, step_ms=5)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `tpu-offload bench`, and the function that runs it, to its parser."""
    parser.description = (
        "Measures how fast blocks move between device and host by each copy path, beside what the "
        "machine can do at all and beside one device_put a block, and how much it delays a model. Prints what to "
        "set and writes it to a file for TPU_OFFLOAD_COPY_PROFILE. The TPU_OFFLOAD_* variables do not apply."
    )
    add = parser.add_argument
    add(
        "--output",
        type=Path,
        default=DEFAULT_OUTPUT,
        metavar="FILE",
        help=f"write the profile to FILE ({DEFAULT_OUTPUT})",
    )
    add("--seconds", type=float_flag(0), metavar="S", help="stop about then, compiling included (100; on a CPU 60)")
    add("--quick", action="store_true", help="jobs of 1 and 8 blocks, 5 rounds: a first look, in seconds")
    names = [path.value for path in PATHS]
    add("--paths", nargs="+", choices=names, metavar="PATH", help=f"copy paths to measure ({' '.join(names)})")
    add(
        "--num-blocks",
        type=int_flag(1, 4096),
        nargs="+",
        metavar="N",
        help="blocks in a job, one or more sizes (1 8 64)",
    )
    add("--rounds", type=int_flag(1), metavar="N", help="rounds at most for each size (25)")
    add(
        "--num-layers", type=int_flag(1, 1024), metavar="N", help="layers (32; on a CPU 8; fewer where memory is small)"
    )
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument(
        "--block-size", type=int_flag(1, 65536), metavar="N", help="tokens in a block (128; on a CPU 16)"
    )
    shape.add_argument(
        "--page-shape",
        type=int_flag(1),
        nargs="+",
        metavar="N",
        help="one layer's slice of a block over all devices: tokens, heads (split over the devices), ... "
        f"(block size, {_NUM_KV_HEADS}, 2, {_HEAD_DIM})",
    )
    add("--dtype", choices=DTYPES, default=DTYPES[0], metavar="NAME", help=f"type of the KV cache ({DTYPES[0]})")
    add("--devices", type=int_flag(1), metavar="N", help="devices that split a page (all of this host)")
    add(
        "--step-ms",
        type=float_flag(0),
        metavar="MS",
        help="length of the model steps that copies may delay; 0 runs none, and measures no fused path (5; on a CPU 2)",
    )
    add(
        "--fused-blocks",
        type=int_flag(1, 4096),
        default=8,
        metavar="N",
        help="blocks that a step copies at most by the fused path, the rest of a job goes directly; more take "
        "longer to compile (8)",
    )
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace, argv: list[str]) -> int:
    started_s = time.monotonic()
    check_writable(args.output)
    check_backend()
    defaults = _ON_CPU if jax.default_backend() == "cpu" else _ON_ACCELERATOR
    sizes = tuple(sorted(set(args.num_blocks or ((1, 8) if args.quick else (1, 8, 64)))))
    step_s = (defaults.step_ms if args.step_ms is None else args.step_ms) / 1e3
    paths = _paths(args.paths, step_s)
    geometry = _fit(_geometry(args, defaults), max(sizes), len(paths), may_shrink=args.num_layers is None)
    seconds = (defaults.seconds if args.seconds is None else args.seconds) + started_s - time.monotonic()
    with device_errors(make_smaller="--num-layers, --block-size or --num-blocks"):
        figures, failures, interrupted = _measure(
            geometry,
            sizes,
            paths,
            seconds=seconds,
            rounds=args.rounds or (5 if args.quick else 25),
            step_s=step_s,
            max_fused=args.fused_blocks,
        )
    if interrupted and not figures:
        raise KeyboardInterrupt
    profile = bench_report.build_profile(geometry, figures, failures, argv, interrupted=interrupted)
    output = args.output
    if interrupted and output.is_file():  # a profile that may be whole is not given up for a part of one
        output = output.with_name(f"{output.name}.interrupted")
    write_json(output, profile)
    bench_report.tell(profile, figures, failures, geometry, output)
    if interrupted:
        sys.stderr.write("tpu-offload: interrupted: this is what was measured until then\n")
    return 130 if interrupted else 0


def _paths(names: Sequence[str] | None, step_s: float) -> tuple[CopyPath, ...]:
    if names is not None and CopyPath.FUSED.value in names and not step_s:
        raise InputError("--paths fused is measured as part of a model step, and --step-ms 0 runs none; leave out one")
    wanted = [CopyPath(name) for name in names] if names else [p for p in PATHS if step_s or p is not CopyPath.FUSED]
    return tuple(path for path in PATHS if path in wanted)


def _geometry(args: argparse.Namespace, defaults: _Defaults) -> Geometry:
    num_devices = args.devices or len(jax.local_devices())
    num_heads = math.lcm(_NUM_KV_HEADS, num_devices)  # beyond eight devices each holds a copy of a head
    page_shape = args.page_shape or (args.block_size or defaults.block_size, num_heads, 2, _HEAD_DIM)
    geometry = Geometry(args.num_layers or defaults.num_layers, tuple(page_shape), args.dtype, num_devices)
    geometry.sharding()  # finds out what cannot be before anything is measured
    return geometry


def _fit(geometry: Geometry, largest: int, num_paths: int, *, may_shrink: bool) -> Geometry:
    """The geometry, with fewer layers where memory is small.

    Raises:
      InputError: it does not fit, and may not be made smaller or is as small as can be.
    """
    on_cpu = jax.default_backend() == "cpu"
    host_nbytes = _MEMORY_SHARE * available_nbytes()
    stats: Mapping[str, int] = jax.local_devices()[0].memory_stats() or {}
    device_nbytes = _MEMORY_SHARE * (stats.get("bytes_limit", 2**62) - stats.get("bytes_in_use", 0))
    while True:
        num_walked = num_walked_blocks(geometry, largest)
        # Host: a pool for each path, the peer's blocks, the limit's buffer, staging arrays. Device: the caches,
        # what the peer gathers (it needs as much again while it does), the limit's buffer, staging arrays.
        host = (num_walked * num_paths + 4 * largest) * geometry.block_nbytes
        device = (num_walked + 5 * largest) * geometry.block_nbytes // geometry.num_devices
        if on_cpu:  # where a device is the host, and the limit has two buffers of the caches' size
            host, device = host + (3 * num_walked + 5 * largest) * geometry.block_nbytes, 0
        if host <= host_nbytes and device <= device_nbytes:
            return geometry
        if not may_shrink or geometry.num_layers == 1:
            raise InputError(
                f"jobs of {largest} blocks of {geometry.block_nbytes / 2**20:.1f} MiB take {host / 2**30:.1f} GB of "
                f"host memory and {device / 2**30:.1f} GB a device, and there are {host_nbytes / 2**30:.1f} and "
                f"{device_nbytes / 2**30:.1f}; make --num-layers, --block-size or --num-blocks smaller"
            )
        geometry = dataclasses.replace(geometry, num_layers=geometry.num_layers // 2)


def _measure(
    geometry: Geometry,
    sizes: Sequence[int],
    paths: Sequence[CopyPath],
    *,
    seconds: float,
    rounds: int,
    step_s: float,
    max_fused: int,
) -> tuple[list[Figures], list[Failure], bool]:
    """What was measured, what failed, and whether Ctrl-C put an end to it."""
    give_up_s = time.monotonic() + seconds
    # The CPU backend copies float8 a thousand times slower in the peer's way, which says nothing of TPUs.
    with_peer = not (jax.default_backend() == "cpu" and geometry.dtype.startswith("float8"))
    sys.stderr.write(f"compiling: {', '.join(path.value for path in paths)}\n")
    bench = TransferBench(
        geometry,
        sizes=sizes,
        paths=paths,
        with_peer=with_peer,
        step_s=step_s,
        max_fused_blocks=max_fused,
        compile_s=_COMPILE_SHARE * seconds,
    )
    figures: list[Figures] = []
    with contextlib.closing(bench), stop_on_interrupt() as stop:
        for i, size in enumerate(sizes):
            if stop():
                break
            left_s = give_up_s - time.monotonic()
            if left_s <= 0 and figures:
                sys.stderr.write(f"jobs of {size} blocks: left out, the time is over; --seconds gives more\n")
                continue
            sys.stderr.write(f"jobs of {size} blocks: measuring, {max(left_s, 0):.0f} s left\n")
            figures += bench.measure(size, seconds=left_s / (len(sizes) - i), max_rounds=rounds, stop=stop)
        return figures, bench.failures, stop()
