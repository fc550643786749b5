"""A hit beyond the limit of one step waits for its load in vLLM's queue; smaller ones do not wait."""

import pytest
from vllm.v1.request import RequestStatus

from tests.adapters.hashed_model import NUM_LAYERS, PAGE_SHAPE
from tests.adapters.scheduler_stack import BLOCK_SIZE, Stack, make_stack, prompt
from tests.adapters.test_partial_loads import computed
from tests.inside.connector import load_timing
from tests.inside.worker import tier_group
from tpu_offload.types import Direction

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("compiled_once")]

MAX_BLOCKS = 4  # loaded before one step
SMALL, LARGE = 3, 9
BLOCK_NBYTES = NUM_LAYERS * PAGE_SHAPE[0] * PAGE_SHAPE[1] * PAGE_SHAPE[2]
scheduling = pytest.mark.parametrize("async_scheduling", [False, True])
workers = pytest.mark.parametrize("num_workers", [1, 2])


def make(*prompts: list[int], **kwargs) -> Stack:
    """An engine with these prompts in the host tier and nothing in HBM."""
    bound = {"max_load_gb_per_step": (MAX_BLOCKS + 0.5) * BLOCK_NBYTES / 2**30}
    settings = {"num_blocks": 60, "num_cpu_chunks": 64, "max_num_batched_tokens": 200, "sync_load": None}
    stack = make_stack(**{**settings, **bound, **kwargs})
    assert load_timing(stack.side).max_blocks == MAX_BLOCKS
    for i, tokens in enumerate(prompts):
        stack.serve(f"saved{i}", tokens)
        stack.scheduler.reset_prefix_cache()
    return stack


def blocks(num_blocks: int, *, seed: int) -> list[int]:
    return prompt(num_blocks * BLOCK_SIZE, seed=seed)


def fail_loads(stack: Stack, num_blocks: int) -> None:
    """Has loads fail whose first piece has this many blocks."""
    for worker in stack.workers:
        copier = tier_group(worker).copiers[Direction.LOAD]

        def load(segment_id, piece, caches, real=copier.load):
            if num_blocks in [len(piece.block_ids[piece.job_ids == job_id]) for job_id in piece.jobs()]:
                raise RuntimeError("injected")
            return real(segment_id, piece, caches)

        copier.load = load


@scheduling
@workers
def test_a_small_hit_does_not_wait_and_a_large_one_delays_no_request(async_scheduling, num_workers):
    small, large = blocks(SMALL, seed=3), blocks(LARGE, seed=5)
    stack = make(small, large, async_scheduling=async_scheduling, num_workers=num_workers)
    stack.add("runs", prompt(5, seed=7), max_tokens=30)
    stack.step()
    stack.step()
    a, b = stack.add("large", [*large, 7], max_tokens=4), stack.add("small", [*small, 7], max_tokens=4)
    before = len(stack.outputs["runs"])
    stack.step()
    assert a.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert b.status is RequestStatus.RUNNING
    assert b.num_computed_tokens > len(small)
    num_steps = 1
    while a.status is not RequestStatus.RUNNING:
        stack.step()
        num_steps += 1
    # The first load gets at least half of each step.
    assert num_steps <= 2 + 2 * LARGE / MAX_BLOCKS
    assert len(stack.outputs["runs"]) == before + num_steps
    stack.drain()
    assert stack.offload.stats().loaded_tokens == len(small) + len(large)
    stack.check_end()


@scheduling
def test_hits_of_one_step_are_limited_together(async_scheduling):
    prompts = [blocks(SMALL, seed=seed) for seed in (3, 5, 9)]
    stack = make(*prompts, async_scheduling=async_scheduling)
    requests = [stack.add(f"b{i}", [*tokens, 7]) for i, tokens in enumerate(prompts)]
    stack.step()
    assert [request.status for request in requests] == [
        RequestStatus.RUNNING,
        RequestStatus.WAITING_FOR_REMOTE_KVS,
        RequestStatus.WAITING_FOR_REMOTE_KVS,
    ]
    stack.drain()
    assert stack.offload.stats().loaded_tokens == sum(map(len, prompts))
    stack.check_end()


@scheduling
def test_a_small_hit_is_loaded_before_its_step_while_a_large_one_is_in_flight(async_scheduling):
    small, large = blocks(SMALL, seed=3), blocks(20, seed=5)
    stack = make(small, large, async_scheduling=async_scheduling)
    a = stack.add("large", [*large, 7])
    stack.step()
    assert a.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    b = stack.add("small", [*small, 7])
    stack.step()
    assert a.status is RequestStatus.WAITING_FOR_REMOTE_KVS, "the load is too small for this test"
    assert b.status is RequestStatus.RUNNING
    stack.drain()
    stack.check_end()


