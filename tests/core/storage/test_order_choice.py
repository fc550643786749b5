"""Which order of eviction a storage tier gets."""

import pytest

from tpu_offload.config import StorageEvictionPolicy
from tpu_offload.core.policies import POLICIES
from tpu_offload.core.storage.adaptive_order import AdaptiveOrder
from tpu_offload.core.storage.eviction_order import RecencyOrder
from tpu_offload.core.storage.order_choice import make_order
from tpu_offload.core.storage.policy_order import PolicyOrder


def test_every_built_in_policy_can_be_set():
    assert {policy.value for policy in StorageEvictionPolicy} == {"auto", *POLICIES}


@pytest.mark.parametrize(
    ("capacity", "demotes", "kind"),
    [
        (50, False, PolicyOrder),
        (49, False, AdaptiveOrder),
        (9, False, AdaptiveOrder),
        (8, False, RecencyOrder),
        (1, False, RecencyOrder),
        (19, True, PolicyOrder),
        (18, True, AdaptiveOrder),
        (3, True, AdaptiveOrder),
        (2, True, RecencyOrder),
    ],
)
def test_auto_depends_on_the_size(caplog, capacity, demotes, kind):
    caplog.set_level("INFO")
    order = make_order(StorageEvictionPolicy.AUTO, capacity=capacity, num_above=10, demotes=demotes, label="a tier")
    assert isinstance(order, kind)
    assert "a tier evicts by " in caplog.text
    assert order.expects == (demotes and kind is not RecencyOrder)


@pytest.mark.parametrize(("capacity", "demotes"), [(1000, False), (2000, True), (1000, True), (250, True)])
def test_the_same_share_of_the_memory_is_a_few_chunks_less(capacity, demotes):
    """By the headers of the records, and because sizes are rounded. Nothing changes by that."""
    whole, less = (
        make_order(StorageEvictionPolicy.AUTO, capacity=num, num_above=1000, demotes=demotes, label="a tier")
        for num in (capacity, capacity * 998 // 1000)
    )
    assert type(less) is type(whole)


@pytest.mark.parametrize(("capacity", "first", "second"), [(25, "density", "lru"), (24, "lru", "density")])
def test_of_two_compared_orders_the_size_says_which_is_first(caplog, capacity, first, second):
    caplog.set_level("INFO")
    order = make_order(StorageEvictionPolicy.AUTO, capacity=capacity, num_above=10, demotes=False, label="a tier")
    assert isinstance(order, AdaptiveOrder)
    assert order.followed == first
    assert f"a tier evicts by {first}, and by {second} when" in caplog.text
