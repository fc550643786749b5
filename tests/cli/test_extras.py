"""Commands without the packages of extras: one line says what is missing and how to install it."""

import configparser
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_simulate import write_trace
from tpu_offload.cli import command
from tpu_offload.cli.main import main
from tpu_offload.errors import InputError

SETUP = Path(__file__).parents[2] / "setup.cfg"


@pytest.fixture
def lack(monkeypatch):
    def lack(*packages):
        for package in packages:
            monkeypatch.setitem(sys.modules, package, None)  # as if not installed

    return lack


@pytest.mark.parametrize(
    ("argv", "lacking", "missing", "wanted"),
    [
        (["replay"], ["flax", "rich"], "replay needs flax and rich, which are", "cli,engine"),
        (["replay", "--help"], ["flax"], "replay needs flax, which is", "engine"),
        (["bench", "--quick"], ["flax", "plotly", "rich"], "bench needs rich, which is", "cli"),
        (["simulate", "--trace", "none.jsonl"], ["rich"], "simulate needs rich, which is", "cli"),
        (["tier", "ls", "/none"], ["rich"], "tier needs rich, which is", "cli"),
    ],
)
def test_a_command_says_what_is_missing(lack, capsys, argv, lacking, missing, wanted):
    lack(*lacking)
    assert main(argv) == 2
    install = f"install with: pip install 'tpu_offload[{wanted}]'"
    assert capsys.readouterr() == ("", f"tpu-offload: error: {missing} not installed; {install}\n")


def test_a_page_says_what_is_missing(tmp_path, lack, capsys):
    flags = ["--trace", str(write_trace(tmp_path / "t.jsonl", [[1, 2], [1, 2]])), "--sizes", "1", "--policies", "lru"]
    lack("jinja2", "plotly", "flax")
    assert main(["simulate", *flags, "--html", str(tmp_path / "a.html")]) == 2
    install = "install with: pip install 'tpu_offload[html]'"
    assert capsys.readouterr() == (
        "",
        f"tpu-offload: error: --html needs plotly and jinja2, which are not installed; {install}\n",
    )
    assert main(["simulate", *flags]) == 0


def test_all_commands_are_listed_without_them(lack, capsys):
    lack("flax", "jinja2", "plotly", "rich")
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert main(["-h"]) == 0
    assert capsys.readouterr().out == out
    assert all(f"  {name} " in out for name in ("replay", "bench", "simulate", "tier"))


def test_without_click_nothing_starts():
    code = "import sys; sys.modules['click'] = None; import tpu_offload_command; tpu_offload_command.run()"
    done = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True, timeout=120)
    error = "tpu-offload: error: click is not installed; install with: pip install 'tpu_offload[cli]'\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", error)


def test_bench_needs_no_engine():
    """In a subprocess, because this process has imported everything already."""
    lacking = "import sys; sys.modules.update(flax=None, jinja2=None, plotly=None)"
    code = f"{lacking}; from tpu_offload.cli.main import run; run()"
    done = subprocess.run([sys.executable, "-c", code, "bench", "--help"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--fused-blocks" in done.stdout


def test_the_package_of_a_storage_tier_is_in_the_extra_of_its_name(lack):
    lack("glide_sync", "obstore")
    with pytest.raises(InputError, match=r"which are not installed; .*tpu_offload\[object,valkey\]"):
        command.require("this", "glide_sync", "obstore")


def test_the_list_of_commands_needs_no_large_package():
    code = "import sys, tpu_offload.cli.main; print({'numpy', 'pydantic', 'jax', 'rich'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "set()\n"


def test_the_extras_are_those_of_the_package():
    setup = configparser.ConfigParser()
    setup.read(SETUP)
    for extra in ("cli", "engine", "html"):
        lines = setup["options.extras_require"][extra].split()
        known = [package for package, its_extra in command.EXTRAS.items() if its_extra == extra]
        assert [line.partition(">=")[0] for line in lines] == known
