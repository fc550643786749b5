"""Copies with data-parallel ranks: one program for all, each device on its own, within two blocks of HBM, in place."""

import functools
import importlib.util
from typing import Any

import pytest

from tests.tpu_compile.harness import Case

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
