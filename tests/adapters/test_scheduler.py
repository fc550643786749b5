"""The connector under vLLM's real scheduler, one behaviour at a time."""

import itertools
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.request import RequestStatus

from tests.adapters.scheduler_stack import (
    BLOCK_SIZE,
    SMALL,
    Stack,
    break_loads,
    hold_saves,
    make_stack,
    prompt,
    save_prompt,
)
from tests.inside.connector import promised_requests
from tests.inside.scheduler import request_table
from tests.inside.worker import last_report, tier_group
from tpu_offload.types import Direction

pytestmark = pytest.mark.vllm


def status(stack: Stack, request_id: str) -> RequestStatus:
    return stack.requests[request_id].status


# Matching and loading.


@pytest.mark.parametrize("num_tokens", [40, 41, 47])
@pytest.mark.parametrize("sync_load", [False, True])
def test_a_hit_of_every_block_leaves_the_last_token(num_tokens, sync_load):
    stack = make_stack(sync_load=sync_load)
    tokens = save_prompt(stack, "a", num_tokens)
    request = stack.add("b", tokens)
    stack.drain()
    assert stack.offload.stats().matched_tokens == min(40, num_tokens - 1)
    assert request.prefill_stats is None or request.num_cached_tokens >= 39
    stack.check_end()


def test_a_request_waits_for_its_load_while_others_run():
    stack = make_stack()
    tokens = save_prompt(stack, "a")
    stack.add("other", prompt(8, seed=50), max_tokens=10)
    stack.step()
    request = stack.add("b", tokens)
    (worker,) = stack.workers  # no load is ever written
    worker.take_written_loads = lambda: ()
    holds, poll = [True], worker.poll
    worker.poll = lambda wait=False: last_report(worker) if holds else poll(wait=False)
    before = len(stack.outputs["other"])
    for _ in range(4):
        stack.step()
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert len(stack.outputs["other"]) == before + 4
    holds.clear()
    stack.drain()
    stack.check_end()


def test_a_loaded_request_runs_in_the_step_after_the_one_that_found_it():
    stack = make_stack()
    tokens = save_prompt(stack, "a")
    request = stack.add("b", tokens)
    stack.step()
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    stack.step()
    assert request.status is RequestStatus.RUNNING
    stack.drain()
    stack.check_end()


def test_a_synchronous_load_is_computed_on_in_the_same_step():
    stack = make_stack(sync_load=True)
    tokens = save_prompt(stack, "a")
    request = stack.add("b", tokens)
    stack.step()
    assert request.status is RequestStatus.RUNNING
    assert stack.outputs["b"] == [stack.sequence("b").tokens[40]]
    stack.drain()
    stack.check_end()


def test_a_direct_load_is_synchronous_by_default():
    stack = make_stack(sync_load=None)
    tokens = save_prompt(stack, "a")
    request = stack.add("b", tokens)
    (worker,) = stack.workers
    worker.poll = lambda wait=False, poll=worker.poll: poll() if not wait else pytest.fail("it waits for the copy")
    stack.step()
    assert request.status is RequestStatus.RUNNING
    stack.drain()
    stack.check_end()


@pytest.mark.parametrize("load_path", ["direct", "staged"])
def test_nothing_of_a_step_with_a_failed_synchronous_load_is_saved(load_path):
    stack = make_stack(sync_load=True, load_path=load_path)
    tokens = save_prompt(stack, "a")
    num_saved = stack.offload.stats().saved_blocks
    break_loads(stack)
    stack.add("b", [*tokens, *prompt(8, seed=77)])  # completes a block in that step
    stack.step()
    assert stack.num_wrong == 1
    assert stack.outputs["b"] == []
    del tier_group(stack.workers[0]).copiers[Direction.LOAD].load
    stack.drain()
    assert stack.offload.stats().saved_blocks == num_saved + 1  # of blocks that were computed afterwards
    stack.serve("c", [*tokens, *prompt(8, seed=77)])
    stack.check_end()


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_with_async_scheduling_the_step_in_flight_saves_nothing_either(policy):
    stack = make_stack(sync_load=True, async_scheduling=True, policy=policy, max_num_batched_tokens=16)
    tokens = save_prompt(stack, "a")
    break_loads(stack)
    saved_before = stack.offload.stats().saved_blocks
    longer = [*tokens, *prompt(36, seed=77)]
    stack.add("b", longer)  # the step after the failing one completes blocks of the prompt
    for _ in range(3):
        stack.step()
    assert stack.num_wrong == 2
    assert stack.offload.stats().saved_blocks == saved_before
    stack.drain()
    if policy == "fail":
        assert status(stack, "b") is RequestStatus.FINISHED_ERROR
        assert stack.outputs["b"] == []
    del tier_group(stack.workers[0]).copiers[Direction.LOAD].load
    stack.scheduler.reset_prefix_cache()
    stack.serve("c", longer)
    stack.check_end()


