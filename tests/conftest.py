"""The whole suite runs on the CPU backend with eight virtual devices, but for `-m tpu`."""

import functools
import gc
import importlib.util
import os
import signal
import sys

import pytest
from hypothesis import HealthCheck, settings

from tests.grids import mark_wide
from tests.kept_programs import KeptPrograms, compiled_once_each
from tpu_offload.native import is_compiled

# The same examples in every run, and no limits by the clock: a busy machine passes, too.
settings.register_profile("tests", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")

_EIGHT_DEVICES = "--xla_force_host_platform_device_count=8"
# Those that take longest, by CPU time.
LONGEST_FIRST = (
    "tests/cli/test_replay.py",
    "tests/engine/test_swap_random.py",
    "tests/multiprocess/test_multiprocess.py",
    "tests/engine/test_hosts.py",
    "tests/simulation/test_campaign.py",
    "tests/simulation/test_mutations.py",
    "tests/engine/test_window.py",
    "tests/engine/test_save_modes.py",
    "tests/core/policies/test_conformance.py",
    "tests/engine/test_cache_loss.py",
    "tests/kernels/test_pages.py",
    "tests/simulation/test_simulation.py",
    "tests/test_benchmarks.py",
    "tests/engine/test_offloading.py",
    "tests/engine/test_hybrid_tier.py",
    "tests/cli/test_preempt.py",
    "tests/core/policies/test_density.py",
    "tests/engine/test_states.py",
    "tests/soak/test_soak.py",
    "tests/storage/test_engine.py",
    "tests/engine/test_engine.py",
    "tests/engine/test_compiles.py",
    "tests/worker/test_page_groups.py",
    "tests/engine/test_hybrid_storage.py",
    "tests/engine/test_hybrid.py",
    "tests/core/test_scheduler_random.py",
    "tests/engine/test_kv_blocks.py",
    "tests/cli/test_bench.py",
    "tests/test_fuzz.py",
    "tests/core/test_index_machine.py",
    "tests/kernels/test_fused.py",
    "tests/engine/test_samples.py",
    "tests/kernels/test_copies.py",
    "tests/sim/test_against_scheduler.py",
    "tests/doctor/test_doctor.py",
    "tests/engine/test_state_hybrid.py",
    "tests/core/test_windows.py",
)
# Of the modules that users get compiled, alone and under vLLM's scheduler: `scripts/test --rest` runs them whole.
OF_COMPILED = (
    "tests/core/",
    "tests/sim/",
    "tests/test_compiled.py",
    "tests/adapters/test_plan.py",
    "tests/adapters/test_scheduler.py",
    "tests/engine/test_kv_blocks.py",  # the last test of these two says what all others of the file together have met
    "tests/engine/test_swap_random.py",
)
HAS_VLLM = all(importlib.util.find_spec(name) for name in ("vllm", "tpu_inference"))


def pytest_report_header():
    if HAS_VLLM:
        return "vLLM connector: its tests run here"
    return "vLLM connector: its tests are NOT run in this environment; scripts/test-vllm runs them"


def pytest_addoption(parser):
    parser.addoption("--record-figures", action="store_true", help="compile all of tests/tpu_compile and record it")


def pytest_configure(config):
    # A shell has its background jobs ignore Ctrl-C, and their children inherit that: tests interrupt commands.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # A container that forbids bytecode would have every process that a test starts compile all it imports: 10 s for
    # vLLM. The environments and the checkout are ours to write into.
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # Before the first test module imports jax, which reads both.
    if config.option.markexpr != "tpu":
        os.environ["JAX_PLATFORMS"] = "cpu"
        flags = os.environ.get("XLA_FLAGS", "")
        if _EIGHT_DEVICES not in flags:  # the processes of pytest-xdist inherit it
            os.environ["XLA_FLAGS"] = f"{flags} {_EIGHT_DEVICES}"


@pytest.hookimpl(tryfirst=True)  # before tests are deselected by their marks
def pytest_collection_modifyitems(config, items):
    """Marks what the quick suite leaves out and what is also run compiled, and orders the files."""
    mark_wide(items)
    skips = is_compiled()
    for item in items:
        if item.location[0].startswith(OF_COMPILED):
            item.add_marker("compiled")
        if skips and item.get_closest_marker("interpreted"):
            item.add_marker(pytest.mark.skip(reason="it changes classes, which cannot be changed compiled"))
    longest_first(config, items)


def longest_first(config, items):
    """With several processes the files that take longest come first: no process is left with one at the end."""
    if hasattr(config, "workerinput"):
        places = {path: place for place, path in enumerate(LONGEST_FIRST)}
        items.sort(key=lambda item: places.get(item.location[0], len(places)))


def pytest_collection_finish():
    """The collector leaves alone what was imported, and comes less often: it took up to a fifth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(scope="session")
def shared_programs(tmp_path_factory, pytestconfig):
    """The folder of what sessions have compiled."""
    cache = getattr(pytestconfig, "cache", None)  # not there with -p no:cacheprovider
    return cache.mkdir("programs") if cache else tmp_path_factory.mktemp("shared-programs")


@pytest.fixture(scope="session", autouse=True)
def kept_programs(shared_programs, tmp_path_factory):
    """What XLA has compiled once it does not compile again: not for another function, process or session.

    Tracing and lowering remain, and so does the event of a compile, which tests count. `pytest --cache-clear` removes
    what earlier sessions have compiled.
    """
    import jax

    own = tmp_path_factory.mktemp("programs")
    programs = KeptPrograms(own, shared_programs)
    # -1: all of them, however small and fast.
    kept = {
        "jax_compilation_cache_dir": str(own),
        "jax_persistent_cache_min_compile_time_secs": -1,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in kept}
    for name, value in kept.items():
        jax.config.update(name, value)
    # Processes that tests start read what this one has compiled. They write nothing: some are killed meanwhile.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(own))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "1e9")
        yield programs
    for name, value in before.items():
        jax.config.update(name, value)
    programs.prune()


@pytest.fixture(scope="session", autouse=True)
def shared_weights():
    """Engines with the same model have the same weights: making them takes longer than most tests' steps."""
    runner = sys.modules.get("tpu_offload.engine.runner")  # if a test imports it
    if runner is None:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "random_weights", functools.lru_cache(maxsize=32)(runner.random_weights))
        yield


