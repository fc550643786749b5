"""The wheel: what it contains, what it requires, and one version everywhere."""

import configparser
import email
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import tpu_offload
from tests.deploy.manifests import ROOT
from tpu_offload.cli.main import main
from tpu_offload.doctor import installed_versions
from tpu_offload.doctor.versions import SUPPORTED
from tpu_offload.measure.devices import environment

PACKAGE = ROOT / "tpu_offload"
BUILD = "import sys, setuptools.build_meta as b; print(b.build_wheel(sys.argv[1]))"
SOURCES = ("LICENSE", "README.md", "pyproject.toml", "setup.cfg", "setup.py", "tpu_offload_command.py")


def make_wheel(folder: Path, *, compile_it: str = "0", **environ: str) -> Path:
    """Builds the wheel from a copy of the sources that the Containerfile copies."""
    source = folder / "source"
    shutil.copytree(PACKAGE, source / "tpu_offload", ignore=shutil.ignore_patterns("__pycache__"))
    for name in SOURCES:
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-W", "ignore", "-c", BUILD, str(folder)]
    env = os.environ | {"COMPILE_TPU_OFFLOAD": compile_it} | environ
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=300, env=env)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return folder / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Without compiled modules, which tests/test_compiled.py is about."""
    with zipfile.ZipFile(make_wheel(tmp_path_factory.mktemp("wheel"))) as archive:
        yield archive


@pytest.fixture(scope="module")
def metadata(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return email.message_from_bytes(wheel.read(name))


def test_it_contains_the_package_and_nothing_else(wheel):
    files = {name for name in wheel.namelist() if ".dist-info/" not in name}
    in_tree = {
        str(path.relative_to(ROOT)) for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    }
    assert files == in_tree | {"tpu_offload_command.py"}
    assert "tpu_offload/py.typed" in files
    assert len([name for name in files if re.fullmatch(r"tpu_offload/plan/shapes/[^/]+\.json", name)]) >= 7
    info = {name.partition(".dist-info/")[2] for name in wheel.namelist() if ".dist-info/" in name}
    assert info == {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt"}


def test_it_is_small(wheel):
    assert sum(one.compress_size for one in wheel.infolist()) < 1.0 * 10**6


def test_it_registers_the_command_and_vllms_plugin(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    points = configparser.ConfigParser(delimiters="=")
    points.read_string(wheel.read(name).decode())
    assert {section: dict(points[section]) for section in points.sections()} == {
        "console_scripts": {"tpu-offload": "tpu_offload_command:run"},
        "vllm.general_plugins": {"tpu_offload": "tpu_offload.adapters.vllm.plugin:register"},
    }


def test_there_is_one_version(metadata, capsys):
    version = tpu_offload.__version__
    assert metadata["Version"] == version
    text = (ROOT / "setup.cfg").read_text()
    assert "version = attr: tpu_offload.__version__" in text
    assert version not in text
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"tpu-offload {version}\n"
    assert installed_versions()["tpu_offload"] == version
    assert environment()["versions"]["tpu_offload"] == version
    elsewhere = [path for path in PACKAGE.rglob("*.py") if version in path.read_text()]
    assert elsewhere == [PACKAGE / "__init__.py"]


def test_the_table_of_doctor_is_that_of_the_package(metadata):
    """`Requires-Python`, what is required, and what the extra `vllm` requires; docs/deploy.md has the table."""
    required = {r.name: str(r.specifier) for r in requirements(metadata, extra=None)}
    assert {one.package: specifiers(one.versions) for one in SUPPORTED if one.package in required} == {
        name: specifiers(versions) for name, versions in required.items()
    }
    versions = {one.package: one.versions for one in SUPPORTED}
    assert versions["python"] == metadata["Requires-Python"]
    (vllm,) = [r for r in requirements(metadata, extra="vllm") if r.name == "vllm-tpu"]
    assert specifiers(versions["vllm-tpu"]) == specifiers(str(vllm.specifier))
    others = {one.package for one in SUPPORTED} - required.keys() - {"python", "vllm-tpu"}
    assert others == {"tpu-inference"}  # which vllm-tpu pins


def specifiers(text):
    return set(text.split(","))


def requirements(metadata, *, extra):
    """What an installation requires without extras, or with one."""
    for one in map(Requirement, metadata.get_all("Requires-Dist")):
        if one.marker is None or (extra is not None and one.marker.evaluate({"extra": extra})):
            yield one


def test_what_is_required_has_no_tests_or_tools_in_it(metadata):
    names = {requirement.name for requirement in requirements(metadata, extra=None)}
    assert names == {
        "jax", "jaxlib", "ml_dtypes", "numpy", "prometheus_client", "psutil", "pydantic", "xxhash"
    }  # fmt: skip
    assert names <= {name for name in names if importlib.metadata.version(name)}


# Compiled modules, with a mypyc that makes two of which the second is not C.

MYPYC = """
import setuptools
def mypycify(*_, **__):
    made = []
    for name, text in (("works", "int PyInit_works;"), ("broken", "this is not C")):
        with open(name + ".c", "w") as file:
            file.write(text)
        made.append(setuptools.Extension("tpu_offload.core." + name, [name + ".c"]))
    return made
"""


@pytest.fixture(params=[MYPYC, "raise ImportError('no mypy')", "def mypycify(*_, **__): raise SystemExit(1)"])
def broken(request, tmp_path):
    """Environment variables with which the compilation fails: in C, without mypyc, or because mypy finds an error."""
    (tmp_path / "mypyc").mkdir()
    (tmp_path / "mypyc" / "__init__.py").touch()
    (tmp_path / "mypyc" / "build.py").write_text(request.param)
    return {"PYTHONPATH": str(tmp_path)}


def test_what_cannot_be_compiled_is_installed_as_it_is(wheel, broken, tmp_path):
    with zipfile.ZipFile(make_wheel(tmp_path, compile_it="", **broken)) as archive:
        files = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert files == {name for name in wheel.namelist() if ".dist-info/" not in name}


def test_what_has_to_be_compiled_fails_if_it_cannot(broken, tmp_path):
    with pytest.raises(RuntimeError):
        make_wheel(tmp_path, compile_it="1", **broken)


def test_another_wish_is_refused_in_one_line(tmp_path):
    with pytest.raises(RuntimeError, match=r"^COMPILE_TPU_OFFLOAD=yes; expected 0, 1, or nothing\n$"):
        make_wheel(tmp_path, compile_it="yes")
