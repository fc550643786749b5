"""Pages as rows of 128 elements, as on TPU, bit for bit: the same functions on the CPU, told that it is a TPU."""

import dataclasses
import itertools
import math

import jax
import numpy as np
import pytest
from jax.experimental.layout import Layout

from tpu_offload.kernels import TransferSpec
from tpu_offload.kernels.pages import read_block, write_block

NUM_LAYERS = 3
# Page shape, dtype, order of the caches' axes from major to minor, number of blocks.
CASES = [
    ((16, 2, 2, 64), "bfloat16", (1, 2, 3, 4, 0), 300),  # 128 blocks in a tile, and fewer at the end
    ((16, 2, 2, 64), "bfloat16", (1, 2, 3, 4, 0), 50),  # fewer than 128
    ((16, 3, 40), "float32", (1, 2, 3, 0), 200),
    ((16, 4, 4, 64), "int8", (1, 2, 3, 4, 0), 150),
    ((3, 1000), "float32", (1, 0, 2), 21),  # 8 blocks in a tile
    ((3, 100), "uint16", (1, 2, 0), 140),
    ((128, 2, 2, 64), "bfloat16", (0, 2, 3, 4, 1), 7),  # tokens in the lanes
    ((128, 2, 96), "int8", (0, 2, 3, 1), 7),
    ((64, 576), "bfloat16", (0, 2, 1), 7),
    ((16, 8, 2, 64), "bfloat16", (0, 1, 2, 3, 4), 7),  # half of the lanes are padding
    ((16, 1, 32), "float32", (0, 1, 2, 3), 7),  # three quarters are
    ((3, 1, 64), "float32", (0, 1, 2, 3), 7),  # an odd number of rows
    ((16, 2, 2, 48), "bfloat16", (0, 1, 2, 3, 4), 7),
    ((16, 8, 128), "bfloat16", (2, 0, 1, 3), 7),  # heads outermost
    ((5, 7, 9), "uint8", (3, 1, 0, 2), 40),
]


def make(monkeypatch, shape, dtype, order, num_blocks):
    """The spec of such caches on a TPU, and caches with random bits, NaNs among them."""
    rng = np.random.default_rng(3)
    dtype = np.dtype(jax.numpy.dtype(dtype))
    bits = [rng.integers(0, 256, (num_blocks, *shape, dtype.itemsize), np.uint8) for _ in range(NUM_LAYERS)]
    caches = [jax.numpy.asarray(b.view(dtype)[..., 0]) for b in bits]
    spec = TransferSpec.from_caches(caches, segment_blocks=4, capacity=4)
    monkeypatch.setattr(TransferSpec, "platform", "tpu")
    spec = dataclasses.replace(spec, cache_layout=Layout(order, ((8, 128),)))
    assert spec.flat
    return spec, caches


def as_bytes(array):
    return np.array(array).view(np.uint8)


@pytest.mark.parametrize("in_turn", [False, True])
@pytest.mark.parametrize(("shape", "dtype", "order", "num_blocks"), CASES)
def test_a_block_comes_back_and_no_other_is_touched(monkeypatch, shape, dtype, order, num_blocks, in_turn):
    spec, caches = make(monkeypatch, shape, dtype, order, num_blocks)
    spec = dataclasses.replace(spec, in_turn=in_turn)
    read = jax.jit(lambda caches, i: read_block(caches, i, spec))
    write = jax.jit(lambda caches, pages, i: write_block(caches, pages, i, spec))
    before = [as_bytes(cache) for cache in caches]
    for source, target in itertools.pairwise([0, num_blocks - 1, num_blocks // 2, 1, 1]):
        pages = read(caches, np.int32(source))
        assert pages.shape == (1, NUM_LAYERS, *spec.pool_page)
        assert pages.dtype == spec.carrier
        caches = write(caches, pages, np.int32(target))
        for cache, expected in zip(caches, before, strict=True):
            expected[target] = expected[source]
            np.testing.assert_array_equal(as_bytes(cache), expected)


@pytest.mark.parametrize(("shape", "dtype", "order", "num_blocks"), CASES)
def test_rows_hold_each_byte_of_the_page_and_zeros(monkeypatch, shape, dtype, order, num_blocks):
    spec, caches = make(monkeypatch, shape, dtype, order, num_blocks)
    pages = np.asarray(read_block(caches, np.int32(1), spec))
    assert pages.shape[-1] == 128
    for i, cache in enumerate(caches):
        page = np.asarray(cache[1]).view(pages.dtype).ravel()
        rows = pages[0, i].ravel()
        assert not rows[page.size :].any()
        np.testing.assert_array_equal(np.sort(rows[: page.size]), np.sort(page))


def test_a_page_is_in_the_order_of_the_memory(monkeypatch):
    spec, caches = make(monkeypatch, (128, 2, 3), "uint16", (0, 2, 3, 1), 4)
    rows = np.asarray(read_block(caches, np.int32(2), spec))[0, 0].reshape(-1, 128)
    np.testing.assert_array_equal(rows[:6], np.asarray(caches[0])[2].transpose(1, 2, 0).reshape(6, 128))


def test_a_padded_page_has_its_halves_side_by_side(monkeypatch):
    spec, caches = make(monkeypatch, (8, 64), "uint16", (0, 1, 2), 4)
    rows = np.asarray(read_block(caches, np.int32(2), spec))[0, 0].reshape(-1, 128)
    page = np.asarray(caches[0])[2]
    np.testing.assert_array_equal(rows[: math.prod(page.shape) // 128], np.concatenate([page[:4], page[4:]], axis=1))
