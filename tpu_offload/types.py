"""What scheduler and worker say to each other: one plan down and one report up per step.

Both ends may live in different processes on different hosts, so everything here is frozen, picklable
and holds only ids and numbers. No array and no object of either side ever crosses.
"""

import dataclasses
import enum
import operator
from collections.abc import Callable
from typing import Any, NewType

BlockHash = NewType("BlockHash", bytes)
"""Hash of one block's tokens chained on the hash of the block before it (see `hashing`)."""

ChunkKey = NewType("ChunkKey", bytes)
"""Names a chunk: the hash of its last block, which covers all tokens before it, plus its layer group."""


class Direction(enum.Enum):
    """Which way a transfer goes."""

    SAVE = "save"  # HBM to host
    LOAD = "load"  # host to HBM


class JobState(enum.Enum):
    """Where a job is. The four last are ends; a job has exactly one of them."""

    PLANNED = "planned"  # accepted by the scheduler, not yet in a plan
    SENT = "sent"  # in a plan that went to the workers
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed_out"  # some worker has not reported it in time; only the scheduler says so

    @property
    def ended(self) -> bool:
        """Whether this is one of the ends."""
        return self not in (JobState.PLANNED, JobState.SENT)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TransferJob:
    """Blocks of one layer group that move together: a load for one request, a save for one or more.

    Attributes:
      job_id: unique over the life of the scheduler.
      direction: save or load.
      group_id: index of the layer group in `KVLayout.groups`.
      block_ids: blocks of the HBM cache.
      host_block_ids: as many places in the host pool; block `j` of the chunk in slot `s` is at
        `s * blocks_per_chunk + j`.
      request_id: the engine's request that a load is for; empty for a save.
      num_staging_blocks: staging blocks that are reserved for it on every worker, 0 on a path that stages nothing. A
        load of more blocks than that is copied in pieces: never more of it than this is in the staging buffer.
    """

    job_id: int
    direction: Direction
    group_id: int
    block_ids: tuple[int, ...]
    host_block_ids: tuple[int, ...]
    request_id: str = ""
    num_staging_blocks: int = 0

    def __post_init__(self) -> None:
        if len(self.block_ids) != len(self.host_block_ids):
            raise ValueError(
                f"job {self.job_id}: {len(self.block_ids)} blocks for {len(self.host_block_ids)} host blocks; "
                "expected as many of each"
            )

    @property
    def num_blocks(self) -> int:
        """Blocks that move."""
        return len(self.block_ids)


