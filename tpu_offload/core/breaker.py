"""Circuit breaker: suspends a kind of copy that keeps failing, and probes whether it works again.

    CLOSED    copies are planned; `num_failures` failures in a row open it
    OPEN      no copy is planned until `retry_s` has passed
    PROBING   one small copy is in flight: success closes the breaker, failure reopens it for twice as long

References:
  Nygard, "Release It!": circuit breaker.
"""

import enum
import logging
from collections.abc import Callable, Hashable
from typing import final

_logger = logging.getLogger(__name__)

_MAX_BACKOFF = 64  # times the first wait


class BreakerState(enum.Enum):
    """Whether copies are planned."""

    CLOSED = "closed"
    OPEN = "open"
    PROBING = "probing"


@final
class CircuitBreaker:
    """One for each kind of copy, all calls from the scheduler's thread.

    Args:
      what: the copies, for the log line.
      num_failures: failures in a row that open it; 0 never opens it.
      retry_s: seconds from its opening to the first probe.
      clock: monotonic seconds.
    """

    def __init__(self, what: str, *, num_failures: int, retry_s: float, clock: Callable[[], float]) -> None:
        self._what = what
        self._num_failures = num_failures
        self._retry_s = retry_s
        self._clock = clock
        self._num_failed = 0  # in a row
        self._state = BreakerState.CLOSED
        self._wait_s = retry_s
        self._probe_at_s = 0.0
        self._probe: Hashable = None
        self._num_opened = 0

    @property
    def state(self) -> BreakerState:
        """Whether copies are planned, suspended, or one of them is being tried."""
        return self._state

    @property
    def closed(self) -> bool:
        """Whether copies are planned without restriction."""
        return self._state is BreakerState.CLOSED

    @property
    def num_opened(self) -> int:
        """How often it opened; a failed probe does not count."""
        return self._num_opened

    @property
    def probe(self) -> Hashable:
        """Whose copy is the probe: its owner, then its job; None unless there is one."""
        return self._probe

    def admits(self, owner: Hashable) -> bool:
        """Whether a copy for `owner` may be planned; unless the breaker is closed, that copy is a probe."""
        if self._state is BreakerState.OPEN:
            return self._clock() >= self._probe_at_s
        return self._state is BreakerState.CLOSED or owner == self._probe

    def begin(self, owner: Hashable) -> None:
        """An admitted owner plans a copy."""
        if self._state is not BreakerState.CLOSED:
            self._state, self._probe = BreakerState.PROBING, owner

    def hand_over(self, owner: Hashable, job_id: int) -> None:
        """The owner's copy has become a job."""
        if self._state is BreakerState.PROBING and owner == self._probe:
            self._probe = job_id

    def cancel_probe(self, owner: Hashable) -> None:
        """A copy was given up before its end, without an outcome. The next one may be the probe."""
        if self._state is BreakerState.PROBING and owner == self._probe:
            self._state, self._probe = BreakerState.OPEN, None

    def succeeded(self, job_id: int) -> None:
        """A copy finished on every worker."""
        if self._state is BreakerState.CLOSED:
            self._num_failed = 0
        elif self._state is BreakerState.PROBING and job_id == self._probe:
            _logger.warning("%s work again", self._what)
            self._state, self._probe = BreakerState.CLOSED, None
            self._num_failed, self._wait_s = 0, self._retry_s

    def failed(self, job_id: int, error: str) -> None:
        """A copy failed on some worker, or timed out."""
        if self._state is BreakerState.CLOSED:
            self._num_failed += 1
            if self._num_failed == self._num_failures:
                self._num_opened += 1
                self._open()
                _logger.error(
                    "%s have failed %d times in a row (%s): suspended for %g s, then one is tried",
                    self._what, self._num_failed, error, self._retry_s,
                )  # fmt: skip
        elif self._state is BreakerState.PROBING and job_id == self._probe:
            self._wait_s = min(2 * self._wait_s, _MAX_BACKOFF * self._retry_s)
            self._open()

    def _open(self) -> None:
        self._state, self._probe = BreakerState.OPEN, None
        self._probe_at_s = self._clock() + self._wait_s
