"""Requests whose KV may have been computed on other tokens than those that vLLM has: it is neither saved nor found.

The workers report them (`runner_tokens`), with the first tainted block. From then on nothing of them is saved. vLLM
keeps their blocks in HBM under the hashes of its own tokens, so they are evicted from its prefix cache in every step,
before the next one is scheduled. A request that has found some of them is tainted from there on as well.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, final

from tpu_offload.adapters.vllm.block_tables import blocks_from, with_distinct_ids

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

_MARGIN = 2  # blocks; vLLM hashes a block when all its tokens are known, a step or two after it is computed


@final
class TaintedRequests:
    """The tainted requests. All calls come from the thread of vLLM's scheduler.

    Args:
      manager: vLLM's KV cache manager.
      block_size: tokens in a block.
      state_groups: vLLM's KV cache groups of states. Their rows are negative ids here.
    """

    def __init__(self, manager: "KVCacheManager", *, block_size: int, state_groups: Collection[int] = ()) -> None:
        self._manager = manager
        self._block_size = block_size
        self._state_groups = state_groups
        self._first_tainted: dict[str, int] = {}  # per request, its first block that may be wrong
        self._num_evicted: dict[str, int] = {}  # per request, its blocks that were full at the last eviction
        self._tainted_block_ids: set[int] = set()  # blocks of requests that were added since the last step

    def __bool__(self) -> bool:
        return bool(self._first_tainted or self._tainted_block_ids)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._first_tainted

    @property
    def request_ids(self) -> frozenset[str]:
        """The tainted requests that have not ended."""
        return frozenset(self._first_tainted)

    def add(self, request_id: str, block_ids: Collection[int], request: "Request | None") -> None:
        """Adds a request that a worker has reported.

        Args:
          request_id: the request.
          block_ids: its blocks, from the first that may be wrong on.
          request: None if it has ended; others may have found its blocks even then.
        """
        self._tainted_block_ids.update(block_ids)
        self._evict(block_ids)
        if request is not None:
            self._first_tainted.setdefault(request_id, request.num_prompt_tokens // self._block_size)

    def finish(self, request_id: str) -> None:
        """A request ended; its id may be reused."""
        self._first_tainted.pop(request_id, None)
        self._num_evicted.pop(request_id, None)

    def propagate(self, requests: Mapping[str, "Request"], admitted: Collection[str]) -> list[str]:
        """After a step was scheduled: evicts tainted blocks, and taints the requests that have found any.

        Args:
          requests: those that hold blocks.
          admitted: those that were granted their first blocks in this step.
        Returns:
          The newly tainted requests.
        """
        newly_tainted: list[str] = []
        tainted, self._tainted_block_ids = self._tainted_block_ids, set()
        # Requests share blocks at admission; those of a newly tainted request may be shared already.
        checked = requests if tainted or not self._first_tainted.keys().isdisjoint(admitted) else admitted
        tables = {
            r: with_distinct_ids(self._manager.get_block_ids(r), self._state_groups)
            for r in {*checked, *self._first_tainted}
            if r in requests
        }
        for request_id in admitted:
            self._num_evicted.pop(request_id, None)
        for request_id, first in self._first_tainted.items():
            tainted |= blocks_from(tables.get(request_id, ()), first)
        num_before = -1
        while num_before < len(tainted):
            num_before = len(tainted)
            for request_id in checked:
                if request_id in self._first_tainted:
                    continue
                first_bad = [
                    next(i for i, block_id in enumerate(table) if block_id in tainted)
                    for table in tables[request_id]
                    if not tainted.isdisjoint(table)
                ]
                if first_bad:
                    self._first_tainted[request_id] = min(first_bad)
                    tainted |= blocks_from(tables[request_id], min(first_bad))
                    newly_tainted.append(request_id)
        for request_id, first in self._first_tainted.items():
            if request_id in tables:
                evicted = self._num_evicted.get(request_id, 0) - _MARGIN
                self._evict(blocks_from(tables[request_id], max(first, evicted)))
                self._num_evicted[request_id] = requests[request_id].num_computed_tokens // self._block_size
        return newly_tainted

    def _evict(self, block_ids: Iterable[int]) -> None:
        """Evicts blocks from vLLM's prefix cache."""
        blocks, pool = set(block_ids), self._manager.block_pool
        self._manager.evict_blocks({block_id for block_id in blocks if 0 <= block_id < pool.num_gpu_blocks})
        rows = {-block_id for block_id in blocks if block_id < 0}
        if rows:  # tpu-inference's `evict_blocks` knows blocks of attention only
            states = pool.mamba_pool
            states.evict_blocks({row for row in rows if row < states.num_gpu_blocks})
