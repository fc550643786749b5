"""Caches and segments full of random bytes, for tests of copies: every bit pattern, NaN payloads included."""

import math

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

DTYPES = ("bfloat16", "float32", "float16", "int8", "float8_e4m3fn", "float8_e5m2")
PAGE_SHAPE = (4, 8, 2, 6)  # split over devices along its axis 1
NUM_LAYERS = 3


def cache_sharding(num_devices):
    devices = jax.devices()[:num_devices]
    if num_devices == 1:
        return SingleDeviceSharding(devices[0])
    return NamedSharding(Mesh(np.array(devices), ("model",)), PartitionSpec(None, None, "model"))


def random_array(rng, shape, dtype):
    """Random bytes at an address that is no multiple of 64: jax would share aligned memory, and not donate it."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(nbytes + 128, np.uint8)
    start = -raw.ctypes.data % 64 + 16
    raw[start : start + nbytes] = rng.integers(0, 256, nbytes, dtype=np.uint8)
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def random_caches(rng, *, dtype="bfloat16", num_devices=1, num_blocks=12, num_layers=NUM_LAYERS, page_shape=PAGE_SHAPE):
    sharding = cache_sharding(num_devices)
    return [jax.device_put(random_array(rng, (num_blocks, *page_shape), dtype), sharding) for _ in range(num_layers)]


def random_like(rng, struct):
    """A random array of the shape, type and sharding of `struct` that can be donated in place."""
    return jax.device_put(random_array(rng, struct.shape, struct.dtype), struct.sharding)


def pointers(array):
    """Where the array's shards are in memory."""
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


def logical_pages(pool, spec):
    """The pages in a pool as the caches have them, however `kernels.pages` stores them; written without its code.

    Args:
      pool: np carrier[n, layers, *pool_page].
      spec: of the caches.
    Returns:
      np carrier[n, layers, *page_shape].
    """
    if not spec.flat:
        return pool
    pages = np.zeros((*pool.shape[:2], *spec.page_shape), pool.dtype)
    order = [axis - 1 for axis in spec.cache_layout.major_to_minor if axis]
    kind = spec.cache_sharding.memory_kind or "device"
    rows_of = spec.pool_sharding(kind).devices_indices_map(pool.shape)
    for device, index in spec.block_sharding(kind).devices_indices_map(pages.shape).items():
        shape = pages[index].shape[2:]
        in_memory = [shape[axis] for axis in order]
        rows = pool[rows_of[device]].reshape(*pool.shape[:2], -1)[..., : math.prod(shape)]
        width, height = in_memory[-1], math.prod(in_memory[:-1])
        if spec.blocks_together == 1 and width < 128 and 128 % width == 0 and height % (128 // width) == 0:
            side_by_side = rows.reshape(*pool.shape[:2], -1, 128)
            rows = np.concatenate(np.split(side_by_side, 128 // width, axis=-1), axis=2)
        pages[index] = rows.reshape(*pool.shape[:2], *in_memory).transpose(0, 1, *(2 + i for i in np.argsort(order)))
    return pages
