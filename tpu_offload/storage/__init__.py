"""Storage tiers below host memory: the contract, the format of what they store, and which tiers there are."""

from tpu_offload.storage.contract import StorageSpec, StorageTier
from tpu_offload.storage.format import RecordFormat
from tpu_offload.storage.registry import STORAGE_TIERS, make_tier

__all__ = ["STORAGE_TIERS", "RecordFormat", "StorageSpec", "StorageTier", "make_tier"]
