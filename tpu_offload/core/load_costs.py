"""Chooses between loading KV and computing it again, by measured times.

Three times are estimated, each as a sum of two terms whose factors are fitted to the latest measurements: prefill by
its tokens and by the tokens that these attend to, promotions from each tier by bytes (with those in flight before
them) and by jobs, loads from the host tier by bytes and by jobs. Without an estimate KV is loaded. One that is old
counts as none: what is never loaded is never measured, and a tier may have become faster.
"""

import math
from collections import defaultdict, deque
from collections.abc import Callable
from typing import final

from tpu_offload.config import LoadMode

_NUM_MEASUREMENTS = 32  # the latest count
_LEAST_MEASUREMENTS = 3
_STALE_S = 30.0  # after this long without a load, one is made to measure it again
_PATIENCE = 1.5  # times the estimate of a read; reads vary, by their neighbours on the disk or network
_MARGIN = 1.1  # loads from the host tier are measured in whole steps, so they seem slower than they are


@final
class TwoTermFit:
    """Fits `seconds = a * main + b * other`, with factors from 0 on, to the latest measurements.

    Relative errors are minimized: small measurements count as much as large ones, and one with a stall in it hardly.

    Args:
      by_ratio: keep the latest measurements for each ratio of the terms, in powers of two, not the latest of all.
        All the latest steps may be at the end of one long prompt, which says little about the beginning of the next.
    """

    def __init__(self, *, by_ratio: bool = False) -> None:
        self._by_ratio = by_ratio
        self._latest: dict[int, deque[tuple[float, float]]] = {}  # by ratio: both terms, over the seconds
        self._factors: tuple[float, float] | None = None
        self.is_separable = False

    def add(self, main: float, other: float, seconds: float) -> None:
        """Adds a measurement; one without an amount, or of less than 1 ns or more than 30 years, is ignored."""
        if 1e-9 <= seconds <= 1e9 and main > 0:
            ratio = math.frexp(other / main)[1] if self._by_ratio else 0
            self._latest.setdefault(ratio, deque(maxlen=_NUM_MEASUREMENTS)).append((main / seconds, other / seconds))
            if len(self._measured) >= _LEAST_MEASUREMENTS:
                self._fit()

    @property
    def _measured(self) -> list[tuple[float, float]]:
        return [one for latest in self._latest.values() for one in latest]

    def seconds(self, main: float, other: float) -> float | None:
        """The estimate; None while there are too few measurements."""
        if self._factors is None:
            return None
        return self._factors[0] * main + self._factors[1] * other

    def _fit(self) -> None:
        """Least squares of `a * x + b * y = 1`. Where the terms cannot be told apart, `main` explains everything."""
        measured = self._measured
        xx = sum(x * x for x, _ in measured)
        xy = sum(x * y for x, y in measured)
        yy = sum(y * y for _, y in measured)
        sx, sy = (sum(terms) for terms in zip(*measured, strict=True))
        det = xx * yy - xy * xy
        self.is_separable = det > 1e-3 * xx * yy
        a, b = sx / xx, 0.0
        if self.is_separable:
            a, b = (sx * yy - sy * xy) / det, (sy * xx - sx * xy) / det
            if b < 0:
                a, b = sx / xx, 0.0
            elif a < 0:
                a, b = 0.0, sy / yy
        self._factors = a, b


