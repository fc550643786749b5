"""A small campaign: no violation, and no kind of event is rare.

`scripts/simulate --seeds 5000` is a large one.
"""

import os
import subprocess
import sys

import pytest

from tests.simulation import shrink
from tests.simulation.campaign import run_seeds
from tests.simulation.trace import RATES, generate

SEEDS = range(240)
NUM_STEPS = 200

OFTEN = {
    "load jobs": 1000, "save jobs": 3000, "num_evicted_chunks": 1500, "swap-outs": 500, "swap-ins": 300,
    "loads used in part": 20, "failed loads": 100, "failed partly": 50, "failed wholly": 300, "refused": 20,
    "num_timed_out_jobs": 300, "num_lost_results": 200, "num_ignored_results": 200, "cancelled": 100,
    "steps with slots in quarantine": 1000, "num_worker_restarts": 50, "reports of an earlier incarnation": 5,
    "resets": 100, "resets with loads in flight": 20, "promises revoked by a reset": 1,
    "steps with all workers dead": 500, "num_breaker_openings": 30,
    "lost swaps": 100, "aborts while loading": 50, "aborts while swapped": 10, "aborts while promised": 5,
    "aborts while returning": 20, "aborts while running": 200, "aborts while waiting": 100,
    "preempted while loading": 100, "preempted while promised": 10, "preempted while returning": 50,
    "preempted while running": 500, "accepted drafts": 500, "rejected drafts": 500, "waits for a save": 100,
    "waits for a save that timed out": 20,
    "runs with windows": 50, "runs with states": 30, "blocks loaded in windows": 500, "blocks loaded in states": 150,
    "checkpoints": 1000, "superseded checkpoints": 80, "checks that checkpoints work again": 10,
    "aborted steps": 50, "several aborted plans": 20,
    "failed loads that a window was granted for": 1, "blocks read": 500_000, "blocks checked in host memory": 25_000,
    "swap_skipped_blocks": 500, "dropped_save_blocks": 500, "dropped_load_blocks": 100, "finished": 2000,
}  # fmt: skip


@pytest.fixture(scope="module")
def outcome():
    return run_seeds(SEEDS, NUM_STEPS)


@pytest.mark.wide
def test_no_rule_is_broken(outcome):
    for seed, violation in outcome.violations.items():
        setup, actions, _ = shrink.minimal(*generate(seed, NUM_STEPS))
        trace = "\n".join(shrink.explain(setup, actions))
        pytest.fail(f"seed {seed}: {violation}\n{trace}\nscripts/simulate --seed {seed} --steps {NUM_STEPS}")


@pytest.mark.wide
def test_everything_has_happened_often(outcome):
    rare = {name: (outcome.totals[name], least) for name, least in OFTEN.items() if outcome.totals[name] < least}
    assert not rare, "(count, expected minimum)"


@pytest.mark.wide
@pytest.mark.parametrize("kind", RATES)
def test_every_fault_has_happened(outcome, kind):
    if kind not in ("abort", "preempt", "reset"):  # counted by their effects
        assert outcome.totals[f"fault: {kind}"] >= 20


@pytest.mark.wide
def test_requests_end_soon_after_the_faults(outcome):
    assert outcome.totals["most steps to finish"] < 1500


@pytest.mark.wide
def test_a_seed_gives_the_same_run_in_every_process():
    """A run does not depend on the order of sets or on memory addresses."""
    code = (
        "from tests.simulation.trace import generate\n"
        "from tests.simulation.shrink import explain\n"
        "import hashlib\n"
        "print(*(hashlib.sha256('\\n'.join(explain(*generate(s, 200))).encode()).hexdigest() for s in range(12)))"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": str(hash_seed), "JAX_PLATFORMS": "cpu"},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for hash_seed in (1, 2)
    }
    assert len(runs) == 1


def test_runs_with_one_group_are_left_out_on_request():
    outcome = run_seeds(range(20), 20, several_groups=True)
    assert 0 < outcome.totals["runs"] < outcome.num_seeds == 20
    assert outcome.totals["runs"] <= outcome.totals["runs with windows"] + outcome.totals["runs with states"]