def test_without_prefix_caching_every_hit_comes_from_the_host_tier():
    stack = make_stack(prefix_caching=False)
    tokens = prompt(40)
    stack.serve("a", tokens)
    stack.serve("b", tokens)
    assert stack.offload.stats().matched_tokens == 39
    stack.check_end()


def test_blocks_in_hbm_are_not_loaded():
    stack = make_stack()
    tokens = prompt(40)
    stack.serve("a", tokens)
    stack.serve("b", [*tokens, *prompt(8, seed=3)])
    assert stack.offload.stats().matched_tokens == 0
    stack.check_end()


def test_a_request_that_may_not_read_the_cache_does_not():
    stack = make_stack()
    tokens = save_prompt(stack, "a")
    request = stack.add("b", tokens)
    request.skip_reading_prefix_cache = True
    stack.drain()
    assert stack.offload.stats().matched_tokens == 0
    stack.check_end()


@pytest.mark.parametrize("kind", ["salt", "lora"])
def test_tenants_share_no_blocks(kind):
    stack = make_stack()
    salt: dict[str, Any] = {"salt": "one"} if kind == "salt" else {}
    tokens = save_prompt(stack, "a", **salt)

    def again(name, which):
        request = stack.add(name, tokens, **({"salt": which} if kind == "salt" else {}))
        if kind == "lora" and which:
            # The request was hashed when it was created: hash it again, with the adapter.
            request.lora_request = LoRARequest(which, 1, "somewhere")
            request.block_hashes.clear()
            request.update_block_hashes()
        stack.drain()
        stack.scheduler.reset_prefix_cache()
        return stack.offload.stats().matched_tokens

    assert again("b", "other") == 0
    assert again("c", "one" if kind == "salt" else None) == 39
    stack.check_end()


# Saves in flight.


def test_a_request_waits_for_the_save_of_its_prefix():
    stack = make_stack(prefix_caching=False, save_path="staged")
    held = hold_saves(stack)
    tokens = prompt(40)
    request = stack.add("a", tokens, max_tokens=2)
    while not request.is_finished():
        stack.step()
    again = stack.add("b", tokens)
    stack.step()
    stack.step()
    assert again.status is RequestStatus.WAITING
    assert stack.offload.stats().staging_reserved_blocks == 5  # those of the saves; the request holds none
    held.clear()
    stack.drain()
    assert stack.offload.stats().matched_tokens == 39
    stack.check_end()


def test_a_request_that_waits_for_a_save_holds_nothing():
    stack = make_stack(prefix_caching=False, num_blocks=24)
    tokens = prompt(40)
    stack.serve("head", tokens[:16])
    held = hold_saves(stack)
    first = stack.add("a", tokens, max_tokens=2)
    while not first.is_finished():
        stack.step()
    again = stack.add("b", tokens)
    stack.step()
    assert again.status is RequestStatus.WAITING
    assert request_table(stack.offload)["b"].last_match.num_found_chunks == 2
    assert request_table(stack.offload)["b"].promise is None
    held.clear()
    stack.drain()
    stack.check_end()


@pytest.mark.parametrize("wait_s", [0.0, 0.5])
def test_the_wait_for_a_save_ends(wait_s):
    now = [0.0]
    stack = make_stack(prefix_caching=False, save_wait_s=wait_s, clock=lambda: now[0])
    held = hold_saves(stack)
    tokens = prompt(40)
    request = stack.add("a", tokens, max_tokens=2)
    while not request.is_finished():
        stack.step()
    again = stack.add("b", tokens)
    stack.step()
    assert (again.status is RequestStatus.WAITING) == (wait_s > 0)
    now[0] += 1
    stack.step()
    assert again.status is RequestStatus.RUNNING
    held.clear()
    stack.drain()
    stack.check_end()


def test_an_idle_engine_steps_until_its_copies_are_reported():
    stack = make_stack()
    stack.serve("a", prompt(40))
    assert not stack.side.has_jobs
    assert stack.offload.stats().saved_blocks == 6


def test_a_finished_request_costs_no_step_of_its_own():
    steps = {}
    for name, settings in {"ours": {}, "off": {"num_cpu_chunks": 0}}.items():
        stack = Stack(num_blocks=12, **{**SMALL, **settings})
        stack.serve("a", prompt(40), max_tokens=8)
        steps[name] = stack.num_steps
    assert steps["ours"] <= steps["off"] + 1  # the save of the prompt ends long before eight tokens are generated


# Matches without admission.