@scheduling
@workers
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_large_hit_that_fails_invalidates_no_step(async_scheduling, num_workers, policy):
    small, large = blocks(SMALL, seed=3), blocks(LARGE, seed=5)
    stack = make(small, large, async_scheduling=async_scheduling, num_workers=num_workers, policy=policy)
    fail_loads(stack, MAX_BLOCKS)  # its first piece
    a, b = stack.add("large", [*large, 7]), stack.add("small", [*small, 7])
    stack.drain()
    assert stack.num_wrong == 0
    assert b.status is RequestStatus.FINISHED_LENGTH_CAPPED
    expected = RequestStatus.FINISHED_LENGTH_CAPPED if policy == "recompute" else RequestStatus.FINISHED_ERROR
    assert a.status is expected
    assert stack.offload.stats().num_failed_jobs == 1
    stack.check_end()


@scheduling
@workers
def test_a_small_hit_fails_while_a_large_one_is_in_flight(async_scheduling, num_workers):
    """One program copies pieces of both, so both fail; the step has computed on the small one only."""
    small, large = blocks(SMALL, seed=3), blocks(LARGE, seed=5)
    stack = make(small, large, async_scheduling=async_scheduling, num_workers=num_workers)
    a = stack.add("large", [*large, 7])
    stack.step()
    assert a.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    fail_loads(stack, SMALL)
    stack.add("small", [*small, 7])
    stack.drain()
    assert stack.num_wrong
    assert 0 < stack.offload.stats().loaded_tokens < len(large), "the earlier pieces"
    stack.check_end()


@scheduling
@workers
def test_a_large_hit_that_shares_what_a_small_one_failed_to_load(async_scheduling, num_workers):
    """Its first blocks are in vLLM's prefix cache, but were never written."""
    large = blocks(SMALL + LARGE, seed=5)
    small = large[: SMALL * BLOCK_SIZE]
    stack = make(large, async_scheduling=async_scheduling, num_workers=num_workers)
    fail_loads(stack, SMALL)
    stack.add("small", [*small, 7], max_tokens=6)
    a = stack.add("large", [*large, 7], max_tokens=6)
    stack.step()
    assert a.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    stack.drain()
    stack.scheduler.reset_prefix_cache()
    stack.serve("again", [*large, 7])
    stack.check_end()


@scheduling
@pytest.mark.parametrize("when", ["before the step is scheduled", "while it runs"])
def test_a_large_hit_that_is_aborted(async_scheduling, when):
    large = blocks(20, seed=5)
    stack = make(large, async_scheduling=async_scheduling)
    stack.add("runs", prompt(5, seed=7), max_tokens=20)
    stack.add("large", [*large, 7])
    stack.step()
    if when == "while it runs":

        def abort() -> None:
            if "large" in stack.scheduler.requests:
                stack.abort("large")

        stack.meanwhile = abort
    else:
        stack.abort("large")
    stack.add("other", blocks(12, seed=11), max_tokens=4)  # is granted its blocks
    stack.drain()
    stack.check_end()


@scheduling
def test_loads_of_one_step_stay_within_the_limit_while_many_wait(async_scheduling):
    """A small hit precedes all loads in flight, even those that are no larger."""
    prompts = [blocks(SMALL, seed=seed) for seed in (3, 5, 9, 11, 13, 15)]
    stack = make(*prompts, async_scheduling=async_scheduling, max_num_seqs=20, num_blocks=100)
    moved: list[int] = []
    (worker,) = stack.workers
    copier = tier_group(worker).copiers[Direction.LOAD]

    def load(segment_id, piece, caches, real=copier.load):
        moved[-1] += len(piece.block_ids)
        return real(segment_id, piece, caches)

    copier.load = load
    requests = [stack.add(f"b{i}", [*tokens, 7]) for i, tokens in enumerate(prompts)]
    for _ in range(len(prompts) * 3):
        moved.append(0)
        stack.step()
    assert all(request.is_finished() for request in requests)
    assert sum(moved) == SMALL * len(prompts)
    assert max(moved) <= MAX_BLOCKS + -(-MAX_BLOCKS // 4)
    stack.drain()
    stack.check_end()


@scheduling
def test_one_document_is_loaded_once(async_scheduling):
    large = blocks(LARGE, seed=5)
    stack = make(large, async_scheduling=async_scheduling)
    requests = [stack.add(f"b{i}", [*large, 7 + i], max_tokens=4) for i in range(4)]
    stack.step()
    assert [request.status for request in requests].count(RequestStatus.WAITING_FOR_REMOTE_KVS) == 1
    stack.drain()
    assert stack.offload.stats().loaded_tokens == len(large)
    stack.check_end()


@scheduling
@workers
def test_a_failed_background_load_evicts_only_its_own_blocks_from_the_prefix_cache(async_scheduling, num_workers):
    other, large = blocks(SMALL, seed=3), blocks(LARGE, seed=5)
    stack = make(large, async_scheduling=async_scheduling, num_workers=num_workers)
    stack.serve("other", other)  # in HBM from here on
    fail_loads(stack, MAX_BLOCKS)
    stack.serve("large", [*large, 7])
    assert stack.offload.stats().num_failed_jobs == 1
    stack.scheduler.reset_connector_cache()
    counts = computed(stack)
    stack.serve("again", [*other, 7], max_tokens=1)
    assert counts["again"] == 1
    stack.check_end()
