"""The storage tiers of one process, nearest first: their copies, and what they share.

Copy programs and the format of records are the same for all tiers. Threads, buffers, and the bound on chunks in flight
belong to one tier each (`worker.storage_io`), so a tier that hangs, such as a frozen server, delays no copy of another.
"""

import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, final

from tpu_offload.config import ENV_PREFIX, OffloadConfig
from tpu_offload.errors import ConfigError
from tpu_offload.kernels import make_slot_copiers
from tpu_offload.layout import KVLayout
from tpu_offload.memory import pinned_zeros
from tpu_offload.storage import RecordFormat, StorageSpec, make_tier
from tpu_offload.storage.format import FINGERPRINT_NBYTES
from tpu_offload.types import ChunkKey, CopyJob
from tpu_offload.worker.host_memory import HostMemory
from tpu_offload.worker.jobs import WorkerJobs
from tpu_offload.worker.storage_io import StorageCopies
from tpu_offload.worker.storage_records import record_payload_nbytes
from tpu_offload.worker.storage_slots import SlotPool
from tpu_offload.worker.validate import storage_job_error

_logger = logging.getLogger(__name__)

_CLOSE_S = 1.0  # `close` waits this long for the threads of all tiers, which are idle unless a tier hangs


@final
class StorageStack:
    """Owns the storage tiers of one process. All methods are called by the thread that dispatches the model.

    Args:
      config: the settings, with a storage tier.
      layout: what a block is made of.
      kv_caches: per layer, dtype[num_blocks, *page_shape]; only shardings are read.
      memories: per page group of chunks, the host tier.
      state_memories: likewise, of states.
      jobs: the worker's jobs.
      worker_id: for the tiers.
    Raises:
      ConfigError: a tier cannot be made, or the caches span several hosts.
    """

    def __init__(
        self,
        config: OffloadConfig,
        layout: KVLayout,
        kv_caches: Sequence[Any],
        *,
        memories: Sequence[HostMemory],
        state_memories: Sequence[HostMemory] = (),
        jobs: WorkerJobs,
        worker_id: int,
    ) -> None:
        sharding = kv_caches[0].sharding
        if not sharding.is_fully_addressable:
            raise ConfigError(
                f"{ENV_PREFIX}STORAGE_TIER={';'.join(config.storage_tier)} with KV caches that span several hosts is "
                "not supported yet; leave it empty"
            )
        self._jobs = jobs
        self._copiers = make_slot_copiers(
            config.storage_copy_path,
            [(memory.spec, memory.arena, memory.blocks_per_chunk) for memory in (*memories, *state_memories)],
            allocate=pinned_zeros,
            precompile=not config.skip_jax_precompile,
        )
        of_chunks, of_states = self._copiers[: len(memories)], self._copiers[len(memories) :]
        self._pools = [SlotPool(memories=memories, copiers=of_chunks)]
        # The layout's fingerprint names model and geometry, but not the shards.
        size, num_parts = config.blocks_per_chunk, config.records_per_state(layout)
        formats = [layout.fingerprint().hex(), size, *(copier.payload_format for copier in of_chunks)]
        if of_states:
            first_state = config.host_chunks(layout)
            self._pools.append(
                SlotPool(memories=state_memories, copiers=of_states, first_slot=first_state, num_parts=num_parts)
            )
            formats += ["states", num_parts, *(copier.payload_format for copier in of_states)]
        fingerprint = hashlib.blake2b(repr(formats).encode(), digest_size=FINGERPRINT_NBYTES)
        self._format = RecordFormat(
            fingerprint=fingerprint.digest(),
            worker_id=worker_id,
            num_shards=len(sharding.addressable_devices),
            payload_nbytes=record_payload_nbytes(self._pools),
        )
        self._tiers: list[StorageCopies] = []
        try:
            for tier_id, num_chunks in enumerate(config.storage_chunks(layout)):
                self._tiers.append(self._make_copies(config, layout, tier_id, num_chunks=num_chunks))
        except BaseException:
            self.close()
            raise

    def _make_copies(self, config: OffloadConfig, layout: KVLayout, tier_id: int, *, num_chunks: int) -> StorageCopies:
        settings = config.storage_tiers[tier_id]
        spec = StorageSpec(
            record_nbytes=self._format.record_nbytes,
            num_chunks=num_chunks,
            worker_id=self._format.worker_id,
            fingerprint=self._format.fingerprint.hex(),
            options=settings.options,
        )
        tier = make_tier(settings.name, spec)
        try:
            return StorageCopies(
                tier,
                label=settings.label,
                pools=self._pools,
                record_format=self._format,
                max_in_flight=settings.max_chunks_in_flight(layout, blocks_per_chunk=config.blocks_per_chunk),
                jobs=self._jobs,
            )
        except BaseException:
            tier.close()
            raise

    @property
    def tiers(self) -> Sequence[StorageCopies]:
        """The copies of each tier, nearest first."""
        return self._tiers

    @property
    def are_shared(self) -> tuple[bool, ...]:
        """By tier, whether other engines use it, too."""
        return tuple(tier.is_shared for tier in self._tiers)

    @property
    def stored_keys(self) -> tuple[tuple[ChunkKey, ...], ...]:
        """By tier, what earlier incarnations of this worker left in it, oldest first."""
        return tuple(tier.stored_keys for tier in self._tiers)

    @property
    def has_flights(self) -> bool:
        """Whether copies are in flight."""
        return any(tier.has_flights for tier in self._tiers)

    @property
    def is_landing(self) -> bool:
        """Whether what was read is being written to its slot."""
        return any(tier.is_landing for tier in self._tiers)

    @property
    def hbm_nbytes(self) -> int:
        """Most bytes of HBM that copies take on each device: those of one program, since they run one by one.

        At most two blocks, or of states two rows, of a page group.
        """
        return max(copier.hbm_nbytes for copier in self._copiers)

    def look_up(self, jobs: Sequence[CopyJob]) -> None:
        """Starts to ask shared tiers which chunks they have."""
        self._start(jobs, StorageCopies.look_up)

    def promote(self, jobs: Sequence[CopyJob]) -> None:
        """Starts to read into slots."""
        self._start(jobs, StorageCopies.promote)

    def cascade(self, jobs: Sequence[CopyJob]) -> None:
        """Starts to clear tiers or delete keys, then dispatches copies of slots and starts to write them."""
        self._start(jobs, StorageCopies.cascade)

    def collect(self) -> None:
        """Dispatches the writes of what was read into its slots, and ends finished items."""
        for tier in self._tiers:
            tier.collect()

    def waiting_on(self, *, all_of_them: bool = False) -> list[Any]:
        """Objects whose `is_ready` lets `collect` make progress; with `all_of_them`, all that it waits for."""
        return [waited for tier in self._tiers for waited in tier.waiting_on(all_of_them=all_of_them)]

    def close(self) -> None:
        """Ends the threads, dropping queued items, and closes the tiers that do not hang. The caller has waited."""
        for tier in self._tiers:  # all of them, before the first is waited for
            tier.stop()
        until_s = time.monotonic() + _CLOSE_S
        for tier in self._tiers:
            tier.close(until_s)

    # Inside.

    def _start(self, jobs: Sequence[CopyJob], start: Callable[[StorageCopies, Sequence[CopyJob]], None]) -> None:
        """Starts the valid jobs, each on its tier; the others fail."""
        if not jobs:  # as in nearly every step
            return
        slots = [pool.slots for pool in self._pools]
        for job in jobs:
            if job.job_id in self._jobs:
                _logger.warning("job %d is in flight already: ignored", job.job_id)
                continue
            error = storage_job_error(job, slots=slots, num_tiers=len(self._tiers))
            if error:
                self._jobs.start(job.job_id, of_storage=True)
                self._jobs.drop_ref([job.job_id], error)
            else:
                start(self._tiers[job.tier_id], (job,))
