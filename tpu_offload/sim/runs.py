"""Many runs over one trace, in as many processes as there are cores."""

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import final

from tpu_offload.core.policies import find_policy
from tpu_offload.errors import InputError
from tpu_offload.sim.belady import belady_hits
from tpu_offload.sim.hbm import Front
from tpu_offload.sim.replay import Outcome, Setup, replay
from tpu_offload.sim.trace import Trace

BOUND = "belady"
_INTERRUPTS = signal.SIGINT, signal.SIGTERM
_BLOCKS_A_PROCESS = 250_000  # about half a second of work, for one to start and import numpy and pydantic


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One policy at one size.

    Attributes:
      policy: its name in `POLICIES`, `module:Class` of another, or `BOUND`.
      size_share: the host tier's room as a share of the unique blocks, as it was asked for.
      setup: what it runs in.
    """

    policy: str
    size_share: float
    setup: Setup


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """Hits of consecutive requests, in blocks."""

    num_blocks: int
    num_hbm_hits: int
    num_host_hits: int
    num_secondary_hits: int

    def __add__(self, other: "Part") -> "Part":
        return Part(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """What a run came to.

    Attributes:
      run: which.
      first: the requests before the split.
      second: those after it.
      num_saved: as in `Outcome`, like those below; of the bound they are 0.
      run_s: how long it took.
    """

    run: Run
    first: Part
    second: Part
    num_saved: int
    num_evicted: int
    num_dropped: int
    num_secondary_saved: int
    run_s: float


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Scene:
    """What all runs have in common; goes to each process once.

    Attributes:
      trace: what is played.
      split: requests before the split.
      only_second: whether what is best for the requests after the split is the bound. What is best for those before
        it is another run then, so that each part has its own bound.
      front: HBM.
    """

    trace: Trace
    split: int
    only_second: bool
    front: Front

    def play(self, run: Run) -> Result:
        """One run, from empty tiers on."""
        start_s = time.perf_counter()
        if run.policy == BOUND:
            hits = self._bound_hits(run.setup.num_chunks)
            outcome = Outcome(tuple(hits), (0,) * len(hits))
        else:
            outcome = replay(self.trace, find_policy(run.policy)(), run.setup, front=self.front)
        run_s = time.perf_counter() - start_s
        return Result(
            run,
            self._part(outcome, 0, self.split),
            self._part(outcome, self.split, len(self.trace.requests)),
            outcome.num_saved,
            outcome.num_evicted,
            outcome.num_dropped,
            outcome.num_secondary_saved,
            run_s,
        )

    def _bound_hits(self, num_chunks: int) -> list[int]:
        if not self.only_second:
            return belady_hits(self.trace, num_chunks, front=self.front)
        end = self.split
        before = dataclasses.replace(self.trace, requests=self.trace.requests[:end])
        first = belady_hits(before, num_chunks, front=Front(self.front.hits[:end], self.front.left[:end]))
        second = belady_hits(self.trace, num_chunks, first_counted=end, front=self.front)
        return [*first, *second[end:]]

    def _part(self, outcome: Outcome, start: int, end: int) -> Part:
        return Part(
            sum(len(request.blocks) for request in self.trace.requests[start:end]),
            sum(self.front.hits[start:end]),
            sum(outcome.host_hits[start:end]),
            sum(outcome.secondary_hits[start:end]),
        )


def play_all(
    scene: Scene, runs: Sequence[Run], *, num_jobs: int, blocks_a_process: int = _BLOCKS_A_PROCESS
) -> Generator[tuple[int, Result]]:
    """Plays runs in several processes; yields their numbers and results as they come.

    An exception, Ctrl-C among them, ends the processes at once.

    Args:
      scene: what all runs have in common.
      runs: what is played.
      num_jobs: processes at most. There are never more than runs.
      blocks_a_process: blocks of prompts, those of each run, that a process is worth its start for. Where there is
        work for one only, none is started.
    Raises:
      InputError: a process was killed.
    """
    num_jobs = min(num_jobs, len(runs), scene.trace.num_blocks * len(runs) // blocks_a_process)
    if num_jobs <= 1:
        yield from ((number, scene.play(run)) for number, run in enumerate(runs))
        return
    # Not forked: threads of the caller (jax has some) may hold locks, and a forked child would wait for ever.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_jobs, context, initializer=_enter, initargs=(scene,)) as pool, _ended():
        with _deaf_to_interrupts():
            numbers = {pool.submit(_play, run): number for number, run in enumerate(runs)}
        try:
            for future in as_completed(numbers):
                yield numbers[future], future.result()
        except BrokenProcessPool as e:
            raise InputError("a process of the simulation was killed; with --jobs 1 it takes the least memory") from e


@contextlib.contextmanager
def _ended() -> Iterator[None]:
    """Ends the processes started inside when that is left by an exception; else they would finish their runs."""
    before = set(multiprocessing.active_children())
    try:
        yield
    except BaseException:
        for process in set(multiprocessing.active_children()) - before:
            process.terminate()
        raise


@contextlib.contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Processes started inside never hear Ctrl-C, which reaches all of them: the first one ends the others.

    Nor does this one, before they are all started and known: a process that is interrupted while it starts another
    forgets that, and leaves it behind. To block the signals is not enough. They are this thread's alone, and python
    hands what any thread gets (libraries have some) to the main one.
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


_scene: Scene | None = None  # of a process that `play_all` has started


def _enter(scene: Scene) -> None:
    global _scene
    _scene = scene
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Ends this process when the one that has started it is gone, however that ended; it would wait for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _play(run: Run) -> Result:
    assert _scene is not None, "only for processes of `play_all`"
    return _scene.play(run)
