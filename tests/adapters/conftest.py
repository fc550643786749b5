"""The tests of the vLLM connector: collected where vLLM is installed, and nowhere else."""

from tests.conftest import HAS_VLLM

collect_ignore_glob = [] if HAS_VLLM else ["*.py"]
