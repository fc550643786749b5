"""Copies inside a step against the slow reference, bit for bit, and how whole chunks are taken from moves."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.caches import DTYPES, pointers, random_caches, random_like
from tests.grids import few
from tpu_offload.kernels import (
    BlockMoves,
    FusedCopies,
    TransferSpec,
    fused_sizes,
    make_fused_step,
    reference,
    take_chunks,
)

SEGMENT_BLOCKS = 12


def moves(block_ids, host_block_ids):
    return BlockMoves(
        np.zeros(len(block_ids), np.int64), np.array(block_ids, np.int32), np.array(host_block_ids, np.int32)
    )


@functools.partial(jax.jit, donate_argnums=(1, 2))
def step(x, caches, segment, inputs):
    """A model whose layers add one to `x` and copy the first block of their caches to the last."""
    copies = FusedCopies(segment, inputs)
    out = []
    for layer, cache in enumerate(caches):
        x = jax.tree.map(lambda leaf: leaf + 1, x)
        bits = jax.lax.bitcast_convert_type(cache, f"uint{8 * cache.dtype.itemsize}")  # NaN payloads and all
        bits = jax.lax.dynamic_update_slice_in_dim(bits, bits[:1], bits.shape[0] - 1, 0)  # this step's KV
        cache = jax.lax.bitcast_convert_type(bits, cache.dtype)
        x, cache = copies.after_layer(layer, x, cache)
        out.append(cache)
    return x, out, copies.finish()


def segment_bytes(segment):
    return np.concatenate([reference.as_bytes(stripe) for stripe in segment], axis=1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_devices", "num_stripes", "blocks_per_chunk"), few([(1, 1, 1), (8, 3, 2), (1, 2, 3)], (8, 3, 2))
)
def test_bits_survive_and_nothing_else_changes(dtype, num_devices, num_stripes, blocks_per_chunk):
    rng = np.random.default_rng(1)
    caches = random_caches(rng, dtype=dtype, num_devices=num_devices, num_layers=4)
    spec = TransferSpec.from_caches(caches, segment_blocks=SEGMENT_BLOCKS, capacity=12, num_stripes=num_stripes)
    target, source = ([random_like(rng, struct) for struct in spec.segment_structs()] for _ in range(2))
    # The last block is written by this very step; blocks 0 to 5 take what is loaded.
    save_ids, save_places = [11, 9, 7, 10, 8, 6], [6, 7, 8, 0, 1, 2]
    load_ids, load_places = [3, 0, 5, 1, 2, 4], [3, 4, 5, 9, 10, 11]
    before = [reference.as_bytes(cache) for cache in caches]
    for cache in before:
        cache[-1] = cache[0]
    expected_target = reference.save(segment_bytes(target), before, save_ids, save_places)
    expected_caches = reference.load(before, segment_bytes(source), load_ids, load_places)
    if blocks_per_chunk == 2:  # six positions that are three chunks of two
        save_places = [6, 7, 8, 9, 0, 1]
        load_places = [2, 3, 4, 5, 10, 11]
        expected_target = reference.save(segment_bytes(target), before, save_ids, save_places)
        expected_caches = reference.load(before, segment_bytes(source), load_ids, load_places)
    fused = make_fused_step(
        spec,
        blocks_per_chunk=blocks_per_chunk,
        save=(target, moves(save_ids, save_places)),
        load=(source, moves(load_ids, load_places)),
    )
    x, caches, outcome = step({"a": jnp.arange(3.0)}, caches, *fused)
    np.testing.assert_array_equal(x["a"], np.arange(3.0) + 4)
    np.testing.assert_array_equal(segment_bytes(outcome.segment), expected_target)
    for cache, expected in zip(caches, expected_caches, strict=True):
        np.testing.assert_array_equal(reference.as_bytes(cache), expected)
    assert (int(outcome.save_token), int(outcome.load_token)) == (6, 6)
    assert {stripe.sharding.memory_kind for stripe in outcome.segment} == {"pinned_host"}


@pytest.mark.parametrize("num_devices", [1, 8])
def test_segment_and_caches_are_updated_in_place(num_devices):
    # Nothing is read before: an array that has been seen by numpy cannot be donated.
    rng = np.random.default_rng(1)
    caches = random_caches(rng, num_devices=num_devices)
    spec = TransferSpec.from_caches(caches, segment_blocks=SEGMENT_BLOCKS, capacity=12, num_stripes=2)
    target, source = ([random_like(rng, struct) for struct in spec.segment_structs()] for _ in range(2))
    at = [pointers(array) for array in (*target, *caches)]
    save, load = (target, moves([0, 1], [3, 4])), (source, moves([2, 3], [5, 6]))
    _, caches, outcome = step(0.0, caches, *make_fused_step(spec, blocks_per_chunk=1, save=save, load=load))
    assert [pointers(array) for array in (*outcome.segment, *caches)] == at


def test_nothing_to_copy_hands_everything_through():
    caches = random_caches(np.random.default_rng(1))
    before = [reference.as_bytes(cache) for cache in caches]
    copies = FusedCopies((), None)
    for layer, cache in enumerate(caches):
        x, after = copies.after_layer(layer, "x", cache)
        assert x == "x"
        assert after is cache
    assert copies.finish() is None
    for cache, expected in zip(caches, before, strict=True):
        np.testing.assert_array_equal(reference.as_bytes(cache), expected)


def test_a_layer_that_is_not_there_is_one_clear_error():
    caches = random_caches(np.random.default_rng(1))
    spec = TransferSpec.from_caches(caches, segment_blocks=4, capacity=4)
    fused = make_fused_step(spec, blocks_per_chunk=1, save=([jnp.zeros(1)], moves([0], [0])))
    with pytest.raises(ValueError, match="layer 3; expected 0 to 2"):
        FusedCopies(*fused).after_layer(3, 0, caches[0])


@given(st.data(), st.integers(1, 4), st.sets(st.integers(1, 6)))
def test_take_chunks(data, blocks_per_chunk, sizes):
    """Against a slow search: whole chunks in order, as many as the largest size that they fill."""
    pieces = data.draw(st.lists(st.tuples(st.integers(0, 7), st.booleans()), max_size=8, unique_by=lambda p: p[0]))
    places: list[Any] = []
    for chunk, whole in pieces:
        some = data.draw(st.integers(0, blocks_per_chunk - 1))
        places += range(chunk * blocks_per_chunk, chunk * blocks_per_chunk + (blocks_per_chunk if whole else some))
    given_moves = moves(range(100, 100 + len(places)), places)
    runs, rest = take_chunks(given_moves, blocks_per_chunk=blocks_per_chunk, sizes=tuple(sorted(sizes)))
    num_whole = sum(whole for _, whole in pieces)
    fitting = [size for size in sizes if size <= num_whole]
    assert len(runs) == max(fitting, default=0) * blocks_per_chunk
    for start in range(0, len(runs), blocks_per_chunk):
        run = runs.host_block_ids[start : start + blocks_per_chunk].tolist()
        assert run[0] % blocks_per_chunk == 0
        assert run == list(range(run[0], run[0] + blocks_per_chunk))
    pairs = list(zip(given_moves.block_ids.tolist(), given_moves.host_block_ids.tolist(), strict=True))
    taken = list(zip(runs.block_ids.tolist(), runs.host_block_ids.tolist(), strict=True))
    left = list(zip(rest.block_ids.tolist(), rest.host_block_ids.tolist(), strict=True))
    assert sorted(taken + left) == sorted(pairs)
    assert left == [pair for pair in pairs if pair not in taken]


def test_fused_sizes():
    assert fused_sizes(128, blocks_per_chunk=1) == (8,)
    assert fused_sizes(5, blocks_per_chunk=1) == (5,)
    assert fused_sizes(128, blocks_per_chunk=32) == (4,)
    assert fused_sizes(3, blocks_per_chunk=4) == ()
    assert fused_sizes(64, blocks_per_chunk=4, buckets=(1, 2, 4, 8, 16, 128)) == (1, 2, 4)
