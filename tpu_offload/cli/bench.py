"""`tpu-offload bench`: measures the copy paths on this machine and writes a profile of them.

`TPU_OFFLOAD_COPY_PROFILE` points to the profile. The file holds all measurements, so it can also be sent to others.
"""

import math
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import jax
from rich.table import Column, Table

from tpu_offload.cli.files import check_outputs, output_file, write_file, write_json
from tpu_offload.cli.html.bench import bench_page
from tpu_offload.cli.html.flag import check_html, html_flag
from tpu_offload.cli.interrupts import stop_on_interrupt
from tpu_offload.cli.options import Command, FiniteFloat, MultiValue, number, option
from tpu_offload.cli.tables import ReportConsole, build_table
from tpu_offload.config import CopyPath
from tpu_offload.errors import InputError
from tpu_offload.measure import (
    PATHS,
    Failure,
    Figures,
    Geometry,
    Measured,
    Spread,
    build_profile,
    check_backend,
    device_errors,
    fit_geometry,
    measure,
)
from tpu_offload.types import Direction

DEFAULT_OUTPUT = Path("tpu-offload-profile.json")
DTYPES = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float16", "float32", "int8")
_NUM_KV_HEADS, _HEAD_DIM = 8, 128  # of Llama-3-8B
_NAMES = [path.value for path in PATHS]


class _Defaults(NamedTuple):
    """Defaults that depend on the platform. On a CPU the command is only tried out, so it takes seconds."""

    num_layers: int
    block_size: int
    seconds: float
    step_ms: float


_ON_CPU = _Defaults(num_layers=8, block_size=16, seconds=60, step_ms=2)
_ON_ACCELERATOR = _Defaults(num_layers=32, block_size=128, seconds=100, step_ms=5)


