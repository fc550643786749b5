"""How fast blocks move between the caches and the host pool on this machine, and what that costs the model.

Measured for each copy path, direction and job size, in rounds. A round runs every method once, in random
order, so that a machine that slows down slows all of them; ratios are taken within a round and given as
median with the 10th and 90th percentile. With nothing else going on:

  seconds     from handing the plan to the worker to the poll that reports the job, the caches being ready
  dispatch_s  the part of it before `begin_step` and `end_step` have returned: the engine's thread is busy
  of_limit    seconds of the limit / ours: 1 is the speed of the hardware. The limit is one contiguous copy of
              as many bytes: memcpy between two old buffers on a CPU; elsewhere a copy between device memory
              and donated pinned memory, so what the bus gives
  of_peer     seconds of the peer's method / ours: how many times faster we are than gather, split and one
              `device_put` a block (saves), or one `device_put` a block, a wait, a scatter and a wait (loads)

And with a model at work, where steps are asked for (on accelerators, by default):

  delay_s     how much later the model is done. Steps of some milliseconds run one after another, each waited
              for as a synchronous engine does; the job is in the plan of the first. They go on until the job
              is reported, and for at least three. The delay is the time that they took less the time of as
              many steps with empty plans, run right after. It holds everything that the copy costs the model,
              whoever does it: device time, HBM and PCIe that both want, dispatch

`rank` makes of that an order of the paths, for each direction. What offloading must not cost is the model's
time, so the path with the smaller delay is the better one. A path's delay is the geometric mean over the job
sizes; delays under 50 us, about what can be told from noise, count as 50 us. Paths within 10 % of the
best delay are as good as it; among them, and where no delay was measured, the one whose transfers take
less time is better, by the geometric mean again. The remaining ties, within 5 %, go to the path that is named
first: direct needs next to no HBM.
"""

import dataclasses
import math
import random
import time
from collections.abc import Callable, Sequence
from typing import Self

import jax
import numpy as np

from tpu_offload.cli.transfer_methods import BusCopies, Caches, Geometry, Memcpy, Method, ModelStep, PeerCopies
from tpu_offload.cli.transfer_methods import WorkerCopies as Worker
from tpu_offload.config import CopyPath, OffloadConfig
from tpu_offload.types import Direction, StepPlan

PATHS = (CopyPath.DIRECT, CopyPath.STAGED)
"""Copy paths that can be measured, in the order in which ties are broken."""

_WALK_NBYTES = 256 * 2**20  # on a CPU, buffers of at least this size are walked: several times its caches
_MIN_STEPS = 3
_DELAY_FLOOR_S = 50e-6
_SAME_DELAY, _SAME_SECONDS = 1.10, 1.05


