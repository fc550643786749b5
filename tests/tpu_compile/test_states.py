"""Copies of the states of linear attention within two rows of HBM, in place, whatever layout the TPU gives them.

The shapes in `states`; `benchmarks/bench_tpu_compile.py --states` compiles all of them.
"""

import functools
import importlib.util

import pytest

from tests.tpu_compile.states import ARRAYS, case

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu, which has the TPU compiler, is not installed"
)

# Topology, model, devices, rows.
STATES = [
    ("v5e:2x2", "Qwen3-Next-80B", 4, 257),
    ("v5p:2x2x1", "Qwen3-Next-80B", 4, 257),
    ("v6e:2x2", "Qwen3-Next-80B", 4, 513),
    ("v6e:2x2", "Qwen3.5-4B", 1, 65),
    ("tpu7x:2x2x1", "Qwen3.5-397B", 8, 257),
]
# So few rows that the convolution's are padded.
FEW_ROWS = [
    ("v5p:2x2x1", "Qwen3.5-4B", 1, 17),
    ("v6e:2x2", "Qwen3-Next-80B", 4, 17),
    ("tpu7x:2x2x1", "Qwen3.5-397B", 8, 17),
]
CASES = [(*s, array) for s in STATES for array in ARRAYS]
CASES += [(*s, "convolution") for s in FEW_ROWS]


@functools.cache
def measured(compiler, topology):
    chosen = [c for c in CASES if c[0] == topology]
    results = iter(compiler.compile([case(*c[:3], c[4], num_rows=c[3]) for c in chosen]))
    return {c: (next(results), next(results)) for c in chosen}


@pytest.fixture(params=CASES, ids=lambda c: f"{c[0]} {c[1]} TP {c[2]} {c[3]} rows {c[4]}")
def copies(request, compiler):
    """The figures of the save and of the load, and what is copied."""
    save, load = measured(compiler, request.param[0])[request.param]
    return save, load, request.param[-1]


def test_they_take_at_most_two_rows_of_hbm(copies):
    """Rows of the group that is copied. v5p takes up to 50 KiB a layer beside one, more than the small pages."""
    for result in copies[:2]:
        row, apart = result["block_nbytes"], 50 * 1024 * result["num_layers"]
        assert result["temp_nbytes"] <= row + max(row, apart), result["program"]
        assert result["temp_nbytes"] <= result["bound_nbytes"], "the library would refuse it"
        assert result["host_temp_nbytes"] == 0, result["program"]


def test_they_are_updated_in_place_and_nothing_is_copied_whole(copies):
    save, load, _ = copies
    assert load["alias_nbytes"] >= load["caches_nbytes"]  # more where tiles are padded
    assert load["output_nbytes"] <= load["alias_nbytes"] + 4096
    assert save["host_alias_nbytes"] >= save["segment_nbytes"]
    assert save["output_nbytes"] <= 4096, "the token"
    for result in (save, load):
        assert result["whole_copies"] == [], result["program"]
        assert result["collectives"] == [], result["program"]


def test_a_row_goes_in_few_large_dmas(copies):
    save, load, array = copies
    for result in (save, load):
        assert result["num_dmas"] == result["max_dmas_in_flight"] == result["num_stripes"], result["program"]
        assert result["dma_nbytes"] >= (256 * 1024 if array == "convolution" else 2**20), result["program"]
    if array == "recurrent":
        assert save["num_stripes"] == 8
