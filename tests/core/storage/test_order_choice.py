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


@pytest.mark.parametrize(
    ("share", "demotes"), [(5, False), (2.5, False), (1, False), (2, True), (1, True), (0.25, True)]
)
def test_a_share_of_the_memory_counts_although_headers_take_some(share, demotes):
    limit, num_above = int(1000 * share), 1000

    def kind(capacity):
        order = make_order(
            StorageEvictionPolicy.AUTO, capacity=capacity, num_above=num_above, demotes=demotes, label="a tier"
        )
        return type(order), order.followed if isinstance(order, AdaptiveOrder) else ""

    if share == 5:
        assert kind(limit) != kind(limit - 1), (
            "twice as large as what it is compared up to: there headers are no matter"
        )
    else:
        assert kind(limit) == kind(limit - limit // 500)


@pytest.mark.parametrize(("capacity", "first", "second"), [(25, "density", "lru"), (24, "lru", "density")])
def test_of_two_compared_orders_the_size_says_which_is_first(caplog, capacity, first, second):
    caplog.set_level("INFO")
    order = make_order(StorageEvictionPolicy.AUTO, capacity=capacity, num_above=10, demotes=False, label="a tier")
    assert isinstance(order, AdaptiveOrder)
    assert order.followed == first
    assert f"a tier evicts by {first}, and by {second} when" in caplog.text
