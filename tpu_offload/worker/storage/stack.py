"""The storage tiers of one process, nearest first: their copies, and what they share.

Copy programs and the format of records are the same for all tiers. Threads, buffers, and the bound on chunks in flight
belong to one tier each (`worker.storage.io`), so a tier that hangs, such as a frozen server, delays no copy of another.

Data-parallel ranks have slots, jobs and schedulers of their own, and so each has its own tiers, with names of its own
for what only they may change. In a tier that engines share, ranks share what they store, as these do: a record is the
same whichever rank has written it. On several hosts, a process without devices of a rank has nothing of it to store: it
acknowledges that rank's jobs at once, so that what the others report decides.
"""

import hashlib
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, final

import jax

from tpu_offload.config import OffloadConfig
from tpu_offload.errors import TransferError
from tpu_offload.kernels import Part, SlotCopier, TransferSpec, make_slot_copiers, part_of_rank
from tpu_offload.layout import KVLayout
from tpu_offload.memory import pinned_zeros
from tpu_offload.storage import RecordFormat, StorageSpec, find_tier, make_tier
from tpu_offload.storage.format import FINGERPRINT_NBYTES
from tpu_offload.types import ChunkKey, CopyJob, JobKind, Pool
from tpu_offload.values import error_line
from tpu_offload.worker.host_memory import HostMemory
from tpu_offload.worker.jobs import WorkerJobs
from tpu_offload.worker.storage.io import StorageCopies, close_tier
from tpu_offload.worker.storage.record_io import record_payload_nbytes
from tpu_offload.worker.storage.slots import SlotPool, pool_of
from tpu_offload.worker.validate import storage_job_error

_logger = logging.getLogger(__name__)

_CLOSE_S = 1.0  # `close` waits this long for the threads of all tiers, which are idle unless a tier hangs,
_END_S = 5.0  # and then this long for the `close` of all tiers


