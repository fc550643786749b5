"""Eviction policies: they decide which chunk is evicted, and nothing else."""

from tpu_offload.core.policies.arc import ARCPolicy
from tpu_offload.core.policies.base import EvictionPolicy, Residents, Use
from tpu_offload.core.policies.density import DensityPolicy
from tpu_offload.core.policies.lru import LRUPolicy
from tpu_offload.core.policies.priority import PriorityPolicy
from tpu_offload.core.policies.registry import DEFAULT_POLICY, POLICIES, check_maker, find_policy
from tpu_offload.core.policies.s3fifo import S3FIFOPolicy
from tpu_offload.core.policies.wtinylfu import WTinyLFUPolicy

__all__ = [
    "DEFAULT_POLICY",
    "POLICIES",
    "ARCPolicy",
    "DensityPolicy",
    "EvictionPolicy",
    "LRUPolicy",
    "PriorityPolicy",
    "Residents",
    "S3FIFOPolicy",
    "Use",
    "WTinyLFUPolicy",
    "check_maker",
    "find_policy",
]
