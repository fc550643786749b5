"""Copies of the states of linear attention, of the shapes that Qwen3.5 and Qwen3-Next have, by the real TPU compiler.

A state layer has two arrays, which are two page groups: the last inputs of the convolution, bf16[rows, 3, channels],
and the recurrent state, f32[rows, heads, 128, 128]. tpu-inference makes both in the default layout of their shape. For
the convolution that is [3, rows, channels] with 8 rows in a tile, or [rows, 3, channels] padded to 4 if there are few
rows; a recurrent state is contiguous.
"""

import dataclasses
import functools
import importlib.util

import pytest

from tests.tpu_compile.harness import Case

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu, which has the TPU compiler, is not installed"
)


@dataclasses.dataclass(frozen=True)
class Model:
    """The states of a model, over all devices: state layers, and the pages of both arrays."""

    num_layers: int
    convolution: tuple[int, ...]
    recurrent: tuple[int, ...]


MODELS = {
    "Qwen3.5-397B": Model(45, (3, 12288), (64, 128, 128)),
    "Qwen3-Next-80B": Model(36, (3, 8192), (32, 128, 128)),
    "Qwen3.5-4B": Model(24, (3, 8192), (32, 128, 128)),
}
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
CASES = [(*s, array) for s in STATES for array in ("convolution", "recurrent")]
CASES += [(*s, "convolution") for s in FEW_ROWS]


def case(topology, name, tp, rows, array):
    model = MODELS[name]
    return Case(
        topology,
        tp,
        dtype="bfloat16" if array == "convolution" else "float32",
        page_shape=getattr(model, array),
        num_layers=model.num_layers,
        num_blocks=rows,
        segment_blocks=16,  # whole tiles: without padded pages a segment would be laid out in them
        capacity=rows,
        bucket=5,
        programs=("direct_save", "direct_load"),
        split_axis=2 if array == "convolution" else 1,
        with_data_axis=True,
    )


@functools.cache
def measured(compiler, topology):
    chosen = [c for c in CASES if c[0] == topology]
    results = iter(compiler.compile([case(*c) for c in chosen]))
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
