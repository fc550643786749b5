"""Requests that are too long are rejected before memory is allocated for them."""

import json
import tracemalloc

import pytest

import tpu_offload.sim.json_lines as json_lines
from tpu_offload.cli.main import main

_NUM_BYTES = 4_000_000


@pytest.fixture
def refused(tmp_path, capsys):
    """Runs `replay` on lines; returns the error and the peak memory of Python objects."""

    def refused(flag, *values):
        path = tmp_path / "requests.jsonl"
        path.write_text("".join(json.dumps(value) + "\n" for value in values))
        tracemalloc.start()
        try:
            assert main(["replay", flag, str(path), "--num-blocks", "64"]) == 2
            nbytes = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        return capsys.readouterr().err, nbytes

    return refused


@pytest.mark.parametrize("letter", ["x", "é"])
def test_a_message_longer_than_can_be_served(refused, letter):
    text = letter * (_NUM_BYTES // len(letter.encode()))
    short = [{"role": "user", "content": "hello"}]
    error, nbytes = refused("--prompts", short, [{"role": "user", "content": text}])
    assert "requests.jsonl line 2: messages of 4000018 tokens, the answer included; expected at most 1024" in error
    assert error.count("\n") == 1
    assert nbytes < 15 * _NUM_BYTES


def test_a_request_of_a_trace_longer_than_can_be_served(refused):
    line = {"timestamp": 0, "input_length": 2**26, "output_length": 1, "hash_ids": list(range(2**17))}
    error, nbytes = refused("--trace", line)
    assert "requests.jsonl line 1: a request of 2097153 tokens, the answer included; expected at most 1024" in error
    assert nbytes < 2**25


def test_an_answer_longer_than_can_be_served(refused):
    line = {"timestamp": 0, "input_length": 1, "output_length": 2**31 - 1, "hash_ids": [1]}
    error, _ = refused("--trace", line)
    assert "requests.jsonl line 1: a request of 67108865 tokens" in error


def test_a_line_that_is_too_long_is_not_read(refused, monkeypatch):
    monkeypatch.setattr(json_lines, "MAX_LINE_NBYTES", 1000)
    error, _ = refused("--prompts", [{"role": "user", "content": "x" * 2000}])
    assert "requests.jsonl line 1: longer than 1000 bytes; expected one request per line" in error
