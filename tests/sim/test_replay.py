"""Replays compared with simple references: ordered dictionaries instead of the index and its policies."""

import itertools
import random
from collections import OrderedDict

import pytest

from tests.sim.traces import chats, make_trace, random_trace
from tpu_offload.config import SaveEvent, StorageAdmission, StorageWriteEvent
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


def below(size, write_on, admission=StorageAdmission.ALL, *, num_chunks=10**4):
    """A host tier of this size above a storage tier."""
    return TierSetup(size, storage=(StorageSetup(num_chunks, write_on, admission),))


@pytest.mark.parametrize("write_on", StorageWriteEvent)
def test_a_storage_tier_with_room_for_all(chat_trace, write_on):
    """Everything that was ever saved hits in one of the tiers."""
    for size in (35, 60, 200):
        outcome = replay(chat_trace, LRUPolicy(), below(size, write_on))
        (stored_hits,), (num_stored,) = outcome.storage_hits, outcome.num_stored
        assert tuple(a + b for a, b in zip(outcome.host_hits, stored_hits, strict=True)) == unlimited_hits(chat_trace)
        assert outcome.host_hits == plain_hits(chat_trace, size)
        demotes = write_on is StorageWriteEvent.HOST_EVICTION
        assert 0 < num_stored <= (outcome.num_evicted if demotes else chat_trace.num_unique_blocks)


@pytest.mark.parametrize("write_on", StorageWriteEvent)
def test_admission_writes_only_what_was_used(chat_trace, write_on):
    """With room for all, each chunk that is used often enough is written once, and no other is."""
    everything = replay(chat_trace, LRUPolicy(), below(60, write_on))
    num_stored = {}
    for admission in (StorageAdmission.SECOND_SIGHTING, StorageAdmission.AFTER_HIT):
        outcome = replay(chat_trace, LRUPolicy(), below(60, write_on, admission))
        num_stored[admission] = outcome.num_stored[0]
        assert 0 < outcome.num_stored[0] < everything.num_stored[0]
        assert 0 < sum(outcome.storage_hits[0]) < sum(everything.storage_hits[0])
    prompts = [set(request.blocks) for request in chat_trace.requests]
    num_seen_twice = sum(sum(block in blocks for blocks in prompts) > 1 for block in set().union(*prompts))
    assert num_stored[StorageAdmission.SECOND_SIGHTING] <= num_seen_twice


def test_a_small_storage_tier(chat_trace):
    """Written on eviction it holds other chunks than the host tier, on save mostly the same."""
    sums = {}
    for write_on in StorageWriteEvent:
        sums[write_on] = sum(replay(chat_trace, LRUPolicy(), below(60, write_on, num_chunks=60)).storage_hits[0])
    assert sums[StorageWriteEvent.HOST_EVICTION] > 2 * sums[StorageWriteEvent.SAVE]


def test_a_stack_of_storage_tiers(chat_trace):
    """The far one has all; the nearer one gives what it has, and more of it with more room."""
    far = StorageSetup(10**4)
    near_hits = []
    for num_chunks in (20, 80, 10**4):
        near = StorageSetup(num_chunks, StorageWriteEvent.HOST_EVICTION)
        outcome = replay(chat_trace, LRUPolicy(), TierSetup(40, storage=(near, far)))
        hits = zip(outcome.host_hits, *outcome.storage_hits, strict=True)
        assert tuple(map(sum, hits)) == unlimited_hits(chat_trace)
        assert outcome.host_hits == plain_hits(chat_trace, 40)
        near_hits.append(sum(outcome.storage_hits[0]))
        assert outcome.num_stored[1] == chat_trace.num_unique_blocks
    assert 0 < near_hits[0] < near_hits[1] < near_hits[2]
    assert sum(outcome.storage_hits[1]) == 0, "whatever the host tier has lost is in the nearer one"
