import logging

import pytest


@pytest.fixture(scope="package", autouse=True)
def others_hear_the_library():
    """A simulated life silences the library's log, for its faults would fill it."""
    logger = logging.getLogger("tpu_offload")
    level = logger.level
    yield
    logger.setLevel(level)
