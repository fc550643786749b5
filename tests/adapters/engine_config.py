"""vLLM's configuration of the engine that the scheduler tests build."""

import atexit
import functools
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.v1.core.kv_cache_planning import get_kv_cache_groups
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from tests.adapters.hashed_model import BLOCK_SIZE, HEAD_SIZES, NUM_LAYERS, NUM_STATES, STATE_SHAPES

EOS = 2


@functools.cache
def model_dir() -> str:
    folder = tempfile.TemporaryDirectory(prefix="tpu_offload-tiny-")
    atexit.register(folder.cleanup)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 512,
        "num_hidden_layers": NUM_LAYERS, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128,
        "vocab_size": 1024, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "torch_dtype": "float32",
        "bos_token_id": 1, "eos_token_id": EOS, "hidden_act": "silu", "tie_word_embeddings": False,
    }  # fmt: skip
    Path(folder.name, "config.json").write_text(json.dumps(config))
    return folder.name


@functools.cache
def model_config() -> ModelConfig:
    return ModelConfig(model=model_dir(), skip_tokenizer_init=True, dtype="float32", seed=0)


def make_config(
    *,
    num_blocks: int,
    async_scheduling: bool = False,
    prefix_caching: bool = True,
    num_spec_tokens: int = 0,
    max_num_batched_tokens: int = 48,
    max_num_seqs: int = 6,
    policy: str = "recompute",
    events: bool = False,
    num_rows: int = 0,
    num_stages: int = 1,
    **settings,
) -> VllmConfig:
    cache = CacheConfig(block_size=BLOCK_SIZE, gpu_memory_utilization=0.9, enable_prefix_caching=prefix_caching)
    config = VllmConfig(
        model_config=model_config(),
        scheduler_config=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=512,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=async_scheduling,
        ),
        cache_config=cache,
        device_config=DeviceConfig("cpu"),
        speculative_config=SpeculativeConfig(
            method="ngram", num_speculative_tokens=num_spec_tokens, prompt_lookup_max=3, prompt_lookup_min=1
        )
        if num_spec_tokens
        else None,
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null") if events else None,
        kv_transfer_config=KVTransferConfig(
            kv_connector="TPUOffloadConnector",
            kv_role="kv_both",
            kv_connector_module_path="tpu_offload.adapters.vllm",
            kv_load_failure_policy=policy,
            kv_connector_extra_config=settings,
        ),
    )
    config.scheduler_config.async_scheduling = async_scheduling  # vLLM turns it off on CPUs
    config.parallel_config.pipeline_parallel_size = num_stages  # vLLM refuses it on CPUs
    config.cache_config.kv_cache_layout = "LBNHC"  # what the engine resolves before it makes connectors
    config.cache_config.num_gpu_blocks = num_blocks
    if num_rows:
        config.cache_config.mamba_cache_mode = "align"
    return config


@functools.cache
def _any_config() -> VllmConfig:
    return make_config(num_blocks=1)


def kv_cache_config(
    num_blocks: int,
    *,
    windows: Sequence[int] = (0,),
    mixed_heads: bool = False,
    num_rows: int = 0,
    retention_interval: int | None = None,
) -> KVCacheConfig:
    """The KV cache groups that vLLM makes of the layers of a model.

    Args:
      num_blocks: of all groups of attention together, which share their arrays.
      windows: of consecutive layers, which repeat: 0 for full attention, else the sliding window in tokens.
      mixed_heads: layers differ in their head size.
      num_rows: for states; if there are any, two groups of these come before full attention.
      retention_interval: see `Stack`.
    """
    pattern = tuple(windows) * NUM_LAYERS
    layers: dict[str, KVCacheSpec] = {}
    for i, window in enumerate(pattern):
        head_size = HEAD_SIZES[i % len(HEAD_SIZES) if mixed_heads else 0]
        spec = functools.partial(SlidingWindowSpec, sliding_window=window) if window else FullAttentionSpec
        layers[f"layer{i}"] = spec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=head_size, dtype=torch.float32)
    groups = get_kv_cache_groups(_any_config(), layers)
    result = KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=groups,
        prefix_cache_retention_interval=retention_interval,
    )
    if num_rows:
        of_states = MambaSpec(
            block_size=BLOCK_SIZE, shapes=STATE_SHAPES, dtypes=(torch.int8, torch.int8), mamba_cache_mode="align"
        )
        groups[:0] = [KVCacheGroupSpec([f"state{i}"], of_states) for i in range(NUM_STATES)]
        result.mamba_num_blocks = num_rows
    return result
