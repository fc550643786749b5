"""What the machine can do at all: methods that only move bytes.

`Memcpy` is the limit on a CPU, where "HBM" is memory of the host, `BusCopies` on an accelerator.
"""

import functools
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from tpu_offload.cli.transfer_methods import Caches
from tpu_offload.types import Direction

_BUS_ROW = 1024  # u32 of one row; 4 KiB, the tile of a TPU


@final
class Memcpy:
    """The limit on a CPU: `np.copyto` between two old buffers that are walked, so that they are not hot.

    Args:
      nbytes: size of each buffer.
      job_nbytes: bytes to copy for one block.
    """

    def __init__(self, *, nbytes: int, job_nbytes: int) -> None:
        self._source, self._target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
        self._job_nbytes = job_nbytes
        self._start = 0

    def dispatch(self, direction: Direction, caches: Caches, block_ids: list[int]) -> Caches:
        """See `Method`; both directions are the same."""
        nbytes = len(block_ids) * self._job_nbytes
        if self._start + nbytes > len(self._source):
            self._start = 0
        part = slice(self._start, self._start + nbytes)
        np.copyto(self._target[part], self._source[part])
        self._start += nbytes
        return caches

    def finish(self, caches: Caches) -> Caches:
        """See `Method`; nothing is left to wait for."""
        return caches


@final
class BusCopies:
    """The limit on an accelerator: one copy of as many contiguous bytes, from or to donated pinned memory.

    Args:
      caches: their devices are used.
      block_nbytes_per_device: bytes of one block on each of them.
    """

    def __init__(self, caches: Caches, *, block_nbytes_per_device: int) -> None:
        self._mesh = Mesh(np.array(list(caches[0].sharding.device_set)), ("device",))
        self._block_nbytes = block_nbytes_per_device
        self._buffers: dict[int, dict[str, jax.Array]] = {}
        self._pending: jax.Array | None = None

    def dispatch(self, direction: Direction, caches: Caches, block_ids: list[int]) -> Caches:
        """See `Method`; the caches are not touched."""
        num_rows = -(-len(block_ids) * self._block_nbytes // (4 * _BUS_ROW))
        if num_rows not in self._buffers:
            self._buffers = {num_rows: {kind: self._make(kind, num_rows) for kind in ("device", "pinned_host")}}
        buffers = self._buffers[num_rows]
        source, target = ("device", "pinned_host") if direction is Direction.SAVE else ("pinned_host", "device")
        buffers[target] = self._pending = self._copy(target)(buffers[target], buffers[source])
        return caches

    def finish(self, caches: Caches) -> Caches:
        """See `Method`."""
        jax.block_until_ready(self._pending)
        return caches

    def _sharding(self, kind: str) -> Sharding:
        return NamedSharding(self._mesh, PartitionSpec("device"), memory_kind=kind)

    def _make(self, kind: str, num_rows: int) -> jax.Array:
        shape = (self._mesh.size * num_rows, _BUS_ROW)
        make = jax.jit(lambda: jnp.zeros(shape, jnp.uint32), out_shardings=self._sharding("device"))
        zeros: jax.Array = jax.device_put(make(), self._sharding(kind))
        return zeros

    @functools.cache  # noqa: B019  (two entries, and the instance lives as long as the command)
    def _copy(self, kind: str) -> Any:
        space = jax.memory.Space.Device if kind == "device" else jax.memory.Space.Host

        def copy(target: Any, source: Any) -> Any:
            return jax.device_put(source, space)

        # Unused as it is, the target has to stay an argument to be the memory that is written.
        return jax.jit(copy, donate_argnums=0, keep_unused=True, out_shardings=self._sharding(kind))
