"""Copies slots, of chunks or of states, between segments of the host tier and flat bytes, for storage.

Programs copy a slot to and from a payload: small, separate arrays. They run in dispatch order, so a later write
to the slot does not change the payload, and no view of a segment exists, which would prevent in-place updates of the
segment. Any thread may copy between payloads and bytes.
"""

import math
from collections.abc import Sequence
from typing import Any, final

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from tpu_offload.kernels.compiled import CompiledPrograms
from tpu_offload.kernels.copier import ArenaView, fetch_early
from tpu_offload.kernels.payload_paths import SlotPath
from tpu_offload.kernels.spec import DEVICE_MEMORY_KIND, TransferSpec

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Payload = list[jax.Array]
"""One slot: per stripe of a segment, carrier[blocks_per_slot, layers, *pool_page] in pinned host memory."""


@final
class SlotCopier:
    """Reads and writes the slots of one page group.

    Args:
      spec: what is in a segment.
      arena: the segments.
      blocks_per_slot: blocks in a slot; of states, one row.
      path: its programs.

    Attributes:
      path: see above.
    """

    def __init__(self, spec: TransferSpec, arena: ArenaView, *, blocks_per_slot: int, path: type[SlotPath]) -> None:
        self._spec = spec
        self._arena = arena
        self._num_blocks = blocks_per_slot
        self._structs = spec.payload_structs(blocks_per_slot)
        self.path = path
        self._programs = CompiledPrograms(spec, num_blocks=path.max_hbm_blocks)

    @property
    def hbm_nbytes(self) -> int:
        """Most bytes of HBM that a copy takes on each device."""
        return self._programs.hbm_nbytes

    @property
    def payload_nbytes(self) -> int:
        """Bytes of one slot in this process."""
        return sum(nbytes * len(devices) for _, nbytes, devices in map(_shards, self._structs))

    @property
    def num_shards(self) -> int:
        """Devices whose shards are in a payload."""
        return len(self._structs[0].sharding.addressable_devices)

    @property
    def payload_format(self) -> str:
        """Identifies the byte layout of a payload: dtypes, shapes, each device's part of a page and its order."""
        spec = self._spec
        order = spec.cache_layout.major_to_minor if spec.flat and spec.cache_layout is not None else ()
        parts = spec.block_sharding(DEVICE_MEMORY_KIND).addressable_devices_indices_map((1, 1, *spec.page_shape))
        by_device = [parts[device] for device in sorted(parts, key=_device_id)]
        return repr(([(struct.dtype.name, struct.shape) for struct in self._structs], by_device, order))

    def compile(self) -> None:
        """Compiles the programs now instead of on first use."""
        _ = self._read, self._write

    @property
    def _read(self) -> Any:
        return self._programs.get("read", lambda spec: self.path.read(spec, self._num_blocks))

    @property
    def _write(self) -> Any:
        return self._programs.get("write", lambda spec: self.path.write(spec, self._num_blocks))

    # On the thread that dispatches.

    def read(self, segment_id: int, first: int) -> Payload:
        """Dispatches a copy of the slot at position `first` of a segment; returns its payload at once."""
        payload, _ = self._read(self._arena.segment(segment_id), np.int32(first))
        return list(payload)

    def write(self, segment_id: int, first: int, payload: Payload) -> jax.Array:
        """Dispatches a write, which donates the segment.

        Returns:
          A token: when it is ready, with the value `first + blocks_per_slot`, the slot is written.
        """
        segment, token = self._write(self._arena.segment(segment_id), payload, np.int32(first))
        self._arena.replace(segment_id, segment)
        return fetch_early(token, self._spec)

    # On any thread.

    def unpack(self, source: Bytes) -> Payload:
        """Makes a payload from its bytes. `source` must not change while the payload is in use."""
        payload: Payload = []
        start = 0
        for struct in self._structs:
            shape, nbytes, devices = _shards(struct)
            kind = struct.sharding.memory_kind
            shards = []
            for device in devices:
                piece = source[start : start + nbytes].view(struct.dtype).reshape(shape)
                shards.append(jax.device_put(piece, SingleDeviceSharding(device, memory_kind=kind)))
                start += nbytes
            payload.append(jax.make_array_from_single_device_arrays(struct.shape, struct.sharding, shards))
        return payload

    def pack(self, payload: Payload, target: Bytes) -> None:
        """Waits for a payload and copies its bytes: stripe after stripe, of each the shards in the order of devices."""
        start = 0
        for array in payload:
            for shard in sorted(array.addressable_shards, key=lambda shard: shard.device.id):
                piece = np.asarray(shard.data).reshape(-1).view(np.uint8)
                np.copyto(target[start : start + len(piece)], piece)
                start += len(piece)


def _shards(struct: jax.ShapeDtypeStruct) -> tuple[Sequence[int], int, list[Any]]:
    """The shape and the bytes of a shard, and the devices of this process that hold one, by id."""
    shape = struct.sharding.shard_shape(struct.shape)
    devices = sorted(struct.sharding.addressable_devices, key=_device_id)
    return shape, math.prod(shape) * np.dtype(struct.dtype).itemsize, devices


def _device_id(device: Any) -> int:
    return int(device.id)
