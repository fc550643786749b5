"""A worker with simulated memories. It executes plans in the order of `OffloadWorker`.

A copy reads in the step of its plan. Direct copies and swaps in are also written in that step. A staged load is written
at the beginning of a later step; a staged save and a swap out are written to host memory at the end of a later step.
The end of each copy is reported after that.

The library's `PlanGate` decides which plans it executes, as in `OffloadWorker`.

Loads are copied in pieces, as in `OffloadWorker`: a staged one through its staging blocks, others by a number of blocks
per step. A piece is read in the step that dispatches it. A failed piece ends the load.

Faults are armed in advance: the next dispatched copy consumes one.
"""

import dataclasses
from collections import deque
from collections.abc import Iterable, Sequence
from typing import final

from tests.simulation.flights import Flight, LongLoad, Memory
from tests.simulation.memory import Junk, mix
from tests.simulation.places import Places
from tests.simulation.segments import SimSegments
from tests.simulation.trace import Setup
from tpu_offload import CacheEpoch, CopyJob, HostStore, JobKind, JobResult, JobState, StepPlan, StepReport
from tpu_offload.worker.plan_gate import PlanGate

_FINISHED, _FAILED, _CANCELLED = JobState.FINISHED, JobState.FAILED, JobState.CANCELLED
NUM_KINDS = 8  # kinds of faults; above 1 some blocks are still copied, and all but 4 report which failed
PARTIAL = (2, 3, 5, 6, 7)  # kinds of faults that still copy some blocks
FIRST_INCARNATION = 1  # 0 means unknown
FAULTY = ("save", "load", "swap")  # kinds of copies that can fail


