"""Whether the devices have enough HBM left for copies, beside the model and vLLM's KV cache."""

import logging
from collections.abc import Sequence
from typing import Any

from tpu_offload import OffloadConfig, OffloadWorker
from tpu_offload.config import CopyPath
from tpu_offload.errors import ConfigError
from tpu_offload.layout import KVLayout

_logger = logging.getLogger(__name__)
_GB = 2**30


def check_worker_hbm(
    worker: OffloadWorker, runner: Any, config: OffloadConfig, layout: KVLayout, *, num_blocks: int
) -> None:
    """Checks that every device of a runner has enough free HBM for a worker's copies.

    Args:
      worker: it.
      runner: vLLM's, with weights and caches allocated.
      config: the settings.
      layout: of the runner's caches.
      num_blocks: blocks of the caches, for each data-parallel rank.
    Raises:
      ConfigError: a device has too little.
    """
    from tpu_inference import utils

    setup = worker.poll().setup
    is_staged = setup is not None and CopyPath.STAGED.value in (setup.save_path, setup.load_path)
    num_staged = min(config.staging_blocks(layout), num_blocks) if is_staged else 0
    check_hbm(
        utils.hbm_usage_bytes(runner.devices),
        needed=worker.hbm_nbytes,
        staging_nbytes=num_staged * layout.block_nbytes_per_device,
        block_nbytes=layout.block_nbytes_per_device,
        utilization=runner.vllm_config.cache_config.gpu_memory_utilization,
    )


def check_hbm(
    usage: Sequence[tuple[int, int]], *, needed: int, staging_nbytes: int, block_nbytes: int, utilization: float
) -> None:
    """Checks that every device has enough free HBM for copies.

    tpu-inference gives the KV cache all of `--gpu-memory-utilization` and reserves HBM for its own connector only.

    Args:
      usage: bytes used and total bytes of each device of this process, with weights and caches allocated.
      needed: bytes that copies need on each device.
      staging_nbytes: those of them that the staging buffer takes; 0 if no copy path is staged.
      block_nbytes: bytes of one block on each device.
      utilization: `--gpu-memory-utilization`.
    Raises:
      ConfigError: a device has too little free HBM.
    """
    used, limit = max(usage, key=lambda device: device[0] - device[1])
    free = limit - used
    if needed <= free:
        _logger.info(
            "copies take up to %.1f MiB of HBM per device; %.1f MiB are free beside weights and KV cache",
            needed / 2**20,
            free / 2**20,
        )
        return
    # One block more, because the remainder of the KV cache's share below a whole block differs at another size.
    lower = max(0.0, utilization - (needed - free + block_nbytes) / limit)
    smaller, others = "", needed - staging_nbytes
    if staging_nbytes and others + block_nbytes <= free:
        fitting = _rounded_down((free - others - block_nbytes) / _GB)
        smaller = (
            f", or TPU_OFFLOAD_STAGING_BUFFER_GB to at most {fitting}, or the copy paths to direct, which has no such "
            "buffer"
        )
    raise ConfigError(
        f"tpu_offload: copies need {needed / _GB:.4g} GB of HBM on each device and {free / _GB:.4g} GB are free beside "
        f"weights and KV cache; set --gpu-memory-utilization to at most {_rounded_down(lower)} "
        f"(it is {utilization:g}){smaller}"
    )


def _rounded_down(value: float) -> str:
    """The value rounded down to three decimals."""
    return f"{int(value * 1000) / 1000:g}"