@pytest.fixture(scope="module", autouse=True)
def exchanged_programs(kept_programs):
    """Each module finds what other processes have compiled by then."""
    kept_programs.exchange()
    yield
    kept_programs.exchange()


@pytest.fixture(scope="module")
def programs_of_hosts(shared_programs, tmp_path_factory):
    """What processes of several hosts compile, which no test itself compiles, is kept once `exchange` is called."""
    own = tmp_path_factory.mktemp("programs-of-hosts")
    programs = KeptPrograms(own, shared_programs)
    programs.exchange()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(own))
        for name in ("MIN_COMPILE_TIME_SECS", "MIN_ENTRY_SIZE_BYTES"):
            patch.setenv(f"JAX_PERSISTENT_CACHE_{name}", "-1")
        yield programs


@pytest.fixture
def clean_environment(monkeypatch):
    """Without the settings of whoever runs the tests."""
    for name in os.environ:
        if name.startswith("TPU_OFFLOAD_"):
            monkeypatch.delenv(name)


@pytest.fixture
def small_buffers(monkeypatch):
    """Lets what `bench` copies between, and the limit's buffer, be as small as its jobs."""
    monkeypatch.setattr("tpu_offload.measure.bench._WALK_NBYTES", 1)


@pytest.fixture
def compiles():
    """A list with an entry for each program that XLA has compiled since the test began."""
    import jax

    names = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture(scope="module")
def compiled_once():
    """What a module's workers compile is compiled once for each layout."""
    with compiled_once_each():
        yield
