"""New weights while the engine runs: tpu-inference frees the KV caches, and makes new ones at the end."""

import contextlib

import jax.numpy as jnp
import pytest

from tests.adapters.scheduler_stack import SMALL, Stack, prompt

pytestmark = pytest.mark.vllm


@contextlib.contextmanager
def update_of_weights(stack):
    """As `start_weight_update` and `finish_weight_update` of tpu-inference's worker."""
    (runner,) = stack.runners
    freed, runner.kv_caches = runner.kv_caches, []
    yield
    runner.kv_caches = [jnp.zeros_like(cache) for cache in freed]


def make(directory, **settings):
    storage = {"storage_tier": "file", "storage_options": f"{directory},min_free_gb=0", "num_storage_chunks": 64}
    return Stack(**{"num_blocks": 12, **SMALL, **storage, **settings})


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_steps_for_copies_in_flight_need_no_caches(tmp_path, async_scheduling):
    """The reset before it has storage cleared, for which vLLM makes steps."""
    stack = make(tmp_path, async_scheduling=async_scheduling)
    stack.serve("a", prompt(40, seed=20))
    assert stack.offload.stats().num_stored_chunks > 0
    assert stack.scheduler.reset_prefix_cache(reset_connector=True)
    with update_of_weights(stack):
        assert stack.side.has_jobs
        stack.drain()  # storage needs no caches
        assert not stack.side.has_jobs
    stack.serve("b", prompt(40, seed=20))
    assert stack.offload.stats().matched_tokens == 0
    stack.check_end()
    stack.close()
    again = make(tmp_path)
    again.serve("d", prompt(40, seed=20))
    assert again.offload.stats().restored_chunks == 0, "what was stored before the reset"
    again.check_end()
    again.close()


@pytest.mark.parametrize("load_path", ["direct", "staged"])
def test_a_request_whose_load_comes_meanwhile_is_computed(tmp_path, load_path):
    stack = make(tmp_path, load_path=load_path, sync_load=False)
    stack.serve("a", prompt(40, seed=20))
    assert stack.scheduler.reset_prefix_cache()
    request = stack.add("b", prompt(40, seed=20))
    with update_of_weights(stack):
        stack.step()
    stack.drain()
    assert request.is_finished()
    assert stack.offload.stats().loaded_tokens == 0
    stack.check_end()
    stack.close()
