"""Figures of the copy measurements, and the ranking of copy paths that follows from them.

Measured with the device otherwise idle. These are None for `fused`, which is part of a model's step and has no time of
its own:

  seconds     from handing the plan to the worker until the poll that reports the job, with the caches ready
  dispatch_s  the part of it until `begin_step` and `end_step` have returned: the engine's thread is busy
  of_limit    seconds of the limit / ours: 1 is the speed of the hardware. The limit is one contiguous copy of
              the same size: memcpy between two reused buffers on a CPU; elsewhere a copy between device memory
              and donated pinned memory, so the rate of the bus
  of_peer     seconds of the peer's method / ours: the speed-up over gather, split and one `device_put` per
              block (saves), or one `device_put` per block, a wait, a scatter and a wait (loads)
  program_s   of `direct`: seconds of the same program with as many blocks, called without a worker
  of_program  program_s / ours: the share of a job that is jax's and the processor's. The rest is this library's
  empty_s     of `direct`: seconds of the same program with no blocks to copy, so what jax takes to run it
  of_floor    (seconds of the limit + empty_s) / ours: 1 is what a jax program can do

Measured while a model runs, which makes all paths comparable. The step is the same for all paths, except that fused
copies are compiled into it:

  delay_s     how much later the model finishes. Steps of some milliseconds run one after another, each waited
              for as a synchronous engine does; the job is in the plan of the first. At least three run, and until
              the job is reported. The delay is their duration minus that of the same number of steps with empty
              plans, run right after. It includes everything that the copy costs the model: device time,
              contention for HBM and PCIe, dispatch
  reported_s  from the start of the first of these steps until the poll that reports the job

`rank` orders the paths of each direction. Offloading must not cost the model's time, so the path with the smaller
delay is better. A path's delay is the geometric mean over the job sizes; delays under 50 us, about the noise floor,
count as 50 us. Paths within 10 % of the best delay count as equal; among them, the one whose jobs are reported sooner
is better, by the geometric mean again. If no model ran, `seconds` decides. Remaining ties, within 5 %, go to the path
that is listed first: direct needs almost no HBM. On a CPU the ranking is mostly noise, because the \"device\" that
copies is the one that computes; it only shows that the paths work.
"""

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Self

import numpy as np

from tpu_offload.config import CopyPath
from tpu_offload.types import Direction

PATHS = (CopyPath.DIRECT, CopyPath.STAGED, CopyPath.FUSED)
"""The measurable copy paths, in tie-breaking order."""

_DELAY_FLOOR_S = 50e-6
_SAME_DELAY, _SAME_SECONDS = 1.10, 1.05


@dataclasses.dataclass(frozen=True, slots=True)
class Spread:
    """Median, 10th and 90th percentile of a figure over the rounds, and its values."""

    median: float
    p10: float
    p90: float
    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Summarizes at least one value."""
        p10, median, p90 = np.percentile(values, (10, 50, 90)).tolist()
        return cls(median, p10, p90, tuple(values))


@dataclasses.dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one path, direction and job size.

    The module's docstring defines each figure; None means not measured. `num_fused_blocks` of a job are copied by the
    model's step, the rest directly; `step_s` is the duration of a step without copies; rates are in 1e9 bytes per
    second.
    """

    path: CopyPath
    direction: Direction
    num_blocks: int
    nbytes: int
    num_fused_blocks: int
    num_rounds: int
    seconds: Spread | None
    gb_per_s: Spread | None
    dispatch_s: Spread | None
    limit_gb_per_s: Spread
    peer_gb_per_s: Spread | None
    of_limit: Spread | None
    of_peer: Spread | None
    program_s: Spread | None
    of_program: Spread | None
    empty_s: Spread | None
    of_floor: Spread | None
    delay_s: Spread | None
    reported_s: Spread | None
    step_s: Spread | None


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """A path that does not work on this machine in one direction, with the reason in one line."""

    path: CopyPath
    direction: Direction
    error: str


def rank(figures: Sequence[Figures], direction: Direction, *, without: Collection[CopyPath] = ()) -> list[CopyPath]:
    """The measured paths of one direction, best first, by the rules in the module's docstring.

    Args:
      figures: figures of any direction.
      direction: direction to rank for.
      without: paths to exclude.
    """
    by_path: dict[CopyPath, list[Figures]] = {}
    for one in figures:
        if one.direction is direction and one.path not in without:
            by_path.setdefault(one.path, []).append(one)
    delays = {path: _geometric_mean([_delay_s(f) for f in all_]) for path, all_ in by_path.items()}
    seconds = {path: _geometric_mean([_seconds(f) for f in all_]) for path, all_ in by_path.items()}
    left = sorted(by_path, key=PATHS.index)
    ranking: list[CopyPath] = []
    while left:
        as_good = [path for path in left if delays[path] <= _SAME_DELAY * min(delays[p] for p in left)]
        fastest = min(seconds[path] for path in as_good)
        best = next(path for path in as_good if seconds[path] <= _SAME_SECONDS * fastest)
        ranking.append(best)
        left.remove(best)
    return ranking


def _delay_s(one: Figures) -> float:
    return max(one.delay_s.median, _DELAY_FLOOR_S) if one.delay_s else _DELAY_FLOOR_S


def _seconds(one: Figures) -> float:
    spread = one.reported_s or one.seconds
    assert spread is not None, "a path without its own time is measured inside steps"
    return spread.median


def _geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))
