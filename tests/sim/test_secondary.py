"""The secondary tier alone."""

from tpu_offload.sim.secondary import SecondaryTier


def held(tier):
    return [key for key in (b"a", b"b", b"c", b"d") if tier.find([key], 0)]


def test_the_tail_goes_first():
    tier = SecondaryTier(2)
    tier.save([b"c", b"b", b"a"])
    assert held(tier) == [b"a", b"b"]
    tier.touch([b"a", b"b", b"c"])
    tier.save([b"d"])
    assert held(tier) == [b"a", b"d"]
    assert (tier.num_saved, tier.num_evicted) == (4, 2)


def test_what_is_there_costs_nothing_and_counts_as_used():
    tier = SecondaryTier(2)
    tier.save([b"a", b"b"])
    tier.save([b"a"])
    tier.save([b"c"])
    assert held(tier) == [b"a", b"c"]
    assert tier.num_saved == 3


def test_a_lookup_goes_on_where_the_host_tier_ended():
    tier = SecondaryTier(9)
    tier.save([b"b", b"c"])
    keys = [b"a", b"b", b"c", b"d"]
    assert [tier.find(keys, first) for first in range(5)] == [0, 2, 1, 0, 0]
