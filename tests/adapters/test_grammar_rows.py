"""Grammar masks of requests that are not scheduled in the order of their ids."""

import logging
from types import SimpleNamespace

import numpy as np
import pytest
from tpu_inference.runner.structured_decoding_manager import StructuredDecodingManager
from vllm.v1.core.sched.output import GrammarOutput

from tests.adapters.llm_client import ours, tokens
from tpu_offload.adapters.vllm.grammar_rows import GrammarRows

pytestmark = pytest.mark.vllm

LOGITS = np.zeros((4, 32), np.float32)


@pytest.fixture
def runner(monkeypatch):
    """tpu-inference's own manager, and a batch with c, a and b in rows 0, 2 and 3."""
    monkeypatch.setattr("tpu_inference.runner.structured_decoding_manager.device_array", lambda mesh, arrays: arrays)
    made = SimpleNamespace(
        grammar_bitmask_cpu=np.zeros((4, 1), np.int32),
        require_structured_out_cpu=np.zeros((4, 1), bool),
        structured_decode_arange=np.arange(32),
        mesh=None,
        input_batch=SimpleNamespace(req_id_to_index={"c": 0, "a": 2, "b": 3}),
    )
    made.structured_decoding_manager = StructuredDecodingManager(made)
    return made


def masks(runner, ids, rows, num_drafts=None):
    """The masks of the rows of the batch; 0 where there is none."""
    output = GrammarOutput(ids, np.array(rows, np.int32)[:, None], num_drafts)
    required, bitmask, _ = runner.structured_decoding_manager.prepare_structured_decoding_input(LOGITS, output)
    assert (output.structured_output_request_ids, output.grammar_bitmask.ravel().tolist()) == (ids, rows)
    return np.where(required, bitmask, 0).ravel().tolist()


@pytest.mark.parametrize(
    ("ids", "rows", "expected", "found"),
    [
        (["a", "b", "c"], [1, 2, 3], [3, 0, 1, 2], [3, 0, 1, 2]),
        (["c", "b", "a"], [3, 2, 1], [3, 0, 1, 2], [1, 0, 3, 2]),
        (["b", "a"], [2, 1], [0, 0, 1, 2], [0, 0, 2, 1]),
        (["c"], [3], [3, 0, 0, 0], [3, 0, 0, 0]),
        # One that is not in the batch.
        (["aa", "c", "b"], [9, 3, 2], [3, 0, 0, 2], [3, 0, 0, 9]),
        (["aa"], [9], [0, 0, 0, 0], [0, 0, 0, 0]),
    ],
)
@pytest.mark.parametrize("num_drafts", [False, True])
def test_each_request_gets_its_own_mask(runner, ids, rows, expected, found, num_drafts):
    drafts = [0] * len(ids) if num_drafts else None
    assert masks(runner, ids, rows, drafts) == found, "tpu-inference does it otherwise now: see docs/upstream"
    patch = GrammarRows(runner)
    assert masks(runner, ids, rows, drafts) == expected
    patch.close()
    assert masks(runner, ids, rows, drafts) == found


def test_a_runner_without_the_defect(runner):
    def prepare(logits, output):
        return dict(zip(output.structured_output_request_ids, output.grammar_bitmask.ravel().tolist(), strict=True))

    runner.structured_decoding_manager = type(
        "Manager", (), {"prepare_structured_decoding_input": staticmethod(prepare)}
    )()
    GrammarRows(runner)
    output = GrammarOutput(["c", "b", "a"], np.array([[3], [2], [1]], np.int32))
    found = runner.structured_decoding_manager.prepare_structured_decoding_input(LOGITS, output)
    assert found == {"a": 1, "b": 2, "c": 3}


def test_masks_of_drafts_are_left_alone(runner):
    GrammarRows(runner)
    assert masks(runner, ["b", "a"], [1, 2, 3, 4]) == [0, 0, 1, 2]


def test_another_tpu_inference_does_not_end_the_engine(runner, caplog):
    GrammarRows(runner)
    runner.structured_decoding_manager._runner = None
    called = []
    patch = GrammarRows(
        SimpleNamespace(
            structured_decoding_manager=SimpleNamespace(
                prepare_structured_decoding_input=lambda logits, output: called.append(output)
            )
        )
    )
    output = GrammarOutput(["a"], np.array([[1]], np.int32))
    with caplog.at_level(logging.WARNING, logger="tpu_offload"):
        patch._prepare(LOGITS, output)
        patch._prepare(LOGITS, output)
    assert called == [output, output]
    (record,) = caplog.records
    assert "the masks of structured outputs could not be sorted" in record.message


def test_a_runner_without_structured_decoding_is_not_touched():
    runner = SimpleNamespace()
    GrammarRows(runner).close()
    assert not vars(runner)


# A whole engine.

FORM = [1, 2, 1, 1, 2, 2]
GENERATE = {
    "do": "generate",
    "prompts": [tokens(f"prompt {i}", 20 + i) for i in range(12)],
    "max_tokens": 12,
    "ignore_eos": False,
    # No word of the tokenizer begins another one of these.
    "structured_outputs": {"regex": "".join(f"w{digit}[0-9]" for digit in FORM)},
}
ENGINE = {"skip_tokenizer_init": False, "num_gpu_blocks_override": 400}


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("patch", [True, False])
def test_requests_of_an_engine(process, patch, is_async):
    """vLLM counts requests: "10" and "11" are scheduled after "8" and "9", and sorted before them."""
    engine = ENGINE | {"async_scheduling": is_async}
    spec = {"model": "tiny", "engine": engine, "connector": ours(patch_runner=patch), "steps": [GENERATE]}
    (step,) = process.run(spec)["steps"]
    right = [
        [token // 10 for token in answer[:-1]] == FORM and (answer[-1], reason) == (2, "stop")
        for answer, reason in zip(step["tokens"], step["finish"], strict=True)
    ]
    assert all(right) == patch
