"""These tests need vLLM, and are not collected without it; `scripts/test-vllm` runs them."""

import os

import pytest

from tests.conftest import HAS_VLLM
from tests.kept_programs import KeptPrograms

collect_ignore_glob = [] if HAS_VLLM else ["*.py"]

# Set before vLLM is imported: its scheduler runs in this process, without a device.
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


class KeptVLLM:
    """Caches of vLLM processes that are reused by the next session: compiled programs, and properties of models.

    Attributes:
      settings: environment variables of processes that are not killed while they compile.
    """

    def __init__(self, tmp_path_factory, cache):
        self._make_folder = tmp_path_factory.mktemp
        make_kept = cache.mkdir if cache else tmp_path_factory.mktemp  # no cache with -p no:cacheprovider
        self._kept_programs, self._kept_properties = make_kept("programs"), make_kept("vllm")
        self._programs, self.settings = self._start()

    def settings_of_another(self):
        """Settings for a process that may be killed while it writes to the cache."""
        return self._start()[1]

    def publish(self):
        """Publishes the programs that were compiled since."""
        self._programs.exchange()

    def _start(self):
        folder = self._make_folder("xla")
        programs = KeptPrograms(folder, self._kept_programs)
        programs.exchange()
        return programs, {"VLLM_XLA_CACHE_PATH": str(folder), "VLLM_CACHE_ROOT": str(self._kept_properties)}


@pytest.fixture(scope="module")
def kept_vllm(tmp_path_factory, pytestconfig):
    return KeptVLLM(tmp_path_factory, getattr(pytestconfig, "cache", None))
