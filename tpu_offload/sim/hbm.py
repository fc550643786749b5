"""The prefix cache in HBM, in front of the host tier. What it holds depends on nothing behind it: it is played once."""

import dataclasses

from tpu_offload.core.policies import LRUPolicy, Use
from tpu_offload.sim.tier import Tier
from tpu_offload.sim.trace import Trace


@dataclasses.dataclass(frozen=True, slots=True)
class Front:
    """What a cache in front does at each request.

    Attributes:
      hits: leading blocks of the prompt that it has.
      left: blocks that it gives up for the prompt, the tail of a prefix before its head, and those of the prompt
        that it has no room for.
    """

    hits: tuple[int, ...]
    left: tuple[tuple[int, ...], ...]


def no_front(trace: Trace) -> Front:
    """Without a cache in front, a prompt's blocks are given up with its request."""
    return Front((0,) * len(trace.requests), tuple(request.blocks[::-1] for request in trace.requests))


def play_hbm(trace: Trace, num_blocks: int) -> Front:
    """Least recently used, under the prefix rule; a prompt's blocks stay cached after it. Room for more than the
    blocks of the trace is as good as room for all of them.

    Generated tokens take no room, as the trace does not say what became of them.
    """
    hbm = Tier(LRUPolicy(), num_chunks=min(num_blocks, len(trace.keys)), record=True)
    numbers = {key: number for number, key in enumerate(trace.keys)}
    hits, left = [], []
    for number, request in enumerate(trace.requests):
        use = Use(number)
        keys = [trace.keys[block] for block in request.blocks]
        num_hits = hbm.find(keys)
        hits.append(num_hits)
        hbm.touch(use, keys, num_hits)
        num_new = len(hbm.save(use, keys, len(keys)))
        hbm.settle()
        hbm.touch(use, keys, len(keys))
        without_room = request.blocks[num_hits + num_new :][::-1]
        left.append(without_room + tuple(numbers[key] for key in hbm.take_evicted()))
    return Front(tuple(hits), tuple(left))