@final
class SimWorker:
    """One worker of the simulated engine."""

    def __init__(self, worker_id: int, setup: Setup, junk: Junk) -> None:
        self.worker_id = worker_id
        self.size = setup.blocks_per_chunk
        self.block_size = setup.block_size
        self.junk = junk
        self.delay = setup.delays[worker_id]
        self.growth = setup.growth
        self.max_load_blocks = setup.max_load_blocks or 10**9
        self.max_slots = setup.num_slots
        self.max_swap = setup.num_swap_blocks
        self.stages_saves = bool(setup.staged >> 2 * worker_id & 1)
        self.stages_loads = bool(setup.staged >> 2 * worker_id & 2)
        self.places = Places(setup)
        self.max_states = setup.num_host_states
        self.num_groups = 1 + len(setup.windows) + (setup.num_rows > 0)
        self._setup = setup
        self.hbm = self._empty_hbm()
        self.incarnation = FIRST_INCARNATION
        self.step = 0
        self.stalled_until = 0
        self.loses_caches = False  # at the next plan
        self.faults: dict[str, deque[int]] = {kind: deque() for kind in FAULTY}
        self.num_faults: dict[str, int] = {}
        self._start(setup.missing_segments[worker_id])

    def _start(self, num_missing: int) -> None:
        self.host = Memory([self.junk.block(size) for size in self.places.host_sizes()])
        self.num_states_ready = 0
        self.pools = [
            Memory([self.junk.block(self.places.block_length(group_id)) for _ in range(self.max_swap)])
            for group_id in range(self.num_groups)
        ]
        self.segments: SimSegments | None = None
        if self.max_states:
            self.segments = SimSegments(
                self.worker_id, self._setup, num_missing=num_missing, on_free=self._free, in_use=self._will_write_from
            )
        self.flights: list[Flight] = []
        self.long_loads: dict[int, LongLoad] = {}
        self.results: list[JobResult] = []
        self.last_job_id = -1
        self.gate = PlanGate(CacheEpoch(worker_id=self.worker_id, incarnation=self.incarnation, num_losses=0), None)  # type: ignore[arg-type]
        self._plan: StepPlan | None = None
        self._grow()

    def restart(self, *, with_hbm: bool, growth: int, num_missing: int = 0) -> None:
        """Restarts the worker: loses all copies in flight and host memory, which grows again."""
        self.incarnation += 1
        self.growth = growth
        self._start(num_missing)
        self.host.gone.update(range(len(self.host.places)))
        for pool in self.pools:
            pool.gone.update(range(len(pool.places)))
        if with_hbm:
            self.hbm = self._empty_hbm()

    def _empty_hbm(self) -> list[list[int]]:
        return [list(self.junk.block(size)) for size in self.places.hbm_sizes()]

    def lose_slots(self, first: int, end: int) -> None:
        """Loses slots of the host tier; they are reallocated."""
        self._lose(self.host, [place for slot in range(first, end) for place in self.places.of_slot(slot)])
        self.host.unreported.append((first, end))

    def lose_swap_blocks(self, group_id: int, first: int, end: int) -> None:
        """Loses blocks of the swap pool; they are reallocated."""
        self._lose(self.pools[group_id], range(first, end))
        self.pools[group_id].unreported.append((first, end))

    def _lose(self, memory: Memory, places: Iterable[int]) -> None:
        for place in places:
            memory.places[place] = self.junk.block(len(memory.places[place]))
            memory.lost.add(place)

    # The step.

    def begin_step(self, plan: StepPlan, step: int) -> None:
        """The part of a step before the forward pass."""
        self.step = step
        self._fail_lost_loads()
        if not self.gate.begin(plan):
            self._count("plans ignored")
            return
        if self.segments is not None:
            self.segments.begin(plan.division)
        if self.gate.is_stale(plan):
            self._count("plans refused", len(plan.jobs) > 0)
            plan = self._cancel_all(plan)
        self._plan = plan
        for job in plan.of(JobKind.EARLY_SAVE):
            self._save(job)
        for swap in plan.of(JobKind.SWAP_OUT):
            self._swap_out(swap)
        for job_id in plan.cancelled_job_ids:
            self._cancel(job_id)
        if self.loses_caches:
            plan = self._plan = self._lose_caches(plan)
        if self.flights:
            self._end_flights(into_hbm=True)
        for job in plan.of(JobKind.LOAD):
            self._load(job)
        if self.long_loads:
            self._dispatch_pieces()
        for swap in plan.of(JobKind.SWAP_IN):
            self._swap_in(swap)
        if not plan.of(JobKind.SAVE):
            self.last_job_id = max(self.last_job_id, plan.next_job_id - 1)

    def end_step(self, plan: StepPlan) -> None:
        """The part of a step after the forward pass."""
        begun, self._plan = self._plan, None
        if begun is not None and begun.step_id == plan.step_id:
            for job in begun.of(JobKind.SAVE):
                self._save(job)
            self.last_job_id = max(self.last_job_id, plan.next_job_id - 1)
        if self.flights:
            self._end_flights(into_hbm=False)
        if self.long_loads:
            self._end_long_loads()
        self._grow()

    def abort_step(self, plan: StepPlan) -> None:
        """The forward pass was not executed, and this worker knows."""
        begun = self._plan
        if begun is not None and begun.step_id == plan.step_id:
            self._cancel_all(dataclasses.replace(begun, jobs=begun.of(JobKind.SAVE)))
            self._plan = dataclasses.replace(begun, jobs=())
        self.end_step(plan)

    def report(self) -> StepReport:
        """The report of the current step."""
        results, self.results = tuple(self.results), []
        lost_slots = []
        for first, end in self.host.unreported:
            before = self.max_slots if first >= self.max_slots else 0
            lost_slots.append((int(before > 0), first - before, end - before))
        self.host.unreported = []
        lost_swap = tuple((i, *span) for i, pool in enumerate(self.pools) for span in pool.unreported)
        for pool in self.pools:
            pool.unreported.clear()
        in_flight = [*(flight.job_id for flight in self.flights), *self.long_loads]
        oldest = min(in_flight, default=self.last_job_id + 1)
        return StepReport(
            worker_id=self.worker_id,
            results=results,
            num_host_slots=(self.host.num_ready, self.num_states_ready)[: 1 + (self.max_states > 0)],
            num_host_segments=self.segments.capacity if self.segments is not None else 0,
            division_id=self.segments.division_id if self.segments is not None else 0,
            lost_slots=tuple(lost_slots),
            num_swap_blocks=tuple(pool.num_ready for pool in self.pools) if self.max_swap else (),
            lost_swap_blocks=lost_swap,
            oldest_job_id=oldest,
            incarnation=self.incarnation,
            num_cache_losses=self.gate.epoch.num_losses,
        )

    def will_write(self, slot: int) -> bool:
        """Whether a copy in flight may still write a slot of the host tier."""
        places = self.places.of_slot(slot)
        return any(
            flight.memory is self.host and any(place in places for place in flight.writes) for flight in self.flights
        )

    def will_write_swap(self, group_id: int, place: int) -> bool:
        """Whether a copy in flight may still write a block of the swap pool."""
        pool = self.pools[group_id]
        return any(flight.memory is pool and place in flight.writes for flight in self.flights)

    def _will_write_from(self, pool: int, first: int) -> bool:
        """Whether a copy in flight may still write a slot of a pool, from its `first` on."""
        before, size = pool * self.max_slots, (self.max_slots, self.max_states)[pool]
        return any(self.will_write(before + slot) for slot in range(first, size))

    def _free(self, pool: int, first: int, end: int) -> None:
        """The memory of these slots is gone. Whoever still reads them finds junk."""
        before = pool * self.max_slots
        for slot in range(before + first, before + end):
            for place in self.places.of_slot(slot):
                self.host.places[place] = self.junk.block(len(self.host.places[place]))
                self.host.lost.discard(place)
                self.host.gone.discard(place)
        self._count("slots freed", end - first)

    def _grow(self) -> None:
        if self.segments is not None:
            self.segments.advance(self.growth, self.step)
            self.host.num_ready, self.num_states_ready = self.segments.num_slots
        else:
            self.host.num_ready = min(self.max_slots, self.host.num_ready + self.growth)
        for pool in self.pools:
            pool.num_ready = min(self.max_swap, pool.num_ready + self.growth)

    # Copies.

    def _save(self, job: CopyJob) -> None:
        self._accept(job.job_id)
        places = self.places.host(job)
        if self._refuse(job.job_id, places, self.host, reads=False):
            return
        contents = [tuple(self.hbm[place]) for place in self.places.hbm(job)]
        writes, result = self._copy(job.job_id, places, contents, self.faults["save"])
        if not self.stages_saves:
            self.host.write(writes)
        self._start_flight(job.job_id, self.host if self.stages_saves else None, writes, result, writes_host=True)
        self.flights[-1].num_staged = self.places.num_staged(job) if self.stages_saves else 0

    def _load(self, job: CopyJob) -> None:
        self._accept(job.job_id)
        if self._refuse(job.job_id, self.places.host(job), self.host, reads=True):
            return
        self.long_loads[job.job_id] = LongLoad(job)

    def _dispatch_pieces(self) -> None:
        """Dispatches the next piece of each load that has room for one."""
        left = self.max_load_blocks
        for load in [load for load in self.long_loads.values() if load.failure is None and not load.is_cancelled]:
            job, first = load.job, load.num_dispatched
            room = left
            if self.stages_loads:
                staged = sum(flight.num_staged for flight in self.flights if flight.job_id == job.job_id)
                room = (job.num_staging_blocks or job.num_blocks) - staged
            num_blocks = max(0, min(job.num_blocks - first, room))
            if not num_blocks:
                continue
            left -= num_blocks
            load.num_dispatched = end = first + num_blocks
            contents = [self.host.places[place] for place in self.places.host(job)[first:end]]
            writes, result = self._copy(job.job_id, self.places.hbm(job)[first:end], contents, self.faults["load"])
            if not self.stages_loads:
                self._write_hbm(writes)
            self._start_flight(job.job_id, None, writes, result, into_hbm=self.stages_loads)
            flight = self.flights[-1]
            flight.is_piece, flight.num_staged = True, num_blocks if self.stages_loads else 0
            if result.state is _FAILED:
                self._fail_piece(load, result, first, end)
            self._count("pieces" if num_blocks < job.num_blocks else "whole loads")

    def _fail_piece(self, load: LongLoad, result: JobResult, first: int, end: int) -> None:
        """Fails a load whose piece was not (fully) copied: no later piece is dispatched."""
        load.failed.update(first + i for i in result.failed_blocks or range(end - first))
        load.failed.update(range(load.num_dispatched, load.job.num_blocks))
        load.failure = load.failure or result

    def _fail_lost_loads(self) -> None:
        """Fails loads whose remaining pieces would read lost memory."""
        for load in list(self.long_loads.values()):
            places = self.places.host(load.job)[load.num_dispatched :]
            if load.failure is None and not self.host.lost.isdisjoint(places):
                result = JobResult(job_id=load.job.job_id, state=_FAILED, error="its host memory was lost")
                self._fail_piece(load, result, load.num_dispatched, load.job.num_blocks)

    def _end_long_loads(self) -> None:
        """Reports the loads without pieces in flight or to dispatch."""
        for job_id, load in list(self.long_loads.items()):
            if any(flight.job_id == job_id for flight in self.flights):
                continue
            if load.failure is not None:
                failed = tuple(sorted(load.failed)) if len(load.failed) < load.job.num_blocks else ()
                self.results.append(
                    JobResult(
                        job_id=job_id, state=_FAILED, error=load.failure.error, duration_s=0.5, failed_blocks=failed
                    )
                )
            elif load.is_cancelled:
                self.results.append(JobResult(job_id=job_id, state=_CANCELLED))
            elif load.num_dispatched < load.job.num_blocks:
                continue
            else:
                self.results.append(JobResult(job_id=job_id, state=_FINISHED, error="", duration_s=0.5, copy_s=0.25))
            del self.long_loads[job_id]

    def _swap_out(self, job: CopyJob) -> None:
        self._accept(job.job_id)
        if any(
            self._refuse(job.job_id, part.host_block_ids, self.pools[part.group_id], reads=False) for part in job.parts
        ):
            return
        faulty = mix(job.job_id, 11) % len(job.parts)  # the part whose copy may fail
        for i, part in enumerate(job.parts):
            contents = [tuple(self.hbm[place]) for place in self.places.hbm_of(part)]
            faults = self.faults["swap"] if i == faulty else deque()
            writes, result = self._copy(job.job_id, part.host_block_ids, contents, faults)
            self._start_flight(job.job_id, self.pools[part.group_id], writes, result, writes_host=True)
            self.flights[-1].is_piece = i != faulty  # the job has one result

    def _swap_in(self, job: CopyJob) -> None:
        self._accept(job.job_id)
        writes: dict[int, tuple[int, ...]] = {}
        for part in job.parts:
            memory, places = self.host, self.places.host_of(part)
            if part.store is HostStore.SWAP_POOL:
                memory, places = self.pools[part.group_id], list(part.host_block_ids)
            if self._refuse(job.job_id, places, memory, reads=True):
                return
            self._complete_early(memory, places)
            writes.update(zip(self.places.hbm_of(part), [memory.places[p] for p in places], strict=True))
        written, result = self._copy(job.job_id, list(writes), list(writes.values()), self.faults["swap"])
        self._write_hbm(written)
        self._start_flight(job.job_id, None, written, result)

    def _accept(self, job_id: int) -> None:
        self.last_job_id = max(self.last_job_id, job_id)

    def _refuse(self, job_id: int, places: Sequence[int], memory: Memory, *, reads: bool) -> bool:
        """Fails a job that is impossible; returns whether it did."""
        why = "" if self._is_allocated(memory, places) else "a position is not allocated yet"
        # Copies in flight to a lost position come before this read in program order.
        lost = memory.lost.difference(*(f.writes for f in self.flights if f.memory is memory)) if reads else ()
        if lost and not lost.isdisjoint(places):
            why = "its host memory was lost"
        if why:
            self._count("refused")
            self._start_flight(job_id, None, {}, JobResult(job_id=job_id, state=_FAILED, error=why))
        return bool(why)

    def _is_allocated(self, memory: Memory, places: Sequence[int]) -> bool:
        if memory is not self.host:
            return max(places) < memory.num_ready
        slots = {self.places.slot_of(place) for place in places}
        end_states = self.max_slots + self.num_states_ready
        return all(slot < (memory.num_ready if slot < self.max_slots else end_states) for slot in slots)

    def _copy(
        self, job_id: int, targets: Sequence[int], contents: list[tuple[int, ...]], faults: deque[int]
    ) -> tuple[dict[int, tuple[int, ...]], JobResult]:
        """What a copy writes, and its result."""
        writes = dict(zip(targets, contents, strict=True))
        if not faults:
            return writes, JobResult(job_id=job_id, state=_FINISHED, error="", duration_s=0.5, copy_s=0.25)
        fault = faults.popleft()
        partly = faults is not self.faults["swap"]
        kind = fault % NUM_KINDS
        failed = set(range(len(targets)))
        if partly and kind > 1 and len(targets) > 1:
            first = 0 if not mix(fault, 9) % 5 else 1 + mix(fault, 8) % (len(targets) - 1)  # the first hole
            failed = {i for i in failed if i == first or (i > first and not mix(fault, i) % 3)}
        leaves_junk = kind in (1, 3, 5)
        for i in failed:
            if leaves_junk:
                writes[targets[i]] = self.junk.block(len(contents[i]))
            else:
                writes.pop(targets[i])
        named = len(failed) < len(targets) and kind != 4
        self._count("failed partly" if named else "failed wholly")
        return writes, JobResult(
            job_id=job_id,
            state=_FAILED,
            error="injected",
            duration_s=0.5,
            failed_blocks=tuple(sorted(failed)) if named else (),
        )

    def _start_flight(
        self,
        job_id: int,
        memory: Memory | None,
        writes: dict[int, tuple[int, ...]],
        result: JobResult,
        *,
        into_hbm: bool = False,
        writes_host: bool = False,
    ) -> None:
        due = self.step + (0 if not self.delay else mix(job_id, self.worker_id + 7) % (self.delay + 1))
        self.flights.append(Flight(job_id, memory, due + into_hbm, writes, result, into_hbm, writes_host))

    def _write_hbm(self, writes: dict[int, tuple[int, ...]]) -> None:
        for block, content in writes.items():
            self.hbm[block] = list(content)

    # Ends.

    def _lose_caches(self, plan: StepPlan) -> StepPlan:
        """A load destroys the KV caches; returns the rest of the plan."""
        self.loses_caches = False
        self.gate.mark_caches_lost()
        self.hbm = self._empty_hbm()
        for flight in self.flights:
            if not flight.writes_host:
                flight.writes.clear()
                if flight.result.state is _FINISHED:
                    flight.result = JobResult(job_id=flight.job_id, state=_CANCELLED)
        for load in self.long_loads.values():
            load.is_cancelled = True
        self._count("losses of the caches")
        return self._cancel_all(dataclasses.replace(plan, jobs=plan.of(JobKind.LOAD, JobKind.SWAP_IN, JobKind.SAVE)))

    def _cancel_all(self, plan: StepPlan) -> StepPlan:
        for job in plan.jobs:
            self._accept(job.job_id)
            self._start_flight(job.job_id, None, {}, JobResult(job_id=job.job_id, state=_CANCELLED))
        return dataclasses.replace(plan, jobs=())

    def _cancel(self, job_id: int) -> None:
        load = self.long_loads.get(job_id)
        if load is not None and (
            load.num_dispatched < load.job.num_blocks or any(f.job_id == job_id and f.into_hbm for f in self.flights)
        ):
            load.is_cancelled = True
        for flight in self.flights:
            if flight.job_id == job_id and flight.into_hbm:
                flight.writes.clear()
                if flight.result.state is _FINISHED:
                    flight.result = JobResult(job_id=job_id, state=_CANCELLED)
                self._count("cancelled")

    def _complete_early(self, memory: Memory, places: Iterable[int]) -> None:
        """Completes writes to these positions: a later read sees them by program order, although they are in flight."""
        wanted = set(places)
        for flight in self.flights:
            if flight.memory is memory and not wanted.isdisjoint(flight.writes):
                memory.write(flight.writes)
                flight.memory = None

    def _end_flights(self, *, into_hbm: bool) -> None:
        """Ends the staged loads (`into_hbm`), or the other copies, that are due."""
        if self.step < self.stalled_until:
            return
        for flight in [f for f in self.flights if f.into_hbm == into_hbm and f.due <= self.step]:
            self.flights.remove(flight)
            if into_hbm:
                self._write_hbm(flight.writes)
            elif flight.memory is not None:
                flight.memory.write(flight.writes)
            if not flight.is_piece:
                self.results.append(flight.result)

    def _count(self, what: str, number: int = 1) -> None:
        self.num_faults[what] = self.num_faults.get(what, 0) + number
