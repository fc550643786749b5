"""Eviction policies by the names that the settings know."""

from tpu_offload.config import DEFAULT_EVICTION_POLICY, EvictionPolicyName
from tpu_offload.core.policies.arc import ARCPolicy
from tpu_offload.core.policies.base import EvictionPolicy
from tpu_offload.core.policies.lru import LRUPolicy
from tpu_offload.core.policies.priority import PriorityPolicy
from tpu_offload.core.policies.s3fifo import S3FIFOPolicy
from tpu_offload.core.policies.wtinylfu import WTinyLFUPolicy
from tpu_offload.errors import ConfigError

POLICIES: dict[str, type[EvictionPolicy]] = {
    EvictionPolicyName.LRU.value: LRUPolicy,
    EvictionPolicyName.ARC.value: ARCPolicy,
    EvictionPolicyName.S3FIFO.value: S3FIFOPolicy,
    EvictionPolicyName.WTINYLFU.value: WTinyLFUPolicy,
}
DEFAULT_POLICY = DEFAULT_EVICTION_POLICY.value


def make_policy(name: str = DEFAULT_POLICY) -> EvictionPolicy:
    """A new policy of this name, which knows no chunk and keeps to priorities.

    Raises:
      ConfigError: there is none of this name.
    """
    if name not in POLICIES:
        raise ConfigError(f"{name!r} is no eviction policy; expected one of {', '.join(POLICIES)}")
    return PriorityPolicy(POLICIES[name])
