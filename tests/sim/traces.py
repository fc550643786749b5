"""Small traces and trace files."""

import json
from pathlib import Path

import pytest

from tpu_offload.sim import Trace, TraceRequest, read_traces
from tpu_offload.types import ChunkKey

SHARED_TRACE = Path(__file__).parents[2].parent / "shared" / "traces" / "conversation_trace.jsonl"
needs_shared_trace = pytest.mark.skipif(
    not SHARED_TRACE.exists(), reason="the shared trace is not next to this checkout"
)


def write_trace(path, prompts, *, times_ms=None):
    """Writes a trace file with a request per prompt, by default a second apart."""
    times_ms = times_ms or [1000 * i for i in range(len(prompts))]
    lines = [
        {"timestamp": time, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": list(ids)}
        for time, ids in zip(times_ms, prompts, strict=True)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def make_trace(tmp_path, prompts):
    return read_traces([write_trace(tmp_path / "trace.jsonl", prompts)])


def random_trace(rng, *, num_requests, num_blocks):
    """A trace without a file: prompts are paths in a random tree, nodes numbered by first appearance."""
    parents = [rng.randrange(i) if i and rng.random() < 0.8 else -1 for i in range(num_blocks)]
    paths = []
    for _ in range(num_requests):
        path, block = [], rng.randrange(num_blocks)
        while block >= 0:
            path.append(block)
            block = parents[block]
        paths.append(path[::-1])
    numbers: dict[int, int] = {}
    for path in paths:
        for block in path:
            numbers.setdefault(block, len(numbers))
    known = {-1: -1} | numbers
    requests = tuple(
        TraceRequest(float(i), tuple(numbers[block] for block in path), 512 * len(path), 1)
        for i, path in enumerate(paths)
    )
    keys = tuple(ChunkKey(number.to_bytes(24, "big")) for number in range(len(numbers)))
    return Trace(requests, keys, tuple(known[parents[block]] for block in numbers))


def chats(rng, *, num_requests, num_chats=12, most=30):
    """Prompts, as ids, of growing conversations with two system prompts; each ends with the turn after `most` ids."""
    histories = [[f"system-{i % 2}-{j}" for j in range(3)] for i in range(num_chats)]
    prompts = []
    for number in range(num_requests):
        history = histories[rng.randrange(num_chats)]
        history += [f"{number}-{j}" for j in range(rng.randint(1, 4))]
        prompts.append(tuple(history))
        if len(history) > most:
            del history[3:]
    return prompts
