"""What a request says for itself, in the `kv_transfer_params` that came with it."""

import dataclasses
import logging
from typing import Any

from tpu_offload import RequestError, RequestLimits

_logger = logging.getLogger(__name__)

_PREFIX = "tpu_offload."
# vLLM's own offloading connector calls two of them so.
_NAMES = {"max_offload_tokens": "max_save_tokens", "max_load_tokens": "max_load_tokens"}
_NAMES |= {_PREFIX + field.name: field.name for field in dataclasses.fields(RequestLimits)}


def read_limits(request_id: str, params: Any) -> RequestLimits | None:
    """The limits among the parameters; None when there are none.

    A client's mistake is not the engine's: with anything that cannot be, or a `tpu_offload.` name that is none, the
    request is served without limits, and one line says so.

    Args:
      request_id: for that line.
      params: `kv_transfer_params`; entries of other connectors are passed over.
    """
    if not isinstance(params, dict):
        return None
    try:
        unknown = [name for name in params if str(name).startswith(_PREFIX) and name not in _NAMES]
        if unknown:
            raise RequestError(f"{unknown[0]!r:.100} is no limit; expected {', '.join(sorted(_NAMES))}")
        values = {field: params[name] for name, field in _NAMES.items() if name in params}
        return RequestLimits(**values) if values else None
    except RequestError as e:
        _logger.warning("kv_transfer_params of request %s: %s; it is served without limits", request_id, e)
        return None
