"""A small paged inference engine that uses the library as any other engine would."""

from tpu_offload.engine.config import EngineConfig, ModelConfig
from tpu_offload.engine.engine import Engine, EngineStats
from tpu_offload.engine.hosts import HostError, Hosts
from tpu_offload.engine.offloading import Seams
from tpu_offload.engine.request import (
    FinishReason,
    PromptTokens,
    Request,
    RequestOutput,
    RequestStats,
    SamplingParams,
)

__all__ = [
    "Engine",
    "EngineConfig",
    "EngineStats",
    "FinishReason",
    "HostError",
    "Hosts",
    "ModelConfig",
    "PromptTokens",
    "Request",
    "RequestOutput",
    "RequestStats",
    "SamplingParams",
    "Seams",
]
