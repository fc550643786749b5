"""A storage tier below the host tier, under vLLM's real scheduler."""

import pytest

from tests.adapters.scheduler_stack import SMALL, Stack, prompt

pytestmark = pytest.mark.vllm


def make(directory, **settings):
    storage = {"storage_tier": "file", "storage_options": f"{directory},min_free_gb=0", "num_storage_chunks": 64}
    return Stack(**{"num_blocks": 12, **SMALL, **storage, "storage_wait_s": 60.0, **settings})


def test_the_first_request_after_a_restart_is_loaded_from_storage(tmp_path):
    stack, tokens = make(tmp_path), prompt(40, seed=20)
    stack.serve("a", tokens)
    num_stored = stack.offload.stats().num_stored_chunks
    assert num_stored > 0
    assert stack.offload.stats().restored_chunks == 0
    stack.close()
    stack = make(tmp_path)
    request = stack.serve("b", tokens)
    stats = stack.offload.stats()
    assert stats.restored_chunks == num_stored
    assert stats.promoted_chunks > 0
    assert stats.matched_tokens >= 32
    assert request.request_id == "b"
    stack.check_end()
    stack.close()


def test_another_revision_finds_nothing(tmp_path):
    stack, tokens = make(tmp_path), prompt(40, seed=20)
    stack.serve("a", tokens)
    stack.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stack.config.model_config, "revision", "other")
        stack = make(tmp_path)
        stack.serve("b", tokens)
    assert stack.offload.stats().restored_chunks == 0
    stack.check_end()
    stack.close()


def test_workers_that_never_report_cost_some_steps_only(tmp_path):
    stack = make(tmp_path)
    for connector in stack.connectors:
        connector.worker_side.take_report = lambda: None
    stack.serve("a", prompt(40, seed=20))
    assert stack.offload is None
    assert stack.num_steps < 40
    stack.close()
