"""How fast the copies themselves are on this machine, with nothing else going on.

In a run, a save is queued behind the step that computes its blocks and a load ahead of the next one, so
the time from dispatch to report says more about the steps than about the copies.
"""

import dataclasses
import statistics
import time

import jax
import jax.numpy as jnp

from tpu_offload import JobState, KVLayout, OffloadConfig, OffloadWorker, StepPlan, TransferJob
from tpu_offload.engine import EngineConfig, ModelConfig
from tpu_offload.types import Direction

_NUM_ROUNDS = 7
_ALLOCATION_TIMEOUT_S = 10.0


@dataclasses.dataclass(frozen=True, slots=True)
class CopyRates:
    """Median rates of jobs of `num_blocks` blocks, in 1e9 bytes a second, the worker's own time included."""

    num_blocks: int
    save_gb_per_s: float
    load_gb_per_s: float


def measure_copy_rates(model: ModelConfig, engine: EngineConfig, offload: OffloadConfig) -> CopyRates | None:
    """Saves and loads jobs of up to 64 blocks, one at a time, with a worker and caches of its own.

    Returns:
      None when there is no room for a host pool, or a copy fails.
    """
    num_chunks = max(1, 64 // offload.blocks_per_chunk)
    offload = offload.model_copy(update={"num_cpu_chunks": num_chunks, "host_gb": None, "skip_jax_precompile": False})
    shape = (64, *model.page_shape(engine.block_size))
    caches = [jax.device_put(jnp.zeros(shape, model.kv_dtype), jax.devices()[0]) for _ in range(model.num_layers)]
    layout = KVLayout.from_caches(caches, block_size=engine.block_size)
    worker = OffloadWorker(offload, layout, caches)
    give_up_s = time.perf_counter() + _ALLOCATION_TIMEOUT_S
    while worker.poll().num_host_chunks < worker.num_host_chunks and time.perf_counter() < give_up_s:
        time.sleep(0.001)
    num_blocks = min(64, offload.staging_blocks(layout), worker.poll().num_host_chunks * offload.blocks_per_chunk)
    if num_blocks == 0:
        worker.close()
        return None
    ids = tuple(range(num_blocks))
    seconds: dict[Direction, list[float]] = {Direction.SAVE: [], Direction.LOAD: []}
    step_id = 0
    for _ in range(_NUM_ROUNDS):
        for direction in Direction:
            jobs = (TransferJob(step_id, direction, 0, ids, ids),)
            saving = direction is Direction.SAVE
            plan = StepPlan(step_id, loads=() if saving else jobs, saves=jobs if saving else ())
            start_s = time.perf_counter()
            caches = worker.begin_step(plan, caches)
            worker.end_step(plan, caches)
            while not (results := worker.poll(wait=True).results):
                step_id += 1
                caches = worker.begin_step(StepPlan(step_id), caches)
            jax.block_until_ready(caches)
            seconds[direction].append(time.perf_counter() - start_s)
            if results[0].state is not JobState.FINISHED:
                worker.close()
                return None
            step_id += 1
    worker.close()
    nbytes = num_blocks * layout.block_nbytes
    save_s, load_s = (statistics.median(seconds[direction]) for direction in (Direction.SAVE, Direction.LOAD))
    return CopyRates(num_blocks, nbytes / save_s / 1e9, nbytes / load_s / 1e9)
