"""Request swap: a preempted request's KV goes to a pool in host memory and comes back."""

from tpu_offload.core.swap.manager import RequestSwap
from tpu_offload.core.swap.victims import Candidate, choose_victims

__all__ = ["Candidate", "RequestSwap", "choose_victims"]
