"""An independent model of the scheduler's state: holders of staging blocks and slots, and visible chunks.

The model is notified of the engine's calls, of plans and of reports, and reads the workers' memories. It creates no
chunk keys: visible keys come from the index's list of changes, and their slots from lookups.
"""

import dataclasses
import sys
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import final

from tests.inside.scheduler import (
    checkpoint_table,
    chunk_index,
    job_table,
    load_planner,
    load_queue,
    request_table,
    swap_pool_hashes,
    swapped_requests,
    tier_context,
)
from tests.simulation.groups import Group
from tests.simulation.load_tracker import Loading, LoadTracker
from tests.simulation.memory import Violation, kv
from tests.simulation.places import Places
from tests.simulation.request import Request
from tests.simulation.router import Router
from tests.simulation.trace import Setup
from tests.simulation.worker import SimWorker
from tpu_offload import (
    BlockHash,
    ChunkKey,
    CopyJob,
    HostDivision,
    JobState,
    OffloadScheduler,
    OffloadStats,
    StepPlan,
    StepReport,
)
from tpu_offload.core.breaker import BreakerState
from tpu_offload.core.index import Checkpoint
from tpu_offload.hashing import last_block_hash
from tpu_offload.types import Direction, JobKind


@dataclasses.dataclass(slots=True, eq=False)
class OpenJob:
    """A job that was sent and has not ended.

    Attributes:
      direction: save or load.
      num_staging_blocks: staging blocks that it holds.
      slots: slots of the host tier that it reads or writes.
      waiting_for: workers that have not reported it.
      deadline_s: when it times out.
      num_blocks: blocks that it copies.
      pieces: of a load, the slot of each block that comes after those of full attention.
      bad_pieces: those that a worker has named as not copied.
      is_void: whether a worker has failed without saying what it did not copy.
    """

    direction: Direction
    num_staging_blocks: int
    slots: set[int]
    waiting_for: set[int]
    deadline_s: float
    num_blocks: int = 0
    pieces: tuple[int, ...] = ()
    bad_pieces: set[int] = dataclasses.field(default_factory=set)
    is_void: bool = False

    @property
    def slots_written(self) -> Collection[int]:
        """Slots of the host tier that it writes."""
        return self.slots if self.direction is Direction.SAVE else ()

    def fail(self, positions: Collection[int]) -> None:
        """A worker could not copy the blocks at these positions; none means all."""
        self.is_void |= not positions
        num_full = self.num_blocks - len(self.pieces)
        self.bad_pieces.update(self.pieces[i - num_full] for i in positions if i >= num_full)


@dataclasses.dataclass(slots=True, eq=False)
class Admitted:
    """A load that was admitted and not sent yet.

    Attributes:
      since_s: when.
      slots: slots of the host tier that it reads.
      parts: per layer group, its blocks and what each of them must hold in the end.
    """

    since_s: float
    slots: tuple[int, ...]
    parts: list[tuple[tuple[int, ...], list[tuple[int, ...]]]]

    @property
    def num_blocks(self) -> int:
        return sum(len(blocks) for blocks, _ in self.parts)


