"""Caches made with an explicit device layout are copied as they are, and keep it."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout

from tests.caches import PAGE_SHAPE, pointers, random_caches
from tests.kernels.test_copies import Setup, moves
from tpu_offload.errors import LayoutError
from tpu_offload.kernels import DirectCopier, StagedCopier, TransferSpec, reference
from tpu_offload.memory import pinned_zeros
from tpu_offload.worker.arrays import renew

ORDERS = [(1, 2, 3, 4, 0), (0, 2, 1, 3, 4), (4, 3, 2, 1, 0)]


def laid_out(caches, order):
    """The caches in that order of axes, from major to minor, by a program: arrays that can be donated in place."""
    return [jax.jit(lambda x: x.copy(), out_shardings=Format(Layout(order), c.sharding))(c) for c in caches]


def make(path, order, dtype, num_devices):
    setup = Setup(path, dtype, num_devices)
    setup.caches = laid_out(setup.caches, order)
    setup.spec = TransferSpec.from_caches(setup.caches, segment_blocks=10, capacity=6, num_stripes=2)
    if path == "direct":
        setup.copier = DirectCopier(setup.spec, setup.store)
    else:
        setup.copier = StagedCopier(setup.spec, setup.store, allocate=pinned_zeros)
    return setup


@pytest.mark.parametrize("num_devices", [1, 8])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("path", ["direct", "staged"])
def test_they_keep_their_layout_their_place_and_every_bit(path, order, dtype, num_devices):
    setup = make(path, order, dtype, num_devices)
    places_before, formats = [pointers(c) for c in setup.caches], [c.format for c in setup.caches]
    expected = reference.save(setup.segment_bytes(), setup.cache_bytes(), [3], [9])
    setup.save(moves([3], [9]))
    np.testing.assert_array_equal(setup.segment_bytes(), expected)
    loaded = reference.load(setup.cache_bytes(), setup.segment_bytes(), [1], [9])
    setup.load(moves([1], [9]))
    for cache, bytes_expected in zip(setup.cache_bytes(), loaded, strict=True):
        np.testing.assert_array_equal(cache, bytes_expected)
    assert [c.format for c in setup.caches] == formats
    assert [pointers(c) for c in setup.caches] == places_before


def test_row_major_caches_need_no_layout_said():
    caches = laid_out(random_caches(np.random.default_rng(0)), (0, 1, 2, 3, 4))
    spec = TransferSpec.from_caches(caches, segment_blocks=2, capacity=2)
    assert spec.cache_layout is None
    assert spec.cache_structs()[0].sharding == caches[0].sharding


def test_caches_of_one_group_with_two_layouts_are_refused():
    caches = random_caches(np.random.default_rng(0))
    mixed = [caches[0], *laid_out(caches[1:], (1, 2, 3, 4, 0))]
    with pytest.raises(LayoutError, match=r"KV cache 1 has the layout .* in device memory, cache 0 .*; expected one"):
        TransferSpec.from_caches(mixed, segment_blocks=2, capacity=2)


def test_new_caches_have_the_layout_of_the_lost_ones():
    caches = laid_out(random_caches(np.random.default_rng(0)), (1, 2, 3, 4, 0))
    layouts = [cache.format.layout for cache in caches]
    for cache in caches:
        cache.delete()
    renewed: Any
    for renewed in renew(caches, layouts=layouts):
        assert renewed.format.layout.major_to_minor == (1, 2, 3, 4, 0)
        assert renewed.shape == (12, *PAGE_SHAPE)
        assert not np.ascontiguousarray(np.asarray(renewed)).view(np.uint8).any()
