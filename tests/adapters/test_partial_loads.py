"""A load fails in part: the blocks before the first hole are used, and the rest is recomputed."""

import sys

import pytest
from vllm.v1.request import RequestStatus

from tests.adapters.scheduler_stack import BLOCK_SIZE, Stack, make_stack, prompt, save_prompt
from tests.inside.scheduler import storage_planner
from tests.inside.worker import tier_group
from tpu_offload.core.policies import Use
from tpu_offload.types import Direction

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("compiled_once")]

CHUNKS_PER_SEGMENT = 3  # of the host pool; the first also has the chunk of the warm-up prompt
FIRST_HOLE = 2  # blocks of `a` in the first segment
modes = pytest.mark.parametrize(
    ("sync_load", "async_scheduling"), [(False, False), (True, False), (False, True), (True, True)]
)
paths = pytest.mark.parametrize("load_path", ["direct", "staged"])


def make(**kwargs) -> tuple[Stack, list[int]]:
    """Five blocks in the host tier, two of them in the first segment of the host pool and three in the second."""
    block_nbytes = BLOCK_SIZE * 2 * 8 * 2
    segment_gb = CHUNKS_PER_SEGMENT * block_nbytes / 2**30
    stack = make_stack(**{"num_blocks": 40, "num_cpu_chunks": 30, "host_segment_gb": segment_gb, **kwargs})
    assert tier_group(stack.workers[0]).memory.spec.segment_blocks == CHUNKS_PER_SEGMENT
    return stack, save_prompt(stack, "a")


def break_segment(stack: Stack, segment_id: int = 1, worker: int = 0) -> None:
    """Has loads from one segment of the host pool fail."""
    copier = tier_group(stack.workers[worker]).copiers[Direction.LOAD]
    real = copier.load

    def load(which, piece, caches):
        if which == segment_id:
            raise RuntimeError("injected")
        return real(which, piece, caches)

    copier.load = load


def repair(stack: Stack, worker: int = 0) -> None:
    del tier_group(stack.workers[worker]).copiers[Direction.LOAD].load


def computed(stack: Stack) -> dict[str, int]:
    """Counts the tokens that each request computes from now on."""
    counts: dict[str, int] = {}
    schedule = stack.scheduler.schedule

    def counted():
        output = schedule()
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            counts[request_id] = counts.get(request_id, 0) + num_tokens
        return output

    stack.scheduler.schedule = counted
    return counts


@modes
@paths
@pytest.mark.parametrize("failing", ["second segment", "both"])
def test_blocks_before_the_first_hole_are_not_recomputed(sync_load, async_scheduling, load_path, failing):
    stack, tokens = make(sync_load=sync_load, async_scheduling=async_scheduling, load_path=load_path)
    break_segment(stack)
    if failing == "both":
        break_segment(stack, 0)
    counts = computed(stack)
    request = stack.serve("b", tokens, max_tokens=1)
    assert request.status is RequestStatus.FINISHED_LENGTH_CAPPED
    num_kept = FIRST_HOLE * BLOCK_SIZE if failing == "second segment" else 0
    # The step of a failed synchronous load is wasted: it computed the last token, whose block was loaded.
    assert counts["b"] == len(tokens) - num_kept + sync_load
    assert stack.offload.stats().loaded_tokens == num_kept
    assert stack.offload.stats().num_failed_jobs == 1
    stack.check_end()


@modes
@paths
def test_the_next_request_is_matched_and_served(sync_load, async_scheduling, load_path):
    stack, tokens = make(sync_load=sync_load, async_scheduling=async_scheduling, load_path=load_path)
    break_segment(stack)
    stack.serve("b", tokens)
    repair(stack)
    stack.scheduler.reset_prefix_cache()
    before = stack.offload.stats().loaded_tokens
    stack.serve("c", [*tokens, 7])
    assert stack.offload.stats().loaded_tokens == before + 40
    stack.check_end()


def test_a_request_preempted_afterwards_does_not_match_the_hole_again():
    stack, tokens = make()
    break_segment(stack)
    stack.add("b", tokens, max_tokens=8)
    for _ in range(3):
        stack.step()
    repair(stack)
    before = stack.offload.stats().matched_tokens
    stack.scheduler.reset_prefix_cache(reset_running_requests=True)
    stack.step()
    # 40 if its recomputed blocks have been saved already.
    assert stack.offload.stats().matched_tokens - before in (FIRST_HOLE * BLOCK_SIZE, 40)
    stack.drain()
    stack.check_end()


@modes
@paths
@pytest.mark.parametrize("order", ["together", "after"])
def test_requests_that_share_the_blocks(sync_load, async_scheduling, load_path, order):
    stack, tokens = make(sync_load=sync_load, async_scheduling=async_scheduling, load_path=load_path)
    break_segment(stack)
    stack.add("b", [*tokens, *prompt(9, seed=77)], max_tokens=6)
    if order == "after":
        stack.step()
    stack.add("c", [*tokens, *prompt(9, seed=78)], max_tokens=6)
    stack.add("d", [*tokens[:24], *prompt(9, seed=79)], max_tokens=6)
    stack.drain()
    repair(stack)
    stack.scheduler.reset_prefix_cache()
    stack.serve("e", [*tokens, *prompt(9, seed=77), 7])
    stack.check_end()


