"""Pinned host memory of one process: how large it is, how it is divided, and which places hold readable blocks."""

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any, Self, final

import jax
import numpy as np

from tpu_offload.config import OffloadConfig
from tpu_offload.errors import TransferError
from tpu_offload.kernels import BlockMoves, Flight, TransferSpec
from tpu_offload.layout import KVLayout
from tpu_offload.memory import (
    HostArena,
    SegmentLimit,
    cap_chunks,
    plan_segments,
    plan_shared_segments,
    size_swap_pool,
    wanted_swap_blocks,
)

_logger = logging.getLogger(__name__)

_GB = 2**30


@dataclasses.dataclass(frozen=True, slots=True)
class PoolPlan:
    """The size of one host pool.

    Attributes:
      num_slots: most slots.
      num_segments: segments that hold them.
      segment_slots: slots in each.
      first_segments: segments that it has at first.
    """

    num_slots: int = 0
    num_segments: int = 0
    segment_slots: int = 1
    first_segments: int = 0

    @property
    def num_first_slots(self) -> int:
        """Slots that it has at first."""
        return min(self.num_slots, self.first_segments * self.segment_slots)


@final
@dataclasses.dataclass(frozen=True, slots=True)
class HostPlan:
    """The size of the host tier.

    Attributes:
      pools: by pool; all are empty if there is no memory for them.
      num_segments: with states, segments of all pools together at any time; else 0.
      nbytes: bytes of host memory in this process.
    """

    pools: tuple[PoolPlan, ...]
    num_segments: int = 0
    nbytes: int = 0

    @property
    def num_first_slots(self) -> tuple[int, ...]:
        """By pool, the slots that it has at first."""
        return tuple([pool.num_first_slots for pool in self.pools])


def plan_host_pools(config: OffloadConfig, layout: KVLayout, kv_caches: Sequence[Any], available: int) -> HostPlan:
    """Sizes the host tier.

    Args:
      config: the settings.
      layout: what a block is made of.
      kv_caches: only their sharding is read.
      available: free bytes of host memory.
    Returns:
      Its pools; all are empty if there is no memory for one, or the host tier is off.
    """
    if not config.enabled:
        return HostPlan((PoolPlan(),))
    fraction = config.host_memory_fraction
    segments = config.host_segments(layout)
    if segments is not None:
        nbytes = segments.segment_nbytes
        num_segments = cap_chunks(
            segments.num_segments, chunk_nbytes=nbytes, fraction=fraction, available=available, what="segments"
        )
        if num_segments < 2:
            _logger.warning(
                "host memory for %d segments; expected at least 2, for chunks and for states: nothing is offloaded; "
                "free host memory, raise TPU_OFFLOAD_HOST_MEMORY_FRACTION or lower TPU_OFFLOAD_HOST_SEGMENT_GB",
                num_segments,
            )
            return HostPlan((PoolPlan(),) * len(segments.segment_slots))
        segments = dataclasses.replace(segments, num_segments=num_segments)
        first = segments.divide(num_segments, (config.state_share,))
        pools = [
            PoolPlan(num_slots, segments.max_segments, *of_segments)
            for num_slots, *of_segments in zip(segments.max_slots, segments.segment_slots, first, strict=True)
        ]
        return HostPlan(tuple(pools), num_segments, num_segments * nbytes)
    wanted, chunk_nbytes = config.host_chunks(layout), layout.block_nbytes_per_host * config.blocks_per_chunk
    fitting = cap_chunks(wanted, chunk_nbytes=chunk_nbytes, fraction=fraction, available=available)
    gb = config.host_segment_gb
    if kv_caches[0].sharding.is_fully_addressable:
        num, size = plan_segments(fitting, chunk_nbytes=chunk_nbytes, segment_gb=gb)
    else:
        num, size = plan_shared_segments(wanted, fitting, chunk_nbytes=chunk_nbytes, segment_gb=gb)
    num_chunks = min(fitting, num * size)
    return HostPlan((PoolPlan(num_chunks, num, size, num),), nbytes=num_chunks * chunk_nbytes)


