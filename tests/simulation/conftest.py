import logging

import pytest


@pytest.fixture(scope="package", autouse=True)
def others_hear_the_library():
    """Restores the library's log level: a simulated run silences its log, which injected faults would flood."""
    logger = logging.getLogger("tpu_offload")
    level = logger.level
    yield
    logger.setLevel(level)