@final
class StorageStack:
    """Owns the storage tiers of one process. All methods are called by the thread that dispatches the model.

    Args:
      config: the settings, with a storage tier.
      layout: what a block is made of.
      memories: by pool, the host tier of each of its page groups.
      jobs: the worker's jobs.
      worker_id: of the worker among those of its engine, for shared tiers.
      holder_id: of the worker among those of all engines with the same place in storage, for private tiers.
    Raises:
      ConfigError: a tier cannot be made.
    """

    def __init__(
        self,
        config: OffloadConfig,
        layout: KVLayout,
        *,
        memories: Sequence[Sequence[HostMemory]],
        jobs: WorkerJobs,
        worker_id: int,
        holder_id: int,
    ) -> None:
        self._jobs = jobs
        self._worker_id, self._holder_id, self._num_ranks = worker_id, holder_id, layout.num_ranks
        all_memories = [memory for of_pool in memories for memory in of_pool]
        ranks = [rank for rank in range(layout.num_ranks) if all_memories[0].spec.local_devices(rank)]
        parts = [[part_of_rank(m.spec, m.arena, rank) for m in all_memories] for rank in ranks]
        sizes = [memory.blocks_per_chunk for memory in all_memories]
        self._copiers = make_slot_copiers(
            config.storage_copy_path,
            [[(part.spec, part.arena, size) for part, size in zip(own, sizes, strict=True)] for own in parts],
            allocate=pinned_zeros,
            precompile=not config.skip_jax_precompile,
        )
        self._pools = {
            rank: _make_pools(config, layout, rank, copiers, memories=memories)
            for rank, copiers in zip(ranks, self._copiers, strict=True)
        }
        self._num_tiers = len(config.storage_tiers)
        # By rank and number of the tier: of the first rank that has devices here, nearest first, then of the next.
        self._tiers: dict[tuple[int, int], StorageCopies] = {}
        try:
            for rank, own in zip(ranks, parts, strict=True):
                fingerprint = _fingerprint(config, layout, self._pools[rank], own)
                for tier_id, num_chunks in enumerate(config.storage_chunks(layout)):
                    copies = self._make_copies(config, layout, rank, tier_id, fingerprint, num_chunks=num_chunks)
                    self._tiers[rank, tier_id] = copies
        except BaseException:
            self.close()
            raise

    def _make_copies(
        self, config: OffloadConfig, layout: KVLayout, rank: int, tier_id: int, fingerprint: bytes, *, num_chunks: int
    ) -> StorageCopies:
        settings, pools = config.storage_tiers[tier_id], self._pools[rank]
        if find_tier(settings.name).is_shared:
            holder_id = shared_holder_id(pools[0].memories[0].spec, rank, worker_id=self._worker_id)
        else:
            holder_id = self._holder_id * self._num_ranks + rank
        record_format = RecordFormat(
            fingerprint=fingerprint,
            worker_id=holder_id,
            num_shards=pools[0].num_shards,
            payload_nbytes=record_payload_nbytes(pools),
        )
        spec = StorageSpec(
            record_nbytes=record_format.record_nbytes,
            num_chunks=num_chunks,
            worker_id=holder_id,
            fingerprint=fingerprint.hex(),
            options=settings.options,
        )
        tier = make_tier(settings.name, spec)
        try:
            return StorageCopies(
                tier,
                label=settings.label if self._num_ranks == 1 else f"{settings.label}, rank {rank}",
                pools=pools,
                record_format=record_format,
                max_in_flight=settings.max_chunks_in_flight(layout, blocks_per_chunk=config.blocks_per_chunk),
                jobs=self._jobs,
            )
        except BaseException:
            close_tier(tier, settings.label)
            raise

    @property
    def tiers(self) -> Sequence[StorageCopies]:
        """The copies of each tier, nearest first: those of the first rank that has devices here, then of the next."""
        return tuple(self._tiers.values())

    @property
    def are_shared(self) -> tuple[bool, ...]:
        """By tier, whether other engines use it, too."""
        return tuple(tier.is_shared for tier in self.tiers[: self._num_tiers])

    @property
    def stored_keys(self) -> tuple[tuple[ChunkKey, ...] | None, ...]:
        """By rank and tier, what earlier incarnations of this worker left in it, oldest first.

        None of a rank without devices here: the worker stores no part of what it has.
        """
        tiers = itertools.product(range(self._num_ranks), range(self._num_tiers))
        return tuple(self._tiers[of].stored_keys if of in self._tiers else None for of in tiers)

    @property
    def has_flights(self) -> bool:
        """Whether copies are in flight."""
        return any(tier.has_flights for tier in self._tiers.values())

    @property
    def is_landing(self) -> bool:
        """Whether what was read is being written to its slot."""
        return any(tier.is_landing for tier in self._tiers.values())

    @property
    def hbm_nbytes(self) -> int:
        """Most bytes of HBM that copies take on each device: those of one program, since they run one by one.

        At most two blocks, or of states two rows, of a page group.
        """
        return max(copier.hbm_nbytes for copier in itertools.chain.from_iterable(self._copiers))

    def look_up(self, jobs: Sequence[CopyJob]) -> None:
        """Starts to ask shared tiers which chunks they have."""
        self._start(jobs, StorageCopies.look_up)

    def promote(self, jobs: Sequence[CopyJob]) -> None:
        """Starts to read into slots."""
        self._start(jobs, StorageCopies.promote)

    def write(self, jobs: Sequence[CopyJob]) -> None:
        """Starts to clear tiers and to delete keys; dispatches copies of slots and starts to write them."""
        self._start(jobs, StorageCopies.write)

    def collect(self) -> None:
        """Dispatches the writes of what was read into its slots, and ends finished items."""
        for tier in self._tiers.values():
            tier.collect()

    def waiting_on(self, *, all_of_them: bool = False) -> list[Any]:
        """Objects whose `is_ready` lets `collect` make progress; with `all_of_them`, all that it waits for."""
        return [waited for tier in self._tiers.values() for waited in tier.waiting_on(all_of_them=all_of_them)]

    def close(self) -> None:
        """Ends the threads, dropping queued items, and closes the tiers that do not hang. The caller has waited."""
        for tier in self._tiers.values():  # all of them, before the first is waited for
            tier.stop()
        until_s = time.monotonic() + _CLOSE_S
        for tier in self._tiers.values():
            tier.close(until_s)
        until_s = time.monotonic() + _END_S
        for tier in self._tiers.values():
            tier.end_close(until_s)

    # Inside.

    def _start(self, jobs: Sequence[CopyJob], start: Callable[[StorageCopies, Sequence[CopyJob]], None]) -> None:
        """Starts the valid jobs, each on its tier, and ends those of ranks without devices here; the others fail."""
        if not jobs:  # as in nearly every step
            return
        slots = [pool.slots for pool in next(iter(self._pools.values()))]  # of every rank
        for job in jobs:
            if job.job_id in self._jobs:
                _logger.warning("job %d is in flight already: ignored", job.job_id)
                continue
            error = storage_job_error(job, slots=slots, num_ranks=self._num_ranks, num_tiers=self._num_tiers)
            if error:
                self._jobs.start(job.job_id, of_storage=True)
                self._jobs.drop_ref([job.job_id], error)
            elif (job.rank, job.tier_id) in self._tiers:
                start(self._tiers[job.rank, job.tier_id], (job,))
            else:
                self._acknowledge(job)

    def _acknowledge(self, job: CopyJob) -> None:
        """Ends a job of a rank without devices here: it finds all and lacks nothing, so the other hosts decide."""
        self._jobs.start(job.job_id, of_storage=True)
        self._jobs.set_found(job.job_id, tuple(map(len, job.prefixes)))
        error = ""
        if job.kind is JobKind.PROMOTE:
            pools = next(iter(self._pools.values()))
            try:
                for _, slot in job.chunks:
                    pool_of(pools, slot).mark_written(slot, job.rank)
            except TransferError as e:
                error = error_line(e)
        self._jobs.drop_ref([job.job_id], error)


