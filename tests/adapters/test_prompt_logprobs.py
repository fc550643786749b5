"""Prompt logprobs of requests that leave the batch of tpu-inference's model runner and return to it."""

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tpu_inference.runner.input_batch import InputBatch
from tpu_inference.runner.persistent_batch_manager import PersistentBatchManager
from tpu_inference.runner.tpu_runner import TPUModelRunner
from vllm import SamplingParams

from tests.adapters.llm_client import ours, tokens
from tpu_offload.adapters.vllm.prompt_logprobs import PromptLogprobs

pytestmark = pytest.mark.vllm

NUM_PROMPT = 9
CHUNKS = [(0, 4), (4, 4), (8, 1)]
"""First token and number of tokens of each step that computes the prompt."""


class Runner:
    """tpu-inference's own batch, and its own method that collects prompt logprobs, in place of a whole runner."""

    patch: PromptLogprobs | None = None

    def __init__(self):
        self.requests: dict[str, Any] = {}
        self.input_batch = InputBatch(4, 64, 64, False, 100, [16])
        self.persistent_batch_manager = PersistentBatchManager(
            self.requests, self.input_batch, {}, False, None, is_last_rank=True
        )

    def step(self, *, new=(), cached=(), resumed=(), finished=()):
        """Begins a step.

        Args:
          new: ids.
          cached: (id, number of tokens computed before, number of generated tokens).
          resumed: ids that were preempted.
          finished: ids.
        """
        fields: dict[str, Any] = {
            "mm_features": [],
            "pooling_params": None,
            "num_computed_tokens": 0,
            "lora_request": None,
        }
        params = SamplingParams(prompt_logprobs=2)
        prompt = list(range(NUM_PROMPT))
        ids = [request_id for request_id, _, _ in cached]
        output = SimpleNamespace(
            finished_req_ids=set(finished),
            free_encoder_mm_hashes=[],
            num_scheduled_tokens=dict.fromkeys([*new, *ids], 4),
            total_num_scheduled_tokens=4 * len([*new, *ids]),
            scheduled_spec_decode_tokens={},
            scheduled_new_reqs=[
                SimpleNamespace(req_id=i, prompt_token_ids=prompt, sampling_params=params, block_ids=([1],), **fields)
                for i in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=ids,
                resumed_req_ids=set(resumed),
                num_computed_tokens=[computed for _, computed, _ in cached],
                num_output_tokens=[num_outputs for _, _, num_outputs in cached],
                new_block_ids=[([1],) if i in resumed else None for i in ids],
            ),
        )
        self.persistent_batch_manager.update_states(output, None)
        assert all(self.requests[i].sampling_params.prompt_logprobs == 2 for i, _, num in cached if not num)

    def compute(self, request_id, first, num_tokens):
        """The logprobs of a step, on their way to the host; None if the runner computes none."""
        if request_id not in self.input_batch.num_prompt_logprobs:
            return None
        rows = np.arange(first, first + num_tokens)
        snap = SimpleNamespace(
            req_id=request_id,
            req_state=self.requests[request_id],
            req_offset=0,
            start_idx=first,
            num_logits=min(num_tokens, NUM_PROMPT - 1 - first),
            is_last_chunk=num_tokens > NUM_PROMPT - 1 - first,
            num_k=self.input_batch.num_prompt_logprobs[request_id],
        )
        tensors = SimpleNamespace(
            logprob_token_ids=np.stack([rows] * 3, 1), logprobs=np.stack([-rows] * 3, 1), selected_token_ranks=rows
        )
        return SimpleNamespace(req_snaps=[snap], tensors=tensors)

    def collect(self, data):
        """Positions whose logprobs vLLM gets from a step, by request."""
        if data is None:
            return {}
        collected = TPUModelRunner._get_prompt_logprobs_dict(self, data)
        return {i: value.logprob_token_ids[:, 0].tolist() for i, value in collected.items()}

    def run(self, request_id, chunks, num_outputs=0):
        """The steps of a prompt after its first, each collected before the next. Returns what vLLM gets."""
        sent: dict[str, list[int]] = {}
        for i, (first, num_tokens) in enumerate(chunks):
            if i:
                self.step(cached=[(request_id, first, num_outputs)])
            sent |= self.collect(self.compute(request_id, first, num_tokens))
        return sent


WHOLE = {"a": list(range(NUM_PROMPT - 1))}


