"""The copy programs compiled by the real TPU compiler: HBM that they take, aliasing, and no whole copies.

The programs are the ones that the worker runs, built by the same functions.
"""

import dataclasses
import functools
import importlib.util
from typing import Any

import pytest

from tests.tpu_compile.figures import whole_copies
from tests.tpu_compile.harness import ALL_PROGRAMS, Case

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu, which has the TPU compiler, is not installed"
)

# Llama 3 8B: 32 layers, 8 KV heads of 128; K and V heads interleaved, two (bfloat16) or four (float8) packed.
PAGES = {"bfloat16": (16, 8, 2, 128), "float8_e4m3fn": (16, 4, 4, 128), "float8_e5m2": (16, 4, 4, 128)}
TOPOLOGIES = {
    "v5e:2x2": [(1, "bfloat16"), (4, "float8_e4m3fn")],
    "v5p:2x2x1": [(4, "bfloat16"), (1, "float8_e5m2")],
    "v6e:2x2": [(1, "bfloat16"), (4, "bfloat16"), (4, "float8_e4m3fn")],
    "tpu7x:2x2x1": [(4, "bfloat16"), (1, "float8_e4m3fn")],
}
CASES = [(topology, tp, dtype) for topology, cases in TOPOLOGIES.items() for tp, dtype in cases]


@functools.cache
def measured(compiler, topology):
    cases = [Case(topology, tp, dtype=dtype, page_shape=PAGES[dtype]) for tp, dtype in TOPOLOGIES[topology]]
    results = compiler.compile(cases)
    return {(r["tp"], r["dtype"], r["program"]): r for r in results}


@pytest.fixture
def result(compiler, topology, tp, dtype):
    return {program: measured(compiler, topology)[tp, dtype, program] for program in ALL_PROGRAMS}


@pytest.mark.parametrize(("topology", "tp", "dtype"), CASES)
def test_direct_programs_take_at_most_two_blocks_of_hbm(result):
    # The capacity is 128 blocks and the number of blocks an argument: this is the HBM of every job.
    for program in ("direct_save", "direct_load"):
        assert result[program]["temp_nbytes"] <= 2 * result[program]["block_nbytes"], program


@pytest.mark.parametrize(("topology", "tp", "dtype"), CASES)
def test_staged_programs_take_the_staging_array_and_no_more(result):
    gather = result["gather"]
    assert gather["staging_nbytes"] <= gather["output_nbytes"] <= gather["staging_nbytes"] + 4096
    for program in ("gather", "scatter", "land", "pick"):
        assert result[program]["temp_nbytes"] <= result[program]["block_nbytes"], program


@pytest.mark.parametrize(("topology", "tp", "dtype"), CASES)
def test_what_is_donated_is_updated_in_place(result):
    for program, host_nbytes in (("direct_save", "segment"), ("land", "segment"), ("pick", "staging")):
        assert result[program]["host_alias_nbytes"] == result[program][f"{host_nbytes}_nbytes"], program
        assert result[program]["output_nbytes"] <= 4096, program  # the token
    for program in ("direct_load", "scatter"):
        assert result[program]["alias_nbytes"] == result[program]["caches_nbytes"], program
        assert result[program]["output_nbytes"] <= result[program]["caches_nbytes"] + 4096, program
    for program in ALL_PROGRAMS:
        assert result[program]["host_temp_nbytes"] == 0, program


@pytest.mark.parametrize(("topology", "tp", "dtype"), CASES)
def test_chunks_go_to_and_from_storage_without_hbm(result):
    read, write = result["read_slot"], result["write_slot"]
    for program in (read, write):
        assert program["temp_nbytes"] <= 256 * 1024, program["program"]  # a block has up to 2 MiB
        assert program["output_nbytes"] <= 4096, "the token"
    assert read["host_output_nbytes"] == read["staging_nbytes"], "a chunk of as many blocks"
    assert write["host_alias_nbytes"] == write["segment_nbytes"], "in place"


@pytest.mark.parametrize(("topology", "tp", "dtype"), CASES)
def test_nothing_is_copied_whole_and_no_device_talks_to_another(result):
    for program in ALL_PROGRAMS:
        copies = result[program]["whole_copies"]
        if program == "read_slot":  # its output is one such copy, of a chunk as large as the staging array here
            copies = [line for line in copies if " dynamic-slice(" not in line]
        assert copies == [], program
        assert result[program]["collectives"] == [], program


