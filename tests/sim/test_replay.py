"""Replays compared with simple references: ordered dictionaries instead of the index and its policies."""

import itertools
import random
from collections import OrderedDict

import pytest

from tests.sim.traces import chats, make_trace, random_trace
from tpu_offload.config import SaveEvent, StorageAdmission, StorageEvictionPolicy, StorageWriteEvent
from tpu_offload.core.policies import POLICIES, LRUPolicy, Use
from tpu_offload.sim import StorageSetup, TierSetup, belady_hits, replay, simulate_hbm
from tpu_offload.sim.tier import Tier

SIZES = (1, 2, 5, 11, 23, 60, 200)


class PlainLRU:
    """LRU by block; the head of a prompt is more recent than its tail."""

    def __init__(self, size):
        self.size, self.blocks = size, OrderedDict()

    def find(self, blocks, first=0):
        return len(list(itertools.takewhile(self.blocks.__contains__, blocks[first:])))

    def use(self, blocks):
        """Uses blocks; returns the evicted ones."""
        for block in reversed(blocks):
            self.blocks[block] = None
            self.blocks.move_to_end(block)
        return [self.blocks.popitem(last=False)[0] for _ in range(len(self.blocks) - self.size)]


def plain_hits(trace, size):
    cache, hits = PlainLRU(size), []
    for request in trace.requests:
        hits.append(cache.find(request.blocks))
        cache.use(request.blocks)
    return tuple(hits)


def longest(trace):
    return max(len(request.blocks) for request in trace.requests)


@pytest.fixture
def chat_trace(tmp_path):
    return make_trace(tmp_path, chats(random.Random(5), num_requests=300))


def unlimited_hits(trace):
    return plain_hits(trace, trace.num_unique_blocks)


@pytest.mark.parametrize("seed", range(25))
def test_lru_is_lru(seed):
    rng = random.Random(seed)
    trace = random_trace(rng, num_requests=200, num_blocks=rng.randint(3, 60))
    for size in SIZES:
        outcome = replay(trace, LRUPolicy(), TierSetup(size))
        if size >= longest(trace):
            assert outcome.host_hits == plain_hits(trace, size)
            assert outcome.num_dropped == 0
        assert sum(outcome.host_hits) + outcome.num_saved + outcome.num_dropped == trace.num_blocks
        assert 0 <= outcome.num_saved - outcome.num_evicted <= size


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_stays_below_the_bound(chat_trace, name):
    for size in SIZES:
        hits = replay(chat_trace, POLICIES[name](), TierSetup(size)).host_hits
        assert sum(hits) <= sum(belady_hits(chat_trace, size))
        assert hits == replay(chat_trace, POLICIES[name](), TierSetup(size)).host_hits
    assert replay(chat_trace, POLICIES[name](), TierSetup(10**4)).host_hits == unlimited_hits(chat_trace)


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_keeps_the_invariants_of_the_index(chat_trace, name):
    tier = Tier(POLICIES[name](), num_chunks=25)
    for number, request in enumerate(chat_trace.requests):
        keys = [chat_trace.keys[block] for block in request.blocks]
        tier.touch(Use(number), keys, tier.find(keys))
        tier.save(Use(number), keys, len(keys))
        tier.check_invariants()
        tier.settle()
        tier.check_invariants()


@pytest.mark.parametrize("seed", range(10))
def test_hbm_in_front(seed):
    rng = random.Random(seed)
    trace = random_trace(rng, num_requests=200, num_blocks=50)
    for hbm_size, size in itertools.product((5, 15, 30), (8, 20, 40)):
        if min(hbm_size, size) < longest(trace):
            continue
        hbm_result = simulate_hbm(trace, hbm_size)
        hbm, host, hits = PlainLRU(hbm_size), PlainLRU(size), []
        for number, request in enumerate(trace.requests):
            in_hbm = hbm.find(request.blocks)
            assert hbm_result.hits[number] == in_hbm
            hits.append(host.find(request.blocks, in_hbm))
            assert set(hbm_result.evicted[number]) == set(hbm.use(request.blocks))
            host.use(request.blocks)
        assert replay(trace, LRUPolicy(), TierSetup(size), hbm_result=hbm_result).host_hits == tuple(hits)


def test_write_through_is_useless_up_to_the_size_of_hbm(chat_trace):
    """It duplicates HBM. With saves on eviction there are hits."""
    hbm_result = simulate_hbm(chat_trace, 60)
    for size in (35, 60):
        assert sum(replay(chat_trace, LRUPolicy(), TierSetup(size), hbm_result=hbm_result).host_hits) == 0
    on_eviction = TierSetup(60, save_on=SaveEvent.HBM_EVICTION)
    hits = replay(chat_trace, LRUPolicy(), on_eviction, hbm_result=hbm_result).host_hits
    assert 0 < sum(hits) <= sum(belady_hits(chat_trace, 60, hbm_result=hbm_result))


