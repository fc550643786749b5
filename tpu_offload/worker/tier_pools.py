"""The memory of the host tier in one process: its pools of chunks and of states, and a copier for each page group."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, final

from tpu_offload.config import ENV_PREFIX, CopyPath, OffloadConfig
from tpu_offload.errors import ConfigError
from tpu_offload.kernels import Copier, DirectCopier, TransferSpec, choose_paths, direct_spec, make_copiers
from tpu_offload.layout import KVLayout
from tpu_offload.memory import SegmentLimit, pinned_zeros
from tpu_offload.types import Direction, HostDivision, HostStore
from tpu_offload.worker.group_copies import GroupCopies, WrapCopier
from tpu_offload.worker.host_memory import HostMemory, HostPlan, PoolPlan
from tpu_offload.worker.jobs import WorkerJobs
from tpu_offload.worker.pool_division import HostPool, PoolDivision


@final
class TierPools:
    """The pools, and the segments that move between them. Called by the thread that dispatches the model.

    Args:
      config: the settings.
      layout: what a block is made of.
      kv_caches: per layer, dtype[num_blocks, *page_shape]; only shapes and shardings are read.
      pools: the sizes of the pool of chunks, which is not empty, and of that of states, if the layout has them.
      jobs: the worker's jobs in flight.
      fused: the engine runs the fused copies in its own step.
      wrap_copier: see `OffloadWorker`.
      on_fail: is called with the id of each job of which a copy has failed, and the error.

    Attributes:
      groups: the copies of each page group; those of a layer group copy the same blocks to the same places.
      paths: the copy path of each direction, for all groups but that of states, which are copied directly.
      segment_chunks: chunks of a segment of the pool of chunks.
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
        self.segment_chunks = pools.chunks.segment_chunks
        self._state_group_id = len(layout.groups) - 1 if layout.state_group is not None else None
        self.lockstep = not kv_caches[0].sharding.is_fully_addressable
        pool_of = layout.first_with_arrays
        page_groups = [
            (i, pages.layer_ids)
            for i, group in enumerate(layout.groups)
            if pool_of[i] == i
            for pages in group.page_groups
        ]
        specs = [
            self._make_spec(config, layout, [kv_caches[i] for i in layer_ids], pools, group_id)
            for group_id, layer_ids in page_groups
        ]
        # Before memory is allocated: it may raise.
        of_attention = [
            spec for spec, (group_id, _) in zip(specs, page_groups, strict=True) if group_id != self._state_group_id
        ]
        self.paths = _choose_paths(config, of_attention, num_groups=len(layout.groups), fused=fused)
        chunk_limit, state_limit = SegmentLimit(), SegmentLimit()
        make_group = functools.partial(self._make_group, config, jobs=jobs, on_fail=on_fail)
        self.groups = [
            make_group(
                group_id,
                layer_ids,
                spec,
                pool=self._plan_of(pools, group_id),
                limit=state_limit if group_id == self._state_group_id else chunk_limit,
            )
            for (group_id, layer_ids), spec in zip(page_groups, specs, strict=True)
        ]
        self._of_chunks = [group for group in self.groups if group.group_id != self._state_group_id]
        self._of_states = [group for group in self.groups if group.group_id == self._state_group_id]
        self._division: PoolDivision | None = None
        if pools.num_segments:
            self._division = PoolDivision(
                HostPool(self._of_chunks, chunk_limit, pools.chunks.first_segments),
                HostPool(self._of_states, state_limit, pools.states.first_segments),
                num_segments=pools.num_segments,
            )

    def _plan_of(self, pools: HostPlan, group_id: int) -> PoolPlan:
        return pools.states if group_id == self._state_group_id else pools.chunks

    def _make_spec(
        self, config: OffloadConfig, layout: KVLayout, caches: list[Any], pools: HostPlan, group_id: int
    ) -> TransferSpec:
        blocks_per_chunk = 1 if group_id == self._state_group_id else config.blocks_per_chunk
        return TransferSpec.from_caches(
            caches,
            segment_blocks=self._plan_of(pools, group_id).segment_chunks * blocks_per_chunk,
            # No staged dispatch copies more blocks than the cache has, however large the budget.
            capacity=min(config.staging_blocks(layout), caches[0].shape[0] // layout.num_ranks),
        )

    def _make_group(
        self,
        config: OffloadConfig,
        group_id: int,
        layer_ids: Sequence[int],
        spec: TransferSpec,
        *,
        pool: PoolPlan,
        limit: SegmentLimit,
        jobs: WorkerJobs,
        on_fail: Callable[[int, str], None],
    ) -> GroupCopies:
        memory = HostMemory.allocate(spec, pool, limit=limit)
        # A row of states is megabytes, and few move in a step: they need no staging buffer.
        paths = self.paths if group_id != self._state_group_id else dict.fromkeys(Direction, CopyPath.DIRECT)
        copiers = make_copiers(paths, spec, memory.arena, allocate=pinned_zeros, buckets=config.block_size_buckets)
        wrapped = {copier: self._wrap_copier(copier, memory.arena) for copier in copiers.values()}
        return GroupCopies(
            group_id=group_id,
            store=HostStore.HOST_TIER,
            layer_ids=layer_ids,
            memory=memory,
            copiers={direction: wrapped[copier] for direction, copier in copiers.items()},
            jobs=jobs,
            lockstep=self.lockstep,
            on_fail=on_fail,
        )

    def memories(self) -> list[HostMemory]:
        """Per page group of chunks, the host memory."""
        return [group.memory for group in self._of_chunks]

    def state_memories(self) -> list[HostMemory]:
        """Likewise, of states; none for a layout without them."""
        return [group.memory for group in self._of_states]

    def sources(self) -> list[GroupCopies]:
        """Per page group, the copies with which swap-ins read the host tier, on the direct path."""
        readers = [group.reader(self._direct(group)) for group in self.groups]
        if self._division is not None:
            self._division.add_readers(readers)
        return readers

    def _direct(self, group: GroupCopies) -> Copier:
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

    def advance(self) -> tuple[int, int, int, int]:
        """Frees and allocates the segments that can be freed and allocated now. Does not wait.

        Returns:
          Chunks whose memory is allocated, which grow to the size of the pool; likewise rows of states; segments that
          both pools can have together; and the last division that was begun. The last three are 0 without states.
        """
        division = self._division
        if division is None:  # nearly always, and in every step
            return _num_ready(self._of_chunks), 0, 0, 0
        division.advance()
        return _num_ready(self._of_chunks), _num_ready(self._of_states), division.num_segments, division.division_id

    @property
    def hbm_nbytes(self) -> int:
        """Most bytes of HBM that the copies take on each device."""
        return sum(group.hbm_nbytes for group in self.groups)

    def take_lost(self) -> tuple[tuple[int, int], ...]:
        """Ranges (first, end) of slots of chunks lost since the last call."""
        return _take_lost(self._of_chunks)

    def take_lost_states(self) -> tuple[tuple[int, int], ...]:
        """Likewise, rows of states."""
        return _take_lost(self._of_states)

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


def _num_ready(groups: Sequence[GroupCopies]) -> int:
    # A segment is usable once all page groups have it.
    if len(groups) == 1:
        return groups[0].memory.arena.num_chunks_ready
    return min([group.memory.arena.num_chunks_ready for group in groups], default=0)


def _take_lost(groups: Iterable[GroupCopies]) -> tuple[tuple[int, int], ...]:
    # What one page group has lost is useless in the others.
    return tuple(sorted({lost for group in groups for lost in group.memory.arena.take_lost()}))


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
