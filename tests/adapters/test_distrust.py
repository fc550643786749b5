"""A model runner that has other tokens than vLLM: what was computed on them is kept nowhere, host tier or HBM."""

import pytest

from tests.adapters.scheduler_stack import BLOCK_SIZE, make_stack, prompt, save_prompt

pytestmark = pytest.mark.vllm

NUM_PROMPT = 2 * BLOCK_SIZE + 3
NUM_TOKENS = NUM_PROMPT + 3 * BLOCK_SIZE
WRONG_AT = NUM_PROMPT + 2
modes = pytest.mark.parametrize(
    ("async_scheduling", "num_workers"), [(False, 1), (True, 1), (True, 2)], ids=["sync", "async", "two workers"]
)


def make(async_scheduling, num_workers, **settings):
    stack = make_stack(
        num_blocks=40, async_scheduling=async_scheduling, num_workers=num_workers, decode_save=True, **settings
    )
    save_prompt(stack, "warm")
    return stack


def go_wrong(stack, *request_ids):
    """The last worker's runner has another token for these requests than vLLM, from some place on."""
    batch = stack.runners[-1].input_batch
    fill = batch.fill

    def fill_wrongly(inputs):
        fill(inputs)
        for request_id, row in batch.req_id_to_index.items():
            if request_id in request_ids and len(inputs[request_id].tokens) > WRONG_AT:
                batch.token_ids_cpu[row, WRONG_AT] += 1

    batch.fill = fill_wrongly


def num_kept(stack, name):
    """How many tokens of a request and its answer the host tier finds; each byte of them is looked at."""
    stack.scheduler.reset_prefix_cache()
    matched = stack.offload.stats().matched_tokens
    stack.serve(f"{name} again", [*stack.sequence(name).tokens[: NUM_TOKENS - 1], 1], max_tokens=1)
    return stack.offload.stats().matched_tokens - matched


@modes
def test_nothing_generated_is_kept_from_there_on(async_scheduling, num_workers):
    stack = make(async_scheduling, num_workers, sync_load=not async_scheduling)
    go_wrong(stack, "a")
    tokens = prompt(NUM_PROMPT, seed=5)
    stack.add("a", tokens, max_tokens=3 * BLOCK_SIZE)
    stack.add("b", prompt(NUM_PROMPT, seed=6), max_tokens=3 * BLOCK_SIZE)
    stack.drain()
    assert not stack.side._distrust.request_ids
    a = list(stack.sequence("a").tokens[: NUM_TOKENS - 1])
    before = stack.scheduler.kv_cache_manager.get_computed_blocks(stack._make_request("x", [*a, 1]))[1]
    assert before == NUM_PROMPT // BLOCK_SIZE * BLOCK_SIZE, "in HBM"
    assert num_kept(stack, "a") == NUM_PROMPT // BLOCK_SIZE * BLOCK_SIZE
    assert num_kept(stack, "b") == (NUM_TOKENS - 1) // BLOCK_SIZE * BLOCK_SIZE
    stack.check_end()


@modes
def test_who_found_it_in_hbm_is_not_saved_either(async_scheduling, num_workers):
    """It comes by while the other generates, before a block of that is known to be wrong."""
    stack = make(async_scheduling, num_workers, sync_load=not async_scheduling)
    tokens = prompt(NUM_PROMPT, seed=5)
    go_wrong(stack, "a")
    stack.add("a", tokens, max_tokens=3 * BLOCK_SIZE)
    for _ in range(200):
        stack.step()
        generated = list(stack.outputs["a"])
        if len(generated) == BLOCK_SIZE - 3 + async_scheduling:
            stack.add("b", tokens + generated + prompt(BLOCK_SIZE, seed=9), max_tokens=3)
        if not stack.scheduler.has_requests():
            break
    stack.drain()
    resident = len(stack.offload._index)
    stack.scheduler.reset_prefix_cache()
    stack.serve("again", [*stack.sequence("a").tokens[: NUM_TOKENS - 1], 1], max_tokens=1)
    stack.check()  # reads every byte that it was given
    assert len(stack.offload._index) >= resident
    stack.check_end()


def test_others_are_saved_though_their_step_was_not():
    stack = make(True, 1, sync_load=False)
    go_wrong(stack, "a")
    for name in "abc":
        stack.add(name, prompt(NUM_PROMPT, seed=ord(name)), max_tokens=3 * BLOCK_SIZE)
    stack.drain()
    assert stack.offload.stats().num_failed_jobs > 0
    for name, found in (("b", NUM_TOKENS - 1), ("c", NUM_TOKENS - 1), ("a", NUM_PROMPT)):
        assert num_kept(stack, name) == found // BLOCK_SIZE * BLOCK_SIZE, name
    stack.check_end()


def test_the_next_request_of_that_id_is_trusted():
    stack = make(True, 1, sync_load=False)
    go_wrong(stack, "a")
    stack.serve("a", prompt(NUM_PROMPT, seed=5), max_tokens=3 * BLOCK_SIZE)
    stack.runners[-1].input_batch.fill = type(stack.runners[-1].input_batch).fill.__get__(stack.runners[-1].input_batch)
    before = stack.offload.stats().saved_blocks
    stack.serve("a", prompt(NUM_PROMPT, seed=7), max_tokens=3 * BLOCK_SIZE)
    assert stack.offload.stats().saved_blocks - before == (NUM_TOKENS - 1) // BLOCK_SIZE
    stack.check_end()
