"""Serves a workload again and again while copies, messages and requests go wrong.

HBM, staging buffer, host tier and swap pool are small, so that everything is evicted, dropped, preempted and swapped
out all the time, and faults strike at random (see `faults`). Three engines take turns, a round each: one copies
directly, one through staging arrays, one saves inside its step. They live from the first round to the last. A
fault may cost time, but nothing else:

* every request of every round gives the tokens that it gave without offloading, before the first round;
* the memory of the process does not grow, and neither does any table of any engine, once all have warmed up;
* no engine ends, hangs, or disagrees with its own accounts.

After each round the engine at hand is given time to come to rest, with no new faults; then its accounts are checked,
the tables of all are counted and memory is read.
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

from tests.soak import report as soak_report
from tests.soak.container_census import SizeHistory, container_sizes
from tests.soak.faults import Fault, Faults
from tests.soak.plan import Plan
from tests.soak.report import Round
from tpu_offload.cli.report import progress
from tpu_offload.config import OffloadConfig
from tpu_offload.engine import Engine, Request, RequestOutput
from tpu_offload.replay.comparison import find_differences
from tpu_offload.replay.serving import Record, serve
from tpu_offload.replay.setup import Setup, describe, serve_once

_STUCK_S = 60.0  # without a request that ends
# What eviction policies remember of evicted chunks is bounded by the tier, or by some thousands for a small one, and
# takes longer than a short soak to fill up; slices of time grow in number with the logarithm of time.
# tests/core/policies/test_conformance.py holds policies to a bound of their memory.
_FILLS_SLOWLY = "._index._policy."
_CERTAIN = {Fault.RESET: 100}  # a step of the first round, by which there is something to forget
_REST_JOBS = 4  # times what a job may take, an engine is given to come to rest


def soak(plan: Plan, *, stop: Callable[[], bool]) -> dict[str, Any]:
    """Serves all rounds; returns the report."""
    setup = plan.setup
    with progress(setup.workload.num_requests) as on_finish:
        baseline, _ = serve_once(setup, None, on_finish=on_finish("baseline"), stop=stop)
    with progress(None) as on_finish, _counted_log_lines() as num_lines, contextlib.ExitStack() as stack:
        sides = []
        for i, (name, config) in enumerate(plan.configs.items()):
            if baseline.complete and not stop():
                sides.append(stack.enter_context(_engine(setup, name, config, seed=plan.seed + i)))
        tables = SizeHistory()
        rounds = list(_serve_rounds(plan, sides, baseline.records, tables, on_finish=on_finish, stop=stop))
        return {
            **describe(setup),
            "config": {name: c.model_dump(mode="json", exclude_none=True) for name, c in plan.configs.items()},
            "soak_s": plan.seconds,
            "num_baseline_requests": len(baseline.records),
            **soak_report.numbers(rounds, tables),
            "faults": {f.value: sum(side.faults.counts[f] for side in sides) for f in Fault},
            "engines": {side.name: side.numbers() for side in sides},
            "log_lines": dict(num_lines),
        }


class _Side:
    """One engine and what befalls it; `serve` takes it for an engine to which nothing does."""

    def __init__(self, name: str, engine: Engine, faults: Faults, *, job_timeout_s: float) -> None:
        self.name = name
        self.engine = engine
        self.faults = faults
        self._rest_s = _REST_JOBS * job_timeout_s
        self._requests: dict[str, Request] = {}

    def add_request(self, request: Request) -> None:
        """See `serving.Engine`."""
        self._requests[request.request_id] = request
        self.engine.add_request(request)

    def step(self) -> Sequence[RequestOutput]:
        """See `serving.Engine`."""
        if self.faults.strikes(Fault.RESET):
            self.engine.reset_cache()
        if self._requests and self.faults.strikes(Fault.ABORT):
            request = self._requests[self.faults.random.choice(list(self._requests))]
            self.engine.abort(request.request_id)
            self.engine.add_request(request)
        outputs = self.engine.step()
        for output in outputs:
            if output.finished:
                self._requests.pop(output.request_id, None)
        return outputs

    def rest(self) -> int:
        """Lets copies and messages come to their ends; returns those that have none after that."""
        self.faults.active = False
        self.engine.abort(*self._requests)
        self._requests.clear()
        until_s = time.monotonic() + self._rest_s
        while (num_jobs := self.num_jobs) and time.monotonic() < until_s:
            self.engine.step()
            time.sleep(0.001)
        self.engine.step()
        self.engine.check_invariants()
        return num_jobs

    @property
    def num_jobs(self) -> int:
        """Jobs that have not ended, and slots that a copy which was given up may still write."""
        stats = self.engine.offload_stats()
        return stats.num_jobs_in_flight + stats.num_quarantined_chunks if stats else 0

    def numbers(self) -> dict[str, Any]:
        """What the engine and the library counted."""
        stats = self.engine.offload_stats()
        return dataclasses.asdict(self.engine.stats()) | (stats.as_dict() if stats else {})


@contextlib.contextmanager
def _engine(setup: Setup, name: str, config: OffloadConfig, *, seed: int) -> Iterator[_Side]:
    faults = Faults(seed, job_timeout_s=config.job_timeout_s, clock=time.perf_counter, certain=_CERTAIN)
    engine = Engine(setup.model, setup.engine, offload=config, clock=time.perf_counter, seams=faults.seams())
    with contextlib.closing(engine):
        engine.warm_up()
        engine.wait_for_host_memory()
        yield _Side(name, engine, faults, job_timeout_s=config.job_timeout_s)


def _serve_rounds(
    plan: Plan,
    sides: Sequence[_Side],
    baseline: Sequence[Record],
    tables: SizeHistory,
    *,
    on_finish: Callable[[str], Callable[[], None]],
    stop: Callable[[], bool],
) -> Iterator[Round]:
    """Round after round until the time is up, somebody stops it, or an engine is of no use any more."""
    start_s = time.monotonic()
    tell = on_finish("soak")
    while sides and not stop() and time.monotonic() - start_s < plan.seconds:
        for side in sides:
            done = _serve_round(plan, side, baseline, until_s=start_s + plan.seconds, on_finish=tell, stop=stop)
            gc.collect()
            sizes = {"jax arrays of the process": len(jax.live_arrays())}
            for other in sides:
                found = container_sizes(other.engine, other.name)
                sizes |= {path: size for path, size in found.items() if _FILLS_SLOWLY not in path}
            tables.add(sizes)
            rss_nbytes, num_entries = psutil.Process().memory_info().rss, sum(sizes.values())
            yield dataclasses.replace(
                done, at_s=time.monotonic() - start_s, rss_nbytes=rss_nbytes, num_entries=num_entries
            )
            if done.error or stop() or time.monotonic() - start_s >= plan.seconds:
                return


def _serve_round(
    plan: Plan,
    side: _Side,
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
    side.faults.active = True
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
        num_jobs_left = side.rest()
    except Exception as e:  # what the soak is there to find: nothing that befalls the library may end an engine
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
    """Counts the warnings of the library, of which there is one a fault, in place of printing them."""
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
