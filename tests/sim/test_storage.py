"""Simulated storage tiers."""

from tests.core.policies.residents import chunk_keys
from tpu_offload.config import StorageWriteEvent
from tpu_offload.sim.storage import StorageSetup, StorageStack, StorageTier


def held(tier):
    return [key for key in chunk_keys("a b c d") if tier.find([key], 0)]


def test_the_tail_is_evicted_first():
    tier = StorageTier(StorageSetup(2), 99)
    tier.save(chunk_keys("c b a"))
    assert held(tier) == chunk_keys("a b")
    tier.touch(chunk_keys("a b c"))
    tier.save(chunk_keys("d"))
    assert held(tier) == chunk_keys("a d")
    assert (tier.num_saved, tier.num_evicted) == (4, 2)


def test_saving_a_resident_chunk_only_touches_it():
    tier = StorageTier(StorageSetup(2), 99)
    tier.save(chunk_keys("a b"))
    tier.save(chunk_keys("a"))
    tier.save(chunk_keys("c"))
    assert held(tier) == chunk_keys("a c")
    assert tier.num_saved == 3


def test_a_lookup_continues_where_the_host_tier_ended():
    tier = StorageTier(StorageSetup(9), 99)
    tier.save(chunk_keys("b c"))
    keys = chunk_keys("a b c d")
    assert [tier.find(keys, first) for first in range(5)] == [0, 2, 1, 0, 0]


def stack(*tiers):
    return StorageStack([StorageSetup(num, StorageWriteEvent(write_on)) for num, write_on in tiers], 99)


def test_runs_come_from_the_nearest_tier_that_has_the_next_chunk():
    tiers = stack((9, "save"), (9, "save"))
    near, far = tiers.tiers
    near.save(chunk_keys("a d"))
    far.save(chunk_keys("a b c d e"))
    assert tiers.find(chunk_keys("a b c d e f"), 0) == [0, 1, 1, 1, 1], "a tier reads all that it has from there on"
    assert tiers.find(chunk_keys("a b c d e f"), 3) == [0, 1]
    assert tiers.find(chunk_keys("f a"), 0) == []


def test_what_a_tier_gave_is_offered_to_nearer_ones_only():
    tiers = stack((9, "save"), (9, "eviction"), (9, "save"), (9, "save"))
    source = dict(zip(chunk_keys("b c"), (2, 0), strict=True))
    tiers.save(chunk_keys("a b c"), source.get)
    assert [held(tier) for tier in tiers.tiers] == [chunk_keys("a b"), [], chunk_keys("a"), chunk_keys("a")]
    tiers.demote(chunk_keys("d"))
    assert [held(tier) for tier in tiers.tiers][1] == chunk_keys("d")
