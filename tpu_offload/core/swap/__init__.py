"""Request swap: copies a preempted request's KV to a pool in host memory and back."""

from tpu_offload.core.swap.manager import RequestSwap
from tpu_offload.core.swap.victims import Candidate, choose_victims

__all__ = ["Candidate", "RequestSwap", "choose_victims"]
