"""Shapes, dtypes and shardings that every copy program is compiled for."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from tpu_offload.errors import LayoutError

HOST_MEMORY_KIND = "pinned_host"
DEVICE_MEMORY_KIND = "device"

# PCIe is busy from 256 KiB a DMA on; more of them at once than this hide nothing, and each takes 40 KiB of HBM.
_MIN_DMA_NBYTES = 256 * 1024
_MAX_PARTS = 8

LayerRange = tuple[int, int]
"""Consecutive layers: the first, and one past the last."""


@dataclasses.dataclass(frozen=True, slots=True)
class TransferSpec:
    """What the copy programs need to know of the caches and of one segment of the host pool.

    The caches are one array `dtype[num_blocks, *page_shape]` a layer. A segment is a list of parts, each an
    array `carrier[segment_blocks, layers in the part, *page_shape]`, and a staging array is one array
    `carrier[n, num_layers, *page_shape]`. All are split over devices like the pages are: every device
    copies its own shard, so no program communicates.

    Why parts: writes into one array are chained on each other, so the TPU compiler waits for each DMA
    before it starts the next. DMAs into different arrays are in flight together.

    Attributes:
      num_layers: arrays in the list of caches.
      num_blocks: blocks in each of them.
      page_shape: global shape of one layer's slice of a block.
      dtype: element type of the caches.
      cache_sharding: sharding of each cache; axis 0 is whole on every device.
      segment_blocks: places for blocks in one segment of the host pool.
      capacity: most blocks that one dispatch copies; the staging budget.
      parts: the layers in each part of a segment.
    """

    num_layers: int
    num_blocks: int
    page_shape: tuple[int, ...]
    dtype: np.dtype[Any]
    cache_sharding: Sharding
    segment_blocks: int
    capacity: int
    parts: tuple[LayerRange, ...]

    @classmethod
    def from_caches(
        cls, kv_caches: Sequence[Any], *, segment_blocks: int, capacity: int, num_parts: int | None = None
    ) -> "TransferSpec":
        """Reads shape, dtype and sharding of the first cache; the layout has checked that all are alike.

        Args:
          kv_caches: per layer, an array or shape struct `[num_blocks, *page_shape]` with a sharding.
          segment_blocks: places for blocks in one segment of the host pool.
          capacity: most blocks that one dispatch copies.
          num_parts: arrays in a segment, at most one a layer; None chooses as many as keep a block's DMAs at
            256 KiB a device, on TPU, and one elsewhere.
        Raises:
          LayoutError: the sharding is neither a `NamedSharding` nor a `SingleDeviceSharding`.
        """
        first = kv_caches[0]
        sharding = first.sharding
        if not isinstance(sharding, NamedSharding | SingleDeviceSharding):
            raise LayoutError(
                f"KV caches with a {type(sharding).__name__}; expected a NamedSharding or a SingleDeviceSharding"
            )
        spec = cls(
            num_layers=len(kv_caches),
            num_blocks=first.shape[0],
            page_shape=tuple(first.shape[1:]),
            dtype=np.dtype(first.dtype),
            cache_sharding=sharding,
            segment_blocks=segment_blocks,
            capacity=capacity,
            parts=((0, len(kv_caches)),),
        )
        if num_parts is None:
            most = _MAX_PARTS if spec.platform == "tpu" else 1
            num_parts = min(most, spec.block_nbytes_per_device // _MIN_DMA_NBYTES)
        return dataclasses.replace(spec, parts=_cut(spec.num_layers, max(1, min(num_parts, spec.num_layers))))

    @property
    def platform(self) -> str:
        """Platform of the devices that hold the caches: `tpu`, `gpu` or `cpu`."""
        device: Any = next(iter(self.cache_sharding.device_set))
        return cast(str, device.platform)

    @property
    def carrier(self) -> np.dtype[Any]:
        """Element type of segments and staging arrays.

        It is the caches' own, but for float8 on the CPU backend, which moves float8 through wider
        floats: 1000 times slower, and float8_e5m2 NaN payloads change. There it is uint8.
        """
        if self.platform == "cpu" and self.dtype.name.startswith("float8"):
            return np.dtype(np.uint8)
        return self.dtype

    @property
    def copies(self) -> tuple[tuple[LayerRange, ...], ...]:
        """Per part, the layers that each copy of a block takes.

        All of the part: one DMA. But the CPU backend copies by the processor, and putting pages together
        first would copy them twice.
        """
        if self.platform == "cpu":
            return tuple(tuple((layer, layer + 1) for layer in range(*part)) for part in self.parts)
        return tuple((part,) for part in self.parts)

    @property
    def block_nbytes_per_device(self) -> int:
        """Bytes of one block, all layers, on each device."""
        shard = self.cache_sharding.shard_shape((self.num_blocks, *self.page_shape))
        return self.num_layers * math.prod(shard[1:]) * self.dtype.itemsize

    def pool_sharding(self, memory_kind: str) -> Sharding:
        """Sharding of an array `[n, layers, *page_shape]` in the memory of that kind."""
        sharding = self.cache_sharding
        if isinstance(sharding, NamedSharding):
            mesh, page_axes = sharding.mesh, tuple(sharding.spec)[1:]
        else:
            # Not a SingleDeviceSharding, of which jax 0.11.2 forgets the memory kind when it traces shape
            # structs for a device that is only described.
            mesh, page_axes = Mesh(np.array(list(sharding.device_set)), ("device",)), ()
        return NamedSharding(mesh, PartitionSpec(None, None, *page_axes), memory_kind=memory_kind)

    @property
    def explicit(self) -> bool:
        """Whether the caches' mesh has explicit axes, as `jax.make_mesh` gives them."""
        sharding = self.cache_sharding
        return isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types

    @property
    def replicated(self) -> Sharding:
        """Sharding of ids, counts and tokens: whole on every device."""
        sharding = self.cache_sharding
        return NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else sharding

    def cache_structs(self) -> list[jax.ShapeDtypeStruct]:
        """The caches' shapes, one a layer."""
        shape = (self.num_blocks, *self.page_shape)
        return [jax.ShapeDtypeStruct(shape, self.dtype, sharding=self.cache_sharding)] * self.num_layers

    def staging_struct(self, num_blocks: int, num_layers: int) -> jax.ShapeDtypeStruct:
        """The shape of an array in HBM that holds pages of some layers of `num_blocks` blocks."""
        shape = (num_blocks, num_layers, *self.page_shape)
        return jax.ShapeDtypeStruct(shape, self.carrier, sharding=self.pool_sharding(DEVICE_MEMORY_KIND))

    def pool_struct(self, num_blocks: int, memory_kind: str) -> jax.ShapeDtypeStruct:
        """The shape of an array that holds `num_blocks` blocks of all layers."""
        shape = (num_blocks, self.num_layers, *self.page_shape)
        return jax.ShapeDtypeStruct(shape, self.carrier, sharding=self.pool_sharding(memory_kind))

    def segment_structs(self) -> list[jax.ShapeDtypeStruct]:
        """The shapes of one segment of the host pool, one a part."""
        sharding = self.pool_sharding(HOST_MEMORY_KIND)
        return [
            jax.ShapeDtypeStruct((self.segment_blocks, end - first, *self.page_shape), self.carrier, sharding=sharding)
            for first, end in self.parts
        ]

    def ids_struct(self, length: int) -> jax.ShapeDtypeStruct:
        """The shape of a list of block ids."""
        return jax.ShapeDtypeStruct((length,), jnp.int32, sharding=self.replicated)

    def moves_struct(self, length: int) -> jax.ShapeDtypeStruct:
        """The shape of what `programs.pack_moves` makes."""
        return jax.ShapeDtypeStruct((3, length), jnp.int32, sharding=self.replicated)


def _cut(num_layers: int, num_parts: int) -> tuple[LayerRange, ...]:
    """Cuts layers into parts whose sizes differ by at most one."""
    bounds = [num_layers * i // num_parts for i in range(num_parts + 1)]
    return tuple(itertools.pairwise(bounds))
