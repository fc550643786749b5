"""Online estimates, by class, of the time to a chunk's next use, and of the hit density of keeping it.

A lifetime of a chunk begins with a use and ends with the next use, or is censored when the chunk is forgotten. For each
class the estimator counts lifetimes that ended, by age and by whether a use ended them, and lifetimes still running, by
age. From these follows the hazard rate: the probability of a use at each age, given that the chunk reached that age
(Kaplan and Meier, "Nonparametric estimation from incomplete observations", 1958). Evicted chunks are tracked for a
while, so that the statistics of a class do not depend on how long its chunks were kept.

HBM serves part of the uses. How requests come is one question, whether HBM still has the chunk then is another: so the
hazard rates are those of all uses, and for each class and age the share of the uses that HBM left to this tier is
learned beside them. A use that HBM serves ends the lifetime without a hit (in the terms of survival analysis it is a
competing risk, not censoring: a chunk that HBM always has never becomes one that HBM lacks). A use for which storage
has the chunk counts as a part of a hit: what this tier saves then is the time to read it.

The value of a chunk is its hit density: expected uses per unit of space and time until then (Beckmann, Chen and Cidon,
"LHD: Improving Cache Hit Rate by Maximizing Hit Density", NSDI 2018), up to the optimal stopping age, at which that
ratio is highest (the Gittins index: Gittins, "Bandit processes and dynamic allocation indices", 1979). For classes in
which age turns out not to matter, one rate of use takes the place of the hazard rates (see `constant_rates`).

The prior, for no or few observations: the probability of a use is the same in each age group, each of which is longer
than the one before, and proportional to the number of uses so far. So the value falls with age, as with LRU, and grows
with uses, as with LFU (both: Blankstein, Sen and Freedman, "Hyperbolic Caching", 2017). Beyond the oldest observed age
it falls as one over the age.

Classes may have parts. Their hazard rates are those of the class times a factor (Cox, "Regression models and
life-tables", 1972): one number for each part, so that few observations suffice.
"""

from array import array
from bisect import bisect
from collections.abc import Sequence
from typing import Any, final

import numpy as np

from tpu_offload.core.policies.constant_rates import ConstantRates, PartRates

type _Floats = np.ndarray[Any, np.dtype[np.float64]]

_PER_OCTAVE = 2
AGES = [2.0 ** (i / _PER_OCTAVE) for i in range(4 * _PER_OCTAVE, 44 * _PER_OCTAVE)]  # where age groups begin
_NUM_GROUPS = len(AGES) + 1
_STARTS = np.array([0.0, *AGES])
_ENDS = np.append(_STARTS[1:], 2 * _STARTS[-1])
_WIDTHS = _ENDS - _STARTS
PRIOR_HAZARD = 0.05  # of a use in an age group, for chunks used once
PRIOR_RUNS = 8.0  # weight of the prior, in observed runs of a class
PART_RUNS = 16.0  # weight of the factor 1 for a part of a class, in expected uses of runs
MAX_PRIOR = 0.9
MAX_HAZARD = 0.999


