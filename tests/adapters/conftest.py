"""Nothing here is collected where vLLM is not installed; `scripts/test-vllm` runs it."""

import os

import pytest

from tests.conftest import HAS_VLLM
from tests.kept_programs import KeptPrograms

collect_ignore_glob = [] if HAS_VLLM else ["*.py"]

# Before vLLM is imported: its scheduler in this process, without a device of its own.
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


class KeptVLLM:
    """What processes of vLLM keep for those of the next session: compiled programs, and what models can do.

    Attributes:
      settings: environment variables of processes that end when nothing is compiled.
    """

    def __init__(self, tmp_path_factory, cache):
        self._make_folder, self._cache = tmp_path_factory.mktemp, cache
        self._programs, self.settings = self._start()

    def settings_of_another(self):
        """For a process that may be killed in the middle of writing."""
        return self._start()[1]

    def publish(self):
        """Hands on what was compiled since."""
        self._programs.exchange()

    def _start(self):
        folder = self._make_folder("xla")
        programs = KeptPrograms(folder, self._cache.mkdir("programs"))
        programs.exchange()
        return programs, {"VLLM_XLA_CACHE_PATH": str(folder), "VLLM_CACHE_ROOT": str(self._cache.mkdir("vllm"))}


@pytest.fixture(scope="module")
def kept_vllm(tmp_path_factory, pytestconfig):
    return KeptVLLM(tmp_path_factory, pytestconfig.cache)
