"""The KV caches of one process of the rig: global arrays, a forward pass with a collective, comparison of all bytes."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.multiprocess.messages import BLOCK_SIZE, MAX_WRITES, NUM_LAYERS

_DTYPE = np.dtype(ml_dtypes.bfloat16)
_HEAD_SHAPE = 2, 8
_GARBAGE = np.uint16(0x5555)

Array = np.ndarray[Any, Any]


class Device:
    """The devices of all processes, and the model on them.

    KV is random bytes from a seed. If the caches are lost on any process, a step computes garbage on all of them, as a
    real forward pass would.
    """

    def __init__(self) -> None:
        devices = np.array(jax.devices())
        self.page_shape = BLOCK_SIZE, len(devices), *_HEAD_SHAPE
        self._mesh = Mesh(devices, ("model",))
        self._cache_sharding = NamedSharding(self._mesh, P(None, None, "model"))
        self._everywhere = NamedSharding(self._mesh, P())
        self._of_devices = NamedSharding(self._mesh, P("model"))
        self._forward = jax.jit(
            _forward,
            donate_argnums=0,
            out_shardings=([self._cache_sharding] * NUM_LAYERS, self._everywhere),
        )

    @functools.lru_cache(maxsize=512)  # noqa: B019  (one instance per process)
    def content(self, seed: int) -> Array:
        """The KV of one block as bits of bfloat16: u16[num_layers, *page_shape]."""
        values = np.random.Generator(np.random.PCG64(seed)).integers(
            0, 2**16, (NUM_LAYERS, *self.page_shape), dtype=np.uint16
        )
        values.setflags(write=False)
        return values

    def make_caches(self, num_blocks: int, *, mixed: bool = False) -> list[jax.Array]:
        """Caches with arbitrary bytes in every block; `mixed`: with pages of two shapes, in two page groups."""
        base = np.stack([self.content(10**6 + i) for i in range(num_blocks)], 1).view(_DTYPE)
        shape = num_blocks, *self.page_shape
        merged = *shape[:3], shape[3] * shape[4]
        layers = [layer.reshape(merged if mixed and i % 2 else shape) for i, layer in enumerate(base)]
        return [
            jax.make_array_from_callback(layer.shape, self._cache_sharding, lambda i, layer=layer: layer[i])  # type: ignore[misc]
            for layer in layers
        ]

    def renew(self, caches: Sequence[jax.Array]) -> list[jax.Array]:
        """Replaces the caches by zeros on this process, without communication."""
        for cache in caches:
            if not cache.is_deleted():
                cache.delete()
        renewed: list[jax.Array] = []
        for shape in [cache.shape for cache in caches]:
            zeros = np.zeros(self._cache_sharding.shard_shape(shape), _DTYPE)
            shards = [jax.device_put(zeros, device) for device in jax.local_devices()]
            renewed.append(jax.make_array_from_single_device_arrays(shape, self._cache_sharding, shards))
        return renewed

    def forward(
        self, caches: list[jax.Array], writes: Mapping[int, int], *, garbage: bool
    ) -> tuple[list[jax.Array], bool]:
        """Writes the KV of seeds into blocks, or garbage if any process requests it; returns whether one did."""
        ids = np.zeros(MAX_WRITES, np.int32)
        ids[: len(writes)] = list(writes)
        data = np.zeros((MAX_WRITES, NUM_LAYERS, *self.page_shape), np.uint16)
        for i, seed in enumerate(writes.values()):
            data[i] = self.content(seed)
        caches, lost = self._forward(
            caches,
            self._put(data, NamedSharding(self._mesh, P(None, None, None, "model"))),
            self._put(ids, self._everywhere),
            self._put(np.int32(len(writes)), self._everywhere),
            self._flag(garbage),
        )
        return list(caches), bool(np.asarray(lost.addressable_data(0)))

    def wrong_blocks(
        self, caches: Sequence[jax.Array], expected: Mapping[int, int]
    ) -> tuple[tuple[int, int, str], ...]:
        """(layer, block, device) of all differences from the KV of these seeds, on the devices of this process."""
        wrong = []
        for layer, cache in enumerate(caches):
            for shard in cache.addressable_shards:
                data = np.asarray(shard.data).view(np.uint16)
                for block_id, seed in expected.items():
                    wanted = self.content(seed)[layer].reshape(cache.shape[1:])
                    if not np.array_equal(data[block_id], wanted[shard.index[1:]]):
                        wrong.append((layer, block_id, str(shard.device)))
        return tuple(wrong)

    def _put(self, value: Any, sharding: NamedSharding) -> jax.Array:
        return jax.make_array_from_callback(np.shape(value), sharding, lambda i: value[i])

    def _flag(self, value: bool) -> jax.Array:
        """bool[num_devices] with this value on the devices of this process."""
        local = [jax.device_put(np.array([value]), device) for device in jax.local_devices()]
        return jax.make_array_from_single_device_arrays((self._mesh.size,), self._of_devices, local)


def _forward(caches: list[Any], data: Any, ids: Any, num_writes: Any, flags: Any) -> tuple[list[Any], Any]:
    garbage = jnp.any(flags)  # the collective
    data = jnp.where(garbage, data ^ _GARBAGE, data)

    def write(i: Any, caches: list[Any]) -> list[Any]:
        written = []
        for layer, cache in enumerate(caches):
            old = jax.lax.dynamic_slice_in_dim(cache, ids[i], 1, 0)
            new = jnp.where(i < num_writes, data[i, layer].reshape(old.shape), old)
            written.append(jax.lax.dynamic_update_slice_in_dim(cache, new, ids[i], 0))
        return written

    bits = [jax.lax.bitcast_convert_type(cache, jnp.uint16) for cache in caches]
    bits = jax.lax.fori_loop(0, MAX_WRITES, write, bits)
    return [jax.lax.bitcast_convert_type(cache, jnp.bfloat16) for cache in bits], garbage
