"""Simulates many cases (policies and sizes) over one trace, in parallel processes."""

import contextlib
import dataclasses
import mmap
import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import reduction
from typing import Any, final

from tpu_offload.core.policies import POLICIES, find_policy
from tpu_offload.errors import InputError, OffloadError
from tpu_offload.sim.belady import belady_hits
from tpu_offload.sim.hbm import HBMResult
from tpu_offload.sim.replay import Outcome, TierSetup, replay
from tpu_offload.sim.trace import Trace
from tpu_offload.values import error_line

BOUND = "belady"
_INTERRUPTS = signal.SIGINT, signal.SIGTERM
_BLOCKS_A_PROCESS = 250_000  # about half a second of work: what starting a process and importing numpy costs


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One policy at one size.

    Attributes:
      policy: its name in `POLICIES`, `module:Class` of another, or `BOUND`.
      size_share: requested size of the host tier, as a share of the unique blocks.
      setup: the tiers behind HBM.
    """

    policy: str
    size_share: float
    setup: TierSetup


@dataclasses.dataclass(frozen=True, slots=True)
class HitCounts:
    """Hits of a range of requests, in blocks; those in storage by tier."""

    num_blocks: int
    num_hbm_hits: int
    num_host_hits: int
    num_storage_hits: tuple[int, ...]

    def __add__(self, other: "HitCounts") -> "HitCounts":
        return HitCounts(
            self.num_blocks + other.num_blocks,
            self.num_hbm_hits + other.num_hbm_hits,
            self.num_host_hits + other.num_host_hits,
            tuple(a + b for a, b in zip(self.num_storage_hits, other.num_storage_hits, strict=True)),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """The result of one case.

    Attributes:
      case: the case.
      first: hits before the split.
      second: hits after it.
      outcome: of all requests; the bound has hits only.
      run_s: wall-clock time of the simulation.
    """

    case: Case
    first: HitCounts
    second: HitCounts
    outcome: Outcome
    run_s: float


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Experiment:
    """What all cases share; sent to each process once.

    Attributes:
      trace: the requests.
      split: number of requests before the split.
      only_second: whether only requests after the split count. Then the bound is computed for each part separately.
      hbm_result: result of `simulate_hbm`.
    """

    trace: Trace
    split: int
    only_second: bool
    hbm_result: HBMResult

    def run(self, case: Case) -> Result:
        """Simulates one case, starting with empty tiers."""
        start_s = time.perf_counter()
        if case.policy == BOUND:
            hits = self._bound_hits(case.setup.num_chunks)
            outcome = Outcome(tuple(hits))
        else:
            outcome = self._replay(case)
        run_s = time.perf_counter() - start_s
        return Result(
            case,
            self._part(outcome, 0, self.split),
            self._part(outcome, self.split, len(self.trace.requests)),
            outcome,
            run_s,
        )

    def _replay(self, case: Case) -> Outcome:
        try:
            return replay(self.trace, find_policy(case.policy)(), case.setup, hbm_result=self.hbm_result)
        except Exception as e:
            if case.policy in POLICIES or isinstance(e, OffloadError):
                raise
            at = traceback.extract_tb(e.__traceback__)[-1]
            raise InputError(
                f"the eviction policy {case.policy} failed: {error_line(e)} ({at.filename}, line {at.lineno}); "
                "expected a policy that does what docs/policies.md says"
            ) from e

    def _bound_hits(self, num_chunks: int) -> list[int]:
        if not self.only_second:
            return belady_hits(self.trace, num_chunks, hbm_result=self.hbm_result)
        end = self.split
        before = dataclasses.replace(self.trace, requests=self.trace.requests[:end])
        first = belady_hits(
            before, num_chunks, hbm_result=HBMResult(self.hbm_result.hits[:end], self.hbm_result.evicted[:end])
        )
        second = belady_hits(self.trace, num_chunks, first_counted=end, hbm_result=self.hbm_result)
        return [*first, *second[end:]]

    def _part(self, outcome: Outcome, start: int, end: int) -> HitCounts:
        return HitCounts(
            sum(len(request.blocks) for request in self.trace.requests[start:end]),
            sum(self.hbm_result.hits[start:end]),
            sum(outcome.host_hits[start:end]),
            tuple(sum(tier.hits[start:end]) for tier in outcome.storage),
        )


def run_all(
    experiment: Experiment, cases: Sequence[Case], *, num_jobs: int, blocks_a_process: int = _BLOCKS_A_PROCESS
) -> Generator[tuple[int, Result]]:
    """Simulates cases in several processes; yields their indices and results as they complete.

    An exception, including Ctrl-C, ends the processes immediately.

    Args:
      experiment: what all cases share.
      cases: what to simulate.
      num_jobs: most processes to use; never more than cases.
      blocks_a_process: prompt blocks, summed over cases, that justify starting a process. If there is work for only
        one, none is started.
    Raises:
      InputError: a process was killed.
    """
    num_jobs = min(num_jobs, len(cases), experiment.trace.num_blocks * len(cases) // blocks_a_process)
    if num_jobs <= 1:
        yield from ((number, experiment.run(case)) for number, case in enumerate(cases))
        return
    # Not forked: threads of the caller (jax has some) may hold locks, and a forked child would deadlock.
    context = multiprocessing.get_context("spawn")
    with (
        contextlib.closing(_Shared.write(experiment)) as shared,
        ProcessPoolExecutor(num_jobs, context, initializer=_enter, initargs=(shared,)) as pool,
        _ended(),
    ):
        try:
            with deferred_interrupts():
                numbers = {pool.submit(_run, case): number for number, case in enumerate(cases)}
            for future in as_completed(numbers):
                yield numbers[future], future.result()
        except BrokenProcessPool as e:
            raise InputError("a process of the simulation was killed; with --jobs 1 it takes the least memory") from e


@contextlib.contextmanager
def _ended() -> Iterator[None]:
    """On an exception, terminates the processes that were started inside; else they would finish their cases."""
    before = set(multiprocessing.active_children())
    try:
        yield
    except BaseException:
        for process in set(multiprocessing.active_children()) - before:
            process.terminate()
        raise


@contextlib.contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Defers interrupts while processes are started, and makes these ignore Ctrl-C.

    Ctrl-C reaches all processes of the terminal; this one terminates the others. A process that is interrupted while it
    starts another loses track of that one and leaves it behind, so signals are deferred until all are started. Blocking
    the signals in this thread is not enough: Python hands a signal that any thread receives (libraries have some) to
    the main thread.
    """
    pending: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()
    handlers = {s: h for s in _INTERRUPTS if is_main and callable(h := signal.getsignal(s))}
    for signum in handlers:
        signal.signal(signum, lambda number, frame: pending.append(number))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
        if pending:
            signal.raise_signal(pending[0])


