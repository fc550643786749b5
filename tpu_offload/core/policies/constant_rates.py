"""Finds the classes of chunks whose uses do not depend on the time since the last one, and their rates of use.

Questions about documents at random times are such traffic: how often a document is used says all, when it was used last
says nothing. There the hazard rates of `lifetimes` mislead. They were learned from lifetimes that began at different
times, and fall with age although, of the chunks with equally many uses now, none is worth more than another; and they
are noisier than one rate for all ages.

So both are tested on what comes next (Dawid, "Present position and potential developments: the prequential approach",
1984). From one estimate to the next the uses of a class are counted by age. Given how many there were and how many
chunks had each age, both predict at which ages: the hazard rates, and the same rate at all ages. Each run that is used
adds the logarithm of the ratio of the two probabilities to the evidence. The level of the rates has no part in it, only
whether age matters.

What HBM serves has no part in it either: young chunks that HBM still has are not used here, at whatever rate requests
come, and chunks that HBM always has say nothing of those that it lacks.

Whether the parts of a class differ is asked in the same way: given how many uses of the class there were at an age, two
predictions say which parts they belong to, by the rates of the parts and by one rate for all. Each class has an answer.
"""

from typing import Any, final

import numpy as np

type _Floats = np.ndarray[Any, np.dtype[np.float64]]
type _Bools = np.ndarray[Any, np.dtype[np.bool_]]

# Share of the constant rate in the prediction that it is compared with. So no use counts for more than log 5: hazard
# rates at ages that few chunks reached are far off, most of all while the first chunks grow old.
DOUBT = 0.2
ENOUGH = 5.0  # evidence: odds of 150 to 1


@final
class ConstantRates:
    """Whether age matters, by class. The unit of time is that of `Lifetimes`.

    Attributes:
      evidence: float64[classes], that age does not matter, as the natural logarithm of odds.
    """

    def __init__(self, num_classes: int) -> None:
        self.evidence = np.zeros(num_classes)
        self._uses = np.zeros(num_classes)  # chunks
        self._exposure = np.zeros(num_classes)  # chunks times time

    def observe(self, uses: _Floats, runs: _Floats, exposure: _Floats, rates: _Floats) -> None:
        """Compares the predictions for a while with what happened.

        Args:
          uses: float64[classes, age groups], chunks used, less what other tiers gave for these uses.
          runs: the same shape, runs that were used together and that HBM lacked, those that storage has as well.
          exposure: the same shape, chunks of this age times time, as far as other tiers lack them.
          rates: the same shape, the rates that were predicted by age, per chunk and time; above 0.
        """
        all_exposure = exposure.sum(1)
        mean = (exposure * rates).sum(1) / np.maximum(all_exposure, 1.0)
        mixed = (1 - DOUBT) * rates + DOUBT * mean[:, None]
        ratio = np.where(exposure > 0, mean[:, None] / mixed, 1.0)
        self.evidence += (runs * np.log(ratio)).sum(1)
        self._uses += uses.sum(1)
        self._exposure += all_exposure

    def halve(self) -> None:
        """Halves the weight of all that was observed."""
        for counts in (self.evidence, self._uses, self._exposure):
            counts /= 2

    def found(self) -> tuple[_Bools, _Floats]:
        """Returns the classes for which age does not matter, as bool[classes], and the rate of use of each class."""
        return self.evidence > ENOUGH, self._uses / np.maximum(self._exposure, 1.0)


@final
class PartRates:
    """Whether the parts of a class are used at different rates, by class.

    Args:
      whole: float64[classes, parts], 1 where the part is one of the class, else 0.

    Attributes:
      evidence: float64[classes], that they are, as the natural logarithm of odds.
    """

    def __init__(self, whole: _Floats) -> None:
        self._whole = whole
        self.evidence = np.zeros(len(whole))

    def observe(self, runs: _Floats, exposure: _Floats, rates: _Floats) -> None:
        """Compares the predictions for a while with what happened; as `ConstantRates.observe`, by part for class."""
        whole = self._whole
        means = (whole @ (exposure * rates)) / np.maximum(whole @ exposure, 1.0)
        mean = whole.T @ means
        mixed = (1 - DOUBT) * rates + DOUBT * mean
        ratio = np.where(exposure > 0, mixed / np.maximum(mean, 1e-300), 1.0)
        self.evidence += whole @ (runs * np.log(ratio)).sum(1)

    def halve(self) -> None:
        """Halves the weight of all that was observed."""
        self.evidence /= 2

    def found(self) -> _Bools:
        """The classes whose parts differ, as bool[classes]."""
        return self.evidence > ENOUGH
