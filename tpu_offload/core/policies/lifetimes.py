"""How long chunks of each class wait for their next use, learnt as they are used, and what keeping one is worth.

A life of a chunk begins with a use and ends with the next, or when it is forgotten. Of each class are known
how many lives ended at which age, and how many of them with a use; and of those that still go on, how old
they are. That gives the chance of a use at each age of those that got so old (Kaplan and Meier,
"Nonparametric estimation from incomplete observations", 1958). Chunks that were evicted are watched on for a
while, so that what is learnt of a class does not depend on how long its chunks were kept.

What a chunk is worth is the number of uses for the room and time that it takes until then: its hit density
(Beckmann, Chen and Cidon, "LHD: Improving Cache Hit Rate by Maximizing Hit Density", NSDI 2018), taken up to
the age at which it is highest, after which a wise keeper gives up (the index of Gittins, "Bandit processes and
dynamic allocation indices", 1979).
"""

from bisect import bisect
from collections.abc import Sequence
from typing import Any, final

import numpy as np

type _Floats = np.ndarray[Any, np.dtype[np.float64]]

_PER_OCTAVE = 2
_AGES = [2.0 ** (i / _PER_OCTAVE) for i in range(8 * _PER_OCTAVE, 48 * _PER_OCTAVE)]  # where age groups begin
_NUM_GROUPS = len(_AGES) + 1
_STARTS = np.array([0.0, *_AGES])
_WIDTHS = np.diff(np.append(_STARTS, 2 * _STARTS[-1]))
# Before anything is known one in twenty is used in each age group, of which each is longer than the one before:
# the older, the less it is worth, as with LRU. It counts as much as four runs of each class.
_PRIOR = 0.05
_PRIOR_RUNS = 8.0
_MAX_CHANCE = 0.999
_MAXP = 0.9


@final
class Lifetimes:
    """Counts lives by class and age. Time and ages are counted in chunks that were used, by all requests together.

    Args:
      num_classes: classes are 0 to `num_classes - 1`.
      half_life: after so many ended lives of runs, what was counted before counts half.
    """

    def __init__(self, num_classes: int, *, half_life: int, factors=None) -> None:
        self._factors = np.array(factors, float)
        self._num_classes = num_classes
        self._half_life = half_life
        self._num_ended = 0
        # [class][age group], in chunks.
        self._uses = [[0.0] * _NUM_GROUPS for _ in range(num_classes)]
        self._ends = [[0.0] * _NUM_GROUPS for _ in range(num_classes)]
        self._run_size = 1.0  # chunks, a running mean

    def end(self, class_id: int, num_chunks: int, age: int, *, used: bool) -> None:
        """Chunks of one run end their life at an age: used, or forgotten."""
        group = bisect(_AGES, age)
        self._ends[class_id][group] += num_chunks
        if used:
            self._uses[class_id][group] += num_chunks
        self._run_size += 0.001 * (num_chunks - self._run_size)
        self._num_ended += 1

    def densities(self, ages: Sequence[int], alive: Sequence[Sequence[float]]) -> _Floats:
        """What a chunk of each class is worth: uses expected for each chunk of room and unit of time.

        Args:
          ages: some, of chunks whose life goes on; those of the youngest also stand for younger ones.
          alive: how many chunks of each class are of that age.
        Returns:
          float64[ages, classes].
        """
        if self._num_ended >= self._half_life:
            self._num_ended = 0
            for row in (*self._uses, *self._ends):
                row[:] = [count / 2 for count in row]
        groups = np.searchsorted(_STARTS, np.asarray(ages), side="right") - 1
        first, end = groups.min(), groups.max() + 1
        uses, ends = np.array(self._uses), np.array(self._ends)
        still = np.zeros((_NUM_GROUPS, self._num_classes))
        np.add.at(still, groups, np.asarray(alive))
        ends += still.T
        widths = _from(_WIDTHS, first)[: end - first]
        uses, ends = _from(uses, first)[:, : end - first], _from(ends, first)
        reached = ends[:, ::-1].cumsum(1)[:, ::-1][:, : end - first]
        reached -= (ends[:, : end - first] - uses) / 2  # who ends otherwise was there for half of the time
        weight = _PRIOR_RUNS * self._run_size
        share = reached.sum(0) + weight
        mean = (self._factors[:, None] * reached).sum(0) + weight
        prior = _chances(uses.sum(0), reached.sum(0), _PRIOR, weight)
        prior = np.minimum(prior * self._factors[:, None] * share / mean, _MAXP)
        chances = _chances(uses, reached, prior, weight)
        left = np.cumprod(1 - chances, axis=1)
        before = np.concatenate([np.ones((self._num_classes, 1)), left[:, :-1]], axis=1)
        used, room = before * chances, (before + left) / 2 * widths
        densities = np.empty((end - first, self._num_classes))
        for group in range(end - first):
            worth = used[:, group:].cumsum(1) / np.maximum(room[:, group:].cumsum(1), 1e-300)
            densities[group] = worth.max(1)
        return densities[groups - first]


def _from(counts: _Floats, first: int) -> _Floats:
    """The age groups from `first` on, with all before it in that one."""
    rest = counts[..., first:].copy()
    rest[..., 0] += counts[..., :first].sum(-1)
    return rest


def _chances(uses: _Floats, reached: _Floats, prior: _Floats | float, weight: float) -> _Floats:
    """The chance of a use in each age group of those that reach it; `prior` counts like `weight` chunks more."""
    return np.minimum((uses + weight * prior) / (reached + weight), _MAX_CHANCE)