@final
class _Shared:
    """An experiment in a file in memory, whose descriptor goes to the processes.

    As an argument itself it would go through a pipe while a process starts. If that one is killed meanwhile, the write
    never ends, because this process has both ends of the pipe open.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def write(cls, experiment: Experiment) -> "_Shared":
        """Writes the file."""
        shared = cls(os.memfd_create("experiment"))
        with open(shared._fd, "wb", closefd=False) as file:
            pickle.dump(experiment, file, pickle.HIGHEST_PROTOCOL)
        return shared

    def read(self) -> Experiment:
        """Reads it by position, because the processes share the one of the file."""
        with mmap.mmap(self._fd, 0, prot=mmap.PROT_READ) as content:
            experiment: Experiment = pickle.loads(content)
        return experiment

    def close(self) -> None:
        """Closes the file."""
        os.close(self._fd)

    def __reduce__(self) -> Any:
        return _received, (reduction.DupFd(self._fd),)


def _received(duplicate: Any) -> _Shared:
    return _Shared(duplicate.detach())


_experiment: Experiment | None = None  # in a process that `run_all` has started


def _enter(shared: _Shared) -> None:
    global _experiment
    _experiment = shared.read()
    shared.close()
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Ends this process when its parent has ended, in any way; otherwise it would wait forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _run(case: Case) -> Result:
    assert _experiment is not None, "only in processes of `run_all`"
    return _experiment.run(case)
