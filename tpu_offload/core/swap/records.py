"""What is known of a request that is swapped out, and of the copies that are on their way."""

import dataclasses
import enum
from collections.abc import Iterator, Sequence
from typing import final

from tpu_offload.core.context import TierContext
from tpu_offload.core.jobs import Job
from tpu_offload.core.swap_pool import HostBlocks
from tpu_offload.types import ChunkKey, CopyPart, Direction, HostStore, JobKind, JobState

_KINDS = {Direction.SAVE: JobKind.SWAP_OUT, Direction.LOAD: JobKind.SWAP_IN}


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
    job: Job | None = None

    @property
    def num_blocks(self) -> tuple[int, ...]:
        """Blocks that it needs to come back, per layer group."""
        first, *others = map(len, self.pool_blocks)
        return (len(self.tier_blocks) + first, *others)


@final
class PlannedSwaps:
    """The copies that are planned or in flight, and what they hold.

    Args:
      context: the books.
    """

    def __init__(self, context: TierContext) -> None:
        self._jobs = context.jobs
        self._pool = context.swap_pool
        self._index = context.index
        self._clock = context.clock
        self._breakers = context.swap_breakers
        self._timeout_s = context.config.job_timeout_s

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs.of(*_KINDS.values()))

    def __contains__(self, job_id: object) -> bool:
        return job_id in self._jobs

    def plan(
        self,
        swapped: Swapped,
        direction: Direction,
        block_tables: Sequence[Sequence[int]],
        places: HostBlocks,
        *,
        tier: CopyPart | None = None,
    ) -> Job | None:
        """Plans a copy between blocks of HBM and places in the swap pool, and takes hold of those.

        Args:
          swapped: whose.
          direction: SAVE swaps out, LOAD swaps in.
          block_tables: per layer group, blocks of HBM.
          places: per layer group, as many held places.
          tier: what comes from the host tier; its chunks are pinned once more.
        Returns:
          None if there is nothing to copy.
        """
        parts = [
            CopyPart(group_id=g, store=HostStore.SWAP_POOL, block_ids=tuple(blocks), host_block_ids=tuple(held))
            for g, (blocks, held) in enumerate(zip(block_tables, places, strict=True))
            if blocks
        ]
        reads_tier = tier is not None and bool(tier.block_ids)
        if tier is not None and reads_tier:
            parts.insert(0, tier)
            self._index.pin(swapped.tier_keys)
        if not parts:
            return None
        self._pool.hold(places)
        return self._jobs.plan(
            _KINDS[direction],
            tuple(parts),
            request=swapped.request_id,
            keys=swapped.tier_keys if reads_tier else (),
            slots=swapped.tier_slots if reads_tier else (),
            pool_blocks=places,
            breaker=self._breakers[direction],
            deadline_s=self._clock() + self._timeout_s,
        )

    def writing(self, blocks: Sequence[int]) -> set[int]:
        """Ids of the copies out that are to write any of these places of the first group."""
        wanted = set(blocks)
        return {
            job.job_id for job in self if job.kind is JobKind.SWAP_OUT and not wanted.isdisjoint(job.pool_blocks[0])
        }

    def detach(self, job: Job) -> None:
        """Nobody waits for a copy back any more. If it has not been sent it never is."""
        job.detached = True
        if job.state is JobState.PLANNED:
            self._jobs.drop(job)

    @property
    def late(self) -> Sequence[Job]:
        """Copies out that timed out and may still land."""
        return self._jobs.late(*_KINDS.values())

    def release(self, swapped: Swapped) -> None:
        """Lets go of what a request held that is no longer swapped out."""
        self._pool.release(swapped.pool_blocks)
        if swapped.tier_keys:
            self._index.unpin(swapped.tier_keys)
