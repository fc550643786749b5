"""The prefix cache in HBM, in front of the host tier. It does not depend on the tiers behind it: simulated once."""

import dataclasses

from tpu_offload.core.policies import LRUPolicy, Use
from tpu_offload.sim.tier import Tier
from tpu_offload.sim.trace import Trace


@dataclasses.dataclass(frozen=True, slots=True)
class HBMResult:
    """Hits and evictions of the HBM prefix cache, per request.

    Attributes:
      hits: leading blocks of the prompt that are in HBM.
      evicted: blocks that leave HBM: those evicted for the prompt, the tail of a prefix before its head, and blocks of
        the prompt for which it has no room.
    """

    hits: tuple[int, ...]
    evicted: tuple[tuple[int, ...], ...]


def no_hbm(trace: Trace) -> HBMResult:
    """No prefix cache in HBM: a prompt's blocks leave it at the end of the request."""
    return HBMResult((0,) * len(trace.requests), tuple(request.blocks[::-1] for request in trace.requests))


def simulate_hbm(trace: Trace, num_blocks: int) -> HBMResult:
    """Simulates HBM with LRU under the prefix rule; a prompt's blocks stay cached after its request.

    Generated tokens take no room: the trace has no ids for them.
    """
    hbm = Tier(LRUPolicy(), num_chunks=min(num_blocks, len(trace.keys)), record=True)
    numbers = {key: number for number, key in enumerate(trace.keys)}
    hits, evicted = [], []
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
        evicted.append(without_room + tuple(numbers[key] for key in hbm.take_evicted()))
    return HBMResult(tuple(hits), tuple(evicted))
