"""The library's log lines in vLLM's log: in its format, by its level, and each with the library's name.

vLLM's format has the file and line of a record, and not the name of its logger.
"""

import copy
import logging
from typing import final

_OURS, _THEIRS = "tpu_offload", "vllm"


@final
class _ToVllm(logging.Handler):
    """Has the handlers of vLLM's logger, as they are at that time, handle each record."""

    def emit(self, record: logging.LogRecord) -> None:
        named = copy.copy(record)
        named.msg, named.args = f"{_OURS}: {record.getMessage()}", None
        logging.getLogger(_THEIRS).callHandlers(named)


def use_vllm_log() -> None:
    """Has the library log to vLLM's handlers, by vLLM's level, unless its logger has handlers already."""
    ours, theirs = logging.getLogger(_OURS), logging.getLogger(_THEIRS)
    if not ours.handlers and theirs.handlers:
        ours.addHandler(_ToVllm())
        ours.propagate = False
        ours.setLevel(theirs.level)
