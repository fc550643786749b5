"""The upper bound: the most prompt blocks that can hit, given knowledge of the future (Belady with bypass).

Between two requests the cache may hold any blocks of earlier prompts, up to its capacity; the blocks of a prompt need
not be kept (bypass). A block hits if it and all blocks before it in the prompt are cached.

The block with the most distant next use is evicted, among the cached ones and those of the current prompt; of equal
ones, the deeper. This is optimal. For a hit a block must be held over the whole interval since its last use, and each
interval is one hit. If too many intervals overlap at one time, dropping the one that ends last leaves the most room for
others (the largest k-colorable subgraph of an interval graph). The prefix rule costs nothing: the blocks before a block
are used whenever it is, so their intervals end no later, and they are evicted later.

With HBM in front an interval starts when the block leaves HBM, and there is none if it is used again before that. So
this is a bound for every way of saving, including those that do not duplicate what HBM has.

References:
  Belady, A study of replacement algorithms for a virtual-storage computer, IBM Systems Journal 1966.
  Yannakakis and Gavril, The maximum k-colorable subgraph problem for chordal graphs, 1987.
"""

import heapq
from collections.abc import Sequence

from tpu_offload.sim.hbm import HBMResult, no_hbm
from tpu_offload.sim.trace import Trace


def belady_hits(
    trace: Trace, num_chunks: int, *, first_counted: int = 0, hbm_result: HBMResult | None = None
) -> list[int]:
    """Simulates a trace with optimal eviction. O(blocks x log blocks).

    Args:
      trace: the requests.
      num_chunks: capacity of the cache in blocks.
      first_counted: maximizes the hits from this request on; earlier hits do not count.
      hbm_result: result of `simulate_hbm`; hits in HBM do not count for the cache behind it.
    Returns:
      Hits per request.
    """
    hbm_result = hbm_result or no_hbm(trace)
    depths = _depths(trace.parents)
    prompts = [request.blocks for request in trace.requests]
    never = len(prompts)
    next_use: dict[int, int] = {}  # after the current request
    held: set[int] = set()
    # Most distant next use first, deeper first. Stale entries stay in the heap: their next use is in the past, so they
    # come after all cached blocks.
    heap: list[tuple[int, int, int]] = []
    hits = []
    for blocks, uses, first, evicted in zip(
        prompts, _next_uses(prompts, never), hbm_result.hits, hbm_result.evicted, strict=True
    ):
        end = first
        while end < len(blocks) and blocks[end] in held:
            end += 1
        hits.append(end - first)
        for block, use in zip(blocks, uses, strict=True):
            next_use[block] = use
            held.discard(block)
        for block in evicted:
            use = next_use[block]
            if first_counted <= use < never:  # else it can yield no counted hit, and is not worth caching
                held.add(block)
                heapq.heappush(heap, (-use, -depths[block], block))
        while len(held) > num_chunks:
            held.discard(heapq.heappop(heap)[2])
    return hits


def _depths(parents: Sequence[int]) -> list[int]:
    """The depth of each block; a block's number is higher than its parent's."""
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return depths


def _next_uses(prompts: Sequence[Sequence[int]], never: int) -> list[list[int]]:
    """For each block of each prompt, the number of the next prompt that contains it."""
    following: dict[int, int] = {}
    next_uses: list[list[int]] = []
    for number in range(len(prompts) - 1, -1, -1):
        blocks = prompts[number]
        next_uses.append([following.get(block, never) for block in blocks])
        following.update(dict.fromkeys(blocks, number))
    next_uses.reverse()
    return next_uses
