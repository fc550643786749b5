"""Failed and late loads, and several workers, under vLLM's real scheduler."""

import itertools
from typing import Any

import jax.numpy as jnp
import pytest
from vllm.v1.request import RequestStatus

from tests.adapters.scheduler_stack import (
    BLOCK_SIZE,
    break_loads,
    broken,
    make_stack,
    prompt,
    reports_of,
    save_prompt,
)
from tests.inside.scheduler import chunk_index, slot_of_chunk
from tests.inside.worker import hold_loads, tier_group
from tpu_offload import StepReport
from tpu_offload.adapters.vllm.messages import ReportMessage
from tpu_offload.types import Direction

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("load_path", ["direct", "staged"])
def test_a_failed_load_is_recomputed(load_path):
    stack = make_stack(load_path=load_path)
    tokens = save_prompt(stack, "a")
    break_loads(stack)
    stack.serve("b", tokens)
    assert not stack.errors
    stats = stack.offload.stats()
    assert (stats.num_failed_jobs, stats.loaded_blocks) == (1, 0)
    stack.check_end()


def test_with_the_policy_fail_only_the_request_of_the_load_ends():
    stack = make_stack(policy="fail")
    tokens = save_prompt(stack, "a")
    break_loads(stack)
    stack.add("other", prompt(12, seed=4), max_tokens=6)
    stack.add("b", tokens)
    stack.drain()
    assert stack.requests["b"].status is RequestStatus.FINISHED_ERROR
    assert len(stack.outputs["other"]) == 6
    stack.check_end()


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("sync_load", [False, True])
def test_a_load_that_fails_after_it_was_used_is_reported(policy, async_scheduling, sync_load):
    stack = make_stack(policy=policy, async_scheduling=async_scheduling, sync_load=sync_load)
    tokens = save_prompt(stack, "a")
    (worker,) = stack.workers
    copier: Any = tier_group(worker).copiers[Direction.LOAD]
    load = copier.load

    def copy_nothing(*args):
        flight, caches = load(*args)
        flight.waiting_on = jnp.int32(0)  # its token reports that nothing was copied
        return flight, caches

    copier.load = copy_nothing
    held, poll = [True], worker.poll
    worker.poll = lambda *, wait=False: (
        StepReport(worker_id=0, results=(), num_host_slots=(worker.num_host_chunks,)) if held else poll(wait=wait)
    )
    longer = [*tokens, *prompt(20, seed=8)]
    request = stack.add("b", longer, max_tokens=8)
    while len(stack.outputs["b"]) < 2:
        stack.step()
    held.clear()
    while not stack.offload.stats().num_failed_jobs:
        assert stack.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block
        stack.step()
    # Blocks saved since may depend on those that were not loaded.
    assert stack.offload.stats().num_resident_chunks == 0
    assert not stack.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block
    stack.drain()
    assert (request.status is RequestStatus.FINISHED_ERROR) == (policy == "fail")
    assert stack.offload.stats().loaded_blocks == 0
    stack.check_end()


def test_a_chunk_that_keeps_failing_is_not_retried_forever():
    stack = make_stack()
    tokens = save_prompt(stack, "a")
    break_loads(stack)
    stack.serve("b", tokens)
    del tier_group(stack.workers[0]).copiers[Direction.LOAD].load
    stack.scheduler.reset_prefix_cache()
    stack.serve("c", tokens)  # the blocks that `b` recomputed were saved again
    assert stack.offload.stats().loaded_blocks == 5
    stack.check_end()


def test_a_load_that_times_out_is_recomputed():
    now = [0.0]
    stack = make_stack(job_timeout_s=1.0, load_path="staged", clock=lambda: now[0])
    tokens = save_prompt(stack, "a")
    release = hold_loads(tier_group(stack.workers[0]))
    stack.add("other", prompt(8, seed=4), max_tokens=12)
    request = stack.add("b", tokens)
    stack.step()
    stack.step()
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    now[0] += 2
    stack.step()
    stack.step()
    assert request.status is RequestStatus.RUNNING
    release()
    stack.drain()
    stats = stack.offload.stats()
    assert (stats.num_timed_out_jobs, stats.loaded_blocks) == (1, 0)
    stack.check_end()


