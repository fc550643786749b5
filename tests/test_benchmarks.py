"""Benchmarks still run: their sweeps, their files and their lines about the targets."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_transfer(tmp_path):
    path = tmp_path / "t.json"
    command = [sys.executable, "benchmarks/bench_transfer.py", "--json", str(path), "--seconds", "1", "--rounds", "1"]
    sweep = ["--num-blocks", "1", "2", "4", "--block-kib", "1024", "--num-layers", "2", "4"]
    sweep += ["--dtype", "bfloat16", "int8", "--devices", "1", "2"]
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environment |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, *sweep], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "direct saves, one block of 1 MiB, ratio to the limit: min" in done.stdout
    report = json.loads(path.read_text())
    assert report["device"]["count"] == 2
    assert len(report["targets"]) == 6
    found = {(r["path"], r["num_layers"], r["dtype"], r["num_devices"], r["num_blocks"]) for r in report["results"]}
    base = {(path, 2, "bfloat16", 1, n) for path in ("direct", "staged") for n in (1, 2, 4)}
    varied = [(4, "bfloat16", 1), (2, "int8", 1), (2, "bfloat16", 2)]
    assert found == base | {("direct", *shape, n) for shape in varied for n in (1, 4)}


def test_save_modes(tmp_path):
    path = tmp_path / "s.json"
    command = [
        sys.executable,
        "benchmarks/bench_save_modes.py",
        "--json",
        str(path),
        "--modes",
        "compute",
        "eviction:2",
    ]
    sizes = ["--host-per-hbm", "1", "--num-requests", "60", "--num-documents", "6", "--hbm-blocks", "40"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, *sizes], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    plain, most, compute, eviction = json.loads(path.read_text())["results"]
    assert plain["computed"] > eviction["computed"] > most["computed"]
    assert compute["gap"] < eviction["gap"]
    assert compute["saved"] > eviction["saved"] > 0