@click.command(cls=Command, exclusive=[("block_size", "page_shape")])
@option("--output", output_file, "FILE", f"write the profile to FILE ({DEFAULT_OUTPUT})", default=DEFAULT_OUTPUT)
@html_flag()
@option("--seconds", FiniteFloat(), "S", "approximate duration, including compilation (100; on a CPU 60)")
@click.option("--quick", is_flag=True, help="jobs of 1 and 8 blocks, 5 rounds: a first look, in seconds")
@option("--paths", MultiValue(click.Choice(_NAMES)), "PATH...", f"copy paths to measure ({' '.join(_NAMES)})")
@option(
    "--num-blocks", MultiValue(click.IntRange(1, 4096)), "N...", "job sizes in blocks, each from 1 to 4096 (1 8 64)"
)
@number("--rounds", "maximum number of rounds per size (25)")
@number("--num-layers", "layers (32; on a CPU 8; fewer if memory is small)", high=1024)
@number("--block-size", "tokens in a block (128; on a CPU 16)", high=65536)
@option(
    "--page-shape",
    MultiValue(click.IntRange(1)),
    "N...",
    "one layer's slice of a block over all devices: tokens, heads (sharded), ... "
    f"(block size, {_NUM_KV_HEADS}, 2, {_HEAD_DIM})",
)
@option("--dtype", click.Choice(DTYPES), "NAME", f"type of the KV cache ({DTYPES[0]})", default=DTYPES[0])
@number("--devices", "devices that a page is sharded over (all of this host)")
@option(
    "--step-ms",
    FiniteFloat(),
    "MS",
    "duration of the model steps that run beside the copies; 0 runs none and skips the fused path (5; on a CPU 2)",
)
@number(
    "--fused-blocks",
    "most blocks that one step copies by the fused path, the rest of a job is copied directly; more take longer to "
    "compile (8)",
    high=4096,
    default=8,
)
@click.pass_obj
def command(
    argv: list[str],
    /,
    *,
    output: Path,
    html: Path | None,
    seconds: float | None,
    quick: bool,
    paths: tuple[str, ...] | None,
    num_blocks: tuple[int, ...] | None,
    rounds: int | None,
    num_layers: int | None,
    block_size: int | None,
    page_shape: tuple[int, ...] | None,
    dtype: str,
    devices: int | None,
    step_ms: float | None,
    fused_blocks: int,
) -> int:
    """Measures how fast each copy path moves blocks between device and host, compared with the machine's limit and with
    one device_put per block, and how much it delays a model. Prints the settings to use and writes a profile for
    TPU_OFFLOAD_COPY_PROFILE. The TPU_OFFLOAD_* variables do not apply.
    """
    started_s = time.monotonic()
    check_outputs({}, output=output, html=html)
    check_html(html)
    check_backend()
    defaults = _ON_CPU if jax.default_backend() == "cpu" else _ON_ACCELERATOR
    sizes = tuple(sorted(set(num_blocks or ((1, 8) if quick else (1, 8, 64)))))
    step_s = (defaults.step_ms if step_ms is None else step_ms) / 1e3
    chosen = _paths(paths, step_s)
    page_shape = page_shape or _page_shape(block_size or defaults.block_size, devices)
    geometry = Geometry(num_layers or defaults.num_layers, page_shape, dtype, devices or len(jax.local_devices()))
    geometry.sharding()  # raises on an invalid geometry before anything is measured
    geometry = fit_geometry(geometry, max(sizes), len(chosen), may_shrink=num_layers is None)
    with device_errors(make_smaller="--num-layers, --block-size or --num-blocks"):
        measured = measure(
            geometry,
            sizes,
            chosen,
            seconds=(defaults.seconds if seconds is None else seconds) + started_s - time.monotonic(),
            max_rounds=rounds or (5 if quick else 25),
            step_s=step_s,
            max_fused_blocks=fused_blocks,
            on_progress=lambda line: click.echo(line, err=True),
            stop_on_interrupt=stop_on_interrupt,
        )
    if measured.interrupted and not measured.figures:
        raise KeyboardInterrupt
    profile = build_profile(geometry, measured, argv)
    if measured.interrupted and output.is_file():  # do not replace a complete profile by a partial one
        output = output.with_name(f"{output.name}.interrupted")
    write_json(output, profile)
    table = _figures_table(measured.figures, measured.failures, geometry)
    _print_report(profile, measured, geometry, output, table)
    if html is not None:
        write_file(html, bench_page(profile, table).render())
    if measured.interrupted:
        sys.stderr.write("tpu-offload: interrupted: the results cover what was measured until then\n")
    return 130 if measured.interrupted else 0


def _page_shape(block_size: int, num_devices: int | None) -> tuple[int, ...]:
    num_heads = math.lcm(_NUM_KV_HEADS, num_devices or len(jax.local_devices()))
    return block_size, num_heads, 2, _HEAD_DIM  # beyond eight devices heads are replicated


def _paths(names: Sequence[str] | None, step_s: float) -> tuple[CopyPath, ...]:
    if names and CopyPath.FUSED.value in names and not step_s:
        raise InputError("--paths fused needs model steps and --step-ms 0 runs none; drop one of them")
    return tuple(p for p in PATHS if (p.value in names if names else step_s or p is not CopyPath.FUSED))