@pytest.fixture(params=[True, False], ids=["patched", "tpu-inference's"])
def runner(request, monkeypatch):
    """The runner, with the workaround and without; `monkeypatch` has new buffers hold no tokens."""
    made = Runner()

    def empty(shape, dtype):
        return np.full(shape, -77, dtype)

    monkeypatch.setattr("tpu_inference.runner.input_batch.np", SimpleNamespace(**vars(np) | {"empty": empty}))
    made.patch = PromptLogprobs(made) if request.param else None
    return made


def test_a_request_that_no_step_leaves_out(runner):
    runner.step(new=["a"])
    assert runner.run("a", CHUNKS) == WHOLE
    runner.step(cached=[("a", NUM_PROMPT, 1)])
    assert runner.collect(runner.compute("a", NUM_PROMPT, 1)) == {}


def test_a_generating_request_after_an_empty_step(runner):
    """It has sent its prompt logprobs, and without the workaround sends what its new buffer holds."""
    runner.step(new=["a"])
    assert runner.run("a", CHUNKS) == WHOLE
    runner.step()
    runner.step(cached=[("a", NUM_PROMPT, 1)])
    sent = runner.collect(runner.compute("a", NUM_PROMPT, 1))
    assert sent == ({} if runner.patch else {"a": [-77] * (NUM_PROMPT - 1)})
    if runner.patch:
        assert runner.requests["a"].in_progress_prompt_logprobs_cpu is None


def test_a_generating_request_that_is_preempted(runner):
    runner.step(new=["a"])
    assert runner.run("a", CHUNKS) == WHOLE
    runner.step()
    runner.step(cached=[("a", 0, 1)], resumed=["a"])
    assert runner.run("a", CHUNKS[:2], 1) == {}
    runner.step(cached=[("a", 8, 1)])
    assert runner.collect(runner.compute("a", 8, 2)) == ({} if runner.patch else WHOLE)


@pytest.mark.parametrize("collected", [True, False])
def test_a_request_that_a_step_leaves_out_amid_its_prompt(runner, collected):
    runner.step(new=["a"])
    data = runner.compute("a", *CHUNKS[0])
    if collected:
        runner.collect(data)
    runner.step()
    runner.step(cached=[("a", 4, 0)])
    second = runner.compute("a", *CHUNKS[1])
    if not collected:
        runner.collect(data)
    runner.collect(second)
    runner.step(cached=[("a", 8, 0)])
    sent = runner.collect(runner.compute("a", *CHUNKS[2]))
    assert sent == (WHOLE if runner.patch or not collected else {"a": [-77] * 4 + [4, 5, 6, 7]})


@pytest.mark.parametrize("collected_first", [True, False])
@pytest.mark.parametrize("chunks", [CHUNKS, [(0, NUM_PROMPT)]], ids=["chunks", "at once"])
def test_a_request_whose_last_chunk_vllm_drops(runner, collected_first, chunks):
    """Running requests are reset while the chunk is in flight. Its logprobs are sent again, and only these count."""
    runner.step(new=["a"])
    runner.run("a", CHUNKS[:2])
    runner.step(cached=[("a", 8, 0)])
    dropped = runner.compute("a", *CHUNKS[2])
    if collected_first:
        runner.collect(dropped)
        runner.step()
    runner.step(cached=[("a", 0, 0)], resumed=["a"])
    data = runner.compute("a", *chunks[0])
    if not collected_first:
        runner.collect(dropped)
        if not runner.patch:
            with pytest.raises(TypeError):  # there is no buffer
                runner.collect(data)
            return
    sent = runner.collect(data)
    for first, num_tokens in chunks[1:]:
        runner.step(cached=[("a", first, 0)])
        sent |= runner.collect(runner.compute("a", first, num_tokens))
    assert sent == WHOLE


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("is_left_out", [True, False])
def test_a_request_that_is_rolled_back_after_its_last_chunk(runner, is_left_out, is_async):
    """A load has destroyed the caches in that step, and vLLM has dropped its output. The next one may be in flight."""
    runner.step(new=["a", "b"])
    assert runner.run("a", CHUNKS) == WHOLE
    if is_async:
        runner.step(cached=[("a", NUM_PROMPT, 1), ("b", 4, 0)])
        assert runner.collect(runner.compute("a", NUM_PROMPT, 1)) == {}
    if is_left_out:
        runner.step(cached=[("b", 4, 0)])
    for _ in range(2):
        runner.step(cached=[("a", 0, 0), ("b", 4, 0)])
        sent = runner.run("a", CHUNKS)
        assert sent == (WHOLE if runner.patch or is_left_out else {})
        if not runner.patch:
            return
    runner.step(finished=["a"])
    assert not runner.patch._params


