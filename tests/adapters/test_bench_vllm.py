"""The vLLM benchmark still runs: all variants generate the same tokens, and both connectors load."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.vllm


def run(path, *arguments):
    command = [sys.executable, "benchmarks/bench_vllm.py", "--quick", "--ours", "async", "--json", str(path)]
    done = subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(path.read_text())


@pytest.mark.wide
def test_the_scheduler_alone(tmp_path):
    printed, report = run(tmp_path / "report.json", "--part", "scheduler")
    assert "pickling the metadata, median (us CPU)" in printed
    assert {"vllm-tpu", "tpu-inference"} <= report["versions"].keys()
    figures = report["scheduler"]["figures"]
    assert set(figures) == {"none", "peer", "ours-async"}
    for variant in ("peer", "ours-async"):
        assert figures[variant]["arrive"]["cached_tokens"]["median"] > 0


@pytest.mark.slow
def test_whole_engines(tmp_path):
    printed, report = run(tmp_path / "report.json", "--part", "engine")
    assert "all variants generated the same tokens" in printed
    figures = report["engine"]["figures"]
    assert figures["none"]["idle"]["loaded_tokens"]["median"] == 0
    for variant in ("peer", "ours-async"):
        assert figures[variant]["idle"]["loaded_tokens"]["median"] > 0
