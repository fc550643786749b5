"""On TPU hardware, with `pytest -m tpu`: the bits that come back are those that went out."""

import jax
import pytest

from tests.caches import DTYPES
from tests.worker_engine import PATHS, Engine

pytestmark = pytest.mark.tpu


@pytest.fixture(autouse=True)
def _needs_a_tpu():
    if jax.default_backend() != "tpu":
        pytest.skip(f"no TPU here: jax runs on {jax.default_backend()}")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_round_trip(path, dtype):
    Engine(path, dtype=dtype).check_round_trip()
