"""Output files of commands."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import ROOT
from tpu_offload.cli import files
from tpu_offload.errors import InputError


def test_file_is_replaced_whole(tmp_path):
    path = tmp_path / "r.json"
    path.write_text("old")
    files.write_json(path, {"x": 1})
    assert json.loads(path.read_text()) == {"x": 1}
    with pytest.raises(ValueError, match="JSON"):
        files.write_json(path, {"x": float("nan")})
    assert json.loads(path.read_text()) == {"x": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]


def test_file_that_cannot_be_written(tmp_path):
    for path, reason in ((tmp_path, "it is a directory"), (tmp_path / "no" / "r.json", "there is no directory")):
        with pytest.raises(InputError, match=reason):
            files.output_file(path)
        with pytest.raises(InputError, match="cannot write"):
            files.write_json(path, {})
    assert files.output_file(str(tmp_path / "r.json")) == tmp_path / "r.json"
    assert not list(tmp_path.iterdir())


def test_a_file_in_a_directory_that_takes_no_files_is_refused_before_the_work(tmp_path, monkeypatch):
    """It may be written itself, but is replaced: a benchmark ran, and its results were lost."""
    path, link = tmp_path / "a" / "r.json", tmp_path / "link.json"
    path.parent.mkdir()
    path.write_text("old")
    link.symlink_to(path)
    access = os.access
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda name, mode: access(name, mode) and str(name) != str(path.parent))
        for name in (path, link, path.with_name("new.json")):
            with pytest.raises(InputError, match=f"cannot write {name}: no file may be made in {path.parent}"):
                files.output_file(name)
        assert files.output_file("/dev/null") == Path("/dev/null"), "is written in place"
    path.parent.chmod(0o1777)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(InputError, match="which is sticky, only its owner may replace it"):
        files.output_file(path)
    assert files.output_file(path.with_name("new.json"))


def test_a_path_that_cannot_be_looked_for_is_one_line(tmp_path):
    with pytest.raises(InputError, match=r"cannot write .*: File name too long"):
        files.output_file(tmp_path / ("x" * 300))


def test_standard_output_is_a_file(tmp_path):
    """Also a pipe, whose link leads to no name."""
    (tmp_path / "out").symlink_to("/dev/stdout")
    code = "import sys; from pathlib import Path; from tpu_offload.cli import files; "
    code += "files.write_json(files.output_file(sys.argv[1]), {})"
    for name in ("/dev/stdout", str(tmp_path / "out")):
        assert (
            subprocess.run([sys.executable, "-c", code, name], capture_output=True, cwd=ROOT, check=True).stdout
            == b"{}\n"
        )


@pytest.mark.parametrize("encoding", ["ascii", "utf-8:strict"])
def test_names_that_the_terminal_cannot_show_are_escaped(tmp_path, encoding):
    """A setting in another alphabet, or with bytes that are no UTF-8, ended the doctor with a traceback."""
    names = {b"TPU_OFFLOAD_" + "größe".encode() + b"\xff": b"1"}
    environment = os.environb | names | {b"PYTHONIOENCODING": encoding.encode(), b"JAX_PLATFORMS": b"cpu"}
    command = [sys.executable, "-m", "tpu_offload_command", "doctor", "--no-devices"]
    done = subprocess.run(command, capture_output=True, timeout=300, check=False, env=environment, cwd=ROOT)
    assert done.stderr == b""
    assert done.returncode == 1
    assert b"TPU_OFFLOAD_gr" in done.stdout
    assert b"\\udcff is not a setting" in done.stdout
