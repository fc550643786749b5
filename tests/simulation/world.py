"""Runs a trace: the real scheduler with simulated engine, workers and channels."""

import dataclasses
import logging
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, final

from tests.inside.scheduler import segment_moves, set_pool_balance, tier_context, workers_of
from tests.jobs import host_block_ids
from tests.resets import draw_from
from tests.simulation import leftovers
from tests.simulation.balance import DrawnBalance
from tests.simulation.channel import Channel
from tests.simulation.engine import SimEngine
from tests.simulation.faults import Faults
from tests.simulation.groups import NULL, Reads, make_groups
from tests.simulation.memory import Junk, Violation
from tests.simulation.model import Model
from tests.simulation.request import Phase, TokenSpan
from tests.simulation.trace import Action, Setup
from tests.simulation.worker import FIRST_INCARNATION, SimWorker
from tests.simulation.works_again import check_works_again
from tpu_offload import JobKind, KVLayout, OffloadConfig, OffloadScheduler, StepPlan
from tpu_offload.layout import PageGroup

TIMEOUT_S = 10.0
STEP_S = 0.1
MAX_BACKOFF = 64  # longest backoff of breakers and chunks, as a multiple of the first
_MAX_STEPS_TO_FINISH = 4000


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Dispatched:
    """A step that was planned and not yet executed by the workers.

    Attributes:
      plan: the plan.
      reads: reads of attention: request, layer group, blocks, how much of the first to skip, and what must follow.
      writes: (block, offset, KV) written by the forward pass.
      open_jobs: jobs that had not ended when it was planned.
      cache_epochs: cache epochs of the workers, as known then.
      is_aborted: its forward pass is not executed.
      unaware: the workers that save nevertheless, as a set of bits.
    """

    plan: StepPlan
    reads: tuple[tuple[str, int, Reads], ...]
    writes: tuple[tuple[int, int, int], ...]
    open_jobs: frozenset[int]
    cache_epochs: tuple[tuple[int, int], ...]
    is_aborted: bool = False
    unaware: int = 0


