"""Times copies by the library, through an `OffloadWorker`."""

import contextlib
import dataclasses
import math
import time
from typing import final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from tpu_offload.config import OffloadConfig
from tpu_offload.errors import InputError, TransferError
from tpu_offload.kernels import ArenaView, Copier
from tpu_offload.layout import KVLayout
from tpu_offload.measure.baselines import Caches
from tpu_offload.measure.model_step import ModelStep
from tpu_offload.types import CopyJob, CopyPart, Direction, JobKind, JobState, Pool, StepPlan
from tpu_offload.worker import OffloadWorker

_ALLOCATION_TIMEOUT_S = 60.0
_MIN_STEPS = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Geometry:
    """Geometry of the KV caches.

    Attributes:
      num_layers: number of arrays.
      page_shape: one layer's slice of a block, `[block_size, kv_heads, ...]`, over all devices.
      dtype: element type.
      num_devices: local devices; axis 1 of a page is sharded over them.
    """

    num_layers: int
    page_shape: tuple[int, ...]
    dtype: str = "bfloat16"
    num_devices: int = 1

    @property
    def page_nbytes(self) -> int:
        """Bytes of one page over all devices."""
        return math.prod(self.page_shape) * np.dtype(self.dtype).itemsize

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block, all layers, over all devices."""
        return self.num_layers * self.page_nbytes

    def sharding(self) -> Sharding:
        """The sharding of each cache.

        Raises:
          InputError: too few devices, or a page cannot be sharded evenly over them.
        """
        devices = jax.local_devices()
        if self.num_devices > len(devices):
            raise InputError(f"{self.num_devices} devices requested, {len(devices)} found")
        if self.num_devices > 1 and (len(self.page_shape) < 2 or self.page_shape[1] % self.num_devices):
            raise InputError(
                f"pages of shape {list(self.page_shape)} cannot be sharded over {self.num_devices} devices; expected a "
                f"multiple of {self.num_devices} as their second number"
            )
        if self.num_devices == 1:
            return SingleDeviceSharding(devices[0])
        mesh = Mesh(np.array(devices[: self.num_devices]), ("model",))
        return NamedSharding(mesh, PartitionSpec(None, None, "model"))

    def make_caches(self, num_blocks: int) -> Caches:
        """Caches of zeros in device memory, per layer dtype[num_blocks, *page_shape]; raises as `sharding` does."""
        shape = (num_blocks, *self.page_shape)
        make = jax.jit(lambda: jnp.zeros(shape, self.dtype), out_shardings=self.sharding())
        return [make() for _ in range(self.num_layers)]


@final
class WorkerCopies:
    """Runs jobs through its own `OffloadWorker`, from the plan to the report.

    It cycles through the positions of the host pool, so that they are not in the CPU's caches.

    Args:
      config: the settings; the staging budget limits the size of a job.
      caches: per layer, dtype[num_blocks, *page_shape]; only shapes and shardings are kept.
    Raises:
      InputError: too little memory for the host pool.

    Attributes:
      copiers: those of its host tier, of one direction or both.

    `dispatch` and `finish` run no model step, so the fused path copies directly there.
    """

    def __init__(self, config: OffloadConfig, caches: Caches) -> None:
        layout = KVLayout.from_caches(caches, block_size=caches[0].shape[1])
        self.copiers: list[Copier] = []
        self.worker = OffloadWorker(config, layout, caches, fused=True, wrap_copier=self._note)
        give_up_s = time.monotonic() + _ALLOCATION_TIMEOUT_S
        while (num_ready := self.worker.poll().num_host_slots[Pool.CHUNKS]) < self.worker.num_host_chunks:
            if time.monotonic() > give_up_s:
                break
            time.sleep(0.001)
        self.num_host_blocks = num_ready * config.blocks_per_chunk
        self.max_job_blocks = config.staging_blocks(layout)
        if not self.num_host_blocks:
            self.worker.close()
            raise InputError("no memory for a host pool; use smaller or fewer blocks")
        self._next_place = 0
        self._next_id = 0
        with contextlib.suppress(TransferError):  # a path that fails will fail again when it is measured
            self._fill(caches)

    def _note(self, copier: Copier, _: ArenaView) -> Copier:
        self.copiers.append(copier)
        return copier

    def _fill(self, caches: Caches) -> None:
        """Saves to every position once: a worker loads only what it has saved."""
        most = min(self.max_job_blocks, caches[0].shape[0])
        for first in range(0, self.num_host_blocks, most):
            num_blocks = min(most, self.num_host_blocks - first)
            self.finish(self.dispatch(self.plan(Direction.SAVE, list(range(num_blocks))), caches))
        self._next_place = 0

    def plan(self, direction: Direction, block_ids: list[int]) -> StepPlan:
        """A plan with one job.

        Raises:
          InputError: the job is larger than the host pool.
        """
        num_blocks = len(block_ids)
        if num_blocks > self.num_host_blocks:
            raise InputError(f"host memory holds {self.num_host_blocks} blocks, the job has {num_blocks}")
        if self._next_place + num_blocks > self.num_host_blocks:
            self._next_place = 0
        places = range(self._next_place, self._next_place + num_blocks)
        self._next_place += num_blocks
        self._next_id += 1
        kind = JobKind.SAVE if direction is Direction.SAVE else JobKind.LOAD
        part = CopyPart(block_ids=tuple(block_ids), host_block_ids=tuple(places))
        return StepPlan(step_id=self._next_id, jobs=(CopyJob(job_id=self._next_id, kind=kind, parts=(part,)),))

    def idle_plan(self) -> StepPlan:
        """An empty plan."""
        self._next_id += 1
        return StepPlan(step_id=self._next_id)

    def dispatch(self, plan: StepPlan, caches: Caches) -> Caches:
        """Hands a plan to the worker, without a model step."""
        caches = self.worker.begin_step(plan, caches)
        self.worker.end_step(plan, caches)
        return caches

    def finish(self, caches: Caches) -> Caches:
        """Steps until the job is reported and the caches are ready.

        Raises:
          TransferError: the job failed.
        """
        while not self.poll(wait=True):
            caches = self.worker.begin_step(self.idle_plan(), caches)
        jax.block_until_ready(caches)
        return caches

    def poll(self, *, wait: bool = False) -> bool:
        """Whether the job has been reported.

        Raises:
          TransferError: the job failed.
        """
        results = self.worker.poll(wait=wait).results
        if results and results[0].state is not JobState.FINISHED:
            raise TransferError(f"a copy failed: {results[0].error}")
        return bool(results)


@dataclasses.dataclass(frozen=True, slots=True)
class JobTimes:
    """Durations of one job, in seconds; None if not measured."""

    seconds: float | None = None
    dispatch_s: float | None = None
    delay_s: float | None = None
    reported_s: float | None = None
    step_s: float | None = None


def time_steps(
    worker: WorkerCopies, step: ModelStep, plan: StepPlan, caches: Caches, *, num_fused: int
) -> tuple[JobTimes, Caches]:
    """Runs model steps with a job in the first one, then the same number without.

    Args:
      worker: with nothing in flight.
      step: for these caches.
      plan: plan with the job.
      caches: donated.
      num_fused: blocks that the first step must copy.
    Raises:
      TransferError: the job failed, or the first step copied another number of blocks.
    """
    caches = _run_step(worker, step, worker.idle_plan(), caches)  # so that no timed step follows a copy
    reported_s, num_steps = None, 0
    start_s = time.perf_counter()
    while reported_s is None or num_steps < _MIN_STEPS:
        caches = _run_step(worker, step, plan, caches, num_fused=num_fused)
        if worker.poll():
            reported_s = time.perf_counter() - start_s
        plan, num_fused = worker.idle_plan(), 0
        num_steps += 1
    middle_s = time.perf_counter()
    for _ in range(num_steps):
        caches = _run_step(worker, step, worker.idle_plan(), caches)
        worker.poll()
    idle_s = time.perf_counter() - middle_s
    delay_s = middle_s - start_s - idle_s
    return JobTimes(delay_s=delay_s, reported_s=reported_s, step_s=idle_s / num_steps), caches


def _run_step(worker: WorkerCopies, step: ModelStep, plan: StepPlan, caches: Caches, *, num_fused: int = 0) -> Caches:
    caches = worker.worker.begin_step(plan, caches, fuse=True)
    fused = worker.worker.fused_step()
    num_runs = fused.inputs.num_saves + fused.inputs.num_loads if fused.inputs else 0  # one block each
    if num_runs != num_fused:
        raise TransferError(f"the step copies {num_runs} blocks of the job; expected {num_fused}")
    caches, outcome = step.dispatch(caches, fused)
    worker.worker.end_step(plan, caches, outcome)
    step.wait()
    return caches


@dataclasses.dataclass(frozen=True, slots=True)
class CopyRates:
    """Median rates of jobs of `num_blocks` blocks, in 1e9 bytes per second, including the worker's own time."""

    num_blocks: int
    save_gb_per_s: float
    load_gb_per_s: float


def measure_copy_rates(
    offload: OffloadConfig, geometry: Geometry, *, max_blocks: int = 64, num_rounds: int = 7
) -> CopyRates:
    """Times saves and loads with an engine's settings, one job at a time on an idle device.

    While an engine serves, a save is queued behind the step that computes its blocks and a load ahead of the next step,
    so the time from dispatch to report depends more on the steps than on the copies. Without steps a `fused` path
    copies directly.

    Args:
      offload: the settings; the host pool is made only as large as needed.
      geometry: geometry of the caches.
      max_blocks: blocks in a job, if budget and host memory allow.
      num_rounds: number of jobs per direction.
    Raises:
      InputError: no memory for a host pool.
      TransferError: a copy failed.
    """
    caches = geometry.make_caches(max_blocks)
    num_chunks = max(1, max_blocks // offload.blocks_per_chunk)
    small = {"num_cpu_chunks": num_chunks, "host_gb": None, "skip_jax_precompile": False}
    worker = WorkerCopies(offload.model_copy(update=small), caches)
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
