"""Measures how fast blocks move between the caches and the host pool, and how much that delays a model.

Each copy path, direction and job size is measured in rounds. A round runs every method once, in random order, so that
changes in machine load affect all methods; ratios are taken within a round and reported as median with the 10th and
90th percentile. `figures` defines each figure.

A path that does not compile or run on this machine is reported as a `Failure`; the others are still measured. The
caches and the worker that it may have destroyed are replaced.
"""

import dataclasses
import logging
import random
import time
from collections.abc import Callable, Sequence

import jax

from tpu_offload.config import CopyPath, OffloadConfig
from tpu_offload.errors import TransferError
from tpu_offload.measure.baselines import BusCopies, Memcpy, Method, PeerCopies, ProgramCopies
from tpu_offload.measure.figures import PATHS, Failure, Figures, Spread
from tpu_offload.measure.model_step import ModelStep
from tpu_offload.measure.worker_copies import Geometry, JobTimes, WorkerCopies, time_steps
from tpu_offload.types import Direction

_logger = logging.getLogger(__name__)

_WALK_NBYTES = 256 * 2**20  # on a CPU, at least this size is walked through: several times the CPU's caches
_DEFAULT_COMPILE_S = 600.0
_PROGRAMS = ("program", "empty")  # of the direct path, by themselves

_Key = tuple[CopyPath | str, Direction]  # a path, "limit", "program", "empty" or "peer"


