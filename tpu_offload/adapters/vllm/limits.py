"""What a request says for itself, in the `kv_transfer_params` that came with it."""

import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Any, final

from tpu_offload import RequestError, RequestLimits

_logger = logging.getLogger(__name__)

_PREFIX = "tpu_offload."
# vLLM's own offloading connector calls two of them so.
_NAMES = {"max_offload_tokens": "max_save_tokens", "max_load_tokens": "max_load_tokens"}
_NAMES |= {_PREFIX + field.name: field.name for field in dataclasses.fields(RequestLimits)}


def read_limits(request_id: str, params: Any, log: Callable[[str], None]) -> RequestLimits | None:
    """The limits among the parameters; None when there are none.

    A client's mistake is not the engine's: the request is served. But what its owner may have meant to keep out of the
    host tier is kept out: with a value that cannot be read, or a `tpu_offload.` name that is none, nothing of it is
    saved or loaded. One line says so; a client that goes on making mistakes is not in the log for each.

    Args:
      request_id: for that line.
      params: `kv_transfer_params`; entries of other connectors are passed over.
      log: takes the line.
    """
    if params is None:
        return None
    try:
        if not isinstance(params, dict):
            raise RequestError(f"{params!r:.100} is no object; expected one from names to values")
        unknown = [name for name in params if str(name).startswith(_PREFIX) and name not in _NAMES]
        if unknown:
            raise RequestError(f"{unknown[0]!r:.100} is no limit; expected {', '.join(sorted(_NAMES))}")
        values = {field: params[name] for name, field in _NAMES.items() if name in params}
        return RequestLimits(**values) if values else None
    except RequestError as e:
        log(f"kv_transfer_params of request {request_id}: {e}; nothing of it is saved or loaded")
        return RequestLimits(cache=False)


@final
class FewLines:
    """Logs at most one line in a while, and with it how many were left out.

    Args:
      interval_s: the while.
      clock: monotonic seconds.
    """

    def __init__(self, interval_s: float = 60.0, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._next_s = 0.0
        self._num_left_out = 0

    def __call__(self, line: str) -> None:
        """A warning, unless there has been one just now."""
        if self._clock() < self._next_s:
            self._num_left_out += 1
            return
        more = f" ({self._num_left_out} more such requests since the last line)" if self._num_left_out else ""
        _logger.warning("%s%s", line, more)
        self._next_s, self._num_left_out = self._clock() + self._interval_s, 0
