"""Slots to and from storage: the HBM that copies take, and that they are in place.

Chunks through HBM, for every page shape of the other tests; those by the host's CPU are in `test_tpu_compile`. Rows of
states by both paths.
"""

import dataclasses
import functools
import importlib.util

import pytest

from tests.tpu_compile import states, test_page_shapes, test_tpu_compile
from tests.tpu_compile.harness import SLOTS_BY_HBM, Case
from tests.tpu_compile.page_shapes import PAGES, case

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu, which has the TPU compiler, is not installed"
)

SHAPES = {pages.name: pages for pages in PAGES}
CASES = {
    f"{topology} {dtype} TP {tp}": Case(
        topology, tp, dtype=dtype, page_shape=test_tpu_compile.PAGES[dtype], bucket=16, programs=SLOTS_BY_HBM
    )
    for topology, tp, dtype in test_tpu_compile.CASES
} | {
    f"{topology} {name} TP {tp}": case(SHAPES[name], topology, tp, num_blocks=num_blocks, programs=SLOTS_BY_HBM)
    for topology, name, tp, num_blocks, _ in test_page_shapes.CASES
}


@functools.cache
def measured(compiler):
    results = iter(compiler.compile(list(CASES.values())))
    return {name: (next(results), next(results)) for name in CASES}


@pytest.fixture(params=CASES)
def copies(request, compiler):
    """The figures of the read and of the write."""
    return measured(compiler)[request.param]


def test_they_take_at_most_two_blocks_of_hbm_and_half_a_mib(copies):
    """However many blocks a chunk has: 16 or 5 here. With blocks of at least 1 MiB it is less than one and 0.7 MiB."""
    for result in copies:
        block = result["block_nbytes"]
        most = block + 700 * 1024 if block >= 2**20 else 2 * block + 512 * 1024
        assert result["temp_nbytes"] <= most, result["program"]
        assert result["temp_nbytes"] <= result["bound_nbytes"], "the library would refuse it"
        assert result["host_temp_nbytes"] == 0, result["program"]


def test_segments_are_updated_in_place_and_nothing_is_copied_whole(copies):
    read, write = copies
    assert write["host_alias_nbytes"] == write["host_output_nbytes"] > 0
    assert read["host_alias_nbytes"] == 0
    if read["dtype"] != "int4":  # whose size in memory is half of what numpy says
        assert read["host_output_nbytes"] == read["staging_nbytes"], "a chunk of as many blocks"
        assert write["host_output_nbytes"] == write["segment_nbytes"]
    for result in copies:
        assert result["output_nbytes"] <= 4096, "the token"
        assert result["whole_copies"] == [], result["program"]
        assert result["collectives"] == [], result["program"]


def test_the_stripes_of_a_block_are_in_flight_together(copies):
    for result in copies:
        # To the device and back; the compiler rolls the first block out of some loops.
        assert result["num_dmas"] >= 2 * result["num_stripes"], result["program"]
        assert result["max_dmas_in_flight"] >= result["num_stripes"], result["program"]


# Rows of states. Three rows are what a path is tried with at the start.
ROWS = ("read_slot", "write_slot", *SLOTS_BY_HBM)
STATES = [
    ("v5e:2x2", "Qwen3-Next-80B", 4, 257, states.SEGMENT_ROWS),
    ("v5p:2x2x1", "Qwen3.5-4B", 1, 17, states.SEGMENT_ROWS),
    ("v6e:2x2", "Qwen3-Next-80B", 4, 513, 3),
    ("tpu7x:2x2x1", "Qwen3.5-397B", 8, 257, states.SEGMENT_ROWS),
]
ROW_CASES = {
    f"{topology} {model} TP {tp} {array}": dataclasses.replace(
        states.case(topology, model, tp, array, num_rows=num_rows),
        segment_blocks=segment_rows,
        bucket=1,
        programs=ROWS,
    )
    for topology, model, tp, num_rows, segment_rows in STATES
    for array in states.ARRAYS
}


@functools.cache
def measured_rows(compiler):
    results = iter(compiler.compile(list(ROW_CASES.values())))
    return {name: {program: next(results) for program in ROWS} for name in ROW_CASES}


@pytest.fixture(params=ROW_CASES)
def rows(request, compiler):
    """The figures of the four programs."""
    return measured_rows(compiler)[request.param]


def test_rows_of_states_take_at_most_two_rows_of_hbm(rows):
    """Through HBM one row and half a MiB, which is more than a small row; by the host's CPU none."""
    for program, result in rows.items():
        row, apart = result["block_nbytes"], 512 * 1024
        most = row + min(apart, max(row, 128 * 1024)) if program in SLOTS_BY_HBM else 128 * 1024
        assert result["temp_nbytes"] <= most, program
        assert result["temp_nbytes"] <= result["bound_nbytes"], "the library would refuse it"
        assert result["host_temp_nbytes"] == 0, program


def test_rows_of_states_are_written_in_place_and_no_segment_is_copied(rows):
    for program, result in rows.items():
        is_write = program.startswith("write")
        assert result["host_output_nbytes"] >= result["segment_nbytes" if is_write else "block_nbytes"], program
        assert result["host_alias_nbytes"] == (result["host_output_nbytes"] if is_write else 0), program
        assert result["output_nbytes"] <= 4096, "the token"
        # A copy of the row itself is one of a whole staging array here, since that is as large.
        assert [line for line in result["whole_copies"] if "[1," not in line] == [], program
        assert result["collectives"] == [], program


@pytest.mark.parametrize("tp", [2, 4])
def test_large_blocks_do_not_go_through_hbm(compiler, tp):
    """The read takes more than its bound, so the library copies them by the host's CPU."""
    case = Case("v6e:2x2", tp, page_shape=(128, 8, 2, 128), bucket=4, programs=("read_slot_hbm", "read_slot"))
    by_hbm, by_host = compiler.compile([case])
    assert 2.0 < by_hbm["temp_nbytes"] / by_hbm["block_nbytes"] < 2.5
    assert by_hbm["temp_nbytes"] > by_hbm["bound_nbytes"]
    assert by_host["temp_nbytes"] < by_host["bound_nbytes"]
