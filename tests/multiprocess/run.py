"""One run of the rig: an engine that plans ahead, duplicate and late messages, and the outcome."""

import dataclasses
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final

from tests.multiprocess.cluster import Cluster
from tests.multiprocess.engine import NUM_DOCUMENTS, Engine
from tests.multiprocess.messages import ROWS, Begin, End, Plans, Reply, Setup, Step
from tests.multiprocess.settings import make_config
from tests.multiprocess.stepped_storage import SHARED
from tests.resets import draw_from
from tpu_offload import ConfigError, KVLayout, LayoutError, OffloadScheduler, Update

_MAX_DRAIN_STEPS = 120
_COUNTED = (
    "saved_blocks", "loaded_blocks", "num_failed_jobs", "num_rejected_reports", "num_ignored_results",
    "cascaded_chunks", "promoted_chunks", "failed_storage_chunks",
)  # fmt: skip
_MAX_LATE = 4  # most steps by which a plan is late


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of a run.

    Attributes:
      num_checked: number of blocks compared, on all processes.
      wrong: (step, process, difference) of each failed comparison.
      broken: other broken rules, in words.
      refused: the error by which scheduler or worker refused the setup, in one line.
      difference: the first difference between the copies that processes dispatched, in words; empty if there is none.
      counts: counts of events.
      dispatched: by process, the dispatched copies.
    """

    num_checked: int
    wrong: tuple[tuple[int, int, str], ...]
    broken: tuple[str, ...]
    refused: str
    difference: str
    counts: Counter[str]
    dispatched: tuple[tuple[tuple[str, int, int, int], ...], ...]

    @property
    def violation(self) -> str:
        """The first broken rule, in one line; empty if there is none."""
        if self.wrong:
            step, rank, what = self.wrong[0]
            return f"{len(self.wrong)} comparisons found wrong KV, first after step {step} on process {rank}: {what}"
        return self.broken[0] if self.broken else ""


def run_setup(processes: Cluster, setup: Setup) -> Outcome:
    """Runs a setup to its end.

    Raises:
      ClusterError: a process died or does not answer; the cluster can then only be closed.
    """
    for rank in range(processes.num_processes):
        processes.send(rank, setup)
    begins: list[Begin] = [processes.receive(rank) for rank in range(processes.num_processes)]
    refused = next((begin.error for begin in begins if begin.error), "")
    layouts = [begin.layout for begin in begins if begin.layout is not None]
    run = None
    if not refused:
        run = _Run(processes, setup, layouts[0])
        refused = run.run()
    return _outcome(processes, run, refused)


@final
class _Run:
    def __init__(self, processes: Cluster, setup: Setup, layout: KVLayout) -> None:
        self.counts: Counter[str] = Counter()
        self.num_checked = 0
        self.wrong: list[tuple[int, int, str]] = []
        self.broken: list[str] = []
        self._processes = processes
        self._ranks = range(processes.num_processes)
        self.setup = setup
        self._num_steps = 0
        # Of each data-parallel rank.
        self._schedulers = [
            OffloadScheduler(
                make_config(setup, layout),
                layout,
                num_workers=setup.num_workers or processes.num_processes,
                clock=lambda: float(self._num_steps),
            )
            for _ in range(setup.data_ranks)
        ]
        for data_rank, scheduler in enumerate(self._schedulers):
            draw_from(f"{setup.seed} {data_rank}", scheduler)
        self._engines = [
            Engine(dataclasses.replace(setup, seed=setup.seed + (data_rank << 32)), scheduler)
            for data_rank, scheduler in enumerate(self._schedulers)
        ]
        self._rng = random.Random(f"{setup.seed} messages")
        self._num_unread = [0 for _ in self._ranks]
        self._num_losses = [0 for _ in self._ranks]
        self._known_losses = [0 for _ in self._ranks]  # losses that the engine has handled
        self._sent: list[list[Plans]] = [[] for _ in self._ranks]
        self._late: list[list[tuple[int, Plans]]] = [[] for _ in self._ranks]

    def run(self) -> str:
        """Runs all steps; returns the error of a refused setup, in one line."""
        try:
            for _ in range(self.setup.num_steps):
                planned = [engine.plan() for engine in self._engines]
                plans, writes = tuple(plan for plan, _ in planned), self._together(of for _, of in planned)
                self._send(plans, writes, self._expected())
                self._read(max_ahead=self._rng.randint(0, self.setup.max_ahead))
                self._check_invariants()
            self._read(max_ahead=0)
            self._drain()
            for document in range(NUM_DOCUMENTS):
                self._audit(document)
        except (ConfigError, LayoutError) as e:
            self._read_quietly()
            return f"{type(e).__name__}: {e}"
        return ""

    def end(self) -> None:
        """Adds the scheduler's counters."""
        for engine, scheduler in zip(self._engines, self._schedulers, strict=True):
            stats = scheduler.stats()
            self.counts.update({name: getattr(stats, name) for name in _COUNTED})
            self.counts.update(engine.counts)
        self.counts["losses of caches"] = sum(self._known_losses)

    def _drain(self) -> None:
        """Steps until nothing is in flight, for a limited number of steps."""
        for _ in range(_MAX_DRAIN_STEPS):
            self._step_alone(tuple(engine.plan_end() for engine in self._engines))
            if not self._has_jobs and self._known_losses == self._num_losses:
                break
        else:
            self.broken.append(
                f"{_MAX_DRAIN_STEPS} steps after the last request ended: jobs in flight: {self._has_jobs}; "
                f"losses of caches by process {self._num_losses}, known to the engine {self._known_losses}"
            )
        self._check_invariants()

    def _audit(self, document: int) -> None:
        """Loads a document as far as it is in the host tier, and compares it."""
        self._step_alone(tuple(engine.plan_audit(document) for engine in self._engines))
        for _ in range(_MAX_DRAIN_STEPS):
            if not any(engine.is_arriving or engine.is_loading for engine in self._engines):
                break
            self._step_alone(
                tuple(
                    engine.plan_audit(document) if engine.is_arriving else scheduler.plan_step()
                    for engine, scheduler in zip(self._engines, self._schedulers, strict=True)
                )
            )
        self._step_alone(tuple(scheduler.plan_step() for scheduler in self._schedulers), self._expected())
        self._drain()

    def _step_alone(self, plans: Plans, expected: dict[int, int] | None = None) -> None:
        """Runs a step and waits for it, without message faults."""
        self._send(plans, {}, expected, is_calm=True)
        self._read(max_ahead=0, is_calm=True)

    # Data-parallel ranks.

    @property
    def _has_jobs(self) -> bool:
        return any(scheduler.has_jobs for scheduler in self._schedulers)

    def _check_invariants(self) -> None:
        for scheduler in self._schedulers:
            scheduler.check_invariants()

    def _expected(self) -> dict[int, int]:
        return self._together(engine.expected() for engine in self._engines)

    def _together(self, of_ranks: Iterable[Mapping[int, int]]) -> dict[int, int]:
        """By place in the caches, what each rank has by its own blocks and rows.

        No rank has the bytes of another, unless they share what they store: then equal prefixes have equal bytes.
        """
        setup, together = self.setup, {}
        are_alike = SHARED in setup.settings.get("storage_tier", "")
        for data_rank, own in enumerate(of_ranks):
            for place, seed in own.items():
                size = setup.num_rows if place >= ROWS else setup.num_blocks
                together[place + data_rank * size] = seed + (0 if are_alike else data_rank << 80)
        return together

    # Messages.

    def _send(
        self, plans: Plans, writes: dict[int, int], expected: dict[int, int] | None, *, is_calm: bool = False
    ) -> None:
        rng, setup = self._rng, self.setup
        restarted = rng.choice(self._ranks) if not is_calm and rng.random() < setup.restart else None
        without_caches = rng.random() < setup.restart_without_caches
        if restarted is not None:
            self.counts["restarts"] += 1
        for rank in self._ranks:
            given, before, inside = self._deliver(rank, plans, is_calm=is_calm)
            is_restarted = rank == restarted
            step = Step(
                number=self._num_steps,
                plans=given,
                before=before,
                inside=inside,
                writes=writes,
                expected=expected,
                known_losses=tuple(self._known_losses),
                restart=is_restarted,
                without_caches=is_restarted and without_caches,
            )
            self._processes.send(rank, step)
            self._num_unread[rank] += 1
        self._num_steps += 1

    def _deliver(
        self, rank: int, plans: Plans, *, is_calm: bool
    ) -> tuple[Plans | None, tuple[Plans, ...], Plans | None]:
        """The plans that reach a process: those of this step, of earlier ones, and of one in the middle of the step."""
        rng, rates, sent = self._rng, self.setup.transport, self._sent[rank]
        # A plan is late if it arrives after a later plan. One that arrives after its step's forward pass but before a
        # # later plan cannot be detected; docs/failures.md forbids that.
        last = sent[-1][0].step_id if sent else -1
        before = [late for due, late in self._late[rank] if due <= self._num_steps and late[0].step_id < last]
        self._late[rank] = [(due, late) for due, late in self._late[rank] if late not in before]
        if sent and not is_calm and rng.random() < rates.plan_again:
            before.append(rng.choice(sent[-6:]))
            self.counts["duplicate plans"] += 1
        given, inside = plans, None
        if not is_calm and rng.random() < rates.plan_late:
            self._late[rank].append((self._num_steps + rng.randint(1, _MAX_LATE), plans))
            self.counts["late plans"] += 1
            return None, tuple(before), None
        if not is_calm and rng.random() < rates.plan_again:
            inside = rng.choice([*sent[-4:], plans])
            self.counts["duplicate plans"] += 1
        sent.append(plans)
        return given, tuple(before), inside

    def _read(self, *, max_ahead: int, is_calm: bool = False) -> None:
        """Processes the replies of all steps except the last `max_ahead`."""
        for rank in self._ranks:
            while self._num_unread[rank] > max_ahead:
                self._num_unread[rank] -= 1
                self._take(rank, self._processes.receive(rank), is_calm=is_calm)

    def _read_quietly(self) -> None:
        for rank in self._ranks:
            for _ in range(self._num_unread[rank]):
                self._processes.receive(rank)
            self._num_unread[rank] = 0

    def _take(self, rank: int, reply: Reply, *, is_calm: bool) -> None:
        self._num_losses[rank] = reply.num_losses
        if reply.garbage:
            self.counts["steps on lost caches"] += 1
        else:
            self.num_checked += reply.num_checked
            if reply.wrong:
                what = f"{len(reply.wrong)} pages, first layer {reply.wrong[0][0]}, block {reply.wrong[0][1]}"
                self.wrong.append((reply.number, rank, what))
        rng, rates = self._rng, self.setup.transport
        if reply.reports is None or (not is_calm and rng.random() < rates.report_lost):
            return
        is_again = not is_calm and rng.random() < rates.report_again
        for engine, scheduler, report in zip(self._engines, self._schedulers, reply.reports, strict=True):
            self._act_on(engine, rank, reply, scheduler.apply(report))
            if is_again:
                engine.take(scheduler.apply(report))

    def _act_on(self, engine: Engine, rank: int, reply: Reply, update: Update) -> None:
        """Processes an update as an engine does; lost caches first, because loaded blocks are lost with them."""
        if update.lost_caches:
            self._known_losses[rank] = reply.num_losses
            engine.lose_caches()
        engine.take(update)


def _outcome(processes: Cluster, run: _Run | None, refused: str) -> Outcome:
    for rank in range(processes.num_processes):
        processes.send(rank, "end")
    ends: list[End] = [processes.receive(rank) for rank in range(processes.num_processes)]
    dispatched = tuple(end.dispatched for end in ends)
    if run is None:
        return Outcome(0, (), (), refused, "", Counter(), dispatched)
    run.end()
    difference = _difference(dispatched)
    if difference and not refused and run.setup.dispatches_alike:
        run.broken.append(difference)
    return Outcome(run.num_checked, tuple(run.wrong), tuple(run.broken), refused, difference, run.counts, dispatched)


def _difference(dispatched: Sequence[Sequence[Any]]) -> str:
    for rank, others in enumerate(dispatched):
        if others != dispatched[0]:
            pairs = zip(others, dispatched[0], strict=False)
            at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(others), len(dispatched[0])))
            a, b = (repr(copies[at]) if at < len(copies) else "missing" for copies in (others, dispatched[0]))
            return (
                f"process {rank} has dispatched {len(others)} copies, process 0 {len(dispatched[0])}; number {at} is "
                f"{a} there and {b} on process 0"
            )
    return ""
