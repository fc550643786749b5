"""The settings: `OffloadConfig`, the values of its choices, and the reader of the environment."""

from tpu_offload.config.choices import (
    DEFAULT_EVICTION_POLICY,
    CopyPath,
    EvictionPolicyName,
    LoadMode,
    SaveEvent,
    StorageAdmission,
    StorageCopyPath,
    StorageEvictionPolicy,
    StorageWriteEvent,
    SwapMode,
)
from tpu_offload.config.environment import ENV_PREFIX
from tpu_offload.config.options import (
    DEFAULT_BREAKER_FAILURES,
    DEFAULT_NUM_CPU_CHUNKS,
    DEFAULT_STAGING_BUFFER_TOKENS,
    OffloadConfig,
)
from tpu_offload.config.segments import HostSegments
from tpu_offload.config.storage_tiers import StorageTierConfig

__all__ = [
    "DEFAULT_BREAKER_FAILURES",
    "DEFAULT_EVICTION_POLICY",
    "DEFAULT_NUM_CPU_CHUNKS",
    "DEFAULT_STAGING_BUFFER_TOKENS",
    "ENV_PREFIX",
    "CopyPath",
    "EvictionPolicyName",
    "HostSegments",
    "LoadMode",
    "OffloadConfig",
    "SaveEvent",
    "StorageAdmission",
    "StorageCopyPath",
    "StorageEvictionPolicy",
    "StorageTierConfig",
    "StorageWriteEvent",
    "SwapMode",
]
