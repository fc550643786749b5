"""Every file and method named in docs/architecture.md exists."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "tpu_offload"
TEXT = (ROOT / "docs" / "architecture.md").read_text()
MEMBERS = sorted(set(re.findall(r"`([A-Z]\w+)\.(\w+)`", TEXT)))
FILES = sorted(set(re.findall(r"`([\w/]+\.py)`", TEXT)))


def members_by_class():
    found: dict[str, Any] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                names = found.setdefault(node.name, set())
                for child in node.body:
                    if isinstance(child, ast.FunctionDef):
                        names.add(child.name)
                    elif isinstance(child, ast.AnnAssign):
                        names.add(child.target.id)
    return found


def test_much_is_named():
    assert len(MEMBERS) > 40
    assert len(FILES) > 20


def test_methods_and_fields():
    classes = members_by_class()
    assert [f"{name}.{member}" for name, member in MEMBERS if member not in classes.get(name, ())] == []


@pytest.mark.parametrize("path", FILES)
def test_files(path):
    assert (PACKAGE / path).is_file() or (ROOT / path).is_file()
