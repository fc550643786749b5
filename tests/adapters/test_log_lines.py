"""The library's lines in vLLM's log."""

import logging
from collections.abc import Iterator

import pytest

from tpu_offload.adapters.vllm.log_lines import use_vllm_log


class Lines(logging.Handler):
    """Keeps what a handler of vLLM's would print."""

    def __init__(self, level: int = logging.NOTSET) -> None:
        super().__init__(level)
        self.lines: list[str] = []
        self.setFormatter(logging.Formatter("[%(filename)s] %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@pytest.fixture
def vllm_logger() -> Iterator[logging.Logger]:
    """vLLM's logger without handlers; it and the library's are put back as they were."""
    loggers = [logging.getLogger("tpu_offload"), logging.getLogger("vllm")]
    before = [(logger, logger.handlers, logger.propagate, logger.level) for logger in loggers]
    for logger in loggers:
        logger.handlers = []
    loggers[0].propagate, loggers[1].propagate = True, False
    yield loggers[1]
    for logger, handlers, propagate, level in before:
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


def test_each_line_names_the_library(vllm_logger: logging.Logger) -> None:
    lines, warnings = Lines(), Lines(logging.WARNING)
    vllm_logger.setLevel(logging.INFO)
    vllm_logger.addHandler(lines)
    use_vllm_log()
    use_vllm_log()  # the scheduler and the worker of one process
    vllm_logger.addHandler(warnings)  # one that is added later
    logger = logging.getLogger("tpu_offload.core.storage.order_choice")
    logger.debug("nobody asked for this")
    logger.info("%s evicts by %s", "storage tier 0:file", "lru")
    logger.warning("100 %% of it, %s", "{}")
    own = "[test_log_lines.py] tpu_offload: "
    assert warnings.lines == [own + "100 % of it, {}"]
    assert lines.lines == [own + "storage tier 0:file evicts by lru", *warnings.lines]
    vllm_logger.info("%d blocks", 3)
    assert lines.lines[-1] == "[test_log_lines.py] 3 blocks"


def test_handlers_of_the_user_stay(vllm_logger: logging.Logger) -> None:
    lines, own = Lines(), Lines()
    vllm_logger.addHandler(lines)
    ours = logging.getLogger("tpu_offload")
    ours.addHandler(own)
    use_vllm_log()
    ours.error("to them alone")
    assert own.lines == ["[test_log_lines.py] to them alone"]
    assert not lines.lines


def test_without_handlers_of_vllm_the_root_logger_has_them(vllm_logger: logging.Logger) -> None:
    vllm_logger.handlers = []  # pytest has added its own
    use_vllm_log()
    assert logging.getLogger("tpu_offload").propagate
    assert not logging.getLogger("tpu_offload").handlers
