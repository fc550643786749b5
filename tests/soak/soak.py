"""Serves a workload round after round while copies, messages and requests fail.

HBM, staging buffer, host tier and swap pool are small, so that eviction, drops, preemption and swapping are constant,
and random faults are injected (see `faults`), also below the host tier (see `storage`). Three engines take turns, one
round each, and live from the first round to the last: one copies directly, one through staging arrays, one saves inside
its step. A fault may only cost time:

* every request of every round gets the tokens that it got without offloading, before the first round;
* neither the memory of the process nor any table of an engine grows after warm-up, nor do its files or threads;
* no engine crashes, hangs, or violates its invariants.

After each round its engine becomes idle without new faults; then its invariants are checked, the tables of all engines
are counted and memory is read.
"""

import contextlib
import dataclasses
import gc
import logging
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import psutil

from tests.inside.engine import storage_tier
from tests.soak import report as soak_report
from tests.soak.container_census import SizeHistory, container_sizes
from tests.soak.faults import Fault, Faults
from tests.soak.plan import Plan
from tests.soak.report import Round
from tests.soak.storage import FaultyFileTier, Storage, opened
from tpu_offload.cli.tables import progress
from tpu_offload.config import OffloadConfig
from tpu_offload.engine import Engine, Request, RequestOutput
from tpu_offload.replay.comparison import find_differences
from tpu_offload.replay.serving import Record, serve
from tpu_offload.replay.setup import Setup, describe, serve_once

_STUCK_S = 60.0  # an engine that finishes no request for this long hangs
# The history that eviction policies keep is bounded (by the tier's size, at least some thousands), but fills up for
# longer than a short soak, and time slices grow logarithmically. tests/core/policies/test_conformance.py checks the
# bound of their memory. The latest 32 copies of each kind are measured; some are rare.
_FILL_SLOWLY = ("._index._policy.", "._context.costs.")
# Steps and calls of the first round.
_CERTAIN = {Fault.RESET: 100, Fault.SERVER_FROZEN: 150, Fault.SERVER_KILLED: 300}
_CERTAIN_IO = {
    Fault.IO_RAISES: 5, Fault.SHORT_READ: 3, Fault.FLIPPED_BIT: 6, Fault.TORN_WRITE: 10, Fault.LATE_IO: 40,
}  # fmt: skip
_IDLE_JOB_TIMEOUTS = 4  # time for an engine to become idle, in job timeouts
_STORAGE_IDLE_S = 60.0  # likewise with storage, whose calls end when they end; generous


def soak(plan: Plan, *, stop: Callable[[], bool]) -> dict[str, Any]:
    """Runs the soak; returns the report."""
    setup = plan.setup
    with progress(setup.workload.num_requests) as on_finish:
        baseline, _ = serve_once(setup, None, on_finish=on_finish("baseline"), stop=stop)
    with progress(None) as on_finish, _counted_log_lines() as num_lines, contextlib.ExitStack() as stack:
        sides: list[_FaultyEngine] = []
        if baseline.complete and not stop():
            below = opened(plan.storage, most_nbytes=plan.stored_nbytes, clock=time.perf_counter)
            sides = _start(plan, stack.enter_context(below), stack, stop=stop)
        tables = SizeHistory()
        rounds = list(_serve_rounds(plan, sides, baseline.records, tables, on_finish=on_finish, stop=stop))
        return {
            **describe(setup),
            "config": {name: c.model_dump(mode="json", exclude_none=True) for name, c in plan.configs.items()},
            "soak_s": plan.seconds,
            "num_baseline_requests": len(baseline.records),
            **soak_report.numbers(rounds, tables),
            "storage": plan.storage.value if plan.storage else None,
            "faults": {f.value: sum(side.num_faults(f) for side in sides) for f in Fault},
            "engines": {side.name: side.numbers() for side in sides},
            "log_lines": dict(num_lines),
        }


class _FaultyEngine:
    """An engine wrapped with fault injection.

    Args:
      name: in the report.
      engine: it has no requests.
      faults: of copies, messages, steps and the server; used by this thread.
      io_faults: of calls of the storage tier; used by its threads.
      storage: what is below it.
      idle_limit_s: time for it to become idle.
    """

    def __init__(
        self, name: str, engine: Engine, faults: Faults, io_faults: Faults, *, storage: Storage, idle_limit_s: float
    ) -> None:
        self.name = name
        self.engine = engine
        self.faults = faults
        self._io_faults = io_faults
        self._storage = storage
        self._idle_limit_s = idle_limit_s
        self._requests: dict[str, Request] = {}

    def add_request(self, request: Request) -> None:
        """See `serving.Engine`."""
        self._requests[request.request_id] = request
        self.engine.add_request(request)

    def step(self) -> Sequence[RequestOutput]:
        """See `serving.Engine`."""
        self._storage.step(self.faults)
        if self.faults.happens(Fault.RESET):
            self.engine.reset_cache()
        if self._requests and self.faults.happens(Fault.ABORT):
            request = self._requests[self.faults.random.choice(list(self._requests))]
            self.engine.abort(request.request_id)
            self.engine.add_request(request)
        outputs = self.engine.step()
        for output in outputs:
            if output.finished:
                self._requests.pop(output.request_id, None)
        return outputs

    def set_active(self, is_active: bool) -> None:
        """Whether new faults are injected."""
        self.faults.active = self._io_faults.active = is_active

    def num_faults(self, fault: Fault) -> int:
        """How often a fault has happened."""
        return self.faults.counts[fault] + self._io_faults.counts[fault]

    def wait_until_idle(self) -> int:
        """Waits until copies and messages have ended; returns the number of unfinished ones."""
        self.set_active(False)
        self._storage.recover()
        self.engine.abort(*self._requests)
        self._requests.clear()
        until_s = time.monotonic() + self._idle_limit_s
        while (num_jobs := self.num_jobs) and time.monotonic() < until_s:
            self.engine.step()
            time.sleep(0.001)
        self.engine.step()
        self.engine.check_invariants()
        return num_jobs

    @property
    def num_jobs(self) -> int:
        """Number of unfinished jobs, and of slots in quarantine."""
        stats = self.engine.offload_stats()
        return stats.num_jobs_in_flight + stats.num_quarantined_chunks if stats else 0

    def numbers(self) -> dict[str, Any]:
        """Counters of the engine and of the library."""
        stats = self.engine.offload_stats()
        return dataclasses.asdict(self.engine.stats()) | (stats.as_dict() if stats else {})


