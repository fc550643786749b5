"""A prompt longer than the staging buffer, on the embedded engine: loaded completely, with the same tokens."""

import dataclasses
import functools

import pytest

from tests.engine.helpers import SMALL_ENGINE, TINY
from tests.inside.engine import one_worker
from tpu_offload import OffloadConfig
from tpu_offload.engine import Engine, Request, SamplingParams

HBM = dataclasses.replace(SMALL_ENGINE, num_blocks=28, max_num_seqs=3)
LONG = [(7 * i) % 90 for i in range(89)]
OTHER = [(11 * i + 3) % 90 for i in range(89)]


def serve(engine, name, prompt):
    prompt = tuple(prompt)
    engine.add_request(Request(request_id=name, prompt_tokens=prompt, sampling=SamplingParams(max_tokens=6)))
    outputs = []
    while engine.has_unfinished:
        outputs += [output for output in engine.step() if output.finished]
        engine.check_invariants()
    return outputs[-1]


@pytest.mark.parametrize(
    "changes",
    [
        {"save_path": "staged", "load_path": "staged"},
        {},
        {"max_load_gb_per_step": 1e-9},
        {"save_path": "fused", "load_path": "fused"},
        {"load_path": "staged", "blocks_per_chunk": 2},
    ],
    ids=str,
)
def test_it_is_loaded_whole(changes) -> None:
    plain = Engine(TINY, HBM)
    settings = {"num_cpu_chunks": 256, "num_staging_blocks": 4, "host_segment_gb": 0.001}
    engine = Engine(TINY, HBM, offload=OffloadConfig.create(**(settings | changes)))
    engine.wait_for_host_memory()
    worker = one_worker(engine)  # wait for each step's copies, so that the machine's speed does not matter
    worker.poll = functools.partial(lambda poll, **_: poll(wait=True), worker.poll)
    expected = serve(plain, "a", LONG)
    first = serve(engine, "a", LONG)
    for i in range(3):  # evicts it from HBM
        serve(engine, f"other {i}", [i, *OTHER])
    again = serve(engine, "b", LONG)
    assert first.tokens == again.tokens == expected.tokens
    block_size = HBM.block_size
    assert again.stats.prompt_tokens.host >= (len(LONG) - 1) // block_size // 2 * 2 * block_size
    stats = engine.offload_stats()
    assert stats.dropped_load_blocks == 0
    assert stats.staging_peak_blocks <= 4
    engine.close()
    plain.close()
