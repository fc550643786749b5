"""The memory of the host tier in one process: its pools, and a copier for each page group."""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, final

from tpu_offload.config import ENV_PREFIX, CopyPath, OffloadConfig
from tpu_offload.errors import ConfigError
from tpu_offload.kernels import Copier, DirectCopier, TransferSpec, choose_paths, direct_spec, make_copiers
from tpu_offload.layout import KVLayout
from tpu_offload.memory import SegmentLimit, pinned_zeros
from tpu_offload.types import Direction, HostDivision, HostStore, Pool
from tpu_offload.worker.host_memory import HostMemory, HostPlan, PoolPlan
from tpu_offload.worker.jobs import WorkerJobs
from tpu_offload.worker.page_group_copies import PageGroupCopies, WrapCopier
from tpu_offload.worker.pool_division import HostPool, PoolDivision


@dataclasses.dataclass(frozen=True, slots=True)
class _Pool:
    """What the layer groups of one pool have in common.

    Attributes:
      plan: the size of the pool.
      slot_blocks: blocks of HBM that a slot holds.
      is_staged: whether its copies may take staging blocks.
      limit: of the segments of all its page groups.
      groups: the copies of its page groups.
    """

    plan: PoolPlan
    slot_blocks: int
    is_staged: bool = True
    limit: SegmentLimit = dataclasses.field(default_factory=SegmentLimit)
    groups: list[PageGroupCopies] = dataclasses.field(default_factory=list)


@final
class TierPools:
    """The pools, and the segments that move between them. Called by the thread that dispatches the model.

    Args:
      config: the settings.
      layout: what a block is made of.
      kv_caches: per layer, dtype[num_blocks, *page_shape]; only shapes and shardings are read.
      pools: the sizes of the pools, which are not empty.
      jobs: the worker's jobs in flight.
      fused: the engine runs the fused copies in its own step.
      wrap_copier: see `OffloadWorker`.
      on_fail: is called with the id of each job of which a copy has failed, and the error.

    Attributes:
      groups: the copies of each page group; those of a layer group copy the same blocks to the same places.
      paths: the copy path of each direction, for all groups but that of states, which are copied directly.
      segment_slots: by pool, slots in a segment.
      lockstep: hosts share one model, and must dispatch in the same order, although readiness differs between them.
    Raises:
      ConfigError: the layout does not support the copy paths. No memory is allocated.
    """

    def __init__(
        self,
        config: OffloadConfig,
        layout: KVLayout,
        kv_caches: Sequence[Any],
        *,
        pools: HostPlan,
        jobs: WorkerJobs,
        fused: bool,
        wrap_copier: WrapCopier,
        on_fail: Callable[[int, str], None],
    ) -> None:
        self._wrap_copier = wrap_copier
        self.segment_slots = tuple([plan.segment_slots for plan in pools.pools])
        self.lockstep = not kv_caches[0].sharding.is_fully_addressable
        # Rows of states are megabytes, and few move in a step: they need no staging buffer.
        self._pools = [
            _Pool(plan, 1, is_staged=False) if pool == Pool.STATES else _Pool(plan, config.blocks_per_chunk)
            for pool, plan in enumerate(pools.pools)
        ]
        page_groups = [
            (group_id, self._pools[Pool.STATES if group is layout.state_group else Pool.CHUNKS], pages.layer_ids)
            for group_id, group in enumerate(layout.groups)
            if layout.first_with_arrays[group_id] == group_id
            for pages in group.page_groups
        ]
        specs = [_spec(config, layout, [kv_caches[i] for i in layer_ids], pool) for _, pool, layer_ids in page_groups]
        # Before memory is allocated: it may raise.
        staged = [spec for spec, (_, pool, _) in zip(specs, page_groups, strict=True) if pool.is_staged]
        self.paths = _choose_paths(config, staged, num_groups=len(layout.groups), fused=fused)
        self.groups = []
        with contextlib.ExitStack() as on_error:
            for (group_id, pool, layer_ids), spec in zip(page_groups, specs, strict=True):
                memory = HostMemory.allocate(spec, pool.plan, limit=pool.limit)
                on_error.callback(memory.arena.close)
                group = PageGroupCopies(
                    group_id=group_id,
                    store=HostStore.HOST_TIER,
                    layer_ids=layer_ids,
                    memory=memory,
                    copiers=self._make_copiers(config, pool, memory),
                    jobs=jobs,
                    lockstep=self.lockstep,
                    on_fail=on_fail,
                )
                self.groups.append(group)
                pool.groups.append(group)
            on_error.pop_all()
        self._division: PoolDivision | None = None
        if pools.num_segments:
            self._division = PoolDivision(
                [HostPool(pool.groups, pool.limit, pool.plan.first_segments) for pool in self._pools],
                num_segments=pools.num_segments,
            )

    def _make_copiers(self, config: OffloadConfig, pool: _Pool, memory: HostMemory) -> dict[Direction, Copier]:
        paths = self.paths if pool.is_staged else dict.fromkeys(Direction, CopyPath.DIRECT)
        copiers = make_copiers(
            paths, memory.spec, memory.arena, allocate=pinned_zeros, buckets=config.block_size_buckets
        )
        wrapped = {copier: self._wrap_copier(copier, memory.arena) for copier in copiers.values()}
        return {direction: wrapped[copier] for direction, copier in copiers.items()}

    def memories(self) -> list[list[HostMemory]]:
        """By pool, the host memory of each of its page groups."""
        return [[group.memory for group in pool.groups] for pool in self._pools]

    def sources(self) -> list[PageGroupCopies]:
        """Per page group, the copies with which swap-ins read the host tier, on the direct path."""
        readers = [group.reader(self._direct(group)) for group in self.groups]
        if self._division is not None:
            self._division.add_readers(readers)
        return readers

    def _direct(self, group: PageGroupCopies) -> Copier:
        copier, arena = group.copiers[Direction.LOAD], group.memory.arena
        if isinstance(copier, DirectCopier):
            return copier
        direct = DirectCopier(direct_spec(group.memory.spec), arena, directions=(Direction.LOAD,))
        return self._wrap_copier(direct, arena)

    # Division of the memory into pools.

    def divide(self, division: HostDivision) -> None:
        """Begins to move segments between the pools; `advance` continues."""
        if self._division is not None:
            self._division.begin(division)

    def advance(self) -> tuple[tuple[int, ...], int, int]:
        """Frees and allocates the segments that can be freed and allocated now. Does not wait.

        Returns:
          By pool, slots whose memory is allocated, which grow to the size of the pool; segments that all pools can have
          together; and the last division that was begun. The last two are 0 without states.
        """
        division = self._division
        if division is None:  # nearly always, and in every step
            return (_num_ready(self._pools[0].groups),), 0, 0
        division.advance()
        num_ready = tuple([_num_ready(pool.groups) for pool in self._pools])
        return num_ready, division.num_segments, division.division_id

    @property
    def hbm_nbytes(self) -> int:
        """Most bytes of HBM that the copies take on each device."""
        return sum(group.hbm_nbytes for group in self.groups)

    def take_lost(self) -> tuple[tuple[int, int, int], ...]:
        """Ranges (pool, first, end) of slots lost since the last call, counted within the pool."""
        lost = {
            (number, *slots)  # what one page group has lost is useless in the others
            for number, pool in enumerate(self._pools)
            for group in pool.groups
            for slots in group.memory.arena.take_lost()
        }
        return tuple(sorted(lost))

    def wait_until_allocated(self) -> None:
        """Blocks until the pool is allocated or its allocation has failed."""
        for group in self.groups:
            group.memory.arena.wait_until_allocated()

    def stop_growing(self) -> None:
        """Stops the allocation of the pool, without waiting for it."""
        for group in self.groups:
            group.memory.arena.stop_growing()

    def close(self) -> None:
        """Frees the memory. The caller has waited for the copies in flight."""
        for group in self.groups:
            group.flights.clear()
            group.memory.arena.close()


