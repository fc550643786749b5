"""The patches in docs/upstream apply to the installed tpu-inference, one after the other."""

import pathlib
import re
import shutil
import subprocess

import pytest

pytestmark = pytest.mark.vllm

DOCS = pathlib.Path(__file__).parents[2] / "docs" / "upstream"


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_patches_apply(tmp_path):
    import tpu_inference

    installed, changed = pathlib.Path(tpu_inference.__path__[0]).parent, set()
    documents = sorted(DOCS.glob("*.md"))
    assert documents
    for document in documents:
        (patch,) = re.findall(r"```diff\n(.*?)```\n", document.read_text(), re.DOTALL)
        for name in re.findall(r"^\+\+\+ b/(.*)$", patch, re.MULTILINE):
            if name not in changed:
                changed.add(name)
                (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(installed / name, tmp_path / name)
        done = subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=patch, text=True, capture_output=True)
        assert done.returncode == 0, f"{document.name}: {done.stderr}"
    assert len(changed) == 4
    for name in changed:
        text = (tmp_path / name).read_text()
        compile(text, name, "exec")
        assert text != (installed / name).read_text()
