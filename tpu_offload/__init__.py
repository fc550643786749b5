"""Moves the KV cache of language-model inference between TPU HBM, host memory and storage.

The public names are loaded on first use (PEP 562), so that importing the scheduler, the simulator or the command line
does not import jax. Each name appears three times: for type checkers, for the loader, and in `__all__`.
"""

from typing import TYPE_CHECKING

__version__ = "0.1.0.dev0"  # the only place; setup.cfg reads it

if TYPE_CHECKING:
    from tpu_offload.config import CopyPath, EvictionPolicyName, OffloadConfig, SaveEvent, SwapMode
    from tpu_offload.core.engine_api import (
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
    from tpu_offload.core.policies import EvictionPolicy, Residents, Use
    from tpu_offload.core.save_policy import SavePolicy
    from tpu_offload.core.scheduler import OffloadScheduler
    from tpu_offload.core.swap.manager import RequestSwap
    from tpu_offload.core.swap.victims import Candidate, choose_victims
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
    from tpu_offload.layout import KVLayout, LayerGroup, LayerGroupKind, PageGroup
    from tpu_offload.metrics import OffloadStats, StatsCollector, TierStats
    from tpu_offload.types import (
        BlockHash,
        CacheEpoch,
        ChunkKey,
        CopyJob,
        CopyPart,
        HostDivision,
        HostStore,
        JobKind,
        JobResult,
        JobState,
        StepPlan,
        StepReport,
        WorkerSetup,
    )
    from tpu_offload.worker import OffloadWorker, RankPlans
else:  # hidden from type checkers: with `__getattr__` they would accept any name

    def __getattr__(name):
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import importlib

        value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
        return value

    def __dir__():
        return sorted({*globals(), *__all__})


_MODULES = {
    "BlockHash": "tpu_offload.types",
    "BlockHasher": "tpu_offload.hashing",
    "CacheEpoch": "tpu_offload.types",
    "CachedPrefix": "tpu_offload.core.engine_api",
    "CachesLostError": "tpu_offload.errors",
    "Candidate": "tpu_offload.core.swap.victims",
    "ChunkKey": "tpu_offload.types",
    "CompileError": "tpu_offload.errors",
    "ConfigError": "tpu_offload.errors",
    "CopyJob": "tpu_offload.types",
    "CopyPart": "tpu_offload.types",
    "CopyPath": "tpu_offload.config",
    "EvictionPolicy": "tpu_offload.core.policies",
    "EvictionPolicyName": "tpu_offload.config",
    "FailedLoad": "tpu_offload.core.engine_api",
    "FinishedTransfer": "tpu_offload.core.engine_api",
    "FusedCopies": "tpu_offload.kernels",
    "FusedInputs": "tpu_offload.kernels",
    "FusedOutcome": "tpu_offload.kernels",
    "FusedStep": "tpu_offload.kernels",
    "HostDivision": "tpu_offload.types",
    "HostStore": "tpu_offload.types",
    "InputError": "tpu_offload.errors",
    "JobKind": "tpu_offload.types",
    "JobResult": "tpu_offload.types",
    "JobState": "tpu_offload.types",
    "KVLayout": "tpu_offload.layout",
    "LayerGroup": "tpu_offload.layout",
    "LayerGroupKind": "tpu_offload.layout",
    "PageGroup": "tpu_offload.layout",
    "LayoutError": "tpu_offload.errors",
    "Match": "tpu_offload.core.engine_api",
    "MatchState": "tpu_offload.core.engine_api",
    "OffloadConfig": "tpu_offload.config",
    "OffloadError": "tpu_offload.errors",
    "OffloadScheduler": "tpu_offload.core.scheduler",
    "OffloadStats": "tpu_offload.metrics",
    "OffloadWorker": "tpu_offload.worker",
    "RankPlans": "tpu_offload.worker",
    "RequestError": "tpu_offload.errors",
    "RequestLimits": "tpu_offload.core.engine_api",
    "RequestSwap": "tpu_offload.core.swap.manager",
    "Residents": "tpu_offload.core.policies",
    "SaveEvent": "tpu_offload.config",
    "SavePolicy": "tpu_offload.core.save_policy",
    "ScheduledRequest": "tpu_offload.core.engine_api",
    "StagingError": "tpu_offload.errors",
    "StatsCollector": "tpu_offload.metrics",
    "StepPlan": "tpu_offload.types",
    "StepReport": "tpu_offload.types",
    "SwapMode": "tpu_offload.config",
    "TierEvent": "tpu_offload.core.engine_api",
    "TierEventKind": "tpu_offload.core.engine_api",
    "TierStats": "tpu_offload.metrics",
    "Update": "tpu_offload.core.engine_api",
    "Use": "tpu_offload.core.policies",
    "WorkerSetup": "tpu_offload.types",
    "choose_victims": "tpu_offload.core.swap.victims",
}

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
    "CopyJob",
    "CopyPart",
    "CopyPath",
    "EvictionPolicy",
    "EvictionPolicyName",
    "FailedLoad",
    "FinishedTransfer",
    "FusedCopies",
    "FusedInputs",
    "FusedOutcome",
    "FusedStep",
    "HostDivision",
    "HostStore",
    "InputError",
    "JobKind",
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
    "PageGroup",
    "RankPlans",
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
    "SwapMode",
    "TierEvent",
    "TierEventKind",
    "TierStats",
    "Update",
    "Use",
    "WorkerSetup",
    "choose_victims",
]
