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


# Of four tokens, as the stand-in for an engine counts: pages as vLLM-TPU's, and those that are rows of 128 in the pool.
@pytest.mark.parametrize("page_shape", [(4, 8, 2, 128), (4, 8, 2, 64), (4, 8, 192), (4, 576)], ids=str)
@pytest.mark.parametrize("path", ["direct", "staged"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_round_trip_of_pages_that_engines_have(path, dtype, page_shape):
    Engine(path, dtype=dtype, page_shape=page_shape).check_round_trip()


@pytest.mark.parametrize("dtype", DTYPES)
def test_swap_round_trip(dtype):
    test_swap.test_every_bit_comes_back(dtype, num_devices=1)


def test_swapped_layer_groups():
    test_swap.test_layer_groups_have_pools_of_their_own(num_devices=1)
