"""These tests need vLLM, and are not collected without it; `scripts/test-vllm` runs them."""

import json

import pytest

from tests.adapters.cpu_environment import set_environment
from tests.adapters.llm_client import Process
from tests.conftest import HAS_VLLM
from tests.kept_programs import KeptPrograms

collect_ignore_glob = [] if HAS_VLLM else ["*.py"]

set_environment()


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


@pytest.fixture(scope="session")
def kept_vllm(tmp_path_factory, pytestconfig):
    return KeptVLLM(tmp_path_factory, getattr(pytestconfig, "cache", None))


@pytest.fixture(scope="session")
def process(tmp_path_factory, kept_vllm):
    """The process of `llm_runs`. Its start takes longer than most runs, so the modules share it."""
    child = Process(tmp_path_factory.mktemp("vllm-home"), kept_vllm.settings)
    yield child
    if not child.has_hung:
        kept_vllm.publish()
    child.close()


@pytest.fixture(scope="session")
def ranked(tmp_path_factory, kept_vllm):
    """The same with four devices, for data-parallel ranks."""
    settings = {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "NEW_MODEL_DESIGN": "1",
        "DP_SCHED_BATCH_PREFILL": "0",  # it looks at the clock
    }
    child = Process(tmp_path_factory.mktemp("vllm-home"), kept_vllm.settings | settings)
    yield child
    if not child.has_hung:
        kept_vllm.publish()
    child.close()


@pytest.fixture(scope="session")
def plain(process):
    """Outcomes of an engine without a connector for the same steps; each is run once."""
    known = {}

    def get(steps, engine, model="qwen3"):
        key = json.dumps([steps, engine, model])
        if key not in known:
            known[key] = process.run({"model": model, "engine": engine, "steps": steps})
            assert known[key]["error"] is None
        return known[key]

    return get
