"""`tpu-offload tier` end to end: what it prints, its statuses and files, and an interrupt."""

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import LINE_BY_LINE
from tests.storage import servers
from tests.storage.conformance import SPEC
from tests.storage.stores import FINGERPRINTS, fill, finds_nothing, open_tier, put, short_key
from tpu_offload.cli.main import main
from tpu_offload.storage import Verification

ROOT = Path(__file__).parents[2]
GB = SPEC.record_nbytes / 2**30


@pytest.fixture
def kv(tmp_path):
    """A file tier's directory with three chunks of worker 0 and two of worker 1."""
    fill(str(tmp_path / "kv"), 3, worker_id=0)
    fill(str(tmp_path / "kv"), 2, worker_id=1)
    return tmp_path / "kv"


@pytest.fixture
def tier(tmp_path, capsys):
    """Runs a subcommand; returns its status, its output and its report."""

    def run(*argv, status=0):
        path = tmp_path / "report.json"
        path.unlink(missing_ok=True)
        capsys.readouterr()
        assert main(["tier", *map(str, argv), "--json", str(path)]) == status
        report = json.loads(path.read_text())
        assert report["argv"] == ["tier", *map(str, argv), "--json", str(path)]
        return capsys.readouterr().out, report

    return run


@pytest.fixture
def error_of(capsys):
    """Runs a subcommand that must end with one line and status 2; returns the line."""

    def run(*argv):
        capsys.readouterr()
        assert main(["tier", *map(str, argv)]) == 2
        err = capsys.readouterr().err
        assert err.startswith("tpu-offload: error: ")
        assert err.count("\n") == 1
        return err

    return run


def damage(kv, worker=0, offset=5000):
    path = kv / f"worker-{worker}" / "segment-000.kv"
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_ls(kv, tier):
    out, report = tier("ls", kv)
    assert out.startswith(f"{kv}: 5 chunks, {5 * GB:.6f} GB\n")
    rows = [(row["fingerprint"], row["worker_id"], row["current"], row["num_chunks"]) for row in report["generations"]]
    assert rows == [(FINGERPRINTS[0], 0, True, 3), (FINGERPRINTS[0], 1, True, 2)]
    assert report["nbytes"] == 5 * SPEC.record_nbytes
    assert all(row["newest_s"] is not None for row in report["generations"])
    assert f"{FINGERPRINTS[0][:12]}..." in out
    assert "left over" not in out


def test_ls_with_keys(kv, tier):
    out, _ = tier("ls", kv, "--keys")
    lines = [line.split() for line in out.splitlines() if line.startswith(FINGERPRINTS[0])]
    assert sorted((int(line[1]), line[3]) for line in lines) == sorted(
        (worker, short_key(i).hex()) for worker, num in ((0, 3), (1, 2)) for i in range(num)
    )
    assert all(re.fullmatch(r"worker-[01]/segment-000\.kv\+\d+", line[5]) for line in lines)


def test_ls_shows_what_a_reset_has_left(kv, tier):
    engine = open_tier(str(kv), worker_id=0)
    engine.clear()
    engine.close()
    out, report = tier("ls", kv)
    assert "left over" in out
    assert [row["num_chunks"] for row in report["generations"]] == [0, 3, 2]


def test_stats(kv, tier):
    damage(kv, offset=100)
    out, report = tier("stats", kv)
    first, second = report["workers"]
    assert (first["num_slots"], first["num_used_slots"], first["num_free_slots"]) == (16, 3, 13)
    assert (second["worker_id"], second["locked_by"]) == (1, None)
    assert first["disk_nbytes"] >= 16 * SPEC.record_nbytes
    assert (report["num_checked"], report["num_damaged"], report["checked"]["good"]) == (5, 1, 4)
    assert report["checked_nbytes"] == 5 * 4096, "headers only"
    assert "slots 16, used slots 3, free slots 13" in out
    assert "1 damaged" in out


def test_verify(kv, tier):
    out, report = tier("verify", kv)
    assert (report["num_damaged"], report["checked"]["good"], report["interrupted"]) == (0, 5, False)
    assert report["checked_nbytes"] == 5 * SPEC.record_nbytes
    assert out.endswith(f"Checked 5 records, {5 * GB:.6f} GB: 5 good.\n")
    damage(kv)
    out, report = tier("verify", kv, status=1)
    assert (report["num_damaged"], report["checked"]["good"]) == (1, 4)
    (suspect,) = report["suspects"]
    assert suspect["place"] == "worker-0/segment-000.kv+0"
    assert "damaged: worker-0/segment-000.kv+0: storage returned a record whose payload is damaged" in out
    assert "4 good, 1 damaged" in out


