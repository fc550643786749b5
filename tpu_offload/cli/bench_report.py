"""What `tpu-offload bench` writes and prints."""

import dataclasses
import enum
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.table import Table

from tpu_offload.cli.console import ReportConsole
from tpu_offload.cli.devices import environment
from tpu_offload.cli.transfer_figures import Failure, Figures, Spread, rank
from tpu_offload.cli.transfer_methods import Geometry
from tpu_offload.config import CopyPath
from tpu_offload.errors import InputError
from tpu_offload.profile import FORMAT, VERSION
from tpu_offload.types import Direction


def build_profile(
    geometry: Geometry,
    figures: Sequence[Figures],
    failures: Sequence[Failure],
    argv: Sequence[str],
    *,
    interrupted: bool = False,
) -> dict[str, Any]:
    """What goes into the file: the profile that is read back, and under `bench` all that was measured.

    Raises:
      InputError: no path works in one of the directions.
    """
    return {
        "format": FORMAT,
        "version": VERSION,
        "device_kind": jax.local_devices()[0].device_kind,
        "entries": [
            {
                "num_layers": geometry.num_layers,
                "page_nbytes": geometry.page_nbytes // geometry.num_devices,
                **{d.value: [path.value for path in _ranking(figures, failures, d)] for d in Direction},
            }
        ],
        "bench": {
            **environment(),
            "date": time.strftime("%Y-%m-%d"),
            "argv": list(argv),
            "interrupted": interrupted,
            "geometry": dataclasses.asdict(geometry) | {"block_nbytes": geometry.block_nbytes},
            "figures": [as_json(one) for one in figures],
            "failures": [as_json(one) for one in failures],
        },
    }


def _ranking(figures: Sequence[Figures], failures: Sequence[Failure], direction: Direction) -> list[CopyPath]:
    failed = {failure.path: failure.error for failure in failures if failure.direction is direction}
    ranking = rank(figures, direction, without=failed)
    if not ranking:
        why = "; ".join(f"{path.value}: {error}" for path, error in failed.items())
        raise InputError(f"no copy path that was measured works here for {direction.value}s: {why}")
    return ranking


def as_json(record: Figures | Failure) -> dict[str, Any]:
    """Figures or a failure, with names in the place of enums."""
    plain = dataclasses.asdict(record)
    return {key: value.value if isinstance(value, enum.Enum) else value for key, value in plain.items()}


def build_table(figures: Sequence[Figures], failures: Sequence[Failure], title: str) -> Table:
    """The figures for a terminal; what was not measured has no column."""
    with_peer = any(one.of_peer for one in figures)
    with_delay = any(one.delay_s for one in figures)
    table = Table(title=title)
    for name in ("", "blocks", "path"):
        table.add_column(name, justify="right" if name == "blocks" else "left", no_wrap=True)
    columns = ["GB/s", "limit", "of limit", *(["of peer"] if with_peer else []), "ms", "dispatch ms"]
    for name in columns + (["reported ms", "delays model ms"] if with_delay else []):
        # Where it is narrow, a ratio goes over two lines; nothing is ever cut off.
        width = 12 if name.startswith("of ") else max(map(len, name.split()))
        table.add_column(name, justify="right", overflow="fold", min_width=width)
    for direction in (Direction.SAVE, Direction.LOAD):
        mine = [one for one in figures if one.direction is direction]
        for num_blocks in sorted({one.num_blocks for one in mine}):
            for one in [one for one in mine if one.num_blocks == num_blocks]:
                cells = [
                    f"{one.gb_per_s.median:.2f}" if one.gb_per_s else "-",
                    f"{one.limit_gb_per_s.median:.2f}",
                    _ratio(one.of_limit),
                    *([_ratio(one.of_peer)] if with_peer else []),
                    _ms(one.seconds),
                    _ms(one.dispatch_s),
                    *([_ms(one.reported_s), _ms(one.delay_s)] if with_delay else []),
                ]
                table.add_row(direction.value, str(num_blocks), one.path.value, *cells)
            table.add_section()
        for failure in [failure for failure in failures if failure.direction is direction]:
            table.add_row(direction.value, "", failure.path.value, "failed")
        table.add_section()
    return table


def _ratio(spread: Spread | None) -> str:
    return f"{spread.median:.2f} ({spread.p10:.2f}-{spread.p90:.2f})" if spread else "-"


def _ms(spread: Spread | None) -> str:
    return f"{spread.median * 1e3:.2f}" if spread else "-"


def tell(
    profile: Mapping[str, Any],
    figures: Sequence[Figures],
    failures: Sequence[Failure],
    geometry: Geometry,
    output: Path,
) -> None:
    """Prints the table, what it was measured on, and the settings to use.

    Args:
      profile: as `build_profile` made it.
      figures: likewise.
      failures: likewise.
      geometry: of the caches.
      output: where the profile was written to.
    """
    console = ReportConsole()
    bench = profile["bench"]
    versions = ", ".join(f"{name} {version}" for name, version in bench["versions"].items())
    console.print(f"{geometry.num_devices} x {profile['device_kind']}; {versions}", highlight=False)
    shape = "x".join(map(str, geometry.page_shape))
    title = (
        f"blocks of {geometry.block_nbytes / 2**20:.2f} MiB: {geometry.num_layers} layers, pages of "
        f"{geometry.dtype}[{shape}]"
    )
    console.print(build_table(figures, failures, title))
    console.print("Ratios are of times, within a round: median (10th to 90th percentile). limit: one contiguous copy.")
    step = next((one.step_s for one in figures if one.step_s), None)
    if step:
        console.print(
            f"delays model: how much later a run of {step.median * 1e3:.1f} ms steps ends because of the job. "
            "reported: when the job is, beside these steps."
        )
    fused = [one for one in figures if one.path is CopyPath.FUSED]
    if fused:
        console.print("fused: the copy is inside of a step, and has no time of its own.")
    for num_blocks, num_fused in sorted({(f.num_blocks, f.num_fused_blocks) for f in fused}):
        if num_fused < num_blocks:
            console.print(f"fused jobs of {num_blocks} blocks: {num_fused} in the step, the others directly.")
    for failure in failures:
        text = f"{failure.path.value} {failure.direction.value}s failed: {failure.error}"
        console.print(text, highlight=False, markup=False)
    console.print("\nRecommended here:")
    best = {direction: profile["entries"][0][direction.value][0] for direction in Direction}
    for direction in Direction:
        console.print(f"  TPU_OFFLOAD_{direction.name}_PATH={best[direction]}", highlight=False)
    if CopyPath.FUSED.value in best.values():
        sizes = ",".join(map(str, sorted({1, *(one.num_fused_blocks for one in fused)})))
        console.print(
            f"fused was measured with TPU_OFFLOAD_BLOCK_SIZE_BUCKETS={sizes} (the engine's step is compiled for each) "
            "and needs an\nengine that offers it; with auto, one that does not takes the next best path.",
            highlight=False,
        )
    console.print("or, to have the paths read from the file that was written:")
    for direction in Direction:
        console.print(f"  TPU_OFFLOAD_{direction.name}_PATH=auto", highlight=False)
    console.print(
        f"  TPU_OFFLOAD_PROFILE={shlex.quote(str(output.absolute()))}", highlight=False, markup=False, soft_wrap=True
    )
