"""Events between the report of a finished load to vLLM and its report to the library's scheduler."""

import contextlib

import pytest
from vllm.v1.request import RequestStatus

from tests.adapters.scheduler_stack import broken, make_stack, prompt, save_prompt
from tests.inside.scheduler import request_table
from tests.inside.worker import last_report, tier_group
from tpu_offload.types import Direction

pytestmark = pytest.mark.vllm


@contextlib.contextmanager
def results_held_back(worker):
    """Copies of this worker are dispatched, but never observed to finish."""
    worker.poll = lambda wait=False: last_report(worker)
    yield
    del worker.poll


@pytest.mark.parametrize("sync_load", [False, True])
def test_reset_of_running_requests_whose_load_is_not_acknowledged(sync_load):
    stack = make_stack(num_blocks=24, sync_load=sync_load)
    tokens = save_prompt(stack, "a")
    request = stack.add("b", tokens, max_tokens=8)
    with results_held_back(stack.workers[0]):
        stack.step()
        stack.step()
        assert request.status is RequestStatus.RUNNING
        assert stack.offload.has_jobs
        stack.scheduler.reset_prefix_cache(reset_running_requests=True)
        stack.step()
    stack.drain()
    stack.check_end()


@pytest.mark.parametrize("num_tokens", [40, 60])
def test_a_load_fails_on_one_worker_before_the_other_has_acknowledged_it(num_tokens):
    stack = make_stack(num_blocks=24, num_workers=2)
    tokens = save_prompt(stack, "a")
    tier_group(stack.workers[1]).copiers[Direction.LOAD].load = broken
    stack.add("b", tokens, max_tokens=8)
    with results_held_back(stack.workers[0]):
        for _ in range(4):
            stack.step()
    stack.drain()
    stack.check_end()


def test_a_request_that_shares_blocks_of_a_failed_load_saves_nothing_of_that_step():
    stack = make_stack(num_blocks=24, sync_load=True, max_num_batched_tokens=40)
    tokens = save_prompt(stack, "a", 32)
    other = [*tokens, *prompt(16, seed=78)]
    tier_group(stack.workers[0]).copiers[Direction.LOAD].load = broken
    stack.add("b", [*tokens, *prompt(9, seed=77)])
    stack.add("c", other)
    stack.step()
    assert stack.num_wrong == 2
    del tier_group(stack.workers[0]).copiers[Direction.LOAD].load
    for _ in range(2):
        stack.step()
    stack.abort("c")
    stack.drain()
    stack.scheduler.reset_prefix_cache()
    stack.serve("d", [*other, *prompt(3)])
    stack.check_end()


def test_blocks_of_a_failed_synchronous_load_are_not_found_before_they_are_recomputed():
    stack = make_stack(num_blocks=24, sync_load=True, max_num_batched_tokens=48)
    tokens = save_prompt(stack, "a", 64)
    tier_group(stack.workers[0]).copiers[Direction.LOAD].load = broken
    stack.add("b", [*tokens, *prompt(9, seed=77)])
    stack.step()
    assert stack.num_wrong == 1
    del tier_group(stack.workers[0]).copiers[Direction.LOAD].load
    stack.abort("b")
    stack.serve("c", [*tokens, *prompt(3)])
    stack.check_end()


def test_a_request_that_shares_blocks_of_a_failed_load_does_not_wait_for_another_to_recompute_them():
    stack = make_stack(num_blocks=24, sync_load=True, max_num_batched_tokens=40)
    tokens = save_prompt(stack, "a", 32)
    tier_group(stack.workers[0]).copiers[Direction.LOAD].load = broken
    stack.add("b", [*tokens, *prompt(4, seed=77)])
    stack.add("c", [*tokens, *prompt(4, seed=78)])
    stack.step()
    assert stack.num_wrong == 2
    del tier_group(stack.workers[0]).copiers[Direction.LOAD].load
    stack.abort("b")
    stack.drain()
    stack.check_end()


