"""What vLLM's configuration means for the library, and what of it the library cannot serve.

Everything that could go wrong silently is refused at start, by both sides, with what to change.
"""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import FullAttentionSpec

from tpu_offload import ConfigError, CopyPath, OffloadConfig, SaveEvent

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_logger = logging.getLogger(__name__)
_GB = 2**30
_NEWS = {
    SaveEvent.HBM_EVICTION: "blocks that its prefix cache gives up",
    SaveEvent.PREEMPTION: "requests that it preempts",
}


def read_config(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> OffloadConfig:
    """The library's settings: `TPU_OFFLOAD_*`, and over them `kv_connector_extra_config`; `sync_load` is decided.

    Raises:
      ConfigError: a setting makes no sense, or vLLM is set up in a way that is not supported.
    """
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None, "a connector without a configuration"
    config = OffloadConfig.from_env(overrides=transfer.kv_connector_extra_config)
    problem = _unsupported(vllm_config, kv_cache_config, config)
    if problem:
        raise ConfigError(f"tpu_offload: {problem}")
    if config.sync_load is None:
        # The device runs a direct load between two steps in any case, so that to let the request wait spares nobody
        # anything. A staged one runs beside the steps.
        config = config.model_copy(update={"sync_load": config.load_path is CopyPath.DIRECT})
    return config


def warn_if_failed_loads_end_requests(policy: str) -> None:
    """Says what vLLM's default does to a request whose load fails."""
    if policy != "recompute":
        _logger.warning(
            'kv_load_failure_policy is "%s": a request whose load fails ends with an error. With '
            '"kv_load_failure_policy": "recompute" in --kv-transfer-config it is computed instead.',
            policy,
        )


def _unsupported(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", config: OffloadConfig) -> str | None:
    """Why this setup is refused, in one line with what to change; None when it is fine."""
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    assert transfer is not None
    if transfer.kv_role != "kv_both":
        return f'kv_role is "{transfer.kv_role}"; set it to "kv_both": the host tier both saves and loads'
    if config.swap_gb != 0:
        return (
            f"swap_gb={config.swap_gb}: vLLM computes preempted requests again and has no way to swap them; leave "
            "TPU_OFFLOAD_SWAP_GB out, and set TPU_OFFLOAD_DECODE_SAVE=1 to have their blocks in the host tier"
        )
    others = [event for event in config.save_on if event is not SaveEvent.COMPUTE]
    if others:
        return (
            f"TPU_OFFLOAD_SAVE_ON={','.join(event.value for event in config.save_on)}: vLLM does not tell a connector "
            f"in time of {' and '.join(_NEWS[event] for event in others)}; leave it out, which saves what is computed"
        )
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups)
        return (
            f"the model has {len(groups)} KV cache groups ({kinds}), expected one: hybrid models are not supported; "
            "for sliding windows remove --no-disable-hybrid-kv-cache-manager, which makes them one group"
        )
    spec = groups[0].kv_cache_spec
    if not isinstance(spec, FullAttentionSpec):
        return (
            f"the KV cache is {type(spec).__name__}, expected full attention: blocks that leave a window or hold a "
            "state cannot be found again by their prefix; run this model without the connector"
        )
    if spec.block_size != vllm_config.cache_config.block_size:
        return (
            f"the KV cache has blocks of {spec.block_size} tokens and the scheduler of "
            f"{vllm_config.cache_config.block_size}; set --block-size to {spec.block_size}"
        )
    if parallel.pipeline_parallel_size > 1:
        return (
            f"pipeline_parallel_size={parallel.pipeline_parallel_size}: only the last stage reports to the "
            "scheduler, so saves of the others could not be followed; set --pipeline-parallel-size 1"
        )
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            return f"{name}={getattr(parallel, name)}: blocks are spread over devices by token; set it to 1"
    dp_size = getattr(getattr(vllm_config, "sharding_config", None), "total_dp_size", 1)
    if dp_size > 1:
        return (
            f"data parallel attention over {dp_size} devices in one engine: each rank has a scheduler and blocks of "
            "its own behind one KV cache; run one engine a rank, or use tensor parallelism"
        )
    additional = vllm_config.additional_config
    if isinstance(additional, dict) and additional.get("enable_continue_decode"):
        return (
            "additional_config has enable_continue_decode, whose loop hands out the KV caches only after the "
            "connector has run; remove it"
        )
    return None


def count_workers() -> int:
    """Processes that hold a part of the caches: one a host under Ray, else one.

    Raises:
      ConfigError: several hosts under something else than Ray.
    """
    try:
        from tpu_inference import envs
    except ImportError:  # vLLM's scheduler without tpu-inference, as in tests
        return 1
    backend = envs.TPU_MULTIHOST_BACKEND
    if not backend:
        return 1
    if backend != "ray":
        raise ConfigError(f"tpu_offload: TPU_MULTIHOST_BACKEND={backend}; expected ray or nothing")
    import ray
    from vllm.platforms import current_platform

    key = current_platform.ray_device_key
    return sum(1 for node in ray.nodes() if node.get("Alive", True) and key in node.get("Resources", {}))


def check_workers(num_workers: int, *, num_processes: int) -> None:
    """Checks that the scheduler waits for as many workers as there are: else nothing would ever be saved.

    Raises:
      ConfigError: it does not.
    """
    if num_workers != num_processes:
        raise ConfigError(
            f"tpu_offload: the scheduler expects reports of {num_workers} processes (nodes with TPUs in the Ray "
            f"cluster, or 1 without TPU_MULTIHOST_BACKEND=ray) and the model runs in {num_processes}; use a Ray "
            "cluster of just the hosts of this engine"
        )


def check_hbm(usage: Sequence[tuple[int, int]], *, needed: int, block_nbytes: int, utilization: float) -> None:
    """Checks that what copies need is there on every device.

    tpu-inference gives the KV cache all of `--gpu-memory-utilization` and keeps nothing for connectors but its own.

    Args:
      usage: bytes used and bytes in all, of each device of this process, with weights and caches in place.
      needed: bytes that copies take on each device.
      block_nbytes: bytes of one block on each device.
      utilization: `--gpu-memory-utilization`.
    Raises:
      ConfigError: too little is free on some device.
    """
    used, limit = max(usage, key=lambda device: device[0] - device[1])
    free = limit - used
    if needed <= free:
        _logger.info(
            "tpu_offload: copies take up to %.1f MiB of HBM a device; %.1f MiB are free beside weights and KV cache",
            needed / 2**20,
            free / 2**20,
        )
        return
    # A block more: what is left over when the KV cache is cut into whole blocks is less at another size.
    lower = max(0.0, utilization - (needed - free + block_nbytes) / limit)
    staged = needed > 2 * block_nbytes  # what direct copies take, which is beside a staging buffer and its block
    fitting = _rounded_down(max(0, free - 3 * block_nbytes) / _GB)
    smaller = (
        f", or TPU_OFFLOAD_STAGING_BUFFER_GB to at most {fitting}, or the copy paths to direct, which needs two blocks"
        if staged
        else ""
    )
    raise ConfigError(
        f"tpu_offload: copies need {needed / _GB:.4g} GB of HBM on each device and {free / _GB:.4g} GB are free beside "
        f"weights and KV cache; set --gpu-memory-utilization to at most {_rounded_down(lower)} "
        f"(it is {utilization:g}){smaller}"
    )


def _rounded_down(value: float) -> str:
    """Three digits behind the point that are not more than the value."""
    return f"{int(value * 1000) / 1000:g}"
