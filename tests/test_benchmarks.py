"""The benchmarks still run: their sweeps, their files and what they say."""

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
    evictions = [*command[:4], "--evicted-blocks", "2", "40", "--repeats", "3"]
    done = subprocess.run(
        evictions, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())["results"]
    assert [row["num_blocks"] for row in found] == [2, 40]
    assert all(row["first_eviction_s"] > row["later_eviction_s"] > 0 for row in found)


def test_policies(tmp_path):
    path = tmp_path / "p.json"
    trace = tmp_path / "trace.jsonl"
    requests = [list(range(i % 7, i % 7 + 5)) for i in range(80)]
    trace.write_text(
        "".join(json.dumps({"timestamp": 0, "hash_ids": [f"{r[0]}-{i}" for i in r]}) + "\n" for r in requests)
    )
    command = [sys.executable, "benchmarks/bench_policies.py", "--json", str(path), "--trace", str(trace)]
    sweep = ["--share", "0.5", "--num-chunks", "100", "--prompt-chunks", "5", "--chunks-timed", "400", "--slices", "4"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, *sweep], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(path.read_text())["results"]
    assert [result["requests"] for result in results] == ["trace", "synthetic"]
    for result in results:
        assert {"lru", "arc", "s3fifo", "wtinylfu", "lru with priorities"} <= result["policies"].keys()
        assert result["policies"]["lru"]["index_ratio_to_lru"]["median"] == 1
        assert all(figures["policy_us_per_chunk"]["median"] > 0 for figures in result["policies"].values())


def test_stalls(tmp_path):
    path = tmp_path / "stalls.json"
    command = [sys.executable, "benchmarks/bench_stalls.py", "--json", str(path), "--num-chunks", "400"]
    sizes = ["--policies", "density", "lru", "--prompt-chunks", "20", "50", "--fill-chunks", "40"]
    sizes += ["--staging-blocks", "16"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, *sizes, "--num-steps", "3"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    results = json.loads(path.read_text())["results"]
    assert [(r["policy"], r["record_events"]) for r in results] == [
        (policy, events) for policy in ("density", "lru") for events in (False, True)
    ]
    for result in results:
        assert {"reset", "apply restart", "apply lost segment", "match 50 hit", "plan_step 20 at once"} <= result[
            "calls_ms"
        ].keys()
        assert result["num_resident"] > 300