def _start(
    plan: Plan, storage: Storage, stack: contextlib.ExitStack, *, stop: Callable[[], bool]
) -> list[_FaultyEngine]:
    """Starts the engines, which end with the stack."""
    sides = []
    for i, (name, config) in enumerate(plan.configs.items()):
        if not stop():
            config = storage.settings(i, config)
            sides.append(stack.enter_context(_engine(plan.setup, name, config, storage=storage, seed=plan.seed + i)))
    return sides


@contextlib.contextmanager
def _engine(setup: Setup, name: str, config: OffloadConfig, *, storage: Storage, seed: int) -> Iterator[_FaultyEngine]:
    timeout_s = config.job_timeout_s
    faults = Faults(seed, job_timeout_s=timeout_s, clock=time.perf_counter, certain=_CERTAIN)
    io_faults = Faults(seed + 1000, job_timeout_s=timeout_s, clock=time.perf_counter, certain=_CERTAIN_IO)
    engine = Engine(setup.model, setup.engine, offload=config, clock=time.perf_counter, seams=faults.seams())
    with contextlib.closing(engine):
        engine.warm_up()
        engine.wait_for_host_memory()
        if config.has_storage:
            tier = storage_tier(engine)
            if isinstance(tier, FaultyFileTier):
                tier.faults = io_faults
        limit_s = _STORAGE_IDLE_S if config.has_storage else _IDLE_JOB_TIMEOUTS * timeout_s
        yield _FaultyEngine(name, engine, faults, io_faults, storage=storage, idle_limit_s=limit_s)


def _serve_rounds(
    plan: Plan,
    sides: Sequence[_FaultyEngine],
    baseline: Sequence[Record],
    tables: SizeHistory,
    *,
    on_finish: Callable[[str], Callable[[], None]],
    stop: Callable[[], bool],
) -> Iterator[Round]:
    """Serves rounds until the time is up, `stop` is True, or an engine has failed."""
    start_s = time.monotonic()
    on_request = on_finish("soak")
    while sides and not stop() and time.monotonic() - start_s < plan.seconds:
        for side in sides:
            done = _serve_round(plan, side, baseline, until_s=start_s + plan.seconds, on_finish=on_request, stop=stop)
            gc.collect()
            process = psutil.Process()
            sizes = {
                "jax arrays of the process": len(jax.live_arrays()),
                "open files of the process": process.num_fds(),
                "threads of the process": process.num_threads(),
            }
            for other in sides:
                found = container_sizes(other.engine, other.name)
                sizes |= {path: size for path, size in found.items() if not any(name in path for name in _FILL_SLOWLY)}
            tables.add(sizes)
            rss_nbytes, num_entries = process.memory_info().rss, sum(sizes.values())
            yield dataclasses.replace(
                done, at_s=time.monotonic() - start_s, rss_nbytes=rss_nbytes, num_entries=num_entries
            )
            if done.error or stop() or time.monotonic() - start_s >= plan.seconds:
                return


def _serve_round(
    plan: Plan,
    side: _FaultyEngine,
    baseline: Sequence[Record],
    *,
    until_s: float,
    on_finish: Callable[[], None],
    stop: Callable[[], bool],
) -> Round:
    last_end_s = time.monotonic()
    error = ""

    def finished() -> None:
        nonlocal last_end_s
        last_end_s = time.monotonic()
        on_finish()

    def enough() -> bool:
        nonlocal error
        now_s = time.monotonic()
        if now_s - last_end_s > _STUCK_S:
            error = f"no request ended for {_STUCK_S:g} s: {side.engine.stats()}"
        return bool(error) or now_s >= until_s or stop()

    records: Sequence[Record] = ()
    num_jobs_left = 0
    side.set_active(True)
    try:
        run = serve(
            side,
            plan.setup.workload,
            concurrency=plan.setup.concurrency,
            sampling=plan.setup.sampling,
            on_finish=finished,
            stop=enough,
        )
        records = run.records
        num_jobs_left = side.wait_until_idle()
    except Exception as e:  # the soak must find it: no fault may crash an engine
        error = "".join(traceback.format_exception(e))
    found, num_compared = find_differences(baseline, records, names=("baseline", side.name))
    return Round(
        engine=side.name,
        num_requests=len(records),
        num_compared=num_compared,
        differences=tuple(difference.as_dict() for difference in found),
        num_jobs_left=num_jobs_left,
        error=error,
    )


@contextlib.contextmanager
def _counted_log_lines() -> Iterator[dict[str, int]]:
    """Counts the library's warnings, at least one per fault, instead of printing them."""
    counts: dict[str, int] = {}

    class Counter(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            name = f"{record.levelname} {record.name}"
            counts[name] = counts.get(name, 0) + 1

    logger, handler = logging.getLogger("tpu_offload"), Counter()
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield counts
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
