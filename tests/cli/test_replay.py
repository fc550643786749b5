"""The command end to end: flags in, a table and a file out."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

from tests.cli.conftest import interrupted_run
from tests.grids import few
from tests.storage import servers
from tpu_offload.cli.main import main
from tpu_offload.engine.hosts import HostRunner
from tpu_offload.replay import setup as replay_setup

pytestmark = pytest.mark.usefixtures("clean_environment")

TINY = (
    *("--num-layers", "1", "--d-model", "32", "--num-heads", "2", "--num-kv-heads", "1", "--head-dim", "16"),
    *("--d-ff", "32", "--block-size", "8", "--max-num-batched-tokens", "64", "--concurrency", "2"),
)


def replay(*flags):
    return main(["replay", *TINY, *flags])


@pytest.fixture
def error_of(capsys):
    """Runs a command that must end with one line and status 2; returns the line."""

    def run(*argv):
        capsys.readouterr()
        assert main([*argv]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("tpu-offload: error: ")
        assert err.count("\n") == 1
        assert "Traceback" not in err
        return err

    return run


def test_chat(tmp_path, capsys):
    path = tmp_path / "r.json"
    assert replay("--requests", "9", "--turns", "3", "--json", str(path)) == 0
    out, _ = capsys.readouterr()
    assert "Outputs identical: every token of the 9 requests" in out
    report = json.loads(path.read_text())
    assert report["outputs_identical"] is True
    assert report["num_compared"] == 9
    assert report["interrupted"] is False
    assert report["differences"] == []
    for run in (report["baseline"], report["offload"]):
        assert 0 < run["ttft_p50_s"] <= run["ttft_p99_s"]
        assert run["tokens_per_s"] > 0
        assert run["num_requests"] == 9
    before, after = report["baseline"]["prompt_tokens"], report["offload"]["prompt_tokens"]
    total = before["computed"] + before["hbm"]
    assert before["host"] == 0
    assert after["computed"] + after["hbm"] + after["host"] == total
    assert after["host"] > 0
    assert after["computed"] < before["computed"]
    assert before["recomputed"] > 0
    assert report["loaded_share_of_recomputed"] == after["host"] / before["recomputed"]
    staging, transfers = report["offload"]["staging"], report["offload"]["transfers"]
    assert staging["peak_blocks"] == 0 < staging["budget_blocks"], "direct copies take none"
    assert staging["dropped_blocks"] == staging["dropped_save_blocks"] + staging["dropped_load_blocks"]
    block_nbytes = 8 * 2 * 16 * 2  # one layer, a key and a value head, bfloat16
    assert transfers["saved_nbytes"] % block_nbytes == transfers["loaded_nbytes"] % block_nbytes == 0
    assert transfers["loaded_nbytes"] == after["host"] // 8 * block_nbytes
    assert report["engine"]["num_blocks"] < report["workload"]["num_unique_blocks"]
    assert report["versions"]["jax"]
    assert report["device"]["platform"]
    assert report["argv"][0] == "replay"


def test_a_model_with_sliding_windows(tmp_path):
    path = tmp_path / "r.json"
    layers = ("--num-layers", "4", "--max-num-batched-tokens", "32")
    assert replay("--model", "hybrid", *layers, "--requests", "9", "--turns", "3", "--json", str(path)) == 0
    report = json.loads(path.read_text())
    assert report["outputs_identical"] is True
    assert report["model"]["window_layers"] == [0, 1, 2]
    assert report["offload"]["prompt_tokens"]["host"] > 0


def test_a_model_with_states(tmp_path):
    """The host tier is sized for the states too: none is evicted."""
    path = tmp_path / "r.json"
    layers = ("--num-layers", "4", "--max-num-batched-tokens", "32")
    assert replay("--model", "state", *layers, "--requests", "9", "--turns", "3", "--json", str(path)) == 0
    report = json.loads(path.read_text())
    assert report["outputs_identical"] is True
    assert report["model"]["state_layers"] == [0, 1, 2]
    assert report["offload"]["prompt_tokens"]["host"] > 0
    assert report["offload"]["host"]["num_evicted_chunks"] == 0


def test_a_model_with_windows_and_states(tmp_path):
    path = tmp_path / "r.json"
    layers = ("--num-layers", "4", "--max-num-batched-tokens", "32")
    assert replay("--model", "mixed", *layers, "--requests", "9", "--turns", "3", "--json", str(path)) == 0
    report = json.loads(path.read_text())
    assert report["outputs_identical"] is True
    assert (report["model"]["state_layers"], report["model"]["window_layers"]) == ([0, 1], [2])
    assert report["offload"]["prompt_tokens"]["host"] > 0


@pytest.mark.parametrize("model", ["hybrid", "state", "mixed"])
def test_layers_that_cannot_be_divided(error_of, model):
    error = error_of("replay", "--model", model, "--num-layers", "6")
    assert f"--model {model} with --num-layers 6; expected a multiple of 4" in error


@pytest.mark.parametrize(
    ("directions", "buckets"),
    few([(("SAVE",), ""), (("LOAD",), "1,2"), (("SAVE", "LOAD"), "1,2")], (("SAVE", "LOAD"), "1,2")),
    ids=str,
)
def test_fused_paths(tmp_path, monkeypatch, directions, buckets):
    """The embedded engine supports them, and the copies measured afterwards have a rate too."""
    path = tmp_path / "r.json"
    for direction in directions:
        monkeypatch.setenv(f"TPU_OFFLOAD_{direction}_PATH", "fused")
    monkeypatch.setenv("TPU_OFFLOAD_BLOCK_SIZE_BUCKETS", buckets)
    assert replay("--requests", "9", "--turns", "3", "--json", str(path)) == 0
    report = json.loads(path.read_text())
    assert report["outputs_identical"] is True
    assert report["num_compared"] == 9
    assert report["offload"]["prompt_tokens"]["host"] > 0
    assert report["offload"]["transfers"]["copy_rates"]["save_gb_per_s"] > 0


def test_prompts_and_sampling(tmp_path, capsys):
    path, out_path = tmp_path / "p.jsonl", tmp_path / "r.json"
    chat = [{"role": "user", "content": f"{'x' * 30}"}, {"role": "assistant", "content": "y" * 20}]
    path.write_text(f"{json.dumps(chat * 2)}\n{json.dumps({'messages': chat})}\n")
    flags = ("--prompts", str(path), "--max-tokens", "3", "--temperature", "0.8", "--top-k", "20")
    assert replay(*flags, "--json", str(out_path)) == 0
    report = json.loads(out_path.read_text())
    assert report["workload"]["num_requests"] == 3
    assert report["baseline"]["num_generated_tokens"] == 9
    assert report["outputs_identical"] is True


def test_trace(tmp_path, capsys):
    path, out_path = tmp_path / "t.jsonl", tmp_path / "r.json"
    request = {"timestamp": 0, "input_length": 2000, "output_length": 64, "hash_ids": [0, 1, 2, 3]}
    lines = [json.dumps(request | {"hash_ids": [0, i % 3 * 3 + 1, i % 3 * 3 + 2, i % 3 * 3 + 3]}) for i in range(12)]
    path.write_text("\n".join([*lines, lines[0][:30]]))
    assert replay("--trace", str(path), "--requests", "12", "--json", str(out_path)) == 0
    report = json.loads(out_path.read_text())
    assert report["outputs_identical"] is True
    assert report["offload"]["prompt_tokens"]["host"] > 0
    capsys.readouterr()
    assert replay("--trace", str(path)) == 2
    assert f"{path} line 13: not JSON" in capsys.readouterr().err


def test_any_difference_is_reported(monkeypatch, capsys, tmp_path):
    """One token of one request of the second run is changed in the output."""
    serve, num_runs = replay_setup.serve, iter(range(2))  # type: ignore[attr-defined]

    def serve_and_spoil(*args, **kwargs):
        served = serve(*args, **kwargs)
        if next(num_runs) == 0:
            return served
        spoilt = dataclasses.replace(served.records[2], tokens=(*served.records[2].tokens[:-1], 319))
        return dataclasses.replace(served, records=(*served.records[:2], spoilt, *served.records[3:]))

    monkeypatch.setattr(replay_setup, "serve", serve_and_spoil)
    assert replay("--requests", "4", "--turns", "2", "--json", str(tmp_path / "r.json")) == 1
    out = capsys.readouterr().out
    assert "OUTPUTS DIFFER in 1 of 4 requests" in out
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["outputs_identical"] is False
    (difference,) = report["differences"]
    assert difference["text"] in out.replace("\n", " ")


def test_offloading_turned_off_by_a_variable(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("TPU_OFFLOAD_NUM_CPU_CHUNKS", "0")
    assert replay("--requests", "2", "--json", str(tmp_path / "r.json")) == 0
    assert "Offloading is off" in capsys.readouterr().out
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["offload"]["staging"]["budget_blocks"] == 0
    assert report["offload"]["transfers"]["saved_nbytes"] == 0


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--requests 0", "'--requests': 0 is not in the range 1<=x"),
        ("--requests -3", "'--requests': -3 is not"),
        ("--requests many", "'--requests': 'many' is not a valid integer"),
        ("--requests 1.5", "'--requests': '1.5' is not a valid integer"),
        ("--requests", "'--requests' requires an argument"),
        ("--seed -1", "'--seed': -1 is not in the range 0<=x<=4294967295"),
        ("--temperature nan", "'--temperature': nan is not finite"),
        ("--temperature inf", "'--temperature': inf is not finite"),
        ("--temperature -0.1", "'--temperature': -0.1 is not in the range x>=0"),
        ("--top-k -1", "'--top-k': -1 is not"),
        ("--concurrency 0", "'--concurrency': 0 is not"),
        ("--block-size 0", "'--block-size': 0 is not"),
        ("--num-layers 99999999999", "'--num-layers': 99999999999 is not"),
        ("--workload tea", "'--workload': 'tea' is not one of 'chat', 'decode'"),
        ("--workload chat --trace x", "not allowed with"),
        ("--trace x --prompts y", "not allowed with"),
        ("--reqests 4", "No such option '--reqests'"),
        ("--request 4", "No such option '--request'"),
        ("left over", "unexpected extra arguments (left over)"),
        ("--tokens-per-block 8", "--tokens-per-block 8 has no effect here; it requires --trace"),
        ("--max-tokens 8", "--max-tokens 8 has no effect here; it requires --prompts"),
        ("--trace x --turns 2", "--turns 2 has no effect here"),
        ("--trace x --tokens-per-block 513", "513 is not in the range 1<=x<=512"),
        ("--trace no-such-file", "cannot read no-such-file: No such file"),
        ("--json no-such-folder/r.json", "cannot write no-such-folder/r.json: there is no directory"),
        ("--num-blocks 3", "--num-blocks 3 is under the"),
        ("--num-blocks 2000000000", "GB of memory are free"),
        ("--num-heads 3", "num_heads=3 is not a multiple of num_kv_heads=2"),
        ("--kv-dtype complex64", "kv_dtype='complex64'"),
        ("--max-num-batched-tokens 2", "max_num_batched_tokens=2"),
    ],
)
def test_wrong_flag(error_of, tmp_path, monkeypatch, flags, expected):
    monkeypatch.chdir(tmp_path)
    assert expected in error_of("replay", *flags.split())


@pytest.mark.parametrize("argv", [[], ["simulate-not"], ["--replay"]])
def test_wrong_command(error_of, argv):
    error_of(*argv)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TPU_OFFLOAD_NUM_CPU_CHUNKS", "many"),
        ("TPU_OFFLOAD_NUM_CPU_CHUNK", "1"),
        ("TPU_OFFLOAD_STAGING_BUFFER_TOKENS", "7"),
        ("TPU_OFFLOAD_HOST_GB", "1e-9"),
    ],
)
def test_wrong_variable(error_of, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert name in error_of("replay", *TINY, "--requests", "1")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "cannot be read"),
        ("{}", "is not a profile"),
        (
            '{"format": "tpu_offload.profile", "version": 1, "device_kind": "TPU v9", "entries": '
            '[{"num_layers": 1, "page_nbytes": 1, "save": ["direct"], "load": ["direct"]}]}',
            "measured on 'TPU v9' and the KV caches are on 'cpu'",
        ),
    ],
)
def test_wrong_profile(error_of, monkeypatch, tmp_path, content, expected):
    path = tmp_path / "p.json"
    if content is not None:
        path.write_text(content)
    monkeypatch.setenv("TPU_OFFLOAD_LOAD_PATH", "auto")
    monkeypatch.setenv("TPU_OFFLOAD_COPY_PROFILE", str(path))
    monkeypatch.setattr(replay_setup, "serve", None)  # the error comes before anything is served
    assert expected in error_of("replay", *TINY, "--requests", "1")


def test_help_names_every_flag(capsys):
    assert main(["replay", "--help"]) == 0
    assert "--tokens-per-block" in capsys.readouterr().out


def test_interrupt_reports_what_is_finished(tmp_path):
    flags = "replay", *TINY, "--requests", "2000", "--turns", "50"
    page = tmp_path / "r.html"
    report = interrupted_run(*flags, "--html", str(page), path=tmp_path / "r.json", during="baseline")
    assert "Interrupted: the numbers cover the requests finished so far." in page.read_text()
    assert report["baseline"]["num_requests"] > 0
    assert report["offload"]["num_requests"] == 0


@pytest.mark.parametrize(("redirect", "status"), few([("| true", 141), (">&-", 0), ("2>&-", 0)], ("| true", 141)))
def test_closed_output(redirect, status):
    """The status is not 1, which means that outputs differ, and there is no traceback."""
    command = " ".join([sys.executable, "-m", "tpu_offload.cli.main", "replay", *TINY, "--requests", "2"])
    script = f"set -o pipefail; {command} {redirect}"
    done = subprocess.run(["bash", "-c", script], stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.wide
def test_two_processes(tmp_path, capsys):
    """Tokens equal those of one process, with and without offloading."""
    path = tmp_path / "r.json"
    flags = ("--num-kv-heads", "2", "--processes", "2", "--devices", "1", "--requests", "6", "--turns", "3")
    assert replay(*flags, "--json", str(path)) == 0
    assert "Outputs identical: every token of the 6 requests" in capsys.readouterr().out
    report = json.loads(path.read_text())
    assert report["processes"] == {"num": 2, "num_devices": 1}
    assert report["outputs_identical"] is True
    assert report["offload"]["prompt_tokens"]["host"] > 0


@pytest.mark.wide
def test_a_process_that_dies(capsys, monkeypatch, programs_of_hosts):
    """The command ends with one line, and without its processes."""
    step, pids = HostRunner.step, []

    def dying(self, spans, fused=None):
        if self._num_steps == 4:
            programs_of_hosts.exchange()
            pids.extend(self._hosts.process_ids)
            os.kill(pids[1], signal.SIGKILL)
        return step(self, spans, fused)

    monkeypatch.setattr(HostRunner, "step", dying)
    assert replay("--num-kv-heads", "2", "--processes", "2", "--devices", "1", "--requests", "6", "--turns", "3") == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "tpu-offload: error: host 1 of 2 has died (SIGKILL): the engine cannot continue without it"
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--devices", "2"), "--devices 2 requires --processes of at least 2"),
        (("--processes", "2", "--preempt"), "--processes 2 with --preempt; expected one of them"),
        (
            ("--processes", "2", "--num-kv-heads", "3", "--num-heads", "3"),
            "num_kv_heads=3 of bfloat16 cannot be divided",
        ),
    ],
)
def test_flags_of_processes(error_of, flags, message):
    assert message in error_of("replay", *flags)


def test_restart(tmp_path, capsys, monkeypatch):
    """The last engine finds in storage what the one before has left, and every token is the same."""
    path = tmp_path / "r.json"
    monkeypatch.setenv("TPU_OFFLOAD_STORAGE_TIER", "file")
    monkeypatch.setenv("TPU_OFFLOAD_STORAGE_OPTIONS", f"{tmp_path / 'kv'},min_free_gb=0")
    monkeypatch.setenv("TPU_OFFLOAD_NUM_STORAGE_CHUNKS", "500")
    monkeypatch.setenv("TPU_OFFLOAD_STORAGE_WAIT_S", "60")
    assert replay("--restart", "--requests", "9", "--turns", "3", "--json", str(path)) == 0
    out, _ = capsys.readouterr()
    assert "Outputs identical: every token of the 9 requests" in out
    assert "Found after the restart: " in out
    report = json.loads(path.read_text())
    found = report["restart"]
    assert found["stored_tokens_asked_again"] > 0
    assert found["found_tokens"] >= 0.9 * found["stored_tokens_asked_again"]
    assert found["restored_chunks"] == found["stored_chunks"] > 0
    assert found["failed_storage_chunks"] == 0
    # A directory that somebody has emptied in between is no error: nothing is found.
    emptied = emptying(replay_setup.serve_once, tmp_path / "kv")
    monkeypatch.setattr("tpu_offload.replay.restart.serve_once", emptied)
    assert replay("--restart", "--requests", "9", "--turns", "3", "--json", str(path)) == 0
    found = json.loads(path.read_text())["restart"]
    assert found["restored_chunks"] == 0
    # What requests in flight together share may be computed by the later one.
    assert found["found_tokens"] < 0.1 * found["stored_tokens_asked_again"]


@pytest.mark.parametrize("tier", ["valkey", "object"])
def test_restart_through_a_server(tmp_path, monkeypatch, tier):
    """Of Valkey, and of S3."""
    path = tmp_path / "r.json"
    with servers.running(servers.valkey() if tier == "valkey" else servers.moto) as server:
        where = f"valkey://127.0.0.1:{server.port}?"
        if tier == "object":
            servers.make_bucket(server.port, "bucket")
            where = f"s3://bucket?endpoint=http://127.0.0.1:{server.port}&region=us-east-1&allow_http=1&"
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "kv")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "SECRET")
        monkeypatch.setenv("TPU_OFFLOAD_STORAGE_TIER", tier)
        monkeypatch.setenv("TPU_OFFLOAD_STORAGE_OPTIONS", f"{where}timeout_s=60&connect_timeout_s=60")
        monkeypatch.setenv("TPU_OFFLOAD_NUM_STORAGE_CHUNKS", "500")
        monkeypatch.setenv("TPU_OFFLOAD_STORAGE_WAIT_S", "60")
        monkeypatch.setenv("TPU_OFFLOAD_STORAGE_LOOKUP_WAIT_S", "60")
        assert replay("--restart", "--requests", "6", "--turns", "2", "--json", str(path)) == 0
    report = json.loads(path.read_text())
    assert report["outputs_identical"] is True
    found = report["restart"]
    assert found["found_tokens"] >= 0.9 * found["stored_tokens_asked_again"] > 0
    if tier == "valkey":  # others share it, so it is asked
        assert found["found_storage_chunks"] > 0 == found["restored_chunks"]
    else:
        assert found["restored_chunks"] == found["stored_chunks"] > 0
    assert found["failed_storage_chunks"] == 0


def emptying(serve_once, directory):
    def serve(*args, **kwargs):
        shutil.rmtree(directory, ignore_errors=True)
        return serve_once(*args, **kwargs)

    return serve


def test_restart_with_a_tier_that_is_asked(tmp_path, monkeypatch):
    """A shared tier lists nothing when the last engine starts."""
    pytest.importorskip("glide_sync")
    path = tmp_path / "r.json"
    with servers.running(servers.valkey()) as server:
        monkeypatch.setenv("TPU_OFFLOAD_STORAGE_TIER", "valkey")
        monkeypatch.setenv("TPU_OFFLOAD_STORAGE_OPTIONS", f"valkey://127.0.0.1:{server.port}?timeout_s=60")
        monkeypatch.setenv("TPU_OFFLOAD_NUM_STORAGE_CHUNKS", "500")
        for name in ("STORAGE_WAIT_S", "STORAGE_LOOKUP_WAIT_S"):
            monkeypatch.setenv(f"TPU_OFFLOAD_{name}", "60")
        assert replay("--restart", "--requests", "6", "--turns", "2", "--json", str(path)) == 0
    found = json.loads(path.read_text())["restart"]
    assert found["stored_tokens_asked_again"] > 0
    assert found["found_tokens"] >= 0.9 * found["stored_tokens_asked_again"]
    assert found["restored_chunks"] == 0
    assert found["found_storage_chunks"] >= 0.9 * found["stored_chunks"] > 0


def test_restart_needs_storage(error_of):
    assert "--restart without a storage tier; set TPU_OFFLOAD_STORAGE_TIER" in error_of("replay", "--restart")
    assert "--restart with --preempt; expected one of them" in error_of("replay", "--restart", "--preempt")