class TransferBench:
    """Caches, workers and baselines for one cache geometry, compiled.

    Args:
      geometry: geometry of the caches.
      sizes: all job sizes that will be measured, in blocks.
      paths: copy paths to measure, each with its own worker and host pool.
      directions: directions to measure.
      with_peer: also measure the peer's method.
      step_s: duration of a model step; 0 runs no steps, which excludes the `fused` path.
      max_fused_blocks: most blocks that a step copies; the rest of a larger job is copied directly, as in an engine.
        Each block adds to the step's compile time, for 64 blocks over a minute on a TPU.
      compile_s: how long to wait for compilation of model steps with fused copies; one that takes longer is a failure.
    Raises:
      InputError: too few devices, or too little host memory for any path.

    Attributes:
      failures: paths that failed; such a path may still have figures for smaller jobs.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        sizes: Sequence[int],
        paths: Sequence[CopyPath] = PATHS[:2],
        directions: Sequence[Direction] = tuple(Direction),
        with_peer: bool = True,
        step_s: float = 0.0,
        max_fused_blocks: int = 8,
        compile_s: float = _DEFAULT_COMPILE_S,
    ) -> None:
        assert step_s or CopyPath.FUSED not in paths, "fused copies are part of a step"
        give_up_s = time.monotonic() + compile_s
        self.geometry = geometry
        self.failures: list[Failure] = []
        self._sizes, self._directions = sizes, directions
        self._fused_sizes = {size: _fused_size(size, sizes, max_fused_blocks) for size in sizes}
        self._num_blocks = num_walked_blocks(geometry, max(sizes))
        self._caches = geometry.make_caches(self._num_blocks)
        self._baselines: dict[str, Method] = {"limit": self._limit()}
        # Start the longest compilations first.
        self._step = ModelStep(self._caches, target_s=step_s) if step_s else None
        self._workers: dict[CopyPath, WorkerCopies] = {}
        for path in sorted(paths, key=lambda path: path is not CopyPath.FUSED):
            self._add_worker(path, directions)
        if self._step and CopyPath.FUSED in self._workers:
            self._step.compile_fused(
                self._workers[CopyPath.FUSED].worker.fused_shapes(), sizes=self._fused_sizes.values()
            )
        if with_peer:
            self._baselines["peer"] = peer = PeerCopies(self._caches, sizes=sizes)
            try:
                peer.wait_until_compiled()  # do not measure while it compiles
            except Exception as e:
                self._skip_peer(e)
        if self._step:
            self._step.wait_for_plain()
            self._wait_for_fused(self._step, give_up_s)
        self._rng = random.Random(0)

    def _limit(self) -> Method:
        if jax.default_backend() == "cpu":
            nbytes = self._num_blocks * self.geometry.block_nbytes
            return Memcpy(nbytes=nbytes, job_nbytes=self.geometry.block_nbytes)
        return BusCopies(self._caches, block_nbytes_per_device=self.geometry.block_nbytes // self.geometry.num_devices)

    def _add_worker(self, path: CopyPath, directions: Sequence[Direction]) -> None:
        config = OffloadConfig.create(
            save_path=path,
            load_path=path,
            num_staging_blocks=max(self._sizes),
            num_cpu_chunks=self._num_blocks,
            # One segment, because a fused step copies blocks of one segment only.
            host_segment_gb=max(1.0, self._num_blocks * self.geometry.block_nbytes / 2**30),
            # One bucket per job size, as with the default buckets of powers of two, without compiling the others.
            block_size_buckets=tuple(
                sorted({1, *(self._fused_sizes.values() if path is CopyPath.FUSED else self._sizes)})
            ),
        )
        try:
            self._workers[path] = worker = WorkerCopies(config, self._caches)
        except Exception as e:
            for direction in directions:
                self._fail(path, direction, e)
        else:
            if path is CopyPath.DIRECT:
                copier = worker.copiers[0]  # one for both directions
                self._baselines["program"] = ProgramCopies(copier, segment_blocks=worker.num_host_blocks)
                self._baselines["empty"] = ProgramCopies(copier, segment_blocks=0)

    def _wait_for_fused(self, step: ModelStep, give_up_s: float) -> None:
        for direction in [direction for path, direction in self._working() if path is CopyPath.FUSED]:
            try:
                for size in set(self._fused_sizes.values()):
                    step.wait_for_fused(direction, size, seconds=max(0.0, give_up_s - time.monotonic()))
            except TimeoutError:
                late = TransferError(f"the model step with {size} blocks did not compile in time; allow more seconds")
                self._fail(CopyPath.FUSED, direction, late)
            except Exception as e:
                self._fail(CopyPath.FUSED, direction, e)

    def measure(
        self,
        num_blocks: int,
        *,
        seconds: float,
        max_rounds: int = 25,
        clock: Callable[[], float] = time.monotonic,
        stop: Callable[[], bool] = lambda: False,
    ) -> list[Figures]:
        """Measures jobs of one size. A path that fails is added to `failures` and has no figures.

        Args:
          num_blocks: one of the `sizes`.
          seconds: no round starts after this long; at least one round is run.
          max_rounds: maximum number of rounds.
          clock: monotonic seconds.
          stop: called after each round; True ends the measurement. Before the first measured round nothing is returned.
        """
        give_up_s = clock() + seconds
        self._run_round(num_blocks)  # compiles the small remaining programs
        if clock() < give_up_s and not stop():
            self._run_round(num_blocks)  # first touch of the memory
        if stop():
            return []
        rounds = [self._run_round(num_blocks)]
        while len(rounds) < max_rounds and clock() < give_up_s and not stop():
            rounds.append(self._run_round(num_blocks))
        return [self._figures(path, direction, num_blocks, rounds) for path, direction in self._working()]

    def close(self) -> None:
        """Frees the host pools and the caches."""
        for worker in self._workers.values():
            worker.worker.close()
        self._workers.clear()
        self._baselines.clear()
        self._caches.clear()

    def _working(self) -> list[tuple[CopyPath, Direction]]:
        """The paths and directions that have not failed."""
        failed = {(failure.path, failure.direction) for failure in self.failures}
        keys = [(path, direction) for path in PATHS if path in self._workers for direction in self._directions]
        return [key for key in keys if key not in failed]

    def _fail(self, path: CopyPath, direction: Direction, error: Exception) -> None:
        """Records a failure and excludes the path from further rounds."""
        line = " ".join(str(error).partition("\n")[0].split())
        if not isinstance(error, TransferError):
            line = f"{type(error).__name__}: {line}"
        self.failures.append(Failure(path, direction, line))

    def _skip_peer(self, error: Exception) -> None:
        """Excludes the peer's method, which is only a baseline."""
        del self._baselines["peer"]
        _logger.warning(
            "the peer's method (one device_put per block) failed and is skipped: %s", str(error).partition("\n")[0]
        )

    def _renew_worker(self, path: CopyPath) -> None:
        """Replaces the worker of a failed copy: its copies in flight would be taken for the next job."""
        works = [direction for other, direction in self._working() if other is path]
        if path is CopyPath.DIRECT:
            for name in _PROGRAMS:
                self._baselines.pop(name, None)
        self._workers.pop(path).worker.close()
        if works:
            self._add_worker(path, works)

    def _renew_caches(self) -> None:
        """Replaces the caches, which a failed copy may have destroyed."""
        self._caches = []  # free the old ones first
        self._caches = self.geometry.make_caches(self._num_blocks)
        if self._step:
            self._step.reset()

    def _run_round(self, num_blocks: int) -> dict[_Key, JobTimes]:
        keys: list[_Key] = list(self._working())
        keys += [(name, direction) for name in self._baselines for direction in self._directions]
        self._rng.shuffle(keys)
        if ("peer", Direction.LOAD) in keys:  # it loads what it has saved
            keys.sort(key=lambda key: key == ("peer", Direction.LOAD))
            if Direction.SAVE not in self._directions:
                keys.insert(0, ("peer", Direction.SAVE))
        times: dict[_Key, JobTimes] = {}
        for name, direction in keys:
            block_ids = self._rng.sample(range(self._num_blocks), num_blocks)
            try:
                if (name, direction) in self._working():  # unless it failed in this round
                    times[name, direction] = self._time_path(CopyPath(name), direction, block_ids)
                elif name in self._baselines:
                    times[name, direction] = self._time_baseline(self._baselines[name], direction, block_ids)
            except Exception as e:
                if name == "limit":  # no ratios without the limit
                    raise
                self._renew_caches()
                if isinstance(name, CopyPath):
                    self._fail(name, direction, e)
                    self._renew_worker(name)
                elif name in _PROGRAMS:  # as the path itself will
                    del self._baselines[name]
                else:
                    self._skip_peer(e)
        return times

    def _time_path(self, path: CopyPath, direction: Direction, block_ids: list[int]) -> JobTimes:
        worker = self._workers[path]
        times = JobTimes()
        if path is not CopyPath.FUSED:
            plan = worker.plan(direction, block_ids)
            start_s = time.perf_counter()
            caches = worker.dispatch(plan, self._caches)
            dispatched_s = time.perf_counter()
            self._caches = worker.finish(caches)
            times = JobTimes(time.perf_counter() - start_s, dispatched_s - start_s)
        if self._step is not None:
            plan = worker.plan(direction, block_ids)
            num_fused = self._num_fused(path, len(block_ids))
            in_steps, self._caches = time_steps(worker, self._step, plan, self._caches, num_fused=num_fused)
            times = dataclasses.replace(in_steps, seconds=times.seconds, dispatch_s=times.dispatch_s)
        return times

    def _num_fused(self, path: CopyPath, num_blocks: int) -> int:
        return self._fused_sizes[num_blocks] if path is CopyPath.FUSED else 0

    def _time_baseline(self, method: Method, direction: Direction, block_ids: list[int]) -> JobTimes:
        start_s = time.perf_counter()
        caches = method.dispatch(direction, self._caches, block_ids)
        dispatched_s = time.perf_counter()
        self._caches = method.finish(caches)
        return JobTimes(time.perf_counter() - start_s, dispatched_s - start_s)

    def _figures(
        self, path: CopyPath, direction: Direction, num_blocks: int, rounds: Sequence[dict[_Key, JobTimes]]
    ) -> Figures:
        nbytes = num_blocks * self.geometry.block_nbytes
        ours = [r[path, direction] for r in rounds]

        def spread(name: str) -> Spread | None:
            values = [getattr(times, name) for times in ours]
            return None if None in values else Spread.of(values)

        def others(name: str) -> list[float]:
            found = [r[name, direction].seconds or 0.0 for r in rounds if (name, direction) in r]
            return found if name in self._baselines and len(found) == len(rounds) else []

        def rate(times: Sequence[float]) -> Spread | None:
            return Spread.of([nbytes / t / 1e9 for t in times]) if times else None

        def ratio(times: Sequence[float]) -> Spread | None:
            return Spread.of([t / s for t, s in zip(times, seconds, strict=True)]) if times and seconds else None

        seconds = [times.seconds for times in ours if times.seconds is not None]
        limit, peer = others("limit"), others("peer")
        program, empty = (others(name) if path is CopyPath.DIRECT else [] for name in _PROGRAMS)
        floor = [a + b for a, b in zip(limit, empty, strict=True)] if empty else []
        limit_rate = rate(limit)
        assert limit_rate is not None, "the limit is always measured"
        return Figures(
            path=path,
            direction=direction,
            num_blocks=num_blocks,
            nbytes=nbytes,
            num_fused_blocks=self._num_fused(path, num_blocks),
            num_rounds=len(rounds),
            seconds=spread("seconds"),
            gb_per_s=rate(seconds),
            dispatch_s=spread("dispatch_s"),
            limit_gb_per_s=limit_rate,
            peer_gb_per_s=rate(peer),
            of_limit=ratio(limit),
            of_peer=ratio(peer),
            program_s=Spread.of(program) if program else None,
            of_program=ratio(program),
            empty_s=Spread.of(empty) if empty else None,
            of_floor=ratio(floor),
            delay_s=spread("delay_s"),
            reported_s=spread("reported_s"),
            step_s=spread("step_s"),
        )


def _fused_size(num_blocks: int, sizes: Sequence[int], most: int) -> int:
    """Number of a job's blocks that a step copies: a compiled size of at most `most`."""
    return num_blocks if num_blocks <= most else max([size for size in sizes if size <= most], default=most)


def num_walked_blocks(geometry: Geometry, largest: int) -> int:
    """Size in blocks of the caches and of each host pool, to measure jobs of up to `largest` blocks."""
    if jax.default_backend() == "cpu":
        return max(2 * largest, -(-_WALK_NBYTES // geometry.block_nbytes))
    return 2 * largest
