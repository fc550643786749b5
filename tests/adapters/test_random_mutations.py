"""Deliberate bugs in what a model with windows or states needs are found by the random runs under vLLM's scheduler.

`tests.simulation.mutations` has these bugs and more. Those that only waste memory or lose hits change no byte that is
read here; the simulation finds these.
"""

import json
import os
import subprocess
import sys

import pytest

from tests.simulation.mutations import MUTATIONS, ROOT

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

FOUND = (
    # Group lookup.
    "a window is loaded into the blocks of the layer group before it",
    "a window is saved from the blocks of the layer group before it",
    "the windows of two layer groups have one name",
    # Window arithmetic.
    "a load lacks the first block of a window",
    "a load copies a block before a window",
    "a checkpoint lacks the first chunk of a window",
    "a window is loaded from the slots of the boundary before",
    "a window that has been passed is saved",
    # Boundaries.
    "a request is promised all of its tokens with a checkpoint",
    "the last checkpoint is found a chunk before its boundary",
    "a checkpoint is found a chunk before its boundary",
    "a checkpoint is saved a step too late",
    "the state of the block before is saved",
    "a state is loaded into the row of the block before",
    "the first state is loaded, whose ever it is",
    # Slots of the host tier.
    "a window chunk that is being saved has one reference",
    "a shared window chunk has no reference more",
    "a dropped checkpoint that a load has read keeps its slots",
    "a promise does not hold its checkpoint",
    "a load that has ended holds its checkpoint",
)


@pytest.fixture(scope="module")
def found():
    command = [sys.executable, "-W", "ignore", "-m", "tests.adapters.random_mutations", "--seeds", "60"]
    names = [argument for name in FOUND for argument in ("--only", name)]
    result = subprocess.run([*command, *names], env=os.environ, cwd=ROOT, check=True, capture_output=True, text=True)
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    return {line["name"]: line for line in lines}


def test_the_bugs_exist():
    assert set(FOUND) <= {mutation.name for mutation in MUTATIONS}


@pytest.mark.parametrize("name", FOUND)
def test_a_bug_is_found(found, name):
    assert found[name].get("error", "") == ""
    assert found[name]["violation"]