@final
class World:
    """One run.

    Args:
      setup: sizes.
      log: called with a line per event.
    """

    def __init__(self, setup: Setup, *, log: Callable[[str], None] | None = None) -> None:
        logging.getLogger("tpu_offload").setLevel(logging.CRITICAL)
        self.setup = setup
        self.log = log or (lambda line: None)
        self.now_s = 100.0
        self.num_steps = 0
        self.counts: Counter[str] = Counter()
        self.junk = junk = Junk()
        self.steps_in_flight: deque[Dispatched] = deque()
        self.repeats: list[int] = []  # workers that receive the next plan twice
        self.late: dict[int, int] = {}  # by worker: it receives the next plan after this many others
        self.late_plans: list[tuple[int, int, Dispatched]] = []  # worker, number of plans before it, step
        self.num_aborted_next = 0  # the next step is not executed, nor so many less one before it
        self.unaware = 0  # the workers that are not told so, as a set of bits
        groups = make_groups(setup)
        pages = PageGroup(layer_ids=(0, 1), page_shape=(setup.block_size, 2, 2, 8), dtype="bfloat16")
        layout = KVLayout(
            block_size=setup.block_size,
            groups=tuple(group.layer_group(pages) for group in groups),
            null_block=NULL if len(groups) > 1 else None,
        )
        self.scheduler = _make_scheduler(setup, layout, lambda: self.now_s)
        draw_from(f"{setup.seed}", self.scheduler)
        self.balance: DrawnBalance | None = None
        rule = tier_context(self.scheduler).balance
        if segment_moves(self.scheduler) is not None and rule is not None:
            self.balance = DrawnBalance(rule)
            set_pool_balance(self.scheduler, self.balance)
        self.workers = [SimWorker(i, setup, junk) for i in range(setup.num_workers)]
        self.channels = [Channel(setup.report_delays[i]) for i in range(setup.num_workers)]
        self.dead: set[int] = set()
        self.model = Model(setup, groups, self.scheduler, self.workers, lambda: self.now_s, TIMEOUT_S, self.log)
        self.engine = SimEngine(setup, layout, groups, self.scheduler, self.model, lambda: self.now_s, junk, self.log)
        self.faults = Faults(self)
        self.actions: dict[str, Callable[[int, int], None]] = {
            "step": lambda a, b: self.step(a),
            "arrive": self.engine.arrive,
            "abort": lambda a, b: self.engine.abort(a),
            "preempt": self.engine.preempt_one,
            "reset": lambda a, b: self.engine.reset(a),
            **self.faults.actions,
        }

    def act(self, action: Action) -> None:
        """Executes one action.

        Raises:
          ValueError: an unknown kind.
        """
        kind, a, b = action
        if kind not in self.actions:
            raise ValueError(f"{kind!r} is not an action; expected one of {', '.join(self.actions)}")
        self.actions[kind](a, b)

    def step(self, number: int) -> None:
        """Runs one step of the engine."""
        engine, model = self.engine, self.model
        self.num_steps += 1
        self.now_s += STEP_S
        self.deliver()
        spans = engine.schedule(number)
        changed = engine.changed_requests(spans, number)
        model.before_plan()
        plan = self.scheduler.plan_step(changed)
        model.on_plan(plan)
        engine.take(self.scheduler.take_update())
        spans = [span for span in spans if span.request.phase is Phase.RUNNING and span.request.tables]
        if not plan.empty:
            self._log_plan(plan)
        self.steps_in_flight.append(self._dispatch(plan, spans))
        if len(self.steps_in_flight) > self.setup.ahead:
            self._execute(self.steps_in_flight.popleft())
        for worker, channel in zip(self.workers, self.channels, strict=True):
            report = worker.report()
            if worker.worker_id not in self.dead:
                channel.send(report, self.num_steps)
        self.scheduler.check_invariants()
        stats = self.scheduler.stats()
        model.check(stats)
        self.counts["steps with all workers dead"] += len(self.dead) == len(self.workers)
        self.counts["steps with slots in quarantine"] += stats.num_quarantined_chunks > 0

    def _dispatch(self, plan: StepPlan, spans: list[TokenSpan]) -> Dispatched:
        """What the workers execute: the step that computes these spans, or a part of it."""
        engine, open_jobs, epochs = self.engine, frozenset(self.model.jobs), workers_of(self.scheduler).epochs
        if self.num_aborted_next:
            self._abort(plan, spans)
            return Dispatched(plan, (), (), open_jobs, epochs, is_aborted=True, unaware=self.unaware)
        reads = tuple(read for span in spans for read in self._reads(span))
        writes = tuple(engine.writes(spans))
        engine.complete(spans)
        return Dispatched(plan, reads, writes, open_jobs, epochs)

    def _abort(self, plan: StepPlan, spans: list[TokenSpan]) -> None:
        """The forward pass of a plan is not executed, nor of some that were made before it and are still to run."""
        in_flight, num_more = self.steps_in_flight, min(self.num_aborted_next - 1, len(self.steps_in_flight))
        self.num_aborted_next = 0
        first = in_flight[-num_more].plan if num_more else plan
        self.log(f"plans {first.step_id} to {plan.step_id} are aborted")
        self.counts["several aborted plans"] += num_more > 0
        self.engine.abort_step(spans)
        self.scheduler.abort_step(first)
        for i in range(len(in_flight) - num_more, len(in_flight)):
            in_flight[i] = dataclasses.replace(in_flight[i], reads=(), writes=(), is_aborted=True, unaware=self.unaware)
        if num_more:
            self.engine.lose_steps()

    def _execute(self, step: Dispatched) -> None:
        """The workers execute a step that was planned now or some steps ago."""
        for worker in self.workers:
            if worker.worker_id not in self.late:
                worker.begin_step(step.plan, self.num_steps)
                if worker.worker_id in self.repeats:
                    worker.begin_step(step.plan, self.num_steps)
                # A late one writes no load before it begins another plan, which repeats the cancellations.
                self.model.check_flights(worker, step.open_jobs)
        # A step on lost caches reads undefined values, and what it computes is undefined on all workers.
        caches_lost = any(self._lost_caches_since(worker, step) for worker in self.workers)
        self.counts["steps on lost caches"] += caches_lost
        if not caches_lost:
            for read in step.reads:
                self._check_reads(*read)
        for worker in self.workers:
            hbm = worker.hbm
            for block, offset, value in step.writes:
                hbm[block][offset] = self.junk.one() if caches_lost else value
            if worker.worker_id not in self.late:
                _end(worker, step)
                if worker.worker_id in self.repeats:
                    worker.begin_step(step.plan, self.num_steps)
                    _end(worker, step)
        self._deliver_late_plans(step)
        self.repeats.clear()
        self.late.clear()

    def _lost_caches_since(self, worker: SimWorker, step: Dispatched) -> bool:
        """Whether a worker's caches are not those that the step was planned for."""
        known, now = step.cache_epochs[worker.worker_id], worker.gate.epoch
        # (0, 0): no report of its first incarnation had arrived yet.
        return (known if known != (0, 0) else (FIRST_INCARNATION, 0)) != (now.incarnation, now.num_losses)

    def _deliver_late_plans(self, step: Dispatched) -> None:
        """Delivers plans that later ones have overtaken."""
        waiting, self.late_plans = self.late_plans, [(i, n, step) for i, n in self.late.items()]
        for worker_id, num_others, late in waiting:
            if num_others > 1 or worker_id in self.late:
                self.late_plans.append((worker_id, num_others - 1, late))
            else:
                self.workers[worker_id].begin_step(late.plan, self.num_steps)
                _end(self.workers[worker_id], late)

    def deliver(self) -> None:
        """Delivers the reports that have arrived to the scheduler."""
        for channel in self.channels:
            for report in channel.receive(self.num_steps):
                update = self.scheduler.apply(report)
                self.model.on_report(report)
                if report.results:
                    self.log(f"worker {report.worker_id} reported {_show(report)}")
                self.engine.take(update)

    def finish(self) -> None:
        """Stops the faults, runs all requests to their end, and checks that nothing is left.

        Raises:
          Violation: a request or a job does not end, or something is still held at the end.
        """
        self.log("faults stop")
        self.faults.stop()
        engine, first_step = self.engine, self.num_steps
        while engine.requests:
            if self.num_steps - first_step > _MAX_STEPS_TO_FINISH:
                stuck = ", ".join(f"{r.name} ({r.phase.value})" for r in engine.requests.values())
                raise Violation(f"not finished {_MAX_STEPS_TO_FINISH} steps after the last fault: {stuck}")
            self.step(0)
        self.counts["most steps to finish"] = self.num_steps - first_step
        self.settle()
        self._check_empty()
        if not self.dead:
            self._check_works_again()
            self._check_empty()

    def totals(self) -> Counter[str]:
        """Counts of all events."""
        stats = self.scheduler.stats()
        totals = self.counts + self.engine.counts + self.model.counts
        for worker in self.workers:
            totals.update(worker.num_faults)
        totals["steps"] = self.num_steps
        for name in (
            "saved_blocks", "loaded_blocks", "num_evicted_chunks", "num_failed_jobs", "num_timed_out_jobs",
            "num_ignored_results", "swapped_out_blocks", "swapped_in_blocks", "num_lost_swaps", "num_recomputed",
            "dropped_save_blocks", "dropped_load_blocks", "deferred_save_blocks", "num_thrashed_swaps",
            "swap_skipped_blocks", "num_lost_results", "num_worker_restarts", "num_breaker_openings",
            "num_moved_segments",
        ):  # fmt: skip
            totals[name] = getattr(stats, name)
        return totals

    # The end.

    def settle(self) -> None:
        """Steps until nothing is in flight, for at most the time after which everything has timed out."""
        # A load in pieces has the timeout for each piece; there are at most twelve.
        quiet, first_step = 14 * TIMEOUT_S / STEP_S, self.num_steps
        while self.num_steps - first_step < quiet and not self._is_quiet():
            self.step(0)

    def _check_works_again(self) -> None:
        """After all faults and backoffs, the tier must save a new prompt and load it."""
        probing = self.model.probing()
        if probing:
            raise Violation(f"at the end, breakers wait for a probe: {', '.join(probing)}")
        if not self.setup.num_slots:
            return
        self.log("a long time passes")
        self._wait_until_grown()
        self.now_s += 4 * MAX_BACKOFF * self.setup.breaker_retry_s
        for _ in range(10):  # until a worker that restarted at the very end has reported
            self.step(0)
        self._wait_until_grown()
        check_works_again(self)

    def _wait_until_grown(self) -> None:
        """Steps until all workers have allocated the host tier."""
        model, moves = self.model, segment_moves(self.scheduler)
        if self.balance is None or moves is None:
            while min(model.num_ready.values()) < self.setup.num_slots:
                self.step(0)
            self._check_num_slots(self.setup.num_slots, 0)
            return
        self.balance.is_even = True
        first_step, least = self.num_steps, min(worker.segments.capacity for worker in self.workers)
        while (
            moves.goal != moves.limits  # a move that the rule has begun, or one to even them
            or sum(moves.limits) != least
            or abs(moves.limits[0] - moves.limits[1]) > 1
            or min(model.num_ready.values()) < moves.limits[0] * self.setup.segment_slots
            or min(model.num_states_ready.values()) < moves.limits[1] * self.setup.segment_slots
        ):
            if self.num_steps - first_step > _MAX_STEPS_TO_FINISH:
                raise Violation(f"the pools have {moves.limits} segments; expected half of {least} each")
            self.step(0)
        self._check_num_slots(*moves.num_slots)

    def _check_num_slots(self, num_chunks: int, num_states: int) -> None:
        """Raises Violation unless the scheduler uses all of the host tier that the workers have."""
        stats = self.scheduler.stats()
        if (stats.num_host_chunks, stats.num_host_states) != (num_chunks, num_states):
            raise Violation(
                f"{stats.num_host_chunks} chunks and {stats.num_host_states} states have slots; the workers have "
                f"{num_chunks} and {num_states}"
            )

    def _is_quiet(self) -> bool:
        if self.scheduler.has_jobs or any(w.flights for w in self.workers):
            return False
        if self.late_plans or any(not step.plan.empty for step in self.steps_in_flight):
            return False
        stats = self.scheduler.stats()
        if stats.num_jobs_in_flight:
            return False
        held = stats.staging_reserved_blocks, stats.num_quarantined_chunks, stats.swap_held_blocks
        return self._may_hold() or not any(held)

    def _may_hold(self) -> bool:
        """Whether late jobs may still hold memory at the end, because a worker never reports again."""
        return bool(self.dead)

    def _check_empty(self) -> None:
        """Raises Violation if anything is held, or a table of the scheduler has leftover entries."""
        stats = self.scheduler.stats()
        names = ["num_jobs_in_flight", "num_swapped_requests"]
        if not self._may_hold():
            names += ["staging_reserved_blocks", "num_quarantined_chunks", "swap_held_blocks"]
        for name in names:
            if getattr(stats, name):
                raise Violation(f"at the end, {name} is {getattr(stats, name)}")
        num_resident = stats.num_resident_chunks
        if num_resident != len(self.model.visible):
            raise Violation(f"at the end, {num_resident} chunks have slots and {len(self.model.visible)} are visible")
        left = leftovers.non_empty_tables(self.scheduler, late_jobs=self._may_hold())
        if left:
            raise Violation(f"at the end, tables are not empty: {left}")

    def _reads(self, span: TokenSpan) -> list[tuple[str, int, Reads]]:
        """The reads of attention in a step: the KV of exactly these tokens."""
        request = span.request
        if request.phase is not Phase.RUNNING:
            raise Violation(f"the simulated engine runs {request.name} while {request.phase.value}")
        return [(request.name, i, reads) for i, reads in enumerate(self.engine.reads(span))]

    def _check_reads(self, name: str, group_id: int, reads: Reads) -> None:
        """Raises Violation unless every worker has what a layer group reads."""
        blocks, first, expected = reads
        self.counts["blocks read"] += len(blocks) * len(self.workers)
        end = first + len(expected)
        for worker in self.workers:
            hbm, found = worker.hbm, []
            for block in blocks:
                found += hbm[block]
            if tuple(found[first:end]) != expected:
                wrong = next(i for i in range(first, end) if found[i] != expected[i - first])
                raise Violation(
                    f"worker {worker.worker_id} reads wrong KV of {name} in layer group {group_id}, "
                    f"block {blocks[wrong // self.setup.block_size]}, offset {wrong % self.setup.block_size}"
                )

    def _log_plan(self, plan) -> None:
        parts = [
            f"load {j.job_id} for {j.request_id}: {list(host_block_ids(j))} -> {list(j.block_ids)}"
            for j in plan.of(JobKind.LOAD)
        ]
        for what, jobs in (("early save", plan.of(JobKind.EARLY_SAVE)), ("save", plan.of(JobKind.SAVE))):
            parts += [f"{what} {j.job_id}: {list(j.block_ids)} -> {list(host_block_ids(j))}" for j in jobs]
        parts += [f"cancel {i}" for i in plan.cancelled_job_ids]
        parts += [
            f"swap {j.direction.value} {j.job_id} of {j.request_id}"
            for j in (*plan.of(JobKind.SWAP_OUT), *plan.of(JobKind.SWAP_IN))
        ]
        self.log(f"plan {plan.step_id}: {'; '.join(parts)}")


