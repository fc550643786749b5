"""Simulates request traces with eviction policies, and computes the upper bound."""

from tpu_offload.sim.belady import belady_hits
from tpu_offload.sim.experiment import BOUND, Case, Experiment, HitCounts, Result, run_all
from tpu_offload.sim.hbm import HBMResult, no_hbm, simulate_hbm
from tpu_offload.sim.replay import Outcome, StorageOutcome, TierSetup, replay
from tpu_offload.sim.storage import StorageSetup
from tpu_offload.sim.trace import Trace, TraceRequest, read_traces

__all__ = [
    "BOUND",
    "Case",
    "Experiment",
    "HBMResult",
    "HitCounts",
    "Outcome",
    "Result",
    "StorageOutcome",
    "StorageSetup",
    "TierSetup",
    "Trace",
    "TraceRequest",
    "belady_hits",
    "no_hbm",
    "read_traces",
    "replay",
    "run_all",
    "simulate_hbm",
]
