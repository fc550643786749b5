"""The bound matches its definition, and no schedule found by exhaustive search hits more."""

import itertools
import random

import pytest

from tests.sim.traces import random_trace
from tpu_offload.sim import belady_hits, simulate_hbm


def by_definition(trace, num_chunks):
    """The definition: per request, count hits before the first miss, add all blocks, evict down to the capacity."""
    prompts = [request.blocks for request in trace.requests]
    held: set[int] = set()
    hits: list[int] = []

    def next_use(number, block):
        return next((i for i in range(number + 1, len(prompts)) if block in prompts[i]), len(prompts))

    def depth(block):
        return 0 if trace.parents[block] < 0 else 1 + depth(trace.parents[block])

    for number, blocks in enumerate(prompts):
        hits.append(len(list(itertools.takewhile(held.__contains__, blocks))))
        held.update(blocks)
        while len(held) > num_chunks:
            held.remove(max(held, key=lambda block: (next_use(number, block), depth(block))))
        assert all(trace.parents[block] in held or trace.parents[block] < 0 for block in held), "a prefix has a hole"
    return hits


def best_of_all(trace, num_chunks, *, hbm_result=None, first_counted=0):
    """The most hits of any schedule, by exhaustive search: between requests it may keep any subset of blocks."""
    best: dict[frozenset[int], int] = {frozenset(): 0}
    in_hbm = set()
    for number, request in enumerate(trace.requests):
        first = hbm_result.hits[number] if hbm_result else 0
        in_hbm.update(request.blocks)
        following: dict[frozenset[int], int] = {}
        for held, num_hits in best.items():
            if number >= first_counted:
                num_hits += len(list(itertools.takewhile(held.__contains__, request.blocks[first:])))
            reach = held | in_hbm
            for size in range(min(num_chunks, len(reach)) + 1):
                for kept in map(frozenset, itertools.combinations(sorted(reach), size)):
                    following[kept] = max(num_hits, following.get(kept, 0))
        best = following
        in_hbm.difference_update(hbm_result.evicted[number] if hbm_result else in_hbm.copy())
    return max(best.values())


@pytest.mark.parametrize("seed", range(60))
def test_matches_its_definition(seed):
    rng = random.Random(seed)
    trace = random_trace(rng, num_requests=rng.randint(1, 40), num_blocks=rng.randint(1, 30))
    for num_chunks in (1, 2, 3, 5, 8, 13, 30):
        assert belady_hits(trace, num_chunks) == by_definition(trace, num_chunks)


@pytest.mark.parametrize("seed", range(40))
def test_no_schedule_hits_more(seed):
    rng = random.Random(seed)
    trace = random_trace(rng, num_requests=rng.randint(2, 9), num_blocks=rng.randint(2, 7))
    for num_chunks in (1, 2, 3, 4):
        assert sum(belady_hits(trace, num_chunks)) == best_of_all(trace, num_chunks)


@pytest.mark.parametrize("seed", range(20))
def test_no_schedule_hits_more_after_the_split(seed):
    rng = random.Random(seed)
    trace = random_trace(rng, num_requests=8, num_blocks=6)
    for num_chunks, first in itertools.product((1, 2, 3), (2, 4, 6)):
        hits = belady_hits(trace, num_chunks, first_counted=first)
        assert sum(hits[first:]) == best_of_all(trace, num_chunks, first_counted=first)


@pytest.mark.parametrize("seed", range(30))
def test_no_way_of_saving_hits_more_behind_hbm(seed):
    rng = random.Random(seed)
    trace = random_trace(rng, num_requests=9, num_blocks=7)
    for num_hbm_blocks, num_chunks in itertools.product((1, 2, 3, 4), (1, 2, 3)):
        hbm_result = simulate_hbm(trace, num_hbm_blocks)
        assert sum(belady_hits(trace, num_chunks, hbm_result=hbm_result)) == best_of_all(
            trace, num_chunks, hbm_result=hbm_result
        )


def test_nothing_to_hit():
    trace = random_trace(random.Random(0), num_requests=0, num_blocks=1)
    assert belady_hits(trace, 3) == []