def plan_swap_pool(
    config: OffloadConfig, layout: KVLayout, kv_caches: Sequence[Any], available: int
) -> list[tuple[int, tuple[int, int]]]:
    """Sizes the swap pool; arguments as for `plan_host_pools`.

    Returns:
      Per layer group, the number of blocks; and the number of segments, and the blocks in each.
    """
    # Groups that share arrays share their blocks: half of the pool's default size is the KV cache, counted once.
    arrays = [group.layer_ids for group in layout.groups]
    num_hbm_blocks = [max(1, kv_caches[ids[0]].shape[0] // layout.num_ranks // arrays.count(ids)) for ids in arrays]
    wanted_nbytes = None if config.swap_gb == "auto" else int(config.swap_gb * _GB)
    groups = [(n, layout.group_nbytes_per_host(g)) for n, g in zip(num_hbm_blocks, layout.groups, strict=True)]
    sizes = size_swap_pool(wanted_nbytes, groups=groups, fraction=config.swap_safety, available=available)
    wanted = wanted_swap_blocks(wanted_nbytes, groups=groups)
    shared = not kv_caches[0].sharding.is_fully_addressable
    segments = [
        plan_shared_segments(most, num_blocks, chunk_nbytes=nbytes, segment_gb=config.host_segment_gb)
        if shared
        else plan_segments(num_blocks, chunk_nbytes=nbytes, segment_gb=config.host_segment_gb)
        for most, num_blocks, (_, nbytes) in zip(wanted, sizes, groups, strict=True)
    ]
    return [(min(n, num * per), (num, per)) for n, (num, per) in zip(sizes, segments, strict=True)]


@final
@dataclasses.dataclass(frozen=True, slots=True)
class HostMemory:
    """The segments of one store and page group, and which of their places hold nothing.

    Attributes:
      spec: what is copied.
      arena: the segments.
      num_segments: most segments.
      blocks_per_chunk: places that are allocated together.
      lost: bool[num_ranks, places]; whether a place of a data-parallel rank was never written, or its contents are
        lost. A plan that was made before the loss was known, or for an earlier incarnation of this worker, would load
        zeros from it.
    """

    spec: TransferSpec
    arena: HostArena
    num_segments: int
    blocks_per_chunk: int
    lost: np.ndarray[Any, np.dtype[np.bool_]]

    @classmethod
    def allocate(cls, spec: TransferSpec, pool: PoolPlan, *, limit: SegmentLimit) -> Self:
        """Starts the allocation of what a pool has at first, in the background; see `HostArena`."""
        arena = HostArena(
            spec.segment_structs(),
            num_segments=pool.first_segments,
            chunks_per_segment=pool.segment_slots,
            num_chunks=pool.num_slots,
            limit=limit,
        )
        return cls(
            spec,
            arena,
            pool.num_segments,
            spec.segment_blocks // pool.segment_slots,
            np.ones((spec.num_ranks, pool.num_segments * spec.segment_blocks), np.bool_),
        )

    def free_from(self, segment_id: int) -> None:
        """Frees all segments from this one on; see `HostArena.free_from`."""
        self.arena.free_from(segment_id)
        self.lost[:, segment_id * self.spec.segment_blocks :] = True

    @property
    def num_blocks_ready(self) -> int:
        """Places that are allocated; grows."""
        return self.arena.num_chunks_ready * self.blocks_per_chunk

    def mark(self, segment_id: int, places: Any, *, lost: bool, ranks: Any = None) -> None:
        """Marks places of a segment as lost or as written; those of all ranks, of one, or each of the rank given."""
        first = segment_id * self.spec.segment_blocks
        end = first + self.spec.segment_blocks
        if ranks is not None:
            self.lost[:, first:end][ranks, places] = lost
        elif len(self.lost) == 1 and not isinstance(places, slice):  # nearly always, and cheaper, also for many
            flags = memoryview(self.lost[0])
            for place in places.tolist():
                flags[first + place] = lost
        else:
            self.lost[:, first:end][:, places] = lost

    def check_segment(self, segment_id: int, *, lost: bool) -> None:
        """After a failed copy, marks a segment as lost if it is, or if the failed program has taken it by donation."""
        try:
            lost = lost or any(map(_is_deleted, self.arena.segment(segment_id)))
        except TransferError:  # lost already
            return
        if lost:
            self.arena.mark_lost(segment_id)
            self.mark(segment_id, slice(None), lost=True)


def _is_deleted(stripe: jax.Array) -> bool:
    """Whether an array has been donated, also in part (`kernels.rank_parts`), which `is_deleted` may not tell."""
    return stripe.is_deleted() or any(shard.data.is_deleted() for shard in stripe.addressable_shards)


def check_copied(flight: Flight) -> None:
    """Raises the error of a flight whose token is ready."""
    num_copied, num_blocks = _num_copied(flight.waiting_on, flight.moves)
    if num_copied != num_blocks:
        raise TransferError(f"the device copied {num_copied} of {num_blocks} blocks")


def _num_copied(token: jax.Array, moves: BlockMoves) -> tuple[int, int]:
    """How many blocks were copied, and how many there are; only of ranks that this process has devices of."""
    if moves.ranks is None or token.is_fully_addressable:
        num_copied = np.asarray(token)
        return int(num_copied.sum() if num_copied.ndim else num_copied), len(moves)
    of_rank: dict[int, int] = {}
    for shard in token.addressable_shards:
        rank, count = shard.index[0].start or 0, int(np.asarray(shard.data)[0])
        of_rank[rank] = min(count, of_rank.get(rank, count))  # that of the device that has copied fewest
    return sum(of_rank.values()), int(np.isin(moves.ranks, list(of_rank)).sum())
