"""Host memory: how much may be used, and pinned segments of it."""

from tpu_offload.memory.host_arena import (
    HostArena,
    SegmentLimit,
    pinned_zeros,
    plan_segments,
    plan_shared_segments,
)
from tpu_offload.memory.sizing import available_nbytes, cap_chunks, size_swap_pool, wanted_swap_blocks

__all__ = [
    "HostArena",
    "SegmentLimit",
    "available_nbytes",
    "cap_chunks",
    "pinned_zeros",
    "plan_segments",
    "plan_shared_segments",
    "size_swap_pool",
    "wanted_swap_blocks",
]