def test_verify_counts_a_damaged_directory(kv, tier):
    (kv / "worker-1" / "directory.bin").write_bytes(b"x" * 8192)
    out, report = tier("verify", kv, status=1)
    assert [one["place"] for one in report["damages"]] == ["worker-1/directory.bin"]
    assert out.count("damaged: worker-1/directory.bin") == 1


def test_verify_of_a_sample(kv, tier):
    _, report = tier("verify", kv, "--sample", "2")
    assert (report["num_checked"], report["num_chunks"]) == (2, 5)
    _, report = tier("verify", kv, "--sample", "20")
    assert report["num_checked"] == 5


def test_clear(kv, tier):
    out, report = tier("clear", kv, "--yes")
    assert (report["num_chunks"], report["num_deleted_chunks"]) == (5, 5)
    assert "Deleted 5 chunks" in out
    assert not list(kv.rglob("*.kv")), "the space is free"
    assert finds_nothing(str(kv), 3, worker_id=0)
    _, report = tier("ls", kv)
    assert report["num_chunks"] == 0


@pytest.mark.parametrize(("answer", "deletes"), [("y\n", True), ("YES\n", True), ("n\n", False), ("\n", False)])
def test_clear_asks(kv, capsys, monkeypatch, answer, deletes):
    monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
    assert main(["tier", "clear", str(kv)]) == (0 if deletes else 1)
    out = capsys.readouterr().out
    assert f"Delete 5 chunks (0.00 GB) of 1 model in {kv}? An engine that uses it loses it. [y/N]" in out
    assert ("Nothing was deleted." in out) != deletes
    assert bool(list(kv.rglob("*.kv"))) != deletes


def test_clear_without_input_is_refused(kv, error_of, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert "give --yes" in error_of("clear", kv)
    assert list(kv.rglob("*.kv"))


@pytest.mark.parametrize(
    ("redirect", "status", "says"), [("<&-", 2, "give --yes"), ("<answer", 1, "Nothing was deleted")]
)
def test_clear_with_an_input_that_is_closed_or_no_text(kv, redirect, status, says):
    """As the process has it."""
    (kv.parent / "answer").write_bytes(b"\xff\n")
    command = f'exec "$0" -m tpu_offload.cli.main tier clear "$1" {redirect}'
    process = subprocess.run(
        ["sh", "-c", command, sys.executable, str(kv)],
        capture_output=True,
        text=True,
        cwd=kv.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8:strict"},
        check=False,
    )
    assert (process.returncode, "Traceback" in process.stderr) == (status, False), process.stderr
    assert says in process.stdout + process.stderr
    assert list(kv.rglob("*.kv"))


@pytest.mark.parametrize("redirect", ["2>/dev/full", ">/dev/full 2>/dev/full"])
def test_verify_that_can_write_nothing_finds_no_damage(kv, redirect):
    """Status 1 would be damage, on a disk where only the log is full."""
    verify = *LINE_BY_LINE, "tier", "verify", str(kv)
    process = subprocess.run(
        ["sh", "-c", f'exec "$@" {redirect}', "sh", *verify], cwd=ROOT, stdout=subprocess.DEVNULL, check=False
    )
    assert process.returncode == 2


def test_beside_a_running_engine(kv, tier, error_of):
    engine = open_tier(str(kv), worker_id=1)
    put(engine, short_key(9), 9)
    for name in ("ls", "stats", "verify"):
        _, report = tier(name, kv)
        assert report["num_chunks"] == 6
    assert f"worker-1 is used by a running engine (pid {os.getpid()}), so nothing was deleted" in error_of("clear", kv)
    out, _ = tier("stats", kv)
    assert f"locked by pid {os.getpid()}" in out
    engine.close()
    tier("clear", kv, "--yes")


def test_a_shared_server(tier, capsys, monkeypatch):
    with servers.running(servers.valkey()) as server:
        url = f"valkey://127.0.0.1:{server.port}"
        fill(url, 3)
        fill(url, 2, fingerprint=FINGERPRINTS[1])
        out, report = tier("stats", url)
        (found,) = report["servers"]
        assert (found["maxmemory_nbytes"], found["maxmemory_policy"]) == (64 * 2**20, "allkeys-lru")
        assert 0 < found["used_memory_nbytes"] < 64 * 2**20
        assert report["checked"]["good"] == 5
        assert "maxmemory 0.06 GB, maxmemory policy allkeys-lru, used memory" in out
        monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
        assert main(["tier", "clear", url]) == 0
        assert f"of 2 models in {url}? All engines that use this server lose it." in capsys.readouterr().out
        assert finds_nothing(url, 3)
        assert finds_nothing(url, 2, fingerprint=FINGERPRINTS[1])


def test_a_store_in_a_directory(tmp_path, tier):
    url = f"file://{tmp_path}/objects"
    fill(url, 3)
    (tmp_path / "objects" / "left#1").write_bytes(b"123")
    _, report = tier("stats", url)
    (found,) = report["directories"]
    assert found["num_unfinished_files"] == 1
    assert [row["oldest_s"] is not None for row in report["generations"]] == [True]
    tier("verify", url)
    tier("clear", url, "--yes")
    assert finds_nothing(url, 3)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["ls", "/none/such"], "/none/such cannot be read: No such file or directory"),
        (["verify", "http://host"], "'http':// is no storage tier; expected a directory"),
        (["stats", "s3://"], "STORE 's3://' has no bucket"),
        (["ls", ",direct=maybe"], "STORE ,direct=maybe has 'direct=maybe'"),
        (["ls"], "Missing argument 'STORE' (see tpu-offload tier ls --help)"),
        (["show", "/x"], "No such command 'show' (see tpu-offload tier --help)"),
        ([], "Missing command (see tpu-offload tier --help)"),
        (["verify", "/x", "--sample", "0"], "Invalid value for '--sample'"),
        (["ls", "/x", "--json", "/none/such/file"], "cannot write /none/such/file"),
    ],
)
def test_invalid_input_is_one_line(error_of, argv, message):
    assert message in error_of(*argv)


