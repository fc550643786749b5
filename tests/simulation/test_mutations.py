"""Each deliberate bug is caught, on a seed that the unmodified library passes."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.compiled import interpreted_only
from tests.simulation.campaign import run_seeds
from tests.simulation.mutations import MUTATIONS, Mutation, apply, caught, unchanged
from tests.simulation.test_campaign import NUM_STEPS, SEEDS

pytestmark = interpreted_only  # it exchanges the code of functions

MOST_SEEDS = 200  # tried if the recorded seed no longer finds a bug
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


@pytest.mark.wide
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


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_a_mutation_has_its_one_place(mutation):
    mutant = apply(mutation)
    compile(mutant.source, mutant.module, "exec")
    assert mutant.source != unchanged(mutant.path)


def test_there_are_many_and_all_differ():
    assert len({m.name for m in MUTATIONS}) == len(MUTATIONS) >= 25
    assert len(set(map(apply, MUTATIONS))) == len(MUTATIONS)


def test_the_seeds_that_found_them_are_of_these():
    assert caught().keys() <= {m.name for m in MUTATIONS}


@pytest.fixture
def library(tmp_path):
    """A small library to mutate."""
    core = tmp_path / "tpu_offload" / "core"
    (core / "swap").mkdir(parents=True)
    (core / "jobs.py").write_text("class Jobs:\n    def end(self, job):\n        del self.jobs[job]\n")
    (core / "swap" / "pool.py").write_text("class Pool:\n    def end(self):\n        self.pool = self.free = []\n")
    return tmp_path


def test_a_function_is_found_in_whatever_module_it_is(library):
    mutation = Mutation("x", "Pool.end", "[]", "None")
    mutant = apply(mutation, root=library)
    assert mutant.module == "tpu_offload.core.swap.pool"
    assert mutant.source == "class Pool:\n\n    def end(self):\n        self.pool = self.free = None\n"


@pytest.mark.parametrize(
    ("function", "find", "message"),
    [
        ("Jobs.fend", "job", "Jobs.fend is not a function in tpu_offload/core; nearest: Jobs.end, Pool.end"),
        (
            "Jobs.end",
            "self.job",
            "Jobs.end (tpu_offload/core/jobs.py:2): `self.job` does not match; nearest is line 3, `del self.jobs[job]`",
        ),
        (
            "Pool.end",
            "self",
            "Pool.end (tpu_offload/core/swap/pool.py:2): `self` matches 2 times, in lines 3, 3; expected once",
        ),
    ],
)
def test_a_mutation_that_does_not_fit_is_an_error_of_one_line(library, function, find, message):
    with pytest.raises(ValueError, match=f"^mutation 'x': {re.escape(message)}$"):
        apply(Mutation("x", function, find, "None"), root=library)


def test_a_function_that_is_there_twice_is_an_error(library):
    (library / "tpu_offload" / "core" / "pool.py").write_text("class Pool:\n    def end(self):\n        pass\n")
    with pytest.raises(ValueError, match=r"Pool.end is a function 2 times, in .*core/pool.py, .*/swap/pool.py"):
        apply(Mutation("x", "Pool.end", "[]", "None"), root=library)
