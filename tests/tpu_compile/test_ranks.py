"""Copies with data-parallel ranks: one program for all, each device on its own, within two blocks of HBM, in place.

To and from storage they are of one rank, or on several hosts of one process, for the devices of that one alone.
"""

import functools
import importlib.util
from typing import Any

import pytest

from tests.grids import few
from tests.tpu_compile.harness import SLOTS_BY_HBM, Case

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu, which has the TPU compiler, is not installed"
)

ATTENTION: dict[str, Any] = {"page_shape": (128, 8, 2, 128), "num_layers": 32}
# Of DeepSeek: 61 layers, pages that are not split, so that each device is a rank.
LATENT: dict[str, Any] = {"page_shape": (64, 2, 640), "num_layers": 61}
LATENT_TURNED: dict[str, Any] = {"page_shape": (576, 128), "num_layers": 61}
STATE: dict[str, Any] = {
    "page_shape": (32, 128, 128),
    "num_layers": 12,
    "dtype": "float32",
    "split_axis": 1,
    "num_blocks": 65,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "v5e, attention": ("v5e:2x2", {"ranks": 2, "tp": 2, **ATTENTION}),
    "v5e, latent": ("v5e:2x2", {"ranks": 4, "tp": 1, **LATENT}),
    "v5p, attention": ("v5p:2x2x1", {"ranks": 2, "tp": 2, **ATTENTION}),
    "v5p, latent": ("v5p:2x2x1", {"ranks": 4, "tp": 1, **LATENT}),
    "v6e, attention": ("v6e:2x2", {"ranks": 2, "tp": 2, **ATTENTION}),
    "v6e, attention in float8": ("v6e:2x2", {"ranks": 4, "tp": 1, "dtype": "float8_e4m3fn", **ATTENTION}),
    "v6e, latent, turned": ("v6e:2x2", {"ranks": 4, "tp": 1, **LATENT_TURNED}),
    "v6e, state": ("v6e:2x2", {"ranks": 2, "tp": 2, **STATE}),
    "tpu7x, attention": ("tpu7x:2x2x1", {"ranks": 4, "tp": 2, **ATTENTION}),
    "tpu7x, latent": ("tpu7x:2x2x1", {"ranks": 8, "tp": 1, **LATENT}),
    "tpu7x, state": ("tpu7x:2x2x1", {"ranks": 4, "tp": 2, **STATE}),
}
PROGRAMS = ("direct_save", "direct_load")


@functools.cache
def measured(compiler):
    given: dict[str, Any] = {"num_blocks": 256, "programs": PROGRAMS}
    cases = [Case(topology, **given | shape) for topology, shape in CASES.values()]
    results = iter(compiler.compile(cases))
    return {name: (next(results), next(results)) for name in CASES}


@pytest.fixture(params=CASES)
def copies(request, compiler):
    return measured(compiler)[request.param]


def test_they_take_at_most_two_blocks_of_hbm(copies):
    for result in copies:
        assert result["temp_nbytes"] <= result["bound_nbytes"], result["program"]
        assert result["host_temp_nbytes"] == 0, result["program"]


def test_they_are_updated_in_place_and_no_device_talks_to_another(copies):
    save, load = copies
    assert load["alias_nbytes"] >= load["caches_nbytes"]
    assert load["output_nbytes"] <= load["alias_nbytes"] + 4096
    assert save["host_alias_nbytes"] >= save["segment_nbytes"]
    assert save["output_nbytes"] <= 4096, "the token"
    for result in copies:
        assert result["whole_copies"] == [], result["program"]
        assert result["collectives"] == [], result["program"]


def test_the_stripes_of_a_block_are_in_flight_together(copies):
    for result in copies:
        assert result["num_dmas"] == result["max_dmas_in_flight"] == result["num_stripes"], result["program"]


SLOTS = ("read_slot", "write_slot", *SLOTS_BY_HBM)
SMALL = {"page_shape": (16, 8, 2, 128), "bucket": 4}  # of larger blocks the way through HBM takes more than two
# By name: topology, devices of one process and rank, and the rest.
PARTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "v5e, attention of a rank": ("v5e:2x2", 2, {"ranks": 2, "tp": 2, **SMALL}),
    "v5e, a host of four": ("v5e:4x4", 4, {"tp": 16, **SMALL, "page_shape": (16, 16, 2, 128)}),
    "v5p, latent of a rank": ("v5p:2x2x1", 1, {"ranks": 4, "tp": 1, **LATENT, "bucket": 2}),
    "v5p, a host of two": ("v5p:2x2x2", 4, {"tp": 8, **SMALL}),
    "v6e, latent of a rank, turned": ("v6e:2x2", 1, {"ranks": 4, "tp": 1, **LATENT_TURNED, "bucket": 1}),
    "v6e, states of a rank": ("v6e:2x2", 2, {"ranks": 2, "tp": 2, **STATE, "bucket": 1}),
    "v6e, a host of two": ("v6e:2x4", 4, {"tp": 8, **SMALL}),
    "tpu7x, float8 of a rank": ("tpu7x:2x2x1", 2, {"ranks": 4, "tp": 2, **SMALL, "dtype": "float8_e4m3fn"}),
    "tpu7x, latent of a rank": ("tpu7x:2x2x1", 1, {"ranks": 8, "tp": 1, **LATENT, "bucket": 2}),
    "tpu7x, states of a host": ("tpu7x:2x2x2", 8, {"tp": 16, **STATE, "bucket": 1}),
}


@functools.cache
def measured_parts(compiler):
    given: dict[str, Any] = {"num_blocks": 64, "programs": SLOTS}
    cases = [Case(topology, part=part, **given | shape) for topology, part, shape in PARTS.values()]
    results = iter(compiler.compile(cases))
    return {name: [next(results) for _ in SLOTS] for name in PARTS}


@pytest.mark.parametrize("name", few(PARTS, first=3))
def test_slots_of_one_rank_or_host_are_copied_by_its_devices_alone(compiler, name):
    """Within one block of HBM, or two, in place, and nothing is copied whole."""
    for result in measured_parts(compiler)[name]:
        assert result["temp_nbytes"] <= result["bound_nbytes"], result["program"]
        assert result["host_temp_nbytes"] == 0, result["program"]
        assert result["collectives"] == [], result["program"]
        is_write = result["program"].startswith("write")
        assert result["host_alias_nbytes"] == (result["host_output_nbytes"] if is_write else 0)
        assert result["host_output_nbytes"] == result["segment_nbytes" if is_write else "staging_nbytes"]