@dataclasses.dataclass(frozen=True, slots=True)
class Spread:
    """Median, 10th and 90th percentile of a figure over the rounds, and the figures themselves."""

    median: float
    p10: float
    p90: float
    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Summarizes at least one value."""
        p10, median, p90 = np.percentile(values, (10, 50, 90)).tolist()
        return cls(median, p10, p90, tuple(values))


@dataclasses.dataclass(frozen=True, slots=True)
class Figures:
    """What was measured for one path, direction and job size; the module's docstring defines each figure.

    Attributes:
      path: the copy path.
      direction: save or load.
      num_blocks: blocks in a job.
      nbytes: bytes of a job over all devices.
      num_rounds: rounds behind every figure.
      seconds: of a transfer.
      gb_per_s: 1e9 bytes a second.
      dispatch_s: seconds before control is back.
      limit_gb_per_s: the limit's rate.
      peer_gb_per_s: the peer's rate; None where it was left out, as in `of_peer`.
      of_limit: the limit's time over ours.
      of_peer: the peer's time over ours.
      delay_s: seconds by which model steps are late; None where no steps were run.
      step_s: seconds of one such step, with no copy.
    """

    path: CopyPath
    direction: Direction
    num_blocks: int
    nbytes: int
    num_rounds: int
    seconds: Spread
    gb_per_s: Spread
    dispatch_s: Spread
    limit_gb_per_s: Spread
    peer_gb_per_s: Spread | None
    of_limit: Spread
    of_peer: Spread | None
    delay_s: Spread | None
    step_s: Spread | None


@dataclasses.dataclass(frozen=True, slots=True)
class _Sample:
    seconds: float
    dispatch_s: float
    delay_s: float | None = None
    step_s: float | None = None


_Key = tuple[CopyPath | str, Direction]  # a path, "limit" or "peer"


class TransferBench:
    """Caches, workers and the other methods for one geometry of the caches, compiled.

    Args:
      geometry: of the caches.
      sizes: blocks in a job, for all that `measure` will be asked for.
      paths: copy paths to measure, each with a worker and a host pool of its own.
      directions: directions to measure.
      with_peer: also measure the peer's method.
      step_s: seconds of a model step; 0 runs no steps.
    Raises:
      InputError: there are too few devices, or not enough host memory.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        sizes: Sequence[int],
        paths: Sequence[CopyPath] = PATHS,
        directions: Sequence[Direction] = tuple(Direction),
        with_peer: bool = True,
        step_s: float = 0.0,
    ) -> None:
        self.geometry = geometry
        self._directions = directions
        self._num_blocks = num_walked_blocks(geometry, max(sizes))
        self._caches = geometry.make_caches(self._num_blocks)
        self._others: dict[str, Method] = {"limit": self._limit()}
        if with_peer:
            self._others["peer"] = peer = PeerCopies(self._caches, sizes=sizes)
        self._workers: dict[CopyPath, Worker] = {}
        for path in paths:
            config = OffloadConfig.create(
                save_path=path,
                load_path=path,
                num_staging_blocks=max(sizes),
                num_cpu_chunks=self._num_blocks,
                # A job is one bucket, as with the default buckets where sizes are powers of two, without
                # compiling the others.
                block_size_buckets=tuple(sorted({1, *sizes})),
            )
            self._workers[path] = Worker(config, self._caches)
        self._step = ModelStep(self._caches, target_s=step_s) if step_s else None
        if self._step:
            self._caches = self._step.calibrate(self._caches)
        if with_peer:
            peer.wait_until_compiled()  # nothing is measured beside it
        self._rng = random.Random(0)

    def _limit(self) -> Method:
        if jax.default_backend() == "cpu":
            nbytes = self._num_blocks * self.geometry.block_nbytes
            return Memcpy(nbytes=nbytes, job_nbytes=self.geometry.block_nbytes)
        return BusCopies(self._caches, block_nbytes_per_device=self.geometry.block_nbytes // self.geometry.num_devices)

    def measure(
        self, num_blocks: int, *, seconds: float, max_rounds: int = 25, clock: Callable[[], float] = time.monotonic
    ) -> list[Figures]:
        """Measures jobs of one size.

        Args:
          num_blocks: one of the `sizes`.
          seconds: start no round after this long; one round is always run.
          max_rounds: rounds at most.
          clock: seconds, monotonic.
        Raises:
          TransferError: a copy failed.
        """
        give_up_s = clock() + seconds
        self._run_round(num_blocks)  # what is left to compile is small
        if clock() < give_up_s:
            self._run_round(num_blocks)  # touches memory for the first time
        rounds = [self._run_round(num_blocks)]
        while len(rounds) < max_rounds and clock() < give_up_s:
            rounds.append(self._run_round(num_blocks))
        return [
            self._figures(path, direction, num_blocks, rounds)
            for path in self._workers
            for direction in self._directions
        ]

    def close(self) -> None:
        """Frees the host pools and the caches."""
        for worker in self._workers.values():
            worker.worker.close()
        self._workers.clear()
        self._others.clear()
        self._caches.clear()

    def _run_round(self, num_blocks: int) -> dict[_Key, _Sample]:
        names: list[CopyPath | str] = [*self._workers, *self._others]
        keys: list[_Key] = [(name, direction) for name in names for direction in self._directions]
        self._rng.shuffle(keys)
        if ("peer", Direction.LOAD) in keys:  # loads what was saved
            keys.sort(key=lambda key: key == ("peer", Direction.LOAD))
            if Direction.SAVE not in self._directions:
                keys.insert(0, ("peer", Direction.SAVE))
        samples: dict[_Key, _Sample] = {}
        for name, direction in keys:
            block_ids = self._rng.sample(range(self._num_blocks), num_blocks)
            if isinstance(name, CopyPath):
                samples[name, direction] = self._time_worker(self._workers[name], direction, block_ids)
            else:
                samples[name, direction] = self._time_other(self._others[name], direction, block_ids)
        return samples

    def _time_worker(self, worker: Worker, direction: Direction, block_ids: list[int]) -> _Sample:
        plan = worker.plan(direction, block_ids)
        start_s = time.perf_counter()
        caches = worker.dispatch(plan, self._caches)
        dispatched_s = time.perf_counter()
        self._caches = worker.finish(caches)
        end_s = time.perf_counter()
        delay_s = step_s = None
        if self._step is not None:
            delay_s, step_s, self._caches = _time_steps(
                worker, self._step, worker.plan(direction, block_ids), self._caches
            )
        return _Sample(end_s - start_s, dispatched_s - start_s, delay_s, step_s)

    def _time_other(self, method: Method, direction: Direction, block_ids: list[int]) -> _Sample:
        start_s = time.perf_counter()
        caches = method.dispatch(direction, self._caches, block_ids)
        dispatched_s = time.perf_counter()
        self._caches = method.finish(caches)
        return _Sample(time.perf_counter() - start_s, dispatched_s - start_s)

    def _figures(
        self, path: CopyPath, direction: Direction, num_blocks: int, rounds: Sequence[dict[_Key, _Sample]]
    ) -> Figures:
        nbytes = num_blocks * self.geometry.block_nbytes
        ours = [r[path, direction] for r in rounds]
        limit = [r["limit", direction].seconds for r in rounds]
        peer = [r["peer", direction].seconds for r in rounds] if "peer" in self._others else []
        seconds = [sample.seconds for sample in ours]
        delays = [sample.delay_s for sample in ours if sample.delay_s is not None]
        steps = [sample.step_s for sample in ours if sample.step_s is not None]

        def rate(times: Sequence[float]) -> Spread:
            return Spread.of([nbytes / t / 1e9 for t in times])

        def ratio(times: Sequence[float]) -> Spread:
            return Spread.of([t / s for t, s in zip(times, seconds, strict=True)])

        return Figures(
            path=path,
            direction=direction,
            num_blocks=num_blocks,
            nbytes=nbytes,
            num_rounds=len(rounds),
            seconds=Spread.of(seconds),
            gb_per_s=rate(seconds),
            dispatch_s=Spread.of([sample.dispatch_s for sample in ours]),
            limit_gb_per_s=rate(limit),
            peer_gb_per_s=rate(peer) if peer else None,
            of_limit=ratio(limit),
            of_peer=ratio(peer) if peer else None,
            delay_s=Spread.of(delays) if delays else None,
            step_s=Spread.of(steps) if steps else None,
        )


def _time_steps(worker: Worker, step: ModelStep, plan: StepPlan, caches: Caches) -> tuple[float, float, Caches]:
    """Runs model steps with a job in the first, then as many without: (delay, seconds of one step, caches)."""
    reported, num_steps = False, 0
    start_s = time.perf_counter()
    while not reported or num_steps < _MIN_STEPS:
        caches = _run_step(worker, step, plan, caches)
        reported = worker.poll() or reported
        plan = worker.idle_plan()
        num_steps += 1
    middle_s = time.perf_counter()
    for _ in range(num_steps):
        caches = _run_step(worker, step, worker.idle_plan(), caches)
        worker.poll()
    idle_s = time.perf_counter() - middle_s
    return middle_s - start_s - idle_s, idle_s / num_steps, caches


def _run_step(worker: Worker, step: ModelStep, plan: StepPlan, caches: Caches) -> Caches:
    caches = step.dispatch(worker.worker.begin_step(plan, caches))
    worker.worker.end_step(plan, caches)
    step.wait()
    return caches


def num_walked_blocks(geometry: Geometry, largest: int) -> int:
    """Blocks of the caches, and of each host pool, that jobs of up to `largest` blocks are measured with."""
    if jax.default_backend() == "cpu":
        return max(2 * largest, -(-_WALK_NBYTES // geometry.block_nbytes))
    return 2 * largest


def rank(figures: Sequence[Figures], direction: Direction) -> list[CopyPath]:
    """The measured paths of one direction, the best first, as the module's docstring defines it."""
    by_path: dict[CopyPath, list[Figures]] = {}
    for one in figures:
        if one.direction is direction:
            by_path.setdefault(one.path, []).append(one)
    delays = {
        path: _geometric_mean([max(f.delay_s.median, _DELAY_FLOOR_S) if f.delay_s else _DELAY_FLOOR_S for f in all_])
        for path, all_ in by_path.items()
    }
    seconds = {path: _geometric_mean([f.seconds.median for f in all_]) for path, all_ in by_path.items()}
    left = sorted(by_path, key=PATHS.index)
    ranking: list[CopyPath] = []
    while left:
        as_good = [path for path in left if delays[path] <= _SAME_DELAY * min(delays[p] for p in left)]
        fastest = min(seconds[path] for path in as_good)
        best = next(path for path in as_good if seconds[path] <= _SAME_SECONDS * fastest)
        ranking.append(best)
        left.remove(best)
    return ranking


def _geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


@dataclasses.dataclass(frozen=True, slots=True)
class CopyRates:
    """Median rates of jobs of `num_blocks` blocks, in 1e9 bytes a second, the worker's own time included."""

    num_blocks: int
    save_gb_per_s: float
    load_gb_per_s: float


def measure_copy_rates(
    offload: OffloadConfig, geometry: Geometry, *, max_blocks: int = 64, num_rounds: int = 7
) -> CopyRates:
    """Times saves and loads of one engine's settings, one job at a time, with nothing else going on.

    In a run, a save is queued behind the step that computes its blocks and a load ahead of the next one, so
    the time from dispatch to report says more about the steps than about the copies.

    Args:
      offload: the settings; the host pool is made as small as this needs.
      geometry: of the caches.
      max_blocks: blocks in a job, where budget and host memory allow it.
      num_rounds: jobs of each direction.
    Raises:
      InputError: there is no room for a host pool.
      TransferError: a copy failed.
    """
    caches = geometry.make_caches(max_blocks)
    num_chunks = max(1, max_blocks // offload.blocks_per_chunk)
    small = {"num_cpu_chunks": num_chunks, "host_gb": None, "skip_jax_precompile": False}
    worker = Worker(offload.model_copy(update=small), caches)
    seconds: dict[Direction, list[float]] = {direction: [] for direction in Direction}
    try:
        block_ids = list(range(min(max_blocks, worker.num_host_blocks, worker.max_job_blocks)))
        for _ in range(num_rounds):
            for direction in Direction:
                plan = worker.plan(direction, block_ids)
                start_s = time.perf_counter()
                caches = worker.finish(worker.dispatch(plan, caches))
                seconds[direction].append(time.perf_counter() - start_s)
    finally:
        worker.worker.close()
    nbytes = len(block_ids) * geometry.block_nbytes
    save, load = (nbytes / float(np.median(seconds[direction])) / 1e9 for direction in Direction)
    return CopyRates(len(block_ids), save, load)
