"""What is known of a request that is swapped out, and of the copies that are on their way."""

import dataclasses
import enum
from collections.abc import Iterator, Sequence
from typing import final

from tpu_offload.core.context import TierContext
from tpu_offload.core.jobs import Held, TrackedJob
from tpu_offload.core.swap_pool import HostBlocks
from tpu_offload.types import ChunkKey, Direction, HostStore, JobState, SwapJob, SwapPart


class Where(enum.Enum):
    """Where a swapped-out request is."""

    OUT = "out"  # copies out may still be in flight, see `Swapped.writers`
    RETURNING = "returning"


@dataclasses.dataclass(slots=True, eq=False)
class Swapped:
    """A request that is swapped out.

    Attributes:
      request_id: the engine's name for it.
      tier_keys: chunks of the host tier that hold its first blocks; pinned.
      tier_slots: where those are.
      tier_blocks: places of those blocks in the host tier.
      pool_blocks: places of its other blocks in the swap pool, per layer group in the order of its block table; held.
      writers: jobs in flight that its blocks in the pool come from.
      where: out, or on its way back.
      job: the copy back, from its start to its end; while RETURNING without one, it waits for `writers` only.
    """

    request_id: str
    tier_keys: Sequence[ChunkKey]
    tier_slots: tuple[int, ...]
    tier_blocks: tuple[int, ...]
    pool_blocks: HostBlocks
    writers: set[int]
    where: Where = Where.OUT
    job: "PlannedSwap | None" = None

    @property
    def num_blocks(self) -> tuple[int, ...]:
        """Blocks that it needs to come back, per layer group."""
        first, *others = map(len, self.pool_blocks)
        return (len(self.tier_blocks) + first, *others)


@final
@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class PlannedSwap(TrackedJob):
    """Copies in flight. They hold the places in the swap pool that they read or write, and pin what they read.

    Attributes:
      swap: what the workers are told.
      tier_slots: where the chunks of the host tier are that they read.
      nbytes: bytes that move, over all devices.
    """

    swap: SwapJob
    tier_slots: tuple[int, ...]
    nbytes: int

    @property
    def pool_blocks(self) -> HostBlocks:
        """Places in the swap pool that they read or write, per layer group."""
        return self.held.pool_blocks

    @property
    def direction(self) -> Direction:
        """SAVE goes out, LOAD comes back."""
        return self.swap.direction

    @property
    def num_parts(self) -> int:
        """A request is back with all of its blocks or not at all."""
        return 0

    @property
    def what(self) -> str:
        """See `TrackedJob`."""
        return f"swap {'out' if self.direction is Direction.SAVE else 'in'} of request {self.swap.request_id}"

    @property
    def consequence(self) -> str:
        """See `TrackedJob`."""
        return "it is recomputed"


@final
class PlannedSwaps:
    """The copies that are planned or in flight, and what they hold.

    Args:
      context: the books.
    """

    def __init__(self, context: TierContext) -> None:
        self._jobs = context.jobs
        self._layout = context.layout
        self._pool = context.swap_pool
        self._index = context.index
        self._clock = context.clock
        self._breakers = context.swap_breakers
        self._timeout_s = context.config.job_timeout_s
        self._to_send: dict[Direction, list[PlannedSwap]] = {direction: [] for direction in Direction}

    def __len__(self) -> int:
        return len(self._jobs.of(PlannedSwap))

    def __iter__(self) -> Iterator[PlannedSwap]:
        return iter(self._jobs.of(PlannedSwap))

    def __contains__(self, job_id: object) -> bool:
        return job_id in self._jobs

    def plan(
        self,
        swapped: Swapped,
        direction: Direction,
        block_ids: Sequence[Sequence[int]],
        places: HostBlocks,
        *,
        tier: SwapPart | None = None,
    ) -> PlannedSwap | None:
        """Plans a copy between blocks of HBM and places in the swap pool, and takes hold of those.

        Args:
          swapped: whose.
          direction: SAVE swaps out, LOAD swaps in.
          block_ids: per layer group, blocks of HBM.
          places: per layer group, as many held places.
          tier: what comes from the host tier; its chunks are pinned once more.
        Returns:
          None if there is nothing to copy.
        """
        parts = [
            SwapPart(group_id=g, store=HostStore.SWAP_POOL, block_ids=tuple(blocks), host_block_ids=tuple(held))
            for g, (blocks, held) in enumerate(zip(block_ids, places, strict=True))
            if blocks
        ]
        reads_tier = tier is not None and bool(tier.block_ids)
        if tier is not None and reads_tier:
            parts.insert(0, tier)
            self._index.pin(swapped.tier_keys)
        if not parts:
            return None
        self._pool.hold(places)
        job_id = self._jobs.next_id()
        job = self._jobs.add(
            PlannedSwap(
                job_id=job_id,
                deadline_s=self._clock() + self._timeout_s,
                waiting_for=self._jobs.workers(),
                breaker=self._breakers[direction],
                held=Held(pins=swapped.tier_keys if reads_tier else (), pool_blocks=places),
                swap=SwapJob(job_id=job_id, direction=direction, request_id=swapped.request_id, parts=tuple(parts)),
                tier_slots=swapped.tier_slots if reads_tier else (),
                nbytes=sum(len(part.block_ids) * self._layout.groups[part.group_id].block_nbytes for part in parts),
            )
        )
        self._to_send[direction].append(job)
        return job

    def writing(self, blocks: Sequence[int]) -> set[int]:
        """Ids of the copies out that are to write any of these places of the first group."""
        wanted = set(blocks)
        return {
            job.job_id
            for job in self
            if job.swap.direction is Direction.SAVE and not wanted.isdisjoint(job.pool_blocks[0])
        }

    def detach(self, job: PlannedSwap) -> None:
        """Nobody waits for a copy back any more. If it has not been sent it never is."""
        job.detached = True
        if job.state is JobState.PLANNED:
            self._to_send[Direction.LOAD].remove(job)
            self._jobs.drop(job)

    def take(self, direction: Direction) -> tuple[SwapJob, ...]:
        """What goes with the coming step's plan."""
        jobs, self._to_send[direction] = self._to_send[direction], []
        for job in jobs:
            job.state = JobState.SENT
        return tuple(job.swap for job in jobs)

    @property
    def late(self) -> Sequence[PlannedSwap]:
        """Copies out that timed out and may still land."""
        return self._jobs.late(PlannedSwap)

    def release(self, swapped: Swapped) -> None:
        """Lets go of what a request held that is no longer swapped out."""
        self._pool.release(swapped.pool_blocks)
        if swapped.tier_keys:
            self._index.unpin(swapped.tier_keys)