@final
class LoadCosts:
    """The measurements of one scheduler, and the choices that follow from them.

    Args:
      mode: AUTO compares; the others force one choice.
      clock: monotonic seconds.
    """

    def __init__(self, mode: LoadMode, *, clock: Callable[[], float]) -> None:
        self._mode = mode
        self._clock = clock
        self._prefill = TwoTermFit(by_ratio=True)
        self._loads = TwoTermFit()
        self._promotions: defaultdict[int, TwoTermFit] = defaultdict(TwoTermFit)  # by tier
        self._last_s: dict[TwoTermFit, float] = {}

    def observe_prefill(self, num_tokens: int, seconds: float, num_attended: float) -> None:
        """A step computed so many tokens of prompts; each attends to those before it, so many together."""
        self._prefill.add(num_tokens, num_attended, seconds)

    def observe_promotion(self, tier_id: int, nbytes: int, seconds: float) -> None:
        """A promotion ended: its bytes and those in flight before it, and the time until all of them had been read."""
        self._observe(self._promotions[tier_id], nbytes, seconds)

    def observe_load(self, nbytes: int, seconds: float) -> None:
        """A load from the host tier ended."""
        if self._mode is LoadMode.AUTO:
            self._observe(self._loads, nbytes, seconds)

    def _observe(self, fit: TwoTermFit, nbytes: int, seconds: float) -> None:
        fit.add(nbytes, 1.0, seconds)
        self._last_s[fit] = self._clock()

    def recompute_s(self, first: int, end: int) -> float | None:
        """Seconds to compute the tokens `first` to `end - 1` of a prompt; None if it is not known."""
        return self._prefill.seconds(end - first, (end - first) * (first + end) / 2)

    def promotion_s(self, tier_id: int, nbytes: int, *, num_jobs: int) -> float | None:
        """Seconds until so many bytes have come from a tier, those in flight included; None if it is not known."""
        return self._promotions[tier_id].seconds(nbytes, num_jobs)

    def prefers_promotion(self, tier_id: int, load_s: float | None, recompute_s: float | None) -> bool:
        """Whether to read KV from a storage tier, by the two estimates."""
        return self._prefers(self._promotions[tier_id], load_s, recompute_s)

    def storage_wait_s(self, load_s: float | None, recompute_s: float | None, *, default_s: float) -> float:
        """How long a request waits for storage, by the two estimates: not longer than computing takes.

        It does not wait for a read that is slower; such a read only measures storage. A read that is expected to take
        nearly as long as computing gets half of its time more: whoever gives up shortly before its end pays for both.
        """
        if self._mode is not LoadMode.AUTO or load_s is None or recompute_s is None:
            return default_s
        if not default_s or load_s > recompute_s:
            return 0.0
        return max(min(recompute_s, max(default_s, 2 * load_s)), _PATIENCE * load_s)

    def lookup_wait_s(
        self, tier_id: int, load_s: float | None, recompute_s: float | None, *, default_s: float
    ) -> float:
        """How long a request waits to learn whether a tier has KV, by the two estimates; 0 if it would not read it."""
        if self._mode is LoadMode.RECOMPUTE:
            return 0.0
        if self._mode is LoadMode.LOAD or recompute_s is None:
            return default_s
        is_slower = load_s is not None and load_s > recompute_s and not self._is_stale(self._promotions[tier_id])
        return 0.0 if is_slower else min(default_s, recompute_s)

    def storage_worth(self, load_s: float | None, recompute_s: float | None, *, default: float) -> float:
        """How much of the time to compute KV a read of it saves, by the two estimates; 0 if it would not be read."""
        if self._mode is LoadMode.RECOMPUTE:
            return 0.0
        if load_s is None or not recompute_s:
            return default
        return max(0.0, 1 - load_s / recompute_s)

    def prefers_load(self, nbytes: int, *, first: int, end: int) -> bool:
        """Whether to load tokens `first` to `end - 1` of a prompt, of so many bytes, from the host tier."""
        if self._mode is not LoadMode.AUTO:
            return self._mode is LoadMode.LOAD
        # Without the term of jobs, which is mostly the wait for the end of a step: prefill has it too. So there is an
        # estimate only once loads of different sizes were measured.
        seconds = self._loads.seconds(nbytes, 0.0) if self._loads.is_separable else None
        return self._prefers(self._loads, None if seconds is None else seconds / _MARGIN, self.recompute_s(first, end))

    def _prefers(self, fit: TwoTermFit, load_s: float | None, recompute_s: float | None) -> bool:
        if self._mode is not LoadMode.AUTO:
            return self._mode is LoadMode.LOAD
        if load_s is None or recompute_s is None or load_s <= recompute_s:
            return True
        if not self._is_stale(fit):
            return False
        self._last_s[fit] = self._clock()
        return True

    def _is_stale(self, fit: TwoTermFit) -> bool:
        return self._clock() - self._last_s.get(fit, -math.inf) >= _STALE_S
