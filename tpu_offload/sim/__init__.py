"""Request traces through eviction policies, and the best that could be done."""

from tpu_offload.sim.belady import belady_hits
from tpu_offload.sim.hbm import Front, no_front, play_hbm
from tpu_offload.sim.replay import Outcome, Setup, replay
from tpu_offload.sim.runs import BOUND, Part, Result, Run, Scene, play_all
from tpu_offload.sim.secondary import SecondaryMode
from tpu_offload.sim.trace import Request, Trace, read_traces

__all__ = [
    "BOUND",
    "Front",
    "Outcome",
    "Part",
    "Request",
    "Result",
    "Run",
    "Scene",
    "SecondaryMode",
    "Setup",
    "Trace",
    "belady_hits",
    "no_front",
    "play_all",
    "play_hbm",
    "read_traces",
    "replay",
]
