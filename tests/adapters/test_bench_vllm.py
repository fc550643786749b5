"""The vLLM benchmark still runs: all variants generate the same tokens, and both connectors load."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.vllm


def test_bench_vllm(tmp_path):
    path = tmp_path / "v.json"
    command = [sys.executable, "benchmarks/bench_vllm.py", "--quick", "--ours", "async", "--json", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    assert "all variants generated the same tokens" in done.stdout
    report = json.loads(path.read_text())
    engine, alone = report["engine"]["figures"], report["scheduler"]["figures"]
    assert set(engine) == set(alone) == {"none", "peer", "ours-async"}
    assert engine["none"]["idle"]["loaded_tokens"]["median"] == 0
    for variant in ("peer", "ours-async"):
        assert engine[variant]["idle"]["loaded_tokens"]["median"] > 0
        assert alone[variant]["arrive"]["cached_tokens"]["median"] > 0