@modes
def test_a_load_fails_on_one_worker_of_two(sync_load, async_scheduling):
    stack, tokens = make(sync_load=sync_load, async_scheduling=async_scheduling, num_workers=2)
    break_segment(stack, worker=1)
    counts = computed(stack)
    stack.serve("b", tokens, max_tokens=1)
    assert counts["b"] == len(tokens) - FIRST_HOLE * BLOCK_SIZE + sync_load
    stack.check_end()


@modes
def test_two_workers_have_different_holes(sync_load, async_scheduling):
    stack, tokens = make(sync_load=sync_load, async_scheduling=async_scheduling, num_workers=2)
    break_segment(stack, 1, worker=0)
    break_segment(stack, 0, worker=1)
    counts = computed(stack)
    stack.serve("b", tokens, max_tokens=1)
    assert counts["b"] == len(tokens) + sync_load
    stack.check_end()


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_with_the_policy_fail_the_request_ends(async_scheduling):
    stack, tokens = make(sync_load=True, async_scheduling=async_scheduling, policy="fail")
    break_segment(stack)
    stack.add("other", prompt(12, seed=4), max_tokens=6)
    stack.add("b", tokens)
    stack.drain()
    assert stack.requests["b"].status is RequestStatus.FINISHED_ERROR
    assert stack.outputs["b"] == []
    assert len(stack.outputs["other"]) == 6
    repair(stack)
    stack.serve("c", [*tokens, 7])
    stack.check_end()


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("who", ["b", "c", "both"])
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("num_steps", [1, 2])
def test_blocks_that_an_aborted_request_computed_on_unloaded_ones_are_not_found(policy, who, together, num_steps):
    """It ends before the failed load is reported to vLLM, and leaves blocks in vLLM's prefix cache."""
    stack, tokens = make(sync_load=True, async_scheduling=True, policy=policy, max_num_batched_tokens=64)
    longer = [*tokens, *prompt(20, seed=77)]
    break_segment(stack)
    stack.add("b", longer, max_tokens=6)
    if together:
        stack.add("c", [*longer, 7, 8, 9], max_tokens=6)
    stack.begin_step()
    if not together:
        stack.add("c", [*longer, 7, 8, 9], max_tokens=6)
    if num_steps == 2:
        stack.begin_step()
    for name in ("b", "c") if who == "both" else (who,):
        stack.abort(name)
    if num_steps == 2:
        stack.end_step()
    repair(stack)
    for name in ("d", "e"):  # finds what was loaded, but none of the wrong blocks
        stack.serve(name, [*longer, 7, 8, 9, 10], max_tokens=6)
    assert stack.requests["e"].status is RequestStatus.FINISHED_LENGTH_CAPPED
    stack.check_end()


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_blocks_that_two_requests_computed_on_shared_unloaded_ones_are_not_found(policy, async_scheduling):
    """vLLM evicts the blocks of the first of them only."""
    stack, tokens = make(sync_load=True, async_scheduling=async_scheduling, policy=policy, max_num_batched_tokens=96)
    longer = [*tokens, *prompt(40, seed=77)]
    break_segment(stack)
    stack.add("b", [*tokens, *prompt(9, seed=78)], max_tokens=6)
    stack.add("c", longer, max_tokens=6)
    stack.drain()
    repair(stack)
    for name in ("d", "e"):
        stack.serve(name, [*longer, 7, 8, 9], max_tokens=6)
        assert stack.requests[name].status is RequestStatus.FINISHED_LENGTH_CAPPED
    stack.check_end()


def test_a_request_aborted_while_it_skips_a_step_leaks_nothing():
    stack, tokens = make(sync_load=True, async_scheduling=True)
    break_segment(stack)
    stack.add("b", tokens, max_tokens=6)
    stack.begin_step()
    stack.begin_step()
    stack.end_step()
    assert stack.requests["b"].next_decode_eligible_step == sys.maxsize
    stack.abort("b")
    stack.end_step()
    stack.add("c", prompt(12, seed=4))
    stack.drain()
    stack.check_end()


def test_a_cascade_in_a_step_with_invalid_blocks_ends_with_it():
    """Its end is never started, so its chunks would otherwise be in flight until the job times out."""
    storage = {"storage_tier": "tests.storage.memory_tier:MemoryTier", "num_storage_chunks": 100}
    stack, tokens = make(sync_load=True, **storage)
    stack.drain()
    planner = storage_planner(stack.offload)
    keys = list(planner.records.stored)
    assert keys
    for key in keys:
        planner.records.forget(key)
    planner.writes.offer(dict.fromkeys(keys, Use(0)))  # so that the step whose load fails has a cascade
    break_segment(stack)
    request = stack.serve("b", tokens, max_tokens=1)
    assert request.status is RequestStatus.FINISHED_LENGTH_CAPPED
    stack.drain()
    stats = stack.offload.stats()
    assert (stats.num_timed_out_jobs, stats.num_jobs_in_flight) == (0, 0)
    stack.check_end()
