"""Pages as rows of 128 elements, as on TPU, bit for bit: the same functions on the CPU, told that it is a TPU."""

import dataclasses
import itertools
import math

import jax
import numpy as np
import pytest
from jax.experimental.layout import Layout
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from tests.caches import logical_pages
from tpu_offload.kernels import HostPath, SlotCopier, TransferSpec
from tpu_offload.kernels.pages import read_block, write_block

NUM_LAYERS = 2
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
    ((3, 256), "bfloat16", (1, 0, 2), 65),  # convolution states: 8 rows in a tile, one in the last
    ((3, 1024), "bfloat16", (0, 1, 2), 17),  # the same with few rows: pages of 3 in tiles of 8
    ((4, 32, 32), "float32", (1, 2, 3, 0), 65),  # recurrent states of small heads
]


# The same, split over eight devices along the page's axis 1, or as `axes` says.
SHARDED_CASES = [
    ((16, 8, 2, 64), "bfloat16", (1, 2, 3, 4, 0), 300),
    ((3, 8, 2, 40), "float32", (1, 2, 3, 4, 0), 200),  # padding in each shard's rows
    ((128, 8, 2, 64), "bfloat16", (0, 2, 3, 4, 1), 7),
    ((16, 8, 2, 64), "bfloat16", (0, 1, 2, 3, 4), 7),
    ((3, 8, 1, 64), "bfloat16", (0, 1, 2, 3, 4), 7),
    ((16, 8, 2, 48), "int8", (2, 0, 1, 3, 4), 7),
    ((16, 512), "bfloat16", (0, 1, 2), 7),  # the last axis is split
    ((16, 512), "bfloat16", (1, 2, 0), 140),
    ((5, 8, 9), "uint8", (3, 1, 0, 2), 40),
]
MESHES = [
    (None, None, "model"),
    (None, "data", "model"),
    (None, None, ("model", "data")),
    (None, "model", None, "data"),
]
# Page shape, dtype, order, sharded axes: states of linear attention, as tpu-inference shards them.
STATES = [
    ((3, 1024), "bfloat16", (1, 0, 2), ("data", None, "model")),
    ((3, 1024), "bfloat16", (0, 1, 2), ("data", None, "model")),
    ((8, 128, 128), "float32", (0, 1, 2, 3), ("data", "model", None, None)),
    ((8, 32, 32), "float32", (1, 2, 3, 0), ("data", "model", None, None)),
]


def make(monkeypatch, shape, dtype, order, num_blocks, sharding=None):
    """The spec of such caches on a TPU, and caches with random bits, NaNs among them."""
    rng = np.random.default_rng(3)
    dtype = np.dtype(jax.numpy.dtype(dtype))
    bits = [rng.integers(0, 256, (num_blocks, *shape, dtype.itemsize), np.uint8) for _ in range(NUM_LAYERS)]
    sharding = sharding or SingleDeviceSharding(jax.devices()[0])
    caches = [jax.device_put(b.view(dtype)[..., 0], sharding) for b in bits]
    spec = TransferSpec.from_caches(caches, segment_blocks=4, capacity=4)
    monkeypatch.setattr(TransferSpec, "platform", "tpu")
    spec = dataclasses.replace(spec, cache_layout=Layout(order, ((8, 128),)))
    return spec, caches


def as_bytes(array):
    return np.array(array).view(np.uint8)


def check_round_trips(spec, caches):
    """Blocks go to the pool and into other places. Returns the rows of the last one, which are as documented."""
    num_blocks = caches[0].shape[0]
    pool_sharding = spec.pool_sharding(spec.cache_sharding.memory_kind)
    read = jax.jit(lambda caches, i: read_block(caches, i, spec), out_shardings=pool_sharding)
    write = jax.jit(lambda caches, pages, i: write_block(caches, pages, i, spec))
    before = [as_bytes(cache) for cache in caches]
    for source, target in itertools.pairwise([0, num_blocks - 1, num_blocks // 2, 1, 1]):
        pages = read(caches, np.int32(source))
        assert pages.shape == (1, NUM_LAYERS, *spec.pool_page)
        assert pages.dtype == spec.carrier
        found = as_bytes(logical_pages(np.asarray(pages), spec))
        np.testing.assert_array_equal(found[0], [cache[source] for cache in before])
        caches = write(caches, pages, np.int32(target))
        for cache, expected in zip(caches, before, strict=True):
            assert cache.sharding.is_equivalent_to(spec.cache_sharding, cache.ndim)
            expected[target] = expected[source]
            np.testing.assert_array_equal(as_bytes(cache), expected)
    return np.asarray(pages)


@pytest.mark.parametrize(("shape", "dtype", "order", "num_blocks"), CASES)
def test_a_block_comes_back_and_no_other_is_touched(monkeypatch, shape, dtype, order, num_blocks):
    spec, caches = make(monkeypatch, shape, dtype, order, num_blocks)
    assert spec.flat
    pages = check_round_trips(spec, caches)
    assert pages.shape[-1] == 128
    assert not pages.reshape(NUM_LAYERS, -1)[:, math.prod(shape) :].any()
    if spec.blocks_together > 1:
        check_round_trips(dataclasses.replace(spec, in_turn=True), caches)


@pytest.mark.parametrize(("shape", "dtype", "order", "num_blocks"), SHARDED_CASES)
def test_each_device_copies_its_own_shard(monkeypatch, shape, dtype, order, num_blocks):
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:8]), ("model",)), PartitionSpec(None, None, "model"))
    spec, caches = make(monkeypatch, shape, dtype, order, num_blocks, sharding)
    assert spec.flat
    check_round_trips(dataclasses.replace(spec, in_turn=True), caches)


