"""Sends runs to a process of `llm_runs`; the settings and prompts of the runs."""

import json
import os
import selectors
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_START_LIMIT_S = 300  # imports, and vLLM's inspection of the model
_RUN_LIMIT_S = 120


class Process:
    """A process of `module` that executes runs. Started on first use, and again after it has hung or died."""

    def __init__(self, home: Path, settings: dict[str, str], *, module: str = "llm_runs") -> None:
        self._home, self._settings, self._module = home, settings, module
        self.has_hung = False  # or died, perhaps while writing
        self._child: subprocess.Popen[str] | None = None
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115

    def run(self, spec: dict) -> dict:
        limit_s = _RUN_LIMIT_S
        if self._child is None:
            self._start()
            limit_s += _START_LIMIT_S
        self._log.seek(0)
        self._log.truncate()
        self._child.stdin.write(json.dumps(spec) + "\n")
        self._child.stdin.flush()
        with selectors.DefaultSelector() as selector:
            assert self._child.stdout is not None
            selector.register(self._child.stdout, selectors.EVENT_READ)
            line = self._child.stdout.readline() if selector.select(limit_s) else ""
        if not line:
            self.has_hung = True
            self.close()
            self._log.seek(0)
            pytest.fail(f"the process hung or died; the end of its log:\n{self._log.read()[-8000:]}")
        outcome = json.loads(line)
        if outcome["error"]:
            self._log.seek(0)
            log = self._log.read()[-8000:]
            if outcome["error"].startswith("in a step: "):
                pytest.fail(f"{outcome['error']}\n{log}")
            print(log)  # pytest shows it if the test did not expect the error
        return outcome

    def close(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            self._child.stdin.close()
            self._child.stdout.close()
            self._child = None

    def _start(self) -> None:
        scripts = ROOT / "scripts" / "vllm_cpu"
        settings = {
            "HOME": str(self._home),
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT, scripts / "stubs", scripts))),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "TPU_SKIP_MDS_QUERY": "1",
            # Else a step that ends ten seconds after the last log writes the statistics that `log_stats` asks for.
            "VLLM_LOG_STATS_INTERVAL": "1e9",
            # One program of the model for all steps, not one for each power of two from 16 tokens on; `test_serve` has
            # those.
            "MIN_TOKEN_BUCKET": "64",
            # Every engine compiles the same programs: cache all of them, even small ones.
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "-1",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        ours = ("TPU_OFFLOAD_", "VLLM_TARGET_DEVICE", "VLLM_LOGGING_LEVEL")  # the latter two are for this process
        environ = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        self._child = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", f"tests.adapters.{self._module}"],
            cwd=ROOT,
            env=environ | settings | self._settings,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )


def ours(*, policy="recompute", role="kv_both", **settings):
    """Settings of our connector; most tests skip the precompilation."""
    extra = {"num_cpu_chunks": 256, "skip_jax_precompile": True} | settings
    if "storage_tier" in settings:  # else the machine's speed decides what is loaded; `test_prefill_times` has that
        extra.setdefault("load_mode", "load")
    return {"kv_load_failure_policy": policy, "kv_role": role, "kv_connector_extra_config": extra}


def tokens(name, count):
    """Pseudo-random tokens that depend on the name only."""
    seed, out = zlib.crc32(name.encode()), []
    for _ in range(count):
        seed = (seed * 1103515245 + 12345) % 2**31
        out.append(3 + (seed >> 8) % 1000)
    return out


def conversations(**sampling):
    """Eight conversations of two kinds in three turns, each turn in another order: twice the size of HBM."""
    turns = [
        {i: tokens(f"kind {i % 2}", 32) + tokens(f"user {i}", 28 + 7 * i % 35) for i in range(8)},
        {i: tokens(f"second {i}", 20 + i) for i in (3, 0, 5, 1, 7, 2, 6, 4)},
        {i: tokens(f"third {i}", 3) for i in range(8)},
    ]
    return [{"do": "chat", "said": {str(i): said for i, said in turn.items()}, **sampling} for turn in turns]
