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

from tests.multiprocess.messages import (
    BLOCK_SIZE,
    MAX_GROUPS,
    MAX_ROW_WRITES,
    MAX_WRITES,
    NULL_BLOCK,
    NUM_LAYERS,
    ROWS,
    Setup,
)
from tpu_offload import KVLayout

_DTYPE = np.dtype(ml_dtypes.bfloat16)
_HEAD_SHAPE = 2, 8
_STATE_DTYPES = _DTYPE, np.dtype(np.float32)
_GARBAGE = np.uint16(0x5555)

Array = np.ndarray[Any, Any]


class Device:
    """The devices of all processes, and the model on them.

    KV is random bytes from a seed. If the caches are lost on any process, a step computes garbage on all of them, as a
    real forward pass would.

    Args:
      num_ranks: data-parallel ranks, which the blocks are split over.
      span_hosts: as in `Setup`.
    """

    def __init__(self, num_ranks: int, span_hosts: bool) -> None:
        devices = np.array(jax.devices())
        size = len(devices) // num_ranks
        self.page_shape = BLOCK_SIZE, size, *_HEAD_SHAPE
        self._num_ranks = num_ranks
        of_ranks = devices.reshape(size, num_ranks).T if span_hosts else devices.reshape(num_ranks, size)
        self._mesh = Mesh(of_ranks, ("rank", "model"))
        by_rank = "rank" if num_ranks > 1 else None
        self._cache_sharding = NamedSharding(self._mesh, P(by_rank, None, "model"))
        # Of states: the last inputs of a convolution, and a matrix for each head, split over another axis.
        self._state_shapes = (3, 4 * size), (size, 4)
        self._state_shardings = self._cache_sharding, NamedSharding(self._mesh, P(by_rank, "model"))
        self._of_rows = NamedSharding(self._mesh, P(None, None, "model")), NamedSharding(self._mesh, P(None, "model"))
        self._everywhere = NamedSharding(self._mesh, P())
        self._of_devices = NamedSharding(self._mesh, P(("rank", "model")))
        write_blocks = self._write([self._cache_sharding] * NUM_LAYERS, [self._of_rows[0]] * NUM_LAYERS)
        write_rows = self._write(self._state_shardings, self._of_rows)
        forward = functools.partial(_forward, write_blocks=write_blocks, write_rows=write_rows)
        self._forward = {
            n: jax.jit(forward, donate_argnums=0, out_shardings=(self._shardings(n), self._everywhere))
            for n in (NUM_LAYERS, NUM_LAYERS + len(_STATE_DTYPES))
        }

    def _write(self, caches: Sequence[NamedSharding], contents: Sequence[NamedSharding]) -> Any:
        """`_write_of_rank` on all ranks, for arrays with these shardings."""
        specs = [sharding.spec for sharding in caches]
        in_specs = specs, [sharding.spec for sharding in contents], P(), P(), P()
        return jax.shard_map(_write_of_rank, mesh=self._mesh, in_specs=in_specs, out_specs=specs, check_vma=False)

    def _shardings(self, num_arrays: int) -> list[NamedSharding]:
        return [*[self._cache_sharding] * NUM_LAYERS, *self._state_shardings][:num_arrays]

    @functools.lru_cache(maxsize=2048)  # noqa: B019  (one instance per process)
    def content(self, seed: int) -> Array:
        """The KV of one block as bits of bfloat16: u16[num_layers, *page_shape]."""
        values = np.random.Generator(np.random.PCG64(seed)).integers(
            0, 2**16, (NUM_LAYERS, *self.page_shape), dtype=np.uint16
        )
        values.setflags(write=False)
        return values

    @functools.lru_cache(maxsize=512)  # noqa: B019
    def state(self, seed: int) -> tuple[Array, Array]:
        """One row of each array of states, as bits: u16 and u32 of `_state_shapes`."""
        rng = np.random.Generator(np.random.PCG64(seed))
        first, second = self._state_shapes
        return rng.integers(0, 2**16, first, dtype=np.uint16), rng.integers(0, 2**32, second, dtype=np.uint32)

    def make_caches(self, setup: Setup) -> list[jax.Array]:
        """Caches with arbitrary bytes in every block and row; in every other run pages have two shapes."""
        num_blocks, num_rows = self._num_ranks * setup.num_blocks, self._num_ranks * setup.num_rows
        base = np.stack([self.content(10**6 + i) for i in range(num_blocks)], 1).view(_DTYPE)
        shape = num_blocks, *self.page_shape
        merged = *shape[:3], shape[3] * shape[4]
        layers = [layer.reshape(merged if setup.seed % 2 and i % 2 else shape) for i, layer in enumerate(base)]
        if setup.num_rows:
            rows = [self.state(10**6 + i) for i in range(num_rows)]
            arrays = map(np.stack, zip(*rows, strict=True))
            layers += [array.view(dtype) for array, dtype in zip(arrays, _STATE_DTYPES, strict=True)]
        return list(map(self._put, layers, self._shardings(len(layers))))

    def layout(self, setup: Setup, caches: Sequence[jax.Array]) -> KVLayout:
        """The layer groups of a run."""
        arrays = range(NUM_LAYERS)
        if not setup.windows and not setup.num_rows:
            return KVLayout.from_caches(caches, block_size=BLOCK_SIZE)
        return KVLayout.from_caches(
            caches,
            block_size=BLOCK_SIZE,
            groups=[(window, arrays) for window in (0, *setup.windows)],
            states=range(NUM_LAYERS, len(caches)),
            null_block=NULL_BLOCK,
        )

    def renew(self, caches: Sequence[jax.Array]) -> list[jax.Array]:
        """Replaces the caches by zeros on this process, without communication."""
        structs = [(cache.shape, cache.dtype, cache.sharding) for cache in caches]
        for cache in caches:
            if not cache.is_deleted():
                cache.delete()
        renewed: list[jax.Array] = []
        for shape, dtype, sharding in structs:
            zeros = np.zeros(sharding.shard_shape(shape), dtype)
            shards = [jax.device_put(zeros, device) for device in jax.local_devices()]
            renewed.append(jax.make_array_from_single_device_arrays(shape, sharding, shards))
        return renewed

    def forward(
        self, caches: list[jax.Array], writes: Mapping[int, int], *, garbage: bool
    ) -> tuple[list[jax.Array], bool]:
        """Writes the contents of seeds into blocks and rows, or garbage if any process requests it.

        Returns:
          The caches, and whether it was garbage.
        """
        blocks = {place: seed for place, seed in writes.items() if place < ROWS}
        rows = {place - ROWS: seed for place, seed in writes.items() if place >= ROWS}
        most = MAX_WRITES * MAX_GROUPS * self._num_ranks
        data = np.zeros((most, NUM_LAYERS, *self.page_shape), np.uint16)
        for i, seed in enumerate(blocks.values()):
            data[i] = self.content(seed)
        inputs = [self._put(data, NamedSharding(self._mesh, P(None, None, None, "model"))), *self._places(blocks, most)]
        if len(caches) > NUM_LAYERS:
            states = [self.state(seed) for seed in rows.values()]
            most_rows = MAX_ROW_WRITES * self._num_ranks
            padding = [self.state(0)] * (most_rows - len(states))
            bits = map(np.stack, zip(*states, *padding, strict=True))
            inputs += [*map(self._put, bits, self._of_rows), *self._places(rows, most_rows)]
        caches, lost = self._forward[len(caches)](caches, self._flag(garbage), *inputs)
        return list(caches), bool(np.asarray(lost.addressable_data(0)))

    def _places(self, writes: Mapping[int, int], most: int) -> tuple[jax.Array, jax.Array]:
        ids = np.zeros(most, np.int32)
        ids[: len(writes)] = list(writes)
        return self._put(ids, self._everywhere), self._put(np.int32(len(writes)), self._everywhere)

    def wrong_blocks(
        self, caches: Sequence[jax.Array], expected: Mapping[int, int]
    ) -> tuple[int, tuple[tuple[int, int, str], ...]]:
        """Compares with the contents of these seeds what this process has of them.

        Returns:
          How many blocks and rows it has, and (array, block or row, device) of all differences.
        """
        wrong, compared = [], set()
        for i, cache in enumerate(caches):
            for shard in cache.addressable_shards:
                data = np.asarray(shard.data)
                data = data.view(np.dtype(f"u{data.dtype.itemsize}"))
                first = shard.index[0].start or 0
                for place, seed in expected.items():
                    number = place % ROWS - first
                    if (place >= ROWS) != (i >= NUM_LAYERS) or not 0 <= number < len(data):
                        continue
                    compared.add(place)
                    contents = self.state(seed)[i - NUM_LAYERS] if place >= ROWS else self.content(seed)[i]
                    wanted = contents.reshape(cache.shape[1:])[shard.index[1:]]
                    if not np.array_equal(data[number], wanted):
                        wrong.append((i, place, str(shard.device)))
        return len(compared), tuple(wrong)

    def _put(self, value: Any, sharding: NamedSharding) -> jax.Array:
        return jax.make_array_from_callback(np.shape(value), sharding, lambda i: value[i])

    def _flag(self, value: bool) -> jax.Array:
        """bool[num_devices] with this value on the devices of this process."""
        local = [jax.device_put(np.array([value]), device) for device in jax.local_devices()]
        return jax.make_array_from_single_device_arrays((self._mesh.size,), self._of_devices, local)