@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize(
    ("order", "axis_type"), [((1, 2, 3, 4, 0), AxisType.Auto), ((0, 2, 3, 4, 1), AxisType.Explicit)]
)
def test_meshes_of_two_axes_in_any_order_of_devices(monkeypatch, axes, order, axis_type):
    devices = np.array(jax.devices()[:8])[::-1].reshape(2, 4)
    mesh = Mesh(devices, ("data", "model"), axis_types=(axis_type,) * 2)
    spec, caches = make(monkeypatch, (4, 8, 2, 32), "bfloat16", order, 130, NamedSharding(mesh, PartitionSpec(*axes)))
    check_round_trips(spec, caches)


@pytest.mark.parametrize("num_devices", [1, 4])
@pytest.mark.parametrize(("shape", "dtype", "order", "axes"), STATES)
def test_states_whose_row_axis_names_a_mesh_axis_of_one(monkeypatch, shape, dtype, order, axes, num_devices):
    mesh = Mesh(np.array(jax.devices()[:num_devices]).reshape(1, -1), ("data", "model"))
    spec, caches = make(monkeypatch, shape, dtype, order, 9, NamedSharding(mesh, PartitionSpec(*axes)))
    assert spec.carrier == (np.uint32 if dtype == "float32" else np.uint16)
    assert spec.flat is (order != (0, 1, 2, 3))
    check_round_trips(spec, caches)
    check_round_trips(dataclasses.replace(spec, in_turn=True), caches)


@pytest.mark.parametrize("seed", range(16))
def test_any_page_in_any_order(monkeypatch, seed):
    rng = np.random.default_rng(seed)
    num_axes = int(rng.integers(1, 5))
    shape = tuple(int(rng.choice([1, 2, 3, 5, 8, 16, 32, 40, 64, 96, 128, 200])) for _ in range(num_axes))
    while math.prod(shape) > 4_000:
        shape = tuple(max(1, length // 2) for length in shape)
    order = tuple(int(i) for i in rng.permutation(num_axes + 1))
    num_blocks = int(rng.choice([2, 3, 7, 8, 9, 50, 127, 128, 129, 140]))
    dtype = str(rng.choice(["bfloat16", "float32", "int8", "float8_e4m3fn", "uint8", "float16"]))
    spec, caches = make(monkeypatch, shape, dtype, order, num_blocks)
    check_round_trips(dataclasses.replace(spec, in_turn=bool(seed % 2)), caches)


class NoSegments:
    """An arena without segments."""

    def segment(self, segment_id):
        raise AssertionError(segment_id)

    def replace(self, segment_id, segment):
        raise AssertionError(segment_id)


def test_payloads_of_other_orders_and_shards_have_other_formats(monkeypatch):
    devices = jax.devices()[:2]
    orders = [(1, 2, 3, 4, 0), (2, 1, 3, 4, 0)]
    splits = [(None, None, "model"), (None, None, None, "model")]
    formats = set()
    for order, split, of_devices in itertools.product(orders, splits, [devices, devices[::-1]]):
        sharding = NamedSharding(Mesh(np.array(of_devices), ("model",)), PartitionSpec(*split))
        spec, _ = make(monkeypatch, (4, 8, 2, 64), "bfloat16", order, 130, sharding)
        formats.add(SlotCopier(spec, NoSegments(), blocks_per_slot=1, path=HostPath).payload_format)
    assert len(formats) == 8