def test_a_match_without_admission_is_released_in_the_same_pass():
    stack = make_stack(num_blocks=8)
    tokens = save_prompt(stack, "a")
    stack.add("hog", prompt(24, seed=9), max_tokens=12)
    stack.step()
    request = stack.add("b", tokens)  # five blocks, three are free
    stack.step()
    assert request.status is RequestStatus.WAITING
    assert not promised_requests(stack.side)
    assert all(tracked.promise is None for tracked in request_table(stack.offload).all())
    stack.abort("b")  # matched but never scheduled
    stack.drain()
    stack.check_end()


@pytest.mark.parametrize("path", ["direct", "staged"])
def test_a_load_that_the_staging_buffer_cannot_hold_is_loaded_whole(path):
    stack = make_stack(num_staging_blocks=3, save_path=path, load_path=path)
    (worker,) = stack.workers
    poll = worker.poll
    worker.poll = lambda *, wait=False: poll(wait=True)  # else `a` ends before the last block is saved
    tokens = save_prompt(stack, "a")
    del worker.poll
    stack.serve("b", tokens)
    stats = stack.offload.stats()
    assert (stats.matched_tokens, stats.dropped_load_blocks) == (39, 0)
    assert stats.staging_peak_blocks == (3 if path == "staged" else 0)
    stack.check_end()


# Selection of blocks to save.


def test_only_blocks_of_the_prompt_are_saved():
    stack = make_stack()
    before = stack.offload.stats().saved_blocks
    stack.serve("a", prompt(12), max_tokens=20)
    assert stack.offload.stats().saved_blocks == before + 1
    stack.check_end()


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("max_tokens", [12, 13])
def test_with_decode_save_generated_blocks_are_saved_but_not_the_last_token(async_scheduling, max_tokens):
    stack = make_stack(decode_save=True, async_scheduling=async_scheduling)
    before = stack.offload.stats().saved_blocks
    stack.serve("a", prompt(12), max_tokens=max_tokens)  # 24 or 25 tokens; the KV of the last is never computed
    # With async scheduling, the token before it is still a placeholder when the last step is planned.
    num_known = 12 + max_tokens - 1 - async_scheduling
    assert stack.offload.stats().saved_blocks == before + num_known // BLOCK_SIZE
    stack.scheduler.reset_prefix_cache()
    stack.serve("b", stack.sequence("a").tokens[:40])
    stack.check_end()


def test_rejected_drafts_are_never_saved():
    guesses = itertools.cycle([True, False, False])
    stack = make_stack(decode_save=True, num_spec_tokens=3, guess=lambda: next(guesses))
    stack.serve("a", prompt(12), max_tokens=30)
    stack.scheduler.reset_prefix_cache()
    stack.serve("b", stack.sequence("a").tokens[:44])  # checks every byte that it loads
    assert stack.offload.stats().matched_tokens >= 32
    stack.check_end()


def test_chunked_prefill_leaves_no_hole():
    stack = make_stack(max_num_batched_tokens=12, num_staging_blocks=1, save_path="staged", load_path="staged")
    tokens = save_prompt(stack, "a", 60)
    stack.serve("filler", prompt(9, seed=60), max_tokens=12)
    assert stack.offload.stats().deferred_save_blocks or stack.offload.stats().dropped_save_blocks
    stack.scheduler.reset_prefix_cache()
    stack.serve("b", tokens)
    stack.check_end()


def test_a_preempted_request_loads_its_own_blocks():
    stack = make_stack(num_blocks=10, prefix_caching=False)
    first = stack.add("a", prompt(24), max_tokens=14)
    second = stack.add("b", prompt(24, seed=5), max_tokens=14)
    stack.drain()
    assert first.num_preemptions + second.num_preemptions > 0
    assert stack.offload.stats().loaded_blocks > 0
    stack.check_end()


# Aborts.


@pytest.mark.parametrize("load_path", ["direct", "staged"])
@pytest.mark.parametrize("num_steps", range(5))
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_abort_in_every_state(num_steps, async_scheduling, load_path):
    stack = make_stack(async_scheduling=async_scheduling, load_path=load_path, decode_save=True)
    tokens = save_prompt(stack, "a")
    stack.add("other", prompt(12, seed=4), max_tokens=10)
    stack.step()
    stack.add("b", [*tokens, *prompt(12, seed=8)], max_tokens=12)
    for _ in range(num_steps):
        stack.step()
    stack.abort("b")
    stack.add("c", prompt(30, seed=6))  # is granted its blocks
    stack.drain()
    stack.check_end()


def test_blocks_of_an_aborted_load_are_not_written_afterwards():
    stack = make_stack(load_path="staged")
    tokens = save_prompt(stack, "a")
    request = stack.add("b", tokens)
    stack.step()
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert {flight.direction for flight in tier_group(stack.workers[0]).flights} == {Direction.LOAD}
    stack.abort("b")
    stack.add("c", prompt(70, seed=6), max_tokens=9)  # needs every block
    stack.drain()
    stack.check_end()
