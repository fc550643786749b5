"""What the processes of bench_vllm.py share: which connectors there are, and the talk between parent and child."""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

SHIM = Path(__file__).parents[1] / "scripts" / "vllm_cpu"
OURS = {
    "async": {"TPU_OFFLOAD_SYNC_LOAD": "0"},
    "sync": {"TPU_OFFLOAD_SYNC_LOAD": "1"},
    "staged": {"TPU_OFFLOAD_SAVE_PATH": "staged", "TPU_OFFLOAD_LOAD_PATH": "staged"},
}
MODULES = {"peer": "tpu_inference.offload.tpu_offload_connector", "ours": "tpu_offload.adapters.vllm"}
EOS = 2


def module_of(variant):
    """The connector's module, for `none`, `peer` or `ours-...`; None without a connector."""
    return MODULES.get(variant.partition("-")[0])


def environment_of(variant, args):
    """The child's environment: the same sizes for both connectors, and each side's own settings."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TPU_OFFLOAD_")}
    environ |= {
        "JAX_PLATFORMS": "cpu",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_OFFLOAD_NUM_CPU_CHUNKS": str(args.host_blocks),
        "TPU_OFFLOAD_NUM_STAGING_BLOCKS": str(args.staging_blocks),
        "TPU_OFFLOAD_SKIP_JAX_PRECOMPILE": "0",
    }
    paths = [str(SHIM / "stubs"), str(SHIM), str(SHIM.parents[1]), environ.get("PYTHONPATH", "")]
    environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    environ.pop("VLLM_TARGET_DEVICE", None)  # it would take tpu-inference's platform away
    return environ | OURS.get(variant.partition("-")[2], {})


def model_dir(args):
    """A folder with a model's configuration and no weights."""
    path = tempfile.mkdtemp(prefix="tiny-qwen3-")
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": args.hidden,
        "intermediate_size": 2 * args.hidden, "num_hidden_layers": args.layers, "num_attention_heads": args.heads,
        "num_key_value_heads": args.kv_heads, "head_dim": 128, "vocab_size": 1024, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "max_position_embeddings": 1 << 15, "torch_dtype": args.dtype, "bos_token_id": 1,
        "eos_token_id": EOS, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
        "tie_word_embeddings": False, "use_sliding_window": False, "max_window_layers": args.layers,
    }  # fmt: skip
    (Path(path) / "config.json").write_text(json.dumps(config))
    return path


def transfer_config(variant):
    """vLLM's `kv_transfer_config`; None without a connector."""
    from vllm.config import KVTransferConfig

    module = module_of(variant)
    if module is None:
        return None
    return KVTransferConfig(
        kv_connector="TPUOffloadConnector",
        kv_role="kv_both",
        kv_connector_module_path=module,
        kv_load_failure_policy="recompute",
    )


class StepTimer:
    """CPU seconds of this thread inside `schedule` and `update_from_output` of a scheduler, a step.

    Neither waits for anything; by the wall clock, other processes of a shared machine would be in it.
    """

    def __init__(self, scheduler):
        self.reset()
        for name, spent in (("schedule", "scheduled"), ("update_from_output", "updated")):
            setattr(scheduler, name, self._timed(getattr(scheduler, name), spent))

    def reset(self):
        self.scheduled, self.updated = [], []

    def steps(self):
        """Seconds of each step that is over."""
        return [a + b for a, b in zip(self.scheduled, self.updated, strict=False)]

    def _timed(self, call, spent):
        clock = time.thread_time

        def timed(*args, **kwargs):
            started_s = clock()
            try:
                return call(*args, **kwargs)
            finally:
                getattr(self, spent).append(clock() - started_s)

        return timed


def serve_parent(handle):
    """A child's main loop: one JSON line in, one out. What libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    answer = handle.start()
    while True:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        line = sys.stdin.readline()
        if not line:
            os._exit(0)  # tpu-inference's clean-up at exit raises on JAX models
        answer = handle.measure(**json.loads(line))
