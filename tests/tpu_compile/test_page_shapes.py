"""Copies of caches of every page shape within the bound, whatever layout the TPU gives them.

A part of the table in `page_shapes`; `benchmarks/bench_tpu_compile.py --page-shapes` compiles all of it.
"""

import functools
import importlib.util

import pytest

from tests.grids import few
from tests.tpu_compile.harness import ALL_PROGRAMS
from tests.tpu_compile.page_shapes import PAGES, case

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu, which has the TPU compiler, is not installed"
)

DIRECT = ("direct_save", "direct_load")
# Topology, name in the table, devices, blocks in the caches, programs.
CASES = [
    ("v6e:2x2", "head 64", 1, 1000, ALL_PROGRAMS),
    ("v6e:2x2", "head 64", 4, 20_000, DIRECT),
    ("v6e:2x2", "head 192", 1, 520, DIRECT),
    ("v6e:2x2", "latent 576", 1, 520, ALL_PROGRAMS),
    ("v6e:2x2", "head 64, int4", 1, 100, DIRECT),
    ("v6e:2x2", "[N, block, heads, 128], float8", 1, 520, DIRECT),
    ("v6e:2x2", "head 64, row-major", 1, 520, DIRECT),
    ("v6e:2x2", "head 64, row-major, blocks of 128", 1, 2000, DIRECT),
    ("v6e:2x2", "head 64, blocks of 128", 1, 2000, ALL_PROGRAMS),
    ("v6e:2x2", "latent 576, blocks of 128", 1, 520, DIRECT),
    ("v6e:2x2", "head 64, blocks of 32", 1, 520, DIRECT),
    ("v6e:2x2", "head 32, as replay's model", 1, 512, ALL_PROGRAMS),
    ("v5e:2x2", "head 64, float8", 1, 520, ALL_PROGRAMS),
    ("v5e:2x2", "vLLM-TPU, convolution state", 1, 100, DIRECT),
    ("v5p:2x2x1", "[N, block, heads, 64]", 1, 20_000, ALL_PROGRAMS),
    ("v5p:2x2x1", "[N, everything]", 1, 520, DIRECT),
    ("v5p:2x2x1", "head 64", 1, 520, DIRECT),
    ("v5p:2x2x1", "head 64, int8", 1, 520, DIRECT),
    ("v5p:2x2x1", "head 64, float8, row-major", 1, 520, DIRECT),
    ("v5p:2x2x1", "latent 576", 1, 520, DIRECT),
    ("v5p:2x2x1", "head 96, blocks of 128", 1, 2000, DIRECT),
    ("v5p:2x2x1", "head 64, float32, blocks of 128", 1, 2000, DIRECT),
    ("tpu7x:2x2x1", "vLLM-TPU, Gemma-4's head 512", 4, 1000, DIRECT),
    ("tpu7x:2x2x1", "head 96", 4, 1000, DIRECT),
    ("tpu7x:2x2x1", "state of 64 x 64", 1, 520, ("direct_load",)),  # written in turn
    ("tpu7x:2x2x1", "latent 576, row-major", 1, 520, DIRECT),
]
QUICK = CASES[3], CASES[12], CASES[14], CASES[23]  # one for each chip


cases_of_pages = pytest.mark.parametrize(
    "which", few(CASES, *QUICK, unpack=False), ids=lambda which: f"{which[0]} {which[1]} TP {which[2]}"
)


@functools.cache
def measured(compiler, which):
    topology, name, tp, num_blocks, programs = which
    (pages,) = (pages for pages in PAGES if pages.name == name)
    return compiler.compile([case(pages, topology, tp, num_blocks=num_blocks, programs=programs)])


@cases_of_pages
def test_copies_stay_within_their_bound(compiler, which):
    for result in measured(compiler, which):
        name = result["program"]
        assert result["temp_nbytes"] <= result["bound_nbytes"], name
        assert result["host_temp_nbytes"] == 0, name
        assert result["collectives"] == [], name


@cases_of_pages
def test_what_is_donated_is_updated_in_place(compiler, which):
    for result in measured(compiler, which):
        if result["program"] in ("direct_load", "scatter"):  # in tiles, which may be padded
            assert result["alias_nbytes"] >= result["caches_nbytes"] * which_bits(which)
            assert result["output_nbytes"] <= result["alias_nbytes"] + 4096
        if result["program"] in ("direct_save", "land"):
            assert result["host_alias_nbytes"] >= result["segment_nbytes"] * which_bits(which)
            assert result["output_nbytes"] <= 4096


def which_bits(which):
    """Bytes of an element in HBM for each that numpy counts: two int4 share one."""
    return 0.5 if "int4" in which[1] else 1


def test_every_shape_has_a_name_of_its_own():
    assert len({pages.name for pages in PAGES}) == len(PAGES)
