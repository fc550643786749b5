"""The patches in docs/upstream apply to the installed tpu-inference, one after the other."""

import pathlib
import re
import shutil
import subprocess

import pytest

pytestmark = pytest.mark.vllm

DOCS = pathlib.Path(__file__).parents[2] / "docs" / "upstream"
FILE = "tpu_inference/runner/tpu_runner.py"


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_patches_apply(tmp_path):
    import tpu_inference

    target = tmp_path / FILE
    target.parent.mkdir(parents=True)
    source = pathlib.Path(tpu_inference.__path__[0]).parent / FILE
    target.write_text(source.read_text())
    documents = sorted(DOCS.glob("*.md"))
    assert documents
    for document in documents:
        (patch,) = re.findall(r"```diff\n(.*?)```\n", document.read_text(), re.DOTALL)
        done = subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=patch, text=True, capture_output=True)
        assert done.returncode == 0, f"{document.name}: {done.stderr}"
    compile(target.read_text(), FILE, "exec")
    assert target.read_text() != source.read_text()
