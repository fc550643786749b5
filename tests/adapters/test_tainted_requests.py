"""A model runner that has other tokens than vLLM: KV computed on them is found neither in the host tier nor in HBM."""

from types import SimpleNamespace

import pytest

from tests.adapters.scheduler_stack import BLOCK_SIZE, make_stack, prompt, save_prompt
from tests.inside.connector import tainted_requests
from tpu_offload.adapters.vllm.tainted_requests import TaintedRequests

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


def corrupt_tokens(stack, *request_ids):
    """Gives the last worker's runner a wrong token for these requests."""
    batch = stack.runners[-1].input_batch
    fill = batch.fill

    def fill_corrupted(inputs):
        fill(inputs)
        for request_id, row in batch.req_id_to_index.items():
            if request_id in request_ids and len(inputs[request_id].tokens) > WRONG_AT:
                batch.token_ids_cpu[row, WRONG_AT] += 1

    batch.fill = fill_corrupted


def num_found(stack, name):
    """The tokens of a request and its answer that the host tier finds; checks every byte of them."""
    stack.scheduler.reset_prefix_cache()
    matched = stack.offload.stats().matched_tokens
    stack.serve(f"{name} again", [*stack.sequence(name).tokens[: NUM_TOKENS - 1], 1], max_tokens=1)
    return stack.offload.stats().matched_tokens - matched


@modes
def test_nothing_generated_is_saved_or_found_from_the_first_wrong_token_on(async_scheduling, num_workers):
    stack = make(async_scheduling, num_workers, sync_load=True)
    corrupt_tokens(stack, "a")
    tokens = prompt(NUM_PROMPT, seed=5)
    stack.add("a", tokens, max_tokens=3 * BLOCK_SIZE)
    stack.add("b", prompt(NUM_PROMPT, seed=6), max_tokens=3 * BLOCK_SIZE)
    stack.drain()
    a = list(stack.sequence("a").tokens[: NUM_TOKENS - 1])
    before = stack.scheduler.kv_cache_manager.get_computed_blocks(stack.make_request("x", [*a, 1]))[1]
    assert before == NUM_PROMPT // BLOCK_SIZE * BLOCK_SIZE, "in HBM"
    assert num_found(stack, "a") == NUM_PROMPT // BLOCK_SIZE * BLOCK_SIZE
    assert num_found(stack, "b") == (NUM_TOKENS - 1) // BLOCK_SIZE * BLOCK_SIZE
    stack.check_end()


def test_states_of_tainted_tokens_are_evicted_from_hbm():
    """They have a pool of their own, in which the ids of other requests' blocks are those of other rows."""
    stack = make_stack(num_blocks=40, num_rows=20, async_scheduling=True, decode_save=True)  # vLLM keeps every state
    corrupt_tokens(stack, "a")
    for i, name in enumerate("ab"):
        stack.add(name, prompt(NUM_PROMPT, seed=5 + i), max_tokens=3 * BLOCK_SIZE)
    stack.drain()
    pool = stack.scheduler.kv_cache_manager.block_pool
    known = {}
    for name in "ab":
        hashes = stack.requests[name].block_hashes
        known[name] = [pool.mamba_pool.get_cached_block(block_hash, [0]) is not None for block_hash in hashes]
    # The prompt, of two blocks, is computed in one step.
    assert known == {"a": [False, True, False, False, False], "b": [False, True, True, True, True]}
    stack.check_end()


@modes
def test_a_request_that_found_tainted_blocks_in_hbm_is_not_saved_either(async_scheduling, num_workers):
    """It arrives while the other decodes, before a block of that is known to be wrong."""
    stack = make(async_scheduling, num_workers, sync_load=True)
    tokens = prompt(NUM_PROMPT, seed=5)
    corrupt_tokens(stack, "a")
    stack.add("a", tokens, max_tokens=3 * BLOCK_SIZE)
    for _ in range(200):
        stack.step()
        generated = list(stack.outputs["a"])
        if len(generated) == BLOCK_SIZE - 3 + async_scheduling:
            stack.add("b", tokens + generated + prompt(BLOCK_SIZE, seed=9), max_tokens=3)
        if not stack.scheduler.has_requests():
            break
    stack.drain()
    resident = stack.offload.stats().num_resident_chunks
    stack.scheduler.reset_prefix_cache()
    stack.serve("again", [*stack.sequence("a").tokens[: NUM_TOKENS - 1], 1], max_tokens=1)
    stack.check()  # checks every byte that it was given
    assert stack.offload.stats().num_resident_chunks >= resident
    stack.check_end()


