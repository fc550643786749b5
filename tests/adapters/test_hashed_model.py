"""The fake model notices wrong KV where attention would read it, and only there."""

import numpy as np
import pytest

from tests.adapters.hashed_model import NUM_LAYERS
from tests.adapters.scheduler_stack import BLOCK_SIZE, make_stack, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("compiled_once")]

WINDOWS = (17, 0, 10)
NUM_TOKENS = 5 * BLOCK_SIZE


@pytest.fixture
def stack():
    """A request is computed up to its first token in a model with three groups."""
    stack = make_stack(num_blocks=40, windows=WINDOWS)
    stack.add("a", prompt(NUM_TOKENS, seed=3), max_tokens=8)
    stack.step()
    yield stack
    stack.close()


def block_at(stack, group, position):
    return stack.runners[0].tables["a"][group][position // BLOCK_SIZE]


def change(stack, layer, block, position):
    caches = stack.runners[0].kv_caches
    caches[layer] = caches[layer].at[block, position % BLOCK_SIZE].add(1)


@pytest.mark.parametrize("layer", range(NUM_LAYERS))
@pytest.mark.parametrize("group", range(len(WINDOWS)))
def test_a_wrong_byte_is_noticed_from_the_window_on(stack, group, layer):
    window = WINDOWS[group]
    first = NUM_TOKENS - window + 1 if window else 0  # that the next token attends to
    if first:
        change(stack, layer, block_at(stack, group, first - 1), first - 1)
        stack.step()
        first += 1
    change(stack, layer, block_at(stack, group, first), first)
    with pytest.raises(AssertionError, match="read KV that is not their own"):
        stack.step()


@pytest.mark.parametrize(("one", "other"), [(0, 1), (1, 2), (0, 2)])
def test_a_block_of_another_group_is_wrong(stack, one, other):
    runner, last = stack.runners[0], NUM_TOKENS - 1
    source, target = block_at(stack, other, last), block_at(stack, one, last)
    runner.kv_caches = [cache.at[target].set(np.asarray(cache[source])) for cache in runner.kv_caches]
    with pytest.raises(AssertionError, match="read KV that is not their own"):
        stack.step()


def test_the_null_block_in_a_window_is_wrong(stack):
    stack.runners[0].tables["a"][0][(NUM_TOKENS - 16) // BLOCK_SIZE] = 0
    with pytest.raises(AssertionError, match="group 0 has the null block at"):
        stack.step()


def test_all_of_the_windows_and_no_more_is_checked(stack):
    runner = stack.runners[0]
    before, in_windows_before = runner.num_checked, runner.num_checked_in_windows
    stack.step()
    in_windows = sum(window - 1 for window in WINDOWS if window)
    assert runner.num_checked - before == NUM_LAYERS * (NUM_TOKENS + in_windows)
    assert runner.num_checked_in_windows - in_windows_before == NUM_LAYERS * in_windows


def test_wide_pages():
    stack = make_stack(mixed_heads=True)
    shapes = {cache.shape[1:] for cache in stack.runners[0].kv_caches}
    assert len(shapes) == NUM_LAYERS
    tokens = prompt(40, seed=20)
    stack.serve("a", tokens)
    stack.scheduler.reset_prefix_cache()
    stack.serve("b", tokens)
    assert stack.offload.stats().loaded_tokens == len(tokens)
    stack.check_end()
    stack.close()


@pytest.mark.parametrize("windows", [(9, 0), (0, 17), (10, 10, 0), (25, 0, 7)])
def test_windows_are_loaded(windows):
    """Only the last blocks of each window, beside those of full attention."""
    stack = make_stack(num_blocks=60, windows=windows)
    tokens = prompt(NUM_TOKENS + 3, seed=20)
    stack.serve("a", tokens)
    stack.scheduler.reset_prefix_cache()
    stack.serve("b", tokens)
    num_window_blocks = sum(-(-(window - 1) // BLOCK_SIZE) for window in windows if window)
    assert stack.offload.stats().loaded_blocks == NUM_TOKENS // BLOCK_SIZE + num_window_blocks
    stack.check_end()
    stack.close()
