"""The copies between the KV caches of one page group and one host store, from their dispatch to their end.

Each dispatched copy is a flight. It ends when its token is ready, which `collect` checks; a job ends with its last
flight (see `worker.jobs`). If a failed program destroys a segment of host memory, the segment is marked as lost, and
nothing is read from its places until they are written again.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

import jax
import numpy as np

from tpu_offload.kernels import ArenaView, BlockMoves, BySegment, Copier, Flight, Phase
from tpu_offload.types import CopyJob, CopyPart, Direction, HostStore
from tpu_offload.values import error_line
from tpu_offload.worker.arrays import check_alive, is_ready
from tpu_offload.worker.host_memory import HostMemory, check_copied
from tpu_offload.worker.jobs import WorkerJobs

Caches = list[jax.Array]
type WrapCopier = Callable[[Copier, ArenaView], Copier]
"""Wraps a copier, given the host memory of its segments; for tests in which copies fail."""


def unwrapped(copier: Copier, arena: ArenaView) -> Copier:
    """Returns the copier itself."""
    return copier


def _no_call(job_id: int, error: str) -> None:
    pass


@final
class PageGroupCopies:
    """All methods are called by the thread that dispatches the model. Copies that fail are reported as failed results.

    Args:
      group_id: the layer group, by its index in `KVLayout.groups`.
      store: the host store.
      layer_ids: positions of the page group's arrays in the list of KV caches.
      memory: the host memory.
      copiers: the copier of each direction.
      jobs: the worker's jobs in flight.
      lockstep: the caches span hosts, which must dispatch in the same order although readiness differs between them.
      on_fail: called with the id of each job of which a flight failed, and the error.
    """

    def __init__(
        self,
        *,
        group_id: int,
        store: HostStore,
        layer_ids: Sequence[int],
        memory: HostMemory,
        copiers: Mapping[Direction, Copier],
        jobs: WorkerJobs,
        lockstep: bool,
        on_fail: Callable[[int, str], None] = _no_call,
    ) -> None:
        self.group_id = group_id
        self.store = store
        self.memory = memory
        self.copiers = copiers
        self.flights: list[Flight] = []
        self._layer_ids = tuple(layer_ids)
        self._jobs = jobs
        self._lockstep = lockstep
        self._on_fail = on_fail

    def reader(self, copier: Copier) -> "PageGroupCopies":
        """Loads from the same memory through another copier, with separate flights."""
        return PageGroupCopies(
            group_id=self.group_id,
            store=self.store,
            layer_ids=self._layer_ids,
            memory=self.memory,
            copiers={Direction.LOAD: copier},
            jobs=self._jobs,
            lockstep=self._lockstep,
        )

    @property
    def hbm_nbytes(self) -> int:
        """Most bytes of HBM that the copies take on each device."""
        return sum(copier.hbm_nbytes for copier in set(self.copiers.values()))

    def compile(self) -> None:
        """Compiles the programs; see `Copier.compile`."""
        for copier in self.copiers.values():  # compiling a shared one again does nothing
            copier.compile()

    # Jobs.

    def can_copy(self, parts: Sequence[tuple[int, CopyPart]], direction: Direction) -> bool:
        """Whether all of these parts (at least one), each with its job's rank, can be copied; else see `part_error`."""
        block_ids: Sequence[int] = parts[0][1].block_ids
        host_ids: Sequence[int] = parts[0][1].host_block_ids
        if len(parts) > 1:
            block_ids = [block_id for _, part in parts for block_id in part.block_ids]
            host_ids = [block_id for _, part in parts for block_id in part.host_block_ids]
        if not block_ids:
            return True
        memory = self.memory
        if min(block_ids) < 0 or max(block_ids) >= memory.spec.num_blocks:
            return False
        if min(host_ids) < 0 or max(host_ids) >= memory.num_blocks_ready:
            return False
        if direction is Direction.SAVE:
            return True
        if memory.spec.num_ranks == 1:
            is_lost = memoryview(memory.lost[0]).__getitem__  # cheaper than numpy, up to hundreds of blocks
            return not any(map(is_lost, host_ids))
        ranks = np.repeat([rank for rank, _ in parts], [len(part.block_ids) for _, part in parts])
        return not memory.lost[ranks, host_ids].any()

    def part_error(self, part: CopyPart, direction: Direction, rank: int) -> str:
        """Why a part of a job of a rank cannot be copied, in one line; empty if it can."""
        if self.can_copy([(rank, part)], direction):
            return ""
        for name, ids, limit in (
            ("block ids", part.block_ids, self.memory.spec.num_blocks),
            ("host block ids", part.host_block_ids, self.memory.num_blocks_ready),
        ):
            if min(ids) < 0 or max(ids) >= limit:
                return f"{name} {min(ids)} to {max(ids)}: expected 0 to {limit - 1} in {self.store.value}"
        if direction is Direction.LOAD:
            lost = [i for i in part.host_block_ids if self.memory.lost[rank, i]]
            if lost:
                segment_id = lost[0] // self.memory.spec.segment_blocks
                return (
                    f"segment {segment_id} of {self.store.value} was lost, or never written: host block {lost[0]} is "
                    "empty"
                )
        return ""

    def by_segment(self, jobs: Sequence[CopyJob]) -> BySegment:
        """The blocks that these jobs copy in this store and layer group, by segment."""
        parts = [
            (job, part)
            for job in jobs
            for part in job.parts
            if part.group_id == self.group_id and part.store is self.store
        ]
        # With few blocks each call of numpy costs more than a list.
        host_ids = parts[0][1].host_block_ids if len(parts) == 1 else [i for _, p in parts for i in p.host_block_ids]
        if not host_ids:
            return []
        block_ids = parts[0][1].block_ids if len(parts) == 1 else [i for _, part in parts for i in part.block_ids]
        job_ids, places = np.array(_of_blocks(parts, "job_id"), np.int64), np.array(host_ids, np.int32)
        ranks = self._ranks_of(parts)
        size = self.memory.spec.segment_blocks
        segment_id = min(host_ids) // size
        if segment_id == max(host_ids) // size:  # nearly always
            if segment_id:
                places -= np.int32(segment_id * size)
            return [(segment_id, BlockMoves(job_ids, np.array(block_ids, np.int32), places, ranks))]
        segment_ids, places = np.divmod(places, np.int32(size))
        moves = BlockMoves(job_ids, np.array(block_ids, np.int32), places, ranks)
        return [(int(i), moves.take(segment_ids == i)) for i in np.unique(segment_ids)]

    def _ranks_of(self, parts: Sequence[tuple[CopyJob, CopyPart]]) -> np.ndarray[Any, np.dtype[np.int32]] | None:
        """The rank of each block of these parts, each with its job; None with one rank."""
        return None if self.memory.spec.num_ranks == 1 else np.array(_of_blocks(parts, "rank"), np.int32)

    # Dispatch.

    def dispatch(self, direction: Direction, groups: BySegment, kv_caches: Caches, *, step_id: int = 0) -> None:
        """Dispatches copies; caches that are written are replaced in the list.

        Raises:
          CachesLostError: a load failed after its program had taken the donated caches.
        """
        for segment_id, moves in groups:
            copier = self.copiers[direction]
            for portion in copier.split(moves):
                self._start(copier, direction, segment_id, portion, kv_caches, step_id=step_id)

    def _start(
        self,
        copier: Copier,
        direction: Direction,
        segment_id: int,
        portion: BlockMoves,
        kv_caches: Caches,
        *,
        step_id: int,
    ) -> None:
        job_ids = portion.jobs()
        self._jobs.add_ref(job_ids)
        try:
            if direction is Direction.SAVE:
                flight = copier.save(segment_id, portion, self._own(kv_caches))
                self.memory.mark(segment_id, portion.host_block_ids, lost=False, ranks=portion.ranks)
            else:
                flight, written = copier.load(segment_id, portion, self._own(kv_caches))
                self._put(kv_caches, written)
        except Exception as e:
            self.fail(portion, segment_id, e)
            check_alive(kv_caches, e)
        else:
            flight.step_id = step_id
            self.flights.append(flight)
            if direction is Direction.LOAD and flight.phase is Phase.COPYING:
                self._jobs.mark_written(job_ids)

    def _own(self, kv_caches: Caches) -> Caches:
        """The arrays of the page group."""
        if len(self._layer_ids) == len(kv_caches):
            return kv_caches
        return [kv_caches[i] for i in self._layer_ids]

    def _put(self, kv_caches: Caches, written: Caches) -> None:
        if len(self._layer_ids) == len(kv_caches) == len(written):  # one page group, nearly always, and cheaper
            kv_caches[:] = written
            return
        for i, cache in zip(self._layer_ids, written, strict=True):
            kv_caches[i] = cache

    # Second halves of staged copies.

    def in_transit(self) -> list[Flight]:
        """The flights whose second half is not dispatched yet."""
        return [flight for flight in self.flights if flight.phase is Phase.TRANSIT]

    def resume(self, kv_caches: Caches, *, step_id: int) -> None:
        """Dispatches the second halves of flights that have arrived; in lockstep, of all dispatched before this step.

        Raises:
          CachesLostError: as `dispatch`.
        """
        for flight in self.in_transit():
            due = flight.step_id < step_id if self._lockstep else is_ready(flight.waiting_on)
            if due and flight.direction is Direction.SAVE:
                self._resume_save(flight)
            elif due:
                self._resume_load(flight, kv_caches)

    def _resume_save(self, flight: Flight) -> None:
        try:
            self._check_arrived(flight)
            self.copiers[flight.direction].resume_save(flight)
        except Exception as e:
            self.flights.remove(flight)
            self.fail(flight.moves, flight.segment_id, e)

    def _resume_load(self, flight: Flight, kv_caches: Caches) -> None:
        live = [job_id for job_id in flight.moves.jobs() if not self._jobs.is_cancelled(job_id)]
        self._jobs.drop_ref(job_id for job_id in flight.moves.jobs() if job_id not in live)
        if not live:
            self.flights.remove(flight)
            return
        moves = flight.moves.take(np.isin(flight.moves.job_ids, live))
        try:
            self._check_arrived(flight)
            self._put(kv_caches, self.copiers[flight.direction].resume_load(flight, moves, self._own(kv_caches)))
            self._jobs.mark_written(live)
        except Exception as e:
            self.flights.remove(flight)
            self.fail(moves, flight.segment_id, e)
            check_alive(kv_caches, e)

    def _check_arrived(self, flight: Flight) -> None:
        """Raises the error of a failed transfer, before its data is written to a segment or the caches."""
        if not self._lockstep:
            flight.waiting_on.block_until_ready()

    # Ends.

    def collect(self) -> None:
        """Dispatches the second halves of saves that have arrived, and ends the flights that are complete."""
        for flight in list(self.flights):
            if flight.phase is Phase.TRANSIT and not self._lockstep and is_ready(flight.waiting_on):
                self._resume_arrived(flight)
                if flight not in self.flights:
                    continue
            if flight.phase is Phase.COPYING and is_ready(flight.waiting_on):
                self.end(flight)

    def _resume_arrived(self, flight: Flight) -> None:
        """Resumes a save, or drops a load of which every job was cancelled; others need `resume`."""
        if flight.direction is Direction.SAVE:
            self._resume_save(flight)
        elif all(map(self._jobs.is_cancelled, flight.moves.jobs())):
            self._resume_load(flight, [])  # writes nothing

    def end(self, flight: Flight) -> None:
        """Ends a flight whose last program is dispatched; waits for its token unless that is ready."""
        self.flights.remove(flight)
        try:
            check_copied(flight)
        except Exception as e:
            # A program that failed on the device has destroyed the donated segment.
            self.fail(flight.moves, flight.segment_id, e, lost=flight.direction is Direction.SAVE)
        else:
            self.copiers[flight.direction].release(flight)
            self._jobs.drop_ref(flight.moves.jobs())

    def fail(self, moves: BlockMoves, segment_id: int, error: Exception, *, lost: bool = False) -> None:
        """Drops the jobs' references with an error, and marks the segment as lost if it is."""
        self.memory.check_segment(segment_id, lost=lost)
        line = error_line(error)
        for job_id in moves.jobs():
            block_ids: Iterable[int] = moves.block_ids[moves.job_ids == job_id].tolist()
            self._jobs.drop_ref([job_id], line, failed=[(self.group_id, block_id) for block_id in block_ids])
            self._on_fail(job_id, line)

    def waiting_on(self, *, all_of_them: bool = False) -> list[Any]:
        """The arrays whose readiness lets `collect` make progress; or all, including those that need `resume`."""
        return [
            flight.waiting_on
            for flight in self.flights
            if all_of_them
            or flight.phase is Phase.COPYING
            or not (self._lockstep or flight.direction is Direction.LOAD)
        ]


def _of_blocks(parts: Sequence[tuple[CopyJob, CopyPart]], name: str) -> list[int]:
    """An attribute of each block's job."""
    values: list[int] = []
    for job, part in parts:
        values += [getattr(job, name)] * len(part.block_ids)
    return values


def page_groups_of(groups: Iterable[PageGroupCopies], group_id: int) -> list[PageGroupCopies]:
    """Those of one layer group; none if there is no such group."""
    return [group for group in groups if group.group_id == group_id]
