"""The limits of a request in `kv_transfer_params`."""

import logging

import pytest

from tests.adapters.scheduler_stack import make_stack, prompt, save_prompt
from tests.inside.scheduler import request_table
from tpu_offload import RequestLimits
from tpu_offload.adapters.vllm.limits import RateLimitedWarnings, read_limits

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(
    ("params", "limits"),
    [
        (None, None),
        ({}, None),
        ({"do_remote_decode": True, "lmcache.skip_save": True}, None),
        ({"tpu_offload.cache": False}, RequestLimits(cache=False)),
        ({"tpu_offload.max_save_tokens": 16, "other": 3}, RequestLimits(max_save_tokens=16)),
        ({"max_offload_tokens": 16, "max_load_tokens": 0}, RequestLimits(max_save_tokens=16, max_load_tokens=0)),
        ({"max_offload_tokens": 16, "tpu_offload.max_save_tokens": 8}, RequestLimits(max_save_tokens=8)),
        ({"max_offload_tokens": 0, "tpu_offload.max_save_tokens": 8}, RequestLimits(max_save_tokens=0)),
        ({"max_load_tokens": None, "tpu_offload.max_load_tokens": 8}, RequestLimits(max_load_tokens=8)),
        ({"cache": False, "offload": {"tpu_offload.cache": False}}, None),
        ({"tpu_offload.priority": -2, "tpu_offload.max_load_tokens": None}, RequestLimits(priority=-2)),
    ],
    ids=str,
)
def test_reads(params, limits):
    assert read_limits("r", params, pytest.fail) == limits


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"tpu_offload.max_save_tokens": -1}, "max_save_tokens=-1; expected an integer from 0 on"),
        ({"max_load_tokens": "many"}, "max_load_tokens='many'"),
        ({"max_load_tokens": True}, "max_load_tokens=True"),
        ({"tpu_offload.priority": 1.5}, "priority=1.5"),
        ({"tpu_offload.cache": 0}, "cache=0; expected True or False"),
        ({"tpu_offload.cache": "no"}, "cache='no'; expected True or False"),
        ({"tpu_offload.skip_save": True, "tpu_offload.cache": False}, "'tpu_offload.skip_save' is unknown; expected"),
        ({"max_offload_tokens": "no", "tpu_offload.max_save_tokens": 8}, "max_save_tokens='no'"),
        ({"tpu_offload.max_load_tokens": "no", "max_load_tokens": 8}, "max_load_tokens='no'"),
        ({"tpu_offload": {"cache": False}}, "'tpu_offload' is unknown; expected"),
        ({"tpu_offload_cache": False}, "'tpu_offload_cache' is unknown"),
        ({"TPU-OFFLOAD.cache": False}, "'TPU-OFFLOAD.cache' is unknown"),
        ({" tpu_offload.cache": False}, "' tpu_offload.cache' is unknown"),
        (["tpu_offload.cache"], "['tpu_offload.cache'] is not an object"),
    ],
    ids=str,
)
def test_invalid_params_keep_the_request_out_of_the_host_tier(params, message):
    lines: list[str] = []
    assert read_limits("r7", params, lines.append) == RequestLimits(cache=False)
    (line,) = lines
    assert message in line
    assert "r7" in line
    assert "\n" not in line


def test_a_request_id_cannot_write_a_line_of_its_own():
    lines: list[str] = []
    read_limits("a\nERROR forged " + 5000 * "y", {"tpu_offload.cache": "no"}, lines.append)
    assert "\n" not in lines[0]
    assert len(lines[0]) < 300


def test_warnings_are_rate_limited(caplog):
    now_s = 100.0
    log = RateLimitedWarnings(60.0, clock=lambda: now_s)
    with caplog.at_level(logging.WARNING, logger="tpu_offload"):
        for i in range(5):
            log(f"mistake {i}")
        now_s += 60
        log("mistake 5")
        now_s += 120
        log("mistake 6")
    assert [record.getMessage() for record in caplog.records] == [
        "mistake 0", "mistake 5 (4 more such requests since the last line)", "mistake 6",
    ]  # fmt: skip


def serve(stack, name, tokens, **params):
    """Serves a request with these limits, and returns how many of its tokens were loaded."""
    before = stack.offload.stats().matched_tokens
    stack.add(name, tokens, extra_args={"kv_transfer_params": params})
    stack.drain()
    stack.scheduler.reset_prefix_cache()
    return stack.offload.stats().matched_tokens - before


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_limits_hold_under_the_real_scheduler(async_scheduling):
    stack = make_stack(async_scheduling=async_scheduling)
    save_prompt(stack, "warm")
    saved = stack.offload.stats().saved_blocks
    tokens = prompt(40, seed=3)
    assert serve(stack, "a", tokens, **{"tpu_offload.cache": False}) == 0
    assert stack.offload.stats().saved_blocks == saved
    assert serve(stack, "b", tokens, max_offload_tokens=25) == 0
    assert stack.offload.stats().saved_blocks == saved + 3, "blocks of 8 tokens"
    assert serve(stack, "c", tokens, **{"tpu_offload.cache": False}) == 0
    assert serve(stack, "d", tokens, max_load_tokens=17) == 16
    assert serve(stack, "e", tokens, **{"tpu_offload.max_load_tokens": "x"}) == 0, "what cannot be read closes"
    assert serve(stack, "f", tokens) == 39
    stack.check_end()


def test_limits_survive_a_preemption_and_end_with_the_request():
    stack = make_stack()
    save_prompt(stack, "warm")
    saved = stack.offload.stats().saved_blocks
    request = stack.add("a", prompt(40, seed=3), extra_args={"kv_transfer_params": {"tpu_offload.cache": False}})
    stack.step()
    stack.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert request.num_preemptions == 1
    stack.drain()
    assert stack.offload.stats().saved_blocks == saved
    stack.side.check_empty()
    assert request_table(stack.offload)._limits == {}
    assert serve(stack, "a", prompt(40, seed=3)) == 0
    assert stack.offload.stats().saved_blocks == saved + 5
    stack.check_end()


def test_a_request_of_the_very_first_step_is_saved_only_without_limits():
    stack = make_stack()
    stack.add("a", prompt(40, seed=3), extra_args={"kv_transfer_params": {"tpu_offload.cache": False}})
    stack.add("b", prompt(40, seed=4))
    stack.drain()
    stack.scheduler.reset_prefix_cache()
    assert serve(stack, "c", prompt(40, seed=3)) == 0
    assert serve(stack, "d", prompt(40, seed=4)) == 39
    stack.check_end()
