"""No request waits for compilation: after `warm_up` serving compiles nothing, for any copy path."""

import dataclasses

import jax
import numpy as np
import pytest

from tests.engine.helpers import SMALL_ENGINE, TINY, make_request, random_tokens
from tests.grids import few
from tests.inside.engine import offloading
from tpu_offload import OffloadConfig
from tpu_offload.engine import Engine
from tpu_offload.types import Direction

TIGHT = dataclasses.replace(SMALL_ENGINE, num_blocks=32, max_num_seqs=3)
_COMPILED = "/jax/core/compile/backend_compile_duration"


@pytest.fixture
def compiles():
    """A list that grows by an entry per program that jax compiles."""
    found = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == _COMPILED:
            found.append(kwargs.get("fun_name", ""))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)


def random_life(engine, rng, *, num_requests):
    """Serves prompts with shared prefixes that evict each other from HBM, aborting some; returns the host hits."""
    num_host_tokens = 0
    left = list(range(num_requests))
    for _ in range(20 * num_requests):
        if left and rng.random() < 0.3:
            i = left.pop()
            prefix = random_tokens(int(rng.integers(6)), 44)
            prompt = prefix[: int(rng.integers(20, 45))] + random_tokens(1000 + i, int(rng.integers(1, 20)))
            engine.add_request(make_request(str(i), prompt, max_tokens=int(rng.integers(1, 9))))
        for output in engine.step():
            if output.finished:
                num_host_tokens += output.stats.prompt_tokens.host
        if rng.random() < 0.05 and len(left) < num_requests:
            engine.abort(str(int(rng.integers(num_requests))))
        if not left and not engine.has_unfinished:
            return num_host_tokens
    raise AssertionError(f"{engine.stats()}: the engine makes no progress")


@pytest.mark.parametrize(
    "changes",
    few(
        [
            {"save_path": "direct", "load_path": "staged"},
            {"save_path": "staged", "load_path": "direct"},
            {"save_path": "fused", "load_path": "direct"},
            {"save_path": "fused", "load_path": "fused", "block_size_buckets": (1,)},
            {"save_path": "staged", "load_path": "fused", "blocks_per_chunk": 2, "block_size_buckets": (1, 2, 4)},
        ],
        first=2,
    ),
    ids=str,
)
def test_serving_compiles_nothing(compiles, changes):
    """With small segments of the host pool, so that copies span several."""
    settings = {"num_cpu_chunks": 60, "staging_buffer_tokens": 64, "host_segment_gb": 20e-6, "decode_save": True}
    engine = Engine(TINY, TIGHT, offload=OffloadConfig.create(**(settings | changes)))
    engine.warm_up()
    assert compiles, "the listener receives nothing"
    fused = dict.fromkeys(Direction, 0)
    fused_step = offloading(engine).fused_step

    def counted():
        step = fused_step()
        if step.inputs is not None:
            fused[Direction.SAVE] += step.inputs.num_saves
            fused[Direction.LOAD] += step.inputs.num_loads
        return step

    offloading(engine).fused_step = counted
    compiles.clear()
    num_host_tokens = random_life(engine, np.random.default_rng(3), num_requests=60)
    assert compiles == []
    assert num_host_tokens > 0
    assert engine.offload_stats().num_evicted_chunks > 0
    assert engine.offload_stats().num_failed_jobs == 0
    for direction in Direction:
        assert bool(fused[direction]) == (changes[f"{direction.value}_path"] == "fused"), fused
    engine.check_invariants()
    engine.close()
