"""An hour of a chat service's traffic: what the default policy is to reach on it, and the others against textbooks."""

import functools
from pathlib import Path

import pytest

from tests.core.policies.textbook import TEXTBOOK, prefix_hit_rate
from tests.core.policies.traffic import Tier
from tests.grids import few
from tpu_offload.core.policies import DEFAULT_POLICY, POLICIES
from tpu_offload.sim.belady import belady_hits
from tpu_offload.sim.trace import Trace, read_traces

TRACE = Path(__file__).parents[4] / "shared" / "traces" / "conversation_trace.jsonl"
SHARES = [0.005, 0.01, 0.02, 0.1]
TEXTBOOK_SHARES = [0.005, 0.02, 0.1]
OTHERS = [name for name in POLICIES if name != DEFAULT_POLICY]

pytestmark = pytest.mark.skipif(not TRACE.exists(), reason=f"the shared trace is not at {TRACE}")


class Traffic:
    """A part of the trace, and what each policy reaches on it, worked out when it is asked for first."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.prompts = [[trace.keys[block] for block in request.blocks] for request in trace.requests]
        self.num_unique = len({key for prompt in self.prompts for key in prompt})
        self.num_blocks = sum(map(len, self.prompts))

    def size(self, share: float) -> int:
        return int(share * self.num_unique)

    @functools.cache  # noqa: B019 (they live as long as the module's tests)
    def rate(self, name: str, share: float) -> float:
        tier = Tier(POLICIES[name](), self.size(share))
        return tier.serve_all(self.prompts) / self.num_blocks

    @functools.cache  # noqa: B019
    def textbook_rate(self, name: str, share: float) -> float:
        return prefix_hit_rate(TEXTBOOK[name](self.size(share)), self.prompts)

    def bound(self, share: float) -> float:
        return sum(belady_hits(self.trace, self.size(share))) / self.num_blocks


@pytest.fixture(scope="module")
def parts() -> dict[str, Traffic]:
    trace = read_traces([TRACE])
    half = trace.duration_s / 2
    return {
        "all": Traffic(trace),
        "first half": Traffic(trace.between(0, half)),
        "second half": Traffic(trace.between(half, 2 * half + 1)),
    }


@pytest.mark.wide
@pytest.mark.parametrize("share", SHARES)
def test_the_default_is_at_least_the_best_of_the_others(parts, share) -> None:
    expected = {name: parts["all"].rate(name, share) for name in OTHERS}
    assert parts["all"].rate(DEFAULT_POLICY, share) >= max(expected.values()), expected


@pytest.mark.parametrize("share", few(TEXTBOOK_SHARES, 0.02))
def test_the_default_is_at_least_the_best_textbook(parts, share) -> None:
    expected = {name: parts["all"].textbook_rate(name, share) for name in TEXTBOOK}
    assert parts["all"].rate(DEFAULT_POLICY, share) >= max(expected.values()), expected


@pytest.mark.parametrize("share", [0.01, 0.02])
def test_the_default_covers_part_of_the_distance_from_lru_to_the_bound(parts, share) -> None:
    assert part_of_the_way(parts["all"], share) >= 0.15


@pytest.mark.parametrize("part", few(["first half", "second half"], first=0))
def test_both_hold_for_each_half_alone(parts, part) -> None:
    expected = {name: parts[part].rate(name, 0.02) for name in OTHERS}
    assert parts[part].rate(DEFAULT_POLICY, 0.02) >= max(expected.values()), expected
    assert part_of_the_way(parts[part], 0.02) >= 0.15


def part_of_the_way(traffic: Traffic, share: float) -> float:
    lru, bound = traffic.rate("lru", share), traffic.bound(share)
    return (traffic.rate(DEFAULT_POLICY, share) - lru) / (bound - lru)


@pytest.mark.wide
@pytest.mark.parametrize("name", TEXTBOOK)
@pytest.mark.parametrize("share", TEXTBOOK_SHARES)
def test_no_worse_than_the_textbook(parts, name, share) -> None:
    """Under the prefix rule no policy hits less."""
    expected = parts["all"].textbook_rate(name, share)
    if name == "wtinylfu":
        expected -= 0.005  # no bypass within a request: see the head of its file
    assert parts["all"].rate(name, share) >= expected
