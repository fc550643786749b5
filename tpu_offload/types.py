"""What scheduler and worker say to each other: one plan down and one report up per step.

Both ends may live in different processes on different hosts, so everything here is frozen, picklable
and holds only ids and numbers. No array and no object of either side ever crosses.
"""

import dataclasses
import enum
import operator
from collections.abc import Callable
from typing import Any, NewType, Self

BlockHash = NewType("BlockHash", bytes)
"""Hash of one block's tokens chained on the hash of the block before it (see `hashing`)."""

ChunkKey = NewType("ChunkKey", bytes)
"""Names a chunk: the hash of its last block, which covers all tokens before it, plus its layer group."""


class Direction(enum.Enum):
    """Which way a transfer goes, as host memory sees it."""

    SAVE = "save"  # into host memory: HBM to host, or a promotion from storage
    LOAD = "load"  # out of host memory: host to HBM, or a cascade to storage


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


class JobKind(enum.Enum):
    """What a job is for, in the order in which the kinds are dispatched in a step.

    Attributes:
      direction: which way its blocks go.
      of_swap: it moves one request out of HBM or back: all of its blocks or none. Any other job may fail in part.
      of_storage: it moves chunks between host memory and storage, and has `CopyJob.chunks` instead of parts.
    """

    direction: Direction
    of_swap: bool
    of_storage: bool

    def __new__(cls, value: str, direction: Direction, of_swap: bool = False, of_storage: bool = False) -> Self:
        """Gives a member its attributes; its value is the name alone."""
        member = object.__new__(cls)
        member._value_ = value
        member.direction, member.of_swap, member.of_storage = direction, of_swap, of_storage
        return member

    @property
    def writes_host(self) -> bool:
        """Whether it writes host memory, which stays reserved while a late copy may still land; else it reads it."""
        return self.direction is Direction.SAVE

    # Before anything of the step writes into the caches: the blocks of these two are others' from this step on.
    EARLY_SAVE = "early save", Direction.SAVE
    SWAP_OUT = "swap out", Direction.SAVE, True
    # Storage is read from here on, by other threads; what has arrived is written in any later step.
    PROMOTE = "promote", Direction.SAVE, False, True
    # Before the forward pass.
    LOAD = "load", Direction.LOAD
    SWAP_IN = "swap in", Direction.LOAD, True
    # After the forward pass, before any later step can overwrite what it reads.
    SAVE = "save", Direction.SAVE
    # After the saves; other threads write to storage.
    CASCADE = "cascade", Direction.LOAD, False, True


