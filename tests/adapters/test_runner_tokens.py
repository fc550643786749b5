"""The tokens of requests that are not in a step, with the real method of the installed tpu-inference."""

import logging
from types import SimpleNamespace

import numpy as np
import pytest
from tpu_inference.runner.tpu_runner import TPUModelRunner

from tpu_offload.adapters.vllm.runner_tokens import RunnerTokens

pytestmark = pytest.mark.vllm

PROMPT = [5, 6, 7]


def make_runner(*, not_scheduled=("b",), modify=None, **results):
    """Two requests that sampled 41 and 42 in the last step, with placeholders 0 for them. Blocks of two tokens.

    Args:
      not_scheduled: requests that are not in the next step.
      modify: in place of tpu-inference's own method that writes the tokens of the last step.
      results: fields of the results of the last step in place of others.
    """
    states = {
        name: SimpleNamespace(
            req_id=name, prompt_token_ids=PROMPT, output_token_ids=[31, 0], num_tokens=5, block_ids=([1, 2, 3],)
        )
        for name in ("a", "b")
    }
    rows = {name: i for i, name in enumerate(name for name in states if name not in not_scheduled)}
    tokens = np.zeros((2, 16), np.int32)
    tokens[:, :4] = [*PROMPT, 31]
    runner = SimpleNamespace(
        requests=dict(states),
        input_batch=SimpleNamespace(
            req_id_to_index=rows,
            token_ids_cpu=tokens,
            num_tokens_no_spec=np.full(2, 5),
            num_computed_tokens_cpu=np.full(2, 4),
            num_prompt_tokens=np.full(2, 3),
            num_tokens=np.full(2, 5),
            vocab_size=100,
        ),
        max_model_len=16,
        dp_size=1,
        _pre_async_results=SimpleNamespace(
            **{
                "req_ids": ["a", "b"],
                "next_tokens": np.asarray([41, 42], np.int32),
                "request_seq_lens": [(0, states["a"], 4), (1, states["b"], 4)],
                "discard_sampled_tokens_req_indices": [],
                "placeholder_req_id_to_index": {"a": 0, "b": 1},
                "logits_indices_selector": None,
                "spec_decode_metadata": None,
                "scheduler_output": SimpleNamespace(scheduled_spec_decode_tokens={}),
                "is_continue_decode": False,
                "continue_decode_max_steps": 1,
            }
            | results
        ),
    )
    # Methods of classes, as in the real runner, so that wrappers on the instances can be removed.
    methods = {"_modify_prev_results": modify or TPUModelRunner._modify_prev_results}
    cls = type("StandIn", (SimpleNamespace,), methods)
    batches = type("Batches", (SimpleNamespace,), {"update_states": lambda self, output, positions: positions})
    return cls(**vars(runner), persistent_batch_manager=batches())


def take_results(runner):
    """Writes the tokens that were sampled in the last step, as a runner does before it samples those of the next."""
    runner._modify_prev_results()


def last_results(runner):
    """The results of the last step."""
    return runner._pre_async_results


def drop_results(runner):
    """There was no step before."""
    runner._pre_async_results = None


def schedule(runner, *request_ids, finished=()):
    """Begins a step with these requests, none of which was preempted in it."""
    output = SimpleNamespace(
        num_scheduled_tokens=dict.fromkeys(request_ids, 1),
        scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set()),
        finished_req_ids=set(finished),
    )
    runner.persistent_batch_manager.update_states(output, 7)


def outputs(runner):
    return {name: state.output_token_ids for name, state in runner.requests.items()}


def test_tpu_inference_loses_the_token():
    """If this fails there is nothing to restore any more: see docs/upstream."""
    runner = make_runner()
    take_results(runner)
    assert outputs(runner) == {"a": [31, 41], "b": [31, 0]}


def newly_tainted(tokens):
    return {tainted.request_id: tainted.block_ids for tainted in tokens.take_newly_tainted()}


