"""How fast the copies of one engine's settings are, for the report of a run."""

import dataclasses
import time

import numpy as np

from tpu_offload.cli.transfer_methods import Geometry, WorkerCopies
from tpu_offload.config import OffloadConfig
from tpu_offload.types import Direction


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
    the time from dispatch to report says more about the steps than about the copies. With no step going on, a
    `fused` path goes directly.

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
