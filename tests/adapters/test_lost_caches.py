"""A load destroys the KV caches: new ones are made, and no token that depends on the old ones is returned."""

import itertools
import logging
import pickle
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from tests.adapters.scheduler_stack import Stack, lose_caches, make_stack, prompt, save_prompt
from tests.inside.worker import last_report
from tpu_offload.adapters.vllm import worker_side

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("compiled_once")]

# (synchronous loads, async scheduling, policy)
MODES = [
    (False, False, "recompute"),
    (True, False, "recompute"),
    (False, True, "recompute"),
    (True, True, "recompute"),
    (False, False, "fail"),
    (True, False, "fail"),
    (False, True, "fail"),
    (True, True, "fail"),
]
modes = pytest.mark.parametrize(("sync_load", "async_scheduling", "policy"), MODES)


def make(sync_load: bool, async_scheduling: bool, policy: str, **kwargs) -> Stack:
    settings = {"num_blocks": 40, "sync_load": sync_load, "async_scheduling": async_scheduling, "policy": policy}
    return make_stack(**{**settings, **kwargs})


def check_ends(stack: Stack, *request_ids: str) -> None:
    """Only with the policy `fail` may requests have ended with an error; all others have all of their tokens."""
    for request_id in request_ids:
        status = stack.requests[request_id].status
        assert status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_ERROR)
        if status is RequestStatus.FINISHED_ERROR:
            assert stack.config.kv_transfer_config.kv_load_failure_policy == "fail"
    stack.check_end()


@modes
@pytest.mark.parametrize("load_path", ["direct", "staged"])
@pytest.mark.parametrize("num_before", [0, 1, 3])
def test_all_requests_are_recomputed(sync_load, async_scheduling, policy, load_path, num_before):
    stack = make(sync_load, async_scheduling, policy, load_path=load_path)
    tokens = save_prompt(stack, "a")
    for name, seed in (("other", 4), ("third", 5)):
        stack.add(name, prompt(12, seed=seed), max_tokens=12)
        for _ in range(num_before):
            stack.step()
    lose_caches(stack)
    stack.add("b", tokens, max_tokens=6)
    stack.add("c", [*tokens[:24], *prompt(12, seed=8)], max_tokens=6)  # shares blocks with b
    stack.add("d", prompt(20, seed=9), max_tokens=6)
    stack.drain()
    check_ends(stack, "b", "c", "d", "other", "third")
    if policy == "fail":
        assert stack.requests["b"].status is RequestStatus.FINISHED_ERROR
    # Blocks that were saved before the loss, and since.
    stack.scheduler.reset_prefix_cache()
    for name, again in (("e", [*tokens, 7]), ("f", [*prompt(20, seed=9), 7])):
        stack.serve(name, again)
        assert stack.requests[name].status is RequestStatus.FINISHED_LENGTH_CAPPED
    # With the policy `fail` there may be no new saves, and chunks whose loads failed twice back off.
    assert stack.offload.stats().loaded_blocks > 0 or policy == "fail"
    stack.check_end()


@modes
def test_the_prefix_cache_drops_blocks_that_no_request_holds(sync_load, async_scheduling, policy):
    stack = make(sync_load, async_scheduling, policy)
    tokens = save_prompt(stack, "a")
    stack.serve("x", prompt(24, seed=31))  # in HBM, held by no request
    lose_caches(stack)
    stack.serve("b", tokens)
    computed_before = stack.num_wrong
    stack.serve("y", [*prompt(24, seed=31), 7])
    assert stack.num_wrong == computed_before
    check_ends(stack, "b", "y")
    assert stack.requests["y"].status is RequestStatus.FINISHED_LENGTH_CAPPED


