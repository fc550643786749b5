"""The bound: how many blocks of the prompts can hit at best, when the future is known.

Between two requests the cache may hold any blocks of the prompts so far, at most as many as it has room for;
what a prompt brings need not be kept (bypass). A block hits when it is held and all before it in the prompt are.

Of what is held, and what the prompt brought, the block goes whose next use is furthest in the future; among
equals the deeper one. This is optimal: to make a block hit is to hold it over the whole gap since its last use,
each gap is a hit, and of gaps that overlap too many at one time, the one that ends last is in the way of the
fewest others (the largest k-colourable subgraph of an interval graph). That a block needs those before it
costs nothing: they are used whenever it is, so their gaps end no later, and they are held longer.

References:
  Belady, A study of replacement algorithms for a virtual-storage computer, IBM Systems Journal 1966.
  Yannakakis and Gavril, The maximum k-colorable subgraph problem for chordal graphs, 1987.
"""

import heapq
from collections.abc import Sequence

from tpu_offload.sim.trace import Trace


def belady_hits(trace: Trace, num_chunks: int, *, first_counted: int = 0) -> list[int]:
    """Plays a trace with the best choice at every moment. O(blocks x log blocks).

    Args:
      trace: what is played.
      num_chunks: blocks that the cache has room for.
      first_counted: what is best is the number of hits from this request on; what hits before it does not count.
    Returns:
      Hits of each request.
    """
    prompts = [request.blocks for request in trace.requests]
    never = len(prompts)
    next_uses = _next_uses(prompts, never)
    held: dict[int, int] = {}  # block -> its next use
    # Furthest next use first, deeper first. What was used since is in here twice, and its old entry is skipped.
    heap: list[tuple[int, int, int]] = []
    hits = []
    for number, blocks in enumerate(prompts):
        num_hits = 0
        for block in blocks:
            if block not in held:
                break
            num_hits += 1
        hits.append(num_hits)
        for depth, (block, use) in enumerate(zip(blocks, next_uses[number], strict=True)):
            if use < never and use >= first_counted:
                held[block] = use
                heapq.heappush(heap, (-use, -depth, block))
            else:
                held.pop(block, None)  # nothing is lost with it, so nothing needs to go for it
        while len(held) > num_chunks:
            use, _, block = heapq.heappop(heap)
            if held.get(block) == -use:
                del held[block]
    return hits


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
