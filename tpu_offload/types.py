"""The messages between scheduler and worker: one plan down and one report up per step.

The two may be different processes on different hosts, so everything here is frozen, picklable and holds only ids and
numbers: no arrays, and no objects of either side. They are frozen for type checkers only (see `tpu_offload.frozen`).
"""

import dataclasses
import enum
import operator
from collections.abc import Callable
from typing import Any, NewType, Self

from tpu_offload.frozen import record

BlockHash = NewType("BlockHash", bytes)
"""Hash of one block's tokens chained on the hash of the block before it (see `hashing`)."""

ChunkKey = NewType("ChunkKey", bytes)
"""Identifies a chunk, of all layer groups: the hash of its last block, which covers all tokens before it."""


class Direction(enum.Enum):
    """The direction of a transfer, as host memory sees it."""

    SAVE = "save"  # into host memory: HBM to host, or a promotion from storage
    LOAD = "load"  # out of host memory: host to HBM, or a cascade to storage

    __hash__ = object.__hash__  # of enum.Enum it is a slow call; members are unique


class Pool(enum.IntEnum):
    """A pool of the host tier. What is given by pool is a sequence in this order, with an entry for each.

    A model without states has one pool. All slots of a pool come after those of the pools before it, so that the number
    of a slot says which pool it is of. Workers count the slots of each pool from 0.
    """

    CHUNKS = 0  # of full attention and of windows
    STATES = 1


class JobState(enum.Enum):
    """The state of a job. The last four are ends; a job reaches exactly one of them."""

    PLANNED = "planned"  # accepted by the scheduler, not yet in a plan
    SENT = "sent"  # in a plan that went to the workers
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed_out"  # a worker has not reported it in time; set by the scheduler only

    __hash__ = object.__hash__  # as in `Direction`

    @property
    def ended(self) -> bool:
        """Whether this is one of the ends."""
        return self not in (JobState.PLANNED, JobState.SENT)


class JobKind(enum.Enum):
    """The purpose of a job, in the order in which the kinds are dispatched in a step.

    Attributes:
      direction: the direction of the copy.
      of_swap: whether it swaps a request out or in: all of its blocks or none. Others may fail in part, except
        lookups and clearings.
      of_storage: whether it copies chunks between host memory and storage, or asks storage for some: it has no parts.
      writes_host: whether it writes host memory, which stays reserved while a late copy may run; else it reads it.
    """

    direction: Direction
    of_swap: bool
    of_storage: bool
    writes_host: bool
    __hash__ = object.__hash__  # as in `Direction`

    def __new__(cls, value: str, direction: Direction, of_swap: bool = False, of_storage: bool = False) -> Self:
        """Sets the attributes of a member; its value is the name alone."""
        member = object.__new__(cls)
        member._value_ = value
        member.direction, member.of_swap, member.of_storage = direction, of_swap, of_storage
        member.writes_host = direction is Direction.SAVE
        return member

    # Before anything of the step writes the host tier: the slots of this one belong to other chunks from then on.
    DEMOTE = "demote", Direction.LOAD, False, True
    # Before anything of the step writes to the caches: the blocks of these two belong to other requests from then on.
    EARLY_SAVE = "early save", Direction.SAVE
    SWAP_OUT = "swap out", Direction.SAVE, True
    # Copies nothing: a thread asks storage which chunks it has.
    LOOKUP = "lookup", Direction.LOAD, False, True
    # I/O threads read storage from here on; a later step may write what has arrived into the slots.
    PROMOTE = "promote", Direction.SAVE, False, True
    # Before the forward pass.
    LOAD = "load", Direction.LOAD
    SWAP_IN = "swap in", Direction.LOAD, True
    # After the forward pass, before any later step can overwrite what it reads.
    SAVE = "save", Direction.SAVE
    # After the saves. I/O threads write storage: what is cleared or deleted before what is written.
    CLEAR = "clearing", Direction.LOAD, False, True
    DELETE = "deletion", Direction.LOAD, False, True
    CASCADE = "cascade", Direction.LOAD, False, True


STORAGE_WRITES = (JobKind.CLEAR, JobKind.DELETE, JobKind.CASCADE)
"""The kinds that are started after the saves of a step."""


