"""Random requests and faults under vLLM's real scheduler: no wrong byte is read, no token differs, nothing leaks.

`python -m tests.adapters.random_campaign` is a larger campaign.
"""

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.adapters.random_modes import MODES
from tests.adapters.random_runs import RandomRun
from tests.grids import few

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("compiled_once")]

NUM_RUNS = {name: 40 if mode.has_windows else 50 for name, mode in MODES.items()}
NUM_RUNS |= {name: 25 for name, mode in MODES.items() if mode.has_states or mode.mixed_heads}
_counts: dict[str, Counter[str]] = {name: Counter() for name in MODES}
modes = pytest.mark.parametrize("mode", few(MODES, "sync-async", "states-async"))
_settings = settings(deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))


@modes
def test_random_runs(mode):
    @settings(_settings, max_examples=NUM_RUNS[mode])
    @given(seed=st.integers(0, 10**6))
    def check(seed):
        run = RandomRun(seed, mode)
        run.run(40)
        _counts[mode].update(run.counts)

    check()


@modes
def test_what_the_runs_must_show_has_happened(mode):
    """The counts differ somewhat from one run of the tests to the next, with the moments at which copies end."""
    counts, groups = _counts[mode], MODES[mode].has_groups
    least = {"blocks loaded": 25, "preemptions": 3, "aborts": 10, "resets": 5, "failed saves": 3}
    least |= {"tokens routed": 500}
    least |= {"failed loads": 1} if groups else {"lost caches": 1}
    if MODES[mode].has_windows:
        least |= {"window blocks to load": 50, "window blocks to save": 300, "positions checked in windows": 50_000}
    if MODES[mode].has_states:
        least |= {"state blocks to load": 10}
    if groups:
        least |= {"evicted chunks": 10, "evicted checkpoints": 5}
    rare = {name: (counts[name], number) for name, number in least.items() if counts[name] < number}
    assert not rare, f"(count, expected minimum); all: {counts}"
