"""Storage tiers below host memory: the contract, and which tiers there are. None ships yet."""

from tpu_offload.storage.contract import StorageSpec, StorageTier
from tpu_offload.storage.registry import STORAGE_TIERS, make_tier

__all__ = ["STORAGE_TIERS", "StorageSpec", "StorageTier", "make_tier"]