def test_other_requests_are_saved_after_a_cancelled_step():
    stack = make(True, 1, sync_load=False)
    corrupt_tokens(stack, "a")
    for name in "abc":
        stack.add(name, prompt(NUM_PROMPT, seed=ord(name)), max_tokens=3 * BLOCK_SIZE)
    stack.drain()
    assert stack.offload.stats().num_failed_jobs > 0
    for name, num_expected in (("b", NUM_TOKENS - 1), ("c", NUM_TOKENS - 1), ("a", NUM_PROMPT)):
        assert num_found(stack, name) == num_expected // BLOCK_SIZE * BLOCK_SIZE, name
    stack.check_end()


def test_the_next_request_with_that_id_is_not_tainted():
    stack = make(True, 1, sync_load=False)
    corrupt_tokens(stack, "a")
    stack.serve("a", prompt(NUM_PROMPT, seed=5), max_tokens=3 * BLOCK_SIZE)
    stack.runners[-1].input_batch.fill = type(stack.runners[-1].input_batch).fill.__get__(stack.runners[-1].input_batch)
    before = stack.offload.stats().saved_blocks
    stack.serve("a", prompt(NUM_PROMPT, seed=7), max_tokens=3 * BLOCK_SIZE)
    assert stack.offload.stats().saved_blocks - before == (NUM_TOKENS - 1) // BLOCK_SIZE
    stack.check_end()


@modes
def test_a_tainted_request_still_gets_the_load_that_it_waits_for(async_scheduling, num_workers):
    """It holds blocks with the ids of those of an ended request that is reported only now."""
    stack = make(async_scheduling, num_workers, sync_load=True)
    tokens = prompt(NUM_PROMPT, seed=5)
    stack.serve("first", tokens, max_tokens=3)
    stack.scheduler.reset_prefix_cache()
    stack.add("again", tokens, max_tokens=3)
    tainted = tainted_requests(stack.side)
    tainted.add("first", range(stack.num_blocks), None)
    stack.step()
    assert "again" in tainted
    stack.drain()
    stack.check_end()


# --- TaintedRequests alone --------------------------------------------------------------------------


class Manager:
    """A stand-in for vLLM's KV cache manager, with blocks of two tokens."""

    def __init__(self, **tables):
        self.tables = tables
        self.block_pool = SimpleNamespace(num_gpu_blocks=100)
        self.evicted: list[int] = []

    def get_block_ids(self, request_id):
        return (self.tables[request_id],)

    def evict_blocks(self, block_ids):
        self.evicted += sorted(block_ids)

    def take_evicted(self):
        evicted, self.evicted = self.evicted, []
        return evicted


def requests(**num_tokens):
    return {
        name: SimpleNamespace(num_prompt_tokens=prompt, num_computed_tokens=computed)
        for name, (prompt, computed) in num_tokens.items()
    }


def test_a_request_that_shares_a_tainted_block_is_tainted_from_there_on_even_in_its_prompt():
    manager = Manager(a=[1, 2, 3, 4], b=[1, 2, 3, 5, 6], c=[1, 7], d=[6, 8])
    tainted = TaintedRequests(manager, block_size=2)
    held = requests(a=(4, 8), b=(10, 10), c=(4, 4), d=(4, 4))
    assert not tainted
    tainted.add("a", (3, 4), held["a"])
    assert tainted
    assert manager.take_evicted() == [3, 4]
    assert sorted(tainted.propagate(held, ())) == ["b", "d"], "d shares a block that b has computed"
    assert tainted.request_ids == {"a", "b", "d"}
    assert set(manager.take_evicted()) == {3, 4, 5, 6, 8}
    assert tainted.propagate(held, ()) == []


def test_blocks_left_by_an_ended_request_are_tainted():
    manager = Manager(b=[1, 2, 3, 5], c=[1, 7])
    tainted = TaintedRequests(manager, block_size=2)
    tainted.add("a", (3, 4, 1000), None)
    assert tainted
    assert "a" not in tainted
    assert manager.take_evicted() == [3, 4], "there is no block 1000"
    assert tainted.propagate(requests(b=(8, 8), c=(4, 4)), ()) == ["b"]
    tainted.finish("b")
    assert not tainted


def test_later_only_admitted_requests_are_checked_and_only_new_blocks_are_evicted():
    manager = Manager(a=[1, *range(10, 30)])
    tainted = TaintedRequests(manager, block_size=2)
    held = requests(a=(2, 42))
    tainted.add("a", (), held["a"])
    assert tainted.propagate(held, ()) == []
    assert manager.take_evicted() == list(range(10, 30))
    manager.tables |= {"a": [1, *range(10, 31)], "b": [1, 10, 50], "c": [1, 10]}
    held |= requests(b=(6, 6), c=(4, 4))
    assert tainted.propagate(held, {"c"}) == ["c"]
    assert set(manager.take_evicted()) == {10, 28, 29, 30}
    manager.tables["a"] = [1, 60, 61]  # preempted and admitted again
    assert tainted.propagate(held, {"a"}) == ["b"], "it has shared blocks with that one all the time"
    assert set(manager.take_evicted()) >= {60, 61}
