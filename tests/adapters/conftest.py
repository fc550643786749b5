"""Nothing here is collected where vLLM is not installed; `scripts/test-vllm` runs it."""

import os

from tests.conftest import HAS_VLLM

collect_ignore_glob = [] if HAS_VLLM else ["*.py"]

# Before vLLM is imported: its scheduler in this process, without a device of its own.
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
