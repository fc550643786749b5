"""Requests that wait after their load give their blocks back when vLLM resets its cache."""

from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from tests.adapters.random_runs import BLOCK_NBYTES
from tests.adapters.scheduler_stack import GB, broken, make_stack, prompt, save_prompt, writing_call
from tests.inside.worker import tier_groups
from tpu_offload.types import Direction

pytestmark = pytest.mark.vllm

SETUPS: dict[str, dict[str, Any]] = {
    "direct": {},
    "async scheduling": {"async_scheduling": True},
    "staged": {"save_path": "staged", "load_path": "staged"},
    "in pieces": {"sync_load": True, "max_load_gb_per_step": 2.5 * BLOCK_NBYTES / GB},
    "windows": {"windows": (0, 16), "num_blocks": 40},
    "states": {"num_rows": 14},
}


def load_in_pause(stack, *, failing=False):
    """A request runs and another waits for its load; the engine is paused, and goes on until all copies have ended."""
    tokens = save_prompt(stack, "a")
    running = stack.add("running", prompt(9, seed=5), max_tokens=12)
    stack.step()
    stack.step()
    for group in tier_groups(stack.workers[0]) if failing else ():
        copier = group.copiers[Direction.LOAD]
        setattr(copier, writing_call(copier), broken)
    loaded = stack.add("b", tokens)
    stack.begin_step()
    assert (running.status, loaded.status) == (RequestStatus.RUNNING, RequestStatus.WAITING_FOR_REMOTE_KVS)
    stack.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    while stack.in_flight:
        stack.end_step()
    while stack.scheduler.has_requests() or stack.in_flight:
        stack.step()
    assert loaded.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    return loaded


@pytest.mark.parametrize("failing", [False, True], ids=["loads", "failed loads"])
@pytest.mark.parametrize("setup", SETUPS)
def test_a_pause_that_keeps_requests_can_clear_the_cache(setup, failing):
    stack = make_stack(**SETUPS[setup])
    loaded = load_in_pause(stack, failing=failing)
    matched = stack.offload.stats().matched_tokens
    assert stack.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    stack.side.check_invariants()
    assert stack.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == stack.num_blocks - 1
    stack.scheduler.set_pause_state(PauseState.UNPAUSED)
    stack.drain()
    stack.check_end()
    assert len(stack.outputs["b"]) == loaded.max_tokens
    assert stack.offload.stats().matched_tokens == matched, "KV of before the reset"
    stack.close()


def test_a_request_whose_load_is_in_flight_keeps_its_blocks_and_those_of_others():
    """If vLLM cannot reset its cache, none is freed: vLLM looks at none of those behind the first that does not fit."""
    stack = make_stack()
    loaded = load_in_pause(stack)
    held = stack.scheduler.kv_cache_manager.get_block_ids("b")
    stack.side._received.discard("b")
    with pytest.raises(RuntimeError, match="Failed to reset KV cache"):
        stack.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert stack.scheduler.kv_cache_manager.get_block_ids("b") == held
    assert loaded.num_computed_tokens > 0
    stack.scheduler.set_pause_state(PauseState.UNPAUSED)
    stack.drain()
    stack.check_end()
    stack.close()


def test_without_a_reset_of_running_requests_these_keep_theirs():
    stack = make_stack()
    load_in_pause(stack)
    assert not stack.scheduler.reset_prefix_cache()
    held = [stack.scheduler.kv_cache_manager.get_block_ids(request_id)[0] for request_id in ("running", "b")]
    assert all(held)
    stack.scheduler.set_pause_state(PauseState.UNPAUSED)
    stack.drain()
    stack.check_end()
    stack.close()
