"""What `tpu-offload bench` writes and prints."""

import dataclasses
import enum
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.table import Column, Table

from tpu_offload.cli.console import ReportConsole
from tpu_offload.cli.devices import environment
from tpu_offload.cli.report import Spread, build_table
from tpu_offload.cli.transfer_figures import Failure, Figures, rank
from tpu_offload.cli.transfer_methods import Geometry
from tpu_offload.config import CopyPath
from tpu_offload.copy_profile import FORMAT, VERSION
from tpu_offload.errors import InputError
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


def figures_table(figures: Sequence[Figures], failures: Sequence[Failure], title: str) -> Table:
    """The figures for a terminal; what was not measured has no column."""
    shown = [spec for spec in _COLUMNS if spec[1] not in _MAY_BE_LEFT_OUT or any(getattr(f, spec[1]) for f in figures)]
    columns = [Column(name, justify="right" if name == "blocks" else "left", no_wrap=True) for name in _LABELS]
    for name, _, _ in shown:
        # Where it is narrow, a ratio goes over two lines; nothing is ever cut off.
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
    versions = ", ".join(f"{name} {version}" for name, version in profile["bench"]["versions"].items())
    console.print(f"{geometry.num_devices} x {profile['device_kind']}; {versions}", highlight=False)
    shape = "x".join(map(str, geometry.page_shape))
    title = (
        f"blocks of {geometry.block_nbytes / 2**20:.2f} MiB: {geometry.num_layers} layers, pages of "
        f"{geometry.dtype}[{shape}]"
    )
    console.print(figures_table(figures, failures, title))
    lines = ["Ratios are of times, within a round: median (10th to 90th percentile). limit: one contiguous copy."]
    step = next((one.step_s for one in figures if one.step_s), None)
    if step:
        lines.append(
            f"delays model: how much later a run of {step.median * 1e3:.1f} ms steps ends because of the job. "
            "reported: when the job is, beside these steps."
        )
    fused = sorted({(one.num_blocks, one.num_fused_blocks) for one in figures if one.path is CopyPath.FUSED})
    if fused:
        lines.append("fused: the copy is inside of a step, and has no time of its own.")
    lines += [f"fused jobs of {n} blocks: {k} in the step, the others directly." for n, k in fused if k < n]
    lines += [f"{one.path.value} {one.direction.value}s failed: {one.error}" for one in failures]
    best = {direction: profile["entries"][0][direction.value][0] for direction in Direction}
    lines += ["", "Recommended here:", *(f"  TPU_OFFLOAD_{d.name}_PATH={best[d]}" for d in Direction)]
    if CopyPath.FUSED.value in best.values():
        sizes = ",".join(map(str, sorted({1, *(num_fused for _, num_fused in fused)})))
        lines.append(
            f"fused was measured with TPU_OFFLOAD_BLOCK_SIZE_BUCKETS={sizes} (the engine's step is compiled for each) "
            "and needs an\nengine that offers it; with auto, one that does not takes the next best path."
        )
    lines.append("or, to have the paths read from the file that was written:")
    lines += [f"  TPU_OFFLOAD_{d.name}_PATH=auto" for d in Direction]
    for line in lines:
        console.print(line, highlight=False, markup=False)
    console.print(
        f"  TPU_OFFLOAD_COPY_PROFILE={shlex.quote(str(output.absolute()))}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