def shared_holder_id(spec: TransferSpec, rank: int, *, worker_id: int) -> int:
    """By which number a shared tier has the records of a rank and this worker.

    On several hosts the worker's number among those that have devices of the rank: so ranks share what they store
    wherever their devices are, if the devices have the same parts of a page.
    """
    if spec.cache_sharding.is_fully_addressable:
        return worker_id
    return spec.processes(rank).index(jax.process_index())


def _make_pools(
    config: OffloadConfig,
    layout: KVLayout,
    rank: int,
    copiers: Sequence[SlotCopier],
    *,
    memories: Sequence[Sequence[HostMemory]],
) -> list[SlotPool]:
    """By pool, the slots of a rank.

    Args:
      config: the settings.
      layout: what a block is made of.
      rank: the rank.
      copiers: its copiers, one for each memory.
      memories: as of `StorageStack`.
    """
    own = iter(copiers)
    return [
        SlotPool(
            rank=rank,
            memories=of_pool,
            copiers=[*itertools.islice(own, len(of_pool))],
            first_slot=first_slot,
            num_parts=config.records_per_state(layout) if pool == Pool.STATES else 0,
        )
        for pool, (first_slot, of_pool) in enumerate(zip(config.first_slots(layout), memories, strict=True))
    ]


def _fingerprint(config: OffloadConfig, layout: KVLayout, pools: Sequence[SlotPool], parts: Sequence[Part]) -> bytes:
    """Of all that the bytes of records depend on. The layout's names model and geometry, but not the shards."""
    formats = [layout.fingerprint().hex(), config.blocks_per_chunk, [part.shards for part in parts]]
    formats += [(pool.num_parts, [copier.payload_format for copier in pool.copiers]) for pool in pools]
    return hashlib.blake2b(repr(formats).encode(), digest_size=FINGERPRINT_NBYTES).digest()