class HostStore(enum.Enum):
    """A kind of host memory."""

    HOST_TIER = "host_tier"  # chunks that were saved
    SWAP_POOL = "swap_pool"  # blocks of requests that were swapped out


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CopyPart:
    """Blocks of one layer group that a job moves between HBM and one host store.

    Attributes:
      block_ids: blocks of the group's caches.
      host_block_ids: as many places in the store. In the host tier block `j` of the chunk in slot `s` is at
        `s * blocks_per_chunk + j`.
      group_id: index of the layer group in `KVLayout.groups`.
      store: the host memory.
    """

    block_ids: tuple[int, ...]
    host_block_ids: tuple[int, ...]
    group_id: int = 0
    store: HostStore = HostStore.HOST_TIER

    def __post_init__(self) -> None:
        if len(self.block_ids) != len(self.host_block_ids):
            raise ValueError(
                f"{len(self.block_ids)} blocks for {len(self.host_block_ids)} host blocks; expected as many of each"
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CopyJob:
    """Blocks that move together: to or from HBM for one request, or a save for one or more.

    Attributes:
      job_id: unique over the life of the scheduler.
      kind: what it is for, and with that which way it goes and when in its step.
      parts: what moves. Only a swap moves blocks of the swap pool; one that comes back may read the host tier as well.
      request_id: the engine's request; empty for a save.
      num_staging_blocks: staging blocks that are reserved for it on every worker, 0 on a path that stages nothing. A
        load of more blocks than that is copied in pieces: never more of it than this is in the staging buffer.
      chunks: chunks that move between the host tier and storage, each with its slot; only of `JobKind.of_storage`.
      deleted_keys: chunks that storage is to delete, before it writes any; only of a cascade.
    """

    job_id: int
    kind: JobKind
    parts: tuple[CopyPart, ...] = ()
    request_id: str = ""
    num_staging_blocks: int = 0
    chunks: tuple[tuple[ChunkKey, int], ...] = ()
    deleted_keys: tuple[ChunkKey, ...] = ()

    @property
    def direction(self) -> Direction:
        """Which way it goes."""
        return self.kind.direction

    @property
    def block_ids(self) -> tuple[int, ...]:
        """Blocks of HBM, of one part after the other."""
        if len(self.parts) == 1:
            return self.parts[0].block_ids
        return tuple(block for part in self.parts for block in part.block_ids)

    @property
    def host_block_ids(self) -> tuple[int, ...]:
        """Their places in host memory, likewise."""
        if len(self.parts) == 1:
            return self.parts[0].host_block_ids
        return tuple(place for part in self.parts for place in part.host_block_ids)

    @property
    def num_blocks(self) -> int:
        """Blocks that move, of all layer groups."""
        return sum([len(part.block_ids) for part in self.parts])

    @property
    def num_items(self) -> int:
        """What can fail one by one: blocks, or of a storage job its chunks and then the keys that it deletes."""
        return len(self.chunks) + len(self.deleted_keys) if self.kind.of_storage else self.num_blocks

    def __reduce__(self) -> tuple[Callable[..., "CopyJob"], tuple[Any, ...]]:
        """As of `StepPlan`: what dataclasses and enums do for themselves takes twice as long."""
        parts = [(part.block_ids, part.host_block_ids, part.group_id, part.store.value) for part in self.parts]
        storage = (self.chunks, self.deleted_keys) if self.kind.of_storage else ()
        return _unpickle_job, (self.job_id, self.kind.value, parts, self.request_id, self.num_staging_blocks, *storage)


_KINDS = {kind.value: kind for kind in JobKind}
_STORES = {store.value: store for store in HostStore}


def _unpickle_job(
    job_id: int,
    kind: str,
    parts: list[tuple[Any, Any, int, str]],
    request_id: str,
    num_staging_blocks: int,
    chunks: tuple[tuple[ChunkKey, int], ...] = (),
    deleted_keys: tuple[ChunkKey, ...] = (),
) -> CopyJob:
    return CopyJob(
        job_id=job_id,
        kind=_KINDS[kind],
        parts=tuple(
            [
                CopyPart(block_ids=block_ids, host_block_ids=host_block_ids, group_id=group_id, store=_STORES[store])
                for block_ids, host_block_ids, group_id, store in parts
            ]
        ),
        request_id=request_id,
        num_staging_blocks=num_staging_blocks,
        chunks=chunks,
        deleted_keys=deleted_keys,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What the workers do around one forward pass.

    Attributes:
      step_id: counts up by one a plan.
      jobs: in the order in which they are dispatched, that of `JobKind`.
      cancelled_job_ids: loads whose blocks the engine has taken back. A worker must not write into
        their blocks from this plan on; it reports the job as cancelled, or as finished when it had
        dispatched the last write before. Repeated in every plan until the job is known to be over, so that no plan
        that is lost or comes too late leaves a load behind.
      next_job_id: jobs with smaller ids have been sent, with this plan or before; a worker that does not have them
        never will, and says so with `StepReport.oldest_job_id`. So a plan that comes twice, or after a later one, is
        recognized, and nothing of it is done again. 0, as in a plan made by hand, says nothing.
      cache_epochs: per worker id, (incarnation, number of cache losses) of that worker as the scheduler knew them when
        it made the plan. A worker that is past that does none of the jobs: what they copy is gone, or is not what the
        scheduler thinks it is. Empty, as in a plan made by hand, is not checked.
    """

    step_id: int
    jobs: tuple[CopyJob, ...] = ()
    cancelled_job_ids: tuple[int, ...] = ()
    next_job_id: int = 0
    cache_epochs: tuple[tuple[int, int], ...] = ()

    @property
    def empty(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.jobs or self.cancelled_job_ids)

    def of(self, *kinds: JobKind) -> tuple[CopyJob, ...]:
        """The jobs of these kinds, in their order."""
        return tuple([job for job in self.jobs if job.kind in kinds]) if self.jobs else ()

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
      failed_blocks: positions in `CopyJob.block_ids` of the blocks that were not copied, ascending; empty stands for
        all of them, as it always does for a swap. Of a storage job: positions in its chunks and then its deleted keys.
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
      storage_chunks: chunks that the settings allow the storage tier; 0 without one.
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
    storage_chunks: int = 0
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
