"""The host pool: how much memory there is, and pinned memory in segments."""

from tpu_offload.memory.host_pool import HostPool, pinned_zeros, plan_segments, plan_shared_segments
from tpu_offload.memory.sizing import available_nbytes, cap_chunks, size_swap_pool, wanted_swap_blocks

__all__ = [
    "HostPool",
    "available_nbytes",
    "cap_chunks",
    "pinned_zeros",
    "plan_segments",
    "plan_shared_segments",
    "size_swap_pool",
    "wanted_swap_blocks",
]
