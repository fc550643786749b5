"""The secondary tier."""

from tests.core.policies.residents import chunk_keys
from tpu_offload.sim.secondary import SecondaryTier


def held(tier):
    return [key for key in chunk_keys("a b c d") if tier.find([key], 0)]


def test_the_tail_is_evicted_first():
    tier = SecondaryTier(2)
    tier.save(chunk_keys("c b a"))
    assert held(tier) == chunk_keys("a b")
    tier.touch(chunk_keys("a b c"))
    tier.save(chunk_keys("d"))
    assert held(tier) == chunk_keys("a d")
    assert (tier.num_saved, tier.num_evicted) == (4, 2)


def test_saving_a_resident_chunk_only_touches_it():
    tier = SecondaryTier(2)
    tier.save(chunk_keys("a b"))
    tier.save(chunk_keys("a"))
    tier.save(chunk_keys("c"))
    assert held(tier) == chunk_keys("a c")
    assert tier.num_saved == 3


def test_a_lookup_continues_where_the_host_tier_ended():
    tier = SecondaryTier(9)
    tier.save(chunk_keys("b c"))
    keys = chunk_keys("a b c d")
    assert [tier.find(keys, first) for first in range(5)] == [0, 2, 1, 0, 0]
