"""The benchmark of the served connector still runs, and all variants give the same answers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_a_round_on_the_real_server(tmp_path):
    path = tmp_path / "report.json"
    command = [sys.executable, "benchmarks/bench_serve.py", "--quick", "--json", str(path)]
    command += ["--variants", "none", "ours", "--workloads", "warm", "overload"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stderr
    assert "vllm serve: median" in done.stdout
    report = json.loads(path.read_text())
    assert not report["refused"]
    figures = report["figures"]["ours"]
    for workload in ("cold", "warm", "overload"):
        assert figures[workload]["differing"]["max"] == 0
    assert figures["warm"]["cached_tokens"]["min"] > report["figures"]["none"]["warm"]["cached_tokens"]["max"]
