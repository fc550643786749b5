"""On TPU hardware, with `pytest -m tpu`: the bits that come back are those that went out."""

import jax
import pytest

from tests.caches import DTYPES
from tests.worker_engine import FINISHED, PATHS, Engine

pytestmark = pytest.mark.tpu


@pytest.fixture(autouse=True)
def _needs_a_tpu():
    if jax.default_backend() != "tpu":
        pytest.skip(f"no TPU here: jax runs on {jax.default_backend()}")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_round_trip(path, dtype):
    engine = Engine(path, dtype=dtype)
    save, load = engine.save([0, 1, 2, 3], [4, 5, 6, 7]), engine.load([8, 9, 10, 11], [4, 5, 6, 7])
    engine.step(saves=[save])
    engine.expect_saved(save)
    assert engine.states() == {save.job_id: FINISHED}
    engine.step(loads=[load])
    engine.expect_loaded(load)
    assert engine.states() == {load.job_id: FINISHED}
    engine.check()