def _spec(config: OffloadConfig, layout: KVLayout, caches: list[Any], pool: _Pool) -> TransferSpec:
    return TransferSpec.from_caches(
        caches,
        segment_blocks=pool.plan.segment_slots * pool.slot_blocks,
        # No staged dispatch copies more blocks than the cache has, however large the budget.
        capacity=min(config.staging_blocks(layout), caches[0].shape[0] // layout.num_ranks),
    )


def _num_ready(groups: Sequence[PageGroupCopies]) -> int:
    # A segment is usable once all page groups have it.
    if len(groups) == 1:
        return groups[0].memory.arena.num_chunks_ready
    return min([group.memory.arena.num_chunks_ready for group in groups], default=0)


def _choose_paths(
    config: OffloadConfig, specs: Sequence[TransferSpec], *, num_groups: int, fused: bool
) -> dict[Direction, CopyPath]:
    """The path of each direction, for all page groups; `auto` is decided by the one with the largest blocks."""
    if (len(specs) > 1 or num_groups > 1) and CopyPath.FUSED in (config.save_path, config.load_path):
        what = f"{num_groups} layer groups" if num_groups > 1 else f"pages of {len(specs)} shapes or dtypes"
        raise ConfigError(
            f"{ENV_PREFIX}SAVE_PATH={config.save_path.value}, {ENV_PREFIX}LOAD_PATH={config.load_path.value} for "
            f"{what}; fused copies support one: set direct or staged"
        )
    largest = max(specs, key=lambda spec: spec.block_nbytes_per_device)
    return choose_paths(config, largest, fused=fused and len(specs) == num_groups == 1)
