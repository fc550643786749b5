"""Models with sliding windows, and with states, above storage: the same tokens, also from what another process left."""

import dataclasses
from typing import Any

import pytest

from tests.engine.helpers import SMALL_ENGINE, STATEFUL, WINDOWED, num_loaded, rounds, serve_rounds
from tests.engine.test_save_modes import results
from tests.grids import few
from tests.storage.memory_tier import FAULTY, NAME
from tests.storage.test_engine import serve_slowly
from tpu_offload import OffloadConfig
from tpu_offload.engine import Engine

pytestmark = pytest.mark.usefixtures("compiled_once")

# Without a prefix cache in HBM, so that all that is found comes from below.
TIGHT = dataclasses.replace(SMALL_ENGINE, num_blocks=48, enable_prefix_caching=False)


def make_offload(**changes: Any) -> OffloadConfig:
    settings = {
        "num_cpu_chunks": 40,
        "staging_buffer_tokens": 256,
        "host_segment_gb": 0.0001,
        "storage_tier": NAME,
        "num_storage_chunks": 600,
        "storage_wait_s": 60.0,
        "load_mode": "load",  # else the machine's speed decides
    }
    return OffloadConfig.create(**(settings | changes))


@pytest.fixture(scope="module", params=[WINDOWED, STATEFUL], ids=["windows", "states"])
def model(request):
    """A model with three layer groups."""
    return request.param


@pytest.fixture(scope="module")
def plain(model):
    ample = dataclasses.replace(SMALL_ENGINE, num_blocks=800, enable_prefix_caching=False)
    return results(serve_rounds(Engine(model, ample), rounds()))


@pytest.mark.parametrize(
    "changes",
    few(
        [
            {},
            {"save_path": "staged", "load_path": "staged"},
            {"storage_write_on": "eviction"},
            {"blocks_per_chunk": 2},
            {"storage_admission": "second_sighting"},
            {"storage_tier": (NAME, NAME), "num_storage_chunks": (100, 600)},
            {"storage_tier": FAULTY},
        ],
        {},
        {"storage_write_on": "eviction"},
        {"storage_tier": FAULTY},
    ),
    ids=["cascade", "staged", "demotion", "two blocks a chunk", "second sighting", "two tiers", "faults"],
)
def test_tokens_are_the_same(model, plain, changes):
    engine = Engine(model, TIGHT, offload=make_offload(**changes))
    engine.wait_for_host_memory()
    outputs = serve_slowly(engine, rounds())
    stats = engine.offload_stats()
    assert results(outputs) == plain
    assert stats.cascaded_chunks > 0
    assert stats.promoted_chunks > 0 or "storage_admission" in changes
    if changes.get("storage_tier") != FAULTY:
        assert (stats.num_failed_jobs, stats.missing_storage_chunks) == (0, 0)
    engine.close()


def test_another_process_finds_checkpoints(model, plain, tmp_path):
    settings = {"storage_tier": "file", "storage_options": f"{tmp_path / 'kv'},min_free_gb=0"}
    outputs = []
    for _ in range(2):
        engine = Engine(model, TIGHT, offload=make_offload(**settings))
        engine.wait_for_host_memory()
        outputs.append(serve_slowly(engine, rounds()))
        stats = engine.offload_stats()
        engine.close()
    assert results(outputs[0]) == results(outputs[1]) == plain
    assert stats.restored_chunks > 0
    assert num_loaded(outputs[1]) > 1.2 * num_loaded(outputs[0]), "also what the first one had to compute"
