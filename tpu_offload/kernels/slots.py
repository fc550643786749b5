"""Chunks between the segments of the host tier and flat bytes, for storage.

On the device's side a chunk's slot is copied to and from small arrays of its own, a payload, by programs in dispatch
order: what another program writes into the slot later is not seen, and no view of a segment ever exists, which would
keep the next program from updating it in place. Between payloads and bytes, any thread may copy.
"""

import math
from collections.abc import Sequence
from typing import Any, final

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from tpu_offload.kernels import programs
from tpu_offload.kernels.compiled import CompiledPrograms
from tpu_offload.kernels.copier import ArenaView, fetch_early
from tpu_offload.kernels.spec import TransferSpec

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Payload = list[jax.Array]
"""One chunk: per stripe of a segment, carrier[blocks_per_chunk, layers, *pool_page] in pinned host memory."""


@final
class SlotCopier:
    """Reads and writes the slots of one layer group.

    Args:
      spec: what is in a segment.
      arena: the segments.
      blocks_per_chunk: blocks in a slot.
    """

    def __init__(self, spec: TransferSpec, arena: ArenaView, *, blocks_per_chunk: int) -> None:
        self._spec = spec
        self._arena = arena
        self._num_blocks = blocks_per_chunk
        self._structs = spec.payload_structs(blocks_per_chunk)
        self._programs = CompiledPrograms(spec, num_blocks=1)

    @property
    def hbm_nbytes(self) -> int:
        """Most bytes of HBM that a copy takes on each device."""
        return self._programs.hbm_nbytes

    @property
    def payload_nbytes(self) -> int:
        """Bytes of a chunk in this process."""
        return sum(nbytes * len(devices) for _, nbytes, devices in map(_shards, self._structs))

    @property
    def payload_format(self) -> str:
        """What the order of the bytes depends on: types, shapes, and how they are split."""
        return repr([(struct.dtype.name, struct.shape, _shards(struct)[0]) for struct in self._structs])

    def compile(self) -> None:
        """Compiles the programs now, instead of on first use."""
        _ = self._read, self._write

    @property
    def _read(self) -> Any:
        return self._programs.get("read", lambda: programs.read_slot(self._spec, self._num_blocks))

    @property
    def _write(self) -> Any:
        return self._programs.get("write", lambda: programs.write_slot(self._spec, self._num_blocks))

    # On the thread that dispatches.

    def read(self, segment_id: int, first: int) -> Payload:
        """Dispatches a copy of the chunk that begins at this position of a segment; the payload is ready later."""
        payload, _ = self._read(self._arena.segment(segment_id), np.int32(first))
        return list(payload)

    def write(self, segment_id: int, first: int, payload: Payload) -> jax.Array:
        """Dispatches a write, which donates the segment.

        Returns:
          A token: when it is ready, with the value `first + blocks_per_chunk`, the chunk is written.
        """
        segment, token = self._write(self._arena.segment(segment_id), payload, np.int32(first))
        self._arena.replace(segment_id, segment)
        return fetch_early(token, self._spec)

    def unpack(self, source: Bytes) -> Payload:
        """The payload with these bytes; `source` is not to be changed while it is in use."""
        payload, start = [], 0
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

    # On any thread.

    def pack(self, payload: Payload, target: Bytes) -> None:
        """Waits for a payload and copies its bytes: stripe after stripe, of each the shards in the order of devices."""
        start = 0
        for array in payload:
            for shard in sorted(array.addressable_shards, key=lambda shard: shard.device.id):
                piece = np.asarray(shard.data).reshape(-1).view(np.uint8)
                np.copyto(target[start : start + len(piece)], piece)
                start += len(piece)


def _shards(struct: jax.ShapeDtypeStruct) -> tuple[Sequence[int], int, list[Any]]:
    """Of an array: the shape of a shard, its bytes, and the devices of this process that have one, in order."""
    shape = struct.sharding.shard_shape(struct.shape)
    devices = sorted(struct.sharding.addressable_devices, key=lambda device: device.id)
    return shape, math.prod(shape) * np.dtype(struct.dtype).itemsize, devices
