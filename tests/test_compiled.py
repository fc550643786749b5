"""The compiled modules that users have; in an interpreted package these tests say nothing (scripts/test --compiled)."""

import importlib
from pathlib import Path

import pytest

import tpu_offload
from tpu_offload.core.policies import LRUPolicy
from tpu_offload.core.scheduler import OffloadScheduler
from tpu_offload.native import is_compiled

pytestmark = pytest.mark.skipif(not is_compiled(), reason="the package is interpreted")
CORE = Path(tpu_offload.__file__).parent / "core"
INTERPRETED = {"__init__.py", "engine_api.py", "validate.py"}  # as in setup.py


@pytest.mark.parametrize("path", sorted(CORE.rglob("*.py")), ids=lambda path: path.relative_to(CORE).as_posix())
def test_a_module_is_compiled_unless_it_validates(path):
    name = ".".join(path.relative_to(CORE.parents[1]).with_suffix("").parts)
    if path.name == "__init__.py":
        name = name.removesuffix(".__init__")
    file = importlib.import_module(name).__file__
    assert file is not None
    assert file.endswith(".py") == (path.name in INTERPRETED)


def test_nothing_of_a_compiled_class_can_be_replaced():
    with pytest.raises((AttributeError, TypeError)):
        LRUPolicy().evict = None  # type: ignore[assignment]
    with pytest.raises(TypeError):
        OffloadScheduler.match = None  # type: ignore[assignment]
