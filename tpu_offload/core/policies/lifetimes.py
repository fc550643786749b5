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

Before anything is known, and where little is, the chance of a use is taken to be the same in each age group, of
which each is longer than the one before, and proportional to the number of uses so far: worth falls with age, as
with LRU, and grows with uses, as with LFU (together: Blankstein, Sen and Freedman, "Hyperbolic Caching", 2017).
Beyond the oldest age that was seen it falls as one over the age.
"""

from array import array
from bisect import bisect
from collections.abc import Sequence
from typing import Any, final

import numpy as np

type _Floats = np.ndarray[Any, np.dtype[np.float64]]

_PER_OCTAVE = 2
_AGES = [2.0 ** (i / _PER_OCTAVE) for i in range(4 * _PER_OCTAVE, 44 * _PER_OCTAVE)]  # where age groups begin
_NUM_GROUPS = len(_AGES) + 1
_STARTS = np.array([0.0, *_AGES])
_ENDS = np.append(_STARTS[1:], 2 * _STARTS[-1])
_WIDTHS = _ENDS - _STARTS
_PRIOR_CHANCE = 0.05  # of a use in an age group, for what was used once
_PRIOR_RUNS = 8.0  # what is assumed counts as much as so many runs of a class
_MAX_PRIOR = 0.9
_MAX_CHANCE = 0.999


@final
class Lifetimes:
    """Counts lives by class and age. Time and ages are counted in chunks that were used, by all requests together.

    Args:
      num_uses: of each class, how often about its chunks have been used.
      half_life: after so many ended lives of runs, what was counted before counts half.
    """

    def __init__(self, num_uses: Sequence[float], *, half_life: int) -> None:
        self._factors = np.array(num_uses, np.float64)[:, None]
        self._half_life = half_life
        self._num_ended = 0
        # Chunks by class and age group. A number at a time is counted in the array, all are seen at once by the view.
        self._uses, self._ends = (array("d", [0.0]) * (len(num_uses) * _NUM_GROUPS) for _ in range(2))
        self._all_uses, self._all_ends = (
            np.frombuffer(counts).reshape(len(num_uses), _NUM_GROUPS) for counts in (self._uses, self._ends)
        )
        self._run_size = 1.0  # chunks, a running mean
        self._worth = np.zeros((_NUM_GROUPS, len(num_uses)))
        self.learn([1], [[0.0] * len(num_uses)])

    def end(self, class_id: int, num_chunks: int, age: int, *, used: bool) -> None:
        """Chunks of one run end their life at an age: used, or forgotten."""
        place = class_id * _NUM_GROUPS + bisect(_AGES, age)
        self._ends[place] += num_chunks
        if used:
            self._uses[place] += num_chunks
        self._run_size += 0.001 * (num_chunks - self._run_size)
        self._num_ended += 1

    def worth(self, ages: Sequence[int]) -> _Floats:
        """What a chunk is worth, as last learnt: uses expected for each chunk of room and unit of time.

        Returns:
          float64[ages, classes].
        """
        worth: _Floats = self._worth[np.searchsorted(_STARTS, np.asarray(ages), side="right") - 1]
        return worth

    def learn(self, ages: Sequence[int], alive: Sequence[Sequence[float]]) -> None:
        """Works out what chunks are worth.

        Args:
          ages: some, of chunks whose life goes on; younger than the youngest are not told apart.
          alive: how many chunks of each class are of that age.
        """
        if self._num_ended >= self._half_life:
            self._num_ended = 0
            self._all_uses /= 2
            self._all_ends /= 2
        groups = np.searchsorted(_STARTS, np.asarray(ages), side="right") - 1
        first = int(groups.min())
        uses, ends = self._all_uses, self._all_ends.copy()
        np.add.at(ends.T, groups, np.asarray(alive))
        uses, ends, widths = (_from(counts, first) for counts in (uses, ends, _WIDTHS))
        end = int(ends.sum(0).nonzero()[0].max(initial=0)) + 1  # of what is older nothing is known
        uses, ends, widths = uses[:, :end], ends[:, :end], widths[:end]
        reached = ends[:, ::-1].cumsum(1)[:, ::-1] - (ends - uses) / 2  # who ends otherwise was there half of the time
        chances = self._chances(uses, reached)
        left = np.cumprod(1 - chances, axis=1)
        before = np.concatenate([np.ones_like(left[:, :1]), left[:, :-1]], axis=1)
        used, room = before * chances, (before + left) / 2 * widths
        self._worth[first : first + end] = _best_rates(used, room).T
        self._worth[:first] = self._worth[first]
        last = first + end - 1
        self._worth[last:] = self._worth[last] * (_ENDS[last] / _ENDS[last:, None])

    def _chances(self, uses: _Floats, reached: _Floats) -> _Floats:
        """The chance of a use in each age group of those that reach it, by class."""
        weight = _PRIOR_RUNS * self._run_size
        common = (uses.sum(0) + weight * _PRIOR_CHANCE) / (reached.sum(0) + weight)
        mean_factor = ((self._factors * reached).sum(0) + weight) / (reached.sum(0) + weight)
        prior = np.minimum(common * self._factors / mean_factor, _MAX_PRIOR)
        chances: _Floats = np.minimum((uses + weight * prior) / (reached + weight), _MAX_CHANCE)
        return chances


def _best_rates(used: _Floats, room: _Floats) -> _Floats:
    """The most uses for the room that could be had from each age group on, up to the best to give up after."""
    later = np.triu(np.ones((used.shape[1], used.shape[1])))  # [from this age group, to that one]
    used, room = (np.cumsum(amounts[:, None] * later, axis=2) for amounts in (used, room))
    best: _Floats = (used / np.maximum(room, 1e-300)).max(2)
    return best


def _from(counts: _Floats, first: int) -> _Floats:
    """The age groups from `first` on, with all before it in that one."""
    rest = counts[..., first:].copy()
    rest[..., 0] += counts[..., :first].sum(-1)
    return rest
