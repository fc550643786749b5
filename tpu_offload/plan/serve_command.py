"""The `vllm serve` command of a plan."""

import json
import shlex
from typing import Any

from tpu_offload.plan.planner import Plan


def serve_command(plan: Plan, *, decode_save: bool = False) -> str:
    """The command that serves the model as planned, for a shell.

    Args:
      plan: the plan, of a model that fits.
      decode_save: whether generated tokens are saved, too: for conversations.
    """
    serving = plan.serving
    arguments: list[str] = ["vllm", "serve", plan.model.repo]
    arguments += ["--tensor-parallel-size", str(serving.num_devices)]
    arguments += ["--max-model-len", str(serving.max_tokens), "--block-size", str(serving.block_size)]
    arguments += ["--max-num-seqs", str(serving.max_requests), "--max-num-batched-tokens", str(serving.step_tokens)]
    arguments += ["--gpu-memory-utilization", f"{plan.hbm_share:g}"]
    if serving.kv_nbytes == 1:
        arguments += ["--kv-cache-dtype", "fp8"]
    if serving.num_ranks > 1:
        strategy: dict[str, Any] = {"enable_dp_attention": True, "attn_dp_size": serving.num_ranks}
        arguments += ["--additional-config", json.dumps({"sharding": {"sharding_strategy": strategy}})]
    if serving.one_group:
        arguments.append("--disable-hybrid-kv-cache-manager")
    if plan.num_hosts > 1:
        arguments += ["--distributed-executor-backend", "ray"]
    extra: dict[str, Any] = {"host_gb": plan.host_gb}
    if decode_save:
        extra["decode_save"] = True
    connector = {
        "kv_connector": "TPUOffloadConnector",
        "kv_connector_module_path": "tpu_offload.adapters.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }
    return shlex.join([*arguments, "--kv-transfer-config", json.dumps(connector)])