class HostStore(enum.Enum):
    """Which host memory a part of a swap is in."""

    SWAP_POOL = "swap_pool"  # blocks of requests that were swapped out
    HOST_TIER = "host_tier"  # chunks that were saved; only read by swaps


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SwapPart:
    """Blocks of one layer group that a swap moves between HBM and one host store.

    Attributes:
      group_id: index of the layer group in `KVLayout.groups`.
      store: the host memory.
      block_ids: blocks of the group's caches.
      host_block_ids: as many places in the store.
    """

    group_id: int
    store: HostStore
    block_ids: tuple[int, ...]
    host_block_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.block_ids) != len(self.host_block_ids):
            raise ValueError(
                f"{len(self.block_ids)} blocks for {len(self.host_block_ids)} host blocks; expected as many of each"
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SwapJob:
    """One request's blocks on their way out of HBM, or back.

    Attributes:
      job_id: unique over the life of the scheduler, also among transfer jobs.
      direction: SAVE swaps out, LOAD swaps in.
      request_id: whose blocks.
      parts: what moves; only a swap-in reads the host tier.
    """

    job_id: int
    direction: Direction
    request_id: str
    parts: tuple[SwapPart, ...]

    @property
    def num_blocks(self) -> int:
        """Blocks that move, of all layer groups."""
        return sum(len(part.block_ids) for part in self.parts)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What the workers do around one forward pass.

    Attributes:
      step_id: counts up by one a plan.
      loads: dispatched before the forward pass.
      saves: dispatched after the forward pass, before any later step can overwrite their blocks.
      cancelled_job_ids: loads whose blocks the engine has taken back. A worker must not write into
        their blocks from this plan on; it reports the job as cancelled, or as finished when it had
        dispatched the last write before. Repeated in every plan until the job is known to be over, so that no plan
        that is lost or comes too late leaves a load behind.
      swap_outs: dispatched before any load, because their blocks are others' from this step on.
      swap_ins: dispatched before the forward pass, after `swap_outs`.
      next_job_id: jobs with smaller ids have been sent, with this plan or before; a worker that does not have them
        never will, and says so with `StepReport.oldest_job_id`. So a plan that comes twice, or after a later one, is
        recognized, and nothing of it is done again. 0, as in a plan made by hand, says nothing.
      early_saves: like `swap_outs`: dispatched before any load, because their blocks are others' from this step on.
      cache_epochs: per worker id, (incarnation, number of cache losses) of that worker as the scheduler knew them when
        it made the plan. A worker that is past that does none of the jobs: what they copy is gone, or is not what the
        scheduler thinks it is. Empty, as in a plan made by hand, is not checked.
    """

    step_id: int
    loads: tuple[TransferJob, ...] = ()
    saves: tuple[TransferJob, ...] = ()
    cancelled_job_ids: tuple[int, ...] = ()
    swap_outs: tuple[SwapJob, ...] = ()
    swap_ins: tuple[SwapJob, ...] = ()
    next_job_id: int = 0
    early_saves: tuple[TransferJob, ...] = ()
    cache_epochs: tuple[tuple[int, int], ...] = ()

    @property
    def empty(self) -> bool:
        """Whether there is nothing to do."""
        return not (
            self.loads or self.saves or self.cancelled_job_ids or self.swap_outs or self.swap_ins or self.early_saves
        )

    def __reduce__(self) -> tuple[Callable[..., "StepPlan"], tuple[Any, ...]]:
        """A plan is pickled every step, and what dataclasses do for slots takes longer."""
        return _unpickle_plan, _values_of_plan(self)


_PLAN_FIELDS = tuple(field.name for field in dataclasses.fields(StepPlan))
_values_of_plan: Callable[[StepPlan], tuple[Any, ...]] = operator.attrgetter(*_PLAN_FIELDS)


def _unpickle_plan(*values: Any) -> StepPlan:
    return StepPlan(**dict(zip(_PLAN_FIELDS, values, strict=True)))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """How a job ended on one worker.

    Attributes:
      job_id: the job.
      state: FINISHED, FAILED or CANCELLED.
      error: what went wrong, in one line; empty unless FAILED.
      failed_blocks: for a transfer job that FAILED, positions in its `block_ids` of the blocks that were not copied,
        ascending; empty stands for all of them.
      duration_s: seconds from dispatch to the poll that saw the end.
      copy_s: seconds that the copy itself took, where the worker has measured it (some swaps), else 0.
    """

    job_id: int
    state: JobState
    error: str = ""
    duration_s: float = 0.0
    copy_s: float = 0.0
    failed_blocks: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CacheEpoch:
    """Names the KV caches of one worker between two losses: nothing saved from others is what the scheduler thinks.

    Attributes:
      worker_id: whose caches.
      incarnation: the life of the worker.
      num_losses: how often it has lost its caches in this life.
    """

    worker_id: int
    incarnation: int
    num_losses: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSetup:
    """What a worker was made with. The scheduler compares it with its own settings and with the other workers'.

    Attributes:
      num_processes: processes that hold a part of this worker's caches, itself included.
      process_index: which of them this is, as `jax.process_index` counts.
      fingerprint: of the layout, in hex.
      blocks_per_chunk: as in the settings; 0 if the host tier is off.
      staging_blocks: the staging budget; 0 if the host tier is off.
      max_load_blocks: blocks that are loaded before one step where loads are not staged; 0 for no bound.
      segment_chunks: chunks in a segment of the host pool; 0 if the host tier is off.
      save_path: how saves move blocks, by name; empty if the host tier is off.
      load_path: how loads do.
      bucket_blocks: the numbers of blocks that staged and fused copies are compiled for, as in the settings.
      max_swap_blocks: blocks that the settings allow the swap pool of each layer group; 0 if request swap is off.
      rival: incarnation of another worker with the same id that the scheduler takes plans' epochs from; 0 without one.
    """

    num_processes: int
    process_index: int
    fingerprint: str
    blocks_per_chunk: int
    staging_blocks: int
    max_load_blocks: int
    segment_chunks: int
    save_path: str
    load_path: str
    bucket_blocks: tuple[int, ...]
    max_swap_blocks: int
    rival: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one worker has to say since its last report.

    Attributes:
      worker_id: 0 to num_workers - 1.
      results: jobs that ended.
      num_host_chunks: slots of the host pool that are allocated and usable by now; in one life it only grows.
      lost_slots: ranges (first, end) of slots whose bytes are gone since the last report.
      num_swap_blocks: per layer group, blocks of the swap pool that are usable by now; likewise. Empty without
        request swap.
      lost_swap_blocks: ranges (group_id, first, end) of those whose bytes are gone since the last report.
      oldest_job_id: no job with a smaller id is in flight on this worker, nor will be: each that it was ever sent
        has been reported, here or earlier. A job under it whose result never came is known to be over.
      incarnation: which life of the worker this is; a later one has a larger number. A worker that was started
        anew has an empty host pool, no KV in HBM, and no job of an earlier life. 0 says nothing.
      num_cache_losses: how often it has lost the KV caches in this life. From the report on that has a new number,
        nothing that the requests of before hold in HBM is saved or swapped out.
      setup: what the worker was made with, until a plan has shown that the scheduler knows this life of it.
    """

    worker_id: int
    results: tuple[JobResult, ...]
    num_host_chunks: int
    lost_slots: tuple[tuple[int, int], ...] = ()
    num_swap_blocks: tuple[int, ...] = ()
    lost_swap_blocks: tuple[tuple[int, int, int], ...] = ()
    oldest_job_id: int = 0
    incarnation: int = 0
    num_cache_losses: int = 0
    setup: WorkerSetup | None = None