def test_a_valkey_server_that_is_dead_or_refuses_is_one_line(capfd):
    """Of the process: valkey-glide writes to the descriptor itself."""
    with servers.running(servers.valkey("--requirepass", "SECRET")) as server:
        url = f"valkey://127.0.0.1:{server.port}"
        capfd.readouterr()
        assert main(["tier", "ls", url]) == 2
        (line,) = capfd.readouterr().err.splitlines()
        assert line.startswith(f"tpu-offload: error: {url}: RequestError: ")
        assert "NOAUTH" in line
    assert main(["tier", "clear", url, "--yes"]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "Connection refused" in line


def test_no_permission_is_one_line(kv, error_of, monkeypatch):
    def refuse(self):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert "Permission denied" in error_of("ls", kv)


def test_a_library_that_is_missing_is_one_line(error_of, monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setitem(sys.modules, "glide_sync", None)
    assert "needs obstore, which is not installed; install with: pip install 'tpu_offload[object]'" in error_of(
        "ls", "s3://b"
    )
    assert "pip install 'tpu_offload[valkey]'" in error_of("ls", "valkey://h")


def test_help_names_the_subcommands(capsys):
    assert main(["tier", "--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in ("ls", "stats", "verify", "clear"))
    assert main(["tier", "clear", "--help"]) == 0
    assert "--yes" in capsys.readouterr().out


# --- interrupts -------------------------------------------------------------------------------------


def test_an_interrupted_verification_reports_what_it_has_read(kv, tier, monkeypatch, capsys):
    real = Verification.run

    def run(self, records, *, on_record, **options):
        def interrupt():
            on_record()
            if self.counts.total() == 2:
                signal.raise_signal(signal.SIGINT)

        real(self, records, on_record=interrupt, **options)

    monkeypatch.setattr(Verification, "run", run)
    out, report = tier("verify", kv, status=130)
    assert (report["interrupted"], report["num_checked"]) == (True, 2)
    assert "Checked 2 records" in out


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_while_it_asks(kv, signum):
    with subprocess.Popen(
        [sys.executable, "-m", "tpu_offload.cli.main", "tier", "clear", str(kv)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=0,
        cwd=ROOT,
    ) as process:
        try:
            assert process.stdout is not None
            text = ""
            while not text.endswith("[y/N] "):
                text += process.stdout.read(1)
            process.send_signal(signum)
            _, err = process.communicate(timeout=120)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
    assert (process.returncode, err) == (130, "tpu-offload: interrupted\n")
    assert list(kv.rglob("*.kv"))


def test_it_imports_no_jax(kv):
    code = (
        "import sys\nfrom tpu_offload.cli.main import main\n"
        "assert main(['tier', 'verify', sys.argv[1]]) == 0\n"
        "assert not {'jax', 'jaxlib', 'flax', 'obstore', 'glide_sync'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code, str(kv)], cwd=ROOT, timeout=120, check=True, capture_output=True)