@final
class Model:
    """The model, and the checks of the scheduler against it.

    Args:
      setup: sizes.
      groups: the layer groups.
      scheduler: the real scheduler.
      workers: the workers, whose memories are checked.
      clock: the simulated time.
      timeout_s: the job timeout of the settings.
      log: called with a line per event.
    """

    def __init__(
        self,
        setup: Setup,
        groups: Sequence[Group],
        scheduler: OffloadScheduler,
        workers: list[SimWorker],
        clock: Callable[[], float],
        timeout_s: float,
        log: Callable[[str], None],
    ) -> None:
        self.groups = groups
        self.scheduler = scheduler
        self.index = chunk_index(scheduler)
        self.workers = workers
        self.clock = clock
        self.timeout_s = timeout_s
        self.log = log
        self.size = setup.blocks_per_chunk
        self.places = Places(setup)
        self.block_size = setup.block_size
        self.budget = setup.num_staging_blocks if setup.num_slots else 0
        self.blocks: dict[BlockHash, tuple[tuple[int, ...], BlockHash | None]] = {}
        self.epoch = 0
        self.loads = LoadTracker(block_size=setup.block_size)
        self.jobs: dict[int, OpenJob] = {}
        self.late: dict[int, OpenJob] = {}  # timed out, and some worker may still copy
        self.stages = {direction: tier_context(scheduler).config.path_for(direction).stages for direction in Direction}
        self.max_load_blocks = setup.max_load_blocks
        self.load_wait_s = setup.load_wait_s
        self.promises: dict[
            str, tuple[int, tuple[int, ...]]
        ] = {}  # position of the first block in its chunk, and slots
        self.admitted: dict[str, Admitted] = {}
        self.planned_at_s = 0.0
        self.visible: dict[ChunkKey, int] = {}
        self.key_in: dict[int, ChunkKey] = {}
        self.checkpoints: dict[ChunkKey, Checkpoint] = {}  # the READY ones
        self.router = Router(groups, self.size)
        self.used_next: dict[str, Checkpoint] = {}  # by request, the one that it was promised last
        self.used: set[Checkpoint] = set()  # that a request has loaded
        self.lost_slots: set[int] = set()  # of pieces that a worker has lost or could not read, until written again
        self.unreadable: set[int] = set()  # of them, those that were reported as lost, or that a failed load named
        self.num_evicted_checkpoints = self.unexplained = 0
        self.cache_epochs: dict[int, tuple[int, int]] = {}  # by worker, as last reported
        self.last_key_in: dict[int, ChunkKey] = {}  # including removed chunks: a promised one stays in its slot
        self.incarnations: dict[int, int] = {}
        self.num_ready = dict.fromkeys(range(setup.num_workers), 0)  # slots that each worker has reported
        self.num_states_ready = dict(self.num_ready)  # likewise, of states
        self.segment_slots = setup.segment_slots
        self.num_segments = setup.num_segments
        self.division: HostDivision | None = None  # of the last plan
        self.counts: Counter[str] = Counter()

    # Calls of the engine.

    def on_match(self, request: Request, num_cached: int, epoch: int) -> None:
        """A match promised `request.num_promised` tokens."""
        self.promises.pop(request.name, None)
        if len(self.groups) > 1:
            self._check_router(request)
        num_tokens = request.num_promised
        if not num_tokens:
            return
        if not num_tokens + num_cached < len(request.tokens):
            raise Violation(f"{request.name} is promised all of its {len(request.tokens)} tokens")
        first = num_cached // self.block_size
        num_blocks = -(-num_tokens // self.block_size)
        slots = []
        by_hash = {last_block_hash(key): slot for key, slot in self.visible.items()}
        for chunk in range(first // self.size, (first + num_blocks - 1) // self.size + 1):
            block_hash = request.hashes[(chunk + 1) * self.size - 1]
            if block_hash not in by_hash:
                raise Violation(f"{request.name} is promised chunk {chunk}, which is not visible")
            slots.append(by_hash[block_hash])
            self.loads.check_match(request.name, (block_hash,))
        if len(self.groups) > 1:
            slots += self._promised_checkpoint(request, num_cached + num_tokens)
        self.promises[request.name] = first % self.size, tuple(slots)
        self.counts["promises"] += 1

    def _promised_checkpoint(self, request: Request, num_tokens: int) -> Sequence[int]:
        """The slots of the checkpoint with which a request is to continue after these tokens."""
        chunk_tokens = self.size * self.block_size
        if num_tokens % chunk_tokens:
            raise Violation(f"{request.name} is promised windows up to token {num_tokens}, which is inside a chunk")
        promise = request_table(self.scheduler)[request.name].promise
        checkpoint = promise.held.checkpoint if promise is not None else None
        if checkpoint is None or last_block_hash(checkpoint.key) != request.hashes[num_tokens // self.block_size - 1]:
            raise Violation(f"{request.name} is promised {num_tokens} tokens, where there is no checkpoint")
        if not self.unreadable.isdisjoint(checkpoint.slots):
            raise Violation(f"{request.name} is promised a checkpoint with a piece that cannot be read")
        if any(slot in job.slots_written for job in self.jobs.values() for slot in checkpoint.slots):
            raise Violation(f"{request.name} is promised a checkpoint with a piece that is being saved")
        if self.checkpoints.get(checkpoint.key) is not checkpoint:  # other checkpoints have its pieces
            self._check_checkpoint(checkpoint.key, checkpoint)
            self.counts["shared checkpoints"] += 1
        self.used_next[request.name] = checkpoint
        return checkpoint.slots

    def _check_router(self, request: Request) -> None:
        """Raises Violation unless the events name the prefix of a request that lookups find."""
        self.sync_index()
        tokens = len(request.tokens)
        named = self.router.num_cached_tokens(request.hashes, tokens, self.block_size)
        asked = request_table(self.scheduler).new(request.name)
        found = load_planner(self.scheduler).num_cached_tokens(asked, request.hashes, num_tokens=tokens)
        if named != found:
            raise Violation(f"{request.name}: by the events {named} tokens can be loaded, by a lookup {found}")

    def on_release(self, name: str) -> None:
        self.promises.pop(name, None)

    def on_admit(self, request: Request, tables: Sequence[Sequence[int]], num_cached: int, num_loaded: int) -> None:
        promise = self.promises.pop(request.name, None)
        if num_loaded and promise is not None:
            first, slots = promise
            first_block = num_cached // self.block_size
            num_blocks = -(-num_loaded // self.block_size)
            if len(self.groups) == 1:
                slots = slots[: -(-(first + num_blocks) // self.size)]
            else:
                self.used.add(self.used_next[request.name])
            parts = []
            for group, table in zip(self.groups, tables, strict=True):
                positions = group.loaded(first_block, first_block + num_blocks)
                contents = [self._content(group, request.nodes, p) for p in positions]
                parts.append((tuple(table[p] for p in positions), contents))
            self.admitted[request.name] = Admitted(self.clock(), slots, parts)

    def _content(self, group: Group, nodes: Sequence[int], position: int) -> tuple[int, ...]:
        """What the block at a position of a prefix holds in a layer group."""
        first = position * self.block_size
        return group.content([kv(node, self.epoch) for node in nodes[first : first + self.block_size]])

    def on_gone(self, name: str) -> None:
        self.promises.pop(name, None)
        self.admitted.pop(name, None)
        self.loads.cancel(name)

    def on_end_of_load(self, name: str, num_tokens: int, *, finished: bool) -> None:
        """The engine is told that a load ended with this many valid tokens."""
        self.admitted.pop(name, None)
        ended = self.loads.job_of(name) not in self.jobs
        bad = self.loads.end_load(name, num_tokens, finished=finished, ended=ended)
        if bad - {last_block_hash(key) for key in tier_context(self.scheduler).backoff}:
            raise Violation(f"a chunk whose load failed for {name} has no backoff")

    def on_reset(self) -> None:
        self.epoch += 1
        self.promises.clear()
        self.admitted.clear()
        self.loads.reset()
        self._void_jobs()
        self.sync_index()
        if swap_pool_hashes(self.scheduler):
            raise Violation("the swap pool still finds blocks by hash after the reset")
        if self.visible:
            raise Violation(f"{len(self.visible)} chunks from before the reset are visible after it")

    # Messages between scheduler and workers.

    def before_plan(self) -> None:
        """Ends jobs that have timed out by the next plan."""
        now_s = self.clock()
        for job_id in [i for i, job in self.jobs.items() if job.deadline_s <= now_s]:
            self.late[job_id] = job = self.jobs.pop(job_id)
            self.lost_slots |= job.slots if job.direction is Direction.LOAD else set()
            self.loads.fail(job_id, ())
            self.counts["timeouts"] += 1

    def on_plan(self, plan: StepPlan) -> None:
        """Records the plan's jobs, and checks that they may read and write what they will."""
        self.sync_index()
        waiting = {load.request_id for load in load_queue(self.scheduler)} | {
            job.request_id for job in plan.of(JobKind.LOAD)
        }
        for name in self.admitted.keys() - waiting:  # abandoned; the next update says so
            del self.admitted[name]
            self.counts["loads that were not sent"] += 1
        readers = self._pinned_slots()
        self._check_division(plan.division, readers)
        now_s = self.planned_at_s = self.clock()
        for job in plan.of(JobKind.LOAD):
            admitted = self.admitted.pop(job.request_id, None)
            if admitted is None or admitted.num_blocks != job.num_blocks:
                wanted = admitted.num_blocks if admitted else None
                raise Violation(f"load {job.job_id} of {job.num_blocks} blocks; {job.request_id} admitted {wanted}")
            num_blocks = job.num_blocks
            self.counts["loads that waited"] += admitted.since_s < now_s - 0.15
            self._check_load(job, admitted)
            places = [self.places.slot_of(place) for place in self.places.host(job)]
            num_full = len(job.parts[0].block_ids)
            chunks = [
                last_block_hash(self.last_key_in[slot]) if slot in self.last_key_in else None
                for slot in places[:num_full]
            ] + [None] * (num_blocks - num_full)
            loading = Loading(job.job_id, places, chunks, num_full, is_whole=len(self.groups) > 1)
            self.loads.start(job.request_id, loading)
            slots = set(places)
            num_staged = job.num_staging_blocks
            if not (0 < num_staged <= self.places.num_staged(job) if self.stages[Direction.LOAD] else num_staged == 0):
                raise Violation(f"load {job.job_id} of {num_blocks} blocks has {num_staged} staging blocks")
            self.counts["loads in pieces"] += num_blocks > (num_staged or self.max_load_blocks or num_blocks)
            deadline_s = now_s + self.timeout_s * self._num_pieces(job)
            opened = OpenJob(Direction.LOAD, num_staged, slots, self._all_workers(), deadline_s)
            opened.num_blocks, opened.pieces = num_blocks, tuple(places[num_full:])
            self._open(job.job_id, opened)
        self.counts["early saves"] += len(plan.of(JobKind.EARLY_SAVE))
        for job in (*plan.of(JobKind.EARLY_SAVE), *plan.of(JobKind.SAVE)):
            slots = {self.places.slot_of(place) for place in self.places.host(job)}
            if sum(len(self.places.of_slot(slot)) for slot in slots) != job.num_blocks:
                raise Violation(f"save {job.job_id} has two chunks for one slot, or half a chunk")
            for slot in slots:
                self._check_writable(job.job_id, slot, readers)
            self.lost_slots -= slots
            self.unreadable -= slots
            if job.num_staging_blocks != (self.places.num_staged(job) if self.stages[Direction.SAVE] else 0):
                raise Violation(f"save {job.job_id} of {job.num_blocks} blocks has {job.num_staging_blocks} staged")
            deadline_s, num_staged = now_s + self.timeout_s, job.num_staging_blocks
            self._open(job.job_id, OpenJob(Direction.SAVE, num_staged, slots, self._all_workers(), deadline_s))
        self._check_deadlines()
        for swap in plan.of(JobKind.SWAP_OUT):
            for group_id, place in ((part.group_id, place) for part in swap.parts for place in part.host_block_ids):
                if any(worker.will_write_swap(group_id, place) for worker in self.workers):
                    raise Violation(f"swap {swap.job_id} writes pool block {place}, which another copy may still write")

    def _num_pieces(self, job: CopyJob) -> int:
        """The pieces for which a load has time. The row of a state may be one of its own."""
        num_blocks = self.places.num_staged(job)
        at_a_time = job.num_staging_blocks or self.max_load_blocks or num_blocks
        return -(-num_blocks // at_a_time) + job.num_blocks - num_blocks

    def _check_deadlines(self) -> None:
        """Raises Violation unless jobs time out when they should: all later checks of them depend on it."""
        for job in job_table(self.scheduler):
            opened = self.jobs.get(job.job_id)
            if opened is not None and opened.deadline_s != job.deadline_s:
                raise Violation(
                    f"{job.kind.value} {job.job_id} times out at {job.deadline_s:g} s; expected {opened.deadline_s:g} s"
                )

    def _check_division(self, division: HostDivision | None, readers: set[int]) -> None:
        """Raises Violation unless nothing uses the memory that a new division takes from a pool."""
        before, self.division = self.division, division
        if division is None or division == before:
            if division != before:
                raise Violation("a plan without the division of the one before")
            return
        if division.division_id != (before.division_id if before else 0) + 1:
            raise Violation(f"division {division.division_id} comes after {before}")
        sizes = division.segments
        if min(sizes) < 1 or sum(sizes) > self.num_segments:
            raise Violation(f"the pools get {sizes} segments, of {self.num_segments}")
        self.counts["moves of memory"] += 1
        pieces = {slot for checkpoint in self.checkpoints.values() for slot in checkpoint.slots}
        written = {slot for job in (*self.jobs.values(), *self.late.values()) for slot in job.slots_written}
        for pool, num_segments in enumerate(sizes):
            first_slot, end = pool * self.places.num_slots, num_segments * self.segment_slots
            for slot in range(first_slot + end, first_slot + self.places.num_slots):
                for what, used in (
                    ("visible", self.key_in),
                    ("read", readers),
                    ("a piece", pieces),
                    ("saved", written),
                ):
                    if slot in used:
                        raise Violation(f"slot {slot} is {what}, and its memory is taken from its pool")
                if any(worker.will_write(slot) for worker in self.workers):
                    raise Violation(f"slot {slot} may still be written, and its memory is taken from its pool")
            counts = (self.num_ready, self.num_states_ready)[pool]
            counts.update({worker_id: min(num, end) for worker_id, num in counts.items()})

    def _check_load(self, job: CopyJob, admitted: Admitted) -> None:
        """Raises Violation unless a load copies what its request needs, in all layer groups, to its blocks."""
        parts = {part.group_id: part for part in job.parts}
        for group, (blocks, contents) in zip(self.groups, admitted.parts, strict=True):
            part = parts.get(group.group_id)
            if (part.block_ids if part else ()) != blocks:
                raise Violation(
                    f"load {job.job_id} for {job.request_id} writes the blocks {part and part.block_ids} of layer "
                    f"group {group.group_id}; expected {blocks}"
                )
            if part is None:
                continue
            self.counts[f"blocks loaded in {group.kind}"] += len(blocks)
            for worker in self.workers:
                for place, content in zip(self.places.host_of(part), contents, strict=True):
                    self._check_place(worker, place, content, f"load {job.job_id} of layer group {group.group_id}")

    def _check_place(self, worker: SimWorker, place: int, content: tuple[int, ...], what: str) -> None:
        """Raises Violation unless a worker's host memory has these bytes, or knows that they are lost."""
        self.counts["blocks checked in host memory"] += 1
        host = worker.host
        if host.places[place] != content and place not in host.lost and place not in host.gone:
            raise Violation(f"{what}: worker {worker.worker_id} has other bytes in place {place}")

    def check_flights(self, worker: SimWorker, open_jobs: Collection[int]) -> None:
        """Raises Violation if a load that had ended when the current plan was made may still write to HBM.

        Its blocks may have been granted to another request, or be computed into.
        """
        for flight in worker.flights:
            if flight.into_hbm and flight.writes and flight.job_id not in open_jobs:
                raise Violation(f"load {flight.job_id} has ended, and worker {worker.worker_id} will write its blocks")

    def on_report(self, report: StepReport) -> None:
        """Updates the model by a report that the scheduler has applied."""
        worker_id = report.worker_id
        known = self.incarnations.get(worker_id, report.incarnation)
        self.incarnations[worker_id] = max(known, report.incarnation)
        if report.incarnation < known:
            self.counts["reports of an earlier incarnation"] += 1
            self.sync_index()
            return
        if report.incarnation > known:
            self.num_ready[worker_id] = self.num_states_ready[worker_id] = 0
        if report.division_id == (self.division.division_id if self.division else 0):
            num_chunks, num_states = self._kept(report)
            self.num_ready[worker_id] = max(self.num_ready[worker_id], num_chunks)
            self.num_states_ready[worker_id] = max(self.num_states_ready[worker_id], num_states)
        if report.incarnation > known:
            self.loads.lose_slots(0, sys.maxsize)
        lost_slots = self._lost_in(report)
        for first, end in lost_slots:
            self.loads.lose_slots(first, end)
            self.lost_slots.update(range(first, end))
            self.unreadable.update(range(first, end))
        losses = report.incarnation, report.num_cache_losses
        if lost_slots or self.cache_epochs.get(worker_id, losses) != losses:
            self._void_jobs()
        self.cache_epochs[worker_id] = losses
        for result in report.results:
            job = self.jobs.get(result.job_id)
            if job and result.state is JobState.FAILED and worker_id in job.waiting_for:
                self.loads.fail(result.job_id, result.failed_blocks)
                if job.direction is Direction.LOAD:
                    self.lost_slots |= job.slots
                    job.fail(result.failed_blocks)
            elif job and result.state is JobState.CANCELLED:
                job.is_void = True
            self._report(result.job_id, worker_id)
        for job_id in [i for i in (*self.jobs, *self.late) if i < report.oldest_job_id]:
            job = self.jobs.get(job_id)
            if job and worker_id in job.waiting_for:  # its result is lost
                job.is_void = True
                self.lost_slots |= job.slots if job.direction is Direction.LOAD else set()
            self._report(job_id, worker_id)
        self.sync_index()
        if report.incarnation > known and self.visible:
            raise Violation(f"worker {worker_id} has restarted, and {len(self.visible)} chunks are visible")
        for first, end in lost_slots:
            for slot in range(first, end):
                if slot in self.key_in:
                    raise Violation(f"slot {slot} is visible after the report of its loss")
        for group_id, first, end in report.lost_swap_blocks:
            if group_id == 0 and not swap_pool_hashes(self.scheduler).keys().isdisjoint(range(first, end)):
                raise Violation(f"some of the lost blocks {first} to {end - 1} of the swap pool are still found")

    def _kept(self, report: StepReport) -> tuple[int, int]:
        """The slots of a worker that the present division leaves to it."""
        num_chunks, num_states = (*report.num_host_slots, 0)[:2]
        if self.division is None:
            return num_chunks, num_states
        chunks, states = (num * self.segment_slots for num in self.division.segments)
        return min(num_chunks, chunks), min(num_states, states)

    def _lost_in(self, report: StepReport) -> list[tuple[int, int]]:
        """Ranges of slots that a worker has lost, those of states among them."""
        before = self.places.num_slots
        return [(pool * before + first, pool * before + end) for pool, first, end in report.lost_slots]

    def _void_jobs(self) -> None:
        """Jobs in flight count as failed as a whole."""
        for job in self.jobs.values():
            job.is_void = True

    def _named(self, keys: Sequence[ChunkKey] | None) -> Sequence[ChunkKey]:
        """The changed keys; None means that all visible keys are removed."""
        return tuple(self.visible) if keys is None else keys

    def sync_index(self) -> None:
        """Applies the index's changes, and checks the bytes of chunks and checkpoints that have become visible."""
        self._sync_chunks()
        if len(self.groups) > 1:
            self._sync_checkpoints()

    def _sync_checkpoints(self) -> None:
        """Checks the checkpoints that have become READY."""
        known, table = self.checkpoints, checkpoint_table(self.scheduler)
        self.checkpoints = {key: checkpoint for key, checkpoint in table.items() if not checkpoint.num_pending}
        for key, checkpoint in self.checkpoints.items():
            if known.get(key) is not checkpoint:
                self._check_checkpoint(key, checkpoint)
                self.counts["checkpoints"] += 1
            if self.index.state(key) is None:
                raise Violation("a checkpoint has outlived the chunk before it")
        gone = [checkpoint for key, checkpoint in known.items() if self.checkpoints.get(key) is not checkpoint]
        self.unexplained += self.index.checkpoints.num_evicted - self.num_evicted_checkpoints
        self.num_evicted_checkpoints = self.index.checkpoints.num_evicted
        for checkpoint in gone:
            self._check_gone(checkpoint)
        self.unexplained = 0

    def _check_gone(self, checkpoint: Checkpoint) -> None:
        """Raises Violation unless there is a reason why a READY checkpoint is not there any more."""
        if checkpoint.key not in self.visible or not self.lost_slots.isdisjoint(checkpoint.slots):
            return
        if self.unexplained:  # evicted
            self.unexplained -= 1
            return
        nodes = self._nodes(last_block_hash(checkpoint.key))
        if not any(self._nodes(last_block_hash(key))[: len(nodes)] == nodes for key in self.checkpoints):
            raise Violation(f"a checkpoint after {len(nodes)} tokens was dropped before a later one was READY")
        if checkpoint in self.used:
            raise Violation(f"a checkpoint after {len(nodes)} tokens was superseded, although a request has loaded it")
        self.counts["superseded checkpoints"] += 1

    def _check_checkpoint(self, key: ChunkKey, checkpoint: Checkpoint) -> None:
        """Raises Violation unless every worker has all of a checkpoint."""
        nodes = self._nodes(last_block_hash(key))
        end = len(nodes) // self.block_size
        slots = iter(checkpoint.slots)
        for group in self.groups[1:]:
            for positions in group.pieces(len(nodes), self.size):
                slot = next(slots, -1)
                if slot < 0:
                    raise Violation(
                        f"a checkpoint after {end} blocks has the slots {checkpoint.slots}, which are too few"
                    )
                for worker in self.workers:
                    for place, position in zip(self.places.of_slot(slot), positions, strict=True):
                        content = self._content(group, nodes, position)
                        what = f"a checkpoint after {end} blocks became READY, layer group {group.group_id}"
                        self._check_place(worker, place, content, what)
                    if worker.will_write(slot):
                        raise Violation(f"slot {slot} is of a READY checkpoint while a copy may still write it")
        if list(slots):
            raise Violation(f"a checkpoint after {end} blocks has the slots {checkpoint.slots}, which are too many")

    def _nodes(self, block_hash: BlockHash) -> list[int]:
        """The nodes of the prefix that ends with a block."""
        blocks: list[tuple[int, ...]] = []
        before: BlockHash | None = block_hash
        while before is not None:
            nodes, before = self.blocks[before]
            blocks.append(nodes)
        return [node for nodes in reversed(blocks) for node in nodes]

    def _sync_chunks(self) -> None:
        taken = self.index.take_changes()
        for one in taken:
            self.router.take(one)
        changes = [(key, one.found) for one in taken if not one.of_pieces for key in self._named(one.keys)]
        for key, found in changes:
            if not found:
                slot = self.visible.pop(key, -1)
                if slot < 0:
                    raise Violation("a chunk was removed that was not visible")
                del self.key_in[slot]
                self.counts["removed chunks"] += 1
                continue
            slots = self.index.find((key,))
            if not slots:
                continue  # already removed again; the removal follows
            self._check_visible(key, slots[0])
            self.visible[key] = slots[0]
            self.key_in[slots[0]] = self.last_key_in[slots[0]] = key
            self.counts["stored chunks"] += 1

    def check(self, stats: OffloadStats) -> None:
        """Checks budgets and deadlines after a step, with the scheduler's statistics."""
        held = sum(job.num_staging_blocks for job in (*self.jobs.values(), *self.late.values()))
        reserved, may_hold_more = stats.staging_reserved_blocks, bool(self.promises or self.admitted)
        if held > reserved or (held < reserved and not may_hold_more):
            raise Violation(f"{reserved} staging blocks are reserved; jobs hold {held}")
        for name, since_s in ((name, admitted.since_s) for name, admitted in self.admitted.items()):
            if since_s + self.load_wait_s <= self.planned_at_s and since_s < self.planned_at_s:
                raise Violation(f"the load of {name} has waited since {since_s:g} s, now is {self.planned_at_s:g} s")
        for worker in self.workers:
            staged = sum(flight.num_staged for flight in worker.flights)
            if staged > self.budget:
                raise Violation(f"worker {worker.worker_id} stages {staged} blocks at once, of {self.budget}")
        self.probing()
        if stats.staging_peak_blocks > self.budget:
            raise Violation(f"{stats.staging_peak_blocks} staging blocks were held at once, of {self.budget}")

    def probing(self) -> list[str]:
        """The breakers that wait for a probe.

        Raises:
          Violation: a breaker waits for a probe that no longer exists.
        """
        scheduler, swap = self.scheduler, self.scheduler.swap
        jobs, swaps = (
            {(job.job_id, job.direction) for job in job_table(scheduler) if job.kind.of_swap == of_swap}
            for of_swap in (False, True)
        )
        promised = {(r.account, Direction.LOAD) for r in request_table(scheduler).all() if r.promise}
        promised |= {(load.held.account, Direction.LOAD) for load in load_queue(scheduler)}
        out = {(name, Direction.LOAD) for name in swapped_requests(swap)}
        waiting = []
        for kind, breakers, probes in (
            ("", tier_context(scheduler).breakers, jobs | promised),
            ("swap ", tier_context(scheduler).swap_breakers, swaps | out),
        ):
            for direction, breaker in breakers.items():
                if breaker.state is BreakerState.PROBING:
                    waiting.append(f"{kind}{direction.value}")
                    if (breaker.probe, direction) not in probes:
                        raise Violation(
                            f"the breaker {waiting[-1]} waits for the probe {breaker.probe}, which no longer exists"
                        )
        return waiting

    # Internals.

    def _all_workers(self) -> set[int]:
        return set(range(len(self.workers)))

    def _open(self, job_id: int, job: OpenJob) -> None:
        if job_id in self.jobs:
            raise Violation(f"job id {job_id} is used twice")
        self.jobs[job_id] = job
        self.counts[f"{job.direction.value} jobs"] += 1

    def _report(self, job_id: int, worker_id: int) -> None:
        for jobs in (self.jobs, self.late):
            if job_id in jobs:
                jobs[job_id].waiting_for.discard(worker_id)
                if not jobs[job_id].waiting_for:
                    job = jobs.pop(job_id)
                    if jobs is self.jobs and not job.is_void:
                        self.unreadable |= job.bad_pieces

    def _pinned_slots(self) -> set[int]:
        """Slots that promises and loads will read."""
        slots = {slot for _, held in self.promises.values() for slot in held}
        slots |= {slot for admitted in self.admitted.values() for slot in admitted.slots}
        return slots.union(*(job.slots for job in self.jobs.values() if job.direction is Direction.LOAD))

    def _check_writable(self, job_id: int, slot: int, readers: set[int]) -> None:
        if slot in self.key_in:
            raise Violation(f"save {job_id} writes slot {slot}, whose chunk is visible")
        if any(slot in checkpoint.slots for checkpoint in self.checkpoints.values()):
            raise Violation(f"save {job_id} writes slot {slot}, which is of a READY checkpoint")
        is_state = slot >= self.places.num_slots
        num_ready = self.num_states_ready if is_state else self.num_ready
        if slot - self.places.num_slots * is_state >= min(num_ready.values()):
            raise Violation(f"save {job_id} writes slot {slot}; the workers have reported {num_ready} slots")
        if slot in readers:
            raise Violation(f"save {job_id} writes slot {slot}, which is pinned for a load")
        for other_id, other in self.jobs.items():
            if other.direction is Direction.SAVE and slot in other.slots:
                raise Violation(f"save {job_id} writes slot {slot}, which belongs to save {other_id}")
        if any(worker.will_write(slot) for worker in self.workers):
            raise Violation(f"save {job_id} is given slot {slot}, which another copy may still write")

    def _check_visible(self, key: ChunkKey, slot: int) -> None:
        """Raises Violation unless every worker has the bytes of a chunk that became visible."""
        if slot in self.key_in:
            raise Violation(f"slot {slot} is visible as two chunks")
        expected = self._contents(key)
        for worker in self.workers:
            for place, content in zip(self.places.of_slot(slot), expected, strict=True):
                self._check_place(worker, place, content, f"a chunk in slot {slot} became visible")
            if worker.will_write(slot):
                raise Violation(f"slot {slot} became visible while a copy may still write it")

    def _contents(self, key: ChunkKey) -> list[tuple[int, ...]]:
        block_hash: BlockHash | None = last_block_hash(key)
        contents: list[tuple[int, ...]] = []
        for _ in range(self.size):
            assert block_hash is not None
            nodes, block_hash = self.blocks[block_hash]
            contents.append(tuple(kv(node, self.epoch) for node in nodes))
        return contents[::-1]
