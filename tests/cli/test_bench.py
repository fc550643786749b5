"""The bench command: table, recommendation and a profile that the library can read."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import jax
import pytest

from tests.cli.conftest import TINY_BENCH
from tpu_offload import KVLayout, OffloadConfig, OffloadWorker
from tpu_offload.cli.main import main
from tpu_offload.copy_profile import CopyProfile
from tpu_offload.measure import Geometry, fit_geometry, profiles


def bench(*flags):
    return main(["bench", *TINY_BENCH, *flags])


def test_table_recommendation_and_profile(small_buffers, tmp_path, capsys, monkeypatch):
    path = tmp_path / "my profile.json"
    assert bench("--output", str(path)) == 0
    out, _ = capsys.readouterr()
    written = json.loads(path.read_text())
    (entry,) = written["entries"]
    assert sorted(entry["save"]) == sorted(entry["load"]) == ["direct", "fused", "staged"]
    assert (entry["num_layers"], entry["page_nbytes"]) == (2, 4 * 8 * 2 * 8 * 2)
    recommended = dict(re.findall(r"^  (TPU_OFFLOAD_\w+)=(direct|staged|fused)$", out, re.MULTILINE))
    assert recommended == {"TPU_OFFLOAD_SAVE_PATH": entry["save"][0], "TPU_OFFLOAD_LOAD_PATH": entry["load"][0]}
    figures = written["bench"]["figures"]
    combinations = [(f["path"], f["direction"], f["num_blocks"]) for f in figures]
    assert sorted(combinations) == sorted(
        (path, direction, n) for path in ("direct", "staged", "fused") for direction in ("save", "load") for n in (1, 3)
    )
    for figure in figures:
        assert figure["nbytes"] == figure["num_blocks"] * 2 * entry["page_nbytes"]
        assert figure["step_s"]["median"] > 0
        assert figure["reported_s"]["median"] > 0
        assert len(figure["delay_s"]["values"]) == 2
        if figure["path"] == "fused":
            assert figure["seconds"] is figure["of_limit"] is figure["of_peer"] is None
            continue
        assert figure["num_rounds"] == len(figure["seconds"]["values"]) == len(figure["of_limit"]["values"]) == 2
        assert 0 < figure["seconds"]["p10"] <= figure["seconds"]["median"] <= figure["seconds"]["p90"]
        assert 0 < figure["dispatch_s"]["median"] <= figure["seconds"]["median"]
        assert figure["of_peer"]["median"] > 0
    assert written["bench"]["versions"]["jax"]
    assert list(tmp_path.iterdir()) == [path], "a temporary file was left"
    # The printed lines for `auto` work unchanged for the measured caches.
    variables = dict(re.findall(r"^  (TPU_OFFLOAD_\w+)='?(auto|/.*?)'?$", out, re.MULTILINE))
    caches = Geometry(2, (4, 8, 2, 8)).make_caches(4)
    worker = OffloadWorker(OffloadConfig.from_env(variables), KVLayout.from_caches(caches, block_size=4), caches)
    assert worker.num_host_chunks > 0
    worker.close()


def test_ratios_are_taken_within_a_round(small_buffers, tmp_path):
    path = tmp_path / "p.json"
    assert bench("--num-blocks", "2", "--paths", "direct", "--rounds", "3", "--output", str(path)) == 0
    for figure in json.loads(path.read_text())["bench"]["figures"]:
        ours, limit = figure["gb_per_s"]["values"], figure["limit_gb_per_s"]["values"]
        assert figure["of_limit"]["values"] == pytest.approx([a / b for a, b in zip(ours, limit, strict=True)])


def test_without_model_steps(small_buffers, tmp_path, capsys):
    path = tmp_path / "p.json"
    assert bench("--step-ms", "0", "--num-blocks", "2", "--output", str(path)) == 0
    assert "delays model" not in capsys.readouterr().out
    figures = json.loads(path.read_text())["bench"]["figures"]
    assert {f["path"] for f in figures} == {"direct", "staged"}
    assert all(f["delay_s"] is f["step_s"] is f["reported_s"] is None for f in figures)


@pytest.mark.wide
def test_several_devices_and_float8(small_buffers, tmp_path, capsys):
    path = tmp_path / "p.json"
    assert bench("--devices", "4", "--dtype", "float8_e4m3fn", "--output", str(path)) == 0
    written = json.loads(path.read_text())
    assert written["entries"][0]["page_nbytes"] == 4 * 8 * 2 * 8 // 4  # on each device
    assert all(figure["of_peer"] is None for figure in written["bench"]["figures"])
    assert "of peer" not in capsys.readouterr().out


def test_default_file(small_buffers, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert bench("--num-blocks", "1") == 0
    assert f"TPU_OFFLOAD_COPY_PROFILE={tmp_path}/tpu-offload-profile.json" in capsys.readouterr().out
    assert CopyProfile.read(tmp_path / "tpu-offload-profile.json").entries


def test_out_of_time_measures_at_least_one_size(small_buffers, tmp_path, capsys):
    path = tmp_path / "p.json"
    assert bench("--seconds", "0", "--output", str(path)) == 0
    assert "jobs of 3 blocks: skipped" in capsys.readouterr().err
    figures = json.loads(path.read_text())["bench"]["figures"]
    assert {(f["num_blocks"], f["num_rounds"]) for f in figures} == {(1, 1)}


def test_offload_variables_do_not_apply(small_buffers, tmp_path, monkeypatch):
    """The error for `auto` without a profile says to run bench, so bench itself must not raise it."""
    monkeypatch.setenv("TPU_OFFLOAD_SAVE_PATH", "auto")
    assert bench("--num-blocks", "1", "--output", str(tmp_path / "p.json")) == 0


def test_fewer_layers_where_memory_is_small(monkeypatch, tmp_path):
    monkeypatch.setattr(profiles, "num_walked_blocks", lambda geometry, largest: 2 * largest)
    # Blocks of 8 layers, host pools for two paths, ...: 22 blocks' room is needed for a job of one.
    block_nbytes = 8 * 4 * 8 * 2 * 8 * 2
    monkeypatch.setattr(profiles, "available_nbytes", lambda: 12 * block_nbytes)
    geometry = fit_geometry(Geometry(8, (4, 8, 2, 8)), 1, 2, may_shrink=True)
    assert geometry.num_layers == 2


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--num-blocks 0", "'--num-blocks': 0 is not in the range 1<=x<=4096"),
        ("--num-blocks", "'--num-blocks' requires an argument"),
        ("--paths fused --step-ms 0", "--paths fused needs model steps"),
        ("--fused-blocks 0", "'--fused-blocks': 0 is not"),
        ("--paths diagonal", "'--paths': 'diagonal' is not one of 'direct', 'staged', 'fused'"),
        ("--dtype complex64", "'--dtype': 'complex64' is not one of"),
        ("--seconds -1", "'--seconds': -1.0 is not in the range x>=0"),
        ("--step-ms nan", "'--step-ms': nan is not finite"),
        ("--page-shape 4 x", "'--page-shape': 'x' is not a valid integer"),
        ("--block-size 4", "not allowed with"),
        ("--devices 9", "9 devices requested, 8 found"),
        ("--devices 3", "pages of shape [4, 8, 2, 8] cannot be sharded over 3 devices"),
        ("--num-blocks 4096 --num-layers 1024 --page-shape 4096 8 2 128", "GB of host memory"),
        ("--output no-such-folder/p.json", "cannot write no-such-folder/p.json: there is no directory"),
        ("--output .", "it is a directory"),
    ],
)
def test_wrong_flag(small_buffers, tmp_path, monkeypatch, capsys, flags, expected):
    monkeypatch.chdir(tmp_path)
    assert bench(*flags.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("tpu-offload: error: ")
    assert err.count("\n") == 1
    assert expected in err
    assert not list(tmp_path.iterdir())


def test_a_path_that_fails_is_one_line_of_the_report(small_buffers, tmp_path, monkeypatch, capsys):
    """A path may not work on some machine; the others are still measured."""
    path = tmp_path / "p.json"
    jax.clear_caches()  # another test may have traced this very step
    monkeypatch.setattr("tpu_offload.kernels.StagedCopier.load", lambda *args: 1 / 0)
    monkeypatch.setattr("tpu_offload.kernels.fused.FusedCopies._stage", lambda *args: 1 / 0)
    assert bench("--num-blocks", "1", "--output", str(path)) == 0
    out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if "failed: " in line]
    assert lines == [
        "fused saves failed: ZeroDivisionError: division by zero",
        "staged loads failed: a copy failed: ZeroDivisionError: division by zero",
    ]
    assert len(re.findall(r"(?:save|load) .* (?:fused|staged) .* failed ", out)) == 2
    written = json.loads(path.read_text())
    assert sorted(written["entries"][0]["save"]) == ["direct", "staged"]
    assert sorted(written["entries"][0]["load"]) == ["direct", "fused"]
    assert [f["direction"] for f in written["bench"]["failures"]] == ["save", "load"]


def test_no_path_that_works_is_one_line(small_buffers, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tpu_offload.kernels.DirectCopier.save", lambda *args: 1 / 0)
    assert bench("--num-blocks", "1", "--paths", "direct", "--output", str(tmp_path / "p.json")) == 2
    err = capsys.readouterr().err.splitlines()[-1]
    assert err == (
        "tpu-offload: error: no measured copy path works on this machine for saves: direct: a copy failed: "
        "ZeroDivisionError: division by zero"
    )
    assert not list(tmp_path.iterdir())


def test_too_little_device_memory_is_one_line(small_buffers, tmp_path, monkeypatch, capsys):
    def exhausted(*args, **kwargs):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no room\nmore")

    monkeypatch.setattr(profiles, "TransferBench", exhausted)
    assert bench("--output", str(tmp_path / "p.json")) == 2
    assert "out of device memory (RESOURCE_EXHAUSTED: no room); make --num-layers" in capsys.readouterr().err


@pytest.mark.wide
def test_interrupt_at_the_first_round_writes_nothing(tmp_path):
    command = [sys.executable, "-m", "tpu_offload.cli.main", "bench"]
    command += ["--num-layers", "1", "--devices", "1", "--num-blocks", "1", "3", "--rounds", "100000"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}
    path = tmp_path / "p.json"
    with subprocess.Popen(
        [*command, "--seconds", "60", "--output", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        try:
            assert process.stderr.readline() == "compiling: direct, staged, fused\n"
            line = process.stderr.readline()
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=120)
        finally:
            process.kill()
    assert "jobs of 1 blocks" in line
    assert process.returncode == 130, err
    assert err == "tpu-offload: interrupted\n"
    assert out == ""
    assert not list(tmp_path.iterdir())


@pytest.mark.wide
@pytest.mark.parametrize("num_interrupts", [1, 3])
def test_interrupt_while_compiling(tmp_path, num_interrupts):
    """Long compilations run on threads; neither the first nor the second Ctrl-C waits for them."""
    size = ["--num-layers", "64", "--page-shape", "4", "8", "2", "8", "--devices", "1", "--num-blocks", "64"]
    command = [sys.executable, "-m", "tpu_offload.cli.main", "bench", *size, "--fused-blocks", "64"]
    with subprocess.Popen(
        [*command, "--seconds", "300", "--output", str(tmp_path / "p.json")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"},
    ) as process:
        try:
            assert process.stderr.readline() == "compiling: direct, staged, fused\n"
            time.sleep(3)
            for _ in range(num_interrupts):
                process.send_signal(signal.SIGINT)
                time.sleep(0.05)
            out, err = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 130, err
    assert err == "tpu-offload: interrupted\n"
    assert out == ""
    assert not list(tmp_path.iterdir())
