"""Storage tiers below host memory: the contract, the format of what they store, and which tiers there are."""

from tpu_offload.config.registered_tiers import STORAGE_TIERS, RegisteredTier
from tpu_offload.storage.contract import StorageSpec, StorageTier, UndeletedError
from tpu_offload.storage.format import RecordError, RecordFormat
from tpu_offload.storage.inspection import Generation, Holding, StoredRecord, StoreInspector, Survey
from tpu_offload.storage.registry import find_tier, make_tier, open_inspector, tier_of
from tpu_offload.storage.verify import Verdict, Verification, sample

__all__ = [
    "STORAGE_TIERS",
    "Generation",
    "Holding",
    "RecordError",
    "RecordFormat",
    "RegisteredTier",
    "StorageSpec",
    "StorageTier",
    "StoreInspector",
    "StoredRecord",
    "Survey",
    "UndeletedError",
    "Verdict",
    "Verification",
    "find_tier",
    "make_tier",
    "open_inspector",
    "sample",
    "tier_of",
]
