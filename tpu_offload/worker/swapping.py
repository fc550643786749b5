"""The copies of request swap: blocks of the caches out to the swap pool of one process, and back.

All of them go by the direct path. What is swapped out has to be read before the step at hand writes over it,
so there is nothing to gain from staging it, and two blocks of HBM are enough.
"""

import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import jax
import numpy as np

from tpu_offload.config import OffloadConfig
from tpu_offload.kernels import ArenaView, Copier, DirectCopier, Flight, Rows, TransferSpec
from tpu_offload.layout import KVLayout
from tpu_offload.memory import plan_segments, plan_shared_segments, size_swap_pool, wanted_swap_blocks
from tpu_offload.types import Direction, HostStore, SwapJob, SwapPart
from tpu_offload.worker.arrays import check_alive, is_ready, wait_for_all
from tpu_offload.worker.boundary import swap_error
from tpu_offload.worker.host_memory import HostMemory, check_copied, error_line
from tpu_offload.worker.jobs import WorkerJobs

_logger = logging.getLogger(__name__)

_GB = 2**30
_MAX_BLOCKS = 1024  # of one dispatch; the ids of more would be a larger argument for every one
# Waiting for a copy costs a step of an engine that runs ahead, so only some copies are measured.
_FIRST_MEASURED, _EVERY_MEASURED = 4, 16

Caches = list[jax.Array]
type WrapCopier = Callable[[Copier, ArenaView], Copier]
"""Puts something around a copy path, given where its segments live; to see what comes of copies that fail."""


def unwrapped(copier: Copier, store: ArenaView) -> Copier:
    """Puts nothing around it."""
    return copier


@dataclasses.dataclass(frozen=True, slots=True)
class SwapSource:
    """Host memory that a layer group's blocks are in, and the copies between them and the caches.

    Attributes:
      layer_ids: positions of the group's arrays in the list of KV caches.
      memory: the memory.
      copier: copies.
    """

    layer_ids: tuple[int, ...]
    memory: HostMemory
    copier: Copier

    def caches(self, kv_caches: Caches) -> Caches:
        """Those of the group."""
        return [kv_caches[i] for i in self.layer_ids]

    def why_impossible(self, part: SwapPart, *, reads: bool, num_ready: int) -> str:
        """Why a part cannot be copied, in one line; empty when it can."""
        for name, ids, limit in (
            ("block ids", part.block_ids, self.memory.spec.num_blocks),
            (f"host block ids of {part.store.value}", part.host_block_ids, num_ready),
        ):
            if ids and (min(ids) < 0 or max(ids) >= limit):
                return f"{name} {min(ids)} to {max(ids)}: expected 0 to {limit - 1}"
        lost = [i for i in part.host_block_ids if self.memory.lost[i]] if reads else []
        return f"what was in host block {lost[0]} of {part.store.value} is lost, or nothing ever was" if lost else ""

    def pieces(self, job_id: int, part: SwapPart) -> Iterator[tuple[int, Rows]]:
        """What one dispatch each copies: the segment, and blocks of it."""
        segment_blocks = np.int32(self.memory.spec.segment_blocks)
        segment_ids, places = np.divmod(np.array(part.host_block_ids, np.int32), segment_blocks)
        job_ids = np.full(len(places), job_id, np.int64)
        rows = Rows(job_ids, np.array(part.block_ids, np.int32), places)
        for segment_id in np.unique(segment_ids):
            for piece in self.copier.split(rows.take(segment_ids == segment_id)):
                yield int(segment_id), piece


