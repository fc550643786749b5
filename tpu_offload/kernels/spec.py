"""Shapes, dtypes and shardings that every copy program is compiled for."""

import dataclasses
import itertools
import math
from collections.abc import Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from tpu_offload.errors import LayoutError
from tpu_offload.kernels.formats import LANES, layout_of, platform_of

HOST_MEMORY_KIND = "pinned_host"
DEVICE_MEMORY_KIND = "device"

# DMAs of 256 KiB saturate PCIe. More than 8 in flight gain nothing, and each takes 40 KiB of HBM.
_MIN_DMA_NBYTES = 256 * 1024
_MAX_STRIPES = 8

LayerRange = tuple[int, int]
"""Consecutive layers: the first, and one past the last."""


@dataclasses.dataclass(frozen=True, slots=True)
class TransferSpec:
    """The geometry of the caches and of a host pool segment, which the copy programs are compiled for.

    The caches are one array `dtype[num_blocks, *page_shape]` per layer. A segment is a list of stripes, each an array
    `carrier[segment_blocks, layers in the stripe, *pool_page]`. A staging array is one array
    `carrier[n, num_layers, *pool_page]`. All are sharded like the pages: each device copies its own shard, and no
    program communicates.

    With data-parallel ranks, axis 0 of caches and stripes is split over the ranks. Ids, positions and numbers of blocks
    are those of one rank. Only the direct programs support several ranks, see `programs`.

    Why stripes: writes into one array are serialized, so the TPU compiler waits for each DMA before it starts the next.
    DMAs into different arrays are in flight together.

    Attributes:
      num_layers: number of caches.
      num_blocks: blocks in each cache, of one rank.
      page_shape: global shape of one layer's slice of a block.
      dtype: element type of the caches.
      cache_sharding: sharding of each cache; axis 0 is split over the ranks, if there are several.
      cache_layout: layout of each cache in device memory; None if row-major, the default off TPU.
      segment_blocks: blocks of each rank that fit into one segment of the host pool.
      capacity: most blocks of each rank that one dispatch copies; for staged and fused copies the staging budget.
      stripes: the layers in each stripe of a segment.
      in_turn: whether a block's pages are written one after another, which takes less HBM where blocks share tiles.
      num_ranks: data-parallel ranks that axis 0 of the caches is split over.
    """

    num_layers: int
    num_blocks: int
    page_shape: tuple[int, ...]
    dtype: np.dtype[Any]
    cache_sharding: Sharding
    cache_layout: Layout | None
    segment_blocks: int
    capacity: int
    stripes: tuple[LayerRange, ...]
    in_turn: bool = False
    num_ranks: int = 1

    @classmethod
    def from_caches(
        cls, kv_caches: Sequence[Any], *, segment_blocks: int, capacity: int, num_stripes: int | None = None
    ) -> "TransferSpec":
        """Reads shape, dtype and sharding of the first cache; `KVLayout` has checked that all are equal.

        Args:
          kv_caches: per layer, an array or shape struct `[num_blocks, *page_shape]` with a sharding.
          segment_blocks: blocks that fit into one segment of the host pool.
          capacity: most blocks that one dispatch copies.
          num_stripes: arrays in a segment, at most one per layer. None: on TPU as many as keep a DMA at 256 KiB per
            device or more, at most 8; elsewhere one.
        Raises:
          LayoutError: the sharding is neither a `NamedSharding` nor a `SingleDeviceSharding`, or the caches have
            different layouts in device memory.
        """
        first = kv_caches[0]
        sharding = first.sharding
        if not isinstance(sharding, NamedSharding | SingleDeviceSharding):
            raise LayoutError(
                f"KV caches with a {type(sharding).__name__}; expected a NamedSharding or a SingleDeviceSharding: "
                "allocate them with jax.device_put(cache, NamedSharding(mesh, PartitionSpec(...)))"
            )
        layout = layout_of(first)
        for i, cache in enumerate(kv_caches):
            if layout_of(cache) != layout:
                raise LayoutError(
                    f"KV cache {i} has the layout {layout_of(cache)} in device memory, cache 0 {layout}; expected one "
                    "in a page group: make all of them with the same jax.experimental.layout.Format"
                )
        blocks_of_rank = sharding.shard_shape(tuple(first.shape))[0]
        spec = cls(
            num_layers=len(kv_caches),
            num_blocks=blocks_of_rank,
            page_shape=tuple(first.shape[1:]),
            dtype=np.dtype(first.dtype),
            cache_sharding=sharding,
            cache_layout=layout,
            segment_blocks=segment_blocks,
            capacity=capacity,
            stripes=((0, len(kv_caches)),),
            num_ranks=first.shape[0] // blocks_of_rank,
        )
        if num_stripes is None:
            most = _MAX_STRIPES if spec.platform == "tpu" else 1
            num_stripes = min(most, spec.block_nbytes_per_device // _MIN_DMA_NBYTES)
        return dataclasses.replace(spec, stripes=_cut(spec.num_layers, max(1, min(num_stripes, spec.num_layers))))

    @property
    def platform(self) -> str:
        """Platform of the devices that hold the caches: `tpu`, `gpu` or `cpu`."""
        return platform_of(self.cache_sharding)

    @property
    def carrier(self) -> np.dtype[Any]:
        """Element type of segments and staging arrays.

        On TPU, unsigned integers of the same size: the TPU compiler gathers pages by arithmetic (a concatenation is a
        maximum, a row is extracted from a tile by a sum), which changes NaN payloads and -0 of floats. The CPU backend
        moves float8 through wider floats, 1000 times slower and with other NaN payloads, so float8 is uint8 there.
        Everything else keeps the caches' type.
        """
        if self.platform == "tpu" and jnp.issubdtype(self.dtype, jnp.floating):
            return np.dtype(jnp.dtype(f"uint{jax.dtypes.itemsize_bits(self.dtype)}"))
        if self.platform == "cpu" and self.dtype.name.startswith("float8"):
            return np.dtype(np.uint8)
        return self.dtype

    @property
    def flat(self) -> bool:
        """Whether pages are rows of 128 elements in segments and staging arrays (see `pages`).

        So on TPU if a block is not contiguous, if a page does not fill its tiles (the compiler would lay out segments
        with less padding, and several blocks in a tile), or if tiles have more than 8 rows (some 8-bit types): the
        compiler would copy whole segments to change the tile height.
        """
        layout = self.cache_layout
        if self.platform != "tpu" or layout is None:
            return False
        in_one_piece = layout.major_to_minor[0] == 0 and self.blocks_together == 1
        tile = layout.tiling[0] if layout.tiling else ()
        is_high = len(tile) > 1 and tile[-2] > 8
        return not in_one_piece or is_high or self._shard_page[-1] % LANES != 0 or self._has_padded_rows

    @property
    def _has_padded_rows(self) -> bool:
        """Whether a page has fewer rows than its tiles, as one of 3 x 128 in tiles of 4 x 128."""
        layout = self.cache_layout
        if layout is None or not layout.tiling or len(layout.tiling[0]) < 2:
            return False
        axis = layout.major_to_minor[-2]
        return axis > 0 and self._shard_page[axis - 1] % layout.tiling[0][-2] != 0

    @property
    def blocks_together(self) -> int:
        """Blocks that share tiles in device memory, so that none can be copied alone; 1 if blocks are contiguous.

        Tiles span the last two axes in memory. With the block axis last, 128 blocks share the rows of a tile; with
        the block axis second to last, one block per row of a tile.
        """
        layout = self.cache_layout
        if self.platform != "tpu" or layout is None or 0 not in layout.major_to_minor[-2:]:
            return 1
        tile = layout.tiling[0] if layout.tiling else (8, LANES)
        return min(self.num_blocks, LANES if layout.major_to_minor[-1] == 0 else tile[0])

    @property
    def pool_page(self) -> tuple[int, ...]:
        """Global shape of a page in segments and staging arrays."""
        if not self.flat:
            return self.page_shape
        num_shards = math.prod(self.page_shape) // math.prod(self._shard_page)
        num_rows = -(-math.prod(self._shard_page) // LANES)
        # Tiles of 8 rows for every type: with more, the default of small types, whole segments are transposed.
        height = min(8, 1 << (num_rows - 1).bit_length())
        return num_shards * -(-num_rows // height), height, LANES

    @property
    def pool_page_axes(self) -> tuple[Any, ...]:
        """Per axis of `pool_page`, the mesh axes that it is sharded over."""
        sharding = self.cache_sharding
        page_axes = tuple(sharding.spec)[1:] if isinstance(sharding, NamedSharding) else ()
        if not self.flat:
            return page_axes
        split = [axis if isinstance(axis, tuple) else (axis,) for axis in page_axes if axis is not None]
        names = tuple(name for axes in split for name in axes)
        return (names,) if names else ()

    @property
    def _shard_page(self) -> tuple[int, ...]:
        """Shape of a page's shard on each device."""
        return tuple(self.cache_sharding.shard_shape((self.num_ranks * self.num_blocks, *self.page_shape))[1:])

    @property
    def of_device(self) -> "TransferSpec":
        """What one device has, with data-parallel ranks: the blocks of its rank, and its shard of their pages."""
        sharding = self.cache_sharding
        device: Any = next(iter(sharding.device_set))
        return dataclasses.replace(
            self, page_shape=self._shard_page, cache_sharding=SingleDeviceSharding(device), num_ranks=1
        )

    def local_devices(self, rank: int) -> list[Any]:
        """The devices of this process that have the blocks of a rank, by their ids; none if other hosts have them."""
        return self._devices_of(rank, self.cache_sharding.addressable_devices)

    def processes(self, rank: int) -> list[int]:
        """The processes that have devices with the blocks of a rank, by `jax.process_index`."""
        return sorted({int(device.process_index) for device in self._devices_of(rank, self.cache_sharding.device_set)})

    def _devices_of(self, rank: int, among: Set[Any]) -> list[Any]:
        shape = (self.num_ranks * self.num_blocks, *self.page_shape)
        indices = self.cache_sharding.devices_indices_map(shape)
        first = rank * self.num_blocks
        own = [device for device in among if (indices[device][0].start or 0) == first]
        return sorted(own, key=lambda device: int(device.id))

    def part(self, devices: Sequence[Any]) -> "TransferSpec":
        """What some devices of one rank have, as if there were no others: a block has pages of only their shards.

        The shards are in the order of the devices, along the axis of a page that is split. Each device has the same
        bytes at the same place as before, so segments and their parts are the same memory (`kernels.rank_parts`).
        """
        page = list(self._shard_page)
        is_split = [own != whole for own, whole in zip(page, self.page_shape, strict=True)]
        axis = is_split.index(True) if any(is_split) else 0
        page[axis] *= len(devices)
        mesh = Mesh(np.array(devices), ("device",))
        sharding = NamedSharding(mesh, PartitionSpec(*[None] * (1 + axis), "device"))
        return dataclasses.replace(self, page_shape=tuple(page), cache_sharding=sharding, num_ranks=1)

    def part_format(self, devices: Sequence[Any]) -> str:
        """Identifies what `part` leaves out: which part of a page each device has."""
        of_page = self.block_sharding(DEVICE_MEMORY_KIND).devices_indices_map((self.num_ranks, 1, *self.page_shape))
        return repr([of_page[device][2:] for device in devices])

    @property
    def copies(self) -> tuple[tuple[LayerRange, ...], ...]:
        """Per stripe, the layer ranges that a block is copied in.

        The whole stripe, in one DMA. On the CPU backend single layers: gathering pages first would copy them twice.
        """
        if self.platform == "cpu":
            return tuple(tuple((layer, layer + 1) for layer in range(*stripe)) for stripe in self.stripes)
        return tuple((stripe,) for stripe in self.stripes)

    @property
    def block_nbytes_per_device(self) -> int:
        """Bytes of one block on each device, all layers."""
        return self.num_layers * math.prod(self._shard_page) * self.dtype.itemsize

    def pool_sharding(self, memory_kind: str) -> Sharding:
        """Sharding of an array `[n, layers, *pool_page]` in memory of this kind."""
        return self._sharding(self.pool_page_axes, memory_kind)

    def block_sharding(self, memory_kind: str) -> Sharding:
        """Sharding of an array `[n, layers, *page_shape]`, with the caches' page shape, in memory of this kind."""
        sharding = self.cache_sharding
        return self._sharding(tuple(sharding.spec)[1:] if isinstance(sharding, NamedSharding) else (), memory_kind)

    def _sharding(self, page_axes: tuple[Any, ...], memory_kind: str) -> Sharding:
        sharding = self.cache_sharding
        # Not a SingleDeviceSharding: jax 0.11.2 drops its memory kind when it traces shape structs for a device of a
        # topology description.
        mesh: Any = Mesh(np.array(list(sharding.device_set)), ("device",))
        if isinstance(sharding, NamedSharding):
            mesh = sharding.mesh
        return NamedSharding(mesh, PartitionSpec(self._rank_axes, None, *page_axes), memory_kind=memory_kind)

    @property
    def _rank_axes(self) -> Any:
        """The mesh axes that axis 0 is split over; None without ranks."""
        sharding = self.cache_sharding
        return sharding.spec[0] if self.num_ranks > 1 and isinstance(sharding, NamedSharding) else None

    @property
    def explicit(self) -> bool:
        """Whether the caches' mesh has explicit axes, as `jax.make_mesh` gives them."""
        sharding = self.cache_sharding
        return isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types

    @property
    def replicated(self) -> Sharding:
        """Sharding of ids and counts: replicated."""
        sharding = self.cache_sharding
        return NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else sharding

    @property
    def by_rank(self) -> Sharding:
        """Sharding of moves and tokens: over the ranks on axis 0 if there are several, else replicated."""
        sharding = self.cache_sharding
        if self.num_ranks == 1 or not isinstance(sharding, NamedSharding):
            return self.replicated
        return NamedSharding(sharding.mesh, PartitionSpec(self._rank_axes))

    @property
    def cache_format(self) -> Any:
        """A `Format` if the layout must be given explicitly, else the sharding."""
        return self.cache_sharding if self.cache_layout is None else Format(self.cache_layout, self.cache_sharding)

    def cache_structs(self) -> list[jax.ShapeDtypeStruct]:
        """The caches' shapes, one per layer."""
        shape = (self.num_ranks * self.num_blocks, *self.page_shape)
        return [jax.ShapeDtypeStruct(shape, self.dtype, sharding=self.cache_format)] * self.num_layers

    def staging_struct(self, num_blocks: int, num_layers: int) -> jax.ShapeDtypeStruct:
        """The shape of an array in HBM that holds pages of some layers of `num_blocks` blocks."""
        shape = (num_blocks, num_layers, *self.pool_page)
        return jax.ShapeDtypeStruct(shape, self.carrier, sharding=self.pool_sharding(DEVICE_MEMORY_KIND))

    def pool_struct(self, num_blocks: int, memory_kind: str) -> jax.ShapeDtypeStruct:
        """The shape of an array that holds `num_blocks` blocks of all layers."""
        shape = (num_blocks, self.num_layers, *self.pool_page)
        return jax.ShapeDtypeStruct(shape, self.carrier, sharding=self.pool_sharding(memory_kind))

    def segment_structs(self) -> list[jax.ShapeDtypeStruct]:
        """The shapes of one segment of the host pool, one per stripe."""
        sharding, num_rows = self.pool_sharding(HOST_MEMORY_KIND), self.num_ranks * self.segment_blocks
        return [
            jax.ShapeDtypeStruct((num_rows, end - first, *self.pool_page), self.carrier, sharding=sharding)
            for first, end in self.stripes
        ]

    def payload_structs(self, num_blocks: int) -> list[jax.ShapeDtypeStruct]:
        """The shapes of `num_blocks` blocks cut out of a segment, one per stripe."""
        return [
            jax.ShapeDtypeStruct((num_blocks, *stripe.shape[1:]), stripe.dtype, sharding=stripe.sharding)
            for stripe in self.segment_structs()
        ]

    def count_struct(self) -> jax.ShapeDtypeStruct:
        """The shape of a position or a count."""
        return jax.ShapeDtypeStruct((), jnp.int32, sharding=self.replicated)

    def ids_struct(self, length: int) -> jax.ShapeDtypeStruct:
        """The shape of a list of block ids."""
        return jax.ShapeDtypeStruct((length,), jnp.int32, sharding=self.replicated)

    def moves_struct(self, length: int) -> jax.ShapeDtypeStruct:
        """The shape of what `programs.pack_moves` returns."""
        shape = (3, length) if self.num_ranks == 1 else (self.num_ranks, 3, length)
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self.by_rank)


def _cut(num_layers: int, num_stripes: int) -> tuple[LayerRange, ...]:
    """Splits the layers into stripes whose sizes differ by at most one."""
    bounds = [num_layers * i // num_stripes for i in range(num_stripes + 1)]
    return tuple(itertools.pairwise(bounds))