@final
class Lifetimes:
    """Lifetimes by class and age. The unit of time and age is one chunk used, by any request.

    Args:
      num_uses: for each class, about how often its chunks have been used.
      half_life: observations are halved in weight after this many lifetimes of runs have ended.
      pools: for each class the pool that it belongs to; the hazard rates of a pool are estimated together. By default
        each class is its own.
      parts: for each part its class. Parts are numbered like classes, after the last of these. What is counted in a
        part counts in its class too.

    Attributes:
      num_classes: with parts.
      densities: the hit densities of all classes and ages, as last estimated: expected uses per chunk of space and unit
        of time. `first_density` says where those of an age are. Flat, because loops read single ones.
      all_uses, all_elsewhere, all_ends: float64[classes, age groups], chunks whose lifetimes ended at that age: by a
        use, what other tiers gave for these uses, in chunks that would have hit here, and at all. Halved in weight
        after each half-life.
      all_ages: the same shape, the sum of the ages at which all these lifetimes ended.
      all_runs: the same shape, the runs that were used since the last estimate and that HBM lacked.
      constant_rates: the classes in which age does not matter.
      part_rates: the classes whose parts differ.
    """

    def __init__(
        self,
        num_uses: Sequence[float],
        *,
        half_life: int,
        pools: Sequence[int] | None = None,
        parts: Sequence[int] = (),
    ) -> None:
        numbers = [*(range(len(num_uses)) if pools is None else pools), *range(-len(parts), 0)]
        self.num_classes = num_classes = len(numbers)
        self._class_of = np.array([*range(len(num_uses)), *parts])  # of each class, itself
        self._whole = np.eye(num_classes)  # [class, classes that count in it]
        self._whole[self._class_of, range(num_classes)] = 1.0
        # [class, classes of its pool]
        self._pooled = np.equal.outer(numbers, numbers).astype(np.float64) @ self._whole
        self._factors = np.array(num_uses, np.float64)[:, None]
        self._half_life = half_life
        self._num_ended = 0
        # `array`s for counting single events, with numpy views of all counts.
        counters = [array("d", [0.0]) * (num_classes * _NUM_GROUPS) for _ in range(5)]
        self._uses, self._elsewhere, self._ends, self._ages, self._runs = counters
        self.all_uses, self.all_elsewhere, self.all_ends, self.all_ages, self.all_runs = (
            np.frombuffer(counts).reshape(num_classes, _NUM_GROUPS) for counts in counters
        )
        self._run_size = 1.0  # chunks, a running mean
        self.densities = array("d", [0.0]) * (_NUM_GROUPS * num_classes)
        self._density = np.frombuffer(self.densities).reshape(_NUM_GROUPS, num_classes)
        # As of the last estimate, by class and age group: chunks alive, chunks times time so far, uses less what
        # other tiers give, predicted rates of all uses, and the share of the uses that is left to this tier.
        self._alive_then, self._lived_then, self._hits_then = (np.zeros_like(self.all_uses) for _ in range(3))
        self._rates, self._shares = np.ones_like(self.all_uses), np.ones_like(self.all_uses)
        self.constant_rates = ConstantRates(num_classes)
        self.part_rates = PartRates(self._whole[: len(num_uses), len(num_uses) :])
        self.learn([1], [[0.0] * num_classes])

    def end(
        self, class_id: int, num_chunks: int, age: int, *, used: bool, elsewhere: float = 0.0, goes_on: bool = False
    ) -> None:
        """Lifetimes of chunks of one run end at an age: by a use, or censored.

        Args:
          class_id: their class.
          num_chunks: how many.
          age: in chunks used since they began.
          used: whether a use ended them.
          elsewhere: how much of what a hit here is worth other tiers give for that use: 1 if HBM served it.
          goes_on: whether they belong to the run that was used last: a request may use a run in pieces.
        """
        place = class_id * _NUM_GROUPS + bisect(AGES, float(age))  # floats are compared faster with each other
        self._ends[place] += num_chunks
        self._ages[place] += num_chunks * age
        if used:
            self._uses[place] += num_chunks
            if elsewhere:
                self._elsewhere[place] += num_chunks * elsewhere
            if elsewhere < 1.0:
                self._runs[place] += not goes_on
        self._run_size += 0.001 * (num_chunks - self._run_size)
        self._num_ended += 1

    def first_density(self, age: int) -> int:
        """The index in `densities` of the hit density of the first class at this age; the other classes follow."""
        return bisect(AGES, float(age)) * self.num_classes

    def learn(
        self, ages: Sequence[int], alive: Sequence[Sequence[float]], *, youngest: int = 0, elapsed: int = 0
    ) -> None:
        """Estimates hit densities from all counts.

        Args:
          ages: ages of running lifetimes.
          alive: for each of these ages, how many chunks of each class have it.
          youngest: ages below this one, or below the lowest of `ages`, are not distinguished.
          elapsed: the time since the last estimate, if that is short enough to compare what it predicted.
        """
        groups = np.searchsorted(_STARTS, np.asarray(ages), side="right") - 1
        first = bisect(AGES, float(max(min(ages), youngest)))
        counts_alive = np.asarray(alive, np.float64).T
        alive_now = counts_alive @ np.equal.outer(groups, np.arange(_NUM_GROUPS))
        lived_now = counts_alive @ np.clip(np.subtract.outer(ages, _STARTS), 0.0, _WIDTHS)
        all_alive = self._whole @ alive_now
        if elapsed:
            hits = self.all_uses - self.all_elsewhere - self._hits_then
            exposure = (self._alive_then + all_alive) / 2 * elapsed
            exposure *= self._shares  # as far as others have none of them
            observed = self._whole @ hits, self._whole @ self.all_runs, exposure
            uses, runs, exposure = (_from(counts, first) for counts in observed)
            rates = self._rates[:, first:]
            self.constant_rates.observe(uses, runs, exposure, rates)
            parts = slice(len(self._factors), None)
            exposure = self._part_exposure(all_alive, lived_now, elapsed, first)
            self.part_rates.observe(runs[parts], exposure, rates[parts])
        self.all_runs[:] = 0
        if self._num_ended >= self._half_life:
            self._num_ended = 0
            for counts in (self.all_uses, self.all_elsewhere, self.all_ends, self.all_ages):
                counts /= 2
            self.constant_rates.halve()
            self.part_rates.halve()
        self._alive_then, self._hits_then = all_alive, self.all_uses - self.all_elsewhere
        self._lived_then = lived_now + self._ended_lived()
        ends = self._pooled @ (self.all_ends + alive_now)
        self._estimate(self._pooled @ self.all_uses, self._pooled @ self.all_elsewhere, ends, first)

    def _part_exposure(self, alive: _Floats, lived: _Floats, elapsed: int, first: int) -> _Floats:
        """Chunks of parts that others lack times the time that they spent in each age group since the last estimate.

        At ages that take longer to reach than the time since then: what is alive, on average of then and now. But a
        lifetime that got to a younger age may have begun and ended meanwhile, and few are at such an age at any one
        time. So there all lifetimes count, running and ended ones, by the time that they spent in the group. Those that
        change their part count, with all their time, in the new one.
        """
        alive_on_average = (self._alive_then + alive) / 2 * elapsed
        since = np.maximum(lived + self._ended_lived() - self._lived_then, 0.0)
        exposure: _Floats = np.where(elapsed > _STARTS, since, alive_on_average) * self._shares
        return _from(exposure[len(self._factors) :], first)

    def _ended_lived(self) -> _Floats:
        """Chunks times the time that lifetimes that ended had spent in each age group; by class or part."""
        longer = np.cumsum(self.all_ends[:, ::-1], axis=1)[:, ::-1] - self.all_ends
        lived: _Floats = self.all_ages - self.all_ends * _STARTS + longer * _WIDTHS
        return lived

    def parts_differ(self) -> list[bool]:
        """For each class whether its parts are used at different rates, as last estimated."""
        differ: list[bool] = self.part_rates.found().tolist()
        return differ

    def _estimate(self, uses: _Floats, elsewhere: _Floats, ends: _Floats, first: int) -> None:
        """Estimates rates and hit densities by age group; those before `first` are not distinguished."""
        uses, elsewhere, ends, widths = (_from(counts, first) for counts in (uses, elsewhere, ends, _WIDTHS))
        end = int(ends.sum(0).nonzero()[0].max(initial=0)) + 1  # nothing older was observed
        uses, elsewhere, ends, widths = uses[:, :end], elsewhere[:, :end], ends[:, :end], widths[:end]
        reached = ends[:, ::-1].cumsum(1)[:, ::-1] - (ends - uses) / 2  # censored ones count half
        hazard = self._hazard(uses, reached)
        left = np.cumprod(1 - hazard, axis=1)
        before = np.concatenate([np.ones_like(left[:, :1]), left[:, :-1]], axis=1)
        used, space, share = before * hazard, (before + left) / 2 * widths, self._share(uses, elsewhere)
        num = len(self._factors)
        differ = self.part_rates.found()[self._class_of[num:]]
        is_own = np.append(np.full(num, True), differ)  # else the value of its class
        density = np.zeros_like(used)
        density[is_own] = _best_rates((used * share)[is_own], space[is_own])
        is_constant, rates = self.constant_rates.found()
        is_constant &= is_own
        used = _constant_uses(rates[is_constant], widths)
        density[is_constant] = _best_rates(used * share[is_constant], used) * rates[is_constant, None]
        last = first + end - 1
        for table, values in (
            (self._density, density.T),
            (self._rates.T, (-np.log1p(-hazard) / widths).T),
            (self._shares.T, share.T),
        ):
            table[first : last + 1] = values
            table[:first] = table[first]
            table[last:] = table[last] * (_ENDS[last] / _ENDS[last:, None])
        self._shares[:, last + 1 :] = 1.0  # others are taken to lack what is so old
        self._density[last:, is_constant] = self._density[last, is_constant]
        self._density[:, ~is_own] = self._density[:, self._class_of[~is_own]]

    def _share(self, uses: _Floats, elsewhere: _Floats) -> _Floats:
        """The share of the uses that is left to this tier, by class and age group; exactly 1 without other tiers.

        The prior is that of all classes together, because what others still have depends on its age most of all.
        """
        weight = PRIOR_RUNS * self._run_size
        num = len(self._factors)
        common = 1 - elsewhere[:num].sum(0) / (uses[:num].sum(0) + weight)
        share: _Floats = 1 - (elsewhere + weight * (1 - common)) / (uses + weight)
        return share

    def _hazard(self, uses: _Floats, reached: _Floats) -> _Floats:
        """The probability of a use in each age group, given that it is reached; by class."""
        weight = PRIOR_RUNS * self._run_size
        num = len(self._factors)
        part_uses, part_reached = uses[num:], reached[num:]
        uses, reached = uses[:num], reached[:num]
        common = (uses.sum(0) + weight * PRIOR_HAZARD) / (reached.sum(0) + weight)
        mean_factor = ((self._factors * reached).sum(0) + weight) / (reached.sum(0) + weight)
        prior = np.minimum(common * self._factors / mean_factor, MAX_PRIOR)
        hazard: _Floats = np.minimum((uses + weight * prior) / (reached + weight), MAX_HAZARD)
        return np.concatenate([hazard, self._part_hazard(hazard[self._class_of[num:]], part_uses, part_reached)])

    def _part_hazard(self, hazard: _Floats, uses: _Floats, reached: _Floats) -> _Floats:
        """The same for parts, in proportion to the hazards of their classes, which are float64[parts, age groups]."""
        weight = PART_RUNS * self._run_size
        factors = (uses.sum(1) + weight) / ((reached * hazard).sum(1) + weight)
        parts: _Floats = np.minimum(hazard * factors[:, None], np.maximum(hazard, MAX_PRIOR))
        return parts


def _best_rates(used: _Floats, space: _Floats) -> _Floats:
    """The highest ratio of uses to space and time from each age group on, up to the optimal stopping age."""
    later = np.triu(np.ones((used.shape[1], used.shape[1])))  # [from this age group, to that one]
    used, space = (np.cumsum(amounts[:, None] * later, axis=2) for amounts in (used, space))
    best: _Floats = (used / np.maximum(space, 1e-300)).max(2)
    return best


def _constant_uses(rates: _Floats, widths: _Floats) -> _Floats:
    """The part of the chunks of each class whose next use is in each age group, at one rate for all ages.

    Those whose next use comes later count in the last group.
    """
    left = np.exp(-rates[:, None] * np.append(0.0, widths.cumsum()))
    left[:, -1] = 0.0
    used: _Floats = np.maximum(left[:, :-1] - left[:, 1:], 1e-300)
    return used


def _from(counts: _Floats, first: int) -> _Floats:
    """The counts by age group from `first` on, which includes those of all groups before it."""
    rest = counts[..., first:].copy()
    rest[..., 0] += counts[..., :first].sum(-1)
    return rest