def test_a_reset_withdraws_what_a_request_offered_that_may_not_read_the_cache():
    stack = make_stack(num_staging_blocks=2, num_blocks=10, save_path="staged")
    stack.add("b", prompt(40, seed=5), max_tokens=8).skip_reading_prefix_cache = True
    with results_held_back(stack.workers[0]):
        for _ in range(2):
            stack.step()
        assert request_table(stack.offload)["b"].num_deferred_chunks
        stack.scheduler.reset_prefix_cache(reset_running_requests=True)
        stack.add("c", prompt(47, seed=6), max_tokens=8)
        waiting = stack.scheduler.waiting
        waiting.add_request(waiting.pop_request())  # b is matched after c, and gets no blocks
        stack.step()
        assert stack.requests["b"].status is RequestStatus.PREEMPTED
        request = request_table(stack.offload).get("b")
        assert request is None or not request.num_offered_chunks  # its blocks belong to another request now
    stack.drain()
    stack.scheduler.reset_prefix_cache()
    stack.serve("d", [*prompt(40, seed=5), 7])
    stack.check_end()


def test_an_idle_engine_does_not_wait_forever_for_a_report():
    stack = make_stack(num_blocks=24, job_timeout_s=0.1)
    with results_held_back(stack.workers[0]):
        stack.serve("a", prompt(40))
        assert stack.offload.stats().num_timed_out_jobs == 1
        assert not stack.scheduler.has_requests()
    stack.serve("b", prompt(8, seed=3))  # the report arrives after all
    stack.check_end()


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("num_tokens", range(16, 26))
def test_a_session_whose_last_token_is_withdrawn(async_scheduling, num_tokens):
    stack = make_stack(num_blocks=24, async_scheduling=async_scheduling, decode_save=True)
    session = stack.add("s", prompt(num_tokens, seed=5), max_tokens=8, resumable=True)
    for turn in range(2):
        for _ in range(30):
            stack.step()
        assert session.status is RequestStatus.WAITING_FOR_STREAMING_REQ
        stack.outputs["s"] = []  # they are part of the prompt from now on
        stack.more("s", prompt(9, seed=30 + turn), max_tokens=8)
    for _ in range(30):
        stack.step()
    all_tokens = list(session.all_token_ids)
    stack.abort("s")
    stack.drain()
    stack.outputs["s"] = []
    for _ in range(2):  # the blocks that the session has saved, and those after them
        stack.scheduler.reset_prefix_cache()
        stack.serve("again", [*all_tokens, 7])
    assert stack.offload.stats().matched_tokens >= num_tokens + 16
    stack.check_end()


@pytest.mark.parametrize("resets", [True, False])
@pytest.mark.parametrize("num_tokens", range(12, 21))
def test_a_session_with_drafts_shares_nothing_after_its_first_prompt(num_tokens, resets):
    """vLLM counts drafts that it has accepted beyond a turn's last token as computed tokens of the next turn."""
    stack = make_stack(num_blocks=24, num_spec_tokens=3, guess=lambda: True, decode_save=True)
    stack.passes.wrong_anyway.add("s")
    session = stack.add("s", prompt(num_tokens, seed=5), max_tokens=2, resumable=True)
    for turn in range(2):
        for _ in range(30):
            stack.step()
        assert session.status is RequestStatus.WAITING_FOR_STREAMING_REQ
        stack.outputs["s"] = []
        stack.more("s", prompt(9, seed=30 + turn), max_tokens=2)
    for _ in range(30):
        stack.step()
    all_tokens = list(session.all_token_ids)
    stack.abort("s")
    stack.drain()
    stack.outputs["s"] = []
    if resets:  # else vLLM's own prefix cache would have its blocks
        stack.scheduler.reset_prefix_cache()
    stack.serve("again", [*all_tokens, 7])
    stack.check_end()