def test_an_aborted_request_leaves_nothing(runner):
    runner.step(new=["a", "b"])
    runner.collect(runner.compute("a", *CHUNKS[0]))
    runner.step()
    runner.step(cached=[("a", 4, 0)])
    runner.step(finished=["b"])
    runner.step(finished=["a"], new=["a"])  # another request with the same id
    assert list(runner.requests) == list(runner.input_batch.num_prompt_logprobs) == ["a"]
    assert (runner.requests["a"].in_progress_prompt_logprobs_cpu[0] == -77).all()
    assert runner.run("a", CHUNKS) == WHOLE


def test_the_parameters_that_vllm_has_do_not_change(runner):
    runner.step(new=["a"])
    params = runner.requests["a"].sampling_params
    runner.run("a", CHUNKS)
    runner.step(cached=[("a", NUM_PROMPT, 1)])
    assert params.prompt_logprobs == 2


@pytest.mark.parametrize("gone", ["num_output_tokens", "buffer", "registered"])
def test_another_tpu_inference_does_not_end_the_engine(caplog, gone):
    runner = Runner()
    runner.step(new=["a"])
    batches, called = runner.persistent_batch_manager, []
    batches.update_states = lambda output, positions: called.append(output)
    patch = PromptLogprobs(runner)
    if gone == "buffer":
        runner.requests["a"] = SimpleNamespace(sampling_params=SamplingParams(prompt_logprobs=2))
    elif gone == "registered":
        del runner.input_batch.num_prompt_logprobs
    cached = SimpleNamespace(req_ids=["a"], resumed_req_ids=set(), num_output_tokens=[0])
    if gone == "num_output_tokens":
        del cached.num_output_tokens
    output = SimpleNamespace(scheduled_cached_reqs=cached, finished_req_ids=())
    with caplog.at_level(logging.WARNING, logger="tpu_offload"):
        batches.update_states(output, None)
        batches.update_states(output, None)
    assert called == [output, output]
    assert runner.requests["a"].sampling_params.prompt_logprobs == 2
    (record,) = caplog.records
    assert "the prompt logprobs of tpu-inference could not be read" in record.message
    patch.close()
    assert batches.update_states(output, None) is None
    assert vars(batches)["update_states"].__name__ == "<lambda>"


def test_a_runner_without_batches_is_not_touched():
    runner = SimpleNamespace()
    PromptLogprobs(runner).close()
    assert not vars(runner)


# A whole engine.

PROMPTS = [tokens("kind", 32) + tokens(f"prompt {i}", 50 + i) for i in range(6)]
GENERATE = {"do": "generate", "prompts": PROMPTS, "max_tokens": 40, "prompt_logprobs": 1}
NO_PREEMPTION = {"num_gpu_blocks_override": 400}


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("patch", [True, False])
def test_preempted_requests_of_an_engine(process, plain, is_async, patch):
    engine = {"async_scheduling": is_async}
    (right,) = plain([GENERATE], engine | NO_PREEMPTION)["steps"]
    outcome = process.run({"engine": engine, "connector": ours(patch_runner=patch), "steps": [GENERATE]})
    assert outcome["end"]["num_preemptions"] > 1
    assert [len(logprobs) for logprobs in right["prompt_logprobs"]] == [len(prompt) - 1 for prompt in PROMPTS]
    assert (outcome["steps"][0]["prompt_logprobs"] == right["prompt_logprobs"]) == patch


def test_requests_of_an_engine_that_are_reset_amid_their_prompts(process, plain):
    """In each of the first steps, while the one before is in flight. Without the workaround the engine ends."""
    prompts = [prompt[: 40 + 20 * i] for i, prompt in enumerate(PROMPTS[:3])]
    drive = {"do": "drive", "prompts": prompts, "abort": {}, "max_tokens": 8, "prompt_logprobs": 1}
    (right,) = plain([drive], {"async_scheduling": True} | NO_PREEMPTION)["steps"]
    reset = drive | {"preempt_at": [0] * 6}
    outcome = process.run({"engine": {"async_scheduling": True}, "connector": ours(), "steps": [reset]})
    assert outcome["end"]["num_preemptions"] > 3
    assert outcome["steps"][0]["prompt_logprobs"] == right["prompt_logprobs"]
