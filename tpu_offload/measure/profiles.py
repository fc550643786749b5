"""Builds a copy profile: fits the geometry to memory, measures all sizes, and lays out the file."""

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

_COMPILE_SHARE = 0.6  # share of the time for compiling model steps with fused copies
_MEMORY_SHARE = 0.6  # share of the free memory that the measurement may use


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """Figures, failures, and whether the measurement was interrupted."""

    figures: list[Figures]
    failures: list[Failure]
    interrupted: bool


def fit_geometry(geometry: Geometry, largest: int, num_paths: int, *, may_shrink: bool) -> Geometry:
    """The geometry, with fewer layers if memory is too small.

    Raises:
      InputError: it does not fit and may not, or cannot, be made smaller.
    """
    on_cpu = jax.default_backend() == "cpu"
    host_nbytes = _MEMORY_SHARE * available_nbytes()
    stats: Mapping[str, int] = jax.local_devices()[0].memory_stats() or {}
    device_nbytes = _MEMORY_SHARE * (stats.get("bytes_limit", 2**62) - stats.get("bytes_in_use", 0))
    while True:
        num_walked = num_walked_blocks(geometry, largest)
        # Host: a pool for each path, the peer's blocks, the limit's buffer, staging arrays. Device: the caches,
        # the peer's gathered blocks (twice, while gathering), the limit's buffer, staging arrays.
        host = (num_walked * num_paths + 4 * largest) * geometry.block_nbytes
        device = (num_walked + 5 * largest) * geometry.block_nbytes // geometry.num_devices
        if on_cpu:  # device memory is host memory, and the limit has two buffers of the caches' size
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
    on_progress: Callable[[str], None],
    stop_on_interrupt: Callable[[], AbstractContextManager[Callable[[], bool]]],
) -> Measured:
    """Measures all sizes, smallest first.

    Args:
      geometry: see `TransferBench`, as for the other arguments up to `max_fused_blocks`.
      sizes: ascending.
      paths: to measure.
      seconds: total duration, including compilation.
      max_rounds: maximum number of rounds per size.
      step_s: duration of a model step.
      max_fused_blocks: most blocks that a step copies.
      on_progress: called with a line of progress.
      stop_on_interrupt: context entered when everything is compiled; yields a function that is called after each round
        and ends the measurement by True.
    """
    give_up_s = time.monotonic() + seconds
    # On the CPU backend the peer's method copies float8 a thousand times slower, which says nothing about TPUs.
    with_peer = not (jax.default_backend() == "cpu" and geometry.dtype.startswith("float8"))
    on_progress(f"compiling: {', '.join(path.value for path in paths)}")
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
                on_progress(f"jobs of {size} blocks: skipped, out of time; raise --seconds")
                continue
            on_progress(f"jobs of {size} blocks: measuring, {max(left_s, 0):.0f} s left")
            figures += bench.measure(size, seconds=left_s / (len(sizes) - i), max_rounds=max_rounds, stop=stop)
        return Measured(figures, bench.failures, stop())


def build_profile(geometry: Geometry, measured: Measured, argv: Sequence[str]) -> dict[str, Any]:
    """The content of the file: the profile, and under `bench` all measurements.

    Raises:
      InputError: no path works in some direction.
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
        raise InputError(f"no measured copy path works on this machine for {direction.value}s: {why}")
    return ranking


def as_json(record: Figures | Failure) -> dict[str, Any]:
    """Figures or a failure as JSON values."""
    plain = dataclasses.asdict(record)
    return {key: value.value if isinstance(value, enum.Enum) else value for key, value in plain.items()}
