"""What `tpu-offload plan` computes, beside what vLLM has: blocks, tokens and states of real engines on the CPU."""

import math

import pytest

from scripts.vllm_cpu.cpu_shim import HBM_NBYTES
from tests.adapters.llm_runs import MODELS
from tests.grids import few
from tpu_offload.plan import (
    AttentionLayers,
    Serving,
    default_block_size,
    find_model,
    page_nbytes,
    plan_caches,
    read_config,
)

pytestmark = pytest.mark.vllm

# As many blocks as fit into a tenth of the device's memory; weights are not counted there.
ENGINE = {"num_gpu_blocks_override": 0, "gpu_memory_utilization": 0.1}
FLAGS = {"max_tokens": 256, "max_requests": 4, "step_tokens": 64, "block_size": 16, "kv_nbytes": 2}


def planned(model, *, devices=1, **flags):
    serving = Serving(**{"num_devices": 1, "num_ranks": 1, "num_batches": 1} | FLAGS | flags)
    return plan_caches(
        read_config(MODELS[model], name=model), serving, available_nbytes=int(HBM_NBYTES * devices * 0.1)
    )


def layout(process, model, **engine):
    outcome = process.run({"model": model, "engine": ENGINE | engine, "steps": [{"do": "kv_layout"}]})
    assert outcome["error"] is None
    return outcome["steps"][0] | {"num_rows": outcome["end"]["num_rows"] or 0}


@pytest.mark.parametrize("model", few(["qwen3", "gemma3", "gemma4", "qwen3.5"], "qwen3", "qwen3.5"))
def test_blocks_are_those_of_vllm(process, model):
    real, plan = layout(process, model), planned(model)
    assert (real["num_blocks"], real["num_rows"]) == (plan.num_blocks, plan.num_states)
    assert real["num_tokens"] == plan.num_tokens
    kinds = [group["window"] or 0 for group in real["groups"] if group["spec"] != "MambaSpec"]
    assert sorted(kinds) == sorted(group.window for group in plan.groups for _ in range(group.num_groups))


@pytest.mark.parametrize(
    ("model", "num_devices", "num_ranks"),
    few([("qwen3, 4 heads", 4, 2), ("gemma3", 2, 2), ("qwen3.5", 2, 2), ("deepseek", 4, 4)], ("deepseek", 4, 4)),
)
def test_ranks_share_the_blocks(ranked, model, num_devices, num_ranks):
    strategy = {"enable_dp_attention": True, "attn_dp_size": num_ranks}
    sizes = {"block_size": 128, "max_model_len": 512} if model == "deepseek" else {}
    engine = {
        "tensor_parallel_size": num_devices,
        "additional_config": {"sharding": {"sharding_strategy": strategy}},
    }
    outcome = ranked.run({"model": model, "engine": ENGINE | sizes | engine, "steps": []})
    assert outcome["error"] is None
    flags = {"block_size": 128, "max_tokens": 512} if sizes else {}
    plan = planned(model, devices=num_devices, num_devices=num_devices, num_ranks=num_ranks, **flags)
    blocks = [rank["num_blocks"] for rank in outcome["end"]["ranks"]]
    assert blocks == num_ranks * [plan.num_blocks // num_ranks]


def test_a_single_head_of_8_bits_is_padded(ranked):
    real = layout(ranked, "qwen3", tensor_parallel_size=2, kv_cache_dtype="fp8")
    plan = planned("qwen3", devices=2, num_devices=2, kv_nbytes=1)
    assert (real["num_blocks"], real["num_tokens"]) == (plan.num_blocks, plan.num_tokens)
    assert plan.block_nbytes == planned("qwen3").block_nbytes


def test_more_devices_than_heads_store_kv_twice(ranked):
    real = layout(ranked, "qwen3, 4 heads", tensor_parallel_size=4)
    plan = planned("qwen3, 4 heads", devices=4, num_devices=4)
    assert (real["num_blocks"], real["num_tokens"]) == (plan.num_blocks, plan.num_tokens)
    assert plan.block_nbytes == 2 * planned("qwen3, 4 heads").block_nbytes


def test_windows_hold_more_with_async_scheduling_and_long_contexts(process):
    """A request of 1,024 tokens holds only the windows of its last tokens and of two steps."""
    real = layout(process, "gemma3", async_scheduling=True, max_model_len=1024)
    plan = planned("gemma3", num_batches=2, max_tokens=1024)
    assert (real["num_blocks"], real["num_tokens"]) == (plan.num_blocks, plan.num_tokens)


def test_kv_in_8_bits(process):
    real, plan = layout(process, "qwen3", kv_cache_dtype="fp8"), planned("qwen3", kv_nbytes=1)
    assert (real["num_blocks"], real["num_tokens"]) == (plan.num_blocks, plan.num_tokens)


@pytest.mark.parametrize("max_tokens", [200, 1024, 4096, 8192, 40_960, 131_072, 262_144])
@pytest.mark.parametrize("max_requests", [64, 256, 1000])
def test_the_block_size_is_that_of_tpu_inference(max_tokens, max_requests):
    from types import SimpleNamespace

    from tpu_inference.layers.vllm.backends.flash_attn import PallasAttentionBackend
    from tpu_inference.layers.vllm.backends.flash_attn_mla import PallasMLAttentionBackend

    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=max_tokens),
        scheduler_config=SimpleNamespace(max_num_seqs=max_requests),
    )
    expected = max(PallasAttentionBackend.get_page_size(config), PallasAttentionBackend.get_min_page_size(config))
    flags = {"max_tokens": max_tokens, "max_requests": max_requests}
    assert default_block_size(find_model("llama-3.1-8b"), **flags) == expected
    latent = default_block_size(find_model("deepseek-v3"), **flags)
    assert latent == PallasMLAttentionBackend.get_page_size(config)


@pytest.mark.parametrize("kv_nbytes", [1, 2])
@pytest.mark.parametrize("num_devices", [1, 2, 8, 16])
@pytest.mark.parametrize(("num_heads", "head_dim"), [(8, 64), (8, 128), (2, 256), (16, 128), (1, 80)])
def test_pages_are_those_of_the_kernels(num_heads, head_dim, num_devices, kv_nbytes):
    """As `get_kv_cache_shape_with_mesh` calls them: for the heads of one device, padded to one at least."""
    import jax.numpy as jnp
    from tpu_inference.layers.common.attention_backend import RPAAttentionBackend
    from tpu_inference.utils import get_padded_head_dim, get_padded_num_heads

    dtype = jnp.bfloat16 if kv_nbytes == 2 else jnp.float8_e4m3fn
    heads = get_padded_num_heads(num_heads, num_devices) // num_devices
    shape = RPAAttentionBackend().get_kv_cache_shape(1, 16, heads, get_padded_head_dim(head_dim), dtype)
    layers = AttentionLayers(
        count=1, num_heads=num_heads, qk_width=head_dim, v_width=head_dim, num_kv_heads=num_heads, head_dim=head_dim
    )
    serving = Serving(**{**FLAGS, "num_devices": num_devices, "num_ranks": 1, "kv_nbytes": kv_nbytes})
    assert page_nbytes(layers, serving) == math.prod(shape) * kv_nbytes * num_devices
