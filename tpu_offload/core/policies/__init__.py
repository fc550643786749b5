"""Eviction policies: they decide which chunk goes, and nothing else."""

from tpu_offload.core.policies.base import EvictionPolicy, Residents, Use
from tpu_offload.core.policies.lru import LRUPolicy

__all__ = ["EvictionPolicy", "LRUPolicy", "Residents", "Use"]
