"""The settings under vLLM, and which configurations of vLLM are not supported.

Whatever could fail silently is rejected at start, by both sides, with a message that says what to change.
"""

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import (
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    is_full_attention_spec,
    iter_layer_specs,
)

from tpu_offload import ConfigError, CopyPath, OffloadConfig, SaveEvent
from tpu_offload.adapters.vllm.names import MODULE_PATH

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_logger = logging.getLogger(__name__)
_GB = 2**30
_MISSING_HOOKS = {SaveEvent.HBM_EVICTION: "prefix-cache eviction", SaveEvent.PREEMPTION: "preemption"}
_TOKENS_ARE_SPREAD = "blocks are spread over devices by token; set it to 1"
_UNSUPPORTED_PARALLELISM = {
    "decode_context_parallel_size": _TOKENS_ARE_SPREAD,
    "prefill_context_parallel_size": _TOKENS_ARE_SPREAD,
}


def read_config(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> OffloadConfig:
    """Reads `TPU_OFFLOAD_*` and `kv_connector_extra_config`, which takes precedence, and resolves `sync_load`.

    Pipeline stages are processes on one host: each gets an equal part of what is set for the host.

    Raises:
      ConfigError: a setting is invalid, or vLLM's configuration is not supported.
    """
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None, "a connector without a configuration"
    config = OffloadConfig.from_env(overrides=transfer.kv_connector_extra_config)
    problem = next(_problems(vllm_config, kv_cache_config, config), None)
    if problem is not None:
        raise ConfigError(f"tpu_offload: {problem}")
    stages = num_stages(vllm_config)
    if stages > 1:
        part = {"host_memory_fraction": config.host_memory_fraction / stages}
        if config.host_gb is not None:
            part["host_gb"] = config.host_gb / stages
        config = config.model_copy(update=part)
    if config.sync_load is None and (len(kv_cache_config.kv_cache_groups) > 1 or count_ranks(vllm_config) > 1):
        config = config.model_copy(update={"sync_load": False})
    elif config.sync_load is None:
        # The device runs a direct load between two steps in either case, so a waiting request would save nothing. A
        # staged load overlaps with the steps.
        config = config.model_copy(update={"sync_load": config.load_path is CopyPath.DIRECT})
    return config


def warn_if_failed_loads_end_requests(policy: str) -> None:
    """Warns that with vLLM's default policy, a request whose load fails ends with an error."""
    if policy != "recompute":
        _logger.warning(
            'kv_load_failure_policy is "%s": a request whose load fails ends with an error. With '
            '"kv_load_failure_policy": "recompute" in --kv-transfer-config it is recomputed.',
            policy,
        )


def warn_of_boundaries_inside_chunks(config: OffloadConfig, kv_cache_config: "KVCacheConfig") -> None:
    """Warns that states are saved only at the ends of chunks, if these have several blocks."""
    if config.blocks_per_chunk > 1 and state_groups(kv_cache_config):
        _logger.warning(
            "TPU_OFFLOAD_BLOCKS_PER_CHUNK=%d: vLLM keeps the states of this model at block boundaries, and those "
            "inside a chunk are not saved, so most prompts will not be found again; set it to 1",
            config.blocks_per_chunk,
        )


def _problems(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", config: OffloadConfig) -> Iterator[str]:
    """Yields why this configuration is not supported, in one line each with what to change."""
    yield from _problems_of_settings(vllm_config, config)
    if state_groups(kv_cache_config):
        yield from _problems_of_states(vllm_config)
    yield from _problems_of_caches(kv_cache_config, block_size=vllm_config.cache_config.block_size)
    caches = vllm_config.cache_config
    unit = getattr(caches, "prefix_match_unit", None)
    if unit not in (None, caches.block_size):
        yield (
            f"prefix_match_unit={unit} with blocks of {caches.block_size} tokens: the host tier names a block by the "
            "hash of all of its tokens; unset --prefix-match-unit"
        )
    num_groups = len(kv_cache_config.kv_cache_groups)
    if num_groups > 1 and config.sync_load:
        yield (
            f"TPU_OFFLOAD_SYNC_LOAD=1: the model has {num_groups} KV cache groups, and for several vLLM cannot "
            "recompute what failed to load right before a step; unset it"
        )
    yield from _problems_of_parallelism(vllm_config)
    yield from _problems_of_ranks(vllm_config, config)
    yield from _problems_of_hashes(vllm_config)
    if num_stages(vllm_config) > 1:
        yield from _problems_of_stages(vllm_config, num_groups=num_groups, config=config)
    if vllm_config.model_config.runner_type == "pooling":
        # So no load that failed would be known, and the answer would be computed on undefined blocks.
        yield (
            "a pooling model: tpu-inference 0.32 drops what the connector reports with a step that pools; run this "
            "model without the connector"
        )
    additional = vllm_config.additional_config
    if isinstance(additional, dict) and additional.get("enable_continue_decode"):
        yield (
            "additional_config has enable_continue_decode, whose loop returns the KV caches only after the connector "
            "has run; remove it"
        )


def _problems_of_settings(vllm_config: "VllmConfig", config: OffloadConfig) -> Iterator[str]:
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    if transfer.kv_role != "kv_both":
        yield f'kv_role is "{transfer.kv_role}"; set it to "kv_both": the host tier both saves and loads'
    if config.swap_gb != 0:
        yield (
            f"swap_gb={config.swap_gb}: vLLM recomputes preempted requests and cannot swap them; unset "
            "TPU_OFFLOAD_SWAP_GB, and set TPU_OFFLOAD_DECODE_SAVE=1 to have their blocks in the host tier"
        )
    longest = vllm_config.model_config.max_model_len
    chunk_tokens = config.blocks_per_chunk * vllm_config.cache_config.block_size
    if config.blocks_per_chunk > 1 and chunk_tokens > longest:
        yield (
            f"TPU_OFFLOAD_BLOCKS_PER_CHUNK={config.blocks_per_chunk}: a chunk has {chunk_tokens} tokens and a prompt "
            f"at most {longest} (max_model_len), so nothing would be saved; set it to far less, or unset it"
        )
    hooks = [hook for event, hook in _MISSING_HOOKS.items() if event in config.save_on]
    if hooks:
        yield (
            f"TPU_OFFLOAD_SAVE_ON={','.join(event.value for event in config.save_on)}: vLLM has no connector hook "
            f"before {' or '.join(hooks)}; unset it to save blocks when they are computed"
        )


def _problems_of_caches(kv_cache_config: "KVCacheConfig", *, block_size: int) -> Iterator[str]:
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    kinds = ", ".join(dict.fromkeys(type(layer).__name__ for spec in specs for layer in iter_layer_specs(spec)))
    full = [spec for spec in specs if is_full_attention_spec(spec)]
    others = [spec for spec in specs if not is_full_attention_spec(spec)]
    has_states = any(isinstance(spec, MambaSpec) for spec in others)
    if not full:
        yield (
            f"the KV cache is {kinds}, expected layers with full attention: blocks that leave a window or hold a state "
            "cannot be found again by their prefix; run this model without the connector"
        )
    elif not all(isinstance(spec, MambaSpec if has_states else SlidingWindowSpec) for spec in others):
        yield (
            f"the model has KV cache groups of {kinds}, expected full attention and either sliding windows or states; "
            "run this model without the connector"
        )
    elif len(full) > 1:
        yield (
            f"the model has {len(full)} KV cache groups with full attention, expected one: "
            + (
                "run this model without the connector"
                if has_states
                else "set --disable-hybrid-kv-cache-manager, which makes one group of all layers"
            )
        )
    for spec in specs:
        if spec.block_size != block_size:
            yield (
                f"the KV cache has blocks of {spec.block_size} tokens and the scheduler of {block_size}; set "
                f"--block-size to {spec.block_size}"
            )
    if any(isinstance(layer, MLAAttentionSpec) for spec in specs for layer in iter_layer_specs(spec)):
        yield from _problems_of_latent_blocks(block_size)


def _problems_of_latent_blocks(block_size: int) -> Iterator[str]:
    from tpu_inference import envs

    # tpu-inference rounds a page up to whole packs of tokens, and then writes the tokens of several blocks into it.
    packing = envs.MLA_KV_PACKING_SIZE
    if block_size % packing and not envs.MLA_TRANSPOSE_KV_CACHE:
        yield (
            f"latent attention with blocks of {block_size} tokens: tpu-inference packs {packing} tokens "
            "(MLA_KV_PACKING_SIZE), so that such a block does not hold the tokens of its hash; set --block-size to a "
            f"multiple of {packing}"
        )


def _problems_of_states(vllm_config: "VllmConfig") -> Iterator[str]:
    caches = vllm_config.cache_config
    if vllm_config.speculative_config is not None:
        yield (
            "speculative decoding: for models with states, tpu-inference turns prefix caching off with it, and their "
            "states cannot be saved without; remove --speculative-config"
        )
    if not caches.enable_prefix_caching:
        yield (
            "prefix caching is off: vLLM then has no states at block boundaries that could be saved; set "
            "--enable-prefix-caching"
        )
    if caches.mamba_cache_mode != "align":
        yield (
            f"mamba_cache_mode is {caches.mamba_cache_mode!r}, expected 'align', with which vLLM keeps states at block "
            "boundaries; unset --mamba-cache-mode"
        )


def group_order(kv_cache_config: "KVCacheConfig") -> tuple[int, ...]:
    """The KV cache groups of vLLM that the library has, in its order: full attention, windows, then states.

    The library has one group of states: in tpu-inference, all of vLLM's have the same block tables.
    """
    states = state_groups(kv_cache_config)
    specs = {i: group.kv_cache_spec for i, group in enumerate(kv_cache_config.kv_cache_groups) if i not in states}
    return (*sorted(specs, key=lambda i: not is_full_attention_spec(specs[i])), *states[:1])


def state_groups(kv_cache_config: "KVCacheConfig") -> tuple[int, ...]:
    """The KV cache groups of vLLM whose layers have states."""
    groups = kv_cache_config.kv_cache_groups
    return tuple(i for i, group in enumerate(groups) if isinstance(group.kv_cache_spec, MambaSpec))


def windows(kv_cache_config: "KVCacheConfig") -> tuple[int, ...]:
    """Per group of attention, in the library's order, its sliding window in tokens; 0 with full attention."""
    groups, states = kv_cache_config.kv_cache_groups, state_groups(kv_cache_config)
    specs = [groups[i].kv_cache_spec for i in group_order(kv_cache_config) if i not in states]
    return tuple(spec.sliding_window if isinstance(spec, SlidingWindowSpec) else 0 for spec in specs)


def _problems_of_parallelism(vllm_config: "VllmConfig") -> Iterator[str]:
    for name, reason in _UNSUPPORTED_PARALLELISM.items():
        size = getattr(vllm_config.parallel_config, name, 1)
        if size > 1:
            yield f"{name}={size}: {reason}"


def _problems_of_ranks(vllm_config: "VllmConfig", config: OffloadConfig) -> Iterator[str]:
    num_ranks = count_ranks(vllm_config)
    if num_ranks == 1:
        return
    what = f"{num_ranks} data-parallel ranks in one engine"
    if config.sync_load:
        yield (
            f"TPU_OFFLOAD_SYNC_LOAD=1 with {what}: their scheduler does not pass on that a step needs a load, which "
            "would come after it; unset it"
        )


def _problems_of_hashes(vllm_config: "VllmConfig") -> Iterator[str]:
    num_ranks = count_ranks(vllm_config)
    # Without prefix caching vLLM hashes blocks only if its scheduler has a connector. That of ranks has none: each rank
    # has one, in a process of its own, where requests arrive with or without hashes.
    if num_ranks > 1 and not vllm_config.cache_config.enable_prefix_caching:
        yield (
            f"prefix caching is off with {num_ranks} data-parallel ranks in one engine: vLLM then hashes no blocks for "
            "them, so nothing could be saved or found; set --enable-prefix-caching"
        )


def count_ranks(vllm_config: "VllmConfig") -> int:
    """The data-parallel ranks in this engine: each has a scheduler with block ids of its own, all have one worker."""
    return int(getattr(getattr(vllm_config, "sharding_config", None), "total_dp_size", 1))


def check_ranks(vllm_config: "VllmConfig", num_ranks: int) -> None:
    """Raises a ConfigError if the KV caches are not split over the engine's data-parallel ranks."""
    expected = count_ranks(vllm_config)
    if num_ranks != expected:
        raise ConfigError(
            f"tpu_offload: the engine has {expected} data-parallel ranks, and its KV caches are split over "
            f"{num_ranks}: set NEW_MODEL_DESIGN=1"
        )


def _problems_of_stages(vllm_config: "VllmConfig", *, num_groups: int, config: OffloadConfig) -> Iterator[str]:
    given = f"pipeline_parallel_size={num_stages(vllm_config)}"
    change = "set --pipeline-parallel-size 1"
    backend = multihost_backend()
    if backend:
        yield f"{given} with TPU_MULTIHOST_BACKEND={backend}: {_problem_of_distant_stages()}; {change}"
    if num_groups > 1:
        yield (
            f"{given} and {num_groups} KV cache groups: stages with sliding windows or states are not supported; "
            f"{change}, or set --disable-hybrid-kv-cache-manager for a model with sliding windows"
        )
    if not config.patch_runner:
        yield (
            f"{given} with TPU_OFFLOAD_PATCH_RUNNER=0: tpu-inference 0.32 drops the connector's output of all stages "
            "but the last; unset it"
        )
    if vllm_config.scheduler_config.async_scheduling:
        yield (
            f"{given} with async scheduling: tpu-inference 0.32 does not give the sampled tokens to the first stage; "
            "set --no-async-scheduling"
        )
    if vllm_config.speculative_config is not None:
        yield (
            f"{given} with speculative decoding: vLLM asks all stages for drafts, and those of tpu-inference 0.32 but "
            "the last raise, so a step times out and ends the engine; remove --speculative-config"
        )


def _problem_of_distant_stages() -> str:
    """Why stages on several hosts cannot work, by the executor that vLLM has for them."""
    from vllm import envs

    if envs.VLLM_USE_RAY_V2_EXECUTOR_BACKEND:
        return (
            "tpu-inference 0.32 does not tell a stage on which host the one before it is, so it waits for activations "
            "forever, with or without a connector"
        )
    return (
        "with VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0 only the output of the last stage reaches the engine, so what the "
        "others have saved or loaded is never reported"
    )


def num_stages(vllm_config: "VllmConfig") -> int:
    """The number of pipeline stages; 1 without pipeline parallelism."""
    stages: int = vllm_config.parallel_config.pipeline_parallel_size
    return stages


def multihost_backend() -> str:
    """What joins the hosts of this engine; empty on one host."""
    try:
        from tpu_inference import envs
    except ImportError:  # vLLM's scheduler without tpu-inference, as in tests
        return ""
    return str(envs.TPU_MULTIHOST_BACKEND or "")


def count_workers(vllm_config: "VllmConfig") -> int:
    """For a scheduler, the processes that hold a part of the caches: one per host, or one per pipeline stage.

    Raises:
      ConfigError: as `count_hosts`; or the scheduler is that of a rank in an engine whose processes were not counted.
    """
    if count_ranks(vllm_config) == 1 or not has_several_workers(vllm_config):
        return count_hosts() * num_stages(vllm_config)
    if _num_workers_of_ranks is None:
        raise ConfigError(
            "tpu_offload: data-parallel ranks with several hosts or pipeline stages need vLLM's plugin tpu_offload, "
            "which has not counted the processes: install the package with pip in the environment of the engine, name "
            f"it in VLLM_PLUGINS if that is set, and use the connector by itself with "
            f"kv_connector_module_path={MODULE_PATH}"
        )
    return _num_workers_of_ranks


def has_several_workers(vllm_config: "VllmConfig") -> bool:
    """Whether an engine's model may run in more than one process."""
    return multihost_backend() != "" or num_stages(vllm_config) > 1


_num_workers_of_ranks: int | None = None  # inherited by the schedulers of ranks, which are forked and must not ask Ray


def count_workers_of_ranks(vllm_config: "VllmConfig") -> int:
    """As `count_workers`; for the schedulers of ranks, too, which are forked afterwards (see `rank_reports`)."""
    global _num_workers_of_ranks
    _num_workers_of_ranks = count_hosts() * num_stages(vllm_config)
    return _num_workers_of_ranks


def holder_id(vllm_config: "VllmConfig", worker_id: int) -> int:
    """Numbers a worker among those of all engines of one `--data-parallel-size`, which have the same settings."""
    engine: int = vllm_config.parallel_config.data_parallel_index
    return engine * count_hosts() * num_stages(vllm_config) + worker_id


def count_hosts() -> int:
    """The hosts of this engine: with Ray, the nodes of its cluster that have TPUs.

    Raises:
      ConfigError: a multi-host backend other than Ray.
    """
    backend = multihost_backend()
    if not backend:
        return 1
    if backend != "ray":
        raise ConfigError(f"tpu_offload: TPU_MULTIHOST_BACKEND={backend}; expected ray or unset")
    import ray
    from vllm.platforms import current_platform

    key = current_platform.ray_device_key
    return sum(1 for node in ray.nodes() if node.get("Alive", True) and key in node.get("Resources", {}))


def check_workers(num_workers: int, *, num_processes: int) -> None:
    """Checks that the scheduler expects the right number of workers; otherwise nothing would ever be saved.

    Raises:
      ConfigError: it expects another number.
    """
    if num_workers != num_processes:
        raise ConfigError(
            f"tpu_offload: the scheduler expects reports of {num_workers} processes (nodes with TPUs in the Ray "
            f"cluster, or 1 without TPU_MULTIHOST_BACKEND=ray) and the model runs in {num_processes}; use a Ray "
            "cluster of just the hosts of this engine"
        )
