"""Which records of a storage tier are evicted first: chooses the order.

Chunks of full attention in a private tier may be ordered by an eviction policy (`policy_order`), or by the better of
one and recency (`adaptive_order`).

Other records are evicted least recently used first: those of a model with windows or states, where a chunk is of use
only with a checkpoint, and those of a tier that other engines share, where nothing is evicted but what is known of it.
"""

import logging

from tpu_offload.config import StorageEvictionPolicy
from tpu_offload.core.policies import POLICIES, PriorityPolicy
from tpu_offload.core.storage.adaptive_order import AdaptiveOrder
from tpu_offload.core.storage.eviction_order import EvictionOrder, RecencyOrder
from tpu_offload.core.storage.policy_order import PolicyOrder

AUTO_RATIO = 5
"""From which ratio of a tier to what is above it on density was not worse in the simulator (docs/tiers.md).

A smaller tier keeps by density what the host tier, by the same policy, keeps as well: there it depends on the traffic
whether lru is better.
"""
AUTO_RATIO_IF_DEMOTED = 1.9
"""Likewise where it is written when the host tier evicts, so it has other chunks; it lost 0.003 of the hits at most.

A little less than 2, because twice the memory has a few chunks less than twice as many.
"""
AUTO_RATIO_FOR_LRU = 0.9
"""Below this ratio lru: density gained nothing there. A little less than 1, because equal memory has fewer chunks."""
AUTO_RATIO_FOR_LRU_IF_DEMOTED = 0.24
"""Likewise where it is written when the host tier evicts. Smaller ones than a quarter were not tried."""
AUTO_RATIO_IF_COMPARED = 2.5
"""From which ratio on density is followed first. In a smaller tier it loses up to 0.011 until lru has found more."""

_logger = logging.getLogger(__name__)


def make_order(
    setting: StorageEvictionPolicy, *, capacity: int, num_above: int, demotes: bool, label: str
) -> EvictionOrder:
    """The order for a private tier of chunks of full attention.

    Args:
      setting: the policy.
      capacity: most chunks.
      num_above: the most chunks in the host tier and the nearer tiers.
      demotes: whether chunks are written when the host tier evicts them.
      label: of the tier, for the log.
    """
    num_expected = num_above if demotes else 0
    if setting is StorageEvictionPolicy.AUTO:
        if capacity >= num_above * (AUTO_RATIO_IF_DEMOTED if demotes else AUTO_RATIO):
            setting = StorageEvictionPolicy.DENSITY
        elif capacity < num_above * (AUTO_RATIO_FOR_LRU_IF_DEMOTED if demotes else AUTO_RATIO_FOR_LRU):
            setting = StorageEvictionPolicy.LRU
        else:
            both = [StorageEvictionPolicy.LRU, StorageEvictionPolicy.DENSITY]
            if capacity >= num_above * AUTO_RATIO_IF_COMPARED:
                both.reverse()
            orders = {policy.value: _make(policy, capacity, num_expected=num_expected) for policy in both}
            _logger.info("%s evicts by %s, and by %s when that is found to be better", label, *orders)
            return AdaptiveOrder(orders, capacity, label=label, expects=demotes)
    _logger.info("%s evicts by %s", label, setting.value)
    return _make(setting, capacity, num_expected=num_expected)


def _make(policy: StorageEvictionPolicy, capacity: int, *, num_expected: int) -> EvictionOrder:
    if policy is StorageEvictionPolicy.LRU:
        return RecencyOrder()
    return PolicyOrder(PriorityPolicy(POLICIES[policy.value]), capacity, num_expected=num_expected)
