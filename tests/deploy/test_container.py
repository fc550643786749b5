"""deploy/container/Containerfile, as far as it can be checked without its base image."""

import configparser
import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from dockerfile_parse import DockerfileParser
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from tests.deploy.manifests import GKE, ROOT
from tests.deploy.test_wheel import SOURCES
from tpu_offload.doctor import versions
from tpu_offload.doctor.versions import SUPPORTED

FILE = ROOT / "deploy" / "container" / "Containerfile"


@pytest.fixture(scope="module")
def steps():
    """Instructions and their values, as an engine reads them."""
    parser = DockerfileParser(fileobj=io.BytesIO(FILE.read_bytes()))
    return [(one["instruction"], one["value"]) for one in parser.structure if one["instruction"] != "COMMENT"]


def test_a_linter_finds_nothing():
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}")
    assert hadolint is not None
    done = subprocess.run([hadolint, "--format", "json", str(FILE)], capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout) == []


def test_the_base_image_has_a_supported_vllm(steps):
    (base,) = [value for kind, value in steps if kind == "ARG" and value.startswith("BASE_IMAGE=")]
    tag = re.fullmatch(r"BASE_IMAGE=docker\.io/vllm/vllm-tpu:v([\d.]+)", base)
    assert tag
    (supported,) = [one for one in SUPPORTED if one.package == "vllm-tpu"]
    assert Version(tag[1]) in SpecifierSet(supported.versions)
    assert [value for kind, value in steps if kind == "FROM"] == ["${BASE_IMAGE} AS build", "${BASE_IMAGE}"]
    kustomization = yaml.safe_load((GKE / "server" / "kustomization.yaml").read_text())
    assert [image["newTag"] for image in kustomization["images"]] == [f"v{tag[1]}"]


def test_what_is_copied_is_what_the_wheel_is_made_of(steps):
    """And nothing else, weights least of all."""
    copied = [value.split() for kind, value in steps if kind in ("COPY", "ADD")]
    assert copied == [[*SOURCES, "./"], ["tpu_offload", "./tpu_offload"]]
    assert all((ROOT / name).exists() for name in (*SOURCES, "tpu_offload"))


def test_extras_exist(steps):
    (extras,) = [value.removeprefix("EXTRAS=") for kind, value in steps if kind == "ARG" and value.startswith("EXTRAS")]
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert {*extras.split(",")} <= {*setup["options.extras_require"]}


def test_its_arguments_are_those_of_vllm_serve(steps):
    assert [json.loads(value) for kind, value in steps if kind == "ENTRYPOINT"] == [["vllm", "serve"]]
    *_, python, flag, code = json.loads([value for kind, value in steps if kind == "RUN"][-1])
    assert (python, flag) == ("python3", "-c")
    done = subprocess.run([sys.executable, flag, code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (1, "")  # not everything is installed in the tests' environment
    assert done.stderr.startswith("vllm-tpu and tpu-inference not installed")


def test_an_image_with_versions_that_do_not_work_is_not_built(monkeypatch, capsys):
    good = {one.package: SpecifierSet(one.versions) for one in SUPPORTED}
    installed = {name: next(v.version for v in found if v.operator == ">=") for name, found in good.items()}
    monkeypatch.setattr(versions, "installed_versions", lambda: installed)
    assert versions.main() == 0
    monkeypatch.setitem(installed, "vllm-tpu", "0.33.0")
    assert versions.main() == 1
    assert "vllm-tpu 0.33.0 is not supported" in capsys.readouterr().err
    monkeypatch.setitem(installed, "vllm-tpu", "0.32.0")
    del installed["tpu-inference"]
    assert versions.main() == 1
