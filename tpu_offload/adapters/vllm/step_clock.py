"""Time that passes only while the engine makes steps."""

from collections.abc import Callable
from typing import final

_MAX_STEP_S = 1.0


@final
class StepClock:
    """Seconds, monotonic; those without a step are left out.

    With data-parallel ranks, and without this package's plugin (see `rank_reports`), the engine makes no steps while it
    computes nothing, so reports of copies wait for the next request. Measured by a plain clock, these copies would time
    out first.

    Args:
      clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last_s = clock()  # of the last step
        self._idle_s = 0.0

    def step(self) -> None:
        """A step begins. What the time since the last one exceeds a second by did not pass."""
        now_s = self._clock()
        self._idle_s += max(0.0, now_s - self._last_s - _MAX_STEP_S)
        self._last_s = now_s

    def __call__(self) -> float:
        """Now."""
        return min(self._clock(), self._last_s + _MAX_STEP_S) - self._idle_s