def test_saved_when_hbm_evicts_is_never_lost_with_room_for_all(chat_trace):
    """Every computed block is in HBM or in the host tier."""
    hbm_result = simulate_hbm(chat_trace, 60)
    outcome = replay(chat_trace, LRUPolicy(), TierSetup(10**4, save_on=SaveEvent.HBM_EVICTION), hbm_result=hbm_result)
    hits = tuple(a + b for a, b in zip(hbm_result.hits, outcome.host_hits, strict=True))
    assert hits == unlimited_hits(chat_trace)
    assert outcome.num_saved < chat_trace.num_unique_blocks


def test_a_prompt_larger_than_hbm(chat_trace):
    hbm_result = simulate_hbm(chat_trace, 10)
    on_eviction = TierSetup(10**4, save_on=SaveEvent.HBM_EVICTION)
    hits = replay(chat_trace, LRUPolicy(), on_eviction, hbm_result=hbm_result).host_hits
    assert tuple(a + b for a, b in zip(hbm_result.hits, hits, strict=True)) == unlimited_hits(chat_trace)


def test_saved_at_the_second_sighting(tmp_path):
    trace = make_trace(tmp_path, [[1, 2], [1, 3], [1, 3], [1, 3]])
    outcome = replay(trace, LRUPolicy(), TierSetup(10, num_sightings=2))
    assert outcome.host_hits == (0, 0, 1, 2)
    assert outcome.num_saved == 2


def storage_hits(outcome):
    """Per request, blocks that hit in any storage tier."""
    return [sum(hits) for hits in zip(*(tier.hits for tier in outcome.storage), strict=True)]


@pytest.mark.parametrize("write_on", StorageWriteEvent)
def test_a_storage_tier_with_room_for_all(chat_trace, write_on):
    """Everything that was ever saved hits in one of the tiers."""
    for size in (60, 90, 200):
        outcome = replay(chat_trace, LRUPolicy(), TierSetup(size, storage=(StorageSetup(10**4, write_on),)))
        hits = tuple(a + b for a, b in zip(outcome.host_hits, storage_hits(outcome), strict=True))
        assert hits == unlimited_hits(chat_trace)
        assert outcome.host_hits == plain_hits(chat_trace, size)
        most = outcome.num_evicted if write_on is StorageWriteEvent.HOST_EVICTION else chat_trace.num_unique_blocks
        assert 0 < outcome.storage[0].num_written <= most
        assert sum(storage_hits(outcome)) == outcome.num_promoted > 0


@pytest.mark.parametrize("write_on", StorageWriteEvent)
def test_admission_writes_only_what_was_used(chat_trace, write_on):
    """With room for all, each chunk that is used often enough is written once, and no other is."""

    def run(admission):
        return replay(chat_trace, LRUPolicy(), TierSetup(60, storage=(StorageSetup(10**4, write_on, admission),)))

    everything = run(StorageAdmission.ALL)
    for admission in (StorageAdmission.SECOND_SIGHTING, StorageAdmission.AFTER_HIT):
        outcome = run(admission)
        assert 0 < outcome.storage[0].num_written < everything.storage[0].num_written
        assert 0 < sum(storage_hits(outcome)) < sum(storage_hits(everything))
    prompts = [set(request.blocks) for request in chat_trace.requests]
    num_seen_twice = sum(sum(block in blocks for blocks in prompts) > 1 for block in set().union(*prompts))
    assert run(StorageAdmission.SECOND_SIGHTING).storage[0].num_written <= num_seen_twice


def test_a_small_storage_tier(chat_trace):
    """With writes on eviction it holds other chunks than the host tier, with writes on save mostly the same."""
    sums = {}
    for write_on in StorageWriteEvent:
        setup = TierSetup(60, storage=(StorageSetup(60, write_on, eviction=StorageEvictionPolicy.LRU),))
        sums[write_on] = sum(storage_hits(replay(chat_trace, LRUPolicy(), setup)))
    assert sums[StorageWriteEvent.HOST_EVICTION] > 2 * sums[StorageWriteEvent.SAVE]


@pytest.mark.parametrize("policy", [StorageEvictionPolicy.AUTO, StorageEvictionPolicy.LRU])
def test_a_stack_hits_where_its_tiers_alone_would(tmp_path, policy):
    """The near tier takes hits from the far one, and together they hit about as much as the far one alone.

    With `auto` the near tier, of 70 chunks, may change its policy at another time if there is a far one.
    """
    alone = in_stack = 0
    for seed in range(8):
        trace = make_trace(tmp_path, chats(random.Random(seed), num_requests=300))

        def run(*sizes, trace=trace):
            storage = tuple(StorageSetup(size, eviction=policy) for size in sizes)
            outcome = replay(trace, LRUPolicy(), TierSetup(40, storage=storage))
            return [sum(tier.hits) for tier in outcome.storage]

        (near,), (far,), both = run(70), run(10**4), run(70, 10**4)
        assert near == both[0] or policy is StorageEvictionPolicy.AUTO
        assert min(both) > 0
        assert sum(both) == far
        alone, in_stack = alone + near, in_stack + both[0]
    assert in_stack >= 0.9 * alone
