"""Swap or recompute, by what was measured."""

import pytest

from tpu_offload.config import SwapMode
from tpu_offload.core.swap.costs import SwapCosts
from tpu_offload.types import Direction


def measured(mode=SwapMode.AUTO, *, out=100, back=50, prefill=10):
    costs = SwapCosts(mode)
    costs.observe_copy(Direction.SAVE, out, 1.0)
    costs.observe_copy(Direction.LOAD, back, 1.0)
    costs.observe_prefill(prefill, 1.0)
    return costs


def prefers(costs, nbytes, tokens):
    return costs.prefers_swap(nbytes_out=nbytes, nbytes_in=nbytes, num_recompute_tokens=tokens)


def test_the_faster_one_wins():
    costs = measured()
    assert prefers(costs, 100, 31)  # 1 s out, 2 s back, against 3.1 s
    assert prefers(costs, 100, 30)
    assert not prefers(costs, 100, 29)


def test_each_direction_has_its_own_rate():
    costs = measured(out=1000, back=10)
    assert costs.prefers_swap(nbytes_out=1000, nbytes_in=0, num_recompute_tokens=10)
    assert not costs.prefers_swap(nbytes_out=0, nbytes_in=11, num_recompute_tokens=10)


@pytest.mark.parametrize("missing", ["out", "back", "prefill"])
def test_without_a_measurement_swapping_is_preferred(missing):
    assert prefers(measured(**{missing: 0}), 10**9, 1)


def test_modes_force_one():
    assert prefers(measured(SwapMode.SWAP), 10**9, 1)
    assert not prefers(measured(SwapMode.RECOMPUTE), 1, 10**9)


def test_a_decision_against_swapping_is_looked_at_again():
    """One slow measurement must not turn swapping off for good: nothing would measure it any more."""
    costs = measured(out=1)
    assert [prefers(costs, 100, 31) for _ in range(48)].count(True) == 3
    for _ in range(9):
        costs.observe_copy(Direction.SAVE, 100, 1.0)
    assert all(prefers(costs, 100, 31) for _ in range(10))


def test_times_that_were_not_measured_change_nothing():
    costs = measured()
    costs.observe_copy(Direction.SAVE, 10**9, 0.0)
    costs.observe_prefill(0, 1.0)
    costs.observe_prefill(100, 0.0)
    assert costs.nbytes_per_s(Direction.SAVE) == 100
    assert costs.prefill_tokens_per_s == 10


def test_old_measurements_are_forgotten():
    costs = measured(prefill=10)
    for _ in range(5):
        costs.observe_prefill(1000, 1.0)
    assert costs.prefill_tokens_per_s == 1000


def test_one_measurement_that_met_a_compile_does_no_harm():
    costs = measured(prefill=1000)
    costs.observe_prefill(1000, 1.0)
    costs.observe_prefill(1000, 3600.0)
    assert costs.prefill_tokens_per_s == 1000
