"""Request traces through eviction policies, and the best that could be done."""

from tpu_offload.sim.belady import belady_hits
from tpu_offload.sim.replay import Outcome, replay
from tpu_offload.sim.trace import Request, Trace, read_traces

__all__ = ["Outcome", "Request", "Trace", "belady_hits", "read_traces", "replay"]
