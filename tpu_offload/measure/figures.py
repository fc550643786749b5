"""What was measured of copies, and what follows from it: an order of the copy paths.

With nothing else going on, for the paths that have a time of their own. `fused` has none: it is part of a
model's step, so its figures of this kind are None:

  seconds     from handing the plan to the worker to the poll that reports the job, the caches being ready
  dispatch_s  the part of it before `begin_step` and `end_step` have returned: the engine's thread is busy
  of_limit    seconds of the limit / ours: 1 is the speed of the hardware. The limit is one contiguous copy of
              as many bytes: memcpy between two old buffers on a CPU; elsewhere a copy between device memory
              and donated pinned memory, so what the bus gives
  of_peer     seconds of the peer's method / ours: how many times faster we are than gather, split and one
              `device_put` a block (saves), or one `device_put` a block, a wait, a scatter and a wait (loads)

With a model at work, which is what paths can be compared by. The step is the same for all of them, but that
with fused copies it is compiled with these in it:

  delay_s     how much later the model is done. Steps of some milliseconds run one after another, each waited
              for as a synchronous engine does; the job is in the plan of the first. They go on until the job
              is reported, and for at least three. The delay is the time that they took less the time of as
              many steps with empty plans, run right after. It holds everything that the copy costs the model,
              whoever does it: device time, HBM and PCIe that both want, dispatch
  reported_s  from the start of the first of these steps to the poll that reports the job

`rank` makes of that an order of the paths, for each direction. What offloading must not cost is the model's
time, so the path with the smaller delay is the better one. A path's delay is the geometric mean over the job
sizes; delays under 50 us, about what can be told from noise, count as 50 us. Paths within
10 % of the best delay are as good as it; among them, the one whose jobs are reported sooner is better, by the
geometric mean again. Where no model was at work, `seconds` decides. The remaining ties, within 5 %, go to the
path that is named first: direct needs next to no HBM. On a CPU all of that is noise or nearly so, because the
"device" that copies is the one that computes; it shows that the paths work, and no more.
"""

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Self

import numpy as np

from tpu_offload.config import CopyPath
from tpu_offload.types import Direction

PATHS = (CopyPath.DIRECT, CopyPath.STAGED, CopyPath.FUSED)
"""Copy paths that can be measured, in the order in which ties are broken."""

_DELAY_FLOOR_S = 50e-6
_SAME_DELAY, _SAME_SECONDS = 1.10, 1.05


@dataclasses.dataclass(frozen=True, slots=True)
class Spread:
    """Median, 10th and 90th percentile of a figure over the rounds, and the figures themselves."""

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
    """What was measured for one path, direction and job size.

    The module's docstring defines each figure; None is what was not measured: the peer, the model's steps, or a time of
    its own of a path that has none. `num_fused_blocks` of a job are copied by the model's step, the rest directly;
    `step_s` is one such step with no copy; rates are in 1e9 bytes a second.
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
    delay_s: Spread | None
    reported_s: Spread | None
    step_s: Spread | None


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """A path that this machine cannot go in one direction, and why, in one line."""

    path: CopyPath
    direction: Direction
    error: str


def rank(figures: Sequence[Figures], direction: Direction, *, without: Collection[CopyPath] = ()) -> list[CopyPath]:
    """The measured paths of one direction, the best first, as the module's docstring defines it.

    Args:
      figures: of any direction.
      direction: the one to rank for.
      without: paths to leave out.
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
    assert spread is not None, "a path without a time of its own is measured inside of steps"
    return spread.median


def _geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))