def _figures_table(figures: Sequence[Figures], failures: Sequence[Failure], geometry: Geometry) -> Table:
    """The table of figures. Figures that were not measured have no column."""
    shape = "x".join(map(str, geometry.page_shape))
    title = (
        f"blocks of {geometry.block_nbytes / 2**20:.2f} MiB: {geometry.num_layers} layers, pages of "
        f"{geometry.dtype}[{shape}]"
    )
    shown = [spec for spec in _COLUMNS if spec[1] not in _MAY_BE_LEFT_OUT or any(getattr(f, spec[1]) for f in figures)]
    columns = [Column(name, justify="right" if name == "blocks" else "left", no_wrap=True) for name in _LABELS]
    for name, _, _ in shown:
        # In a narrow terminal a ratio wraps to two lines; nothing is truncated.
        width = 12 if name.startswith("of ") else max(map(len, name.split()))
        columns.append(Column(name, justify="right", overflow="fold", min_width=width))
    lines: list[Sequence[str] | None] = []
    for direction in (Direction.SAVE, Direction.LOAD):
        mine = [one for one in figures if one.direction is direction]
        for num_blocks in sorted({one.num_blocks for one in mine}):
            for one in mine:
                if one.num_blocks == num_blocks:
                    cells = (text(spread) if (spread := getattr(one, name)) else "-" for _, name, text in shown)
                    lines.append((direction.value, str(num_blocks), one.path.value, *cells))
            lines.append(None)
        lines += [(direction.value, "", f.path.value, "failed") for f in failures if f.direction is direction]
        lines.append(None)
    return build_table(title, columns, lines)


def _ms(spread: Spread) -> str:
    return f"{spread.median * 1e3:.2f}"


_plain, _ratio = "{0.median:.2f}".format, "{0.median:.2f} ({0.p10:.2f}-{0.p90:.2f})".format
_LABELS = ("", "blocks", "path")
_COLUMNS: tuple[tuple[str, str, Callable[[Spread], str]], ...] = (
    ("GB/s", "gb_per_s", _plain),
    ("limit", "limit_gb_per_s", _plain),
    ("of limit", "of_limit", _ratio),
    ("of peer", "of_peer", _ratio),
    ("ms", "seconds", _ms),
    ("dispatch ms", "dispatch_s", _ms),
    ("reported ms", "reported_s", _ms),
    ("delays model ms", "delay_s", _ms),
)
_MAY_BE_LEFT_OUT = ("of_peer", "reported_s", "delay_s")


def _print_report(
    profile: Mapping[str, Any], measured: Measured, geometry: Geometry, output: Path, table: Table
) -> None:
    """Prints the device, the table and the settings to use."""
    console = ReportConsole()
    figures, failures = measured.figures, measured.failures
    versions = ", ".join(f"{name} {version}" for name, version in profile["bench"]["versions"].items())
    console.print(f"{geometry.num_devices} x {profile['device_kind']}; {versions}", highlight=False)
    console.print(table)
    lines = ["Ratios are of times within a round: median (10th to 90th percentile). limit: one contiguous copy."]
    step = next((one.step_s for one in figures if one.step_s), None)
    if step:
        lines.append(
            f"delays model: how much later a run of {step.median * 1e3:.1f} ms steps ends because of the job. "
            "reported: when the job is reported while these steps run."
        )
    fused = sorted({(one.num_blocks, one.num_fused_blocks) for one in figures if one.path is CopyPath.FUSED})
    if fused:
        lines.append("fused: the copy is part of a step, so it has no time of its own.")
    lines += [f"fused jobs of {n} blocks: {k} in the step, the others directly." for n, k in fused if k < n]
    lines += [f"{one.path.value} {one.direction.value}s failed: {one.error}" for one in failures]
    best = {direction: profile["entries"][0][direction.value][0] for direction in Direction}
    lines += ["", "Recommended here:", *(f"  TPU_OFFLOAD_{d.name}_PATH={best[d]}" for d in Direction)]
    if CopyPath.FUSED.value in best.values():
        sizes = ",".join(map(str, sorted({1, *(num_fused for _, num_fused in fused)})))
        lines.append(
            f"fused was measured with TPU_OFFLOAD_BLOCK_SIZE_BUCKETS={sizes} (the engine's step is compiled for each) "
            "and needs an\nengine that supports it; with auto, other engines take the next best path."
        )
    lines.append("Or, to read the paths from the profile:")
    lines += [f"  TPU_OFFLOAD_{d.name}_PATH=auto" for d in Direction]
    for line in lines:
        console.print(line, highlight=False, markup=False)
    console.print(
        f"  TPU_OFFLOAD_COPY_PROFILE={shlex.quote(str(output.absolute()))}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
