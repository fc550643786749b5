"""The bound: how many blocks of the prompts can hit at best, when the future is known.

Between two requests the cache may hold any blocks of the prompts so far, at most as many as it has room for;
what a prompt brings need not be kept (bypass). A block hits when it is held and all before it in the prompt are.

Of what is held, and what the prompt brought, the block goes whose next use is furthest in the future; among
equals the deeper one. This is optimal: to make a block hit is to hold it over the whole gap since its last use,
each gap is a hit, and of gaps that overlap too many at one time, the one that ends last is in the way of the
fewest others (the largest k-colourable subgraph of an interval graph). That a block needs those before it
costs nothing: they are used whenever it is, so their gaps end no later, and they are held longer.

With HBM in front a gap begins when the block leaves HBM, and there is none when it comes back before that. So this
bounds every way of saving, also those that leave to HBM what HBM has.

References:
  Belady, A study of replacement algorithms for a virtual-storage computer, IBM Systems Journal 1966.
  Yannakakis and Gavril, The maximum k-colorable subgraph problem for chordal graphs, 1987.
"""

import heapq
from collections.abc import Sequence

from tpu_offload.sim.hbm import Front, no_front
from tpu_offload.sim.trace import Trace


def belady_hits(trace: Trace, num_chunks: int, *, first_counted: int = 0, front: Front | None = None) -> list[int]:
    """Plays a trace with the best choice at every moment. O(blocks x log blocks).

    Args:
      trace: what is played.
      num_chunks: blocks that the cache has room for.
      first_counted: what is best is the number of hits from this request on; what hits before it does not count.
      front: HBM, whose hits are none of the cache behind it.
    Returns:
      Hits of each request.
    """
    front = front or no_front(trace)
    depths = _depths(trace.parents)
    prompts = [request.blocks for request in trace.requests]
    never = len(prompts)
    next_use: dict[int, int] = {}  # after the request that is played
    held: set[int] = set()
    # Furthest next use first, deeper first. Entries of what was used since stay in here: their time is past, so they
    # come after all that is held.
    heap: list[tuple[int, int, int]] = []
    hits = []
    for blocks, uses, first, left in zip(prompts, _next_uses(prompts, never), front.hits, front.left, strict=True):
        end = first
        while end < len(blocks) and blocks[end] in held:
            end += 1
        hits.append(end - first)
        for block, use in zip(blocks, uses, strict=True):
            next_use[block] = use
            held.discard(block)
        for block in left:
            use = next_use[block]
            if first_counted <= use < never:  # else nothing is lost with it, and nothing needs to go for it
                held.add(block)
                heapq.heappush(heap, (-use, -depths[block], block))
        while len(held) > num_chunks:
            held.discard(heapq.heappop(heap)[2])
    return hits


def _depths(parents: Sequence[int]) -> list[int]:
    """Of each block how many come before it; each has a higher number than the one before it."""
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return depths


def _next_uses(prompts: Sequence[Sequence[int]], never: int) -> list[list[int]]:
    """For each block of each prompt, the number of the next prompt that it is in."""
    following: dict[int, int] = {}
    next_uses: list[list[int]] = []
    for number in range(len(prompts) - 1, -1, -1):
        blocks = prompts[number]
        next_uses.append([following.get(block, never) for block in blocks])
        following.update(dict.fromkeys(blocks, number))
    next_uses.reverse()
    return next_uses