@pytest.mark.parametrize("not_scheduled", [("b",), ("a", "b"), ()])
def test_the_token_is_restored(caplog, not_scheduled):
    runner = make_runner(not_scheduled=not_scheduled)
    tokens = RunnerTokens(runner, restore=True, block_size=2)
    with caplog.at_level(logging.WARNING, logger="tpu_offload"):
        take_results(runner)
        assert not caplog.records
        schedule(runner, *not_scheduled)
    assert outputs(runner) == {"a": [31, 41], "b": [31, 42]}
    assert (tokens.tainted, newly_tainted(tokens)) == (frozenset(), {})
    assert len(caplog.records) == bool(not_scheduled)
    tokens.close()
    assert "_modify_prev_results" not in vars(runner)


def test_a_runner_without_the_defect_is_not_touched(caplog):
    def modify(runner):
        for state, token in zip(runner.requests.values(), (41, 42), strict=True):
            state.output_token_ids[-1] = token

    runner = make_runner(modify=modify)
    tokens = RunnerTokens(runner, restore=True, block_size=2)
    with caplog.at_level(logging.WARNING, logger="tpu_offload"):
        take_results(runner)
    assert outputs(runner) == {"a": [31, 41], "b": [31, 42]}
    assert not tokens.tainted
    assert not caplog.records


@pytest.mark.parametrize(
    ("restore", "results"),
    [(False, {}), (True, {"is_continue_decode": True, "modify": lambda runner: None})],
    ids=["disabled", "several steps at once"],
)
def test_a_request_whose_token_is_not_restored_is_tainted(caplog, restore, results):
    runner = make_runner(**results)
    tokens = RunnerTokens(runner, restore=restore, block_size=2)
    with caplog.at_level(logging.WARNING, logger="tpu_offload"):
        take_results(runner)
        schedule(runner, "a")
        assert not tokens.tainted
        schedule(runner, "a", "b")
    assert runner.requests["b"].output_token_ids == [31, 0]
    assert tokens.tainted == {"b"}
    assert newly_tainted(tokens) == {"b": (3,)}, "from its token 4 on"
    assert newly_tainted(tokens) == {}
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    tokens.finish({"b", "c"})
    assert not tokens.tainted


@pytest.mark.parametrize("restore", [True, False])
@pytest.mark.parametrize("why", ["ended, and its id is reused", "rolled back by vLLM, which drops the token"])
def test_nothing_is_logged_for_a_request_that_needs_no_token(caplog, restore, why):
    ended = why.startswith("ended")
    runner = make_runner()
    tokens = RunnerTokens(runner, restore=restore, block_size=2)
    with caplog.at_level(logging.WARNING, logger="tpu_offload"):
        take_results(runner)
        if not ended:
            runner.requests["b"].num_tokens = 4
        schedule(runner, "a", "b", finished=["b"] if ended else [])
    assert not caplog.records
    assert not tokens.tainted


def test_a_request_is_tainted_at_once_if_steps_cannot_be_observed():
    runner = make_runner()
    del runner.persistent_batch_manager
    tokens = RunnerTokens(runner, restore=False, block_size=2)
    take_results(runner)
    assert tokens.tainted == {"b"}


def resume(runner, request_id, num_tokens):
    """Prepares the next step, in which a request is resumed after a reset, with this many of vLLM's tokens."""
    output = SimpleNamespace(
        num_scheduled_tokens={request_id: 1},
        scheduled_cached_reqs=SimpleNamespace(
            resumed_req_ids={request_id}, all_token_ids={request_id: [*PROMPT, 31, 42][:num_tokens]}
        ),
        finished_req_ids=set(),
    )

    def update_states(self, output, positions):
        state, batch = runner.requests[request_id], runner.input_batch
        del state.output_token_ids[num_tokens - len(PROMPT) :]
        state.num_tokens = num_tokens
        row = batch.req_id_to_index[request_id]
        batch.token_ids_cpu[row, :num_tokens] = [*PROMPT, *state.output_token_ids]
        batch.num_tokens_no_spec[row] = num_tokens
        return positions

    cls = type("Batches", (SimpleNamespace,), {"update_states": update_states})
    runner.persistent_batch_manager = cls()
    return output


