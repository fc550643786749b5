"""Models with sliding windows, and with states, beside full attention: with the host tier they say the same tokens."""

import dataclasses
import random
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests.engine.helpers import (
    SMALL_ENGINE,
    STATEFUL,
    WINDOWED,
    make_request,
    num_loaded,
    random_tokens,
    rounds,
    serve,
    serve_rounds,
)
from tests.engine.test_save_modes import results
from tests.grids import few, few_setups
from tests.inside.engine import offload_scheduler, one_worker
from tests.inside.scheduler import tier_context
from tpu_offload import ConfigError, JobKind, OffloadConfig
from tpu_offload.engine import Engine
from tpu_offload.engine.offloading import Seams

pytestmark = pytest.mark.usefixtures("compiled_once")

TIGHT = dataclasses.replace(SMALL_ENGINE, num_blocks=48)
# No spare blocks: some running requests are soon preempted.
CROWDED = dataclasses.replace(TIGHT, num_spare_blocks=0)


def make_offload(**changes: Any) -> OffloadConfig:
    settings = {"num_cpu_chunks": 400, "staging_buffer_tokens": 256, "host_segment_gb": 0.001}
    return OffloadConfig.create(**(settings | changes))


@pytest.fixture(scope="module", params=[WINDOWED, STATEFUL], ids=["windows", "states"])
def model(request):
    """A model with three layer groups."""
    return request.param


@pytest.fixture(scope="module")
def plain(model):
    ample = dataclasses.replace(SMALL_ENGINE, num_blocks=800, enable_prefix_caching=False)
    return {n: results(serve_rounds(Engine(model, ample), rounds(max_tokens=n))) for n in (6, 30)}


CASES: dict[str, tuple[Any, int, dict[str, Any]]] = {
    "direct": (TIGHT, 6, {}),
    "staged": (TIGHT, 6, {"save_path": "staged", "load_path": "staged"}),
    "little host memory": (TIGHT, 6, {"num_cpu_chunks": 50}),
    "two blocks a chunk": (TIGHT, 6, {"blocks_per_chunk": 2}),
    "chunks larger than the staging buffer": (TIGHT, 6, {"blocks_per_chunk": 2, "staging_buffer_tokens": 4}),
    "no prefix cache in HBM": (dataclasses.replace(TIGHT, enable_prefix_caching=False), 6, {}),
    "preemption, async": (dataclasses.replace(CROWDED, async_scheduling=True), 30, {"save_on": "compute,preemption"}),
    "answers saved": (CROWDED, 30, {"decode_save": True}),
    "swap": (CROWDED, 30, {"swap_gb": 0.01, "swap_mode": "swap"}),
}


@pytest.mark.parametrize(
    ("config", "max_tokens", "changes"), few_setups(CASES, "little host memory", "preemption, async")
)
def test_tokens_are_the_same(model, plain, config, max_tokens, changes):
    engine = Engine(model, config, offload=make_offload(**changes))
    engine.wait_for_host_memory()
    outputs = serve_rounds(engine, rounds(max_tokens=max_tokens))
    assert results(outputs) == plain[max_tokens]
    if max_tokens == 30:
        assert engine.stats().num_preemptions > 0
    stats = engine.offload_stats()
    assert stats.num_checkpoints > 0
    assert num_loaded(outputs) > 0 or "num_cpu_chunks" in changes
    assert (stats.num_evicted_checkpoints > 0) == ("num_cpu_chunks" in changes)
    assert stats.num_failed_jobs == 0
    engine.close()


@pytest.mark.parametrize("group_id", few(range(3), 1))
def test_wrong_bytes_of_any_group_would_be_noticed(model, plain, group_id):
    engine = Engine(model, TIGHT, offload=make_offload())
    begin_step = one_worker(engine).begin_step

    def damaging(plan, kv_caches, **kwargs):
        parts = [part for job in plan.of(JobKind.LOAD) for part in job.parts if part.group_id == group_id]
        block_ids = jnp.asarray([b for part in parts for b in part.block_ids], int)
        kv_caches = begin_step(plan, kv_caches, **kwargs)
        for i in tier_context(offload_scheduler(engine)).layout.groups[group_id].layer_ids:
            kv_caches[i] = kv_caches[i].at[block_ids].set(1.0)
        return kv_caches

    one_worker(engine).begin_step = damaging
    assert results(serve_rounds(engine, rounds())) != plain[6]
    engine.close()


class FailingLoads:
    """Has some dispatches of loads fail."""

    def __init__(self) -> None:
        self.rng = random.Random(3)
        self.num_failed = 0

    def wrap(self, copier: Any, arena: Any) -> Any:
        load = copier.load

        def failing(*args: Any) -> Any:
            if self.rng.random() < 0.3:
                self.num_failed += 1
                raise RuntimeError("made to fail")
            return load(*args)

        copier.load = failing
        return copier


def test_requests_whose_load_fails_are_computed(model, plain):
    """A window has no blocks further back than the load would have ended, nor a state, so the request starts anew."""
    failing = FailingLoads()
    offload = make_offload(breaker_failures=1000, host_segment_gb=1)  # few dispatches a load
    engine = Engine(model, TIGHT, offload=offload, seams=Seams(failing.wrap))
    engine.wait_for_host_memory()
    outputs = serve_rounds(engine, rounds())
    assert results(outputs) == plain[6]
    assert failing.num_failed > 3
    assert num_loaded(outputs) > 0
    engine.close()


@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
def test_a_long_conversation_loads_what_was_computed(model, blocks_per_chunk):
    """Each turn finds all of the one before it in the host tier; windows and states take little of that."""
    offload = make_offload(decode_save=True, blocks_per_chunk=blocks_per_chunk)
    engine = Engine(model, dataclasses.replace(TIGHT, num_blocks=96), offload=offload)
    engine.wait_for_host_memory()
    said: tuple[int, ...] = ()
    num_computed = []
    for turn in range(6):
        said += random_tokens(turn, 12)
        output = serve(engine, [make_request(f"turn {turn}", said, max_tokens=6)])[f"turn {turn}"]
        num_computed.append(len(said) - output.stats.prompt_tokens.host - output.stats.prompt_tokens.hbm)
        said += output.tokens
        serve(engine, [make_request(f"other {turn}", random_tokens(100 + turn, 110), max_tokens=1)])  # empties HBM
    assert num_computed[0] == 12
    assert all(computed < 12 + 6 + 4 * blocks_per_chunk for computed in num_computed[1:])
    stats = engine.offload_stats()
    assert stats.loaded_blocks - stats.loaded_tokens // 4 < np.sum(num_computed), "no more than the windows"
    engine.close()


def test_fused_copies_are_refused(model):
    with pytest.raises(ConfigError, match="for 3 layer groups; fused copies support one"):
        Engine(model, TIGHT, offload=make_offload(save_path="fused"))