def test_a_reset_while_a_load_is_in_flight():
    stack = make_stack(load_path="staged")
    tokens = save_prompt(stack, "a")
    request = stack.add("b", tokens)
    stack.step()
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert stack.scheduler.reset_connector_cache()
    side, invalid = stack.connectors[0].worker_side, set()
    take = side.take_invalid_block_ids

    def note():
        found = take()
        invalid.update(found)
        return found

    side.take_invalid_block_ids = note
    stack.drain()
    assert len(invalid) == 5  # vLLM recomputes those blocks
    stats = stack.offload.stats()
    assert stats.loaded_blocks == 0
    stack.scheduler.reset_prefix_cache()
    matched = stats.matched_tokens
    stack.serve("c", tokens)
    assert stack.offload.stats().matched_tokens in (matched, matched + 39)  # 39 if it was saved again after the reset
    stack.check_end()


# Several workers.


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_three_workers_that_report_in_any_order(order):
    stack = make_stack(num_workers=3)
    held: dict[int, list[Any]] = {i: [] for i in range(3)}
    turn = itertools.count()

    def tamper(results):
        """Delivers the reports of one worker per step, in this order, and holds back the others."""
        reporter = order[next(turn) % 3]
        for i, result in enumerate(results):
            message = reports_of(result)
            held[i] += message.reports if message else ()
            reports, held[i] = (held[i], []) if i == reporter else ([], held[i])
            stack.replace_reports(result, ReportMessage(reports=tuple(reports)) if reports else None)
        return results

    stack.tamper = tamper
    num_visible = stack.offload.stats().num_resident_chunks
    stack.add("a", prompt(40), max_tokens=1)
    stack.step()
    stack.step()
    assert len(chunk_index(stack.offload).find(list(slot_of_chunk(stack.offload)))) <= num_visible
    stack.drain()
    stack.scheduler.reset_prefix_cache()
    stack.serve("b", prompt(40))
    assert stack.offload.stats().matched_tokens == 39
    stack.check_end()


def test_a_chunk_that_one_worker_has_not_reported_is_not_found():
    now = [0.0]
    stack = make_stack(num_workers=2, job_timeout_s=5.0, save_wait_s=0.0, clock=lambda: now[0])

    def mute(results):
        stack.replace_reports(results[1], None)
        return results

    stack.tamper = mute
    request = stack.add("a", prompt(40), max_tokens=2)
    while not request.is_finished():
        stack.step()
    stack.step()
    assert stack.offload.has_jobs
    stack.scheduler.reset_prefix_cache()
    again = stack.add("b", prompt(40))
    while not again.is_finished():
        stack.step()
    assert stack.offload.stats().matched_tokens == 0
    now[0] += 10
    stack.step()
    assert stack.offload.stats().num_timed_out_jobs > 0
    stack.check()


def test_duplicate_reports_change_nothing():
    stack = make_stack(num_workers=2)

    def twice(results):
        for result in results:
            message = reports_of(result)
            if message:
                stack.replace_reports(result, ReportMessage(reports=message.reports * 2))
        return results

    stack.tamper = twice
    tokens = save_prompt(stack, "a")
    stack.serve("b", tokens)
    stats = stack.offload.stats()
    assert stats.num_ignored_results > 0
    assert stats.matched_tokens == 39
    stack.check_end()


def test_a_load_that_fails_on_one_worker_of_two_is_recomputed():
    stack = make_stack(num_workers=2)
    tokens = save_prompt(stack, "a")
    break_loads(stack, worker=1)
    stack.serve("b", tokens)
    assert stack.offload.stats().loaded_blocks == 0
    stack.check_end()


@pytest.mark.parametrize(("num_stages", "broken_stage"), [(2, 0), (2, 1), (4, 2)])
def test_steps_in_the_pipeline_behind_a_failed_load_are_not_saved(num_stages, broken_stage):
    """Each stage computes further chunks of the prompt before the scheduler learns of the failure in one of them."""
    stack = make_stack(num_blocks=40, num_stages=num_stages, sync_load=True, max_num_batched_tokens=16)
    tokens = [*save_prompt(stack, "a"), *prompt(64, seed=5)]
    loads = tier_group(stack.workers[broken_stage]).copiers[Direction.LOAD]
    loads.load, load = broken, loads.load
    stack.add("b", tokens)
    for _ in range(num_stages):
        stack.step()
    loads.load = load
    stack.drain()
    assert stack.num_wrong == num_stages
    stack.scheduler.reset_prefix_cache()
    num_before = stack.offload.stats().loaded_blocks
    stack.serve("c", tokens)
    assert stack.offload.stats().loaded_blocks - num_before == len(tokens) // BLOCK_SIZE
    stack.check_end()
