"""Simulates request traces with eviction policies, computes the upper bound, and when loading KV pays."""

from tpu_offload.sim.belady import belady_hits
from tpu_offload.sim.break_even import (
    MFU_RANGE,
    MODELS,
    V6E,
    Chip,
    ModelShape,
    Range,
    break_even,
    least_prefix,
    prefill_s,
)
from tpu_offload.sim.experiment import BOUND, Case, Experiment, HitCounts, Result, run_all
from tpu_offload.sim.hbm import HBMResult, no_hbm, simulate_hbm
from tpu_offload.sim.replay import Outcome, StorageOutcome, TierSetup, replay
from tpu_offload.sim.storage import StorageSetup
from tpu_offload.sim.trace import Trace, TraceRequest, read_traces

__all__ = [
    "BOUND",
    "MFU_RANGE",
    "MODELS",
    "V6E",
    "Case",
    "Chip",
    "Experiment",
    "HBMResult",
    "HitCounts",
    "ModelShape",
    "Outcome",
    "Range",
    "Result",
    "StorageOutcome",
    "StorageSetup",
    "TierSetup",
    "Trace",
    "TraceRequest",
    "belady_hits",
    "break_even",
    "least_prefix",
    "no_hbm",
    "prefill_s",
    "read_traces",
    "replay",
    "run_all",
    "simulate_hbm",
]
