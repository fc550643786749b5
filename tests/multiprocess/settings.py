"""The configs of a run."""

from typing import Any

from tests.multiprocess.messages import Setup
from tpu_offload import KVLayout, OffloadConfig

_GB = 2**30
_PLENTY_NBYTES = 2**31


def make_config(setup: Setup, layout: KVLayout, rank: int | None = None) -> OffloadConfig:
    """The settings of a process, or of the scheduler. Durations are in steps, the unit of the clock."""
    defaults: dict[str, Any] = {
        "num_staging_blocks": 12,
        "num_cpu_chunks": 24,
        "skip_jax_precompile": True,
        "metrics_log_interval": 0,
        "job_timeout_s": 30,
        "breaker_failures": 0,
        "breaker_retry_s": 4,
        "swap_mode": "swap",
        "swap_gb": setup.swap_blocks * layout.block_nbytes_per_host / _GB,
    }
    given = {**defaults, **setup.settings, **(setup.settings_of.get(rank, {}) if rank is not None else {})}
    chunk_nbytes = layout.block_nbytes_per_host * given.get("blocks_per_chunk", 1)
    return OffloadConfig.create(host_segment_gb=(setup.host_segment_chunks + 0.5) * chunk_nbytes / _GB, **given)


def available_nbytes(setup: Setup, layout: KVLayout, rank: int) -> int:
    """The available host memory of a process, for the library."""
    num_chunks = setup.available_chunks.get(rank)
    if num_chunks is None:
        return _PLENTY_NBYTES
    config = make_config(setup, layout, rank)
    chunk_nbytes = layout.block_nbytes_per_host * config.blocks_per_chunk
    share = config.state_share if layout.state_group is not None else 0.0
    return int(num_chunks * chunk_nbytes / config.host_memory_fraction / (1 - share)) + 1