class HostStore(enum.Enum):
    """A kind of host memory."""

    HOST_TIER = "host_tier"  # chunks that were saved
    SWAP_POOL = "swap_pool"  # blocks of requests that were swapped out


@record(frozen=True, slots=True, kw_only=True)
class CopyPart:
    """Blocks of one layer group that a job moves between HBM and one host store.

    Attributes:
      block_ids: blocks of the group's caches; of a group of states, rows.
      host_block_ids: their places in the store, one for each. In the host tier, block `j` of the chunk in slot `s` is
        at `s * blocks_per_chunk + j`. Rows of states have places of their own, from 0 on.
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
                f"{len(self.block_ids)} blocks for {len(self.host_block_ids)} host blocks; expected equal numbers"
            )


@record(frozen=True, slots=True, kw_only=True)
class CopyJob:
    """One job of the workers: blocks that move to or from HBM, for one request or several, or what storage does.

    Attributes:
      job_id: unique over the lifetime of the scheduler.
      kind: its purpose, which determines its direction and its place in the step.
      parts: the blocks. Only a swap uses the swap pool; a swap in may read the host tier as well.
      request_id: the engine's request; empty for a save.
      num_staging_blocks: staging blocks reserved for it on every worker, 0 if the path is not staged. A load of more
        blocks is copied in portions of at most this size.
      chunks: chunks to copy between the host tier and storage, each with its slot; only of a promotion, a cascade or a
        demotion.
      prefixes: of chunks that storage may have, in the order of a prompt; only of a lookup.
      deleted_keys: records that the tier deletes; only of a deletion.
      tier_id: the storage tier of a storage job, 0 for the nearest.
      rank: the data-parallel rank whose blocks they are, set by `RankPlans`; 0 with one rank.
    """

    job_id: int
    kind: JobKind
    parts: tuple[CopyPart, ...] = ()
    request_id: str = ""
    num_staging_blocks: int = 0
    chunks: tuple[tuple[ChunkKey, int], ...] = ()
    deleted_keys: tuple[ChunkKey, ...] = ()
    prefixes: tuple[tuple[ChunkKey, ...], ...] = ()
    tier_id: int = 0
    rank: int = 0

    @property
    def direction(self) -> Direction:
        """The direction of the copy."""
        return self.kind.direction

    @property
    def block_ids(self) -> tuple[int, ...]:
        """Blocks in HBM, part after part."""
        if len(self.parts) == 1:
            return self.parts[0].block_ids
        return tuple(block for part in self.parts for block in part.block_ids)

    @property
    def num_blocks(self) -> int:
        """Blocks to copy, of all layer groups."""
        return sum([len(part.block_ids) for part in self.parts])

    @property
    def num_items(self) -> int:
        """What can fail one by one: blocks, or of a storage job its chunks, or the keys that it deletes.

        A lookup and a clearing have none: they fail as a whole.
        """
        return len(self.chunks) + len(self.deleted_keys) if self.kind.of_storage else self.num_blocks

    def __reduce__(self) -> tuple[Callable[..., "CopyJob"], tuple[Any, ...]]:
        """As in `StepPlan`: the default pickling of dataclasses and enums takes twice as long."""
        parts = [(part.block_ids, part.host_block_ids, part.group_id, part.store.value) for part in self.parts]
        others = self.chunks, self.deleted_keys, self.prefixes, self.tier_id, self.rank
        rest = others if self.kind.of_storage or self.rank else ()
        return _unpickle_job, (self.job_id, self.kind.value, parts, self.request_id, self.num_staging_blocks, *rest)


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
    prefixes: tuple[tuple[ChunkKey, ...], ...] = (),
    tier_id: int = 0,
    rank: int = 0,
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
        prefixes=prefixes,
        tier_id=tier_id,
        rank=rank,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HostDivision:
    """How the host tier of a model with states is divided into its pools.

    Attributes:
      division_id: increases by one with each change; 0 is the division that a worker begins with.
      segments: by pool, segments that it may have.
    """

    division_id: int
    segments: tuple[int, ...]

    def __reduce__(self) -> tuple[Callable[..., "HostDivision"], tuple[int, tuple[int, ...]]]:
        """As in `StepPlan`."""
        return _unpickle_division, (self.division_id, self.segments)


def _unpickle_division(division_id: int, segments: tuple[int, ...]) -> HostDivision:
    return HostDivision(division_id=division_id, segments=segments)


@record(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What the workers do around one forward pass.

    Attributes:
      step_id: increases by one with each plan.
      jobs: in dispatch order, that of `JobKind`.
      cancelled_job_ids: loads whose blocks the engine has taken back. From this plan on, a worker must not write to
        these blocks; it reports the job as cancelled, or as finished if it had dispatched the last write before.
        Repeated in every plan until the job has ended, so that a lost or late plan leaves no load running.
      next_job_id: all jobs with smaller ids have been sent, with this plan or earlier. A worker that has not received
        one never will, and reports that in `StepReport.oldest_job_id`. Duplicate and late plans are detected by it, and
        not repeated. 0, as in a handmade plan, is not checked.
      cache_epochs: per worker id, (incarnation, number of cache losses) of that worker as known to the scheduler when
        it made the plan. A worker that has later ones runs none of the jobs: the blocks are gone or have other
        contents. Empty, as in a handmade plan, is not checked.
      division: of the host tier, from this plan on: nothing uses the segments that it takes from a pool. In every plan
        once it has changed, so that a restarted worker learns it; None before, and without states.
    """

    step_id: int
    jobs: tuple[CopyJob, ...] = ()
    cancelled_job_ids: tuple[int, ...] = ()
    next_job_id: int = 0
    cache_epochs: tuple[tuple[int, int], ...] = ()
    division: HostDivision | None = None

    @property
    def empty(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.jobs or self.cancelled_job_ids)

    def by_kind(self) -> dict[JobKind, list[CopyJob]]:
        """The jobs of each kind that has any, in their order."""
        jobs: dict[JobKind, list[CopyJob]] = {}
        for job in self.jobs:
            of_kind = jobs.get(job.kind)
            if of_kind is None:
                jobs[job.kind] = [job]
            else:
                of_kind.append(job)
        return jobs

    def of(self, *kinds: JobKind) -> tuple[CopyJob, ...]:
        """The jobs of these kinds, in their order."""
        return tuple([job for job in self.jobs if job.kind in kinds]) if self.jobs else ()

    def __reduce__(self) -> tuple[Callable[..., "StepPlan"], tuple[Any, ...]]:
        """A plan is pickled every step; the default for dataclasses with slots takes longer."""
        values = _values_of_plan(self)
        return _unpickle_plan, values if self.division is not None else values[:-1]


