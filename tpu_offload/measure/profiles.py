"""From a geometry of the caches to a profile: what fits, what is measured in which order, what goes into the file."""

import contextlib
import dataclasses
import enum
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax

from tpu_offload.config import CopyPath
from tpu_offload.copy_profile import FORMAT, VERSION
from tpu_offload.errors import InputError
from tpu_offload.measure.bench import TransferBench, num_walked_blocks
from tpu_offload.measure.devices import environment
from tpu_offload.measure.figures import Failure, Figures, rank
from tpu_offload.measure.worker_copies import Geometry
from tpu_offload.memory import available_nbytes
from tpu_offload.types import Direction

_COMPILE_SHARE = 0.6  # of the time, for model steps with fused copies to compile
_MEMORY_SHARE = 0.6  # of the memory that is free, for everything that is measured with


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """What was measured, what failed, and whether it was stopped before the end."""

    figures: list[Figures]
    failures: list[Failure]
    interrupted: bool


def fit_geometry(geometry: Geometry, largest: int, num_paths: int, *, may_shrink: bool) -> Geometry:
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


def measure(
    geometry: Geometry,
    sizes: Sequence[int],
    paths: Sequence[CopyPath],
    *,
    seconds: float,
    max_rounds: int,
    step_s: float,
    max_fused_blocks: int,
    tell: Callable[[str], None],
    stop_on_interrupt: Callable[[], AbstractContextManager[Callable[[], bool]]],
) -> Measured:
    """Measures all sizes, the smallest first.

    Args:
      geometry: as the other arguments up to `max_fused_blocks`, of `TransferBench` and its `measure`.
      sizes: ascending.
      paths: to measure.
      seconds: for all of it, compiling included.
      max_rounds: for each size.
      step_s: of a model step.
      max_fused_blocks: in a step.
      tell: called with a line of progress.
      stop_on_interrupt: entered when everything is compiled; returns what is asked after each round, and True ends the
        measuring.
    """
    give_up_s = time.monotonic() + seconds
    # The CPU backend copies float8 a thousand times slower in the peer's way, which says nothing of TPUs.
    with_peer = not (jax.default_backend() == "cpu" and geometry.dtype.startswith("float8"))
    tell(f"compiling: {', '.join(path.value for path in paths)}")
    bench = TransferBench(
        geometry,
        sizes=sizes,
        paths=paths,
        with_peer=with_peer,
        step_s=step_s,
        max_fused_blocks=max_fused_blocks,
        compile_s=_COMPILE_SHARE * seconds,
    )
    figures: list[Figures] = []
    with contextlib.closing(bench), stop_on_interrupt() as stop:
        for i, size in enumerate(sizes):
            if stop():
                break
            left_s = give_up_s - time.monotonic()
            if left_s <= 0 and figures:
                tell(f"jobs of {size} blocks: left out, the time is over; --seconds gives more")
                continue
            tell(f"jobs of {size} blocks: measuring, {max(left_s, 0):.0f} s left")
            figures += bench.measure(size, seconds=left_s / (len(sizes) - i), max_rounds=max_rounds, stop=stop)
        return Measured(figures, bench.failures, stop())


def build_profile(geometry: Geometry, measured: Measured, argv: Sequence[str]) -> dict[str, Any]:
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
                **{d.value: [path.value for path in _ranking(measured, d)] for d in Direction},
            }
        ],
        "bench": {
            **environment(),
            "date": time.strftime("%Y-%m-%d"),
            "argv": list(argv),
            "interrupted": measured.interrupted,
            "geometry": dataclasses.asdict(geometry) | {"block_nbytes": geometry.block_nbytes},
            "figures": [as_json(one) for one in measured.figures],
            "failures": [as_json(one) for one in measured.failures],
        },
    }


def _ranking(measured: Measured, direction: Direction) -> list[CopyPath]:
    failed = {failure.path: failure.error for failure in measured.failures if failure.direction is direction}
    ranking = rank(measured.figures, direction, without=failed)
    if not ranking:
        why = "; ".join(f"{path.value}: {error}" for path, error in failed.items())
        raise InputError(f"no copy path that was measured works here for {direction.value}s: {why}")
    return ranking


def as_json(record: Figures | Failure) -> dict[str, Any]:
    """Figures or a failure, with names in the place of enums."""
    plain = dataclasses.asdict(record)
    return {key: value.value if isinstance(value, enum.Enum) else value for key, value in plain.items()}
