"""LRU: recency follows requests."""

from tpu_offload.core.policies import LRUPolicy


def test_the_prefix_used_longest_ago_goes_first() -> None:
    policy = LRUPolicy()
    policy.insert([b"a0", b"a1"])
    policy.insert([b"b0", b"b1"])
    policy.touch([b"a0", b"a1"])
    assert policy.victims(4, lambda key: True) == [b"b1", b"b0", b"a1", b"a0"]


def test_using_a_shared_head_keeps_it_longer_than_both_tails() -> None:
    policy = LRUPolicy()
    policy.insert([b"s", b"a"])
    policy.insert([b"b"])
    policy.touch([b"s", b"b"])
    assert policy.victims(3, lambda key: True) == [b"a", b"b", b"s"]
