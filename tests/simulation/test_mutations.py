"""Each deliberate bug is caught, on a seed that the library as it is passes."""

import json
import os
import subprocess
import sys

import pytest

from tests.simulation.campaign import run_seeds
from tests.simulation.mutations import MUTATIONS, Mutation, apply, caught, path_of
from tests.simulation.test_campaign import NUM_STEPS, SEEDS

MOST_SEEDS = 200  # of one that is not found any more by the seed that found it before
assert len(SEEDS) >= MOST_SEEDS


@pytest.fixture(scope="module")
def found():
    command = [sys.executable, "-W", "ignore", "-m", "tests.simulation.mutations"]
    result = subprocess.run(
        [*command, "--seeds", str(MOST_SEEDS), "--steps", str(NUM_STEPS)],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        check=True,
        capture_output=True,
        text=True,
    )
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    return {line["name"]: line for line in lines}


def test_the_library_as_it_is_passes_these_seeds():
    assert run_seeds(sorted(set(caught().values())), NUM_STEPS).violations == {}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_a_bug_is_caught(found, mutation):
    this = found[mutation.name]
    assert this.get("error", "") == ""
    assert this["violation"], (
        f"caught neither by seed {caught().get(mutation.name)} nor by the first {MOST_SEEDS}; if the simulation "
        "has changed: python -m tests.simulation.mutations --seeds 2000 --record"
    )


def test_there_are_many_and_all_differ():
    assert len({m.name for m in MUTATIONS}) == len(MUTATIONS) >= 25
    assert len({(m.path, apply(m, path_of(m).read_text())) for m in MUTATIONS}) == len(MUTATIONS)


@pytest.mark.parametrize("old", ["no such text", "self"])
def test_a_mutation_that_does_not_fit_is_an_error(old):
    mutation = Mutation("x", "jobs", old, "")
    with pytest.raises(ValueError, match="times in its file"):
        apply(mutation, path_of(mutation).read_text())
