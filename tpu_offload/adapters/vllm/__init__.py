"""The connector for vLLM on TPU (tpu-inference)."""

from tpu_offload.adapters.vllm.connector import TPUOffloadConnector

__all__ = ["TPUOffloadConnector"]