def _make_scheduler(setup: Setup, layout: KVLayout, clock: Callable[[], float]) -> OffloadScheduler:
    return OffloadScheduler(
        OffloadConfig.create(
            num_staging_blocks=setup.num_staging_blocks,
            save_path=_path(setup, 0b01010101),
            load_path=_path(setup, 0b10101010),
            max_load_gb_per_step=(setup.max_load_blocks + 0.5) * layout.block_nbytes_per_device / 2**30
            if setup.max_load_blocks
            else 0.0,
            load_wait_s=setup.load_wait_s,
            **_host_size(setup, layout),
            blocks_per_chunk=setup.blocks_per_chunk,
            decode_save=setup.decode_save,
            save_on=setup.save_on,
            save_after_sightings=setup.save_after_sightings,
            swap_gb=1.0 if setup.num_swap_blocks else 0.0,
            swap_mode=setup.swap_mode,
            job_timeout_s=TIMEOUT_S,
            save_wait_s=setup.save_wait_s,
            breaker_failures=setup.breaker_failures,
            breaker_retry_s=setup.breaker_retry_s,
            metrics_log_interval=0.0,
        ),
        layout,
        num_workers=setup.num_workers,
        clock=clock,
        record_events=True,
    )


def _host_size(setup: Setup, layout: KVLayout) -> dict[str, Any]:
    """The settings for a host tier of this size. A row of states is as large as a chunk."""
    if not setup.segment_slots:
        return {"num_cpu_chunks": setup.num_slots}
    slot_gb = layout.block_nbytes * setup.blocks_per_chunk / 2**30
    return {
        "host_gb": (setup.num_segments * setup.segment_slots + 0.5) * slot_gb,
        "host_segment_gb": (setup.segment_slots + 0.5) * slot_gb,
        "state_share": setup.state_share,
    }


def _path(setup: Setup, bits: int) -> str:
    """The copy path of a direction: staged if any worker stages it, by these bits of `setup.staged`."""
    return "staged" if setup.staged & bits & (1 << 2 * setup.num_workers) - 1 else "direct"


def _end(worker: SimWorker, step: Dispatched) -> None:
    """The part of a step after the forward pass."""
    if step.is_aborted and not step.unaware >> worker.worker_id & 1:
        worker.abort_step(step.plan)
    else:
        worker.end_step(step.plan)


def _show(report) -> str:
    return ", ".join(f"{r.job_id} {r.state.value}" for r in report.results)


def run(setup: Setup, actions: list[Action], *, log: Callable[[str], None] | None = None) -> World:
    """Runs a whole trace, until all requests have ended.

    Raises:
      Violation: a rule was broken.
        Exception: any error of the library.
    """
    world = World(setup, log=log)
    for action in actions:
        world.act(action)
    world.finish()
    return world