def test_large_capacity_costs_no_hbm(compiler):
    """One program serves all job sizes; making the largest ten times larger changes nothing but the ids."""
    small = Case("v6e:2x2", 4, num_layers=8, capacity=64, programs=("direct_save", "direct_load"))
    results = compiler.compile([small, dataclasses.replace(small, capacity=640)])
    for before, after in zip(results[:2], results[2:], strict=True):
        assert after["temp_nbytes"] - before["temp_nbytes"] <= 8192


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_swaps_of_a_layer_group_take_at_most_two_blocks_of_it(compiler, topology):
    """The swap's programs are the direct ones, over a group's layers and as many ids as a dispatch may have.

    Of blocks under 128 KiB a device they take a quarter MiB: the compiler has about 40 KiB for each DMA.
    """
    swap = Case(topology, 4, page_shape=PAGES["bfloat16"], capacity=1024, programs=("direct_save", "direct_load"))
    groups = [
        dataclasses.replace(swap, num_layers=5, num_blocks=2048),  # full attention, as in Gemma 3: one layer of six
        dataclasses.replace(swap, num_layers=25, num_blocks=300, segment_blocks=77),  # sliding windows
    ]
    for result in compiler.compile(groups):
        assert result["temp_nbytes"] <= max(2 * result["block_nbytes"], 256 * 1024), result["program"]
        assert result["whole_copies"] == [], result["program"]
        assert result["host_temp_nbytes"] == 0, result["program"]


def test_the_check_for_whole_copies_finds_them(compiler):
    """Without donation the caches must be copied: the check has to see that."""
    (result,) = compiler.compile(
        [Case("v6e:2x2", 1, num_layers=2, num_blocks=64, programs=("direct_load",), donate=False)]
    )
    assert len(result["whole_copies"]) >= 2
    assert result["alias_nbytes"] == 0


def test_the_check_reads_hlo():
    hlo = """
ENTRY %main (p: bf16[8,4]) -> bf16[8,4] {
  %p = bf16[8,4]{1,0} parameter(0)
  %slice = bf16[1,4]{1,0} copy(%p)
  %copy.1 = bf16[8,4]{1,0:T(8,128)} copy(%p)
  ROOT %dus = bf16[8,4]{1,0} dynamic-update-slice(%copy.1, %slice)
}
"""
    assert whole_copies(hlo, {32: "cache"}) == ["%copy.1 = bf16[8,4]{1,0:T(8,128)} copy(%p)"]


@functools.cache
def fused(compiler, topology):
    """A forward pass of eight layers, small so that it compiles fast, without and with four saves and four loads."""
    sizes: dict[str, Any] = {
        "num_layers": 8,
        "d_model": 1024,
        "d_ff": 2816,
        "num_tokens": 128,
        "page_shape": (64, 8, 2, 128),
    }
    case = Case(topology, 4, **sizes, num_stripes=4, num_saves=4, num_loads=4, programs=("step", "fused_step"))
    plain, with_copies = compiler.compile([case])
    return plain, with_copies


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_fused_copies_lie_under_the_compute_of_the_layers(compiler, topology):
    _, result = fused(compiler, topology)
    assert result["num_dmas"] == 2 * 4 * 4  # in both directions, four blocks of four stripes
    # The last stripe is complete after the last layer, so three of its four blocks have nothing left to hide under.
    assert result["saved_under_compute"] >= 0.65
    assert result["loaded_under_compute"] == 1.0
    assert result["max_dmas_in_flight"] >= 2


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_fused_copies_take_the_blocks_that_the_budget_counts_and_two_more(compiler, topology):
    plain, result = fused(compiler, topology)
    assert result["temp_nbytes"] - plain["temp_nbytes"] <= (4 + 4 + 2) * result["block_nbytes"]
    assert result["host_alias_nbytes"] == result["segment_nbytes"]
    assert result["host_temp_nbytes"] == 0
    assert result["alias_nbytes"] == result["caches_nbytes"]
    assert result["whole_copies"] == plain["whole_copies"] == []
    assert len(result["collectives"]) == len(plain["collectives"])


def test_what_ties_the_saves_to_the_layers_is_needed(compiler):
    """Without it the compiler puts them all off to the end of the step."""
    sizes: dict[str, Any] = {
        "num_layers": 8,
        "d_model": 1024,
        "d_ff": 2816,
        "num_tokens": 128,
        "page_shape": (64, 8, 2, 128),
    }
    case = Case("v6e:2x2", 4, **sizes, num_stripes=4, num_saves=4, programs=("untied_fused_step",))
    (result,) = compiler.compile([case])
    assert result["saved_under_compute"] < 0.5


def test_the_dmas_of_a_block_are_in_flight_together(compiler):
    """One a stripe; and one at a time where the segment is one array."""
    case = Case("v6e:2x2", 4, page_shape=(64, 8, 2, 128), programs=("direct_save", "direct_load", "chained_save"))
    save, load, chained = compiler.compile([case])
    assert save["num_stripes"] == 8
    assert save["block_nbytes"] == 2 * 2**20
    for result in (save, load):
        assert result["num_dmas"] == result["max_dmas_in_flight"] == 8
        assert result["dma_nbytes"] == 256 * 1024
    assert (chained["num_dmas"], chained["max_dmas_in_flight"]) == (1, 1)