@final
class SwapCopies:
    """Owns the swap pool of one process. All methods are called by the thread that dispatches the model.

    A copy that goes wrong ends as a failed result of its job.

    Args:
      config: the settings.
      layout: what a block is made of.
      kv_caches: per layer, dtype[num_blocks, *page_shape]; only shapes and shardings are read.
      jobs: told of the jobs.
      available: bytes of host memory that the host tier has left.
      tier: the host tier, to read from; None without one.
      clock: seconds, monotonic.
      wrap_copier: see `OffloadWorker`.
    """

    def __init__(
        self,
        config: OffloadConfig,
        layout: KVLayout,
        kv_caches: Sequence[Any],
        *,
        jobs: WorkerJobs,
        available: int,
        tier: SwapSource | None,
        clock: Callable[[], float],
        wrap_copier: WrapCopier = unwrapped,
    ) -> None:
        self._jobs = jobs
        self._clock = clock
        self._flights: list[tuple[Flight, SwapSource]] = []
        self._num_copies = dict.fromkeys(Direction, 0)
        self._timeout_s = config.job_timeout_s
        self._tier = tier
        self._blocks_per_chunk = config.blocks_per_chunk
        self._groups: list[SwapSource] = []
        num_hbm_blocks = [kv_caches[group.layer_ids[0]].shape[0] for group in layout.groups]
        wanted_nbytes = None if config.swap_gb == "auto" else int(config.swap_gb * _GB)
        groups = [(n, layout.group_nbytes_per_host(g)) for n, g in zip(num_hbm_blocks, layout.groups, strict=True)]
        sizes = size_swap_pool(wanted_nbytes, groups=groups, fraction=config.swap_safety, available=available)
        wanted = wanted_swap_blocks(wanted_nbytes, groups=groups)
        shared = not kv_caches[0].sharding.is_fully_addressable
        segments = [
            plan_shared_segments(most, num_blocks, chunk_nbytes=nbytes, segment_gb=config.host_segment_gb)
            if shared
            else plan_segments(num_blocks, chunk_nbytes=nbytes, segment_gb=config.host_segment_gb)
            for most, num_blocks, (_, nbytes) in zip(wanted, sizes, groups, strict=True)
        ]
        sizes = tuple(min(n, num * per) for n, (num, per) in zip(sizes, segments, strict=True))
        if not all(sizes):
            return
        for group, num_blocks, (num_segments, segment_blocks) in zip(layout.groups, sizes, segments, strict=True):
            caches = [kv_caches[i] for i in group.layer_ids]
            capacity = min(_MAX_BLOCKS, caches[0].shape[0])
            spec = TransferSpec.from_caches(caches, segment_blocks=segment_blocks, capacity=capacity)
            memory = HostMemory.allocate(
                spec, num_segments=num_segments, chunks_per_segment=segment_blocks, num_chunks=num_blocks
            )
            copier = wrap_copier(DirectCopier(spec, memory.pool), memory.pool)
            self._groups.append(SwapSource(group.layer_ids, memory, copier))
        if not config.skip_jax_precompile:
            for source in self._sources():
                source.copier.compile()

    @property
    def num_blocks_ready(self) -> tuple[int, ...]:
        """Per layer group, the blocks of the pool whose memory is there; grows to the size of the pool."""
        return tuple(group.memory.pool.num_chunks_ready for group in self._groups)

    @property
    def has_flights(self) -> bool:
        """Whether copies are on their way."""
        return bool(self._flights)

    @property
    def hbm_nbytes(self) -> int:
        """Most bytes of HBM that the copies take on each device: those of one program, for they run one by one."""
        return max((group.copier.hbm_nbytes for group in self._groups), default=0)

    def wait_until_allocated(self) -> None:
        """Blocks until all of the pool is there or its allocation has failed; for warm-up, benchmarks and tests."""
        for group in self._groups:
            group.memory.pool.wait_until_allocated()

    def swap_out(self, jobs: Sequence[SwapJob], kv_caches: Caches) -> None:
        """Dispatches copies out; the caches are read in program order."""
        for job in jobs:
            self._run(job, Direction.SAVE, kv_caches)

    def swap_in(self, jobs: Sequence[SwapJob], kv_caches: Caches) -> Caches:
        """Dispatches copies back.

        Args:
          jobs: what to copy.
          kv_caches: all caches; donated.
        Returns:
          The caches to use from now on.
        Raises:
          CachesLostError: a copy failed after its program had taken the donated caches.
        """
        kv_caches = list(kv_caches)
        for job in jobs:
            self._run(job, Direction.LOAD, kv_caches)
        return kv_caches

    def collect(self) -> None:
        """Ends the copies that are over."""
        for flight, source in list(self._flights):
            if is_ready(flight.waiting_on):
                self._land(flight, source)

    def waiting_on(self, *, all_of_them: bool = True) -> list[Any]:
        """The arrays whose readiness ends the copies on their way; `collect` can go on with any of them."""
        return [flight.waiting_on for flight, _ in self._flights]

    def take_lost(self) -> tuple[tuple[int, int, int], ...]:
        """Ranges (group_id, first, end) of blocks of the pool lost since the last call."""
        return tuple(
            (g, first, end) for g, group in enumerate(self._groups) for first, end in group.memory.pool.take_lost()
        )

    def close(self) -> None:
        """Frees the pool. Whoever owns this has waited for the copies in flight for as long as it wants to."""
        self._flights.clear()
        for group in self._groups:
            group.memory.pool.close()

    # Inside.

    def _sources(self) -> list[SwapSource]:
        return [*self._groups, *([self._tier] if self._tier else [])]

    def _run(self, job: SwapJob, direction: Direction, kv_caches: Caches) -> None:
        """Dispatches one job. The caches that it writes are replaced in the list."""
        if job.job_id in self._jobs:
            _logger.warning("job %d is in flight already; its repetition is ignored", job.job_id)
            return
        self._jobs.start(job.job_id, writes_caches=direction is Direction.LOAD)
        error = self._why_impossible(job, direction)
        try:
            if not error:
                self._measured(job, kv_caches)
        finally:
            self._jobs.end_part([job.job_id], error)

    def _measured(self, job: SwapJob, kv_caches: Caches) -> None:
        """Dispatches a job; every so often waits for it, to tell what the copy alone takes."""
        number = self._num_copies[job.direction]
        self._num_copies[job.direction] += 1
        # Not the very first, which may compile.
        measured = 0 < number <= _FIRST_MEASURED or (number > 0 and number % _EVERY_MEASURED == 0)
        if measured:
            measured = wait_for_all(kv_caches, timeout_s=self._timeout_s)
        num_flights, start_s = len(self._flights), self._clock()
        self._copy(job, kv_caches)
        if measured and wait_for_all(self.waiting_on()[num_flights:], timeout_s=self._timeout_s):
            self._jobs.set_copy_s(job.job_id, self._clock() - start_s)

    def _copy(self, job: SwapJob, kv_caches: Caches) -> None:
        for part in job.parts:
            source = self._source(part)
            assert source is not None, "_why_impossible has looked"
            for segment_id, piece in source.pieces(job.job_id, part):
                self._jobs.add_part([job.job_id])
                try:
                    self._start(job.direction, source, segment_id, piece, kv_caches)
                except Exception as e:
                    self._fail(piece, source, segment_id, e)
                    check_alive(kv_caches, e)
                    return  # the rest would be of no use

    def _start(self, direction: Direction, source: SwapSource, segment_id: int, piece: Rows, kv_caches: Caches) -> None:
        if direction is Direction.SAVE:
            flight = source.copier.save(segment_id, piece, source.caches(kv_caches))
            source.memory.mark(segment_id, piece.host_block_ids, lost=False)
        else:
            flight, written = source.copier.load(segment_id, piece, source.caches(kv_caches))
            for i, cache in zip(source.layer_ids, written, strict=True):
                kv_caches[i] = cache
        self._flights.append((flight, source))

    def _source(self, part: SwapPart) -> SwapSource | None:
        if part.store is HostStore.HOST_TIER:
            return self._tier if part.group_id == 0 else None
        return self._groups[part.group_id] if 0 <= part.group_id < len(self._groups) else None

    def _why_impossible(self, job: SwapJob, direction: Direction) -> str:
        """Why a job cannot be started, in one line; empty when it can."""
        error = swap_error(job, direction)
        if error:
            return error
        reads = job.direction is Direction.LOAD
        for part in job.parts:
            source = self._source(part)
            in_tier = part.store is HostStore.HOST_TIER
            if source is None or (in_tier and not reads):
                verb = "reads" if reads else "writes"
                return (
                    f"a swap {verb} layer group {part.group_id} of {part.store.value}: this worker has no such memory"
                )
            num_ready = source.memory.pool.num_chunks_ready * (self._blocks_per_chunk if in_tier else 1)
            error = source.why_impossible(part, reads=reads, num_ready=num_ready)
            if error:
                return error
        return ""

    def _land(self, flight: Flight, source: SwapSource) -> None:
        """Ends a flight whose token is ready."""
        self._flights.remove((flight, source))
        try:
            check_copied(flight)
        except Exception as e:
            # A program that failed on the device has taken the donated segment with it.
            self._fail(flight.rows, source, flight.segment_id, e, lost=flight.direction is Direction.SAVE)
        else:
            self._jobs.end_part(flight.rows.jobs())

    def _fail(self, rows: Rows, source: SwapSource, segment_id: int, error: Exception, *, lost: bool = False) -> None:
        """Ends a job's part with an error, and gives up the segment if it is gone."""
        source.memory.give_up(segment_id, lost=lost)
        self._jobs.end_part(rows.jobs(), error_line(error))
