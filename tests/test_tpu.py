"""On TPU hardware, with `pytest -m tpu`: the bits that come back are those that went out."""

import jax
import pytest

from tests.caches import DTYPES
from tests.worker import test_swap
from tests.worker.engine import PATHS, Engine

pytestmark = pytest.mark.tpu


@pytest.fixture(autouse=True)
def _needs_a_tpu():
    if jax.default_backend() != "tpu":
        pytest.skip(f"no TPU here: jax runs on {jax.default_backend()}")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_round_trip(path, dtype):
    Engine(path, dtype=dtype).check_round_trip()


@pytest.mark.parametrize("dtype", DTYPES)
def test_swap_round_trip(dtype):
    test_swap.test_every_bit_comes_back(dtype, num_devices=1)


def test_swapped_layer_groups():
    test_swap.test_layer_groups_have_pools_of_their_own(num_devices=1)
