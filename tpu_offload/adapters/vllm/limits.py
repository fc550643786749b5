"""The limits of a request, from its `kv_transfer_params`."""

import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Any, final

from tpu_offload import RequestError, RequestLimits

_logger = logging.getLogger(__name__)

_PREFIX = "tpu_offload."
# The first two are the names in vLLM's own offloading connector.
_NAMES = {"max_offload_tokens": "max_save_tokens", "max_load_tokens": "max_load_tokens"}
_NAMES |= {_PREFIX + field.name: field.name for field in dataclasses.fields(RequestLimits)}


def read_limits(request_id: str, params: Any, log: Callable[[str], None]) -> RequestLimits | None:
    """Reads the limits of a request; None if it has none.

    A request with an invalid value, or an unknown entry that begins like `tpu_offload`, is served, but bypasses the
    host tier: the client may have meant to keep it out. A warning names the entry. Of two names of one limit the
    smaller value holds.

    Args:
      request_id: for the warning.
      params: `kv_transfer_params`; entries of other connectors are ignored.
      log: logs the warning; see `RateLimitedWarnings`.
    """
    if params is None:
        return None
    try:
        if not isinstance(params, dict):
            raise RequestError(f"{params!r:.100} is not an object; expected entries by name")
        unknown = [name for name in params if name not in _NAMES and _is_meant_for_us(name)]
        if unknown:
            raise RequestError(f"{unknown[0]!r:.100} is unknown; expected {', '.join(sorted(_NAMES))}")
        values: dict[str, Any] = {}
        for name, field in _NAMES.items():
            if name in params:
                value = getattr(RequestLimits(**{field: params[name]}), field)  # raises if it is invalid
                both = [v for v in (values.get(field), value) if v is not None]
                values[field] = min(both, default=None)
        return RequestLimits(**values) if values else None
    except RequestError as e:
        # The client may have chosen the id: no line of the log may end in it.
        log(f"kv_transfer_params of request {request_id!r:.100}: {e}; nothing of it is saved or loaded")
        return RequestLimits(cache=False)


def _is_meant_for_us(name: Any) -> bool:
    return str(name).strip().lower().replace("-", "_").startswith(_PREFIX.rstrip("."))


@final
class RateLimitedWarnings:
    """Logs at most one warning per interval, with the number of those suppressed since the last.

    Args:
      interval_s: the interval.
      clock: monotonic seconds.
    """

    def __init__(self, interval_s: float = 60.0, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._next_s = 0.0
        self._num_suppressed = 0

    def __call__(self, line: str) -> None:
        """Logs a warning, unless there was one within the interval."""
        if self._clock() < self._next_s:
            self._num_suppressed += 1
            return
        more = f" ({self._num_suppressed} more such requests since the last line)" if self._num_suppressed else ""
        _logger.warning("%s%s", line, more)
        self._next_s, self._num_suppressed = self._clock() + self._interval_s, 0
