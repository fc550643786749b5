"""Moves the KV cache of language-model inference between TPU HBM, host memory and storage."""

from tpu_offload.config import CopyPath, EvictionPolicyName, OffloadConfig, SaveEvent, SwapMode
from tpu_offload.core.policies import EvictionPolicy, Residents, Use
from tpu_offload.core.requests import (
    CachedPrefix,
    FailedLoad,
    FinishedTransfer,
    Match,
    MatchState,
    RequestLimits,
    ScheduledRequest,
    TierEvent,
    TierEventKind,
    Update,
)
from tpu_offload.core.save_policy import SavePolicy
from tpu_offload.core.scheduler import OffloadScheduler
from tpu_offload.core.swap import Candidate, RequestSwap, choose_victims
from tpu_offload.errors import (
    CachesLostError,
    CompileError,
    ConfigError,
    InputError,
    LayoutError,
    OffloadError,
    RequestError,
    StagingError,
)
from tpu_offload.hashing import BlockHasher
from tpu_offload.kernels import FusedCopies, FusedInputs, FusedOutcome, FusedStep
from tpu_offload.layout import KVLayout, LayerGroup, LayerGroupKind
from tpu_offload.metrics import OffloadStats, StatsCollector
from tpu_offload.types import (
    BlockHash,
    CacheEpoch,
    ChunkKey,
    HostStore,
    JobResult,
    JobState,
    StepPlan,
    StepReport,
    SwapJob,
    SwapPart,
    TransferJob,
    WorkerSetup,
)
from tpu_offload.worker import OffloadWorker

__all__ = [
    "BlockHash",
    "BlockHasher",
    "CacheEpoch",
    "CachedPrefix",
    "CachesLostError",
    "Candidate",
    "ChunkKey",
    "CompileError",
    "ConfigError",
    "CopyPath",
    "EvictionPolicy",
    "EvictionPolicyName",
    "FailedLoad",
    "FinishedTransfer",
    "FusedCopies",
    "FusedInputs",
    "FusedOutcome",
    "FusedStep",
    "HostStore",
    "InputError",
    "JobResult",
    "JobState",
    "KVLayout",
    "LayerGroup",
    "LayerGroupKind",
    "LayoutError",
    "Match",
    "MatchState",
    "OffloadConfig",
    "OffloadError",
    "OffloadScheduler",
    "OffloadStats",
    "OffloadWorker",
    "RequestError",
    "RequestLimits",
    "RequestSwap",
    "Residents",
    "SaveEvent",
    "SavePolicy",
    "ScheduledRequest",
    "StagingError",
    "StatsCollector",
    "StepPlan",
    "StepReport",
    "SwapJob",
    "SwapMode",
    "SwapPart",
    "TierEvent",
    "TierEventKind",
    "TransferJob",
    "Update",
    "Use",
    "WorkerSetup",
    "choose_victims",
]
