"""Environment variables of a process that runs vLLM's scheduler without a device; set before vLLM is imported."""

import os


def set_environment() -> None:
    """Sets those that are not set."""
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