_PLAN_FIELDS = tuple(field.name for field in dataclasses.fields(StepPlan))
_values_of_plan: Callable[[StepPlan], tuple[Any, ...]] = operator.attrgetter(*_PLAN_FIELDS)


def _unpickle_plan(*values: Any) -> StepPlan:
    return StepPlan(**dict(zip(_PLAN_FIELDS, values, strict=False)))


@record(frozen=True, slots=True, kw_only=True)
class JobResult:
    """How a job ended on one worker.

    Attributes:
      job_id: the job.
      state: FINISHED, FAILED or CANCELLED.
      error: what went wrong, or why it was cancelled, in one line; empty if FINISHED.
      failed_blocks: positions in `CopyJob.block_ids` of the blocks that were not copied, ascending; empty for all of
        them, as always for a swap. Of a storage job: positions in its chunks or deleted keys.
      duration_s: seconds from dispatch to the poll that observed the end.
      copy_s: seconds of the copy itself, where the worker has measured it (some swaps), else 0. Of a promotion: from
        its dispatch until the last chunk was read.
      missing_chunks: of a promotion, positions of chunks that storage does not have any more, ascending: nothing
        failed, but they were not copied. Those of damaged records, too, which have failed. Of a deletion, positions of
        keys that storage has refused to delete, and which have failed.
      num_found: of a lookup that FINISHED, for each of its prefixes the number of leading chunks that storage has of
        this worker; else empty.
    """

    job_id: int
    state: JobState
    error: str = ""
    duration_s: float = 0.0
    copy_s: float = 0.0
    failed_blocks: tuple[int, ...] = ()
    missing_chunks: tuple[int, ...] = ()
    num_found: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CacheEpoch:
    """Identifies the KV caches of one worker between two losses. Saves from other epochs are invalid.

    Attributes:
      worker_id: the worker.
      incarnation: of the worker.
      num_losses: how often this incarnation has lost its caches.
    """

    worker_id: int
    incarnation: int
    num_losses: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSetup:
    """The setup of a worker. The scheduler compares it with its own settings and with that of the other workers.

    Attributes:
      num_processes: processes that hold a part of this worker's caches, itself included.
      process_index: of this process, as `jax.process_index`.
      fingerprint: of the layout, in hex.
      blocks_per_chunk: as in the settings; 0 if the host tier is off.
      staging_blocks: the staging budget; 0 if the host tier is off.
      max_load_blocks: most blocks loaded before one step, if loads are not staged; 0 for no limit.
      segment_slots: by pool, slots in a segment; empty if the host tier is off.
      save_path: name of the copy path of saves; empty if the host tier is off.
      load_path: likewise for loads.
      bucket_blocks: sizes that staged and fused copies are compiled for, as in the settings.
      max_swap_blocks: upper limit of the swap pool of each layer group; 0 if request swap is off.
      storage_chunks: capacity of each storage tier, nearest first, as in the settings; empty without one.
      stored_keys: by tier, the chunks that it had on this worker when that started, oldest first; of a shared one none.
        With data-parallel ranks those of all tiers of the first rank, then of the next; each rank gets its own. None of
        a rank of which this process has no device, or if it has no memory for a host tier: then the lists of the other
        workers decide.
      shares_storage: by tier, whether other engines use it, too, so that it has to be asked what it has.
      rival: incarnation of another process with the same worker id, if a plan has its epoch; else 0.
    """

    num_processes: int
    process_index: int
    fingerprint: str
    blocks_per_chunk: int
    staging_blocks: int
    max_load_blocks: int
    segment_slots: tuple[int, ...]
    save_path: str
    load_path: str
    bucket_blocks: tuple[int, ...]
    max_swap_blocks: int
    storage_chunks: tuple[int, ...] = ()
    stored_keys: tuple[tuple[ChunkKey, ...] | None, ...] = ()
    shares_storage: tuple[bool, ...] = ()
    rival: int = 0