@pytest.mark.parametrize("num_tokens", [4, 5], ids=["dropped", "taken"])
@pytest.mark.parametrize("restore", [True, False])
def test_a_resumed_request_continues_with_the_tokens_that_vllm_has(caplog, restore, num_tokens):
    runner = make_runner(not_scheduled=("a",))
    output = resume(runner, "b", num_tokens)
    tokens = RunnerTokens(runner, restore=restore, block_size=2)
    with caplog.at_level(logging.WARNING, logger="tpu_offload"):
        assert runner.persistent_batch_manager.update_states(output, 7) == 7
        take_results(runner)
    if restore:
        fed = runner.input_batch.token_ids_cpu[runner.input_batch.req_id_to_index["b"]]
        assert outputs(runner)["b"] == [31, 42][: num_tokens - 3] == fed[3:num_tokens].tolist()
    assert tokens.tainted == (set() if restore else {"b"})
    assert newly_tainted(tokens) == ({} if restore else {"b": (2, 3) if num_tokens == 4 else (3,)})
    tokens.close()
    assert "update_states" not in vars(runner.persistent_batch_manager)


@pytest.mark.parametrize("gone", ["field", "results", "all_token_ids"])
def test_a_step_that_cannot_be_read_does_not_end_the_engine(gone):
    runner = make_runner(not_scheduled=())
    output = resume(runner, "b", 4)
    tokens = RunnerTokens(runner, restore=True, block_size=2)
    if gone == "results":
        drop_results(runner)
    elif gone == "all_token_ids":
        output.scheduled_cached_reqs.all_token_ids = {}
    else:
        del runner._pre_async_results
    assert runner.persistent_batch_manager.update_states(output, 7) == 7
    assert tokens.tainted == ({"b"} if gone == "all_token_ids" else set())


@pytest.mark.parametrize("gone", ["results", "next_tokens", "requests", "extract"])
def test_another_tpu_inference_does_not_end_the_engine(caplog, monkeypatch, gone):
    called = []
    runner = make_runner(modify=lambda runner: called.append(runner))
    if gone == "extract":
        monkeypatch.delattr("tpu_inference.runner.utils.host_extract_sampled_tokens")
    tokens = RunnerTokens(runner, restore=True, block_size=2)
    if gone == "results":
        drop_results(runner)
    elif gone == "next_tokens":
        del last_results(runner).next_tokens
    elif gone == "requests":
        del runner.requests
    with caplog.at_level(logging.WARNING, logger="tpu_offload"):
        take_results(runner)
        take_results(runner)
        schedule(runner, "b")
    assert called == [runner, runner]
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    tokens.compare("b", 3, (99,))
    assert tokens.tainted == {"b"}


def test_requests_that_sampled_nothing_or_have_ended_are_skipped():
    runner = make_runner(not_scheduled=("a", "b"), discard_sampled_tokens_req_indices=[0])
    runner.requests["b"] = SimpleNamespace(req_id="b", output_token_ids=[])  # another request with the same id
    tokens = RunnerTokens(runner, restore=False, block_size=2)
    take_results(runner)
    assert outputs(runner) == {"a": [31, 0], "b": []}
    assert not tokens.tainted


@pytest.mark.parametrize(
    ("request_id", "first", "known", "expected"),
    [
        ("a", 3, (31,), {}),
        ("a", 1, (6, 7, 31), {}),
        ("a", 3, (32,), {"a": (2, 3)}),
        ("a", 1, (6, 7, 30), {"a": (2, 3)}),
        ("a", 1, (9, 7, 31), {"a": (1, 2, 3)}),
        ("b", 3, (31,), {"b": (2, 3)}),  # it is not in the batch
        ("c", 3, (31,), {"c": ()}),
        ("a", 15, (0, 0), {"a": ()}),  # beyond the end of the runner's row
    ],
)
def test_compares_the_tokens_of_runner_and_vllm(request_id, first, known, expected):
    tokens = RunnerTokens(make_runner(), restore=True, block_size=2)
    tokens.compare(request_id, first, known)
    assert newly_tainted(tokens) == expected
    assert tokens.tainted == set(expected)
    tokens.compare(request_id, first, (99,) * len(known))
    assert newly_tainted(tokens) == ({} if expected else {request_id: (1, 2, 3)[first // 2 :]})


def test_a_request_is_tainted_if_the_runner_cannot_be_read():
    runner = SimpleNamespace(requests={})
    tokens = RunnerTokens(runner, restore=True, block_size=2)
    tokens.compare("a", 3, (31,))
    assert tokens.tainted == {"a"}
    tokens.close()
