"""Lets pipeline stages start whose model tpu-inference 0.32 runs with PyTorch: gpt-oss, Gemma-3, Qwen3-MoE and others.

For such a model it replaces vLLM's group of stages by one of its own, without `broadcast_object`. vLLM calls that in
each stage, before it makes any connector, to give all the same `engine_id`; and the engine ends. (For a model written
in JAX vLLM keeps its group, which has one member in each stage, so nothing is exchanged there, either.) On one host all
stages are processes of one parent and have its configuration: their ids are equal without.

docs/upstream has the change to tpu-inference that makes this unnecessary. With it, this changes nothing.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from tpu_offload.adapters.vllm.names import has_this_connector
from tpu_offload.adapters.vllm.patching import wrap_once

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def let_stages_start() -> None:
    """Has vLLM skip the exchange of `engine_id` where it would fail, with this connector; idempotent.

    Called in every process of vLLM, before it makes connectors.
    """
    from vllm.distributed.kv_transfer import kv_transfer_state

    wrap_once(kv_transfer_state, "_sync_engine_id_across_tp", _sync_engine_id)


def _sync_engine_id(original: Callable[["VllmConfig"], None], vllm_config: "VllmConfig") -> None:
    if has_this_connector(vllm_config) and vllm_config.parallel_config.pipeline_parallel_size > 1:
        from vllm.distributed.parallel_state import get_pp_group

        if not hasattr(get_pp_group(), "broadcast_object"):
            return
    original(vllm_config)
