"""Failed loads of requests with windows, which need more blocks to compute all of their prompt than to load it."""

import pytest

from tests.adapters.scheduler_stack import break_loads, make_stack, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("compiled_once")]


def test_a_request_whose_load_has_failed_does_not_wait_for_one_behind_it():
    """HBM has room for what both load, not for what one has loaded beside all that the other computes anew.

    vLLM frees the blocks of a failed load when it looks at its request, and looks at no request behind one that does
    not fit.
    """
    stack = make_stack(num_blocks=27, windows=(9, 26, 0))
    prompts = {name: prompt(43, seed=seed) for name, seed in (("a", 20), ("b", 40))}
    for name, tokens in prompts.items():
        stack.serve(f"first {name}", tokens)
    stack.scheduler.reset_prefix_cache()
    break_loads(stack)
    for name, tokens in prompts.items():
        stack.add(name, tokens, max_tokens=2)
    stack.drain(max_steps=40)
    assert stack.offload.stats().num_failed_jobs == 2
    stack.check_end()
    stack.close()
