"""The state of a swapped-out request, and the jobs that copy requests out and back."""

import dataclasses
import enum
from collections.abc import Collection, Iterator, Sequence
from typing import final

from tpu_offload.core.context import TierContext
from tpu_offload.core.holdings import Holdings
from tpu_offload.core.jobs import Job
from tpu_offload.core.swap.pool import HostBlocks
from tpu_offload.types import CopyPart, Direction, HostStore, JobKind, JobState

_KINDS = {Direction.SAVE: JobKind.SWAP_OUT, Direction.LOAD: JobKind.SWAP_IN}


class SwapState(enum.Enum):
    """The state of a swapped-out request."""

    OUT = "out"  # copies out may still be in flight, see `SwappedRequest.writers`
    RETURNING = "returning"


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class SwappedRequest:
    """A request that is swapped out.

    Attributes:
      request_id: the engine's name for it.
      held: chunks of the host tier that hold its first blocks, pinned; and per layer group, places of its other blocks
        in the swap pool, in the order of its block table.
      tier_blocks: places of its first blocks in the host tier.
      writers: ids of the jobs in flight that write those places.
      step_id: id of the plan that followed its swap-out.
      can_save: whether its KV was what its hashes say.
      state: out, or returning.
      job: the copy back while it is in flight. Without one a RETURNING request waits only for `writers`.
    """

    request_id: str
    held: Holdings
    tier_blocks: tuple[int, ...]
    writers: set[int]
    step_id: int
    can_save: bool
    state: SwapState = SwapState.OUT
    job: Job | None = None

    @property
    def num_blocks(self) -> tuple[int, ...]:
        """Blocks that it needs to be swapped in, per layer group."""
        first, *others = map(len, self.held.pool_blocks)
        return (len(self.tier_blocks) + first, *others)

    def copies_back(
        self, granted: Sequence[Sequence[int]], present: Collection[int]
    ) -> tuple[list[Sequence[int]], HostBlocks, CopyPart]:
        """What a swap-in copies.

        Args:
          granted: per layer group, `num_blocks` blocks of HBM.
          present: positions in the first block table that need no copy.
        Returns:
          Per layer group, the blocks of HBM to write from the swap pool, and their places there; and what is read from
          the host tier.
        """
        num_tier = len(self.tier_blocks)
        missing = [i for i in range(self.num_blocks[0]) if i not in present]
        from_tier = [i for i in missing if i < num_tier]
        from_pool = [i for i in missing if i >= num_tier]
        targets: list[Sequence[int]] = [[granted[0][i] for i in from_pool], *granted[1:]]
        pool_blocks = self.held.pool_blocks
        places = (tuple(pool_blocks[0][i - num_tier] for i in from_pool), *pool_blocks[1:])
        tier = CopyPart(
            group_id=0,
            store=HostStore.HOST_TIER,
            block_ids=tuple(granted[0][i] for i in from_tier),
            host_block_ids=tuple(self.tier_blocks[i] for i in from_tier),
        )
        return targets, places, tier


@final
class SwapJobs:
    """The copies out and back that are planned or in flight, and the pins and pool blocks that they hold.

    Args:
      context: shared state of the scheduler.
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
        swapped: SwappedRequest,
        direction: Direction,
        block_tables: Sequence[Sequence[int]],
        places: HostBlocks,
        *,
        tier: CopyPart | None = None,
    ) -> Job | None:
        """Plans a copy between blocks of HBM and places in the swap pool, and holds those places.

        Args:
          swapped: the request.
          direction: SAVE swaps out, LOAD swaps in.
          block_tables: per layer group, blocks of HBM.
          places: per layer group, one held place for each of them.
          tier: what is read from the host tier; its chunks are pinned once more.
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
            self._index.pin(swapped.held.keys)
        if not parts:  # without a copy its probe proves nothing
            self._breakers[direction].cancel_probe(swapped.request_id)
            return None
        self._pool.hold(places)
        return self._jobs.plan(
            _KINDS[direction],
            tuple(parts),
            Holdings(
                direction,
                self._breakers[direction],
                probe=swapped.request_id,
                keys=swapped.held.keys if reads_tier else (),
                slots=swapped.held.slots if reads_tier else (),
                are_pinned=reads_tier,
                pool_blocks=places,
            ),
            request=swapped.request_id,
            deadline_s=self._clock() + self._timeout_s,
        )

    def writing(self, blocks: Sequence[int]) -> set[int]:
        """Ids of the copies out, planned or in flight, that write any of these places of the first group."""
        wanted = set(blocks)
        return {
            job.job_id
            for job in self
            if job.kind is JobKind.SWAP_OUT and not wanted.isdisjoint(job.held.pool_blocks[0])
        }

    def detach(self, job: Job) -> None:
        """No request waits for this copy back any more. If it is not sent yet, it never will be."""
        job.detached = True
        if job.state is JobState.PLANNED:
            self._jobs.cancel_planned(job)

    @property
    def late(self) -> Sequence[Job]:
        """Copies out that timed out and may still write to the pool."""
        return self._jobs.late(*_KINDS.values())