def _forward(caches: list[Any], flags: Any, *inputs: Any, write_blocks: Any, write_rows: Any) -> tuple[list[Any], Any]:
    """Inputs: contents, places and number of blocks; of rows, the contents in two arrays, places and number."""
    garbage = jnp.any(flags)  # the collective
    data, ids, num_writes = inputs[:3]
    contents = [data[:, layer] for layer in range(NUM_LAYERS)]
    written = write_blocks(caches[:NUM_LAYERS], contents, ids, num_writes, garbage)
    if len(inputs) > 3:
        *contents, ids, num_writes = inputs[3:]
        written += write_rows(caches[NUM_LAYERS:], contents, ids, num_writes, garbage)
    return written, garbage


def _write_of_rank(caches: list[Any], contents: list[Any], ids: Any, num_writes: Any, garbage: Any) -> list[Any]:
    """Writes, of the blocks of all ranks, those of this one."""
    num_blocks = caches[0].shape[0]
    first = jax.lax.axis_index("rank") * num_blocks
    contents = [jnp.where(garbage, bits ^ bits.dtype.type(_GARBAGE), bits) for bits in contents]

    def write(i: Any, caches: list[Any]) -> list[Any]:
        written = []
        place = ids[i] - first
        is_written = (i < num_writes) & (place >= 0) & (place < num_blocks)
        place = jnp.clip(place, 0, num_blocks - 1)
        for cache, bits in zip(caches, contents, strict=True):
            old = jax.lax.dynamic_slice_in_dim(cache, place, 1, 0)
            new = jnp.where(is_written, bits[i].reshape(old.shape), old)
            written.append(jax.lax.dynamic_update_slice_in_dim(cache, new, place, 0))
        return written

    as_bits = [jax.lax.bitcast_convert_type(cache, of.dtype) for cache, of in zip(caches, contents, strict=True)]
    as_bits = jax.lax.fori_loop(0, ids.shape[0], write, as_bits)
    return [jax.lax.bitcast_convert_type(bits, cache.dtype) for bits, cache in zip(as_bits, caches, strict=True)]