@modes
@pytest.mark.parametrize("load_path", ["direct", "staged"])
def test_nothing_computed_on_lost_blocks_is_saved(sync_load, async_scheduling, policy, load_path):
    """Requests are in chunked prefill, and complete blocks in the steps around the loss."""
    stack = make(sync_load, async_scheduling, policy, load_path=load_path, max_num_batched_tokens=16)
    tokens = save_prompt(stack, "a")
    longer, other = prompt(90, seed=4), prompt(70, seed=5)
    stack.add("other", longer)
    stack.step()
    lose_caches(stack)
    stack.add("b", tokens)
    stack.add("c", other)
    stack.drain()
    check_ends(stack, "b", "c", "other")
    for name, again in (("d", longer), ("e", other), ("f", tokens)):
        stack.scheduler.reset_prefix_cache()
        stack.serve(name, [*again, 7])  # checks every byte that it loads
        assert stack.requests[name].status is RequestStatus.FINISHED_LENGTH_CAPPED
    stack.check_end()


@modes
@pytest.mark.parametrize("worker", [0, 1])
def test_one_worker_of_two_loses_its_caches(sync_load, async_scheduling, policy, worker):
    stack = make(sync_load, async_scheduling, policy, num_workers=2)
    tokens = save_prompt(stack, "a")
    stack.add("other", prompt(30, seed=4), max_tokens=9)
    stack.step()
    lose_caches(stack, worker)
    stack.add("b", [*tokens, *prompt(9, seed=7)])
    stack.drain()
    check_ends(stack, "b", "other")
    stack.scheduler.reset_prefix_cache()
    stack.serve("c", [*tokens, *prompt(9, seed=7), 5])
    assert stack.requests["c"].status is RequestStatus.FINISHED_LENGTH_CAPPED
    stack.check_end()


@modes
def test_caches_are_lost_again_during_the_recovery(sync_load, async_scheduling, policy):
    stack = make(sync_load, async_scheduling, policy)
    tokens = save_prompt(stack, "a", 64)
    for turn in range(3):
        stack.add(f"other{turn}", prompt(20, seed=40 + turn), max_tokens=9)
        lose_caches(stack)
        stack.add(f"b{turn}", [*tokens, *prompt(5, seed=50 + turn)], max_tokens=9)
        for _ in range(2):
            stack.step()
    stack.drain()
    check_ends(stack, *(f"{kind}{turn}" for kind, turn in itertools.product(("b", "other"), range(3))))


@pytest.mark.parametrize("load_path", ["direct", "staged"])
@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("num_steps", range(4))
def test_requests_aborted_or_preempted_meanwhile_leak_nothing(async_scheduling, load_path, num_steps):
    stack = make(False, async_scheduling, "recompute", load_path=load_path, num_blocks=14)
    tokens = save_prompt(stack, "a")
    stack.add("other", prompt(16, seed=4), max_tokens=20)
    stack.add("third", prompt(16, seed=5), max_tokens=20)
    stack.step()
    lose_caches(stack)
    stack.add("b", tokens, max_tokens=12)
    stack.add("c", tokens, max_tokens=12)
    for _ in range(num_steps):
        stack.step()
    stack.abort("b")
    stack.drain()
    check_ends(stack, "c", "other", "third")


def test_a_waiting_request_that_holds_some_blocks_frees_them():
    """After its load, when there is no block for the rest. This is rare, so the state is set up by hand."""
    stack = make(False, False, "recompute")
    tokens = save_prompt(stack, "a")
    request = stack.add("b", tokens, max_tokens=8)
    stack.step()
    stack.step()
    assert request.status is RequestStatus.RUNNING
    (running,), scheduler = stack.scheduler.running, stack.scheduler
    scheduler.running.clear()
    running.status = RequestStatus.WAITING
    scheduler.kv_holding_waiting.prepend_request(running)
    stack.side.invalidate_blocks(set(range(stack.num_blocks)))
    assert running.num_computed_tokens == 0
    assert not scheduler.kv_cache_manager.get_block_ids("b")[0]


