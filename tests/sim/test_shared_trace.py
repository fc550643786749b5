"""Known figures for an hour of production traffic."""

import pytest

from tests.grids import few
from tests.sim.traces import SHARED_TRACE, needs_shared_trace
from tpu_offload.core.policies import LRUPolicy
from tpu_offload.sim import TierSetup, belady_hits, read_traces, replay

pytestmark = needs_shared_trace

# By share: LRU and the bound, from the trace's own documentation.
KNOWN = {
    0.005: (0.044, 0.183),
    0.01: (0.053, 0.246),
    0.02: (0.079, 0.314),
    0.05: (0.196, 0.366),
    0.1: (0.279, 0.366),
    0.2: (0.345, 0.366),
}


@pytest.fixture(scope="module")
def trace():
    return read_traces([SHARED_TRACE])


def test_what_is_in_it(trace):
    assert (len(trace.requests), trace.num_blocks, trace.num_unique_blocks) == (12031, 288500, 182790)
    assert trace.notes == ()


@pytest.mark.parametrize("share", few(KNOWN, first=2))
def test_known_figures(trace, share):
    num_chunks = round(share * trace.num_unique_blocks)
    lru = sum(replay(trace, LRUPolicy(), TierSetup(num_chunks)).host_hits) / trace.num_blocks
    bound = sum(belady_hits(trace, num_chunks)) / trace.num_blocks
    # It has three digits; 0.0525 was rounded up.
    assert (lru, bound) == pytest.approx(KNOWN[share], abs=0.00055)
