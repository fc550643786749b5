"""One policy at one size over a trace, request after request."""

import dataclasses

from tpu_offload.core.policies import EvictionPolicy, Use
from tpu_offload.sim.tier import Tier
from tpu_offload.sim.trace import Trace


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a run. Numbers of blocks.

    Attributes:
      host_hits: of each request, those that the host tier had.
      num_saved: brought into the host tier.
      num_evicted: taken out of it.
      num_dropped: found no room.
    """

    host_hits: tuple[int, ...]
    num_saved: int = 0
    num_evicted: int = 0
    num_dropped: int = 0


def replay(trace: Trace, policy: EvictionPolicy, *, num_chunks: int) -> Outcome:
    """Plays a trace against a host tier."""
    host = Tier(policy, num_chunks=num_chunks)
    hits = []
    for number, request in enumerate(trace.requests):
        use = Use(number)
        keys = [trace.keys[block] for block in request.blocks]
        num_hits = host.find(keys)
        hits.append(num_hits)
        host.touch(use, keys, num_hits)
        host.save(use, keys, len(keys))
        host.touch(use, keys, len(keys))
    return Outcome(tuple(hits), host.num_saved, host.num_evicted, host.num_dropped)
