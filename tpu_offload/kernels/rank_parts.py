"""What the devices of one rank in this process have of the host tier, as segments of its own.

Storage copies the slots of one data-parallel rank without those of the others, and on several hosts each host copies
what it has, whenever its disk is done: neither can be a program over all devices. So a part of a segment, the shards of
some devices, is passed to a program as arrays of its own. Their memory is the segment's, and nothing is copied.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, final

import jax

from tpu_offload.kernels.copier import ArenaView, Segment
from tpu_offload.kernels.spec import TransferSpec


class Part(NamedTuple):
    """The part of a host pool that one rank has in this process.

    Attributes:
      spec: what is in it.
      arena: its segments.
      shards: identifies which shards of a block it has; empty if it has all of them.
    """

    spec: TransferSpec
    arena: ArenaView
    shards: str = ""


def part_of_rank(spec: TransferSpec, arena: ArenaView, rank: int) -> Part:
    """The part of a data-parallel rank: with one rank on one host all of it."""
    if spec.num_ranks == 1 and spec.cache_sharding.is_fully_addressable:
        return Part(spec, arena)
    devices = spec.local_devices(rank)
    part = spec.part(devices)
    return Part(part, _PartView(arena, part, devices), spec.part_format(devices))


@final
class _PartView:
    """See `ArenaView`. Arrays of the segment are deleted from the donation of its part to `replace`."""

    def __init__(self, arena: ArenaView, part: TransferSpec, devices: Sequence[Any]) -> None:
        self._arena = arena
        self._structs = part.segment_structs()
        self._devices = devices
        # Per stripe, the shards of the last segment that was asked for: an array of which a shard is deleted does not
        # give them. They hold no memory that the segment does not hold, and go with it.
        self._shards: list[dict[Any, jax.Array]] = []

    def segment(self, segment_id: int) -> Segment:
        self._shards = list(map(_shards_of, self._arena.segment(segment_id)))
        return [
            jax.make_array_from_single_device_arrays(
                struct.shape, struct.sharding, [shards[device] for device in self._devices]
            )
            for shards, struct in zip(self._shards, self._structs, strict=True)
        ]

    def replace(self, segment_id: int, segment: Segment) -> None:
        whole: Segment = []
        for old, shards, own in zip(self._arena.segment(segment_id), self._shards, segment, strict=True):
            new = list((shards | _shards_of(own)).values())
            whole.append(jax.make_array_from_single_device_arrays(old.shape, old.sharding, new))
        self._arena.replace(segment_id, whole)
        self._shards = []


def _shards_of(stripe: jax.Array) -> dict[Any, jax.Array]:
    return {shard.device: shard.data for shard in stripe.addressable_shards}
