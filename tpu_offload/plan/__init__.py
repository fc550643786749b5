"""Plans the serving of a model on a TPU machine: what fits, what pays, and the command. No device is needed."""

from tpu_offload.plan.break_even import MFU_RANGE, Range, break_even, least_prefix, prefill_s, prefix_nbytes
from tpu_offload.plan.machines import CHIPS, Chip, Machine, find_machine
from tpu_offload.plan.model import AttentionLayers, ModelShape, Parameters, StateLayers, WeightBits
from tpu_offload.plan.model_config import WEIGHTS, built_in_models, find_model, read_config
from tpu_offload.plan.planner import PREFIXES, Plan, PlanOptions, TierRate, advice, make_plan
from tpu_offload.plan.serve_command import serve_command
from tpu_offload.plan.traffic import Hits, expected_hits
from tpu_offload.plan.vllm_blocks import CachePlan, GroupPlan, Serving, default_block_size, page_nbytes, plan_caches

__all__ = [
    "CHIPS",
    "MFU_RANGE",
    "PREFIXES",
    "WEIGHTS",
    "AttentionLayers",
    "CachePlan",
    "Chip",
    "GroupPlan",
    "Hits",
    "Machine",
    "ModelShape",
    "Parameters",
    "Plan",
    "PlanOptions",
    "Range",
    "Serving",
    "StateLayers",
    "TierRate",
    "WeightBits",
    "advice",
    "break_even",
    "built_in_models",
    "default_block_size",
    "expected_hits",
    "find_machine",
    "find_model",
    "least_prefix",
    "make_plan",
    "page_nbytes",
    "plan_caches",
    "prefill_s",
    "prefix_nbytes",
    "read_config",
    "serve_command",
]