@record(frozen=True, slots=True, kw_only=True)
class StepReport:
    """The report of one worker since its last one.

    Attributes:
      worker_id: 0 to num_workers - 1.
      results: jobs that ended.
      num_host_slots: by pool, slots that are allocated. Within an incarnation they only grow, except by a
        `HostDivision`.
      num_host_segments: segments that this worker can have in all pools together; never grows within an incarnation.
        0 without states, and if it is unknown.
      division_id: the last `HostDivision` that it has begun to carry out. Slots of an earlier one may be gone.
      lost_slots: ranges (pool, first, end) of slots whose contents were lost since the last report, counted within
        the pool.
      num_swap_blocks: per layer group, allocated blocks of the swap pool; only grows, too. Empty without request swap.
      lost_swap_blocks: ranges (group_id, first, end) of those whose contents were lost since the last report.
      oldest_job_id: no job with a smaller id is or will be in flight on this worker, except `storage_job_ids`: every
        one that it received has been reported, here or earlier. A smaller job whose result never arrived has ended.
      storage_job_ids: its jobs in flight to and from storage. A call of a storage tier may never return; the results
        of other jobs are no less certain for that.
      incarnation: identifies one run of the worker process; a restarted worker has a larger one, an empty host pool, no
        KV in HBM, and no earlier jobs. 0 is not checked.
      num_cache_losses: how often this incarnation has lost the KV caches. From the report with a new number on, nothing
        that earlier requests hold in HBM is saved or swapped out.
      setup: the worker's setup, until a plan has shown that the scheduler knows this incarnation.
    """

    worker_id: int
    results: tuple[JobResult, ...]
    num_host_slots: tuple[int, ...]
    num_host_segments: int = 0
    division_id: int = 0
    lost_slots: tuple[tuple[int, int, int], ...] = ()
    num_swap_blocks: tuple[int, ...] = ()
    lost_swap_blocks: tuple[tuple[int, int, int], ...] = ()
    oldest_job_id: int = 0
    storage_job_ids: tuple[int, ...] = ()
    incarnation: int = 0
    num_cache_losses: int = 0
    setup: WorkerSetup | None = None