@modes
def test_a_session_that_waits_for_more_input_continues(sync_load, async_scheduling, policy):
    stack = make(sync_load, async_scheduling, policy)
    tokens = save_prompt(stack, "a")
    session = stack.add("s", prompt(20, seed=5), max_tokens=4, resumable=True)
    for _ in range(10):
        stack.step()
    assert session.status is RequestStatus.WAITING_FOR_STREAMING_REQ
    lose_caches(stack)
    request = stack.add("b", tokens)
    for _ in range(10):
        stack.step()
    assert request.is_finished()
    stack.outputs["s"] = []  # they are part of the prompt from now on
    stack.more("s", prompt(9, seed=30), max_tokens=4)
    for _ in range(12):
        stack.step()
    if policy == "recompute":
        assert stack.outputs["s"]
    stack.abort("s")
    stack.drain()
    all_tokens = list(session.all_token_ids)
    stack.outputs["s"] = []
    stack.scheduler.reset_prefix_cache()
    stack.serve("again", [*all_tokens, 7])
    stack.check_end()


@modes
@pytest.mark.parametrize("load_path", ["direct", "staged"])
def test_a_duplicate_message_is_applied_once(sync_load, async_scheduling, policy, load_path):
    stack = make(sync_load, async_scheduling, policy, load_path=load_path)
    for connector in stack.connectors:
        deliver_twice(connector.worker_side)
    tokens = save_prompt(stack, "a")
    stack.add("other", prompt(30, seed=4), max_tokens=9)
    stack.serve("b", [*tokens, *prompt(9, seed=7)])
    stack.drain()
    assert stack.offload.stats().loaded_blocks > 0
    check_ends(stack, "b", "other")


def deliver_twice(side):
    """Delivers each message to the worker once more, just before the next one."""
    bind = side.bind
    last: list[Any] = []

    def bind_twice(message):
        if last:
            bind(last.pop())
            side.start_loads()
            side.start_saves()
        last.append(pickle.loads(pickle.dumps(message)))
        bind(message)

    side.bind = bind_twice


def test_copies_into_lost_caches_are_ignored():
    stack = make(False, False, "recompute", num_blocks=40)
    tokens = save_prompt(stack, "a")
    other = prompt(24, seed=21)
    stack.serve("a2", other)
    stack.scheduler.reset_prefix_cache()
    (worker,) = stack.workers
    worker.poll, poll = lambda wait=False: last_report(worker), worker.poll
    stack.add("b", tokens)  # written, but not yet observed to finish
    stack.step()
    assert stack.offload.stats().num_jobs_in_flight == 1
    lose_caches(stack)
    stack.add("c", other)
    stack.step()
    worker.poll = poll
    stack.drain()
    assert stack.offload.stats().loaded_blocks == 0
    check_ends(stack, "b", "c")


def test_the_loss_is_logged_in_one_line(caplog):
    stack = make(True, False, "recompute")
    tokens = save_prompt(stack, "a")
    lose_caches(stack)
    with caplog.at_level(logging.ERROR, logger=worker_side.__name__):
        stack.serve("b", tokens)
    (record,) = [r for r in caplog.records if r.name == worker_side.__name__]
    assert "took the KV caches with it" in record.getMessage()
    assert "(RuntimeError: injected)" in record.getMessage()
    assert "New caches are made" in record.getMessage()


def test_requests_that_fill_hbm_are_not_stuck_when_all_their_loads_fail():
    """vLLM counts the blocks that a request has had as reserved, also against its own next load."""
    stack = make(False, False, "recompute", num_blocks=19, load_path="staged")
    prompts = {f"b{seed}": [*prompt(16), *prompt(28, seed=seed)] for seed in (20, 30, 40)}
    for name, tokens in prompts.items():
        stack.serve(f"saved {name}", tokens)
        stack.scheduler.reset_prefix_cache()
    lose_caches(stack, skip=2)
    for name, tokens in prompts.items():
        stack.add(name, tokens)
    stack.drain()
    check_ends(stack, *prompts)
