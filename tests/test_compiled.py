"""The compiled modules that users have; in an interpreted package these tests say nothing (scripts/test --compiled)."""

import importlib
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tpu_offload
from tests.core.fakes import LAYOUT
from tpu_offload import Candidate, MatchState, OffloadConfig, OffloadScheduler
from tpu_offload.native import is_compiled

pytestmark = pytest.mark.skipif(not is_compiled(), reason="the package is interpreted")
CORE = Path(tpu_offload.__file__).parent / "core"
INTERPRETED = {"__init__.py", "engine_api.py"}  # as in setup.py


@pytest.mark.parametrize("path", sorted(CORE.rglob("*.py")), ids=lambda path: path.relative_to(CORE).as_posix())
def test_a_module_is_compiled_unless_engines_make_its_objects(path):
    name = ".".join(path.relative_to(CORE.parents[1]).with_suffix("").parts)
    if path.name == "__init__.py":
        name = name.removesuffix(".__init__")
    file = importlib.import_module(name).__file__
    assert file is not None
    assert file.endswith(".py") == (path.name in INTERPRETED)


NESTED = """
from tpu_offload.core.policies import Use
from tpu_offload.core.policies.run_keys import RunKeys
from tpu_offload.core.request_state import Arrival, LastMatch
from tpu_offload.core.saving import Offer

for depth in range(160):
    for make in (lambda: Use(1), lambda: RunKeys([b"x"]), Arrival, LastMatch, lambda: Offer(1, [], 0, (), [])):
        held = make()
        for _ in range(depth):
            held = [held]
        del held
"""


def test_what_holds_each_other_is_freed_without_writing_elsewhere():
    """CPython frees more than 50 levels in turn, and notes those that wait in their headers, which some types lack."""
    env = os.environ | {"PYTHONMALLOC": "debug"}  # ends the process where memory was overwritten
    done = subprocess.run([sys.executable, "-c", NESTED], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[:2000]


def test_a_method_of_a_compiled_object_cannot_be_replaced():
    with pytest.raises(AttributeError, match="read-only"):
        OffloadScheduler(OffloadConfig.create(), LAYOUT).match = None  # type: ignore[assignment]


def test_candidates_are_sent_to_other_processes():
    candidate = Candidate(request_id="a", block_tables=[[1]], num_new_blocks=[0])
    assert pickle.loads(pickle.dumps(candidate)) == candidate


def test_integers_of_numpy_are_accepted_as_ever():
    offload = OffloadScheduler(OffloadConfig.create(), LAYOUT, num_workers=np.int64(1))  # type: ignore[arg-type]
    match = offload.match("a", [], num_tokens=np.int64(17), num_computed_tokens=np.uint8(0))  # type: ignore[arg-type]
    assert match.state is MatchState.MISS
